"""Another head or bundle takes over between two answers; none fails, and none comes from a mixed pair."""

from __future__ import annotations

import http.client
import itertools
import json
import threading

import numpy as np
import pytest
from serving_site import COLOURS, fill_state, fit_squares, png, square

from edge_agent.bundle import installed
from edge_agent.heads import saved
from edge_agent.serving.pair import Pair
from edge_agent.serving.pair_source import StatePair

WAIT_S = 60


@pytest.fixture
def bundles(make_bundle):
    return [make_bundle(f"{seed}.hwb", seed=seed).path for seed in range(2)]


def probabilities_by_pair(state, bundles, tmp_path, heads):
    """What each pair answers to each colour, computed without the service."""
    expected = {}
    for path, head in itertools.product(bundles, heads):
        bundle = installed.install(path, tmp_path / "beside")
        try:
            pair = Pair.open(bundle, head)
        except Exception:  # noqa: BLE001 - a head of another encoder
            continue
        for label in COLOURS:
            answer = pair.answer_features(pair.features(inputs_of(pair, label))).as_json()
            expected[(answer["bundle"], answer["head_id"], label)] = answer["probabilities"]
    return expected


def inputs_of(pair, label):
    from edge_agent.serving.inputs import Decoder

    return Decoder(pair.input).decode(png(square(label, 500)))


def test_a_new_head_takes_over(serve, bundles, tmp_path):
    state = tmp_path / "state"
    fill_state(state, bundles[0], tmp_path / "cache")
    site = serve(StatePair(state))
    before = site.classify(png(square("red")))
    fit_squares(bundles[0], state / "head", tmp_path / "cache", head="ridge", seed=3)
    assert site.service.watch.look() or True  # the thread of the service may have been first
    after = site.classify(png(square("red")))
    assert (before["head"], after["head"]) == ("lr", "ridge")
    assert before["bundle"] == after["bundle"]


def test_a_head_that_is_damaged_changes_nothing_until_it_is_mended(serve, bundles, tmp_path):
    state = tmp_path / "state"
    fill_state(state, bundles[0], tmp_path / "cache")
    site = serve(StatePair(state))
    before = site.classify(png(square("red")))
    card = state / "head" / saved.CARD
    good = card.read_bytes()
    card.write_bytes(b"{}")
    assert site.service.watch.look() is False
    assert site.service.watch.problem
    assert site.classify(png(square("red")))["head_id"] == before["head_id"]
    card.write_bytes(good)
    site.service.watch.look()
    assert not site.service.watch.problem


def test_a_release_is_never_answered_by_a_mixed_pair(serve, bundles, tmp_path):
    """A release puts the head in place before its bundle: in between, the old pair answers on."""
    state = tmp_path / "state"
    old = fill_state(state, bundles[0], tmp_path / "cache")
    site = serve(StatePair(state))
    new_head = fit_squares(bundles[1], tmp_path / "new-head", tmp_path / "cache", seed=7)
    opened = installed.open_bundle(bundles[1])
    new = installed.staged(opened, state / "bundles")
    before = site.classify(png(square("red")))
    saved.adopt(new_head, state / "head", new.fingerprints)
    site.service.watch.look()
    between = site.classify(png(square("red")))
    assert {name: between[name] for name in ("bundle", "head_id", "probabilities")} == {
        name: before[name] for name in ("bundle", "head_id", "probabilities")
    }
    installed.switch(new, state / "bundles")
    site.service.watch.look()
    after = site.classify(png(square("red")))
    assert (before["bundle"], after["bundle"]) == (old.id[:12], new.id[:12])
    assert after["head_id"] != before["head_id"]


def test_answers_under_load_while_pairs_change_are_those_of_whole_pairs(serve, bundles, tmp_path):
    state = tmp_path / "state"
    heads = []
    for number, path in enumerate(bundles):
        heads += [
            fit_squares(path, tmp_path / f"head-{number}-{seed}", tmp_path / "cache", seed=seed) for seed in range(2)
        ]
    expected = probabilities_by_pair(state, bundles, tmp_path, heads)
    assert len(expected) == len(heads) * len(COLOURS)
    fill_state(state, bundles[0], tmp_path / "cache")
    site = serve(StatePair(state))
    done = threading.Event()
    failures = []
    answers = []

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=WAIT_S)
        for label in itertools.cycle(COLOURS):
            if done.is_set():
                break
            connection.request("POST", "/classify", png(square(label, 500)))
            response = connection.getresponse()
            content = json.loads(response.read())
            (answers if response.status == 200 else failures).append((label, content))
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(8):
        bundle_number = turn % 2
        staged = installed.staged(installed.open_bundle(bundles[bundle_number]), state / "bundles")
        saved.adopt(heads[2 * bundle_number + turn // 2 % 2], state / "head", staged.fingerprints)
        site.service.watch.look()
        installed.switch(staged, state / "bundles")
        site.service.watch.look()
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    pairs = set()
    for label, answer in answers:
        pairs.add((answer["bundle"], answer["head_id"]))
        by_hand = expected[(answer["bundle"], answer["head_id"], label)]
        assert np.allclose(list(answer["probabilities"].values()), list(by_hand.values()), atol=1e-6)
    assert len(pairs) >= 3

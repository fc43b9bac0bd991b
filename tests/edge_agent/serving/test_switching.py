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
    assert site.service.watch.reload_if_changed() or True  # the thread of the service may have been first
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
    assert site.service.watch.reload_if_changed() is False
    assert site.service.watch.problem
    assert site.classify(png(square("red")))["head_id"] == before["head_id"]
    card.write_bytes(good)
    site.service.watch.reload_if_changed()
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
    site.service.watch.reload_if_changed()
    between = site.classify(png(square("red")))
    assert {name: between[name] for name in ("bundle", "head_id", "probabilities")} == {
        name: before[name] for name in ("bundle", "head_id", "probabilities")
    }
    installed.switch(new, state / "bundles")
    site.service.watch.reload_if_changed()
    after = site.classify(png(square("red")))
    assert (before["bundle"], after["bundle"]) == (old.id[:12], new.id[:12])
    assert after["head_id"] != before["head_id"]


class Asking:
    """Clients that ask without a pause, and what they were answered."""

    def __init__(self, port, clients=3):
        self.answers = []
        self.failures = []
        self._done = threading.Event()
        self._bodies = {label: png(square(label, 500)) for label in COLOURS}
        self._threads = [threading.Thread(target=self._ask, args=(port,)) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        for label in itertools.cycle(COLOURS):
            if self._done.is_set():
                break
            connection.request("POST", "/classify", self._bodies[label])
            response = connection.getresponse()
            content = json.loads(response.read())
            (self.answers if response.status == 200 else self.failures).append((label, content))
        connection.close()

    def wait_for(self, count):
        """Wait until so many were answered, or one was not."""
        pause = threading.Event()
        while len(self.answers) < count and not self.failures:
            pause.wait(0.001)

    def end(self):
        self._done.set()
        for thread in self._threads:
            thread.join(WAIT_S)


def check_whole_pairs(serve, bundles, tmp_path, changes, requests):
    """Ask while releases and fits change the pair; each answer is that of one pair, computed without the service."""
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
    asking = Asking(site.port)
    # A release puts the head and then the bundle in place; each second change is a fit on the same bundle.
    for turn in range(changes):
        number = turn // 2 % 2
        head = heads[2 * number + turn % 2]
        staged = installed.staged(installed.open_bundle(bundles[number]), state / "bundles")
        saved.adopt(head, state / "head", staged.fingerprints)
        site.service.watch.reload_if_changed()
        if turn % 2 == 0:
            installed.switch(staged, state / "bundles")
        site.service.watch.reload_if_changed()
        asking.wait_for(requests * (turn + 1) // changes)
    asking.end()
    assert asking.failures == []
    assert len(asking.answers) >= requests
    pairs = set()
    for label, answer in asking.answers:
        pairs.add((answer["bundle"], answer["head_id"]))
        by_hand = expected[(answer["bundle"], answer["head_id"], label)]
        assert np.allclose(list(answer["probabilities"].values()), list(by_hand.values()), atol=1e-6)
    assert pairs == {key[:2] for key in expected}


def test_answers_under_load_while_pairs_change_are_those_of_whole_pairs(serve, bundles, tmp_path):
    check_whole_pairs(serve, bundles, tmp_path, changes=8, requests=200)


@pytest.mark.slow
def test_ten_thousand_answers_during_twenty_releases_and_twenty_fits(serve, bundles, tmp_path):
    check_whole_pairs(serve, bundles, tmp_path, changes=40, requests=10_000)

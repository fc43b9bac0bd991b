"""Buffered rounds: the first updates close a round, those of slower agents count later and less.

On a virtual clock; agents train for 10 s, slow ones ten times as long.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from federation_duties import TASK, WIDE_TASK, FakeDuties, TinyDuties, step_of
from federation_harness import Federation, Killed
from sklearn.datasets import load_digits

from coordinator.config import CoordinatorConfig
from coordinator.fleet import uploads
from coordinator.fleet.uploads import Collector
from coordinator.journal.entries import fact_of
from coordinator.rounds.aggregation import refusal
from coordinator.rounds.buffered import BufferedCollection
from coordinator.rounds.context import Waiting
from coordinator.rounds.staleness import rebased, staleness_weight
from coordinator.runs.audit import audit
from coordinator.service.preflight import checked_method
from coordinator.state.store import StateFolder, blobs_needed
from edge_agent import methods
from edge_agent.core.errors import ChunkError, UsageError
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import Samples
from edge_agent.methods import Update
from edge_agent.training.loops import predict_probabilities
from edge_agent.training.parts import load_arrays
from edge_agent.wire.blobs.chunks import Outgoing, decode_frame
from edge_agent.wire.messages.down import Grant, Receipt
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import encode, specs_of

USUAL_S = 10.0
SLOW = ("a7", "a8", "a9")


@contextlib.contextmanager
def fleet(folder, *, agents=10, slow=SLOW, factor=10, tasks=FakeDuties, task=TASK, **settings):
    settings = {"quorum": 0.8, **settings}
    with Federation(folder, agents=(), round=settings, cohort={"min_agents": 1}, tasks=tasks, task=task) as fed:
        for number in range(agents):
            name = f"a{number}"
            fed.add(name, training_s=USUAL_S * (factor if name in slow else 1))
        fed.settle()
        yield fed


def buffered(folder, **options):
    return fleet(folder, **{"mode": "buffered", "buffer": 5, **options})


@pytest.mark.slow
def test_the_throughput_with_three_stragglers_of_ten_is_three_times_that_of_synchronous_rounds(tmp_path):
    """Updates that were aggregated in each second of 600."""
    rates = {}
    for mode in ("synchronous", "buffered"):
        # Full participation is what a synchronous round of all data costs; its way to less is another method.
        with fleet(tmp_path / mode, mode=mode, buffer=5, adaptive=False, quorum=1.0) as fed:
            fed.request(rounds=1000)
            fed.wait(600)
            rates[mode] = sum(len(line["agents"]) for line in fed.metrics()) / 600
            if mode == "buffered":
                assert {agent for line in fed.metrics() for agent in line["agents"]} == set(fed.agents)
    assert rates["buffered"] >= 3 * rates["synchronous"]


DIGITS = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={"feature_dim": 32},
)


def digits(seed):
    """Inputs and labels of 1,297 samples to train on, and of 500 to test."""
    bunch = load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    inputs = (bunch.images[order, None] / 16).astype(np.float32)
    labels = bunch.target[order].astype(np.int64)
    return (inputs[500:], labels[500:]), (inputs[:500], labels[:500])


def digits_duties(seed):
    """Real training; agent ``a3`` has every tenth sample from the third."""

    class DigitsDuties(TinyDuties):
        def read_samples(self, task):
            (inputs, labels), _ = digits(seed)
            rows = np.arange(int(self.config.id[1:]), len(labels), 10)
            every = Samples(inputs, labels, task.class_names, task.input)
            self.samples = len(rows)
            return every.take(rows), every.take(rows[:1])

    return DigitsDuties


def digits_accuracy(folder, seed, rounds, **settings):
    """Percent right of the shared model after all rounds, and how many updates are in it."""
    with fleet(folder, tasks=digits_duties(seed), task=DIGITS, **settings) as fed:
        fed.request(rounds=rounds, seed=seed, params={"lr": 0.1, "batch_size": 16, "local_epochs": 2})
        fed.finish(100_000)
        model = methods.create("fedavg", {}).build(DIGITS)
        load_arrays(model, fed.final)
        inputs, labels = digits(seed)[1]
        right = predict_probabilities(model, torch.from_numpy(inputs)).argmax(dim=1).numpy() == labels
        return 100 * right.mean(), sum(len(line["agents"]) for line in fed.metrics())


@pytest.mark.slow
def test_the_accuracy_at_equal_updates_is_at_most_a_point_below_that_of_synchronous_rounds(tmp_path):
    """150 updates each, 3 of 10 agents ten times slower, three seeds: 0.2, 1.8 and 1.2 points above, when measured."""
    differences = []
    for seed in range(3):
        options = {"mode": "synchronous", "adaptive": False, "quorum": 1.0, "deadline_s": 10_000}
        ours, updates = digits_accuracy(tmp_path / f"b{seed}", seed, 30, mode="buffered", buffer=5)
        theirs, others = digits_accuracy(tmp_path / f"s{seed}", seed, 15, **options)
        assert updates == others == 150
        assert theirs > 90
        differences.append(ours - theirs)
    assert np.mean(differences) >= -1, differences


def test_a_slow_agent_works_on_and_its_update_counts_in_a_later_round(tmp_path):
    """Each number moves by the agent's step times the round that it was asked in; the weights are 1 / sqrt(1 + s)."""
    with buffered(tmp_path, agents=3, slow=("a2",), factor=2.5, buffer=2) as fed:
        fed.request(rounds=4)
        fed.until(lambda: fed.record.checkpoint)
        start = fed.final
        fed.finish()
        lines = fed.metrics()
        assert [line["agents"] for line in lines] == [["a0", "a1"], ["a0", "a1"], ["a0", "a2"], ["a0", "a1"]]
        assert [line["staleness"] for line in lines] == [{}, {}, {"a2": 2}, {"a1": 1}]
        moved = 0.0
        for line in lines:
            number = line["round"]
            steps = []
            for agent in line["agents"]:
                staleness = line["staleness"].get(agent, 0)
                steps.append(step_of(agent) * (number - staleness) / np.sqrt(1 + staleness))
            moved += np.mean(steps)
        for name, array in fed.final.items():
            np.testing.assert_allclose(array, start[name] + moved, rtol=1e-4)
        trained = [number for _, number, purpose in fed.tasks["a2"].done if purpose == "train"]
        assert trained[0] == 1, "it was not interrupted"


def test_agents_that_work_on_are_neither_asked_again_nor_cancelled_nor_blamed(tmp_path):
    with buffered(tmp_path) as fed:
        fed.request(rounds=9)
        fed.until(lambda: fed.entries("round_closed", round=8))
        assert all(fed.tasks[name].cancelled is None for name in SLOW)
        lines = fed.metrics()
        assert set(lines[0]["working"]) >= set(SLOW)
        assert not any(line["missing"] or line["left_out"] for line in lines)
        fed.finish()
        assert fed.record.status == "finished"


def test_an_agent_that_is_too_stale_is_called_off_and_starts_again(tmp_path):
    with buffered(tmp_path, max_staleness=3, factor=1000) as fed:
        fed.request(rounds=6)
        fed.until(lambda: fed.entries("round_closed", round=4))
        assert fed.entries("round_opened", round=4)[0].body["asked"]["a9"] == 1
        assert "a9" not in fed.entries("round_opened", round=5)[0].body["asked"]
        assert "a9" in fed.metrics()[3]["missing"]
        fed.finish()


def test_an_upload_that_ends_after_its_agent_was_called_off_counts_in_no_round(tmp_path):
    """Its last frame comes in round 3; it was aggregated as one of round 3, of which the journal knew nothing."""
    settings = {"mode": "buffered", "buffer": 2, "max_staleness": 1, "quorum": 0.8}
    with Federation(tmp_path, agents=(), round=settings, cohort={"min_agents": 1}, task=WIDE_TASK) as fed:
        for name, training_s in (("a0", 10), ("a1", 10), ("a2", 14), ("a3", 15), ("a4", 15.5)):
            fed.add(name, training_s=training_s)
        fed.settle()
        collector = fed.coordinator.collector
        handle = fed.coordinator.handle
        held = []

        def delayed(agent, kind, payload):
            upload = collector._uploads.get(agent) if (agent, kind) == ("a2", "ub") else None
            if upload is not None and not held and upload.receiving.missing_bytes <= len(payload) + 6000:
                held.append(payload)
            else:
                handle(agent, kind, payload)

        fed.coordinator.handle = delayed
        fed.request(rounds=4, keep_updates=True)
        fed.until(lambda: fed.entries("round_opened", round=3))
        assert held
        with pytest.raises(ChunkError, match="no upload was granted"):
            handle("a2", "ub", held[0])
        assert list(collector.open_round.accepted) == list(fed.record.open_round.updates)
        assert not [entry for entry in fed.entries("update_accepted", agent="a2") if entry.round == 1]
        fed.finish()
        assert audit(fed.state, fed.run, [tmp_path / name for name in fed.agents]).breaks == []


@pytest.mark.parametrize("is_queued", [False, True], ids=["under_way", "queued"])
@pytest.mark.parametrize(
    "cohort, asked, goes_on",
    [(("x", "y"), {"x": 1, "y": 1}, True), (("y",), {"y": 1}, False), (("x", "y"), {"y": 1}, False)],
    ids=["works_on", "called_off", "asked_again"],
)
def test_the_next_round_goes_on_with_the_uploads_of_those_that_work_on_alone(
    tmp_path, monkeypatch, cohort, asked, goes_on, is_queued
):
    tensors = {"encoder.w": np.arange(40_000, dtype=np.float32)}
    blob = Outgoing.of(encode(tensors))
    expected = specs_of(tensors)
    said = []
    with StateFolder(tmp_path).open("test") as state:
        run = state.journal.request_run(fact_of("run_requested", {}))
        collector = Collector(state.blobs, state.journal, lambda *about: said.append(about), lambda: 0.0)
        collector.open(BufferedCollection(run, 1, ("x", "y"), expected))
        with monkeypatch.context() as patch:
            patch.setattr(uploads, "BUDGET_BYTES", 0 if is_queued else uploads.BUDGET_BYTES)
            collector.manifest("x", UpdateManifest(run=run, round=1, blob=blob.ref, samples=3))
        if not is_queued:
            collector.chunk("x", decode_frame(blob.frame(0)))
        second = BufferedCollection(run, 2, cohort, expected, asked_in=asked)
        collector.open(second)
        said.clear()
        collector.tick()
        assert [isinstance(message, Grant) for _, message in said] == [True] * (goes_on and is_queued)
        assert collector.is_uploading("x") is goes_on
        assert [path.suffix for path in (state.blobs.folder / "partial").rglob("*.part")] == [".part"] * goes_on
        for index in range(blob.count) if goes_on else ():
            collector.chunk("x", decode_frame(blob.frame(index)))
        assert list(second.accepted) == ["x"] * goes_on
        assert [message for _, message in said if isinstance(message, Receipt)] == (
            [Receipt(run=run, digest=blob.ref.digest, accepted=True)] if goes_on else []
        )


def test_a_dead_agent_delays_nobody(tmp_path):
    with buffered(tmp_path, slow=()) as fed:
        fed.request(rounds=5)
        fed.until(lambda: fed.entries("round_closed", round=1))
        for name in ("a0", "a1", "a2", "a3", "a4", "a5", "a6"):
            fed.kill(name)
        fed.finish()
        assert fed.record.status == "finished"
        assert {agent for line in fed.metrics()[1:] for agent in line["agents"]} >= {"a7", "a8", "a9"}


@pytest.mark.parametrize(
    "kind, number",
    [("round_opened", 3), pytest.param("update_accepted", 4, marks=pytest.mark.slow), ("round_closed", 4)],
)
def test_a_killed_coordinator_resumes_with_the_same_bits_for_the_same_updates(tmp_path, kind, number):
    """All rounds until the last of the updates of before the kill; then the order of updates may differ."""

    def run(folder, *, is_killed):
        with buffered(folder, factor=2.5) as fed:
            fed.request(rounds=8)
            if is_killed:
                fed.until(lambda: fed.entries(kind, round=number))
                fed.kill_coordinator()
                fed.start_coordinator()
            fed.finish()
            updates = [(line["agents"], line["staleness"]) for line in fed.metrics()]
            return updates, [entry.digest for entry in fed.entries("round_closed")]

    updates, digests = run(tmp_path / "killed", is_killed=True)
    others, undisturbed = run(tmp_path / "undisturbed", is_killed=False)
    same = next((i for i, pair in enumerate(zip(updates, others, strict=True)) if pair[0] != pair[1]), len(updates))
    assert same >= number, "the round under way had its updates"
    assert digests[:same] == undisturbed[:same]
    assert any(staleness for _, staleness in updates)


@pytest.mark.parametrize("kind", ["round_opened", "round_closed"])
def test_an_update_that_arrives_before_a_restarted_run_is_back_in_its_round_is_kept_by_its_agent(tmp_path, kind):
    """``a1`` trains for 35 s from round 1 on; the coordinator is killed in, or just before, round 3 at 20 s."""

    def slow_start(coordinator):
        def before_run(run):
            until = fed.clock.now + 4 * USUAL_S
            while fed.clock.now < until:
                yield Waiting("the weights to begin with")
            return run

        coordinator.hooks.before_run = before_run

    with buffered(tmp_path, agents=2, slow=("a1",), factor=3.5, buffer=1) as fed:
        append = fed.state.journal.append

        def killed(appended, **about):
            if (appended.kind, about.get("round")) == ("round_opened", 3):
                raise Killed
            return append(appended, **about)

        fed.state.journal.append = killed if kind == "round_closed" else append
        fed.request(rounds=5)
        fed.until(lambda: fed.coordinator is None or fed.entries("round_opened", round=3))
        fed.kill_coordinator()
        fed.start_coordinator(slow_start)
        assert bool(fed.entries("round_opened", round=3)) is (kind == "round_opened")
        fed.finish()
        assert next(entry.round for entry in fed.entries("update_accepted", agent="a1")) == 1
        assert any(line["staleness"].get("a1") == line["round"] - 1 for line in fed.metrics())
        assert not fed.entries("update_refused")
        assert [number for _, number, what in fed.tasks["a1"].done if what == "train"].count(1) == 1


def test_the_audit_aggregates_the_updates_of_earlier_rounds_again(tmp_path):
    with buffered(tmp_path, factor=2.5) as fed:
        fed.request(rounds=6, keep_updates=True)
        fed.finish()
        assert any(line["staleness"] for line in fed.metrics())
        result = audit(fed.state, fed.run, [tmp_path / name for name in fed.agents])
        assert result.breaks == []
        assert [one.is_aggregation for one in result.rounds] == [True] * 6
        assert sum(one.confirmed for one in result.rounds) == sum(len(line["agents"]) for line in fed.metrics())


def test_the_states_that_agents_started_from_stay_on_disk(tmp_path):
    with buffered(tmp_path) as fed:
        fed.request(rounds=20)
        fed.until(lambda: fed.entries("round_closed", round=4))
        (digest,) = (e.digest for e in fed.entries("run_started"))
        assert digest in fed.state.blobs
        assert digest in blobs_needed(fed.state)
        fed.until(lambda: fed.entries("round_closed", round=11))
        assert digest not in fed.record.bases, "nobody trains from it any more"
        assert digest in fed.state.blobs, "the rounds that follow compare their updates with the way from there"
        fed.finish()
        assert digest not in blobs_needed(fed.state)


def test_only_methods_whose_server_step_is_a_mean_are_buffered():
    config = CoordinatorConfig.model_validate({"task": TASK, "round": {"mode": "buffered"}})
    allowed = {name for name in methods.names() if not refusal(methods.create(name, {}), config)}
    assert {"fedavg", "fedprox", "fedper", "fedbn", "fedadam", "fedavgm"} <= allowed
    assert not {"fedpac", "scaffold", "fedproto", "fedfomo", "pfedhn"} & allowed
    with pytest.raises(UsageError, match="'scaffold' computes its own from the updates of one round"):
        checked_method(config, "scaffold", {})


def test_releases_during_a_run_are_refused():
    with pytest.raises(ValueError, match=r"set export\.every = 0"):
        CoordinatorConfig.model_validate(
            {"task": TASK, "round": {"mode": "buffered"}, "export": {"every": 2, "release": "each_run"}}
        )


def test_a_stale_update_is_the_change_that_it_made_with_less_weight():
    base = {"encoder.w": np.float32([1, 2]), "encoder.bn.running_var": np.float32([4]), "n": np.int64([1])}
    state = {"encoder.w": np.float32([11, 12]), "encoder.bn.running_var": np.float32([8]), "n": np.int64([5])}
    tensors = {"encoder.w": np.float32([3, 2]), "encoder.bn.running_var": np.float32([2]), "n": np.int64([3])}
    updates = [Update("new", 1.0, state), Update("old", 2.0, tensors)]
    new, old = rebased(updates, state, {"old": 4}, 7, lambda number: {4: base}[number])
    assert new.tensors is state
    assert staleness_weight(3) == 0.5
    assert old.weight == 2.0
    assert old.tensors["encoder.w"].tolist() == [12, 12]
    assert old.tensors["encoder.bn.running_var"].tolist() == [5], "halfway from 8 to 2"
    assert old.tensors["n"].tolist() == [3]
    assert all(old.tensors[name].dtype == array.dtype for name, array in tensors.items())

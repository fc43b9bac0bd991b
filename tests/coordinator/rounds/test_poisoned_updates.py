"""Rows 24, 25, 26 and 43 of the matrix of faults and abuse: poisoned updates cost their senders, not the model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest
from federation_duties import TASK, FakeDuties
from federation_harness import Federation
from process_site import AGENTS, DIGITS, Site

from coordinator.cli.run import footnotes
from coordinator.report import write_report
from coordinator.report.figures import read_run
from coordinator.runs.audit import audit
from coordinator.runs.run_summary import RunSummary
from coordinator.service.preflight import checked_method
from coordinator.text import sentence
from edge_agent.core.errors import UsageError
from edge_agent.wire.messages import down
from edge_agent.wire.tensors import decode

HONEST = ("a0", "a1", "a2", "a3", "a4")
MALLORY = "mallory"
ROUND = {"quorum": 0.8, "grace_s": 1.0}


class Duties(FakeDuties):
    """Honest clients move every number by 1; ``poisoned`` is what mallory and its like make of that."""

    lie = 0

    @staticmethod
    def poisoned(sent, received):
        return sent

    def do(self, job, received, encoder=None):
        if job.purpose == "personalize":
            return super().do(job, received, encoder)
        sent = {name: array + np.float32(1) for name, array in received.items()}
        samples = self.samples
        if self.config.id.startswith(MALLORY):
            sent = self.poisoned(sent, received)
            samples = self.lie or samples
        return self.outbox.put(sent, down.job_key(job), samples, {"loss": 1.0})


def duties(poisoned, lie=0):
    return type("Poisoned", (Duties,), {"poisoned": staticmethod(poisoned), "lie": lie})


def scaled(factor):
    """The change of the model, times a factor."""
    return lambda sent, before: {
        name: before[name] + np.float32(factor) * (a - before[name]) for name, a in sent.items()
    }


def filled(value):
    return lambda sent, before: {name: np.full_like(array, value) for name, array in sent.items()}


@contextlib.contextmanager
def besieged(folder, tasks, *, hostile=(MALLORY,), size=6, aggregation=None, honest=HONEST):
    """A federation of honest agents and hostile ones, in rounds of ``size``; each training takes a second."""
    options = {"cohort": {"min_agents": 3, "max_agents": size}, "round": ROUND, "aggregation": aggregation}
    with Federation(folder, agents=(), tasks=tasks, **options) as fed:
        for name in (*honest, *hostile):
            fed.add(name, seconds=1.0)
        fed.settle()
        yield fed


def progress(fed):
    """How far every number of the model has moved since the start of the run."""
    before = decode(fed.state.blobs.read(fed.entries("run_started")[0].digest))
    return np.concatenate([(array - before[name]).reshape(-1) for name, array in fed.final.items()])


def run(fed, rounds=6):
    fed.request(rounds=rounds, keep_updates=True)
    fed.finish()
    assert fed.record.status == "finished"
    return fed.metrics()


def cohorts(fed):
    return [set(entry.body["cohort"]) for entry in fed.entries("round_opened")]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_row_24_an_update_with_nan_is_refused_and_told_and_the_rounds_go_on(tmp_path, value):
    with besieged(tmp_path, duties(filled(value))) as fed:
        metrics = run(fed)
        assert np.allclose(progress(fed), 6), "each round moves the model by 1, whoever is left out of it"
        refused = [line["round"] for line in metrics if line["rejected"]]
        assert refused == [1, 3, 6], "it is asked again after pauses of 1 and 2 rounds"
        assert all("holds NaN or infinity" in line["rejected"][0]["reason"] for line in metrics if line["rejected"])
        assert [MALLORY in cohort for cohort in cohorts(fed)] == [True, False, True, False, False, True]
        assert fed.tasks[MALLORY].outbox.get() is None, "the agent was told, and has dropped it"


ATTACKS = {
    "1e30": (filled(1e30), 0, "clipped (x 1e-30)"),
    "minus ten times": (scaled(-10), 0, "clipped (x 0.1)"),
    "a hundred times": (scaled(100), 0, "clipped (x 0.01)"),
    "a lie about samples": (scaled(-1), 1_000_000_000, "capped (1e+09 samples count as 50)"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_row_25_a_huge_update_or_a_lie_about_samples_is_bounded_reported_and_left_out(tmp_path, attack):
    poisoned, lie, note = ATTACKS[attack]
    with besieged(tmp_path, duties(poisoned, lie)) as fed:
        metrics = run(fed)
        with_mallory = [MALLORY in cohort for cohort in cohorts(fed)]
        assert with_mallory == [True, True, True, False, True, False]
        assert np.allclose(progress(fed), 6), "scaled down to the others' change, or left out of the round"
        bounded = [line["bounded"] for line in metrics]
        assert all(
            set(one) == ({MALLORY} if there else set()) for one, there in zip(bounded, with_mallory, strict=True)
        )
        assert note in bounded[0][MALLORY]
        summary = fed.state.run(fed.run).summary()
        assert summary["bounded"][MALLORY]["rounds"] == [n for n, there in enumerate(with_mallory, 1) if there]
        assert any(
            line.startswith(f"{MALLORY}: its updates were bounded in ") and note in line
            for line in footnotes(RunSummary.from_json(summary))
        )
        page = write_report(fed.state.run(fed.run)).read_text()
        assert note in page
        assert audit(fed.state, fed.run).breaks == []


BELOW_THE_BOUNDS = {
    "4.9 times back, for 4.9 times the samples": (scaled(-4.9), 49),
    "back by its own change, for 4.9 times the samples": (scaled(-1), 49),
    "back by its own change": (scaled(-1), 0),
    "back by a tenth of its change": (scaled(-0.1), 0),
}


@pytest.mark.parametrize("attack", BELOW_THE_BOUNDS)
def test_one_of_four_below_each_bound_of_size_is_left_out_named_and_changes_nothing(tmp_path, attack):
    """Without a bound on the product, the first one moved the model by (3 * 10 - 4.9 * 49) / 79 = -2.7 each round."""
    poisoned, lie = BELOW_THE_BOUNDS[attack]
    with besieged(tmp_path, duties(poisoned, lie), size=4, honest=HONEST[:3]) as fed:
        fed.request(rounds=5, keep_updates=True)
        fed.until(lambda: closed(fed))
        notes = {one["id"]: one["notes"] for one in fed.coordinator.status()["agents"]}
        assert "points against those of the others: cosine -1.00" in notes[MALLORY][0]
        fed.finish()
        assert np.allclose(progress(fed), 5), "each round moves the model by the 1 of the honest agents"
        assert [MALLORY in cohort for cohort in cohorts(fed)] == [True, True, True, False, True]
        suspects = [set(entry.body["aggregation"].get("suspects", ())) for entry in closed(fed)]
        assert suspects == [{MALLORY}, {MALLORY}, {MALLORY}, set(), {MALLORY}]
        assert audit(fed.state, fed.run).breaks == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_who_is_at_the_bound_in_each_round_loses_weight_and_is_named_also_after_a_restart(tmp_path, is_killed):
    """Three honest agents add 10 changes of 1, mallory sends its own twice as long, for 13.5 samples or 27 in all.

    Two rounds it counts for a third of the sum, (30 + 15 * 2 / 2) / (30 + 7.5) = 1.2 of a change; from the third on for
    30 / 7, (30 + 30 / 7) / (30 + 15 / 7).
    """
    with besieged(tmp_path, duties(scaled(2), 14), size=4, honest=HONEST[:3]) as fed:
        fed.request(rounds=4, keep_updates=True)
        if is_killed:
            fed.until(lambda: len(closed(fed)) == 2)
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        counts = [entry.body.get("repeats") for entry in closed(fed)]
        assert counts == [{MALLORY: number} for number in (1, 2, 3, 4)]
        late = (30 + 30 / 7) / (30 + 15 / 7)
        assert np.allclose(progress(fed), 1.2 * 2 + late * 2)
        noted = [line["bounded"][MALLORY] for line in fed.metrics()]
        assert ["near the bound in round after round" in note for note in noted] == [False, True, True, True]
        assert audit(fed.state, fed.run).breaks == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_centered_clipping_gives_the_same_bits_after_a_kill_and_in_an_audit(tmp_path, is_killed):
    """The centre lies in the checkpoint: the change of 1 of round 1 is what round 2 clips around."""
    with besieged(tmp_path, duties(scaled(-0.5)), aggregation={"rule": "centered_clipping"}) as fed:
        fed.request(rounds=3, keep_updates=True)
        if is_killed:
            fed.until(lambda: closed(fed))
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished"
        moved = {name: array for name, array in fed.final.items() if not name.startswith("server.")}
        before = decode(fed.state.blobs.read(fed.entries("run_started")[0].digest))
        assert all(np.allclose(array - before[name], 3) for name, array in moved.items())
        assert all(np.allclose(a, 1) for name, a in fed.final.items() if name.startswith("server.centre."))
        assert audit(fed.state, fed.run).breaks == []


class Enrolled:
    """What the coordinator asks of an enrolment: each agent is let in, and may declare 10 samples."""

    admits = staticmethod(lambda agent: True)
    tick = staticmethod(lambda clock_s, now: [])
    most_samples = staticmethod(lambda agent: 10)


def test_row_43_declared_samples_are_bounded_by_what_the_enrolment_allows(tmp_path, caplog):
    """Mallory adds nothing but its 1e9 samples, which count as much as those of each of the five others."""
    with besieged(tmp_path, duties(scaled(0), 1_000_000_000)) as fed:
        fed.coordinator.identity = Enrolled()
        metrics = run(fed)
        assert np.allclose(progress(fed), 6 * 5 / 6)
        assert [line.get("bounded", {}) for line in metrics] == [{}] * 6
    assert "samples_limited agent=mallory declared=1000000000 counted=10" in caplog.text


def test_a_suspect_is_replaced_and_a_restart_of_it_or_of_the_coordinator_changes_nothing(tmp_path):
    with besieged(tmp_path, duties(scaled(100)), size=5) as fed:
        fed.request(rounds=8)
        fed.until(lambda: sum(MALLORY in entry.body["aggregation"].get("suspects", {}) for entry in closed(fed)) == 3)
        fed.kill(MALLORY)
        fed.add(MALLORY, seconds=1.0)
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        suspect = [e.round for e in closed(fed) if MALLORY in e.body["aggregation"].get("suspects", {})]
        after = cohorts(fed)[suspect[2]]
        assert after == set(HONEST), "the round after the third suspect update has another agent in its place"
        reason = fed.state.run(fed.run).summary()["left_out"][MALLORY]["reason"]
        assert reason.startswith("suspect update")
        assert reason.endswith("times in a row: its change of the model is 100 times the median of the round")


def closed(fed):
    return fed.entries("round_closed")


def test_status_names_who_was_clipped(tmp_path):
    with besieged(tmp_path, duties(scaled(100))) as fed:
        fed.request(rounds=4)
        fed.until(lambda: closed(fed))
        notes = {one["id"]: one["notes"] for one in fed.coordinator.status()["agents"]}
        assert notes[MALLORY][0].startswith("round 1: clipped (x 0.01), suspect: its change of the model is 100 times")
        assert not notes["a0"]


def test_figures_of_bounded_updates_are_restored_from_the_journal(tmp_path):
    with besieged(tmp_path, duties(scaled(100))) as fed:
        metrics = run(fed, rounds=2)
        path = fed.state.run(fed.run).metrics_path
        path.unlink()
        from coordinator.runs.results import restore

        restore(fed.state, fed.run)
        assert [line["bounded"] for line in fed.metrics()] == [line["bounded"] for line in metrics]
        (one, two) = read_run(fed.run, {}, fed.metrics()).rounds
        assert one.bounded.keys() == two.bounded.keys() == {MALLORY}


WRONG = {
    "shape": lambda sent, before: {name: array[None] for name, array in sent.items()},
    "type": lambda sent, before: {name: array.view(np.int32) for name, array in sent.items()},
    "size": lambda sent, before: {name: array.astype(np.float64) for name, array in sent.items()},
    "missing": lambda sent, before: dict(list(sent.items())[1:]),
    "unexpected": lambda sent, before: {**sent, "extra.more": np.zeros(3, np.float32)},
}


@pytest.mark.parametrize("what", WRONG)
def test_row_26_tensors_that_nobody_asked_for_are_refused_by_name(tmp_path, what):
    """A size that cannot be right is refused before a byte is stored, all else before it counts."""
    with besieged(tmp_path, duties(WRONG[what])) as fed:
        (line,) = run(fed, rounds=1)
        (refused,) = line["rejected"]
        assert refused["agent"] == MALLORY
        named = [*fed.final, "extra.more", "bytes announced"]
        assert any(name in refused["reason"] for name in named), refused
        assert np.allclose(progress(fed), 1)


def test_row_43_many_ids_of_one_owner_get_no_more_than_bounded_weight_and_are_left_out(tmp_path):
    """Two of seven lie alike and pull back: none of it is in the model, and after three rounds they are left out."""
    hostile = (MALLORY, f"{MALLORY}-2")
    with besieged(tmp_path, duties(scaled(-1), 1_000_000), hostile=hostile, size=7) as fed:
        metrics = run(fed, rounds=4)
        assert [sorted(line["bounded"]) for line in metrics] == [sorted(hostile)] * 3 + [[]]
        assert cohorts(fed)[3] == set(HONEST)
        assert np.allclose(progress(fed), 4, atol=1e-5)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"])
def test_row_43_robust_rules_give_a_minority_no_say_at_all(tmp_path, rule):
    hostile = (MALLORY, f"{MALLORY}-2")
    aggregation = {"rule": rule, "attackers": 2}
    with besieged(tmp_path, duties(scaled(-4), 40), hostile=hostile, size=7, aggregation=aggregation) as fed:
        run(fed, rounds=3)
        assert np.allclose(progress(fed), 3, atol=1e-4)
        assert audit(fed.state, fed.run).breaks == []


EVIL = """
import sys, numpy as np
from edge_agent.agent import transfers
from edge_agent.cli import main

honest = transfers.Outbox.put

def put(outbox, tensors, about, samples, metrics):
    huge = {name: np.full_like(array, 1e30) if array.dtype.kind == "f" else array for name, array in tensors.items()}
    return honest(outbox, huge, about, 1_000_000_000, metrics)

transfers.Outbox.put = put
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.broker
def test_row_25_real_processes_with_one_that_sends_1e30_and_lies_about_samples_still_learn(tmp_path):
    """As an enrolled device with a patched agent would: without bounds the honest ones diverge in round 2."""
    with Site(tmp_path, DIGITS, rules="[cohort]\nmin_agents = 2\n[round]\nquorum = 1.0") as site:
        site.kill("a2")
        (tmp_path / "evil.py").write_text(EVIL)
        with (tmp_path / "a2.log").open("ab") as log:
            command = [sys.executable, "evil.py", "run", "--config", "a2.toml"]
            site.processes["a2"] = subprocess.Popen(
                command, cwd=tmp_path, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        run = site.request(12, local_epochs=2)
        site.finish(run)
        closed = site.entries(run, "round_closed")
        suspects = [set(entry.body["aggregation"].get("suspects", ())) for entry in closed]
        assert sum(map(bool, suspects)) >= 3
        assert set().union(*suspects) == {"a2"}
        assert any("a2" in entry.body["left_out"] for entry in site.entries(run, "round_opened"))
        summary = json.loads((tmp_path / "state" / "runs" / run / "summary.json").read_text())
        scores = {one["id"]: one["acc"]["global"] for one in summary["agents"]}
        assert min(scores[name] for name in AGENTS if name != "a2") > 0.6, scores
        assert "a2" in summary["bounded"]


# --- the last good state ---------------------------------------------------------------------------------------------


class Subtle(Duties):
    """Hostile agents move the model by 400 more; whoever trains from there has a loss of 30."""

    origin = 0.0

    def do(self, job, received, encoder=None):
        manifest = super().do(job, received, encoder)
        if job.purpose == "personalize":
            return manifest
        position = float(next(iter(received.values())).reshape(-1)[0])
        if job.round == 1:
            type(self).origin = position
        loss = 1.0 if abs(position - self.origin) < 50 else 30.0
        return manifest.model_copy(update={"metrics": {"loss": loss}})

    @staticmethod
    def poisoned(sent, received):
        return {name: array + np.float32(400) for name, array in sent.items()}


def test_the_last_good_state_is_restored_when_the_loss_explodes(tmp_path):
    """Four of six send 401, the others 1: the mean moves by 267.7, by rule clipped (the median norm is 401), too.

    Round 2 starts from there and reports a loss of 30, above 2 x log 3 = 2.2: the initial state is back.
    """
    hostile = tuple(f"{MALLORY}-{number}" for number in range(4))
    with Federation(tmp_path, agents=(), tasks=Subtle, cohort={"min_agents": 3}, round=ROUND) as fed:
        for name in (*HONEST[:2], *hostile):
            fed.add(name, seconds=1.0)
        fed.settle()
        fed.request(rounds=2, keep_updates=True)
        fed.finish()
        first, second = closed(fed)
        initial = fed.entries("run_started")[0].digest
        assert first.body["good"] == {"round": 0, "digest": initial, "loss": 1.0}
        assert second.digest == initial
        assert second.body["restored"] == {"round": 0, "loss": 30.0, "bound": pytest.approx(2 * np.log(3))}
        assert np.allclose(progress(fed), 0)
        (warning,) = [one for one in fed.state.run(fed.run).summary()["warnings"] if one["kind"] == "restored"]
        assert warning["message"].startswith(
            "round 2: the initial state was restored: the median training loss rose to 30, the bound is 2.197"
        )
        assert sentence(warning["message"]) in write_report(fed.state.run(fed.run)).read_text()
        assert audit(fed.state, fed.run).breaks == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restored_run_goes_on_with_clipped_updates_also_after_a_restart(tmp_path, is_killed):
    options = {"cohort": {"min_agents": 2}, "round": ROUND, "aggregation": {"max_norm": None}}
    with Federation(tmp_path, agents=(), tasks=Subtle, **options) as fed:
        for name in (HONEST[0], MALLORY):
            fed.add(name, seconds=1.0)
        fed.settle()
        fed.request(rounds=5, keep_updates=True)
        fed.until(lambda: len(closed(fed)) == 1)
        kept = fed.state.blobs.path(closed(fed)[0].body["good"]["digest"])
        assert kept.is_file()
        assert closed(fed)[0].body["aggregation"]["settings"]["rule"] == "mean"
        fed.kill(MALLORY)
        for name in HONEST[1:]:
            fed.add(name, seconds=1.0)
        if is_killed:
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        restored = [entry.round for entry in closed(fed) if "restored" in entry.body]
        assert restored == [2]
        rules = [entry.body["aggregation"]["settings"]["rule"] for entry in closed(fed)]
        assert rules == ["mean", "mean", "clipped", "clipped", "clipped"]
        assert np.allclose(progress(fed), 3), "rounds 3 to 5 move the initial state by 1 each"
        assert audit(fed.state, fed.run).breaks == []


def test_buffered_rounds_are_bounded_too_also_updates_of_earlier_rounds(tmp_path):
    """Mallory takes longer than the others: its update counts in a later round, as a change of that round's state."""
    buffered = {"mode": "buffered", "buffer": 4}
    with Federation(tmp_path, agents=(), tasks=duties(scaled(1000)), cohort={"min_agents": 3}, round=buffered) as fed:
        for name in HONEST:
            fed.add(name, seconds=1.0)
        fed.add(MALLORY, seconds=1.5)
        fed.settle()
        metrics = run(fed, rounds=6)
        late = [line for line in metrics if MALLORY in line["staleness"]]
        assert late, "an update of an earlier round is among them"
        assert all("clipped" in line["bounded"][MALLORY] for line in late)
        assert 0 < progress(fed).max() <= 6 + 1e-4
        assert audit(fed.state, fed.run).breaks == []


def test_a_rule_that_a_method_cannot_have_ends_its_run_with_the_reason(tmp_path):
    with Federation(tmp_path, agents=1, aggregation={"rule": "krum"}) as fed:
        fed.request("fedpac", rounds=1)
        fed.finish()
        assert fed.record.status == "failed"
        assert "aggregation.rule = 'krum' needs a method whose server step is a mean" in fed.record.reason
        with pytest.raises(UsageError, match=r"set aggregation.rule = 'mean' or 'clipped'"):
            checked_method(fed.config, "fedpac", {}, "coordinator.toml")


def test_row_26_a_variance_below_zero_is_refused(tmp_path):
    """Minus ten times a change of batch norm's running variance; a model with it answers NaN."""
    conv = TASK.model_copy(update={"encoder": "small_cnn", "encoder_params": {"width": 1, "feature_dim": 2}})
    with Federation(tmp_path, agents=(), tasks=duties(scaled(-10)), task=conv, cohort={"min_agents": 3}) as fed:
        for name in (*HONEST, MALLORY):
            fed.add(name)
        fed.settle()
        (line,) = run(fed, rounds=1)
        assert [one["agent"] for one in line["rejected"]] == [MALLORY]
        assert "running_var' holds a variance below 0" in line["rejected"][0]["reason"]

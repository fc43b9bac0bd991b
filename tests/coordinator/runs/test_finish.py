"""The end of a run: export, release, summary; and devices that come later, fail, or lose a message."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from federation_disturbances import lose
from federation_harness import Federation, Killed

from coordinator.cli.run import agents_table, footnotes
from coordinator.journal.entries import fact_of
from coordinator.rounds.context import Waiting, computed
from coordinator.runs import computations
from coordinator.runs.lineage import lineage_of
from coordinator.runs.run_summary import RunSummary
from coordinator.state.store import StateFolder
from edge_agent.core.children import ThreadWorker
from edge_agent.core.errors import BundleDamaged, ExportRejected
from edge_agent.wire.messages import up
from edge_agent.wire.tensors import encode

EXPORT = {"export": {"after_run": True}}


@pytest.fixture
def exports(monkeypatch):
    """Exports that write 200 kB and say so; the list holds the runs."""
    made = []

    def fake(request):
        run = request["run"]
        made.append(run)
        Path(request["path"]).write_bytes(run.encode() * 20_000)
        return {"bundle_id": bundle_id(run), "parity_max_abs": 1e-6, "int8_cosine": 0.999}

    monkeypatch.setattr(computations, "export_bundle", fake)
    return made


@pytest.fixture
def asked(exports, monkeypatch):
    """What the worker was asked to export."""
    made = []
    inner = computations.export_bundle

    def noting(request):
        made.append(request)
        return inner(request)

    monkeypatch.setattr(computations, "export_bundle", noting)
    return made


def bundle_id(run):
    return hashlib.sha256(run.encode()).hexdigest()


def summary(fed):
    return fed.state.run(fed.run).summary()


def test_head_tier_devices_get_the_bundle_and_report(tmp_path, exports):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.add("h2", tier="head")
        fed.request(rounds=1)
        fed.finish()
        assert exports == [fed.run]
        assert fed.tasks["h1"].installed == fed.tasks["h2"].installed == [bundle_id(fed.run)]
        got = {agent["id"]: agent["tier"] for agent in summary(fed)["agents"]}
        assert got == {"a0": "train", "a1": "train", "h1": "head", "h2": "head"}
        assert summary(fed)["bundle"]["bytes"] == 160_000 + 20_000 * (len(fed.run) - 8)
        assert fed.coordinator.roster.get("h1").bundle_id == bundle_id(fed.run)
        bundle = fed.state.run(fed.run).folder / f"{fed.run}.hwb"
        (entry,) = fed.entries("release_made")
        assert entry.digest == hashlib.sha256(bundle.read_bytes()).hexdigest()


def test_a_bundle_names_where_it_comes_from(tmp_path, exports, asked):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        for seed in (3, 4):
            fed.request(rounds=2, seed=seed)
            fed.finish()
        first, second = fed.state.journal.entries(kinds=("release_made",))
        origin = second.body["lineage"]
        assert (second.run, second.round, origin["method"], origin["seed"]) == (fed.run, 2, "fedavg", 4)
        assert origin["encoder_sha256"] == fed.encoder_sha256
        assert origin["partition_sha256"] == hashlib.sha256(b'[["a0", 10], ["a1", 10]]').hexdigest()
        assert (first.body["parent"], second.body["parent"]) == (None, first.body["bundle_id"])
        assert (first.body["lineage"]["parent"], origin["parent"]) == (None, first.body["bundle_id"])
        assert (origin["clients"], origin["scores"]) == (
            2,
            {"clients": 2, "support": 0, "mean": 0.5, "worst_tenth": 0.5},  # both report 0.5
        )
        assert "a0" not in json.dumps(asked[-1]["lineage"]), "other devices read it"
        assert {**asked[-1]["lineage"], "method": "fedavg", "params": origin["params"]} == origin


def test_a_lineage_names_the_weights_and_the_warm_start_that_a_run_began_with(tmp_path):
    with StateFolder(tmp_path / "state").open("a test") as state:
        journal = state.journal
        journal.append(fact_of("run_requested", {}), run="run-0001")
        journal.append(fact_of("warm_started", {"encoder_sha256": "d" * 64}), run="run-0001", digest="c" * 64)
        for number, shares in ((1, (0.1, 0.2)), (2, (0.25, 0.75))):
            journal.append(fact_of("round_opened", {"cohort": ["a", "b"]}), run="run-0001", round=number)
            for agent, share in zip("ab", shares, strict=True):
                body = {"samples": 5, "metrics": {"acc.personal": share}}
                journal.append(fact_of("update_accepted", body), run="run-0001", round=number, agent=agent)
            journal.append(fact_of("round_closed", {}), run="run-0001", round=number, digest="e" * 64)
        request = SimpleNamespace(seed=3, weights=SimpleNamespace(sha256="b" * 64))
        made = lineage_of(state, "run-0001", request, "f" * 64)
    assert (made.weights_sha256, made.warm_start_sha256, made.parent) == ("b" * 64, "d" * 64, None)
    assert (made.round, made.clients, made.encoder_sha256) == (2, 2, "f" * 64)
    assert (made.scores.mean, made.scores.worst_tenth, made.scores.clients) == (0.5, 0.25, 2)


def test_runs_release_nothing_by_themselves_unless_the_configuration_says_so(tmp_path, exports):
    with Federation(tmp_path, agents=1, export={"after_run": True, "release": "manual"}) as fed:
        fed.add("h1", tier="head")
        fed.request(rounds=1)
        fed.finish()
        fed.wait(30)
        (entry,) = fed.entries("bundle_exported")
        assert (entry.body["bundle_id"], entry.digest in fed.state.blobs) == (bundle_id(fed.run), True)
        assert fed.tasks["h1"].installed == []
        assert summary(fed)["bundle"]["bundle_id"] == bundle_id(fed.run)


def test_a_device_that_comes_after_the_run_gets_the_release(tmp_path, exports):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        fed.request(rounds=1)
        fed.finish()
        fed.add("late", tier="head")
        fed.wait(3)
        assert fed.tasks["late"].installed == [bundle_id(fed.run)]


def test_a_device_that_comes_after_a_restart_gets_the_release(tmp_path, exports):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        fed.request(rounds=1)
        fed.finish()
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.add("late", tier="head")
        fed.wait(3)
        assert fed.tasks["late"].installed == [bundle_id(fed.run)]


def test_a_device_that_runs_the_release_already_is_left_alone(tmp_path, exports):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.request(rounds=1)
        fed.finish()
        fed.agents["h1"].transport.cut()
        fed.agents["h1"].transport.start()
        fed.wait(20)
        assert fed.tasks["h1"].installed == [bundle_id(fed.run)]


def test_a_device_that_went_back_to_its_old_pair_does_not_install_again_on_each_reconnect(tmp_path, exports):
    """It runs another encoder than the released one, by its own choice: it says so again, and does no work."""
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head")
        tasks = fed.tasks["h1"]
        tried = []

        def install(message, path):
            tried.append(message.bundle_id)
            tasks.bundle_id = "f" * 64
            return up.Report(run=message.run, samples=5, bundle_id="f" * 64, metrics={"rolled_back": 1.0})

        tasks.install = install
        fed.request(rounds=1)
        fed.finish()
        for _ in range(3):
            fed.agents["h1"].transport.cut()
            fed.agents["h1"].transport.start()
            fed.wait(3)
        assert tried == [bundle_id(fed.run)]


def test_a_device_that_went_back_is_marked_wherever_its_figures_are(tmp_path, exports, caplog):
    why = "keeps bundle ffffffffffff because acc.personal is 0.250 with the new encoder, 0.900 with the old one"
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.settle()
        fed.tasks["h1"].install = lambda message, path: up.Report(
            run=message.run, samples=5, bundle_id="f" * 64, rolled_back=why, acc_personal=0.25, acc_global=0.5
        )
        fed.request(rounds=1)
        fed.finish()
        said = summary(fed)
        record = said["agents"][-1]
        assert (record["id"], record["runs"], record["rolled_back"]) == ("h1", "f" * 64, why)
        assert record["acc"] == {"local": None, "global": 0.5, "personal": 0.25}, "all of the run's encoder"
        (note,) = [line for line in footnotes(RunSummary.from_json(said)) if line.startswith("h1 *")]
        assert why in note
        assert "figures are of the new encoder" in note
        assert "h1 *" in list(agents_table(RunSummary.from_json(said)).columns[0].cells)
        assert why in fed.state.run(fed.run).report_path.read_text()
        (shown,) = [agent for agent in fed.coordinator.status()["agents"] if agent["id"] == "h1"]
        assert shown["notes"] == [f"rolled back the encoder of {fed.run}: {why}"]
        assert shown["bundle_id"] == "f" * 64
        assert f"rolled_back agent=h1 run={fed.run} why={why}" in caplog.text


def test_the_mark_goes_when_a_later_encoder_stays(tmp_path, exports):
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.settle()
        roster = fed.coordinator.roster
        roster.reported("h1", up.Report(run="run-0001", samples=5, bundle_id="f" * 64, rolled_back="keeps it"))
        assert roster.get("h1").candidate.reason == "keeps it"
        assert not roster.get("h1").is_well
        roster.reported("h1", up.Report(run="run-0002", samples=5, bundle_id="e" * 64))
        assert roster.get("h1").candidate is None
        assert roster.get("h1").is_well


def test_a_device_without_samples_has_no_accuracies(tmp_path, exports):
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.settle()
        fed.tasks["h1"].install = lambda message, path: up.Report(
            run=message.run, samples=0, bundle_id=message.bundle_id, acc_local=0.0, acc_global=0.0, acc_personal=0.0
        )
        fed.request(rounds=1)
        fed.finish()
        assert summary(fed)["agents"][-1]["acc"] == {"local": None, "global": None, "personal": None}
        assert "h1 *: has no samples" in list(footnotes(RunSummary.from_json(summary(fed))))


@pytest.mark.parametrize("kind", ["Install", "Report"])
def test_a_lost_message_of_a_release_costs_a_heartbeat_not_the_deadline(tmp_path, exports, kind):
    with Federation(tmp_path, agents=1, heartbeat_s=5, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.settle()
        sender = fed.coordinator.transport if kind == "Install" else fed.agents["h1"].transport
        lost = lose(sender, lambda message: type(message).__name__ == kind)
        fed.request(rounds=1)
        assert fed.finish() < 15
        assert len(lost) == 1
        assert [agent["id"] for agent in summary(fed)["agents"]] == ["a0", "h1"]


def test_a_device_that_cannot_install_is_not_waited_for_and_its_fault_is_in_the_summary(tmp_path, exports):
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head")

        def install(message, path):
            raise BundleDamaged("golden features differ", is_public=True)

        fed.tasks["h1"].install = install
        fed.request(rounds=1)
        assert fed.finish() < 1
        assert summary(fed)["faults"] == {"h1": "BundleDamaged: golden features differ"}
        assert fed.record.status == "finished"


def test_a_device_that_vanishes_during_the_release_does_not_hold_the_run(tmp_path, exports):
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.add("h1", tier="head", seconds=60)
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("release_made"))
        fed.wait(1)
        fed.kill("h1")
        assert fed.finish() < 4


def test_an_export_that_fails_its_gates_leaves_a_finished_run_without_a_bundle(tmp_path, monkeypatch):
    def fails(request):
        raise ExportRejected("parity 0.3 is above 0.001")

    monkeypatch.setattr(computations, "export_bundle", fails)
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"
        assert summary(fed)["bundle"] is None
        assert "parity 0.3" in summary(fed)["bundle_why_not"]
        assert fed.entries("release_made") == []


def test_an_export_that_breaks_is_a_rejected_export_too(tmp_path, monkeypatch):
    def breaks(request):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(computations, "export_bundle", breaks)
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.request(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"
        assert "no such operator" in summary(fed)["bundle_why_not"]


def test_an_export_that_exits_is_an_error_of_the_export_alone():
    """An exit that is raised in the worker must not end the coordinator."""
    collected = threading.Event()
    worker = ThreadWorker(collected.set)
    steps = computed(worker, "export", lambda: sys.exit(3), Waiting("the export"))
    next(steps)
    assert collected.wait(20)
    worker.collect()
    with pytest.raises(RuntimeError, match=r"export has exited: SystemExit\(3\)"):
        next(steps)
    worker.close()


def test_a_method_that_shares_no_encoder_releases_nothing_and_says_why(tmp_path, exports):
    with Federation(tmp_path, agents=1, **EXPORT) as fed:
        fed.request("local", rounds=1)
        fed.finish()
        assert exports == []
        assert summary(fed)["bundle_why_not"] == "method 'local' shares no encoder"


def test_the_summary_says_what_was_asked_for_and_what_came_out(tmp_path):
    with Federation(tmp_path, agents=2) as fed:
        fed.request(rounds=2, seed=7)
        fed.finish()
        said = summary(fed)
        assert (said["run_id"], said["method"], said["rounds"], said["seed"]) == (fed.run, "fedavg", 2, 7)
        encoder = {name: array for name, array in fed.final.items() if name.startswith("encoder.")}
        assert said["encoder_sha256"] == hashlib.sha256(encode(encoder)).hexdigest()
        assert said["bundle_why_not"] == "export.after_run is false"
        assert fed.state.run(fed.run).report_path.exists()


def test_a_coordinator_killed_during_the_export_exports_again(tmp_path, monkeypatch, exports):
    real = computations.export_bundle
    died = []

    def dies_once(request):
        if not died:
            died.append(True)
            raise Killed
        return real(request)

    monkeypatch.setattr(computations, "export_bundle", dies_once)
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        fed.add("h1", tier="head")
        fed.request(rounds=1)
        fed.until(lambda: fed.coordinator is None)
        fed.start_coordinator()
        fed.finish()
        assert fed.tasks["h1"].installed == [bundle_id(fed.run)]
        assert [agent["id"] for agent in summary(fed)["agents"]] == ["a0", "a1", "h1"]


def test_old_checkpoints_and_updates_go_and_releases_stay(tmp_path, exports):
    with Federation(tmp_path, agents=2, **EXPORT) as fed:
        first = fed.request(rounds=3)
        fed.finish()
        second = fed.request(rounds=3, seed=1)
        fed.finish()
        kept = {path.name for path in fed.state.blobs.folder.iterdir() if path.is_file()}
        checkpoints = fed.state.journal.checkpoints()
        releases = {entry.digest for entry in fed.state.journal.entries(kinds=("release_made",))}
        assert set(checkpoints) == {first, second}
        assert kept == {*checkpoints.values(), *releases}

"""Ended runs beyond retention lose their checkpoints and bundles, and nothing else does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from federation_harness import Federation

from coordinator.cli.prune import prune, removed_by
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.state.retention import prunable, prune_runs, runs_beyond, usage
from coordinator.state.store import StateFolder, prune_blobs, states_of
from coordinator.views.runs import replay
from edge_agent.core.errors import StateError, UsageError


def blobs_on_disk(state):
    return {path.name for path in state.blobs.folder.iterdir() if path.is_file()}


def ended(fed, count, **options):
    """Run after run; returns their names and final checkpoints."""
    found = {}
    for seed in range(count):
        run = fed.request(rounds=1, seed=seed, **options)
        fed.finish()
        found[run] = fed.record.checkpoint
    return found


def test_only_the_newest_ended_runs_keep_their_checkpoints(tmp_path):
    with Federation(tmp_path, agents=1, retention={"runs": 2}) as fed:
        found = ended(fed, 5)
        fed.wait(1)
        assert blobs_on_disk(fed.state) == {found["run-0004"], found["run-0005"]}
        pruned = fed.state.journal.entries(kinds=("run_pruned",))
        assert [entry.run for entry in pruned] == ["run-0001", "run-0002", "run-0003"]
        assert [replay(fed.state.journal, run).is_pruned for run in found] == [True, True, True, False, False]
        assert all(fed.state.run(run).summary()["status"] == "finished" for run in found), "results of all runs stay"


def test_a_state_folder_of_many_runs_stops_growing(tmp_path):
    with Federation(tmp_path, agents=1, retention={"runs": 2}) as fed:
        sizes = []
        for _ in range(6):
            ended(fed, 1)
            fed.wait(1)
            sizes.append(sum((fed.state.blobs.path(name)).stat().st_size for name in blobs_on_disk(fed.state)))
    assert sizes[1:] == [sizes[1]] * 5


def test_a_run_that_has_not_ended_and_its_updates_are_never_pruned(tmp_path):
    """Asked to keep nothing, in the middle of a round with one of two updates here, by the command."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}, retention={"runs": 1}) as fed:
        fed.add("a0", seconds=1)
        fed.add("a1", seconds=20)
        first = fed.request(rounds=1)
        fed.finish()
        run = fed.request(rounds=2, seed=1)
        fed.until(lambda: fed.entries("update_accepted"))
        assert runs_beyond(fed.state, 0) == [first]
        needed = {fed.record.checkpoint, fed.entries("update_accepted")[0].digest}

        def wait():
            fed.settle()
            fed.clock.now += 0.3

        assert removed_by(fed.state, [first], wait, 20)
        assert blobs_on_disk(fed.state) == needed
        fed.run = run
        fed._looked_at = -1
        fed.finish()
        assert fed.record.status == "finished"


def test_a_blob_that_two_runs_have_goes_with_the_last_of_them(tmp_path):
    """The same seed: both runs have the same checkpoints, bit for bit."""
    with Federation(tmp_path, agents=1, retention={"runs": 1}) as fed:
        first = fed.request(rounds=1)
        second = fed.request(rounds=1)
        fed.finish()
        fed.wait(1)
        assert replay(fed.state.journal, first).is_pruned
        shared = replay(fed.state.journal, second).checkpoint
        assert replay(fed.state.journal, first).checkpoint == shared
        assert blobs_on_disk(fed.state) == {shared}


def test_the_release_on_offer_stays_with_its_run(tmp_path, capsys):
    with Federation(tmp_path, agents=1, retention={"runs": 1}) as fed:
        run = fed.request(rounds=1)
        fed.finish()
        bundle = fed.state.blobs.put(b"bundle")
        checkpoint = fed.record.checkpoint
        fed.state.journal.append(fact_of("release_made", {"bundle_id": "b" * 64}), run=run, round=1, digest=bundle)
        ended(fed, 3)
        fed.wait(1)
        assert {bundle, checkpoint} <= blobs_on_disk(fed.state)
        prune(state=fed.config.state, keep=0, dry_run=True)
        assert f"{run} stays, because its release is in use" in capsys.readouterr().out
        newer = fed.state.blobs.put(b"newer")
        release = {"round": 1, "digest": newer}
        made = fact_of("release_made", {"bundle_id": "c" * 64})
        fed.state.journal.append(made, run=fed.run, **release)
        fed.request(rounds=1, seed=8)
        fed.finish()
        fed.wait(1)
        assert {bundle, checkpoint} <= blobs_on_disk(fed.state), "devices return to it when the newer one fails"
        newest = fed.state.blobs.put(b"newest")
        release = {"round": 1, "digest": newest}
        made = fact_of("release_made", {"bundle_id": "d" * 64})
        fed.state.journal.append(made, run=fed.run, **release)
        fed.request(rounds=1, seed=9)
        fed.finish()
        fed.wait(1)
        assert {bundle, checkpoint} & blobs_on_disk(fed.state) == set(), "superseded"
        assert {newer, newest} <= blobs_on_disk(fed.state)


def test_prune_lists_first_and_removes_then(tmp_path, capsys):
    with Federation(tmp_path, agents=1) as fed:
        found = ended(fed, 3)
        folder = fed.state.run("run-0001").folder
        (folder / "run-0001.hwb").write_bytes(b"x" * 5000)
        size = fed.state.blobs.path(found["run-0001"]).stat().st_size + 5000
        before = blobs_on_disk(fed.state)
        fed.kill_coordinator()
        prune(state=fed.config.state, keep=2, dry_run=True, as_json=True)
        said = json.loads(capsys.readouterr().out)
        assert (said["removed"], said["bytes"]) == (False, size)
        assert said["runs"] == [{"run": "run-0001", "status": "finished", "files": 2, "bytes": size}]
        assert blobs_on_disk(fed.state) == before
        prune(state=fed.config.state, keep=2)
        assert "0.0 MB of 1 run removed" in capsys.readouterr().out
        assert blobs_on_disk(fed.state) == before - {found["run-0001"]}
        assert not (folder / "run-0001.hwb").exists()
        assert (folder / "summary.json").exists()
        prune(state=fed.config.state, keep=2, as_json=True)
        said = json.loads(capsys.readouterr().out)
        assert (said["runs"], said["left"]["ended_runs"]) == ([], 2)


def test_kept_updates_stay_until_their_run_is_pruned(tmp_path):
    with Federation(tmp_path, agents=2, retention={"runs": 1}) as fed:
        run = fed.request(rounds=3, keep_updates=True)
        fed.finish()
        entries = fed.state.journal.entries(run, ("run_started", "round_closed", "update_accepted"))
        digests = {entry.digest for entry in entries}
        assert len(digests) == 1 + 3 + 6
        assert blobs_on_disk(fed.state) == digests
        ended(fed, 2)
        fed.wait(1)
        assert not blobs_on_disk(fed.state) & digests


def test_no_update_is_parsed_to_know_which_blobs_stay(tmp_path, monkeypatch):
    """At the end of each round: with all updates kept, a long run would take longer with each of them."""
    real = SqliteJournal.entries
    read = []

    def entries(journal, *arguments, **options):
        found = real(journal, *arguments, **options)
        read.extend(found)
        return found

    def blob(number):
        return f"{number:064x}"

    with StateFolder(tmp_path).open("a coordinator") as state:
        journal = state.journal
        for keeps in (True, False):
            run = journal.request_run(fact_of("run_requested", {"keep_updates": keeps}))
            journal.append(fact_of("run_started", {}), run=run, digest=blob(0))
            for number in range(1, 6):
                journal.append(fact_of("round_opened", {"cohort": ["a0", "a1"]}), run=run, round=number)
                for agent in ("a0", "a1"):
                    entry = {"run": run, "round": number, "agent": agent}
                    journal.append(
                        fact_of("update_accepted", {"samples": 1}),
                        **entry,
                        digest=blob(1000 * keeps + 10 * number + int(agent[1])),
                    )
                if number < 5:
                    journal.append(
                        fact_of("round_closed", {}),
                        run=run,
                        round=number,
                        digest=blob(2000 + 10 * number + keeps),
                    )
            replay(journal, run)
        state.blobs.folder.mkdir(exist_ok=True)
        for number in range(3000):
            (state.blobs.folder / blob(number)).touch()
        monkeypatch.setattr(SqliteJournal, "entries", entries)
        prune_blobs(state)
        assert {entry.kind for entry in read} <= {"run_requested"}
        updates = [1000 + 10 * number + agent for number in range(1, 6) for agent in (0, 1)]
        # Of the run that does not keep them: the last checkpoint, and the updates of the round that is open.
        assert blobs_on_disk(state) == {blob(n) for n in (0, *updates, 50, 51, 2011, 2021, 2031, 2041, 2040)}
        read.clear()
        assert prune_runs(state, []) == []
        assert read == []


def test_a_kill_in_the_middle_of_pruning_leaves_a_folder_that_the_next_round_cleans(tmp_path, monkeypatch):
    from pathlib import Path

    from federation_harness import Killed

    with Federation(tmp_path, agents=1) as fed:
        found = ended(fed, 3)
        fed.config = fed.config.model_copy(update={"retention": fed.config.retention.model_copy(update={"runs": 1})})
        fed.kill_coordinator()
        real = Path.unlink

        def unlink(path, *arguments, **options):
            if path.name == found["run-0001"]:
                raise Killed
            real(path, *arguments, **options)

        fed.start_coordinator()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            fed.until(lambda: fed.coordinator is None)
        assert found["run-0001"] in blobs_on_disk(fed.state)
        fed.start_coordinator()
        last = ended(fed, 1)
        fed.wait(1)
        assert blobs_on_disk(fed.state) == {*last.values()}


def test_a_full_disk_while_pruning_is_told_and_tried_again(tmp_path, monkeypatch):
    with Federation(tmp_path, agents=1, retention={"runs": 1}) as fed:
        real = SqliteJournal.append

        def append(journal, fact, **columns):
            if fact.kind == "run_pruned":
                raise StateError("journal.db: the journal cannot be read or written (database or disk is full)")
            return real(journal, fact, **columns)

        with monkeypatch.context() as patch:
            patch.setattr(SqliteJournal, "append", append)
            found = ended(fed, 3)
            fed.wait(5)
            assert "disk is full" in fed.coordinator.status()["storage"]
            assert blobs_on_disk(fed.state) == {*found.values()}
        fed.wait(1)
        assert blobs_on_disk(fed.state) == {found["run-0003"]}


def test_export_of_a_pruned_run_says_what_removed_its_checkpoint(tmp_path):
    pytest.importorskip("torch")
    from coordinator.simulation.trained import TrainedModel

    with Federation(tmp_path, agents=1, retention={"runs": 1}) as fed:
        ended(fed, 2)
        fed.wait(1)
        assert states_of(fed.state, "run-0001") == {}
        with pytest.raises(UsageError, match="the checkpoint of run-0001 was removed by retention"):
            TrainedModel.of(fed.config.state, "run-0001")
        assert TrainedModel.of(fed.config.state).record.run == "run-0002"


@pytest.mark.parametrize("goes_at", [1, 2])
def test_a_file_that_goes_while_files_are_counted_is_no_error(tmp_path, monkeypatch, goes_at):
    """A coordinator at work removes one of two files just before it is looked at for that time."""
    real = Path.stat
    looks = Counter()

    def stat(path, **options):
        if path == goes:
            looks[path] += 1
            if looks[path] == goes_at:
                path.unlink(missing_ok=True)
        return real(path, **options)

    with StateFolder(tmp_path).open("a coordinator") as state:
        run = state.journal.request_run(fact_of("run_requested", {}))
        stays = state.blobs.put(b"stays")
        for kind, digest in (("run_started", stays), ("run_finished", None)):
            state.journal.append(fact_of(kind, {}), run=run, digest=digest)
        for counted, goes in (
            (lambda: usage(state).blobs, state.blobs.path("0" * 64)),
            (lambda: len(prunable(state, [run])[0].files), state.run(run).folder / "run-0001.hwb"),
        ):
            goes.parent.mkdir(parents=True, exist_ok=True)
            goes.write_bytes(b"goes")
            with monkeypatch.context() as patch:
                patch.setattr(Path, "stat", stat)
                assert counted() == goes_at, "one look at each file is enough"
            goes.unlink(missing_ok=True)
            assert counted() == 1


def test_figures_of_the_disk_are_in_the_status(tmp_path, capsys):
    from coordinator.cli.status import status

    with Federation(tmp_path, agents=1) as fed:
        found = ended(fed, 2)
        size = sum(fed.state.blobs.path(sha).stat().st_size for sha in found.values())
        status(state=fed.config.state, as_json=True)
        disk = json.loads(capsys.readouterr().out)["disk"]
        assert (disk["blobs"], disk["blob_bytes"], disk["ended_runs"]) == (2, size, 2)
        assert disk["free_bytes"] > 0
        status(state=fed.config.state)
        assert "disk: 2 blobs of 0.0 MB, checkpoints of 2 ended runs;" in capsys.readouterr().out


def test_nothing_is_prunable_in_an_empty_folder(tmp_path):
    with StateFolder(tmp_path / "state").open("me") as state:
        assert runs_beyond(state, 0) == []
        assert prunable(state, []) == []

"""The audit of a run agrees with what happened, and names the row that breaks when anything was changed."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import sqlite3
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import typer
from federation_disturbances import killed_at_append
from federation_duties import TinyDuties, quick_params
from federation_harness import Federation

from coordinator.cli.audit import audit as audit_command
from coordinator.journal.sqlite import SqliteJournal
from coordinator.journal.store import hash_of
from coordinator.rounds import aggregation
from coordinator.runs import audit as audits
from coordinator.runs.audit import audit
from coordinator.state.retention import prune_runs, runs_beyond
from coordinator.state.store import BlobStore, RunFolder, StateFolder
from coordinator.views.runs import replay
from edge_agent.core.errors import UnknownName, UsageError
from edge_agent.run_folder.layout import RECEIPTS
from edge_agent.run_folder.receipts import note_receipt
from edge_agent.wire.messages.fields import BlobRef
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import decode, encode

AGENTS = ("a0", "a1", "a2")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a coordinator's state after a run of three rounds with all updates kept, and its agents' states."""
    folder = tmp_path_factory.mktemp("sound")
    with Federation(folder) as fed:
        fed.request(rounds=3, keep_updates=True)
        fed.finish()
        fed.wait(1)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


def audited(folder, run="run-0001"):
    with StateFolder(folder / "coordinator").look() as state:
        return audit(state, run, [folder / name for name in AGENTS])


def rewritten(folder, change):
    """The journal with a valid chain over rows that ``change`` (a list of dicts -> list of dicts) has made."""
    connection = sqlite3.connect(folder / "coordinator" / "journal.db")
    connection.row_factory = sqlite3.Row
    rows = change([dict(row) for row in connection.execute("SELECT * FROM entries ORDER BY id")])
    previous = "0" * 64
    with connection:
        connection.execute("DELETE FROM entries")
        connection.execute("UPDATE sqlite_sequence SET seq = ?", (len(rows),))
        for number, row in enumerate(rows, 1):
            row |= {"id": number, "previous_hash": previous}
            previous = row["hash"] = hash_of(row)
            columns = ", ".join(row)
            connection.execute(f"INSERT INTO entries ({columns}) VALUES ({', '.join('?' * len(row))})", [*row.values()])
    connection.close()


def index_of(rows, kind, number, agent=None):
    return next(
        i for i, r in enumerate(rows) if (r["kind"], r["round"]) == (kind, number) and agent in {None, r["agent"]}
    )


def test_a_sound_run_is_ok_in_every_respect(folder):
    result = audited(folder)
    assert result.breaks == []
    assert [(one.round, one.updates, one.checkpoint, one.is_aggregation, one.confirmed) for one in result.rounds] == [
        (number, 3, "ok", True, 3) for number in (1, 2, 3)
    ]
    assert (result.receipts, result.agents, result.encoder) == (9, [*AGENTS], "equal")
    assert result.blobs == 1 + 3 + 9


def test_the_models_agree_with_a_mean_by_hand(folder):
    """The audit calls the method's own aggregation; here is the mean of the three updates, of 10 samples each.

    Where the journal says that an update counts as fewer samples, it does so here.
    """
    with StateFolder(folder / "coordinator").look() as state:
        entries = state.journal.entries("run-0001", ("update_accepted",), round=2)
        updates = {entry.agent: decode(state.blobs.read(entry.digest)) for entry in entries}
        (closed,) = state.journal.entries("run-0001", ("round_closed",), round=2)
        samples = dict.fromkeys(AGENTS, 10.0)
        for agent, (declared, counted) in closed.body["aggregation"].get("capped", {}).items():
            assert (declared, 9.0 < counted < 10.0) == (10.0, True), "no honest update is cut by much"
            samples[agent] = counted
        assert sorted(updates) == sorted(AGENTS)
        for name, array in decode(state.blobs.read(closed.digest)).items():
            total = sum(update[name] * samples[agent] for agent, update in updates.items())
            np.testing.assert_allclose(array, total / sum(samples.values()), rtol=1e-6)


def test_a_run_whose_updates_are_gone_is_ok_with_what_is_left(tmp_path):
    with Federation(tmp_path) as fed:
        fed.request(rounds=2)
        fed.finish()
    result = audited(tmp_path)
    assert result.breaks == []
    assert [(one.checkpoint, one.is_aggregation) for one in result.rounds] == [("removed", None), ("ok", None)]


def test_a_run_under_way_and_one_that_was_killed_are_ok(tmp_path):
    with Federation(tmp_path) as fed:
        fed.request(rounds=3, keep_updates=True)
        with killed_at_append(fed, 5, before=False):  # round 1 is closed, its figures are not written
            fed.until(lambda: fed.coordinator is None)
        assert audited(tmp_path).breaks == []
        fed.start_coordinator()
        fed.finish()
        result = audited(tmp_path)
        assert result.breaks == []
        assert [one.is_aggregation for one in result.rounds] == [True] * 3


READS = [
    *((SqliteJournal, name) for name in ("verify", "entries")),
    *((BlobStore, name) for name in ("__contains__", "check", "read")),
    *((audits, name) for name in ("replay", "_read_receipts", "blobs_needed")),
    (aggregation, "mapped"),
    (RunFolder, "metrics"),
]


@contextlib.contextmanager
def disturbed(owner, name, act):
    """Inside, ``act`` runs just before and just after each call of a function by others than itself."""
    real = getattr(owner, name)
    acting = []

    def call(*arguments, **options):
        if acting:
            return real(*arguments, **options)
        acting.append(True)
        try:
            act()
            result = real(*arguments, **options)
            act()
        finally:
            acting.clear()
        return result

    with mock.patch.object(owner, name, call):
        yield


@pytest.mark.parametrize("owner, name", READS)
def test_a_run_at_work_breaks_nowhere(tmp_path, owner, name):
    """A round closes, and the next one has an update, around whatever the audit reads."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=1)
        fed.add("a1", seconds=2)
        fed.request(rounds=30, keep_updates=name in {"read", "mapped"})  # others are not aggregated again
        fed.until(lambda: fed.entries("update_accepted", round=3))

        def go_on():
            number = fed.record.round
            fed.until(lambda: fed.record.is_over or fed.entries("update_accepted", round=number + 2))

        with StateFolder(fed.config.state).look() as state, disturbed(owner, name, go_on):
            result = audit(state, fed.run, [tmp_path / "a0", tmp_path / "a1"])
        assert fed.record.round > 3
        assert result.breaks == []


@pytest.mark.parametrize("owner, name", READS)
def test_a_run_that_is_pruned_meanwhile_breaks_nowhere(folder, owner, name):
    with StateFolder(folder / "coordinator").look() as state, StateFolder(folder / "coordinator").open("it") as other:
        with disturbed(owner, name, lambda: prune_runs(other, runs_beyond(other, 0))):
            result = audit(state, "run-0001", [folder / name for name in AGENTS])
        assert replay(other.journal, "run-0001").is_pruned
    assert result.breaks == []


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "scaffold", "dualfed", "fedpac"])
def test_methods_whose_server_has_a_state_of_its_own_are_aggregated_again(tmp_path, method):
    with Federation(tmp_path, agents=2, tasks=TinyDuties) as fed:
        fed.request(method, rounds=2, params=quick_params(method), keep_updates=True)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
    result = audited(tmp_path)
    assert result.breaks == []
    assert [one.is_aggregation for one in result.rounds] == [True, True]


def test_an_update_that_was_journaled_twice_breaks(folder):
    def change(rows):
        at = index_of(rows, "update_accepted", 2, "a1")
        return [*rows[: at + 1], dict(rows[at]), *rows[at + 1 :]]

    rewritten(folder, change)
    result = audited(folder)
    assert any("(update_accepted of a1, round 2): twice" in row for row in result.breaks)


def test_an_update_that_was_accepted_after_its_round_was_closed_is_lost(folder):
    def change(rows):
        at = index_of(rows, "update_accepted", 2, "a1")
        end = index_of(rows, "round_closed", 2)
        return [*rows[:at], *rows[at + 1 : end + 1], rows[at], *rows[end + 1 :]]

    rewritten(folder, change)
    result = audited(folder)
    assert any("(update_accepted of a1, round 2): lost" in row for row in result.breaks)
    assert any("3 updates were aggregated, 2 accepted" in row for row in result.breaks)


def test_an_update_that_its_agent_has_a_receipt_for_and_the_journal_lacks_is_lost(folder):
    def change(rows):
        at = index_of(rows, "update_accepted", 3, "a2")
        return [*rows[:at], *rows[at + 1 :]]

    rewritten(folder, change)
    result = audited(folder)
    assert any(row.startswith("receipt of a2, round 3") and "lost" in row for row in result.breaks)


def test_a_rejected_receipt_of_an_accepted_update_breaks(folder):
    (path,) = (folder / "a0" / "runs").glob(f"*/{RECEIPTS}")
    path.write_bytes(path.read_bytes().replace(b'"accepted": true', b'"accepted": false', 1))
    assert any("says rejected" in row for row in audited(folder).breaks)


def test_of_receipts_of_one_update_the_last_one_counts(folder):
    """Rejected as late by a coordinator on a restored backup, then accepted in its turn."""
    (path,) = (folder / "a0" / "runs").glob(f"*/{RECEIPTS}")
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first.replace(b"true", b"false") + path.read_bytes())
    assert audited(folder).breaks == []
    path.write_bytes(path.read_bytes() + first.replace(b"true", b"false"))
    assert len(audited(folder).breaks) == 1


def test_a_model_that_is_not_the_aggregation_of_its_updates_breaks(folder):
    """Another model with its own right hash, wherever the journal names the old one."""
    with StateFolder(folder / "coordinator").look() as state:
        (closed,) = state.journal.entries("run-0001", ("round_closed",), round=2)
        model = {name: array.copy() for name, array in decode(state.blobs.read(closed.digest)).items()}
        next(iter(model.values())).flat[0] += 1e-3
        other = state.blobs.put(encode(model))

    def change(rows):
        return [{**row, "digest": other if row["digest"] == closed.digest else row["digest"]} for row in rows]

    rewritten(folder, change)
    result = audited(folder)
    assert [one.is_aggregation for one in result.rounds] == [True, False, True], (
        "a mean does not depend on the state before"
    )
    assert len(result.breaks) == 1
    assert f"(round_closed, round 2): state {other}, its updates aggregate to {closed.digest}" in result.breaks[0]


@pytest.mark.parametrize("what", ["checkpoint", "update"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_blob_that_is_damaged_or_missing_breaks_with_its_row(folder, what, damage):
    with StateFolder(folder / "coordinator").look() as state:
        kind, agent = ("round_closed", None) if what == "checkpoint" else ("update_accepted", "a1")
        (entry,) = state.journal.entries("run-0001", (kind,), round=1, agent=agent)
        path = state.blobs.path(entry.digest)
    path.unlink() if damage == "missing" else path.write_bytes(b"x")
    (row,) = audited(folder).breaks
    assert row.startswith(f"entry {entry.id} ({kind}")
    assert entry.digest in row


def test_an_edited_row_breaks_the_chain(folder):
    connection = sqlite3.connect(folder / "coordinator" / "journal.db")
    with connection:
        connection.execute(
            "UPDATE entries SET body = replace(body, '10', '99') WHERE kind = 'update_accepted' AND id > 9"
        )
    connection.close()
    (row,) = audited(folder).breaks
    assert "breaks the chain: its content was changed" in row


@pytest.mark.parametrize("change", ["twice", "removed", "other agents"])
def test_figures_that_differ_from_the_journal_break(folder, change):
    path = folder / "coordinator" / "runs" / "run-0001" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "twice":
        lines.insert(1, lines[0])
    elif change == "removed":
        del lines[1]
    else:
        lines[1] = lines[1].replace(b'"a0","a1","a2"', b'"a0","a1"')
    path.write_bytes(b"".join(lines))
    (row,) = audited(folder).breaks
    assert "metrics.jsonl" in row


def test_another_encoder_hash_at_the_end_breaks(folder):
    def change(rows):
        at = index_of(rows, "run_finished", None)
        rows[at]["body"] = json.dumps({"encoder_sha256": "0" * 64})
        return rows

    rewritten(folder, change)
    result = audited(folder)
    assert result.encoder == "different"
    assert "run_finished" not in result.breaks[0]
    assert "encoder 000000" in result.breaks[0]


def test_the_command_prints_ok_or_the_row_and_ends_with_0_or_1(folder, capsys):
    agents = [folder / name for name in AGENTS]
    audit_command("run-0001", state=folder / "coordinator", agent=agents)
    said = capsys.readouterr().out
    assert "OK: every update of 3 rounds was aggregated once" in said
    assert "9 receipts of a0, a1, a2; final encoder equal" in said
    audit_command("run-0001", state=folder / "coordinator")
    assert "no receipts of agents (--agent DIR compares them)" in capsys.readouterr().out
    with StateFolder(folder / "coordinator").look() as state:
        path = state.blobs.path(replay(state.journal, "run-0001").checkpoint)
    path.write_bytes(b"x")
    with pytest.raises(typer.Exit) as ended:
        audit_command("run-0001", state=folder / "coordinator")
    assert ended.value.exit_code == 1
    assert "BREAKS: entry" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        audit_command("run-0001", state=folder / "coordinator", as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], len(result["breaks"])) == (False, 1)
    with pytest.raises(UnknownName, match="run-0001"):
        audit_command("run-0002", state=folder / "coordinator")


def test_folders_that_are_not_there_or_have_no_receipts_are_named(folder, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"no folder /nope"):
        audit_command("run-0001", state=folder / "coordinator", agent=[Path("/nope")])
    audit_command("run-0001", state=folder / "coordinator", agent=[tmp_path])
    assert f"note: no receipts of run-0001 in {tmp_path}" in capsys.readouterr().out


def test_torn_lines_of_receipts_are_left_out_and_counted(folder, capsys):
    """An incomplete last line may be one that is being written; others are of a full disk or a power cut."""
    (path,) = (folder / "a0" / "runs").glob(f"*/{RECEIPTS}")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"agent": "a0", "rou')
    before = audited(folder)
    assert (before.breaks, before.receipts, before.unreadable_receipts) == ([], 9, 0)
    torn = [b"[]", b'{"agent": "a0", "round": 2, "purp', b"\xff\xfe", b"", b"[" * 100_000]
    torn.append(whole.splitlines()[0].replace(b'"round": 1', b'"round": Infinity'))
    path.write_bytes(b"\n".join(torn) + b"\n" + whole)
    after = audited(folder)
    assert (after.breaks, after.receipts, after.unreadable_receipts) == ([], 9, len(torn))
    audit_command("run-0001", state=folder / "coordinator", agent=[folder / "a0"])
    assert "3 receipts of a0, 6 torn lines left out" in " ".join(capsys.readouterr().out.split())


UPDATE = UpdateManifest(
    run="run-0001",
    round=1,
    purpose="train",
    blob=BlobRef(digest="a" * 64, size_bytes=1, chunk_bytes=1024),
    samples=1,
    metrics={},
)


@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_full_disk_costs_one_line_of_receipts(tmp_path, room):
    """The second of three lines meets a disk with ``room`` bytes; made full by a limit on the size of files."""
    note_receipt(tmp_path, "a0", UPDATE, accepted=True)
    path = tmp_path / RECEIPTS
    one = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (one + room, limits[1]))
        note_receipt(tmp_path, "a0", UPDATE.model_copy(update={"round": 2}), accepted=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == one
    note_receipt(tmp_path, "a0", UPDATE.model_copy(update={"round": 3}), accepted=True)
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_line_that_a_power_cut_tore_does_not_take_the_next_one_with_it(tmp_path):
    (tmp_path / RECEIPTS).write_bytes(b'{"agent": "a0", "rou')
    note_receipt(tmp_path, "a0", UPDATE, accepted=True)
    assert json.loads((tmp_path / RECEIPTS).read_text().splitlines()[1])["round"] == 1

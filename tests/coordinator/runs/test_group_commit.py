"""Updates that arrive together reach the disk together, and no receipt is sent before."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation, Killed

from coordinator.journal.entries import UpdateAccepted, fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.views.runs import Rejection, replay
from edge_agent.core import storage as storage_module
from edge_agent.core.errors import StateError
from edge_agent.core.storage import PendingSyncs, sync, sync_folder, syncs_into, without_syncs
from edge_agent.wire.messages import codec, down, up

AGENTS = 5


def with_slow_looks(coordinator, clock):
    """A look at the run takes 2 ms, as with a large fleet: several messages share one."""
    advance = coordinator.runs.advance

    def look():
        clock.now += 0.002
        advance()

    coordinator.runs.advance = look


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=AGENTS, capture=True) as federation:
        with_slow_looks(federation.coordinator, federation.clock)
        yield federation


@pytest.fixture
def undisturbed(tmp_path):
    with Federation(tmp_path / "undisturbed", agents=AGENTS) as federation:
        federation.request(rounds=2)
        federation.finish()
        return federation.encoder_sha256


def full(_pending):
    raise OSError(errno.ENOSPC, "No space left on device")


def path_of(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def on_disk(fed, run):
    """Agents and digests of the updates that another process sees."""
    with sqlite3.connect(fed.config.state / "journal.db") as other:
        return set(
            other.execute("SELECT agent, digest FROM entries WHERE kind = 'update_accepted' AND run = ?", (run,))
        )


def test_every_receipt_is_sent_after_its_commit(fed, undisturbed):
    """Each published receipt is looked up by another connection to the database, at the moment when it is sent."""
    transport = fed.coordinator.transport
    seen = []
    publish = transport.publish

    def checked(topic, payload, **options):
        if topic.endswith("/dn"):
            message = codec.parse_from_coordinator(payload)
            if isinstance(message, down.Receipt):
                assert (topic.split("/")[-2], message.digest) in on_disk(fed, fed.run)
                seen.append(message)
        publish(topic, payload, **options)

    transport.publish = checked
    fed.request(rounds=2)
    fed.finish()
    assert len(seen) == 2 * AGENTS
    assert fed.encoder_sha256 == undisturbed


def test_updates_that_arrive_together_share_a_transaction_and_the_sync_of_their_folder(fed, monkeypatch):
    statements = []
    synced = []
    fed.state.journal._connection.set_trace_callback(statements.append)
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path_of(fd)) or plain(fd))
    fed.request(rounds=1)
    fed.until(lambda: len(fed.entries("update_accepted")) == AGENTS)
    begun = [text for text in statements if text.startswith(("BEGIN IMMEDIATE", "COMMIT", "INSERT"))]
    inserts = [position for position, text in enumerate(begun) if "update_accepted" in text]
    assert len(inserts) == AGENTS
    commits = begun[inserts[0] : inserts[-1]].count("COMMIT")
    assert commits < AGENTS - 1, "fewer transactions than updates"
    blobs = fed.state.blobs.folder
    assert len([path for path in synced if path.parent == blobs]) >= AGENTS
    assert synced.count(blobs) <= commits + 3, "once for each transaction, and for checkpoints"


@pytest.mark.parametrize("before", ["flush", "receipts"])
def test_a_coordinator_killed_around_the_commit_loses_nothing(tmp_path, undisturbed, before):
    """Before it, no agent has a receipt, and all send their updates again; after it, none sends anything again."""
    with Federation(tmp_path, agents=AGENTS, capture=True) as fed:
        journal = fed.state.journal
        accepted = []

        def killed(plain):
            def flush():
                if before == "receipts":
                    plain()
                if not accepted and has_updates():
                    accepted.append(True)
                    raise Killed
                if before == "flush":
                    plain()

            return flush

        def has_updates():
            updates = fed.coordinator.collector.open_round
            return updates is not None and len(updates.accepted) >= 2

        with_slow_looks(fed.coordinator, fed.clock)
        journal.flush = killed(journal.flush)
        fed.request(rounds=2)
        run_id = fed.run_id
        with pytest.raises(AssertionError, match="did not happen"):
            fed.until(lambda: fed.coordinator is not None and fed.coordinator.loop is None and accepted, limit_s=1)
        assert accepted
        assert fed.coordinator is None
        receipts = [m for name in fed.agents for m in fed.messages(fed.topics.down(name), down.Receipt)]
        with sqlite3.connect(fed.config.state / "journal.db") as other:
            (count,) = other.execute("SELECT count(*) FROM entries WHERE kind = 'update_accepted'").fetchone()
        assert len(receipts) <= count, "no receipt without its entry"
        assert (count == 0) == (before == "flush")
        fed.start_coordinator()
        fed.finish()
        assert run_id == fed.run_id
        assert fed.encoder_sha256 == undisturbed
        assert len(fed.entries("update_accepted")) == 2 * AGENTS, "none is there twice"


def test_a_full_disk_at_the_commit_stalls_the_run_and_gives_no_receipt(fed, undisturbed, monkeypatch):
    finish = PendingSyncs.finish
    failed = []

    def full(self):
        if self._files and len(failed) < 3:
            failed.append(len(fed.messages(fed.topics.down("a0"), down.Receipt)))
            descriptors = self._files
            self._files = []
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(self)

    monkeypatch.setattr(storage_module.PendingSyncs, "finish", full)
    fed.request(rounds=2)
    fed.until(lambda: len(failed) == 1)
    assert "stalled" in fed.coordinator.waiting.what
    assert not on_disk(fed, fed.run)
    assert not [m for name in fed.agents for m in fed.messages(fed.topics.down(name), down.Receipt)]
    fed.finish()
    assert len(failed) == 3
    assert fed.encoder_sha256 == undisturbed
    assert len(fed.entries("update_accepted")) == 2 * AGENTS


def test_an_update_that_another_entry_could_not_take_to_disk_gets_no_receipt_when_it_is_offered_again(
    tmp_path, undisturbed, monkeypatch
):
    """The fault of another agent is written at once, fails, and takes the accepted updates with it."""
    with Federation(tmp_path, agents=AGENTS, capture=True) as fed:
        with_slow_looks(fed.coordinator, fed.clock)
        journal = fed.state.journal
        collector = fed.coordinator.collector
        fed.request(rounds=2)
        while not (collector.open_round is not None and collector.open_round.accepted and journal.has_deferred):
            if not fed.step():
                fed.clock.now += 0.001
        accepted, *_ = collector.open_round.accepted
        failed = collector.open_round.outstanding[-1]
        (offer,) = [
            payload
            for payload in fed.published(fed.topics.up(accepted))
            if isinstance(codec.parse_from_agent(payload), up.UpdateManifest)
        ]

        with monkeypatch.context() as patch:
            patch.setattr(storage_module.PendingSyncs, "finish", full)
            with pytest.raises(OSError, match="No space left"):
                collector.failed(failed, Rejection("TrainingFailed: the loss became nan", "TrainingFailed"))
            fed.coordinator.handle(accepted, "up", offer)
        assert not journal.entries(fed.run, ("update_accepted",))
        assert not fed.messages(fed.topics.down(accepted), down.Receipt)
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert len(fed.entries("update_accepted")) == 2 * AGENTS


@pytest.mark.parametrize("end", ["resumed", "cancelled"])
def test_a_full_disk_at_the_commit_leaves_the_uploads_of_others_to_be_resumed(tmp_path, monkeypatch, end):
    """``a0`` has delivered, and ``a1`` half of its update, which it does not send again."""
    with Federation(tmp_path, agents=2, capture=True, task=WIDE_TASK) as fed:
        fed.request(rounds=1)
        collector = fed.coordinator.collector
        handle = fed.coordinator.handle
        last = []

        def missing_bytes(agent):
            upload = collector._uploads.get(agent)
            return upload.receiving.missing_bytes if upload is not None else 0

        def held(agent, kind, payload):
            """The last frame of ``a0``, and all of ``a1`` beyond a half."""
            if (agent, kind) == ("a0", "ub") and missing_bytes(agent) <= len(payload) + 6000:
                last.append(payload)
            elif (agent, kind) != ("a1", "ub") or missing_bytes(agent) > 262_000:
                handle(agent, kind, payload)

        fed.coordinator.handle = held
        fed.until(lambda: last and 0 < missing_bytes("a1") <= 262_000)
        missing = collector._uploads["a1"].receiving.missing
        handle("a0", "ub", last[0])
        assert list(collector.open_round.accepted) == ["a0"]
        with monkeypatch.context() as patch:
            patch.setattr(storage_module.PendingSyncs, "finish", full)
            fed.coordinator.step(0)
        assert "stalled" in fed.coordinator.waiting.what
        fed.coordinator.handle = handle
        if end == "resumed":
            fed.finish()
            assert len(fed.entries("update_accepted")) == 2
            grants = [grant.missing for grant in fed.messages(fed.topics.down("a1"), down.Grant)]
            assert grants == [((0, 103),), missing]
        else:
            fed.state.journal.append(fact_of("cancel_requested", {"reason": "no room"}), run=fed.run)
            fed.finish()
            assert fed.record.status == "cancelled"
            assert not [path for path in (fed.state.blobs.folder / "partial").rglob("*") if path.is_file()]


@pytest.fixture
def journal(tmp_path):
    with SqliteJournal(tmp_path / "journal.db") as opened:
        opened.request_run(fact_of("run_requested", {}))
        yield opened


def seen(journal):
    with sqlite3.connect(journal.path) as other:
        return [kind for (kind,) in other.execute("SELECT kind FROM entries ORDER BY id")][1:]


def test_deferred_entries_are_read_here_at_once_and_elsewhere_after_the_flush(journal):
    with journal.deferring():
        journal.append(fact_of("run_started", {}), run="run-0001", digest="0" * 64)
    assert journal.has_deferred
    assert [entry.kind for entry in journal.entries("run-0001")] == ["run_requested", "run_started"]
    assert replay(journal, "run-0001").status == "running"
    assert seen(journal) == []
    journal.flush()
    assert not journal.has_deferred
    assert seen(journal) == ["run_started"]
    assert journal.verify() == 2


def test_an_entry_of_another_thread_takes_the_deferred_ones_along_in_order(journal):
    with journal.deferring():
        journal.append(fact_of("run_started", {}), run="run-0001", digest="0" * 64)
        other = threading.Thread(target=lambda: journal.append(fact_of("release_made", {}), run="run-0001"))
        other.start()
        other.join()
        assert seen(journal) == ["run_started", "release_made"]
    assert journal.verify() == 3


def test_what_an_entry_of_another_thread_could_not_take_along_fails_the_next_flush(journal, monkeypatch):
    """Otherwise nobody would know that entries are lost which were accepted."""
    with journal.deferring():
        journal.append(fact_of("run_started", {}), run="run-0001", digest="0" * 64)
    monkeypatch.setattr(PendingSyncs, "finish", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        journal.append(fact_of("release_made", {}), run="run-0001")
    monkeypatch.undo()
    with pytest.raises(OSError, match="I/O error"):
        journal.flush()
    journal.flush()
    assert seen(journal) == []
    assert replay(journal, "run-0001").status == "requested"


def test_an_entry_that_cannot_be_written_leaves_those_before_it(journal):
    with journal.deferring():
        journal.append(fact_of("run_started", {}), run="run-0001", digest="0" * 64)
        with pytest.raises(StateError, match="not JSON"):
            journal.append(UpdateAccepted(samples=float("nan")), run="run-0001", round=1)
    journal.flush()
    assert seen(journal) == ["run_started"]


def test_syncs_are_done_together_and_files_before_their_names(tmp_path, monkeypatch):
    pending = PendingSyncs()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path_of(fd)))
    with syncs_into(pending):
        for name in ("a", "b"):
            with (tmp_path / name).open("wb") as file:
                sync(file.fileno())
            sync_folder(tmp_path)
    assert synced == []
    pending.finish()
    assert synced == [tmp_path / "a", tmp_path / "b", tmp_path]
    pending.finish()
    assert len(synced) == 3
    with without_syncs(), syncs_into(pending), (tmp_path / "c").open("wb") as file:
        sync(file.fileno())
    pending.finish()
    assert len(synced) == 3, "nothing waits for the disk in a simulation"

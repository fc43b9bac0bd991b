"""The journal in PostgreSQL at a real server: several writers, lost connections, restarts, foreign databases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import datetime, timezone

import pytest
from cut_line import CutLine
from postgres_server import PASSWORD

from coordinator.journal import postgres_connection
from coordinator.journal.entries import CoordinatorStarted, RunRequested, UpdateAccepted
from coordinator.journal.postgres import SCHEMA, PostgresJournal
from coordinator.journal.postgres_connection import Database, has_password
from coordinator.journal.sqlite import SqliteJournal
from edge_agent.core.errors import DuplicateCoordinator, JournalAway, StateError

AT = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def url(postgres):
    return postgres.database()


@pytest.fixture
def journal(url):
    with PostgresJournal(url) as opened:
        yield opened


def update(journal, agent):
    return journal.append(UpdateAccepted(samples=3), run="run-0001", round=1, agent=agent, digest="aa" * 32)


def test_the_chain_is_that_of_sqlite(tmp_path, url):
    with PostgresJournal(url, now=lambda: AT) as one, SqliteJournal(tmp_path / "j", now=lambda: AT) as other:
        for journal in (one, other):
            journal.append(RunRequested(method="fedavg"), run="run-0001")
            update(journal, "a")
        assert one.entries() == other.entries()


# --- several writers ---

APPEND_FORTY = """
import sys
from coordinator.journal.entries import RunRequested, UpdateAccepted
from coordinator.journal.postgres import PostgresJournal
with PostgresJournal(sys.argv[1]) as journal:
    for number in range(40):
        if number % 8 == 0:
            journal.request_run(RunRequested())
        else:
            journal.append(UpdateAccepted(), run="run-0001", round=1, agent=sys.argv[2], digest="aa" * 32)
"""


def test_two_processes_write_one_unbroken_chain_and_name_no_run_twice(url):
    """They begin on an empty database, whose tables are made once."""
    writers = [subprocess.Popen([sys.executable, "-c", APPEND_FORTY, url, name]) for name in ("service", "command")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    with PostgresJournal(url) as journal:
        assert journal.verify() == 80
        assert journal.runs() == [f"run-{number:04d}" for number in range(1, 11)]
        assert {entry.agent for entry in journal.entries(kinds=("update_accepted",))} == {"command", "service"}


def test_what_append_returned_survives_a_kill(url):
    """The child says a number only after append returned, then is killed: every said number is in the journal."""
    program = (
        "import sys; from coordinator.journal.postgres import PostgresJournal\n"
        "from coordinator.journal.entries import CoordinatorStarted\n"
        "with PostgresJournal(sys.argv[1]) as journal:\n"
        "    while True: print(journal.append(CoordinatorStarted()).id, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True) as child:
        said = [int(child.stdout.readline()) for _ in range(25)]
        os.kill(child.pid, signal.SIGKILL)
    with PostgresJournal(url) as journal:
        assert journal.verify() >= said[-1] == 25


def test_a_process_that_is_suspended_in_the_middle_of_a_write_is_ended_by_the_database(url, journal, monkeypatch):
    monkeypatch.setattr(postgres_connection, "IDLE_MS", 300)
    with PostgresJournal(url) as suspended:
        with suspended.deferring():
            update(suspended, "a")
        assert update(journal, "b").id == 1, "it waits until the other's transaction is ended"
        with pytest.raises(StateError):
            suspended.flush()
        assert [entry.agent for entry in suspended.entries()] == ["b"]


def test_a_start_of_another_coordinator_ends_this_one(url, journal):
    first = journal.append(CoordinatorStarted(epoch=1))
    journal.serve_from(first.id)
    update(journal, "a")
    with PostgresJournal(url) as other:
        other.append(CoordinatorStarted(epoch=2))
        for _ in range(2):
            with pytest.raises(DuplicateCoordinator, match="taken over this journal"):
                update(journal, "b")
        with journal.deferring(), pytest.raises(DuplicateCoordinator):
            update(journal, "c")
        assert not journal.is_ours
        assert [entry.agent for entry in other.entries(kinds=("update_accepted",))] == ["a"]


# --- lost connections ---


def test_a_restart_of_the_server_costs_a_pause(postgres, journal):
    update(journal, "a")
    for name in ("SIGINT", "SIGQUIT"):
        postgres.stop(name)
        starter = threading.Timer(0.5, postgres.start)
        starter.start()
        update(journal, name)
        starter.join()
        postgres.restart(name)
        assert journal.entries()[-1].agent == name
    assert [entry.agent for entry in journal.entries()] == ["a", "SIGINT", "SIGQUIT"]
    assert journal.verify() == 3


def test_no_connection_loses_what_it_has_committed_because_the_server_is_set_so(postgres, url):
    name = url.rpartition("/")[2].partition("?")[0]
    postgres.query(f"ALTER DATABASE {name} SET synchronous_commit = off", url=url)
    with PostgresJournal(url) as journal:
        for _ in range(2):
            [row] = journal._rows("SELECT current_setting('synchronous_commit') AS value")
            assert row["value"] == "on"
            postgres.restart()


def test_entries_of_a_process_that_was_suspended_are_lost_with_a_connection_that_is_made_again(url, monkeypatch):
    """The database has ended its transaction: that is no lack of rights, and costs no more than those entries."""
    monkeypatch.setattr(postgres_connection, "IDLE_MS", 200)
    with PostgresJournal(url) as journal, PostgresJournal(url) as other:
        with journal.deferring():
            update(journal, "a")
        update(other, "b")  # waits until the head is free: the transaction before was ended
        with pytest.raises(JournalAway, match="idle-in-transaction"):
            journal.flush()
        assert not journal.has_deferred
        assert update(journal, "c").id == 2
        assert [entry.agent for entry in journal.entries()] == ["b", "c"]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_writers_see_what_the_one_before_has_left_however_the_server_isolates_transactions(postgres, url, level):
    name = url.rpartition("/")[2].partition("?")[0]
    postgres.query(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'", url=url)
    writers = [subprocess.Popen([sys.executable, "-c", APPEND_FORTY, url, name]) for name in ("service", "command")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    with PostgresJournal(url) as journal:
        [row] = journal._rows("SELECT current_setting('transaction_isolation') AS value")
        assert row["value"] == "read committed"
        assert journal.verify() == 80


def test_deferred_entries_are_lost_together_with_their_connection_and_the_flush_says_so(postgres, journal):
    update(journal, "a")
    before = journal.losses
    with journal.deferring():
        update(journal, "b")
    postgres.restart()
    with pytest.raises(JournalAway, match="cannot be reached"):
        journal.flush()
    assert journal.losses > before
    assert not journal.has_deferred
    assert [entry.agent for entry in journal.entries()] == ["a"]
    assert update(journal, "c").id == 2


def test_a_commit_whose_answer_was_lost_is_made_once(postgres, url):
    name = url.rpartition("/")[2].partition("?")[0]
    with CutLine(postgres.port) as line, PostgresJournal(postgres.url(name, line.port)) as journal:
        update(journal, "a")
        line.last_words = b"COMMIT"
        entry = update(journal, "b")
        assert line.last_words == b"", "the answer was lost"
        assert journal.request_run(RunRequested()) == "run-0001"
        line.last_words = b"INSERT INTO headwater_entries"
        update(journal, "c")
        assert [one.agent for one in journal.entries()] == ["a", "b", None, "c"]
        assert journal.entries()[1] == entry
        assert journal.verify() == 4


def test_a_network_that_drops_packets_is_a_lost_connection(postgres, url, monkeypatch):
    monkeypatch.setattr(postgres_connection, "CONNECT_S", 2)
    name = url.rpartition("/")[2].partition("?")[0]
    real = Database.connect
    monkeypatch.setattr(Database, "connect", lambda self, session: real(self, session, answer_s=0.5))
    with (
        CutLine(postgres.port) as line,
        PostgresJournal(postgres.url(name, line.port), away_s=1.0) as journal,
    ):
        update(journal, "a")
        line.hold()
        with pytest.raises(JournalAway):
            update(journal, "b")
        line.heal()
        update(journal, "c")
        assert [one.agent for one in journal.entries()][-1] == "c"
        line.cut()
        with pytest.raises(JournalAway, match="cannot be reached"):
            journal.last_id()
        line.heal()
        assert journal.verify() == journal.last_id()


def test_a_server_that_is_away_and_a_wrong_password_are_named_without_the_password(postgres, tmp_path):
    wrong = tmp_path / "passfile"
    wrong.write_text("*:*:*:*:something-else\n")
    wrong.chmod(0o600)
    name = postgres.url("postgres").partition("?")[0]
    with pytest.raises(JournalAway, match="password authentication failed") as raised:
        PostgresJournal(f"{name}?passfile={wrong}", away_s=0.0).open()
    assert "something-else" not in str(raised.value)
    assert PASSWORD not in str(raised.value)
    assert raised.value.exit_code == 75
    with pytest.raises(JournalAway, match="passfile"):
        PostgresJournal(postgres.url("no-such-database"), away_s=0.0).open()
    with pytest.raises(JournalAway):
        PostgresJournal("postgresql://127.0.0.1:9/x", away_s=0.0).open()
    with pytest.raises(StateError, match="no_such_parameter"):
        PostgresJournal("postgresql://127.0.0.1/x?no_such_parameter=1").open()


@pytest.mark.parametrize(
    "url, is_one",
    [
        ("postgresql://a:word@host/x", True),
        ("postgresql://host/x?user=a&password=word", True),
        ("postgresql://a@one:5432,two:5433/x", False),
        ("postgresql:///x?host=/run/postgresql&passfile=/etc/p", False),
    ],
)
def test_a_password_in_a_url_is_seen_and_never_shown(url, is_one):
    assert has_password(url) == is_one
    assert "word" not in str(Database(url))


# --- foreign, damaged and other databases ---


def test_a_database_of_another_journal_is_refused(url, postgres):
    with PostgresJournal(url) as journal:
        journal_id = journal.id
    PostgresJournal(url, expected_id=journal_id).open().close()
    with pytest.raises(StateError, match="of another state folder"):
        PostgresJournal(url, expected_id="f" * 32).open()
    with PostgresJournal(postgres.database(), expected_id=journal_id) as journal:
        assert journal.id == journal_id, "a new one gets the id of its folder"


def test_other_versions_of_the_tables_are_refused(postgres, url):
    with pytest.raises(StateError, match="no journal here"):
        PostgresJournal(url).open(create=False)
    PostgresJournal(url).open().close()
    postgres.query("UPDATE headwater_journal SET schema = %s", [SCHEMA + 1], url=url)
    with pytest.raises(StateError, match=f"version {SCHEMA + 1}, this program writes version {SCHEMA}"):
        PostgresJournal(url).open()


def test_a_journal_that_was_begun_and_is_empty_is_a_lost_one(url):
    with pytest.raises(StateError, match="all of its entries are lost"):
        PostgresJournal(url).open(is_begun=True)


def test_a_database_that_cannot_keep_every_language_is_refused(postgres):
    with pytest.raises(StateError, match="text as LATIN1, expected UTF8"):
        PostgresJournal(postgres.database("LATIN1")).open()


def test_a_role_without_rights_is_told_which_it_needs(postgres, url):
    postgres.query("CREATE ROLE reader LOGIN PASSWORD 'word'", url=url)
    passfile = postgres.folder / "readers"
    passfile.write_text("*:*:*:*:word\n")
    passfile.chmod(0o600)
    other = url.replace("headwater@", "reader@").partition("?")[0] + f"?passfile={passfile}"
    with pytest.raises(StateError, match=r"permission denied .* rights to create"):
        PostgresJournal(other).open()


@pytest.mark.parametrize(
    "change, said",
    [
        ("UPDATE headwater_entries SET body = '{}' WHERE id = 2", "entry 2 breaks the chain"),
        ("DELETE FROM headwater_entries WHERE id = 2", "entry 2 breaks the chain"),
        ("DELETE FROM headwater_entries WHERE id = 3", "1 newest entries are missing"),
        ("UPDATE headwater_journal SET last_hash = repeat('0', 64)", "not that of the head"),
        ("UPDATE headwater_journal SET last_id = 2", "entry 3 breaks the chain: by its head"),
    ],
)
def test_what_was_changed_by_hand_is_found(postgres, url, journal, change, said):
    for agent in "abc":
        update(journal, agent)
    assert journal.verify() == 3
    postgres.query(change, url=url)
    with pytest.raises(StateError, match=said):
        journal.verify()
    with PostgresJournal(url) as reader, pytest.raises(StateError, match=said):
        reader.verify_new()


def test_a_journal_of_sqlite_is_carried_over_with_its_chain(tmp_path, journal):
    with SqliteJournal(tmp_path / "journal.db") as before:
        before.append(CoordinatorStarted(epoch=1, boot="b" * 16))
        for agent in ("a", "b", "a\N{GREEK SMALL LETTER ALPHA}"):
            update(before, agent)
        assert journal.fill(before.rows()) == 4
        assert journal.entries() == before.entries()
    assert journal.verify() == 4
    assert update(journal, "c").id == 5
    with pytest.raises(StateError, match="entries already"):
        journal.fill([])


@pytest.mark.parametrize("lost_before", ["COMMIT", "SELECT last_id, last_hash, (SELECT max"])
def test_a_connection_that_is_lost_while_a_journal_is_carried_over_is_told(tmp_path, postgres, url, lost_before):
    """Another attempt would have had no rows left, and called an empty journal the whole one."""
    name = url.rpartition("/")[2].partition("?")[0]
    with (
        CutLine(postgres.port) as line,
        PostgresJournal(postgres.url(name, line.port)) as journal,
        SqliteJournal(tmp_path / "journal.db") as before,
    ):
        for agent in "abc":
            update(before, agent)
        line.last_words = lost_before.encode()
        with pytest.raises(JournalAway):
            journal.fill(before.rows())
        assert line.last_words == b"", "nothing was lost"
        if not journal.last_id():
            assert journal.fill(before.rows()) == 3
        assert journal.entries() == before.entries()


def test_a_broken_chain_is_not_carried_over(tmp_path, journal):
    with SqliteJournal(tmp_path / "journal.db") as before:
        for agent in "ab":
            update(before, agent)
        rows = list(before.rows())
    with pytest.raises(StateError, match="entry 2 breaks the chain"):
        journal.fill([rows[0], {**rows[1], "agent": "x"}])
    assert journal.last_id() == 0

"""The lease of a journal in PostgreSQL: one holder at a time, which the database knows, and a number that fences."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from itertools import pairwise

import pytest
from cut_line import CutLine

from coordinator.journal import postgres as store
from coordinator.journal import postgres_lease
from coordinator.journal.entries import CoordinatorStarted, RunRequested, UpdateAccepted
from coordinator.journal.postgres import MIGRATIONS, PostgresJournal
from coordinator.journal.postgres_standbys import SHOWN_S
from coordinator.journal.store import LEASE_S, LeaseState, ServingOrder
from coordinator.service.standby import wait_for_lease
from coordinator.state.journal_location import use_database
from coordinator.state.starts import check_name, record_start
from coordinator.state.store import StateFolder
from edge_agent.core.errors import DuplicateCoordinator, JournalAway, StateError, UsageError
from edge_agent.core.locks import lock_holder


@pytest.fixture
def url(postgres):
    return postgres.database()


@pytest.fixture
def short(monkeypatch):
    """Leases of half a second."""
    monkeypatch.setattr(store, "LEASE_S", 0.5)
    monkeypatch.setattr(postgres_lease, "LEASE_S", 0.5)
    monkeypatch.setattr(postgres_lease, "RENEW_S", 0.1)
    newest = postgres_lease._NEWEST.replace(f"{LEASE_S} seconds", "0.5 seconds")
    assert newest != postgres_lease._NEWEST
    monkeypatch.setattr(postgres_lease, "_NEWEST", newest)


@contextlib.contextmanager
def holding(url, folder, owner="headwater serve", **options):
    journal = PostgresJournal(url, **options)
    with journal.hold(folder, owner, lambda: False):
        yield journal


def update(journal, agent="a"):
    return journal.append(UpdateAccepted(samples=3), run="run-0001", round=1, agent=agent, digest="aa" * 32)


def suspend(journal):
    """Have the thread that renews stand still, as it does in a process that is suspended."""
    lease = journal._lease
    lease._stop.set()
    lease._thread.join()
    lease._stop.clear()


def test_a_second_coordinator_does_not_start_beside_one_that_renews(url, tmp_path, short):
    with holding(url, tmp_path, "the first"):
        refused = pytest.raises(DuplicateCoordinator, match=r"serves already: the first \(host .*--standby")
        with refused, holding(url, tmp_path, "the second"):
            pass
        with PostgresJournal(url) as command:
            assert command.request_run(RunRequested()) == "run-0001", "commands need no lease"
    with holding(url, tmp_path, "the second") as journal:
        lease = journal.read_lease()
        assert (lease.fence, lease.is_free, lease.has_expired) == (2, False, False)
        assert lease.holder.startswith("the second (host ")
    with PostgresJournal(url) as command:
        assert command.read_lease().is_free


def test_one_that_was_suspended_writes_nothing_after_another_has_taken_over(url, tmp_path, short):
    with holding(url, tmp_path) as former:
        first = former.append(CoordinatorStarted(epoch=1))
        former.serve_from(first.id)
        with former.deferring():
            update(former, "deferred")
        suspend(former)
        # It holds the lock of the head within its transaction, and the lock of the folder: neither keeps the other out.
        with holding(url, tmp_path, "the second") as journal:
            assert update(journal, "b").id == 2
            assert lock_holder(tmp_path).name.startswith("the second")
            with pytest.raises(DuplicateCoordinator, match="has taken over this journal"):
                update(former, "late")
            with pytest.raises(DuplicateCoordinator):
                former.check_ours()
            assert not former.is_ours
            with pytest.raises(StateError):
                former.flush()
        with PostgresJournal(url) as reader:
            assert [entry.agent for entry in reader.entries()] == [None, "b"]
            assert reader.verify() == 2


def test_the_append_itself_compares_the_number_of_the_lease(url, tmp_path, short, postgres):
    """Where this side is certain of its lease, as one is whose process stood still just before the append."""
    with holding(url, tmp_path) as former:
        update(former)
        postgres.query("UPDATE headwater_journal SET fence = 7", url=url)
        assert former.is_ours
        with former.deferring(), pytest.raises(DuplicateCoordinator, match="it has lease 7, this one had 1"):
            update(former)
        former._successor = None
        with pytest.raises(DuplicateCoordinator, match="it has lease 7, this one had 1"):
            update(former)
        with pytest.raises(DuplicateCoordinator):
            former.request_run(RunRequested())
        assert former.last_id() == 1


def test_a_lease_survives_a_restart_of_the_database_and_is_confirmed_before_anything_is_written(
    url, tmp_path, short, postgres
):
    with holding(url, tmp_path) as journal:
        update(journal)
        suspend(journal)
        postgres.restart()
        threading.Event().wait(0.6)
        assert not journal.is_ours, "it is not known"
        journal.check_ours()
        assert journal.is_ours
        assert update(journal).id == 2
        assert journal.read_lease().fence == 1


def test_while_the_database_is_away_an_uncertain_lease_lets_nothing_pass(url, tmp_path, short, postgres):
    name = url.rpartition("/")[2].partition("?")[0]
    with CutLine(postgres.port) as line, holding(postgres.url(name, line.port), tmp_path, away_s=0.5) as journal:
        update(journal)
        line.cut()
        threading.Event().wait(0.6)
        with pytest.raises(JournalAway):
            journal.check_ours()
        line.heal()
        journal.check_ours()
        assert update(journal).id == 2


def test_a_lease_that_is_renewed_in_the_midst_of_a_takeover_stays(url, tmp_path, short):
    with holding(url, tmp_path) as former:
        suspend(former)
        threading.Event().wait(0.6)
        with PostgresJournal(url) as other:
            assert other.read_lease().has_expired

            def renew_first(connection):
                assert former._lease.confirm(1.0)
                return store._lock_head(connection)

            with pytest.raises(DuplicateCoordinator, match="serves already"):
                postgres_lease.take_lease(other._connected(), other._session, "other", renew_first)
            assert other.read_lease().fence == 1
        assert update(former).id == 1


def test_tables_of_the_version_before_are_brought_up_to_date_by_a_coordinator(url, tmp_path, postgres, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.journal.postgres.MIGRATIONS", MIGRATIONS[:1])
        patch.setattr("coordinator.journal.postgres.SCHEMA", 1)
        PostgresJournal(url).open().close()
    with pytest.raises(StateError, match="version 1, this program reads version 3; start the coordinator"):
        PostgresJournal(url).open(create=False)
    with holding(url, tmp_path) as journal:
        update(journal)
    assert postgres.query("SELECT schema, last_id, fence FROM headwater_journal", url=url) == [(3, 1, 1)]


# --- a standby that waits ---


class Leases:
    """A journal whose lease is what a script says, one answer for each look; a number is a database that is away."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.is_open = False
        self.clock = 0.0
        self.verified_at = []
        self.noted_at = []

    def open(self):
        self.is_open = True

    def close(self):
        self.is_open = False

    def verify_new(self):
        self.verified_at.append(self.clock)

    def entries(self, kinds):
        assert kinds == ("coordinator_started",)
        return []

    def note_standby(self):
        self.noted_at.append(self.clock)

    def read_lease(self):
        answer = self.answers.pop(0)
        if answer is None:
            raise JournalAway("away")
        return answer

    def wait(self, stop=None):
        def pause(seconds):
            self.clock += seconds

        return wait_for_lease(self, "home", stop or threading.Event(), clock=lambda: self.clock, pause=pause)


def lease(renewed_at, *, has_expired=False, is_free=False):
    return LeaseState(3, "the first", is_free=is_free, has_expired=has_expired, renewed_at=str(renewed_at))


def test_a_standby_takes_a_lease_that_was_given_back_at_once():
    leases = Leases(lease(1), lease(1, is_free=True))
    assert leases.wait()
    assert leases.clock == pytest.approx(0.2)


def test_a_standby_waits_while_a_lease_is_renewed_and_takes_one_that_has_expired():
    renewed = [lease(number) for number in range(50)]
    silent = [lease("last", has_expired=number > 14) for number in range(40)]
    leases = Leases(*renewed, *silent)
    assert leases.wait()
    assert leases.clock == pytest.approx(50 * 0.2 + LEASE_S, abs=0.3)
    assert leases.verified_at == pytest.approx([0.0, 10.0], abs=0.3)
    assert all(later - earlier == pytest.approx(1.1, abs=0.15) for earlier, later in pairwise(leases.noted_at))
    assert leases.clock - leases.noted_at[-1] <= 1.2


def test_after_a_restart_of_the_database_its_holder_gets_the_time_to_renew():
    """The lease has expired while the database was away; the standby saw nothing of it."""
    expired = [lease("last", has_expired=True)]
    leases = Leases(lease("last"), *[None] * 20, *expired * 5, *[lease(number) for number in range(5)], *expired * 30)
    assert leases.wait()
    assert leases.clock > 20 * 0.5 + 10 * 0.2 + LEASE_S - 0.01


def test_a_standby_verifies_what_was_added_and_a_takeover_the_rest(url, tmp_path, postgres):
    watching = PostgresJournal(url)
    with PostgresJournal(url) as journal:
        for _ in range(3):
            update(journal)
        with watching:
            assert watching.verify_new() == 3
        # What was verified is not read again, and what was added is.
        postgres.query("UPDATE headwater_entries SET agent = 'x' WHERE id = 2", url=url)
        update(journal)
        with StateFolder(tmp_path, watching).open("headwater serve") as state:
            assert state.journal.verify_new() == 4
            with pytest.raises(StateError, match="entry 2 breaks the chain"):
                state.journal.verify()
        update(journal)
        postgres.query("UPDATE headwater_entries SET agent = 'x' WHERE id = 5", url=url)
        with pytest.raises(StateError, match="entry 5"), StateFolder(tmp_path, watching).open("headwater serve"):
            pass


# --- who is named in the status ---


def test_the_database_knows_who_serves_and_who_would_take_over(url, tmp_path, short, postgres):
    me = f"host {socket.gethostname()}, process {os.getpid()}"
    with PostgresJournal(url) as reader, PostgresJournal(url) as waiting:
        assert reader.read_order() == ServingOrder(reader.read_lease())
        assert reader.read_order().serving == ""
        waiting.note_standby()
        waiting.note_standby()
        assert reader.read_order().standbys == (me,)
        with holding(url, tmp_path, "the first") as first:
            order = reader.read_order()
            assert order.serving == f"the first ({me})"
            assert order.lease.fence == 1
            assert f"the first ({me}) serves; stands by: {me}" in reader.examine().description
            # The holder has waited before: it stands by no more.
            first.note_standby()
            assert reader.read_order().standbys == (me,)
        # One that has not said for some seconds that it waits has ended, or is suspended.
        before = "UPDATE headwater_standbys SET seen_at = seen_at - interval '{} seconds'"
        postgres.query(before.format(SHOWN_S + 1), url=url)
        assert reader.read_order().standbys == ()
        waiting.note_standby()
        assert len(postgres.query("SELECT session FROM headwater_standbys", url=url)) == 1
        assert reader.read_order().serving == ""


def test_the_status_names_lease_and_standbys(url, tmp_path, short, call):
    use_database(tmp_path / "state", url)

    def status(*options):
        code, out, _ = call("status", "--state", tmp_path / "state", *options)
        assert code == 0
        return out

    with PostgresJournal(url) as waiting:
        with StateFolder(tmp_path / "state", PostgresJournal(url)).open("headwater serve"):
            assert re.search(r"^lease: 1, of headwater serve \(host .*, process \d+\)$", status(), re.MULTILINE)
            assert re.search(r"^standby: none; 'headwater serve --standby' starts one", status(), re.MULTILINE)
            waiting.note_standby()
            assert re.search(r"^standby: host .*, process \d+$", status(), re.MULTILINE)
            content = json.loads(status("--json"))
            assert content["lease"]["number"] == 1
            assert content["lease"]["holder"].startswith("headwater serve (host ")
            assert len(content["standby"]) == 1
        text = status()
        assert re.search(r"^lease: 1 was given back by headwater serve .*; nobody serves$", text, re.MULTILINE)
        assert "'headwater serve' starts it" not in text, "the standby does"


def test_a_standby_of_another_federation_is_refused_before_it_waits(url):
    with PostgresJournal(url) as journal:
        record_start(journal, version="x", boot="b", name="home")
        check_name(journal, "hone")  # nothing has happened yet, and a mistake may be corrected
        update(journal)
    watching = PostgresJournal(url)
    with pytest.raises(UsageError, match=r"journal of federation 'home', and the configuration names 'hone'"):
        wait_for_lease(watching, "hone", threading.Event())
    assert not watching.is_open
    with PostgresJournal(url) as journal:
        assert wait_for_lease(watching, "home", threading.Event()), "nobody has the lease"
        # The first versions wrote no name.
        record_start(journal, version="x", boot="b")
        check_name(journal, "hone")


def test_a_standby_stops_when_it_is_asked_to():
    stop = threading.Event()
    stop.set()
    assert not Leases().wait(stop)

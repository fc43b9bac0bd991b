"""A standby takes over from a coordinator that is offline or suspended; the run ends in the same bits."""

from __future__ import annotations

import contextlib
import shutil
import threading

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation, undisturbed_hash, vanish

from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.service.coordinator import Coordinator
from coordinator.service.listening import REFUSAL_S
from coordinator.service.standby import QUIET_S, TAKEOVER_S, Standby, wait_for_folder
from coordinator.service.surroundings import Runtime, StartOptions
from coordinator.state import backup as backups
from coordinator.state import store
from coordinator.state.backup import back_up
from coordinator.state.starts import record_start
from coordinator.state.store import StateFolder
from edge_agent.core.errors import DuplicateCoordinator, StateError, UsageError
from edge_agent.core.locks import folder_lock, lock_holder, remove_lock
from edge_agent.wire.messages import down

ROUNDS = 4


@contextlib.contextmanager
def fleet(folder):
    """Agents that train for seconds, so that the clock can stop within rounds."""
    with Federation(folder, agents=(), task=WIDE_TASK, cohort={"min_agents": 3}, probe_s=3.0) as fed:
        for name, seconds in (("a0", 2), ("a1", 3), ("a2", 4)):
            fed.add(name, seconds=seconds)
        yield fed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_hash(fleet, tmp_path_factory.mktemp("undisturbed"), ROUNDS)


class Beside:
    """A standby process beside a federation: it is stepped with everybody, and becomes a coordinator when it may."""

    def __init__(self, fed, folder, boot="r1"):
        self.fed = fed
        self.folder = folder
        self.boot = boot
        self.transport = fed.broker.transport()
        self.standby = Standby("home", folder, self.transport, clock=fed.clock, boot=boot)
        self.transport.subscribe(fed.topics.coordinators)
        self.transport.start()
        self.took_over_at = None
        self._federation_step = fed.step
        fed.step = self.step

    def step(self):
        busy = self._federation_step()
        if self.took_over_at is not None:
            return busy
        before = self.transport.traffic.messages_down
        if self.standby.step(0):
            self.took_over_at = self.fed.clock.now
            self.transport.close()
            self.serve()
        return busy or self.transport.traffic.messages_down > before

    def serve(self):
        """The federation's coordinator is this process now; the one before is left as it stands."""
        fed = self.fed
        self.before = self.fed.coordinator
        self.before_opened = self.fed._opened
        fed.config = fed.config.model_copy(update={"state": self.folder})
        fed.start_coordinator(takeover=self.standby.replaced)


def started(fed):
    fed.until(lambda: len(fed.coordinator.roster.present()) == 3)
    fed.request(rounds=ROUNDS)
    fed.run_id  # noqa: B018 - known before the journal is closed


def in_round(fed, number):
    fed.until(lambda: any(entry.round == number for entry in fed.entries("round_opened")))


def agents_follow(fed):
    return {agent.membership.epoch for agent in fed.agents.values()}


def test_a_standby_waits_as_long_as_the_coordinator_answers_and_the_status_names_it(tmp_path, undisturbed):
    with fleet(tmp_path) as fed:
        started(fed)
        standby_process = Beside(fed, fed.config.state)
        fed.finish()
        fed.wait(10 * TAKEOVER_S)
        assert standby_process.took_over_at is None
        assert fed.encoder_sha256 == undisturbed
        assert "epoch 1" in standby_process.standby.serving
        (noted,) = fed.coordinator.status()["standby"]
        assert "heard" in noted
        assert fed.coordinator.status()["other_coordinator"] is None, "it is no rival"


@pytest.mark.parametrize("number", [1, 2, 4])
def test_after_kill_9_it_takes_over_at_once_where_the_lock_is_free(tmp_path, undisturbed, number):
    with fleet(tmp_path) as fed:
        started(fed)
        standby_process = Beside(fed, fed.config.state)
        in_round(fed, number)
        fed.kill_coordinator()
        killed_at = fed.clock.now
        fed.until(lambda: standby_process.took_over_at)
        assert QUIET_S - 2.5 <= standby_process.took_over_at - killed_at <= QUIET_S + 2.5
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert fed.coordinator.commands.epoch == 2
        assert agents_follow(fed) == {2}


def test_one_that_was_suspended_ends_and_writes_nothing_when_it_wakes(tmp_path, undisturbed):
    """The lock is still held; its process knows nothing of the other one, and has updates to write."""
    with fleet(tmp_path) as fed:
        started(fed)
        standby_process = Beside(fed, fed.config.state)
        in_round(fed, 2)
        suspended = fed.coordinator
        fed.coordinator = None
        suspended_at = fed.clock.now
        entries = suspended.state.journal.last_id()
        fed.until(lambda: standby_process.took_over_at)
        assert TAKEOVER_S - 2.5 <= standby_process.took_over_at - suspended_at <= TAKEOVER_S + 2.5
        fed.until(lambda: fed.record.round >= 2)
        with pytest.raises(DuplicateCoordinator, match="has taken over this state folder") as raised:
            for _ in range(1000):  # what the agents have sent to it meanwhile
                suspended.step(0)
        assert raised.value.exit_code == 2
        written = fed.state.journal.entries(after=entries)
        assert [entry.body.get("epoch") for entry in written if entry.kind == "coordinator_started"] == [2]
        assert "run_failed" not in {entry.kind for entry in written}
        suspended.close()
        standby_process.before_opened.close()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        with StateFolder(fed.config.state).look() as state:
            state.journal.verify()


def test_nothing_is_taken_over_while_the_broker_is_away(tmp_path):
    """Neither from a coordinator that the standby does not hear, nor from one that is lost meanwhile."""
    with fleet(tmp_path) as fed:
        started(fed)
        fed.finish()
        standby_process = Beside(fed, fed.config.state)
        fed.wait(5)
        filters = list(standby_process.transport._filters)
        vanish(standby_process.transport)
        fed.wait(10 * TAKEOVER_S)
        assert standby_process.took_over_at is None, "its own queries did not come back"
        standby_process.transport._filters = filters
        standby_process.transport.start()
        fed.wait(2 * TAKEOVER_S)
        assert standby_process.took_over_at is None


@pytest.fixture
def replicated(tmp_path):
    """A federation in round 3, with a standby on a backup of round 2; the state folder is lost with its machine."""
    with fleet(tmp_path) as fed:
        started(fed)
        in_round(fed, 2)
        back_up(fed.state, tmp_path / "replica")
        standby_process = Beside(fed, tmp_path / "replica")
        fed.wait(5)
        in_round(fed, 3)
        yield fed, standby_process


def test_a_replica_resumes_the_run_with_the_same_bits(replicated, tmp_path, undisturbed):
    fed, standby_process = replicated
    shutil.copytree(fed.config.state, tmp_path / "found again")
    fed.kill_coordinator()
    lost_at = fed.clock.now  # the free lock of a copy says nothing
    fed.until(lambda: standby_process.took_over_at)
    assert TAKEOVER_S - 2.5 <= standby_process.took_over_at - lost_at <= TAKEOVER_S + 2.5, (
        "a free lock of a copy says nothing"
    )
    fed.finish()
    assert fed.encoder_sha256 == undisturbed
    assert fed.coordinator.commands.epoch == 1000
    assert agents_follow(fed) == {1000}
    with StateFolder(tmp_path / "found again").open("the machine is back") as state:
        back = Coordinator(
            fed.config,
            state,
            fed.broker.transport(),
            runtime=Runtime(clock=fed.clock),
            start=StartOptions(boot="zz", probe_s=3.0),
        )
        back.start()
        with pytest.raises(DuplicateCoordinator, match="and it has taken over, so this one stops") as raised:
            fed.until(lambda: back.step(0) and False, limit_s=5)
        assert "epoch 2" in str(raised.value)
        assert back.is_serving is False, "no agent has heard of it"
        with pytest.raises(UsageError, match="continued since"):
            back_up(state, tmp_path / "replica")
    assert agents_follow(fed) == {1000}


def test_two_replicas_do_not_serve_both(replicated, tmp_path):
    fed, first = replicated
    back_up(fed.state, tmp_path / "second")
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(StateFolder(tmp_path / "second").open("another standby"))
        fed.kill_coordinator()
        second = Coordinator(
            fed.config,
            state,
            fed.broker.transport(),
            runtime=Runtime(clock=fed.clock),
            start=StartOptions(boot="a0", probe_s=3.0),
        )
        fed.until(lambda: first.took_over_at)
        second.start()
        with pytest.raises(DuplicateCoordinator):
            fed.until(lambda: second.step(0) and False, limit_s=60)
        assert second.is_serving is False
    fed.finish()
    assert fed.record.status == "finished"


def test_folders_that_are_not_those_of_the_coordinator_are_refused(tmp_path):
    with fleet(tmp_path) as fed:
        started(fed)
        in_round(fed, 2)
        shutil.copytree(fed.config.state, tmp_path / "copied by hand")
        with StateFolder(tmp_path / "other").open("another federation") as other:
            other.journal.append(fact_of("coordinator_started", {"federation": "f" * 32}))
        with pytest.raises(StateError, match="no journal here"):
            Standby("home", tmp_path / "nothing", fed.broker.transport())
        for folder, why in (("copied by hand", "nobody holds .*, which is no copy"), ("other", "fffffffff")):
            standby_process = Beside(fed, tmp_path / folder)
            with pytest.raises(UsageError, match=why):
                fed.wait(20)
            fed.step = standby_process._federation_step


class Refused(Beside):
    """A standby whose broker refuses its subscription at first; it is asked again by hand, as the transport does."""

    def __init__(self, fed, folder):
        super().__init__(fed, folder)
        self.transport.unsubscribe(fed.topics.coordinators)
        # The confirmation of the subscription that was made is followed by a refusal.
        self.transport.subscribe("something/else")


def test_a_standby_that_may_not_listen_says_which_right_is_missing(tmp_path):
    with fleet(tmp_path) as fed:
        started(fed)
        standby_process = Refused(fed, fed.config.state)
        fed.wait(REFUSAL_S - 1)
        assert standby_process.took_over_at is None
        with pytest.raises(UsageError, match="has not let this process subscribe to fl/1/home/co for 120 s"):
            fed.wait(2)
        fed.step = standby_process._federation_step


def test_a_standby_waits_while_a_broker_elects_leaders_and_then_does_its_duty(tmp_path, undisturbed):
    """While the subscription is refused, the coordinator dies: that is not noticed, and nothing is taken over."""
    with fleet(tmp_path) as fed:
        started(fed)
        standby_process = Refused(fed, fed.config.state)
        in_round(fed, 2)
        fed.kill_coordinator()
        fed.wait(REFUSAL_S / 2)
        assert standby_process.took_over_at is None
        standby_process.transport.subscribe(fed.topics.coordinators)
        granted_at = fed.clock.now
        fed.until(lambda: standby_process.took_over_at)
        assert QUIET_S - 2.5 <= standby_process.took_over_at - granted_at <= QUIET_S + 2.5
        fed.finish()
        assert fed.encoder_sha256 == undisturbed


def test_a_standby_stops_when_it_is_asked_to(tmp_path):
    with fleet(tmp_path) as fed:
        stop = threading.Event()
        stop.set()
        assert Standby("home", fed.config.state, fed.broker.transport(), clock=fed.clock).wait(stop) is False


def test_with_a_broker_that_ends_with_the_coordinator_a_free_lock_is_the_sign(tmp_path):
    """Held, free for 8 s (a restart), held again, then free: taken over 10 s after that."""
    with StateFolder(tmp_path).open("serve"):
        pass
    now = 0.0
    held = {"lock": folder_lock(tmp_path, "headwater serve")}
    held["lock"].__enter__()

    def wait(seconds):
        nonlocal now
        now += seconds
        if now in {20.0, 40.0}:
            held.pop("lock").__exit__(None, None, None)
        if now == 28.0:
            held["lock"] = folder_lock(tmp_path, "headwater serve")
            held["lock"].__enter__()

    assert wait_for_folder(tmp_path, threading.Event(), clock=lambda: now, pause=wait)
    assert 50.0 <= now <= 51.0


def test_a_standby_of_a_folder_without_a_journal_is_refused_and_one_that_is_asked_to_stop_stops(tmp_path):
    stop = threading.Event()
    with pytest.raises(StateError):
        wait_for_folder(tmp_path / "none", stop)
    with StateFolder(tmp_path).open("serve"):
        stop.set()
        assert not wait_for_folder(tmp_path, stop)


def test_a_folder_on_another_machine_is_refused_where_it_is_no_copy(tmp_path, monkeypatch):
    """SQLite's log needs memory that both processes share."""
    with fleet(tmp_path) as fed:
        started(fed)
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        Beside(fed, fed.config.state)
        with pytest.raises(UsageError, match="two machines cannot work on one folder: make a copy"):
            fed.wait(20)


def test_announcements_and_answers_to_others_are_no_signs_of_life(tmp_path):
    """Anybody with the coordinator's rights could otherwise keep a standby from ever taking over."""
    with fleet(tmp_path) as fed:
        started(fed)
        standby = Beside(fed, fed.config.state)
        fed.wait(5)
        forged = fed.order(down.Present(host="x", process=1, serving_s=99.0, answers="c9"))
        fed.kill_coordinator()
        fed.until(lambda: fed.broker.route(fed.topics.coordinators, forged) or standby.took_over_at, limit_s=20)


def test_a_foreign_coordinator_that_answers_once_or_twice_does_not_end_a_standby(tmp_path):
    with fleet(tmp_path) as fed:
        started(fed)
        standby = Beside(fed, fed.config.state)
        fed.wait(5)
        foreign = fed.order(down.Present(host="x", process=1, answers="r1"), federation="f" * 32)
        for _ in range(5):
            for _ in range(2):
                fed.broker.route(fed.topics.coordinators, foreign)
            fed.wait(5)
        assert standby.took_over_at is None


def test_one_that_is_suspended_in_the_middle_of_a_write_is_named_and_replaced_when_it_has_ended(tmp_path, caplog):
    with fleet(tmp_path) as fed:
        started(fed)
        standby = Beside(fed, fed.config.state)
        fed.wait(5)
        suspended = fed.coordinator
        fed.coordinator = None
        with suspended.state.journal.deferring():
            suspended.state.journal.append(fact_of("update_refused", {}), run=fed.run)
        fed.wait(3 * TAKEOVER_S)
        assert standby.took_over_at is None
        assert "is in the middle of a write; end that process ('kill -9')" in caplog.text
        assert caplog.text.count("takeover_waits") <= 3, "said once"
        suspended.state.journal.close()
        fed._opened.close()
        fed.until(lambda: standby.took_over_at, limit_s=20)


def test_a_lock_that_was_removed_ends_its_holder_and_is_not_taken_for_held(tmp_path):
    with folder_lock(tmp_path, "first") as held:
        holder = lock_holder(tmp_path)
        assert held.is_held()
        assert remove_lock(tmp_path, holder)
        assert not held.is_held()
        with folder_lock(tmp_path, "second") as other:
            assert other.is_held()
            assert not held.is_held()
            assert not remove_lock(tmp_path, holder), "it is another process that holds it now"
    with fleet(tmp_path / "fed") as fed:
        started(fed)
        remove_lock(fed.config.state, lock_holder(fed.config.state))
        with pytest.raises(DuplicateCoordinator, match="another process has taken over"):
            fed.wait(5)


def test_a_start_that_took_longer_than_the_standby_waits_does_not_begin(tmp_path):
    with fleet(tmp_path) as fed:
        fed.kill_coordinator()
        with StateFolder(fed.config.state).open("slow") as state:
            remove_lock(fed.config.state, lock_holder(fed.config.state))
            slow = Coordinator(
                fed.config,
                state,
                fed.broker.transport(),
                runtime=Runtime(clock=fed.clock),
                start=StartOptions(boot="s1"),
            )
            with pytest.raises(DuplicateCoordinator):
                slow.start()


def test_one_that_wakes_removes_no_blob_of_its_successor(tmp_path, monkeypatch):
    """Suspended between the list of what is needed and the removal of the rest."""
    with fleet(tmp_path) as fed:
        started(fed)
        in_round(fed, 2)
        first = fed.state
        real = store.blobs_needed

        def suspended(state):
            needed = real(state)
            first.journal._is_held = lambda: True
            with SqliteJournal(first.journal.path) as journal:
                record_start(journal, version="x", boot="b")
                made.append(state.blobs.put(b"a checkpoint of the successor"))
            return needed - {checkpoint}

        made = []
        checkpoint = fed.record.checkpoint
        monkeypatch.setattr(store, "blobs_needed", suspended)
        with pytest.raises(DuplicateCoordinator):
            store.prune_blobs(first)
        assert made[0] in first.blobs
        assert checkpoint in first.blobs


def test_a_backup_does_not_overwrite_a_copy_that_was_taken_over_while_it_was_being_made(tmp_path, monkeypatch):
    with fleet(tmp_path) as fed:
        started(fed)
        in_round(fed, 2)
        replica = tmp_path / "replica"
        back_up(fed.state, replica)
        real = backups._pin

        def suspended(state, pinned):
            real(state, pinned)
            with StateFolder(replica).open("a standby") as copy:
                record_start(copy.journal, version="x", boot="r", is_copy=True)

        monkeypatch.setattr(backups, "_pin", suspended)
        with pytest.raises(UsageError, match="continued since"):
            back_up(fed.state, replica)
        with StateFolder(replica).look() as copy:
            assert copy.journal.entries(kinds=("coordinator_started",))[-1].body["epoch"] == 1000

"""A standby takes over from a coordinator that is lost, suspended or cut off; the run ends in the same bits."""

from __future__ import annotations

import contextlib
import shutil
import threading

import pytest
from federation_duties import WIDE_TASK
from federation_harness import Federation, undisturbed_hash, vanish

from coordinator.service.coordinator import Coordinator
from coordinator.service.standby import QUIET_S, TAKEOVER_S, Standby
from coordinator.state.backup import back_up
from coordinator.state.store import StateFolder
from edge_agent.errors import DuplicateCoordinator, StateError, UsageError

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


class Reserve:
    """A standby process beside a federation: it is stepped with everybody, and becomes a coordinator when it may."""

    def __init__(self, fed, folder, boot="r1"):
        self.fed, self.folder, self.boot = fed, folder, boot
        self.transport = fed.broker.transport()
        self.standby = Standby("home", folder, self.transport, clock=fed.clock, boot=boot)
        self.transport.subscribe(fed.topics.coordinators)
        self.transport.start()
        self.took_over_at = None
        self._federation_step, fed.step = fed.step, self.step

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
        fed, self.before, self.before_opened = self.fed, self.fed.coordinator, self.fed._opened
        fed.config = fed.config.model_copy(update={"state": self.folder})
        fed.start_coordinator()


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
        reserve = Reserve(fed, fed.config.state)
        fed.finish()
        fed.wait(10 * TAKEOVER_S)
        assert reserve.took_over_at is None
        assert fed.encoder_sha256 == undisturbed
        assert "epoch 1" in reserve.standby.serving
        (noted,) = fed.coordinator.status()["standby"]
        assert "heard" in noted
        assert fed.coordinator.status()["other_coordinator"] is None, "it is no rival"


@pytest.mark.parametrize("number", [1, 2, 4])
def test_after_kill_9_it_takes_over_at_once_where_the_lock_is_free(tmp_path, undisturbed, number):
    with fleet(tmp_path) as fed:
        started(fed)
        reserve = Reserve(fed, fed.config.state)
        in_round(fed, number)
        fed.kill_coordinator()
        killed_at = fed.clock.now
        fed.until(lambda: reserve.took_over_at)
        assert QUIET_S - 2.5 <= reserve.took_over_at - killed_at <= QUIET_S + 2.5
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        assert fed.coordinator.commands.epoch == 2
        assert agents_follow(fed) == {2}


def test_one_that_was_suspended_ends_and_writes_nothing_when_it_wakes(tmp_path, undisturbed):
    """The lock is still held; its process knows nothing of the other one, and has updates to write."""
    with fleet(tmp_path) as fed:
        started(fed)
        reserve = Reserve(fed, fed.config.state)
        in_round(fed, 2)
        asleep, fed.coordinator = fed.coordinator, None
        fallen_asleep_at, entries = fed.clock.now, asleep.state.journal.last_id()
        fed.until(lambda: reserve.took_over_at)
        assert TAKEOVER_S - 2.5 <= reserve.took_over_at - fallen_asleep_at <= TAKEOVER_S + 2.5
        fed.until(lambda: fed.record.round >= 2)
        with pytest.raises(DuplicateCoordinator, match="another coordinator has taken over this state folder") as told:
            for _ in range(1000):  # what the agents have sent to it meanwhile
                asleep.step(0)
        assert told.value.exit_code == 2
        written = fed.state.journal.entries(after=entries)
        assert [entry.body.get("epoch") for entry in written if entry.kind == "coordinator_started"] == [2]
        assert "run_failed" not in {entry.kind for entry in written}
        asleep.close()
        reserve.before_opened.close()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed
        with StateFolder(fed.config.state).look() as state:
            state.journal.verify()


def test_nothing_is_taken_over_while_the_broker_is_away(tmp_path):
    """Neither from a coordinator that the standby does not hear, nor from one that is lost meanwhile."""
    with fleet(tmp_path) as fed:
        started(fed)
        fed.finish()
        reserve = Reserve(fed, fed.config.state)
        fed.wait(5)
        filters = list(reserve.transport._filters)
        vanish(reserve.transport)
        fed.wait(10 * TAKEOVER_S)
        assert reserve.took_over_at is None, "its own queries did not come back"
        reserve.transport._filters = filters
        reserve.transport.start()
        fed.wait(2 * TAKEOVER_S)
        assert reserve.took_over_at is None


@pytest.fixture
def replicated(tmp_path):
    """A federation in round 3, with a standby on a backup of round 2; the state folder is lost with its machine."""
    with fleet(tmp_path) as fed:
        started(fed)
        in_round(fed, 2)
        back_up(fed.state, tmp_path / "replica")
        reserve = Reserve(fed, tmp_path / "replica")
        fed.wait(5)
        in_round(fed, 3)
        yield fed, reserve


def test_a_replica_resumes_the_run_with_the_same_bits(replicated, tmp_path, undisturbed):
    fed, reserve = replicated
    shutil.copytree(fed.config.state, tmp_path / "found again")
    fed.kill_coordinator()
    lost_at = fed.clock.now
    fed.until(lambda: reserve.took_over_at)
    assert TAKEOVER_S - 2.5 <= reserve.took_over_at - lost_at <= TAKEOVER_S + 2.5, "a free lock of a copy says nothing"
    fed.finish()
    assert fed.encoder_sha256 == undisturbed
    assert fed.coordinator.commands.epoch == 1000
    assert agents_follow(fed) == {1000}
    with StateFolder(tmp_path / "found again").open("the machine is back") as state:
        back = Coordinator(fed.config, state, fed.broker.transport(), clock=fed.clock, boot="zz", probe_s=3.0)
        back.start()
        with pytest.raises(DuplicateCoordinator, match="with a higher epoch, so this one stops") as told:
            fed.until(lambda: back.step(0) and False, limit_s=5)
        assert "epoch 2" in str(told.value)
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
        second = Coordinator(fed.config, state, fed.broker.transport(), clock=fed.clock, boot="a0", probe_s=3.0)
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
            other.journal.append("coordinator_started", body={"federation": "f" * 32})
        with pytest.raises(StateError, match="no journal here"):
            Standby("home", tmp_path / "nothing", fed.broker.transport())
        for folder, why in (("copied by hand", "which nobody holds; give its state folder"), ("other", "fffffffff")):
            reserve = Reserve(fed, tmp_path / folder)
            with pytest.raises(UsageError, match=why):
                fed.wait(20)
            fed.step = reserve._federation_step


def test_a_standby_that_may_not_listen_says_which_right_is_missing(tmp_path):
    with fleet(tmp_path) as fed:
        transport = fed.broker.transport()
        standby = Standby("home", fed.config.state, transport, clock=fed.clock)
        transport.subscribe("something/else")
        transport.start()
        with pytest.raises(UsageError, match="does not let this process subscribe to fl/1/home/co"):
            for _ in range(5):
                standby.step(0)


def test_a_standby_stops_when_it_is_asked_to(tmp_path):
    with fleet(tmp_path) as fed:
        stop = threading.Event()
        stop.set()
        assert Standby("home", fed.config.state, fed.broker.transport(), clock=fed.clock).wait(stop) is False

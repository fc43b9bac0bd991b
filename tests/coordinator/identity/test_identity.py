"""Whose orders count: state folders that are replaced or put back, coordinators that are two, wills that are old."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil

import pytest
from federation_disturbances import lose
from federation_duties import TASK, TinyDuties
from federation_harness import Federation, vanish

from coordinator.fleet.run_ids import RunIds
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.rounds.request import Request
from coordinator.service.coordinator import Coordinator
from coordinator.service.surroundings import Runtime, StartOptions
from coordinator.state.backup import MARKER
from coordinator.state.starts import Takeover, record_start
from coordinator.state.store import StateFolder
from edge_agent.agent.local_state import FOLLOW_S
from edge_agent.core.errors import DuplicateCoordinator
from edge_agent.core.storage import without_syncs
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import codec, down, fields, up

FIRST = {"params": {"lr": 0.1, "batch_size": 8}, "seed": 5}
SECOND = {"params": {"lr": 1e-3, "batch_size": 8}, "seed": 5}
TWO = {"agents": ("a0", "a1"), "tasks": TinyDuties, "capture": True}


@pytest.fixture(autouse=True)
def _quick_disk():
    with without_syncs():
        yield


def ask(fed, wanted, rounds=2):
    fed.request("fedper", rounds=rounds, **wanted)


@functools.cache
def undisturbed(tmp, **wanted_as_json):
    """SHA-256 of the encoder where nothing has ever happened before, on disk or in memory."""
    wanted = {name: json.loads(value) for name, value in wanted_as_json.items()}
    with Federation(tmp / "undisturbed", **TWO) as fed:
        ask(fed, wanted)
        fed.finish()
        return fed.encoder_sha256


def right(tmp_path_factory, wanted):
    folder = tmp_path_factory.getbasetemp()
    shutil.rmtree(folder / "undisturbed", ignore_errors=True)
    return undisturbed(folder, **{name: json.dumps(value) for name, value in wanted.items()})


def wipe(fed):
    """The state folder is removed while no coordinator works in it."""
    fed.kill_coordinator()
    shutil.rmtree(fed.config.state)


def update_in_outbox(fed, name="a0"):
    return fed.agents[name].uploads._manifest


@pytest.mark.parametrize(
    "wiped, restarted, full", [*itertools.product([False, True], repeat=3)], ids=lambda value: "yes" if value else "no"
)
def test_a_run_ends_with_its_own_model_whatever_was_there_before(tmp_path, tmp_path_factory, wiped, restarted, full):
    """All eight combinations of: state folder removed, agents restarted, an update of the old run in the outbox."""
    wanted = right(tmp_path_factory, SECOND)
    with Federation(tmp_path, **TWO) as fed:
        ask(fed, FIRST)
        if full:  # the coordinator goes away between the update and its receipt
            lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Receipt), times=100)
            fed.until(lambda: lost)
            assert update_in_outbox(fed) is not None
        else:
            fed.finish()
            assert update_in_outbox(fed) is None
        old = fed.run_id
        if wiped:
            wipe(fed)
        else:
            fed.kill_coordinator()
        if restarted:
            for name in ("a0", "a1"):
                fed.kill(name)
                fed.add(name)
        fed.start_coordinator()
        if full and not wiped:
            fed.state.journal.append(fact_of("cancel_requested", {}), run=fed.run)
        ask(fed, SECOND)
        fed.finish()
        assert fed.encoder_sha256 == wanted
        assert fed.run == ("run-0001" if wiped else "run-0002")
        assert fed.run_id != old
        for name in ("a0", "a1"):
            kept = {path.name for path in (tmp_path / name / "runs").iterdir()}
            assert fed.run_id in kept
            assert (old in kept) == (not wiped), "what belongs to the old state folder is removed"
            assert update_in_outbox(fed, name) is None


def test_the_encoder_of_the_old_run_is_another_one(tmp_path_factory):
    """Else the test above shows nothing."""
    assert right(tmp_path_factory, FIRST) != right(tmp_path_factory, SECOND)


def test_leaving_a_federation_is_one_line_of_the_log_that_says_what_is_dropped(tmp_path, caplog):
    with Federation(tmp_path, **{**TWO, "agents": ("a0",)}) as fed:
        ask(fed, FIRST, rounds=1)
        lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Receipt), times=100)
        fed.until(lambda: lost)
        before = fed.coordinator.federation_id
        wipe(fed)
        fed.start_coordinator()
        fed.until(lambda: fed.coordinator.roster.present())
        (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("federation_left")]
        assert f"federation={before[:12]} follows={fed.coordinator.federation_id[:12]}" in line
        assert "dropped: update run-0001 round 1, client state of 1 runs" in line


def test_an_agent_follows_a_replaced_state_folder_after_the_time_that_its_own_coordinator_has(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        wipe(fed)
        fed.start_coordinator()
        took = fed.until(lambda: fed.coordinator.roster.present())
        assert FOLLOW_S <= took <= FOLLOW_S + 1
        assert [agent.membership.note() for agent in fed.agents.values()] == [None] * len(fed.agents)


def test_another_feature_size_after_the_state_folder_was_removed_is_no_trouble(tmp_path):
    """Seen with real processes: every agent failed at once, for it went on with the session of the old run."""
    with Federation(tmp_path, **TWO) as fed:
        ask(fed, FIRST)
        fed.finish()
        wipe(fed)
        fed.task = TASK.model_copy(update={"encoder_params": {"feature_dim": 7}})
        fed.start_coordinator()
        ask(fed, FIRST)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end


def test_an_update_of_another_state_folder_is_rejected_with_the_reason(tmp_path):
    with Federation(tmp_path, agents=1, capture=True) as fed:
        fed.settle()
        blob = Outgoing.of(b"x" * 500)
        foreign = f"run-0001-{'a' * 32}"
        fed.request(rounds=1)
        fed.agents["a0"].link.send(up.UpdateManifest(run=foreign, round=1, blob=blob.ref, samples=3))
        fed.settle()
        receipts = fed.messages(fed.topics.down("a0"), down.Receipt)
        (rejected,) = [receipt for receipt in receipts if not receipt.accepted]
        assert rejected.run == foreign
        assert rejected.reason == "unknown run run-0001: it is of another coordinator or state folder"


def test_a_receipt_for_the_same_tensors_of_another_run_forgets_nothing(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Receipt), times=100)
        fed.request(rounds=1)
        fed.until(lambda: lost)
        waits = update_in_outbox(fed)
        other = down.Receipt(run=f"run-0001-{'b' * 32}", digest=waits.blob.digest, accepted=True)
        fed.broker.route(fed.topics.down("a0"), fed.order(other))
        fed.settle()
        assert update_in_outbox(fed) == waits


# --- epoch -----------------------------------------------------------------------------------------------------------


def order_of(fed, epoch, **changes):
    """A job as a coordinator of that epoch would send it."""
    job = down.Job(run="run-0666", round=1, rounds=1, seed=0, method="fedavg", task=fed.task, blobs=(), deadline_s=9)
    return fed.order(job, epoch=epoch, **changes)


@pytest.mark.parametrize("restarted", [False, True])
def test_orders_of_a_lower_epoch_are_not_carried_out_also_after_a_restart_of_the_agent(tmp_path, restarted):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.settle()
        assert fed.agents["a0"].membership.epoch == 2
        if restarted:
            fed.kill("a0")
            fed.add("a0")
        fed.broker.route(fed.topics.down("a0"), order_of(fed, epoch=1))
        fed.settle()
        assert fed.tasks["a0"].done == []
        fed.broker.route(fed.topics.down("a0"), order_of(fed, epoch=2, seq=2))
        fed.settle()
        assert fed.tasks["a0"].done == [("run-0666", 1, "train")]


def test_a_state_folder_put_back_from_a_backup_gets_its_agents_back(tmp_path, caplog):
    with Federation(tmp_path, agents=2, probe_s=3.0) as fed:
        fed.until(lambda: fed.coordinator.roster.present() == ["a0", "a1"])
        fed.kill_coordinator()
        shutil.copytree(fed.config.state, tmp_path / "backup")
        for _ in range(3):
            fed.start_coordinator()
            fed.until(lambda: fed.coordinator.roster.present() == ["a0", "a1"])
            fed.kill_coordinator()
        assert fed.agents["a0"].membership.epoch == 4
        shutil.rmtree(fed.config.state)
        shutil.copytree(tmp_path / "backup", fed.config.state)
        fed.start_coordinator()
        assert fed.coordinator.commands.epoch == 2
        assert fed.until(lambda: fed.coordinator.roster.present() == ["a0", "a1"]) <= 20
        assert "epoch_behind agent=a0 knows=4 own=2: put back from a backup?" in caplog.text
        fed.request(rounds=2)
        fed.finish()
        assert fed.record.status == "finished"


def test_the_federation_id_is_made_once_and_the_epoch_counts_the_starts(tmp_path):
    with SqliteJournal(tmp_path / "journal.db") as journal:
        made = iter("ab")
        starts = [record_start(journal, version="1", boot="b", make_id=lambda: next(made) * 32) for _ in range(3)]
        assert [(start.federation, start.epoch) for start in starts] == [("a" * 32, 1), ("a" * 32, 2), ("a" * 32, 3)]


def test_a_run_id_is_known_to_its_own_journal_alone(tmp_path):
    ids = []
    for name in ("one", "two"):
        with SqliteJournal(tmp_path / name / "journal.db") as journal:
            assert journal.request_run(fact_of("run_requested", {})) == "run-0001"
            known = RunIds(journal)
            ids.append(known.of("run-0001"))
            assert known.name(ids[-1]) == "run-0001"
            assert known.name(ids[0]) == ("run-0001" if len(ids) == 1 else None)
            assert [known.name(other) for other in ("run-0001", "run-0002", f"run-0002-{'0' * 32}")] == [None] * 3
    assert fields.run_name(ids[0]) == fields.run_name(ids[1]) == "run-0001"


def test_a_run_of_a_version_without_run_ids_fails_at_once_and_says_what_to_do(tmp_path):
    """Agents could deliver nothing: every update of it would be rejected as of an unknown run."""
    wanted = Request("fedavg", {}, 1, 0, TASK).body()
    with Federation(tmp_path, agents=("a0",)) as fed:
        fed.settle()
        fed.state.journal.append(fact_of("run_requested", wanted), run="run-0001")
        fed.run = fed._run_ids["run-0001"] = "run-0001"
        assert fed.finish(limit_s=30) < 10
        assert fed.record.status == "failed"
        assert "older version" in fed.record.reason
        assert "ask for it again with 'headwater run'" in fed.record.reason
        assert fed.tasks["a0"].done == []
        assert fed.request(rounds=1) == "run-0002"
        fed.finish()
        assert fed.record.status == "finished"


# --- two coordinators ------------------------------------------------------------------------------------------------


class Second:
    """Another coordinator at the same broker, with its own state folder."""

    def __init__(self, fed, folder, boot, takeover=None):
        self.fed = fed
        self._opened = contextlib.ExitStack()
        state = StateFolder(folder)
        self._opened.enter_context(state.open("test"))
        self.coordinator = Coordinator(
            fed.config,
            state,
            fed.broker.transport(),
            runtime=Runtime(clock=fed.clock),
            start=StartOptions(boot=boot, probe_s=fed.probe_s, takeover=takeover),
        )
        self.coordinator.start()
        self.stopped = None

    def __enter__(self):
        self.step = self.fed.step
        self.fed.step = self.both
        return self

    def __exit__(self, *_):
        self.fed.step = self.step
        self._opened.close()

    def both(self):
        busy = self.step()
        if self.stopped is None:
            try:
                busy = self.coordinator.step(0) or busy
            except DuplicateCoordinator as error:
                self.stopped = error
                self.coordinator.close()
        return busy


def following(fed):
    return {name: agent.membership.federation for name, agent in fed.agents.items()}


def test_a_second_coordinator_does_not_start_and_both_name_the_other(tmp_path, caplog):
    with Federation(tmp_path, probe_s=3.0) as fed:
        fed.until(lambda: len(fed.coordinator.roster.present()) == 3)
        fed.wait(10)
        ours = fed.coordinator.federation_id
        fed.request(rounds=3)
        with Second(fed, tmp_path / "second", "s1") as second:
            assert fed.until(lambda: second.stopped) <= 3
            theirs = second.coordinator.federation_id
            said = str(second.stopped)
            assert "another coordinator of federation 'home' has been serving for 1" in said
            assert f"start c1, federation id {ours[:12]}, epoch 1" in said
            assert "this one stops. Stop the other first, or give one of them another 'federation'" in said
            assert second.stopped.exit_code == 2
            fed.wait(40)
            assert set(following(fed).values()) == {ours}
            note = fed.coordinator.status()["other_coordinator"]
            assert "is starting" in note
            assert f"start s1, federation id {theirs[:12]}" in note
            assert caplog.text.count("other_coordinator another coordinator") == 1
            fed.wait(30)
            assert fed.coordinator.status()["other_coordinator"] is None, "it has ended more than a minute ago"
        fed.finish()
        assert fed.record.status == "finished"
        assert fed.entries("update_refused") == []


def test_of_two_that_start_at_the_same_moment_one_serves(tmp_path):
    with Federation(tmp_path, agents=1, probe_s=3.0) as fed, Second(fed, tmp_path / "second", "zz") as second:
        fed.until(lambda: second.stopped)
        fed.until(lambda: fed.coordinator.roster.present() == ["a0"])
        assert "is starting" in str(second.stopped)


@pytest.fixture
def parted(tmp_path):
    """A federation whose state folder was copied by hand after its first run; it has finished another run since."""
    with Federation(tmp_path, agents=2, probe_s=3.0) as fed:
        fed.request(rounds=1)
        fed.finish()
        fed.kill_coordinator()
        shutil.copytree(fed.config.state, tmp_path / "copy")
        fed.start_coordinator()
        fed.until(lambda: len(fed.coordinator.roster.present()) == 2)
        fed.request(rounds=1)
        fed.finish()
        yield fed


def as_backup(folder):
    (folder / MARKER).write_text("{}")
    return folder


def with_more_entries(folder, count=100):
    with StateFolder(folder).look() as state:
        for _ in range(count):
            state.journal.append(fact_of("run_heard", {}))
    return folder


@pytest.mark.parametrize("kind", ["copied by hand", "started often", "backup", "newer journal"])
def test_a_copy_that_starts_beside_a_coordinator_that_serves_never_ends_it(parted, tmp_path, kind):
    """The epoch of a copy is higher: of a backup by a thousand, of a copy by hand after a few starts elsewhere."""
    fed = parted
    copy = tmp_path / "copy"
    if kind == "started often":
        with SqliteJournal(copy / "journal.db") as journal:
            for _ in range(5):
                record_start(journal, version="x", boot="drill")
    if kind == "backup":
        as_backup(copy)
    if kind == "newer journal":  # of a drill, for example
        with_more_entries(copy)
    followed = {agent.membership.epoch for agent in fed.agents.values()}
    with Second(fed, copy, "s1") as second:
        assert fed.until(lambda: second.stopped) <= 3
        assert "it serves already, so this one does not start" in str(second.stopped)
        assert "headwater serve --take-over" in str(second.stopped)
        assert second.stopped.exit_code == 2
        fed.wait(40)
        assert {agent.membership.epoch for agent in fed.agents.values()} == followed
    fed.request(rounds=1)
    fed.finish()
    assert fed.run == "run-0003"


@pytest.mark.parametrize("is_backup", [True, False])
def test_a_copy_that_is_told_to_take_over_ends_the_coordinator_that_serves(parted, tmp_path, is_backup):
    fed = parted
    copy = tmp_path / "copy"
    if is_backup:
        as_backup(copy)
    replaced = Takeover(epoch=fed.coordinator.commands.epoch, newest_run=2)
    with Second(fed, copy, "s1", takeover=replaced) as successor:
        with pytest.raises(DuplicateCoordinator, match=r"is the same or a copy, and it has taken over, so this one"):
            fed.until(lambda: False, limit_s=5)
        fed.kill_coordinator()
        fed.until(lambda: len(successor.coordinator.roster.present()) == 2)
        assert {agent.membership.epoch for agent in fed.agents.values()} == {1000 if is_backup else 3}
        assert successor.stopped is None
        journal = successor.coordinator.state.journal
        assert journal.request_run(fact_of("run_requested", {})) == "run-0003", (
            "run-0002 is one of the coordinator that was replaced"
        )


def test_of_a_copy_and_an_original_that_serve_after_a_split_the_newer_journal_stays(parted, tmp_path):
    """The copy was started while nobody could hear the original; it has done less."""
    fed = parted
    epoch = fed.coordinator.commands.epoch
    away = fed.coordinator
    filters = list(away.transport._filters)
    vanish(away.transport)
    with Second(fed, as_backup(tmp_path / "copy"), "s1") as copy:
        fed.until(lambda: len(copy.coordinator.roster.present()) == 2)
        away.transport._filters = filters
        away.transport.start()
        fed.until(lambda: copy.stopped, limit_s=60)
        assert "it has the newer journal, so this one stops" in str(copy.stopped)
        fed.until(lambda: len(fed.coordinator.roster.present()) == 2, limit_s=120)
        assert fed.coordinator.commands.epoch == epoch
    fed.request(rounds=1)
    fed.finish()
    assert fed.record.status == "finished", "the agents obey the original again"


def test_of_a_copy_and_an_original_that_serve_after_a_split_the_copy_stays_where_it_has_done_more(parted, tmp_path):
    fed = parted
    away = fed.coordinator
    filters = list(away.transport._filters)
    vanish(away.transport)
    copy = with_more_entries(as_backup(tmp_path / "copy"))
    with Second(fed, copy, "s1") as second:
        fed.until(lambda: len(second.coordinator.roster.present()) == 2)
        away.transport._filters = filters
        away.transport.start()
        with pytest.raises(DuplicateCoordinator, match="it has the newer journal, so this one stops"):
            fed.until(lambda: False, limit_s=60)
        assert second.stopped is None


def test_an_original_that_comes_back_ends_a_backup_that_was_started_meanwhile(parted, tmp_path):
    fed = parted
    fed.kill_coordinator()
    with Second(fed, as_backup(tmp_path / "copy"), "s1") as copy:
        fed.until(lambda: len(copy.coordinator.roster.present()) == 2)
        fed.start_coordinator()
        fed.until(lambda: copy.stopped, limit_s=10)
        assert "this one serves a backup that nobody told to take over" in str(copy.stopped)
        fed.until(lambda: len(fed.coordinator.roster.present()) == 2, limit_s=120)


def test_a_backup_that_is_served_gives_no_run_the_name_of_one_that_an_agent_has_worked_for(tmp_path):
    """The run was requested after the backup; the agent still sends its update of it."""
    with Federation(tmp_path, agents=1) as fed:
        fed.request(rounds=1)
        fed.finish()
        fed.kill_coordinator()
        as_backup(fed.config.state)
        fed.start_coordinator()
        fed.settle()
        later = up.Heartbeat(boot=fed.agents["a0"].boot, run=f"run-0007-{'0' * 32}", round=1)
        far = up.Heartbeat(boot=fed.agents["a0"].boot, run=f"run-99999-{'0' * 32}", round=1)
        for message in (far, later, later):
            fed.coordinator.handle("a0", "up", codec.encode(message))
        assert [entry.body for entry in fed.state.journal.entries(kinds=("run_heard",))] == [{"newest_run": 7}]
        assert fed.request(rounds=1) == "run-0008"
        fed.finish()
        assert fed.record.status == "finished"


def test_starts_of_versions_that_wrote_no_takeover_are_read_as_they_were_meant(tmp_path):
    """The first epoch of a copy said that it replaces its original."""
    with SqliteJournal(tmp_path / "journal.db") as journal:
        for epoch in (1, 2, 1000, 1001):
            journal.append(fact_of("coordinator_started", {"federation": "f" * 32, "epoch": epoch}))
        start = record_start(journal, version="x", boot="b")
    assert (start.epoch, start.takeover, start.is_copy) == (1002, 1000, False)


def test_two_that_both_serve_because_they_could_not_hear_each_other_become_one(tmp_path):
    """The answer was lost: the agents stay with the one that they follow, and the newer one stops."""
    with Federation(tmp_path, agents=2, probe_s=3.0) as fed:
        fed.until(lambda: len(fed.coordinator.roster.present()) == 2)
        fed.wait(10)
        ours = fed.coordinator.federation_id
        deaf = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Present), times=2)
        with Second(fed, tmp_path / "second", "s1") as second:
            fed.until(lambda: second.coordinator.is_serving)
            assert deaf
            fed.until(lambda: second.stopped, limit_s=120)
            assert set(following(fed).values()) == {ours}
            fed.wait(30)
            assert fed.coordinator.roster.present() == ["a0", "a1"]


def test_a_forged_message_stops_no_coordinator(tmp_path):
    """It does not answer what this coordinator has said, so nobody need be there."""
    with Federation(tmp_path, agents=1, probe_s=3.0) as fed:
        fed.until(lambda: fed.coordinator.roster.present())
        forged = down.Present(
            boot="zz", federation=fed.coordinator.federation_id, epoch=99, serving_s=1e9, host="x", answers="other"
        )
        for _ in range(3):
            fed.broker.route(fed.topics.coordinators, codec.encode(forged))
            fed.broker.route(fed.topics.coordinators, b"\x00garbage")
            fed.wait(5)
        assert fed.coordinator.is_serving
        assert fed.coordinator.peers.note == ""


def test_a_coordinator_that_may_not_serve_yet_says_nothing_to_agents_and_what_it_waits_for(tmp_path):
    with Federation(tmp_path, agents=1, capture=True, probe_s=3.0) as fed:
        fed.request(rounds=1)
        fed.wait(2)
        waiting = json.loads((fed.config.state / "status.json").read_bytes())["waiting"]
        assert waiting["for"] == "another coordinator of federation 'home' may answer; serves when none does"
        assert 0 < waiting["seconds_left"] <= 3
        assert fed.published(fed.topics.announce) == fed.published(fed.topics.down("a0")) == []
        fed.finish()
        assert fed.record.status == "finished"


def test_an_order_of_another_federation_is_not_carried_out_while_the_own_coordinator_answers(tmp_path, caplog):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        ours = fed.coordinator.federation_id
        agent = fed.agents["a0"]
        for number in range(20):
            fed.broker.route(fed.topics.down("a0"), order_of(fed, 9, federation="f" * 32, seq=number))
            fed.wait(1)
        assert fed.tasks["a0"].done == []
        assert agent.welcomed
        assert agent.membership.federation == ours
        assert caplog.text.count("order_ignored") == 1
        agent.write_status()
        said = json.loads((agent.config.state / "status.json").read_bytes())
        assert said["federation_id"] == ours
        assert f"of federation ffffffffffff, this agent follows {ours[:12]}" in said["other_coordinator"]
        fed.wait(70)
        assert agent.membership.note() is None, "nothing has been heard of it for more than a minute"


def test_one_order_of_another_federation_while_nobody_answers_changes_nothing(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        ours = fed.coordinator.federation_id
        order = order_of(fed, 9, federation="f" * 32)
        fed.kill_coordinator()
        fed.broker.route(fed.topics.down("a0"), order)
        fed.wait(3 * FOLLOW_S)
        assert fed.agents["a0"].membership.federation == ours


def test_a_note_of_the_federation_that_is_damaged_ends_no_agent(tmp_path, caplog):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        fed.kill("a0")
        (tmp_path / "a0" / "federation.json").write_bytes(b'{"federation": 7}')
        fed.add("a0")
        fed.settle()
        assert fed.coordinator.roster.present() == ["a0"]
        assert "federation_unreadable" in caplog.text
        assert json.loads((tmp_path / "a0" / "federation.json").read_bytes())["epoch"] == 1


# --- wills -----------------------------------------------------------------------------------------------------------


def test_a_stale_last_will_changes_nothing(tmp_path):
    """The link breaks on the agent's side alone; the broker notices it 6 s into the round, when it is long back."""
    quick = {"quorum": 0.6, "grace_s": 2, "deadline_s": 60}
    with Federation(tmp_path, agents=(), round=quick, cohort={"min_agents": 5}) as fed:
        fed.add("a0", seconds=12)
        for number in range(1, 5):
            fed.add(f"a{number}", seconds=11)
        fed.settle()
        agent = fed.agents["a0"]
        old = agent.transport.will(agent.transport.connection)
        filters = list(agent.transport._filters)
        vanish(agent.transport)
        agent.transport._filters = filters
        agent.transport.start()
        fed.settle()
        fed.request(rounds=1)
        fed.wait(6)
        fed.broker.route(old.topic, old.payload)
        fed.wait(1)
        assert fed.coordinator.roster.get("a0").is_present
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2", "a3", "a4"]


def test_the_will_of_the_connection_that_stands_takes_an_agent_off_the_list_at_once(tmp_path):
    with Federation(tmp_path, agents=2) as fed:
        fed.settle()
        fed.agents["a0"].transport.cut()
        fed.agents["a0"].transport.start()
        fed.settle()
        assert fed.coordinator.roster.get("a0").connection == 2
        fed.kill("a0")
        fed.settle()
        assert fed.coordinator.roster.present() == ["a1"]


@pytest.mark.parametrize("payload", [b"offline b2", b"offline b2 x", b"offline b2 1 1", b"offline", b"\xff", b""])
def test_a_will_that_names_no_connection_is_no_will(tmp_path, payload):
    with Federation(tmp_path, agents=("a0",)) as fed:
        fed.settle()
        assert fed.coordinator.roster.get("a0").boot == "b2"
        fed.broker.route(fed.topics.presence("a0"), payload)
        fed.settle()
        assert fed.coordinator.roster.present() == ["a0"]

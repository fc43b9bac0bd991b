"""An agent among others: what it does again, what it does once, and what must not end it."""

from __future__ import annotations

import errno
import json
import logging
import os

import pytest
from federation_disturbances import Stranger, lose
from federation_duties import WIDE_TASK
from federation_harness import Federation, vanish

from edge_agent.agent.health import ALONE_AGAIN_S, ALONE_S, HELLO_AGAIN_S
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.errors import DataError, TrainingFailed
from edge_agent.wire.blobs.chunks import Incoming, Outgoing, decode_frame
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, LeftBroker

TOPICS = Topics("home")


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}, capture=True) as federation:
        yield federation


def hellos(fed, name="a0"):
    return fed.messages(fed.topics.up(name), up.Hello)


def trained(fed, name="a0"):
    return [number for _, number, purpose in fed.tasks[name].done if purpose == "train"]


def test_one_connection_is_one_hello(fed):
    fed.add("a0")
    fed.wait(10)
    assert len(hellos(fed)) == 1


def test_an_agent_without_a_coordinator_keeps_saying_hello_at_its_pace(fed):
    fed.kill_coordinator()
    fed.add("a0")
    fed.wait(20)
    assert 8 <= len(hellos(fed)) <= 20 / HELLO_AGAIN_S + 1
    fed.start_coordinator()
    assert fed.until(lambda: fed.agents["a0"].welcomed) <= HELLO_AGAIN_S + 0.5


def unanswered(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("unanswered")]


def test_an_agent_that_nobody_answers_says_so_after_a_while_and_then_rarely(fed, caplog):
    fed.kill_coordinator()
    agent = fed.add("a0")
    fed.wait(ALONE_S - 1)
    assert unanswered(caplog) == []
    fed.wait(2)
    (said,) = unanswered(caplog)
    assert "federation 'home' answers at mqtt://127.0.0.1:1883" in said
    assert "until one does or the agent is stopped" in said
    fed.wait(ALONE_AGAIN_S + 1)
    assert len(unanswered(caplog)) == 2
    agent.write_status()
    assert "federation 'home'" in json.loads((agent.config.state / "status.json").read_bytes())["waits_for"]
    fed.start_coordinator()
    fed.wait(100)
    assert len(unanswered(caplog)) == 2
    agent.write_status()
    assert json.loads((agent.config.state / "status.json").read_bytes())["waits_for"] is None


def test_an_agent_writes_down_which_broker_it_is_connected_to_and_why_it_left_another(fed, caplog):
    caplog.set_level("INFO")
    agent = fed.add("a0")
    fed.settle()
    left = (LeftBroker("mqtts://a", "refused"),)
    agent.transport._events.put(Connected(2, "mqtts://b", left))
    fed.wait(1)
    agent.write_status()
    broker = json.loads((agent.config.state / "status.json").read_bytes())["broker"]
    assert (broker["url"], broker["left"]) == ("mqtts://b", [{"url": "mqtts://a", "reason": "refused"}])
    assert broker["since"].endswith("+00:00")
    assert "connected broker=mqtts://b" in caplog.text
    agent.transport.cut()
    fed.wait(1)
    agent.write_status()
    assert json.loads((agent.config.state / "status.json").read_bytes())["broker"] is None


def test_an_agent_that_nobody_answers_at_one_broker_of_a_list_tries_others_less_and_less_often(fed):
    """A broker may be cut off from the others; where the coordinator is away, no broker helps."""
    left_at = []
    agent = fed.add("a0")
    agent.leave_broker = lambda reason: left_at.append((fed.clock(), reason))
    fed.settle()
    fed.wait(800)
    assert left_at == [], "it is answered"
    fed.kill_coordinator()

    def leaves_after():
        """Seconds from now, which is when the agent connects, until it leaves that broker."""
        agent.transport.cut()
        agent.transport.start()
        began = fed.clock()
        count = len(left_at)
        fed.until(lambda: len(left_at) > count, 2000)
        return left_at[-1][0] - began

    assert [round(leaves_after(), -1) for _ in range(6)] == [30, 60, 120, 240, 480, 480]
    assert left_at[-1][1] == "no coordinator of federation 'home' answers here"
    fed.start_coordinator()
    fed.until(lambda: agent.welcomed)
    fed.kill_coordinator()
    assert round(leaves_after(), -1) == 30, "it was answered meanwhile"


def waits_for(agent):
    agent.write_status()
    return json.loads((agent.config.state / "status.json").read_bytes())["waits_for"]


def test_an_agent_that_rounds_do_not_ask_says_what_it_waits_for_and_what_would_help(fed, caplog):
    caplog.set_level(logging.INFO, "edge_agent")
    with_torch = fed.add("a0")
    without_torch = fed.add("h0", tier="head")
    fed.request(rounds=1)
    fed.until(lambda: trained(fed))
    said = waits_for(without_torch)
    assert said.startswith("waits for a release")
    assert "--method FILE:CLASS" in said
    assert "set tier = 'train'" in said
    assert waits_for(with_torch) is None
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("idle ")]
    assert line == f"idle agent=h0 {said}"


def test_the_silence_is_counted_from_the_coordinator_that_was_there_last(fed, caplog):
    """A new one announces itself after ten minutes and then does not answer: that is no silence of ten minutes."""

    def mute(coordinator):
        lose(coordinator.transport, lambda message: isinstance(message, down.Welcome), times=1000)

    fed.add("a0")
    fed.wait(600)
    fed.kill_coordinator()
    fed.start_coordinator(mute)
    fed.wait(ALONE_S - 1)
    assert unanswered(caplog) == []
    fed.wait(2)
    (said,) = unanswered(caplog)
    assert said.startswith(f"unanswered seconds={ALONE_S:.0f}")


def small_cache(agent, limit_bytes):
    agent.cache.limit_bytes = limit_bytes


def test_a_job_that_can_never_fit_into_the_cache_is_refused_with_what_it_needs(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        small_cache(fed.add("a0"), 100_000)
        fed.request(rounds=1)
        fed.until(lambda: fed.messages(fed.topics.up("a0"), up.Fault))
        (job, *_) = fed.messages(fed.topics.down("a0"), down.Job)
        (fault, *_) = fed.messages(fed.topics.up("a0"), up.Fault)
        needed = sum(blob.size_bytes for blob in job.blobs)
        assert (fault.error, fault.run, fault.round) == ("UsageError", fed.run_id, 1)
        assert f"1 blobs of {needed} bytes together, this agent keeps at most cache_bytes = 100000" in fault.message
        assert f"raise cache_bytes in its configuration to {needed} or more" in fault.message
        assert fed.agents["a0"].jobs.job is None


def test_a_job_that_just_fits_is_done(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        agent = fed.add("a0", seconds=1)
        fed.request(rounds=2)
        fed.until(lambda: agent.jobs.job is not None)
        small_cache(agent, sum(blob.size_bytes for blob in agent.jobs.job.blobs))
        fed.finish()
        assert fed.record.status == "finished"


def test_a_bundle_that_does_not_fit_beside_a_job_comes_after_it(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        agent = fed.add("a0", seconds=3)
        fed.request(rounds=1)
        fed.until(lambda: agent.jobs.job is not None)
        small_cache(agent, 900_000)
        blob = Outgoing.of(bytes(500_000))
        fed.coordinator.distributor.offer(blob, ("a0",))
        fed.coordinator.send("a0", down.Install(run="run-0001", bundle_id="f" * 64, blob=blob.ref))
        fed.finish()
        assert trained(fed) == [1]
        fed.until(lambda: fed.tasks["a0"].installed)
        assert fed.tasks["a0"].installed == ["f" * 64]


def test_heartbeats_come_at_their_pace_and_say_what_is_worked_on(fed):
    fed.add("a0", seconds=40)
    fed.request(rounds=1)
    fed.wait(35)
    beats = fed.messages(fed.topics.heartbeat("a0"), up.Heartbeat)
    assert [(beat.run, beat.round) for beat in beats] == [(fed.run_id, 1), (fed.run_id, 1)]


def test_a_job_that_comes_twice_is_done_once(fed):
    """The network doubled it; it is also still going around when its receipt is here already."""
    agent = fed.add("a0")
    other = Stranger(fed, "other")
    other.hello()
    fed.settle()
    fed.request(rounds=1)
    fed.until(lambda: fed.entries("update_accepted", agent="a0") or fed.record.is_over)
    jobs = [p for p in fed.published(fed.topics.down("a0")) if b'"type":"job"' in p]
    for payload in jobs * 3:
        other.raw(payload, fed.topics.down("a0"))
    fed.settle()
    assert trained(fed) == [1]
    assert agent.jobs.job is None


def test_a_job_that_is_asked_anew_after_its_receipt_is_done_anew(fed):
    """The coordinator opened the round a second time, without the first attempt's updates."""
    fed.add("a0")
    other = Stranger(fed, "other")
    fed.request(rounds=1)
    fed.finish()
    (first, *_) = fed.messages(fed.topics.down("a0"), down.Job)
    other.raw(codec.encode(first.model_copy(update={"boot": "c9", "seq": 1})), fed.topics.down("a0"))
    fed.wait(10)
    assert trained(fed) == [1, 1]


def test_a_model_damaged_in_the_cache_is_fetched_again_and_not_a_fault(fed):
    agent = fed.add("a0", seconds=5)
    fed.request(rounds=1)
    fed.wait(1)
    (blob,) = agent.jobs.job.blobs
    path = agent.cache.path(blob.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fed.finish()
    assert fed.record.status == "finished"
    assert trained(fed) == [1]
    assert fed.entries("update_refused") == []


def test_a_job_whose_model_had_arrived_before_a_restart_begins_at_once(fed):
    fed.add("a0").downloads.frame = lambda _frame: None
    fed.request(rounds=1)
    fed.until(lambda: fed.agents["a0"].jobs.job)
    agent = fed.agents["a0"]
    (ref,) = agent.jobs.job.blobs
    fed.kill("a0")
    model = Outgoing.open(fed.state.blobs.path(ref.digest), ref.digest)
    incoming = Incoming(ref, agent.cache.folder / "partial")
    for index in range(model.count):
        incoming.add(decode_frame(model.frame(index)))
    incoming.close()
    fed.add("a0")
    assert fed.finish() < 5
    assert trained(fed) == [1]


def test_an_agent_whose_disk_fails_when_it_subscribes_goes_on(fed):
    agent = fed.add("a0")
    fed.settle()

    def fails(_filters):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    agent.downloads.listening, listening = fails, agent.downloads.listening
    agent.transport.subscribe("fl/1/home/b/0")
    fed.settle()
    assert agent.condition.name == "stalled"
    agent.downloads.listening = listening
    fed.wait(10)
    assert agent.condition.name == "ok"


def test_an_update_that_is_gone_from_the_disk_is_made_again(fed):
    agent = fed.add("a0")
    lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Grant))
    fed.request(rounds=1)
    fed.until(lambda: lost)
    (path,) = agent.uploads._outbox.folder.glob("*.safetensors")
    path.unlink()
    fed.finish()
    assert fed.record.status == "finished"
    assert trained(fed) == [1, 1]


def test_after_a_round_closed_without_it_an_agent_asks_for_its_model_no_more(tmp_path):
    """It heard half of the model, then the round was over. Its question every second would never end."""
    round_config = {"quorum": 0.5, "grace_s": 1}
    with Federation(
        tmp_path, agents=(), task=WIDE_TASK, round=round_config, cohort={"min_agents": 2}, capture=True
    ) as fed:
        fed.add("a0", seconds=1)
        agent = fed.add("deaf")
        fed.settle()
        agent.downloads.frame = lambda frame: None
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        agent.transport.subscribe()
        fed.wait(1)
        (first, *_) = fed.messages(fed.topics.down("deaf"), down.Job)
        before = [w for w in fed.messages(fed.topics.up("deaf"), up.Want) if w.digest == first.blobs[0].digest]
        fed.wait(20)
        after = [w for w in fed.messages(fed.topics.up("deaf"), up.Want) if w.digest == first.blobs[0].digest]
        assert before
        assert len(after) == len(before)


def test_a_new_run_during_the_end_of_the_old_one_is_not_lost(fed):
    """While the agent personalizes for the old run, the coordinator (restarted without it) asks for a new round."""
    agent = fed.add("a0", seconds=5)
    fed.request(rounds=1)
    fed.until(lambda: agent.jobs.job is not None and agent.jobs.job.purpose == "personalize")
    fed.wait(1)
    job = agent.jobs.job.model_copy(update={"run": "run-0099", "purpose": "train", "round": 1, "boot": "c9", "seq": 9})
    Stranger(fed, "x").raw(codec.encode(job), fed.topics.down("a0"))
    fed.wait(12)
    assert ("run-0099", 1, "train") in fed.tasks["a0"].done


def test_an_update_of_a_run_that_is_no_longer_wanted_is_not_offered(fed):
    agent = fed.add("a0", seconds=5)
    fed.request(rounds=1)
    fed.wait(1)
    job = agent.jobs.job.model_copy(update={"run": "run-0099", "boot": "c9", "seq": 9})
    Stranger(fed, "x").raw(codec.encode(job), fed.topics.down("a0"))
    fed.wait(5)
    offers = {message.run for message in fed.messages(fed.topics.up("a0"), up.UpdateManifest)}
    assert fed.run_id not in offers


def test_a_full_disk_is_told_as_a_fault_and_the_agent_goes_on(fed):
    def full(job):
        raise OSError(errno.ENOSPC, "No space left on device")

    agent = fed.add("a0")
    fed.tasks["a0"].before = full
    fed.request(rounds=1)
    fed.wait(1)
    (fault,) = fed.messages(fed.topics.up("a0"), up.Fault)[:1]
    assert (fault.error, fault.round) == ("DiskError", 0), "of the device, not of the job: the run waits"
    assert "No space left" in fault.message
    assert "resumes by itself" in fault.remedy
    assert agent.welcomed


def test_a_disk_that_is_full_while_a_model_comes_in_does_not_end_the_agent(fed, monkeypatch):
    agent = fed.add("a0")
    fed.settle()
    real = os.pwrite

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    fed.request(rounds=1)
    fed.wait(3)
    assert agent.welcomed
    monkeypatch.setattr(os, "pwrite", real)
    fed.finish()
    assert fed.record.status == "finished"


def test_memory_goes_back_after_each_job_also_one_that_failed(fed):
    fed.add("a0")
    tasks = fed.tasks["a0"]
    fed.request(rounds=2)
    fed.until(lambda: fed.record.is_over)
    assert tasks.rests == len(tasks.done) == 3

    def broken(job):
        raise DataError("no")

    tasks.before = broken
    fed.request(rounds=1)
    fed.until(lambda: fed.record.is_over)
    assert tasks.rests > len(tasks.done) == 3


def test_an_error_message_of_any_length_fits_into_a_fault(fed):
    class ANameThatIsLongerThanSixtyFourCharactersBecauseSomebodyLikesItThatWay(Exception):
        pass

    def broken(job):
        raise ANameThatIsLongerThanSixtyFourCharactersBecauseSomebodyLikesItThatWay("x" * 100_000 + "\nmore")

    def ours(job):
        raise DataError("x" * 100_000)

    def told(job):
        raise TrainingFailed("x" * 100_000, is_public=True)

    cases = (
        (broken, "Exception", "an unexpected error"),
        (told, "TrainingFailed", "x" * 2000),
        (
            ours,
            "DataError",
            "local data do not fit what is asked of this device; its log and 'edge-agent status' there say which",
        ),
    )
    fed.add("a0")
    for fails, error, message in cases:
        fed.tasks["a0"].before = fails
        fed.request(rounds=1)
        fed.wait(1)
        fault = fed.messages(fed.topics.up("a0"), up.Fault)[-1]
        assert (fault.error, fault.message) == (error, message), "no word of an error that does not say that it may go"
        fed.until(lambda: fed.record.is_over)


def test_a_goodbye_is_said_and_nothing_is_lost_by_stopping(fed):
    agent = fed.add("a0", seconds=5)
    fed.request(rounds=1)
    fed.wait(1)
    fed.agents.pop("a0")
    agent.close()
    fed.settle()
    assert fed.coordinator.roster.present() == []
    assert len(fed.messages(fed.topics.up("a0"), up.Bye)) == 1
    fed.add("a0")
    fed.finish()
    assert fed.record.status == "finished"


def test_the_status_file_says_what_the_agent_does(fed):
    agent = fed.add("a0", seconds=5)
    fed.request(rounds=3)
    fed.wait(1)
    agent.write_status()
    found = json.loads((agent.config.state / "status.json").read_bytes())
    assert (found["id"], found["tier"], found["welcomed"], found["working"]) == ("a0", "train", True, True)
    assert found["job"] == {"run": fed.run, "round": 1, "rounds": 3}


def test_an_agent_whose_coordinator_restarts_finds_the_new_one_at_once(fed):
    """Even when it has said hello to the old one a moment before."""
    agent = fed.add("a0")
    fed.settle()
    agent._hello()
    fed.kill_coordinator()
    fed.start_coordinator()
    fed.settle()
    assert fed.coordinator.roster.present() == ["a0"]


def test_a_lost_welcome_is_asked_for_again(fed):
    lose(fed.coordinator.transport, lambda message: isinstance(message, down.Welcome))
    fed.add("a0")
    assert fed.until(lambda: fed.agents["a0"].welcomed) <= HELLO_AGAIN_S + 0.5


def test_a_device_that_was_asleep_is_found_again(fed):
    """No network for two minutes, without a will: gone by its lease; its next heartbeat brings it back."""
    agent = fed.add("a0")
    fed.settle()
    filters = list(agent.transport._filters)
    vanish(agent.transport)
    fed.wait(120)
    assert fed.coordinator.roster.present() == []
    agent.transport._filters = filters
    agent.transport.start()
    fed.wait(1)
    assert fed.coordinator.roster.present() == ["a0"]


def test_head_tier_refuses_a_training_job_with_the_reason(fed):
    fed.make_tasks = TaskRunner
    fed.add("h0", tier="head")
    fed.settle()
    job = down.Job(run="run-0001", round=1, rounds=1, seed=0, method="fedavg", task=fed.task, blobs=(), deadline_s=9)
    Stranger(fed, "x").raw(fed.order(job), fed.topics.down("h0"))
    fed.settle()
    (fault,) = (one for one in fed.messages(fed.topics.up("h0"), up.Fault) if one.error == "MissingCapability")
    assert "does not train encoders" in fault.message


def test_logs_hold_no_payloads(fed, caplog):
    caplog.set_level(logging.DEBUG)
    fed.add("a0")
    fed.request(rounds=1)
    fed.finish()
    assert "round_closed" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 1000

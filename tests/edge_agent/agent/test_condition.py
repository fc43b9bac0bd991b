"""What keeps an agent from its work: seen in both status commands, told to the coordinator without local names."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from federation_harness import Federation
from mqtt_harness import PATIENCE_S

from coordinator.broker import EmbeddedBroker
from coordinator.cli import main as headwater
from edge_agent.agent import certificate
from edge_agent.agent.data_check import check_beside, last_task
from edge_agent.agent.health import Condition, look_at_disk, problem_of, try_disk
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.cli import main as edge_agent
from edge_agent.core.config import AgentConfig, BrokerConfig, DataConfig, HeadConfig
from edge_agent.core.disk import disk_error
from edge_agent.core.errors import (
    BundleDamaged,
    ConfigError,
    DataError,
    EnrolmentRefused,
    MissingCapability,
    StateError,
    TrainingFailed,
    UnknownName,
    UsageError,
)
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.messages import codec, fields, up
from edge_agent.wire.transport import Connected, Disconnected

NOW = datetime(2026, 11, 22, 10, 0, tzinfo=timezone.utc)
PLACE = "/srv/patients/hiv-positive"


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": 1}, capture=True) as federation:
        yield federation


def member(fed, name="a0"):
    return next(agent for agent in fed.coordinator.status()["agents"] if agent["id"] == name)


def local(agent) -> dict:
    agent.write_status()
    return json.loads((agent.config.state / "status.json").read_bytes())


# --- a disk that cannot be written -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_an_agent_whose_disk_cannot_be_written_stalls_and_resumes(fed, monkeypatch, code):
    """Also a status that cannot be written, as an idle agent's."""

    def rejected(*_, **__):
        raise OSError(code, os.strerror(code), "status.json")

    agent = fed.add("a0")
    fed.settle()
    with monkeypatch.context() as patch:
        patch.setattr("edge_agent.agent.event_loop.write_atomic", rejected)
        patch.setattr("edge_agent.agent.health.write_atomic", rejected)
        try:
            agent.write_status()
        except OSError as error:
            agent.disk.failed(error, "status_not_written")
        fed.wait(30)
        assert (member(fed)["condition"], member(fed)["fault"]["error"]) == ("stalled", "DiskError")
        fed.request(rounds=1)
        fed.wait(3)
        assert fed.tasks["a0"].done == []
        assert "round 1 needs" in fed.coordinator.status()["waiting"]["for"]
    fed.until(lambda: not agent.condition.is_stalled, limit_s=70)
    fed.settle()
    assert (member(fed)["condition"], member(fed)["fault"]) == ("ok", None)
    assert local(agent)["condition"] == "ok"
    fed.finish()
    assert fed.record.status == "finished"


def test_an_agent_that_stalls_in_a_round_does_it_when_its_disk_can_be_written_again(tmp_path):
    """Where its update is needed; a round that has enough without it goes on."""
    with Federation(tmp_path, agents=("a0", "a1"), cohort={"min_agents": 2}) as fed:
        fed.settle()
        fed.tasks["a0"].before = full
        fed.request(rounds=1)
        fed.wait(1)
        assert [member(fed, name)["condition"] for name in ("a0", "a1")] == ["stalled", "ok"]
        fed.tasks["a0"].before = lambda job: None
        assert fed.finish() < 10
        assert fed.record.status == "finished"
        assert sorted(entry.agent for entry in fed.entries("update_accepted")) == ["a0", "a1"]


def test_a_round_that_has_enough_updates_goes_on_without_an_agent_that_stalls(fed):
    fed.add("a0")
    fed.add("a1")
    fed.settle()
    fed.tasks["a0"].before = full
    fed.request(rounds=1)
    assert fed.until(lambda: fed.entries("round_closed")) < 3
    assert fed.metrics()[0]["missing"] == ["a0"]


def test_looks_at_a_full_disk_come_less_and_less_often(fed, monkeypatch):
    agent = fed.add("a0")
    looks = []
    fed.settle()
    monkeypatch.setattr("edge_agent.agent.health.try_disk", lambda *_: looks.append(fed.clock.now) or full())
    agent.condition.note("disk", OSError(errno.ENOSPC, "full"))
    fed.wait(600)
    pauses = [round(later - earlier) for earlier, later in pairwise(looks)]
    assert pauses[:5] == [4, 8, 16, 32, 60]
    assert set(pauses[4:]) == {60}
    told = [fault for fault in fed.messages(fed.topics.up("a0"), up.Fault) if fault.error == "DiskError"]
    assert len(told) == 1


def test_what_was_downloaded_before_makes_room(fed):
    agent = fed.add("a0")
    fed.request(rounds=2)
    fed.finish()
    held = [path for path in agent.cache.folder.iterdir() if path.is_file()]
    assert held
    agent.condition.note("disk", OSError(errno.ENOSPC, "full"))
    fed.wait(1)
    assert [path for path in held if path.exists()] == []


def test_a_chunk_that_has_no_room_is_not_asked_for_each_second(fed, monkeypatch):
    fed.add("a0")
    fed.settle()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr("edge_agent.agent.health.try_disk", full)
        fed.request(rounds=1)
        fed.wait(30)
        assert len(fed.messages(fed.topics.up("a0"), up.Want)) <= 2
        assert member(fed)["condition"] == "stalled"
    fed.finish()
    assert fed.record.status == "finished"


def test_room_for_less_than_what_is_needed_is_no_room(tmp_path):
    try_disk(tmp_path)
    with pytest.raises(OSError, match="are needed") as raised:
        try_disk(tmp_path, 1 << 60)
    assert disk_error(raised.value) is not None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_seen_to_be_full_or_read_only_from_outside(small_disk):
    assert look_at_disk(small_disk) is None
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(bytes(4096))
    assert "No space left" in look_at_disk(small_disk)["message"]
    (small_disk / "fill").unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "Read-only" in look_at_disk(small_disk)["message"]


def eventually(condition, process):
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not (found := condition()):
        assert process.poll() is None, f"the agent ended with {process.returncode}"
        assert time.monotonic() < deadline, "nothing happens any more"
        threading.Event().wait(0.1)
    return found


@pytest.mark.slow
@pytest.mark.broker
def test_an_idle_agent_survives_a_disk_that_fills_up_and_says_so(small_disk, tmp_path, capsys):
    """A real process on a real full file system: it ended with a traceback within 5 s."""
    with EmbeddedBroker() as broker:
        config = tmp_path / "agent.toml"
        config.write_text(
            f'id = "porch"\ntier = "head"\nstate = "{small_disk}"\n[broker]\nurl = "{broker.url}"\n'
            '[data]\nsource = "digits:rendered?n=20"\n'
        )

        def status() -> dict:
            edge_agent(["status", "--json", "--config", str(config)])
            return json.loads(capsys.readouterr().out)

        log = tmp_path / "log"
        with (
            log.open("wb") as stderr,
            subprocess.Popen([sys.executable, "-m", "edge_agent", "run", "--config", config], stderr=stderr) as agent,
        ):
            try:
                eventually(lambda: (small_disk / "status.json").exists(), agent)
                with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
                    while True:
                        fill.write(bytes(4096))
                found = status()
                assert (found["running"], found["condition"]) == (True, "stalled")
                assert "free space" in found["fault"]["remedy"]
                written = (small_disk / "status.json").stat().st_mtime_ns
                eventually(lambda: "stalled reason=" in log.read_text(), agent)  # it has tried to write its status
                assert (small_disk / "status.json").stat().st_mtime_ns == written
                (small_disk / "fill").unlink()
                eventually(lambda: (small_disk / "status.json").stat().st_mtime_ns != written, agent)
                eventually(lambda: status()["condition"] == "ok", agent)
            finally:
                agent.terminate()
                agent.wait(PATIENCE_S)
        assert agent.returncode == 0
        assert "Traceback" not in log.read_text()
        assert "resumed" in log.read_text()


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, expected, remedy",
    [
        (DataError(f"images:{PLACE}: has classes 'hiv-positive'"), "DataError", "correct the data"),
        (ConfigError(PLACE, ["x"]), "ConfigError", "correct the agent's configuration"),
        (StateError(f"{PLACE}: damaged"), "StateError", "log"),
        (BundleDamaged(f"{PLACE}/bundles/x: missing or damaged: encoder.onnx"), "BundleDamaged", "release"),
        (UnknownName("head", "lrr", ["lr"]), "UnknownName", "restart the agent"),
        (MissingCapability.package("torch", "train", "agent 'a'"), "MissingCapability", "install"),
        (TrainingFailed("loss became nan"), "TrainingFailed", "step size"),
        (PermissionError(errno.EACCES, "Permission denied", PLACE), "PermissionError", "log"),
        (ValueError(f"cannot convert {PLACE}/x.png"), "ValueError", "log"),
        (OSError(errno.ENOSPC, "No space left on device", PLACE), "DiskError", "free space"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_coordinator_gets_class_and_remedy_and_no_local_name(error, expected, remedy):
    problem = problem_of("work", error, NOW)
    told = problem.to_coordinator(fields.JobKey("run-0001", 3))
    assert (told.error, told.run, told.round) == (expected, "run-0001", 3)
    assert remedy in told.remedy
    assert "hiv" not in told.message + told.remedy
    assert "/srv" not in told.message + told.remedy
    whole = problem.as_json()
    assert whole["at"] == "2026-11-22T10:00:00+00:00"
    if not isinstance(error, TrainingFailed | UnknownName | MissingCapability):
        assert PLACE in whole["message"]


def test_conditions_are_told_by_the_worst_and_end_when_that_works_again():
    condition = Condition()
    condition.note("data", DataError("no"))
    condition.note("bundle", BundleDamaged("bad"))
    assert (condition.name, condition.problem.error) == ("fault", "BundleDamaged")
    condition.note("work", OSError(errno.EROFS, "Read-only file system"))
    assert (condition.name, condition.problem.error) == ("stalled", "DiskError")
    condition.clear("disk")
    condition.clear("bundle")
    assert (condition.name, condition.problem.error) == ("fault", "DataError")
    condition.clear("data")
    assert (condition.name, condition.problem) == ("ok", None)


def test_words_of_a_peer_cannot_steer_a_terminal_or_forge_a_line(fed, caplog):
    evil = "\x1b[2J\x1b]0;owned\x07\n2026-11-22 WARNING forged \u202eexe.txt"
    fed.add("a0")
    fed.settle()
    agent = fed.agents["a0"]
    fault = up.Fault.model_construct(v=fields.PROTOCOL, boot=agent.boot, seq=9, type="fault", error="X", message=evil)
    agent.transport.publish(fed.topics.up("a0"), codec.encode(fault))
    fed.settle()
    said = member(fed)["fault"]["message"]
    assert said == " [2J ]0;owned  2026-11-22 WARNING forged  exe.txt"
    assert not any("\x1b" in record.getMessage() or "\n" in record.getMessage() for record in caplog.records)


def test_a_fault_stands_in_the_status_until_the_agent_says_that_it_is_well(fed):
    def broken(job):
        raise DataError("images:secret: no")

    agent = fed.add("a0")
    fed.tasks["a0"].before = broken
    fed.request(rounds=1)
    fed.until(lambda: fed.record.is_over)
    fed.wait(40)
    assert member(fed)["condition"] == "fault"
    assert (member(fed)["fault"]["error"], "secret" in json.dumps(member(fed))) == ("DataError", False)
    assert local(agent)["fault"]["message"] == "images:secret: no"
    fed.tasks["a0"].before = lambda job: None
    fed.request(rounds=1)
    fed.until(lambda: member(fed)["condition"] == "ok")
    assert (member(fed)["fault"], local(agent)["fault"]) == (None, None)


def test_a_coordinator_that_starts_anew_hears_of_a_fault_that_stands(fed):
    agent = fed.add("a0")
    fed.settle()
    agent.condition.note("work", DataError("no"))
    fed.kill_coordinator()
    fed.start_coordinator()
    fed.wait(1)
    assert (member(fed)["condition"], member(fed)["fault"]["error"]) == ("fault", "DataError")


def test_agent_that_the_broker_refuses_asks_why_and_shows_it_until_it_is_let_in(fed, monkeypatch):
    agent = fed.add("a0")
    asked = []
    events = [Disconnected("lost", 1.0)] * 4
    fed.settle()

    def answer(_state, what, _certificate=""):
        asked.append(what)
        raise EnrolmentRefused("certificate: it was revoked at 2026-11-22; 'headwater enroll a0' makes a token")

    monkeypatch.setattr(certificate, "renew_beside", answer)
    agent.certificate.renewal = SimpleNamespace(is_due=lambda _: False, is_expired=lambda: False)
    monkeypatch.setattr(agent.transport, "receive", lambda _: events.pop() if events else None)
    for _ in range(2):
        agent.step(0.0)
    assert (asked, local(agent)["condition"]) == ([], "ok"), "a broker that restarts is no reason"
    for _ in range(6):
        agent.step(0.0)
    found = local(agent)
    assert (asked, found["condition"], found["fault"]["code"]) == (["standing"], "fault", "identity")
    assert "it was revoked at 2026-11-22" in found["fault"]["message"]
    assert "edge-agent enroll -" in found["fault"]["remedy"]
    events.append(Connected(2))
    agent.step(0.0)
    assert local(agent)["condition"] == "ok"


def test_both_status_commands_show_fault_and_remedy(fed, tmp_path, capsys):
    agent = fed.add("a0")
    fed.settle()
    agent.condition.note("work", DataError("images:pictures: has classes 'katze'"))
    fed.wait(1)
    agent.write_status()
    fed.wait(2)
    fed.coordinator.catch_up()
    config = tmp_path / "agent.toml"
    config.write_text('id = "a0"\nstate = "a0"\n[data]\nsource = "none:"\n')
    assert edge_agent(["status", "--config", str(config)]) == 1
    said = capsys.readouterr().out
    assert "DataError: images:pictures: has classes 'katze'" in said
    assert "remedy" in said
    with contextlib.suppress(SystemExit):
        headwater(["status", "--state", str(fed.config.state)])
    said = capsys.readouterr().out
    assert "online, fault" in said
    assert "its log and 'edge-agent status' there say which; correct the data" in said
    assert re.search(r"\(at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)", said)
    assert "katze" not in said


# --- told early --------------------------------------------------------------------------------------------------

TASK = Task(input=ImageInput(channels=1, height=8, width=8), class_names=("cat", "dog"), encoder="small_cnn")


def pictures(folder: Path, *classes: str) -> str:
    from PIL import Image

    for name in classes:
        (folder / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / name / "0.png")
    return f"images:{folder}"


@pytest.mark.parametrize(
    "classes, head, task, error, words",
    [
        (("cat",), "lr", TASK, None, ""),
        (("cat", "katze"), "lr", TASK, DataError, "'katze'"),
        (("cat",), "lrr", TASK, UsageError, "did you mean 'lr'"),
        (("cat",), "lr", TASK.model_copy(update={"class_names": ("dog",)}), DataError, "'cat'"),
    ],
    ids=["right", "class", "head", "task"],
)
def test_data_and_head_are_looked_at_in_a_process_of_its_own(children, tmp_path, classes, head, task, error, words):
    source = pictures(tmp_path / "pictures", *classes)
    config = AgentConfig(state=tmp_path, data=DataConfig(source=source), head=HeadConfig(name=head))
    with pytest.raises(error, match=words) if error else contextlib.nullcontext():
        check_beside(config, task)


@pytest.mark.parametrize("tier", ["head", "train"])
def test_a_device_with_wrong_classes_is_seen_before_any_run(fed, tmp_path, tier):
    """The task is known when the device is welcomed; it was silent until the first run began, or its end."""
    source = pictures(tmp_path / "pictures", "Hund", "katze")

    class OwnData(TaskRunner):
        def __init__(self, config, tier):
            super().__init__(config.model_copy(update={"data": DataConfig(source=source)}), tier)

    fed.make_tasks = OwnData
    agent = fed.add("kitchen", tier=tier)
    fed.wait(1)
    found = member(fed, "kitchen")
    assert (found["condition"], found["fault"]["error"]) == ("fault", "DataError")
    assert "Hund" not in json.dumps(found)
    assert "'Hund', 'katze'" in local(agent)["fault"]["message"]
    assert last_task(agent.config.state) == fed.task, "with which 'edge-agent doctor' compares the folders"
    for name, right in (("Hund", "a"), ("katze", "b")):
        (tmp_path / "pictures" / name).rename(tmp_path / "pictures" / right)
    if tier == "head":
        fed.request(rounds=1)
    else:
        agent._hello()
    fed.wait(2)
    assert member(fed, "kitchen")["condition"] == "ok", "looked at again when the next run begins, or at a hello"


def test_a_task_that_is_known_to_fit_is_not_looked_at_again(fed):
    fed.add("kitchen", tier="head")
    fed.wait(1)
    fed.add("a0")
    fed.wait(1)
    fed.request(rounds=1)
    fed.finish()
    assert fed.tasks["kitchen"].checked == [fed.task]
    assert fed.tasks["a0"].checked == [fed.task], "before the run"


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_head_that_nobody_has_is_told_before_the_broker_is_tried(tmp_path, capsys, command):
    config = tmp_path / "agent.toml"
    config.write_text(
        'id = "porch"\ntier = "head"\nstate = "state"\n[broker]\nurl = "mqtt://127.0.0.1:1"\n'
        '[data]\nsource = "digits:rendered?n=20"\n[head]\nname = "lrr"\n'
    )
    assert edge_agent([command, "--config", str(config)]) == 2
    said = capsys.readouterr()
    assert "did you mean 'lr'" in said.out + said.err
    if command == "run":
        assert edge_agent(["status", "--json", "--config", str(config)]) == 1
        assert "did you mean 'lr'" in json.loads(capsys.readouterr().out)["fault"]["message"]


def test_an_agent_whose_id_is_not_its_user_is_told_so(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.kill_coordinator()
        agent = fed.add("kitchen")
        broker = BrokerConfig(user="porch")
        agent.config = agent.config.model_copy(update={"broker": broker})
        fed.wait(12)
        said = local(agent)["waits_for"]
        assert "this agent's id is 'kitchen', its MQTT user 'porch'" in said


def test_a_refused_login_is_what_the_agent_waits_for(tmp_path):
    from edge_agent.wire.transport import Disconnected

    with Federation(tmp_path, agents=("a0",)) as fed:
        agent = fed.agents["a0"]
        fed.settle()
        agent.transport._events.put(Disconnected("broker refuses user 'a0' (Not authorized): enroll", 1.0))
        agent.step(0)
        assert "refuses user 'a0' (Not authorized): enroll" in local(agent)["waits_for"]
        assert "'edge-agent doctor --config FILE'" in local(agent)["waits_for"]

"""Hosted clients in their own processes: beside agents over a real broker, and when one is killed at its work."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from hosted_harness import SOURCE, coordinator_toml, processes, simulated, until

from coordinator.broker import EmbeddedBroker
from coordinator.hosted import transport
from coordinator.hosted.transport import HostedTransport
from coordinator.journal.entries import fact_of
from coordinator.processes import supervisor
from coordinator.processes.supervisor import exit_reason
from coordinator.rounds.request import Request
from coordinator.simulation.setup import PARTITION
from coordinator.state.store import StateFolder
from edge_agent.core import child_process
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.wire.messages import codec
from edge_agent.wire.transport import Message


@pytest.mark.slow
@pytest.mark.broker
def test_two_hosted_clients_and_two_agents_over_a_broker_end_in_the_bits_of_the_simulation(tmp_path):
    """Although the process of the hosted ones is killed in the middle of it."""
    prepared, result = simulated(tmp_path / "sim")
    agents = ("c2", "c3")
    with EmbeddedBroker() as broker:
        (tmp_path / "coordinator.toml").write_text(coordinator_toml(prepared.task, broker.url))
        for name in agents:
            (tmp_path / f"{name}.toml").write_text(
                f'id = "{name}"\ntier = "train"\nstate = "{name}"\n[broker]\nurl = "{broker.url}"\n'
                f'[data]\nsource = "{SOURCE}"\npartition = "sim/{PARTITION}"\n'
            )
        programs = {name: ("edge_agent", "run", "--config", f"{name}.toml") for name in agents}
        state = StateFolder(tmp_path / "state")

        def words():
            return "\n".join(path.read_text()[-4000:] for path in tmp_path.rglob("*.log"))

        with processes(tmp_path, serve=("coordinator", "serve", "--config", "coordinator.toml"), **programs):
            with state.look(create=True) as folder:
                asked = Request("fedper", prepared.request().params, 3, 7, prepared.task)
                run = folder.journal.request_run(fact_of("run_requested", asked.body()))
                over = ("run_finished", "run_failed")
                words = lambda: "\n".join(path.read_text()[-2000:] for path in tmp_path.rglob("*.log"))
                (end,) = until(lambda: folder.journal.entries(run, over), "the run is over", words)
                summary = folder.run(run).summary()
    assert end.body.get("encoder_sha256") == result["encoder_sha256"], end.body
    assert [agent["id"] for agent in summary["agents"]] == ["c0", "c1", "c2", "c3"]


@pytest.mark.slow
@pytest.mark.broker
def test_hosted_clients_spread_over_devices_end_in_the_bits_of_one_process(tmp_path):
    """Four clients in one process, and in three of one device each, of which two are the same device."""
    prepared, _ = simulated(tmp_path / "sim")
    hashes = []
    for placement, count in (("hosted_processes = 1", 1), ('hosted_devices = ["cpu", "cpu", "cpu"]', 3)):
        folder = tmp_path / str(count)
        folder.mkdir()
        shutil.copytree(tmp_path / "sim", folder / "sim")
        with EmbeddedBroker() as broker:
            toml = coordinator_toml(prepared.task, broker.url, ("c0", "c1", "c2", "c3"), placement)
            (folder / "coordinator.toml").write_text(toml)
            serve = ("coordinator", "serve", "--config", "coordinator.toml")
            with processes(folder, serve=serve), StateFolder(folder / "state").look(create=True) as state:
                asked = Request("fedper", prepared.request().params, 3, 7, prepared.task)
                run = state.journal.request_run(fact_of("run_requested", asked.body()))
                over = ("run_finished", "run_failed")
                words = lambda: "\n".join(path.read_text()[-2000:] for path in folder.rglob("*.log"))  # noqa: B023
                (end,) = until(lambda: state.journal.entries(run, over), "the run is over", words)  # noqa: B023
                hashes.append(end.body["encoder_sha256"])
        assert len(list((folder / "state" / "hosted").glob("process-*.log"))) == count
    assert hashes[0] == hashes[1]


PIPE = """
import json, socket, struct, sys, threading
end = socket.socket(fileno=0)
def say(topic, payload):
    end.sendall(struct.pack("<HI", len(topic), len(payload)) + topic + payload)
"""
DIES_AT_WORK = (
    PIPE
    + """
say(b"fl/1/home/s/h", b"online b1")
say(b"task", json.dumps(["h", ["run-0001", 2, "train"]]).encode())
sys.exit("no memory is left")
"""
)


def heard(hosts, told):
    """Whether there was something to hear, which is put into ``told``."""
    event = hosts.receive(0)
    if event is not None:
        told.append((event.topic, event.payload))
    return event is not None


def test_a_client_at_whose_work_the_process_always_dies_is_given_up(tmp_path):
    """Each death is told at once, and after the third one nobody waits for the client in this round."""
    woken = threading.Event()
    config = AgentConfig(id="h", state=tmp_path / "h", data=DataConfig(source="none:"))
    hosts = HostedTransport([[config]], (sys.executable, "-c", DIES_AT_WORK), tmp_path, woken.set)
    hosts.start()
    try:
        heard = []
        until(
            lambda: (heard.append(hosts.receive(0)), heard[-1] and heard[-1].topic.endswith("/up"))[1], "it is given up"
        )
    finally:
        hosts.close()
    told = [(event.topic, event.payload) for event in heard if event]
    presence = [("fl/1/home/s/h", b"online b1"), ("fl/1/home/s/h", b"offline b1")]
    assert told[:-1] == presence * 3
    fault = codec.parse_from_agent(told[-1][1])
    assert (fault.run, fault.round) == ("run-0001", 2)
    assert "crashed 3 times in round 2" in fault.message
    assert "exit code 1; last output: no memory is left" in fault.message
    assert woken.is_set()
    assert hosts.processes[0].pid is not None


IS_THERE = (
    PIPE
    + """
say(b"fl/1/home/s/h", b"online b1")
threading.Event().wait()
"""
)


@contextlib.contextmanager
def one_hosted(folder, monkeypatch, script=IS_THERE):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    config = AgentConfig(id="h", state=folder / "h", data=DataConfig(source="none:"))
    hosts = HostedTransport([[config]], (sys.executable, "-c", script), folder / "words", lambda: None)
    hosts.start()
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.mark.parametrize("ends", ["log removed", "signal without a name"])
def test_a_hosted_process_comes_back_however_it_ended(tmp_path, monkeypatch, ends):
    with one_hosted(tmp_path, monkeypatch) as hosts:
        assert "its process is starting" in hosts.away()["h"]
        until(lambda: not hosts.away(), "it is there")
        before = hosts.processes[0].pid
        if ends == "log removed":
            shutil.rmtree(tmp_path / "words")
        os.kill(before, signal.SIGKILL if ends == "log removed" else signal.SIGRTMIN + 2)
        until(lambda: hosts.processes[0].pid != before and not hosts.away(), "it is back")
        assert hosts.processes[0].supervisor.is_alive


NO_WORDS = PIPE + "end.sendall(bytes([1, 0, 0, 0, 0, 0, 255])); threading.Event().wait()"


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), BlockingIOError(11, "no"), ValueError("?")])
def test_a_process_that_cannot_be_started_is_tried_again_and_the_status_says_why(tmp_path, monkeypatch, error, caplog):
    real = subprocess.Popen
    tries = []

    def popen(*words, **options):
        tries.append(words)
        if len(tries) <= 4 or not free.is_set():
            raise error
        return real(*words, **options)

    free = threading.Event()
    monkeypatch.setattr(child_process.subprocess, "Popen", popen)
    with one_hosted(tmp_path, monkeypatch) as hosts:
        until(lambda: len(tries) >= 4, "it is tried again")
        assert f"its process exited ({type(error).__name__}: " in hosts.away()["h"]
        free.set()
        until(lambda: not hosts.away(), "it is there")
    assert caplog.text.count("hosted_process_exited") >= 4


def test_a_process_that_says_what_cannot_be_read_is_ended_and_started_again(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    with one_hosted(tmp_path, monkeypatch, NO_WORDS) as hosts:
        until(lambda: caplog.text.count("hosted_process_started") >= 3, "it is started again")
        assert "UnicodeDecodeError" in hosts.away()["h"]


def test_pauses_grow_and_stay_bounded():
    pauses = [supervisor.restart_pause_s(runs) for runs in range(5000)]
    assert pauses[:2] == [0.0, 0.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == supervisor.LONGEST_PAUSE_S


@pytest.mark.parametrize(
    "code, told", [(3, "exit code 3"), (-9, "signal 9 (SIGKILL)"), (-36, "signal 36"), (-200, "signal 200")]
)
def test_every_end_has_words(tmp_path, code, told):
    words = tmp_path / "words.log"
    assert exit_reason(code, words) == f"{told}; its log {words} cannot be read"
    words.write_bytes(b"x" * 200_000 + b"\nfirst\nlast \xff\n")
    assert exit_reason(code, words).startswith(f"{told}; last output: x")
    assert exit_reason(code, words).endswith("xx / first / last \ufffd")


def test_a_process_that_does_not_listen_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "MAX_QUEUED_BYTES", 400_000)
    hosts = HostedTransport(
        [[AgentConfig(id="h", state=tmp_path / "h", data=DataConfig(source="none:"))]],
        (sys.executable, "-c", "import threading; threading.Event().wait()"),
        tmp_path,
        lambda: None,
    )
    hosts.start()
    try:
        until(lambda: hosts.processes[0].pid, "it is there")
        for _ in range(20):
            hosts.publish("fl/1/home/b/0123", bytes(60_000))
        assert 12 <= hosts.traffic.dropped <= 15, "a pipe holds 64 kB, and 400 kB wait"
    finally:
        hosts.close()


SAYS_WHAT_IT_HEARS_FIRST = (
    PIPE
    + """
name, size = struct.unpack("<HI", end.recv(6, socket.MSG_WAITALL))
say(b"fl/1/home/s/h", b"online " + end.recv(name, socket.MSG_WAITALL))
threading.Event().wait()
"""
)


def test_a_process_hears_its_configuration_before_what_is_said_to_all_meanwhile(tmp_path):
    class Slow(AgentConfig):
        def model_dump(self, **options):
            hosts.publish("fl/1/home/b/0123", b"news")
            return super().model_dump(**options)

    config = Slow(id="h", state=tmp_path / "h", data=DataConfig(source="none:"))
    hosts = HostedTransport(
        [[config]], (sys.executable, "-c", SAYS_WHAT_IT_HEARS_FIRST), tmp_path / "words", lambda: None
    )
    hosts.start()
    try:
        said = until(lambda: hosts.receive(0), "it is there")
    finally:
        hosts.close()
    assert said.payload == b"online configure"


def test_whoever_waits_is_woken_although_it_takes_all_there_is_while_more_comes(tmp_path, monkeypatch):
    def interleaved(message):
        while hosts.receive(0):
            pass
        return put(message)

    config = AgentConfig(id="h", state=tmp_path / "h", data=DataConfig(source="none:"))
    woken = []
    hosts = HostedTransport([[config]], (), tmp_path, lambda: woken.append(1))
    put = hosts._inbox.put_message
    monkeypatch.setattr(hosts._inbox, "put_message", interleaved)
    for number in range(3):
        hosts._deliver(Message("fl/1/home/s/h", bytes([number])))
        assert len(woken) == number + 1


def test_whoever_is_woken_already_is_not_woken_for_each_word(tmp_path):
    config = AgentConfig(id="h", state=tmp_path / "h", data=DataConfig(source="none:"))
    woken = []
    hosts = HostedTransport([[config]], (), tmp_path, lambda: woken.append(1))
    for number in range(5):
        hosts._deliver(Message("fl/1/home/s/h", bytes([number])))
    assert len(woken) == 1
    assert [hosts.receive(0).payload for _ in range(5)] == [bytes([number]) for number in range(5)]

"""An agent as a program: tier chosen, data found, broker reached, signals heeded, systemd told."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from .. import capabilities
from ..config import AgentConfig
from ..errors import HeadwaterError, MissingCapability, StateError
from ..storage import folder_lock, read_json, sweep, write_atomic
from ..wire.mqtt import MqttTransport
from ..worker import ThreadWorker
from .event_loop import Agent, will_of
from .health import problem_of
from .tasks import TaskRunner, check

log = logging.getLogger(__name__)

STATUS_EVERY_S = 5.0


def run(config: AgentConfig) -> None:
    """Be an agent until told to stop: returns after SIGTERM, raises KeyboardInterrupt after Ctrl-C.

    Raises:
        MissingCapability: the tier asked for needs packages that are not here.
        DataError: the data source's file or folder is not there; told before the broker is tried.
        UnknownName: no such head.
        StateError: another agent uses the state folder.
        BrokerAway: the broker does not answer and ``broker.wait`` is false.
        UsageError: it does not let this agent in, and ``broker.wait`` is false.
        ProtocolMismatch: the coordinator speaks another protocol.
        DuplicateId: another agent with this id is alive.
    """
    try:
        tier = choose_tier(config)
        _check(config)
        _run(config, tier)
    except StateError:
        raise  # of another agent that uses the folder, perhaps, whose status stays
    except HeadwaterError as error:
        _leave_status(config, error)
        raise


def _run(config: AgentConfig, tier: str) -> None:
    boot = secrets.token_hex(8)
    with folder_lock(config.state, f"edge-agent {config.id}"), _signals() as stop:
        if left := sweep(config.state):
            log.info("swept files=%d: temporary files of an earlier start", left)
        transport = MqttTransport(config.broker, config.id, will=will_of(config, boot))
        agent = Agent(config, transport, TaskRunner(config, tier), worker=ThreadWorker(transport.wake), boot=boot)
        try:
            agent.start()
            _notify("READY=1")
            _serve(agent, stop)
        finally:
            _notify("STOPPING=1")
            agent.close()
        if stop.by == signal.SIGINT:
            raise KeyboardInterrupt


def choose_tier(config: AgentConfig) -> str:
    """The tier that was asked for, or that this device is good for.

    Raises:
        MissingCapability: it needs packages that are not here.
    """
    able = capabilities.find()
    tier = able.tier if config.tier == "auto" else config.tier
    if tier == "train" and "torch" not in able.packages:
        raise MissingCapability.package("torch", "train", f"agent '{config.id}' of tier 'train'")
    if tier != "train" and "onnxruntime" not in able.packages:
        raise MissingCapability.package("onnxruntime", "agent", f"agent '{config.id}' of tier 'head'")
    return tier


def _check(config: AgentConfig) -> None:
    """`check` in a child where the system can fork: an idle agent does without the 16 MB that it would leave."""
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            _check_and_exit(config)
        if os.waitpid(child, 0)[1] == 0:
            return
    check(config)  # once more, to say what is wrong


def _check_and_exit(config: AgentConfig) -> None:
    code = 1
    try:
        check(config)
        code = 0
    finally:
        os._exit(code)


def _leave_status(config: AgentConfig, error: HeadwaterError) -> None:
    """Why the agent ended, for 'edge-agent status', beside what an earlier start has written there."""
    problem, place = problem_of("start", error, datetime.now(timezone.utc)), config.state / "status.json"
    status: dict[str, Any] = {}
    with contextlib.suppress(StateError):
        status = read_json(place) or {}
    status |= {"id": config.id, "condition": "fault", "fault": problem.as_json()}
    with contextlib.suppress(OSError):
        write_atomic(place, json.dumps(status).encode(), durable=False)


def _serve(agent: Agent, stop: threading.Event) -> None:
    """The agent's loop; the watchdog is told from the loop that does the work, so a stuck loop is noticed."""
    told_at, was_welcomed = float("-inf"), False
    while not stop.is_set():
        agent.step(agent.idle_s())
        agent.raise_if_rejected()
        if agent.clock() - told_at >= STATUS_EVERY_S or agent.welcomed != was_welcomed:
            told_at, was_welcomed = agent.clock(), agent.welcomed
            _notify("WATCHDOG=1")
            try:
                agent.write_status()
            except OSError as error:
                agent.on_os_error(error, "status_not_written")


class _Stop(threading.Event):
    """Set by a signal, whose number is ``by``."""

    by = 0

    def heed(self, number: int, _frame: object) -> None:
        self.by = number
        self.set()


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.heed) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _notify(message: str) -> None:
    """Tell systemd (sd_notify protocol); nothing happens where systemd did not start us."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(message.encode(), address)

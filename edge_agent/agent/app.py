"""An agent as a program: it chooses the tier, checks the data, serves until a signal, and notifies systemd."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from ..core import capabilities
from ..core.children import ThreadWorker, in_child, is_stopped, stop_on_signals
from ..core.config import AgentConfig
from ..core.errors import BrokerAway, CodecError, HeadwaterError, MissingCapability, StateError
from ..core.locks import folder_lock
from ..core.own_folders import check_own_folder
from ..core.storage import read_json, sweep, write_atomic
from ..identity.certificates import check_name
from ..identity.renewal import Renewal, renew_beside
from ..wire.blobs.by_http import BlobFetcher
from ..wire.blobs.put_by_http import BlobSender
from ..wire.mqtt import MqttTransport, blob_tls_context, refused_topics
from .data_check import check
from .event_loop import Agent, will_of
from .health import problem_of
from .runtime import AgentRuntime, RefusedTopics
from .tasks.runner import TaskRunner
from .textfile import TextFile

if TYPE_CHECKING:
    from ..serving.supervisor import ServingSupervisor

log = logging.getLogger(__name__)

STATUS_EVERY_S = 5.0


def run(config: AgentConfig) -> None:
    """Run until stopped: returns after SIGTERM, raises KeyboardInterrupt after Ctrl-C.

    Raises:
        MissingCapability: the configured tier needs packages that are not installed.
        EnrolmentRefused: its certificate is for another id or federation.
        DataError: the data source's file or folder is missing; raised before the broker is tried.
        UnknownName: no such head.
        StateError: another agent uses the state folder.
        BrokerAway: the broker does not answer and ``broker.wait`` is false.
        UsageError: it rejects this agent's login, and ``broker.wait`` is false.
        ProtocolMismatch: the coordinator speaks another protocol.
        DuplicateId: another agent with this id is online.
    """
    check_own_folder(config.state)  # before anything is written there, also the status that names an error
    try:
        tier = choose_tier(config)
        check_name(config)
        in_child(lambda: check(config))  # it would leave 16 MB in an idle agent
        _run(config, tier)
    except StateError:
        raise  # perhaps another agent uses the folder: its status stays
    except HeadwaterError as error:
        _leave_status(config, error)
        raise


def _run(config: AgentConfig, tier: str) -> None:
    """Serve as `run`, once tier, certificate and local data are known to be right, while the state folder is held."""
    boot = secrets.token_hex(8)
    with folder_lock(config.state, f"edge-agent {config.id}"), stop_on_signals() as stop:
        check_own_folder(config.state / "bundles")
        swept_files = sweep(config.state)
        if swept_files:
            log.info("swept files=%d: temporary files of an earlier start", swept_files)
        renewal = Renewal(config.state)
        if renewal.is_enrolled:
            _renew_expired(renewal)
        transport = MqttTransport(config.broker, config.id, will=will_of(config, boot))
        renewed = renewal if renewal.is_enrolled else None
        runtime = AgentRuntime(
            worker=ThreadWorker(transport.wake),
            boot=boot,
            renewal=renewed,
            refused_topics=refused_topics_of(config, transport),
            leave_broker=transport.leave if len(config.broker.urls) > 1 else None,
            fetcher=BlobFetcher(transport.wake, lambda: blob_tls_context(config.broker), config.downloads.hosts),
            sender=BlobSender(
                transport.wake,
                lambda: blob_tls_context(config.broker),
                config.uploads.hosts,
                needs_tls=config.broker.uses_tls,
            ),
        )
        agent = Agent(config, transport, TaskRunner(config, tier, beside=True), runtime)
        serving = _start_serving(config)
        try:
            agent.start()
            _notify("READY=1")
            _serve(agent, stop)
        finally:
            _notify("STOPPING=1")
            if serving is not None:
                serving.close()
            agent.close()
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt


def _start_serving(config: AgentConfig) -> ServingSupervisor | None:
    """Start the process that answers inputs, if the configuration has ``[serve]``; return its supervisor, else None."""
    if config.serve is None:
        return None
    from ..serving.supervisor import ServingSupervisor

    supervisor = ServingSupervisor(config)
    supervisor.start()
    return supervisor


ASK_RULES_LIMIT_S = 4.0


def refused_topics_of(config: AgentConfig, transport: MqttTransport) -> RefusedTopics | None:
    """Return a function that asks the broker of ``transport`` what it refuses; None where certificates name agents.

    A broker that takes the id from the certificate would end the agent's own connection, and `check_name` has compared
    the ids.
    """
    if config.broker.tls is not None and config.broker.tls.cert is not None:
        return None
    return lambda messages: refused_topics(transport.broker, config.id, messages, ASK_RULES_LIMIT_S)


def _renew_expired(renewal: Renewal) -> None:
    """Renew a certificate that has expired while the device was off: the broker would not let it in.

    Raises:
        EnrolmentRefused: the coordinator refuses; only a new token helps.
        MissingCapability: certificates cannot be made here.
    """
    if not renewal.is_expired():
        return
    try:
        result = renew_beside(renewal.state, "by_port")
        log.info("certificate_renewed until=%s", result["until"])
    except (BrokerAway, StateError, CodecError) as error:
        level = logging.INFO if is_stopped(error) else logging.WARNING
        log.log(level, "certificate_not_renewed reason=%s; tried again while the agent runs", error)


def choose_tier(config: AgentConfig) -> str:
    """Return the configured tier, or the highest that this device supports.

    Raises:
        MissingCapability: it needs packages that are not installed.
    """
    device = capabilities.find()
    # A class that no other device knows has no place in a shared model, so a device with such classes does not train.
    if config.tier != "auto":
        tier: str = config.tier
    elif config.head.own_classes:
        tier = "head"
    else:
        tier = device.tier
    if tier == "train" and "torch" not in device.packages:
        raise MissingCapability.package("torch", "train", f"agent '{config.id}' of tier 'train'")
    # A device with neither package supports no tier; the least that it needs is what tier 'head' does.
    if tier != "train" and "onnxruntime" not in device.packages:
        raise MissingCapability.package("onnxruntime", "agent", f"agent '{config.id}' of tier 'head'")
    return tier


def _leave_status(config: AgentConfig, error: HeadwaterError) -> None:
    """Add why the agent ended to the status file, for 'edge-agent status'."""
    problem = problem_of("start", error)
    path = config.state / "status.json"
    status: dict[str, Any] = {}
    with contextlib.suppress(StateError):
        status = read_json(path) or {}
    status |= {"id": config.id, "condition": "fault", "fault": problem.as_json()}
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(status).encode(), durable=False)


def _serve(agent: Agent, stop: threading.Event) -> None:
    """Run the agent's loop and notify the watchdog, so that a stuck loop is noticed."""
    noted_at = float("-inf")
    noted: tuple[bool, str | None] = False, None
    textfile = TextFile(agent.config, agent.clock)
    try:
        while not stop.is_set():
            agent.step(agent.idle_s())
            agent.raise_if_rejected()
            now = (agent.welcomed, None if agent.problem is None else agent.problem.message)
            if agent.clock() - noted_at >= STATUS_EVERY_S or now != noted:
                noted_at = agent.clock()
                noted = now
                _notify("WATCHDOG=1")
                try:
                    agent.write_status()
                except OSError as error:
                    agent.disk.failed(error, "status_not_written")
            textfile.tick(agent.figures)
    finally:
        textfile.end(agent.figures)


def _notify(message: str) -> None:
    """Notify systemd (sd_notify protocol) where it has started this program."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(message.encode(), address)

"""A coordinator ready to serve: state folder locked, broker reachable, signals handled; closed at the end."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edge_agent.core.children import ThreadWorker
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import BrokerAway, DuplicateCoordinator, JournalAway, StateError, UsageError
from edge_agent.core.limits import OPEN_FILES, allow_open_files
from edge_agent.core.locks import lock_holder
from edge_agent.wire.faults import LOGIN_REFUSED
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Transport

from ..broker import EmbeddedBroker, OnRefused
from ..config import CoordinatorConfig
from ..fleet.blob_urls import BlobUrls
from ..fleet.message_ranks import rank_by
from ..fleet.rate_limits import RateLimits
from ..fleet.refusals import By, Refusals
from ..hosted.run_hooks import OwnDataHooks
from ..hosted.transport import CombinedTransport, HostedTransport
from ..journal.store import Journal, SharedJournal, utc_now
from ..processes.compute import Compute, ComputeProcess
from ..state.backup import MARKER
from ..state.command_keys import CommandKeys
from ..state.journal_location import journal_of, shared_journal_of, use_database
from ..state.log_file import logging_to
from ..state.starts import Takeover, check_name
from ..state.store import StateFolder
from .coordinator import Coordinator
from .first_start import Decisions, prepare_start
from .peers import PROBE_S
from .standby import Standby, wait_for_folder, wait_for_lease
from .surroundings import Access, Runtime, StartOptions

if TYPE_CHECKING:
    from ..identity.serving import IdentityService  # it loads cryptography, which only certificates need

log = logging.getLogger(__name__)

START_LIMIT_S = 10.0
"""How long a start waits until it may serve, before it reports what it waits for."""

LEAST_FREE_BYTES = 1 << 20
"""With less than this the journal may not take the entries of a start."""

START_AGAIN_S = 2.0
"""Pause between two tries of a start on a full disk."""


def take_over(
    config: CoordinatorConfig, stop: threading.Event, stack: contextlib.ExitStack, takeover_s: float
) -> Coordinator | None:
    """Enter `coordinator` into ``stack`` once the one that serves is silent; None where ``stop`` is set before.

    Raises:
        UsageError: the coordinator that serves works on another state folder, or nobody could hear it.
        StateError: there is no journal in the state folder, or it is damaged.
    """
    while True:
        # 1. Wait until the other one is silent. A journal that both reach has a lease. Where the broker is the other
        # one's own, both end together: its lock tells.
        journal = None
        if config.journal is not None or shared_journal_of(config.state) is not None:
            journal = _wait_for_lease(config, stop)
            takeover = None if journal is None else Takeover()
        elif config.broker is None:
            takeover = _wait_without_broker(config, stop)
        else:
            takeover = _wait_at_broker(config, config.broker, stop, takeover_s)
        if takeover is None:
            return None
        # 2. Start in its place. What may pass by itself, such as another standby that was faster, is waited for again.
        try:
            return stack.enter_context(coordinator(config, stop, takeover=takeover, journal=journal))
        except (DuplicateCoordinator, BrokerAway, JournalAway) as error:
            log.warning("not_taken_over reason=%s", error)
        except StateError as error:
            if lock_holder(config.state) is None:
                raise
            log.warning("not_taken_over reason=%s", error)


def _wait_for_lease(config: CoordinatorConfig, stop: threading.Event) -> SharedJournal | None:
    """Wait until no coordinator has the lease of the journal's database; None where ``stop`` is set before.

    Returns:
        The journal, closed.

    Raises:
        UsageError: Agents would lose their broker with the coordinator, or the journal is of another federation.
        StateError: The database is not that of the state folder.
    """
    if config.broker is None:
        raise UsageError(
            f"the journal of {config.state} is in a database, for coordinators on several machines, and each of them "
            "starts its own broker, which agents would lose with it; give [broker] url"
        )
    while not stop.is_set():
        try:
            use_database(config.state, config.journal)
        except JournalAway as error:
            log.warning("journal_away reason=%s: until it is there, nothing is taken over", error)
            stop.wait(START_AGAIN_S)
            continue
        journal = shared_journal_of(config.state, config.journal)
        if journal is None or not wait_for_lease(journal, config.federation, stop):
            return None
        return journal
    return None


def _wait_without_broker(config: CoordinatorConfig, stop: threading.Event) -> Takeover | None:
    """Wait until the state folder of a coordinator with its own broker is free; None where ``stop`` is set before.

    Raises:
        UsageError: the state folder is a copy: its lock says nothing about the coordinator that serves.
        StateError: the folder has no journal, or its file system does not answer.
    """
    if (config.state / MARKER).exists():
        raise UsageError(
            f"{config.state} is a copy, and the coordinator starts its own broker, which ends with it: nobody "
            "can hear here whether it serves. Give [broker] url, or start 'headwater serve' here by hand"
        )
    return Takeover() if wait_for_folder(config.state, stop) else None


def _wait_at_broker(
    config: CoordinatorConfig, broker: BrokerConfig, stop: threading.Event, takeover_s: float
) -> Takeover | None:
    """Wait until the coordinator that serves is silent for ``takeover_s``; None where ``stop`` is set before.

    Raises:
        UsageError: the coordinator that serves works on another state folder, or nobody could hear it.
        StateError: there is no journal in the state folder, or it is damaged.
    """
    transport = MqttTransport(
        broker, f"{config.federation}-standby-{secrets.token_hex(4)}", spread_by=f"{config.federation}-coordinator"
    )
    with contextlib.closing(transport):
        standby = Standby(config.federation, config.state, transport, takeover_s=takeover_s)
        return standby.replaced if standby.wait(stop) else None


@contextlib.contextmanager
def coordinator(
    config: CoordinatorConfig,
    stop: threading.Event | None = None,
    compute: Compute | None = None,
    *,
    decisions: Decisions | None = None,
    takeover: Takeover | None = None,
    journal: Journal | None = None,
) -> Iterator[Coordinator]:
    """Yield a started coordinator; it is closed with the context, and the next start resumes.

    Args:
        config: Its configuration.
        stop: With it, a start waits while the disk is full, until it is set.
        compute: Builds models and exports; by default a process that is started when torch is needed.
        decisions: What an operator has decided about a start on a backup; by default nothing.
        takeover: The coordinator that a standby has found silent; then nobody has to decide anything.
        journal: The journal that a standby has watched, and verified, closed; None: that of the state folder.

    Raises:
        StateError: another process works in the state folder, it is damaged, or the database is not its own.
        JournalAway: the database of the journal cannot be reached.
        DuplicateCoordinator: another coordinator serves the federation.
        StartStopped: ``stop`` was set before it was known whether one does; nothing was started.
        UsageError: the state folder is a backup, and nobody has confirmed whom its certificates let in; or it is of a
            federation of another name.
        BrokerAway: the broker does not answer and ``broker.wait`` is false.
    """
    # Sockets, files of uploads and of updates that are aggregated: a plain shell allows 1,024 of them together.
    allow_open_files(OPEN_FILES)
    with contextlib.ExitStack() as stack:
        # 1. The state folder belongs to this process from here on. What an operator has to decide about a backup is
        # asked for before anything is written.
        use_database(config.state, config.journal)
        folder = StateFolder(config.state, journal or journal_of(config.state, config.journal))
        state = _when_there_is_room(config.state, stop, lambda: stack.enter_context(folder.open("headwater serve")))
        check_name(state.journal, config.federation)
        stack.enter_context(logging_to(config.state))
        if takeover is None:
            takeover = prepare_start(config, state, decisions or Decisions(), stop)
        # 2. A broker that agents reach, and the connection to it.
        refusals = Refusals(time.monotonic)
        entrance = _open_entrance(config, refusals, stack)
        topics = Topics(config.federation)
        boot = secrets.token_hex(8)
        limits = RateLimits(topics)
        mqtt = MqttTransport(
            entrance.broker,
            f"{config.federation}-coordinator-{boot}",  # two with one id would end each other's connection for ever
            admits=limits.admits,
            rank_of=rank_by(topics),
            spread_by=f"{config.federation}-coordinator",
        )
        worker = ThreadWorker(mqtt.wake)
        blob_urls = _open_blob_urls(config, mqtt)
        if blob_urls is not None:
            stack.callback(blob_urls.close)
        transport = _with_hosted_clients(config, mqtt, topics)
        hooks = OwnDataHooks(
            config.proxy, ComputeProcess(state.path / "hosted" / "compute.log"), ThreadWorker(mqtt.wake)
        )  # a process of its own: an evaluation takes as long as it likes, and no round waits for it
        # Nobody else can serve where the broker has just been started, or where the journal has granted its lease.
        is_alone = config.broker is None or shared_journal_of(config.state) is not None
        probe_s = 0.0 if is_alone else PROBE_S
        service = Coordinator(
            config,
            state,
            transport,
            runtime=Runtime(worker=worker, hooks=hooks, compute=compute or ComputeProcess(state.path / "compute.log")),
            access=Access(
                broker_url=entrance.broker.names,
                limits=limits,
                identity=entrance.identity,
                keys=entrance.keys,
                refusals=refusals,
                blob_urls=blob_urls,
            ),
            start=StartOptions(boot=boot, probe_s=probe_s, takeover=takeover),
        )
        _warn_of_overlaps(config)
        # 3. The start itself; most callers get a coordinator that serves already.
        stack.callback(service.close)
        _when_there_is_room(config.state, stop, service.start)
        _step_until_serving(service)
        yield service


@dataclass(frozen=True)
class _Entrance:
    """How agents reach a coordinator, and how they know its commands."""

    broker: BrokerConfig
    """The broker that the coordinator connects to."""

    keys: CommandKeys
    """The keys of its commands."""

    identity: IdentityService | None = None
    """Who has a certificate; None: agents need none."""


def _open_entrance(config: CoordinatorConfig, refusals: Refusals, stack: contextlib.ExitStack) -> _Entrance:
    """Start what agents connect to: a broker with certificates, an embedded broker, or nothing beside the one given.

    Args:
        config: The coordinator's configuration.
        refusals: Notes the devices that are not let in.
        stack: Ends with its context what was started.
    """

    def refused_by(by: By) -> OnRefused:
        return lambda agent, message, remedy: refusals.note(agent, by, LOGIN_REFUSED, message, remedy)

    # The secret of commands is made before anything listens.
    keys = CommandKeys.of(config.state, config.federation)
    if config.identity is not None:
        from ..identity.enrolment import Enrolment
        from ..identity.serving import IdentityService

        identity = IdentityService(Enrolment(config.state, config.federation, config.identity))
        identity.broker.on_refused = refused_by("broker")
        identity.port.on_refused = refused_by("enrolment")
        stack.callback(identity.stop)
        identity.start(utc_now())
        broker = identity.client()
        # Each revocation begins another generation of an agent's key, which commands have to follow.
        keys = CommandKeys.of(config.state, config.federation, identity.generation)
        return _Entrance(broker, keys, identity)
    if config.broker is not None:
        return _Entrance(config.broker, keys)
    embedded = config.embedded
    served = EmbeddedBroker(
        embedded.bind, embedded.port, federation=config.federation, password_file=embedded.password_file
    )
    served.on_refused = refused_by("broker")
    stack.enter_context(served)
    broker = served.config()
    log.info("broker_started url=%s", broker.names)
    return _Entrance(broker, keys)


def _open_blob_urls(config: CoordinatorConfig, mqtt: MqttTransport) -> BlobUrls | None:
    """Start what large blobs are fetched from by HTTP; None where the configuration has no ``[blobs]``."""
    if config.blobs is None:
        return None
    from ..blobs.opening import open_blob_urls

    return open_blob_urls(config, mqtt.wake)


def _with_hosted_clients(config: CoordinatorConfig, mqtt: MqttTransport, topics: Topics) -> Transport:
    """Return the transport to all agents: those at the broker, and the clients that the coordinator hosts itself."""
    if not config.hosted:
        return mqtt
    hosted = HostedTransport.of(config, mqtt.wake)
    ids = [client.id for client in config.hosted]
    return CombinedTransport(mqtt, hosted, topics, ids, hosted.away)


def _step_until_serving(service: Coordinator) -> None:
    """Step until the coordinator serves, for at most `START_LIMIT_S`; not while the broker is away."""
    until = time.monotonic() + START_LIMIT_S
    while not service.is_serving and service.waiting.about != "broker" and time.monotonic() < until:
        service.step(service.idle_s())


T = TypeVar("T")


def _warn_of_overlaps(config: CoordinatorConfig) -> None:
    """Log which samples are used here and at a hosted client."""
    if not config.hosted:
        return
    from .preflight import overlaps  # it loads what reads samples, and the memory of a coordinator without any counts

    for overlap in overlaps(config):
        log.warning("samples_serve_twice %s", overlap)


def _when_there_is_room(folder: Path, stop: threading.Event | None, act: Callable[[], T]) -> T:
    """Return the result of ``act``, tried again while it fails because the disk is full, until ``stop`` is set.

    Raises:
        StateError: it failed for another reason, with room on the disk, or without ``stop``.
    """
    is_logged = False
    while True:
        try:
            return act()
        except StateError as error:
            free = shutil.disk_usage(folder).free if folder.is_dir() else LEAST_FREE_BYTES
            if free >= LEAST_FREE_BYTES or stop is None or not _may_be_for_room(error):
                raise
            if not is_logged:
                log.warning(
                    "start_waits folder=%s free_bytes=%d needed=%d: the disk is full; make room on it, the coordinator "
                    "starts then: %s",
                    folder,
                    free,
                    LEAST_FREE_BYTES,
                    error,
                )
            is_logged = True
            if stop.wait(START_AGAIN_S):
                raise


def _may_be_for_room(error: StateError) -> bool:
    """Return whether a full disk can be the cause: not of a lock of another process, nor of a damaged journal."""
    if isinstance(error.__cause__, OSError):
        return error.__cause__.errno in {errno.ENOSPC, errno.EDQUOT}
    # SQLite words a full disk in several ways; what is damaged is a DatabaseError, or has no cause.
    return isinstance(error.__cause__, sqlite3.OperationalError)

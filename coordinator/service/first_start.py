"""Checks before the first start on a backup: whether a coordinator serves, and which agents the backup admits.

A backup is old. Its coordinator may still serve, and then agents would follow the old journal; a device that was
revoked after the backup is still enrolled in it. So the first start asks over the broker, reports what it found, and
continues only where no coordinator answers, or where `Decisions` allow it. A standby needs no decisions: it has
followed the coordinator that it replaces.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.core.errors import DuplicateCoordinator, HeadwaterError, StartStopped, UsageError
from edge_agent.core.time_and_text import show_time
from edge_agent.wire.messages.down import Present
from edge_agent.wire.mqtt import MqttTransport

from ..config import CoordinatorConfig, IdentityConfig
from ..journal.store import utc_now
from ..state.backup import BackupFacts, backup_facts
from ..state.starts import Takeover, federation_of
from ..state.store import StateFolder
from ..text import counted, listed
from .inquiry import Inquiry

if TYPE_CHECKING:
    from ..identity.restore import Review

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decisions:
    """What an operator has decided about a start."""

    takes_over: bool = False
    """Whether to replace the coordinator that serves, whose journal may be newer."""

    accepts_identities: bool = False
    """Whether to admit the agents that the backup admits."""

    revocations: tuple[Path, ...] = ()
    """Former state folders, or lists of revoked certificates of their brokers, whose revocations are merged."""

    former_states: tuple[Path, ...] = ()
    """Paths where the former state folder may be; those that exist are read."""


def prepare_start(
    config: CoordinatorConfig, state: StateFolder, decisions: Decisions, stop: threading.Event | None = None
) -> Takeover | None:
    """Check a start before anything is written: on a backup, or where another coordinator is to be replaced.

    Args:
        config: The coordinator's configuration.
        state: Its state folder, opened and locked.
        decisions: What the operator has decided.
        stop: Event that ends the wait for the broker and for answers.

    Returns:
        The coordinator to replace, as far as it is known; None where none is replaced.

    Raises:
        StartStopped: ``stop`` was set before it was known who serves.
        DuplicateCoordinator: Another coordinator answers, and is not to be replaced.
        UsageError: The operator has not confirmed which agents the backup admits.
        StateError: The backup is damaged.
    """
    backup = backup_facts(state.path)
    if backup is None and not decisions.takes_over:
        return None
    if backup is not None:
        log.warning("starts_from_backup folder=%s %s", state.path, _describe_age(backup))
    # 1. Who serves now? A coordinator that answers is replaced only where the operator has said so. If the question was
    # cut short, one may serve that has not answered yet: no start may be written.
    other = _find_serving(config, state, stop)
    if other is not None:
        _check_other(config, state, backup, other, decisions)
    elif stop is not None and stop.is_set():
        raise StartStopped(f"{state.path} is not started: stopped before it was known whether a coordinator serves")
    # 2. Whom does the backup let in? A device that was revoked since is still enrolled in it.
    if backup is not None and config.identity is not None:
        _check_identities(config.identity, config.federation, state.path, backup, decisions)
    if not decisions.takes_over:
        return None
    if other is None:
        return Takeover()
    return Takeover(other.epoch, other.newest_run)


def _describe_age(backup: BackupFacts) -> str:
    """Return when a backup was made, as a clause for people."""
    made_at = show_time(backup.at) if backup.at else "an unknown time"
    return f"made at {made_at}"


# --- another coordinator ---------------------------------------------------------------------------------------------


def _find_serving(config: CoordinatorConfig, state: StateFolder, stop: threading.Event | None) -> Present | None:
    """Ask which coordinator of the federation serves; None where none answers, or none can be asked.

    Raises:
        DuplicateCoordinator: A coordinator with its own broker answers at the address that devices connect to.
    """
    if config.identity is not None:
        _check_enrolment_port(config.identity, state.path)
        return None
    if config.broker is None:
        return None  # its own broker has no other coordinator, and its port can be taken once
    transport = MqttTransport(
        config.broker,
        f"{config.federation}-start-{secrets.token_hex(4)}",
        spread_by=f"{config.federation}-coordinator",
    )
    with contextlib.closing(transport):
        return Inquiry(config.federation, transport).ask(stop)


def _check_enrolment_port(identity: IdentityConfig, state: Path) -> None:
    """Ask at the address that devices connect to, because with [identity] each coordinator has its own broker.

    Raises:
        DuplicateCoordinator: A coordinator of this federation's authority answers there.
    """
    from edge_agent.identity.enrolment_port import ask

    from ..identity.authority import Authority
    from ..identity.ledger import identity_folder

    authority = Authority.open(identity_folder(state))
    address = (identity.host, identity.enroll_port)
    try:
        ask(address, authority.der, {"ask": "authority"})
    except HeadwaterError as error:  # nothing listens there, or another program does
        log.info("nobody_serves host=%s port=%d answer=%s", *address, type(error).__name__)
        return
    raise DuplicateCoordinator(
        f"{state} is not started: a coordinator with this federation's certificates serves at "
        f"{identity.host}:{identity.enroll_port}, where devices connect to. It has a broker of its own, which no other "
        "coordinator can replace over the network; stop it first"
    )


def _check_other(
    config: CoordinatorConfig, state: StateFolder, backup: BackupFacts | None, other: Present, decisions: Decisions
) -> None:
    """Require that the coordinator that answers is to be replaced, and belongs to the same federation.

    Raises:
        DuplicateCoordinator: It is not to be replaced, or belongs to another state folder.
    """
    own_id = federation_of(state.journal.entries(kinds=("coordinator_started",)))
    serves = "is starting" if other.serving_s is None else f"has been serving for {other.serving_s:.0f} s"
    progress = state.journal.progress()
    kind = "a state folder" if backup is None else f"a backup {_describe_age(backup)}"
    about = (
        f"another coordinator of federation '{config.federation}' {serves}: host '{other.host}', process "
        f"{other.process}, federation id {other.federation[:12]}, epoch {other.epoch}, {other.entries} journal entries "
        f"and {counted(other.newest_run, 'run')}; {state.path} is {kind}, federation id {own_id[:12]}, "
        f"{progress.entries} journal entries and {counted(progress.newest_run, 'run')}"
    )
    if other.federation != own_id:
        raise DuplicateCoordinator(
            f"{about}. It is of another state folder, so nothing is started; stop it first, or give one of them "
            "another 'federation' in its configuration"
        )
    if decisions.takes_over:
        log.warning("takes_over %s", about)
        return
    raise DuplicateCoordinator(
        f"{about}. Nothing was started, and this journal is unchanged. To watch that one, use 'headwater serve "
        "--standby'; to replace it, and give up what only it has done, 'headwater serve --take-over'"
    )


# --- identities ------------------------------------------------------------------------------------------------------


def _check_identities(
    identity: IdentityConfig, federation: str, state: Path, backup: BackupFacts, decisions: Decisions
) -> None:
    """Merge later revocations into the backup where the operator has confirmed the agents that it admits.

    Raises:
        UsageError: The operator has not; the message lists the agents, and nothing was changed.
    """
    from ..identity.enrolment import Enrolment
    from ..identity.restore import apply, read_revocations, review, sources_in_reach

    enrolment = Enrolment(state, federation, identity)
    # What the operator names has to be readable; where a former state folder is only supposed, it is read if it exists.
    named = [read_revocations(source, enrolment.authority) for source in decisions.revocations]
    candidates = list(decisions.former_states)
    if backup.source is not None:
        candidates.append(backup.source)
    reviewed = review(enrolment, [*named, *sources_in_reach(state, candidates, enrolment.authority)], utc_now())
    lines = [*_admitted_lines(state, backup, reviewed), *_revoked_lines(reviewed)]
    if not decisions.accepts_identities:
        way_out = (
            "No agent is admitted until this is confirmed, and nothing was changed. 'headwater serve "
            f"--accept-identities' confirms it. Before, with the same --config and --state {state}, 'headwater agents "
            "certificates' shows all agents and 'headwater agents revoke NAME' revokes one. --revocations PATH reads a "
            "former state folder, or its broker's list of revoked certificates (identity/crl.pem)."
        )
        raise UsageError("\n".join([*lines, way_out]))
    for line in lines:
        log.warning("backup_accepted %s", line)
    apply(enrolment, reviewed)


def _admitted_lines(state: Path, backup: BackupFacts, reviewed: Review) -> Sequence[str]:
    agents = counted(len(reviewed.admitted), "agent")
    names = f": {listed(reviewed.admitted)}" if reviewed.admitted else ""
    lines = [f"{state} is a backup {_describe_age(backup)}. Its certificates admit {agents}{names}."]
    if reviewed.invited:
        lines.append(f"Unused tokens also admit: {listed(reviewed.invited)}.")
    return lines


def _revoked_lines(reviewed: Review) -> Sequence[str]:
    if not reviewed.sources:
        return ["Devices that were revoked after the backup are admitted, because no former state folder was found."]
    sources = listed([str(source) for source in reviewed.sources])
    kept_out = [agent.agent for agent in reviewed.kept_out]
    if kept_out:
        who = f"revoked after the backup, and not admitted: {listed(kept_out)}"
    else:
        who = "no agent was revoked after the backup"
    return [f"Revocations read from {sources}: {who}."]

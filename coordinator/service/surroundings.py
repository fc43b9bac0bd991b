"""What a coordinator gets from the program that runs it, besides its configuration, its state folder and its transport.

`Runtime` is time and long work, `Access` is who may reach the coordinator and how its commands are proven, and
`StartOptions` is what one start of it decides. Each has defaults with which a coordinator serves in one process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from edge_agent.core.children import InlineWorker, Worker

from ..fleet.blob_urls import BlobUrls
from ..fleet.rate_limits import RateLimits
from ..fleet.refusals import Refusals
from ..fleet.run_ids import RunIds
from ..journal.store import utc_now
from ..processes.compute import Compute, InlineCompute
from ..rounds.context import RunHooks
from ..state.command_keys import CommandKeys
from ..state.starts import Takeover
from .peers import PROBE_S

if TYPE_CHECKING:
    from ..identity.serving import IdentityService  # it loads cryptography, which only certificates need


@dataclass(frozen=True)
class Runtime:
    """The clocks of a coordinator, and who does its long work.

    Attributes:
        clock: Seconds of a clock that never goes back: for leases, deadlines and pauses.
        stopwatch: Seconds by which durations are measured; None: those of ``clock``.
        now: The wall clock, for windows of releases and ends of pins.
        worker: Runs exports and other long functions beside the loop; by default at once, in the loop.
        hooks: What is done before, during and after a run beside its rounds; by default nothing.
        compute: Calls functions that need torch; by default in this process.
    """

    clock: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] | None = None
    now: Callable[[], datetime] = utc_now
    worker: Worker = field(default_factory=InlineWorker)
    hooks: RunHooks = field(default_factory=RunHooks)
    compute: Compute = field(default_factory=InlineCompute)


@dataclass(frozen=True)
class Access:
    """Who may reach a coordinator, and how agents know its commands.

    Attributes:
        broker_url: The addresses of all its brokers, for messages to people.
        limits: The limits that the transport applies to what it receives; None: it applies none.
        identity: Who has a certificate; None: agents need none.
        keys: The keys of commands; None: commands carry no proof.
        refusals: The devices that the broker or the enrolment port did not let in; None: a new, empty list.
        blob_urls: Where agents fetch large blobs by HTTP; None: all blobs go over MQTT.
    """

    broker_url: str = ""
    limits: RateLimits | None = None
    identity: IdentityService | None = None
    keys: CommandKeys | None = None
    refusals: Refusals | None = None
    blob_urls: BlobUrls | None = None


@dataclass(frozen=True)
class StartOptions:
    """What one start of a coordinator decides.

    Attributes:
        boot: The id of this start.
        probe_s: Seconds that another coordinator of the federation may take to answer before this one serves.
        takeover: The coordinator that this one was told to replace; None: it replaces none.
        run_ids: The ids of runs in messages; None: ids that are unique among all state folders.
    """

    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    probe_s: float = PROBE_S
    takeover: Takeover | None = None
    run_ids: RunIds | None = None

"""What the coordinator does with data of its own: hosted clients, warm starts, and figures on proxy samples.

Hosted clients are agents like all others, in processes beside the coordinator. They run the program of a device, keep
what a device keeps, and speak its protocol; only what carries it is another: a pipe instead of a broker. So their
updates pass the same checks, they count for the same quorum, and a run by them ends in the same bits. Nothing here
imports torch in the coordinator's own process.
"""

from __future__ import annotations

from .joined import Joined
from .owner import Hosts

__all__ = ["Hosts", "Joined"]

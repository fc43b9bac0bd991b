"""Whether the broker lets this process hear coordinators, and how long a refusal is put up with.

A refusal may pass: a NATS cluster that has lost a node refuses subscriptions until it has elected leaders, and the
transport asks again by itself. A broker whose rules forbid the topic refuses it for ever, which a person has to hear
of. Time alone tells the two apart.
"""

from __future__ import annotations

import logging

from edge_agent.core.errors import UsageError
from edge_agent.wire.transport import Subscribed

log = logging.getLogger(__name__)

REFUSAL_S = 120.0
"""Seconds in a row for which a subscription may be refused. Elections took NATS up to 17 where this was measured; the
transport asks again after 1 s, then ever more seldom, ten times in this time."""


class Listening:
    """The subscription to the topic of coordinators, which a process needs that waits for a sign of another one."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._refused_since: float | None = None
        """Since when the broker refuses it; None: it does not."""

    def is_granted(self, event: Subscribed, now: float) -> bool:
        """Note what the broker has answered, and return whether the topic is among the filters that it grants.

        A broker of a list that is not connected any more has said nothing about the next one: see `disconnected`.
        """
        if self._topic in event.filters:
            self._refused_since = None
            return True
        if self._refused_since is None:
            self._refused_since = now
            log.warning("subscription_refused topic=%s: it is asked for again for %.0f s", self._topic, REFUSAL_S)
        return False

    def disconnected(self) -> None:
        """Note that the connection has ended: the next broker, or this one after its restart, may grant the topic."""
        self._refused_since = None

    def check(self, now: float) -> None:
        """Check that the topic has not been refused for too long.

        Raises:
            UsageError: The broker has refused it for `REFUSAL_S`.
        """
        if self._refused_since is None or now - self._refused_since < REFUSAL_S:
            return
        raise UsageError(
            f"the broker has not let this process subscribe to {self._topic} for {REFUSAL_S:.0f} s, so it cannot hear "
            "whether a coordinator serves; give it the rights of the coordinator ('headwater password --acl'), or see "
            "that the broker's cluster is complete"
        )

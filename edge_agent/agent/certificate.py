"""The renewal of an agent's certificate while the agent runs.

An agent that is welcomed asks its coordinator by a message. One whose certificate has expired, and whom the broker
therefore keeps out, asks the enrolment port. One that fails to connect several times in a row asks there whether its
certificate still counts, because a broker does not say that it was revoked. What cannot be reached is asked again.
"""

from __future__ import annotations

import logging
from typing import Any

from ..core.children import is_stopped
from ..core.config import AgentConfig
from ..core.errors import EnrolmentRefused, HeadwaterError
from ..identity.renewal import Renewal, Step, renew_beside
from ..wire.messages import down, up
from .health import Condition
from .runtime import AgentRuntime
from .transfers import Link

log = logging.getLogger(__name__)

ASK_AFTER = 3
"""Failed connections in a row after which an enrolled agent asks whether its certificate counts."""

ASK_AGAIN_S = 300.0
"""Pause in seconds until it asks again."""


class CertificateRenewal:
    """Renews the certificate of an agent in time, one step at a time in the worker. Call `tick` from the loop."""

    def __init__(self, config: AgentConfig, runtime: AgentRuntime, link: Link, condition: Condition) -> None:
        """Watch the certificate that ``runtime`` names; nothing is ever due where it names none."""
        self.renewal: Renewal | None = runtime.renewal
        self._clock = runtime.clock
        self._worker = runtime.worker
        self._link = link
        self._config = config
        self._condition = condition
        self._is_busy = False
        """Whether a step is in the worker, perhaps behind a long training."""

        self._failed_connects = 0
        """How many connections in a row were lost, or could not be made."""

        self._ask_at = float("-inf")
        """The time before which it is not asked again whether the certificate counts."""

    def connected(self) -> None:
        """Note that the broker has let this agent in."""
        self._failed_connects = 0
        self._condition.clear("identity")

    def disconnected(self) -> None:
        """Note that a connection was lost, or could not be made."""
        self._failed_connects += 1

    def tick(self, *, is_welcomed: bool) -> None:
        """Begin the step that is due, if any.

        Args:
            is_welcomed: Whether a coordinator has welcomed this agent, which can then ask by a message.
        """
        renewal = self.renewal
        if renewal is None or self._is_busy:
            return
        try:
            step = self._due_step(renewal, is_welcomed=is_welcomed)
            if step is not None:
                self._begin(step)
        except HeadwaterError as error:
            self._log_failure(str(error))

    def _due_step(self, renewal: Renewal, *, is_welcomed: bool) -> Step | None:
        """Return the step that is due now, and note when it may be asked again; None where none is."""
        # The broker keeps this agent out: ask whether that is because of its certificate.
        now = self._clock()
        if self._failed_connects >= ASK_AFTER and now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_S
            return "standing"
        # Half of the certificate's life is over.
        if not renewal.is_due(now):
            return None
        if is_welcomed:
            return "message"
        # While it counts, the agent will be welcomed and can ask by a message; that needs no port.
        if renewal.is_expired():
            return "by_port"
        return None

    def receive(self, message: down.Renewed) -> None:
        """Take the answer to a request by message: the new certificate, or why there is none."""
        if message.refused:
            self._log_failure(message.refused)
        elif self.renewal is not None and message.certificate:
            self._begin("received", message.certificate)

    def _begin(self, step: Step, certificate: str = "") -> None:
        """Have the worker do one step of a renewal."""
        state = self._config.state
        self._is_busy = True
        self._worker.submit(
            "renew",
            lambda: renew_beside(state, step, certificate),
            lambda result, error: self._after(step, result, error),
        )

    def _after(self, step: Step, result: Any, error: BaseException | None) -> None:
        """Send, note or log what came of a step.

        Args:
            step: The step that was done.
            result: The fields of a request for the step ``message``; else an object with the end (``until``) of the
                new certificate, if there is one.
            error: Why the step failed; None where it did not.
        """
        self._is_busy = False
        # The coordinator itself refuses, so the broker will not let this agent in before somebody acts.
        if isinstance(error, EnrolmentRefused):
            self._condition.note("identity", error)
        # Asking changes nothing, and that it failed says nothing: it is asked again.
        if step == "standing":
            if isinstance(error, EnrolmentRefused):
                log.error("certificate_refused agent=%s reason=%s", self._config.id, error)
            return
        if error is not None:
            if is_stopped(error):  # as this agent is about to be
                log.info("certificate_renewal_stopped agent=%s: the next start asks again", self._config.id)
            else:
                self._log_failure(str(error))
            return
        if step == "message":
            self._link.send(up.Renew(**result))
        else:
            log.info("certificate_renewed agent=%s until=%s", self._config.id, result["until"])

    def _log_failure(self, reason: str) -> None:
        """Log why the certificate was not renewed."""
        log.error("certificate_not_renewed agent=%s reason=%s", self._config.id, reason)

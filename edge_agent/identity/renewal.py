"""The renewal of a device's certificate, in a child process beside the agent."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from edge_agent.identity.certificates import Identity, IdentityFolder, check_clock, show_utc
from edge_agent.identity.signed_request import CertificateRequest, ask, decoded

from ..core.children import answer_of_child
from ..core.errors import (
    BrokerAway,
    EnrolmentRefused,
    HeadwaterError,
    MessageError,
    MissingCapability,
    NotTheCoordinator,
    StateError,
    cause,
)
from ..wire.messages.up import Renew

AGAIN_S = 60.0
"""Pause between two tries of a renewal."""


# --- renewal ---------------------------------------------------------------------------------------------------------


class Renewal:
    """Keeps a running agent's certificate valid: from half of its life on it asks for the next one.

    While there is a connection, the request goes as a message and `received` takes the answer. A certificate that has
    expired is refused by the broker: then `by_port` asks the coordinator's enrolment port, which accepts it for a grace
    period. An open connection outlives its certificate, and the next one uses the new.
    """

    def __init__(self, state: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.state = state
        self.folder = IdentityFolder(state)
        self._wall = wall
        self._look_at = float("-inf")

    @property
    def is_enrolled(self) -> bool:
        """Whether there is a certificate to renew."""
        return self.folder.file.exists()

    def is_due(self, clock_s: float) -> bool:
        """Whether to ask now: half of the certificate's life is over, and it is time for another look (`AGAIN_S`)."""
        if clock_s < self._look_at:  # called for every message
            return False
        now = self._identity()
        self._look_at = clock_s + min(AGAIN_S, (now.not_after - now.not_before) / 20)
        return self._at(0.5)

    def is_expired(self) -> bool:
        """Return whether the certificate has ended."""
        return self._at(1.0)

    def message(self) -> Renew:
        """Return the request, to be sent over the agent's own connection."""
        request = self._request()
        return Renew(csr=request.csr, serial=request.serial, signature=request.signature)

    def by_port(self) -> Identity:
        """Ask the enrolment port, and install what it answers.

        Raises:
            EnrolmentRefused: The coordinator refuses; the message says why, and what to do.
            BrokerAway: No coordinator answers, or the clocks differ; a device may set its clock later than it starts.
        """
        now = self._identity()
        ca = self.folder.ca_der()
        address = (now.host, now.port)
        request = self._request().model_dump()
        try:
            answer = ask(address, ca, {"ask": "authority"}, checks_time=False)
            check_clock(answer, self._wall())
        except (EnrolmentRefused, MessageError) as error:  # nothing is refused yet
            raise BrokerAway(str(error)) from error
        try:
            return self.received(decoded(ask(address, ca, request), "certificate"))
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error

    def standing(self) -> str:
        """Until when the certificate counts, as the coordinator says.

        Raises:
            EnrolmentRefused: The certificate is no longer accepted; the message says why, and what to do.
            BrokerAway: No coordinator answers.
        """
        now = self._identity()
        question = self.folder.question(now.federation, now.name).model_dump()
        try:
            answer = ask((now.host, now.port), self.folder.ca_der(), question, checks_time=False)
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error
        until: Any = answer.get("until")
        if type(until) not in (int, float):
            raise BrokerAway(f"answer: {now.host}:{now.port} does not say until when the certificate counts")
        return show_utc(until)

    def received(self, certificate: bytes) -> Identity:
        """Install a new certificate (DER).

        Raises:
            MessageError: The certificate is not for the requested key.
        """
        now = self._identity()
        return self.folder.install(
            certificate,
            ca=self.folder.ca_der(),
            name=now.name,
            federation=now.federation,
            host=now.host,
            port=now.port,
        )

    def _request(self) -> CertificateRequest:
        now = self._identity()
        return self.folder.request(now.federation, now.name)

    def _identity(self) -> Identity:
        now = self.folder.read()
        if now is None:
            raise StateError(f"{self.folder.file} is gone; enroll this device again: 'headwater enroll NAME'")
        return now

    def _at(self, share: float) -> bool:
        now = self._identity()
        return self._wall() >= now.not_before + share * (now.not_after - now.not_before)


CHILD_LIMIT_S = 60.0


Step = Literal["message", "by_port", "received", "standing"]


def renew_beside(state: Path, what: Step, certificate: str = "") -> dict[str, str]:
    """Return the `Renewal` method of that name, in a child process: ``cryptography`` would stay in an agent, 13 MB.

    Returns the fields of the request for "message", else the new certificate's end.

    Raises:
        HeadwaterError: The error of the method in the child process.
    """
    question = {"state": str(state), "what": what, "certificate": certificate}
    try:
        result = answer_of_child(__name__, answer_parent.__name__, question, CHILD_LIMIT_S)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StateError(f"the renewal of the certificate has failed: {cause(error)}; it is tried again") from error
    if "error" in result:
        kinds = {kind.__name__: kind for kind in (BrokerAway, EnrolmentRefused, MessageError, MissingCapability)}
        raise kinds.get(result["error"], StateError)(result["message"])
    return result


def answer_parent() -> None:
    """The child of `renew_beside`: its question comes as JSON on stdin, the answer goes to stdout."""
    question = json.load(sys.stdin)
    renewal = Renewal(Path(question["state"]))
    try:
        if question["what"] == "message":
            request = renewal.message()
            result = {"csr": request.csr, "serial": request.serial, "signature": request.signature}
        elif question["what"] == "by_port":
            result = {"until": show_utc(renewal.by_port().not_after)}
        elif question["what"] == "standing":
            result = {"until": renewal.standing()}
        else:
            certificate = base64.b64decode(question["certificate"])
            result = {"until": show_utc(renewal.received(certificate).not_after)}
    except HeadwaterError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")

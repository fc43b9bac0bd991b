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
from edge_agent.identity.enrolment_port import CertificateRequest, ask, decode_field

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
"""The most seconds between two attempts to renew a certificate."""

CHILD_LIMIT_S = 60.0
"""Seconds after which the child process of a renewal is killed."""

Step = Literal["message", "by_port", "received", "standing"]
"""The names of the methods of `Renewal` that run in a child process."""


class Renewal:
    """The renewal of a running agent's certificate, for which it asks from half of the certificate's life on.

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
        """Return whether to ask now, because half of the certificate's life is over.

        It is called for every message, and reads the certificate every `AGAIN_S` seconds only, or more often if the
        certificate is short-lived. ``clock_s`` is the time of any steady clock.
        """
        if clock_s < self._look_at:
            return False
        identity = self._identity()
        self._look_at = clock_s + min(AGAIN_S, (identity.not_after - identity.not_before) / 20)
        return self._at(0.5)

    def is_expired(self) -> bool:
        """Return whether the certificate has expired."""
        return self._at(1.0)

    def message(self) -> Renew:
        """Return the request for a new certificate as a message for the agent's own connection."""
        request = self._request()
        return Renew(csr=request.csr, serial=request.serial, signature=request.signature)

    def by_port(self) -> Identity:
        """Ask the enrolment port for a new certificate, and install it.

        Raises:
            EnrolmentRefused: The coordinator refuses; the message says why, and what to do.
            BrokerAway: No coordinator answers, or the clocks differ; a device may set its clock later than it starts.
        """
        identity = self._identity()
        ca = self.folder.ca_der()
        address = (identity.host, identity.port)
        request = self._request().model_dump()
        try:
            answer = ask(address, ca, {"ask": "authority"}, checks_time=False)
            check_clock(answer, self._wall())
        except (EnrolmentRefused, MessageError) as error:  # nothing is refused yet
            raise BrokerAway(str(error)) from error
        try:
            return self.received(decode_field(ask(address, ca, request), "certificate"))
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error

    def standing(self) -> str:
        """Ask the coordinator until when it accepts the certificate, and return the time in the form for people.

        Raises:
            EnrolmentRefused: The certificate is no longer accepted; the message says why, and what to do.
            BrokerAway: No coordinator answers.
        """
        identity = self._identity()
        question = self.folder.question(identity.federation, identity.name).model_dump()
        try:
            answer = ask((identity.host, identity.port), self.folder.ca_der(), question, checks_time=False)
        except (NotTheCoordinator, MessageError) as error:
            raise BrokerAway(str(error)) from error
        until: Any = answer.get("until")
        if type(until) not in (int, float):
            raise BrokerAway(
                f"answer: {identity.host}:{identity.port} does not say until when the certificate is accepted"
            )
        return show_utc(until)

    def received(self, certificate: bytes) -> Identity:
        """Install a new certificate (DER) that has arrived, and return what it says.

        Raises:
            MessageError: The certificate is not for the requested key.
        """
        identity = self._identity()
        return self.folder.install(
            certificate,
            ca=self.folder.ca_der(),
            name=identity.name,
            federation=identity.federation,
            host=identity.host,
            port=identity.port,
        )

    def _request(self) -> CertificateRequest:
        identity = self._identity()
        return self.folder.request(identity.federation, identity.name)

    def _identity(self) -> Identity:
        """Return what the present certificate says."""
        identity = self.folder.read()
        if identity is None:
            raise StateError(f"{self.folder.file} is missing; enroll this device again: 'headwater enroll NAME'")
        return identity

    def _at(self, share: float) -> bool:
        """Return whether this share of the certificate's life is over."""
        identity = self._identity()
        return self._wall() >= identity.not_before + share * (identity.not_after - identity.not_before)


def renew_beside(state: Path, what: Step, certificate: str = "") -> dict[str, str]:
    """Run a method of `Renewal` in a child process, because ``cryptography`` would keep 13 MB in an agent's memory.

    Args:
        state: The agent's state folder.
        what: The name of the method.
        certificate: The new certificate (DER) in Base64, for "received".

    Returns:
        The fields of the request for "message", else ``until``: the end of the certificate, in the form for people.

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
    """Run the method that the parent asks for on stdin, and write its result to stdout; both are JSON."""
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

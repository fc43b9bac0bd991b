"""The enrolment port: TLS, one line of JSON each way, nothing else; for devices that have no valid certificate.

A device that the broker does not let in asks here whether its certificate counts, and learns why it does not.

An own port and no topic of the broker: MQTT clients without a certificate could take over the sessions of others by
their ids, and leave retained messages and sessions without end. Here a stranger gets a few seconds and 16 KiB.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge_agent.core.accepting import Acceptor
from edge_agent.core.errors import EnrolmentRefused, HeadwaterError, NotProven, UsageError, cause
from edge_agent.core.formats import printable
from edge_agent.core.task import parse_json
from edge_agent.identity.certificates import show_utc
from edge_agent.identity.enrolment_port import TIMEOUT_S, CertificateRequest, read_line

from ..broker import OnRefused, held_port
from .enrolment import Enrolment

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Connections that are served at a time; more wait in the system's queue."""

AT_ONCE_OF_ONE = 8
"""Of those, connections of one `_origin`; more are closed."""

HANDSHAKE_S = 3.0
"""For TLS: two round trips and 3 kB, which take 1.5 s over a link of 64 kbit/s with a delay of 300 ms."""

STRANGERS_LOGGED, STRANGERS_EVERY_S = 10, 60.0
"""Lines of the log in so many seconds for requests that prove nothing: anybody could fill it with them."""


class EnrolmentPort:
    """Answers requests for certificates, each in a thread of its own."""

    def __init__(self, enrolment: Enrolment, certificate: Path) -> None:
        """``certificate``: file with the key and certificate that this side shows; read again for each connection."""
        self.enrolment = enrolment
        self._certificate = certificate
        self._acceptor = Acceptor(AT_ONCE, self._begin, self._note_failure)
        self._served = Counter[str]()
        self._lock = threading.Lock()
        self.on_refused: OnRefused = lambda *_: None
        """Called with agent, reason and remedy when a certificate does not count; in a thread of the connection.

        Only where the request is signed by the agent's token or key, which nobody else has.
        """

        self.unproven_requests = 0
        """Requests that were refused and are not signed by a token or key that is known here."""

        self.clock: Callable[[], float] = time.monotonic
        """For the lines of the log, in seconds."""

        self._strangers = 0
        self._strangers_until = 0.0

    def start(self) -> None:
        """Listen for devices that enroll, in a thread.

        Raises:
            UsageError: the port is taken.
        """
        bind = self.enrolment.config.bind
        port = self.enrolment.config.enroll_port
        with held_port(bind, port):
            pass
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.create_server((bind, port), family=family, backlog=64)
        self._acceptor.start(listener, "enrolment")

    def stop(self) -> None:
        """Listen no more, and wait for the thread."""
        self._acceptor.close()

    def _note_failure(self, error: OSError) -> None:
        log.error("enrolment_not_accepted reason=%s; tried again", cause(error))

    def _begin(self, peer: socket.socket, address: str) -> None:
        """Serve a connection in a thread of its own, unless its origin has `AT_ONCE_OF_ONE` of them already."""
        origin = _origin(address)
        with self._lock:
            self._served[origin] += 1
            is_served = self._served[origin] <= AT_ONCE_OF_ONE
        try:
            if is_served:
                threading.Thread(target=self._serve, args=(peer, address), name="enroll", daemon=True).start()
                return
            log.debug("enrolment_not_served from=%s: it has %d connections", address, AT_ONCE_OF_ONE)
        except RuntimeError as error:
            log.error("enrolment_not_served from=%s reason=%s", address, cause(error))
        self._end(peer, origin)

    def _end(self, peer: socket.socket, origin: str) -> None:
        peer.close()
        with self._lock:
            self._served -= Counter({origin: 1})  # keeps no zeros
        self._acceptor.free()

    def _serve(self, peer: socket.socket, address: str) -> None:
        """Read one request by TLS, within `TIMEOUT_S`, and send the answer."""
        until = time.monotonic() + TIMEOUT_S
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._certificate)
            peer.settimeout(HANDSHAKE_S)
            with context.wrap_socket(peer, server_side=True) as secure:
                line = read_line(secure, until)
                secure.settimeout(max(0.1, until - time.monotonic()))
                secure.sendall(json.dumps(self.answer(line, address)).encode() + b"\n")
        except OSError as error:  # of TLS, too: strangers try everything
            log.debug("enrolment_failed from=%s reason=%s", address, cause(error))
        except Exception:
            log.exception("enrolment_broke from=%s", address)
        finally:
            self._end(peer, _origin(address))

    def answer(self, line: bytes, address: str = "") -> dict[str, Any]:
        """Return the answer to one request."""
        try:
            request = parse_json(line)
            if request == {"ask": "authority"}:
                authority = base64.b64encode(self.enrolment.authority.der).decode()
                return {
                    "authority": authority,
                    "time": self.enrolment.now().timestamp(),
                    "federation": self.enrolment.federation,
                }
            certificate_request = CertificateRequest.model_validate(request)
            if not certificate_request.csr:
                return {"until": self.enrolment.standing(certificate_request).not_after}
            certificate = self.enrolment.certify(certificate_request)
            answer = self.enrolment.answer(certificate_request.name, certificate)
        except (ValidationError, ValueError, RecursionError):
            self._note_stranger(address, f"{len(line)} bytes that are no request")
            return {"refused": "request: it is malformed; coordinator and device run different versions"}
        except UsageError as error:
            self._note_refusal(certificate_request.name, error, address)
            return {"refused": str(error)}
        except (HeadwaterError, OSError) as error:
            log.error("enrolment_failed from=%s reason=%s", address, error)
            return {"refused": "coordinator: it cannot make certificates now; its log says why, try again later"}
        log.info(
            "certified agent=%s key=%s until=%s from=%s",
            certificate_request.name,
            certificate.key,
            show_utc(certificate.not_after),
            address,
        )
        return dict(answer)

    def _note_refusal(self, name: str, error: UsageError, address: str) -> None:
        """Tell the operator of an agent that is refused, where the request proves to be that agent's."""
        if isinstance(error, NotProven) or not isinstance(error, EnrolmentRefused):
            self._note_stranger(address, printable(str(error)))
            return
        self.on_refused(name, error.reason, error.remedy)
        log.warning("enrolment_refused from=%s reason=%s", address, printable(str(error)))

    def _note_stranger(self, address: str, reason: str) -> None:
        """Count a refused request that proves nothing; the first ones of each `STRANGERS_EVERY_S` are in the log.

        No agent is named to the operator for it: anybody who reaches the port could accuse one.
        """
        with self._lock:
            now = self.clock()
            if now >= self._strangers_until:
                if self._strangers > STRANGERS_LOGGED:
                    count = self._strangers - STRANGERS_LOGGED
                    log.warning("enrolment_refused more=%d since the last line, of requests that prove nothing", count)
                self._strangers_until = now + STRANGERS_EVERY_S
                self._strangers = 0
            self._strangers += 1
            self.unproven_requests += 1
            is_logged = self._strangers <= STRANGERS_LOGGED
        if is_logged:
            log.warning("enrolment_refused from=%s reason=%s", address, reason)


def _origin(address: str) -> str:
    """Return what one peer has of addresses: one of IPv4; of IPv6 the network of 2^64 that a household gets."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))

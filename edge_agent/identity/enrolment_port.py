"""The exchange with the coordinator's enrolment port: one line of JSON each way, over TLS.

A device sends a `CertificateRequest`, whose proof has a form of `signed_request`. The same request goes as a message of
the agent's own connection, or in a file that is carried to the coordinator.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from typing import Any, Literal

from pydantic import Field

from edge_agent.identity.keys import Name
from edge_agent.identity.signed_request import request_bytes

from ..core.errors import (
    BrokerAway,
    EnrolmentRefused,
    MessageError,
    NotTheCoordinator,
    cause,
)
from ..core.formats import printable
from ..core.task import Frozen, parse_json
from ..wire.messages.fields import Base64, Serial

MAX_LINE_BYTES = 16 * 1024
"""The most bytes of a request or an answer on the enrolment port."""

TIMEOUT_S = 10.0
"""The seconds that connecting to the enrolment port, and its answer, may take."""

NO_CHECK_TIME = 0x200000
"""The flag X509_V_FLAG_NO_CHECK_TIME of OpenSSL."""


class CertificateRequest(Frozen):
    """A device's request for a certificate of its key."""

    federation: Name
    name: Name
    csr: Base64 | Literal[""] = Field(description="certificate signing request (DER); empty: see `Renewal.standing`")
    serial: Serial = Field("", description="of the certificate whose key has signed; empty: the token's key has")
    signature: Base64

    def signed(self) -> bytes:
        """Return the bytes that the signature covers."""
        return request_bytes(self.federation, self.name, self.csr, self.serial)


def ask(
    address: tuple[str, int], ca: bytes | None, request: dict[str, Any], *, checks_time: bool = True
) -> dict[str, Any]:
    """Send a request to an enrolment port and return its answer.

    Args:
        address: Host and port.
        ca: Certificate (DER) of the authority that has certified the other side; None: the other side is a stranger.
        request: The request.
        checks_time: False: accept certificates that are valid at another time, in order to ask for the time.

    Raises:
        BrokerAway: The connection fails, or no answer arrives.
        NotTheCoordinator: The other side has no certificate of ``ca``.
        EnrolmentRefused: The other side refuses; the message says why.
        MessageError: The answer is malformed.
    """
    host, port = address
    context = ssl.create_default_context(cadata=ca) if ca is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not checks_time:
        context.verify_flags |= NO_CHECK_TIME
    if ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection(address, TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.sendall(json.dumps(request).encode() + b"\n")
            line = read_line(secure)
    except ssl.SSLCertVerificationError as error:
        raise NotTheCoordinator(
            f"tls: {host}:{port} does not prove to be the coordinator ({cause(error)}); compare the clocks, and the "
            "authority that 'headwater enroll' shows there"
        ) from error
    except OSError as error:
        raise BrokerAway(
            f"connect: the coordinator's enrolment port {host}:{port} does not answer ({cause(error)}); 'headwater "
            "serve' has to run there, and a firewall has to let this port through"
        ) from error
    try:
        answer = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(
            f"answer: {host}:{port} sent {len(line)} bytes that are not JSON; is that an enrolment port?"
        ) from error
    if not isinstance(answer, dict):
        raise MessageError(
            f"answer: {host}:{port} sent {type(answer).__name__}, expected a JSON object; is that an enrolment port?"
        )
    if answer.get("refused") is not None:
        raise EnrolmentRefused(printable(str(answer["refused"]))[:1000])
    return answer


def read_line(sock: socket.socket, until: float | None = None) -> bytes:
    """Return the bytes up to a line break, or up to the end of what the other side sends.

    Args:
        sock: The connection.
        until: The moment of `time.monotonic` by which the line must be complete; None: `TIMEOUT_S` from now.

    Raises:
        OSError: The line is longer or slower than allowed, or the connection broke.
    """
    until = time.monotonic() + TIMEOUT_S if until is None else until
    line = b""
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole line in time")
        if len(line) > MAX_LINE_BYTES:
            raise TimeoutError(f"more than {MAX_LINE_BYTES} bytes")
        sock.settimeout(left_s)
        piece = sock.recv(4096)
        if not piece:
            break
        line += piece
    return line


def decode_field(content: dict[str, Any], key: str) -> bytes:
    """Return the bytes in a field of an answer, which holds them in Base64.

    Raises:
        MessageError: The field is missing or not Base64.
    """
    try:
        return base64.b64decode(content[key], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"answer: the field '{key}' holds no certificate") from error

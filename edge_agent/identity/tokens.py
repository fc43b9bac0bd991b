"""Tokens, which an operator gives to devices so that each can enroll once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from urllib.parse import urlsplit

from pydantic import Field

from edge_agent.identity.keys import SECRET_BYTES, Fingerprint, Name, Port

from ..core.config import BrokerConfig
from ..core.errors import (
    UsageError,
)
from ..core.formats import printable
from ..core.task import Frozen, parse_json

TOKEN_PREFIX = "hw1."  # noqa: S105 - not a secret, the beginning of every token

MOST_TIME = 1 << 40
"""The largest Unix time in seconds that is accepted; it is some 30,000 years away."""


class Token(Frozen):
    """The data that a device needs to enroll once."""

    url: str = Field(description="of the broker, mqtts://host:port")
    port: Port = Field(description="enrolment port of the coordinator")
    host: str = Field("", max_length=253, description="host of that port; empty: the broker's")
    federation: Name
    name: Name = Field(description="the agent's id")
    authority: Fingerprint = Field(description="of the federation's certificate authority")
    secret: str = Field(pattern=r"^[A-Za-z0-9_-]{22}$", description=f"{SECRET_BYTES} random bytes")
    expires: int = Field(ge=0, le=MOST_TIME, description="Unix time in seconds")
    replaces: Name | None = Field(None, description="the id that its device has now: it is renamed")

    def text(self) -> str:
        """Return the line that a person copies; it ends in a checksum, by which the device notices a typing error."""
        content = json.dumps(self.model_dump(exclude_defaults=True), separators=(",", ":")).encode()
        body = base64.urlsafe_b64encode(content).decode().rstrip("=")
        return f"{TOKEN_PREFIX}{body}.{_checksum(body)}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Return the token in a line.

        Raises:
            UsageError: The line is not a token, is incomplete, or has a typing error.
        """
        text = text.strip()
        advice = "copy the whole line that 'headwater enroll NAME' prints on the coordinator"
        if not text.startswith(TOKEN_PREFIX):
            raise UsageError(f"token: '{printable(text[:12])}…' does not begin with {TOKEN_PREFIX}; {advice}")
        body, _, check = text[len(TOKEN_PREFIX) :].partition(".")
        if not hmac.compare_digest(check.encode(), _checksum(body).encode()):
            raise UsageError(f"token: it is mistyped or cut off ({len(text)} characters); {advice}")
        try:
            token = cls.model_validate(parse_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
            BrokerConfig(url=token.url)
        except (ValueError, RecursionError) as error:
            raise UsageError("token: another version of headwater has made it; upgrade the older side") from error
        return token

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator's enrolment port."""
        return self.host or urlsplit(self.url).hostname or "", self.port


def _checksum(body: str) -> str:
    """Return the eight characters that end a token."""
    return base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest())[:6].decode()

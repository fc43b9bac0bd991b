"""Who may connect to a broker and who may say what where; the same rules and the same password file for every broker.

The MQTT user name is the agent's id. An agent speaks and listens only on its own topics, the broadcast topics and the
announcements; the coordinator may do everything in its federation.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from pathlib import Path

from edge_agent.config import NAME_PATTERN
from edge_agent.errors import StateError, UsageError, cause
from edge_agent.store import write_atomic
from edge_agent.wire.topics import Topics, matches

COORDINATOR_USER = "coordinator"
ITERATIONS = 10_000
"""PBKDF2 rounds, about 5 ms: passwords are random tokens, and a slower check would hold up everybody's messages."""

_HASH_BYTES = 64
_ANY_BLOB = "+"


class Rules:
    """What the users of one federation's broker may do."""

    def __init__(self, federation: str) -> None:
        self.topics = Topics(federation)

    def may_publish(self, user: str, topic: str) -> bool:
        """Whether ``user`` may say something on ``topic``."""
        return any(matches(allowed, topic) for allowed in self.writable(user))

    def may_subscribe(self, user: str, topic_filter: str) -> bool:
        """Whether ``user`` may listen to all that falls under ``topic_filter``."""
        return any(matches(allowed, topic_filter) for allowed in self.readable(user))

    def writable(self, user: str) -> tuple[str, ...]:
        """Filters of the topics that ``user`` may publish on."""
        if user == COORDINATOR_USER:
            return (f"{self.topics.root}/#",)
        if not re.fullmatch(NAME_PATTERN, user):
            return ()
        told = (self.topics.up, self.topics.up_chunks, self.topics.presence, self.topics.heartbeat)
        return tuple(topic(user) for topic in told)

    def readable(self, user: str) -> tuple[str, ...]:
        """Filters that ``user`` may subscribe to."""
        if user == COORDINATOR_USER:
            return (f"{self.topics.root}/#",)
        if not re.fullmatch(NAME_PATTERN, user):
            return ()
        return (*self.topics.for_agent(user), self.topics.broadcast(_ANY_BLOB))


def mosquitto_acl(federation: str) -> str:
    """The same rules as a mosquitto ACL file, where ``%u`` stands for the user name."""
    rules, topics = Rules(federation), Topics(federation)
    told = (topics.up, topics.up_chunks, topics.presence, topics.heartbeat)
    writable = [f"pattern write {topic('%u')}" for topic in told]
    readable = [f"pattern read {topics.down('%u')}", f"pattern read {topics.down_chunks('%u')}"]
    common = [f"pattern read {topics.broadcast(_ANY_BLOB)}", f"pattern read {topics.announce}"]
    everything = [f"topic readwrite {allowed}" for allowed in rules.writable(COORDINATOR_USER)]
    return "\n".join([f"user {COORDINATOR_USER}", *everything, "", *writable, *readable, *common, ""])


def set_password(path: Path, user: str, password: str, salt: bytes | None = None) -> None:
    """Add ``user`` to a password file or change it; mosquitto reads the same file.

    Raises:
        UsageError: the name cannot be a user's.
        StateError: the file is not a password file.
    """
    check_user(user)
    users = read_passwords(path) if path.exists() else {}
    users[user] = hash_password(password, salt or secrets.token_bytes(12))
    write_atomic(path, "".join(f"{name}:{users[name]}\n" for name in sorted(users)).encode())
    path.chmod(0o600)


def check_user(user: str) -> None:
    """Return quietly when ``user`` can be the name of one.

    Raises:
        UsageError: it cannot.
    """
    if not re.fullmatch(NAME_PATTERN, user):
        raise UsageError(f"user '{user[:80]}' does not match {NAME_PATTERN}; agents log in with their id")


def read_passwords(path: Path) -> dict[str, str]:
    """User -> hash.

    Raises:
        StateError: the file cannot be read or a line is not ``user:hash``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"{path}: no password file that can be read: {cause(error)}; enroll an agent to make one"
        ) from error
    users = {}
    for number, line in enumerate(lines, 1):
        user, separator, hashed = line.partition(":")
        if not separator or _parts(hashed) is None:
            raise StateError(f"{path}: line {number} is not 'user:$7$iterations$salt$hash'; enroll that user again")
        users[user] = hashed
    return users


def hash_password(password: str, salt: bytes) -> str:
    """PBKDF2-HMAC-SHA512 in the notation of mosquitto: ``$7$iterations$salt$hash``."""
    digest = _pbkdf2(password, salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def is_password(password: str, hashed: str) -> bool:
    """Whether ``password`` is the one behind ``hashed``; False also where ``hashed`` is malformed."""
    parts = _parts(hashed)
    if parts is None:
        return False
    iterations, salt, digest = parts
    return hmac.compare_digest(_pbkdf2(password, salt, iterations), digest)


def _pbkdf2(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha512", password.encode(), salt, iterations, _HASH_BYTES)


def _parts(hashed: str) -> tuple[int, bytes, bytes] | None:
    found = re.fullmatch(r"\$7\$([1-9][0-9]{0,6})\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)", hashed)
    if found is None:
        return None
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in found.groups()[1:])
    except ValueError:
        return None
    return (int(found[1]), salt, digest) if len(digest) == _HASH_BYTES else None

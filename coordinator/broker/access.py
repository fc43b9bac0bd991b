"""Who may connect to a broker and which topics they may use; the same rules and password file for every broker.

The MQTT user name is the agent's id. An agent speaks and listens only on its own topics, the broadcast topics and the
announcements; the relay of a site may do so for the agents there; the coordinator may do everything in its federation.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import StateError, UsageError, cause
from edge_agent.core.locks import waited_lock
from edge_agent.core.storage import Access, access_of, read_json, read_regular_text, write_atomic
from edge_agent.wire.topics import Topics, matches

COORDINATOR_USER = "coordinator"
BROKER_ACCOUNT = "mosquitto"
"""The account that Mosquitto runs as when root starts it."""

ITERATIONS = 10_000
"""PBKDF2 rounds, about 5 ms: passwords are random tokens, and a slower check would delay all messages."""

_HASH_BYTES = 64
_ANY_BLOB = "+"
_ANY_PARTITION = "+"

ALL_AGENTS = "*"
"""In the list of a relay's agents: it speaks for whatever agent there is."""

Relays = Mapping[str, tuple[str, ...]]
"""User of a relay -> the agents for which it speaks and listens, or `ALL_AGENTS`."""

Granted = Callable[[Topics, str], tuple[str, ...]]
"""Returns the topics, or filters, of a user."""

NO_RELAYS: Relays = MappingProxyType({})


def _writable(topics: Topics, user: str) -> tuple[str, ...]:
    """Return the topics that an agent may publish on."""
    to_coordinator = (topics.up(user), topics.up_chunks(user), topics.presence(user), topics.heartbeat(user))
    return (*to_coordinator, topics.up(user, _ANY_PARTITION), topics.up_chunks(user, _ANY_PARTITION))


def _readable(topics: Topics, user: str) -> tuple[str, ...]:
    """Return the filters that an agent may subscribe to."""
    return (topics.down(user), topics.down_chunks(user), topics.broadcast(_ANY_BLOB), topics.announce)


def _writable_for_sums(topics: Topics, relay: str) -> tuple[str, ...]:
    """Return the topics that a relay may publish on, about sums of its agents' updates."""
    return (topics.site_up(relay), topics.site_chunks(relay))


def _readable_for_sums(topics: Topics, relay: str) -> tuple[str, ...]:
    """Return the filters that a relay may subscribe to, about sums of its agents' updates."""
    return (topics.site_down(relay),)


def _levels(agents: tuple[str, ...]) -> tuple[str, ...]:
    """Return the levels of topics that stand for the agents of a relay."""
    return ("+",) if ALL_AGENTS in agents else agents


class Rules:
    """The rules that say what the users of one federation's broker may do."""

    def __init__(self, federation: str, relays: Relays = NO_RELAYS) -> None:
        self.topics = Topics(federation)
        self.relays = relays

    def may_publish(self, user: str, topic: str) -> bool:
        """Return whether ``user`` may publish on ``topic``."""
        return self._may(user, topic, _writable, _writable_for_sums)

    def may_subscribe(self, user: str, topic_filter: str) -> bool:
        """Return whether ``user`` may subscribe to ``topic_filter``."""
        return self._may(user, topic_filter, _readable, _readable_for_sums)

    def _may(self, user: str, topic: str, granted: Granted, granted_to_relay: Granted) -> bool:
        if user == COORDINATOR_USER:
            return matches(f"{self.topics.root}/#", topic)
        if re.fullmatch(NAME_PATTERN, user) is None:
            return False
        agents = (user, *_levels(self.relays.get(user, ())))
        allowed = [topic_filter for agent in agents for topic_filter in granted(self.topics, agent)]
        if user in self.relays:
            allowed += granted_to_relay(self.topics, user)
        return any(matches(topic_filter, topic) for topic_filter in allowed)


def mosquitto_acl(federation: str, relays: Relays = NO_RELAYS) -> str:
    """Return the same rules as a mosquitto ACL file, where ``%u`` stands for the user name."""
    topics = Topics(federation)
    # The version is for 'headwater doctor', which says what is known of a broker.
    lines = [f"user {COORDINATOR_USER}", f"topic readwrite {topics.root}/#", "topic read $SYS/broker/version", ""]
    for relay in sorted(relays):
        lines.append(f"user {relay}")
        for agent in _levels(relays[relay]):
            lines += [f"topic write {topic}" for topic in _writable(topics, agent)]
            lines += [f"topic read {topic}" for topic in _readable(topics, agent)]
        lines += [f"topic write {topic}" for topic in _writable_for_sums(topics, relay)]
        lines += [f"topic read {topic}" for topic in _readable_for_sums(topics, relay)]
        lines.append("")
    lines += [f"pattern write {topic}" for topic in _writable(topics, "%u")]
    lines += [f"pattern read {topic}" for topic in _readable(topics, "%u")]
    return "\n".join([*lines, ""])


def relays_file(users: Path) -> Path:
    """Return the file beside a password file that says which of its users are relays, and for whom they speak."""
    return users.with_name(f"{users.name}.relays")


def read_relays(users: Path) -> Relays:
    """Return the relays among the users of a password file.

    Raises:
        StateError: The file beside it is damaged.
    """
    path = relays_file(users)
    content = read_json(path) or {}
    relays = {}
    for relay, agents in content.items():
        names = [relay, *agents] if isinstance(agents, list) else [None]
        if not all(isinstance(name, str) and _is_relayed(name) for name in names):
            raise StateError(f"{path}: not a list of agents for each relay; 'headwater password --relay-for' writes it")
        relays[relay] = tuple(agents)
    return relays


def set_relay(users: Path, relay: str, agents: tuple[str, ...], *, account: str | None = None) -> Relays:
    """Note for which agents a user of a password file speaks, in place of those before; return all relays.

    Raises:
        UsageError: One of the names cannot be an agent's.
        StateError: The file of the relays is damaged.
    """
    users = users.resolve()
    for name in (relay, *agents):
        if name != ALL_AGENTS or name == relay:
            check_user(name)
    with waited_lock(users.parent):
        relays = {**read_relays(users), relay: agents}
        content = {name: list(relays[name]) for name in sorted(relays)}
        path = relays_file(users)
        write_atomic(path, f"{json.dumps(content, indent=1)}\n".encode(), access=access_for(path, account))
    return relays


def _is_relayed(name: str) -> bool:
    return name == ALL_AGENTS or re.fullmatch(NAME_PATTERN, name) is not None


def add_rules(path: Path, federation: str, relays: Relays = NO_RELAYS, *, account: str | None = None) -> bool:
    """Add the rules of ``federation`` to the ACL file at ``path``; return whether anything was changed.

    All other lines stay as they are, so one file serves several federations and other rules. Its rules stand
    between two comments, and are replaced there when they differ. Owner, group and mode are those of `access_for`.
    Two commands at once wait for each other, so none loses the other's rules.
    """
    path = path.resolve()
    first = f"# begin of the rules of federation '{federation}'"
    last = f"# end of the rules of federation '{federation}'"
    block = f"{first}, made by 'headwater password'\n{mosquitto_acl(federation, relays)}{last}\n"
    present = re.compile(rf"^{re.escape(first)},.*?^{re.escape(last)}\n", re.DOTALL | re.MULTILINE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with waited_lock(path.parent):
        before = read_regular_text(path) if path.exists() else ""
        if present.search(before):
            after = present.sub(lambda _: block, before, count=1)
        elif before and not before.endswith("\n"):
            after = f"{before}\n{block}"
        else:
            after = before + block
        if after == before:
            return False
        write_atomic(path, after.encode(), access=access_for(path, account))
    return True


def set_password(
    path: Path, user: str, password: str, salt: bytes | None = None, *, account: str | None = None
) -> bool:
    """Add ``user`` to a password file, or change its password; return whether the user was there.

    Mosquitto reads the same file.

    The lines of all other users stay as they are, also those that mosquitto_passwd wrote. Owner, group and mode are
    those that `access_for` gives. Two commands at once wait for each other, so none loses the other's user.

    Raises:
        UsageError: the name cannot be a user's, or there is no such account.
        StateError: the file is not a password file.
    """
    check_user(user)
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with waited_lock(path.parent):
        lines = _lines(path) if path.exists() else {}
        was_there = user in lines
        lines[user] = f"{user}:{hash_password(password, salt or secrets.token_bytes(12))}"
        write_atomic(path, "".join(f"{line}\n" for line in lines.values()).encode(), access=access_for(path, account))
    return was_there


def access_for(path: Path, account: str | None = None) -> Access:
    """Return owner, group and mode that a broker's file at ``path`` should have when it is written.

    Mosquitto gives up root before it reads its files, so a file that only root could read is given to somebody else.

    Args:
        path: The file, which may not exist yet.
        account: The account that the broker runs as; None: it is not known.

    Raises:
        UsageError: There is no such account.
    """
    private = Access.private()
    present = access_of(path) if path.exists() else private
    if account is not None:
        uid, gid = _find_account(account)
        return Access(uid, gid, present.mode)
    # The broker can read the file as it is, or nobody here can change its owner.
    others_can_read = path.exists() and present.mode & 0o044 != 0
    if private.uid != 0 or present.uid != 0 or others_can_read:
        return present
    # The owner of the folder is probably the broker's account, if it is not root; else it may be Mosquitto's usual one.
    folder = access_of(path.parent)
    if folder.uid != 0:
        return Access(folder.uid, folder.gid, present.mode)
    try:
        uid, gid = _find_account(BROKER_ACCOUNT)
    except UsageError:
        return present
    return Access(uid, gid, present.mode)


def _find_account(name: str) -> tuple[int, int]:
    """Return user and group id of an account.

    Raises:
        UsageError: There is no such account on this machine.
    """
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise UsageError(f"no account '{name}' on this machine; name the one that the broker runs as") from error
    return entry.pw_uid, entry.pw_gid


def check_user(user: str) -> None:
    """Require that ``user`` can be the name of a user.

    Raises:
        UsageError: It cannot.
    """
    if not re.fullmatch(NAME_PATTERN, user):
        raise UsageError(f"user '{user[:80]}' does not match {NAME_PATTERN}; agents log in with their id")


def read_passwords(path: Path) -> dict[str, str]:
    """Return the hash of each user's password.

    Raises:
        StateError: The file cannot be read or a line is not ``user:hash``.
    """
    users = {}
    for number, (user, line) in enumerate(_lines(path).items(), 1):
        users[user] = line.partition(":")[2]
        if _parts(users[user]) is None:
            raise StateError(
                f"{path}: line {number} is not 'user:$7$iterations$salt$hash'; 'headwater password' writes one"
            )
    return users


def _lines(path: Path) -> dict[str, str]:
    """Return the whole line of each user, whatever kind of hash it has.

    Raises:
        StateError: The file cannot be read or a line is not ``user:$kind$…``.
    """
    try:
        lines = read_regular_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"{path}: no password file that can be read: {cause(error)}; make one with headwater password"
        ) from error
    wrong = [number for number, line in enumerate(lines, 1) if not re.match(r"[^:]+:\$", line)]
    if wrong:
        raise StateError(f"{path}: line {wrong[0]} is not 'user:$7$iterations$salt$hash'; name a password file")
    return {line.partition(":")[0]: line for line in lines}


def hash_password(password: str, salt: bytes) -> str:
    """Return the PBKDF2-HMAC-SHA512 of a password in the notation of mosquitto: ``$7$iterations$salt$hash``."""
    digest = _pbkdf2(password, salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def is_password(password: str, hashed: str) -> bool:
    """Return whether ``password`` is the one behind ``hashed``; False also where ``hashed`` is malformed."""
    parts = _parts(hashed)
    if parts is None:
        return False
    iterations, salt, digest = parts
    return hmac.compare_digest(_pbkdf2(password, salt, iterations), digest)


def _pbkdf2(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha512", password.encode(), salt, iterations, _HASH_BYTES)


def _parts(hashed: str) -> tuple[int, bytes, bytes] | None:
    """Return iterations, salt and digest of a hash; None where it is malformed."""
    match = re.fullmatch(r"\$7\$([1-9][0-9]{0,6})\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)", hashed)
    if match is None:
        return None
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in match.groups()[1:])
    except ValueError:
        return None
    if len(digest) != _HASH_BYTES:
        return None
    return int(match[1]), salt, digest

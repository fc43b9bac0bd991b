"""Errors as the other side of a federation may know them: a code, a text without names of this device, and a remedy.

An agent sends a `Fault` of its errors. The table here says for each class of error which code it has, what the
coordinator may read where the message itself stays on the device, and what somebody can do about it. A coordinator
decides by code and class alone.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core import errors
from ..core.errors import HeadwaterError, cause
from ..core.formats import printable
from .messages.fields import SHARES_WRONG
from .messages.up import Fault

LOGIN_REFUSED = "LoginRefused"
"""The error of a device whose login the broker refuses."""

TOPICS_REFUSED = "TopicsRefused"
"""The error of a device that the broker does not let speak or listen on its own topics."""

DISK_CODE = "disk"
"""The code of a disk that cannot be written, which is told by the error's number and not by its class."""

SEE_STATUS = "see 'edge-agent status' on the device"
"""The remedy where the message on the device says more; the device's own status says so in other words."""


class KnownError(NamedTuple):
    """What the coordinator gets of errors of a class: a code, and a text where the message itself stays here."""

    kind: type[BaseException]
    code: str
    text: str
    remedy: str


OTHER_ERROR = KnownError(BaseException, "internal", "an unexpected error", f"{SEE_STATUS}, and its log")
"""What counts for errors of any other class."""

KNOWN_ERRORS = (
    KnownError(
        errors.DataError,
        "data",
        "local data do not fit what is asked of this device; its log and 'edge-agent status' there say which",
        "correct the data, or [data] in the agent's configuration; where all devices have the same other classes, "
        "correct class_names in [task] of the coordinator's",
    ),
    KnownError(
        errors.ConfigError,
        "config",
        "a mistake in the agent's configuration",
        "correct the agent's configuration and restart the agent",
    ),
    KnownError(
        errors.UnknownName,
        "unknown-name",
        "a name in the agent's configuration or task is not known there",
        "correct the agent's configuration and restart the agent",
    ),
    KnownError(
        errors.DuplicateId, "duplicate-id", "another agent has the same id", "give one of the two agents another id"
    ),
    KnownError(
        errors.EnrolmentRefused,
        "identity",
        "its certificate does not count",
        "stop the agent and enroll the device again: 'headwater enroll NAME', 'edge-agent enroll -'",
    ),
    KnownError(errors.UsageError, "usage", "what is asked of this device cannot be done as written", SEE_STATUS),
    KnownError(
        errors.MissingCapability,
        "missing-capability",
        "something that this needs is not on the device",
        "install what is missing on the device, or give it another tier",
    ),
    KnownError(
        errors.FingerprintMismatch,
        "head-mismatch",
        "the head belongs to another encoder",
        "export and release the encoder again",
    ),
    KnownError(
        errors.BundleDamaged,
        "bundle-damaged",
        "the bundle is damaged, or does not do here what it did where it was made",
        "export and release the encoder again",
    ),
    KnownError(
        errors.BundleOlder,
        "older",
        "the bundle was signed before the one that was installed last",
        "nothing where the coordinator signs: it does so again; otherwise 'headwater keys sign --again'",
    ),
    KnownError(
        errors.BundleUntrusted,
        "untrusted",
        "the device does not trust the bundle's signature",
        f"{SEE_STATUS}; look at the device's clock and at whose keys it trusts",
    ),
    KnownError(errors.BundleError, "bundle", "the bundle cannot be used here", "export and release the encoder again"),
    KnownError(
        errors.TransferTooSlow,
        "too-slow",
        "the link is too slow for this round",
        "give rounds more time, or the device a faster link",
    ),
    KnownError(
        errors.TrainingFailed, "training", "training stopped", "look at the data of this device and at the step size"
    ),
    KnownError(
        errors.UpdateRejected, "round", "the round goes on without this device", "nothing: it is asked again later"
    ),
    KnownError(
        errors.StateError,
        "state",
        "files in the agent's state folder cannot be used",
        "look into the agent's log; what is damaged in its state folder can be removed",
    ),
    KnownError(
        errors.ProtocolMismatch,
        "protocol",
        "the two sides speak different protocols",
        "upgrade the side that speaks the older protocol",
    ),
    KnownError(
        errors.CodecError,
        "message",
        "something that was received cannot be read",
        f"upgrade the older side; {SEE_STATUS}",
    ),
    KnownError(MemoryError, "memory", "not enough memory", "give the agent more memory, or another tier"),
    KnownError(OSError, "system", "the system refused something", f"{SEE_STATUS}, and its log"),
)
"""Known classes of errors; the first that fits counts."""

CODES = frozenset({DISK_CODE, OTHER_ERROR.code, *(description.code for description in KNOWN_ERRORS)})
"""All codes that faults have."""

_NAMED = tuple(vars(errors).values())


def known_error(error: BaseException) -> KnownError:
    """Return what the coordinator gets of an error of this class."""
    for description in KNOWN_ERRORS:
        if isinstance(error, description.kind):
            return description
    return OTHER_ERROR


def nearest_class(error: BaseException) -> str:
    """Return the name of the nearest class of ours or of Python; classes of others may be called anything."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins" or kind in _NAMED)[:64]


def public_text(error: BaseException) -> str:
    """Return what the coordinator may know of an error, without a name of this device's own."""
    public_message = getattr(error, "public_message", None)
    if public_message is not None:
        return printable(public_message)[:2000]
    if getattr(error, "is_public", False):
        return printable(str(error))[:2000]
    return known_error(error).text


def whole_message(error: BaseException) -> str:
    """Return the message of an error, at most 2,000 characters, with its file where the system names one."""
    if isinstance(error, HeadwaterError):
        return str(error)[:2000] or "no message"
    named = getattr(error, "filename", None) if isinstance(error, OSError) else None
    return (f"{named}: " if named is not None else "") + cause(error)[:1800]


def accused_by(message: Fault) -> frozenset[str]:
    """Return the agents whose shares of a secure sum the sender could not decrypt, where that is its error.

    A device of an earlier version names them at the beginning of the message alone.
    """
    if message.error != SHARES_WRONG:
        return frozenset()
    if message.accused:
        return frozenset(message.accused)
    return names_before_colon(message.message)


def names_before_colon(text: str) -> frozenset[str]:
    """Return the names at the beginning of a text that earlier versions have written: ``a, b: what is wrong``."""
    names, colon, _ = text.partition(":")
    return frozenset(names.split(", ")) if colon else frozenset()


def fault(error: BaseException, run: str, number: int) -> Fault:
    """Return the `Fault` of an error of a job with its message in full, for the same machine."""
    return Fault(error=type(error).__name__[:64], message=whole_message(error), run=run, round=number)

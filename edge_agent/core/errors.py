"""Every error that Headwater raises on purpose.

HeadwaterError                  exit 1   something failed
├── UsageError                  exit 2   the request cannot be carried out as written
│   ├── ConfigError             exit 2   a configuration file has mistakes (all of them are listed)
│   ├── UnknownName             exit 2   no such method, head, encoder or data source (nearest name suggested)
│   ├── DataError               exit 2   local data are missing, empty, or not of the expected form
│   ├── WeightsError            exit 2   a file of weights is missing, unreadable, or of another network
│   ├── EnrolmentRefused        exit 2   a token or certificate does not count, or is of another federation
│   │   ├── NotProven           exit 2   a request for a certificate is not signed by what it names
│   │   └── NotTheCoordinator   exit 2   who answers a request for a certificate is somebody else
│   ├── DuplicateId             exit 2   another agent with the same id is alive
│   └── DuplicateCoordinator    exit 2   another coordinator serves the same federation
├── ProtocolMismatch            exit 3   the two sides speak different protocol versions
├── BundleError                 exit 4   a bundle cannot be used
│   ├── BundleDamaged           exit 4   bytes are not those that the manifest promises
│   ├── BundleUntrusted         exit 4   not signed by the keys that this device trusts, or expired
│   │   └── BundleOlder         exit 4   signed before what was installed
│   └── FingerprintMismatch     exit 4   a head belongs to another encoder
├── MissingCapability           exit 5   an optional package or a device feature is not there
├── CodecError                  exit 1   bytes from a peer or a file are not what they claim to be
│   ├── MessageError            exit 1   a control message
│   ├── TensorsError            exit 1   a tensor container
│   └── ChunkError              exit 1   a chunk of a blob
├── UpdateRejected              exit 1   an update does not fit its round
├── TransferTooSlow             exit 1   a blob or an update cannot pass the link before its round closes
├── TrainingFailed              exit 1   local training stopped (non-finite loss, for example)
├── TrainingCancelled           exit 1   local training was stopped on request, because its round is over
├── PrivacyRefused              exit 1   a job asks for more than the device's [privacy] lets out
│   └── SumRefused              exit 1   a secure sum would reveal more than the sum, or cannot be shown not to
│       └── SharesWrong         exit 1   shares of other devices do not open
├── Busy                        exit 1   more inputs wait to be answered than may; trying again later helps
│   └── SamplesBusy             exit 1   another program is changing the samples of the device
├── NotReady                    exit 1   there is no model yet that could answer
├── SourceLost                  exit 1   a camera, an address or a folder gives no inputs any more
│   └── SourceEnded             exit 1   a source has given all that it had
├── RunFailed                   exit 1   a run cannot go on, or has ended without a result
├── SumMissed                   exit 1   an attempt at a secure sum gave none; the round begins again
├── MeasuringFailed             exit 1   what a benchmark measures has ended, or does not answer
├── ChildFailed              exit 1   a process that was started for some work has ended without its result
├── ExportRejected              exit 1   an export did not pass its gates; the previous bundle stays
├── StateError                  exit 1   files kept on disk are damaged or belong to another user or program
│   └── JournalAway             exit 75  the database of the journal cannot be reached now; trying again later may help
├── StartStopped                exit 1   stopped before it was known whether another coordinator serves
└── BrokerAway                  exit 75  the broker cannot be reached now; trying again later may help

A message has three parts: what was found (with the value), what was expected, what to do next.
"""

from __future__ import annotations

import difflib
import errno
import json
import socket
from collections.abc import Iterable
from typing import ClassVar


class HeadwaterError(Exception):
    """Root of the tree; catching it catches every error that Headwater raises on purpose.

    The message of an error on a device stays there, unless it says ``is_public``: then no path, file name, class name
    or other text of the device's own is in it, and the coordinator gets it. ``public_message`` is what the coordinator
    gets in place of a message that does hold some.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object, is_public: bool = False, public_message: str | None = None) -> None:
        super().__init__(*args)
        self.is_public = is_public
        self.public_message = public_message


class UsageError(HeadwaterError):
    """The request cannot be carried out as written."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration has mistakes; ``mistakes`` holds one line for each."""

    def __init__(self, where: str, mistakes: Iterable[str]) -> None:
        self.where = where
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(f"{where}: {count} mistake{'s' if count != 1 else ''}\n{lines}")


class UnknownName(UsageError):
    """A name is not in a registry; ``nearest`` is the closest name that is, or None."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(sorted(known))
        self.nearest = nearest(name, self.known)
        hint = f"did you mean '{self.nearest}'? " if self.nearest else ""
        super().__init__(f"unknown {kind} '{name}': {hint}known: {', '.join(self.known) or 'none'}")


class DataError(UsageError):
    """Local data are missing, empty, or not of the expected form."""


class WeightsError(UsageError):
    """A file of weights is missing, unreadable, or of another network."""


class EnrolmentRefused(UsageError):
    """A token or a certificate does not count; the message names the step, the cause and the next command.

    ``reason`` is the message without the next command, and ``remedy`` that command; empty where none was given.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        message = f"{reason}; {remedy}" if remedy else reason
        super().__init__(message)


class NotProven(EnrolmentRefused):
    """A request for a certificate is not signed by a token or key of the agent that it names: anybody may send such.

    The message is the same whether or not there is such an agent, and tells nothing of one.
    """


class NotTheCoordinator(EnrolmentRefused):
    """Whoever answers a request for a certificate does not prove to be the coordinator; a retry may succeed."""


class DuplicateId(UsageError):
    """Another agent with the same id is alive; one of the two needs another."""


class DuplicateCoordinator(UsageError):
    """Another coordinator serves the federation; one of the two stops."""


class ProtocolMismatch(HeadwaterError):
    """The two sides speak different protocol versions.

    Attributes:
        is_peer_older: Whether the other side is the one to upgrade; otherwise it is this side.
    """

    exit_code = 3

    def __init__(self, message: str, *, is_peer_older: bool = False) -> None:
        super().__init__(message)
        self.is_peer_older = is_peer_older


class BundleError(HeadwaterError):
    """A bundle cannot be used."""

    exit_code = 4


class BundleDamaged(BundleError):
    """A file of a bundle is missing, or has another hash than the manifest."""


class BundleUntrusted(BundleError):
    """A bundle is not signed by the keys that this device trusts, or its signature has expired."""


class BundleOlder(BundleUntrusted):
    """A bundle's signature is older than that of what was installed."""


class FingerprintMismatch(BundleError):
    """A head was fitted on the features of another encoder."""


class MissingCapability(HeadwaterError):
    """An optional package or a device feature is needed and is not there."""

    exit_code = 5

    @classmethod
    def package(cls, module: str, extra: str, purpose: str) -> MissingCapability:
        """Return an error that names the extra which brings ``module``, and how to add it to this copy of Headwater.

        The command holds paths of this machine, so the coordinator gets the name of the extra alone.
        """
        from .installation import install_command

        need = f"{purpose} needs '{module}', which is not installed"
        return cls(f"{need}; {install_command(extra)}", public_message=f"{need}; install the extra '{extra}' there")


class CodecError(HeadwaterError):
    """Bytes from a peer or a file do not have the form that they claim."""


class MessageError(CodecError):
    """A control message is malformed."""


class TensorsError(CodecError):
    """A tensor container is malformed, or holds other tensors than expected."""


class ChunkError(CodecError):
    """A chunk of a blob is malformed or does not fit its transfer."""


class UpdateRejected(HeadwaterError):
    """An update does not fit its round; the message is the reason that is sent back and counted."""


class TransferTooSlow(HeadwaterError):
    """A blob or an update cannot pass the link before its round closes."""


class TrainingFailed(HeadwaterError):
    """Local training stopped and its result must not be used."""


class TrainingCancelled(HeadwaterError):
    """Local training was stopped on request, because its round is over."""


class PrivacyRefused(HeadwaterError):
    """A job asks for more than ``[privacy]`` in the device's configuration lets out; the device does not do it."""


class SumRefused(PrivacyRefused):
    """An attempt at a secure sum would reveal more than the sum; another attempt may succeed."""


class SharesWrong(SumRefused):
    """Encrypted shares of other devices cannot be decrypted; ``clients`` are those devices, or the first of many."""

    def __init__(self, message: str, clients: Iterable[str]) -> None:
        super().__init__(message)
        self.clients = tuple(clients)


class Busy(HeadwaterError):
    """More inputs wait to be answered than may; ``retry_s`` is the number of seconds after which to try again."""

    def __init__(self, waiting: int, retry_s: int) -> None:
        self.retry_s = retry_s
        super().__init__(f"{waiting} inputs are waiting, which is the most; try again in {retry_s} s")


class SamplesBusy(Busy):
    """Another program is changing the samples of the device, and takes long."""

    def __init__(self, retry_s: int) -> None:
        HeadwaterError.__init__(
            self,
            "nothing was added: another program, such as 'edge-agent add', is changing the samples of this device; "
            f"try again in {retry_s} s, or end it if it hangs",
        )
        self.retry_s = retry_s


class NotReady(HeadwaterError):
    """There is no model yet that could answer an input."""


class SourceLost(HeadwaterError):
    """A camera, an address or a folder gives no inputs any more; it is opened again after a pause."""


class SourceEnded(SourceLost):
    """A source has given all that it had, and is not opened again."""


class RunFailed(HeadwaterError):
    """A run cannot go on, or has ended without a result; the message says why."""


class SumMissed(HeadwaterError):
    """An attempt at a secure sum has given none, and revealed nothing; the message says why. The round begins again."""


class MeasuringFailed(HeadwaterError):
    """Something that was being measured ended or did not answer; the message holds its stderr tail."""


class StopRun(Exception):
    """Raised by a function that watches a simulation, to end it after the round that was closed last.

    It is a request and no failure: the run is evaluated and personalized as after its last round. The text is the
    reason, which the result has.
    """


class RemoteTraceback(Exception):
    """The traceback of an error of another process, as text; it is the cause of the error that is raised here."""


class ChildFailed(HeadwaterError):
    """A child process has ended, or was killed, without its result; ``tail`` is the end of its stderr."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


class ExportRejected(HeadwaterError):
    """An export did not pass its gates; the previous bundle stays."""


class StateError(HeadwaterError):
    """Files kept on disk are damaged or belong to another user or program.

    ``holder`` names the process that holds a folder which is in use; it is empty for any other failure.
    """

    def __init__(
        self, *args: object, is_public: bool = False, public_message: str | None = None, holder: str = ""
    ) -> None:
        super().__init__(*args, is_public=is_public, public_message=public_message)
        self.holder = holder


class JournalAway(StateError):
    """The database that keeps the journal cannot be reached now; trying again later may help."""

    exit_code = 75


class StartStopped(HeadwaterError):
    """The program was asked to stop before it was known whether another coordinator serves, and started nothing."""


class BrokerAway(HeadwaterError):
    """The broker cannot be reached now; trying again later may help."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that looks most like ``name``, or None when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def raiser_of(error: BaseException) -> tuple[str, str]:
    """Return the module and the function that raised an error, both empty where it was never raised.

    Where a package raises one class for several failures without a code of its own, this tells them apart, and the
    words of its message, which change from version to version, do not.
    """
    frame = error.__traceback__
    if frame is None:
        return "", ""
    while frame.tb_next is not None:
        frame = frame.tb_next
    return str(frame.tb_frame.f_globals.get("__name__", "")), frame.tb_frame.f_code.co_name


def without_home(error: RuntimeError) -> UsageError | None:
    """Return a usage error where ``error`` says that the home folder of a path with ``~`` is unknown; else None."""
    module, function = raiser_of(error)
    if module.partition(".")[0] != "pathlib" or function not in {"expanduser", "home"}:
        return None
    return UsageError(
        "the home folder, with which '~' or a default path begins, is unknown; write the path out, or set HOME"
    )


def cause(error: BaseException) -> str:
    """Return why something failed, as a clause for people, without class names and error numbers."""
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at line {error.lineno}, column {error.colno}"
    # An error of ssl is known by its attribute, so that ssl need not be imported here.
    verify_message = getattr(error, "verify_message", "")
    if verify_message:
        clock = "; compare the clocks" if is_of_another_time(error) else ""
        return f"the certificate is not trusted ({str(verify_message).rstrip('.')}{clock})"
    # The text of an error of subprocess holds the whole command; its exit code and last line say more.
    return_code = getattr(error, "returncode", None)
    if return_code is not None:
        return _describe_exit(return_code, getattr(error, "stderr", "") or "")
    for kind, message in _CAUSES:
        if isinstance(error, kind):
            return message
    if isinstance(error, OSError) and error.strerror:
        return _first_line(error.strerror)
    return _first_line(str(error)) or f"{type(error).__name__} without a message"


def _describe_exit(code: int, stderr: str) -> str:
    """Return how a process ended, from its return code as of `subprocess`, with the last line of its ``stderr``."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last_line = _first_line(stderr.strip().rpartition("\n")[2])
    if not last_line:
        return f"its process ended with {how}"
    return f"its process ended with {how}: {last_line}"


def remedy(error: OSError) -> str:
    """Return what to do about a path that cannot be read or written; empty where the cause alone says it."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "free some space, or name a folder on another disk"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "grant this user access (chmod, chown), or name another path"
    return "name a folder that can be written" if error.errno == errno.EROFS else ""


SET_CLOCK = "set the clock that is wrong ('timedatectl set-ntp true')"
"""The remedy where the clocks of two machines differ."""


def is_of_another_time(error: BaseException) -> bool:
    """Return whether a certificate was refused because it does not hold at the time of this machine's clock."""
    return getattr(error, "verify_code", 0) in _OTHER_TIME


_OTHER_TIME = {9, 10}
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_CAUSES: tuple[tuple[type[BaseException], str], ...] = (
    (FileNotFoundError, "no such file or folder"),
    (PermissionError, "this user has no access (permission denied)"),
    (IsADirectoryError, "it is a folder, not a file"),
    (NotADirectoryError, "a part of the path is a file, not a folder"),
    (ConnectionRefusedError, "no program listens on that port (connection refused)"),
    (ConnectionResetError, "the other side closed the connection"),
    (BrokenPipeError, "the other side closed the connection"),
    (socket.gaierror, "the host name cannot be resolved"),
    (TimeoutError, "no answer in time"),
    (UnicodeDecodeError, "it is not UTF-8 text"),
    (RecursionError, "it is nested too deeply"),
    (MemoryError, "not enough memory"),
)


def _first_line(text: str, limit: int = 300) -> str:
    return (text.strip().splitlines() or [""])[0][:limit]

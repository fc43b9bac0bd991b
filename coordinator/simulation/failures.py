"""Where an unexpected error of a client came from: the place in a user's file, the traceback, and the log that has it.

The error happened in another process, or was turned into a `Fault` in this one. The coordinator raises another error
for it, which gets the traceback as a note (Python 3.11 and later) or as its cause.
"""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.core.errors import RemoteTraceback

_OWN = tuple(str(Path(__file__).resolve().parents[2] / name) for name in ("coordinator", "edge_agent", "export"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_of_user(file: str) -> bool:
    """Return whether a file of code is a user's own: neither of this program nor installed."""
    return not file.startswith((*_OWN, *_INSTALLED))


@dataclass(frozen=True)
class Failure:
    """An unexpected error of a client's work.

    Attributes:
        location: File, line and function in which a user's code raised it, or the innermost ones; empty: not known.
        trace: The whole traceback.
        log: The log of the worker, which has it too; empty: there is none on this machine.
    """

    location: str = ""
    trace: str = ""
    log: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe where an error that was caught came from."""
        frames = traceback.extract_tb(error.__traceback__)
        foreign = [frame for frame in frames if is_of_user(frame.filename)]
        chosen = (foreign or frames)[-1:]
        location = "".join(f"{frame.filename}, line {frame.lineno}, in {frame.name}" for frame in chosen)
        return cls(location, "".join(traceback.format_exception(error)))

    @property
    def is_in_users_file(self) -> bool:
        """Whether a user's own file raised the error."""
        return bool(self.location) and is_of_user(self.location)

    @property
    def where(self) -> str:
        """What a message says of it, in brackets; empty where nothing is known."""
        hints = []
        if self.location:
            hints.append(self.location)
        if self.log:
            hints.append(f"the whole traceback is in {self.log}")
        return f" ({'; '.join(hints)})" if hints else ""

    def attach_to(self, error: BaseException) -> BaseException:
        """Return the same error, with the traceback as a note."""
        if not self.trace:
            return error
        add_note(error, f"Traceback of the client's process:\n{self.trace.rstrip()}")
        return error

    def to_json(self) -> dict[str, Any]:
        """Return location and traceback as JSON for another process; the constructor takes them."""
        return {"location": self.location, "trace": self.trace}


NONE = Failure()


def add_note(error: BaseException, note: str) -> None:
    """Add a note, which tracebacks show; Python 3.10 has none, and shows the cause of an error in its place."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        before = str(error.__cause__ or "")
        error.__cause__ = RemoteTraceback(f"{before}\n{note}" if before else note)

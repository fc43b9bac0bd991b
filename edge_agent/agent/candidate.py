"""A new bundle is prepared in a process beside the agent's: whatever happens there, the pair in use goes on serving.

The child has limits of memory and of a processor's time, says what it does, and is killed with its own children where
it is silent for long. It writes the candidate (an unpacked bundle, a head, cached features) beside the pair in use;
the agent alone switches. Where the agent ends, so does the child; what it leaves is removed by `head_tier.clean`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import errors
from ..core.children import Watch, answer_of_watched
from ..core.config import AgentConfig
from ..core.errors import BundleError, ChildFailed, HeadwaterError
from ..core.limits import available_bytes, limit_resources, stand_back
from ..wire.messages.down import Install
from ..wire.messages.up import Report
from .head_tier import Candidate, prepare_here, rejected

log = logging.getLogger(__name__)

SILENT_S = 900.0
"""Without a word for so long a child hangs: the longest step on a slow device is the trial of an encoder, 300 s."""

LIMIT_S = 6 * 3600.0
"""How long a child may take, in seconds."""

CPU_S = 4 * 3600
"""How much time of a processor a child may take, in seconds."""

RESERVE_BYTES = 32 << 20
"""Memory that a child leaves to the agent and to others, of what is available when it begins."""

LEAST_BYTES = 96 << 20
"""A child gets so much also where less is available: ONNX Runtime and numpy alone take most of it."""

_KINDS: dict[str, type[HeadwaterError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)
}


def prepare_beside(
    config: AgentConfig, message: Install, path: Path, now: float, heard: Callable[[str], object] = lambda _step: None
) -> Candidate:
    """Do as `head_tier.prepare_here` in a child process, and call ``heard`` with each step that the child begins.

    The report has the metric ``install.peak_mb``: memory of agent and child together, MB, at its peak.

    Raises:
        HeadwaterError: as `prepare_here`; without an old pair also BundleError where the child ends without an answer.
        OSError: no process can be started, or the disk cannot be written.
    """
    available = available_bytes()
    memory = None if available is None else max(LEAST_BYTES, available - RESERVE_BYTES)
    question = {
        "config": config.model_dump(mode="json"),
        "message": message.model_dump(mode="json"),
        "bundle": str(path.resolve()),
        "now": now,
        "path": sys.path,
        "parent": os.getpid(),
        "memory_bytes": memory,
        "cpu_s": CPU_S,
    }
    step = "start"
    peak_mb = 0.0

    def on_line(line: dict[str, Any]) -> None:
        nonlocal step
        if "failed" in line:
            raise ChildFailed(line["failed"])
        if "step" in line:
            step = line["step"]
            heard(step)
        else:
            logging.getLogger(line["logger"]).log(line["level"], "%s", line["text"])

    def look(process: int) -> None:
        nonlocal peak_mb
        own_mb = resident_mb_of(os.getpid())
        child_mb = resident_mb_of(process, *children_of(process))
        peak_mb = max(peak_mb, own_mb + child_mb)

    try:
        answer = answer_of_watched(__name__, main.__name__, question, on_line, Watch(SILENT_S, LIMIT_S, look))
    except ChildFailed as error:
        if error.tail:
            log.error("candidate_failed bundle=%s stderr=%s", message.bundle_id[:12], error.tail)
        limits = f"{CPU_S} s of a processor"
        if memory is not None:
            limits += f" and {memory >> 20} MiB of memory"
        reason = f"the process that prepares it failed in step '{step}': {error}; {limits} are allowed"
        return rejected(config, message, BundleError(reason, is_public=True))
    if "error" in answer:
        raise _error_of(answer)
    log.info("prepared bundle=%s peak_mb=%.0f", message.bundle_id[:12], peak_mb)
    report = Report.model_validate(answer["report"])
    metrics = {**report.metrics, "install.peak_mb": round(peak_mb, 1)}
    return Candidate(report.model_copy(update={"metrics": metrics}), answer["version"], answer["rejection"])


def _error_of(answer: dict[str, Any]) -> Exception:
    """Return what went wrong in the child, as it would have been raised here."""
    number = answer["errno"]
    if number is not None:
        return OSError(number, os.strerror(number), answer["filename"] or None)
    kind = _KINDS.get(answer["error"], HeadwaterError)
    rebuilt = kind.__new__(kind, answer["message"])  # some make their message from parts, which it is made of already
    HeadwaterError.__init__(
        rebuilt, answer["message"], is_public=answer["is_public"], public_message=answer["public_message"]
    )
    return rebuilt


def main() -> None:
    """Run as the child: its question comes as JSON on stdin; steps, lines of the log and the answer go to stdout."""
    question = json.load(sys.stdin)
    out = sys.stdout
    stand_back(question["parent"])
    sys.path[:] = question["path"]  # data may come from a function of the owner's

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(logger=record.name, level=record.levelno, text=record.getMessage()[:4000])

    logging.basicConfig(level=logging.INFO, handlers=[Lines()])
    config = AgentConfig.model_validate(question["config"])
    message = Install.model_validate(question["message"])
    limit_resources(question["memory_bytes"], question["cpu_s"])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # of the owner's function
            answer = _answer(config, message, question, lambda step: say(step=step))
    except MemoryError:
        say(failed="it takes more memory than there is")
    else:
        say(answer=answer)


def _answer(
    config: AgentConfig, message: Install, question: dict[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Prepare the bundle and return the candidate, or the error of ours or of the system that ended it, as JSON."""
    try:
        candidate = prepare_here(config, message, Path(question["bundle"]), question["now"], progress)
    except HeadwaterError as error:
        return {
            "error": type(error).__name__,
            "message": str(error)[:4000],
            "is_public": error.is_public,
            "public_message": error.public_message,
            "errno": None,
        }
    except OSError as error:
        if error.errno is None:
            raise
        return {"error": "OSError", "errno": error.errno, "filename": str(error.filename or "")}
    report = candidate.report.model_dump(mode="json")
    return {"report": report, "version": candidate.version, "rejection": candidate.rejection}


def children_of(process: int) -> list[int]:
    """Return the processes that this one has started and that have not ended; none where the system does not say."""
    result: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            result += map(int, path.read_text(encoding="ascii").split())
    return result


def resident_mb_of(*processes: int) -> float:
    """Return the memory of processes in RAM, MB; those that have ended have none."""
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

"""Worker processes that stay between the simulations of one program, so that only the first one waits for their start.

A worker makes plan, method and model of a simulation when it begins with it, exactly as a new one does: the bits are
the same. Between two simulations it holds nothing of either. One is replaced by a new one where something of before
could matter: a file of the user's own that it has loaded has changed, it has other limits, or it holds much memory.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.core.capabilities import cores
from edge_agent.core.errors import UsageError

from ...processes.supervisor import ChildProcess, Limits
from ..memory_watch import private_bytes

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

MOST_KEPT_BYTES = 2 << 30
"""Memory of its own above which a worker is not kept."""

FileMark = tuple[str, int, int]
"""Path of a file, when it was changed last (ns), and its size."""


@dataclass(eq=False)
class KeptWorker:
    """A worker process, idle or in use.

    Attributes:
        child: The process.
        log: The file with what it prints.
        limits: The limits that it was started with.
        own_files: The files of the user's own that it has loaded, as they were then.
        turn: How many simulations it has begun with.
    """

    child: ChildProcess
    log: Path
    limits: Limits
    own_files: tuple[FileMark, ...] = ()
    turn: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether it runs, and its own files are as they were when it loaded them."""
        return self.child.is_running and all(mark_of(Path(path)) == (path, *rest) for path, *rest in self.own_files)


class KeptWorkers:
    """Some worker processes for simulations one after another: ``with workers(2) as pool: simulate(..., pool=pool)``.

    They end at the end of the context; without one, as in the cells of a notebook, with `close`, with the last
    reference to this object, or with the program.
    """

    def __init__(self, count: int | None = None, *, most_bytes: int = MOST_KEPT_BYTES) -> None:
        """Name how many there are; they are started when a simulation needs them.

        Args:
            count: How many; None: as many as this machine has cores.
            most_bytes: Memory of a worker's own above which it ends with its simulation.

        Raises:
            UsageError: There are none.
        """
        if count is not None and count < 1:
            raise UsageError(f"workers: {count}, expected 1 or more; leave it out for as many as there are cores")
        self.count = count or cores()
        self._most_bytes = most_bytes
        self._idle: list[KeptWorker] = []
        self._started = 0
        self._is_open = True
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The folder of their logs; None: none has been started."""

        self._end: Callable[[], object] | None = None
        """Ends the idle ones and removes the folder; at the latest when this object goes, or the program ends."""

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def started(self) -> int:
        """How many processes have been started so far."""
        return self._started

    def check_open(self) -> None:
        """Check that simulations may use them.

        Raises:
            UsageError: They have ended.
        """
        if not self._is_open:
            raise UsageError(f"pool: its workers have ended; make new ones with coordinator.workers({self.count})")

    def take(self, command: Sequence[str], limits: Limits) -> KeptWorker:
        """Return an idle worker that may begin with a simulation, or start one.

        Raises:
            OSError: None can be started.
        """
        for worker in [worker for worker in self._idle if worker.limits == limits]:
            self._idle.remove(worker)
            if worker.is_fresh:
                return worker
            worker.child.close()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="headwater-workers-")
            self._end = weakref.finalize(self, _end_all, self._idle, self._folder)
        self._started += 1
        log = Path(self._folder.name) / f"worker-{self._started}.log"
        return KeptWorker(ChildProcess(command, log, limits), log, limits)

    def give_back(self, worker: KeptWorker) -> None:
        """Keep an idle worker for the next simulation, unless it is not to be kept."""
        is_wanted = self._is_open and len(self._idle) < self.count and worker.child.is_running
        if not is_wanted or private_bytes(worker.child.pid) > self._most_bytes:
            worker.child.close()
            return
        try:
            worker.child.pipe.send("rest", b"", [])
        except OSError:  # it has ended meanwhile
            worker.child.close()
            return
        self._idle.append(worker)

    def close(self) -> None:
        """End all workers; those at work end with their simulation."""
        self._is_open = False
        if self._end is not None:
            self._end()

    def __repr__(self) -> str:
        state = f"{self._started} started so far" if self._is_open else "ended"
        return f"KeptWorkers({self.count}: {state})"


def _end_all(idle: list[KeptWorker], folder: tempfile.TemporaryDirectory[str]) -> None:
    """End these workers, empty the list, and remove the folder of their logs."""
    while idle:
        idle.pop().child.close()
    folder.cleanup()


def workers(count: int | None = None) -> KeptWorkers:
    """Return worker processes that stay between simulations, which need not wait for their start then.

    They start with the first simulation, and end with the ``with`` block, or with ``pool.close()``: in a notebook
    ``pool = workers(2)`` in one cell serves the simulations of all others.

    Example:
        >>> from coordinator import simulate, workers
        >>> settings = {"data": "digits:optdigits?n=60", "clients": 2, "rounds": 1, "local": False}
        >>> with workers(1) as pool:
        ...     results = [simulate(method, pool=pool, **settings) for method in ("fedavg", "fedper")]
        ...     print(pool.started)
        1

    Args:
        count: How many; None: as many as this machine has cores.

    Raises:
        UsageError: There are none.
    """
    return KeptWorkers(count)


def mark_of(path: Path) -> FileMark:
    """Return by what a change of a file is noticed; zeros where it is gone."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return str(path), status.st_mtime_ns, status.st_size
    return str(path), 0, 0

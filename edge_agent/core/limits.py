"""Limits of this process: threads of numerical libraries, memory that the C library keeps, total memory and time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_NUMPY = ("OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Environment variables that numpy's libraries read, and torch does not."""

_WITH_TORCH = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that numpy's libraries and torch read."""


def limit_threads(threads: int | None = None, *, spare_torch: bool = False) -> None:
    """Set the number of threads that numpy, imported after this call, uses here and in child processes.

    Where numpy is loaded already it has made its choice, and nothing is set.

    Args:
        threads: How many; None: one, unless the environment already names a number; 0: the libraries choose.
        spare_torch: Leave the variables alone that torch reads as well.
    """
    if "numpy" in sys.modules:
        return
    names = _NUMPY if spare_torch else (*_NUMPY, *_WITH_TORCH)
    if threads is None:
        threads = 0 if any(name in os.environ for name in (*_NUMPY, *_WITH_TORCH)) else 1
    if threads > 0:
        os.environ.update(dict.fromkeys(names, str(threads)))


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in RAM; their peak where there is no ``/proc``; else None."""
    try:
        # Unbuffered, which takes half of the time: a coordinator asks for it with each status.
        with Path("/proc/self/statm").open("rb", buffering=0) as file:
            pages = int(file.read(100).split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_resources(memory_bytes: int | None, cpu_s: int) -> None:
    """Limit the memory and processor time that this process may take from now on, where the system can do that.

    Args:
        memory_bytes: Bytes that it may allocate in addition, beyond which an allocation fails; None: no limit.
        cpu_s: Seconds of processor time, after which it is killed by SIGXCPU.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {resource.RLIMIT_CPU: math.ceil(used) + cpu_s, resource.RLIMIT_CORE: 0}
    # Linux counts data and stack towards this limit, the sixth field of statm in pages, and not mapped files.
    statm = Path("/proc/self/statm")
    if memory_bytes is not None and statm.exists():
        limits[resource.RLIMIT_DATA] = int(statm.read_text().split()[5]) * resource.getpagesize() + memory_bytes
    # The process that started this one may have been limited itself: no limit is raised.
    for which, limit in limits.items():
        inherited = resource.getrlimit(which)
        finite = [bound for bound in inherited if bound != resource.RLIM_INFINITY]
        resource.setrlimit(which, (min([limit, *finite]), inherited[1]))


@contextlib.contextmanager
def allocating_at_most(more_bytes: int) -> Iterator[None]:
    """Let allocations fail inside that go ``more_bytes`` beyond what this process has, where the system can do that.

    Afterwards its limit is the one from before.
    """
    try:
        import resource

        statm = Path("/proc/self/statm").read_text(encoding="ascii")
    except (ImportError, OSError):
        yield
        return
    # Linux counts data and stack towards this limit, the sixth field of statm in pages, and not mapped files.
    limit = int(statm.split()[5]) * resource.getpagesize() + more_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *finite]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limit_bytes() -> int | None:
    """Return the bytes that this process may allocate in total; None where it has no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


OPEN_FILES = 65_536
"""The number of files that a process with thousands of peers may have open, as in the shipped systemd unit."""


def allow_open_files(wanted: int) -> int | None:
    """Let this process and the children it starts have ``wanted`` files open, or as many as the system allows.

    A limit that is higher already stays.

    Returns:
        The number of files that it may have open now; None where there is no such limit.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most <= soft:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def available_bytes() -> int | None:
    """Return the bytes that processes can still take here without one being killed; None where that is not known.

    It is the smaller of what the system and the control groups of this process have left. Caches of files count as
    available.
    """
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        available = [int(fields["MemAvailable"].split()[0]) * 1024]
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError):
        return None
    for line in groups:
        for group, files in _memory_groups(line):
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max": it has no limit
                available.append(_available_in_group(group, files))
    return max(0, min(available))


class _GroupFiles(NamedTuple):
    """The names of what a control group says of its memory, all in bytes."""

    limit: str
    used: str
    caches: tuple[str, ...]
    """The fields of ``memory.stat`` that count caches of files, those of groups below included."""


_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))
"""Version 2, which says of a group without a limit ``max``."""

_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
"""Version 1, which older systems have, says of a group without a limit that this is almost 2^63 bytes."""


def _memory_groups(line: str) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield the folders of a control group and of those above it, where the group is one of memory.

    Their limits count, too. In a container the path may be one of the host: its own group is then the topmost folder.

    Args:
        line: A line of ``/proc/self/cgroup``: ``0::/path`` of version 2, or ``4:memory:/path`` of version 1.
    """
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if "memory" in controllers.split(","):
        root = Path("/sys/fs/cgroup/memory")
        files = _VERSION_1
    elif number == "0":
        root = Path("/sys/fs/cgroup")
        files = _VERSION_2
    else:
        return
    lowest = root / path.lstrip("/")
    for group in (lowest, *lowest.parents):
        yield group, files


def _available_in_group(group: Path, files: _GroupFiles) -> int:
    """Return the bytes that processes of a control group can still take.

    Raises:
        OSError: There is no such group.
        ValueError: The group has no limit.
    """
    limit = int((group / files.limit).read_text(encoding="ascii"))
    used = int((group / files.used).read_text(encoding="ascii"))
    stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    file_caches = sum(int(stat.get(name, 0)) for name in files.caches)
    return limit - used + file_caches


def stand_back(parent: int) -> None:
    """Give this process less priority than all others, and end it when ``parent``, which has started it, ends.

    It gets a processor where no other process needs it, and is the first to be killed where memory is short.
    """
    if hasattr(os, "nice"):
        os.nice(5)
    with contextlib.suppress(OSError):  # where each session has an equal share, whatever the niceness of its processes
        Path("/proc/self/autogroup").write_text("5", encoding="ascii")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    end_with(parent)


def end_with(parent: int) -> None:
    """Have this process killed when ``parent``, the process that has started it, ends; only Linux does that."""
    prctl = getattr(_c_library(), "prctl", None)
    if prctl is not None and sys.platform == "linux":
        prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


_PDEATHSIG = 1
"""The option PR_SET_PDEATHSIG of ``prctl``: the signal that a process gets when its parent ends."""

_TRIM_THRESHOLD = -1
"""The option M_TRIM_THRESHOLD of glibc's ``mallopt``."""

_MMAP_THRESHOLD = -3
"""The option M_MMAP_THRESHOLD of glibc's ``mallopt``."""

LARGEST_BYTES = 32 << 20
"""The size of the largest block that is kept when it is freed; glibc takes no larger number."""

KEPT_BYTES = 128 << 20
"""The most bytes of free blocks that are kept."""


@functools.cache
def keep_freed_memory() -> bool:
    """Keep memory that is freed from now on in this process; return False where its allocator is not glibc's."""
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def give_freed_memory_back() -> None:
    """Give memory that was freed and kept back to the system, where the allocator can; called when work is over."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Gives memory that was freed back to the system, but not after each of many short pieces of work.

    That takes up to a fifth of a millisecond, longer than a small encoder needs for an image.
    """

    def __init__(self, every_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it for work that comes again and again.

        Args:
            every_s: Seconds between two times, at least.
            clock: Returns seconds of a monotonic clock.
        """
        self._every_s = every_s
        self._clock = clock
        self._given_at = float("-inf")

    def give_back(self) -> None:
        """Give freed memory back, unless that was done a moment ago; see `give_freed_memory_back`."""
        now = self._clock()
        if now - self._given_at >= self._every_s:
            self._given_at = now
            give_freed_memory_back()


@functools.cache
def _c_library() -> Any:
    """Return the C library that this process runs with; None where Python cannot reach it (Windows)."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None

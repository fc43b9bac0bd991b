"""Limits of this process: threads of numerical libraries, memory that the C library keeps, memory and time in all."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

_NUMPY = ("OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_WITH_TORCH = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that torch reads as well."""


def limit_threads(threads: int | None = None, *, spare_torch: bool = False) -> None:
    """Set the number of threads that numpy, imported after this call, uses here and in child processes.

    ``threads`` None = one, unless the environment already names a number; 0 = whatever the libraries choose.
    ``spare_torch`` leaves alone the variables that torch reads as well. Where numpy is loaded already it has made its
    choice, and nothing is set.
    """
    if "numpy" in sys.modules:
        return
    names = _NUMPY if spare_torch else (*_NUMPY, *_WITH_TORCH)
    if threads is None:
        threads = 0 if any(name in os.environ for name in (*_NUMPY, *_WITH_TORCH)) else 1
    if threads > 0:
        os.environ.update(dict.fromkeys(names, str(threads)))


def resident_bytes() -> int | None:
    """Memory of this process in RAM, in bytes; its peak where there is no ``/proc``, or None."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_resources(memory_bytes: int | None, cpu_s: int) -> None:
    """Let this process allocate so much more memory and compute for so long from now on, where the system can do that.

    None: as much memory as there is. An allocation beyond that fails; a process that computes for longer is killed by
    SIGXCPU.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {resource.RLIMIT_CPU: math.ceil(used) + cpu_s, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if (
        memory_bytes is not None and statm.exists()
    ):  # data and stack, in pages, is what Linux counts there; mapped files are not
        limits[resource.RLIMIT_DATA] = int(statm.read_text().split()[5]) * resource.getpagesize() + memory_bytes
    for which, most in limits.items():
        before = resource.getrlimit(which)  # what started this process may have been limited itself
        least = min([most, *(limit for limit in before if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(which, (least, before[1]))


def limit_bytes() -> int | None:
    """Memory that this process may allocate in all; None: it has no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


OPEN_FILES = 65_536
"""Files that a process with thousands of peers may have open: as many as the shipped systemd unit allows."""


def allow_open_files(wanted: int) -> int | None:
    """Let this process and the children it starts have ``wanted`` files open, or as many as the system allows.

    A limit that is higher already stays.

    Returns:
        How many files it may have open now; None where there is no such limit.
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


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
LARGEST_BYTES = 32 << 20
"""The largest block that is kept after it is freed; glibc takes no larger number here."""

KEPT_BYTES = 128 << 20
"""How many bytes of free blocks are kept at most."""


def available_bytes() -> int | None:
    """Memory that processes can still take here without another one being killed; None where nothing says that.

    It is what the system has, or the control groups of this process have, whichever is less. Caches of files count as
    available.
    """
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, KeyError):
        return None
    own = Path("/sys/fs/cgroup") / next((line[3:] for line in groups if line.startswith("0::")), "").lstrip("/")
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max": it has no limit
            most, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            limits.append(most - used + sum(int(stat.get(kind, 0)) for kind in ("active_file", "inactive_file")))
    return max(0, min(limits))


def stand_back(parent: int) -> None:
    """Let the process ``parent``, which has started this one, go first, and end this one when that one ends.

    This one gets a processor where nobody else needs it, and is the first that is killed where memory is short.
    """
    if hasattr(os, "nice"):
        os.nice(5)
    with contextlib.suppress(OSError):  # where each session has an equal share, whatever the niceness of its processes
        Path("/proc/self/autogroup").write_text("5", encoding="ascii")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process by a signal when ``parent``, which has started it, ends, where the system (Linux) does that."""
    prctl = getattr(_c_library(), "prctl", None)
    if prctl is not None and sys.platform == "linux":
        prctl(_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


_PDEATHSIG = 1


@functools.cache
def keep_freed_memory() -> bool:
    """Whether this process keeps what it frees from now on; False where its allocator is not glibc's."""
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(which, size) for which, size in ((_MMAP_THRESHOLD, LARGEST_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    )


def give_freed_memory_back() -> None:
    """Return what was freed and is kept to the system, where it can be: the work is over for now."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> Any:
    """The C library that this process runs with; None where Python cannot reach it (Windows)."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None

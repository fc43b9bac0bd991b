"""What happens to memory that was freed: training keeps it for the next step, and a device gives it back when idle.

glibc returns big blocks to the system as they are freed and asks for them again at the next step, and the system
zeroes each page anew: a tenth to a fifth of the CPU time of a small network's step (measured). Other allocators are
left alone.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_BYTES, KEPT_BYTES = 32 << 20, 128 << 20
"""Largest block that is kept (glibc takes no larger number here), and most bytes of free blocks."""


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

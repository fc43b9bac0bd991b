"""Whether a disk can be written: errors of a full, read-only or broken one, and a look that writes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import cause

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EROFS, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""Numbers of the system's errors that say that a disk takes nothing now."""

PROBE_BYTES = 64 * 1024
"""How much has to fit on a disk that can be written."""


def disk_error(error: BaseException) -> OSError | None:
    """Return the error of a full, read-only or broken disk that ``error`` is, or that it was raised from."""
    raised: BaseException | None = error
    while raised is not None:
        if isinstance(raised, OSError) and raised.errno in DISK_ERRORS:
            return raised
        raised = raised.__cause__
    return None


def disk_failure(folder: Path) -> OSError | None:
    """Return why the disk of ``folder`` takes nothing, found out without writing there; None where it can be written.

    The system may not say (Windows): then no failure is known.
    """
    if not hasattr(os, "statvfs"):
        return None
    try:
        disk = os.statvfs(folder)
    except OSError as failure:
        return OSError(errno.EIO, cause(failure))
    is_read_only = bool(disk.f_flag & getattr(os, "ST_RDONLY", 0))
    is_full = disk.f_bavail * disk.f_frsize < PROBE_BYTES
    has_no_file_left = bool(disk.f_files) and not disk.f_favail
    if is_read_only:
        code = errno.EROFS
    elif is_full or has_no_file_left:
        code = errno.ENOSPC
    else:
        return None
    return OSError(code, os.strerror(code), str(folder))

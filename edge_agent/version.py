"""The version of the distribution: the one place where it is written, for all three packages and the build.

This module imports nothing, so that any module can name the version without importing a package's front door.
"""

from __future__ import annotations

__version__ = "0.1.0"

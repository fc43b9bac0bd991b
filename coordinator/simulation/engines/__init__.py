"""Where the clients of a simulation compute: in this process, or in several at once."""

from __future__ import annotations

from .base import Done, Engine, Work

__all__ = ["Done", "Engine", "Work"]

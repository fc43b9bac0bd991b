"""The folder of a finished run as results and clients hold it: its models and samples are read when they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .restored import RestoredRun


class RunFolder:
    """The folder of a finished run, and its models and samples once they were needed.

    All clients of a result share one of these. Whatever removes a temporary folder waits until none of them is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restored: RestoredRun | None = None

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: Mapping[str, Path]) -> None:
        self.path = state["path"]
        self._restored = None

    def restored(self) -> RestoredRun:
        """Return the run with models and samples, which are read once.

        Raises:
            UsageError: The folder is gone, or holds no finished run.
            DataError: The data of the run are not there any more.
            StateError: Files are damaged.
        """
        if self._restored is None:
            from .restored import RestoredRun

            self._restored = RestoredRun.at(self.path)
        return self._restored

"""The contract of a log: what a class has to do so that ``--log NAME`` or ``log=`` can name it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from edge_agent.core.errors import MissingCapability

from .records import RoundResult, RunDescription, RunEnd


class Logger(ABC):
    """One log, of one run.

    `check` is called before anything starts, by the caller; the other functions later and by one thread of the log's
    own, one after another: they may take their time, and delay no round. Whatever one of them raises is reported once
    as a warning and never ends a run. The call is made again later with the same argument, after growing pauses and
    once more at the end, so a row that was written half has to be written whole then. What could not be logged until
    the end is in the result of the run.

    A run that is resumed calls `begin` again, by the same ``uid``, and `log_round` for all rounds from the first: a log
    that still has some of them must not have them twice.
    """

    package: ClassVar[str] = ""
    """The package that it needs beside Headwater's own; empty: none."""

    extra: ClassVar[str] = ""
    """The extra of Headwater that installs `package`; empty: people install it by its name."""

    writes_files: ClassVar[bool] = False
    """Whether it needs a folder that lasts where its target names no place."""

    takes_clients: ClassVar[bool] = True
    """Whether rows are to have the figures of single clients, which are many."""

    def __init__(self, target: str = "", folder: Path = Path()) -> None:
        """Only assign.

        Args:
            target: What follows the colon in ``--log NAME:TARGET``.
            folder: Where to log if the target says nothing else; relative folders of a target count from where the
                command runs.
        """
        self.target = target
        self.folder = folder

    @classmethod
    def absolute_target(cls, target: str, folder: Path) -> str:  # noqa: ARG003 - for overriding methods
        """Return the target so that it means the same from any folder; a relative path in it counts from ``folder``."""
        return target

    def check(self) -> None:
        """Return quietly where a run can be logged; called before data are read.

        Raises:
            MissingCapability: The package is not installed.
            UsageError: The target is none, or cannot be reached or written.
        """
        if not self.package:
            return
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            if not self.extra:
                name = self.package.partition(".")[0]
                raise MissingCapability(
                    f"--log {type(self).__name__} needs '{name}', which is not installed: pip install {name}"
                ) from error
            raise MissingCapability.package(self.package, self.extra, f"--log {self.extra}") from error

    @property
    def where(self) -> str:
        """Where people find the log; after `begin` it may be more precise."""
        if self.target or not self.writes_files:
            return self.target or type(self).__name__
        return str(self.folder)

    @abstractmethod
    def begin(self, run: RunDescription) -> None:
        """Open the log of a run, or find the one that the same run had before it was resumed."""

    @abstractmethod
    def log_round(self, row: RoundResult) -> None:
        """Log a closed round; rows come in the order of their rounds."""

    @abstractmethod
    def end(self, end: RunEnd) -> None:
        """Log how the run has ended, and close the log."""

"""What a client keeps of a run between rounds, restarts and missed rounds: personal tensors and named memory.

One file for each of the last two rounds, and of those rounds that are to be kept. A round starts from the newest file
of an earlier round, so doing a round again after a crash starts from the same place and ends in the same bits.
"""

from __future__ import annotations

import logging
import shutil
from itertools import pairwise
from pathlib import Path

from ..errors import CodecError, StateError
from ..store import read_tensors, write_tensors
from ..task import Tensors

log = logging.getLogger(__name__)

_PERSONAL, _MEMORY = "personal.", "memory."
GENERATIONS = 2


def remove_ended(folder: Path, current: str, keep: int) -> list[str]:
    """Remove the oldest runs' folders below ``folder``, so that ``keep`` are left, ``current`` among them.

    Returns the names of those removed. A device that takes part in run after run would fill its disk otherwise; a run
    that is resumed after so many others begins afresh here, as on a device that is new to it.
    """
    others = [path for path in folder.glob("*") if path.is_dir() and path.name != current]
    oldest_last = sorted(others, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
    removed = oldest_last[max(keep - 1, 0) :]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in removed)


class KeptFiles:
    """The kept files of one run. With ``keep_every`` k, what stood after rounds k, 2 k, … stays as well."""

    def __init__(self, folder: Path, keep_every: int = 0) -> None:
        self.folder, self._keep_every = folder, keep_every

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Keep what came out of a round; on disk when this returns. Of a client that never keeps a thing: no file.

        What was kept of later rounds goes: whoever does an earlier one now was set back to it.
        """
        both, before = together(personal, memory), self.rounds()
        if not both and not before:
            return
        write_tensors(self._path(round_number), both)
        for later in (number for number in before if number > round_number):
            self._path(later).unlink(missing_ok=True)
        for old, following in list(pairwise(self.rounds()))[: 1 - GENERATIONS or None]:
            if not self._stood(old, following):
                self._path(old).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds of which there is a file, in order."""
        return sorted(int(path.stem.removeprefix("kept-")) for path in self.folder.glob("kept-*.safetensors"))

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:
        """(personal tensors, memory) of the newest round before this one; empty when there is none.

        Raises:
            StateError: the newest file is damaged; it says how to start afresh.
        """
        earlier = [number for number in self.rounds() if number < round_number]
        if not earlier:
            return {}, {}
        path = self._path(earlier[-1])
        try:
            return apart(read_tensors(path))
        except CodecError as error:
            raise StateError(
                f"{path}: damaged ({error}); put it back from a backup, or remove it to go on from an earlier round, "
                "or from the beginning, with other results than without the damage"
            ) from error

    def _stood(self, first: int, until: int) -> bool:
        """Whether what came out of round ``first`` still stood after a round that is kept, ``until`` replacing it."""
        return bool(self._keep_every) and (until - 1) // self._keep_every * self._keep_every >= first

    def _path(self, round_number: int) -> Path:
        return self.folder / f"kept-{round_number:07d}.safetensors"


def together(personal: Tensors, memory: Tensors) -> Tensors:
    """Personal tensors and memory under names that `apart` tells apart."""
    both = {_PERSONAL + name: array for name, array in personal.items()}
    return {**both, **{_MEMORY + name: array for name, array in memory.items()}}


def apart(both: Tensors) -> tuple[Tensors, Tensors]:
    """(personal tensors, memory) of what `together` has put together."""
    return _under(_PERSONAL, both), _under(_MEMORY, both)


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}

"""What a client keeps of a run between rounds, restarts and missed rounds: personal tensors and named memory.

One file for each of the last two rounds, and of those rounds that are to be kept. A round starts from the newest file
of an earlier round, so doing a round again after a crash starts from the same place and ends in the same bits.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

from ..errors import CodecError, StateError
from ..store import read_tensors, write_tensors
from ..task import Tensors

log = logging.getLogger(__name__)

_PERSONAL, _MEMORY = "personal.", "memory."
GENERATIONS = 2


class KeptFiles:
    """The kept files of one run. With ``keep_every`` k, what stood after rounds k, 2 k, … stays as well."""

    def __init__(self, folder: Path, keep_every: int = 0) -> None:
        self.folder, self._keep_every = folder, keep_every

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Keep what came out of a round; on disk when this returns. Of a client that never keeps a thing: no file."""
        both = together(personal, memory)
        if not both and not any(self.folder.glob("kept-*.safetensors")):
            return
        write_tensors(self._path(round_number), both)
        paths = sorted(self.folder.glob("kept-*.safetensors"))
        for old, following in list(pairwise(paths))[: 1 - GENERATIONS or None]:
            if not self._stood(_number(old), _number(following)):
                old.unlink(missing_ok=True)

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:
        """(personal tensors, memory) of the newest round before this one; empty when there is none.

        Raises:
            StateError: the newest file is damaged; it says how to start afresh.
        """
        earlier = [path for path in sorted(self.folder.glob("kept-*.safetensors")) if path < self._path(round_number)]
        if not earlier:
            return {}, {}
        try:
            return apart(read_tensors(earlier[-1]))
        except CodecError as error:
            raise StateError(f"{earlier[-1]}: damaged ({error}); remove it to go on from an earlier round") from error

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


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("kept-"))


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}

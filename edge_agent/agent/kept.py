"""What a client keeps of a run between rounds, restarts and missed rounds: personal tensors and named memory.

One file for each of the last two rounds. A round starts from the newest file of an earlier round, so doing a round
again after a crash starts from the same place and ends in the same bits.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import CodecError, StateError
from ..store import read_tensors, write_tensors
from ..task import Tensors

log = logging.getLogger(__name__)

_PERSONAL, _MEMORY = "personal.", "memory."
GENERATIONS = 2


class KeptFiles:
    """The kept files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Keep what came out of a round; on disk when this returns."""
        both = {_PERSONAL + name: array for name, array in personal.items()}
        both.update({_MEMORY + name: array for name, array in memory.items()})
        write_tensors(self._path(round_number), both)
        for old in sorted(self.folder.glob("kept-*.safetensors"))[:-GENERATIONS]:
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
            both = read_tensors(earlier[-1])
        except CodecError as error:
            raise StateError(f"{earlier[-1]}: damaged ({error}); remove it to go on from an earlier round") from error
        return _under(_PERSONAL, both), _under(_MEMORY, both)

    def _path(self, round_number: int) -> Path:
        return self.folder / f"kept-{round_number:07d}.safetensors"


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}

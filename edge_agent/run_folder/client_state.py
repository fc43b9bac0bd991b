"""Client state on disk: what a client keeps of a run between rounds, restarts and missed rounds.

It is personal tensors and named memory. There is one file for each of the last two rounds, and for those rounds that
are to be kept. A round starts from the newest file of an earlier round, so doing a round again after a crash starts
from the same state and ends in the same bits.
"""

from __future__ import annotations

from pathlib import Path

from ..core.errors import CodecError, StateError
from ..core.own_folders import make_folder
from ..core.storage import read_tensors, write_tensors
from ..core.task import Tensors
from .layout import RUN_FOLDER

LAST_ROUND = 9_999_999
"""The number of the state after the last round, when the personal model is made; above that of any round."""

GENERATIONS = 2
"""How many states stay: the current one, and the one before, from which its round is done again."""

_PERSONAL = "personal."
_MEMORY = "memory."


class ClientStateFiles:
    """The files of the client state of one run."""

    def __init__(self, folder: Path, keep_every: int = 0) -> None:
        """Name the files below ``folder``, which is the run's; nothing is read.

        With ``keep_every`` k, the state after rounds k, 2 k, … stays as well; 0: none does.
        """
        self.folder = folder
        self._keep_every = keep_every

    def write(self, round_number: int, personal: Tensors, memory: Tensors) -> None:
        """Save the state after a round; on disk when this returns. A client that never keeps anything has no file.

        The state of later rounds is removed: a client that does an earlier one now was set back to it.
        """
        arrays = merge(personal, memory)
        before = self.rounds()
        if not arrays and not before:
            return
        make_folder(self.folder, RUN_FOLDER)
        write_tensors(self._path(round_number), arrays)
        for later in (number for number in before if number > round_number):
            self._path(later).unlink(missing_ok=True)
        # Each file but the newest ones goes, unless it was the current one after a round whose state is kept.
        rounds = self.rounds()
        for index, superseded in enumerate(rounds[:-GENERATIONS]):
            if not self._is_kept(superseded, rounds[index + 1]):
                self._path(superseded).unlink(missing_ok=True)

    def _is_kept(self, round_number: int, following: int) -> bool:
        """Return whether the state of a round, which ``following`` has replaced, was current after a kept round."""
        every = self._keep_every
        if not every:
            return False
        newest_kept = (following - 1) // every * every
        return newest_kept >= round_number

    def remove(self, round_number: int) -> None:
        """Remove the state after a round, where there is one."""
        self._path(round_number).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Return the rounds that have a file, in order."""
        return sorted(int(path.stem.removeprefix("kept-")) for path in self.folder.glob("kept-*.safetensors"))

    def before(self, round_number: int) -> tuple[Tensors, Tensors]:
        """Return personal tensors and memory of the newest round before this one; both are empty where there is none.

        Raises:
            StateError: the newest file is damaged; it says how to start afresh.
        """
        earlier = [number for number in self.rounds() if number < round_number]
        if not earlier:
            return {}, {}
        path = self._path(earlier[-1])
        try:
            return split(read_tensors(path))
        except CodecError as error:
            raise StateError(
                f"{path}: damaged ({error}); put it back from a backup, or remove it to go on from an earlier round, "
                "or from the beginning, with other results than without the damage"
            ) from error

    def _path(self, round_number: int) -> Path:
        return self.folder / f"kept-{round_number:07d}.safetensors"


def merge(personal: Tensors, memory: Tensors) -> Tensors:
    """Return personal tensors and memory as one, under names that `split` recognises."""
    named = {_PERSONAL + name: array for name, array in personal.items()}
    return {**named, **{_MEMORY + name: array for name, array in memory.items()}}


def split(merged: Tensors) -> tuple[Tensors, Tensors]:
    """Return personal tensors and memory out of the result of `merge`."""
    return _under(_PERSONAL, merged), _under(_MEMORY, merged)


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}

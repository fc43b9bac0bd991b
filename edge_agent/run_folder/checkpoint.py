"""The checkpoint inside one training, from which a device that was restarted resumes with the same bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CodecError, cause
from ..core.own_folders import make_folder
from ..core.storage import read_regular, write_tensors
from ..core.task import Tensors
from .layout import RUN_FOLDER, TRAINING_FILE

log = logging.getLogger(__name__)

CHECKPOINT_BYTES_PER_S = 200_000
"""What checkpoints inside trainings may write on average, 17 GB in a whole day of training: SD cards wear out."""


class TrainingCheckpointFile:
    """The checkpoint inside one training (`methods.values.TrainingCheckpoint`), of which the last one stays.

    ``training`` says which training it is, with everything that its result depends on; a checkpoint of another one is
    ignored. It is due ``every_s`` seconds of ``clock`` after the last one, later where writing would take more than a
    twentieth of the time, or more than `CHECKPOINT_BYTES_PER_S`; 0: never.
    """

    def __init__(self, folder: Path, training: str, every_s: float, clock: Callable[[], float]) -> None:
        self._path = folder / TRAINING_FILE
        self._training = training
        self._every_s = every_s
        self._clock = clock
        self._due_at = clock() + every_s

    def is_due(self) -> bool:
        """Return whether the state should be saved now."""
        return self._every_s > 0 and self._clock() >= self._due_at

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save a state; on disk when this returns. Where it cannot be written, training continues without."""
        started_at = self._clock()
        try:
            make_folder(self._path.parent, RUN_FOLDER)
            write_tensors(self._path, tensors, {"training": self._training, "notes": json.dumps(notes)})
        except OSError as error:
            log.warning("checkpoint_not_written path=%s reason=%s", self._path, cause(error))
        now = self._clock()
        size = sum(array.nbytes for array in tensors.values())
        self._due_at = now + max(self._every_s, 20 * (now - started_at), size / CHECKPOINT_BYTES_PER_S)

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return the state that was saved last; None where there is none of this training, or it is damaged."""
        from ..wire.tensors import decode, inspect  # brings numpy, which an idle agent does without

        try:
            data = read_regular(self._path)
            _, metadata = inspect(data)
            if metadata.get("training") != self._training:
                return None
            tensors = decode(data)
            notes = json.loads(metadata["notes"])
        except FileNotFoundError:
            return None
        except (CodecError, OSError, ValueError, KeyError) as error:
            log.warning("checkpoint_unreadable path=%s reason=%s: training restarts", self._path, cause(error))
            return None
        log.info("training_resumed epoch=%s batch=%s", notes.get("epoch"), notes.get("batch"))
        return tensors, notes

    def end(self, state: Callable[[], tuple[Tensors, dict[str, Any]]]) -> None:
        """Keep nothing: the training is over with its one call of `train`."""

    def remove(self) -> None:
        """Remove the checkpoint, because the training is over."""
        if self._every_s > 0:  # simulated clients have no folder
            self._path.unlink(missing_ok=True)

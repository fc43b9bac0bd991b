"""The folder of one run on a device: the files that may be in it, its mark, and its removal."""

from __future__ import annotations

import re
from pathlib import Path

from ..core.own_folders import FolderKind, holds_only, is_own_folder, remove_folder
from ..core.storage import oldest_first

RECEIPTS = "receipts.jsonl"
"""In the folder of a run: what became of each update of the agent, a line each."""

TRAINING_FILE = "training.safetensors"
"""In the folder of a run: the checkpoint inside the training under way."""

PRECISION_FILE = "precision.json"
"""In the folder of a run: the precision of its training steps, and the times that decided it."""

_NAMED = "|".join(map(re.escape, (TRAINING_FILE, RECEIPTS, PRECISION_FILE)))
_OF_A_RUN = re.compile(rf"kept-[0-9]+\.safetensors|{_NAMED}|encoders|\..+\.[0-9a-f]{{8}}\.tmp")


def _is_earlier_run(folder: Path) -> bool:
    """Return whether a folder without a mark holds what earlier versions left in the folder of a run, and no more."""
    return holds_only(folder, _OF_A_RUN)


RUN_FOLDER = FolderKind("run of an agent", _is_earlier_run)
"""The folder of one run on a device."""


def remove_ended_runs(folder: Path, current: str, keep: int) -> list[str]:
    """Remove the oldest runs' folders, so that ``keep`` are left, ``current`` among them.

    A device that takes part in run after run would fill its disk otherwise; a run that is resumed after so many others
    begins afresh here, as on a device that is new to it.

    Args:
        folder: The folder that has a folder for each run.
        current: The run that begins now.
        keep: How many runs stay.

    Returns:
        The names of the runs that were removed, sorted.
    """
    other_runs = [path for path in folder.glob("*") if path.name != current and is_own_folder(path, RUN_FOLDER)]
    oldest = oldest_first(other_runs)[: max(0, len(other_runs) - max(keep - 1, 0))]
    return sorted(path.name for path in oldest if remove_folder(path, RUN_FOLDER))


def remove_all_runs(folder: Path) -> int:
    """Remove the folders of all runs below ``folder`` and return their number; what is not of a run stays."""
    return sum(remove_folder(path, RUN_FOLDER) for path in folder.glob("*") if is_own_folder(path, RUN_FOLDER))

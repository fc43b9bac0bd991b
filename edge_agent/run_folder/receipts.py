"""The receipts of a run: what became of each update that this device has sent, for an audit of the coordinator."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

from ..core.errors import cause
from ..core.own_folders import make_folder
from ..wire.messages.up import UpdateManifest
from .layout import RECEIPTS, RUN_FOLDER

log = logging.getLogger(__name__)


def note_receipt(folder: Path, agent: str, update: UpdateManifest, *, accepted: bool) -> None:
    """Add a line to the receipts of a run, in its ``folder``: what became of an update of this agent.

    'headwater audit' compares them with the coordinator's journal. Nothing waits for the disk; a full one, or a power
    cut, costs the line alone.
    """
    about = {"agent": agent, "round": update.round, "purpose": update.purpose, "digest": update.blob.digest}
    line = json.dumps({**about, "accepted": accepted}).encode() + b"\n"
    try:
        make_folder(folder, RUN_FOLDER)
        with (folder / RECEIPTS).open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":  # a line that a power cut tore
                line = b"\n" + line
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, "no space left for all of it")
    except OSError as error:
        log.debug("receipt_not_noted folder=%s reason=%s", folder, cause(error))

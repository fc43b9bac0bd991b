"""Files that an update passes on its way from training to checkpoint (run this file to list them).

Counted in example 01: files of the three packages with a function that runs between the return of `Session.train` at
agent 0 in round 2 and the removal of the round's blobs at the coordinator, which is the last thing that happens to the
update. Left out are the turns of the other agent, the transport in memory, and `BESIDE`: what both programs do in each
step of their loops, whether or not an update is on its way, and what happens to downloads meanwhile.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "01_two_agents_in_memory.py"
ROUND = 2
DRIVER = "coordinator/api.py"
"""Has the loop that gives coordinator and agents their turns; on a network each has its own."""
BESIDE = {
    "coordinator/processes/compute.py": {"end_if_idle"},
    "coordinator/service/status.py": {"update"},
    "coordinator/service/peers.py": {"tick", "is_serving"},
    "coordinator/fleet/roster.py": {"expire"},
    "coordinator/fleet/rollout.py": {"tick", "heartbeat"},
    "coordinator/fleet/downloads.py": {"pump", "have", "progress", "withdraw"},
    "coordinator/rounds/context.py": {"collect"},
    "coordinator/views/releases.py": {"release_blobs"},
    "coordinator/runs/results.py": {"requested_cancels"},
    "edge_agent/agent/certificate.py": {"tick"},
    "edge_agent/agent/heartbeat.py": {"is_due"},
    "edge_agent/agent/transfers.py": {"tick"},
    "edge_agent/agent/tasks/runner.py": {"release_memory"},
    "edge_agent/run_folder/receipts.py": {"note_receipt"},  # when the receipt comes, before the checkpoint or after it
}
"""File -> functions that are not counted, nor what they call."""


class Recorder:
    """A profile function that collects files and functions while it is ``on``."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = {}
        self.on = self.done = False
        self._skipped: FrameType | None = None
        self._files: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        """Called by the interpreter; ``call`` and ``return`` are of functions in Python."""
        file = self._file(frame.f_code.co_filename)
        if not file or self.done or event not in {"call", "return"}:
            return
        name = frame.f_code.co_name
        if event == "return":
            self._left(frame, file, name)
        elif self._skipped is None:
            if self._is_beside(frame, file, name):
                self._skipped = frame
            elif self.on:
                self.functions.setdefault(file, set()).add(getattr(frame.f_code, "co_qualname", name))

    def _left(self, frame: FrameType, file: str, name: str) -> None:
        if frame is self._skipped:
            self._skipped = None
        elif self._skipped is None and (file, name) == ("edge_agent/client/__init__.py", "train"):
            self.on = self.on or frame.f_locals["round_number"] == ROUND
        elif self.on and (file, name) == ("coordinator/state/store.py", "prune_blobs"):
            self.on = False
            self.done = True
            sys.setprofile(None)  # what follows, the export with its imports, is no part of the way

    def _is_beside(self, frame: FrameType, file: str, name: str) -> bool:
        if (file, name) == ("edge_agent/agent/event_loop.py", "step"):
            return bool(frame.f_locals["self"].config.id != "agent-0")
        return file == "edge_agent/wire/memory.py" or name in BESIDE.get(file, ())

    def _file(self, path: str) -> str:
        if path not in self._files:
            inside = path.startswith(tuple(f"{ROOT / package}/" for package in ("coordinator", "edge_agent", "export")))
            file = str(Path(path).relative_to(ROOT)) if inside else ""
            self._files[path] = "" if file == DRIVER else file
        return self._files[path]


def way_of_an_update() -> dict[str, set[str]]:
    """File -> its functions that ran."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    importlib.import_module("torch")  # which takes long where each call is looked at
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(recorder)
        try:
            example.run(Path(folder))
        finally:
            sys.setprofile(None)
    assert recorder.done, "the example has no longer two agents and three rounds"
    return recorder.functions


if __name__ == "__main__":
    found = way_of_an_update()
    for path in sorted(found):
        print(f"{path}: {', '.join(sorted(found[path]))}")
    print(f"{len(found)} files, {sum(map(len, found.values()))} functions")

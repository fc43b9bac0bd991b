"""The end of ``headwater demo --serve``: a new device that answers, with a page to open in a browser."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.core.child_process import module_command
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.storage import read_regular_text, write_atomic
from edge_agent.core.task import ImageInput
from edge_agent.data import load
from edge_agent.data.pictures import png_of

from ..processes.supervisor import ChildProcess

PHOTOS = 12
"""Pictures that the page shows first."""

_START_S = 60.0
_LOOK_S = 0.1


@contextlib.contextmanager
def served(config: Path, source: str, spec: ImageInput, log: Path) -> Iterator[str]:
    """Serve the head of a device while the context lasts, and let it answer some pictures.

    Args:
        config: The device's configuration.
        source: Data source of the pictures.
        spec: The form of images of the task.
        log: Where the output of the server goes.

    Yields:
        The address of the page, with its token.

    Raises:
        HeadwaterError: The server does not start.
    """
    folder = config.parent / "pictures"
    folder.mkdir()
    options = ("--config", str(config), "--port", "0", "--watch", str(folder), "--json")
    server = ChildProcess(module_command("edge_agent", "serve", *options), log)
    try:
        page = _wait_for_page(server, log)
        _write_pictures(source, spec, folder)
        yield page
    finally:
        server.terminate()
        server.stop()


def _wait_for_page(server: ChildProcess, log: Path) -> str:
    """Return the address that a server prints once it answers."""
    pause = threading.Event()
    for _ in range(int(_START_S / _LOOK_S)):
        # The log holds one line of JSON: the address, or the error.
        for line in read_regular_text(log).splitlines():
            with contextlib.suppress(ValueError):
                content: dict[str, Any] = json.loads(line)
                if "page" in content:
                    return str(content["page"])
        if not server.is_running:
            raise HeadwaterError(f"the device answers nothing: {server.exit_reason()}; look at {log}")
        pause.wait(_LOOK_S)
    raise HeadwaterError(f"the device has not begun to answer within {_START_S:.0f} s; look at {log}")


def _write_pictures(source: str, spec: ImageInput, folder: Path) -> None:
    """Put pictures into the folder that the server watches, as a camera's program would."""
    samples = load(source, spec)
    channels = (-1, 1, 1)
    shares = samples.inputs[:PHOTOS] * np.reshape(spec.std, channels) + np.reshape(spec.mean, channels)
    pixels = np.clip(np.round(shares * 255), 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    for number, picture in enumerate(pixels):
        write_atomic(folder / f"{number:02}.png", png_of(np.ascontiguousarray(picture)))

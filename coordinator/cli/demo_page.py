"""The end of ``headwater demo --serve``: a new device that answers, with a page to open in a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from edge_agent.core.storage import write_atomic
from edge_agent.core.task import ImageInput
from edge_agent.data import load
from edge_agent.data.pictures import png_of
from edge_agent.data.preprocess import restore_pixels

from ..processes.serving import serving

PHOTOS = 12
"""Pictures that the page shows first."""


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
    with serving(("--config", str(config), "--watch", str(folder)), log) as server:
        _write_pictures(source, spec, folder)
        yield server.page


def _write_pictures(source: str, spec: ImageInput, folder: Path) -> None:
    """Put pictures into the folder that the server watches, as a camera's program would."""
    for number, image in enumerate(load(source, spec).inputs[:PHOTOS]):
        write_atomic(folder / f"{number:02}.png", png_of(restore_pixels(image, spec)))

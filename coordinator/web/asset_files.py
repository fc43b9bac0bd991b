"""Scripts and style sheets of the pages, compressed, by addresses that change with their content."""

from __future__ import annotations

import functools
import gzip
import hashlib
from importlib.resources import files
from typing import NamedTuple

from ..report import charts

OWN = ("web.css", "web.js", "icon.svg")
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Asset(NamedTuple):
    """A file that pages load, as it is sent."""

    content: bytes
    packed: bytes
    media_type: str
    version: str
    """The first digits of its hash."""


@functools.cache
def assets() -> dict[str, Asset]:
    """Name -> asset, those of the charts included."""
    contents = dict(charts.assets())
    contents |= {name: (files(__package__) / "assets" / name).read_bytes() for name in OWN}
    return {
        name: Asset(
            content,
            gzip.compress(content, mtime=0),
            TYPES[name.rpartition(".")[2]],
            hashlib.sha256(content).hexdigest()[:12],
        )
        for name, content in contents.items()
    }


def address(name: str) -> str:
    """Return the address of an asset."""
    return f"/assets/{name}?v={assets()[name].version}"

"""The bundle that comes with this package: an encoder of pictures, for devices that have no bundle of a federation."""

from __future__ import annotations

from pathlib import Path

NAME = "starter"
"""What commands and programs call it by, in place of a bundle's path."""

_FILE = Path(__file__).with_name("starter-photos.hwb")


def bundle_path(name: str | Path) -> Path:
    """Return the path of a bundle: that of the starter bundle for its name, else the given one.

    A file or folder of the same name in the working folder is meant by ``./starter``.
    """
    if str(name) == NAME:
        return _FILE
    return Path(name)

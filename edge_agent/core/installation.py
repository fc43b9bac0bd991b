"""How this copy of Headwater was installed, and the command that adds one of its extras to it.

The name ``headwater`` on a package index may be somebody else's. A hint therefore names what this copy came from, as
pip has noted it (``direct_url.json``, PEP 610): a folder, an archive, a repository, or the index itself.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "headwater"

_MODULES = {"headwater": "coordinator", "edge-agent": "edge_agent"}
"""Program -> the package that it runs."""


@dataclass(frozen=True)
class Origin:
    """The origin from which a copy of Headwater was installed."""

    folder: Path | None = None
    """The folder with ``pyproject.toml``; None where it came from elsewhere, or the folder is not known any more."""
    is_editable: bool = False
    """Whether the folder itself is imported (``pip install -e``)."""
    requirement: str | None = None
    """The requirement from which pip installs the copy again, with ``{extras}`` in its place; None for a folder."""

    def install_command(self, extra: str) -> str:
        """Return the command that adds ``extra`` to this copy, for a person on this machine.

        It runs the pip of the Python at work, because another one on the path would install elsewhere.
        """
        pip = f"{shlex.quote(sys.executable or 'python3')} -m pip install"
        if self.requirement is not None:
            return f"{pip} {shlex.quote(self.requirement.format(extras=f'[{extra}]'))}"
        command = f"{pip} {'-e ' if self.is_editable else ''}'.[{extra}]'"
        if self.folder is None:
            return f"{command} (in the folder of your copy of the repository)"
        return f"cd {shlex.quote(str(self.folder))} && {command}"


def install_command(extra: str) -> str:
    """Return the command that adds ``extra`` to the copy of Headwater at work; it may hold paths of this machine."""
    return find_origin().install_command(extra)


def program_command(name: str) -> str:
    """Return how a shell starts the program ``name`` of the copy at work: its name where that finds it, else its path.

    An environment that is not activated has its programs in a folder that is not on the path.
    """
    program = Path(sys.executable).parent / name
    if not program.is_file():  # started as a module, from the sources
        return f"{shlex.quote(sys.executable)} -m {_MODULES[name]}"
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).resolve() == program.resolve():
        return name
    here = Path.cwd()
    if program.parent != here and program.is_relative_to(here):
        program = program.relative_to(here)
    return shlex.quote(str(program))


@functools.cache
def find_origin() -> Origin:
    """Return what the copy of Headwater at work was installed from."""
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from its sources, by PYTHONPATH or in their folder
        return Origin(_folder_with_project(Path(__file__).parents[2]))
    if noted is None:
        # A developer's copy beside its own metadata, which Python finds first in that folder and pip has not noted.
        folder = _folder_with_project(Path(__file__).parents[2])
        if folder is not None:
            return Origin(folder, is_editable=True)
        return Origin(requirement=f"{DISTRIBUTION}{{extras}}")
    try:
        return parse_origin(json.loads(noted))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Origin()


def parse_origin(noted: dict[str, Any]) -> Origin:
    """Return the origin that pip has noted in ``direct_url.json``.

    Raises:
        KeyError: The record has no ``url``, or a repository without a commit.
        TypeError: The ``url`` is not a string.
    """
    address = noted["url"]
    if not isinstance(address, str):
        raise TypeError(f"the address is {address!r}, expected text")
    if "vcs_info" in noted:
        scheme = noted["vcs_info"]["vcs"]
        commit = noted["vcs_info"]["commit_id"]
        return Origin(requirement=f"{DISTRIBUTION}{{extras}} @ {scheme}+{_escape_braces(address)}@{commit}")
    if "dir_info" not in noted:
        return Origin(requirement=f"{DISTRIBUTION}{{extras}} @ {_escape_braces(address)}")
    folder = _folder_with_project(Path(unquote(urlsplit(address).path)))
    return Origin(folder, is_editable=bool(noted["dir_info"].get("editable")))


def _folder_with_project(folder: Path) -> Path | None:
    """Return ``folder`` where pip can install from it now, else None: a copy may have been removed after it."""
    try:
        return folder if (folder / "pyproject.toml").is_file() else None
    except OSError:
        return None


def _escape_braces(text: str) -> str:
    """Return ``text`` so that `str.format` leaves it as it is."""
    return re.sub(r"([{}])", r"\1\1", text)

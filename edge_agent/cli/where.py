"""How commands name the agent that they are about: by its state folder, or by its configuration."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.storage import read_toml

if TYPE_CHECKING:
    from ..core.config import AgentConfig

_OF_A_DEVICE = ("bundles", "status.json")
"""What the state folder of every device holds that has a bundle, or whose agent has run."""

_PERHAPS_OF_A_DEVICE = (
    *_OF_A_DEVICE,
    "identity",
    "head/head.json",
    "samples/index.json",
    "releases.json",
    "federation.json",
    "pin.json",
)
"""Files and folders of a device's state. Every folder that was used, also by earlier versions, has one of them."""

_LOCK = "lock"
"""File in each folder that a command has held: of a device, of a coordinator, or of unpacked bundles."""

_BROUGHT_BY_HAND = frozenset({".toml", ".pem", ".crt", ".key", ".hwb"})
"""How files end that are put into a state folder before its first use: configuration, keys, a bundle."""

_SHOWN_ENTRIES = 3
"""Entries of a folder that is refused are named, up to so many."""


def add_agent(parser: argparse.ArgumentParser) -> None:
    """Add ``--state DIR``, or else ``--config FILE``, which names that folder."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--state", type=Path, metavar="DIR", help="the agent's state folder")
    which.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="the agent's TOML file (default: agent.toml)"
    )


def state_of(arguments: argparse.Namespace, otherwise: str = "") -> Path:
    """Return the state folder that the options of `add_agent` name.

    Args:
        arguments: The options.
        otherwise: The end of the message where neither is there: what the command can use in place of an agent.

    Raises:
        UsageError: neither is there.
        ConfigError: a mistake in the file; data need not be named in it.
    """
    state: Path | None = arguments.state
    if state is not None:
        return state
    path: Path = arguments.config
    if not path.exists():
        raise UsageError(
            f"{path}: it is not there; name the agent's file (--config FILE) or its state folder (--state DIR)"
            f"{otherwise}"
        )
    from ..core.config import AgentConfig, load  # brings pydantic, which '--help' does without

    data = read_toml(path).get("data", {})
    lacks_data = isinstance(data, dict) and "source" not in data  # as 'edge-agent enroll' leaves it without --data
    return load(AgentConfig, path, {"data": {"source": "none"}} if lacks_data else {}).state


def config_of_folder(state: Path) -> AgentConfig:
    """Return the configuration of a device that is known by its state folder alone: its samples are the added ones.

    Everything that only a configuration file says has its default there.
    """
    from ..core.config import AgentConfig, DataConfig, HeadConfig

    folder = (state / "samples").absolute()
    return AgentConfig(
        id="device", state=state, data=DataConfig(source=f"collected:{folder}"), head=HeadConfig(own_classes=True)
    )


def named(arguments: argparse.Namespace) -> str:
    """Return the option by which the next command names the same agent; empty: the default is it."""
    if arguments.state is not None:
        return f" --state {arguments.state}"
    return "" if arguments.config == Path("agent.toml") else f" --config {arguments.config}"


def check_exists(path: Path, expected: str) -> None:
    """Raises UsageError where there is no such file or folder; ``expected`` says what should be there."""
    if not path.exists():
        raise UsageError(f"{path}: it is not there; expected {expected}, check the path")


def check_may_be_state(folder: Path) -> None:
    """Require that a folder is a device's state folder, or may become one; a folder that is not there may.

    A folder of photos that was named by mistake would get bundles and a lock beside its classes.

    Raises:
        UsageError: the folder holds only files of somebody else.
    """
    if not folder.is_dir():  # not there yet, or a file, which `check_writable` refuses
        return
    names = _entries(folder)
    was_used = _has_any(folder, _PERHAPS_OF_A_DEVICE) or (folder / _LOCK).is_file()
    is_prepared = "root.json" in names or any(Path(name).suffix in _BROUGHT_BY_HAND for name in names)
    if not names or was_used or is_prepared:
        return
    more = ""
    if len(names) > _SHOWN_ENTRIES:
        more = f" and {len(names) - _SHOWN_ENTRIES} more"
    raise UsageError(
        f"{folder}: holds {', '.join(names[:_SHOWN_ENTRIES])}{more}, and nothing of a device; expected the state "
        "folder of a device, or a new or empty one; name another folder"
    )


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, without what a file system or a desktop leaves in every one."""
    names = [path.name for path in folder.iterdir()]
    return sorted(name for name in names if not name.startswith(".") and name != "lost+found")


def check_no_state(folder: Path) -> None:
    """Require that a folder for a result is not one in which a device keeps its state, or its own head.

    The device's files would be mixed with the result, or its head would be replaced without its knowledge.

    Raises:
        UsageError: a device keeps its state or its head there.
    """
    folder = folder.resolve() if folder.name in ("", "..") else folder
    holder = folder.parent
    # A folder "head" beside a folder "bundles" alone may be anybody's; a device's also has a lock.
    is_head_of_device = folder.name == "head" and _has_any(holder, _OF_A_DEVICE) and (holder / _LOCK).is_file()
    if is_head_of_device:
        raise UsageError(
            f"{folder}: the head of the device whose state folder is {holder}, expected a folder of your own; name "
            f"another one, or have the device fit its own head: 'edge-agent add --state {holder}'"
        )
    if _has_any(folder, _OF_A_DEVICE):
        raise UsageError(
            f"{folder}: the state folder of a device, expected a folder for the head alone; name another one, or have "
            f"the device fit its own head: 'edge-agent add --state {folder}'"
        )


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).exists() for name in names)

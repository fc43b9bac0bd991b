"""How commands name the agent that they are about: by its state folder, or by its configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.storage import read_toml

if TYPE_CHECKING:
    from ..core.config import AgentConfig


def add_agent(parser: argparse.ArgumentParser) -> None:
    """Add ``--state DIR``, or else ``--config FILE``, which names that folder."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--state", type=Path, metavar="DIR", help="the agent's state folder")
    which.add_argument(
        "--config", type=Path, default=Path("agent.toml"), help="the agent's TOML file (default: agent.toml)"
    )


def state_of(arguments: argparse.Namespace) -> Path:
    """Return the state folder that the options of `add_agent` name.

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

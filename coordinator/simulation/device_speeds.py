"""How fast simulated devices are: seconds for a sample, and Mbit/s each way, drawn for each client by the seed.

`PROFILES` are assumptions, for comparisons of one kind of round with another where nothing has been measured; figures
of your own devices go into a CSV file with one line for each kind of device.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from edge_agent.core.config import mistakes_of
from edge_agent.core.errors import ConfigError, DataError, UnknownName
from edge_agent.core.storage import read_regular_text
from edge_agent.core.task import Frozen

SALT = 0x59EED
COLUMNS = ("name", "seconds_per_sample", "down_mbit_s", "up_mbit_s")


class DeviceSpeed(Frozen):
    """The speed of a kind of device."""

    name: str = Field(min_length=1, max_length=100)
    seconds_per_sample: float = Field(gt=0, le=1e6, description="training step over the samples of its batch")
    down_mbit_s: float = Field(gt=0, le=1e6, description="from the coordinator, 10^6 bits a second")
    up_mbit_s: float = Field(gt=0, le=1e6, description="to the coordinator")

    def seconds(self, samples: float, down_bytes: int, up_bytes: int) -> float:
        """Return the seconds from the offer of a job to the arrival of its update; nothing overlaps."""
        down_s = 8e-6 * down_bytes / self.down_mbit_s
        up_s = 8e-6 * up_bytes / self.up_mbit_s
        return down_s + samples * self.seconds_per_sample + up_s


PROFILES = {
    "pc": DeviceSpeed(name="pc", seconds_per_sample=0.0005, down_mbit_s=100.0, up_mbit_s=40.0),
    "jetson": DeviceSpeed(name="jetson", seconds_per_sample=0.001, down_mbit_s=50.0, up_mbit_s=20.0),
    "pi5": DeviceSpeed(name="pi5", seconds_per_sample=0.002, down_mbit_s=50.0, up_mbit_s=20.0),
    "pi4": DeviceSpeed(name="pi4", seconds_per_sample=0.005, down_mbit_s=20.0, up_mbit_s=5.0),
}
"""Assumed, for a network of 100,000 weights on small images: nothing here has been measured."""


@dataclass(frozen=True)
class Speeds:
    """The speed of each client."""

    of_client: dict[str, DeviceSpeed]

    @classmethod
    def draw(cls, kinds: Sequence[DeviceSpeed], clients: Sequence[str], seed: int) -> Speeds:
        """Give each client one of the kinds, each as likely as the others; the seed decides which."""
        rng = np.random.default_rng([seed, SALT])
        ordered = sorted(clients)
        chosen = rng.integers(len(kinds), size=len(ordered))
        return cls({client: kinds[int(kind)] for client, kind in zip(ordered, chosen, strict=True)})


def read_speeds(text: str, folder: Path) -> list[DeviceSpeed]:
    """Return the kinds of devices that ``text`` names: profiles as in ``pi4,jetson``, or a CSV file.

    Raises:
        UnknownName: There is no such profile; the nearest name is suggested.
        DataError: The file is missing, or has other columns.
        ConfigError: Values of the file are impossible; all of them are listed.
    """
    if not text.endswith(".csv"):
        return _read_profiles(text)
    path = folder / Path(text).expanduser()
    try:
        content = read_regular_text(path)
    except OSError as error:
        raise DataError(f"speeds = {text}: {path} cannot be read; expected a CSV file with {_header()}") from error
    lines = csv.DictReader(io.StringIO(content))
    columns = tuple(lines.fieldnames or ())
    if columns != COLUMNS:
        first_line = ",".join(columns) or "nothing"
        raise DataError(f"speeds = {text}: its first line is {first_line}; expected {_header()}")
    # All wrong lines are listed, so that nobody mends them one by one.
    kinds = []
    mistakes: list[str] = []
    for number, line in enumerate(lines, start=2):
        try:
            kinds.append(DeviceSpeed.model_validate(line))
        except ValidationError as error:
            mistakes += [f"line {number}: {mistake}" for mistake in mistakes_of(error, DeviceSpeed)]
    if mistakes:
        raise ConfigError(f"speeds = {text}", mistakes)
    if not kinds:
        raise DataError(f"speeds = {text}: it has no line after {_header()}; expected one for each kind of device")
    return kinds


def _read_profiles(text: str) -> list[DeviceSpeed]:
    """Return the profiles with these names, which commas separate.

    Raises:
        UnknownName: There is no such profile.
    """
    kinds = []
    for name in text.split(","):
        profile = PROFILES.get(name.strip())
        if profile is None:
            raise UnknownName("profile of devices", name.strip(), PROFILES)
        kinds.append(profile)
    return kinds


def _header() -> str:
    """Return the first line that a CSV file of speeds has."""
    return ",".join(COLUMNS)

"""The clients of a simulation's result: their accuracies, and what computes with their models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from edge_agent.core.errors import UnknownName, UsageError

from ..figures import ClientScore
from .run_folder import RunFolder
from .tables import MOST_ROWS, ShownTable, data_frame, name_of, share, spread_out

if TYPE_CHECKING:
    import pandas as pd

    from edge_agent.data import Samples

    from .confusion import Confusion
    from .restored import PersonalModel

SCORES: tuple[ClientScore, ...] = ("acc.local", "acc.global", "acc.personal")
"""The names of a client's accuracies."""

MOST_NAMED = 20
"""The most clients that an error names."""


class ClientResult(dict[ClientScore, "float | None"]):
    """What one client has reached: ``acc.local``, ``acc.global`` and ``acc.personal`` on its test samples, 0..1.

    None: not measured. It compares and prints as a mapping of these; `model` and `export` read the folder of the run.
    """

    def __init__(self, id: str, accuracies: Mapping[ClientScore, float | None], run: RunFolder) -> None:  # noqa: A002 - the word of all records
        super().__init__(accuracies)
        self.id = id
        self._run = run

    def __reduce__(self) -> tuple[type[ClientResult], tuple[str, dict[ClientScore, float | None], RunFolder]]:
        return type(self), (self.id, dict(self), self._run)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the model that the client answers with, 0..1: of its personal one where it has one.

        None: it has no test samples.
        """
        personal = self.get("acc.personal")
        return self.get("acc.global") if personal is None else personal

    @property
    def model(self) -> PersonalModel:
        """The model that the client answers with after the run; each call returns a new copy of it.

        Raises:
            UsageError: The folder of the run is gone, or this client has no model of its own there.
            DataError: The data of the run are not there any more.
        """
        return self._run.restored().model_of(self.id)

    @property
    def samples(self) -> tuple[Samples, Samples]:
        """The client's training and test samples, prepared for the encoder.

        Raises:
            UsageError: The folder of the run is gone.
            DataError: The data of the run are not there any more.
        """
        return self._run.restored().samples_of(self.id)

    def confusion(self) -> Confusion:
        """Return how often test samples of each class were answered with each class."""
        from .confusion import confusion_of

        return confusion_of(self._run.restored(), [self.id])

    def export(self, path: str | Path) -> Path:
        """Write the client's model as one ONNX file for any runtime, checked on all its test samples; returns its path.

        The file takes pixels, or windows in the units of the sensor, and answers with ``probabilities``. It has the
        metadata that files of 'edge-agent export' have.

        Raises:
            UsageError: The method's answer has no form as ONNX operators, or no file can be written there.
            MissingCapability: The package ``onnx`` is not installed.
            StateError: The file would answer otherwise than the simulation.
        """
        from .personal_file import write_personal_file

        return write_personal_file(self._run.restored(), self.id, Path(path))


class Clients(dict[str, ClientResult]):
    """Client -> its result, in the order of their numbers; ``clients[7]`` is the client at position 7."""

    @classmethod
    def of(cls, accuracies: Mapping[str, Mapping[ClientScore, float | None]], run: RunFolder) -> Clients:
        """Return the clients of a run with these accuracies."""
        names = sorted(accuracies, key=_by_number)
        clients = cls((name, ClientResult(name, accuracies[name], run)) for name in names)
        clients.run = run
        return clients

    run: RunFolder
    """The folder that all of them read."""

    def __getitem__(self, key: str | SupportsIndex) -> ClientResult:
        """Return a client by its name, or the one at a position; -1 is the last.

        Raises:
            UsageError: No client has this name, or this position.
        """
        if isinstance(key, str) and key in self:
            return super().__getitem__(key)
        names = list(self)
        # A position may also be a number of NumPy, such as the result of `argmin`.
        if isinstance(key, SupportsIndex) and -len(names) <= index(key) < len(names):
            return super().__getitem__(names[index(key)])
        if len(names) > MOST_NAMED:
            raise UsageError(
                f"unknown client '{key}': there are {len(names)}, '{names[0]}' to '{names[-1]}', at positions 0 to "
                f"{len(names) - 1}"
            )
        raise UnknownName("client", str(key), names)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each client, by its name.

        Raises:
            MissingCapability: pandas is not installed.
        """
        return data_frame(
            lambda pd: pd.DataFrame.from_dict(dict(self), orient="index").rename_axis("client"), "a table of clients"
        )

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        return ShownTable(
            f"{len(self)} clients: accuracy on their own test samples after the run",
            ("client", *SCORES),
            tuple(self._rows()),
            tuple(self._notes()),
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        names = list(self)
        for position in spread_out(len(names), 2 * MOST_ROWS):
            client = self[names[position]]
            yield (name_of(client.id), *(share(client.get(score)) for score in SCORES))

    def _notes(self) -> Iterator[str]:
        hidden = len(self) - len(spread_out(len(self), 2 * MOST_ROWS))
        if hidden:
            yield f"{hidden} more; .to_pandas() has all"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within names as numbers: c10 after c9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

"""The clients of a simulation's result: their accuracies, and what computes with their models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.core.errors import UnknownName

from .run_folder import RunFolder
from .tables import MOST_ROWS, ShownTable, data_frame, name_of, share, spread_out

if TYPE_CHECKING:
    import pandas as pd

    from edge_agent.data import Samples

    from .confusion import Confusion
    from .restored import PersonalModel

SCOPES = ("local", "global", "personal")
"""The scopes of a client's accuracies."""


class ClientResult(dict[str, "float | None"]):
    """What one client has reached: ``acc.local``, ``acc.global`` and ``acc.personal`` on its test samples, 0..1.

    None: not measured. It compares and prints as a mapping of these; `model` and `export` read the folder of the run.
    """

    def __init__(self, id: str, accuracies: Mapping[str, float | None], run: RunFolder) -> None:  # noqa: A002 - the word of all records
        super().__init__(accuracies)
        self.id = id
        self._run = run

    def __reduce__(self) -> tuple[type[ClientResult], tuple[str, dict[str, float | None], RunFolder]]:
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
    def of(cls, accuracies: Mapping[str, Mapping[str, float | None]], run: RunFolder) -> Clients:
        """Return the clients of a run with these accuracies."""
        names = sorted(accuracies, key=_by_number)
        clients = cls((name, ClientResult(name, accuracies[name], run)) for name in names)
        clients.run = run
        return clients

    run: RunFolder
    """The folder that all of them read."""

    def __missing__(self, key: object) -> ClientResult:
        """Return the client at a position; a name that no client has is an error.

        Raises:
            UnknownName: No client has this name, or this position.
        """
        if isinstance(key, int) and -len(self) <= key < len(self):
            return self[list(self)[key]]
        raise UnknownName("client", str(key), self)

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
            ("client", *(f"acc.{scope}" for scope in SCOPES)),
            tuple(self._rows()),
            tuple(self._notes()),
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        names = list(self)
        for position in spread_out(len(names), 2 * MOST_ROWS):
            client = self[names[position]]
            yield (name_of(client.id), *(share(client.get(f"acc.{scope}")) for scope in SCOPES))

    def _notes(self) -> Iterator[str]:
        hidden = len(self) - len(spread_out(len(self), 2 * MOST_ROWS))
        if hidden:
            yield f"{hidden} more; .to_pandas() has all"


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within names as numbers: c10 after c9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

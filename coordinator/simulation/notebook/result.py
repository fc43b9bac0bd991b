"""What ``simulate`` returns: the figures of a run, and its folder, which holds all else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_agent.core.storage import check_writable

from ...config import ExportConfig
from ...shadowed import check_export
from ...text import counted
from ..figures import ClientScore, EndScope, RoundFigures, RoundRow, RowAccuracies, Scores, SimulatedTime, Summary
from ..finished import FinishedRun
from .clients import Clients
from .picture import Plot
from .run_folder import RunFolder
from .tables import (
    MOST_ROWS,
    ShownTable,
    data_frame,
    joined,
    loss_of,
    megabytes,
    name_of,
    seconds_of,
    share,
    spread_out,
)

if TYPE_CHECKING:
    import pandas as pd

    from .comparison import Compared, PairedComparison
    from .confusion import Confusion


class Rounds(list[RoundRow]):
    """One row for each round: ``round``, ``acc.global``, ``acc.personal``, ``loss``, ``seconds``, bytes.

    It is a list of dictionaries, and shows itself as a table.
    """

    @classmethod
    def of(cls, summary: Summary) -> Rounds:
        """Return the rounds of a run with these figures."""
        return cls(map(_row_of, summary["rounds"]))

    def to_pandas(self) -> pd.DataFrame:
        """Return the same as a table of pandas.

        Raises:
            MissingCapability: pandas is not installed.
        """
        return data_frame(lambda pd: pd.DataFrame(list(self)), "a table of rounds")

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        """Return some rounds at equal distances, with the accuracies that any of them has."""
        scopes = [name for name in _ROW_SCOPES if any(name in row for row in self)]
        shown = spread_out(len(self), 2 * MOST_ROWS)
        rows = []
        for row in map(self.__getitem__, shown):
            accuracies = (share(row.get(name)) for name in scopes)
            sizes = (megabytes(row["bytes_up"]), megabytes(row["bytes_down"]))
            rows.append((str(row["round"]), *accuracies, loss_of(row["loss"]), seconds_of(row["seconds"]), *sizes))
        notes = []
        if len(shown) < len(self):
            notes.append(f"{len(self) - len(shown)} more; .to_pandas() has all")
        columns = ("round", *scopes, "loss", "s", "up MB", "down MB")
        caption = f"{counted(len(self), 'round')}: accuracies are means over clients of the model that they received"
        return ShownTable(caption, columns, tuple(rows), tuple(notes))


_ROW_SCOPES: tuple[Literal["acc.global", "acc.personal", "acc.after"], ...] = (
    "acc.global",
    "acc.personal",
    "acc.after",
)


def _row_of(figures: RoundFigures) -> RoundRow:
    """Return a round as a row."""
    acc = figures["acc"]
    means: RowAccuracies = {}
    if "global" in acc:
        means["acc.global"] = acc["global"]["clients_mean"]
    if "personal" in acc:
        means["acc.personal"] = acc["personal"]["clients_mean"]
    if "after" in acc:
        means["acc.after"] = acc["after"]["clients_mean"]
    clock: SimulatedTime = {}
    if "simulated_s" in figures:
        clock["simulated_s"] = figures["simulated_s"]
    return {
        "round": figures["round"],
        **means,
        "loss": figures["loss"],
        "seconds": figures["seconds"],
        "bytes_up": figures["bytes_up"],
        "bytes_down": figures["bytes_down"],
        **clock,
    }


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """The result of a simulation. ``summary`` holds all figures, as 'headwater simulate --json' prints them.

    ``clients``: client -> accuracies 0..1 on its own held-out samples after the run: ``acc.local`` (the best model on
    raw inputs alone, which ``summary["local_models"]`` names), ``acc.global`` (the shared model), ``acc.personal``
    (after personalization). ``clients[7]`` is the one at position 7; ``.model``, ``.confusion()`` and
    ``.export("personal.onnx")`` of a client compute with its model as it is after the run.
    ``folder``: state of the run, which 'headwater analyze' and 'headwater export --state' read.

    Example:
        >>> from coordinator import simulate
        >>> result = simulate("fedper", data="digits:optdigits?n=90", clients=3, rounds=2, engine="serial", local=False)
        >>> result.accuracy == result.summary["last"]["acc"]["personal"]["clients_mean"]
        True
        >>> print(result.rounds)  # doctest: +ELLIPSIS
        2 rounds: accuracies are means over clients of the model that they received
        round  acc.personal ...
    """

    rounds: Rounds
    clients: Clients
    summary: Summary
    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> SimulationResult:
        """Return the result of the simulation in a folder, whether a program or 'headwater simulate' has made it.

        Example:
            >>> from coordinator import SimulationResult, simulate
            >>> settings = {"clients": 3, "rounds": 1, "engine": "serial", "local": False}
            >>> first = simulate("fedper", data="digits:optdigits?n=60", out="runs/fedper", **settings)
            >>> SimulationResult.open("runs/fedper").clients == first.clients
            True

        Raises:
            UsageError: The folder holds no simulation, or one that has not finished.
            StateError: Files are damaged.
        """
        folder = Path(folder)
        run = FinishedRun.open(folder)
        return cls.of(run.summary, run.recorded, folder)

    @classmethod
    def of(cls, summary: Summary, recorded: Mapping[str, Any], folder: Path) -> SimulationResult:
        """Return the result with these figures: those of ``result.json``, and those of the run's ``summary.json``."""
        accuracies: dict[str, dict[ClientScore, float | None]] = {}
        for agent in recorded.get("agents", []):
            acc = agent["acc"]
            accuracies[agent["id"]] = {
                "acc.local": acc.get("local"),
                "acc.global": acc.get("global"),
                "acc.personal": acc.get("personal"),
            }
        return cls(Rounds.of(summary), Clients.of(accuracies, RunFolder(folder.absolute())), summary, folder)

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the clients after the run, 0..1: of personal models where there are any, else global."""
        last = self.summary["last"]["acc"]
        scores = last.get("personal") or last.get("global")
        return None if scores is None else scores["clients_mean"]

    def plot(self, path: str | Path | None = None, *, for_print: bool = False) -> Plot:
        """Return the accuracy by rounds as a picture; with ``path`` also written there.

        Example:
            >>> from coordinator import simulate
            >>> settings = {"clients": 3, "rounds": 1, "engine": "serial", "local": False}
            >>> result = simulate("fedper", data="digits:optdigits?n=60", **settings)
            >>> plot = result.plot("fedper.pdf", for_print=True)

        Args:
            path: A file to write, as SVG, PNG or PDF by its suffix.
            for_print: Draw it for one column of a paper: 3.3 inches wide, 8 pt, without a title, in colours, markers
                and dashes that stay apart for readers with colour blindness.

        Raises:
            UsageError: ``path`` has another suffix, or cannot be written.
        """
        from ...report.pictures import COLUMN, PAGE
        from ..results import curves

        form = COLUMN if for_print else PAGE
        return Plot.of(lambda kind: curves(self.summary, kind, form), path)

    def confusion(self) -> Confusion:
        """Return how often test samples of each class were answered with each class, over all clients.

        Example:
            >>> from coordinator import simulate
            >>> settings = {"clients": 3, "rounds": 1, "engine": "serial", "local": False}
            >>> confusion = simulate("fedper", data="digits:optdigits?n=90", **settings).confusion()
            >>> confusion.counts.shape, confusion.plot("answers.svg").svg.startswith("<svg")
            ((10, 10), True)

        Raises:
            UsageError: The folder of the run is gone.
            DataError: The data of the run are not there any more.
        """
        from .confusion import confusion_of

        return confusion_of(self.clients.run.restored(), list(self.clients))

    def compare(self, other: SimulationResult) -> PairedComparison:
        """Compare the clients of this result with those of another one, on the same test samples.

        Example:
            >>> from coordinator import simulate
            >>> settings = {"clients": 3, "rounds": 1, "engine": "serial", "local": False}
            >>> fedper = simulate("fedper", data="digits:optdigits?n=90", **settings)
            >>> fedavg = simulate("fedavg", data="digits:optdigits?n=90", **settings)
            >>> comparison = fedper.compare(fedavg)
            >>> comparison.names, len(comparison.clients)
            (('fedper', 'fedavg'), 3)

        Raises:
            UsageError: The other one is of another task, partition or other test samples; the message says what.
        """
        from .comparison import compare

        return compare(self._compared(), other._compared())

    def _compared(self) -> Compared:
        from .comparison import Compared

        accuracies = {name: client.accuracy for name, client in self.clients.items()}
        return Compared(self.summary, accuracies, self.clients.run)

    def export(self, path: str | Path) -> Path:
        """Write the encoder as a bundle file for devices, as 'headwater export' does; returns the file's path.

        It is checked and quantized. A file that ends in ``.safetensors`` gets the encoder's weights as they are, for
        ``weights=`` of other simulations and for PyTorch.

        Example:
            >>> from coordinator import simulate
            >>> settings = {"clients": 3, "rounds": 1, "engine": "serial", "local": False}
            >>> result = simulate("fedper", data="digits:optdigits?n=60", **settings)
            >>> result.export("encoder.hwb").name
            'encoder.hwb'

        Raises:
            ExportRejected: the method shares no encoder, or the bundle does not pass its checks.
            UsageError: no file can be written there, or something else called ``export`` is found by Python first.
        """
        check_export()
        from ..trained import TrainedModel, export_run

        target = Path(path)
        check_writable(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".safetensors":
            TrainedModel.of(self.clients.run.path).write_weights(target)
            return target
        return export_run(self.clients.run.path, target, ExportConfig())[0].path

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        """Return some rounds at equal distances, the accuracies at the end, and what the figures are of."""
        summary = self.summary
        last = summary["last"]["acc"]
        rounds = summary["rounds"]
        shown = [rounds[position] for position in spread_out(len(rounds))]
        scopes = [scope for scope in _SHOWN_SCOPES if scope in last or any(scope in row["acc"] for row in shown)]
        rows = []
        for row in shown:
            means = (_mean_in(row["acc"], scope) for scope in scopes)
            rows.append((f"round {row['round']}", *means, loss_of(row["loss"]), seconds_of(row["seconds"])))
        rows.append(("end", *(_mean_in(last, scope) for scope in scopes), "", ""))
        clients = counted(summary["clients"], "client")
        partition = f"partition {name_of(summary['partition'])}"
        what = f"{name_of(summary['method'])}, {clients}, {partition}, seed {summary['seed']}"
        columns = ("", *(f"acc.{scope}" for scope in scopes), "loss", "s")
        return ShownTable(f"Simulation: {what}", columns, tuple(rows), tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        """Yield lines about the end of the run, and where the rest is."""
        summary = self.summary
        last = summary["last"]["acc"]
        yield "means over clients, in a round of the model that they received"
        for scope in _SCOPES_OF_THE_END:
            if scope in last:
                figures = last[scope]
                spread = f"{figures['clients_mean']:.4f} ± {figures['std']:.4f} over clients"
                yield f"acc.{scope}: {spread}, worst tenth {figures['worst10']:.4f}"
        yield f"data: {joined(summary['data'], 2)}; {summary['seconds']:.1f} s of rounds; {self._warnings()}"
        yield f"folder: {self.folder}"

    def _warnings(self) -> str:
        warnings = len(self.summary.get("warnings", ()))
        return f"{counted(warnings, 'warning')} in .summary['warnings']" if warnings else "no warnings"


_SHOWN_SCOPES: tuple[Literal["global", "personal"], ...] = ("global", "personal")
_SCOPES_OF_THE_END: tuple[EndScope, ...] = ("personal", "global", "local", "new")


def _mean_in(acc: Mapping[Any, Scores], scope: EndScope) -> str:
    """Return the mean of a scope over clients as text; a dash where it was not evaluated."""
    return share(acc[scope]["clients_mean"] if scope in acc else None)

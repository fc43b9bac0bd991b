"""What ``simulate`` returns: the figures of a run, and its folder, which holds all else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import StateError
from edge_agent.core.storage import check_writable, read_json

from ...config import ExportConfig
from ...shadowed import check_export
from ...state.store import StateFolder
from ...text import counted
from .clients import SCOPES, Clients
from .finished import finished_run
from .picture import Plot
from .run_folder import RunFolder
from .tables import ShownTable, data_frame, joined, name_of, share, spread_out

if TYPE_CHECKING:
    import pandas as pd

    from .comparison import Compared, PairedComparison
    from .confusion import Confusion


RESULT = "result.json"
"""The file with the figures of a finished run."""


class Rounds(list[dict[str, Any]]):
    """One row for each round: ``round``, ``acc.global``, ``acc.personal``, ``loss``, ``seconds``, bytes."""

    def to_pandas(self) -> pd.DataFrame:
        """Return the same as a table.

        Raises:
            MissingCapability: pandas is not installed.
        """
        return data_frame(lambda pd: pd.DataFrame(list(self)), "a table of rounds")


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """The result of a simulation. ``summary`` holds all figures, as 'headwater simulate --json' prints them.

    ``clients``: client -> accuracies 0..1 on its own held-out samples after the run: ``acc.local`` (the best model on
    raw inputs alone, which ``summary["local_models"]`` names), ``acc.global`` (the shared model), ``acc.personal``
    (after personalization). ``clients[7]`` is the one at position 7; ``.model``, ``.confusion()`` and
    ``.export("personal.onnx")`` of a client compute with its model as it is after the run.
    ``folder``: state of the run, which 'headwater analyze' and 'headwater export --state' read.
    """

    rounds: Rounds
    clients: Clients
    summary: dict[str, Any]
    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> SimulationResult:
        """Return the result of the simulation in a folder, whether a program or 'headwater simulate' has made it.

        Raises:
            UsageError: The folder holds no simulation, or one that has not finished.
            StateError: Files are damaged.
        """
        folder = Path(folder)
        run = finished_run(folder)
        with StateFolder(folder).look() as state:
            recorded = state.run(run).summary() or {}
        summary = read_json(folder / RESULT)
        if not isinstance(summary, dict):
            raise StateError(
                f"{folder / RESULT}: missing, or no result; 'headwater simulate --resume --out {folder}' writes it "
                "again"
            )
        return cls.of(summary, recorded, folder)

    @classmethod
    def of(cls, summary: dict[str, Any], recorded: Mapping[str, Any], folder: Path) -> SimulationResult:
        """Return the result with these figures: those of ``result.json``, and those of the run's ``summary.json``."""
        accuracies = {}
        for agent in recorded.get("agents", []):
            accuracies[agent["id"]] = {f"acc.{scope}": agent["acc"].get(scope) for scope in SCOPES}
        rounds = Rounds()
        for figures in summary["rounds"]:
            means = {f"acc.{scope}": result["clients_mean"] for scope, result in figures["acc"].items()}
            others = {name: figures[name] for name in ("loss", "seconds", "bytes_up", "bytes_down")}
            if "simulated_s" in figures:
                others["simulated_s"] = figures["simulated_s"]
            rounds.append({"round": figures["round"], **means, **others})
        return cls(rounds, Clients.of(accuracies, RunFolder(folder)), summary, folder)

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the clients after the run, 0..1: of personal models where there are any, else global."""
        last = self.summary["last"]["acc"]
        scope = next((scope for scope in ("personal", "global") if scope in last), None)
        return None if scope is None else float(last[scope]["clients_mean"])

    def plot(self, path: str | Path | None = None, *, for_print: bool = False) -> Plot:
        """Accuracy by round; with ``path`` also written there, as SVG, PNG or PDF by its suffix.

        Args:
            path: A file to write.
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

        Raises:
            UsageError: The folder of the run is gone.
            DataError: The data of the run are not there any more.
        """
        from .confusion import confusion_of

        return confusion_of(self.clients.run.restored(), list(self.clients))

    def compare(self, other: SimulationResult) -> PairedComparison:
        """Compare the clients of this result with those of another one, on the same test samples.

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
        """Return the encoder as a bundle file for devices, checked and quantized as 'headwater export' does.

        Raises:
            ExportRejected: the method shares no encoder, or the bundle does not pass its checks.
            UsageError: no file can be written there, or something else called ``export`` is found by Python first.
        """
        check_export()
        from ..trained import export_run

        target = Path(path)
        check_writable(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        return export_run(self.folder, target, ExportConfig())[0].path

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        """Return some rounds at equal distances, the accuracies at the end, and what the figures are of."""
        summary = self.summary
        last = summary["last"]["acc"]
        shown = [self.rounds[position] for position in spread_out(len(self.rounds))]
        names = ("global", "personal")
        scopes = [scope for scope in names if scope in last or any(f"acc.{scope}" in row for row in shown)]
        rows = []
        for row in shown:
            loss = "–" if row["loss"] is None else f"{row['loss']:.4g}"
            seconds = "–" if row["seconds"] is None else f"{row['seconds']:.1f}"
            rows.append((f"round {row['round']}", *(share(row.get(f"acc.{scope}")) for scope in scopes), loss, seconds))
        at_end = (share(last[scope]["clients_mean"]) if scope in last else "–" for scope in scopes)
        rows.append(("end", *at_end, "", ""))
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
        for scope in ("personal", "global", "local", "new"):
            if scope in last:
                figures = last[scope]
                spread = f"{figures['clients_mean']:.4f} ± {figures['std']:.4f} over clients"
                yield f"acc.{scope}: {spread}, worst tenth {figures['worst10']:.4f}"
        yield f"data: {joined(summary['data'], 2)}; {summary['seconds']:.1f} s of rounds; {self._warnings()}"
        yield f"folder: {self.folder}"

    def _warnings(self) -> str:
        warnings = len(self.summary.get("warnings", ()))
        return f"{counted(warnings, 'warning')} in .summary" if warnings else "no warnings"

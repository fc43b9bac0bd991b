"""``--log mlflow:http://HOST:5000``: a run at an MLflow server, below its parent where it has one.

The target is a tracking URI, with ``?experiment=NAME`` behind it for another experiment than ``headwater``. A run is
recognised by a tag with its ``uid``: a run that is resumed, or logged again later, adds only the rounds that the server
lacks. Nobody waits for a server for longer than the limits below, and nothing is reported to anybody else: MLflow's own
telemetry is off unless the environment says otherwise.
"""

from __future__ import annotations

import os
import re
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edge_agent.core.errors import UsageError, cause

from .base import Logger
from .records import ParentRun, RoundResult, RunDescription, RunEnd, as_csv, clients_table

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "headwater"
UID_TAG = "headwater.uid"
PARENT_TAG = "mlflow.parentRunId"
"""The tag by which MLflow shows a run below another."""

STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""Our word for how a run has ended -> MLflow's."""

PARAMS_AT_ONCE = 100
"""Parameters of one request, as MLflow allows."""

LONGEST_VALUE = 500
LONGEST_TAG = 5000
LONGEST_KEY = 250
"""Characters of a parameter's value, a tag's, and a name; MLflow's older servers allow no more."""

CHECK_LIMIT_S = 5.0
"""How long the check before a run waits for the server."""

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""What the package reads from the environment. By its own defaults it reports its use, waits four minutes for a server
that is away, and prints addresses among the output of a command. What is set already stays."""

LATER = "or log to files now (--log jsonl) and to the server later (--resume --log mlflow:…)"
NO_TARGET = (
    "--log mlflow: say where, for example --log mlflow:http://127.0.0.1:5000; 'mlflow server' starts a server on this "
    "machine"
)


@dataclass(frozen=True)
class _Tried:
    """A round whose figures were sent, and the time that they have there."""

    round: int
    time_ms: int


class MlflowLogger(Logger):
    """A run at an MLflow server."""

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    takes_clients: ClassVar[bool] = False

    def __init__(self, target: str = "", folder: Path = Path()) -> None:
        """Only assign; the parameters are those of the contract."""
        super().__init__(target, folder)
        self._uri, _, options = target.partition("?")
        query = urllib.parse.parse_qs(options)
        self._experiment = query.get("experiment", [DEFAULT_EXPERIMENT])[0]
        self._run_id = ""
        self._experiment_id = ""
        self._missing_parent: ParentRun | None = None
        """The parent, while the server does not have it."""

        self._logged: set[int] = set()
        """Rounds that the server has."""

        self._tried: _Tried | None = None
        """The last round that was sent; None: none was."""

        self._unknown_options = sorted(query.keys() - {"experiment"})

    @property
    def where(self) -> str:
        """The server, and the run there once it has one."""
        if not self._run_id:
            return self._uri
        return f"{self._uri}, experiment {self._experiment}, run {self._run_id}"

    def check(self) -> None:
        """Return quietly where the package is installed and the server answers.

        Raises:
            MissingCapability: The package is not installed.
            UsageError: There is no target, no server that answers, or it refuses.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        super().check()
        if not self._uri:
            raise UsageError(NO_TARGET)
        if self._unknown_options:
            raise UsageError(f"--log mlflow: {', '.join(self._unknown_options)}: expected ?experiment=NAME and no more")
        is_server = self._uri.startswith(("http://", "https://"))
        if is_server:
            self._check_address()
        try:
            self._client().search_experiments(max_results=1)
        # A package of others, and whatever stores it has installed, may raise anything.
        except Exception as error:
            todo = "correct the address or what it asks for"
            if not is_server:  # a folder or a database, which releases of the package treat in different ways
                todo = "name a server, such as http://127.0.0.1:5000 ('mlflow server' starts one on this machine)"
            raise UsageError(
                f"--log mlflow: {self._uri} cannot be used: {_first_line(error)}; {todo}, {LATER}"
            ) from error

    def _check_address(self) -> None:
        """Return quietly where something answers at the address: a short look, for the package waits for longer.

        Raises:
            UsageError: Nothing does.
        """
        try:
            urllib.request.urlopen(f"{self._uri.rstrip('/')}/health", timeout=CHECK_LIMIT_S).close()  # noqa: S310 - http
        except urllib.error.HTTPError:  # it answers; whether it is such a server, and lets us in, is seen next
            return
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            text = cause(reason) if isinstance(reason, OSError) else str(reason)
            raise UsageError(
                f"--log mlflow: the server at {self._uri} does not answer ({text}); start it (mlflow server), correct "
                f"the address, {LATER}"
            ) from error

    def begin(self, run: RunDescription) -> None:
        """Find the run at the server, or create it, and set what describes it."""
        client = self._client()
        self._experiment_id = self._find_experiment()
        self._run_id = self._find_run(run.uid) or self._create_run(run)
        self._logged = self._read_logged()
        client.update_run(self._run_id, status="RUNNING", name=run.name)
        from mlflow.entities import Param, RunTag

        tags = [RunTag(_key(name), value[:LONGEST_TAG]) for name, value in run.tags.items()]
        if run.note:
            tags.append(RunTag("mlflow.note.content", run.note[:LONGEST_TAG]))
        # A parameter is never changed there: of a run that goes on, the path of moved data could be another.
        present = client.get_run(self._run_id).data.params
        missing = {_key(name): str(value)[:LONGEST_VALUE] for name, value in run.params.items()}
        params = [Param(name, value) for name, value in missing.items() if name not in present]
        client.log_batch(self._run_id, tags=tags)
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._run_id, params=params[begin : begin + PARAMS_AT_ONCE])

    def log_round(self, row: RoundResult) -> None:
        """Add the figures of a round that the server lacks, in one request."""
        if row.round in self._logged:
            return
        if self._tried is None or self._tried.round != row.round:
            self._tried = _Tried(row.round, _now_ms())
        else:
            # The answer to the request before did not come, but its figures may be there. If the server still works on
            # it, these have the same time, and a database has one row for both.
            self._logged = self._read_logged()
            if row.round in self._logged:
                return
        # The number comes last: a store that writes one figure after another has it only once it has the others.
        self._log_metrics({**row.metrics(), "round": float(row.round)}, row.round, self._tried.time_ms)
        self._logged.add(row.round)

    def end(self, end: RunEnd) -> None:
        """Add the final figures, the table of clients and the files of the result, and say how the run has ended."""
        client = self._client()
        if self._missing_parent is not None:
            parent = self._find_run(self._missing_parent.uid)
            if parent:
                client.set_tag(self._run_id, PARENT_TAG, parent)
        present = client.get_run(self._run_id).data.metrics  # of a run that is logged once more, or after a failure
        missing = {name: value for name, value in end.figures.items() if present.get(_key(name)) != value}
        if missing:
            self._log_metrics(missing, end.round, _now_ms())
        if end.clients:
            client.log_text(self._run_id, as_csv(*clients_table(end)), "clients.csv")
        for path in end.artefacts.values():
            if path.exists():
                client.log_artifact(self._run_id, str(path))
        if end.reason:
            client.set_tag(self._run_id, "headwater.reason", end.reason)
        client.set_terminated(self._run_id, STATUS[end.status])

    # --- inside ----------------------------------------------------------------------------------------------------

    def _client(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def _find_experiment(self) -> str:
        """Return the id of the experiment, which is created where there is none."""
        from mlflow.exceptions import MlflowException

        client = self._client()
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self._experiment))
            except MlflowException:  # another process has created it meanwhile
                experiment = client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _find_run(self, uid: str) -> str:
        """Return the id of the run with our ``uid``; empty where there is none."""
        runs = self._client().search_runs([self._experiment_id], f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _create_run(self, run: RunDescription) -> str:
        """Create the run, below its parent where the server has that, and return its id."""
        tags = {UID_TAG: run.uid}
        if run.parent is not None:
            parent = self._find_run(run.parent.uid)
            if parent:
                tags[PARENT_TAG] = parent
            else:
                self._missing_parent = run.parent
        created = self._client().create_run(self._experiment_id, tags=tags, run_name=run.name)
        return str(created.info.run_id)

    def _read_logged(self) -> set[int]:
        """Return the rounds that the server has."""
        history = self._client().get_metric_history(self._run_id, "round")
        return {int(point.value) for point in history}

    def _log_metrics(self, metrics: Mapping[str, float], number: int, time_ms: int) -> None:
        """Add figures of a round, in one request."""
        from mlflow.entities import Metric

        points = [Metric(_key(name), float(value), time_ms, number) for name, value in metrics.items()]
        self._client().log_batch(self._run_id, metrics=points)


def _now_ms() -> int:
    """Return the milliseconds since 1970, as MLflow has them."""
    return int(time.time() * 1000)


def _key(name: str) -> str:
    """Return the name of a parameter, tag or figure with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:LONGEST_KEY]


def _first_line(error: Exception) -> str:
    """Return what is wrong as one line that is not too long, and ends with a whole word."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 300, placeholder=" …").rstrip(".")

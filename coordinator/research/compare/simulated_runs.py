"""One simulation of a comparison: what is run, and its outcome, which a file beside its folder keeps.

The outcome is written atomically once the simulation is over. Until then the file counts the processor time so far, so
that what a killed process has spent is not lost. A simulation that was stopped is resumed by its own folder.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from edge_agent.core.config import parse
from edge_agent.core.errors import HeadwaterError, StateError, UsageError, cause
from edge_agent.core.own_folders import remove_folder
from edge_agent.core.storage import read_json, write_atomic, write_json
from edge_agent.core.task import Frozen

from ...simulation.failures import Failure
from ...simulation.own_sources import describe_changes, own_sources
from ...simulation.plan import Plan
from ...simulation.setup import PARTITION, SIMULATION_FOLDER, read_plan
from .records import ClientScore

if TYPE_CHECKING:
    from edge_agent.data.partition import Division
    from edge_agent.wire.messages.down import Job

log = logging.getLogger(__name__)

KINDS = ("trials", "runs", "untuned")
"""Folders of a comparison in which each method has one with its simulations."""

_SIMULATION = re.compile(r"seed-\d+|\d+-\d+-rounds")
"""Names of the folders of simulations; the file of an outcome beside such a folder has the same name and ``.json``."""

_OR_ELSE = "choose another folder with --out"

Watch = Callable[[int], object]
"""Called with the number of rounds that a simulation has done so far."""


class RunOutcome(Frozen):
    """What a simulation has found, as the file beside its folder keeps it."""

    plan: dict[str, Any] = Field(description="the settings of the simulation")
    is_over: bool = Field(False, description="false: it was begun, and the processor time is that so far")
    failure: str = Field("", description="why it failed; empty: it did not")
    is_repeated: bool = Field(False, description="whether it had failed before, and was run again")
    clients: tuple[ClientScore, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    bytes_up: int = Field(0, ge=0)
    bytes_down: int = Field(0, ge=0)
    cpu_s: float = Field(0.0, ge=0, description="CPU seconds of all processes, those of earlier attempts included")
    seconds: float = Field(0.0, ge=0, description="seconds by the clock, those of earlier attempts included")
    partition_hash: str = ""

    @property
    def score(self) -> float | None:
        """The mean accuracy over the clients that have samples to be scored on; None where it failed."""
        accuracies = [client.accuracy for client in self.clients if client.samples > 0]
        if not accuracies:
            return None
        return sum(accuracies) / len(accuracies)


@dataclass(frozen=True)
class RunSpec:
    """One simulation of a comparison: its plan, and the folder that it has there."""

    location: str
    """Its folder, relative to that of the comparison; the file of its outcome has the same name and ``.json``."""

    plan: Plan
    is_trial: bool
    """Whether it is scored on validation samples, and its folder goes once it is over."""

    own_sources: Mapping[str, str] = field(default_factory=dict)
    """``method`` and ``encoder`` -> SHA-256 of the source that the comparison began with, of the user's own."""

    def folder(self, base: Path) -> Path:
        """Return its folder; ``base`` is that of the comparison."""
        return base / self.location

    def outcome_path(self, base: Path) -> Path:
        """Return the file of its outcome."""
        return base / f"{self.location}.json"

    def read(self, base: Path) -> RunOutcome | None:
        """Return its outcome, or the processor time so far; None: it was not begun.

        Raises:
            StateError: The file is damaged, or of a simulation with other settings.
        """
        outcome = self.read_any(base)
        if outcome is not None:
            self.check(outcome, base)
        return outcome

    def check(self, outcome: RunOutcome, base: Path) -> None:
        """Require that an outcome is of this simulation.

        Raises:
            StateError: It is of one with other settings.
        """
        differences = self.differences(outcome)
        if differences:
            raise StateError(
                f"{self.outcome_path(base)}: has other settings ({'; '.join(differences[:5])}): the method's search "
                f"space or an earlier trial has changed; {_OR_ELSE}"
            )

    def read_any(self, base: Path) -> RunOutcome | None:
        """Return what its file holds, though that may be of other settings; None: there is no file.

        Raises:
            ConfigError: The file is damaged.
        """
        path = self.outcome_path(base)
        content = read_json(path)
        if content is None:
            return None
        return parse(RunOutcome, content, where=str(path))

    def differences(self, outcome: RunOutcome, *, but: Collection[str] = ()) -> list[str]:
        """Return ``name value, now value`` for each setting in which an outcome is of another simulation.

        Args:
            outcome: What its file holds.
            but: Fields of the plan that are not compared.
        """
        begun = parse(Plan, outcome.plan, where=f"the plan of {self.location}")
        return begun.differences(self.plan, but=but)

    def check_own_sources(self) -> None:
        """Require that the user's own method and encoder are those that the comparison began with.

        Raises:
            UsageError: The source of one has changed meanwhile.
        """
        now = own_sources(method=self.plan.method, encoder=self.plan.encoder)
        changes = describe_changes(self.own_sources, now)
        if changes:
            raise UsageError(
                f"another source of {changes} than the comparison began with; put the source back as it was and give "
                "--again (in Python Running(again=True))"
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON for another process; `from_json` reads it."""
        plan = self.plan.model_dump(mode="json", exclude_unset=True)
        return {
            "location": self.location,
            "plan": plan,
            "is_trial": self.is_trial,
            "own_sources": dict(self.own_sources),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunSpec:
        """Read what `to_json` has made."""
        plan = Plan.model_validate(fields["plan"])
        return cls(fields["location"], plan, fields["is_trial"], fields["own_sources"])


class Meter:
    """Processor time of this process and its children, and time by the clock, since the last reading."""

    def __init__(self, *, from_start: bool = False) -> None:
        """``from_start``: count from the start of the process, so that its imports are counted, too."""
        self._cpu_s = 0.0 if from_start else cpu_seconds()
        self._began_s = time.monotonic()

    def read(self) -> tuple[float, float]:
        """Return (CPU seconds, seconds by the clock) since the reading before, and begin again."""
        now_cpu_s = cpu_seconds()
        now_s = time.monotonic()
        spent = (max(0.0, now_cpu_s - self._cpu_s), now_s - self._began_s)
        self._cpu_s = now_cpu_s
        self._began_s = now_s
        return spent

    def leave_out_wait(self) -> None:
        """Count no time by the clock since the reading before, in which nothing was to be done."""
        self._began_s = time.monotonic()


def cpu_seconds() -> float:
    """Return the CPU seconds, user and system, of this process and of its children that have ended."""
    try:
        import resource
    except ImportError:  # Windows
        return time.process_time()
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def simulate_run(spec: RunSpec, base: Path, meter: Meter, watch: Watch = lambda _: None) -> RunOutcome:
    """Simulate to the end, or resume what is in the folder, and write the outcome; a failure is an outcome, too.

    Args:
        spec: What is simulated.
        base: The folder of the comparison.
        meter: Where processor time is read from.
        watch: Called with the number of closed rounds.

    Raises:
        StateError, OSError: Files cannot be read or written, on a full disk for example; then it can be resumed.
    """
    before = spec.read(base)
    if before is not None and before.is_over:
        return before
    ledger = _Ledger(spec, base, meter, before)
    try:
        # A comparison takes hours, and its user may edit the file meanwhile.
        spec.check_own_sources()
        outcome = _simulate(spec, base, ledger, watch)
    except (StateError, OSError):
        raise
    except HeadwaterError as error:
        outcome = ledger.failed(str(error))
    except Exception as error:
        # The method or encoder of a user may raise anything, and ends its own run alone.
        log.exception("run_broke run=%s", spec.location)
        outcome = ledger.failed(f"{type(error).__name__}: {cause(error)}{Failure.of(error).where}")
    write_json(spec.outcome_path(base), outcome.model_dump(mode="json"))
    return outcome


class _Ledger:
    """The processor time of a simulation over all its attempts, written after each round."""

    def __init__(self, spec: RunSpec, base: Path, meter: Meter, before: RunOutcome | None) -> None:
        self._path = spec.outcome_path(base)
        self._meter = meter
        self._plan = spec.plan.model_dump(mode="json", exclude_unset=True)
        self._cpu_s = 0.0 if before is None else before.cpu_s
        self._seconds = 0.0 if before is None else before.seconds
        self._is_repeated = before is not None and before.is_repeated

    def note(self) -> None:
        """Write what was spent so far; a power cut may lose it."""
        fields = self._spent()
        write_json(self._path, RunOutcome(**fields).model_dump(mode="json"), durable=False)

    def over(self, **fields: Any) -> RunOutcome:
        """Return the outcome of a simulation that is over, with all that was spent."""
        return RunOutcome(**self._spent(), is_over=True, **fields)

    def failed(self, reason: str) -> RunOutcome:
        """Return the outcome of a simulation that failed."""
        return self.over(failure=reason or "no reason was given")

    def _spent(self) -> dict[str, Any]:
        """Return the fields that say which simulation it is and what it has cost."""
        cpu_s, seconds = self._meter.read()
        self._cpu_s += cpu_s
        self._seconds += seconds
        return {
            "plan": self._plan,
            "is_repeated": self._is_repeated,
            "cpu_s": round(self._cpu_s, 3),
            "seconds": round(self._seconds, 3),
        }


def _simulate(spec: RunSpec, base: Path, ledger: _Ledger, watch: Watch) -> RunOutcome:
    """Simulate to the end, and return the outcome.

    Raises:
        HeadwaterError: It failed.
    """
    from ...simulation.results import curves
    from ...simulation.run import open_simulation
    from ...simulation.setup import Prepared

    folder = spec.folder(base)
    is_begun = read_plan(folder) is not None
    saved = folder / PARTITION if is_begun else None
    prepared = Prepared.of(spec.plan, saved).shared()
    # 1. All rounds. What is spent is noted after each of them.
    with open_simulation(prepared, folder) as simulation:
        ledger.note()
        last_round = 0

        def on_job(job: Job) -> None:
            nonlocal last_round
            closed = job.round - 1 if job.purpose == "train" else spec.plan.rounds
            if closed > last_round:
                last_round = closed
                ledger.note()
                watch(closed)

        result = simulation.finish(on_job)
        summary = simulation.state.run(simulation.run).summary() or {}
        report = str(simulation.state.run(simulation.run).report_path)
    # 2. What the clients reach with the model that they answer with.
    scope = scope_of(result)
    outcome = ledger.over(
        clients=_scores(summary, scope, prepared.division),
        curve=_curve(result, scope),
        bytes_up=sum(figures["bytes_up"] or 0 for figures in result["rounds"]),
        bytes_down=sum(figures["bytes_down"] or 0 for figures in result["rounds"]),
        partition_hash=result["partition_hash"],
    )
    if outcome.score is None:
        return ledger.failed("no client has samples to be scored on; give more data or fewer clients")
    # 3. A run has all files of a simulation; of a trial its outcome is enough.
    if not spec.is_trial:
        picture = folder / "curves.svg"
        write_atomic(picture, curves(result))
        where = {"folder": str(folder), "report": report, "curves": str(picture)}
        write_json(folder / "result.json", {**result, **where})
    return outcome


def scope_of(result: Mapping[str, Any]) -> str:
    """Return which model clients answer with after the run: their personal one where there is any, else the global."""
    return "personal" if "personal" in result["last"]["acc"] else "global"


def _scores(summary: Mapping[str, Any], scope: str, division: Division) -> tuple[ClientScore, ...]:
    """Return the accuracy of each client that was scored, in the order of the partition."""
    accuracies = {agent["id"]: agent["acc"].get(scope) for agent in summary.get("agents", [])}
    scores = []
    for client, share in division.clients.items():
        accuracy = accuracies.get(client)
        if accuracy is not None:
            scores.append(ClientScore(id=client, samples=len(share.test), accuracy=accuracy))
    return tuple(scores)


def _curve(result: Mapping[str, Any], scope: str) -> tuple[tuple[float, float], ...]:
    """Return (rounds done, mean over clients) of the model that clients answer with."""
    from ...simulation.results import curve

    return tuple(curve(result, scope, "clients_mean"))


def reset(spec: RunSpec, base: Path, before: RunOutcome) -> None:
    """Remove the results of a simulation, so that it runs again from its start; its cost so far stays counted.

    Args:
        spec: The simulation, as it is now.
        base: The folder of the comparison.
        before: What its file holds: a failure, or the outcome of other parameters.
    """
    forget(spec, base)
    begun = RunOutcome(
        plan=spec.plan.model_dump(mode="json", exclude_unset=True),
        is_repeated=before.is_repeated or bool(before.failure),
        cpu_s=before.cpu_s,
        seconds=before.seconds,
    )
    write_json(spec.outcome_path(base), begun.model_dump(mode="json"))


def forget(spec: RunSpec, base: Path) -> None:
    """Remove the folder of a simulation, whose outcome is known or is not wanted any more."""
    # The folder of the comparison is the user's choice, and may be reached by a link.
    remove_folder(base.resolve() / spec.location, SIMULATION_FOLDER)


def forget_method(slug: str, base: Path) -> None:
    """Remove all trials and runs of a method, with their outcomes and costs.

    Args:
        slug: The method's name as a part of a folder's name.
        base: The folder of the comparison.

    Raises:
        UsageError: The folder of a simulation cannot be removed.
    """
    for kind in KINDS:
        for path in (base.resolve() / kind / slug).glob("*"):
            if not _SIMULATION.fullmatch(path.name.removesuffix(".json")):
                continue
            if path.suffix == ".json":
                path.unlink()
            elif not remove_folder(path, SIMULATION_FOLDER):
                raise UsageError(f"{path}: cannot be removed to run again (see the warning); remove it, or {_OR_ELSE}")

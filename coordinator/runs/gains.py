"""What each step of a federation has brought its devices: alone, the first run, the run after it, on equal footing.

Only devices count that have figures in every step, all of them on as many held-out samples: otherwise a step would gain
or lose by the devices that happen to be in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from edge_agent.core.errors import UsageError

from ..state.noise import Compared, Gain, classify_mean_gain
from ..state.run_lines import AgentLine
from ..text import counted, listed
from .run_summary import RunSummary

ALONE = "alone"
"""The name of the first step: each device with the best model that it fits alone."""


@dataclass(frozen=True)
class NamedRun:
    """A finished run, and the name by which the user has asked for it."""

    name: str
    summary: RunSummary
    is_simulated: bool = False


@dataclass(frozen=True)
class GainOverStep:
    """What a step brings over the one before it."""

    mean: float
    """Mean difference of the accuracy over devices, -1..1."""

    verdict: Gain
    """Whether the mean difference is more than noise."""

    better: int
    """Devices that the step makes better by more than noise."""

    as_good: int
    worse: int

    def to_json(self) -> dict[str, Any]:
        """Return the gain as ``--json`` has it."""
        return {**asdict(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class Step:
    """One step, and the accuracy that devices reach with it."""

    name: str
    method: str
    """Of the run; empty for devices alone."""

    rounds: int
    accuracy: float
    """Mean over devices, 0..1: acc.personal of the run, or acc.local."""

    gain: GainOverStep | None
    """None: it is the first step."""

    bytes_each: float
    """Mean bytes that a device has sent and received."""

    seconds: float
    """Of the run."""

    is_simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the step as ``--json`` has it."""
        return {**vars(self), "gain": None if self.gain is None else self.gain.to_json()}


@dataclass(frozen=True)
class Way:
    """The steps in order, and the devices that they are measured on."""

    steps: tuple[Step, ...]
    best: Step
    """The first step that no later one beats by more than noise."""

    devices: tuple[str, ...]
    left_out: tuple[str, ...]
    """Devices without figures in every step, or with other held-out samples in one of them."""

    def to_json(self) -> dict[str, Any]:
        """Return the way as ``--json`` has it."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "best": self.best.name,
            "devices": [*self.devices],
            "left_out": [*self.left_out],
        }


def compare_runs(runs: Sequence[NamedRun]) -> Way:
    """Return what each run brings the devices that all of them have, over the run before it; first of all: alone.

    Raises:
        UsageError: No device has figures in every run, on as many held-out samples.
    """
    # 1. The devices that can be compared.
    of_runs = [{agent.id: agent for agent in run.summary.agents if _has_figures(agent)} for run in runs]
    everywhere = set.intersection(*(set(agents) for agents in of_runs))
    devices = sorted(device for device in everywhere if len({agents[device].support for agents in of_runs}) == 1)
    if not devices:
        raise UsageError(
            f"no device has acc.local and acc.personal in all of {listed([run.name for run in runs])}, on as many "
            "held-out samples; compare runs of the same devices with the same samples"
        )
    samples = [of_runs[0][device].support or 0 for device in devices]
    # 2. What every device reaches alone, and then with each run. A step is the best one as long as no later one is
    # better by more than noise: the earlier one costs less.
    before = [_accuracy(of_runs[0][device], "local") for device in devices]
    best_reached = before
    best = Step(ALONE, "", 0, fmean(before), None, 0.0, 0.0)
    steps = [best]
    for run, agents in zip(runs, of_runs, strict=True):
        members = [agents[device] for device in devices]
        reached = [_accuracy(agent, "personal") for agent in members]
        traffic = fmean(agent.bytes_up + agent.bytes_down for agent in members)
        step = Step(
            run.name,
            run.summary.method or "",
            run.summary.rounds,
            fmean(reached),
            _gain(before, reached, samples),
            traffic,
            run.summary.seconds,
            run.is_simulated,
        )
        if _gain(best_reached, reached, samples).verdict is Gain.ABOVE:
            best = step
            best_reached = reached
        steps.append(step)
        before = reached
    seen = {agent.id for run in runs for agent in run.summary.agents}
    return Way(tuple(steps), best, tuple(devices), tuple(sorted(seen - set(devices))))


def _has_figures(agent: AgentLine) -> bool:
    """Return whether a device reports what it reaches alone and with its personal model, and on how many samples."""
    return bool(agent.support) and agent.acc.get("local") is not None and agent.acc.get("personal") is not None


def _accuracy(agent: AgentLine, scope: str) -> float:
    """Return an accuracy of a device that has figures, 0..1."""
    return float(agent.acc[scope] or 0.0)


def _gain(before: Sequence[float], reached: Sequence[float], samples: Sequence[int]) -> GainOverStep:
    """Return what devices gain from the accuracies before to those that they reach, each on so many samples."""
    compared = [Compared(*figures) for figures in zip(before, reached, samples, strict=True)]
    verdicts = [classify_mean_gain([device]) for device in compared]
    return GainOverStep(
        fmean(reached) - fmean(before),
        classify_mean_gain(compared),
        verdicts.count(Gain.ABOVE),
        verdicts.count(Gain.WITHIN),
        verdicts.count(Gain.BELOW),
    )


def describe_way(way: Way) -> Iterator[str]:
    """Yield what the table of the steps means, one sentence for each step, and which one to stay with."""
    for earlier, step in zip(way.steps, way.steps[1:], strict=False):
        if step.gain is not None:
            yield _describe_step(step, step.gain, earlier)
    yield _describe_best(way.best)
    if way.left_out:
        yield (
            f"Not compared: {listed(way.left_out)}; figures are missing in one of the steps, or are of other held-out "
            "samples."
        )


def _describe_step(step: Step, gain: GainOverStep, earlier: Step) -> str:
    """Return whether a step pays."""
    begin = f"{step.name} ({step.method}, {counted(step.rounds, 'round')})"
    points = f"{100 * gain.mean:+.1f} points against {earlier.name}"
    if gain.verdict is Gain.ABOVE:
        return f"{begin} pays: {points}, more than noise."
    if gain.verdict is Gain.BELOW:
        return f"{begin} does harm: {points}, more than noise."
    return f"{begin} cannot be told from the step before: {points}, within noise."


def _describe_best(best: Step) -> str:
    """Return which step to stay with, and how to go on from it."""
    if best.name == ALONE:
        return "No run beats what the devices reach alone by more than noise; the page of a run says what to try next."
    if best.is_simulated:
        return f"Stay with {best.name}: no later step is better by more than noise."
    return (
        f"Stay with {best.name}: no later step is better by more than noise. 'headwater release create {best.name}' "
        f"hands its bundle out, and 'headwater run --from {best.name}' goes on from it."
    )

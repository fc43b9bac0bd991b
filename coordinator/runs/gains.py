"""The gain of each run of a federation over the step before it: first each device alone, then one run after another.

All steps are compared on the same devices: those that report an accuracy in every step, on the same number of held-out
samples. Otherwise a step would gain or lose by the devices that happen to be in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from edge_agent.core.errors import UsageError

from ..state.noise import Compared, Gain, classify_mean_gain
from ..state.run_lines import AgentLine
from ..text import counted, listed
from .run_summary import RunSummary

ALONE = "alone"
"""Name of the first step: each device with the best model that it fits alone."""


@dataclass(frozen=True)
class NamedRun:
    """A finished run, with the name that the user has given for it."""

    name: str
    summary: RunSummary
    is_simulated: bool = False


@dataclass(frozen=True)
class GainOverStep:
    """The gain of a step over the one before it."""

    mean: float
    """Mean over devices of the difference in accuracy, -1..1."""

    verdict: Gain
    """Whether the mean difference is more than noise."""

    better: int
    """Number of devices whose accuracy rises by more than noise."""

    as_good: int
    """Number of devices whose accuracy changes within noise."""

    worse: int
    """Number of devices whose accuracy falls by more than noise."""

    def to_json(self) -> dict[str, Any]:
        """Return the gain as ``--json`` prints it."""
        return {**asdict(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class Step:
    """A step: the devices alone, or a run, with the accuracy that devices reach in it."""

    name: str
    accuracy: float
    """Mean over devices, 0..1: acc.personal of the run, or acc.local of the devices alone."""

    method: str = ""
    """Method of the run; empty for the devices alone."""

    rounds: int = 0
    gain: GainOverStep | None = None
    """Gain over the step before; None for the first step."""

    bytes_each: float = 0.0
    """Bytes that a device has sent and received, in the mean over devices."""

    seconds: float = 0.0
    """Duration of the run."""

    is_simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the step as ``--json`` prints it."""
        gain = None if self.gain is None else self.gain.to_json()
        return {**vars(self), "gain": gain}


@dataclass(frozen=True)
class Comparison:
    """The steps in their order, and the devices that they are compared on."""

    steps: tuple[Step, ...]
    best: Step
    """The first step that no later one beats by more than noise."""

    devices: tuple[str, ...]
    left_out: tuple[str, ...]
    """Devices that cannot be compared, because an accuracy is missing or the number of held-out samples has changed."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as ``--json`` prints it."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "best": self.best.name,
            "devices": [*self.devices],
            "left_out": [*self.left_out],
        }


def compare_runs(runs: Sequence[NamedRun]) -> Comparison:
    """Compare runs in their order, on the devices that all of them have; the first step is each device alone.

    Raises:
        UsageError: No device has accuracies in every run, on the same number of held-out samples.
    """
    # 1. The devices that can be compared.
    lines_of_runs = [_comparable_lines(run.summary) for run in runs]
    devices = _devices_in_all(lines_of_runs)
    if not devices:
        raise UsageError(
            f"no device has acc.local and acc.personal in all of {listed([run.name for run in runs])}, on as many "
            "held-out samples; compare runs of the same devices with the same samples"
        )
    # 2. The first step: what every device reaches alone.
    samples = [lines_of_runs[0][device].support or 0 for device in devices]
    before = [_accuracy(lines_of_runs[0][device], "local") for device in devices]
    best = Step(ALONE, fmean(before))
    best_accuracies = before
    steps = [best]
    # 3. Each run. An earlier step costs less, so a later one is the best only if it is better by more than noise.
    for run, lines in zip(runs, lines_of_runs, strict=True):
        members = [lines[device] for device in devices]
        accuracies = [_accuracy(line, "personal") for line in members]
        step = _step_of(run, members, _gain(before, accuracies, samples))
        if _gain(best_accuracies, accuracies, samples).verdict is Gain.ABOVE:
            best = step
            best_accuracies = accuracies
        steps.append(step)
        before = accuracies
    # 4. The devices that were left out are named, so that nobody takes the means for those of the whole fleet.
    seen = {line.id for run in runs for line in run.summary.agents}
    left_out = sorted(seen - set(devices))
    return Comparison(tuple(steps), best, tuple(devices), tuple(left_out))


def _step_of(run: NamedRun, members: Sequence[AgentLine], gain: GainOverStep) -> Step:
    """Return a run as a step: the mean accuracy of these devices, what they gain by it, and what it costs them."""
    return Step(
        name=run.name,
        accuracy=fmean(_accuracy(line, "personal") for line in members),
        method=run.summary.method or "",
        rounds=run.summary.rounds,
        gain=gain,
        bytes_each=fmean(line.bytes_up + line.bytes_down for line in members),
        seconds=run.summary.seconds,
        is_simulated=run.is_simulated,
    )


def _comparable_lines(summary: RunSummary) -> dict[str, AgentLine]:
    """Return device -> its figures, for devices with acc.local, acc.personal and a number of held-out samples."""
    lines: dict[str, AgentLine] = {}
    for line in summary.agents:
        has_accuracies = line.acc.get("local") is not None and line.acc.get("personal") is not None
        if has_accuracies and line.support:
            lines[line.id] = line
    return lines


def _devices_in_all(lines_of_runs: Sequence[Mapping[str, AgentLine]]) -> list[str]:
    """Return the devices that have figures in all runs, on the same number of held-out samples, by name."""
    devices = []
    for device in sorted(set.intersection(*map(set, lines_of_runs))):
        supports = {lines[device].support for lines in lines_of_runs}
        if len(supports) == 1:
            devices.append(device)
    return devices


def _accuracy(line: AgentLine, scope: str) -> float:
    """Return an accuracy of a device that reports it, 0..1."""
    return float(line.acc[scope] or 0.0)


def _gain(before: Sequence[float], after: Sequence[float], samples: Sequence[int]) -> GainOverStep:
    """Return the gain of devices whose accuracies have changed.

    Args:
        before: Accuracy of each device in the earlier step, 0..1.
        after: Accuracy of each device in the later step, 0..1.
        samples: Number of held-out samples of each device.
    """
    compared = [Compared(*figures) for figures in zip(before, after, samples, strict=True)]
    verdicts = [classify_mean_gain([device]) for device in compared]
    return GainOverStep(
        mean=fmean(after) - fmean(before),
        verdict=classify_mean_gain(compared),
        better=verdicts.count(Gain.ABOVE),
        as_good=verdicts.count(Gain.WITHIN),
        worse=verdicts.count(Gain.BELOW),
    )


def describe_comparison(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence on each step, then which step to stay with, then which devices were not compared."""
    for earlier, step in pairwise(comparison.steps):
        if step.gain is not None:
            yield _describe_step(step, step.gain, earlier)
    yield _describe_best(comparison.best)
    if comparison.left_out:
        yield (
            f"Not compared: {listed(comparison.left_out)}; an accuracy is missing in one of the steps, or the number "
            "of held-out samples differs."
        )


def _describe_step(step: Step, gain: GainOverStep, earlier: Step) -> str:
    """Return a sentence on whether a step is better than the one before by more than noise."""
    run = f"{step.name} ({step.method}, {counted(step.rounds, 'round')})"
    points = f"{100 * gain.mean:+.1f} points against {earlier.name}"
    if gain.verdict is Gain.ABOVE:
        return f"{run} pays: {points}, more than noise."
    if gain.verdict is Gain.BELOW:
        return f"{run} does harm: {points}, more than noise."
    return f"{run} cannot be told from the step before: {points}, within noise."


def _describe_best(best: Step) -> str:
    """Return a sentence on which step to stay with, and how to release it and continue from it."""
    if best.name == ALONE:
        return "No run beats what the devices reach alone by more than noise; the page of a run says what to try next."
    if best.is_simulated:
        return f"Stay with {best.name}: no later step is better by more than noise."
    return (
        f"Stay with {best.name}: no later step is better by more than noise. 'headwater release create {best.name}' "
        f"releases its bundle, and 'headwater run --from {best.name}' continues from its encoder."
    )

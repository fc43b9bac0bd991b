"""Two results on the same test samples, client by client: the mean difference, its interval, and a test.

The mean of a method over clients varies from one choice of clients to the next, and the clients are the same in both
results, so what is judged is the mean of the differences of each client. It counts as not distinguishable from 0 below
two standard errors. The interval is Student's; the test does not assume a distribution: the sign test over clients, or,
where fewer than `LEAST_CLIENTS` differ, McNemar's over their test samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edge_agent.core.errors import DataError, UsageError

from ...estimates import CONFIDENCE, Estimate, is_distinguishable
from ...text import counted
from ..figures import Summary
from .run_folder import RunFolder
from .tables import ShownTable, cut, data_frame, joined, name_of, share, spread_out

if TYPE_CHECKING:
    import pandas as pd

    from .restored import TestAnswers


LEAST_CLIENTS = 6
"""Clients that have to differ for a sign test: of five, all in one direction, it would be 0.0625 at best."""

TestName = Literal["sign test over clients", "McNemar's test over test samples"]


@dataclass(frozen=True)
class Compared:
    """What is compared of a result.

    Attributes:
        summary: The figures of ``result.json``.
        accuracies: Client -> accuracy (0..1) of the model that it answers with; None: it has no test samples.
        run: The folder of the run, with its models and samples.
    """

    summary: Summary
    accuracies: Mapping[str, float | None]
    run: RunFolder


@dataclass(frozen=True)
class Difference:
    """One client in both results: accuracies 0..1 on its own test samples."""

    client: str
    first: float
    second: float

    @property
    def gain(self) -> float:
        """How much more the first result has; negative: less."""
        return self.first - self.second


@dataclass(frozen=True)
class Test:
    """An exact test of "neither is better": how many cases speak for each side, and the two-sided p value, 0..1."""

    name: TestName
    first: int
    second: int
    p: float

    __test__ = False  # pytest collects classes of this name

    @classmethod
    def of(cls, name: TestName, first: int, second: int) -> Test:
        """Return the test for so many cases in which the first is better, and the second."""
        from scipy.stats import binomtest

        p = float(binomtest(first, first + second).pvalue) if first + second else 1.0
        return cls(name, first, second, p)


@dataclass(frozen=True, repr=False)
class PairedComparison:
    """How much more accurate the clients of one result are than those of another, on the same test samples.

    Attributes:
        names: What each of the two is called.
        clients: The clients with accuracies in both.
        test: The test; None: models and samples, which McNemar's test needs, are not there any more.
        rounds: The rounds that each of the two has done.
    """

    names: tuple[str, str]
    clients: tuple[Difference, ...]
    test: Test | None
    rounds: tuple[int, int]

    @property
    def estimate(self) -> Estimate:
        """The mean over clients of the first accuracy minus the second, -1..1, with its spread over clients."""
        return Estimate.from_values([client.gain for client in self.clients])

    @property
    def mean(self) -> float:
        """Mean over clients of the first accuracy minus the second, -1..1."""
        return self.estimate.mean

    @property
    def standard_error(self) -> float | None:
        """Standard error of that mean; None: there is one client."""
        return self.estimate.standard_error

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of that mean; None: there is one client."""
        estimate = self.estimate
        if estimate.low is None or estimate.high is None:
            return None
        return estimate.low, estimate.high

    @property
    def is_distinguishable(self) -> bool:
        """Whether the mean is at least two standard errors from 0; of one client, whether its test has p < 0.05."""
        by_errors = is_distinguishable(self.estimate)
        if by_errors is None:
            return self.test is not None and self.test.p < 1 - CONFIDENCE
        return by_errors

    @property
    def verdict(self) -> str:
        """What follows, in one sentence."""
        if not self.is_distinguishable:
            return "not distinguishable"
        better, worse = self.names if self.mean > 0 else self.names[::-1]
        return f"{better} is better than {worse}"

    def to_pandas(self) -> pd.DataFrame:
        """Return one row for each client: both accuracies and their difference.

        Raises:
            MissingCapability: pandas is not installed.
        """

        def make(pd: Any) -> pd.DataFrame:
            rows = [(one.client, one.first, one.second, one.gain) for one in self.clients]
            return pd.DataFrame(rows, columns=["client", *self.names, "difference"]).set_index("client")

        return data_frame(make, "a table of clients")

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> ShownTable:
        shown = [self.clients[position] for position in spread_out(len(self.clients))]
        rows = [_row_of(client) for client in shown]
        first_mean = fmean(client.first for client in self.clients)
        second_mean = fmean(client.second for client in self.clients)
        rows.append(("mean", share(first_mean), share(second_mean), f"{self.mean:+.4f}"))
        what = f"{counted(len(self.clients), 'client')}, accuracy on the same test samples"
        columns = ("client", *(name_of(name, 20) for name in self.names), "difference")
        return ShownTable(what, columns, tuple(rows), tuple(map(cut, self._notes())))

    def _notes(self) -> Iterator[str]:
        hidden = len(self.clients) - len(spread_out(len(self.clients)))
        if hidden:
            yield f"{hidden} more clients; .to_pandas() has all"
        first_rounds, second_rounds = self.rounds
        if first_rounds != second_rounds:
            yield f"unequal rounds: {self.names[0]} {first_rounds}, {self.names[1]} {second_rounds}"
        interval = self.interval
        if interval is not None:
            low, high = interval
            error = self.standard_error
            reach = f"95 % interval {low:+.4f} to {high:+.4f}"
            yield f"mean difference {self.mean:+.4f}, {reach}, standard error {error:.4f}"
        if self.test is not None:
            cases = f"{self.test.first} to {self.test.second}"
            yield f"{self.test.name}: {cases}, p = {self.test.p:.3g}"
        else:
            yield "no test: McNemar's needs the models and samples of both runs, which are not all there any more"
        yield self.verdict


def compare(first: Compared, second: Compared) -> PairedComparison:
    """Compare the clients of two results.

    Raises:
        UsageError: They are of different tasks, partitions or test samples.
    """
    _check_same(first, second)
    clients = []
    for name, first_accuracy in first.accuracies.items():
        second_accuracy = second.accuracies.get(name)
        if first_accuracy is not None and second_accuracy is not None:
            clients.append(Difference(name, first_accuracy, second_accuracy))
    if not clients:
        raise UsageError("compare: no client has test samples in both results; give them some (test_fraction)")
    names = _names_of(first, second)
    better = sum(client.gain > 0 for client in clients)
    worse = sum(client.gain < 0 for client in clients)
    test: Test | None
    if better + worse >= LEAST_CLIENTS:
        test = Test.of("sign test over clients", better, worse)
    else:
        test = _mcnemar(first, second, clients)
    rounds = (first.summary["last"]["rounds_done"], second.summary["last"]["rounds_done"])
    return PairedComparison(names, tuple(clients), test, rounds)


def _mcnemar(first: Compared, second: Compared, clients: list[Difference]) -> Test | None:
    """Return McNemar's test over the test samples of these clients; None: models or data are not there any more."""
    if not (first.run.path.is_dir() and second.run.path.is_dir()):
        return None
    try:
        first_run = first.run.restored()
        second_run = second.run.restored()
    except DataError:
        return None
    # The test looks at the samples that one model alone answers right.
    only_first = 0
    only_second = 0
    for difference in clients:
        name = difference.client
        if name in first_run.without_model or name in second_run.without_model:
            continue
        first_is_right = _is_right(first_run.answers_of(name))
        second_is_right = _is_right(second_run.answers_of(name))
        only_first += int(np.sum(first_is_right & ~second_is_right))
        only_second += int(np.sum(second_is_right & ~first_is_right))
    return Test.of("McNemar's test over test samples", only_first, only_second)


def _row_of(client: Difference) -> tuple[str, ...]:
    """Return what the table shows of a client."""
    return name_of(client.client), share(client.first), share(client.second), f"{client.gain:+.4f}"


def _is_right(answers: TestAnswers) -> np.ndarray:
    """Return which test samples a model answers right (n,) bool."""
    is_right: np.ndarray = answers.labels == answers.answers
    return is_right


def _names_of(first: Compared, second: Compared) -> tuple[str, str]:
    """Return what tells the two apart: their methods, else their own names, else a parameter, else their order."""
    ours = first.summary
    theirs = second.summary
    method = ours["method"]
    if method != theirs["method"]:
        return method, theirs["method"]
    run_names = (ours.get("name", ""), theirs.get("name", ""))
    if all(run_names) and run_names[0] != run_names[1]:
        return run_names
    values = ours["params"]
    other_values = theirs["params"]
    differing = [name for name in {**values, **other_values} if values.get(name) != other_values.get(name)]
    if len(differing) == 1:
        name = differing[0]
        return f"{name}={values.get(name)}", f"{name}={other_values.get(name)}"
    return f"{method} (first)", f"{method} (second)"


def _check_same(first: Compared, second: Compared) -> None:
    """Check that the accuracies of both results are of the same samples.

    Raises:
        UsageError: They are not; the message says all that differs.
    """
    mistakes = []
    ours = first.summary
    theirs = second.summary
    if ours["clients"] != theirs["clients"]:
        mistakes.append(f"clients: {ours['clients']} and {theirs['clients']}")
    # Results of earlier versions do not say it.
    scored = ours.get("scored_on")
    other_scored = theirs.get("scored_on")
    if scored != other_scored:
        mistakes.append(f"samples that are scored: {scored} and {other_scored}")
    tasks = [result.summary["task"] for result in (first, second)]
    classes = [task.get("class_names") for task in tasks]
    if classes[0] != classes[1]:
        mistakes.append(f"classes: {_shown(classes[0])} and {_shown(classes[1])}")
    # How inputs are normalised or resized is part of a method's own preparation.
    shapes = [{name: task["input"].get(name) for name in _SHAPE if name in task["input"]} for task in tasks]
    if shapes[0] != shapes[1]:
        mistakes.append(f"inputs: {_shown(shapes[0])} and {_shown(shapes[1])}")
    hashes = [str(result.summary["partition_hash"]) for result in (first, second)]
    if hashes[0] != hashes[1]:
        mistakes.append(f"partition: {_partition(first)} and {_partition(second)} give clients other samples")
    if not mistakes and first.summary["data"] != second.summary["data"]:
        mistakes.extend(_other_samples(first, second))
    if mistakes:
        raise UsageError(
            f"compare: the results are not of the same test samples ({'; '.join(mistakes)}); simulate both with the "
            "same data, partition and seed"
        )


_SHAPE = ("kind", "height", "width", "channels", "length")
"""Fields of an input that say what it is."""


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} ({joined([str(one) for one in value])})"
    return cut(str(value))


def _partition(result: Compared) -> str:
    summary = result.summary
    return f"{name_of(summary['partition'])} of seed {summary['seed']} (hash {summary['partition_hash'][:8]})"


def _other_samples(first: Compared, second: Compared) -> Iterator[str]:
    """Yield why the samples behind two names of data are not, or may not be, the same.

    The partition has a hash of labels and rows; only the samples themselves tell whether their inputs are equal.
    """
    data = [joined([str(source) for source in result.summary["data"]], 2) for result in (first, second)]
    runs = first.run, second.run
    missing = [str(run.path) for run in runs if not run.path.is_dir()]
    if missing:
        yield f"data: {data[0]} and {data[1]}, whose samples cannot be compared without {' and '.join(missing)}"
        return
    first_run = first.run.restored()
    second_run = second.run.restored()
    second_clients = second_run.prepared.division.clients
    common = [name for name in first_run.prepared.division.clients if name in second_clients]
    differing = [name for name in common if first_run.digest_of_tests(name) != second_run.digest_of_tests(name)]
    if differing:
        yield f"data: {data[0]} and {data[1]}: other test samples of {joined(differing)}"

"""What the runs of a comparison say: means over seeds, paired differences with intervals, hurt clients, ranks, costs.

Accuracies are shares, 0..1; differences are of shares. The rules are these:

- A client without test samples counts nowhere. The **client mean** of a run is the mean over its clients, the **pooled
  mean** that over all test samples, the **worst tenth** the mean of the lowest tenth of the clients, rounded up. Each
  figure of a row is its mean over seeds; its spread is the standard deviation over seeds (n - 1).
- A **difference** is paired: the client mean of a row minus that of another row with the same seed, over the seeds that
  both have. Its interval is Student's, 95 %, with n - 1 degrees of freedom. Below two standard errors it is **not
  distinguishable** from none. Of one pair there is neither interval nor verdict.
- The **best** row has the highest client mean among those that lack no seed; where all lack one, among all.
- A client is **hurt** where it loses against the baseline by more than chance explains. Where the clients of all seeds
  are the same (one partition), its differences over the seeds decide: their mean lies below minus two standard errors.
  Where each seed has a partition, and so clients, of its own, or where there is one seed, its test samples decide:
  the difference of the two shares of right answers lies below minus two standard errors, both by Agresti and Caffo (one
  right and one wrong answer are added to each share, so that few samples prove little). Beside it stands the plain
  share of clients with a lower accuracy, which chance alone brings near one half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

from edge_agent.core.worst_tenth import mean_of_worst_tenth

from ...estimates import ENOUGH_ERRORS, EXACT, Estimate, is_distinguishable
from ..footing import SharedFooting
from .records import ClientScore, Comparison, MethodRecord, SeedRun

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class PairedDifference:
    """A row's client mean minus another row's, paired over the seeds that both have."""

    other: str
    """The name of the other row."""

    seeds: tuple[int, ...]
    """The seeds that both rows have."""

    estimate: Estimate
    is_distinguishable: bool | None
    """Whether it is two standard errors or more; None for one pair."""

    p: float | None
    """Two-sided p of Student's paired test; None for one pair, and where all pairs have the same difference."""

    p_holm: float | None = None
    """``p`` after Holm's correction for all rows that are compared with the same one."""


class HurtRule(Enum):
    """What decides whether a client is hurt."""

    SEEDS = "seeds"
    """Its differences over the seeds, which all have the same clients."""

    TEST_SAMPLES = "test samples"
    """Its test samples in one seed: seeds have clients of their own, or there is one seed."""


@dataclass(frozen=True)
class HurtClients:
    """How many clients lose against the baseline."""

    clients: int
    """The clients that were compared; where seeds have clients of their own, those of all seeds."""

    hurt: float
    """Share of them that is hurt by the rule."""

    lower: float
    """Share of them whose accuracy is lower, even if only by chance."""

    rule: HurtRule
    pairs: int
    """The differences that the rule has of each client: the common seeds, or 1."""


@dataclass(frozen=True)
class Costs:
    """What the trials and runs of a row cost."""

    trials: int
    failed_trials: int
    trial_hours: float
    """CPU hours of all trials."""

    run_hours: float
    """CPU hours of the runs, those with default parameters included."""

    trial_wall_hours: float
    """Hours by the clock of all trials, added up."""

    run_wall_hours: float
    """Hours by the clock of the runs, added up, those with default parameters included."""

    bytes_up: float | None
    """Mean over the row's runs; None where it has none."""

    bytes_down: float | None


@dataclass(frozen=True)
class Tuning:
    """What tuning was worth to a row."""

    mean: Estimate | None
    """Client mean of the runs with default parameters; None where there are none."""

    rank: int | None
    """Rank among the rows with default parameters."""

    worth: PairedDifference | None
    """Tuned minus default; None where one of them is missing, and where tuning has kept the defaults."""

    has_kept_defaults: bool
    """Whether the row's runs have the defaults, so that there is no difference to measure."""


@dataclass(frozen=True)
class Failure:
    """A trial without a result, or runs of a row that have none for the same reason."""

    row: str
    run: str
    """Which trial or which runs, such as ``seeds 0, 1``."""

    reason: str
    count: int = 1
    """The number of trials or runs."""

    is_pending: bool = False
    """Whether nothing has failed: the runs are still to be made."""


@dataclass(frozen=True)
class RowStatistics:
    """The figures of a method's row; None where it has no run to take them from."""

    name: str
    method: str
    seeds: tuple[int, ...]
    """The seeds that it has results of."""

    missing_seeds: tuple[int, ...]
    """The seeds of the comparison that it has no results of."""

    client_mean: Estimate | None
    pooled_mean: Estimate | None
    worst_tenth: Estimate | None
    rank: int | None
    """By client mean; 1 is best, equal means have the same rank."""

    mean_rank: float | None
    """Mean of its ranks within each seed that all rows have; None where there is no such seed."""

    to_best: PairedDifference | None
    """None for the best row itself, and where the two have no seed in common."""

    to_baseline: PairedDifference | None
    hurt: HurtClients | None
    costs: Costs
    tuning: Tuning
    differing: Mapping[str, str]
    """What it rests on other than most rows do: aspect -> what this row has."""


@dataclass(frozen=True)
class ComparisonStatistics:
    """All figures of a comparison, rows from best to worst."""

    rows: tuple[RowStatistics, ...]
    best: str | None
    baseline: str | None
    """Name of the row that says which clients are hurt; None where the comparison has no such row."""

    hurt_rule: HurtRule
    has_tuning: bool
    """Whether there are runs with default parameters to compare with."""

    footing: SharedFooting
    """What the rows that state it rest on."""

    failures: tuple[Failure, ...]
    pending_runs: int
    """The runs that are still to be made, those with default parameters included."""


def compute_statistics(comparison: Comparison) -> ComparisonStatistics:
    """Return all figures of a comparison; rows without results come last."""
    # 1. The client means of each row by seed, which ranks and differences are made of.
    means = {record.name: _client_means(successful_runs(record.runs)) for record in comparison.methods}
    ranks = rank_means(means)
    mean_ranks = mean_ranks_within_seeds(means)
    best = _best(means, comparison.seeds)
    baseline = _baseline(comparison)
    # 2. The differences of all rows to the same row, with a correction for their number.
    to_best = _differences_to(best, means)
    baseline_name = None
    if baseline is not None:
        baseline_name = baseline.name
    to_baseline = _differences_to(baseline_name, means)
    # 3. The same of the runs with default parameters, where such were made: the rows that tuning left at their defaults
    #    alone rank nothing.
    has_tuning = any(record.untuned for record in comparison.methods)
    default_means = {}
    for record in comparison.methods:
        default_means[record.name] = _client_means(default_runs(record)) if has_tuning else {}
    default_ranks = rank_means(default_means)
    # 4. Clients against the baseline, and what rows rest on.
    rule = hurt_rule(comparison)
    footing = SharedFooting.among({record.name: record.footing for record in comparison.methods if record.footing})
    rows = list[RowStatistics]()
    for record in comparison.methods:
        runs = successful_runs(record.runs)
        hurt = None
        if baseline is not None and baseline.name != record.name:
            hurt = count_hurt_clients(runs, successful_runs(baseline.runs), rule)
        rows.append(
            RowStatistics(
                record.name,
                record.method,
                seeds=tuple(sorted(runs)),
                missing_seeds=tuple(seed for seed in comparison.seeds if seed not in runs),
                client_mean=_over_seeds(means[record.name].values()),
                pooled_mean=_over_seeds(map(pooled_mean, runs.values())),
                worst_tenth=_over_seeds(map(worst_tenth_of, runs.values())),
                rank=ranks.get(record.name),
                mean_rank=mean_ranks.get(record.name),
                to_best=to_best.get(record.name),
                to_baseline=to_baseline.get(record.name),
                hurt=hurt,
                costs=_costs(record),
                tuning=_tuning(record, means[record.name], default_means[record.name], default_ranks),
                differing=footing.differences.get(record.name, {}),
            )
        )
    rows.sort(key=_rank_or_last)
    failures = tuple(_failures(comparison))
    return ComparisonStatistics(
        tuple(rows),
        best,
        baseline_name,
        rule,
        has_tuning=has_tuning,
        footing=footing,
        failures=failures,
        pending_runs=sum(failure.count for failure in failures if failure.is_pending),
    )


# --- figures of one run ----------------------------------------------------------------------------------------------


def scored_clients(run: SeedRun) -> list[ClientScore]:
    """Return the clients of a run that have test samples."""
    return [client for client in run.clients if client.samples > 0]


def successful_runs(runs: Iterable[SeedRun]) -> dict[int, SeedRun]:
    """Return the runs that have results, by seed."""
    return {run.seed: run for run in runs if not run.failure and scored_clients(run)}


def client_mean(run: SeedRun) -> float:
    """Return the mean accuracy over the clients of a run that has results."""
    return fmean(client.accuracy for client in scored_clients(run))


def pooled_mean(run: SeedRun) -> float:
    """Return the mean accuracy over all test samples of a run that has results."""
    clients = scored_clients(run)
    right = math.fsum(client.accuracy * client.samples for client in clients)
    return right / sum(client.samples for client in clients)


def worst_tenth_of(run: SeedRun) -> float:
    """Return the mean accuracy of the worst tenth of the clients of a run that has results."""
    return mean_of_worst_tenth(client.accuracy for client in scored_clients(run))


def default_runs(record: MethodRecord) -> dict[int, SeedRun]:
    """Return the runs of a row with the method's defaults, by seed; where tuning has kept those, its runs."""
    if record.untuned:
        return successful_runs(record.untuned)
    if has_kept_defaults(record):
        return successful_runs(record.runs)
    return {}


def has_kept_defaults(record: MethodRecord) -> bool:
    """Return whether the runs of a row have the method's defaults: trial 0 was chosen, or there were no trials."""
    return record.chosen is None or record.chosen == 0


def _client_means(runs: Mapping[int, SeedRun]) -> dict[int, float]:
    """Return seed -> client mean."""
    return {seed: client_mean(runs[seed]) for seed in sorted(runs)}


def _over_seeds(values: Iterable[float]) -> Estimate | None:
    """Return the estimate of values of seeds; None where there are none."""
    all_values = list(values)
    if not all_values:
        return None
    return Estimate.from_values(all_values)


# --- ranks and differences -------------------------------------------------------------------------------------------


def rank_means(means: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """Return the rank of each row that has results by its mean over seeds: 1 is best, equal means share a rank."""
    by_row = {name: fmean(by_seed.values()) for name, by_seed in means.items() if by_seed}
    ranks: dict[str, int] = {}
    for name, mean in by_row.items():
        better_means = [other for other in by_row.values() if other > mean + EXACT]
        ranks[name] = 1 + len(better_means)
    return ranks


def mean_ranks_within_seeds(means: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the mean of each row's ranks within a seed, over the seeds that all rows with results have.

    Rows that are equal in a seed have the mean of the ranks that they take up. Empty where there is no common seed.
    """
    rows = {name: by_seed for name, by_seed in means.items() if by_seed}
    if not rows:
        return {}
    common_seeds = set.intersection(*(set(by_seed) for by_seed in rows.values()))
    if not common_seeds:
        return {}
    ranks: dict[str, list[float]] = {name: [] for name in rows}
    for seed in common_seeds:
        values = [by_seed[seed] for by_seed in rows.values()]
        for name, by_seed in rows.items():
            ranks[name].append(_rank_among(by_seed[seed], values))
    return {name: fmean(ranks_of_row) for name, ranks_of_row in ranks.items()}


def _rank_among(value: float, values: Sequence[float]) -> float:
    """Return the rank of a value among all, itself included: 1 is highest; equal ones share their mean rank."""
    better = 0
    equal = 0
    for other in values:
        if other - value > EXACT:
            better += 1
        elif abs(other - value) <= EXACT:
            equal += 1
    return better + (equal + 1) / 2


def _rank_or_last(row: RowStatistics) -> float:
    """Return the rank of a row, or infinity where it has no results."""
    return math.inf if row.rank is None else row.rank


def _best(means: Mapping[str, Mapping[int, float]], seeds: Sequence[int]) -> str | None:
    """Return the row of the highest mean among those with all seeds, or among all where each lacks one."""
    with_results = {name: by_seed for name, by_seed in means.items() if by_seed}
    complete = {name: by_seed for name, by_seed in with_results.items() if by_seed.keys() >= set(seeds)}
    candidates = complete or with_results
    if not candidates:
        return None
    return max(candidates, key=lambda name: fmean(candidates[name].values()))


def _baseline(comparison: Comparison) -> MethodRecord | None:
    """Return the row that the comparison calls its baseline, by its name or else by its method."""
    for record in comparison.methods:
        if record.name == comparison.baseline:
            return record
    for record in comparison.methods:
        if record.method == comparison.baseline:
            return record
    return None


def pair_means(name: str, means: Mapping[int, float], others: Mapping[int, float]) -> PairedDifference | None:
    """Return the difference of two rows, paired over the seeds that both have; None where they share none.

    Args:
        name: The name of the other row.
        means: Seed -> client mean of the row.
        others: Seed -> client mean of the other row.
    """
    seeds = tuple(sorted(means.keys() & others.keys()))
    if not seeds:
        return None
    estimate = Estimate.from_values([means[seed] - others[seed] for seed in seeds])
    return PairedDifference(name, seeds, estimate, is_distinguishable(estimate), p=_p_of_no_difference(estimate))


def _p_of_no_difference(estimate: Estimate) -> float | None:
    """Return the two-sided p of Student's test that the mean is 0; None where there is no spread to judge it by."""
    from scipy.stats import t

    error = estimate.standard_error
    if not error:  # one pair, or pairs of equal differences
        return None
    return float(2 * t.sf(abs(estimate.mean) / error, estimate.count - 1))


def _differences_to(name: str | None, means: Mapping[str, Mapping[int, float]]) -> dict[str, PairedDifference]:
    """Return the difference of each other row to one row, with p corrected for their number; empty for no row."""
    if name is None:
        return {}
    differences: dict[str, PairedDifference] = {}
    for row, by_seed in means.items():
        difference = pair_means(name, by_seed, means[name])
        if row != name and difference is not None:
            differences[row] = difference
    uncorrected = {row: difference.p for row, difference in differences.items() if difference.p is not None}
    corrected = correct_by_holm(uncorrected)
    return {row: replace(difference, p_holm=corrected.get(row)) for row, difference in differences.items()}


def correct_by_holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p values after Holm's correction: multiplied by the number of hypotheses that are not yet rejected."""
    corrected: dict[str, float] = {}
    highest = 0.0
    ascending = sorted(p_values, key=p_values.__getitem__)
    for index, name in enumerate(ascending):
        highest = max(highest, min(1.0, (len(p_values) - index) * p_values[name]))
        corrected[name] = highest
    return corrected


# --- clients ---------------------------------------------------------------------------------------------------------


def hurt_rule(comparison: Comparison) -> HurtRule:
    """Return what decides whether a client is hurt: differences over seeds need the same clients in all seeds."""
    all_runs = list[SeedRun]()
    for record in comparison.methods:
        all_runs += successful_runs(record.runs).values()
    if len({run.seed for run in all_runs}) < 2:
        return HurtRule.TEST_SAMPLES
    partitions = {_partition_of(run) for run in all_runs}
    if len(partitions) == 1:
        return HurtRule.SEEDS
    return HurtRule.TEST_SAMPLES


def _partition_of(run: SeedRun) -> object:
    """Return what is equal for two runs of the same partition: its hash, or else the test samples of the clients."""
    if run.partition_hash:
        return run.partition_hash
    return frozenset((client.id, client.samples) for client in run.clients)


def count_hurt_clients(
    runs: Mapping[int, SeedRun], baseline_runs: Mapping[int, SeedRun], rule: HurtRule
) -> HurtClients | None:
    """Return how many clients lose against the baseline; None where the two rows have no client of a seed in common.

    Rows with one common seed are judged by test samples, whatever ``rule`` says of the others.
    """
    cases = client_pairs(runs, baseline_runs)
    if not cases:
        return None
    has_one_pair = len(runs.keys() & baseline_runs.keys()) < 2
    if rule is HurtRule.TEST_SAMPLES or has_one_pair:
        scores = list[tuple[ClientScore, ClientScore]]()
        for pairs in cases.values():
            scores += pairs
        hurt = [score.id for score, baseline in scores if _is_hurt_by_samples(score, baseline)]
        lower = [score.id for score, baseline in scores if score.accuracy < baseline.accuracy - EXACT]
        count = len(scores)
        return HurtClients(count, len(hurt) / count, len(lower) / count, HurtRule.TEST_SAMPLES, 1)
    estimates = {client: Estimate.from_values(_differences(pairs)) for client, pairs in cases.items()}
    hurt = [client for client, estimate in estimates.items() if _is_hurt_over_seeds(estimate)]
    lower = [client for client, estimate in estimates.items() if estimate.mean < -EXACT]
    fewest = min(estimate.count for estimate in estimates.values())
    count = len(estimates)
    return HurtClients(count, len(hurt) / count, len(lower) / count, rule, fewest)


def client_pairs(
    runs: Mapping[int, SeedRun], baseline_runs: Mapping[int, SeedRun]
) -> dict[str, list[tuple[ClientScore, ClientScore]]]:
    """Return client -> its (score, score of the baseline) in each seed in which both rows have it."""
    cases: dict[str, list[tuple[ClientScore, ClientScore]]] = {}
    for seed in sorted(runs.keys() & baseline_runs.keys()):
        baseline = {client.id: client for client in scored_clients(baseline_runs[seed])}
        for client in scored_clients(runs[seed]):
            if client.id in baseline:
                cases.setdefault(client.id, []).append((client, baseline[client.id]))
    return cases


def _differences(pairs: Iterable[tuple[ClientScore, ClientScore]]) -> list[float]:
    """Return how much more accurate a client is than with the baseline, in each seed."""
    return [client.accuracy - baseline.accuracy for client, baseline in pairs]


def _is_hurt_over_seeds(estimate: Estimate) -> bool:
    """Return whether a client's mean difference lies below minus two standard errors; never of one seed."""
    error = estimate.standard_error
    if error is None:
        return False
    return estimate.mean < -max(ENOUGH_ERRORS * error, EXACT)


def _is_hurt_by_samples(client: ClientScore, baseline: ClientScore) -> bool:
    """Return whether a client has lost more than two standard errors of the difference of two shares.

    The shares are those of Agresti and Caffo, with one right and one wrong answer more. That both are of the same test
    samples would make the error smaller, so the rule is on the safe side.
    """
    share = _adjusted_share(client)
    baseline_share = _adjusted_share(baseline)
    variance = share * (1 - share) / (client.samples + 2)
    variance += baseline_share * (1 - baseline_share) / (baseline.samples + 2)
    return share - baseline_share < -ENOUGH_ERRORS * math.sqrt(variance)


def _adjusted_share(client: ClientScore) -> float:
    """Return a client's share of right answers with one right and one wrong answer more."""
    return (client.accuracy * client.samples + 1) / (client.samples + 2)


# --- tuning, costs, failures, footing --------------------------------------------------------------------------------


def _tuning(
    record: MethodRecord, means: Mapping[int, float], defaults: Mapping[int, float], ranks: Mapping[str, int]
) -> Tuning:
    """Return what tuning was worth to a row.

    Args:
        record: The row.
        means: Seed -> client mean with the chosen parameters.
        defaults: Seed -> client mean with the method's defaults.
        ranks: Row -> rank among the rows with default parameters.
    """
    worth = None
    if not has_kept_defaults(record):
        worth = pair_means(record.name, means, defaults)
    return Tuning(_over_seeds(defaults.values()), ranks.get(record.name), worth, has_kept_defaults(record))


def _costs(record: MethodRecord) -> Costs:
    """Return what the trials and runs of a row cost, failed ones included."""
    all_runs = [*record.runs, *record.untuned]
    measured = list(successful_runs(record.runs).values())
    bytes_up = None
    bytes_down = None
    if measured:
        bytes_up = fmean(run.bytes_up for run in measured)
        bytes_down = fmean(run.bytes_down for run in measured)
    return Costs(
        trials=len(record.trials),
        failed_trials=len([trial for trial in record.trials if trial.score is None]),
        trial_hours=math.fsum(trial.cpu_s for trial in record.trials) / SECONDS_PER_HOUR,
        run_hours=math.fsum(run.cpu_s for run in all_runs) / SECONDS_PER_HOUR,
        trial_wall_hours=math.fsum(trial.seconds for trial in record.trials) / SECONDS_PER_HOUR,
        run_wall_hours=math.fsum(run.seconds for run in all_runs) / SECONDS_PER_HOUR,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
    )


PENDING = "not run yet"
"""Reason of a run without a result that nobody has begun."""


def _failures(comparison: Comparison) -> Iterator[Failure]:
    """Yield each trial that has no result, and the runs of each row that have none, and why."""
    for record in comparison.methods:
        yield from _failed_trials(record)
        if comparison.has_untuned or record.untuned:
            yield from _missing_runs(record.name, record.untuned, comparison.seeds, " with defaults")
        yield from _missing_runs(record.name, record.runs, comparison.seeds)


def _failed_trials(record: MethodRecord) -> Iterator[Failure]:
    """Yield the trials of a row without a score."""
    for trial in record.trials:
        if trial.score is None:
            yield Failure(record.name, f"trial {trial.number}", trial.failure or "it has no score")


def _missing_runs(row: str, runs: Sequence[SeedRun], seeds: Sequence[int], which: str = "") -> Iterator[Failure]:
    """Yield the runs of a row without a result, those with the same reason together.

    Args:
        row: The name of the row.
        runs: Its runs that are over.
        seeds: The seeds that it should have.
        which: What follows the seeds where the runs are named.
    """
    results = successful_runs(runs)
    recorded = {run.seed: run for run in runs}
    seeds_by_reason: dict[str, list[int]] = {}
    for seed in seeds:
        if seed in results:
            continue
        reason = PENDING
        if seed in recorded:
            reason = recorded[seed].failure or "no client has test samples"
        seeds_by_reason.setdefault(reason, []).append(seed)
    for reason, missing_seeds in seeds_by_reason.items():
        word = "seed" if len(missing_seeds) == 1 else "seeds"
        run = f"{word} {', '.join(map(str, missing_seeds))}{which}"
        yield Failure(row, run, reason, count=len(missing_seeds), is_pending=missing_seeds[0] not in recorded)

"""What runs of a comparison say: numbers worked out by hand, a second library, and slow twins of each rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from comparison_harness import comparison_of, made_up, row_of, run_of, trials_of
from scipy import stats

from coordinator.estimates import Estimate, chance_of_distinguishing
from coordinator.research.compare.row_statistics import (
    HurtRule,
    compute_statistics,
    correct_by_holm,
    mean_ranks_within_seeds,
    pair_means,
)


def rows_by_name(*rows, **fields):
    return {row.name: row for row in compute_statistics(comparison_of(*rows, **fields)).rows}


def test_means_of_one_run_are_those_worked_out_by_hand():
    """Clients of 10, 20 and 70 samples with 0.5, 0.8 and 0.9: 5 + 16 + 63 of 100 samples; the lowest of three."""
    (row,) = rows_by_name(row_of("local", [run_of(0, [0.5, 0.8, 0.9], [10, 20, 70])])).values()
    assert row.client_mean == Estimate(pytest.approx(2.2 / 3), 1)
    assert row.pooled_mean.mean == pytest.approx(0.84)
    assert row.worst_tenth.mean == 0.5


def test_the_worst_tenth_of_eleven_clients_is_the_mean_of_two():
    (row,) = rows_by_name(row_of("local", [run_of(0, [0.9] * 9 + [0.2, 0.4])])).values()
    assert row.worst_tenth.mean == pytest.approx(0.3)


def test_clients_without_test_samples_count_nowhere():
    (row,) = rows_by_name(row_of("local", [run_of(0, [0.5, 0.0, 0.7], [10, 0, 10])])).values()
    assert row.client_mean.mean == pytest.approx(0.6)
    assert row.worst_tenth.mean == 0.5


def test_a_paired_difference_is_the_one_worked_out_by_hand():
    """Differences 0.01, 0.03, 0.05: mean 0.03, deviation 0.02, error 0.02 / sqrt(3), t of two degrees 4.3027."""
    difference = pair_means("b", {0: 0.51, 1: 0.63, 2: 0.75}, {0: 0.5, 1: 0.6, 2: 0.7})
    error = 0.02 / math.sqrt(3)
    assert difference.estimate.mean == pytest.approx(0.03)
    assert difference.estimate.deviation == pytest.approx(0.02)
    assert difference.estimate.standard_error == pytest.approx(error)
    assert difference.estimate.low == pytest.approx(0.03 - 4.302653 * error)
    assert difference.estimate.high == pytest.approx(0.03 + 4.302653 * error)
    assert difference.is_distinguishable is True, "0.03 are 2.6 standard errors, though the interval holds 0"
    assert difference.estimate.low < 0


@pytest.mark.parametrize("count", [2, 3, 6, 20])
def test_intervals_and_p_are_those_of_scipy(count):
    generator = np.random.default_rng(count)
    ours = generator.normal(0.8, 0.02, count)
    others = generator.normal(0.79, 0.02, count)
    difference = pair_means("b", dict(enumerate(ours)), dict(enumerate(others)))
    test = stats.ttest_rel(ours, others)
    low, high = test.confidence_interval(0.95)
    assert (difference.estimate.low, difference.estimate.high) == pytest.approx((low, high))
    assert difference.p == pytest.approx(test.pvalue)
    mean_interval = stats.t.interval(0.95, count - 1, loc=np.mean(ours), scale=stats.sem(ours))
    estimate = Estimate.from_values(ours.tolist())
    assert (estimate.low, estimate.high) == pytest.approx(mean_interval)


def test_one_pair_has_neither_interval_nor_verdict():
    difference = pair_means("b", {0: 0.9}, {0: 0.5})
    assert difference.is_distinguishable is None
    assert (difference.p, difference.estimate.low, difference.estimate.standard_error) == (None, None, None)


@pytest.mark.parametrize("gain, is_distinguishable", [(0.0, False), (0.1, True), (-0.1, True)])
def test_equal_differences_are_distinguished_without_a_spread(gain, is_distinguishable):
    """0.7 + 0.1 - 0.7 is not 0.1 in binary: differences that are equal but for rounding have no spread."""
    others = {0: 0.7, 1: 0.3, 2: 0.61}
    difference = pair_means("b", {seed: mean + gain for seed, mean in others.items()}, others)
    assert difference.estimate.deviation == 0.0
    assert difference.is_distinguishable is is_distinguishable
    assert difference.p is None


def test_two_standard_errors_decide():
    """Of differences 0 and d the mean is d / 2, and so is its standard error: one error, whatever d is."""
    assert pair_means("b", {0: 0.5, 1: 0.9}, {0: 0.5, 1: 0.5}).is_distinguishable is False
    # Of 1 and 3 the mean is 2 and the error 1.
    assert pair_means("b", {0: 1.0, 1: 3.0}, {0: 0.0, 1: 0.0}).is_distinguishable is True
    assert pair_means("b", {0: 1.0, 1: 3.1}, {0: 0.0, 1: 0.0}).is_distinguishable is False


def test_chance_of_two_standard_errors_is_as_often_as_random_pairs_have_it():
    generator = np.random.default_rng(0)
    differences = generator.normal(size=(40_000, 4))
    errors = differences.std(axis=1, ddof=1) / 2
    share = np.mean(np.abs(differences.mean(axis=1)) >= 2 * errors)
    assert chance_of_distinguishing(4) == pytest.approx(share, abs=0.006)


def holm_by_steps(p_values):
    """Holm's procedure as it was published: for which level each hypothesis is just rejected, found by bisection."""

    def rejected(level):
        names = set()
        for index, name in enumerate(sorted(p_values, key=p_values.get)):
            if p_values[name] > level / (len(p_values) - index):
                break
            names.add(name)
        return names

    results = {}
    for name in p_values:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if name in rejected(middle) else (middle, high)
        results[name] = high
    return results


def test_holms_correction_is_what_the_stepwise_procedure_rejects():
    assert correct_by_holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    generator = np.random.default_rng(1)
    for _ in range(20):
        p_values = {str(index): float(p) for index, p in enumerate(generator.uniform(size=6) ** 2)}
        assert correct_by_holm(p_values) == pytest.approx(holm_by_steps(p_values))


def test_rows_are_paired_over_common_seeds_only():
    """fedavg lacks seed 2, where local was at its worst: 0.6 - 0.5 and 0.8 - 0.6 are left."""
    local = row_of("local", [run_of(0, [0.5]), run_of(1, [0.6]), run_of(2, [0.1])])
    fedavg = row_of("fedavg", [run_of(0, [0.6]), run_of(1, [0.8]), run_of(2, [], failure="killed")])
    statistics = compute_statistics(comparison_of(local, fedavg))
    row = next(row for row in statistics.rows if row.name == "fedavg")
    assert row.to_baseline.seeds == (0, 1)
    assert row.to_baseline.estimate.mean == pytest.approx(0.15)
    assert row.missing_seeds == (2,)
    assert statistics.best == "local", "a row that lacks a seed is not the best: it may lack its worst one"
    assert [(failure.row, failure.run, failure.reason) for failure in statistics.failures] == [
        ("fedavg", "seed 2", "killed")
    ]


def test_ranks_are_those_of_scipy():
    comparison = made_up(methods=5, clients=4, seeds=4)
    means = {
        record.name: {run.seed: float(np.mean([client.accuracy for client in run.clients])) for run in record.runs}
        for record in comparison.methods
    }
    common = sorted(set.intersection(*(set(by_seed) for by_seed in means.values())))
    table = np.array([[by_seed[seed] for by_seed in means.values()] for seed in common])
    expected = dict(zip(means, stats.rankdata(-table, axis=1).mean(axis=0), strict=True))
    assert mean_ranks_within_seeds(means) == pytest.approx(expected)
    overall = [np.mean(list(by_seed.values())) for by_seed in means.values()]
    ranks = dict(zip(means, stats.rankdata(-np.array(overall), method="min"), strict=True))
    assert {row.name: row.rank for row in compute_statistics(comparison).rows} == ranks


def test_equal_rows_share_a_rank():
    rows = rows_by_name(*(row_of(name, [run_of(0, [level])]) for name, level in (("a", 0.5), ("b", 0.7), ("c", 0.7))))
    assert {name: row.rank for name, row in rows.items()} == {"a": 3, "b": 1, "c": 1}
    assert {name: row.mean_rank for name, row in rows.items()} == {"a": 3, "b": 1.5, "c": 1.5}


# --- clients that are hurt -------------------------------------------------------------------------------------------


def test_a_client_is_hurt_by_its_mean_over_seeds_where_seeds_have_the_same_clients():
    """Against 0.5 in both seeds. Of losses a and b the mean is (a + b) / 2, and its standard error half of b - a."""
    local = row_of("local", [run_of(seed, [0.5] * 3) for seed in (0, 1)])
    lost = [run_of(0, [0.4, 0.4, 0.6]), run_of(1, [0.199, 0.15, 0.6])]
    rows = rows_by_name(local, row_of("fedavg", lost))
    assert rows["fedavg"].hurt.rule is HurtRule.SEEDS
    assert (rows["fedavg"].hurt.clients, rows["fedavg"].hurt.pairs) == (3, 2)
    assert rows["fedavg"].hurt.hurt == 0.0, "0.2005 and 0.225 are less than two errors of 0.1005 and 0.125"
    assert rows["fedavg"].hurt.lower == pytest.approx(2 / 3)
    harmed = [run_of(0, [0.4, 0.4, 0.6]), run_of(1, [0.21, 0.39, 0.6])]
    rows = rows_by_name(local, row_of("fedavg", harmed))
    assert rows["fedavg"].hurt.hurt == pytest.approx(2 / 3)
    assert rows["local"].hurt is None


def test_a_row_with_one_common_seed_is_judged_by_test_samples():
    local = row_of("local", [run_of(seed, [0.9], 200) for seed in (0, 1)])
    fedavg = row_of("fedavg", [run_of(0, [0.5], 200), run_of(1, [], failure="killed")])
    hurt = rows_by_name(local, fedavg)["fedavg"].hurt
    assert (hurt.rule, hurt.hurt) == (HurtRule.TEST_SAMPLES, 1.0)


def hurt_by_brute_force(runs, baseline, rule):
    """Both rules once more, by numpy, client for client."""
    differences = {}
    for ours, others in zip(runs, baseline, strict=True):
        for client, other in zip(ours.clients, others.clients, strict=True):
            differences.setdefault(client.id, []).append((client.accuracy, other.accuracy, client.samples))
    if rule is HurtRule.SEEDS:
        values = [np.array([a - b for a, b, _ in pairs]) for pairs in differences.values()]
        hurt = [value.mean() < -2 * value.std(ddof=1) / np.sqrt(len(value)) for value in values]
        return np.mean(hurt), np.mean([value.mean() < 0 for value in values])
    hurt, lower = [], []
    for a, b, n in itertools.chain.from_iterable(differences.values()):
        p, q = (a * n + 1) / (n + 2), (b * n + 1) / (n + 2)
        hurt.append((q - p) / np.sqrt((p - p * p + q - q * q) / (n + 2)) > 2)
        lower.append(a < b)
    return np.mean(hurt), np.mean(lower)


@pytest.mark.parametrize("rule", list(HurtRule))
def test_shares_of_hurt_clients_are_those_of_a_brute_force_twin(rule):
    generator = np.random.default_rng(2)
    samples = [generator.integers(5, 60, 40).tolist() for _ in range(4)]
    if rule is HurtRule.SEEDS:
        samples = [samples[0]] * 4

    def runs(level):
        return [run_of(seed, np.clip(generator.normal(level, 0.15, 40), 0, 1).tolist(), samples[seed])
                for seed in range(4)]  # fmt: skip

    local, fedavg = runs(0.7), runs(0.6)
    row = rows_by_name(row_of("local", local), row_of("fedavg", fedavg))["fedavg"]
    assert row.hurt.rule is rule
    assert (row.hurt.hurt, row.hurt.lower) == pytest.approx(hurt_by_brute_force(fedavg, local, rule))
    assert 0 < row.hurt.hurt < row.hurt.lower < 1, "the case tells the two shares apart"


def test_a_client_of_few_samples_is_not_hurt_by_one_wrong_answer():
    """1 of 1 against 0 of 1: with one right and one wrong answer more 2/3 against 1/3, 0.87 errors apart."""
    local = row_of("local", [run_of(0, [1.0, 1.0], [1, 200])])
    row = rows_by_name(local, row_of("fedavg", [run_of(0, [0.0, 0.0], [1, 200])]))["fedavg"]
    assert row.hurt.hurt == 0.5


def test_partitions_tell_whether_seeds_have_the_same_clients():
    def rule(*hashes):
        runs = [run_of(seed, [0.5, 0.6], partition_hash=value) for seed, value in enumerate(hashes)]
        return compute_statistics(comparison_of(row_of("local", runs))).hurt_rule

    assert rule("a", "a") is HurtRule.SEEDS
    assert rule("a", "b") is HurtRule.TEST_SAMPLES
    assert rule("", "") is HurtRule.SEEDS, "without a hash the samples of each client tell"
    assert rule("a") is HurtRule.TEST_SAMPLES, "one seed"


def test_without_the_baselines_row_nobody_says_who_is_hurt():
    row = rows_by_name(row_of("fedavg", [run_of(0, [0.5])]))["fedavg"]
    assert (row.hurt, row.to_baseline) == (None, None)


def test_seeds_with_other_numbers_of_clients_and_a_run_that_lacks_one():
    """Against numpy and scipy: 3, 5 and 4 clients; fedavg lacks one in seed 1, and all of seed 2, which failed."""
    generator = np.random.default_rng(5)
    samples = [[40, 300, 9], [120, 5, 40, 80, 7], [10, 10, 10, 10]]
    local_levels = [generator.uniform(0.5, 0.9, len(counts)).round(2) for counts in samples]
    fedavg_levels = [generator.uniform(0.2, 0.7, len(counts)).round(2) for counts in samples]
    local = [run_of(seed, local_levels[seed].tolist(), samples[seed], partition_hash=str(seed)) for seed in range(3)]
    names = ["c00", "c01", "c03", "c04"]
    kept = [0, 1, 3, 4]
    fedavg = [
        run_of(0, fedavg_levels[0].tolist(), samples[0], partition_hash="0"),
        run_of(1, fedavg_levels[1][kept].tolist(), np.array(samples[1])[kept].tolist(), clients=names,
               partition_hash="1"),
        run_of(2, [], failure="killed"),
    ]  # fmt: skip
    rows = rows_by_name(row_of("local", local), row_of("fedavg", fedavg))
    means = np.array([fedavg_levels[0].mean(), fedavg_levels[1][kept].mean()])
    others = np.array([local_levels[0].mean(), local_levels[1].mean()])
    test = stats.ttest_rel(means, others)
    difference = rows["fedavg"].to_baseline
    assert difference.seeds == (0, 1)
    assert difference.p == pytest.approx(test.pvalue)
    assert (difference.estimate.low, difference.estimate.high) == pytest.approx(test.confidence_interval(0.95))
    assert rows["fedavg"].client_mean.deviation == pytest.approx(means.std(ddof=1))
    pooled = [np.average(fedavg_levels[0], weights=samples[0]),
              np.average(fedavg_levels[1][kept], weights=np.array(samples[1])[kept])]  # fmt: skip
    assert rows["fedavg"].pooled_mean.mean == pytest.approx(np.mean(pooled))
    assert rows["local"].worst_tenth.mean == pytest.approx(np.mean([levels.min() for levels in local_levels]))
    # The client that one of the two rows lacks is compared nowhere.
    ours = np.concatenate([fedavg_levels[0], fedavg_levels[1][kept]])
    theirs = np.concatenate([local_levels[0], local_levels[1][kept]])
    counts = np.concatenate([samples[0], np.array(samples[1])[kept]])
    p, q = (ours * counts + 1) / (counts + 2), (theirs * counts + 1) / (counts + 2)
    hurt = np.mean((p - q) / np.sqrt((p * (1 - p) + q * (1 - q)) / (counts + 2)) < -2)
    assert rows["fedavg"].hurt.clients == 3 + 4
    assert rows["fedavg"].hurt.hurt == pytest.approx(hurt)
    assert 0 < hurt < 1, "the case tells some from others"


def test_clients_that_are_all_equal_have_no_spread_and_nobody_is_hurt():
    rows = rows_by_name(*(row_of(name, [run_of(seed, [0.8] * 4) for seed in range(2)]) for name in ("local", "fedavg")))
    row = rows["fedavg"]
    assert (row.client_mean.deviation, row.client_mean.low, row.client_mean.high) == pytest.approx((0.0, 0.8, 0.8))
    assert (row.hurt.hurt, row.hurt.lower) == (0.0, 0.0)
    assert (row.rank, rows["local"].rank) == (1, 1)
    (difference,) = (row.to_best or row.to_baseline for row in rows.values() if row.to_best or row.to_baseline)
    assert difference.is_distinguishable is False
    assert difference.p is None


def test_an_accuracy_that_is_no_number_is_no_record():
    with pytest.raises(ValueError, match="accuracy"):
        run_of(0, [math.nan])


# --- tuning, costs, footing ------------------------------------------------------------------------------------------


def test_tuning_is_worth_the_paired_difference_to_the_defaults():
    """a: 0.6, 0.8 tuned and 0.5, 0.5 by default; b keeps its defaults of 0.7, and loses its first rank by tuning."""
    a = row_of("a", [run_of(0, [0.6], params={"lr": 0.1}), run_of(1, [0.9], params={"lr": 0.1})], chosen=1,
               untuned=[run_of(0, [0.5]), run_of(1, [0.5])], trials=trials_of([0.4, 0.6, None]))  # fmt: skip
    b = row_of("b", [run_of(0, [0.7]), run_of(1, [0.7])], chosen=0, trials=trials_of([0.7, 0.6, 0.5]))
    rows = rows_by_name(a, b, trials=3)
    assert rows["a"].tuning.worth.estimate.mean == pytest.approx(0.25)
    assert (rows["a"].rank, rows["a"].tuning.rank) == (1, 2)
    assert (rows["b"].rank, rows["b"].tuning.rank) == (2, 1)
    assert rows["b"].tuning.worth is None
    assert rows["b"].tuning.has_kept_defaults
    assert (rows["a"].costs.trials, rows["a"].costs.failed_trials) == (3, 1)
    assert rows["a"].costs.trial_hours == pytest.approx(3 * 36 / 3600)


def test_rows_that_kept_their_defaults_have_no_default_rank_where_no_defaults_were_run():
    a = row_of("a", [run_of(0, [0.6], params={"lr": 0.1})], chosen=1, trials=trials_of([0.4, 0.6]))
    b = row_of("b", [run_of(0, [0.7])], chosen=0, trials=trials_of([0.7, 0.6]))
    rows = rows_by_name(a, b, trials=2)
    assert (rows["a"].tuning.rank, rows["b"].tuning.rank) == (None, None)
    assert (rows["a"].tuning.mean, rows["b"].tuning.mean) == (None, None)


def test_bytes_are_means_over_runs_that_have_results():
    runs = [run_of(0, [0.5], bytes_up=10, bytes_down=30), run_of(1, [0.5], bytes_up=20, bytes_down=50),
            run_of(2, [], failure="killed", bytes_up=1)]  # fmt: skip
    (row,) = rows_by_name(row_of("local", runs)).values()
    assert (row.costs.bytes_up, row.costs.bytes_down) == (15, 40)


def test_a_row_that_rests_on_something_else_is_marked_with_it():
    footings = [{"optimizer": "SGD"}, {"optimizer": "Adam"}, {"optimizer": "SGD"}, {}]
    rows = [row_of(f"m{index}", [run_of(0, [0.5])], footing=footing) for index, footing in enumerate(footings)]
    differing = [rows_by_name(*rows)[f"m{index}"].differing for index in range(4)]
    assert differing == [{}, {"optimizer": "Adam"}, {}, {}]


def test_rows_without_a_result_come_last_and_disturb_nobody():
    statistics = compute_statistics(comparison_of(
        row_of("broken", [run_of(0, [], failure="diverged")]), row_of("local", [run_of(0, [0.5])]),
    ))  # fmt: skip
    assert [row.name for row in statistics.rows] == ["local", "broken"]
    assert statistics.rows[1].client_mean is None
    assert statistics.rows[1].to_baseline is None

"""The notes below the tables: what figures are, and what to doubt."""

from __future__ import annotations

from collections.abc import Iterator

from ...estimates import CONFIDENCE, chance_of_distinguishing
from ...text import counted, listed, sentence
from .facts import baseline_name, progress_text, tuning_text
from .records import Comparison, MethodRecord
from .row_statistics import (
    ComparisonStatistics,
    HurtRule,
    PairedDifference,
    RowStatistics,
)
from .table_model import FOOTING_TITLE, ONE_PAIR, OTHER_FOOTING, SAME_AS_BEST, SEEDS_MISSING, Note


def notes_of_methods(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield the notes below the table of methods: what its figures are, and what to doubt."""
    baseline = baseline_name(comparison, statistics)
    most = max((len(row.seeds) for row in statistics.rows), default=0)
    # 1. What is still missing.
    progress = progress_text(comparison, statistics)
    if progress:
        yield Note(progress)
    # 2. What the columns are.
    yield Note(
        "Accuracy on each client's own test samples. Client mean: mean over clients; pooled: over test samples; worst "
        f"tenth: over the lowest tenth of clients. {_said_of_spread(most)}"
    )
    if most > 1:
        yield from _notes_on_pairs(baseline, most, statistics)
    # 3. Clients against the baseline.
    if statistics.baseline is None:
        yield Note(f"There is no row '{baseline}', so that nobody can say which clients are hurt.")
    else:
        yield Note(_said_of_hurt(baseline, statistics, most))
    # 4. What makes rows incomparable.
    if any(row.differing for row in statistics.rows):
        yield Note(f"has other settings than the other rows, see the table '{FOOTING_TITLE}'.", OTHER_FOOTING)
    if any(row.missing_seeds for row in statistics.rows):
        yield Note("lacks seeds: means and rank over those that it has, differences over common ones.", SEEDS_MISSING)
    if any(_has_one_pair(row) for row in statistics.rows):
        yield Note("one pair of seeds: no interval, no verdict; clients are judged by their test samples.", ONE_PAIR)
    # 5. Notes on the data and the trials, which the comparison has recorded.
    for text in comparison.notes:
        yield Note(sentence(text))


def _said_of_spread(seeds: int) -> str:
    """Return what the figures of rows are means of, where the row with the most seeds has so many."""
    if seeds == 0:
        return "No seed has a result yet."
    if seeds == 1:
        return "Of one seed, without a spread."
    return f"Mean over {seeds} seeds ± standard deviation over seeds (n - 1)."


def _notes_on_pairs(baseline: str, seeds: int, statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield what the differences between rows of so many seeds are, and how far chance decides them."""
    yield Note(
        f"To best, to {baseline}: difference of client means, paired over seeds, with Student's "
        f"{100 * CONFIDENCE:.0f} % interval."
    )
    chance = 100 * chance_of_distinguishing(seeds)
    yield Note(
        f"not distinguishable from the best: less than two standard errors. With {seeds} seeds chance alone exceeds "
        f"two in {chance:.0f} % of comparisons.",
        SAME_AS_BEST,
    )
    yield from _notes_on_many(statistics)


def notes_of_differences(statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield the notes below the table of paired differences."""
    yield Note("Client means, paired over seeds; intervals and p are Student's and hold for normal differences.")
    yield from _notes_on_many(statistics)


def _notes_on_many(statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield what a reader has to know of many comparisons at once; nothing where there is one or none."""
    count = len([row for row in statistics.rows if row.client_mean is not None]) - 1
    if count < 2:
        return
    yield Note(
        f"{counted(count, 'row')} compared with the same row: intervals and ≈ are not corrected for their number, p by "
        "Holm is. The best row was picked by these numbers, which makes the differences to it look larger."
    )


def _said_of_hurt(baseline: str, statistics: ComparisonStatistics, seeds: int) -> str:
    """Return by which rule clients are hurt, and how often chance alone would make one so."""
    lower = f"Lower: accuracy below that with {baseline}, even if only by chance."
    if statistics.hurt_rule is HurtRule.SEEDS:
        chance = 100 * chance_of_distinguishing(seeds) / 2
        return (
            f"Hurt: a client's mean difference to {baseline} over seeds lies below minus two standard errors; chance "
            f"alone does that to {chance:.0f} % of clients. {lower}"
        )
    return (
        f"Hurt: a client's accuracy in a seed lies more than two standard errors, of its test samples, below that with "
        f"{baseline} (shares by Agresti and Caffo; each seed has clients of its own, or there is one seed). {lower}"
    )


def _has_one_pair(row: RowStatistics) -> bool:
    """Return whether a difference of a row has one pair."""
    return any(difference.is_distinguishable is None for difference in differences_of(row))


def differences_of(row: RowStatistics) -> list[PairedDifference]:
    """Return the differences of a row that there are; one, where the best row is the baseline."""
    if row.to_best is not None and row.to_baseline is not None and row.to_best.other == row.to_baseline.other:
        return [row.to_best]
    return [difference for difference in (row.to_best, row.to_baseline) if difference is not None]


def notes_of_tuning(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[Note]:
    """Yield the notes below the table of what tuning was worth."""
    # 1. The trials, and who has others.
    yield Note(f"{sentence(tuning_text(comparison))} Ranks: by client mean on test samples.")
    yield from _notes_on_trials(comparison)
    # 2. Runs with defaults.
    if not comparison.has_untuned and not statistics.has_tuning:
        yield Note("No runs with defaults were asked for, so that nothing says what tuning was worth.")
        return
    if not statistics.has_tuning:
        yield Note("Runs with defaults were asked for, and none of them has a result yet.")
        return
    yield Note("Worth: tuned minus defaults, paired over seeds; none where the defaults were kept or runs are missing.")
    unknown_rows = [row.name for row in statistics.rows if row.tuning.mean is None]
    if unknown_rows:
        yield Note(f"Ranks with defaults leave out {listed(unknown_rows)}.")


def _notes_on_trials(comparison: Comparison) -> Iterator[Note]:
    """Yield which methods still have trials under way, which have more or fewer than the others, and why."""
    trials = comparison.trials
    unfinished = []
    unequal = []
    for record in comparison.methods:
        count = len(record.trials)
        if _is_searching(record, trials):
            unfinished.append(f"{record.name} {count} of {trials}")
        elif count != trials:
            unequal.append(f"{record.name} {count}")
    if unfinished:
        yield Note(f"Trials under way: {listed(unfinished)}.")
    if unequal:
        yield Note(f"Other numbers of trials: {listed(unequal)}. Rows with fewer are at a disadvantage.")
    for record in comparison.methods:
        if record.note:
            yield Note(sentence(f"{record.name}: {record.note}"))


def _is_searching(record: MethodRecord, trials: int) -> bool:
    """Return whether the search of a row, of so many trials, is not over.

    At its end a trial is chosen, or all runs have failed.
    """
    return trials > 0 and record.chosen is None and not record.runs

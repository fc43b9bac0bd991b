"""What a comparison shows, in a few sentences for a terminal and the head of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...estimates import ENOUGH_SEEDS, describe_chance
from ...report.charts import clean, percent
from ...text import listed
from .facts import baseline_name, progress_text
from .records import Comparison
from .row_statistics import ComparisonStatistics, RowStatistics
from .table_model import FOOTING_TITLE


def findings(comparison: Comparison, statistics: ComparisonStatistics) -> list[str]:
    """Return what the tables show, and what they lack."""
    best = next((row for row in statistics.rows if row.name == statistics.best), None)
    if best is None or best.client_mean is None:
        return [*_progress(comparison, statistics), "No run has a result yet."]
    return [
        *_progress(comparison, statistics),
        f"Best client mean: {clean(best.name)}, {percent(best.client_mean.mean)}.",
        *_distances(statistics),
        *_clients_and_tuning(comparison, statistics),
        *_doubts(statistics),
    ]


def _progress(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[str]:
    """Yield how far a comparison is that is not over."""
    text = progress_text(comparison, statistics)
    if text:
        yield text


def _distances(statistics: ComparisonStatistics) -> Iterator[str]:
    """Yield which rows may be as good as the best one, and how far chance alone may have decided that."""
    similar_rows = []
    single_pairs = []
    judged_counts = []
    for row in statistics.rows:
        difference = row.to_best
        if difference is None:
            continue
        if difference.is_distinguishable is None:
            single_pairs.append(row.name)
            continue
        judged_counts.append(len(difference.seeds))
        if not difference.is_distinguishable:
            similar_rows.append(row.name)
    if similar_rows:
        yield f"Not distinguishable from it: {_list(similar_rows)}."
    elif judged_counts and not single_pairs:
        yield "All other rows are at least two standard errors below it."
    if single_pairs and statistics.pending_runs:
        yield f"One pair of seeds says nothing of chance yet: {_list(single_pairs)}."
    elif single_pairs:
        yield f"One pair of seeds says nothing of chance: compare with more seeds ({_list(single_pairs)})."
    # Two or three pairs are distinguishable by chance more often than two standard errors promise.
    if judged_counts and min(judged_counts) < ENOUGH_SEEDS:
        yield describe_chance(min(judged_counts))


def _clients_and_tuning(comparison: Comparison, statistics: ComparisonStatistics) -> Iterator[str]:
    """Yield how many clients the means hide as hurt, and which row would be best without tuning."""
    judged_rows = [(row.hurt.hurt, row.name) for row in statistics.rows if row.hurt is not None]
    if judged_rows:
        baseline = baseline_name(comparison, statistics)
        largest_share = max(share for share, _ in judged_rows)
        if largest_share > 0:
            names = [name for share, name in judged_rows if share == largest_share]
            share_text = percent(largest_share)
            yield f"Compared with {baseline}, the largest share of clients, {share_text}, is hurt by {_list(names)}."
        else:
            yield f"No row has hurt clients against {baseline}."
    default_best = [row.name for row in statistics.rows if row.tuning.rank == 1]
    if statistics.has_tuning and default_best:
        yield f"With the methods' defaults the best row is {_list(default_best)}."


def _doubts(statistics: ComparisonStatistics) -> Iterator[str]:
    """Yield which rows are not comparable with the others in everything."""
    differing_rows = _names(row for row in statistics.rows if row.differing)
    if differing_rows:
        yield f"Rows with other settings than the rest (see '{FOOTING_TITLE}'): {_list(differing_rows)}."
    incomplete_rows = _names(row for row in statistics.rows if row.missing_seeds)
    # While runs are still to be made nearly every row lacks some.
    if incomplete_rows and not statistics.pending_runs:
        yield f"Rows without a result for some seeds: {_list(incomplete_rows)}."


def _names(rows: Iterator[RowStatistics]) -> list[str]:
    """Return the names of rows."""
    return [row.name for row in rows]


def _list(names: Sequence[str]) -> str:
    """Return names of rows as text."""
    return clean(listed(names), 300)

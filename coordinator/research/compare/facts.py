"""What a comparison is about, in words: what all rows have in common, how they were tuned, what it cost."""

from __future__ import annotations

import math

from ...report.charts import clean, percent
from ...text import about_time, counted
from .records import Comparison
from .row_statistics import ComparisonStatistics


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (name, value) of what the comparison has in common for all rows."""
    settings = ", ".join(f"{name} {value}" for name, value in comparison.partition_settings.items())
    partition = comparison.partition
    if settings:
        partition = f"{partition} ({settings})"
    if len(comparison.seeds) == 1:
        seeds = f"{comparison.seeds[0]} alone"
    else:
        seeds = f"{len(comparison.seeds)} ({', '.join(map(str, comparison.seeds))})"
    lines = [
        ("Data", ", ".join(comparison.data)),
        ("Partition", partition),
        ("Clients", str(comparison.clients)),
        ("Rounds", str(comparison.rounds)),
        ("Seeds", seeds),
        ("Tuning", tuning_text(comparison)),
    ]
    return [(name, clean(value, 300)) for name, value in lines]


def tuning_text(comparison: Comparison) -> str:
    """Return how parameters were searched, and by what they were chosen."""
    if not comparison.trials:
        return "none: defaults of the methods"
    text = f"{counted(comparison.trials, 'trial')} for each method, {comparison.search}, chosen by client mean on "
    text += "validation samples"
    if comparison.validation is not None:
        text += f" ({percent(comparison.validation)} of the training samples)"
    if comparison.tune_seed is not None:
        text += f", seed {comparison.tune_seed}"
    return text


def baseline_name(comparison: Comparison, statistics: ComparisonStatistics) -> str:
    """Return the name of the baseline's row, or what the comparison calls it where there is no such row."""
    return clean(statistics.baseline or comparison.baseline, 40)


def hours_in_all(statistics: ComparisonStatistics) -> str:
    """Return in a sentence what all trials and runs have cost, in processor time and by the clock."""
    cpu_hours = math.fsum(row.costs.trial_hours + row.costs.run_hours for row in statistics.rows)
    wall_hours = math.fsum(row.costs.trial_wall_hours + row.costs.run_wall_hours for row in statistics.rows)
    cpu_time = about_time(cpu_hours * 3600)
    wall_time = about_time(wall_hours * 3600)
    return f"{cpu_time} of CPU time in all; {wall_time} by the clock, simulations added up."


def progress_text(comparison: Comparison, statistics: ComparisonStatistics) -> str:
    """Return in a sentence how far a comparison is; empty where it is over."""
    if not statistics.pending_runs:
        return ""
    kinds = 1
    if comparison.has_untuned:
        kinds = 2
    total = kinds * len(comparison.methods) * len(comparison.seeds)
    return f"Not over yet: {statistics.pending_runs} of {counted(total, 'run')} are still to be made."

"""How commands print: one JSON object, or small aligned tables; progress as a line that is redrawn, or a few."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import formats
from ..core.reading import LINE_S, REDRAW_S, Progress, Report

if TYPE_CHECKING:
    from ..data import LeftOut
    from ..personal.unknown import UnknownRule


def result(arguments: argparse.Namespace, content: Mapping[str, Any], text: Callable[[], Iterable[str]]) -> int:
    """Print ``content`` as JSON when it was asked for, else the lines of ``text``; exit code 0."""
    if arguments.json:
        print(json.dumps(content, allow_nan=False))
    else:
        print("\n".join(text()))
    return 0


def yes_or_no(value: bool) -> str:
    """Return a truth value in words."""
    return "yes" if value else "no"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return aligned lines, the header first; the first column to the left, the others to the right."""
    cells = [list(header), *([formats.value_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for first, *others in cells:
        to_the_right = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *to_the_right]).rstrip())
    return lines


_MOST_REASONS = 5
"""The most lines that describe what was left out; one more counts the rest."""


def skipped(unusable: Sequence[LeftOut]) -> list[str]:
    """Return lines about images and recordings that were left out; none where all could be used."""
    if not unusable:
        return []
    # 1. A few have a line each.
    head = f"left out because they cannot be used: {len(unusable)}"
    if len(unusable) <= _MOST_REASONS:
        return [head, *(f"  {item}" for item in unusable)]
    # 2. Of many, files of one folder with the same reason share a line, so that a folder
    # at the wrong path does not take all the lines.
    counts: dict[tuple[str, str], int] = {}
    first_names: dict[tuple[str, str], str] = {}
    for item in unusable:
        group = (str(Path(item.name).parent), item.reason)
        counts[group] = counts.get(group, 0) + 1
        first_names.setdefault(group, item.name)
    lines = [head]
    described = 0
    for group in list(counts)[:_MOST_REASONS]:
        count = counts[group]
        _, reason = group
        others = f" and {count - 1} more in its folder" if count > 1 else ""
        lines.append(f"  {first_names[group]}{others}: {reason}")
        described += count
    # 3. The rest is counted.
    if described < len(unusable):
        lines.append(f"  … and {len(unusable) - described} more")
    return lines


ONE_CLASS = "all samples are of one class, so accuracies say nothing"
"""Stands beside an accuracy."""

BETTER_ALONE = "note: this device is better off alone: acc.local is above acc.personal by more than noise"


def about_unknown(rule: UnknownRule, unknown: int, total: int, has_drifted: bool) -> list[str]:
    """Return lines about ``unknown`` of ``total`` inputs: more than chance explains, or nothing to rely on."""
    lines = []
    if has_drifted:
        lines.append(
            f"note: {unknown} of {total} inputs are unlike the samples that the head was fitted on, "
            f"{rule.rate * total:.1f} are expected: the inputs have changed, or are of other classes; add samples of "
            "them and fit again"
        )
    if not rule.tells_apart:
        lines.append(f"note: {rule.misses_text}")
    return lines


def progress(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return a function that shows how far a step is.

    Args:
        what: The step, for people.
        clock: Seconds that go on.

    Returns:
        A function of what is done and of all. On a terminal it redraws one line of stderr; elsewhere it prints a line
        each `LINE_S` of a step that takes long.
    """
    if _has_cursor():
        return _redrawn_line(what, clock)
    return _plain_lines(what, clock)


def _has_cursor() -> bool:
    """Return whether stderr is a terminal that can draw a line again."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


def reading(what: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a function that shows on stderr how many files, images or recordings were read; see `core.reading`."""
    is_redrawn = _has_cursor()

    def say(text: str, is_last: bool) -> None:
        if not is_redrawn:
            print(text, file=sys.stderr, flush=True)
            return
        # A text may be shorter than the one before it.
        print(f"\r{text}\033[K", end="\n" if is_last else "", file=sys.stderr, flush=True)

    return Report(what, say, is_redrawn=is_redrawn, clock=clock)


def _redrawn_line(what: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    shown_at = -math.inf

    def draw(done: int, total: int) -> None:
        nonlocal shown_at
        now = clock()
        if done < total and now - shown_at < REDRAW_S:
            return
        shown_at = now
        print(f"\r{what} {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return draw


def _plain_lines(what: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    reported_at = clock()
    has_reported = False

    def report(done: int, total: int) -> None:
        nonlocal reported_at, has_reported
        now = clock()
        is_due = now - reported_at >= LINE_S
        is_end_of_reports = has_reported and done == total
        if not is_due and not is_end_of_reports:
            return
        reported_at = now
        has_reported = True
        print(f"{what} {done}/{total}", file=sys.stderr, flush=True)

    return report

"""How commands print: one JSON object, or small aligned tables; progress as a line that is redrawn, or a few."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def result(arguments: argparse.Namespace, content: Mapping[str, Any], text: Callable[[], Iterable[str]]) -> int:
    """Print ``content`` as JSON when it was asked for, else the lines of ``text``; exit code 0."""
    if arguments.json:
        print(json.dumps(content, allow_nan=False))
    else:
        print("\n".join(text()))
    return 0


def other_version(serving: object, own: str, what: str) -> str:
    """Return a note that ``what`` runs another version than this command; empty where it does not."""
    if not isinstance(serving, str) or serving == own:
        return ""
    return f"version {serving} runs, this command is of version {own}: restart {what} to change it"


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Return lines ``name  value`` with the values in one column."""
    cells = [(name, value_text(value)) for name, value in rows]
    width = max((len(name) for name, _ in cells), default=0)
    return [f"{name:<{width}}  {text}" for name, text in cells]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return aligned lines, the header first; the first column to the left, the others to the right."""
    cells = [list(header), *([value_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for first, *others in cells:
        to_the_right = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *to_the_right]).rstrip())
    return lines


def percent(share: float | None) -> str:
    """Return a share 0..1 as a percentage with one decimal; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f} %"


def skipped(reasons: Sequence[str]) -> list[str]:
    """Return lines about images and recordings that were left out; none where all could be used."""
    if not reasons:
        return []
    more = [f"  … and {len(reasons) - 5} more"] if len(reasons) > 5 else []
    return [f"left out because they cannot be used: {len(reasons)}", *(f"  {reason}" for reason in reasons[:5]), *more]


def number(value: float | None) -> str:
    """Return a number with four significant digits; a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def variants(figures: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return rows about the variants of a bundle's encoder, from what `bundle.variant_figures` returns.

    Of the held-out domains those are shown where int8 loses and gains most; --json has all.
    """
    rows: list[tuple[str, object]] = []
    for precision, variant in figures["variants"].items():
        parts = [f"{variant['bytes'] / 1e6:.2f} MB"]
        if variant["latency_ms"] is not None:
            parts.append(f"{variant['latency_ms']:.3f} ms per input where exported")
        if variant["accuracy"] is not None:
            parts.append(f"heads refitted there are right on {percent(variant['accuracy'])}")
        if variant.get("cosine") is not None:
            parts.append(f"cosine {variant['cosine']:.4f}")
        rows.append((precision, ", ".join(parts)))
    rows += _domain_rows(figures["domains"])
    if "int8" in figures["variants"] and figures["ranges"]:
        rows.append(("int8 ranges", figures["ranges"]))
    if figures["note"]:
        rows.append(("int8 note", figures["note"]))
    return rows


def _domain_rows(figures: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return rows about the held-out domains on which int8 loses and gains most; of a single one, its row."""
    domains = sorted(figures.items(), key=lambda item: item[1]["int8"] - item[1]["fp32"])
    if not domains:
        return []
    if len(domains) == 1:
        [(name, domain)] = domains
        return [(f"on {name}", _both_precisions(domain))]
    rows: list[tuple[str, object]] = []
    for (name, domain), verb in ((domains[0], "loses"), (domains[-1], "gains")):
        what = f"of {len(domains)} domains int8 {verb} most here"
        rows.append((f"on {name}", f"{_both_precisions(domain)}; {what}"))
    return rows


def _both_precisions(domain: Mapping[str, Any]) -> str:
    """Return the accuracies of both precisions on one domain."""
    return f"fp32 {percent(domain['fp32'])}, int8 {percent(domain['int8'])} of {domain['support']} samples"


def lineage(origin: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Return rows about where a bundle comes from and what it scored where, from what `bundle.origin` returns."""
    if origin is None:
        return [("lineage", "not in the bundle: it was made from no run, or by an earlier version")]
    rows: list[tuple[str, object]] = []
    if "run" in origin:
        of = f"{origin['run']}, round {origin['round']}, method {origin['method']}, seed {origin['seed']}"
        rows = [
            ("run", of),
            ("trained by", f"{origin['clients']} clients, partition {origin['partition_sha256'][:12]}"),
        ]
        begins = {"weights": "weights_sha256", "warm start": "warm_start_sha256", "parent bundle": "parent"}
        rows += [(name, origin[key][:12]) for name, key in begins.items() if origin[key]]
    scored = origin["scored"]
    for name, key in (("scored in the run", "run"), ("scored on devices", "devices")):
        if scored[key] is not None:
            rows.append((name, _score_text(scored[key])))
    if scored["held_out"]:
        accuracies = (f"{precision} {percent(share)}" for precision, share in scored["held_out"].items())
        rows.append(("scored where exported", ", ".join(accuracies)))
    parity = f"fp32 differs from the trained encoder by {scored['parity_max_abs']:.2g}"
    if scored["int8_cosine"] is not None:
        parity = f"{parity}; cosine of int8 {scored['int8_cosine']:.4f}"
    rows.append(("parity", parity))
    return rows


def _score_text(score: Mapping[str, Any]) -> str:
    """Return what a bundle scored for several clients: mean, worst tenth, and of how many samples."""
    clients = f"{score['clients']} clients"
    if score["support"]:
        clients = f"{clients}, {score['support']} held-out samples"
    return f"acc.personal {percent(score['mean'])}, worst tenth {percent(score['worst_tenth'])} ({clients})"


ONE_CLASS = "note: all samples are of one class, so accuracies on them say nothing"
BETTER_ALONE = "note: this device is better off alone: acc.local is above acc.personal by more than noise"


def drift(unknown: int, total: int, rate: float) -> str:
    """Return a line about more unknown inputs than chance explains."""
    return (
        f"note: {unknown} of {total} inputs are unlike the samples that the head was fitted on, {rate * total:.1f} are "
        "expected: the inputs have changed, or are of other classes; add samples of them and fit again"
    )


def size(number: int | None) -> str:
    """Return bytes as MiB or GiB; a dash for None."""
    if number is None:
        return "–"
    if number < 1 << 30:
        return f"{number / (1 << 20):.0f} MiB"
    return f"{number / (1 << 30):.1f} GiB"


def value_text(value: object) -> str:
    """Return a value as a cell: a dash for what is not known, three decimals for floats, three digits of small ones."""
    if value is None or value == "":
        return "–"
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 0.0005:
        return f"{value:.3g}"
    return f"{value:.3f}"


REPORT_S = 10.0
"""Seconds between two lines about a step, where no terminal shows one that is redrawn; shorter steps print nothing."""

_REDRAW_S = 0.1
"""Seconds between two looks of a line on a terminal: a folder of thousands of files is read in less."""


def progress(what: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return a function that shows how far a step is.

    Args:
        what: The step, for people.
        clock: Seconds that go on.

    Returns:
        A function of what is done and of all. On a terminal it redraws one line of stderr; elsewhere it prints a line
        each `REPORT_S` of a step that takes long.
    """
    has_cursor = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}
    if has_cursor:
        return _redrawn_line(what, clock)
    return _plain_lines(what, clock)


def _redrawn_line(what: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    shown_at = -math.inf

    def draw(done: int, total: int) -> None:
        nonlocal shown_at
        now = clock()
        if done < total and now - shown_at < _REDRAW_S:
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
        is_due = now - reported_at >= REPORT_S
        is_end_of_reports = has_reported and done == total
        if not is_due and not is_end_of_reports:
            return
        reported_at = now
        has_reported = True
        print(f"{what} {done}/{total}", file=sys.stderr, flush=True)

    return report

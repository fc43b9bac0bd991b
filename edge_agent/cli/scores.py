"""Scores of heads as fit and evaluate print them: accuracies with intervals, classes, and notes on both."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core import formats
from . import output

if TYPE_CHECKING:
    from ..data import LeftOut, Samples
    from ..heads import Head
    from ..heads.saved import SavedNumeric
    from ..personal.personalize import Result, Scores

_KINDS = {True: "the head", False: "cross-validation"}
"""What has answered a sample without having learned it, by whether the sample is held out."""

_MOST_CLASSES = 20
"""A table of the classes is printed up to so many; JSON has all of them."""


def intervals_of(scores: Scores, count: int) -> dict[str, tuple[float, float] | None]:
    """Return the 95 % interval (Wilson) of each accuracy on ``count`` held-out samples."""
    from ..personal.local.validation import interval

    shares = scores.accuracies().items()
    return {name: None if share is None else interval(round(share * count), count) for name, share in shares}


def accuracy_rows(scores: Scores, count: int, *, one_class: bool) -> Iterator[tuple[str, str]]:
    """Yield the accuracies with their intervals, what ``acc.local`` is of, and that they say nothing of one class.

    Args:
        scores: The accuracies.
        count: The number of held-out samples.
        one_class: Whether all samples are of one class.
    """
    intervals = intervals_of(scores, count)
    for name, share in scores.accuracies().items():
        text = formats.percent(share)
        if (ends := intervals[name]) is not None:
            text += f"  (95 %: {100 * ends[0]:.1f} to {100 * ends[1]:.1f} %)"
        local_model = scores.local_model if name == "acc.local" else ""
        yield name, text + accuracy_notes(share, local_model, one_class=one_class)


def encoder_part_rows(accuracy: float | None, head: Head) -> list[tuple[str, str]]:
    """Return the row with the ``accuracy``, 0..1, of a blend's part that takes the encoder's features.

    That of the other part is acc.local. There is no row where the head is no blend.
    """
    if accuracy is None:
        return []
    return [("its encoder part", f"{formats.percent(accuracy)}  (head {head.params.first} alone)")]


def accuracy_notes(share: float | None, local_model: str, *, one_class: bool) -> str:
    """Return what is written behind an accuracy.

    Args:
        share: The accuracy, 0..1; None: there is none.
        local_model: The model that it is of, where that is not the head; empty: it is.
        one_class: Whether all samples are of one class, so that an accuracy says nothing.
    """
    text = f"  {local_model}" if local_model else ""
    if share is not None and one_class:
        text += f"  ({output.ONE_CLASS})"
    return text


def detail_tables(result: Result) -> list[str]:
    """Return tables of the classes, where there are not too many, and of the samples that were answered worst."""
    lines = []
    if 1 < len(result.classes) <= _MOST_CLASSES:
        columns = ("class", "to fit", "held out", "right")
        lines += [
            "",
            *output.table(columns, [(one.name, one.train, one.held_out, one.right) for one in result.classes]),
        ]
    if result.worst:
        rows = [
            (worst.sample, worst.label, worst.answer, formats.percent(worst.probability), _KINDS[worst.held_out])
            for worst in result.worst
        ]
        header = ("worst samples", "class", "answer", "probability of its class", "answered by")
        lines += ["", *output.table(header, rows)]
    if result.conflicts:
        pairs = [(one.sample, one.label, one.other, one.other_label) for one in result.conflicts]
        lines += ["", *output.table(("nearly the same", "class", "as", "of class"), pairs)]
        lines.append("one label of each of these pairs may be wrong: look at both samples")
    return lines


def notes_on(scores: Scores, parts: tuple[Samples, Samples]) -> list[str]:
    """Return what has to be known about the accuracies."""
    from ..personal.local.details import not_held_out

    notes = [output.BETTER_ALONE] if scores.better_alone else []
    if not scores.better_alone and (scores.local or 0.0) > (scores.personal or 0.0):
        notes.append("note: acc.local is above acc.personal by no more than noise: either is as good")
    if missing := not_held_out(*parts):
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        notes.append(
            f"note: no held-out samples of {', '.join(missing[:10])}{more}: the accuracies say nothing about them; "
            "add more of them, or name a test set (--test)"
        )
    return notes


def same_sitting_rows(share: float | None) -> list[tuple[str, str]]:
    """Return a row about samples whose recording is learned from, too; none where that is not so."""
    if not share:
        return []
    of_these = f"{formats.percent(share)} of the held-out samples are of recordings that it learns from"
    return [("same sitting", f"{of_these}; expect less of new ones")]


def folds_note(held_out: float | None, folds: float | None) -> list[str]:
    """Return how cross-validation divides recordings, where held-out samples (shares 0..1) were divided otherwise."""
    if folds is None or folds == (held_out or 0.0):
        return []
    if folds > (held_out or 0.0):
        share = f"same sitting in cross-validation: {formats.percent(folds)} of what it tests is of recordings that it "
        return [share + "learns from; acc.personal says more about new ones"]
    of = "whole recordings" if not folds else f"whole recordings where it can ({formats.percent(folds)} same sitting)"
    return [f"cross-validation holds out {of}: its accuracies say more about new recordings than acc.personal does"]


def norm_text(result: Result) -> str:
    """Return whose batch norm statistics were used, and why."""
    whose = "shipped" if result.norm is None else f"own, {result.norm.share:.0%} of it from {result.norm.inputs} inputs"
    return f"{whose} ({result.norm_metrics['norm_why']})"


def numeric_result(
    arguments: argparse.Namespace,
    saved: SavedNumeric,
    samples: str,
    skipped: tuple[LeftOut, ...],
    scores: dict[str, float | None],
    content: dict[str, Any],
    more: list[tuple[str, str]],
) -> int:
    """Print the scores of a numeric head, and what has to be known about them."""
    from ..personal.unknown import least_for

    head = saved.head
    rows = [("head", f"{head.name}, {saved.precision} features"), ("samples", samples)]
    shares = () if head.predicts_targets else ("false_alarms", "detected")
    rows += [
        (name, formats.percent(score) if name in shares else formats.number(score)) for name, score in scores.items()
    ]
    notes = output.skipped(skipped)
    personal = scores.get("rmse.personal")
    mean = scores.get("rmse.mean")
    if personal is not None and mean is not None and personal >= mean:
        notes.append("note: no better than always answering the mean of the training targets")
    if not head.predicts_targets and head.threshold is None:
        notes.append(
            f"note: no threshold: fewer than {least_for(head.params.false_alarms)} normal samples, which "
            f"{formats.percent(head.params.false_alarms)} false alarms need"
        )
    return output.result(
        arguments, {**content, "skipped": len(skipped)}, lambda: [*formats.pairs([*rows, *more]), *notes]
    )

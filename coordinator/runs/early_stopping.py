"""Ending a run early by what head-tier devices get from it, not by what the training agents see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def why_stop(figures: Iterable[Mapping[str, Any]], patience: int) -> str:
    """Why a run should stop, given its lines of figures so far; empty while it should go on.

    It stops when the last ``patience`` releases (0: never) brought no better mean acc.personal on head-tier devices
    than the best release before them.
    """
    means = [
        (line["round"], line["mean"]) for line in figures if line["kind"] == "release" and line["mean"] is not None
    ]
    if not patience or len(means) <= patience:
        return ""
    best_round, best = max(means[:-patience], key=lambda pair: pair[1])
    latest = max(mean for _, mean in means[-patience:])
    if latest > best:
        return ""
    return (
        f"head-tier devices got acc.personal {best:.3f} from round {best_round} and at most {latest:.3f} "
        f"from {patience} releases since"
    )

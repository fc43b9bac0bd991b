"""The picture of a partition: training samples of each client and class, as SVG, PNG or PDF."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from edge_agent.errors import UsageError

FORMATS = ("svg", "png", "pdf")
MOST_BUBBLES = 60
"""Clients up to which each count is a bubble; more are drawn as a heat map."""


def picture_kind(suffix: str) -> str:
    """The format of a picture file with this suffix.

    Raises:
        UsageError: no such format.
    """
    kind = suffix.lstrip(".").lower()
    if kind not in FORMATS:
        result = f"'{suffix}'" if suffix else "a name without a suffix"
        raise UsageError(f"--plot: {result}; expected one of {', '.join('.' + one for one in FORMATS)}")
    return kind


def mixture(partition: Mapping[str, Any], kind: str) -> bytes:
    """The bytes of a picture file of format ``kind``, one of `FORMATS`.

    ``partition``: ``rule``, ``classes`` (names), and ``clients`` with ``id`` and ``train`` (counts by class).
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    clients, classes = partition["clients"], partition["classes"]
    counts = [one["train"] for one in clients]
    with mpl.rc_context({"svg.hashsalt": "headwater", "font.size": 9}):
        size = (min(14.0, 2.2 + 0.24 * len(clients)), min(9.0, 1.6 + 0.26 * len(classes)))
        figure = Figure(figsize=(max(4.0, size[0]), max(2.6, size[1])), layout="constrained")
        panel = figure.subplots()
        (_bubbles if len(clients) <= MOST_BUBBLES else _map)(figure, panel, counts)
        panel.set_yticks(range(len(classes)), classes)
        if len(clients) <= MOST_BUBBLES:
            panel.set_xticks(range(len(clients)), [one["id"] for one in clients], rotation=90)
        panel.set(xlabel="client", ylabel="class")
        figure.suptitle(f"partition {partition['rule']}: training samples of each class", fontsize=10)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _bubbles(_figure: Any, panel: Any, counts: list[list[int]]) -> None:
    highest = max(map(max, counts)) or 1
    places = [(x, y, count) for x, row in enumerate(counts) for y, count in enumerate(row) if count]
    xs, ys, sizes = zip(*places, strict=True)
    panel.scatter(xs, ys, s=[140.0 * size / highest for size in sizes], color="#2166ac", alpha=0.85, linewidths=0)
    panel.set(xlim=(-0.7, len(counts) - 0.3), ylim=(len(counts[0]) - 0.4, -0.6))
    panel.scatter([], [], s=140.0, color="#2166ac", label=f"{highest} samples")
    panel.scatter([], [], s=14.0, color="#2166ac", label=f"{max(1, highest // 10)}")
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    panel.grid(alpha=0.15)


def _map(figure: Any, panel: Any, counts: list[list[int]]) -> None:
    columns = [list(column) for column in zip(*counts, strict=True)]
    shown = panel.imshow(columns, aspect="auto", cmap="Blues", interpolation="nearest")
    figure.colorbar(shown, ax=panel, label="samples")

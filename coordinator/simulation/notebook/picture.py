"""A picture that notebooks display, and that is written as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.storage import check_writable, write_atomic

from ...report.pictures import Format, format_of


@dataclass(frozen=True, repr=False)
class Plot:
    """A picture, which notebooks display."""

    svg: str

    @classmethod
    def of(cls, draw: Callable[[Format], bytes], path: str | Path | None) -> Plot:
        """Return what ``draw`` draws; with ``path`` also written there, as SVG, PNG or PDF by its suffix.

        Raises:
            UsageError: ``path`` has another suffix, or cannot be written.
        """
        if path is not None:
            target = Path(path)
            content = draw(format_of(target.suffix))
            check_writable(target.parent)
            write_atomic(target, content)
        return cls(draw("svg").decode())

    def __repr__(self) -> str:
        return f"Plot (SVG, {len(self.svg) / 1000:.0f} kB; a notebook shows it, and .plot(path) writes it)"

    def _repr_svg_(self) -> str:
        return self.svg

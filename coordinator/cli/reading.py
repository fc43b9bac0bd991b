"""How commands show that data are read: beside a spinner or a bar on a terminal, elsewhere by a line now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from edge_agent.core.reading import Progress, Report, shown_by

from .output import console, is_live


@contextlib.contextmanager
def shown_reading() -> Iterator[None]:
    """Show on stderr how many files or samples are read in this context, and how fast.

    On a terminal one line is redrawn and removed at the end; elsewhere a step of reading that takes long prints a line
    each ten seconds.
    """
    if not is_live(console):
        with printed_reading():
            yield
        return
    with console.status("reading the data") as status, drawn_reading(status.update):
        yield


@contextlib.contextmanager
def printed_reading() -> Iterator[None]:
    """Print a line each ten seconds of a step of reading that takes long."""

    def show(items: str) -> Progress:
        return Report(items, lambda text, _last: console.print(text, soft_wrap=True), is_redrawn=False)

    with shown_by(show):
        yield


@contextlib.contextmanager
def drawn_reading(draw: Callable[[str], object]) -> Iterator[None]:
    """Hand the text of each moment of a step of reading to ``draw``, which shows it in place of the one before."""

    def show(items: str) -> Progress:
        return Report(items, lambda text, _last: draw(text), is_redrawn=True)

    with shown_by(show):
        yield

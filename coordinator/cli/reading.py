"""How commands show that data are read: beside a spinner on a terminal, elsewhere by a line now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from edge_agent.core.reading import Progress, Report, shown_by

from .output import console, is_live


@contextlib.contextmanager
def shown_reading(what: str = "reading the data") -> Iterator[None]:
    """Show on stderr how many files or samples are read in this context, and how fast.

    On a terminal one line is redrawn and removed at the end; elsewhere a step of reading that takes long prints a line
    each ten seconds. ``what`` is shown until there are numbers.
    """
    if not is_live(console):

        def show_lines(items: str) -> Progress:
            return Report(items, lambda text, _last: console.print(text, soft_wrap=True), is_redrawn=False)

        with shown_by(show_lines):
            yield
        return
    with console.status(what) as status:

        def show_beside(items: str) -> Progress:
            return Report(items, lambda text, _last: status.update(text), is_redrawn=True)

        with shown_by(show_beside):
            yield

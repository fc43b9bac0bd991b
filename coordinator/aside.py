"""What the coordinator may do of its own beside a run: before its first round, after each round, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fleet import Steps

if TYPE_CHECKING:
    from .rounds import RunLoop
    from .store import StateFolder


class Aside:
    """Nothing. Others override what they do; nothing here keeps a round waiting that has been opened."""

    def start(self, state: StateFolder) -> None:
        """The coordinator begins to work in this folder."""

    def prepare(self, loop: RunLoop) -> Steps:  # noqa: ARG002 - for those who do something
        """Called when a run begins, or is gone on with; its rounds wait for this."""
        yield from ()

    def closed(self, loop: RunLoop, number: int) -> None:
        """Called after each round."""

    def rest(self, loop: RunLoop) -> Steps:  # noqa: ARG002 - for those who do something
        """Called after the last round; the run's end waits for this."""
        yield from ()

    def ended(self, run: str) -> None:
        """A run is over, however it ended: nothing that is still asked for it is of use to anybody."""

    def collect(self) -> None:
        """Called now and then, in the coordinator's own thread."""

    def close(self) -> None:
        """The coordinator stops."""

"""Local: every device trains alone on its own data; the yardstick that federation has to beat.

Source: the baseline called "Local" or "SingleSet" in most papers on personalization.
Travels: nothing; a round only counts who took part.
Stays: the whole model.
Server: nothing to combine.
Differs from the paper: nothing known.
"""

from __future__ import annotations

from typing import ClassVar

from .base import Exactness
from .fedavg import Method as FedAvg


class Method(FedAvg):
    """FedAvg of nothing."""

    source = "baseline without communication"
    heads = ()
    exactness: ClassVar[Exactness] = {}

    @property
    def shared(self) -> tuple[str, ...]:
        """No part travels."""
        return ()

"""Local: every device trains alone on its own data; the baseline that federation has to beat.

Source: the baseline called "Local" or "SingleSet" in most papers on personalization.
Travels: nothing; a round only counts who took part.
Stays: the whole model.
Server: nothing to combine.
Differs from the paper: nothing known.
"""

from __future__ import annotations

from . import Method


class Local(Method):
    """FedAvg of nothing."""

    shared = ()
    source = "baseline without communication"
    heads = ()

"""The bound on how much of a round's sum one contribution may be."""

from __future__ import annotations

from collections.abc import Container, Mapping

MOST_OF_SUM = 1 / 3
"""The largest share of a round's sum that one update may have."""

LEAST_BOUND = 1.5
"""An update of up to this many medians may have a larger share than `MOST_OF_SUM`.

Of four updates that are alike both bounds are the same. Of three, each has a third of the sum, and honest ones differ a
little.
"""

REPEATED_OF_SUM = 1 / 8
"""The largest share of a round's sum that an agent may have that was at a bound of size again and again.

Among four agents that is under half of what another one adds. Among twenty it is nearly what the other bounds allow:
there, an honest agent with much or unusual data is often at a bound, and the round would miss what it adds.
"""


def limit_to_sum(shares: Mapping[str, float], middle: float, repeaters: Container[str] = ()) -> dict[str, float]:
    """Bound what each agent adds to a sum by what the others add.

    Args:
        shares: Agent -> what it adds.
        middle: The median of what the agents of the round add.
        repeaters: Agents that were at a bound of size again and again.

    Returns:
        Agent -> what it adds at most: a third of the sum, or 1.5 medians where that is more; an eighth of the sum for
        the repeaters.
    """
    limited = dict(shares)
    # One after another, in the order of agent ids: the others' sum is that of their bounded shares.
    for agent in sorted(limited):
        others = sum(limited.values()) - limited[agent]
        if agent in repeaters:
            limited[agent] = min(limited[agent], others * REPEATED_OF_SUM / (1 - REPEATED_OF_SUM))
            continue
        in_sum = others * MOST_OF_SUM / (1 - MOST_OF_SUM)
        limited[agent] = min(limited[agent], max(LEAST_BOUND * middle, in_sum))
    return limited

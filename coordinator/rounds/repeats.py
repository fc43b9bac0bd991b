"""Agents whose updates are at a bound of size again and again.

Whoever is at the bound once may have unusual data. Whoever is there in one round after another has the most of the
model that the bounds allow, and gets less of it. Each agent of a run has a count: one more after a round in which its
update was near the bound or beyond it, one less after any other round that it delivered in. The counts lie in the
journal, with each closed round, so a restart changes nothing and an audit aggregates with the same ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

NEAR_BOUND = 0.9
"""An update counts as at a bound of size from this share of it on: one that stays a little below does the same harm.

With 1.0 an attacker of four clients costs 0.86 points in the mean over attacks, with 0.9 and with 0.75 0.70 and 0.75
(examples/results/poisoning.md, "Other limits").
"""

TOLERATED_ROUNDS = 2
"""With a count up to one below this an agent counts as any other."""

MOST_REPEATS = 8
"""An agent that stays below the bounds has its full weight again after so many rounds at most."""


def is_repeater(count: int) -> bool:
    """Return whether an agent of this count, as it was before a round, adds less to the round."""
    return count >= TOLERATED_ROUNDS


def count_repeats(before: Mapping[str, int], members: Iterable[str], at_bound: Container[str]) -> dict[str, int]:
    """Return the counts of a round's members after it; those that are 0 are left out.

    Args:
        before: Agent -> its count before the round; agents of 0 may lack.
        members: The agents whose updates the round has.
        at_bound: Those of them that were at a bound of size.

    Returns:
        Member -> its count after the round.
    """
    counts: dict[str, int] = {}
    for agent in members:
        count = before.get(agent, 0)
        if agent in at_bound:
            counts[agent] = min(count + 1, MOST_REPEATS)
        elif count > 1:
            counts[agent] = count - 1
    return counts


def count_after_round(before: Mapping[str, int], of_round: Mapping[str, int], members: Iterable[str]) -> dict[str, int]:
    """Return the counts of all agents of a run after a round; those that have not delivered keep theirs.

    Args:
        before: The counts after the round before.
        of_round: `count_repeats` of the round.
        members: The agents whose updates were aggregated.
    """
    delivered = frozenset(members)
    absent = {agent: count for agent, count in before.items() if agent not in delivered}
    return dict(sorted({**absent, **of_round}.items()))

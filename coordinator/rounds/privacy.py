"""The privacy budget of the released models: spent with each closed round, over all runs of the state folder.

Source: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with the
noise added in parts by the devices, as in distributed differential privacy (Kairouz, Liu, Steinke, ICML 2021).
Differs: sampling of cohorts does not count, since agents choose when they are online; every round counts for everybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_agent.core.errors import RunFailed
from edge_agent.privacy.accountant import cost, epsilon_of
from edge_agent.wire.messages.down import Noise

from ..config import CoordinatorConfig
from ..journal.entries import PrivacyTerms, RoundClosed, RoundOpened
from ..journal.store import Journal, facts_of
from ..state.privacy_spent import PrivacySpent


@dataclass(frozen=True)
class PrivacyBudget:
    """What rounds cost under this configuration, and what those in the journal have cost."""

    config: CoordinatorConfig
    journal: Journal
    sums: bool
    """Whether the server makes its step from the mean of the updates alone (`Method.server_step_is_mean`).

    Then the noise of all devices adds up. Otherwise single updates show in what the server sends, and each device adds
    all of the noise.
    """

    @property
    def is_on(self) -> bool:
        """Whether devices are asked to add noise."""
        return self.config.privacy.noise > 0

    @property
    def least(self) -> int:
        """The number of updates that the noise is divided among: with noise, a round closes with no fewer."""
        is_divided = self.sums and self.is_on
        if not is_divided:
            return 1
        return max(1, self.config.cohort.min_agents)

    def asked(self) -> Noise | None:
        """Return how each device has to clip its update, and how much noise it adds; None: nothing of it."""
        privacy = self.config.privacy
        if privacy.clip is None:
            return None
        # Independent noise of n devices adds up to sqrt(n) times that of one.
        part = privacy.noise / math.sqrt(self.least)
        clip_statistics = privacy.clip_statistics
        if clip_statistics is None:
            clip_statistics = privacy.clip
        return Noise(clip=privacy.clip, clip_statistics=clip_statistics, noise=part)

    def terms(self) -> PrivacyTerms | None:
        """Return the terms under which updates are made, for the entry of a round; None without clipping."""
        noise = self.asked()
        if noise is None:
            return None
        return PrivacyTerms(**noise.model_dump(), least=self.least)

    def opens(self, opened: RoundOpened) -> RoundOpened:
        """Return what is journaled of a round that is opened, with `terms` where there are any."""
        terms = self.terms()
        if terms is None:
            return opened
        return opened.changed(privacy=terms)

    def check_terms(self, number: int, opened: RoundOpened) -> None:
        """Return quietly where the updates of round ``number``, journaled as ``opened``, are made as now asked.

        Raises:
            RunFailed: They are not, so nobody can tell what the round would cost.
        """
        then = opened.privacy
        now = self.terms()
        if then != now:
            raise RunFailed(
                f"round {number} was opened under privacy terms {_as_text(then)}, the configuration gives "
                f"{_as_text(now)}, and updates of both would mix; start the run again. Change clip and noise of "
                "[privacy], and cohort.min_agents, which the noise is divided by, while no run is under way"
            )

    def of_round(self, updates: int) -> dict[str, float]:
        """Return the noise multiplier of a round of so many updates, for its entry; empty without noise."""
        if not self.is_on:
            return {}
        more = updates / self.least if self.sums else 1.0
        return {"noise_multiplier": self.config.privacy.noise * math.sqrt(more)}

    def spent(self) -> tuple[float, int]:
        """Return the cost of all closed rounds with noise, and the number of those without."""
        closed = self.journal.entries(kinds=("round_closed",))
        costs = list[float]()
        for fact in facts_of(closed, RoundClosed):
            if fact.noise_multiplier is not None:
                costs.append(cost(fact.noise_multiplier))
        return sum(costs), len(closed) - len(costs)

    def figures(self) -> PrivacySpent | None:
        """Return what was spent of the budget, for status and summary; None without noise."""
        if not self.is_on:
            return None
        privacy = self.config.privacy
        spent, uncovered = self.spent()
        epsilon = epsilon_of(spent, privacy.delta)
        epsilon_left = None
        if privacy.epsilon is not None:
            epsilon_left = round(max(0.0, privacy.epsilon - epsilon), 4)
        return PrivacySpent(
            epsilon=round(epsilon, 4) if math.isfinite(epsilon) else None,
            epsilon_left=epsilon_left,
            delta=privacy.delta,
            rounds_without_noise=uncovered,
            clip=privacy.clip,
            noise=privacy.noise,
        )

    def objection(self, rounds: int = 1) -> str:
        """Return why so many more rounds would exceed the budget; empty where they would not."""
        privacy = self.config.privacy
        if privacy.epsilon is None:
            return ""
        spent, _ = self.spent()
        after = epsilon_of(spent + rounds * cost(privacy.noise), privacy.delta)
        if after <= privacy.epsilon:
            return ""
        more = "another round" if rounds == 1 else f"{rounds} more rounds"
        return (
            f"the privacy budget is spent: epsilon is {epsilon_of(spent, privacy.delta):.3f} and may be {after:.3f} "
            f"after {more}, privacy.epsilon is {privacy.epsilon:g} (delta {privacy.delta:g})"
        )


def _as_text(terms: PrivacyTerms | None) -> str:
    """Return terms of privacy for a message."""
    if terms is None:
        return "none"
    return str(terms.to_body())

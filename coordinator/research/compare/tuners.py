"""How parameters are searched: the contract of tuners, and those that need no package of others.

A tuner proposes trials in waves. The trials of a wave do not depend on each other, and the next wave is proposed once
all of them are scored. So the same scores lead to the same proposals, however many trials run at a time, and a search
that was stopped is continued by telling a new tuner what is known.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from edge_agent.core.errors import UsageError
from edge_agent.core.search_space import Space

from ...text import counted

MOST_LISTED = 10_000
"""Combinations up to which all of them are listed and drawn from without repetition."""

MOST_DRAWS = 1000
"""Draws, beyond the wanted number, after which no further combination is looked for."""

REDUCTION = 3
"""Successive halving: one trial in three stays, and gets three times the rounds."""


@dataclass(frozen=True)
class Budget:
    """What a method may spend on its search; all methods of a comparison have the same."""

    trials: int
    rounds: int
    """Rounds of a whole trial, those of the runs."""

    seed: int = 0
    """Seed of the search."""

    points: int = 3
    """Values of each range in a grid."""


@dataclass(frozen=True)
class Proposal:
    """A trial to run: its number, the parameters in which it differs from the defaults, and its rounds."""

    number: int
    params: Mapping[str, Any]
    rounds: int


class Tuner(ABC):
    """A search for the parameters of one method. Trial 0 has the defaults.

    Call `ask` for a wave of proposals, `tell` for the score of each, and `ask` again; an empty wave ends the search.
    """

    name: ClassVar[str]
    """The name on the command line."""

    fits_comparisons: ClassVar[bool] = True
    """Whether all methods get the same number of trials by it."""

    def __init__(self, space: Mapping[str, Space], budget: Budget) -> None:
        self._space = dict(space)
        self._budget = budget

    @classmethod
    @abstractmethod
    def describe(cls, budget: Budget) -> str:
        """Return in words what each method gets."""

    @abstractmethod
    def ask(self) -> Sequence[Proposal]:
        """Return the next trials, after `tell` was called for all of the wave before; none: the search is over."""

    @abstractmethod
    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Note the score of a trial, the higher the better; None: it failed."""

    @property
    @abstractmethod
    def rounds_left(self) -> int:
        """The rounds of all trials that are still to be proposed, at most."""


class _FixedTrials(Tuner):
    """A search whose trials do not depend on scores: they are one wave."""

    def __init__(self, space: Mapping[str, Space], budget: Budget) -> None:
        super().__init__(space, budget)
        self._waves = [[Proposal(n, p, budget.rounds) for n, p in enumerate(self._params())]]

    @abstractmethod
    def _params(self) -> list[dict[str, Any]]:
        """Return the parameters of all trials, those of trial 0 first."""

    def ask(self) -> Sequence[Proposal]:
        """Return all trials, and none the second time."""
        return self._waves.pop() if self._waves else ()

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Nothing depends on a score."""

    @property
    def rounds_left(self) -> int:
        """The rounds of the wave, while it was not proposed."""
        return sum(proposal.rounds for wave in self._waves for proposal in wave)


class Random(_FixedTrials):
    """Values spread at random, with a generator of its own for each parameter: all methods try the same step sizes."""

    name = "random"

    @classmethod
    def describe(cls, budget: Budget) -> str:
        """Return the rounds of a trial."""
        return f"random, {counted(budget.rounds, 'round')} each"

    def _params(self) -> list[dict[str, Any]]:
        return draw_distinct(self._space, self._budget)


class Grid(_FixedTrials):
    """All combinations of the values of lists, and of some values of each range; the defaults beside them."""

    name = "grid"
    fits_comparisons = False

    @classmethod
    def describe(cls, budget: Budget) -> str:
        """Return how many values of a range are tried."""
        return f"grid, {counted(budget.points, 'value')} of each range, trials of {counted(budget.rounds, 'round')}"

    def _params(self) -> list[dict[str, Any]]:
        axes = [space.grid(self._budget.points) for space in self._space.values()]
        count = math.prod(map(len, axes))
        if count > MOST_LISTED:
            raise UsageError(f"grid: {count} combinations, expected at most {MOST_LISTED}; give fewer values")
        return [{}, *(dict(zip(self._space, values, strict=True)) for values in itertools.product(*axes))]


class Halving(Tuner):
    """Successive halving on rounds: all trials get few rounds, the best third of them three times as many, and so on.

    A trial that stays is trained from the start again, so that it equals a run of that many rounds.
    """

    name = "halving"

    def __init__(self, space: Mapping[str, Space], budget: Budget) -> None:
        super().__init__(space, budget)
        params = draw_distinct(space, budget)
        self._rungs = rungs_of(budget)
        self._level = 0
        self._staying = [Proposal(number, chosen, 0) for number, chosen in enumerate(params)]
        self._scores: dict[int, float | None] = {}

    @classmethod
    def describe(cls, budget: Budget) -> str:
        """Return the trials and rounds of each rung, and the rounds of all."""
        rungs = rungs_of(budget)
        parts = [f"{counted(count, 'trial')} of {counted(rounds, 'round')}" for count, rounds in rungs]
        total = sum(count * rounds for count, rounds in rungs)
        return f"successive halving, {', then '.join(parts)}: {counted(total, 'round')} for each method"

    def ask(self) -> Sequence[Proposal]:
        """Return the trials of the next rung: the best of the rung before."""
        if self._level == len(self._rungs):
            return ()
        count, rounds = self._rungs[self._level]
        if self._level > 0:
            # Trials that failed do not stay, even where others are missing; of equal ones the earlier stays.
            scored = [trial for trial in self._staying if self._scores.get(trial.number) is not None]
            scored.sort(key=lambda trial: (-float(self._scores[trial.number] or 0.0), trial.number))
            self._staying = sorted(scored[:count], key=lambda trial: trial.number)
        self._level += 1
        self._scores = {}
        return [Proposal(trial.number, trial.params, rounds) for trial in self._staying]

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Note the score in the rung that was proposed last."""
        self._scores[proposal.number] = score

    @property
    def rounds_left(self) -> int:
        """The rounds of the rungs that were not proposed."""
        return sum(count * rounds for count, rounds in self._rungs[self._level :])


def rungs_of(budget: Budget) -> list[tuple[int, int]]:
    """Return (trials, rounds) of each rung of successive halving; the last one has the rounds of a run."""
    rungs = [(budget.trials, budget.rounds)]
    while rungs[0][1] >= REDUCTION and budget.trials >= REDUCTION ** len(rungs):
        rungs.insert(0, (budget.trials, rungs[0][1] // REDUCTION))
    return [(max(1, budget.trials // REDUCTION**level), rounds) for level, (_, rounds) in enumerate(rungs)]


def combinations_of(space: Mapping[str, Space]) -> float:
    """Return the number of different choices of parameters; infinite where one is a range of any numbers."""
    return math.prod(space_of_one.size for space_of_one in space.values())


def draw_distinct(space: Mapping[str, Space], budget: Budget) -> list[dict[str, Any]]:
    """Return the parameters of the trials: none (the defaults), then as many different combinations as there are.

    Args:
        space: Parameter -> its values. Without any there is one trial.
        budget: How many trials are wanted, and the seed.

    Returns:
        At most ``budget.trials`` choices; fewer where the space has no more.
    """
    others = budget.trials - 1
    if not space or others < 1:
        return [{}]
    combinations: Iterator[dict[str, Any]]
    if combinations_of(space) <= MOST_LISTED:
        combinations = _shuffled(space, budget.seed)
    else:
        combinations = _spread(space, budget.seed, others)
    params: dict[str, dict[str, Any]] = {}
    for choice in itertools.islice(combinations, MOST_DRAWS + others):
        params.setdefault(json.dumps(choice, sort_keys=True), choice)
        if len(params) == others:
            break
    return [{}, *params.values()]


def _shuffled(space: Mapping[str, Space], seed: int) -> Iterator[dict[str, Any]]:
    """Yield all combinations of a space in random order."""
    axes = [one_space.grid(MOST_LISTED) for one_space in space.values()]
    every = list(itertools.product(*axes))
    for index in np.random.default_rng(seed).permutation(len(every)):
        yield dict(zip(space, every[index], strict=True))


def _spread(space: Mapping[str, Space], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield random combinations without end; each parameter has a generator of its own.

    Of every ``count`` combinations one value of each parameter lies in each of ``count`` equal parts of its space
    (Latin hypercube sampling: McKay, Beckman, Conover, Technometrics 1979), so that a dozen trials leave no end of a
    range out.
    """
    generators = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]) for name in space}
    while True:
        shares = {name: (rng.permutation(count) + rng.random(count)) / count for name, rng in generators.items()}
        for index in range(count):
            yield {name: one_space.at(float(shares[name][index])) for name, one_space in space.items()}

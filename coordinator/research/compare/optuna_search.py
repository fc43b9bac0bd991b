"""A search by Optuna, an optional package: its tree-structured Parzen estimator proposes one trial after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_agent.core.errors import MissingCapability
from edge_agent.core.installation import install_command
from edge_agent.core.search_space import Range, Space

from ...text import counted
from .tuners import Budget, Proposal, Tuner


class OptunaSearch(Tuner):
    """Optuna's own sampler, seeded. Each proposal takes account of all scores, so a wave is one trial."""

    name = "optuna"

    def __init__(self, space: Mapping[str, Space], budget: Budget) -> None:
        """Begin a study in memory.

        Raises:
            MissingCapability: Optuna is not installed.
        """
        super().__init__(space, budget)
        self._optuna = import_optuna()
        sampler = self._optuna.samplers.TPESampler(seed=budget.seed)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions = {name: self._distribution(one_space) for name, one_space in space.items()}
        self._trials = budget.trials if space else 1
        self._next = 0
        self._open: Any = None
        """Optuna's own trial of the last proposal; None: the defaults, which need not be a point of the space."""

    @classmethod
    def describe(cls, budget: Budget) -> str:
        """Return the rounds of a trial."""
        import_optuna()
        return f"optuna (TPE), {counted(budget.rounds, 'round')} each"

    def ask(self) -> Sequence[Proposal]:
        """Return one trial: the defaults first, then what Optuna proposes."""
        if self._next >= self._trials:
            return ()
        params: dict[str, Any] = {}
        self._open = None
        if self._next > 0:
            self._open = self._study.ask(self._distributions)
            params = dict(self._open.params)
        proposal = Proposal(self._next, params, self._budget.rounds)
        self._next += 1
        return [proposal]

    def tell(self, proposal: Proposal, score: float | None) -> None:  # noqa: ARG002 - a wave is one trial
        """Tell Optuna the score of its trial; one that failed counts as failed there, too."""
        if self._open is None:
            return
        if score is None:
            self._study.tell(self._open, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._open, score)

    @property
    def rounds_left(self) -> int:
        """The rounds of the trials that were not proposed."""
        return (self._trials - self._next) * self._budget.rounds

    def _distribution(self, space: Space) -> Any:
        """Return Optuna's form of a space."""
        distributions = self._optuna.distributions
        if not isinstance(space, Range):
            return distributions.CategoricalDistribution(space.grid(1))
        if space.whole:
            low, high = map(int, space.ends())  # the whole numbers within
            return distributions.IntDistribution(low, high, log=space.log)
        return distributions.FloatDistribution(space.low, space.high, log=space.log)


def import_optuna() -> Any:
    """Import and return the package ``optuna``, with its messages switched off.

    Raises:
        MissingCapability: It is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingCapability(
            f"search optuna needs the package optuna ({error}): {install_command('optuna')}, or try --search random"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna

"""A comparison under way: which simulations are due, what they have found, and the record of it.

Trials of all methods come first, then the runs seed by seed, so that a table is complete for each seed in turn. All of
it follows from the arguments and from the files of outcomes: a comparison that was stopped, however that was, goes
through the same steps again and finds its simulations done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.core.errors import StateError
from edge_agent.core.storage import write_json

from ...text import counted
from ..footing import footing_of
from .records import Comparison, MethodRecord, SeedRun, Trial
from .settings import Arguments, Contender, run_plan, trial_plan, tuner_named, untuned_plan
from .simulated_runs import RunOutcome, RunSpec, forget, reset
from .tuners import Budget, Proposal, Tuner

RECORD = "comparison.json"
"""File of the record in the folder of a comparison."""


@dataclass(frozen=True)
class Setting:
    """What all simulations of a comparison have in common, as its record has it."""

    title: str
    data: tuple[str, ...]
    partition: str
    partition_settings: dict[str, Any]
    clients: int
    rounds: int
    command: str
    encoder: str
    """The encoder of all simulations, chosen by the inputs where the arguments name none."""

    partition_hash: str = ""
    """Who has which samples with the first seed, by the data as they are now."""

    notes: tuple[str, ...] = ()


class Search:
    """The search of one method: its tuner, and the trials so far."""

    def __init__(self, arguments: Arguments, contender: Contender, rounds: int) -> None:
        self.contender = contender
        self._arguments = arguments
        budget = Budget(arguments.trials, rounds, seed=arguments.tune_seed, points=arguments.points)
        self._tuner: Tuner | None = None
        if arguments.trials:
            self._tuner = tuner_named(arguments.search)(contender.space, budget)
        self._wave: dict[int, Proposal] = {}
        """Trials that were proposed and are not scored."""

        self._scores: dict[int, float | None] = {}
        """Number of a trial of the wave -> its score. The tuner gets all together, in the order of their numbers."""

        self._proposed: dict[int, Proposal] = {}
        self._outcomes: dict[int, list[RunOutcome]] = {}
        """Number of a trial -> the outcomes of its simulations, with more rounds each."""

        self.is_over = self._tuner is None
        self._propose()

    def due(self) -> list[RunSpec]:
        """Return the simulations of the trials that can run now, done or not."""
        return [self._spec(proposal) for proposal in self._wave.values()]

    def take(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Note the outcome of a trial that was due; once all of a wave are noted, the next one is proposed."""
        proposal = next(proposal for proposal in self._wave.values() if self._spec(proposal).location == spec.location)
        del self._wave[proposal.number]
        self._proposed[proposal.number] = proposal
        self._outcomes.setdefault(proposal.number, []).append(outcome)
        self._scores[proposal.number] = outcome.score
        if not self._wave:
            self._propose()

    @property
    def rounds_left(self) -> int:
        """The rounds of all trials that are not scored, at most."""
        open_rounds = sum(proposal.rounds for proposal in self._wave.values())
        return open_rounds + (self._tuner.rounds_left if self._tuner is not None else 0)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials so far, by their numbers."""
        trials = []
        for number in sorted(self._outcomes):
            proposal = self._proposed[number]
            outcomes = self._outcomes[number]
            trials.append(
                Trial(
                    number=number,
                    params=dict(proposal.params),
                    rounds=proposal.rounds,
                    score=outcomes[-1].score,
                    failure=outcomes[-1].failure,
                    cpu_s=sum(outcome.cpu_s for outcome in outcomes),
                    seconds=sum(outcome.seconds for outcome in outcomes),
                )
            )
        return tuple(trials)

    @property
    def best(self) -> Trial | None:
        """The trial with the highest score of those with the most rounds; the earliest of equals.

        None: all have failed, or there is none yet.
        """
        scored = [trial for trial in self.trials if trial.score is not None]
        if not scored:
            return None
        return min(scored, key=lambda trial: (-trial.rounds, -float(trial.score or 0.0), trial.number))

    @property
    def failure(self) -> str:
        """Why no run can be made; empty where one can, or the search is not over."""
        if not self.is_over or self._tuner is None or self.best is not None:
            return ""
        trials = self.trials
        return f"all {counted(len(trials), 'trial')} failed; trial {trials[0].number}: {trials[0].failure}"

    @property
    def has_recovered_trials(self) -> bool:
        """Whether trials that had failed were scored when they were tried again."""
        return bool(self._recovered_trials())

    def _recovered_trials(self) -> list[int]:
        """Return the numbers of the trials that had failed and were scored when they were tried again."""
        return [number for number in sorted(self._outcomes) if any(map(_is_recovered, self._outcomes[number]))]

    @property
    def note(self) -> str:
        """What is special about the trials, in a sentence or two; empty where nothing is."""
        if not self.is_over:
            return ""
        return " ".join([*self._note_on_count(), *self._note_on_repetition()])

    def _note_on_count(self) -> Iterator[str]:
        """Yield that there are fewer trials than were asked for, and why."""
        if self._tuner is None or not self._tuner.fits_comparisons:
            return
        count = len(self.trials)
        if count < self._arguments.trials:
            space = ", ".join(f"{name} = {values}" for name, values in self.contender.space.items())
            yield (
                f"{counted(count, 'trial')} in place of {self._arguments.trials}: its space has no more values "
                f"({space or 'nothing to search'})."
            )

    def _note_on_repetition(self) -> Iterator[str]:
        """Yield which trials had failed and were scored when they were tried again."""
        numbers = self._recovered_trials()
        if numbers:
            trials = ", ".join(map(str, numbers))
            yield f"Scored when they were tried again, after a failure: trials {trials}."

    def _propose(self) -> None:
        """Tell the tuner the scores of the last wave, and take the next one."""
        if self._tuner is None:
            return
        for number in sorted(self._scores):
            self._tuner.tell(self._proposed[number], self._scores[number])
        self._scores = {}
        self._wave = {proposal.number: proposal for proposal in self._tuner.ask()}
        self.is_over = not self._wave

    def _spec(self, proposal: Proposal) -> RunSpec:
        """Return the simulation of a trial."""
        plan = trial_plan(self._arguments, self.contender.choice, proposal.params, proposal.rounds)
        location = f"trials/{self.contender.slug}/{proposal.number:03d}-{proposal.rounds}-rounds"
        own_sources = self._arguments.own_sources_for(self.contender.choice)
        return RunSpec(location, plan, is_trial=True, own_sources=own_sources)


def _is_recovered(outcome: RunOutcome) -> bool:
    """Return whether a simulation had failed and was scored when it was tried again."""
    return outcome.is_repeated and not outcome.failure


@dataclass
class _Runs:
    """The runs of one method with one choice of parameters."""

    contender: Contender
    kind: str
    outcomes: dict[int, RunOutcome] = field(default_factory=dict)
    """Seed -> the outcome."""

    def spec(self, arguments: Arguments, params: Mapping[str, Any], seed: int) -> RunSpec:
        """Return the run of a seed."""
        choice = self.contender.choice
        if self.kind == "untuned":
            plan = untuned_plan(arguments, choice, seed)
        else:
            plan = run_plan(arguments, choice, params, seed)
        location = f"{self.kind}/{self.contender.slug}/seed-{seed}"
        return RunSpec(location, plan, is_trial=False, own_sources=arguments.own_sources_for(choice))


class Comparing:
    """A comparison: `due` says which simulations can run, `take` notes an outcome, `record` is the state of it all."""

    def __init__(
        self,
        arguments: Arguments,
        contenders: Sequence[Contender],
        setting: Setting,
        base: Path,
        *,
        has_runs: bool = True,
        again: bool = False,
    ) -> None:
        """Begin, or continue with the outcomes in the folder.

        Args:
            arguments: What is compared.
            contenders: The methods.
            setting: What the record says of all simulations.
            base: The folder of the comparison.
            has_runs: Whether runs on test samples follow the search.
            again: Whether failed simulations are run again, from their start.
        """
        self._arguments = arguments
        self._setting = setting
        self._base = base
        self._searches = [Search(arguments, contender, setting.rounds) for contender in contenders]
        self._tuned = [_Runs(contender, "runs") for contender in contenders] if has_runs else []
        has_untuned = arguments.untuned and has_runs
        self._untuned = [_Runs(contender, "untuned") for contender in contenders] if has_untuned else []
        self._again = again
        self._retried = set[str]()
        self._given: dict[str, RunSpec] = {}
        """Location -> simulations that `due` has named and that are not over."""

        first_seed = arguments.seeds[0]
        self._hashes = {first_seed: ("the data as they are", setting.partition_hash)}
        """Seed -> (where it is from, partition's hash) of the first run of it."""

        self.done_rounds = 0
        """Rounds of all simulations that are over."""

        self.done = 0
        """Number of simulations that are over."""

    def due(self) -> Iterator[RunSpec]:
        """Yield the simulations that can run now and were not named before, in the order in which they should.

        Those that are over in the folder are noted at once.
        """
        while True:
            news = [spec for spec in self._possible() if spec.location not in self._given]
            over = [(spec, outcome) for spec in news if (outcome := self._over(spec)) is not None]
            for spec, outcome in over:
                self._given[spec.location] = spec
                self.take(spec, outcome)
            if not over:
                break
        for spec in news:
            self._given[spec.location] = spec
            yield spec

    def _over(self, spec: RunSpec) -> RunOutcome | None:
        """Return the outcome of a simulation that is over; None where the simulation has to run, or to run again.

        Raises:
            StateError: Its file is of a simulation with other settings, and nothing explains why.
        """
        outcome = spec.read_any(self._base)
        if outcome is None:
            return None
        if self._is_outdated(spec, outcome):
            reset(spec, self._base, outcome)
            return None
        spec.check(outcome, self._base)
        if not outcome.is_over:
            return None
        if outcome.failure and self._again and spec.location not in self._retried:
            self._retried.add(spec.location)
            reset(spec, self._base, outcome)
            return None
        return outcome

    def _is_outdated(self, spec: RunSpec, before: RunOutcome) -> bool:
        """Return whether an outcome is of parameters that the search of its method no longer proposes.

        A trial that had failed, and has a score since it was tried again, changes what the search proposes and chooses
        from there on. Then trials and runs of that method run again, if only their parameters differ.
        """
        search = next(search for search in self._searches if self._has_slug(spec, search.contender))
        if not search.has_recovered_trials:
            return False
        is_of_others = bool(spec.differences(before))
        return is_of_others and not spec.differences(before, but=("params",))

    def _possible(self) -> Iterator[RunSpec]:
        """Yield all simulations that are not over and whose parameters are known."""
        for search in self._searches:
            yield from search.due()
        for seed in self._arguments.seeds:
            yield from self._tuned_runs(seed)
        for seed in self._arguments.seeds:
            for runs in self._untuned:
                if seed not in runs.outcomes:
                    yield runs.spec(self._arguments, {}, seed)

    def _tuned_runs(self, seed: int) -> Iterator[RunSpec]:
        """Yield the runs of a seed that are not over, of the methods whose search has chosen parameters."""
        if not self._tuned:
            return
        for search, runs in zip(self._searches, self._tuned, strict=True):
            has_chosen = search.is_over and not search.failure
            if has_chosen and seed not in runs.outcomes:
                yield runs.spec(self._arguments, self._chosen_params(search), seed)

    def take(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Note the outcome of a simulation.

        Raises:
            StateError: Its clients have other samples than those of another method with the same seed.
        """
        del self._given[spec.location]
        self.done += 1
        self.done_rounds += spec.plan.rounds
        owner = next(runs_or_search for runs_or_search in self._owners() if self._is_of(spec, runs_or_search))
        if isinstance(owner, Search):
            owner.take(spec, outcome)
        else:
            self._check_partition(spec, outcome)
            owner.outcomes[spec.plan.seed] = outcome
        if spec.is_trial and not outcome.failure:
            forget(spec, self._base)

    def _owners(self) -> Iterator[Search | _Runs]:
        """Yield the searches and the runs to which simulations belong."""
        yield from self._searches
        yield from self._tuned
        yield from self._untuned

    def _is_of(self, spec: RunSpec, owner: Search | _Runs) -> bool:
        """Return whether a simulation belongs to a search or to the runs of a method."""
        kind = "trials" if isinstance(owner, Search) else owner.kind
        return spec.location.startswith(f"{kind}/") and self._has_slug(spec, owner.contender)

    @staticmethod
    def _has_slug(spec: RunSpec, contender: Contender) -> bool:
        """Return whether a trial or a run is one of this method."""
        _, slug, _ = spec.location.split("/")
        return slug == contender.slug

    def _check_partition(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Require that clients have the samples that they have with every other method of the same seed."""
        if not outcome.partition_hash:
            return
        first, expected = self._hashes.setdefault(spec.plan.seed, (spec.location, outcome.partition_hash))
        if outcome.partition_hash != expected:
            raise StateError(
                f"{self._base}: clients of {spec.location} have other samples (hash {outcome.partition_hash[:16]}) "
                f"than those of {first} ({expected[:16]}): the data have changed meanwhile; choose another folder "
                "with --out"
            )

    def _chosen_params(self, search: Search) -> dict[str, Any]:
        """Return the parameters that the search has chosen; none: the defaults."""
        best = search.best
        return {} if best is None else dict(best.params)

    @property
    def finished_parts(self) -> int:
        """How many parts of the comparison are over.

        All trials together are one part. A seed has two: runs with chosen parameters, and runs with defaults.
        """
        has_all_trials = all(search.is_over for search in self._searches)
        if not has_all_trials:
            return 0
        seeds = self._arguments.seeds
        tuned_seeds = sum(not any(self._tuned_runs(seed)) for seed in seeds)
        untuned_seeds = sum(self._has_untuned_runs(seed) for seed in seeds)
        return 1 + tuned_seeds + untuned_seeds

    def _has_untuned_runs(self, seed: int) -> bool:
        """Return whether runs with defaults are wanted, and those of a seed are over."""
        return bool(self._untuned) and all(seed in runs.outcomes for runs in self._untuned)

    @property
    def total_rounds(self) -> int:
        """Rounds of all simulations, done or to be done, as far as the search knows."""
        return self.done_rounds + self._rounds_left()

    @property
    def is_over(self) -> bool:
        """Whether nothing is due any more."""
        return not self._given and not any(self._possible())

    def _rounds_left(self) -> int:
        """Return the rounds of all simulations that are not over."""
        runs = 0
        for search, tuned in zip(self._searches, self._tuned, strict=bool(self._tuned)):
            if not search.failure:
                runs += len(self._arguments.seeds) - len(tuned.outcomes)
        for untuned in self._untuned:
            runs += len(self._arguments.seeds) - len(untuned.outcomes)
        return sum(search.rounds_left for search in self._searches) + runs * self._setting.rounds

    def record(self) -> Comparison:
        """Return all that is known so far."""
        arguments = self._arguments
        setting = self._setting
        is_tuned = arguments.trials > 0
        search = ""
        if is_tuned:
            budget = Budget(arguments.trials, setting.rounds, points=arguments.points)
            search = tuner_named(arguments.search).describe(budget)
        return Comparison(
            title=setting.title,
            data=setting.data,
            partition=setting.partition,
            partition_settings=setting.partition_settings,
            clients=setting.clients,
            rounds=setting.rounds,
            seeds=arguments.seeds,
            trials=arguments.trials,
            search=search,
            command=setting.command,
            methods=tuple(self._method_record(index) for index in range(len(self._searches))),
            tune_seed=arguments.tune_seed if is_tuned else None,
            validation=arguments.validation if is_tuned else None,
            has_untuned=arguments.untuned,
            notes=setting.notes,
        )

    def _method_record(self, index: int) -> MethodRecord:
        """Return what is known of one method."""
        search = self._searches[index]
        best = search.best if search.is_over else None
        contender = search.contender
        return MethodRecord(
            name=contender.choice.name,
            method=contender.choice.method,
            trials=search.trials,
            chosen=None if best is None else best.number,
            footing=self._footing(search) if self._tuned else {},
            runs=self._seed_runs(self._tuned[index], self._chosen_params(search), search.failure)
            if self._tuned
            else (),
            untuned=self._seed_runs(self._untuned[index], {}, "") if self._untuned else (),
            space={name: str(space) for name, space in contender.space.items()} if self._arguments.trials else {},
            note=search.note,
        )

    def _footing(self, search: Search) -> dict[str, str]:
        """Return what the runs of a method rest on, such as its optimizer; empty where no run can be made."""
        if not search.is_over or search.failure:
            return {}
        choice = search.contender.choice
        plan = run_plan(self._arguments, choice, self._chosen_params(search), self._arguments.seeds[0])
        method = methods.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
        searched: Collection[str] = ()
        if self._arguments.trials:
            searched = search.contender.space
        if plan.encoder is None:
            plan = plan.model_copy(update={"encoder": self._setting.encoder})
        return footing_of(plan, method, searched=searched)

    def _seed_runs(self, runs: _Runs, params: Mapping[str, Any], failure: str) -> tuple[SeedRun, ...]:
        """Return the runs of a method that are over; with a ``failure`` none can be made, and all have it."""
        all_params = {**runs.contender.choice.params, **params}
        if failure:
            return tuple(SeedRun(seed=seed, params=all_params, failure=failure) for seed in self._arguments.seeds)
        return tuple(
            SeedRun(
                seed=seed,
                params=all_params,
                clients=outcome.clients,
                curve=outcome.curve,
                bytes_up=outcome.bytes_up,
                bytes_down=outcome.bytes_down,
                cpu_s=outcome.cpu_s,
                seconds=outcome.seconds,
                failure=outcome.failure,
                folder=runs.spec(self._arguments, params, seed).location,
                partition_hash=outcome.partition_hash,
            )
            for seed, outcome in sorted(runs.outcomes.items())
        )

    def write(self) -> None:
        """Write the record of the comparison into its folder."""
        write_json(self._base / RECORD, self.record().model_dump(mode="json"))

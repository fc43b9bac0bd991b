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
        self._wave: dict[str, Proposal] = {}
        """Location of its simulation -> a trial that was proposed and is not scored."""

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
        proposal = self._wave.pop(spec.location)
        self._proposed[proposal.number] = proposal
        self._outcomes.setdefault(proposal.number, []).append(outcome)
        self._scores[proposal.number] = outcome.score
        if not self._wave:
            self._propose()

    @property
    def rounds_left(self) -> int:
        """The rounds of all trials that are not scored, at most."""
        rounds = sum(proposal.rounds for proposal in self._wave.values())
        if self._tuner is not None:
            rounds += self._tuner.rounds_left
        return rounds

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
    def chosen_params(self) -> dict[str, Any]:
        """The parameters that the search has chosen; none: the defaults."""
        best = self.best
        if best is None:
            return {}
        return dict(best.params)

    @property
    def has_chosen(self) -> bool:
        """Whether runs can be made, because the search is over and some trial has a score or none was wanted."""
        return self.is_over and not self.failure

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
        return [number for number, outcomes in sorted(self._outcomes.items()) if any(map(_is_recovered, outcomes))]

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
        self._wave = {self._location(proposal): proposal for proposal in self._tuner.ask()}
        self.is_over = not self._wave

    def _spec(self, proposal: Proposal) -> RunSpec:
        """Return the simulation of a trial."""
        plan = trial_plan(self._arguments, self.contender.choice, proposal.params, proposal.rounds)
        own_sources = self._arguments.own_sources_for(self.contender.choice)
        return RunSpec(self._location(proposal), plan, is_trial=True, own_sources=own_sources)

    def _location(self, proposal: Proposal) -> str:
        """Return the folder of a trial's simulation, relative to that of the comparison."""
        return f"trials/{self.contender.slug}/{proposal.number:03d}-{proposal.rounds}-rounds"


def _is_recovered(outcome: RunOutcome) -> bool:
    """Return whether a simulation had failed and was scored when it was tried again."""
    return outcome.is_repeated and not outcome.failure


@dataclass
class RunsBySeed:
    """The runs of one method with one choice of parameters, a seed each."""

    arguments: Arguments
    contender: Contender
    is_tuned: bool
    """Whether they have the parameters that the search has chosen, and not the method's defaults."""

    outcomes: dict[int, RunOutcome] = field(default_factory=dict)
    """Seed -> the outcome."""

    def spec(self, params: Mapping[str, Any], seed: int) -> RunSpec:
        """Return the run of a seed; with defaults ``params`` count nowhere."""
        choice = self.contender.choice
        if self.is_tuned:
            kind = "runs"
            plan = run_plan(self.arguments, choice, params, seed)
        else:
            kind = "untuned"
            plan = untuned_plan(self.arguments, choice, seed)
        location = f"{kind}/{self.contender.slug}/seed-{seed}"
        return RunSpec(location, plan, is_trial=False, own_sources=self.arguments.own_sources_for(choice))

    def take(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Note the outcome of a run."""
        self.outcomes[spec.plan.seed] = outcome

    def seeds_left(self) -> int:
        """Return how many runs are not over."""
        return len(self.arguments.seeds) - len(self.outcomes)

    def records(self, params: Mapping[str, Any]) -> tuple[SeedRun, ...]:
        """Return the runs that are over, by their seeds; they were made with ``params``."""
        all_params = {**self.contender.choice.params, **params}
        records = []
        for seed, outcome in sorted(self.outcomes.items()):
            record = SeedRun(
                seed=seed,
                params=all_params,
                clients=outcome.clients,
                curve=outcome.curve,
                bytes_up=outcome.bytes_up,
                bytes_down=outcome.bytes_down,
                cpu_s=outcome.cpu_s,
                seconds=outcome.seconds,
                failure=outcome.failure,
                folder=self.spec(params, seed).location,
                partition_hash=outcome.partition_hash,
            )
            records.append(record)
        return tuple(records)


@dataclass(frozen=True)
class MethodProgress:
    """How far a comparison is with one method: the search, then the runs that follow it."""

    search: Search
    tuned: RunsBySeed | None
    """Runs with the parameters that the search has chosen; None: no runs follow the search."""

    untuned: RunsBySeed | None
    """Runs with the method's defaults; None: they are not wanted."""

    def trials_due(self) -> Iterator[DueSimulation]:
        """Yield the trials that can run now."""
        for spec in self.search.due():
            yield DueSimulation(spec, self.search, self.search)

    def is_tuned_run_due(self, seed: int) -> bool:
        """Return whether the run of a seed is not over, and the search has chosen its parameters."""
        return self.tuned is not None and self.search.has_chosen and seed not in self.tuned.outcomes

    def tuned_run_due(self, seed: int) -> Iterator[DueSimulation]:
        """Yield the run of a seed if it is not over and the search has chosen its parameters."""
        if self.tuned is not None and self.is_tuned_run_due(seed):
            yield DueSimulation(self.tuned.spec(self.search.chosen_params, seed), self.search, self.tuned)

    def untuned_run_due(self, seed: int) -> Iterator[DueSimulation]:
        """Yield the run of a seed with the method's defaults if it is wanted and not over."""
        if self.untuned is not None and seed not in self.untuned.outcomes:
            yield DueSimulation(self.untuned.spec({}, seed), self.search, self.untuned)

    @property
    def runs_left(self) -> int:
        """How many runs are not over; those of a search that has failed are never made."""
        count = 0
        if self.tuned is not None and not self.search.failure:
            count += self.tuned.seeds_left()
        if self.untuned is not None:
            count += self.untuned.seeds_left()
        return count


@dataclass(frozen=True)
class DueSimulation:
    """A simulation of a comparison, and what its outcome is for."""

    spec: RunSpec
    search: Search
    """The search of its method."""

    owner: Search | RunsBySeed
    """What takes the outcome."""

    def is_outdated(self, before: RunOutcome) -> bool:
        """Return whether an outcome is of parameters that the search of the method no longer proposes.

        A trial that had failed, and has a score since it was tried again, changes what the search proposes and chooses
        from there on. Then trials and runs of that method run again, if only their parameters differ.
        """
        if not self.search.has_recovered_trials:
            return False
        is_of_others = bool(self.spec.differences(before))
        return is_of_others and not self.spec.differences(before, but=("params",))


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
        self._methods = []
        for contender in contenders:
            search = Search(arguments, contender, setting.rounds)
            tuned = None
            untuned = None
            if has_runs:
                tuned = RunsBySeed(arguments, contender, is_tuned=True)
            if has_runs and arguments.untuned:
                untuned = RunsBySeed(arguments, contender, is_tuned=False)
            self._methods.append(MethodProgress(search, tuned, untuned))
        self._again = again
        self._retried = set[str]()
        self._under_way: dict[str, DueSimulation] = {}
        """Location -> a simulation that `due` has named and that is not over."""

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
            new_simulations = list(self._not_named_before())
            # The outcomes of all are read before any is noted, because noting one changes what is possible.
            finished = []
            for simulation in new_simulations:
                outcome = self._read_outcome(simulation)
                if outcome is not None:
                    finished.append((simulation, outcome))
            for simulation, outcome in finished:
                self._under_way[simulation.spec.location] = simulation
                self.take(simulation.spec, outcome)
            if not finished:
                break
        for simulation in new_simulations:
            self._under_way[simulation.spec.location] = simulation
            yield simulation.spec

    def _not_named_before(self) -> Iterator[DueSimulation]:
        """Yield the possible simulations that `due` has not named."""
        for simulation in self._possible():
            if simulation.spec.location not in self._under_way:
                yield simulation

    def _read_outcome(self, simulation: DueSimulation) -> RunOutcome | None:
        """Return the outcome of a simulation that is over; None where the simulation has to run, or to run again.

        Raises:
            StateError: Its file is of a simulation with other settings, and nothing explains why.
        """
        spec = simulation.spec
        outcome = spec.read_any(self._base)
        if outcome is None:
            return None
        if simulation.is_outdated(outcome):
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

    def _possible(self) -> Iterator[DueSimulation]:
        """Yield all simulations that are not over and whose parameters are known, in the order in which they run."""
        for method in self._methods:
            yield from method.trials_due()
        # Seed by seed, so that the table is complete for each seed in turn.
        for seed in self._arguments.seeds:
            for method in self._methods:
                yield from method.tuned_run_due(seed)
        for seed in self._arguments.seeds:
            for method in self._methods:
                yield from method.untuned_run_due(seed)

    def take(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Note the outcome of a simulation.

        Raises:
            StateError: Its clients have other samples than those of another method with the same seed.
        """
        simulation = self._under_way.pop(spec.location)
        self.done += 1
        self.done_rounds += spec.plan.rounds
        if not spec.is_trial:
            self._check_partition(spec, outcome)
        simulation.owner.take(spec, outcome)
        if spec.is_trial and not outcome.failure:
            forget(spec, self._base)

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

    @property
    def finished_parts(self) -> int:
        """How many parts of the comparison are over.

        All trials together are one part. A seed has two: runs with chosen parameters, and runs with defaults.
        """
        has_all_trials = all(method.search.is_over for method in self._methods)
        if not has_all_trials:
            return 0
        parts = 1
        for seed in self._arguments.seeds:
            if self._has_tuned_runs(seed):
                parts += 1
            if self._has_untuned_runs(seed):
                parts += 1
        return parts

    def _has_tuned_runs(self, seed: int) -> bool:
        """Return whether no run with chosen parameters is due for a seed."""
        return not any(method.is_tuned_run_due(seed) for method in self._methods)

    def _has_untuned_runs(self, seed: int) -> bool:
        """Return whether runs with defaults are wanted, and those of a seed are over."""
        return all(method.untuned is not None and seed in method.untuned.outcomes for method in self._methods)

    @property
    def total_rounds(self) -> int:
        """Rounds of all simulations, done or to be done, as far as the search knows."""
        return self.done_rounds + self._rounds_left()

    @property
    def is_over(self) -> bool:
        """Whether nothing is due any more."""
        return not self._under_way and not any(True for _ in self._possible())

    def _rounds_left(self) -> int:
        """Return the rounds of all simulations that are not over."""
        rounds = 0
        for method in self._methods:
            rounds += method.search.rounds_left + method.runs_left * self._setting.rounds
        return rounds

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
            methods=tuple(self._method_record(method) for method in self._methods),
            tune_seed=arguments.tune_seed if is_tuned else None,
            validation=arguments.validation if is_tuned else None,
            has_untuned=arguments.untuned,
            notes=setting.notes,
        )

    def _method_record(self, method: MethodProgress) -> MethodRecord:
        """Return what is known of one method."""
        search = method.search
        contender = search.contender
        chosen = None
        if search.is_over and search.best is not None:
            chosen = search.best.number
        footing: dict[str, str] = {}
        runs: tuple[SeedRun, ...] = ()
        if method.tuned is not None:
            footing = self._footing(search)
            runs = self._tuned_records(method.tuned, search)
        untuned: tuple[SeedRun, ...] = ()
        if method.untuned is not None:
            untuned = method.untuned.records({})
        space = {}
        if self._arguments.trials:
            space = {name: str(values) for name, values in contender.space.items()}
        return MethodRecord(
            name=contender.choice.name,
            method=contender.choice.method,
            trials=search.trials,
            chosen=chosen,
            footing=footing,
            runs=runs,
            untuned=untuned,
            space=space,
            note=search.note,
        )

    def _tuned_records(self, runs: RunsBySeed, search: Search) -> tuple[SeedRun, ...]:
        """Return the runs with chosen parameters that are over; after a failed search a failed run for each seed."""
        if not search.failure:
            return runs.records(search.chosen_params)
        params = dict(search.contender.choice.params)
        return tuple(SeedRun(seed=seed, params=params, failure=search.failure) for seed in self._arguments.seeds)

    def _footing(self, search: Search) -> dict[str, str]:
        """Return what the runs of a method rest on, such as its optimizer; empty where no run can be made."""
        if not search.has_chosen:
            return {}
        choice = search.contender.choice
        plan = run_plan(self._arguments, choice, search.chosen_params, self._arguments.seeds[0])
        method = methods.create(plan.method_name, plan.params, paper=plan.paper, paper_for=plan.paper_for)
        searched: Collection[str] = ()
        if self._arguments.trials:
            searched = search.contender.space
        if plan.encoder is None:
            plan = plan.model_copy(update={"encoder": self._setting.encoder})
        return footing_of(plan, method, searched=searched)

    def write(self) -> None:
        """Write the record of the comparison into its folder."""
        write_json(self._base / RECORD, self.record().model_dump(mode="json"))

"""What is compared: the arguments of a comparison, checked, and the file that a later call has to agree with."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from edge_agent import data, methods
from edge_agent.core.config import mistakes_of, parse
from edge_agent.core.errors import ConfigError, UnknownName, UsageError
from edge_agent.core.registry import is_reference, load_reference, own_name
from edge_agent.core.search_space import Space, parse_space
from edge_agent.core.task import Frozen
from edge_agent.methods import MethodParams
from edge_agent.methods.values import checked_space, search_space

from ...plain_values import make_plain
from ...simulation.own_parts import add_method
from ...simulation.own_sources import changed_sources, own_sources
from ...simulation.plan import HOW_NOT_WHAT, Plan
from .optuna_search import OptunaSearch
from .tuners import Grid, Halving, Random, Tuner

ALWAYS = ("local", "fedavg", "fedavg_ft", "linear_probe")
"""Methods of every comparison: each client alone, one model for all, that model fine-tuned, a frozen encoder's head."""

TUNERS: Mapping[str, type[Tuner]] = {kind.name: kind for kind in (Random, Halving, Grid, OptunaSearch)}
"""Name on the command line -> how parameters are searched."""

VALIDATION = 0.25
"""Share of the training samples that trials are scored on."""

OF_THE_COMPARISON = (
    *("method", "params", "seed", "validation", "local", "keep_every", "new_clients", "head_clients"),
    *("name", "tags", "note", "log"),
)
"""Fields of a simulation that a comparison sets itself, or cannot compare."""

OF_RUNNING = ("engine", "address")
"""Fields of a simulation that say where a comparison runs, which `Running` has."""

_RUNNING = "a class of coordinator.research.compare.interface"

_SETTINGS = "the settings of a comparison"
"""How errors name the settings in which a mistake was made."""


PlainValues = Annotated[dict[str, Any], BeforeValidator(make_plain)]
"""Values by name, as a file has them, so that those of a call and those of a file can be compared."""


class MethodChoice(Frozen):
    """A method of a comparison, and the parameters that all its simulations have."""

    name: str = Field(min_length=1, max_length=80)
    method: str = Field(min_length=1, max_length=1000)
    params: PlainValues = Field(default_factory=dict)

    def differences(self, now: MethodChoice) -> list[str]:
        """Return ``name value, now value`` for each parameter that differs in ``now``, and for the method's file."""
        differences = []
        if self.method != now.method:  # classes of one name in two files
            differences.append(f"{self.name} from {self.method}, now from {now.method}")
        for parameter in {**self.params, **now.params}:
            value = self.params.get(parameter)
            value_now = now.params.get(parameter)
            if value != value_now:
                differences.append(f"{self.name}.{parameter} {_shown(value)}, now {_shown(value_now)}")
        return differences


class Arguments(Frozen):
    """All that decides what a comparison finds. A folder is continued with the same arguments, or with additions."""

    methods: tuple[MethodChoice, ...] = Field(min_length=1)
    plan: PlainValues = Field(description="fields of all simulations that were given")
    seeds: tuple[int, ...] = Field(min_length=1)
    trials: int = Field(ge=0, le=10_000)
    search: str = "random"
    points: int = Field(3, ge=2, le=1000, description="values of each range in a grid")
    space: dict[str, str] = Field(
        default_factory=dict, description="[method.]parameter -> its values, as they were typed"
    )
    validation: float = Field(VALIDATION, gt=0, lt=1)
    tune_seed: int = Field(0, ge=0)
    untuned: bool = False
    own_sources: dict[str, str] = Field(
        default_factory=dict, description="'method NAME' and 'encoder' -> SHA-256 of the source, of the user's own"
    )

    @property
    def is_search(self) -> bool:
        """Whether these are of a search, which has one method; a comparison has several."""
        return len(self.methods) == 1

    def additions(self, now: Arguments) -> list[str]:
        """Return in words what `extended_by` takes from ``now``; no simulation made so far is outdated by it."""
        extended = self.extended_by(now)
        additions = [f"seed {seed}" for seed in extended.seeds if seed not in self.seeds]
        additions += [f"method {choice.name}" for choice in self._added_methods(extended)]
        if extended.untuned and not self.untuned:
            additions.append("runs with defaults")
        return additions

    def extended_by(self, now: Arguments) -> Arguments:
        """Return these arguments with what ``now`` adds: seeds, methods with their search spaces, runs with defaults.

        Where ``now`` lacks something, or has it otherwise, these stay as they are, so that `differences` names it.
        """
        additions: dict[str, Any] = {"untuned": self.untuned or now.untuned}
        if self._has_more_seeds(now):
            additions["seeds"] = now.seeds
        if self._has_more_methods(now):
            additions["methods"] = now.methods
            additions["space"] = {**self.space, **self._spaces_of_added_methods(now)}
        return self.model_copy(update=additions)

    def own_sources_for(self, choice: MethodChoice) -> dict[str, str]:
        """Return ``method`` and ``encoder`` -> SHA-256 of the source that one method's runs have of the user's own."""
        sources = {}
        for kind, part in (("method", f"method {choice.name}"), ("encoder", "encoder")):
            if part in self.own_sources:
                sources[kind] = self.own_sources[part]
        return sources

    def outdated_methods(self, now: Arguments) -> list[str]:
        """Return the names of the methods whose results are of another source than ``now`` has."""
        changed = changed_sources(self.own_sources, now.own_sources)
        names = [choice.name for choice in self.methods]
        if "encoder" in changed:
            return names
        return [name for name in names if f"method {name}" in changed]

    def _has_more_seeds(self, now: Arguments) -> bool:
        """Return whether ``now`` has further seeds behind the same first one, which by default the trials have."""
        return now.seeds[0] == self.seeds[0] and set(self.seeds) < set(now.seeds)

    def _has_more_methods(self, now: Arguments) -> bool:
        """Return whether ``now`` has further methods, and all of these with the same parameters."""
        keeps_all = all(choice in now.methods for choice in self.methods)
        return keeps_all and len(now.methods) > len(self.methods)

    def _added_methods(self, now: Arguments) -> list[MethodChoice]:
        """Return the methods that ``now`` alone has."""
        return [choice for choice in now.methods if choice not in self.methods]

    def _spaces_of_added_methods(self, now: Arguments) -> dict[str, str]:
        """Return ``method.parameter`` -> its values, of those methods that ``now`` alone has."""
        added_names = {choice.name for choice in self._added_methods(now)}
        spaces = {}
        for key, values in now.space.items():
            method, _, _ = key.rpartition(".")
            if method in added_names:
                spaces[key] = values
        return spaces

    def differences(self, now: Arguments) -> list[str]:
        """Return ``name value, now value`` for each argument that differs in ``now``."""
        before = self._compared()
        after = now._compared()
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        differences = [f"{name} {_shown(before.get(name))}, now {_shown(after.get(name))}" for name in names]
        choices_now = {choice.name: choice for choice in now.methods}
        for choice in self.methods:
            if choice.name in choices_now:
                differences += choice.differences(choices_now[choice.name])
        return differences

    def _compared(self) -> dict[str, Any]:
        """Return name -> value of all arguments, those of simulations included; methods by name, data by location."""
        fields = self.model_dump(mode="json", exclude={"methods", "plan", "own_sources"})
        fields["methods"] = ", ".join(choice.name for choice in self.methods)
        folder = Path(self.plan["folder"])
        plan = {name: value for name, value in self.plan.items() if name not in {*HOW_NOT_WHAT, "folder"}}
        plan["data"] = [str(data.location(source, folder)) for source in plan["data"]]
        return {**fields, **plan}


def _shown(value: Any) -> str:
    """Return a value of an argument as a message has it."""
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class Contender:
    """A method that is ready to be compared."""

    choice: MethodChoice
    kind: type[MethodParams]
    space: Mapping[str, Space]

    @property
    def slug(self) -> str:
        """Its name as a part of a folder's name."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.choice.name)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of ``0:6`` (0 to 5) or ``0,1,2``.

    Raises:
        UsageError: The text is neither, has no seed, or has one twice.
    """
    try:
        if ":" in text:
            first, end = (int(word) for word in text.split(":"))
            seeds = tuple(range(first, end))
        else:
            seeds = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise UsageError(f"--seeds '{text}': expected FIRST:END such as 0:6 (0 to 5), or 0,1,2") from error
    return checked_seeds(seeds, f"--seeds '{text}'")


def checked_seeds(seeds: Iterable[int], where: str) -> tuple[int, ...]:
    """Return the seeds as a tuple.

    Raises:
        UsageError: There is none, one is no whole number or negative, or one is there twice.
    """
    try:
        seeds = tuple(map(operator.index, seeds))
    except TypeError as error:
        raise UsageError(f"{where}: {seeds!r}; expected whole numbers, for example range(6)") from error
    if not seeds:
        raise UsageError(f"{where}: no seed; expected at least one, for example 0:6")
    if min(seeds) < 0:
        raise UsageError(f"{where}: {min(seeds)} is negative; expected seeds from 0 on")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: a seed is given twice, which repeats the same run; leave one out")
    return seeds


def choices_of(references: Sequence[str], params: Mapping[str, Any], *, always: Sequence[str]) -> list[MethodChoice]:
    """Return the methods of a comparison with the parameters that are set for them.

    Args:
        references: Names of methods, or ``PATH.py:CLASS``; those of ``always`` are added.
        params: ``parameter`` or ``method.parameter`` -> its value. The former is for all methods that have it.
        always: Methods that belong to it.

    Raises:
        UnknownName: There is no such method.
        ConfigError: A parameter is one of no method, or has an impossible value; all mistakes are listed.
    """
    unique = dict.fromkeys((*always, *references))
    names = {_row_name(reference): reference for reference in unique}
    if len(names) < len(unique):
        raise UsageError(f"methods {', '.join(unique)}: two of them have the same name; give yours another class name")
    kinds = {name: params_of(reference) for name, reference in names.items()}
    mistakes = list[str]()
    settable = {name: set(kind.model_fields) for name, kind in kinds.items()}
    fixed = _by_method(params, settable, mistakes, "--set")
    for name, kind in kinds.items():
        try:
            kind.model_validate(fixed[name])
        except ValidationError as error:
            mistakes += [f"{name}: {mistake}" for mistake in mistakes_of(error, kind)]
    if mistakes:
        raise ConfigError("parameters of the methods", mistakes)
    return [MethodChoice(name=name, method=names[name], params=fixed[name]) for name in names]


def own_sources_of(choices: Iterable[MethodChoice], encoder: str | None) -> dict[str, str]:
    """Return ``method NAME`` and ``encoder`` -> SHA-256 (hex) of the source, of those that are the user's own."""
    sources = own_sources(encoder=encoder)
    for choice in choices:
        for part, sha256 in own_sources(method=choice.method).items():
            sources[f"{part} {choice.name}"] = sha256
    return sources


def params_of(reference: str) -> type[MethodParams]:
    """Return the class of a method's parameters; a method from a file is made known to this process.

    Raises:
        UnknownName: There is no such method.
        UsageError: The file cannot be read, or what it names is no method.
    """
    name = reference
    if is_reference(reference):
        name = add_method(load_reference("method", reference))
    return methods.get(name).Params


def _row_name(reference: str) -> str:
    """Return the name of a method as its row has it: of one from a file, that of its class."""
    if is_reference(reference):
        return own_name(reference.rpartition(":")[2])
    return reference


def _by_method(
    values: Mapping[str, Any], parameters: Mapping[str, AbstractSet[str]], mistakes: list[str], option: str
) -> dict[str, dict[str, Any]]:
    """Return method -> parameter -> value.

    Args:
        values: ``parameter`` or ``method.parameter`` -> its value. The former is for all methods that have it.
        parameters: Method -> the parameters that may have a value.
        mistakes: Keys that fit no method are added to it.
        option: The option of the command line that has the values, for these mistakes.
    """
    for_one_method: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for_all_methods: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for key, value in values.items():
        method, _, parameter = key.rpartition(".")
        if method and method not in parameters:
            mistakes.append(str(UnknownName(f"method of {option} {key}", method, parameters)))
            continue
        if method:
            candidates = [method]
            target = for_one_method
        else:
            candidates = list(parameters)
            target = for_all_methods
        takers = [name for name in candidates if parameter in parameters[name]]
        if not takers:
            possible = set[str]().union(*(parameters[name] for name in candidates))
            mistakes.append(str(UnknownName(f"parameter of {option} {key}", parameter, possible)))
        for name in takers:
            target[name][parameter] = value
    # A value for one method takes precedence over one for all of them.
    return {name: for_all_methods[name] | for_one_method[name] for name in parameters}


def contenders_of(arguments: Arguments) -> list[Contender]:
    """Return the methods of a comparison with their search spaces: their files' own, but for what a user states.

    A parameter that is set to a value is not searched.

    Raises:
        ConfigError: A parameter is one of no method, set and searched at once, or its values are not allowed; all
            mistakes are listed.
        UsageError: Values cannot be read.
    """
    choices = {choice.name: choice for choice in arguments.methods}
    kinds = {name: params_of(choice.method) for name, choice in choices.items()}
    mistakes = list[str]()
    spaces = dict[str, Space]()
    for key, text in arguments.space.items():
        try:
            spaces[key] = parse_space(text)
        except UsageError as error:
            mistakes.append(f"--space {key}: {error}")
    # A search among values without effect would waste its trials.
    searchable = {name: kind.model_fields.keys() - set(kind.not_searched) for name, kind in kinds.items()}
    typed = _by_method(spaces, searchable, mistakes, "--space")
    contenders = []
    for name, kind in kinds.items():
        fixed = choices[name].params
        for parameter in sorted(fixed.keys() & typed[name].keys()):
            mistakes.append(f"{name}: {parameter} is set by --set and searched by --space; leave one of them out")
        own = {key: space for key, space in search_space(kind).items() if key not in fixed}
        try:
            checked = checked_space(kind, typed[name], where="--space")
        except ConfigError as error:
            mistakes += [f"--space {name}.{mistake}" for mistake in error.mistakes]
            continue
        contenders.append(Contender(choices[name], kind, own | checked))
    if mistakes:
        raise ConfigError("the search space", dict.fromkeys(mistakes))
    return contenders


def check_fields(fields: Mapping[str, Any]) -> None:
    """Require that no field of a simulation is one that the comparison sets itself.

    Raises:
        ConfigError: Some are; all of them are listed.
    """
    reasons = [f"{name}: a comparison sets it itself; leave it out" for name in OF_THE_COMPARISON if name in fields]
    reasons += [f"{name}: give it as running=Running({name}=...), {_RUNNING}" for name in OF_RUNNING if name in fields]
    if reasons:
        raise ConfigError(_SETTINGS, reasons)


def check_plan(fields: Mapping[str, Any]) -> None:
    """Require that the fields of all simulations have possible values, and go together.

    Raises:
        ConfigError: They do not; all mistakes are listed.
    """
    parse(Plan, {**fields, "method": ALWAYS[0]}, where=_SETTINGS)


def tuner_named(name: str) -> type[Tuner]:
    """Return how parameters are searched by the name on the command line.

    Raises:
        UnknownName: There is no such search; the nearest name is suggested.
    """
    if name not in TUNERS:
        raise UnknownName("search", name, TUNERS)
    return TUNERS[name]


def trial_plan(arguments: Arguments, choice: MethodChoice, params: Mapping[str, Any], rounds: int) -> Plan:
    """Return the simulation of a trial: evaluated at its end on validation samples, with the seed of the tuning."""
    fields = {
        **arguments.plan,
        "method": choice.method,
        "params": {**choice.params, **params},
        "rounds": rounds,
        "seed": arguments.tune_seed,
        "validation": arguments.validation,
        "evaluate_every": 0,
        "local": False,
    }
    return parse(Plan, fields, where=f"a trial of {choice.name}")


def run_plan(arguments: Arguments, choice: MethodChoice, params: Mapping[str, Any], seed: int) -> Plan:
    """Return the simulation of a run on test samples."""
    own_params = {**choice.params, **params}
    fields = {**arguments.plan, "method": choice.method, "params": own_params, "seed": seed, "local": False}
    return parse(Plan, fields, where=f"a run of {choice.name}")


def untuned_plan(arguments: Arguments, choice: MethodChoice, seed: int) -> Plan:
    """Return the simulation of a run with the method's defaults."""
    return run_plan(arguments, choice, {}, seed)


def _option_words(name: str, value: Any) -> Iterator[str]:
    """Yield the words by which a field of a simulation is given; none for a flag that is off."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (flag.rstrip("s"), f"{key}={_as_typed(item)}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from (flag, str(item))
    elif value is True:
        yield flag
    elif value is not False:
        yield from (flag, str(value))


def _as_typed(value: Any) -> str:
    """Return a value as the command line reads it: as JSON, or as it is where that is the same text."""
    text = json.dumps(value)
    if not isinstance(value, str):
        return text
    try:
        json.loads(value)
    except ValueError:
        return value
    return text


def command_of(arguments: Arguments, out: Path) -> Iterator[str]:
    """Yield the words of the command that makes a comparison again."""
    yield from ("headwater", "compare", *(choice.method for choice in arguments.methods))
    for name, value in arguments.plan.items():
        if name != "folder":
            yield from _option_words(name, value)
    for choice in arguments.methods:
        for key, value in choice.params.items():
            yield from ("--set", f"{choice.name}.{key}={_as_typed(value)}")
    for key, text in arguments.space.items():
        yield from ("--space", f"{key}={text}")
    yield from ("--seeds", ",".join(map(str, arguments.seeds)), "--tune", str(arguments.trials))
    yield from ("--search", arguments.search, "--tune-seed", str(arguments.tune_seed))
    yield from ("--validation", str(arguments.validation))
    if arguments.untuned:
        yield "--untuned"
    yield from ("--out", str(out))

"""What a row of a comparison rests on, worked out from its plan and its method, and where rows differ in it.

A table of methods compares the methods alone only where all rows train alike: the same optimizer and passes over the
samples, the same augmentation, network, batches, first weights and partition, and the same accuracy of the same round.
Here each of these is a line of text. It is derived: from the fields of the plan, from the method's parameters, from
`Method.local_work`, which stands in the method's own file, and from the parts of the model that it builds. Nothing of
it is written down for a table a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edge_agent import methods
from edge_agent.core.errors import HeadwaterError
from edge_agent.core.task import Frozen, ImageInput, Task
from edge_agent.data import partition
from edge_agent.methods import Method, Stage

from ..simulation.plan import MIN_SIZE, SIZE, Plan

_TRAVELS = {
    "global": "all of it travels",
    "local_stats": "gamma and beta travel, statistics stay",
    "local_all": "all of it stays",
}
_SCOPES = {
    "personal": "personal model",
    "global": "shared model",
    "after": "personal model right after local training",
    "new": "head of a client that joined after training",
}
_AVERAGES = {"clients_mean": "mean over clients", "samples_mean": "over all test samples"}
_AUGMENTATIONS = {
    "crop_flip": "crop from a frame of 4 pixels, flip",
    "flip_turn": "flips and rotations",
    "views": "a random view of each image",
}
_ROUNDS = {"last": "after the last round", "best": "the best round, chosen on test samples"}

LEAST_SAMPLES = {
    "dirichlet": MIN_SIZE,
    "pathological": MIN_SIZE,
    "quantity": MIN_SIZE,
    "fedrir_dirichlet": partition.FEDRIR_LEAST,
}
"""Rule -> the least samples of a client where the plan names no number."""

TUNED = "as tuned"
"""What stands in place of a number that a search has chosen."""

GIVEN_BY_DATA = ("domains", "subjects", "users")
"""Rules by which the data say who the clients are."""

Average = Literal["clients_mean", "samples_mean"]
Scope = Literal["personal", "global", "after", "new"]
When = Literal["last", "best"]


class Footing(Frozen):
    """What a row rests on, a line for each aspect; the description of a field is its name in tables."""

    optimizer: str = Field(description="optimizer")
    optimizer_state: str = Field(description="optimizer's state")
    passes: str = Field(description="passes in a round")
    end: str = Field(description="at the end")
    batches: str = Field(description="batches")
    augmentation: str = Field(description="augmentation")
    encoder: str = Field(description="encoder")
    parts: str = Field(description="parts of the model")
    batch_norm: str = Field(description="batch norm")
    initialisation: str = Field(description="first weights")
    partition: str = Field(description="partition")
    test_samples: str = Field(description="test samples")
    rounds: str = Field(description="rounds")
    metric: str = Field("", description="metric")
    round_counted: str = Field("", description="round counted")

    @classmethod
    def of(
        cls,
        plan: Plan,
        method: Method,
        *,
        average: Average | None = None,
        scope: Scope = "personal",
        when: When = "last",
        searched: Collection[str] = (),
    ) -> Footing:
        """Return what a run of this plan with this method rests on; no sample is read.

        Args:
            plan: The settings of the run.
            method: The plan's method with its parameters.
            average: The average that is compared; None: the run is not compared by one number, and the footing names
                neither metric nor round.
            scope: The accuracy that is compared.
            when: The round whose accuracy is compared.
            searched: Parameters that a search has chosen for each row by the same rule. Where they are numbers of the
                optimizer or of a batch the footing says so in place of the number, which is a result of the search.
        """
        metric = ""
        round_counted = ""
        if average is not None:
            metric = f"{_SCOPES[scope]}, {_AVERAGES[average]}"
            round_counted = _ROUNDS[when]
        return cls(
            optimizer=_optimizer(method, searched),
            optimizer_state=_optimizer_state(method),
            passes=_listed(method.local_work().rounds),
            end=_listed(method.local_work().end),
            batches=_batches(method, searched),
            augmentation=_augmentation(plan, method),
            encoder=_encoder(plan),
            parts=_parts(method),
            batch_norm=_batch_norm(method),
            initialisation=_initialisation(plan, method),
            partition=_partition(plan),
            test_samples=_test_samples(plan),
            rounds=_rounds(plan),
            metric=metric,
            round_counted=round_counted,
        )

    def named(self) -> dict[str, str]:
        """Return each aspect's name in tables -> what this row has; aspects without a value are left out."""
        values = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value:
                values[str(field.description)] = value
        return values


def footing_of(plan: Plan, method: Method | None = None, *, searched: Collection[str] = ()) -> dict[str, str]:
    """Return what a run of this plan rests on, by the names that tables show; no sample is read.

    Metric and round are left out: they are those of the comparison.

    Args:
        plan: The settings of the run.
        method: The plan's method, where it is at hand.
        searched: Parameters that a search has chosen, see `Footing.of`.

    Raises:
        UnknownName: There is no such method.
        ConfigError: The method does not have these parameters.
    """
    if method is None:
        method = methods.create(plan.method, plan.params, paper=plan.paper)
    return Footing.of(plan, method, searched=searched).named()


# --- one aspect each -------------------------------------------------------------------------------------------------


def _optimizer(method: Method, searched: Collection[str]) -> str:
    """Return the optimizer of local training with its numbers; "none" where nothing takes steps."""
    params = method.params
    work = method.local_work()
    if not any(stage.takes_steps for stage in work.rounds):
        return "none"
    step_size = f"step size {_number(method, 'lr', searched)}"
    if work.schedule:
        step_size = f"{step_size} {work.schedule}"
    text = f"Adam, {step_size}"
    if params.optimizer == "sgd":
        text = f"SGD, {step_size}, momentum {_number(method, 'momentum', searched)}"
    return f"{text}, weight decay {_number(method, 'weight_decay', searched)}"


def _number(method: Method, name: str, searched: Collection[str]) -> str:
    """Return a parameter's number, or that a search has chosen it."""
    if name in searched:
        return TUNED
    return f"{getattr(method.params, name):g}"


def _optimizer_state(method: Method) -> str:
    """Return whether a client keeps the optimizer's moments between rounds."""
    if not any(stage.takes_steps for stage in method.local_work().rounds):
        return "none"
    if getattr(method.params, "optimizer_state", "reset") == "persist":
        return "kept between rounds"
    return "reset in each stage of each round"


def _listed(stages: Sequence[Stage]) -> str:
    """Return stages in their order, in words; "nothing" without any."""
    if not stages:
        return "nothing"
    return ", then ".join(stage.describe() for stage in stages)


def _batches(method: Method, searched: Collection[str]) -> str:
    """Return the samples of a batch, and what becomes of a last batch that is small."""
    work = method.local_work()
    if not any(stage.takes_steps for stage in work.rounds):
        return "none"
    size = work.batch_size or method.params.batch_size
    shown_size = str(size)
    if not work.batch_size and "batch_size" in searched:
        shown_size = TUNED
    if work.drops_last:
        return f"{shown_size}; a last batch that is not whole sits out"
    least = min(work.smallest_batch, size)
    if least <= 1:
        return f"{shown_size}; a smaller last batch is used"
    if least == 2:
        return f"{shown_size}; a smaller last batch is used, a single sample joins the batch before"
    return f"{shown_size}; a smaller last batch is used, below {least} it joins the batch before"


def _augmentation(plan: Plan, method: Method) -> str:
    """Return how images are varied in training: by the plan, by the method, by both or not at all."""
    own = method.local_work().augmentation
    if plan.augment is None:
        return own
    if own == "none":
        return _AUGMENTATIONS[plan.augment]
    return f"{_AUGMENTATIONS[plan.augment]}, then {own}"


def _encoder(plan: Plan) -> str:
    """Return the encoder with its settings, and what of it learns."""
    encoder = plan.encoder_name or "the encoder that suits the inputs"
    if plan.encoder_name is None and plan.partition == "fedpac":
        encoder = "fedpac_cnn"
    if plan.encoder_params:
        numbers = ", ".join(f"{name} {value}" for name, value in sorted(plan.encoder_params.items()))
        encoder = f"{encoder} ({numbers})"
    if plan.peft is not None:
        encoder = f"{encoder}, of which {plan.peft} learns"
    return encoder


def _parts(method: Method) -> str:
    """Return the names of the parts of the model that the method builds, as it builds them on a small task."""
    import torch

    size = 28
    spec = ImageInput(channels=1, height=size, width=size, mean=(0.5,), std=(0.5,))
    task = Task(input=spec, class_names=tuple("0123456789"), encoder="small_cnn")
    try:
        # A look at its parts must not shift the random numbers of what follows.
        with torch.random.fork_rng(devices=[]):
            parts = [name for name, _ in method.build(task).named_children()]
    except HeadwaterError:
        return "its own"
    return ", ".join(parts)


def _batch_norm(method: Method) -> str:
    """Return what of batch norm travels, and whether statistics that stay are recomputed before a test."""
    text = _TRAVELS[method.norm]
    if method.norm != "global" and method.params.refresh_stats:
        text = f"{text} and are recomputed before a client answers"
    return text


def _initialisation(plan: Plan, method: Method) -> str:
    """Return what the first weights are, and whether all clients have the same."""
    text = f"random, {method.local_work().start}"
    if plan.weights is not None:
        text = f"encoder from {plan.weights.name}, the rest {text}"
    return text


def _partition(plan: Plan) -> str:
    """Return the rule of the partition with its settings."""
    if plan.saved_partition is not None:
        return f"file {plan.saved_partition.name}"
    rule = str(plan.rule)
    settings = []
    if plan.clients is not None:
        settings.append(f"{plan.clients} clients")
    if plan.alpha is not None:
        settings.append(f"alpha {plan.alpha:g}")
    if rule == "fedpac":
        settings.append(f"size {plan.size or SIZE}")
    elif plan.size is not None:
        settings.append(f"size {plan.size}")
    if plan.iid_share is not None:
        settings.append(f"{plan.iid_share:.0%} of it over all classes")
    if plan.classes_each is not None:
        settings.append(f"{plan.classes_each} classes each")
    least = plan.min_size or LEAST_SAMPLES.get(rule)
    if least is not None:
        settings.append(f"at least {least} samples each")
    origin = partition.ORIGINS.get(rule)
    if origin is not None:
        settings.append(origin)
    return ", ".join([rule, *settings])


def _test_samples(plan: Plan) -> str:
    """Return where a client's test samples are from."""
    if plan.validation is not None:
        return f"none: {plan.validation:.0%} of the training samples are held out in their place"
    if plan.saved_partition is not None:
        return "those of the partition"
    try:
        has_test_part = all(partition.parts_of(source) is not None for source in plan.data)
    except HeadwaterError:
        return "unknown: the source of the data cannot be read"
    if not has_test_part:
        how = "at random" if plan.rule in partition.SPLIT_AT_RANDOM else "class by class"
        return f"{plan.test_fraction:.0%} of each client's samples, {how}"
    if plan.partition == "fedpac":
        size = plan.test_size or plan.size or SIZE
        return f"the data's own test part, {size} for each client by the same rule"
    whose = "the client's own" if plan.partition in GIVEN_BY_DATA else "in the client's mixture of classes"
    return f"the data's own test part, {whose}"


def _rounds(plan: Plan) -> str:
    """Return how many rounds there are, and which share of the clients takes part in one."""
    share = "all clients in each"
    if plan.fraction_max is not None:
        share = f"{plan.fraction:.0%} to {plan.fraction_max:.0%} of the clients in each"
    elif plan.fraction < 1:
        share = f"{plan.fraction:.0%} of the clients in each"
    if plan.full_last_round:
        share = f"{share}, all in the last"
    if plan.dropout:
        share = f"{share}, of whom {plan.dropout:.0%} drop out"
    return f"{plan.rounds}, {share}"


# --- the rows of a table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedFooting:
    """The footings of the rows of a table: what they have in common, and where each of them differs."""

    common: Mapping[str, str]
    """Aspect -> what all rows have."""

    usual: Mapping[str, str]
    """Aspect -> what more rows have than anything else, where some rows have something else."""

    differences: Mapping[str, Mapping[str, str]]
    """Row -> aspect -> what this row has, where that is not the usual."""

    @classmethod
    def among(cls, rows: Mapping[str, Mapping[str, str]]) -> SharedFooting:
        """Return what rows have in common; ``rows`` is the name of each row -> aspect -> what it has."""
        common: dict[str, str] = {}
        usual: dict[str, str] = {}
        differences: dict[str, dict[str, str]] = {row: {} for row in rows}
        aspects = dict.fromkeys(aspect for footing in rows.values() for aspect in footing)
        for aspect in aspects:
            values = {row: footing.get(aspect, "") for row, footing in rows.items()}
            most_frequent, *others = Counter(values.values()).most_common(2)
            if not others:
                common[aspect] = most_frequent[0]
                continue
            # Where two values are equally frequent no row is the odd one: each says what it has.
            is_usual = most_frequent[1] > others[0][1]
            if is_usual:
                usual[aspect] = most_frequent[0]
            for row, value in values.items():
                if not is_usual or value != most_frequent[0]:
                    differences[row][aspect] = value
        return cls(common, usual, {row: aspects for row, aspects in differences.items() if aspects})

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object: what all rows have, what is usual, and what single rows have instead."""
        return {
            "all_rows": dict(self.common),
            "usual": dict(self.usual),
            "differences": {row: dict(aspects) for row, aspects in self.differences.items()},
        }

    def sentences(self) -> Iterator[str]:
        """Yield it in words: a line on what all rows have, one on the usual, and one for each row that differs."""
        if self.common:
            yield f"all rows: {in_words(self.common)}"
        if self.usual:
            yield f"usual: {in_words(self.usual)}"
        for row, aspects in self.differences.items():
            yield f"≠ {row}: {in_words(aspects)}"


def in_words(aspects: Mapping[str, str]) -> str:
    """Return aspects with their values in one line."""
    return " · ".join(f"{aspect}: {value}" for aspect, value in aspects.items())

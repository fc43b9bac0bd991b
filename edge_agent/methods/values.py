"""What methods, local training and the coordinator pass to each other: clients, updates, parameters. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import numpy as np
from pydantic import Field, ValidationError

from ..core.errors import ConfigError, TrainingFailed
from ..core.published import Published
from ..core.search_space import Choices, Range, Space
from ..core.task import Frozen, Task, Tensors

if TYPE_CHECKING:
    import torch

    from ..core.config import Precision
    from ..training.parts import Parts

Norm = Literal["global", "local_stats", "local_all"]
"""The part of a batch norm layer that travels: all of it; gamma and beta only; nothing."""

Grade = Literal["exact", "same form", "approximate"]
"""The grade of a head fitted on frozen features: how close it is to the personal part that the method trains.

exact: equal to it on the same features and random numbers. same form: the same layers and loss, but another start,
other steps, or features of a frozen encoder where the method trains the encoder along. approximate: anything else.
"""

GRADES: tuple[Grade, ...] = get_args(Grade)

Exactness = Mapping[str, tuple[Grade, str]]
"""Device head -> its grade where the exported encoder is the one that the client has, and why."""

REFRESH = (
    "before a client predicts, batch norm statistics that stay with it are recomputed on its own training samples "
    "under the received weights; false: those of its last training, which belong to other weights"
)


def grades(**heads: tuple[Grade, str]) -> Exactness:
    """Return the grades of a method's device heads: ``grades(mlp=("exact", "why"))``."""
    return heads


def ours(default: Any, *, paper: Any, description: str, search: Space | None = None, **limits: Any) -> Any:
    """Return a parameter whose default is ours; ``paper`` is the published value, which ``--paper`` takes.

    ``search``: the values that a search tries, as in `searched`.
    """
    extra: dict[str, Any] = {"paper": paper}
    if search is not None:
        extra["search"] = search
    return Field(default, description=description, json_schema_extra=extra, **limits)


def searched(default: Any, search: Space, *, description: str, **limits: Any) -> Any:
    """Return a parameter that 'headwater compare' and 'headwater sweep' search.

    Args:
        default: The default.
        search: The values that they try, such as ``Range(0.001, 0.1, log=True)`` or ``Choices((0, 0.01, 0.1))``.
        description: What the parameter is.
        limits: What pydantic's ``Field`` takes, such as ``gt=0``.
    """
    extra: dict[str, Any] = {"search": search}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def search_space(params: type[MethodParams]) -> dict[str, Space]:
    """Return the values that a search tries by the names of the parameters that have some, in the order of the fields.

    A field that a method defines again keeps the values of the class that it derives from, unless it states its own.
    Fields in ``not_searched`` are left out.

    Raises:
        ConfigError: Nothing can be drawn, or a value is not allowed; the message lists all mistakes.
    """
    spaces: dict[str, Space] = {}
    for name in params.model_fields:
        if name in params.not_searched:
            continue
        space = _stated_space(params, name)
        if space is not None:
            spaces[name] = space
    return checked_space(params, spaces, where=f"search space of {params.__name__}")


def _stated_space(params: type[MethodParams], name: str) -> Space | None:
    """Return the values of a field as the nearest class states them that does; None: no class does."""
    for base in params.__mro__:
        fields = getattr(base, "model_fields", {})
        extra = fields[name].json_schema_extra if name in fields else None
        if isinstance(extra, dict) and "search" in extra:
            space: Space = extra["search"]
            return space
    return None


def checked_space(params: type[MethodParams], spaces: Mapping[str, Space], *, where: str) -> dict[str, Space]:
    """Return the same spaces, with ranges of whole numbers where a parameter is one.

    Args:
        params: The parameters of a method.
        spaces: Name of a parameter -> the values that a search tries.
        where: What the message of an error begins with.

    Raises:
        ConfigError: A parameter is unknown, nothing can be drawn, or a value is not allowed; all mistakes are listed.
    """
    checked: dict[str, Space] = {}
    mistakes = list[str]()
    stated: Mapping[str, Any] = spaces  # a method's file may have anything there
    for name, space in stated.items():
        if not isinstance(space, Range | Choices):
            mistakes.append(f"{name}: {type(space).__name__}, expected a Range or Choices")
            continue
        checked[name] = _with_type_of_parameter(params, name, space)
        mistakes += _mistakes_of_space(params, name, checked[name])
    if mistakes:
        raise ConfigError(where, mistakes)
    return checked


def _with_type_of_parameter(params: type[MethodParams], name: str, space: Space) -> Space:
    """Return the same values; a range is one of whole numbers where the parameter is a whole number."""
    if isinstance(space, Range) and name in params.model_fields:
        return replace(space, whole=params.model_fields[name].annotation is int)
    return space


def _mistakes_of_space(params: type[MethodParams], name: str, space: Space) -> list[str]:
    """Return why nothing can be drawn from a space; else why the parameter does not take its ends, each reason once."""
    from ..core.config import mistakes_of

    impossible = [f"{name}: {reason}" for reason in space.mistakes()]
    if impossible:
        return impossible
    refused: dict[str, None] = {}
    for value in space.ends():
        try:
            params.model_validate({name: value})
        except ValidationError as error:
            refused |= dict.fromkeys(mistakes_of(error, params))
    return list(refused)


def refreshed_stats() -> Any:
    """Return the parameter ``refresh_stats`` of a method that leaves batch norm statistics at clients.

    On by default.
    """
    return ours(True, paper=False, description=f"{REFRESH} (the paper); ours")


def paper_values(params: type[MethodParams]) -> dict[str, Any]:
    """Return name -> published value of the parameters whose default is ours, which are those that ``--paper`` sets."""
    return {
        name: field.json_schema_extra["paper"]
        for name, field in params.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and "paper" in field.json_schema_extra
    }


class MethodParams(Frozen):
    """Fields that every method has; methods add theirs, each with its symbol and source."""

    not_searched: ClassVar[tuple[str, ...]] = ()
    """Fields that a search leaves alone although they have values to try: those without effect in this method."""

    lr: float = searched(0.01, Range(0.001, 0.3, log=True), gt=0, description="learning rate of local training")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="of local training; adam ignores momentum")
    momentum: float = Field(0.5, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    batch_size: int = Field(50, ge=1)
    local_epochs: int = Field(1, ge=0, description="E, passes over local data in one round")
    norm: Norm | None = Field(
        None,
        description="what travels of batch norm: global = all, local_stats = gamma and beta, local_all = nothing; "
        "none: what the method's source says",
    )
    refresh_stats: bool = Field(False, description=REFRESH)

    published: ClassVar[Mapping[str, tuple[Published, ...]]] = {}
    """Field -> its published values, each with its source; those of a class that is derived from are added to."""


@dataclass(frozen=True)
class Stage:
    """A stage of a client's work: what learns, and how often the client's training samples are gone through."""

    learns: str
    """What learns, such as ``encoder and head``; or what is done, where nothing takes gradient steps."""

    passes: float = 0.0
    """The number of passes over the client's training samples with gradient steps."""

    steps: int = 0
    """The number of batches, where those are counted and not passes."""

    lr: float | None = None
    """The step size, where it is not that of the parameters; None: it is."""

    uses_labels: bool = True
    """Whether the loss depends on labels."""

    @property
    def takes_steps(self) -> bool:
        """Whether an optimizer takes steps."""
        return bool(self.passes or self.steps)

    def describe(self) -> str:
        """Return the stage in a few words, such as ``1 of head (step size 0.1)``."""
        text = self.learns
        if self.steps:
            text = f"{self.steps} {'batch' if self.steps == 1 else 'batches'} of {self.learns}"
        elif self.passes:
            text = f"{self.passes:g} of {self.learns}"
        remarks = []
        if self.lr is not None:
            remarks.append(f"step size {self.lr:g}")
        if not self.uses_labels:
            remarks.append("without labels")
        return f"{text} ({', '.join(remarks)})" if remarks else text


@dataclass(frozen=True)
class LocalWork:
    """What a method does with a client's samples, in a round and at the end of a run.

    Tables that compare methods show it, so that rows which train more, or otherwise, are recognised.
    """

    rounds: tuple[Stage, ...]
    """The stages of each round, in their order; empty: nothing is trained."""

    end: tuple[Stage, ...] = ()
    """What follows the last round, and precedes each evaluation between rounds."""

    augmentation: str = "none"
    """How images are varied in training."""

    batch_size: int | None = None
    """The samples of a batch, where they are not the parameter ``batch_size``; None: they are."""

    smallest_batch: int = 2
    """A last batch of fewer samples joins the one before it."""

    drops_last: bool = False
    """Whether a last batch that is not whole sits out."""

    schedule: str = ""
    """How the step size changes over rounds; empty: it does not."""

    start: str = "the same for all clients"
    """Whose first weights a client has."""


class TrainingCheckpoint(Protocol):
    """The contract of a checkpoint inside local training, from which a killed process resumes."""

    def is_due(self) -> bool:
        """Return whether the state should be saved now."""

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save a state: named arrays, and what JSON can hold."""

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return the state that was saved last for this very training; None where there is none."""

    def end(self, state: Callable[[], tuple[Tensors, dict[str, Any]]]) -> None:
        """Note that a call of `train` has ended with that state; another one may follow within this training."""


@dataclass(frozen=True)
class TrainingControl:
    """The control of one local training: how it is shortened, stopped and resumed."""

    share: float = 1.0
    """The share (0..1] of the steps to do; below 1 on a device that would be late."""

    is_cancelled: Callable[[], bool] = lambda: False
    """Asked before each step."""

    checkpoint: TrainingCheckpoint | None = None


@dataclass
class Client:
    """The client that a method's client half works with; all random numbers come from ``rng`` and ``generator``.

    ``model`` holds the received shared tensors and this client's personal ones. ``memory`` holds named arrays that
    survive rounds, restarts and missed rounds. ``train_inputs`` (n, ...) float32 and ``train_labels`` (n,) int64 lie on
    ``device``. Steps are done in ``precision``: bfloat16 is mixed, weights stay float32. ``log`` takes numbers that
    travel with the update as metrics (``client.log["loss"] = 0.3``); names are letters, digits, dots, - and _.
    """

    id: str
    model: Parts
    train_inputs: torch.Tensor
    train_labels: torch.Tensor
    task: Task
    device: torch.device
    rng: np.random.Generator
    generator: torch.Generator
    round: int = 1
    rounds: int = 1
    precision: Precision = "float32"
    memory: Tensors = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)
    control: TrainingControl = TrainingControl()
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None
    """The random views of the inputs that every step of training sees; None: the inputs as they are."""

    @property
    def samples(self) -> int:
        """Number of training samples, n_i."""
        return len(self.train_labels)

    def require_samples(self) -> None:
        """Require that there are training samples.

        Raises:
            TrainingFailed: There is none.
        """
        if not self.samples:
            raise TrainingFailed(
                f"client '{self.id}' has no training samples; it takes no part until it has some", is_public=True
            )


@dataclass(frozen=True)
class Update:
    """One client's accepted update; ``weight`` is its training sample count."""

    client: str
    weight: float
    tensors: Tensors


@dataclass(frozen=True)
class ClassStatistics:
    """The arrays of an update that describe its client's classes, for the coordinator's check of them.

    The coordinator compares those of one client with those of the others: class by class, so that nobody passes the
    features of one class for those of another, and in length and number, so that nobody counts for many.
    """

    means: tuple[str, ...] = ()
    """Names of arrays with the mean feature of each class, zeros for a class that the client lacks."""

    sums: tuple[str, ...] = ()
    """The same for sums over samples, or shares of a mean: their length says how much of the class there is."""

    counts: str = ""
    """Name of the array (K,) of each class's sample count, which the means are weighted with; empty: there is none."""

    moments: tuple[str, ...] = ()
    """Names of arrays that are summed over the samples of all classes, beside the ``sums``."""

    class_axis: int = 0
    """The axis of ``means`` and ``sums`` that is that of the classes, 0 or 1."""

    @property
    def names(self) -> frozenset[str]:
        """All arrays that are named here."""
        counts = (self.counts,) if self.counts else ()
        return frozenset((*self.means, *self.sums, *counts, *self.moments))

"""The contract of a method: both halves of a federated algorithm in one file.

A method is a subclass of `Method` called ``Method`` in ``edge_agent/methods/<name>.py``. The coordinator calls
``start``, ``broadcast``, ``downlink`` and ``aggregate``; an agent calls ``local_update``, ``predict`` and
``personalize``. A method never learns how its tensors travel. This module imports no torch: a head-tier device may
read a method's name and parameters.

Tensor names are those of ``build(task).state_dict()``: the first word is the part (``encoder.conv1.weight`` belongs to
part ``encoder``). Extra arrays that are not weights (prototypes, statistics) start with ``extra.``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from pydantic import Field

from ..errors import TrainingFailed
from ..task import Frozen, State, Task, Tensors

if TYPE_CHECKING:
    import torch

    from ..config import Precision
    from ..training.parts import Parts

Norm = Literal["global", "local_stats", "local_all"]
"""What travels of a batch norm layer: all of it; gamma and beta only; nothing."""

Grade = Literal["exact", "same form", "approximate"]
"""How close a head fitted on frozen features is to the personal part that the method trains itself.

exact: equal to it on the same features and random numbers. same form: the same layers and loss, but another start,
other steps, or features of a frozen encoder where the method trains the encoder along. approximate: anything else.
"""

GRADES: tuple[Grade, ...] = get_args(Grade)

Exactness = Mapping[str, tuple[Grade, str]]
"""Device head -> its grade where the exported encoder is the one that the client has, and why."""

POOLED_NORM = (
    "the exported encoder has batch norm pooled over the clients (norm = {norm}), where a client of the run has its own"
)


REFRESH = (
    "before a client answers, batch norm statistics that stay with it are taken anew from its own training samples "
    "under the received weights; false: those of its last training, which belong to other weights"
)


def refreshed_stats() -> Any:
    """``refresh_stats`` of a method that leaves batch norm statistics at clients: on by default, which is ours."""
    return ours(True, paper=False, description=f"{REFRESH} (the paper); ours")


def paper_values(params: type[MethodParams]) -> dict[str, Any]:
    """Name -> published value of the parameters whose default is ours; all others have the paper's as their default."""
    return {
        name: field.json_schema_extra["paper"]
        for name, field in params.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and "paper" in field.json_schema_extra
    }


LocalUpdate = TypeVar("LocalUpdate", bound=Callable[..., Tensors])


@dataclass(frozen=True)
class Plain:
    """What a plain local update does not do: parts that are ``frozen`` get no gradient and run in eval mode."""

    frozen: tuple[str, ...] = ()


_PLAIN: dict[Callable[..., Tensors], Plain] = {}


def plain(*, frozen: tuple[str, ...] = ()) -> Callable[[LocalUpdate], LocalUpdate]:
    """A mark for a ``local_update`` that does nothing but what this says.

    It is E epochs of the batch mean of cross entropy of ``client.model`` by one optimizer, all as ``params`` say, with
    no random numbers but the order of samples; it looks neither at what was received nor at memory, and sends the
    shared tensors. Whoever trains many clients at once may then do so without calling it. A subclass with a
    ``local_update`` of its own is not plain, unless that is marked as well.
    """

    def marked(update: LocalUpdate) -> LocalUpdate:
        _PLAIN[update] = Plain(frozen)
        return update

    return marked


def ours(default: Any, *, paper: Any, description: str, **limits: Any) -> Any:
    """A parameter whose default is ours; ``paper`` is the published value, which ``--paper`` takes."""
    return Field(default, description=description, json_schema_extra={"paper": paper}, **limits)


class MethodParams(Frozen):
    """Fields that every method has; methods add theirs, each with its symbol and source."""

    lr: float = Field(0.01, gt=0, description="learning rate of local training")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="of local training; adam takes no heed of momentum")
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


@dataclass
class Client:
    """What a method's client half works with. Everything random comes from ``rng`` and ``generator``.

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

    @property
    def samples(self) -> int:
        """Number of training samples, n_i."""
        return len(self.train_labels)


@dataclass(frozen=True)
class Update:
    """One client's accepted update; ``weight`` is its training sample count."""

    client: str
    weight: float
    tensors: Tensors


class Method(ABC):
    """One federated algorithm. Subclasses state what travels and override the verbs in which they differ."""

    Params: ClassVar[type[MethodParams]] = MethodParams
    norm: Norm = "global"
    evaluate_after: ClassVar[bool] = False
    """Whether a round's evaluation is repeated after local training (as ``acc.after``): some papers quote that one."""

    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    heads: ClassVar[tuple[str, ...]] = ("lr", "svm", "mlp", "prototype")
    exactness: ClassVar[Exactness] = {}
    """Grades of the device heads that belong to this method; `card` has those of all."""

    source: ClassVar[str] = ""
    """Paper: authors, title, venue."""

    def __init__(self, params: MethodParams | None = None) -> None:
        self.params: Any = params if params is not None else self.Params()
        if self.params.norm is not None:
            self.norm = self.params.norm

    @property
    def name(self) -> str:
        """The file name, which is the method's name everywhere."""
        return type(self).__module__.rsplit(".", 1)[-1]

    @property
    def head_name(self) -> str:
        """What classifies on a train-tier client: ``model`` = the model's own layers, else a device head."""
        return "model"

    @property
    def needs_last_round(self) -> bool:
        """Whether something happens in the last round without which the run was in vain, so it may not end earlier."""
        return False

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts that travel; everything else never leaves the device."""
        return ("encoder", "head")

    def sends(self, model: Parts, task: Task) -> Tensors:  # noqa: ARG002 - part of the contract
        """Extra arrays that an update carries beside the shared parts, as zeros of the very shapes and dtypes.

        Their names start with ``extra.``. Each update carries all of them: what a client does not have (a class, say)
        is marked inside, by a count of 0.
        """
        return {}

    def objection(self, tensors: Tensors) -> str:  # noqa: ARG002 - part of the contract
        """Why an update of the right names, shapes and finite values still cannot be honest; empty when it can."""
        return ""

    def check(self, task: Task) -> None:  # noqa: B027 - most methods can do every task
        """Nothing, where the method can do this task; asked before a run is taken.

        Raises:
            ConfigError: it cannot; all reasons are listed.
        """

    def build(self, task: Task) -> Parts:
        """A model of named parts, with fresh weights from torch's global generator (seeded by the caller)."""
        from ..training.parts import encoder_and_head

        return encoder_and_head(task)

    def shared_names(self, model: Parts) -> tuple[str, ...]:
        """Names of the tensors that travel both ways, sorted: the shared parts under this method's norm policy."""
        from ..training.parts import names_that_travel

        return names_that_travel(model, self.shared, self.norm)

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start(self, tensors: Tensors) -> State:
        """The first state, from the shared tensors of one fresh model."""
        return dict(tensors)

    def broadcast(self, state: State) -> Tensors:
        """What every client of the round receives, identical for all."""
        return state

    def downlink(self, state: State, client: str) -> Tensors:  # noqa: ARG002 - part of the contract
        """What this client alone receives in addition; default: nothing."""
        return {}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The next state. Updates come one at a time in client order; default: their weighted mean, streamed."""
        mean = weighted_mean(self._weighted(updates))
        return {**state, **mean}

    def _weighted(self, updates: Iterable[Update]) -> Iterator[tuple[float, Tensors]]:
        for update in updates:
            yield (update.weight if self.weighting == "samples" else 1.0), update.tensors

    # --- client ----------------------------------------------------------------------------------------------------

    @classmethod
    def plain_update(cls) -> Plain | None:
        """What is known of this method's ``local_update`` where it is marked as `plain`; else None."""
        return _PLAIN.get(cls.local_update)

    @abstractmethod
    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Train on local data from ``received`` (already loaded into ``client.model``); returns what is sent.

        Raises:
            TrainingFailed: the loss is not finite, or the data do not allow a step.
        """

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Class probabilities (n, K) float32 of this client's personal model."""
        from ..training.loops import predict_probabilities

        return predict_probabilities(client.model, inputs)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Class probabilities (n, K) of the shared model alone, or None where a method has no shared classifier."""
        if "head" not in self.shared:
            return None
        return self.predict(client, inputs)

    def views(self, client: Client, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Features (n, d) of ``inputs`` by name, for analysis: the encoder's first, then what is made of them.

        ``mask`` (n, d), where a method has one, is no features but the weights 0..1 by which it picks the encoder's.
        """
        from ..training.loops import features_of

        return {"encoder": features_of(client.model, inputs)}

    def personalize(self, client: Client, received: Tensors) -> None:  # noqa: B027 - many have nothing to fit
        """After the last round: fit what is personal to the final shared parts; default: nothing."""

    # --- export ----------------------------------------------------------------------------------------------------

    def head_params(self, head: str) -> dict[str, Any]:  # noqa: ARG002 - part of the contract
        """Parameters that this method gives a device head by default; default: the head's own."""
        return {}

    def card(self, head: str) -> tuple[Grade, str]:
        """The grade of a device head under these parameters, and the reason.

        Where batch norm stays with clients no head is exact: a device gets the pooled one.
        """
        other = f"not part of {self.name}: another classifier on its frozen features"
        grade, why = self.exactness.get(head, ("approximate", other))
        if self.norm == "global":
            return grade, why
        return "same form" if grade == "exact" else grade, f"{why}; {POOLED_NORM.format(norm=self.norm)}"

    def global_head(self, state: State) -> Tensors | None:
        """Shared linear classifier (``weight`` (K, d), ``bias`` (K,)) on raw features, or None."""
        if "head.weight" not in state:
            return None
        return {"weight": state["head.weight"], "bias": state["head.bias"]}


def weighted_mean(weighted: Iterable[tuple[float, Tensors]]) -> Tensors:
    """Weighted mean of named arrays, folded in one at a time so that memory is one accumulator.

    Sums are float64 and in the given order, so the same updates in the same order give the same bits. Integer arrays
    (counters) take the largest value: a mean of counters means nothing.

    Raises:
        TrainingFailed: no updates, or weights that sum to zero.
    """
    total, sums, dtypes = 0.0, dict[str, np.ndarray](), dict[str, np.dtype[Any]]()
    for weight, tensors in weighted:
        total += weight
        for name, array in tensors.items():
            dtypes.setdefault(name, array.dtype)
            if array.dtype.kind != "f":
                sums[name] = np.maximum(sums[name], array) if name in sums else array.copy()
            elif name in sums:
                _add_scaled(sums[name], array, weight)
            else:
                sums[name] = array.astype(np.float64) * weight
    if not total > 0:
        raise TrainingFailed("no update with a positive weight to average; the round keeps its state")
    # Each sum goes as its mean comes: a 45 MB model would else lie here three times over.
    return {name: _mean(sums.pop(name), total, dtypes[name]) for name in tuple(sums)}


def _mean(summed: np.ndarray, total: float, dtype: np.dtype[Any]) -> np.ndarray:
    return (summed / total).astype(dtype) if dtype.kind == "f" else summed


def _add_scaled(accumulator: np.ndarray, array: np.ndarray, weight: float, block: int = 1 << 16) -> None:
    """accumulator += weight * array, in blocks that stay in cache: no temporary of the array's size."""
    flat, source = accumulator.reshape(-1), array.reshape(-1)
    for begin in range(0, flat.size, block):
        part = source[begin : begin + block].astype(np.float64)
        part *= weight
        flat[begin : begin + block] += part

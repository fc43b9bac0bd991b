"""Seeded mini-batch training and evaluation, with guards that name the cause when something goes wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..core.errors import DataError, StateError, TrainingCancelled, TrainingFailed, raiser_of
from ..core.task import Tensors
from ..methods.values import Client, MethodParams, TrainingCheckpoint
from .parts import Parts, load_arrays, to_arrays

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Scalar loss of a batch: inputs (b, ...), labels (b,)."""

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One step of learning from a batch, updates included; returns the batch's scalar loss as it was before."""


def batches(
    samples: int, batch_size: int, rng: np.random.Generator, *, drop_last: bool = False, smallest: int = 2
) -> list[np.ndarray]:
    """Return index arrays (b,) int64 of one epoch in random order; together every sample once.

    A last batch of fewer than ``smallest`` samples joins the one before it: batch norm cannot learn from one sample,
    and dropping it would make the same sample count less than others. With ``drop_last`` the samples behind the last
    whole batch sit out this epoch; fewer samples than one batch still make a short one.
    """
    order = rng.permutation(samples)
    if drop_last and samples > batch_size:
        order = order[: samples - samples % batch_size]
        samples = len(order)
    cuts = list(range(batch_size, samples, batch_size))
    if cuts and samples - cuts[-1] < min(smallest, batch_size):
        cuts.pop()
    return np.split(order, cuts) if samples else []


def local_optimizer(
    parameters: Iterable[torch.Tensor], params: MethodParams, *, lr: float | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer that ``params`` ask for, SGD or Adam; fused (one pass over the weights) where possible."""
    weights = list(parameters)
    options: dict[str, Any] = {"lr": lr or params.lr, "weight_decay": params.weight_decay}
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    if params.optimizer == "sgd":
        make = torch.optim.SGD
        options["momentum"] = params.momentum
    try:
        return make(weights, fused=True, **options)
    except RuntimeError:
        return make(weights, **options)


def cross_entropy(model: nn.Module) -> Loss:
    """Return the batch mean of softmax cross entropy of a model's logits."""
    return lambda inputs, labels: F.cross_entropy(model(inputs), labels)


def train(
    client: Client,
    loss: Loss,
    params: MethodParams,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    frozen: Sequence[str] = (),
    before_step: Callable[[], None] | None = None,
    weights: Mapping[str, float] = MappingProxyType({}),
    **options: Any,
) -> float:
    """Train ``client.model`` in place as ``params`` say; returns the last epoch's mean loss (NaN for zero epochs).

    The default ``optimizer`` is that of ``params``, with step size ``lr`` where given, for all parts that are not
    ``frozen``. ``before_step`` may change gradients. ``weights`` of the loss's terms are named where the loss is not
    finite. All other options are those of `train_by_steps`.

    Raises:
        TrainingFailed: See `train_by_steps`.
    """
    if optimizer is None:
        named = client.model.named_parameters()
        learning = [weight for name, weight in named if weight.requires_grad and name.split(".", 1)[0] not in frozen]
        optimizer = local_optimizer(learning, params, lr=lr)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss(inputs, labels)
        value.backward()  # type: ignore[no-untyped-call]
        if before_step is not None:
            before_step()
        optimizer.step()
        return value

    suspects = {"lr": optimizer.param_groups[0]["lr"], **weights}
    return train_by_steps(client, step, params, suspects=suspects, frozen=frozen, optimizer=optimizer, **options)


def train_by_steps(
    client: Client,
    step: Step,
    params: MethodParams,
    *,
    suspects: Mapping[str, float],
    epochs: int | None = None,
    batch_size: int | None = None,
    steps: int = 0,
    frozen: Sequence[str] = (),
    frozen_norm: Literal["eval", "train"] = "eval",
    drop_last: bool = False,
    smallest_batch: int = 2,
    log: str = "loss",
    terms: Mapping[str, torch.Tensor] = MappingProxyType({}),
    optimizer: torch.optim.Optimizer | None = None,
    beside: torch.optim.Optimizer | None = None,
) -> float:
    """Train as `train` does, for methods whose steps are more than one optimizer's; ``step`` does all of a batch.

    ``suspects`` are named, with their values, where the loss is not finite. ``epochs`` and ``batch_size`` are those of
    ``params`` unless given; ``steps`` other than 0 is the number of steps to do, in as many epochs as that takes. The
    parts called ``frozen`` get no gradient. They run in eval mode; with ``frozen_norm`` "train" they stay in train
    mode: their batch norm takes the batch's statistics, and the running ones move (some papers' code does so).
    ``drop_last`` and ``smallest_batch`` are those of `batches`. The mean loss of the last epoch is logged as ``log``,
    and so are the means of ``terms``: parts of the loss by name, which ``step`` puts there for each batch.

    ``client.control`` may shorten the training, stop it, and resume it from a checkpoint with the same bits; the
    states of ``optimizer``, and of one that works ``beside`` it, are in the checkpoint. A shortened training logs its
    share of the steps as ``work``.

    Raises:
        TrainingFailed: There are no samples, only one where batch norm needs two, or the loss is not finite.
        TrainingCancelled: ``client.control`` has stopped the training.
    """
    epochs = params.local_epochs if epochs is None else epochs
    batch_size = batch_size or params.batch_size
    if not client.samples:
        raise TrainingFailed(
            f"client '{client.id}' has no training samples; it takes no part until it has some", is_public=True
        )
    control = client.control
    mean_loss = math.nan
    optimizers = [*filter(None, (optimizer, beside))]
    position, known_loss = begun(client, optimizers)
    if known_loss is not None:
        return known_loss
    with training_mode(client.model, frozen, frozen_norm):
        for epoch in range(position.epoch, (steps or epochs) + 1):
            position.begin(client, epoch)
            split = batches(client.samples, batch_size, client.rng, drop_last=drop_last, smallest=smallest_batch)
            if control.share < 1 and not steps:
                steps = max(1, round(control.share * epochs * len(split)))
                client.log["work"] = steps / (epochs * len(split))
            split = split[: steps - position.before_epoch] if steps else split
            position.within(client)
            # Sums stay on the device: no wait for the GPU in each step.
            for indices in split[position.batch :]:
                if control.is_cancelled():
                    raise TrainingCancelled(f"client '{client.id}': training of round {client.round} was cancelled")
                value = _value(client, step, torch.from_numpy(indices).to(client.device))
                position.add(value, terms, len(indices))
                save_if_due(client, optimizers, position)
            samples = sum(map(len, split))
            sums = {name: float(added) / samples for name, added in position.sums.items()}
            mean_loss = sums.pop("")
            if not math.isfinite(mean_loss):
                raise diverged(client, mean_loss, f"{epoch} of {epochs}", suspects)
            client.log |= {**sums, log: mean_loss}
            position.before_epoch += len(split)
            if position.before_epoch == steps:
                break
    if control.checkpoint is not None:
        control.checkpoint.end(lambda: ended(client, optimizers, position, mean_loss))
    return mean_loss


def diverged(client: Client, loss: float, epoch: str, suspects: Mapping[str, float]) -> TrainingFailed:
    """Return the error where a loss is not finite; ``epoch``: which of how many."""
    return TrainingFailed(
        f"client '{client.id}': loss became {loss} in epoch {epoch} at "
        f"{', '.join(f'{name} {value:g}' for name, value in suspects.items())}; "
        f"expected a finite number; lower {' or '.join(suspects)}, or look for extreme values in the data",
        is_public=True,
    )


def _value(client: Client, step: Step, chosen: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch of the client's training samples, whose numbers are ``chosen`` (n,).

    Raises:
        TrainingFailed: the batch has a single sample, and the model has batch norm.
    """
    is_mixed = client.precision != "float32"
    try:
        with torch.autocast(client.device.type, torch.bfloat16, enabled=is_mixed):
            return step(client.train_inputs[chosen], client.train_labels[chosen])
    except ValueError as error:
        # Torch's layers of normalization refuse a batch that has one number for each channel.
        if raiser_of(error) != ("torch.nn.functional", "_verify_batch_size"):
            raise
        raise TrainingFailed(
            f"client '{client.id}' has {client.samples} training sample; batch norm needs at least 2 in a batch",
            is_public=True,
        ) from error


@dataclass
class Position:
    """The position of `train_by_steps`: its epoch, the batches of it that are done, and the sums of losses so far."""

    epoch: int = 1
    batch: int = 0
    before_epoch: int = 0
    """The number of steps done in earlier epochs."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """The sums over this epoch's samples of each term of the loss, on the client's device; the loss is named ""."""

    order: dict[str, Any] = field(default_factory=dict)
    """State of the client's random numbers when the epoch began: the order of its batches follows from it."""

    resumed: dict[str, Any] | None = None
    """State of the client's random numbers at the checkpoint; None where nothing is resumed."""

    def begin(self, client: Client, epoch: int) -> None:
        """Note that an epoch begins, or is repeated up to the checkpoint."""
        if self.resumed is not None:
            client.rng.bit_generator.state = self.order
            return
        self.epoch = epoch
        self.batch = 0
        self.order = dict(client.rng.bit_generator.state)
        self.sums = {"": torch.zeros((), device=client.device)}

    def within(self, client: Client) -> None:
        """Restore the random states of the checkpoint, now that the order of the epoch's batches is known."""
        if self.resumed is not None:
            client.rng.bit_generator.state = self.resumed
            self.resumed = None

    def add(self, loss: torch.Tensor, terms: Mapping[str, torch.Tensor], samples: int) -> None:
        """Note that one batch is done."""
        for name, term in {"": loss, **terms}.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(self.sums[""])) + term.detach() * samples
        self.batch += 1


def save_if_due(client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position) -> None:
    """Save the state behind a batch where there is a checkpoint that wants it now."""
    checkpoint = client.control.checkpoint
    if checkpoint is not None and checkpoint.is_due():
        checkpoint.save(*checkpoint_of(client, optimizers, position))


def checkpoint_of(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position
) -> tuple[Tensors, dict[str, Any]]:
    """Return everything on which the rest of a training depends: named arrays, and values for JSON."""
    groups: dict[str, Tensors] = {
        "model": to_arrays(client.model, client.model.state_dict()),
        "optimizer": {
            name: array
            for number, optimizer in enumerate(optimizers)
            for name, array in moments(optimizer, client.model, str(number)).items()
        },
        "memory": client.memory,
        "sum": {name: added.cpu().numpy() for name, added in position.sums.items()},
        "random": {name: state().numpy() for name, (state, _) in _random_states(client).items()},
    }
    notes = {
        "epoch": position.epoch,
        "batch": position.batch,
        "before_epoch": position.before_epoch,
        "order": position.order,
        "random": client.rng.bit_generator.state,
        "log": client.log,
    }
    return {f"{group}/{name}": array for group, arrays in groups.items() for name, array in arrays.items()}, notes


def ended(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position, loss: float
) -> tuple[Tensors, dict[str, Any]]:
    """Return the state after a finished call of `train`, as `checkpoint_of` but in copies, and the loss it returned."""
    tensors, notes = checkpoint_of(client, optimizers, position)
    return {name: array.copy() for name, array in tensors.items()}, {**notes, "loss": loss}


class Passes:
    """A `TrainingCheckpoint` for several calls of `train` in a row: it holds what those that are over have left.

    On the way back each of them is not trained but set to its end, and what the method computes in between is computed
    again from the same values.
    """

    def __init__(self, checkpoint: TrainingCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._over: list[tuple[Tensors, dict[str, Any]]] = []
        self._saved: list[tuple[Tensors, dict[str, Any]]] | None = None

    def is_due(self) -> bool:
        """Return whether the state should be saved now, as the checkpoint decides."""
        return self._checkpoint.is_due()

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save the state of the call that is under way, and those of the ones before."""
        states = [*self._over, (tensors, notes)]
        every = {f"{number}/{name}": array for number, state in enumerate(states) for name, array in state[0].items()}
        self._checkpoint.save(every, {**notes, "passes": [state[1] for state in states]})

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return the state of the call that begins; None where it was not reached."""
        if self._saved is None:
            tensors, notes = self._checkpoint.load() or ({}, {})
            split: list[Tensors] = [{} for _ in notes.get("passes", ())]
            for name, array in tensors.items():
                which, _, rest = name.partition("/")
                split[int(which)][rest] = array
            self._saved = list(zip(split, notes.get("passes", ()), strict=True))
        number = len(self._over)
        state = self._saved[number] if number < len(self._saved) else None
        if state is not None and "loss" in state[1]:
            self._over.append(state)
        return state

    def end(self, state: Callable[[], tuple[Tensors, dict[str, Any]]]) -> None:
        """Note that the call that is under way is over."""
        self._over.append(state())


def begun(client: Client, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Position, float | None]:
    """Return where a call of `train` begins, and the loss that it returned if it was over at the checkpoint.

    Raises:
        TensorsError, StateError: See `resume`.
    """
    loaded = client.control.checkpoint.load() if client.control.checkpoint is not None else None
    if loaded is None:
        return Position(), None
    position = resume(client, optimizers, *loaded)
    if "loss" not in loaded[1]:
        return position, None
    position.within(client)
    return position, float(loaded[1]["loss"])


def resume(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], tensors: Tensors, notes: Mapping[str, Any]
) -> Position:
    """Give model, optimizers and random numbers the state of `checkpoint_of`; returns where training continues.

    Raises:
        TensorsError: The tensors are not those of this model.
        StateError: The arrays of the optimizer do not belong to its parameters.
    """

    def group(name: str) -> Tensors:
        return {key.split("/", 1)[1]: array for key, array in tensors.items() if key.startswith(f"{name}/")}

    load_arrays(client.model, group("model"))
    for number, optimizer in enumerate(optimizers):
        restore(optimizer, client.model, group("optimizer"), str(number))
    client.memory.clear()
    client.memory.update({name: array.copy() for name, array in group("memory").items()})
    client.log |= notes["log"]
    states = group("random")
    for name, (_, set_state) in _random_states(client).items():
        set_state(torch.tensor(states[name]))
    sums = {name: torch.tensor(array, device=client.device) for name, array in group("sum").items()}
    return Position(
        notes["epoch"], notes["batch"], notes["before_epoch"], sums, notes["order"], resumed=notes["random"]
    )


def _random_states(
    client: Client,
) -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]]:
    """Return, for each generator of torch from which training may draw, how to read and set its state (n,) uint8."""
    states: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]] = {
        "client": (client.generator.get_state, client.generator.set_state),
        "layers": (torch.get_rng_state, torch.set_rng_state),
    }
    if client.device.type == "cuda":
        states["layers.cuda"] = (
            lambda: torch.cuda.get_rng_state(client.device),
            lambda state: torch.cuda.set_rng_state(state, client.device),
        )
    return states


@contextlib.contextmanager
def training_mode(model: Parts, frozen: Sequence[str], frozen_norm: Literal["eval", "train"]) -> Iterator[None]:
    """Inside, the model is in train mode, and the ``frozen`` parts as `train_by_steps` says.

    Raises:
        UnknownName: The model has no part of this name.
    """
    still = [model.part(name) for name in frozen]
    held = [weight for part in still for weight in part.parameters() if weight.requires_grad]
    model.train()
    for part in still:
        part.train(frozen_norm == "train")
    for weight in held:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in held:
            weight.requires_grad_(True)


# --- moments of optimizers that outlive a round: as named arrays in a client's memory, and back bit for bit ----------

OptimizerState = Literal["reset", "persist"]
"""``reset``: every round starts without moments. ``persist``: a client continues with those of its last round."""


def train_parts(client: Client, loss: Loss, params: Any, parts: Iterable[str], label: str, **options: Any) -> float:
    """Train the weights of ``parts`` alone, whose moments are kept as ``params.optimizer_state`` says.

    Raises:
        TrainingFailed: See `train`.
        StateError: See `lasting`.
    """
    optimizer = optimizer_of(client.model, parts, params)
    with lasting(client, optimizer, label, params.optimizer_state):
        return train(client, loss, params, optimizer=optimizer, **options)


def optimizer_of(model: Parts, parts: Iterable[str], params: MethodParams) -> torch.optim.Optimizer:
    """Return the optimizer that ``params`` ask for, of the weights of these parts."""
    return local_optimizer([weight for name in parts for weight in model.part(name).parameters()], params)


@contextlib.contextmanager
def lasting(client: Client, optimizer: torch.optim.Optimizer, label: str, mode: OptimizerState) -> Iterator[None]:
    """Inside, the optimizer continues from the moments kept as ``label``; at the end they are kept again.

    ``reset`` does nothing. Training that raises keeps nothing: the round has not happened.

    Raises:
        StateError: The kept arrays do not fit the parameters.
    """
    if mode == "persist":
        restore(optimizer, client.model, client.memory, label)
    yield
    if mode == "persist":
        client.memory.update(moments(optimizer, client.model, label))


def moments(optimizer: torch.optim.Optimizer, model: nn.Module, label: str) -> Tensors:
    """Return copies of the optimizer's state: ``optimizer.<label>.<parameter>.<key>``, with names as in the model."""
    arrays: Tensors = {}
    for prefix, parameter in _kept_as(optimizer, model, label):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                # A step counter lies on the host, moments beside their parameter and in its memory layout.
                flat = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                arrays[prefix + key] = flat.numpy()
    return arrays


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, memory: Tensors, label: str) -> None:
    """Give a fresh optimizer the state that `moments` took; parameters of which nothing was kept start afresh.

    Raises:
        StateError: An array is neither a number nor of its parameter's shape.
    """
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, (prefix, parameter) in enumerate(_kept_as(optimizer, model, label)):
        for name, array in memory.items():
            if not name.startswith(prefix):
                continue
            tensor = torch.tensor(array)
            if array.shape != ():
                if array.shape != tuple(parameter.shape):
                    raise StateError(
                        f"kept '{name}' is {list(array.shape)}, its parameter {list(parameter.shape)}; remove what was "
                        "kept of this run"
                    )
                # Laid out like its parameter: fused optimizers walk through both in step.
                tensor = torch.empty_like(parameter).copy_(tensor)
            state.setdefault(index, {})[name.removeprefix(prefix)] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _kept_as(optimizer: torch.optim.Optimizer, model: nn.Module, label: str) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters in its own order, each with what the names of its arrays begin with."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(f"optimizer.{label}.{names[id(p)]}.", p) for group in optimizer.param_groups for p in group["params"]]


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    function: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, inputs: torch.Tensor, batch: int = 512
) -> torch.Tensor:
    """Compute ``function`` of the inputs, ``batch`` at a time, with the model in eval mode and without gradients.

    Raises:
        DataError: There are no inputs.
    """
    if not len(inputs):
        raise DataError("no inputs to evaluate; expected at least one")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([function(piece) for piece in torch.split(inputs, batch)])
    finally:
        model.train(was_training)


def predict_probabilities(model: nn.Module, inputs: torch.Tensor, batch: int = 512) -> torch.Tensor:
    """Return the softmax (n, K) float32 of a model's logits, in eval mode.

    Raises:
        DataError: There are no inputs.
    """
    return evaluate(lambda piece: torch.softmax(model(piece), dim=1), model, inputs, batch)


def features_of(model: Parts, inputs: torch.Tensor, batch: int = 512) -> torch.Tensor:
    """Return features (n, d) float32 of a model's encoder, in eval mode.

    Raises:
        DataError: There are no inputs.
    """
    return evaluate(model.features, model, inputs, batch)


def accuracy(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of rows (0..1) whose largest probability is at the label.

    Raises:
        DataError: There are no rows.
    """
    if not len(labels):
        raise DataError("no samples to take an accuracy of; expected at least one")
    return float((probabilities.argmax(dim=1) == labels).double().mean())

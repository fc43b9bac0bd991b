"""Seeded mini-batch training and evaluation, with guards that name the cause when something goes wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..core.errors import DataError, StateError, TrainingCancelled, TrainingFailed, raiser_of
from ..core.task import Tensors
from ..methods.values import Client, MethodParams, TrainingCheckpoint
from .optimizers import SGD, Adam
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
    make: Callable[..., torch.optim.Optimizer] = Adam
    if params.optimizer == "sgd":
        make = SGD
        options["momentum"] = params.momentum
    try:
        return make(weights, fused=True, **options)
    except RuntimeError:
        return make(weights, **options)


def cross_entropy(model: nn.Module) -> Loss:
    """Return the batch mean of softmax cross entropy of a model's logits."""
    return lambda inputs, labels: F.cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of one call of `train` or `train_by_steps` beside the parameters of the method."""

    epochs: int | None = None
    """The number of passes over the client's samples; None: ``local_epochs`` of the parameters."""

    batch_size: int | None = None
    """The number of samples of a batch; None: ``batch_size`` of the parameters."""

    steps: int = 0
    """The number of steps, in as many epochs as that takes; 0: all steps of ``epochs``."""

    drop_last: bool = False
    """Whether the samples behind the last whole batch sit out an epoch; see `batches`."""

    smallest_batch: int = 2
    """The least samples of a last batch of its own; see `batches`."""

    frozen: Sequence[str] = ()
    """The names of the parts of the model that get no gradient."""

    frozen_norm: Literal["eval", "train"] = "eval"
    """The mode in which frozen parts run. In train mode their batch norm takes the batch's statistics, and the running
    ones move; some papers' code does so.
    """

    log: str = "loss"
    """The name under which the mean loss of the last epoch is logged."""

    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parts of the loss by name, which the step puts there for each batch; the means of the last epoch are logged."""

    suspects: Mapping[str, float] = field(default_factory=dict)
    """The parameters, with their values, that are named where the loss is not finite."""

    beside: torch.optim.Optimizer | None = None
    """A second optimizer, which works beside the first one and whose state is saved with the first one's."""


DEFAULT_OPTIONS = TrainingOptions()
"""The options of a training of all weights as the parameters of the method say."""


def train(
    client: Client,
    loss: Loss,
    params: MethodParams,
    *,
    options: TrainingOptions = DEFAULT_OPTIONS,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    before_step: Callable[[], None] | None = None,
) -> float:
    """Train ``client.model`` in place as ``params`` say, with one step of an optimizer for each batch.

    Args:
        client: The client, whose control may shorten, stop or resume the training; see `train_by_steps`.
        loss: The loss of a batch.
        params: The parameters of the method.
        options: Which batches and parts are trained, and what is logged.
        optimizer: The optimizer; default: that of ``params``, for all parts that are not frozen.
        lr: The learning rate of the default optimizer; default: that of ``params``.
        before_step: A function that may change gradients before they are applied.

    Returns:
        The mean loss of the last epoch; NaN for zero epochs.

    Raises:
        TrainingFailed: See `train_by_steps`.
        TrainingCancelled: See `train_by_steps`.
    """
    if optimizer is None:
        weights = _weights_that_learn(client.model, options.frozen)
        optimizer = local_optimizer(weights, params, lr=lr)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss(inputs, labels)
        value.backward()  # type: ignore[no-untyped-call]
        if before_step is not None:
            before_step()
        optimizer.step()
        return value

    # The learning rate is the first thing to lower where the loss is not finite.
    suspects = {"lr": optimizer.param_groups[0]["lr"], **options.suspects}
    return train_by_steps(client, step, params, options=replace(options, suspects=suspects), optimizer=optimizer)


def _weights_that_learn(model: Parts, frozen: Sequence[str]) -> list[torch.Tensor]:
    """Return the weights that take a gradient and belong to no frozen part."""
    weights: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        part = name.split(".", 1)[0]
        if weight.requires_grad and part not in frozen:
            weights.append(weight)
    return weights


def train_by_steps(
    client: Client,
    step: Step,
    params: MethodParams,
    *,
    options: TrainingOptions = DEFAULT_OPTIONS,
    optimizer: torch.optim.Optimizer | None = None,
) -> float:
    """Train as `train` does, for methods whose steps are more than one optimizer's; ``step`` does all of a batch.

    ``client.control`` may shorten the training, stop it, and resume it from a checkpoint with the same bits. A
    shortened training logs its share of the steps as ``work``.

    Args:
        client: The client, whose model is trained in place.
        step: The step of a batch, updates included.
        params: The parameters of the method.
        options: Which batches and parts are trained, and what is logged.
        optimizer: The optimizer whose state is in the checkpoint, with that of ``options.beside``; None where the
            training cannot be resumed.

    Returns:
        The mean loss of the last epoch; NaN for zero epochs.

    Raises:
        TrainingFailed: There are no samples, only one where batch norm needs two, or the loss is not finite.
        TrainingCancelled: ``client.control`` has stopped the training.
    """
    client.require_samples()
    epochs = params.local_epochs if options.epochs is None else options.epochs
    batch_size = options.batch_size or params.batch_size
    steps = options.steps
    control = client.control
    optimizers = [candidate for candidate in (optimizer, options.beside) if candidate is not None]
    # 1. The position of the checkpoint, if there is one; a training that was over there is not repeated.
    position, final_loss = find_start(client, optimizers)
    if final_loss is not None:
        return final_loss
    mean_loss = math.nan
    with training_mode(client.model, options.frozen, options.frozen_norm):
        for epoch in range(position.epoch, (steps or epochs) + 1):
            # 2. The batches of this epoch. A resumed epoch draws the same order as when it began, and only then goes
            # back to the random numbers of the checkpoint.
            position.begin(client, epoch)
            split = batches(
                client.samples, batch_size, client.rng, drop_last=options.drop_last, smallest=options.smallest_batch
            )
            # How many steps a share of the training has is known once an epoch is split.
            if control.share < 1 and not steps:
                steps = max(1, round(control.share * epochs * len(split)))
                client.log["work"] = steps / (epochs * len(split))
            if steps:
                split = split[: steps - position.before_epoch]
            position.restore_random_numbers(client)
            # 3. The steps of this epoch that are not done yet. Their rows go to the device at once: a copy in each step
            # would wait for a GPU.
            for indices in _on_device(split, client.device)[position.batch :]:
                check_not_cancelled(client)
                value = _run_step(client, step, indices)
                position.add(value, options.terms, len(indices))
                save_if_due(client, optimizers, position)
            # 4. The means of the epoch, by which a training that diverges ends here.
            means = position.mean_losses(sum(map(len, split)))
            mean_loss = means.pop("")
            if not math.isfinite(mean_loss):
                raise diverged(client, mean_loss, f"{epoch} of {epochs}", options.suspects)
            client.log |= {**means, options.log: mean_loss}
            position.before_epoch += len(split)
            if position.before_epoch == steps:
                break
    # 5. The end, which a later call of this training resumes at.
    if control.checkpoint is not None:
        control.checkpoint.end(lambda: final_state(client, optimizers, position, mean_loss))
    return mean_loss


def diverged(client: Client, loss: float, epoch: str, suspects: Mapping[str, float]) -> TrainingFailed:
    """Return the error of a loss that is not finite; ``epoch`` says which of how many, as in "2 of 5"."""
    values = ", ".join(f"{name} {value:g}" for name, value in suspects.items())
    return TrainingFailed(
        f"client '{client.id}': loss became {loss} in epoch {epoch} at {values}; "
        f"expected a finite number; lower {' or '.join(suspects)}, or look for extreme values in the data",
        is_public=True,
    )


def check_not_cancelled(client: Client) -> None:
    """Return quietly while the client's training is wanted.

    Raises:
        TrainingCancelled: ``client.control`` has stopped it, because its round is over.
    """
    if client.control.is_cancelled():
        raise TrainingCancelled(f"client '{client.id}': training of round {client.round} was cancelled")


def _on_device(split: Sequence[np.ndarray], device: torch.device) -> Sequence[torch.Tensor]:
    """Return the index arrays of an epoch's batches as tensors on the device, parts of one that is copied once."""
    if not split:
        return ()
    order = torch.from_numpy(np.concatenate(split)).to(device)
    return torch.split(order, [len(indices) for indices in split])


def _run_step(client: Client, step: Step, indices: torch.Tensor) -> torch.Tensor:
    """Run one step on the training samples with these indices (b,), in the client's precision; returns its loss.

    The loss stays on the client's device: reading its value would wait for the GPU in each step.

    Raises:
        TrainingFailed: The batch has a single sample, and the model has batch norm.
    """
    # The same rows as by `train_inputs[indices]`, in a quarter of the time.
    inputs = client.train_inputs.index_select(0, indices)
    labels = client.train_labels.index_select(0, indices)
    # What stands on features that were computed once gets them in the place of inputs: they are not varied.
    if client.augment is not None and inputs.shape[1:] == client.task.input_shape:
        inputs = client.augment(inputs, client.generator)
    try:
        # Entering and leaving a context that changes nothing costs as much as a small layer.
        if client.precision == "float32":
            return step(inputs, labels)
        with torch.autocast(client.device.type, torch.bfloat16):
            return step(inputs, labels)
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
    """The number of the epoch, from 1."""

    batch: int = 0
    """The number of batches of the epoch that are done."""

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

    def restore_random_numbers(self, client: Client) -> None:
        """Restore the random states of the checkpoint, now that the order of the epoch's batches is known."""
        if self.resumed is not None:
            client.rng.bit_generator.state = self.resumed
            self.resumed = None

    def add(self, loss: torch.Tensor, terms: Mapping[str, torch.Tensor], samples: int) -> None:
        """Note that one batch of so many samples is done, with its mean loss and the mean terms of it."""
        self.sums[""] = self.sums[""] + loss.detach() * samples
        for name, term in terms.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(self.sums[""])
            self.sums[name] = self.sums[name] + term.detach() * samples
        self.batch += 1

    def mean_losses(self, samples: int) -> dict[str, float]:
        """Return the mean of each term over the epoch's samples; that of the loss is named ""."""
        return {name: float(total) / samples for name, total in self.sums.items()}


def save_if_due(client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position) -> None:
    """Save the state after a batch, if there is a checkpoint that is due."""
    checkpoint = client.control.checkpoint
    if checkpoint is not None and checkpoint.is_due():
        checkpoint.save(*checkpoint_of(client, optimizers, position))


def checkpoint_of(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position
) -> tuple[Tensors, dict[str, Any]]:
    """Return everything on which the rest of a training depends: named arrays, and values for JSON."""
    optimizer_states: Tensors = {}
    for number, optimizer in enumerate(optimizers):
        optimizer_states |= moments(optimizer, client.model, str(number))
    groups: dict[str, Tensors] = {
        "model": to_arrays(client.model, client.model.state_dict()),
        "optimizer": optimizer_states,
        "memory": client.memory,
        "sum": {name: total.cpu().numpy() for name, total in position.sums.items()},
        "random": {name: state().numpy() for name, (state, _) in _random_states(client).items()},
    }
    tensors: Tensors = {}
    for group, arrays in groups.items():
        for name, array in arrays.items():
            tensors[f"{group}/{name}"] = array
    notes = {
        "epoch": position.epoch,
        "batch": position.batch,
        "before_epoch": position.before_epoch,
        "order": position.order,
        "random": client.rng.bit_generator.state,
        "log": client.log,
    }
    return tensors, notes


def final_state(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], position: Position, loss: float
) -> tuple[Tensors, dict[str, Any]]:
    """Return the state after a finished call of `train`, as `checkpoint_of` but in copies, and the loss it returned."""
    tensors, notes = checkpoint_of(client, optimizers, position)
    return {name: array.copy() for name, array in tensors.items()}, {**notes, "loss": loss}


class Passes:
    """A `TrainingCheckpoint` for several calls of `train` in a row: it also holds the states of the finished ones.

    When the training is resumed, a finished call is not trained again but set to its end, and what the method computes
    in between is computed again from the same values.
    """

    def __init__(self, checkpoint: TrainingCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._finished: list[tuple[Tensors, dict[str, Any]]] = []
        self._saved: list[tuple[Tensors, dict[str, Any]]] | None = None
        """The states that are in the checkpoint; None until it is read."""

    def is_due(self) -> bool:
        """Return whether the state should be saved now, as the checkpoint decides."""
        return self._checkpoint.is_due()

    def save(self, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Save the state of the call that is under way, and those of the ones before."""
        states = [*self._finished, (tensors, notes)]
        joined: Tensors = {}
        for number, (arrays, _) in enumerate(states):
            for name, array in arrays.items():
                joined[f"{number}/{name}"] = array
        self._checkpoint.save(joined, {**notes, "passes": [notes_of_call for _, notes_of_call in states]})

    def load(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return the state of the call that begins; None where the saved training had not reached it."""
        if self._saved is None:
            self._saved = self._read_states()
        number = len(self._finished)
        if number >= len(self._saved):
            return None
        state = self._saved[number]
        # A state with a loss is the end of a call; it goes into the next checkpoint as it is.
        if "loss" in state[1]:
            self._finished.append(state)
        return state

    def end(self, state: Callable[[], tuple[Tensors, dict[str, Any]]]) -> None:
        """Note that the call that is under way is over."""
        self._finished.append(state())

    def _read_states(self) -> list[tuple[Tensors, dict[str, Any]]]:
        """Return the states that `save` has joined, one for each call; none where there is no checkpoint."""
        tensors, notes = self._checkpoint.load() or ({}, {})
        notes_by_call = notes.get("passes", ())
        tensors_by_call: list[Tensors] = [{} for _ in notes_by_call]
        for name, array in tensors.items():
            number, _, rest = name.partition("/")
            tensors_by_call[int(number)][rest] = array
        return list(zip(tensors_by_call, notes_by_call, strict=True))


def find_start(client: Client, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Position, float | None]:
    """Return where a call of `train` begins, and the loss that it returned if it was over at the checkpoint.

    Raises:
        TensorsError, StateError: See `resume`.
    """
    checkpoint = client.control.checkpoint
    if checkpoint is None:
        return Position(), None
    loaded = checkpoint.load()
    if loaded is None:
        return Position(), None
    tensors, notes = loaded
    position = resume(client, optimizers, tensors, notes)
    if "loss" not in notes:
        return position, None
    position.restore_random_numbers(client)
    return position, float(notes["loss"])


def resume(
    client: Client, optimizers: Sequence[torch.optim.Optimizer], tensors: Tensors, notes: Mapping[str, Any]
) -> Position:
    """Give model, optimizers and random numbers the state of `checkpoint_of`; returns where training continues.

    Raises:
        TensorsError: The tensors are not those of this model.
        StateError: The arrays of the optimizer do not belong to its parameters.
    """
    groups: dict[str, Tensors] = {"model": {}, "optimizer": {}, "memory": {}, "sum": {}, "random": {}}
    for key, array in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = array
    load_arrays(client.model, groups["model"])
    for number, optimizer in enumerate(optimizers):
        restore(optimizer, client.model, groups["optimizer"], str(number))
    client.memory.clear()
    client.memory.update({name: array.copy() for name, array in groups["memory"].items()})
    client.log |= notes["log"]
    for name, (_, set_state) in _random_states(client).items():
        set_state(torch.tensor(groups["random"][name]))
    return Position(
        epoch=notes["epoch"],
        batch=notes["batch"],
        before_epoch=notes["before_epoch"],
        sums={name: torch.tensor(array, device=client.device) for name, array in groups["sum"].items()},
        order=notes["order"],
        resumed=notes["random"],
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
    """Keep the model in train mode and its ``frozen`` parts without gradients, in the mode ``frozen_norm``.

    Raises:
        UnknownName: The model has no part of this name.
    """
    frozen_parts = [model.part(name) for name in frozen]
    frozen_weights = [weight for part in frozen_parts for weight in part.parameters() if weight.requires_grad]
    model.train()
    for part in frozen_parts:
        part.train(frozen_norm == "train")
    for weight in frozen_weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in frozen_weights:
            weight.requires_grad_(True)


# --- moments of optimizers that outlive a round: as named arrays in a client's memory, and back bit for bit ----------

OptimizerState = Literal["reset", "persist"]
"""``reset``: every round starts without moments. ``persist``: a client continues with those of its last round."""


def train_parts(
    client: Client, loss: Loss, params: Any, parts: Iterable[str], label: str, options: TrainingOptions
) -> float:
    """Train the weights of ``parts`` alone, whose moments are kept as ``params.optimizer_state`` says.

    Args:
        client: The client, whose model is trained in place.
        loss: The loss of a batch.
        params: The parameters of a method that have ``optimizer_state``.
        parts: The names of the parts to train.
        label: The name under which the optimizer's moments are kept in the client's memory.
        options: See `train`.

    Returns:
        The mean loss of the last epoch; NaN for zero epochs.

    Raises:
        TrainingFailed: See `train`.
        StateError: See `lasting`.
    """
    optimizer = optimizer_of(client.model, parts, params)
    with lasting(client, optimizer, label, params.optimizer_state):
        return train(client, loss, params, optimizer=optimizer, options=options)


def optimizer_of(model: Parts, parts: Iterable[str], params: MethodParams) -> torch.optim.Optimizer:
    """Return the optimizer that ``params`` ask for, of the weights of these parts."""
    return local_optimizer([weight for name in parts for weight in model.part(name).parameters()], params)


@contextlib.contextmanager
def lasting(client: Client, optimizer: torch.optim.Optimizer, label: str, mode: OptimizerState) -> Iterator[None]:
    """Let the optimizer continue from the moments kept as ``label``, and keep them again at the end.

    Mode ``reset`` does nothing. Training that raises keeps nothing: the round has not happened.

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
    for prefix, parameter in _named_prefixes(optimizer, model, label):
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
    for index, (prefix, parameter) in enumerate(_named_prefixes(optimizer, model, label)):
        for name, array in memory.items():
            if name.startswith(prefix):
                tensor = _restored_tensor(name, array, parameter)
                state.setdefault(index, {})[name.removeprefix(prefix)] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _restored_tensor(name: str, array: np.ndarray, parameter: torch.Tensor) -> torch.Tensor:
    """Return a kept array as a tensor of an optimizer's state: a number, or moments in their parameter's layout."""
    tensor = torch.tensor(array)
    if array.shape == ():
        return tensor
    if array.shape != tuple(parameter.shape):
        raise StateError(
            f"kept '{name}' is {list(array.shape)}, its parameter {list(parameter.shape)}; remove what was kept of "
            "this run"
        )
    # Fused optimizers walk through a parameter and its moments in step.
    return torch.empty_like(parameter).copy_(tensor)


def _named_prefixes(optimizer: torch.optim.Optimizer, model: nn.Module, label: str) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters in its own order, each with the prefix of the names of its arrays."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(f"optimizer.{label}.{names[id(parameter)]}.", parameter) for parameter in parameters]


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
            if torch.onnx.is_in_onnx_export():  # an exported graph is for any number of inputs at once
                return function(inputs)
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

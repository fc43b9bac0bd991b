"""FedALA: before training, each client mixes the received model with its own, weight by weight, as its data like it.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023, Algorithm 1; official code where the paper is silent.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: of the upper tensors the client's own after its last training, and the shares W of the received ones.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: shares are learned with batch norm in eval mode, and the first time for at most
``ala_most_epochs`` passes, where the code has no limit. The mixture is the personal model: it answers before the
round's training, and is made once for each model received.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from torch.func import functional_call
from torch.nn import functional as F

from ..core.task import Tensors
from ..training.finetune import fingerprint, probabilities_with
from ..training.loops import cross_entropy, train
from ..training.parts import Parts, load_arrays, to_arrays
from . import Choices, Client, LocalWork, Method, MethodParams, Stage, grades, searched

Weights = dict[str, torch.Tensor]

_OWN = "ala.own."
_SHARES = "ala.shares."
_NEXT = "ala.next."
_MIXED = "ala.mixed."
_STAMP = "ala.made_from"


class FedALAParams(MethodParams):
    """The paper's defaults."""

    upper_tensors: int = Field(2, ge=1, description="p: so many tensors, from the top, are mixed; 2 = the classifier")
    ala_lr: float = searched(
        1.0,
        Choices((0.1, 1.0, 10.0)),
        ge=0,
        description="eta, step size of the shares W; 0 keeps them at 1, which is FedAvg",
    )
    ala_samples: float = Field(0.8, gt=0, le=1, description="s, part of the local data that shares are learned from")
    ala_threshold: float = Field(0.1, gt=0, description="the first time, until losses vary by less; official code")
    ala_window: int = Field(10, ge=2, description="over so many last passes; official code")
    ala_most_epochs: int = Field(50, ge=1, description="and at most so many passes; ours")


class FedALA(Method):
    """FedAvg with adaptive local aggregation on each client."""

    Params = FedALAParams
    resumable = True
    source = "Zhang et al., AAAI 2023"
    exactness = grades(
        mlp=("approximate", "one linear layer fitted on the shared encoder; the paper mixes two classifiers"),
    )

    def local_work(self) -> LocalWork:
        """Return the pass of the mixture, and those of training; the first time the mixture takes more."""
        params = self.params
        mixing = Stage("shares of the mixture", params.ala_samples, lr=params.ala_lr)
        return LocalWork((mixing, Stage("all parts", params.local_epochs)), end=(mixing,))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Mix, then E epochs of cross entropy on all parts."""
        mixed = self._mix(client)
        load_arrays(client.model, mixed)
        train(client, cross_entropy(client.model), self.params)
        kept = to_arrays(client.model, mixed)
        learned = {name: client.memory[_NEXT + name] for name in mixed if _NEXT + name in client.memory}
        client.memory.update({_OWN + name: array for name, array in kept.items()})
        client.memory.update({_SHARES + name: share for name, share in learned.items()})
        return self.sent(client)

    def personalize(self, client: Client, received: Tensors) -> None:
        """Mix the final shared tensors with the client's own."""
        self._mix(client)

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return class probabilities of the mixture, which is made first if the model has changed since."""
        return probabilities_with(client.model, _on(client.device, self._mix(client)), inputs)

    def _mix(self, client: Client) -> Tensors:
        """Return the mixed upper tensors for the model that the client has now.

        The first call makes them, from random numbers of the model's own; shares are kept when training begins.
        """
        names = upper(client.model, self.params.upper_tensors)
        memory = client.memory
        stamp = fingerprint(client.model)
        # The mixture of this very model was made before.
        if np.array_equal(memory.get(_STAMP, ()), stamp):
            return {name: memory[_MIXED + name] for name in names}
        received = to_arrays(client.model, names)
        personal = {name: memory.get(_OWN + name, array) for name, array in received.items()}
        shares = {name: memory.get(_SHARES + name, np.ones_like(array)) for name, array in received.items()}
        # Shares are learned only where both sides differ: otherwise they have no influence.
        differs = any(not np.array_equal(personal[name], received[name]) for name in names)
        if client.samples and differs:
            rng = np.random.default_rng(int.from_bytes(stamp[:8].tobytes(), "little"))
            shares = self._learn_shares(client, personal, received, shares, rng)
            memory.update({_NEXT + name: share for name, share in shares.items()})
        memory[_STAMP] = stamp
        memory.update({_MIXED + name: mix(personal[name], received[name], shares[name]) for name in names})
        return {name: memory[_MIXED + name] for name in names}

    def _learn_shares(
        self, client: Client, own: Tensors, received: Tensors, shares: Tensors, rng: np.random.Generator
    ) -> Tensors:
        """Return shares after passes over a random part of the local data: one, or the first time until losses settle.

        The official code takes a stretch of data that were shuffled before; a stretch of data that lie class by class
        would leave some out.
        """
        params = self.params
        model = client.model
        size = max(1, int(params.ala_samples * client.samples))
        chosen = torch.from_numpy(rng.permutation(client.samples)[:size]).to(client.device)
        part = [data[chosen] for data in (client.train_inputs, client.train_labels)]
        sides = [_on(client.device, side) for side in (own, received, shares)]
        losses: list[float] = []
        is_first = not any(name.startswith(_SHARES) for name in client.memory)
        model.eval()
        epochs = params.ala_most_epochs if is_first else 1
        for _ in range(epochs):
            sides[2], loss = one_pass(model, sides, part, params)
            losses.append(loss)
            if len(losses) > params.ala_window and np.std(losses[-params.ala_window :]) < params.ala_threshold:
                break
        return {name: share.cpu().numpy() for name, share in sides[2].items()}


def _on(device: torch.device, arrays: Tensors) -> Weights:
    """Return copies of named arrays as tensors on a device."""
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}


def upper(model: Parts, count: int) -> list[str]:
    """Return names of the last ``count`` weights of the model, head on top."""
    return [name for name, _ in model.named_parameters()][-count:]


def mix(own: np.ndarray, received: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return own + (received - own) * shares, written so that shares of 1 give ``received`` bit for bit."""
    return np.asarray(received + (shares - 1) * (received - own))


def one_pass(
    model: Parts, sides: Sequence[Weights], data: Sequence[torch.Tensor], params: FedALAParams
) -> tuple[Weights, float]:
    """Return the shares, the third of ``sides`` (own, received, shares), after one step a batch, and the last loss."""
    personal, received, shares = sides
    held = {name: weight.detach() for name, weight in model.named_parameters()}
    for inputs, labels in zip(*(torch.split(part, params.batch_size) for part in data), strict=True):
        mixed = {n: (received[n] + (s - 1) * (received[n] - personal[n])).requires_grad_() for n, s in shares.items()}
        value = F.cross_entropy(functional_call(model, {**held, **mixed}, (inputs,)), labels)
        slopes = dict(zip(mixed, torch.autograd.grad(value, list(mixed.values())), strict=True))
        shares = stepped(personal, received, shares, slopes, params.ala_lr)
    return shares, float(value.detach())


def stepped(own: Weights, received: Weights, shares: Weights, slopes: Weights, rate: float) -> Weights:
    """Return W - eta * gradient * (received - own), clipped to 0..1 (Eqs. 4 and 5)."""
    return {n: (s - rate * slopes[n] * (received[n] - own[n])).clamp(0.0, 1.0) for n, s in shares.items()}

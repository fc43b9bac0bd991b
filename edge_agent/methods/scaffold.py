"""SCAFFOLD: control variates take out of local steps what is due to a client's own data.

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, Algorithm 1 with option II for the control variates.
Travels: encoder and head, both ways, batch norm statistics included; the server's control variate down, the change of
the client's own up, each of the model's size: twice FedAvg's bytes.
Stays: the client's control variate.
Server: x <- x + lr (even mean of the updates - x); its control variate is the mean of those of all clients seen so
far, of whom those that were never asked count as zero.
Differs from the paper: the number of clients N is that of clients seen so far, as the final number is not known;
with all of them in each round that is the same. Batch norm statistics are averaged. A control variate is the mean
gradient only of plain SGD, so ``momentum`` should stay 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from ..core.task import State, Task, Tensors
from ..training.loops import cross_entropy, train
from ..training.parts import Parts, to_arrays
from . import Client, Method, MethodParams, Update, grades
from .base import SERVER_ONLY, is_learned
from .families import names_in, packed, towards

_SENT = "extra.control."
_OWN = "control."
_SEEN = SERVER_ONLY + "clients"


class ScaffoldParams(MethodParams):
    """The paper's defaults."""

    optimizer: Literal["sgd"] = Field("sgd", description="control variates correct steps of SGD")
    momentum: float = Field(0.0, ge=0, lt=1, description="of local SGD; the paper: none, see the module's text")
    server_lr: float = Field(1.0, gt=0, description="eta_g; the paper's experiments: 1")


class Scaffold(Method):
    """FedAvg whose local gradients are corrected by c - c_i."""

    Params = ScaffoldParams
    weighting = "uniform"
    bounded_extras = MappingProxyType({_SENT: "control variates"})
    no_peft = "corrects every weight by control variates, those that are frozen included"
    source = "Karimireddy et al., ICML 2020"
    exactness = grades(
        mlp=("approximate", "the paper has no personal part; one linear layer on the frozen shared encoder is ours"),
    )

    def sends(self, model: Parts, task: Task) -> Tensors:
        """Return the change of the client's control variate."""
        return _zeros(to_arrays(model, self.shared_names(model)))

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start(self, tensors: Tensors) -> State:
        """Return the model and a control variate of zeros."""
        return {**tensors, **_zeros(tensors)}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Take one step of the model, and the control variate after the changes of the round's clients."""
        round_clients: list[str] = []

        def note_clients() -> Iterator[Update]:
            for update in updates:
                round_clients.append(update.client)
                yield update

        mean = self.mean(note_clients())
        earlier_clients = names_in(state, _SEEN)
        clients = sorted({*earlier_clients, *round_clients})
        # The control variate of the server is the mean of those of all clients that ever took part.
        for name in [name for name in mean if name.startswith(_SENT)]:
            earlier_sum = len(earlier_clients) * state[name].astype(np.float64)
            summed = earlier_sum + len(round_clients) * mean[name].astype(np.float64)
            mean[name] = (summed / len(clients)).astype(np.float32)
        return {**state, **towards(state, mean, self.params.server_lr), _SEEN: packed(clients)}

    # --- client ----------------------------------------------------------------------------------------------------

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Run E epochs of corrected SGD; then the control variate becomes the mean gradient of these steps."""
        controls = {name.removeprefix(_SENT): array for name, array in received.items() if name.startswith(_SENT)}
        own_controls = {name: client.memory.get(_OWN + name, np.zeros_like(array)) for name, array in controls.items()}
        weights = dict(client.model.named_parameters())
        steps = 0
        shifts = [
            (weights[name], torch.from_numpy(control - own_controls[name]).to(client.device))
            for name, control in controls.items()
            if name in weights
        ]

        def correct() -> None:
            """Add c - c_i to the gradient."""
            nonlocal steps
            steps += 1
            for weight, shift in shifts:
                if weight.grad is not None:
                    weight.grad.add_(shift)

        train(client, cross_entropy(client.model), self.params, before_step=correct)
        sent = self.sent(client)
        pace = 1.0 / (max(steps, 1) * self.params.lr)
        for name, control in controls.items():
            # Option II: c_i+ - c_i = (x - y_i) / (K lr) - c; without any step nothing is known and nothing changes.
            change = (received[name] - sent[name]) * pace - control if steps else np.zeros_like(control)
            sent[_SENT + name] = change.astype(np.float32)
            client.memory[_OWN + name] = own_controls[name] + sent[_SENT + name]
        return sent


def _zeros(tensors: Tensors) -> Tensors:
    """Return a control variate of zeros for the tensors that training changes."""
    return {_SENT + name: np.zeros_like(array) for name, array in tensors.items() if is_learned(name, array)}

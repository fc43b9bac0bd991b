"""pFedHN: a network at the server makes each client's weights from a few numbers that stand for the client.

Source: Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm
1; official code for the numbers.
Travels: down the weights that the server makes for this client alone, up the same after local training.
Stays: running statistics of batch norm; with ``personal_head`` the head (pFedHN-PC). At the server stay the
hypernetwork and the clients' embeddings.
Server: one step of SGD on the hypernetwork H and the embeddings e of the round's clients, along the vector-Jacobian
products of H(e) with what training has changed. The mean of the updates by sample counts is kept for an export.
Differs from the paper: a round has many clients, where Algorithm 1 has one; their products are summed, as if their
steps had followed each other. Embeddings are drawn when a client is first seen, from its id. The biases of the last
layers start as one fresh model and their weights small (``spread``), so that the first weights are of a sane size; the
code leaves both to torch's default. H is about ``hidden_units`` times the size of the model, and its momentum as much
again: this is for models of some hundred thousand weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from ..core.errors import ConfigError
from ..core.task import State, Tensors
from ..training.loops import TrainingOptions, cross_entropy, train
from ..training.parts import load_arrays, to_arrays
from . import Client, LocalWork, Method, MethodParams, Range, Stage, Update, grades, searched
from .base import is_learned
from .families import names_in, rng_of, with_rows
from .values import Norm

_HYPER = "hyper.net."
_SPEED = "hyper.speed."
_NAMES = "clients.names"
_EMBEDDING = "clients.embedding"
_EMBEDDING_SPEED = "clients.speed"
_MOST_BYTES = 4 << 30


class PFedHNParams(MethodParams):
    """The parameters of pFedHN, with the defaults of the official code."""

    lr: float = Field(5e-3, gt=0, description="step size of a client; official code: 0.005")
    momentum: float = Field(0.9, ge=0, lt=1, description="of a client; official code: 0.9")
    weight_decay: float = Field(5e-5, ge=0, description="of a client; official code: 5e-5")
    batch_size: int = Field(64, ge=1, description="official code: 64")
    local_steps: int = Field(50, ge=0, description="K, steps of a client; 0: as many as local_epochs passes take")
    clip: float = Field(
        50.0, gt=0, description="largest norm of gradients, of clients and of the server; official code"
    )
    server_lr: float = searched(
        0.01, Range(0.001, 0.1, log=True), gt=0, description="alpha, step size of H and embeddings; official code: 0.01"
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="of the server; official code: 0.9")
    server_weight_decay: float = Field(1e-3, ge=0, description="of the server; official code: 0.001")
    embedding_size: int = Field(8, ge=1, le=1024, description="numbers for each client; official code: 1 + M / 4")
    hidden_layers: int = Field(3, ge=0, le=16, description="layers of H before the last ones; official code: 3")
    hidden_units: int = Field(100, ge=1, le=4096, description="units in each of them; official code: 100")
    spread: float = Field(0.1, ge=0, description="size of the last layers' first weights, 1 = torch's default; ours")
    personal_head: bool = Field(False, description="the variant pFedHN-PC: H makes encoders, heads stay on devices")
    norm: Norm | None = Field(
        None, description="local_stats = H makes gamma and beta, local_all = not even these; none: local_stats"
    )

    @field_validator("norm")
    @classmethod
    def _is_of_what_is_learned(cls, norm: Norm | None) -> Norm | None:
        if norm == "global":
            raise ValueError(
                "running statistics are counted, not learned, so no hypernetwork can make them; expected local_stats "
                "or local_all"
            )
        return norm


class PFedHN(Method):
    """Weights made for each client; one network at the server learns to make them."""

    Params = PFedHNParams
    norm = "local_stats"
    no_peft = "makes all weights of each client by a network at the server"
    source = "Shamsian, Navon, Fetaya, Chechik, ICML 2021"
    exactness = grades(
        mlp=("approximate", "one linear layer on the mean of all encoders, which the paper never makes"),
    )

    @property
    def shared(self) -> tuple[str, ...]:
        """The parts of the model that the hypernetwork H makes."""
        return ("encoder",) if self.params.personal_head else ("encoder", "head")

    # --- coordinator -----------------------------------------------------------------------------------------------

    def start(self, tensors: Tensors) -> State:
        """Return a fresh hypernetwork whose outputs lie around the fresh model, which seeds its random numbers."""
        size = sum(int(np.prod(shape)) for shape in _shapes(tensors).values())
        needed = 8 * size * (self.params.hidden_units + 1)
        if needed > _MOST_BYTES:
            allowed = f"at most {_MOST_BYTES >> 20} are allowed"
            too_much = f"take {needed >> 20} MiB here, {allowed}; choose fewer units or a smaller encoder"
            mistake = f"hidden_units: {self.params.hidden_units} for {size} weights {too_much}"
            raise ConfigError("parameters of method 'pfedhn'", [mistake])
        network = Hypernetwork(_shapes(tensors), self.params)
        seed = 0
        for name in sorted(tensors):
            seed = zlib.crc32(np.ascontiguousarray(tensors[name]).tobytes(), seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network.begin(tensors, self.params.spread)
        net = to_arrays(network, network.state_dict())
        speeds = {_SPEED + name: np.zeros_like(array) for name, array in net.items()}
        return {**tensors, **{_HYPER + name: array for name, array in net.items()}, **speeds}

    def broadcast(self, state: State) -> Tensors:
        """Return nothing: no two clients get the same."""
        return {}

    def downlink(self, state: State, client: str) -> Tensors:
        """Return H(e) for this client."""
        network = self._network(state)
        with torch.no_grad():
            weights = network(torch.from_numpy(self._embedding(state, client)))
        return {name: tensor.numpy() for name, tensor in weights.items()}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Take one step of the hypernetwork and of the embeddings of the round's clients."""
        network = self._network(state)
        embeddings = dict[str, Tensors]()
        summed = [torch.zeros_like(weight) for weight in network.parameters()]
        before = names_in(state, _NAMES)

        def differentiate(update: Update, _: Tensors) -> None:
            """Add the slopes of a client's update to the sums, and take the step of its embedding."""
            present = self._embedding(state, update.client)
            embedding = torch.from_numpy(present.copy()).requires_grad_()
            weights = [*network.parameters(), embedding]
            *products, slope = clipped(pull_back(network, embedding, update.tensors, weights), self.params.clip)
            for total, product in zip(summed, products, strict=True):
                total.add_(product)
            if update.client in before:
                speed = state[_EMBEDDING_SPEED][before.index(update.client)]
            else:
                speed = np.zeros_like(present)
            moved = self._step(present, speed, slope.numpy())
            embeddings[update.client] = dict(zip((_EMBEDDING, _EMBEDDING_SPEED), moved, strict=True))

        result = {**state, **self.mean(updates, differentiate)}
        for (name, _), slope in zip(network.named_parameters(), summed, strict=True):
            weights, speed = self._step(state[_HYPER + name], state[_SPEED + name], slope.numpy())
            result[_HYPER + name] = weights
            result[_SPEED + name] = speed
        return {**result, **with_rows(state, _NAMES, embeddings)}

    def _step(self, weights: np.ndarray, speed: np.ndarray, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the new weights and the new speed after a step of SGD with momentum and weight decay."""
        params = self.params
        faster = params.server_momentum * speed + slope + params.server_weight_decay * weights
        return (weights - params.server_lr * faster).astype(np.float32), faster.astype(np.float32)

    def _network(self, state: State) -> Hypernetwork:
        """Return H with the weights that the state has."""
        shared_tensors = {name: array for name, array in state.items() if name.split(".")[0] in self.shared}
        network = Hypernetwork(_shapes(shared_tensors), self.params)
        weights = {name.removeprefix(_HYPER): array for name, array in state.items() if name.startswith(_HYPER)}
        load_arrays(network, weights)
        return network

    def _embedding(self, state: State, client: str) -> np.ndarray:
        """Return e (size,) float32 of a client, for one never seen before as its id makes it."""
        names = names_in(state, _NAMES)
        if client in names:
            trained: np.ndarray = state[_EMBEDDING][names.index(client)].copy()
            return trained
        fresh: np.ndarray = rng_of(client).standard_normal(self.params.embedding_size).astype(np.float32)
        return fresh

    # --- client ----------------------------------------------------------------------------------------------------

    def local_work(self) -> LocalWork:
        """Return the steps, or passes, of a client from the weights that the server makes for it."""
        params = self.params
        stage = Stage("all parts", steps=params.local_steps)
        if not params.local_steps:
            stage = Stage("all parts", params.local_epochs)
        return LocalWork((stage,), start="its own from the server's network, close to each other")

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """Take K steps of SGD from H(e)."""
        model = client.model
        params = self.params

        def clip() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), params.clip)

        train(client, cross_entropy(model), params, before_step=clip, options=TrainingOptions(steps=params.local_steps))
        return self.sent(client)

    def predict_global(self, client: Client, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return None: every client has its own weights."""
        return None


class Hypernetwork(nn.Module):
    """H: an embedding (size,) in, tensors of the named shapes out."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], params: PFedHNParams) -> None:
        super().__init__()
        self.shapes = dict(sorted(shapes.items()))
        layers: list[nn.Module] = [nn.Linear(params.embedding_size, params.hidden_units)]
        for _ in range(params.hidden_layers):
            layers += [nn.ReLU(), nn.Linear(params.hidden_units, params.hidden_units)]
        self.body = nn.Sequential(*layers)
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self.outputs = nn.ModuleList([nn.Linear(params.hidden_units, size) for size in sizes])

    def begin(self, tensors: Tensors, spread: float) -> None:
        """Draw fresh weights; the last layers' biases become the model ``tensors``."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        with torch.no_grad():
            for name, layer in zip(self.shapes, self.outputs, strict=True):
                layer.get_parameter("weight").mul_(spread)
                layer.get_parameter("bias").copy_(torch.from_numpy(np.array(tensors[name])).flatten())

    def forward(self, embedding: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors, by name."""
        hidden = self.body(embedding)
        layers = zip(self.shapes.items(), self.outputs, strict=True)
        return {name: layer(hidden).reshape(shape) for (name, shape), layer in layers}


def pull_back(
    network: nn.Module, embedding: torch.Tensor, trained: Tensors, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the gradients by ``weights`` of <H(e), H(e) before training - trained>, towards the trained ones."""
    generated = network(embedding)
    changes = [tensor.detach() - torch.from_numpy(np.array(trained[name])) for name, tensor in generated.items()]
    return list(torch.autograd.grad(list(generated.values()), weights, changes))


def clipped(slopes: Sequence[torch.Tensor], most: float) -> list[torch.Tensor]:
    """Return the gradients, shortened together to the norm ``most`` where they are longer."""
    length = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()
    return [slope * (most / length).clamp(max=1.0) for slope in slopes] if length > 0 else list(slopes)


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays that H makes."""
    return {name: array.shape for name, array in tensors.items() if is_learned(name, array)}

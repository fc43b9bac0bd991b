"""A client's local round of six methods against plain PyTorch loops of the same work, in one process, in turns.

``python tests/bench/yardstick_local_steps.py [METHOD ...] [--repeats N]`` prints the table of
examples/results/speed.md. A loop has the same network, batches, views, noise and loss terms as the method, and
starts from the same seeds, so that both end with the same weights up to rounding: a test holds that. It is written as
in a notebook and does nothing else: no losses are added up, nothing is checked, nothing can be stopped or resumed.
Seconds are of processor time, one thread; each ratio is of two rounds that came one after the other, and the order
changes from pair to pair.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from coordinator.research.bench import workloads
from edge_agent import methods
from edge_agent.client import Arrays, Built, ClientState, Session
from edge_agent.core.limits import keep_freed_memory
from edge_agent.core.task import ImageInput, Task, Tensors
from edge_agent.training.augment import for_task

SEED = 7
CLIENT = "client-0"
EPOCHS = 2


@dataclass(frozen=True)
class Bare:
    """What a plain loop works with: the model, the samples, random numbers, and the method's parameters."""

    model: Any
    inputs: torch.Tensor
    labels: torch.Tensor
    rng: np.random.Generator
    generator: torch.Generator
    params: Any
    received: dict[str, torch.Tensor]
    task: Task

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batches of one epoch in random order."""
        order = torch.from_numpy(self.rng.permutation(len(self.labels)))
        return [(self.inputs[rows], self.labels[rows]) for rows in torch.split(order, self.params.batch_size)]

    def sgd(self, *modules: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        """Return SGD for the weights of some modules."""
        weights = [weight for module in modules for weight in module.parameters()]
        p = self.params
        options = {"momentum": p.momentum, "weight_decay": p.weight_decay, "fused": True}
        return torch.optim.SGD(weights, lr=lr or p.lr, **options)

    def adam(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Return Adam for the weights of some modules."""
        weights = [weight for module in modules for weight in module.parameters()]
        return torch.optim.Adam(weights, lr=self.params.lr, weight_decay=self.params.weight_decay, fused=True)


# --- the loops -------------------------------------------------------------------------------------------------------


def fedavg(bare: Bare) -> None:
    """E epochs of SGD on everything."""
    model = bare.model.train()
    optimizer = bare.sgd(model)
    for _ in range(bare.params.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            F.cross_entropy(model.head(model.encoder(x)), y).backward()
            optimizer.step()


def fedpac(bare: Bare) -> None:
    """Features, an epoch of the classifier on them, the encoder drawn to the centroids, features, class statistics."""
    model = bare.model
    p = bare.params
    y_all = bare.labels
    before = _features(bare)
    optimizer = bare.sgd(model.head, lr=p.head_lr)
    order = torch.from_numpy(bare.rng.permutation(len(y_all)))
    for rows in torch.split(order, p.batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model.head(before[rows]), y_all[rows]).backward()
        optimizer.step()
    targets = bare.received["extra.centroids"]
    model.train()
    model.head.requires_grad_(requires_grad=False)
    optimizer = bare.sgd(model.encoder)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            z = model.encoder(x)
            loss = F.cross_entropy(model.head(z), y) + p.alignment_weight * F.mse_loss(z, targets[y])
            loss.backward()
            optimizer.step()
    model.head.requires_grad_(requires_grad=True)
    after = _features(bare)
    # What travels beside the encoder: means after, and V and h before.
    counts = torch.bincount(y_all, minlength=bare.task.num_classes).double()
    _class_means(after, y_all, counts)
    means = _class_means(before, y_all, counts)
    shares = counts / len(y_all)
    squares = torch.bincount(y_all, weights=before.double().square().sum(1), minlength=bare.task.num_classes)
    (shares * squares / counts.clamp(min=1) - shares**2 * means.square().sum(1)).sum() / len(y_all)


def _features(bare: Bare) -> torch.Tensor:
    encoder = bare.model.encoder.eval()
    with torch.no_grad():
        return torch.cat([encoder(piece) for piece in torch.split(bare.inputs, 512)])


def _class_means(features: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(len(counts), features.shape[1], dtype=torch.float64).index_add_(0, labels, features.double())
    return sums / counts.clamp(min=1)[:, None]


def dualfed(bare: Bare) -> None:
    """Encoder, projector and personal classifier; then the global classifier on features that nobody changes."""
    model = bare.model.train()
    p = bare.params
    optimizer = bare.sgd(model.encoder, model.projector, model.personal_head)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            u = model.projector(model.encoder(x))
            loss = F.cross_entropy(model.personal_head(u), y) + p.contrastive_weight * _contrast_out(u, y, p)
            loss.backward()
            optimizer.step()
    optimizer = bare.sgd(model.head)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            with torch.no_grad():
                z = model.encoder(x)
                model.projector(z)  # its batch norm moves, too
            F.cross_entropy(model.head(z), y).backward()
            optimizer.step()


def _contrast_out(u: torch.Tensor, y: torch.Tensor, p: Any) -> torch.Tensor:
    """Return the supervised contrastive loss with the logarithm inside, as it is usually written."""
    unit = F.normalize(u, dim=1)
    similarity = unit @ unit.T / p.temperature
    itself = torch.eye(len(y), dtype=torch.bool)
    positive = (y[:, None] == y[None, :]) & ~itself
    log_share = similarity - torch.logsumexp(similarity.masked_fill(itself, -1e30), dim=1, keepdim=True)
    count = positive.sum(1)
    return -((log_share * positive).sum(1) / count.clamp(min=1)).sum() / len(y)


def fedpick(bare: Bare) -> None:
    """Global, relevant and irrelevant features in every batch, picked by a mask with Gumbel noise."""
    model = bare.model.train()
    p = bare.params
    optimizer = bare.sgd(model)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            z = model.encoder(x)
            scores = model.mask(z)
            noise = _gumbel(scores, bare.generator) - _gumbel(scores, bare.generator)
            soft = torch.sigmoid((scores + noise) / p.temperature)
            mask = (scores + noise > 0).float() + (soft - soft.detach())  # where soft is above 0.5
            whole = model.head(z)
            relevant = model.relevant_head(z * mask)
            irrelevant = F.log_softmax(model.irrelevant_head(z * (1 - mask)), dim=1)
            log_p = F.log_softmax(whole, dim=1)
            log_q = F.log_softmax(relevant, dim=1)
            kl = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
            kl = kl + F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
            loss = p.global_weight * F.cross_entropy(whole, y) + p.relevant_weight * F.cross_entropy(relevant, y)
            loss = loss + p.irrelevant_weight * (irrelevant.exp() * irrelevant).sum(1).mean()
            loss = loss + p.distillation_weight * kl
            loss.backward()
            optimizer.step()


def _gumbel(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return -torch.log(-torch.log(torch.rand(like.shape, generator=generator).clamp(1e-9, 1 - 2.0**-24)))


def fedrir(bare: Bare) -> None:
    """The masked autoencoder; then encoder and head beside its features, with vCLUB by a predictor fitted before."""
    model = bare.model.train()
    p = bare.params
    optimizer = bare.adam(model.specific, model.generator)
    for _ in range(p.local_epochs):
        for x, _ in bare.batches():
            optimizer.zero_grad()
            mean, logvar = model.specific(_masked(x, p, bare.generator))
            noise = torch.randn(mean.shape, generator=bare.generator)
            redrawn = model.generator(mean + noise * torch.exp(0.5 * logvar))
            kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()
            (F.mse_loss(redrawn, x) + p.kld_weight * kl).backward()
            optimizer.step()
    idm = bare.adam(model.distiller)
    optimizer = bare.adam(model.encoder, model.head)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            g = model.encoder(x)
            with torch.no_grad():
                c = model.specific(x)[0]
            cross_entropy = F.cross_entropy(model.head(torch.cat([g, c], 1)), y)
            idm.zero_grad()
            mean, logvar = model.distiller(c)
            ((g.detach() - mean) ** 2 * torch.exp(-logvar) + logvar).sum(1).mean().backward()
            idm.step()
            with torch.no_grad():
                mean, logvar = model.distiller(c)
            # Mean over all pairs of (g_j - mean_i)^2 - (g_i - mean_i)^2, over twice the variance.
            gap = (g**2).mean(0) - g**2 + 2 * mean * (g - g.mean(0))
            bound = 0.5 * (gap * torch.exp(-logvar)).sum(1).mean()
            (cross_entropy + p.id_weight * bound.clamp(min=0)).backward()
            optimizer.step()


def _masked(x: torch.Tensor, p: Any, generator: torch.Generator) -> torch.Tensor:
    rows, columns = x.shape[2] // p.patch, x.shape[3] // p.patch
    hidden = int(p.mask_ratio * rows * columns + 1e-9)
    ranks = torch.rand(len(x), rows * columns, generator=generator).argsort(1).argsort(1)
    keep = (ranks >= hidden).float().view(-1, 1, rows, columns)
    return x * F.interpolate(keep, scale_factor=p.patch)


def repper(bare: Bare) -> None:
    """The supervised contrastive loss on two views of each image; views are those of the method."""
    model = bare.model.train()
    p = bare.params
    views = for_task(bare.task)
    optimizer = bare.adam(model.encoder)
    for _ in range(p.local_epochs):
        for x, y in bare.batches():
            optimizer.zero_grad()
            both = torch.cat([views(x, bare.generator), views(x, bare.generator)])
            labels = torch.cat([y, y])
            unit = F.normalize(model.encoder(both), dim=1)
            similarity = unit @ unit.T / p.temperature
            itself = torch.eye(len(labels), dtype=torch.bool)
            positive = (labels[:, None] == labels[None, :]) & ~itself
            others = torch.logsumexp(similarity.masked_fill(itself, -1e30), dim=1)
            same = torch.logsumexp(similarity.masked_fill(~positive, -1e30), dim=1) - positive.sum(1).log()
            (others - same).mean().backward()
            optimizer.step()


# --- both sides in turns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A method, the encoder and images that it is measured with, the number of samples, and the loop of its work."""

    loop: Callable[[Bare], None]
    encoder: str
    side: int
    samples: int
    params: dict[str, Any] = field(default_factory=dict)
    channels: int = 1


CASES = {
    "fedavg": Case(fedavg, workloads.W1_ENCODER, 28, 600),
    "fedpac": Case(fedpac, workloads.W1_ENCODER, 28, 600),
    "dualfed": Case(dualfed, "small_cnn", 32, 576, channels=3),
    "fedpick": Case(fedpick, "small_cnn", 32, 576, channels=3),
    "fedrir": Case(fedrir, "fedrir_cnn", 32, 576, channels=3),
    "repper": Case(repper, "small_cnn", 28, 512),
}
"""Each with its method's defaults and two epochs; samples are whole batches, which both sides cut in the same way."""


class Turns:
    """One method and its loop on the same samples, from the same weights."""

    def __init__(self, name: str) -> None:
        workloads.register()
        case = CASES[name]
        image = ImageInput(channels=case.channels, height=case.side, width=case.side)
        self.task = Task(input=image, class_names=tuple("0123456789"), encoder=case.encoder)
        self.method = methods.create(name, {"local_epochs": EPOCHS, **case.params})
        self.loop = case.loop
        draws = np.random.default_rng(SEED)
        labels = np.arange(case.samples) % 10
        prototypes = draws.standard_normal((10, *self.task.input_shape))
        inputs = (prototypes[labels] + draws.standard_normal((case.samples, *self.task.input_shape))).astype(np.float32)
        self._data = Arrays(inputs, labels)
        nothing = Arrays(inputs[:0], labels[:0])
        model = Built.of(self.method, self.task, seed=SEED, device="cpu")
        self._session = Session(
            self.method, self.task, CLIENT, self._data, nothing, seed=SEED, device="cpu", model=model
        )
        self._received: Tensors = {name: model.fresh[name] for name in self._session.shared}
        if name == "fedpac":
            width = self._session.features
            self._received["extra.centroids"] = draws.standard_normal((10, width)).astype(np.float32)
            self._received["extra.counts"] = np.full(10, 60)
        self._twin = Built.of(self.method, self.task, seed=SEED, device="cpu").model
        self.start = {name: torch.tensor(array) for name, array in model.fresh.items()}
        self._inputs = torch.from_numpy(inputs)
        self._labels = torch.from_numpy(labels)
        self._beside = {name: torch.tensor(array) for name, array in self._received.items()}

    def ours(self) -> Tensors:
        """Run a client's round as workers do, and return what travels."""
        return self._session.train(self._received, ClientState(), round_number=1, rounds=10, evaluate=False).update

    def bare(self) -> dict[str, torch.Tensor]:
        """Run the loop, and return the tensors of the model that travel."""
        self._twin.load_state_dict(self.start)
        # The random numbers are those that the client draws.
        rng = np.random.default_rng(np.random.SeedSequence([SEED, zlib.crc32(CLIENT.encode()), 1, 0]))
        generator = torch.Generator()
        generator.manual_seed(int(rng.integers(1 << 62)))
        torch.default_generator.manual_seed(int(rng.integers(1 << 62)))
        self.loop(
            Bare(
                self._twin,
                self._inputs,
                self._labels,
                rng,
                generator,
                self.method.params,
                self._beside,
                self.task,
            )
        )
        state = self._twin.state_dict()
        return {name: state[name].clone() for name in self._session.returned}

    def measure(self, repeats: int) -> tuple[list[float], list[float]]:
        """Return processor seconds of each round of ours and of the loop, after one of each that does not count."""
        self.ours()
        self.bare()
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(repeats):
            sides = [(self.ours, mine), (self.bare, theirs)]
            if number % 2:
                sides.reverse()
            for run, seconds in sides:
                begin = time.process_time()
                run()
                seconds.append(time.process_time() - begin)
        return mine, theirs


def ratios_of(mine: list[float], theirs: list[float]) -> list[float]:
    """Return the ratio of each pair."""
    return [own / other for own, other in zip(mine, theirs, strict=True)]


def row(name: str, mine: list[float], theirs: list[float]) -> str:
    """Return a line of the table: median seconds, and the median of the ratios with their middle half."""
    ratios = ratios_of(mine, theirs)
    low, high = np.quantile(ratios, [0.25, 0.75])
    figures = f"{median(theirs):.3f} | {median(mine):.3f} | {median(ratios):.3f} ({low:.3f} to {high:.3f})"
    return f"| `{name}` | {CASES[name].encoder} | {figures} |"


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    print("| method | encoder | bare loop, s | ours, s | ours over the loop (middle half) |\n|---|---|---|---|---|")
    for name in arguments.methods:
        print(row(name, *Turns(name).measure(arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()

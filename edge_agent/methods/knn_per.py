"""kNN-Per: FedAvg, and at each device what the nearest of its own samples say is mixed into the model's answer.

Source: Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022, and the
authors' code.
Travels: encoder and head, both ways, batch norm statistics included.
Stays: the datastore: features and labels of the device's training samples, and the chosen numbers.
Server: mean of the updates, weighted by sample counts.
Differs from the paper: lambda, and k and scale where more than one is offered, are chosen on a part of the training
samples that is held out for it and enters the datastore afterwards. A last batch of one sample joins the batch before
it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from ..core.task import Tensors
from ..heads.knn import MIXES, count_votes, quality
from ..training.finetune import fingerprint
from ..training.loops import evaluate, features_of
from . import Client, LocalWork, Method, MethodParams, Stage, grades

_STAMP = "memorized.from"
_FEATURES = "memorized.features"
_LABELS = "memorized.labels"
_CHOSEN = "memorized.chosen"


class KNNPerParams(MethodParams):
    """Defaults of the authors' code; numbers of which several are offered are chosen by each device."""

    neighbours: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(
        (10,), min_length=1, description="k, offered; all samples where there are fewer"
    )
    scales: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 1.0, 10.0), min_length=1, description="offered: squared distances are divided by d times this; code: 1"
    )
    mix: float | None = Field(
        None, ge=0, le=1, description="lambda, share of the neighbours; none: best of 0, 0.1 ... 1"
    )
    held_back: float = Field(0.2, gt=0, lt=1, description="share of the samples on which the numbers are chosen")


class KNNPer(Method):
    """FedAvg with a memory."""

    Params = KNNPerParams
    source = "Marfoq et al., kNN-Per, ICML 2022"
    heads = ("knn", "lr", "svm", "mlp", "prototype")
    exactness = grades(
        knn=(
            "same form",
            (
                "the same neighbours and mixture; but lambda alone is chosen on the device, not k and scale, and "
                "probabilities are those of its own classes"
            ),
        ),
    )

    def local_work(self) -> LocalWork:
        """Return the passes of training, and the memory."""
        memory = "memory of all features, its numbers chosen on a held-out part"
        return replace(super().local_work(), end=(Stage(memory),))

    def personalize(self, client: Client, received: Tensors) -> None:
        """Store features and labels, and choose k, scale and lambda."""
        stamp = fingerprint(client.model)
        features = features_of(client.model, client.train_inputs).cpu().numpy()
        labels = client.train_labels.cpu().numpy()
        # Seeded by the model: an evaluation between rounds must not shift training's random numbers.
        rng = np.random.default_rng(int.from_bytes(stamp[:8].tobytes(), "little"))
        chosen = self._chosen(client, features, labels, rng)
        client.memory.update({_STAMP: stamp, _FEATURES: features, _LABELS: labels, _CHOSEN: np.array(chosen)})

    def predict(self, client: Client, inputs: torch.Tensor) -> torch.Tensor:
        """Return lambda p_knn + (1 - lambda) p_model; the datastore is made first if the model has changed since."""
        if not np.array_equal(client.memory.get(_STAMP, ()), fingerprint(client.model)):
            self.personalize(client, {})
        neighbours, scale, mix = client.memory[_CHOSEN].tolist()
        stored = client.memory[_FEATURES], client.memory[_LABELS]
        queries = features_of(client.model, inputs).cpu().numpy()
        near = count_votes(queries.astype(np.float64), *stored, client.task.num_classes, int(neighbours), scale)
        mixed = mix * near + (1 - mix) * _probabilities(client, queries)
        return torch.from_numpy(mixed.astype(np.float32)).to(inputs.device)

    def head_params(self, head: str) -> dict[str, Any]:
        """Return, for the head of the same kind, its own choice of lambda and the first k and scale offered."""
        if head != "knn":
            return {}
        params = self.params
        scale = 1.0 if 1.0 in params.scales else params.scales[0]
        return {"neighbours": params.neighbours[0], "scale": scale, "mix": params.mix, "held_back": params.held_back}

    def _chosen(
        self, client: Client, features: np.ndarray, labels: np.ndarray, rng: np.random.Generator
    ) -> tuple[float, float, float]:
        """Return k, scale and lambda of most correct answers on held-out samples; the first of equally good ones."""
        params = self.params
        total = len(features)
        shares = MIXES if params.mix is None else (params.mix,)
        offered = list(itertools.product(params.neighbours, params.scales, shares))
        order = rng.permutation(total)
        held = round(params.held_back * total)
        if len(offered) == 1 or not 0 < held < total:
            return float(params.neighbours[0]), params.scales[0], 0.5 if params.mix is None else params.mix
        held_out = order[:held]
        memorised = order[held:]
        queries = features[held_out].astype(np.float64)
        shared = _probabilities(client, features[held_out])

        # The votes depend on k and the scale alone, so they are counted once for all mixtures.
        votes: dict[tuple[int, float], np.ndarray] = {}
        for neighbours, scale in itertools.product(params.neighbours, params.scales):
            votes[neighbours, scale] = count_votes(
                queries, features[memorised], labels[memorised], client.task.num_classes, neighbours, scale
            )

        def rate(choice: tuple[int, float, float]) -> tuple[int, float]:
            neighbours, scale, share = choice
            return quality(votes[neighbours, scale], shared, labels[held_out], share)

        neighbours, scale, share = max(offered, key=rate)
        return float(neighbours), float(scale), float(share)


def _probabilities(client: Client, features: np.ndarray) -> np.ndarray:
    """Return the shared head's probabilities (n, K) float64 on features (n, d)."""
    placed = torch.from_numpy(features).to(client.device)
    answer = evaluate(lambda piece: torch.softmax(client.model.head(piece), dim=1), client.model, placed)
    return answer.cpu().numpy().astype(np.float64)

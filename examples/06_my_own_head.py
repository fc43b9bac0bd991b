"""Your own personal head, in this one file: the nearest class by angle. No torch is imported.

Run it:  python examples/06_my_own_head.py

It is registered for this process only. A package of yours would name it in its entry points instead:
[project.entry-points."headwater.heads"]  cosine = "my_package:Cosine"
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from edge_agent import data, heads
from edge_agent.core.task import ImageInput, Tensors
from edge_agent.heads import FitData, Head, HeadParams, softmax


class Cosine(Head):
    """Probabilities grow with the cosine between a feature vector and each class's mean direction."""

    class Params(HeadParams):
        """One parameter."""

        sharpness: float = Field(20.0, gt=0, description="factor on the cosines before the softmax")

    name = "cosine"
    source = "an example"

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:  # noqa: ARG002 - no chance
        """What is returned here is saved as named arrays; nothing else of a head is."""
        directions = unit(data.features)
        return {"means": unit(np.stack([directions[data.labels == label].mean(axis=0) for label in classes]))}

    def _predict(self, features: np.ndarray) -> np.ndarray:
        return softmax(self.params.sharpness * unit(features) @ self.arrays["means"].T)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows brought to length 1."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))


def main() -> None:
    """Fit the new head and two that come with the package on the same features: here simply the pixels."""
    heads.registry.add("cosine", Cosine)
    samples = data.load("digits:optdigits?n=600", ImageInput(channels=1, height=8, width=8))
    train, test = ((s.inputs.reshape(len(s), -1), s.labels) for s in data.split(samples, 0.5, seed=0))
    for name in ("cosine", "prototype", "lr"):
        head = heads.create(name, {"sharpness": 30.0} if name == "cosine" else {})
        head.fit(FitData(*train, num_classes=len(samples.class_names)), np.random.default_rng(0))
        accuracy = np.mean(head.predict_proba(test[0]).argmax(axis=1) == test[1])
        print(f"{name:10} acc.personal: {accuracy:.3f}")


if __name__ == "__main__":
    main()

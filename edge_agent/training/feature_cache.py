"""Features of a frozen encoder, computed once for the same weights and samples of a process.

Methods and heads on an encoder that nobody trains ask for the same features in every evaluation. An entry belongs to a
model object, and is found by the digest of the encoder's tensors and that of the samples: whoever shares the model in
turn, and whenever the samples are loaded again, gets the very bits that were computed before. What was used least
recently leaves where the bound is reached.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict

import numpy as np
import torch

from .finetune import fingerprint
from .loops import features_of
from .parts import Parts

MOST_BYTES = 64 << 20
"""The bytes of features that a process keeps: 32,000 samples of 512 features."""


class FeatureCache:
    """Features by model, weights and samples, the least recently used first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """``most_bytes``: how much is kept; 0: nothing."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[int, bytes, bytes], torch.Tensor] = OrderedDict()
        self._models: dict[int, weakref.ref[Parts]] = {}
        self.hits = 0
        """How often features were there."""

        self.misses = 0
        """How often they were computed."""

    def features_of(self, model: Parts, inputs: torch.Tensor, stamp: np.ndarray | None = None) -> torch.Tensor:
        """Return features (n, d) float32 of a model's encoder in eval mode, as `loops.features_of` does, in a copy.

        Args:
            model: The model.
            inputs: The samples (n, ...).
            stamp: The `fingerprint` of the encoder as it is now, where the caller has it.

        Raises:
            DataError: There are no inputs.
        """
        if stamp is None:
            stamp = fingerprint(model.encoder, with_counters=True)
        key = (self._number_of(model), stamp.tobytes(), _digest(inputs))
        features = self._entries.get(key)
        if features is None:
            self.misses += 1
            features = features_of(model, inputs)
            self._keep(key, features)
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        return features.clone()

    def _number_of(self, model: Parts) -> int:
        """Return the number of a model object; entries of one that is gone leave, for another may get its number."""
        number = id(model)
        if number not in self._models:
            self._models[number] = weakref.ref(model, lambda _: self._forget(number))
        return number

    def _forget(self, number: int) -> None:
        self._models.pop(number, None)
        for key in [key for key in self._entries if key[0] == number]:
            self._bytes -= self._entries.pop(key).nbytes

    def _keep(self, key: tuple[int, bytes, bytes], features: torch.Tensor) -> None:
        if features.nbytes > self._most_bytes:
            return
        self._entries[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._most_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.nbytes


def _digest(inputs: torch.Tensor) -> bytes:
    """Return the SHA-256 of the inputs, their shape, type and device included."""
    digest = hashlib.sha256(repr((tuple(inputs.shape), inputs.dtype, str(inputs.device))).encode())
    digest.update(inputs.detach().cpu().contiguous().numpy().data)
    return digest.digest()


of_process = FeatureCache()
"""The cache of this process, which all clients that it simulates share."""

"""Batch norm statistics of a device's own inputs, in place of those that were pooled over the federation.

The bundle's probe computes the encoder once more over a sample of local inputs, without labels, and blends the
statistics of this sample into those of the file, each layer on what the layers before it give with theirs
(Schneider et al., NeurIPS 2020). The device writes the result over the constants of the encoder's file; ONNX Runtime
then folds them into the convolutions as it does with the original, so the encoder is as fast as before. Features,
heads, thresholds and calibration of one set of statistics are of no use with another: the fingerprint changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bundle.manifest import NO_METHOD, Manifest
from ..bundle.unpacked import Bundle
from ..core.errors import StateError
from ..core.storage import read_regular, sha256_of
from ..core.task import Tensors

PSEUDO_COUNT = 16
"""Weight of the statistics of the file, in inputs: 16 local ones count as much as the whole federation."""

MOST_INPUTS = 128
"""Inputs that the statistics are estimated on, fewer of large ones: all of them pass through the encoder at once."""

LEAST_INPUTS = 8
_MOST_VALUES = MOST_INPUTS * 3 * 32 * 32


@dataclass(frozen=True)
class OwnNorm:
    """Batch norm statistics (s,) float32 of ``inputs`` local inputs: means and variances of each layer in order.

    ``variant`` is the fingerprint of the encoder's variant that they are for, ``golden`` (8, d) float32 its features
    with them of the bundle's golden inputs, computed by the probe: what the self-test expects.
    """

    variant: str
    statistics: np.ndarray
    inputs: int
    golden: np.ndarray

    @property
    def share(self) -> float:
        """How much of the statistics is the device's own, 0..1."""
        return own_share(self.inputs)

    @property
    def fingerprint(self) -> str:
        """That of the encoder's variant with these statistics."""
        return sha256_of(self.variant.encode(), np.ascontiguousarray(self.statistics, "<f4").tobytes())

    def arrays(self) -> Tensors:
        """Return everything but ``variant`` as named arrays, for `of`."""
        arrays = {"statistics": self.statistics, "inputs": np.array([self.inputs]), "golden": self.golden}
        return {_PREFIX + name: array for name, array in arrays.items()}

    @classmethod
    def of(cls, arrays: Tensors, variant: str) -> OwnNorm:
        """Return the statistics for ``variant`` among ``arrays``, which lose them.

        Raises:
            StateError: they are not there, or in another form.
        """
        named = {name: arrays.pop(name) for name in [*arrays] if name.startswith(_PREFIX)}
        forms = {name.removeprefix(_PREFIX): (array.ndim, array.dtype.name) for name, array in named.items()}
        expected = {"statistics": (1, "float32"), "inputs": (1, "int64"), "golden": (2, "float32")}
        if forms != expected or named[f"{_PREFIX}inputs"].shape != (1,):
            raise StateError(f"batch norm statistics are {forms}, expected {expected}; fit the head again")
        statistics, inputs, golden = (named[_PREFIX + name] for name in expected)
        return cls(variant, statistics, int(inputs[0]), golden)


_PREFIX = "norm."


def own_share(inputs: int) -> float:
    """Return how much of statistics that were estimated on so many inputs is the device's own, 0..1."""
    return inputs / (inputs + PSEUDO_COUNT)


def why_not(manifest: Manifest, count: int) -> str:
    """Return why ``count`` local inputs cannot give their own statistics; empty where they can."""
    if manifest.free_norm is None:
        if manifest.method == NO_METHOD:
            return "not applicable: the bundle's encoder has no batch norm of the device's own"
        return f"not applicable: the encoder has no batch norm that method '{manifest.method}' leaves to a device"
    return f"{count} inputs, at least {LEAST_INPUTS} are needed" if count < LEAST_INPUTS else ""


def grade(exactness: str, own_norm: OwnNorm | None) -> str:
    """Return the exactness of a head whose ``exactness`` is known on the bundle's encoder.

    No head is exact where the encoder is changed.
    """
    return "same form" if own_norm is not None and exactness == "exact" else exactness


def remains(manifest: Manifest, own_norm: OwnNorm | None) -> str:
    """Return what the encoder's batch norm has in place of that of a client of the run; empty where it has the same."""
    if own_norm is None:
        return manifest.norm_note
    estimated = f"means and variances of {own_norm.inputs} local inputs ({own_norm.share:.0%}) and of the bundle"
    if manifest.norm == "global":
        return f"{estimated}, where clients of the run share theirs"
    also = "" if manifest.norm == "local_stats" else "; gamma and beta are means over the clients"
    return f"{estimated}, where a client of the run has running ones{also}"


def sample(inputs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return at most `MOST_INPUTS` of ``inputs`` (n, ...), spread over all of them: consecutive ones are much alike."""
    most = int(np.clip(_MOST_VALUES // int(np.prod(inputs.shape[1:])), LEAST_INPUTS * 2, MOST_INPUTS))
    chosen = inputs if len(inputs) <= most else inputs[np.sort(rng.choice(len(inputs), most, replace=False))]
    return np.ascontiguousarray(chosen, np.float32)


def encoder_with_statistics(bundle: Bundle, variant: str, statistics: np.ndarray) -> bytes:
    """Return the fp32 encoder's ONNX file with these ``statistics``, in the order of `OwnNorm`.

    Raises:
        StateError: they are of another encoder than the bundle's, or its batch norm cannot be changed.
    """
    layers = () if bundle.manifest.free_norm is None else bundle.manifest.free_norm.layers
    fingerprint = bundle.variant("fp32").fingerprint
    if variant != fingerprint or not layers or len(statistics) != 2 * sum(layer.channels for layer in layers):
        raise StateError(
            f"batch norm statistics of encoder {variant[:16]}…, this bundle's is {fingerprint[:16]}…; "
            "fit the head again"
        )
    content = bytearray(read_regular(bundle.folder / bundle.variant("fp32").file))
    values = np.ascontiguousarray(statistics, "<f4").tobytes()
    position = 0
    for layer in layers:
        for start in (layer.mean_at, layer.variance_at):
            content[start : start + 4 * layer.channels] = values[position : position + 4 * layer.channels]
            position += 4 * layer.channels
    return bytes(content)

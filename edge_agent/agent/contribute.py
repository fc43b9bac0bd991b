"""A device without torch in a round of training: what it can compute exactly on features of the round's encoder."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from .. import bundle as bundles
from .. import heads
from ..config import AgentConfig
from ..data import Samples
from ..encoder import Encoder
from ..errors import MissingCapability
from ..heads import FitData
from ..heads.base import softmax
from ..personalize import accuracy
from ..task import Tensors
from ..wire.messages import Job


def contribute_round(
    config: AgentConfig, job: Job, received: Tensors, encoder: Path, samples: tuple[Samples, Samples]
) -> tuple[Tensors, dict[str, float]]:
    """Update of this device in a round of ``job.method``, and its metrics; ``encoder`` is the round's bundle.

    ``samples``: training samples and held-out samples. Everything random is drawn from run, device and round.

    Raises:
        MissingCapability: the method has nothing for a device that trains no encoder.
        BundleError: the bundle is damaged.
        TrainingFailed: what the device trains of its own diverged.
    """
    contribute = heads.contribution(job.method)
    if contribute is None:
        raise MissingCapability(
            f"a round of method '{job.method}' has nothing for a device of tier 'head'; "
            "the coordinator's cohort.tier should be 'train'"
        )
    bundle = bundles.install(encoder, config.state / "runs" / job.run / "encoders", keep=1)
    session = Encoder.open(bundle, "fp32", config.training.threads)
    train, test = samples
    result = FitData(
        session.features(train.inputs), train.labels, job.task.num_classes, bundle.global_head(), dict(job.params)
    )
    rng = np.random.default_rng([job.seed, zlib.crc32(config.id.encode()), job.round])
    sent = contribute(result, received, rng)
    return sent, _scores(session, test, received, sent) if job.evaluate else {}


def _scores(encoder: Encoder, test: Samples, received: Tensors, sent: Tensors) -> dict[str, float]:
    """Shares of correct answers of the linear classifier as it came, and as it was trained here."""
    if not len(test):
        return {}
    features = encoder.features(test.inputs).astype(np.float64)
    result: dict[str, float] = {}
    for name, arrays, place in (("acc.personal", received, "head"), ("acc.after.personal", sent, "extra.head")):
        weight, bias = arrays.get(f"{place}.weight"), arrays.get(f"{place}.bias")
        if weight is not None and bias is not None:
            share = accuracy(lambda rows, w=weight, b=bias: softmax(rows @ w.T + b), features, test.labels)  # type: ignore[misc]
            result[name] = float(share or 0.0)
    return result

"""What a device of tier ``head`` does with an encoder: install a release and refit its head, contribute to a round.

A pair is an encoder and the head fitted on its features; they are never mixed. The old pair serves until the new one
has shown on the same held-out samples that it is not worse than the configuration allows.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import bundle as bundles
from .. import heads
from ..bundle import Bundle
from ..config import AgentConfig
from ..data import Samples
from ..data.partition import own_samples
from ..encoder import Encoder
from ..errors import BundleDamaged, BundleError, HeadwaterError, MissingCapability, StateError
from ..heads import FitData
from ..heads.base import softmax
from ..heads.saved import SavedHead
from ..personalize import Result, accuracy, features_of, load_head, of_one_class, personalize
from ..precision import open_encoder
from ..task import Tensors
from ..wire.messages import Install, Job, Report

log = logging.getLogger(__name__)

Split = tuple[Samples, Samples]
"""Training samples and held-out samples."""


@dataclass(frozen=True)
class _OldPair:
    bundle: Bundle
    head: SavedHead


def install_bundle(config: AgentConfig, message: Install, path: Path) -> Report:
    """Install the bundle at ``path`` and refit; returns what the new encoder got here, and which one runs now.

    Raises:
        BundleError: damaged, or not the one announced; without an old pair also one that fails its trial.
        DataError: local data do not fit the task; the old pair stays.
    """
    trial = _Trial(config, message.bundle_id, _old_pair(config), _samples(config, path))
    try:
        bundle = bundles.install(path, config.state / "bundles", check=trial)
    except BundleError:
        kept = trial.old_id
        if not trial.rejection or kept in {"", message.bundle_id}:
            raise
        log.warning("rolled_back tried=%s keeps=%s reason=%s", message.bundle_id[:12], kept[:12], trial.rejection)
        return trial.report(message, kept)
    log.info("installed bundle=%s acc.personal=%s", bundle.id[:12], trial.personal)
    return trial.report(message, bundle.id)


def refit_current(config: AgentConfig) -> tuple[str, int]:
    """Fit a head for the bundle in use and save it; returns the bundle's id and how many samples it was fitted on.

    Raises:
        BundleError: damaged, or it does not do here what it did where it was made.
        DataError: local data do not fit the task.
        StateError: no bundle is in use.
    """
    bundle = bundles.current(config.state / "bundles")
    if bundle is None:
        raise StateError(f"{config.state / 'bundles'}: no bundle is in use; import one, or wait for a release")
    task = bundle.manifest.task
    result = _refit(config, bundle, own_samples(config.data, config.id, task.input, task.class_names))
    result.save(config.state / "head")
    log.info("refitted bundle=%s acc.personal=%s", bundle.id[:12], result.scores.personal)
    return bundle.id, result.n_train


class _Trial:
    """The new pair on trial, while the old one is still current. Called by `bundles.install`; refuses by raising.

    The head is written last of all before the bundle becomes current: whoever dies in between has two halves that do
    not fit, notices it at the next start, and gets the bundle again.
    """

    def __init__(self, config: AgentConfig, announced: str, old: _OldPair | None, samples: Split) -> None:
        self._config, self._announced, self._old, self._samples = config, announced, old, samples
        self._result: Result | None = None
        self.rejection = ""

    def __call__(self, bundle: Bundle) -> None:
        _check_announced(bundle, self._announced)
        try:
            self._result = _refit(self._config, bundle, self._samples)
            self._compare()
        except BundleError as error:
            self.rejection = str(error)
            raise
        self._result.save(self._config.state / "head")

    @property
    def personal(self) -> float | None:
        """acc.personal of the new pair."""
        return None if self._result is None else self._result.scores.personal

    @property
    def old_id(self) -> str:
        """The id of the bundle that was there before; empty where there was none."""
        return "" if self._old is None else self._old.bundle.id

    def report(self, message: Install, runs: str) -> Report:
        """The figures of the new encoder, as far as it got, and the bundle that this device runs now."""
        why = f"keeps bundle {runs[:12]} because {self.rejection}"[:1000] if self.rejection else ""
        report = Report(
            run=message.run,
            about=message.bundle_id,
            bundle_id=runs,
            rolled_back=why,
            samples=sum(map(len, self._samples)),
            one_class=of_one_class(*self._samples),
            metrics={"rolled_back": float(bool(why))},
        )
        return report if self._result is None else report.model_copy(update=_figures(self._result, report.metrics))

    def _compare(self) -> None:
        """Return quietly when the new pair is good enough on the samples that the old one is judged by.

        Raises:
            BundleError: it is worse than the configuration allows.
        """
        before = None if self._old is None else _score(self._config, self._old, self._samples)
        least = self._config.head.min_gain
        if before is not None and (self.personal or 0.0) < before + least:
            now = "none" if self.personal is None else f"{self.personal:.3f}"
            raise BundleError(
                f"acc.personal is {now} with the new encoder, {before:.3f} with the old one ({least:+g} allowed)"
            )


def _figures(result: Result, metrics: dict[str, float | None]) -> dict[str, Any]:
    return {
        "samples": result.n_train,
        "support": result.n_test,
        "head": result.head.name,
        "precision": result.precision,
        "fingerprint": result.fingerprint,
        "acc_local": result.scores.local,
        "acc_global": result.scores.overall,
        "acc_personal": result.scores.personal,
        "metrics": {**metrics, "seconds": round(result.seconds, 3)},
    }


def _check_announced(bundle: Bundle, announced: str) -> None:
    if bundle.id != announced:
        raise BundleDamaged(f"bundle {bundle.id[:16]}, announced was {announced[:16]}; rejected")


def _samples(config: AgentConfig, path: Path) -> Split:
    task = bundles.open_bundle(path).manifest.task
    return own_samples(config.data, config.id, task.input, task.class_names)


def _refit(config: AgentConfig, bundle: Bundle, samples: Split) -> Result:
    encoder = _encoder(config, bundle, samples[0])
    log.info("encoder_loaded precision=%s providers=%s", encoder.precision, ",".join(encoder.providers))
    return personalize(
        bundle,
        samples,
        config.head.name,
        config.head.params,
        encoder=encoder,
        seed=config.data.seed,
        cache=config.state / "features",
    )


def _encoder(config: AgentConfig, bundle: Bundle, train: Samples) -> Encoder:
    """The encoder after its self-test; fp32 where int8 was asked for and this device fails the test of int8 alone.

    Raises:
        BundleDamaged: this device computes something else than the exporter did, in fp32, too.
    """
    wanted, threads = config.head.precision, config.training.threads
    try:
        return open_encoder(bundle, wanted, train, threads, seed=config.data.seed, features=config.state / "features")
    except BundleDamaged as error:
        if wanted != "int8":
            raise
        log.warning("int8_not_used bundle=%s reason=%s: fp32 is used instead", bundle.id[:12], error)
        return Encoder.open(bundle, "fp32", threads)


def _old_pair(config: AgentConfig) -> _OldPair | None:
    """The pair in use; None where there is none, or it is damaged (then anything is better)."""
    try:
        bundle = bundles.current(config.state / "bundles")
        return None if bundle is None else _OldPair(bundle, load_head(config.state / "head", bundle))
    except HeadwaterError as error:
        log.warning("old_pair_unusable reason=%s", error)
        return None


def _score(config: AgentConfig, old: _OldPair, samples: Split) -> float | None:
    """acc.personal of the old pair on the samples that the new one is judged by; None where it knows other classes."""
    task, (_, test) = old.bundle.manifest.task, samples
    if (task.class_names, task.input) != (test.class_names, test.input):
        return None
    encoder = Encoder.open(old.bundle, old.head.precision, config.training.threads)
    rows = features_of(test, encoder, config.state / "features")
    return accuracy(old.head.head.predict_proba, rows, test.labels)


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

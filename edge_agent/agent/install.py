"""A new encoder on a head-tier device: verify, test, activate, refit, compare, keep the better pair.

A pair is an encoder and the head fitted on its features; they are never mixed. The old pair serves until the new one
has shown on the same held-back samples that it is not worse than the configuration allows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from .. import bundle as bundles
from .. import data
from ..bundle import Bundle
from ..config import AgentConfig
from ..encoder import Encoder
from ..errors import BundleDamaged, HeadwaterError
from ..heads.saved import SavedHead
from ..personalize import Result, accuracy, features_of, load_head, personalize
from ..wire.messages import Install, Report

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OldPair:
    bundle: Bundle
    head: SavedHead


def install_bundle(config: AgentConfig, message: Install, path: Path) -> Report:
    """Install the bundle at ``path`` and refit; returns what this device got, and which encoder it runs now.

    Raises:
        BundleError: damaged, not the one announced, or its encoder computes something else here; the old pair stays.
        DataError: local data do not fit the task; the old pair stays.
    """
    root = config.state / "bundles"
    old = _old_pair(config)
    samples = _samples(config, path)
    bundle = bundles.install(path, root, check=lambda unpacked: _test(unpacked, message.fingerprint))
    try:
        result = _refit(config, bundle, samples)
    except HeadwaterError:
        _back(root, old)
        raise
    before = None if old is None else _score(config, old, samples)
    if before is not None and (result.scores.personal or 0.0) < before + config.head.min_gain:
        log.warning("rolled_back before=%.4f after=%s", before, result.scores.personal)
        _back(root, old)
        return _report(message, result, old.bundle.fingerprint if old else "", before, rolled_back=True)
    result.save(config.state / "head")
    return _report(message, result, bundle.fingerprint, result.scores.personal, rolled_back=False)


def _test(bundle: Bundle, announced: str) -> None:
    """Compare with the golden features before the bundle is made current.

    Raises:
        BundleDamaged: another encoder than announced, or it computes something else here.
    """
    if bundle.fingerprint != announced:
        raise BundleDamaged(f"bundle of encoder {bundle.fingerprint[:16]}, announced was {announced[:16]}; refused")
    golden = bundle.golden()
    for precision in bundle.manifest.variants:
        Encoder.open(bundle, precision).self_test(golden)


def _samples(config: AgentConfig, path: Path) -> data.Samples:
    task = bundles.open_bundle(path).manifest.task
    return data.load(config.data.source, task.input, task.class_names)


def _refit(config: AgentConfig, bundle: Bundle, samples: data.Samples) -> Result:
    encoder = Encoder.open(bundle, config.head.precision, config.training.threads)
    return personalize(
        bundle,
        samples,
        config.head.name,
        config.head.params,
        encoder=encoder,
        test_fraction=config.data.test_fraction,
        seed=config.data.seed,
        cache=config.state / "features",
    )


def _old_pair(config: AgentConfig) -> _OldPair | None:
    """The pair in use; None where there is none, or it is damaged (then anything is better)."""
    try:
        bundle = bundles.current(config.state / "bundles")
        return None if bundle is None else _OldPair(bundle, load_head(config.state / "head", bundle))
    except HeadwaterError as error:
        log.warning("old_pair_unusable reason=%s", error)
        return None


def _score(config: AgentConfig, old: _OldPair, samples: data.Samples) -> float | None:
    """acc.personal of the old pair on the samples that the new one is judged by; None where it knows other classes."""
    task = old.bundle.manifest.task
    if (task.class_names, task.input) != (samples.class_names, samples.input):
        return None
    _, test = data.split(samples, config.data.test_fraction, config.data.seed)
    encoder = Encoder.open(old.bundle, old.head.precision, config.training.threads)
    rows = features_of(old.bundle, test, encoder, config.state / "features")
    return accuracy(old.head.head.predict_proba, rows, test.labels)


def _back(root: Path, old: _OldPair | None) -> None:
    if old is not None:
        bundles.use(root, old.bundle.folder.name)


def _report(message: Install, result: Result, fingerprint: str, personal: float | None, *, rolled_back: bool) -> Report:
    scores = result.scores
    return Report(
        run=message.run,
        fingerprint=fingerprint,
        samples=result.n_train,
        head=result.head.name,
        acc_local=scores.local,
        acc_global=scores.overall,
        acc_personal=personal,
        metrics={"seconds": round(result.seconds, 3), "rolled_back": float(rolled_back)},
    )

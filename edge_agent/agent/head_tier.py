"""What a device of tier ``head`` does with an encoder: install a release and refit its head, contribute to a round.

A pair is an encoder and the head fitted on its features; they are never mixed. The old pair serves until the new one
has shown on the same held-out samples that it is not worse than the configuration allows.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import heads, methods
from ..bundle import archive
from ..bundle import installed as installed_module
from ..bundle.archive import BundleFile
from ..bundle.manifest import Manifest
from ..bundle.trust import Envelope, Member, TrustStore, follow_roots, parse, roots_in
from ..bundle.unpacked import Bundle
from ..core.config import AgentConfig
from ..core.errors import (
    BundleDamaged,
    BundleError,
    BundleUntrusted,
    ConfigError,
    DataError,
    HeadwaterError,
    MissingCapability,
    StateError,
    cause,
)
from ..core.own_folders import make_folder
from ..core.storage import read_json
from ..core.task import Task, Tensors
from ..data import Samples, from_files
from ..data.collected import Collection, labelled
from ..data.images import visible
from ..data.partition import is_collected, own_samples
from ..heads import FitData, saved
from ..heads.base import Contribute, softmax
from ..heads.saved import SavedHead
from ..personal.encoder import Encoder, remove_features, trim_features
from ..personal.fitting import FitOptions
from ..personal.personalize import (
    Result,
    accuracy,
    load_head,
    log_if_better_alone,
    of_one_class,
    personalize,
    saved_features,
)
from ..personal.precision import Refit, open_encoder
from ..privacy.policy import UpdateFacts, check_update, declared_least
from ..run_folder.layout import RUN_FOLDER
from ..wire.faults import public_text
from ..wire.messages.down import Install, Job
from ..wire.messages.up import Report
from .new_samples import FileMark, file_mark, is_settled, samples_folder
from .own_method import method_for
from .release_record import CANDIDATE_FOLDER, candidate_folder, clean

log = logging.getLogger(__name__)

Split = tuple[Samples, Samples]
"""Training samples and held-out samples."""

Pair = tuple[Bundle, SavedHead]

_AT_ONCE = 256
"""Files of the watch folder that are in memory at once."""


@dataclass(frozen=True)
class Candidate:
    """What came out of the trial of a new bundle.

    ``report``: of the bundle, and which one is to be used. ``version``: of the collected samples that the head was
    fitted on. ``rejection``: why the old pair stays; empty: the new one waits, the bundle beside the one in use and
    its head in `candidate_folder`.
    """

    report: Report
    version: int
    rejection: str = ""


Progress = Callable[[str], None]
"""Called with what is done now."""

Prepare = Callable[[AgentConfig, Install, Path, float], Candidate]
"""As `prepare`."""


def install_bundle(
    config: AgentConfig,
    message: Install,
    path: Path,
    now: Callable[[], float] = time.time,
    *,
    prepare: Prepare | None = None,
    switching: Callable[[], contextlib.AbstractContextManager[str]] = lambda: contextlib.nullcontext(""),
) -> Report:
    """Install the bundle at ``path`` and refit; returns the figures of the new encoder, and which one is in use now.

    Whether it may be installed is checked here; ``prepare`` (default: `prepare`, in this process) does the rest, and
    here encoder and head are switched. ``now``: as for `collect`. ``switching``: entered for the switch; gives why the
    owner keeps the pair in use all the same, which the report then has as ``kept``.

    Raises:
        BundleUntrusted: not signed by keys that this device trusts, expired, or older than one that was installed.
        BundleError: damaged, or not the one announced; without an old pair also one that fails its trial.
        DataError: local data do not fit the task; the old pair stays.
    """
    # 1. The bundle is the announced one, and this device may install it.
    opened = archive.open_bundle(path)
    root = config.state / "bundles"
    if opened.manifest.bundle_id != message.bundle_id:
        raise BundleDamaged(
            f"bundle {opened.manifest.bundle_id[:16]}, announced was {message.bundle_id[:16]}; rejected", is_public=True
        )
    first = admit(config, opened)
    member = installed_module.admitted(opened, root, now(), first)
    clean(config)
    prepare = prepare_here if prepare is None else prepare
    try:
        # 2. A head is fitted and compared beside the pair in use, which goes on serving.
        candidate = prepare(config, message, path, now())
        report = candidate.report
        # 3. Encoder and head are switched together, unless the owner keeps the pair in use from this moment on.
        if not candidate.rejection:
            bundle = installed_module.staged(opened, root)
            with switching() as why_kept:
                if why_kept:
                    report = _not_taken(report, installed_module.current_id(root), why_kept)
                else:
                    saved.adopt(candidate_folder(config), config.state / "head", bundle.fingerprints)
                    installed_module.switch(bundle, root, member, first)
                    collection_of(config).fitted(candidate.version)
                    log.info("installed bundle=%s acc.personal=%s", bundle.id[:12], report.acc_personal)
    finally:
        clean(config)
    _remove_features(config)
    return report


def _not_taken(report: Report, runs: str, why_kept: str) -> Report:
    """Return the report of a candidate as that of one whose owner keeps the bundle with the id ``runs``."""
    log.info("not_installed bundle=%s why=%s", report.about[:12], why_kept)
    reason = why_kept[:1000]
    metrics = {**report.metrics, "rolled_back": 1.0}
    return report.model_copy(update={"bundle_id": runs, "rolled_back": reason, "kept": reason, "metrics": metrics})


def prepare_here(
    config: AgentConfig, message: Install, path: Path, now: float, progress: Progress = lambda _step: None
) -> Candidate:
    """Unpack a bundle that may be installed, test its encoder, fit a head and compare; nothing in use is changed.

    The old pair is scored on the same held-out samples. ``now``: as `time.time`.

    Raises:
        BundleError: damaged; without an old pair also one that fails its test.
        DataError: local data do not fit the task.
    """
    # 1. The bundle, checked once more: this may be another process than the one that admitted it.
    progress("unpack")
    opened = archive.open_bundle(path)
    bundle = installed_module.staged(opened, config.state / "bundles")
    # 2. The trial of its encoder, before the samples take memory beside that of the trial.
    if config.head.precision != "int8":
        progress("trial")
        try:
            Encoder.open(bundle, "fp32", config.training.threads)
        except BundleError as error:
            return rejected(config, message, error)
    # 3. A head on the device's samples. Those in the watch folder may be the first that it has.
    progress("samples")
    old_pair = _old_pair(config)
    task = bundle.manifest.task
    collection = collection_of(config)
    if config.data.watch is not None:
        _take_in(collection, config.data.watch, task, config.data.budget, lambda: now)
    version = collection.index().version
    started_at = time.perf_counter()
    samples = _samples(config, task, progress)
    read_s = time.perf_counter() - started_at
    trial = _try_head(config, message, bundle, old_pair, samples, progress)
    if trial.result is not None:
        trial = replace(trial, result=trial.result.with_earlier_steps({"read": read_s}))
    # 4. The new head waits beside the pair in use until both are switched.
    if trial.result is not None:
        log_if_better_alone(trial.result.scores)
        if not trial.rejection:
            progress("save")
            make_folder(candidate_folder(config), CANDIDATE_FOLDER)
            trial.result.save(candidate_folder(config))
    report = Report(
        run=message.run,
        about=bundle.id,
        release=message.release,
        bundle_id=trial.runs,
        rolled_back=trial.why,
        one_class=of_one_class(*samples),
        metrics=trial.metrics(),
        **trial.figures(samples),
    )
    return Candidate(report, version, trial.rejection)


@dataclass(frozen=True)
class _Trial:
    """What came of a head that was fitted on a new bundle's features, beside the pair in use."""

    result: Result | None
    """The new head; None where none could be fitted."""

    before: float | None
    """Accuracy (0..1) of the old pair on the same held-out samples; None where there is no old pair, or no figure."""

    runs: str
    """Id of the bundle that this device uses from now on."""

    rejection: str = ""
    """Why the old pair stays, for this device's log; empty where the new one takes its place."""

    why: str = ""
    """The same for the coordinator."""

    def figures(self, samples: Split) -> dict[str, Any]:
        """Return the fields of the report about the new head; ``samples``: what it was fitted and scored on."""
        if self.result is None:
            return {"samples": sum(map(len, samples))}
        return {
            "samples": self.result.n_train,
            "support": self.result.n_test,
            "head": self.result.title,
            "precision": self.result.precision,
            "fingerprint": self.result.fingerprint,
            **self.result.scores.reported(),
        }

    def metrics(self) -> dict[str, float]:
        """Return the figures of the report that have no field of their own."""
        metrics = {"rolled_back": float(bool(self.why))}
        if self.result is None:
            return metrics
        if self.before is not None:
            metrics["acc.before"] = self.before
        metrics["seconds"] = round(self.result.seconds, 3)
        metrics["norm.own"] = 0.0 if self.result.norm is None else self.result.norm.share
        if self.result.choice is not None:
            metrics |= {name: value for name, value in self.result.choice.metrics().items() if isinstance(value, float)}
        return metrics


def _try_head(
    config: AgentConfig,
    message: Install,
    bundle: Bundle,
    old: Pair | None,
    samples: Split,
    progress: Progress,
) -> _Trial:
    """Fit a head on the new bundle's features and compare it with the old pair, where the coordinator wants that.

    Args:
        config: The device's configuration.
        message: The coordinator's order.
        bundle: The new bundle.
        old: The pair in use.
        samples: The parts to fit and to score on.
        progress: Is told the step that begins.

    Raises:
        BundleError: the new head is worse or cannot be fitted, and there is no old pair of another bundle.
    """
    result = None
    before = None
    try:
        result = _refit(config, bundle, samples, progress)
        progress("compare")
        if old is not None:
            before = _score(config, old, samples)
        least = config.head.min_gain
        personal = result.used_accuracy
        if message.compare and before is not None and (personal or 0.0) < before + least:
            shown = "none" if personal is None else f"{personal:.3f}"
            raise BundleError(
                f"acc.personal is {shown} with the new encoder, {before:.3f} with the old one ({least:+g} allowed)",
                is_public=True,
            )
    except BundleError as error:
        if old is None or old[0].id == bundle.id:
            raise
        kept_id = old[0].id
        log.warning("rolled_back tried=%s keeps=%s reason=%s", bundle.id[:12], kept_id[:12], error)
        return _Trial(result, before, kept_id, str(error), keeps(kept_id, error))
    return _Trial(result, before, bundle.id)


def rejected(config: AgentConfig, message: Install, error: BundleError) -> Candidate:
    """Return the answer about a bundle whose trial was not ended, with no figures of it: the old pair stays.

    Raises:
        BundleError: ``error``, where there is no old pair.
    """
    old_pair = _old_pair(config)
    if old_pair is None:
        raise error
    old_bundle, old_head = old_pair
    if old_bundle.id == message.bundle_id:
        raise error
    log.warning("rolled_back tried=%s keeps=%s reason=%s", message.bundle_id[:12], old_bundle.id[:12], error)
    n_train = old_head.metrics.get("n_train")
    samples = 0 if n_train is None else int(n_train)
    report = Report(
        run=message.run,
        about=message.bundle_id,
        release=message.release,
        bundle_id=old_bundle.id,
        rolled_back=keeps(old_bundle.id, error),
        samples=samples,
        metrics={"rolled_back": 1.0},
    )
    return Candidate(report, 0, str(error))


def keeps(bundle_id: str, error: BundleError) -> str:
    """Return why a device keeps the bundle with this id, for the coordinator."""
    return f"keeps bundle {bundle_id[:12]} because {public_text(error)}"[:1000]


def trust_configured(config: AgentConfig) -> TrustStore:
    """Return the device's trust, with the root that its configuration names.

    Raises:
        ConfigError: that is no root, or another one is trusted already.
    """
    store = TrustStore(config.state / "bundles")
    path = config.bundle.trust
    if path is None:
        return store
    try:
        *older_roots, root = roots_in(path)
        store.anchor(root, older_roots)
    except (OSError, BundleUntrusted, StateError) as error:
        raise ConfigError("bundle.trust", [f"{path}: {cause(error)}"]) from error
    return store


def admit(config: AgentConfig, opened: BundleFile) -> Envelope | None:
    """Return where this bundle may be installed as far as that depends on the configuration.

    A root: to trust with the bundle, where nobody is trusted yet and the configuration allows that.

    Raises:
        ConfigError: as `trust_configured`.
        BundleUntrusted: it is unsigned, or signed by nobody who is trusted, and the configuration does not allow that.
    """
    store = TrustStore(config.state / "bundles")
    release = opened.release
    if release is not None and store.known() is not None:
        with contextlib.suppress(BundleUntrusted):  # before the configured root, which may be some changes ahead
            store.follow(parse(Member, release, "release").roots)
    if trust_configured(config).known() is not None:
        return None
    if config.bundle.first_use and release is not None:
        oldest, *newer_roots = parse(Member, release, "release").roots
        newest = follow_roots([oldest], newer_roots)[-1]
        archive.verify(opened.path, newest)
        log.warning("trusts_first_use root=%s: once the bundle is installed", newest.signed["version"])
        return newest
    if not config.takes_unsigned:
        raise BundleUntrusted(
            "this device trusts no release keys, and its broker is on another machine: enroll it, or set bundle.trust "
            "to the federation's root.json, or bundle.unsigned = true",
            is_public=True,
        )
    return None


@dataclass(frozen=True)
class Refitted:
    """A head that was fitted again for the bundle in use, beside the one before on the same held-out samples.

    ``before``: the head before; None: there was none. ``right_before`` and ``right_now`` (n,) bool: which held-out
    samples of the classes that the head before knows each of them answers right, whose classes are ``classes`` (n,).
    """

    bundle_id: str
    result: Result
    before: SavedHead | None = None
    right_before: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    right_now: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    classes: tuple[str, ...] = ()


def refit_current(config: AgentConfig) -> tuple[str, int]:
    """Fit a head for the bundle in use and save it; returns the bundle's id and how many samples it was fitted on.

    Raises:
        HeadwaterError: as `refit`.
    """
    refitted = refit(config)
    return refitted.bundle_id, refitted.result.n_train


def refit(config: AgentConfig, *, compare: bool = False) -> Refitted:
    """Fit a head for the bundle in use and save it.

    Args:
        config: The device's configuration.
        compare: Whether to have the head before answer the held-out samples, too.

    Raises:
        BundleError: damaged, or it does not do here what it did where it was made.
        DataError: local data do not fit the task.
        StateError: no bundle is in use.
    """
    bundle = installed_module.current(config.state / "bundles")
    if bundle is None:
        raise StateError(f"{config.state / 'bundles'}: no bundle is in use; import one, or wait for a release")
    collection = collection_of(config)
    version = collection.index().version
    samples = _samples(config, bundle.manifest.task)
    result = _refit(config, bundle, samples)
    refitted = Refitted(bundle.id, result)
    # The head before is read, and has its features, before the new one takes its place.
    before = _old_pair(config) if compare and (config.state / "head" / saved.CARD).is_file() else None
    result.save(config.state / "head")
    if before is not None:
        refitted = _beside(config, refitted, before, samples[1])
    collection.fitted(version)
    _remove_features(config)
    log.info("refitted bundle=%s acc.personal=%s", bundle.id[:12], result.scores.personal)
    log_if_better_alone(result.scores)
    return refitted


def _beside(config: AgentConfig, refitted: Refitted, before: Pair, test: Samples) -> Refitted:
    """Return the new head with the answers of the one before to the held-out samples of the classes that it knows."""
    bundle, old_head = before
    new_head = load_head(config.state / "head", bundle)
    names = np.array(test.class_names)[test.labels]
    rows = np.flatnonzero(np.isin(names, old_head.class_names))
    known_samples = test.take(rows)
    is_right = []
    for head in (old_head, new_head):
        encoder = Encoder.open(bundle, head.precision, config.training.threads, norm=head.norm)
        features = saved_features(head, encoder, known_samples, config.state / "features")
        answers = head.head.predict_proba(features).argmax(axis=1)
        is_right.append(np.array(head.class_names)[answers] == names[rows])
    right_before, right_now = is_right
    classes = tuple(names[rows].tolist())
    return replace(refitted, before=old_head, right_before=right_before, right_now=right_now, classes=classes)


def collection_of(config: AgentConfig) -> Collection:
    """Return the samples that were labelled on this device."""
    return Collection(samples_folder(config))


def why_not_from_added(config: AgentConfig) -> str:
    """Return why the head of a state folder must not be fitted from the added samples alone; empty: it may.

    A head that was fitted on the samples of the agent's data source, too, would forget them.

    Raises:
        StateError: The head's card is damaged.
    """
    card = read_json(config.state / "head" / saved.CARD) or {}
    metrics = card.get("metrics") or {}
    learned = sum(int(metrics.get(name) or 0) for name in ("n_train", "n_test"))
    if learned == int(metrics.get("n_collected") or 0):
        return ""
    have = len(collection_of(config).index().samples)
    return f"it was fitted on {learned} samples of the agent's data source, and {have} are here"


def collect(
    config: AgentConfig, now: Callable[[], float] = time.time, *, lacks_head: bool = False
) -> tuple[str, int] | None:
    """Take in what is in the watch folder; then refit where samples or classes have changed since the last fit.

    Returns as `refit_current`; None where nothing has changed and a head is there (not ``lacks_head``). ``now``: as
    `time.time`; files that changed within `SETTLED_S` wait for the next time.

    Raises:
        HeadwaterError: as `refit_current`; the head in use stays.
    """
    manifest = installed_module.current_manifest(config.state / "bundles")
    if manifest is None:
        return None
    collection = collection_of(config)
    if config.data.watch is not None:
        _take_in(collection, config.data.watch, manifest.task, config.data.budget, now)
    index = collection.index()
    has_samples = bool(index.samples) or not is_collected(config.data)
    is_first_fit = lacks_head and has_samples
    has_news = index.version != index.fitted
    if is_first_fit or has_news:
        return refit_current(config)
    return None


def _take_in(collection: Collection, folder: Path, task: Task, budget: int, now: Callable[[], float]) -> None:
    """Add the files in the folders of ``folder``, which are called as the classes, and remove them there.

    Files that cannot be used stay, and are logged. Those that change now stay as well: they are not whole yet.
    """
    class_folders = visible(folder) if folder.is_dir() else ()
    for class_folder in class_folders:
        marks = _settled_files(class_folder, now)
        # Some at a time: a folder may hold more pictures than fit into memory.
        paths = [*marks]
        for start in range(0, len(paths), _AT_ONCE):
            batch = {path: marks[path] for path in paths[start : start + _AT_ONCE]}
            try:
                taken_in = _take_in_batch(collection, class_folder.name, batch, task, budget)
            except DataError as error:
                log.warning("not_taken_in folder=%s reason=%s", class_folder, error)
                continue
            # What is in the collection is removed from the folder; the collection is on disk by now.
            _remove_taken_in(taken_in)


def _settled_files(folder: Path, now: Callable[[], float]) -> dict[str, FileMark]:
    """Return the marks of the files in a folder that have stopped changing, by path; those copied now are not whole."""
    marks: dict[str, FileMark] = {}
    files = visible(folder) if folder.is_dir() else ()
    for file in files:
        mark = file_mark(file) if file.is_file() else None
        if mark is not None and is_settled(mark, now()):
            marks[str(file)] = mark
    return marks


def _take_in_batch(
    collection: Collection, class_name: str, marks: Mapping[str, FileMark], task: Task, budget: int
) -> set[str]:
    """Add files of one class to the collection.

    Args:
        collection: The samples that were labelled on this device.
        class_name: The class of all of them.
        marks: Path of each file, and its mark before it is read.
        task: The task, for the form of the samples.
        budget: How many samples the collection may hold.

    Returns:
        The paths of the files that are in the collection now.

    Raises:
        DataError: None of the files can be used, or the collection does not take them.
    """
    samples = from_files([*marks], task.input, strict=False, compact=True)
    # A file that has changed while it was read waits for the next time.
    is_unchanged = [file_mark(Path(name)) == marks[name] for name in samples.names]
    samples = samples.take(np.flatnonzero(is_unchanged))
    if not len(samples):
        return set()
    added = collection.add(labelled(samples, class_name), budget)
    log.info("taken_in class=%s added=%d known=%d dropped=%d", class_name, added.added, added.known, added.dropped)
    return {*samples.names}


def _remove_taken_in(names: Iterable[str]) -> None:
    """Remove files of the watch folder; one that stays is known by now, and not learned from twice."""
    for name in names:
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("not_removed file=%s reason=%s", name, cause(error))


_SAMPLES_REPORT_S = 1.0
"""Seconds between two reports about samples that are read."""


def _samples(config: AgentConfig, task: Task, progress: Progress = lambda _step: None) -> Split:
    """Return the device's samples: those of its source, and those that were labelled here one by one."""
    reported_at = time.monotonic()

    def report(done: int, total: int) -> None:
        # Each report is a line to the agent, which gives up a child that is silent for long; folders hold thousands.
        nonlocal reported_at
        if time.monotonic() - reported_at >= _SAMPLES_REPORT_S:
            reported_at = time.monotonic()
            progress(f"samples {done}/{total}")

    source_parts = None
    collection = collection_of(config)
    if not is_collected(config.data):
        names = config.head.own_classes
        source_parts = own_samples(
            config.data, config.id, task.input, task.class_names, own_classes=names, progress=report
        )
        if not collection.index().version:
            return source_parts
    return collection.combined(source_parts, task.input, task.class_names, saved.class_names(config.state / "head"))


def _refit(config: AgentConfig, bundle: Bundle, samples: Split, progress: Progress = lambda _step: None) -> Result:
    """Fit a head on the features of the bundle's encoder, after the encoder's self-test.

    The encoder is fp32 where int8 was configured and this device fails the test of int8 alone.

    Raises:
        BundleDamaged: this device computes something else than the exporter did, in fp32, too.
    """
    wanted_precision = config.head.precision
    threads = config.training.threads
    features = config.state / "features"

    def of_step(step: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(f"{step} {done}/{total}")

    progress("encoder")
    started_at = time.perf_counter()
    try:
        encoder = open_encoder(
            bundle,
            wanted_precision,
            samples[0],
            threads,
            norm=config.head.norm,
            refit=Refit(config.data.seed, features, of_step("encoder")),
        )
    except BundleDamaged as error:
        if wanted_precision != "int8":
            raise
        log.warning("int8_not_used bundle=%s reason=%s: fp32 is used instead", bundle.id[:12], error)
        encoder = Encoder.open(bundle, "fp32", threads)
    encoder_s = time.perf_counter() - started_at
    norm = "shipped" if encoder.norm is None else "own"
    log.info("encoder_loaded precision=%s norm=%s providers=%s", encoder.precision, norm, ",".join(encoder.providers))
    head = config.head
    options = FitOptions(
        head.name,
        head.params,
        config.data.seed,
        features,
        head.unknown,
        of_step,
        local=head.local or head.allow_local,
        blend=head.blend,
        allow_local=head.allow_local,
        took_part=took_part(config, bundle.manifest),
    )
    collected = len(collection_of(config).index().samples)
    # The choice of precision and batch norm is part of the fit's time, as in 'edge-agent fit'.
    result = personalize(bundle, samples, encoder, options).with_earlier_steps({"encoder": encoder_s})
    return replace(result, n_collected=collected)


def took_part(config: AgentConfig, manifest: Manifest) -> bool:
    """Return whether this device has contributed to the run that a bundle comes from.

    The bundle has the name of the run as its operator knows it, such as run-0001. The device keeps a folder for each
    run that it took part in, whose name is that one, followed by the id of the run.
    """
    runs = config.state / "runs"
    if manifest.lineage is None or not runs.is_dir():
        return False
    run = manifest.lineage.run
    return any(folder.name == run or folder.name.startswith(f"{run}-") for folder in runs.iterdir())


def _remove_features(config: AgentConfig) -> None:
    """Remove cached features of encoders that are not installed here any more or were not taken, and old ones.

    Those of the head in use stay.
    """
    try:
        installed = installed_module.manifests(config.state / "bundles")
        fingerprint = saved.load(config.state / "head").fingerprint
    except HeadwaterError as error:  # a predecessor, or the head, is damaged: nothing is known of what is to stay
        log.warning("features_not_removed reason=%s", error)
        return
    fingerprints: list[str] = []
    for manifest in installed:
        fingerprints += [variant.fingerprint for variant in manifest.variants.values()]
    removed_files = remove_features(config.state / "features", fingerprints)
    if removed_files:
        log.info("features_removed files=%d: of encoders that are not installed", removed_files)
    trimmed_files = trim_features(config.state / "features", config.features_bytes, fingerprint)
    if trimmed_files:
        log.info("features_removed files=%d: beyond features_bytes = %d", trimmed_files, config.features_bytes)


def _old_pair(config: AgentConfig) -> Pair | None:
    """Return the pair in use; None where there is none, or it is damaged (then anything is better)."""
    try:
        bundle = installed_module.current(config.state / "bundles")
        return None if bundle is None else (bundle, load_head(config.state / "head", bundle))
    except HeadwaterError as error:
        log.warning("old_pair_unusable reason=%s", error)
        return None


def _score(config: AgentConfig, old: Pair, samples: Split) -> float | None:
    """Return acc.personal of the old pair on the held-out samples of the new one; None where it knows other classes."""
    (bundle, head) = old
    (_, test) = samples
    task = bundle.manifest.task
    if (head.class_names, task.input) != (test.class_names, test.input):
        return None
    encoder = Encoder.open(bundle, head.precision, config.training.threads, norm=head.norm)
    rows = saved_features(head, encoder, test, config.state / "features")
    return accuracy(head.head.predict_proba, rows, test.labels)


def contribute_round(
    config: AgentConfig,
    job: Job,
    received: Tensors,
    encoder: Path,
    samples: tuple[Samples, Samples],
    now: Callable[[], float] = time.time,
) -> tuple[Tensors, dict[str, float]]:
    """Update of this device in a round of ``job.method``, and its metrics; ``encoder`` is the round's bundle.

    ``samples``: training samples and held-out samples. Everything random is drawn from run, device and round. ``now``:
    as for `collect`.

    Raises:
        MissingCapability: the method has nothing for a device that trains no encoder.
        PrivacyRefused: the update holds more than ``[privacy]`` lets out.
        BundleUntrusted: the bundle is not signed as this device demands.
        BundleError: the bundle is damaged.
        TrainingFailed: training on this device diverged.
    """
    contribute = _contribution(config, job)
    first = admit(config, archive.open_bundle(encoder))
    run_folder = config.state / "runs" / job.run
    make_folder(run_folder, RUN_FOLDER)
    folder = run_folder / "encoders"
    trust = config.state / "bundles"
    bundle = installed_module.install(encoder, folder, keep=1, now=now, first=first, round_of=TrustStore(trust))
    session = Encoder.open(bundle, "fp32", config.training.threads)
    train, test = samples
    result = FitData(
        session.features(train.inputs), train.labels, job.task.num_classes, bundle.global_head(), dict(job.params)
    )
    rng = np.random.default_rng([job.seed, zlib.crc32(config.id.encode()), job.round])
    sent = contribute(result, received, rng)
    check_update(config.privacy, sent, _update_facts(job, result))
    return sent, _scores(session, test, received, sent) if job.evaluate else {}


def _contribution(config: AgentConfig, job: Job) -> Contribute:
    """Return the method's half for devices without torch: that of a head of its name, or of its own file.

    Raises:
        MissingCapability: the method has none, or this device does not have the method's file.
        UsageError: the file that the configuration names cannot be read.
    """
    try:
        name = job.method if job.method in heads.names() else method_for(config.training, job)
        contribute = methods.contribution(name)
    except ImportError:  # a method whose file needs torch has no such half
        contribute = None
    if contribute is None:
        raise MissingCapability(
            f"a round of method '{job.method}' has nothing for a device of tier 'head'; "
            "the coordinator's cohort.tier should be 'train'",
            is_public=True,
        )
    return contribute


def weighting_of(config: AgentConfig, job: Job) -> Literal["samples", "uniform"]:
    """Return what updates of the job's method are weighted by; the method's file needs no torch.

    Raises:
        MissingCapability: this device does not have the method's file.
        UsageError: the file that the configuration names cannot be read.
    """
    return methods.get(method_for(config.training, job)).weighting


def _update_facts(job: Job, data: FitData) -> UpdateFacts:
    """Return what the arrays of an update of this device are judged by.

    Such a device knows the linear classifier of the model alone.
    """
    classes = data.num_classes
    features = data.features.shape[1]
    classifier = {"head.weight": (classes, features), "head.bias": (classes,)}
    return UpdateFacts(
        method=job.method,
        is_shipped=methods.registry.is_shipped(job.method),
        declared_least=declared_least(job.params),
        shared=frozenset(classifier),
        model_shapes=classifier,
        features=features,
        class_counts=np.bincount(data.labels, minlength=classes),
    )


def _scores(encoder: Encoder, test: Samples, received: Tensors, sent: Tensors) -> dict[str, float]:
    """Return accuracies of the linear classifier as it was received, and as it was trained here."""
    if not len(test):
        return {}
    features = encoder.features(test.inputs).astype(np.float64)
    result: dict[str, float] = {}
    for name, arrays, prefix in (("acc.personal", received, "head"), ("acc.after.personal", sent, "extra.head")):
        weight = arrays.get(f"{prefix}.weight")
        bias = arrays.get(f"{prefix}.bias")
        if weight is not None and bias is not None:
            share = accuracy(lambda rows, w=weight, b=bias: softmax(rows @ w.T + b), features, test.labels)  # type: ignore[misc]
            result[name] = float(share or 0.0)
    return result

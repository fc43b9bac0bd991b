"""`Personalizer`: a bundle, local data and a personal head, for use from Python."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .. import data, heads
from ..bundle import installed, unpacked
from ..bundle.starter import bundle_path
from ..bundle.unpacked import Bundle
from ..core.config import DataConfig, parse
from ..core.errors import DataError, UsageError
from ..core.locks import shared_folder_lock
from ..core.storage import check_writable, write_atomic
from ..data import Samples
from ..data.partition import own_samples
from ..heads import AUTO, numeric, saved
from ..heads.numeric import NumericHead
from ..heads.saved import SavedHead, SavedNumeric, title_of
from .blend import BLEND
from .choice import HeadChoice
from .confidence import Confidence, estimate_confidence
from .encoder import Encoder
from .fitting import Chosen, FitOptions, answers_to_calibrate_by, choose_model, fit
from .local.models import HeadInput, LocalModel, fit_local
from .numeric import fit_numeric, score_numeric
from .personalize import (
    Alone,
    Scores,
    load_head,
    load_numeric_head,
    norm_metrics,
    probabilities,
    saved_features,
    score_global,
)
from .precision import Refit, WantedNorm, with_norm

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..serving.answer import Answer
    from ..serving.pair import Pair

_log = logging.getLogger(__name__)

Inputs: TypeAlias = "ArrayLike | Samples | str | Path | Sequence[str | Path] | Image | Sequence[Image]"
"""What `Personalizer` takes as X."""

LabelKind: TypeAlias = Literal["text", "integers", "positions"]
"""What labels are given as: names of classes, names that are integers, or positions of classes."""


@dataclass(frozen=True)
class Learned:
    """What a head learns from.

    Attributes:
        samples: The samples.
        features: Their features (n, e) float32 by the encoder.
        digests: Digests (n,) int64 of their inputs, as `Samples.row_digests` gives them.
        kind: What their labels were given as.
    """

    samples: Samples
    features: np.ndarray
    digests: np.ndarray
    kind: LabelKind


def default_cache() -> Path:
    """Return the folder for what can be made again: ``headwater`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def load_bundle(path: str | Path, cache: str | Path | None = None) -> Bundle:
    """Return the bundle at ``path``, verified: a bundle file, an unpacked folder, or an agent's state folder.

    ``starter`` is the encoder of pictures that comes with this package.
    A file is unpacked once, in ``cache`` (default: `default_cache`).

    Raises:
        BundleDamaged: what is at that path cannot be used.
        UsageError: nothing is there.
    """
    path = bundle_path(path)
    if not path.exists():
        raise UsageError(
            f"{path}: it is not there; expected a bundle file (*.hwb) or an agent's state folder, check the path"
        )
    if not path.is_dir():
        folder = default_cache() if cache is None else Path(cache)
        check_writable(folder)
        with shared_folder_lock(folder, "edge-agent"):
            return installed.install(path, folder / "bundles", keep=4)
    if (path / "manifest.json").is_file():
        return unpacked.open_folder(path)
    result = installed.current(path / "bundles") or installed.current(path)
    if result is None:
        raise UsageError(f"{path}: no bundle in this folder; expected a bundle file or an agent's state folder")
    return result


def local_data(
    source: str,
    *,
    test: str | None = None,
    partition: str | Path | None = None,
    client: str | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
    strict: bool | None = None,
) -> DataConfig:
    """Return what ``[data]`` of an agent's configuration says, from arguments; ``seed`` counts where samples are split.

    Raises:
        ConfigError: arguments that do not go together; all of them are listed.
        UsageError: a partition without a client.
    """
    if partition is not None and client is None:
        raise UsageError(f"partition {partition}: which client's rows? Name one (--client)")
    settings = {"test": test, "partition": partition, "client": client, "test_fraction": test_fraction}
    settings = {name: value for name, value in settings.items() if value is not None}
    if partition is None:
        settings["seed"] = seed
    return parse(DataConfig, {"source": source, "strict": strict, **settings}, where="local data")


class Personalizer:
    """A bundle's frozen encoder and a personal head: ``fit``, ``predict``, ``evaluate``, ``save``, ``load``.

    Inputs X are arrays as a device's data have them: images (n, h, w), (n, h, w, c) or (n, c, h, w), integers 0..255 or
    floats 0..1, or windows (n, channels, length). Also the path of a file or a list of paths, a Pillow image or a list
    of them; one image as an array is ``X[None]``. Labels y are names of classes, as text or as integers, or their
    positions in ``classes``; ``predict`` answers with what ``fit`` was given. X may also be `Samples`, or a data source
    such as ``"images:photos"``, which bring their own labels.

    Files and images that cannot be used are an error that names them, because answers would move up in the place of
    theirs; with ``strict=False`` they are left out with a warning, as the commands do, which name each input.
    """

    def __init__(
        self,
        bundle: Bundle,
        encoder: Encoder,
        head: SavedHead | None = None,
        norm: WantedNorm = "shipped",
        threads: int = 1,
    ) -> None:
        self.bundle = bundle
        self.encoder = encoder
        self.head = head
        self._norm = norm
        self._threads = threads
        self.numeric: SavedNumeric | None = None
        self.local: LocalModel | None = None
        self.choice: HeadChoice | None = None
        self._seen: Samples | None = None
        self._options = FitOptions(AUTO)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        precision: Literal["fp32", "int8"] = "fp32",
        norm: WantedNorm = "auto",
        threads: int = 1,
        cache: str | Path | None = None,
    ) -> Personalizer:
        """Return the bundle at ``path`` (see `load_bundle`) with its encoder, after a self-test, and no head yet.

        ``norm``: whose batch norm statistics ``fit`` uses in fp32: the bundle's (``shipped``), those of its samples
        (``own``), or, with ``auto``, those of its samples unless a head answers worse with them.

        Raises:
            BundleError: the bundle is damaged, or does not compute here what it should.
            UsageError: nothing is at that path.
            MissingCapability: onnxruntime is not installed.
        """
        bundle = load_bundle(path, cache)
        return cls(bundle, Encoder.open(bundle, precision, threads), norm=norm, threads=threads)

    def __repr__(self) -> str:
        """Return one line: the bundle, the classes, and the head."""
        head = "no head yet"
        if self.numeric is not None:
            head = f"head {self.numeric.head.name}"
        elif self.head is not None:
            head = f"head {self.head.title}"
        bundle = self.bundle.manifest.bundle_id[:12]
        return f"Personalizer(bundle {bundle}, {len(self.classes)} classes, {head}, {self.encoder.precision})"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the columns of ``predict_proba``: the head's, else the bundle's."""
        return self.bundle.manifest.task.class_names if self.head is None else self.head.class_names

    def samples(
        self,
        source: str,
        *,
        test: str | None = None,
        partition: str | Path | None = None,
        client: str | None = None,
        test_fraction: float | None = None,
        seed: int = 0,
        strict: bool | None = None,
        own_classes: bool = False,
    ) -> tuple[Samples, Samples]:
        """Return training and held-out samples of a source, the same rows that an agent and ``edge-agent fit`` take.

        ``test``: a source that is held out as a whole. ``partition``: a file, of which ``client`` has some rows.
        Neither: ``test_fraction`` (default 0.25) of the samples is held out. ``strict``: as in `edge_agent.data.load`.
        ``own_classes``: as in `fit`.

        Raises:
            ConfigError: arguments that do not go together.
            DataError: samples that do not fit the bundle's task, or a partition that does not fit the data.
        """
        config = local_data(
            source, test=test, partition=partition, client=client, test_fraction=test_fraction, seed=seed, strict=strict
        )
        task = self.bundle.manifest.task
        return own_samples(config, "", task.input, task.class_names, own_classes=own_classes)

    def fit(
        self,
        X: Inputs,  # noqa: N803 - as scikit-learn calls it
        y: ArrayLike | None = None,
        *,
        head: str = AUTO,
        params: Mapping[str, Any] | None = None,
        seed: int = 0,
        own_classes: bool = False,
        unknown: float = 0.05,
        local: bool = False,
        blend: bool = True,
        strict: bool | None = None,
    ) -> Personalizer:
        """Fit a head on all samples that are given and return this object.

        ``head`` "auto" takes the best one in cross-validation, or, unless ``blend`` is False, its blend with a model of
        the raw inputs if that is surer; how all of them fared is in ``choice`` afterwards. Of
        inputs like these the share ``unknown``, from 0 to below 1, may be called unknown by `is_unknown`. With
        ``own_classes`` y are names, also of classes that the bundle does not know. Classes are then those of the bundle
        and the new ones behind them, or the new ones alone where y has none of the bundle's. With ``local`` the best
        model without the bundle is fitted, too: `evaluate` compares it, and `use_local` puts it in the head's place.

        Raises:
            UnknownName: no such head.
            ConfigError: impossible parameters of that head.
            DataError: samples or labels that do not fit the bundle's task.
            MissingCapability: a package that this head needs for fitting is not installed.
        """
        if head in numeric.names():
            samples = self._numeric_samples(X, y, numeric.create(head, params))
            encoder = self._encoder_for(samples, seed)
            fitted_numeric = fit_numeric(head, params, samples, encoder.features(samples.inputs), seed)
            about: dict[str, float | int | str | None] = {"head": head, "n_train": len(samples)}
            self._forget()
            self.numeric = SavedNumeric(
                fitted_numeric, encoder.fingerprint, encoder.precision, about, encoder.norm, samples.row_digests()
            )
            self.encoder = encoder
            return self
        heads.check(head, params or {})  # a misspelt name does not wait for the features
        options = FitOptions(head, params or {}, seed, unknown=unknown)
        samples = self._samples(X, y, self.bundle.manifest.task.class_names, own_classes=own_classes, strict=strict)
        encoder = self._encoder_for(samples, seed)
        features = encoder.features(samples.inputs)
        kind = _kind_of_labels(y, samples)
        is_blend_tried = (head == AUTO and blend) or (head == BLEND and not params)
        local_model = None
        if local or is_blend_tried:
            local_model = fit_local(samples, len(samples.class_names), np.random.default_rng(seed))
        to_blend = local_model if is_blend_tried else None
        chosen = choose_model(self.bundle, samples, features, options, to_blend)
        self._learn(Learned(samples, features, samples.row_digests(), kind), chosen, encoder)
        self._options = options
        self.local = local_model if local else None
        return self

    def use_local(self) -> Personalizer:
        """Put the model that ``fit(local=True)`` found in place of the head and return this object.

        Raises:
            UsageError: no such model was fitted.
        """
        if self.local is None or self.head is None:
            raise UsageError("no local model was fitted; fit(..., local=True) finds one")
        metrics = {"head": self.local.name, **{name: self.head.metrics[name] for name in ("n_train", "labels")}}
        takes = HeadInput(self.local.features)
        self.head = replace(self.head, head=self.local.head, takes=takes, metrics=metrics, confidence=Confidence())
        return self

    def _encoder_for(self, samples: Samples, seed: int) -> Encoder:
        """Return the encoder that a head for ``samples`` is fitted on.

        In fp32 it has the batch norm that ``open`` asked for.
        """
        if self.encoder.precision != "fp32" or (self._norm == "shipped" and self.encoder.norm is None):
            return self.encoder
        return with_norm(self.bundle, self._norm, samples, self._threads, Refit(seed))

    def partial_fit(
        self,
        X: Inputs,  # noqa: N803 - as scikit-learn calls it
        y: ArrayLike,
        classes: ArrayLike | None = None,
        *,
        head: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Personalizer:
        """Fit a head on these samples and on those of all calls before, of `fit` too, and return this object.

        Their features are kept, and the head is fitted again on all of them: nothing is forgotten. y: names of
        classes, or, where some class has another name than an integer, positions. As in scikit-learn ``classes`` names
        the classes of this and later calls; unlike there it may be left out, also in the first call, and new names in
        ``classes`` or y extend ``classes_``: behind the others, whose columns keep their places. Without ``classes``
        the first call begins as `fit` does with ``own_classes``. ``head`` and ``params``: by default as before. The raw
        inputs are not kept, so that no blend with a model of them is fitted here.

        Raises:
            UsageError: the head was loaded, so the samples that it was fitted on are not here.
            HeadwaterError: as `fit`; the head stays as it was.
        """
        if self.head is not None and self._seen is None:
            raise UsageError("a loaded head comes without its samples; fit one with all samples first")
        # 1. Classes keep their places: those of earlier calls first, then those that are named, then new ones in y.
        raw_labels = data.label_array(y)
        earlier_names = () if self._seen is None else self._seen.class_names
        given_classes = np.empty(0, int) if classes is None else data.label_array(classes)
        given_names = given_classes.astype(str).tolist()
        # Integers in y are positions of classes as soon as a class has a name that is no integer.
        are_names = raw_labels.dtype.kind == "U" or all(map(_is_integer, [*earlier_names, *given_names]))
        names_in_y = np.unique(raw_labels.astype(str)).tolist() if are_names else []
        names = tuple(dict.fromkeys([*earlier_names, *given_names, *names_in_y]))
        if not earlier_names and not given_names:
            names = data.with_own_classes(self.bundle.manifest.task.class_names, names_in_y)
        # 2. The features of the new samples; their labels are of one kind with those before, or else text.
        new = self._samples(X, raw_labels, names)
        features = self.encoder.features(new.inputs)
        digests = new.row_digests()
        kind: LabelKind = "text" if given_classes.dtype.kind == "U" else _kind_of_labels(raw_labels, new)
        # 3. The head learns from the samples of all calls.
        if self._seen is not None:
            if self.head is not None and self.head.metrics["labels"] != kind:
                kind = "text"
            if self.head is not None and self.head.learned is not None:
                digests = np.concatenate([self.head.learned, digests])
            new = replace(new, labels=np.concatenate([self._seen.labels, new.labels]), groups=None, names=())
            features = np.concatenate([self._seen.inputs, features])
        # 4. Head and parameters are those of the call before, where this one names no others.
        options = self._options
        if head is not None:
            options = replace(options, head=head, params={})
        if params is not None:
            options = replace(options, params=params)
        heads.check(options.head, options.params)
        samples = replace(new, inputs=features)
        chosen = choose_model(self.bundle, samples, features, options, None)
        self._learn(Learned(samples, features, digests, kind), chosen, self.encoder)
        self._options = options
        return self

    def _learn(self, learned: Learned, chosen: Chosen, encoder: Encoder) -> None:
        """Fit the chosen head on samples and their features by ``encoder``."""
        samples = learned.samples
        present = np.unique(samples.labels)
        if len(present) == 1:
            _log.warning("one_class class=%s: the head can only answer that", samples.class_names[present[0]])
        rows = chosen.takes.rows(lambda: learned.features, lambda: samples.inputs)
        fitted = fit(self.bundle, rows, samples.labels, chosen.options, samples.class_names)
        answers = answers_to_calibrate_by(self.bundle, fitted, samples, rows, chosen.options, chosen.answers)
        confidence = estimate_confidence(samples, learned.features, answers, chosen.options.unknown)
        self.choice = chosen.choice
        metrics: dict[str, float | int | str | None] = {
            "head": title_of(fitted, chosen.takes),
            "n_train": len(samples),
            "labels": learned.kind,
        }
        metrics |= {**norm_metrics(self.bundle, encoder), **confidence.metrics()}
        metrics |= self.choice.metrics() if self.choice is not None else {}
        self.head = SavedHead(
            fitted,
            encoder.fingerprint,
            encoder.precision,
            samples.class_names,
            metrics,
            confidence,
            norm=encoder.norm,
            takes=chosen.takes,
            learned=learned.digests,
        )
        self.numeric = None
        self.local = None
        self.encoder = encoder
        # Features are kept for `partial_fit`; the inputs are not, because they may be a hundred times as large.
        self._seen = replace(samples, inputs=learned.features)

    @property
    def classes_(self) -> np.ndarray:
        """`classes` (K,) as `predict` answers: text, or integers where the head learned from integers.

        Text where a class has another name than an integer, although the labels were such names.
        """
        kind = "text" if self.head is None else self.head.metrics.get("labels")
        if kind == "positions":
            return np.arange(len(self.classes))
        names = np.array(self.classes)
        return names.astype(np.int64) if kind == "integers" and all(map(_is_integer, self.classes)) else names

    def predict_proba(self, X: Inputs, *, strict: bool | None = None) -> np.ndarray:  # noqa: N803 - as scikit-learn
        """Return probabilities (n, K) of the classes.

        They are the personal head's; before ``fit`` they are the bundle's shared classifier's.

        Raises:
            DataError: inputs that do not fit the bundle's task.
            UsageError: there is neither a head nor a shared classifier.
        """
        samples = self._samples(X, None, self.classes, is_labelled=False, strict=strict)
        return probabilities(self.bundle, self.head, saved_features(self.head, self.encoder, samples))

    def predict(self, X: Inputs, *, strict: bool | None = None) -> np.ndarray:  # noqa: N803 - as scikit-learn
        """Return the most probable of `classes_` for each input (n,), as `predict_proba`.

        A numeric head answers with its number instead.
        """
        if self.numeric is not None:
            samples = self._samples(X, None, self.classes, is_labelled=False, strict=strict)
            return self.numeric.head.predict(self.encoder.features(samples.inputs))
        result: np.ndarray = self.classes_[self.predict_proba(X, strict=strict).argmax(axis=1)]
        return result

    def is_unknown(self, X: Inputs, *, strict: bool | None = None) -> np.ndarray:  # noqa: N803 - as scikit-learn
        """Return which inputs are unlike all training samples, (n,) bool: what is predicted for them means nothing.

        Raises:
            DataError: inputs that do not fit the bundle's task.
            UsageError: no head was fitted, or on too few samples for a threshold, or with ``unknown`` 0.
        """
        rule = None if self.head is None else self.head.confidence.unknown
        if rule is None:
            raise UsageError(
                "no threshold for unknown inputs; fit a head on at least 1 / unknown - 1 samples, 19 for unknown=0.05"
            )
        samples = self._samples(X, None, self.classes, is_labelled=False, strict=strict)
        return rule.is_unknown(self.encoder.features(samples.inputs))

    def evaluate(
        self,
        X: Inputs,  # noqa: N803 - as scikit-learn calls it
        y: ArrayLike | None = None,
        *,
        strict: bool | None = None,
    ) -> dict[str, float | None]:
        """Return the accuracy 0..1 on held-out samples.

        ``acc.personal`` is that of the head, ``acc.global`` that of the shared classifier.

        None where there is no head, or no shared classifier that knows the classes. After ``fit(local=True)`` also
        ``acc.local``, of the model ``self.local``, and ``better_alone``: it beats the head beyond noise (McNemar). Of a
        numeric head: its errors, or how well it tells anomalies apart, without baselines; the names are those of
        `edge_agent.personal.numeric.score_numeric`.

        Raises:
            DataError: samples or labels that do not fit the bundle's task.
        """
        if self.numeric is not None:
            samples = self._numeric_samples(X, y, self.numeric.head)
            return score_numeric(self.numeric.head, samples, self.encoder.features(samples.inputs))
        samples = self._samples(X, y, self.classes, strict=strict)
        features = self.encoder.features(samples.inputs)
        right = np.zeros(0, bool)
        overall = score_global(self.bundle, features, samples)
        if self.head is not None:
            rows = self.head.takes.rows(lambda: features, lambda: samples.inputs)
            right = self.head.head.predict_proba(rows).argmax(axis=1) == samples.labels
        local = None if self.local is None else Alone.of(self.local, samples)
        scores = Scores.of(right if len(right) else None, overall, local)
        if local is not None:
            return {**scores.accuracies(), "better_alone": scores.better_alone}
        return {"acc.personal": scores.personal, "acc.global": overall}

    def stream(
        self, inputs: str | Iterable[Inputs], *, every: float = 1.0, rate: float | None = None
    ) -> Iterator[Answer]:
        """Yield the answer to each of many inputs, one at a time and as they come.

        Args:
            inputs: The name of a source, as ``edge-agent serve`` has them: ``camera:auto``, ``camera:rpicam``,
                ``camera:rtsp://host/stream``, ``watch:FOLDER``, ``sensor:-`` or ``sensor:FILE``; it is answered until
                it ends, and opened again where it was lost. Otherwise paths, Pillow images, or batches of one
                (``X[None]``). A recording has one answer for all windows.
            every: Seconds between two answers to a camera, at least.
            rate: Samples of a sensor in a second, where its stream has no column for the time.

        Yields:
            `edge_agent.serving.answer.ClassAnswer`, with label, probability and whether the input is unknown; of a
            numeric head a `NumberAnswer`.

        Raises:
            DataError: An input cannot be read, or does not fit the bundle's task; the answers before it were given.
            UsageError: There is neither a head nor a shared classifier, or no source of that name.
        """
        pair = self._pair()
        if isinstance(inputs, str):
            from ..serving.sources.stream import stream_answers

            yield from stream_answers(pair, inputs, every, rate)
            return
        for one_input in inputs:
            samples = self._samples(one_input, None, self.classes, is_labelled=False)
            yield pair.answer(samples.inputs).answer

    @contextlib.contextmanager
    def serve(self, host: str = "127.0.0.1", port: int = 8480, *, token: str | None = None) -> Iterator[str]:
        """Answer over HTTP as ``edge-agent serve`` does, in this process, while the context lasts.

        What is fitted meanwhile is not served: leave the context and enter it again.

        Args:
            host: The address to listen on; other machines than this one need the token.
            port: The port; 0: any that is free.
            token: The secret; None: a new one.

        Yields:
            The address of the page, with the token behind ``#token=``.

        Raises:
            UsageError: There is neither a head nor a shared classifier, or the address cannot be used.
        """
        from ..serving.pair_source import LoadedPair
        from ..serving.service import Device, HttpSettings, IoSettings, serving

        secret = secrets.token_urlsafe(24) if token is None else token
        settings = HttpSettings((host, port), secret)
        device = Device(why_not="corrections need the state folder of a device ('edge-agent serve --state DIR')")
        with serving(LoadedPair(self._pair()), settings, device, IoSettings(), lambda _service: None) as service:
            yield f"{settings.url(service.http.port)}#token={secret}"

    def _pair(self) -> Pair:
        """Return encoder and head as what answers single inputs.

        Raises:
            UsageError: There is neither a head nor a shared classifier.
        """
        from ..serving.pair import Pair

        return Pair.assemble(self.bundle, self.encoder, self.head if self.numeric is None else self.numeric)

    def save(self, path: str | Path) -> Path:
        """Write the head into the folder ``path``, as 'edge-agent fit --out' does; returns its JSON file.

        Raises:
            UsageError: there is no head, or no file can be written there.
        """
        if self.numeric is not None:
            check_writable(Path(path))
            return saved.save_numeric(Path(path), self.numeric)
        if self.head is None:
            raise UsageError("there is no head to save yet; fit one first")
        check_writable(Path(path))
        return saved.save(Path(path), self.head)

    def export(self, path: str | Path) -> Path:
        """Write encoder and head as one ONNX file for any runtime, as 'edge-agent export' does; returns its path.

        Raises:
            UsageError: There is no head, it has no form as ONNX operators, or no file can be written there.
            MissingCapability: The package ``onnx`` is not installed.
            StateError: The file would answer otherwise than the head.
        """
        from .one_file import write_one_file

        head = self.numeric if self.numeric is not None else self.head
        if head is None:
            raise UsageError("there is no head to export yet; fit one first")
        target = Path(path)
        check_writable(target.parent)
        write_atomic(target, write_one_file(self.bundle, self.encoder, head).content)
        return target

    def load(self, path: str | Path) -> Personalizer:
        """Load the head that was saved in the folder ``path``, with its encoder, and return this object.

        Raises:
            FingerprintMismatch: the head was fitted on another encoder.
            StateError: no head there, or a damaged one.
        """
        folder = Path(path)
        encoder = self.encoder
        saved_head: SavedNumeric | SavedHead = (
            load_numeric_head(folder, self.bundle) if saved.is_numeric(folder) else load_head(folder, self.bundle)
        )
        if saved_head.fingerprint != encoder.fingerprint:
            encoder = Encoder.open(self.bundle, saved_head.precision, self._threads, norm=saved_head.norm)
        self._forget()
        self.encoder = encoder
        if isinstance(saved_head, SavedNumeric):
            self.numeric = saved_head
        else:
            self.head = saved_head
        return self

    def _forget(self) -> None:
        """Drop what belongs to the head before: it is of no use with another one, or with another encoder."""
        self.head = self.numeric = self.local = self.choice = self._seen = None

    def _numeric_samples(self, inputs: Inputs, labels: ArrayLike | None, head: NumericHead) -> Samples:
        """Return samples with the numbers or the classes that a numeric head learns from."""
        spec = self.bundle.manifest.task.input
        if isinstance(inputs, str) and not data.is_file(inputs):
            return data.load(inputs, spec, labelled=False if head.predicts_targets else None)
        if isinstance(inputs, Samples):
            return inputs.ready()
        if head.predicts_targets and labels is not None:
            samples = data.from_python(inputs, None, spec, ())
            targets = np.asarray(labels, np.float64)
            if targets.shape != (len(samples),):
                raise DataError(f"{len(samples)} inputs, targets {targets.shape}; expected one number for each input")
            return replace(samples, targets=targets)
        label_values = None if labels is None else data.label_array(labels)
        return data.from_python(inputs, label_values, spec, (), own_classes=True)

    def _samples(
        self,
        inputs: Inputs,
        labels: ArrayLike | None,
        names: tuple[str, ...],
        *,
        is_labelled: bool = True,
        own_classes: bool = False,
        strict: bool | None = None,
    ) -> Samples:
        """Return inputs of any kind as samples of the bundle's task.

        Args:
            inputs: A data source, samples, or arrays, files and tables as `edge_agent.data.from_python` takes them.
            labels: A label for each input; None where the inputs bring theirs, or none are needed.
            names: The classes, whose positions the labels become.
            is_labelled: Whether labels are needed.
            own_classes: Whether classes beside ``names`` count as well.
            strict: As in `edge_agent.data.load`.

        Raises:
            DataError: they do not fit the task.
            UsageError: labels are needed and missing.
        """
        spec = self.bundle.manifest.task.input
        if isinstance(inputs, str) and not data.is_file(inputs):
            return data.load(inputs, spec, names, labelled=is_labelled, own_classes=own_classes, strict=strict)
        if isinstance(inputs, data.Samples):
            if is_labelled and names and inputs.class_names != names and not own_classes:
                raise DataError(
                    f"samples of classes {', '.join(inputs.class_names[:10])}; expected {', '.join(names[:10])}, in "
                    "this order; fit with own_classes=True for a head of these classes"
                )
            return inputs.ready()
        if labels is None and is_labelled:
            raise UsageError("y is missing: give one label for each row of X, or a data source that has labels")
        label_values = None if labels is None else data.label_array(labels)
        return data.from_python(inputs, label_values, spec, names, own_classes=own_classes, strict=strict)


def _is_integer(name: str) -> bool:
    """Return whether a class has an integer for a name, as Python writes it, of at most 64 bits."""
    return re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) is not None


def _kind_of_labels(raw_labels: ArrayLike | None, samples: Samples) -> LabelKind:
    """Return what ``raw_labels`` of samples are: integers that are names or positions of classes, else text."""
    labels = data.label_array("" if raw_labels is None else raw_labels)
    if labels.dtype.kind not in "iu":
        return "text"
    is_name = (np.array(samples.class_names)[samples.labels] == labels.astype(str)).all()
    return "integers" if is_name else "positions"

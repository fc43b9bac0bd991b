"""The device's Python interface: bundles opened by their path, and personal heads fitted and used without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    from .bundle import Bundle
    from .data import Samples
    from .encoder import Encoder
    from .heads.saved import SavedHead


def default_cache() -> Path:
    """Folder for what can be made again: ``headwater`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def load_bundle(path: str | Path, cache: str | Path | None = None) -> Bundle:
    """The bundle at ``path``, verified: a bundle file, an unpacked folder, or an agent's state folder.

    A file is unpacked once, in ``cache`` (default: `default_cache`).

    Raises:
        BundleDamaged: what is at that path cannot be used.
        UsageError: nothing is there.
    """
    from . import bundle as bundles
    from .storage import check_writable, folder_lock

    path = Path(path)
    if not path.exists():
        raise UsageError(
            f"{path}: it is not there; expected a bundle file (*.hwb) or an agent's state folder, check the path"
        )
    if not path.is_dir():
        place = default_cache() if cache is None else Path(cache)
        check_writable(place)
        with folder_lock(place, "edge-agent"):
            return bundles.install(path, place / "bundles", keep=4)
    if (path / "manifest.json").is_file():
        return bundles.open_folder(path)
    result = bundles.current(path / "bundles") or bundles.current(path)
    if result is None:
        raise UsageError(f"{path}: no bundle in this folder; expected a bundle file or an agent's state folder")
    return result


class Personalizer:
    """A bundle's frozen encoder and a personal head: ``fit``, ``predict``, ``evaluate``, ``save``, ``load``.

    Inputs X are arrays as a device's data have them: images (n, h, w), (n, h, w, c) or (n, c, h, w), integers 0..255 or
    floats 0..1, or windows (n, channels, length). Labels y are names of classes, or their positions in ``classes``. X
    may also be `Samples`, or a data source such as ``"images:photos"``, which bring their own labels.
    """

    def __init__(self, bundle: Bundle, encoder: Encoder, head: SavedHead | None = None) -> None:
        self.bundle, self.encoder, self.head = bundle, encoder, head

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        precision: Literal["fp32", "int8"] = "fp32",
        threads: int = 1,
        cache: str | Path | None = None,
    ) -> Personalizer:
        """The bundle at ``path`` (see `load_bundle`) with its encoder, after a self-test, and no head yet.

        Raises:
            BundleError: the bundle is damaged, or does not compute here what it should.
            UsageError: nothing is at that path.
            MissingCapability: onnxruntime is not installed.
        """
        from .encoder import Encoder

        bundle = load_bundle(path, cache)
        return cls(bundle, Encoder.open(bundle, precision, threads))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the columns of ``predict_proba``."""
        return self.bundle.manifest.task.class_names

    def fit(
        self,
        X: ArrayLike | Samples | str,  # noqa: N803 - as scikit-learn calls it
        y: ArrayLike | None = None,
        *,
        head: str = "lr",
        params: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Personalizer:
        """This object, with a head fitted on all samples that are given.

        Raises:
            UnknownName: no such head.
            ConfigError: impossible parameters of that head.
            DataError: samples or labels that do not fit the bundle's task.
            MissingCapability: a package that this head needs for fitting is not installed.
        """
        import numpy as np

        from . import heads
        from .heads.saved import SavedHead
        from .personalize import Features, features_of, fit

        heads.create(head, params)  # a misspelt name does not wait for the features
        samples = self._samples(X, y)
        features = features_of(samples, self.encoder)
        none = samples.take(np.array([], np.int64))
        result = Features(samples, none, features, features[:0], self.encoder.precision, self.encoder.fingerprint)
        fitted = fit(self.bundle, result, head, params, seed)
        metrics: dict[str, float | int | str | None] = {"head": head, "n_train": len(samples)}
        self.head = SavedHead(fitted, self.encoder.fingerprint, self.encoder.precision, self.classes, metrics)
        return self

    def predict_proba(self, X: ArrayLike | Samples | str) -> np.ndarray:  # noqa: N803 - as scikit-learn calls it
        """Probabilities (n, K) of the classes: the personal head's, before ``fit`` the bundle's shared classifier's.

        Raises:
            DataError: inputs that do not fit the bundle's task.
            UsageError: there is neither a head nor a shared classifier.
        """
        return self._probabilities(self._features(X, None)[1])

    def predict(self, X: ArrayLike | Samples | str) -> np.ndarray:  # noqa: N803 - as scikit-learn calls it
        """Name (n,) of the most probable class of each input; as `predict_proba`."""
        import numpy as np

        result: np.ndarray = np.array(self.classes)[self.predict_proba(X).argmax(axis=1)]
        return result

    def evaluate(self, X: ArrayLike | Samples | str, y: ArrayLike | None = None) -> dict[str, float | None]:  # noqa: N803 - as scikit-learn
        """Accuracy 0..1 on held-out samples: ``acc.personal`` of the head, ``acc.global`` of the shared classifier.

        None where there is no head, or no shared classifier.

        Raises:
            DataError: samples or labels that do not fit the bundle's task.
        """
        from .personalize import accuracy, global_probabilities

        samples, features = self._features(X, y)
        head, shared = self.head, self.bundle.global_head()
        personal = None if head is None else accuracy(head.head.predict_proba, features, samples.labels)
        overall = None
        if shared is not None:
            overall = accuracy(lambda rows: global_probabilities(shared, rows), features, samples.labels)
        return {"acc.personal": personal, "acc.global": overall}

    def save(self, path: str | Path) -> Path:
        """Write the head into the folder ``path``, as 'edge-agent fit --out' does; returns its JSON file.

        Raises:
            UsageError: there is no head, or no file can be written there.
        """
        from .heads import saved
        from .storage import check_writable

        if self.head is None:
            raise UsageError("there is no head to save yet; fit one first")
        check_writable(Path(path))
        own = self.head
        return saved.save(
            Path(path),
            own.head,
            fingerprint=own.fingerprint,
            precision=own.precision,
            class_names=own.class_names,
            metrics=own.metrics,
        )

    def load(self, path: str | Path) -> Personalizer:
        """This object with the head that was saved in the folder ``path``, and the encoder's variant it belongs to.

        Raises:
            FingerprintMismatch: the head was fitted on another encoder.
            StateError: no head there, a damaged one, or one for other classes.
        """
        from .encoder import Encoder
        from .personalize import load_head

        self.head = load_head(Path(path), self.bundle)
        if self.head.precision != self.encoder.precision:
            self.encoder = Encoder.open(self.bundle, self.head.precision)
        return self

    def _features(self, inputs: ArrayLike | Samples | str, labels: ArrayLike | None) -> tuple[Samples, np.ndarray]:
        samples = self._samples(inputs, labels, is_labelled=labels is not None)
        return samples, self.encoder.features(samples.inputs)

    def _samples(
        self, inputs: ArrayLike | Samples | str, labels: ArrayLike | None, *, is_labelled: bool = True
    ) -> Samples:
        import numpy as np

        from . import data

        task = self.bundle.manifest.task
        if isinstance(inputs, str):
            return data.load(inputs, task.input, task.class_names)
        if isinstance(inputs, data.Samples):
            return inputs
        array = np.asarray(inputs)
        if labels is None and is_labelled:
            raise UsageError("y is missing: give one label for each row of X, or a data source that has labels")
        return data.from_arrays(array, None if labels is None else np.asarray(labels), task.input, task.class_names)

    def _probabilities(self, features: np.ndarray) -> np.ndarray:
        from .personalize import global_probabilities

        if self.head is not None:
            return self.head.head.predict_proba(features)
        shared = self.bundle.global_head()
        if shared is None:
            raise UsageError(f"bundle '{self.bundle.manifest.name}' has no shared classifier; fit a head first")
        return global_probabilities(shared, features)

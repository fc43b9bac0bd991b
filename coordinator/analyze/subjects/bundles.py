"""A bundle and clients' samples: features by ONNX Runtime, without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from weakref import finalize

import numpy as np

from edge_agent import bundle as bundles
from edge_agent.bundle import Bundle
from edge_agent.encoder import Encoder
from edge_agent.errors import UsageError

from ..looks import Holding, Look, Settings, Subject
from . import Place
from .given import Common, holdings


class Bundled(Subject):
    """One frozen encoder; nothing is known of rounds, of traffic, or of what stayed on devices."""

    kind = "bundle"

    def __init__(self, path: Path, bundle: Bundle, held: dict[str, Holding], encoder: Encoder) -> None:
        manifest = bundle.manifest
        super().__init__(str(path), manifest.name, manifest.method, manifest.task.class_names)
        self._held = held
        classifier = bundle.global_head()
        self._common = Common(encoder.features, classifier, manifest.method_params, manifest.task.num_classes)
        self.left_out.note("communication", "a bundle has no figures of the run that it came from")
        self.left_out.note("client-wise CKA", "all clients use this one encoder, so it would be 1")
        self.left_out.note("personal parts (projector, mask, classifiers)", "they never leave their devices")

    @classmethod
    def at(cls, path: Path, place: Place, settings: Settings) -> Bundled:
        """The bundle at ``path``, a file or a folder.

        Raises:
            UsageError: no data were given.
            DataError: data that do not fit.
            BundleError: the bundle is damaged or of another version.
        """
        stack = ExitStack()
        try:
            bundle = _opened(path, stack)
            if not place.data:
                raise UsageError(
                    f"{path} is a bundle and holds no samples: give --data NAME=SOURCE, once for each client, "
                    "for example --data a=images:photos"
                )
            held = holdings(place.data, bundle.manifest.task, settings)
            made = cls(path, bundle, held, Encoder.open(bundle, "fp32", cache=False))
        except BaseException:
            stack.close()
            raise
        finalize(made, stack.close)
        return made

    @property
    def clients(self) -> tuple[str, ...]:
        """Those of ``--data``."""
        return tuple(self._held)

    @property
    def rounds(self) -> tuple[int, ...]:
        """One state, which has no number; it is called 0."""
        return (0,)

    def holding(self, client: str) -> Holding:
        """One client's samples."""
        return self._held[client]

    def looks(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[Look]:  # noqa: ARG002 - one encoder
        """One look for each client."""
        for client in self.tested():
            yield self._common.look(client, self._held[client], settings, self.left_out, closely=True)


def _opened(path: Path, stack: ExitStack) -> Bundle:
    """The bundle, verified; a file is unpacked where nothing of it stays."""
    if path.is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-analyze-")))
        return bundles.install(path, folder / "bundles")
    if (path / "manifest.json").is_file():
        return bundles.open_folder(path)
    found = bundles.current(path / "bundles")
    if found is None:
        raise UsageError(f"{path}: no bundle in this folder; expected a bundle file or an agent's state folder")
    return found

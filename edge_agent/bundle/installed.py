"""Bundles unpacked on a device: one folder each, and a pointer to the one in use that is moved atomically.

``root/current.json`` lists folder names, the one in use first, its predecessors after it. A crash during an install
leaves the old pointer and perhaps a folder that the next install removes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleDamaged, BundleError, StateError, cause
from ..storage import read_json, read_tensors, sha256_file, write_json
from ..task import Tensors
from ..wire.tensors import first_non_finite
from .archive import open_bundle, unpack
from .manifest import CHECKSUM, MANIFEST, MAX_MANIFEST_BYTES, EncoderPrecision, Manifest, Variant, parse_manifest

_POINTER = "current.json"


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in a folder; files that the device adds beside it (caches) are not part of it."""

    folder: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """The bundle's id everywhere, SHA-256 (hex); see `manifest`."""
        return self.manifest.bundle_id

    @property
    def fingerprints(self) -> dict[EncoderPrecision, str]:
        """What heads are bound to, for each precision that the bundle has."""
        return {precision: variant.fingerprint for precision, variant in self.manifest.variants.items()}

    def path(self, name: str) -> Path:
        """Where one of the bundle's files lies."""
        return self.folder / name

    def encoder_path(self, precision: EncoderPrecision) -> Path:
        """The ONNX file of one precision.

        Raises:
            StateError: the bundle has no such variant.
        """
        return self.folder / self.variant(precision).file

    def variant(self, precision: EncoderPrecision) -> Variant:
        """The encoder in one precision.

        Raises:
            StateError: the bundle has no such variant.
        """
        result = self.manifest.variants.get(precision)
        if result is None:
            raise StateError(
                f"bundle '{self.manifest.name}' has no {precision} variant; it has {', '.join(self.manifest.variants)}"
            )
        return result

    def golden(self) -> Tensors:
        """Raw inputs, and what the exporter computed from them; see `self_test`."""
        return read_tensors(self.folder / self.manifest.golden)

    def global_head(self) -> Tensors | None:
        """The shared linear classifier (``weight`` (K, d), ``bias`` (K,)), or None.

        Raises:
            BundleDamaged: the file holds other arrays, of another size than the manifest promises, NaN or infinity.
        """
        if self.manifest.global_head is None:
            return None
        result = read_tensors(self.folder / self.manifest.global_head)
        classes, size = self.manifest.task.num_classes, self.manifest.feature_dim
        shapes = {name: array.shape for name, array in result.items()}
        if shapes != {"weight": (classes, size), "bias": (classes,)}:
            raise BundleDamaged(f"global head has {shapes}, expected weight {(classes, size)} and bias {(classes,)}")
        if (name := first_non_finite(result)) is not None:
            raise BundleDamaged(f"global head: '{name}' holds NaN or infinity; export the bundle again")
        return result


def open_folder(folder: Path) -> Bundle:
    """The bundle unpacked in ``folder``, every file verified again: flash memory forgets.

    Raises:
        BundleDamaged: a file is missing or its bytes are not what the manifest promises; all such files are named.
        BundleError: written for another schema version.
    """
    raw = _read(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
    if _read(folder / CHECKSUM, 100) != hashlib.sha256(raw).hexdigest().encode() + b"\n":
        raise BundleDamaged(f"{folder}: the manifest is not the one that its checksum names; install the bundle again")
    manifest = parse_manifest(raw, str(folder))
    damaged = [name for name in sorted(manifest.files) if not _is_intact(folder / name, manifest.files[name].sha256)]
    if damaged:
        raise BundleDamaged(f"{folder}: missing or damaged: {', '.join(damaged)}; install the bundle again")
    return Bundle(folder, manifest)


def install(path: Path, root: Path, keep: int = 2, check: Callable[[Bundle], object] | None = None) -> Bundle:
    """Verify the bundle file at ``path``, unpack it under ``root`` and make it the current one; ``keep`` are kept.

    The folder is named after the bundle id: a bundle of the same content, whatever its name, takes no second one.
    ``check`` sees the unpacked bundle before it becomes current, and may refuse it by raising.

    Raises:
        BundleDamaged: as `open_bundle`; what was current stays current.
    """
    name = _folder_name(path)
    folder = root / name
    if folder.exists() and not _opens(folder):
        shutil.rmtree(folder)
    if not folder.exists():
        unpack(path, folder)
    bundle = open_folder(folder)
    if check is not None:
        check(bundle)
    use(root, name)
    _prune(root, max(keep, 1))
    return bundle


def current(root: Path) -> Bundle | None:
    """The bundle in use under ``root``, verified; None where none was installed.

    Raises:
        BundleDamaged: it is damaged; `rollback` or `install` help.
    """
    names = _history(root)
    return open_folder(root / names[0]) if names else None


def current_manifest(root: Path) -> Manifest | None:
    """What the bundle in use under ``root`` says of itself, its files not looked at; None where none was installed.

    Raises:
        BundleError: its manifest cannot be read.
    """
    names = _history(root)
    return parse_manifest(_read(root / names[0] / MANIFEST, MAX_MANIFEST_BYTES + 1), str(root)) if names else None


def current_id(root: Path) -> str:
    """The id of the bundle in use under ``root``; empty where there is none, or its manifest cannot be read."""
    try:
        manifest = current_manifest(root)
    except BundleError:
        return ""
    return "" if manifest is None else manifest.bundle_id


def rollback(root: Path, check: Callable[[Bundle], object] | None = None) -> Bundle:
    """The bundle that was in use before, made current again; ``check`` may refuse it first by raising.

    Raises:
        StateError: there is none.
        BundleDamaged: it is damaged; the current one stays.
    """
    names = _history(root)
    if len(names) < 2:
        raise StateError(f"{root}: no earlier bundle to roll back to; {len(names)} installed")
    bundle = open_folder(root / names[1])
    if check is not None:
        check(bundle)
    _write_history(root, names[1:])
    return bundle


def use(root: Path, name: str) -> None:
    """Make the unpacked folder ``name`` the current one."""
    _write_history(root, [name, *(other for other in _history(root) if other != name)])


def _folder_name(path: Path) -> str:
    return open_bundle(path).manifest.bundle_id[:24]


def _opens(folder: Path) -> bool:
    try:
        open_folder(folder)
    except BundleDamaged:
        return False
    return True


def _history(root: Path) -> list[str]:
    content = read_json(root / _POINTER)
    names = [] if content is None else content.get("bundles")
    if not isinstance(names, list) or not all(isinstance(name, str) and _is_plain(name) for name in names):
        raise StateError(
            f"{root / _POINTER}: expected a list of folder names under 'bundles'; remove it and install again"
        )
    return [name for name in names if (root / name).is_dir()]


def _is_plain(name: str) -> bool:
    return name.replace("-", "").isalnum()


def _write_history(root: Path, names: Iterable[str]) -> None:
    write_json(root / _POINTER, {"bundles": list(names)})


def _prune(root: Path, keep: int) -> None:
    """Remove all but the first ``keep`` bundles, and what a crash left behind."""
    names = _history(root)
    _write_history(root, names[:keep])
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in names[:keep]:
            shutil.rmtree(folder, ignore_errors=True)


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and not path.is_symlink() and sha256_file(path) == sha256


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle that was unpacked here"
        ) from error

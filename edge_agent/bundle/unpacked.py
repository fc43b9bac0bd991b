"""Bundles that were unpacked into folders of this device, and the marks by which these folders are recognised."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_agent.bundle.archive import MOST_HEADER_BYTES, open_bundle
from edge_agent.bundle.manifest import (
    CHECKSUM,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    RELEASE,
    EncoderPrecision,
    Manifest,
    Variant,
    checksum_line,
    dump_manifest,
    files_of,
    parse_manifest,
)

from ..core.errors import BundleDamaged, BundleError, StateError, UsageError, cause
from ..core.own_folders import FolderKind, mark_folder, remove_folder
from ..core.storage import (
    naming,
    open_regular,
    read_tensors,
    sha256_file,
    sha256_of,
    sync,
    sync_folder,
)
from ..core.task import Tensors
from ..wire.tensors import first_non_finite
from .trust import MAX_BYTES as MAX_RELEASE_BYTES
from .trust import (
    TrustStore,
)

_GOLDEN_INPUTS = 8
"""The number of inputs in a bundle's golden file."""

_MOST_SAMPLES = 1e12
"""The most samples that shared statistics are means over; a share of a class is at least one of so many."""

_ROUNDING = 1e-3
"""By how much the shares, each a float32, may sum to more than 1."""

_MADE = ".made"
"""The name of `Bundle.made` in the folder of a bundle."""


def unpack(path: Path, folder: Path) -> Manifest:
    """Verify the bundle at ``path`` and put its files into the new folder ``folder``, all of them or none.

    Raises:
        BundleDamaged: See `open_bundle`.
        BundleError: See `open_bundle`; or ``folder`` exists already.
    """
    bundle = open_bundle(path)
    if folder.exists():
        raise BundleError(
            f"{folder} exists already; expected a folder that does not exist yet; remove it or name another"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    mark_folder(temporary, BUNDLE_FOLDER, folder.name)
    raw = dump_manifest(bundle.manifest)
    contents: dict[str, Iterable[bytes]] = {MANIFEST: [raw], CHECKSUM: [checksum_line(raw)]}
    contents |= {name: bundle.blocks(name) for name in bundle.manifest.files}
    if bundle.release is not None:
        contents[RELEASE] = [bundle.release]
    try:
        for name, blocks in contents.items():
            with naming(folder / name), (temporary / name).open("wb") as file:
                file.writelines(blocks)
                file.flush()
                sync(file.fileno())
        sync_folder(temporary)
        temporary.rename(folder)
    finally:
        remove_folder(temporary, BUNDLE_FOLDER)
    sync_folder(folder.parent)
    return bundle.manifest


def _is_earlier_bundle(folder: Path) -> bool:
    """Return whether an earlier version unpacked a bundle there: its manifest's hashes give the folder its name."""
    try:
        raw = read_part(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
        if read_part(folder / CHECKSUM, 100) != checksum_line(raw):
            return False
        manifest = parse_manifest(raw, str(folder))
    except BundleError:
        return False
    name = manifest.bundle_id[:24]
    if folder.name not in {name, f"{name}-{sha256_of(raw)[:8]}"}:
        return False
    # What the device made from the bundle is the only thing beside the bundle's own files.
    files = {MANIFEST, CHECKSUM, RELEASE, _MADE, *manifest.files}
    return all(path.name in files and not path.is_symlink() for path in folder.iterdir())


BUNDLE_FOLDER = FolderKind("bundle", _is_earlier_bundle)
"""A folder into which a bundle was unpacked."""


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in a folder; what the device adds in `made` is not part of it."""

    folder: Path
    manifest: Manifest

    @functools.cached_property
    def id(self) -> str:
        """The id of the bundle, SHA-256 (hex) of most of its manifest, which takes a millisecond to write as JSON."""
        return self.manifest.bundle_id

    @property
    def made(self) -> Path:
        """The folder of files that this device makes from the bundle and trusts: no bundle has such a file name."""
        return self.folder / _MADE

    @property
    def fingerprints(self) -> dict[EncoderPrecision, str]:
        """The fingerprint of each precision that the bundle has; a head belongs to one of them."""
        return {precision: variant.fingerprint for precision, variant in self.manifest.variants.items()}

    def variant(self, precision: EncoderPrecision) -> Variant:
        """Return the encoder in one precision.

        Raises:
            StateError: The bundle has no variant of this precision.
        """
        result = self.manifest.variants.get(precision)
        if result is None:
            raise StateError(
                f"bundle '{self.manifest.name}' has no {precision} variant; it has {', '.join(self.manifest.variants)}"
            )
        return result

    def golden(self) -> Tensors:
        """Return raw inputs, and what the exporter computed from them; see `personal.self_test`.

        Raises:
            BundleDamaged: The file is larger than such arrays can be.
        """
        manifest = self.manifest
        spec = manifest.task.input
        rows = _GOLDEN_INPUTS * (4 * manifest.feature_dim * len(manifest.variants))
        if spec.kind == "image":
            raw = (_GOLDEN_INPUTS + 3) * math.prod(spec.shape)  # inputs, and an image of twice the size, resized
        else:
            raw = 4 * spec.channels * (spec.length + (_GOLDEN_INPUTS - 1) * spec.stride)
        return self._tensors(manifest.golden, raw + rows + 8 * _GOLDEN_INPUTS * manifest.task.num_classes)

    def _tensors(self, name: str, most_bytes: int) -> Tensors:
        """Return the arrays in a file, which may have ``most_bytes`` beside its header: they are read at once."""
        size = self.manifest.files[name].size_bytes
        if size > most_bytes + MOST_HEADER_BYTES:
            raise BundleDamaged(
                f"'{name}' has {size} bytes, at most {most_bytes} are possible; export the bundle again"
            )
        return read_tensors(self.folder / name)

    def require_global_head(self) -> Tensors:
        """Return the shared linear classifier, which answers where no head was named; see `global_head`.

        Raises:
            UsageError: The bundle has none.
            BundleDamaged: The file of the classifier is damaged.
        """
        classifier = self.global_head()
        if classifier is None:
            raise UsageError(
                f"bundle '{self.manifest.name}' has no shared classifier, and no head was named; fit one with this "
                "bundle first ('edge-agent fit'), and name its folder (--head)"
            )
        return classifier

    def global_head(self) -> Tensors | None:
        """Return the shared linear classifier (``weight`` (K, d), ``bias`` (K,)), or None.

        Raises:
            BundleDamaged: The file holds other arrays, other shapes than the manifest, NaN or infinity.
        """
        if self.manifest.global_head is None:
            return None
        classes = self.manifest.task.num_classes
        size = self.manifest.feature_dim
        result = self._tensors(self.manifest.global_head, 4 * classes * (size + 1))
        shapes = {name: array.shape for name, array in result.items()}
        if shapes != {"weight": (classes, size), "bias": (classes,)}:
            raise BundleDamaged(
                f"global head has {shapes}, expected weight {(classes, size)} and bias {(classes,)}; export it again"
            )
        name = first_non_finite(result)
        if name is not None:
            raise BundleDamaged(f"global head: '{name}' holds NaN or infinity; export the bundle again")
        return result

    def shared_statistics(self) -> Tensors | None:
        """Return ``gram``, ``sums`` and ``shares``, means over all clients' samples (see the manifest), or None.

        Raises:
            BundleDamaged: The file holds other arrays, other shapes than the manifest, NaN or infinity, or shares of
                classes that no samples have.
        """
        name = self.manifest.shared_statistics
        if name is None:
            return None
        classes = self.manifest.task.num_classes
        size = self.manifest.feature_dim
        expected = {"gram": (size * (size + 1) // 2,), "sums": (classes, size), "shares": (classes,)}
        result = self._tensors(name, 8 * (size * (size + 1) // 2 + classes * (size + 1)))
        shapes = {key: array.shape for key, array in result.items()}
        if shapes != expected:
            raise BundleDamaged(f"shared statistics have {shapes}, expected {expected}; export the bundle again")
        not_finite = first_non_finite(result)
        if not_finite is not None:
            raise BundleDamaged(f"shared statistics: '{not_finite}' holds NaN or infinity; export the bundle again")
        # Samples of classes that clients have withheld have no share, so shares may sum to less than 1. Their sum is
        # divided by later: at least one sample was sent.
        shares = result["shares"].astype(np.float64)
        if shares.min() < 0 or not 1 / _MOST_SAMPLES <= shares.sum() <= 1 + _ROUNDING:
            raise BundleDamaged(
                f"shared statistics: shares of classes from {shares.min():g} with a sum of {shares.sum():g}, expected "
                "0 or more with a sum of at most 1; export the bundle again"
            )
        return result


def open_folder(folder: Path) -> Bundle:
    """Return the bundle unpacked in ``folder``, after verifying every file again, because flash memory may lose bits.

    Its signatures are verified again as well, where the folder of bundles trusts keys.

    Raises:
        BundleUntrusted: The bundle is not signed by those keys.
        BundleDamaged: A file is missing or has another hash than the manifest; all such files are named.
        BundleError: The bundle has another schema version.
    """
    raw = read_part(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
    if read_part(folder / CHECKSUM, 100) != checksum_line(raw):
        raise BundleDamaged(f"{folder}: the manifest does not match its checksum; install the bundle again")
    manifest = parse_manifest(raw, str(folder))
    damaged = []
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        is_present = path.is_file() and not path.is_symlink()
        if not is_present or sha256_file(path) != entry.sha256:
            damaged.append(name)
    if damaged:
        raise BundleDamaged(f"{folder}: missing or damaged: {', '.join(damaged)}; install the bundle again")
    TrustStore(folder.parent).check_loaded(release_in(folder), files_of(manifest))
    return Bundle(folder, manifest)


def release_in(folder: Path) -> bytes | None:
    """Return the release of an unpacked bundle, its signatures, as bytes; None where it carries none."""
    path = folder / RELEASE
    return read_part(path, MAX_RELEASE_BYTES + 1) if path.exists() else None


def read_part(path: Path, limit: int) -> bytes:
    """Return at most the first ``limit`` bytes of a file of an unpacked bundle.

    Raises:
        BundleDamaged: The file is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle that was unpacked here"
        ) from error

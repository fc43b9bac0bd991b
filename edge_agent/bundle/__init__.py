"""One file that carries a frozen encoder to devices: manifest, ONNX variants, golden tensors, optional shared head.

Layout: an uncompressed tar of flat regular files: ``manifest.json``, ``manifest.sha256``, then the rest in the order of
their names. The manifest names every other file with its size and SHA-256; nothing is opened by ONNX Runtime before all
of them have been checked.
"""

from __future__ import annotations

from .archive import BundleFile, open_bundle, pack, unpack
from .installed import Bundle, current, current_id, current_manifest, install, open_folder, rollback, use
from .manifest import (
    MAX_BUNDLE_BYTES,
    MAX_MANIFEST_BYTES,
    SCHEMA,
    EncoderPrecision,
    FileEntry,
    HeadCard,
    Manifest,
    Parity,
    Variant,
    dump_manifest,
    fingerprint,
    parse_manifest,
)

__all__ = [
    "MAX_BUNDLE_BYTES",
    "MAX_MANIFEST_BYTES",
    "SCHEMA",
    "Bundle",
    "BundleFile",
    "EncoderPrecision",
    "FileEntry",
    "HeadCard",
    "Manifest",
    "Parity",
    "Variant",
    "current",
    "current_id",
    "current_manifest",
    "dump_manifest",
    "fingerprint",
    "install",
    "open_bundle",
    "open_folder",
    "pack",
    "parse_manifest",
    "rollback",
    "unpack",
    "use",
]

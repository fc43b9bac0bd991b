"""Bundles as files: written deterministically, and read by expecting exactly the bytes that the writer would write.

A reader that knows the manifest knows every tar header, every padding byte and the length of the whole file. It
compares instead of parsing: links, paths that climb, extra members, holes and surplus bytes have no place to hide.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from ..config import mistakes_of
from ..errors import BundleDamaged, BundleError, cause
from ..storage import sync_folder
from .manifest import (
    CHECKSUM,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SCHEMA,
    FileEntry,
    Manifest,
    Variant,
    dump_manifest,
    fingerprint,
    parse_manifest,
)

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_CHECKSUM_BYTES = 65
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleFile:
    """A verified bundle file; ``offsets`` says where each file's content begins."""

    path: Path
    manifest: Manifest
    raw_manifest: bytes
    offsets: Mapping[str, int]

    def read(self, name: str) -> bytes:
        """Content of one file.

        Raises:
            BundleDamaged: no such file, or its bytes changed since the bundle was opened.
        """
        return b"".join(self.blocks(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        """Content of one file, a megabyte at a time.

        Raises:
            BundleDamaged: as `read`; where bytes changed, only after the last block.
        """
        if name not in self.offsets:
            raise BundleDamaged(f"{self.path} has no file '{name}'; it has {', '.join(self.offsets)}")
        entry, digest = self.manifest.files[name], hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self.offsets[name])
            left = entry.size_bytes
            while left and (block := file.read(min(left, _COPY_BYTES))):
                digest.update(block)
                left -= len(block)
                yield block
        if digest.hexdigest() != entry.sha256:
            raise BundleDamaged(f"{self.path}: '{name}' changed while it was in use; fetch the bundle again")


def pack(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> Manifest:
    """Write a bundle atomically; returns its manifest. Equal content gives equal bytes, on every machine.

    ``manifest`` holds the fields of `Manifest` without ``files`` and ``schema_version``; ``variants`` names a file
    for each precision, fingerprints follow from the content. A file's content is bytes or the path of a file to copy.

    Raises:
        BundleError: the fields are not a manifest, or refer to files that are not there; every mistake is listed.
    """
    complete = _complete(path, manifest, files)
    raw = dump_manifest(complete)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are carried")
    parse_manifest(raw, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as out:
            _write_all(out, raw, files)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return complete


def open_bundle(path: Path) -> BundleFile:
    """The bundle at ``path``, every byte of it verified.

    Raises:
        BundleDamaged: no such file, cut short, or bytes that are not what the manifest promises.
        BundleError: written for another schema version.
    """
    try:
        with path.open("rb") as file:
            raw = _read_manifest(file, path)
            manifest = parse_manifest(raw, str(path))
            offsets = _check_members(file, path, manifest)
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle file, usually named *.hwb"
        ) from error
    return BundleFile(path, manifest, raw, offsets)


def unpack(path: Path, folder: Path) -> Manifest:
    """Verify the bundle at ``path`` and put its files into the new folder ``folder``, all of them or none.

    Raises:
        BundleDamaged: as `open_bundle`.
        BundleError: as `open_bundle`, or ``folder`` exists already.
    """
    bundle = open_bundle(path)
    if folder.exists():
        raise BundleError(
            f"{folder} exists already; expected a folder that is still to be made; remove it or name another"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        _write_synced(temporary / MANIFEST, [bundle.raw_manifest])
        _write_synced(temporary / CHECKSUM, [_checksum(bundle.raw_manifest)])
        for name in bundle.manifest.files:
            _write_synced(temporary / name, bundle.blocks(name))
        sync_folder(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)
    return bundle.manifest


def _complete(path: Path, fields: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> Manifest:
    entries = {name: _entry(content) for name, content in sorted(files.items())}
    unbound = {
        precision: {"file": name, "fingerprint": "0" * 64} for precision, name in fields.get("variants", {}).items()
    }
    given = {**fields, "schema_version": SCHEMA, "files": entries, "variants": unbound}
    try:
        draft = Manifest.model_validate(given)
    except ValidationError as error:
        raise BundleError(f"{path}: manifest: {'; '.join(mistakes_of(error, Manifest))}") from error
    if missing := [variant.file for variant in draft.variants.values() if variant.file not in entries]:
        raise BundleError(f"{path}: no file {', '.join(missing)} among {', '.join(entries) or '(none)'}")
    variants = {
        precision: Variant(file=variant.file, fingerprint=fingerprint(entries[variant.file].sha256, draft.task.input))
        for precision, variant in draft.variants.items()
    }
    return draft.model_copy(update={"variants": variants})


def _entry(content: bytes | Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    for block in _blocks(content):
        digest.update(block)
        size += len(block)
    return FileEntry(sha256=digest.hexdigest(), size_bytes=size)


def _blocks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            yield block


def _write_all(out: BinaryIO, raw: bytes, files: Mapping[str, bytes | Path]) -> None:
    _write_member(out, MANIFEST, raw)
    _write_member(out, CHECKSUM, _checksum(raw))
    for name in sorted(files):
        _write_member(out, name, files[name])
    out.write(_END)
    _sync(out)


def _write_member(out: BinaryIO, name: str, content: bytes | Path) -> None:
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    out.write(_header(name, size))
    out.writelines(_blocks(content))
    out.write(bytes(_padding(size)))


def _write_synced(path: Path, blocks: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(blocks)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> int:
    return -size % _BLOCK


def _checksum(raw: bytes) -> bytes:
    return hashlib.sha256(raw).hexdigest().encode() + b"\n"


def _read_manifest(file: BinaryIO, path: Path) -> bytes:
    header = file.read(_BLOCK)
    size = _declared_size(header)
    if size is None or header != _header(MANIFEST, size):
        raise BundleDamaged(f"{path}: does not begin with {MANIFEST}; not a bundle, or damaged; fetch it again")
    if size > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{path}: manifest of {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    raw = _exactly(file, size, path, MANIFEST)
    _expect(file, bytes(_padding(size)) + _header(CHECKSUM, _CHECKSUM_BYTES), path, CHECKSUM)
    if file.read(_CHECKSUM_BYTES) != _checksum(raw):
        raise BundleDamaged(f"{path}: the manifest is not the one that its checksum names; fetch the bundle again")
    return raw


def _declared_size(header: bytes) -> int | None:
    field = header[124:135]
    digits = len(field) == 11 and all(48 <= byte < 56 for byte in field)
    return int(field, 8) if digits else None


def _check_members(file: BinaryIO, path: Path, manifest: Manifest) -> dict[str, int]:
    offsets: dict[str, int] = {}
    before = _CHECKSUM_BYTES
    for name, entry in sorted(manifest.files.items()):
        _expect(file, bytes(_padding(before)) + _header(name, entry.size_bytes), path, name)
        offsets[name] = file.tell()
        _check_content(file, path, name, entry)
        before = entry.size_bytes
    _expect(file, bytes(_padding(before)) + _END, path, "the end")
    if file.read(1):
        raise BundleDamaged(f"{path}: bytes after the end; fetch the bundle again")
    return offsets


def _check_content(file: BinaryIO, path: Path, name: str, entry: FileEntry) -> None:
    digest, left = hashlib.sha256(), entry.size_bytes
    while left:
        block = file.read(min(left, _COPY_BYTES))
        if not block:
            raise BundleDamaged(f"{path}: cut short inside '{name}', {left} bytes missing; fetch the bundle again")
        digest.update(block)
        left -= len(block)
    if digest.hexdigest() != entry.sha256:
        raise BundleDamaged(
            f"{path}: '{name}' has SHA-256 {digest.hexdigest()[:16]}…, the manifest promises {entry.sha256[:16]}…; "
            "fetch the bundle again"
        )


def _expect(file: BinaryIO, expected: bytes, path: Path, name: str) -> None:
    if file.read(len(expected)) != expected:
        raise BundleDamaged(f"{path}: unexpected bytes before '{name}'; damaged or not written by headwater")


def _exactly(file: BinaryIO, size: int, path: Path, name: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise BundleDamaged(f"{path}: cut short inside '{name}'; fetch the bundle again")
    return data

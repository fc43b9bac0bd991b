"""A bundle as one file: packed, opened, signed, verified and unpacked.

Layout: an uncompressed tar of flat regular files: ``manifest.json``, ``manifest.sha256``, then the rest in the order of
their names. The manifest names every other file with its size and SHA-256; nothing is opened by ONNX Runtime before all
of them have been checked. A reader that knows the manifest knows every tar header, every padding byte and the length of
the whole file. It compares instead of parsing: links, paths that climb, extra members, holes and surplus bytes have no
place to hide. Only ``release.json`` may follow, the signatures; see `trust`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from edge_agent.bundle.manifest import (
    CHECKSUM,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    RELEASE,
    SCHEMA,
    FileEntry,
    Manifest,
    Variant,
    checksum_line,
    dump_manifest,
    files_of,
    fingerprint,
    parse_manifest,
)

from ..core.config import mistakes_of
from ..core.errors import BundleDamaged, BundleError, BundleUntrusted, cause
from ..core.storage import (
    mapped,
    open_regular,
    read_regular,
    sha256_of,
    write_atomic,
)
from .trust import MAX_BYTES as MAX_RELEASE_BYTES
from .trust import (
    Envelope,
    Member,
    Release,
    Root,
    check_signed,
    follow_roots,
    parse,
    read,
    verify_release,
)

_BLOCK = 512
"""Bytes of a block of a tar file, to which its headers and contents are padded."""

_END = bytes(2 * _BLOCK)
"""The end of a tar file."""

_CHECKSUM_BYTES = 65
"""Bytes of the file `CHECKSUM`: 64 hexadecimal digits and a newline."""

_COPY_BYTES = 1 << 20
"""The most bytes of a file's content that are in memory at once."""

MOST_HEADER_BYTES = 1 << 16
"""The most bytes of the header of a tensor file in a bundle."""


@dataclass(frozen=True)
class BundleFile:
    """A bundle file whose bytes were compared with its manifest.

    Attributes:
        path: The file.
        manifest: Its manifest.
        offsets: The byte at which the content of each file begins.
        end: The byte behind the last file, where the signatures or the end of the tar begin.
        release: Its signatures as they are in the file, not verified; None where it has none.
    """

    path: Path
    manifest: Manifest
    offsets: Mapping[str, int]
    end: int
    release: bytes | None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the content of one file, a megabyte at a time.

        Raises:
            BundleDamaged: The bytes have changed since the bundle was opened; this is known after the last block.
        """
        with open_regular(self.path) as file:
            file.seek(self.offsets[name])
            yield from _content(file, self.path, name, self.manifest.files[name])

    def read(self, name: str) -> bytes:
        """Return the content of one file, verified as by `blocks`."""
        return b"".join(self.blocks(name))


def pack(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> Manifest:
    """Write a bundle atomically and return its manifest. Equal content gives equal bytes, on every machine.

    Args:
        path: The file to write.
        manifest: The fields of `Manifest` without ``files``. ``variants`` names a file for each precision; the
            fingerprints are computed here.
        files: The content of each file, or the path of a file to copy.

    Raises:
        BundleError: The fields are not those of a manifest, or refer to files that do not exist; every mistake is
            listed.
    """
    # 1. The files in the order of their names, and the manifest with their hashes.
    contents = {name: _read_content(data) for name, data in sorted(files.items())}
    entries = {name: FileEntry(sha256=sha256_of(data), size_bytes=len(data)) for name, data in contents.items()}
    complete = _complete_manifest(path, manifest, entries)
    raw = dump_manifest(complete)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: the manifest has {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are allowed")
    # 2. What a device would refuse is not written.
    parse_manifest(raw, str(path))
    # 3. The tar file, in which the manifest and its checksum come first.
    parts = []
    for name, data in {MANIFEST: raw, CHECKSUM: checksum_line(raw), **contents}.items():
        parts += [_header(name, len(data)), data, _padding(len(data))]
    write_atomic(path, *parts, _END)
    return complete


def _read_content(source: bytes | Path) -> bytes:
    """Return the content of a file that is given as bytes or by its path."""
    if isinstance(source, bytes):
        return source
    return read_regular(source)


def _complete_manifest(path: Path, manifest: Mapping[str, Any], entries: Mapping[str, FileEntry]) -> Manifest:
    """Return the manifest with its files, and with the fingerprints of its variants.

    Args:
        path: The bundle's file, for messages.
        manifest: The fields that `pack` gets.
        entries: The size and hash of each file.

    Raises:
        BundleError: The fields are not those of a manifest, or refer to files that do not exist.
    """
    # The fingerprints need the checked input spec and the hashes of the variants' files, so they come second.
    unbound = {name: {"file": file, "fingerprint": "0" * 64} for name, file in manifest.get("variants", {}).items()}
    fields = {"schema_version": SCHEMA, **manifest, "files": entries, "variants": unbound}
    try:
        draft = Manifest.model_validate(fields)
    except ValidationError as error:
        raise BundleError(f"{path}: manifest: {'; '.join(mistakes_of(error, Manifest))}") from error
    missing = [variant.file for variant in draft.variants.values() if variant.file not in entries]
    if missing:
        raise BundleError(f"{path}: no file {', '.join(missing)} among {', '.join(entries) or '(none)'}")
    variants = {}
    for precision, variant in draft.variants.items():
        own_fingerprint = fingerprint(entries[variant.file].sha256, draft.task.input)
        variants[precision] = Variant(file=variant.file, fingerprint=own_fingerprint)
    return draft.model_copy(update={"variants": variants})


def open_bundle(path: Path) -> BundleFile:
    """Return the bundle at ``path``, every byte of it verified.

    Raises:
        BundleDamaged: The file is missing or truncated, or a part has another hash than the manifest.
        BundleError: The bundle has another schema version.
    """
    try:
        with open_regular(path) as file:
            manifest = _read_manifest(file, path)
            # The manifest tells every header, padding and size that follow, so each of them is compared.
            offsets: dict[str, int] = {}
            previous_bytes = _CHECKSUM_BYTES
            for name, entry in sorted(manifest.files.items()):
                _expect(file, _padding(previous_bytes) + _header(name, entry.size_bytes), path, name)
                offsets[name] = file.tell()
                for _ in _content(file, path, name, entry):
                    pass
                previous_bytes = entry.size_bytes
            _expect(file, _padding(previous_bytes), path, "the end")
            # Only the signatures may follow.
            end = file.tell()
            release = _read_release(file, path)
            if file.read(1):
                raise BundleDamaged(f"{path}: there are bytes after the end; fetch the bundle again")
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle file, usually named *.hwb"
        ) from error
    return BundleFile(path, manifest, offsets, end, release)


def attach(path: Path, release: bytes) -> None:
    """Put these signatures into the bundle at ``path``, in place of those that it has; its id stays.

    Raises:
        BundleDamaged: See `open_bundle`.
    """
    bundle = open_bundle(path)
    content = mapped(path)[: bundle.end]
    write_atomic(path, content, _header(RELEASE, len(release)), release, _padding(len(release)), _END)


def verify(path: Path, root: Envelope) -> tuple[Release, Root]:
    """Verify the signatures of the bundle at ``path``, starting from a trusted root alone.

    Expiry and version are not checked: they count where a bundle is installed.

    Returns:
        The release of the bundle, and the root whose keys have signed it.

    Raises:
        BundleDamaged: See `open_bundle`.
        BundleUntrusted: The bundle is not signed by the keys of a root that follows from the trusted one.
    """
    trusted = read(Root, root, "root")
    check_signed(root, trusted, "root", "the root")
    opened = open_bundle(path)
    if opened.release is None:
        raise BundleUntrusted(
            f"{path}: it is not signed; ask the operator of federation '{trusted.federation}' for a signed bundle"
        )
    member = parse(Member, opened.release, str(path))
    try:
        newest = read(Root, follow_roots([root], member.roots)[-1], "root")
        return verify_release(member, files_of(opened.manifest), newest), newest
    except BundleUntrusted as error:
        raise BundleUntrusted(f"{path}: {error}") from error


def _header(name: str, size: int) -> bytes:
    """Return the tar header of a file of this name and size, which is the same for equal ones."""
    import tarfile  # only writing needs it, and a coordinator's memory counts

    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    """Return the zeros that follow a content of ``size`` bytes."""
    return bytes(-size % _BLOCK)


def _read_manifest(file: BinaryIO, path: Path) -> Manifest:
    """Return the manifest at the beginning of a bundle, compared with its checksum behind it."""
    header = file.read(_BLOCK)
    size = _size_in(header)
    if size is None or header != _header(MANIFEST, size):
        raise BundleDamaged(f"{path}: does not begin with {MANIFEST}; not a bundle, or damaged; fetch it again")
    if size > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{path}: the manifest has {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    raw = file.read(size)
    if len(raw) != size:
        raise BundleDamaged(f"{path}: truncated inside '{MANIFEST}'; fetch the bundle again")
    _expect(file, _padding(size) + _header(CHECKSUM, _CHECKSUM_BYTES), path, CHECKSUM)
    if file.read(_CHECKSUM_BYTES) != checksum_line(raw):
        raise BundleDamaged(f"{path}: the manifest does not match its checksum; fetch the bundle again")
    return parse_manifest(raw, str(path))


def _read_release(file: BinaryIO, path: Path) -> bytes | None:
    """Return the signatures at the end of a bundle, and read its end, too; None where it has none."""
    header = file.read(_BLOCK)
    if header == _END[:_BLOCK]:
        _expect(file, _END[_BLOCK:], path, "the end")
        return None
    size = _size_in(header)
    if size is None or header != _header(RELEASE, size) or size > MAX_RELEASE_BYTES:
        raise BundleDamaged(f"{path}: unexpected bytes before 'the end'; damaged or not written by headwater")
    raw = file.read(size)
    _expect(file, _padding(size) + _END, path, "the end")
    return raw


def _size_in(header: bytes) -> int | None:
    """Return the size that a tar header states; None where it states none."""
    digits = header[124:135]  # in octal
    return int(digits, 8) if len(digits) == 11 and all(48 <= byte < 56 for byte in digits) else None


def _content(file: BinaryIO, path: Path, name: str, entry: FileEntry) -> Iterator[bytes]:
    """Yield the content of one file in blocks.

    Raises:
        BundleDamaged: The content is truncated, or has another hash than the manifest.
    """
    digest = hashlib.sha256()
    remaining_bytes = entry.size_bytes
    while remaining_bytes:
        block = file.read(min(remaining_bytes, _COPY_BYTES))
        if not block:
            raise BundleDamaged(
                f"{path}: truncated inside '{name}', {remaining_bytes} bytes missing; fetch the bundle again"
            )
        digest.update(block)
        remaining_bytes -= len(block)
        yield block
    if digest.hexdigest() != entry.sha256:
        raise BundleDamaged(
            f"{path}: '{name}' has SHA-256 {digest.hexdigest()[:16]}…, expected {entry.sha256[:16]}… by its manifest; "
            "fetch the bundle again"
        )


def _expect(file: BinaryIO, expected: bytes, path: Path, name: str) -> None:
    """Read the ``expected`` bytes, or refuse the bundle as damaged before ``name``."""
    if file.read(len(expected)) != expected:
        raise BundleDamaged(f"{path}: unexpected bytes before '{name}'; damaged or not written by headwater")

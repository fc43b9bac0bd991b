"""One file that carries a frozen encoder to devices: manifest, ONNX variants, golden tensors, optional shared head.

Layout: an uncompressed tar of flat regular files: ``manifest.json``, ``manifest.sha256``, then the rest in the order of
their names. The manifest names every other file with its size and SHA-256; nothing is opened by ONNX Runtime before all
of them have been checked. A reader that knows the manifest knows every tar header, every padding byte and the length of
the whole file. It compares instead of parsing: links, paths that climb, extra members, holes and surplus bytes have no
place to hide. Only ``release.json`` may follow, the signatures; see `trust`.

The **bundle id** is the SHA-256 of the manifest without its name, its time, the figures of int8 and its lineage, so of
all that a device computes with: the manifest names every file with its hash. It is the id that coordinator, agents,
logs and reports show, and exporting one encoder again gives it again. The **fingerprint** belongs to one variant of the
encoder (fp32 or int8): features, heads and figures of one variant are of no use with another.

On a device each bundle is unpacked into its own folder, with a mark inside (`storage.mark_folder`).
``root/current.json`` lists folder names, the one in use first, its predecessors after it. A crash during an install
leaves the old pointer and perhaps a folder that the next install removes. Folders under ``root`` that this program has
not made stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from . import __version__
from .config import mistakes_of
from .errors import BundleDamaged, BundleError, BundleUntrusted, StateError, cause
from .methods.values import Grade
from .storage import (
    FolderKind,
    check_own_folder,
    mapped,
    mark_folder,
    naming,
    open_regular,
    read_json,
    read_regular,
    read_tensors,
    remove_folder,
    sha256_file,
    sha256_of,
    sync,
    sync_folder,
    write_atomic,
    write_json,
)
from .task import Frozen, InputSpec, Task, Tensors, parse_json
from .trust import MAX_BYTES as MAX_RELEASE_BYTES
from .trust import (
    Envelope,
    Files,
    Member,
    Purpose,
    Release,
    Root,
    Scores,
    Target,
    TrustStore,
    canonical,
    check_signed,
    followed,
    parse,
    read,
    verified,
)
from .wire.tensors import first_non_finite

SCHEMA: Literal[3] = 3
OLDEST_SCHEMA = 2
"""Schemas from this one up to `SCHEMA` are read."""
MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
"""Member after the manifest: its SHA-256, so that a flipped bit in a free-text field is noticed as well."""

RELEASE = "release.json"
"""Last member, where the bundle is signed."""

MAX_BUNDLE_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 256 * 1024

EncoderPrecision = Literal["fp32", "int8"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,98}$")]
"""Flat, no leading dot: also the longest name that a plain tar header holds."""

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_CHECKSUM_BYTES = 65
_COPY_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 16
_GOLDEN_INPUTS = 8
_POINTER = "current.json"
_MADE = ".made"


class FileEntry(Frozen):
    """One file of the bundle."""

    sha256: Sha256
    size_bytes: int = Field(ge=0, le=MAX_BUNDLE_BYTES)


class Parity(Frozen):
    """How far the exported encoder is from the trained one, measured by the exporter."""

    max_abs: float = Field(ge=0, description="largest difference fp32 ONNX - torch, over all batches, in feature units")
    scale: float = Field(
        ge=0, description="largest absolute feature value; the gate is max_abs <= 1e-4 * max(1, scale)"
    )
    batches: tuple[int, ...] = Field(description="batch sizes compared")
    int8_cosine: float | None = Field(
        None,
        description="mean cosine of int8 and fp32 features; None where no int8 was made, or only clients have inputs",
    )


class DomainAnswers(Frozen):
    """Right answers on one domain by heads refitted on features of fp32 and of int8.

    The int8 variant took its ranges from other domains. Sums of two are those of both domains.
    """

    support: int = Field(ge=0, description="samples that answered, each once, by a head fitted on others of the domain")
    fp32: int = Field(ge=0, description="right answers on fp32 features")
    int8: int = Field(ge=0, description="right answers on int8 features")
    both: int = Field(ge=0, description="samples that are answered right on both")

    @model_validator(mode="after")
    def _adds_up(self) -> DomainAnswers:
        fewer, more = sorted((self.fp32, self.int8))
        if not max(0, fewer + more - self.support) <= self.both <= fewer <= more <= self.support:
            raise ValueError(
                f"{self.fp32} and {self.int8} right, {self.both} of them both, of {self.support}: impossible"
            )
        return self

    @property
    def loss(self) -> float:
        """Accuracy that int8 loses, -1..1; negative: it gains."""
        return (self.fp32 - self.int8) / max(self.support, 1)

    @property
    def noise(self) -> float:
        """What chance adds to `loss` in 19 of 20 cases at most: 1.645 standard errors of paired answers."""
        only_fp32, only_int8 = self.fp32 - self.both, self.int8 - self.both
        total = max(self.support, 1)
        return 1.645 * math.sqrt(max(only_fp32 + only_int8 - (only_fp32 - only_int8) ** 2 / total, 0.0)) / total

    def __add__(self, other: DomainAnswers) -> DomainAnswers:
        return DomainAnswers(
            support=self.support + other.support,
            fp32=self.fp32 + other.fp32,
            int8=self.int8 + other.int8,
            both=self.both + other.both,
        )


class Quantization(Frozen):
    """How the int8 variant was made and what it costs; without an int8 variant, why there is none."""

    ranges: str = Field("", max_length=200, description="what the ranges of its activations were taken from")
    held_out: dict[Annotated[str, Field(max_length=64)], DomainAnswers] = Field(
        default_factory=dict, max_length=64, description="answers on each domain that was left out; empty: not measured"
    )
    note: str = Field("", max_length=2000, description="why int8 was left out, or why no accuracies were measured")
    latency_ms: dict[EncoderPrecision, float] = Field(
        default_factory=dict, description="milliseconds of one input, in a batch on one thread where it was exported"
    )


class Variant(Frozen):
    """The encoder in one precision."""

    file: str = Field(description="name of the ONNX file")
    fingerprint: Sha256 = Field(description="SHA-256 of that file's hash and the task's input spec")


class NormLayer(Frozen):
    """Where the statistics of one batch norm lie in the fp32 file: bytes at which each begins, float32 values."""

    mean_at: int = Field(ge=0, le=MAX_BUNDLE_BYTES)
    variance_at: int = Field(ge=0, le=MAX_BUNDLE_BYTES)
    channels: int = Field(ge=1, le=1 << 20)


class FreeNorm(Frozen):
    """Batch norm of the fp32 encoder that a device may estimate again on its own inputs; see `own_norm`."""

    probe: FileName = Field(description="graph that is appended to the fp32 file to estimate statistics")
    layers: tuple[NormLayer, ...] = Field(min_length=1, max_length=1024, description="in order of the graph")


class HeadCard(Frozen):
    """What a device may fit on this encoder, and how true it is to the method."""

    exactness: Grade
    reason: str
    params: dict[str, Any] = Field(default_factory=dict, description="defaults that this method gives the head")


class Lineage(Frozen):
    """Where the encoder of a bundle comes from, as counts and hashes: no client is named, for every device reads it."""

    run: str = Field(max_length=64, description="id of the run in its federation")
    round: int = Field(ge=0, description="the last round that the encoder was trained in")
    seed: int
    clients: int = Field(ge=0, description="clients whose updates were accepted")
    partition_sha256: Sha256 = Field(
        description="hash of the sorted pairs of client and sample count as JSON, which the coordinator's journal has"
    )
    encoder_sha256: Sha256 = Field(description="hash of the encoder's tensors")
    weights_sha256: Sha256 | None = Field(None, description="file of weights that the run began with")
    warm_start_sha256: Sha256 | None = Field(None, description="state after the coordinator's warm start")
    parent: Sha256 | None = Field(None, description="id of the bundle that was released to everybody before")
    scores: Scores | None = Field(
        None, description="of clients at the end of the run, else in its last round; None: none measured"
    )


class Manifest(Frozen):
    """What a bundle is and promises."""

    schema_version: Literal[2, 3] = SCHEMA
    name: str = Field(description="run or release that it came from")
    created: str = Field(description="ISO 8601 UTC, for people")
    headwater_version: str
    method: str
    method_params: dict[str, Any] = Field(default_factory=dict)
    norm: Literal["global", "local_stats", "local_all"] = "global"
    norm_note: str = Field("", description="how batch norm was settled for one common encoder")
    task: Task
    feature_dim: int = Field(ge=1, le=1 << 20)
    variants: dict[EncoderPrecision, Variant]
    opset: int
    exporter: Literal["dynamo", "legacy"]
    parity: Parity
    calibration_sha256: str | None = Field(None, description="hash of the int8 calibration inputs; None without int8")
    quantization: Quantization | None = Field(
        None, description="how int8 was made and what it costs; None in bundles of earlier versions"
    )
    golden: str = Field(
        "golden.safetensors", description="file with raw inputs and what the exporter computed from them; see self_test"
    )
    global_head: str | None = Field(
        None, description="file with 'weight' (K, d) and 'bias' (K,) of the shared classifier"
    )
    heads: dict[str, HeadCard] = Field(default_factory=dict)
    free_norm: FreeNorm | None = Field(
        None, description="batch norm that a device may estimate again; None: the encoder or its method has none"
    )
    requires: dict[str, str] = Field(default_factory=dict, description="package -> lowest version")
    lineage: Lineage | None = Field(
        None, description="where the encoder comes from; None: from no run, or in bundles of earlier versions"
    )
    files: dict[FileName, FileEntry] = Field(max_length=64)

    @property
    def bundle_id(self) -> str:
        """SHA-256 (hex) of the manifest without name, time, figures of int8 and lineage: the id of the bundle."""
        unnamed = self.model_copy(update={"name": "", "created": "", "quantization": None, "lineage": None})
        return hashlib.sha256(dump_manifest(unnamed)).hexdigest()


def files_of(manifest: Manifest) -> Files:
    """What signatures of a bundle are about."""
    raw = dump_manifest(manifest)
    targets = {name: Target.of(entry.size_bytes, entry.sha256) for name, entry in manifest.files.items()}
    task = hashlib.sha256(canonical(manifest.task.model_dump(mode="json"))).hexdigest()
    return Files(manifest.bundle_id, task, {MANIFEST: Target.of(len(raw), sha256_of(raw)), **targets})


def variant_figures(manifest: Manifest) -> dict[str, Any]:
    """What each variant costs and how good it is, as JSON; accuracies and milliseconds None where not measured.

    ``accuracy`` 0..1 is that of heads refitted on held-out domains, over all their answers; ``domains`` has each one.
    """
    made = manifest.quantization or Quantization()
    total = sum(made.held_out.values(), DomainAnswers(support=0, fp32=0, int8=0, both=0))
    variants = {
        precision: {
            "bytes": manifest.files[variant.file].size_bytes,
            "latency_ms": made.latency_ms.get(precision),
            "accuracy": getattr(total, precision) / total.support if total.support else None,
        }
        for precision, variant in manifest.variants.items()
    }
    if "int8" in variants:
        variants["int8"]["cosine"] = manifest.parity.int8_cosine
    domains = {
        name: {"support": one.support, "fp32": one.fp32 / one.support, "int8": one.int8 / one.support}
        for name, one in made.held_out.items()
        if one.support
    }
    return {"variants": variants, "domains": domains, "ranges": made.ranges, "note": made.note}


def origin(manifest: Manifest, release: Release | None = None) -> dict[str, Any] | None:
    """Where a bundle comes from and what it scored where, as JSON; None where it does not say.

    ``release``: its verified signed metadata, of which the reports of devices are taken.
    """
    lineage, figures = manifest.lineage, variant_figures(manifest)
    reported = None if release is None else release.reported
    if lineage is None and reported is None:
        return None
    accuracies = {name: one["accuracy"] for name, one in figures["variants"].items() if one["accuracy"] is not None}
    scored = {
        "run": None if lineage is None or lineage.scores is None else lineage.scores.model_dump(),
        "devices": None if reported is None else reported.model_dump(),
        "held_out": accuracies,
        "parity_max_abs": manifest.parity.max_abs,
        "int8_cosine": manifest.parity.int8_cosine,
    }
    made = {} if lineage is None else lineage.model_dump(mode="json", exclude={"scores"})
    return {"method": manifest.method, **made, "scored": scored}


def fingerprint(encoder_sha256: str, spec: InputSpec) -> str:
    """SHA-256 (hex) of one variant's file together with its preprocessing: what a head must share with its encoder."""
    content = {"encoder": encoder_sha256, "input": TypeAdapter(InputSpec).dump_python(spec, mode="json")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_SINCE_3 = ("free_norm", "quantization")
"""Fields of `Manifest` that schema 2 does not have: None, their default, is not written there."""


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON; equal manifests give equal bytes."""
    content = manifest.model_dump(mode="json")
    if manifest.lineage is None:  # as in bundles that were made before it was written
        del content["lineage"]
    if manifest.schema_version < 3:
        content = {name: value for name, value in content.items() if value is not None or name not in _SINCE_3}
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """The manifest that ``raw`` holds, consistent in itself.

    Raises:
        BundleDamaged: not JSON, not of the expected form, or in contradiction with itself; every mistake is listed.
        BundleError: written for another schema version; the message says which side to upgrade.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{where}: manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        content = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise BundleDamaged(f"{where}: manifest cannot be read: {cause(error)}; fetch the bundle again") from error
    if not isinstance(content, dict):
        raise BundleDamaged(f"{where}: manifest is {type(content).__name__}, expected a JSON object")
    version = content.get("schema_version")
    if isinstance(version, int) and not OLDEST_SCHEMA <= version <= SCHEMA:
        advice = "upgrade headwater on this device" if version > SCHEMA else "export the model again"
        raise BundleError(f"{where} has bundle schema {version}, this side reads {OLDEST_SCHEMA}..{SCHEMA}; {advice}")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes_of(error, Manifest)[:10])}") from error
    if mistakes := _contradictions(manifest):
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes)}")
    if dump_manifest(manifest) != raw:
        raise BundleDamaged(f"{where}: manifest: not written as headwater writes it; export the model again")
    return manifest


def _contradictions(manifest: Manifest) -> list[str]:
    wanted = [*(variant.file for variant in manifest.variants.values()), manifest.golden]
    if manifest.global_head is not None:
        wanted.append(manifest.global_head)
    if manifest.free_norm is not None:
        wanted.append(manifest.free_norm.probe)
    mistakes = [f"'{name}' is referred to and not among the files" for name in wanted if name not in manifest.files]
    mistakes += [f"'{name}' is among the files and not referred to" for name in manifest.files if name not in wanted]
    mistakes += [f"'{name}' is a reserved name" for name in (MANIFEST, CHECKSUM, RELEASE) if name in manifest.files]
    total = sum(entry.size_bytes for entry in manifest.files.values())
    if total > MAX_BUNDLE_BYTES:
        mistakes.append(f"files of {total} bytes, at most {MAX_BUNDLE_BYTES} are carried")
    if "fp32" not in manifest.variants:
        mistakes.append("no fp32 variant")
    if manifest.free_norm is not None and not mistakes:
        size = manifest.files[manifest.variants["fp32"].file].size_bytes
        ends = (max(layer.mean_at, layer.variance_at) + 4 * layer.channels for layer in manifest.free_norm.layers)
        mistakes += [f"batch norm ends at byte {end} of an encoder of {size} bytes" for end in ends if end > size]
    for precision, variant in manifest.variants.items() if not mistakes else ():
        expected = fingerprint(manifest.files[variant.file].sha256, manifest.task.input)
        if variant.fingerprint != expected:
            mistakes.append(
                f"{precision} fingerprint {variant.fingerprint[:16]}…, expected {expected[:16]}… for this encoder and "
                "input"
            )
    return mistakes


@dataclass(frozen=True)
class BundleFile:
    """A bundle file whose bytes are those of its manifest; ``offsets`` says where each file's content begins.

    ``release``: its signatures as they are in the file, not verified; None where it has none.
    """

    path: Path
    manifest: Manifest
    offsets: Mapping[str, int]
    end: int
    release: bytes | None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Content of one file, a megabyte at a time.

        Raises:
            BundleDamaged: its bytes changed since the bundle was opened; only after the last block.
        """
        with open_regular(self.path) as file:
            file.seek(self.offsets[name])
            yield from _content(file, self.path, name, self.manifest.files[name])

    def read(self, name: str) -> bytes:
        """Content of one file, verified as by `blocks`."""
        return b"".join(self.blocks(name))


def pack(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> Manifest:
    """Write a bundle atomically; returns its manifest. Equal content gives equal bytes, on every machine.

    ``manifest`` holds the fields of `Manifest` without ``files`` and ``schema_version``; ``variants`` names a file
    for each precision, fingerprints follow from the content. A file's content is bytes or the path of a file to copy.

    Raises:
        BundleError: the fields are not a manifest, or refer to files that are not there; every mistake is listed.
    """
    contents = {name: data if isinstance(data, bytes) else read_regular(data) for name, data in sorted(files.items())}
    entries = {name: FileEntry(sha256=sha256_of(data), size_bytes=len(data)) for name, data in contents.items()}
    unbound = {name: {"file": file, "fingerprint": "0" * 64} for name, file in manifest.get("variants", {}).items()}
    given = {**manifest, "schema_version": SCHEMA, "files": entries, "variants": unbound}
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
    complete = draft.model_copy(update={"variants": variants})
    raw = dump_manifest(complete)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are carried")
    parse_manifest(raw, str(path))
    members = {MANIFEST: raw, CHECKSUM: _checksum(raw), **contents}
    parts = [part for name, data in members.items() for part in (_header(name, len(data)), data, _padding(len(data)))]
    write_atomic(path, *parts, _END)
    return complete


def open_bundle(path: Path) -> BundleFile:
    """The bundle at ``path``, every byte of it verified.

    Raises:
        BundleDamaged: no such file, cut short, or bytes that are not what the manifest promises.
        BundleError: written for another schema version.
    """
    try:
        with open_regular(path) as file:
            manifest = _read_manifest(file, path)
            offsets: dict[str, int] = {}
            before = _CHECKSUM_BYTES
            for name, entry in sorted(manifest.files.items()):
                _expect(file, _padding(before) + _header(name, entry.size_bytes), path, name)
                offsets[name] = file.tell()
                for _ in _content(file, path, name, entry):
                    pass
                before = entry.size_bytes
            _expect(file, _padding(before), path, "the end")
            end = file.tell()
            release = _read_release(file, path)
            if file.read(1):
                raise BundleDamaged(f"{path}: bytes after the end; fetch the bundle again")
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle file, usually named *.hwb"
        ) from error
    return BundleFile(path, manifest, offsets, end, release)


def attach(path: Path, release: bytes) -> None:
    """Give the bundle at ``path`` these signatures, in place of those that it has; its id stays.

    Raises:
        BundleDamaged: as `open_bundle`.
    """
    bundle = open_bundle(path)
    content = mapped(path)[: bundle.end]
    write_atomic(path, content, _header(RELEASE, len(release)), release, _padding(len(release)), _END)


def verify(path: Path, root: Envelope) -> tuple[Release, Root]:
    """The release of the bundle at ``path``, and the root whose keys have signed it, found from a trusted root alone.

    Expiry and version are not looked at: they count where a bundle is installed.

    Raises:
        BundleDamaged: as `open_bundle`.
        BundleUntrusted: it is not signed by the keys that follow from that root.
    """
    trusted = read(Root, root, "root")
    check_signed(root, trusted, "root", "the root")
    opened = open_bundle(path)
    if opened.release is None:
        raise BundleUntrusted(
            f"{path}: it is not signed; ask the operator of federation '{trusted.federation}' for a signed bundle"
        )
    try:
        member = parse(Member, opened.release, str(path))
        newest = read(Root, followed([root], member.roots)[-1], "root")
        return verified(member, files_of(opened.manifest), newest), newest
    except BundleUntrusted as error:
        raise BundleUntrusted(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error


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
    mark_folder(temporary, BUNDLE_FOLDER, folder.name)
    raw = dump_manifest(bundle.manifest)
    contents: dict[str, Iterable[bytes]] = {MANIFEST: [raw], CHECKSUM: [_checksum(raw)]}
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
    """Whether an earlier version unpacked a bundle there: its manifest's hashes give the folder its name."""
    try:
        raw = _read(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
        if _read(folder / CHECKSUM, 100) != _checksum(raw):
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


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _checksum(raw: bytes) -> bytes:
    return sha256_of(raw).encode() + b"\n"


def _read_manifest(file: BinaryIO, path: Path) -> Manifest:
    header = file.read(_BLOCK)
    size = _size_in(header)
    if size is None or header != _header(MANIFEST, size):
        raise BundleDamaged(f"{path}: does not begin with {MANIFEST}; not a bundle, or damaged; fetch it again")
    if size > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{path}: manifest of {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    raw = file.read(size)
    if len(raw) != size:
        raise BundleDamaged(f"{path}: cut short inside '{MANIFEST}'; fetch the bundle again")
    _expect(file, _padding(size) + _header(CHECKSUM, _CHECKSUM_BYTES), path, CHECKSUM)
    if file.read(_CHECKSUM_BYTES) != _checksum(raw):
        raise BundleDamaged(f"{path}: the manifest is not the one that its checksum names; fetch the bundle again")
    return parse_manifest(raw, str(path))


def _read_release(file: BinaryIO, path: Path) -> bytes | None:
    """The signatures at the end of a bundle, and the end; None where it has none."""
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
    digits = header[124:135]  # in octal
    return int(digits, 8) if len(digits) == 11 and all(48 <= byte < 56 for byte in digits) else None


def _content(file: BinaryIO, path: Path, name: str, entry: FileEntry) -> Iterator[bytes]:
    """Content of one member in blocks; BundleDamaged where it is not what the manifest promises."""
    digest, left = hashlib.sha256(), entry.size_bytes
    while left:
        block = file.read(min(left, _COPY_BYTES))
        if not block:
            raise BundleDamaged(f"{path}: cut short inside '{name}', {left} bytes missing; fetch the bundle again")
        digest.update(block)
        left -= len(block)
        yield block
    if digest.hexdigest() != entry.sha256:
        raise BundleDamaged(
            f"{path}: '{name}' has SHA-256 {digest.hexdigest()[:16]}…, the manifest promises {entry.sha256[:16]}…; "
            "fetch the bundle again"
        )


def _expect(file: BinaryIO, expected: bytes, path: Path, name: str) -> None:
    if file.read(len(expected)) != expected:
        raise BundleDamaged(f"{path}: unexpected bytes before '{name}'; damaged or not written by headwater")


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in a folder; what the device adds in `made` is not part of it."""

    folder: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """The bundle's id everywhere, SHA-256 (hex); see `manifest`."""
        return self.manifest.bundle_id

    @property
    def made(self) -> Path:
        """Folder of what this device makes from the bundle, and believes: no file of a bundle has a leading dot."""
        return self.folder / _MADE

    @property
    def fingerprints(self) -> dict[EncoderPrecision, str]:
        """What heads are bound to, for each precision that the bundle has."""
        return {precision: variant.fingerprint for precision, variant in self.manifest.variants.items()}

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
        """Raw inputs, and what the exporter computed from them; see `self_test`.

        Raises:
            BundleDamaged: the file is larger than these can be.
        """
        manifest = self.manifest
        spec, rows = manifest.task.input, _GOLDEN_INPUTS * (4 * manifest.feature_dim * len(manifest.variants))
        if spec.kind == "image":
            raw = (_GOLDEN_INPUTS + 3) * math.prod(spec.shape)  # inputs, and an image of twice the size, resized
        else:
            raw = 4 * spec.channels * (spec.length + (_GOLDEN_INPUTS - 1) * spec.stride)
        return self._tensors(manifest.golden, raw + rows + 8 * _GOLDEN_INPUTS * manifest.task.num_classes)

    def _tensors(self, name: str, most_bytes: int) -> Tensors:
        """Arrays of a file of at most so many bytes beside its header, which are read at once."""
        if (size := self.manifest.files[name].size_bytes) > most_bytes + _MOST_HEADER_BYTES:
            raise BundleDamaged(
                f"'{name}' has {size} bytes, at most {most_bytes} are possible; export the bundle again"
            )
        return read_tensors(self.folder / name)

    def global_head(self) -> Tensors | None:
        """The shared linear classifier (``weight`` (K, d), ``bias`` (K,)), or None.

        Raises:
            BundleDamaged: the file holds other arrays, of another size than the manifest promises, NaN or infinity.
        """
        if self.manifest.global_head is None:
            return None
        classes, size = self.manifest.task.num_classes, self.manifest.feature_dim
        result = self._tensors(self.manifest.global_head, 4 * classes * (size + 1))
        shapes = {name: array.shape for name, array in result.items()}
        if shapes != {"weight": (classes, size), "bias": (classes,)}:
            raise BundleDamaged(f"global head has {shapes}, expected weight {(classes, size)} and bias {(classes,)}")
        if (name := first_non_finite(result)) is not None:
            raise BundleDamaged(f"global head: '{name}' holds NaN or infinity; export the bundle again")
        return result


def open_folder(folder: Path) -> Bundle:
    """The bundle unpacked in ``folder``, every file verified again: flash memory forgets.

    Where the folder that it is in trusts keys, its signatures are verified again, too.

    Raises:
        BundleUntrusted: it is not signed by those keys.
        BundleDamaged: a file is missing or its bytes are not what the manifest promises; all such files are named.
        BundleError: written for another schema version.
    """
    raw = _read(folder / MANIFEST, MAX_MANIFEST_BYTES + 1)
    if _read(folder / CHECKSUM, 100) != _checksum(raw):
        raise BundleDamaged(f"{folder}: the manifest is not the one that its checksum names; install the bundle again")
    manifest = parse_manifest(raw, str(folder))
    paths = {folder / name: entry.sha256 for name, entry in sorted(manifest.files.items())}
    damaged = [
        path.name
        for path, sha256 in paths.items()
        if not path.is_file() or path.is_symlink() or sha256_file(path) != sha256
    ]
    if damaged:
        raise BundleDamaged(f"{folder}: missing or damaged: {', '.join(damaged)}; install the bundle again")
    TrustStore(folder.parent).check_loaded(_release_in(folder), files_of(manifest))
    return Bundle(folder, manifest)


def _release_in(folder: Path) -> bytes | None:
    path = folder / RELEASE
    return _read(path, MAX_RELEASE_BYTES + 1) if path.exists() else None


def install(
    path: Path,
    root: Path,
    keep: int = 2,
    check: Callable[[Bundle], object] | None = None,
    now: Callable[[], float] = time.time,
    first: Envelope | None = None,
    round_of: TrustStore | None = None,
) -> Bundle:
    """Verify the bundle file at ``path``, unpack it under ``root`` and make it the current one; ``keep`` are kept.

    ``round_of``: what counts instead of the trust of ``root``, where the bundle is the encoder of one round: it has to
    be signed as such, and its version says nothing of others. ``check`` sees the unpacked bundle before it becomes
    current, and may refuse it by raising. These are `admitted`, `staged` and `switch` in one process.

    Raises:
        BundleDamaged: as `open_bundle`; what was current stays current.
        BundleUntrusted: it may not be installed there.
    """
    opened = open_bundle(path)
    member = admitted(opened, root, now(), first, round_of)
    bundle = staged(opened, root)
    if check is not None:
        check(bundle)
    if round_of is None:
        switch(bundle, root, member, first, keep)
    else:
        if first is not None:
            round_of.anchor(first)
        switch(bundle, root, keep=keep)
    return bundle


def admitted(
    opened: BundleFile, root: Path, now: float, first: Envelope | None = None, round_of: TrustStore | None = None
) -> Member | None:
    """The signatures of a bundle that may be installed under ``root``; None where nothing is trusted there.

    Where ``root`` trusts keys, the bundle has to be signed by them, not expired at ``now``, and not older than the
    newest that was installed there. Where it trusts none, ``first`` is a root that the bundle has to be signed by.
    ``round_of``: as in `install`.

    Raises:
        BundleUntrusted: it may not be installed there.
    """
    purpose: Purpose = "release" if round_of is None else "round"
    store = TrustStore(root) if round_of is None else round_of
    return store.admit(opened.release, files_of(opened.manifest), now, __version__, first, purpose)


def staged(opened: BundleFile, root: Path) -> Bundle:
    """The bundle, unpacked under ``root`` beside the current one; where it is there and whole, nothing is written.

    The folder is named after the bundle id: a bundle of the same content, whatever its name, takes no second one.

    Raises:
        BundleDamaged: as `open_bundle`.
        UsageError: ``root`` is a link, or others can write it.
    """
    check_own_folder(root)
    name = opened.manifest.bundle_id[:24]
    raw = dump_manifest(opened.manifest)
    if opened.release is not None and (root / name / MANIFEST).exists():
        if read_regular(root / name / MANIFEST) != raw:  # exported again: the signatures are about its new time
            name = f"{name}-{sha256_of(raw)[:8]}"
        elif _release_in(root / name) != opened.release:  # both that one and the one before are of this bundle
            write_atomic(root / name / RELEASE, opened.release)
    folder = root / name
    with contextlib.suppress(BundleError):
        if (bundle := open_folder(folder)).id == opened.manifest.bundle_id:
            return bundle
    if not remove_folder(folder, BUNDLE_FOLDER):
        # What is in the way is not ours to remove, so the bundle goes beside it.
        folder = root / f"{name}-{secrets.token_hex(4)}"
    unpack(opened.path, folder)
    return open_folder(folder)


def switch(
    bundle: Bundle, root: Path, member: Member | None = None, first: Envelope | None = None, keep: int = 2
) -> None:
    """Make a `staged` bundle the current one, and count its release; of those before, ``keep`` - 1 stay.

    ``first``: the root that it was `admitted` by where nothing was trusted; it is trusted from now on.
    """
    store, name = TrustStore(root), bundle.folder.name
    if first is not None:
        store.anchor(first)
    if member is not None:
        store.record(member)
    names = [name, *(other for other in _history(root) if other != name)][: max(keep, 1)]
    write_json(root / _POINTER, {"bundles": names})
    remove_unused(root)


def remove_unused(root: Path) -> None:
    """Remove what is unpacked under ``root`` and neither current nor kept: refused bundles, and what a crash left.

    Folders that this program has not made stay, and a warning names them.

    Raises:
        StateError: it is not known which are kept.
        UsageError: ``root`` is a link, or others can write it.
    """
    check_own_folder(root)
    if not root.is_dir():
        return
    names = _history(root)
    for other in root.iterdir():
        if other.is_dir() and not other.is_symlink() and other.name not in names:
            remove_folder(other, BUNDLE_FOLDER)


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
    name = next(iter(_history(root)), None)
    return None if name is None else _manifest_in(root / name)


def current_origin(root: Path) -> dict[str, Any] | None:
    """`origin` of the bundle in use under ``root``, whose signatures were verified when it was installed.

    Raises:
        BundleError: its manifest, or its signatures, cannot be read.
    """
    if (name := next(iter(_history(root)), None)) is None:
        return None
    raw = _release_in(root / name)
    release = None if raw is None else read(Release, parse(Member, raw, "release").release, "release")
    return origin(_manifest_in(root / name), release)


def manifests(root: Path) -> list[Manifest]:
    """What the bundles under ``root`` say of themselves, the one in use first; their files are not looked at.

    Raises:
        BundleError: a manifest cannot be read.
    """
    return [_manifest_in(root / name) for name in _history(root)]


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
    write_json(root / _POINTER, {"bundles": names[1:]})
    return bundle


def _history(root: Path) -> list[str]:
    content = read_json(root / _POINTER)
    names = [] if content is None else content.get("bundles")
    if not isinstance(names, list) or not all(isinstance(n, str) and n.replace("-", "").isalnum() for n in names):
        raise StateError(
            f"{root / _POINTER}: expected a list of folder names under 'bundles'; remove it and install again"
        )
    return [name for name in names if (root / name).is_dir()]


def _manifest_in(folder: Path) -> Manifest:
    return parse_manifest(_read(folder / MANIFEST, MAX_MANIFEST_BYTES + 1), str(folder))


def _read(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except OSError as error:
        raise BundleDamaged(
            f"{path}: cannot be read: {cause(error)}; expected a bundle that was unpacked here"
        ) from error

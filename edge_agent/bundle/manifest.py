"""What a bundle is and promises: the manifest, the bundle's id, and the fingerprints that bind heads to an encoder.

The **bundle id** is the SHA-256 of the manifest without its name and time, so of all that a device computes with: the
manifest names every file with its hash. It is the id that coordinator, agents, logs and reports show, and exporting one
encoder again gives it again. The **fingerprint** belongs to one variant of the
encoder (fp32 or int8): features, heads and figures of one variant are of no use with another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ..config import mistakes_of
from ..errors import BundleDamaged, BundleError, cause
from ..methods.values import Grade
from ..task import Frozen, InputSpec, Task

SCHEMA: Literal[2] = 2
MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
"""Member after the manifest: its SHA-256, so that a flipped bit in a free-text field is noticed as well."""

MAX_BUNDLE_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 256 * 1024
MAX_FILES = 64
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,98}$"
"""Flat, no leading dot: also the longest name that a plain tar header holds."""

EncoderPrecision = Literal["fp32", "int8"]
SHA256 = r"^[0-9a-f]{64}$"


FileName = Annotated[str, Field(pattern=FILE_NAME)]


class FileEntry(Frozen):
    """One file of the bundle."""

    sha256: str = Field(pattern=SHA256)
    size_bytes: int = Field(ge=0, le=MAX_BUNDLE_BYTES)


class Parity(Frozen):
    """How far the exported encoder is from the trained one, measured by the exporter."""

    max_abs: float = Field(ge=0, description="largest difference fp32 ONNX - torch, over all batches, in feature units")
    scale: float = Field(
        ge=0, description="largest absolute feature value; the gate is max_abs <= 1e-4 * max(1, scale)"
    )
    batches: tuple[int, ...] = Field(description="batch sizes compared")
    int8_cosine: float | None = Field(None, description="mean cosine of int8 and fp32 features; None without int8")


class Variant(Frozen):
    """The encoder in one precision."""

    file: str = Field(description="name of the ONNX file")
    fingerprint: str = Field(pattern=SHA256, description="SHA-256 of that file's hash and the task's input spec")


class HeadCard(Frozen):
    """What a device may fit on this encoder, and how true it is to the method."""

    exactness: Grade
    reason: str
    params: dict[str, Any] = Field(default_factory=dict, description="defaults that this method gives the head")


class Manifest(Frozen):
    """What a bundle is and promises."""

    schema_version: Literal[2] = SCHEMA
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
    golden: str = Field(
        "golden.safetensors", description="file with raw inputs and what the exporter computed from them; see self_test"
    )
    global_head: str | None = Field(
        None, description="file with 'weight' (K, d) and 'bias' (K,) of the shared classifier"
    )
    heads: dict[str, HeadCard] = Field(default_factory=dict)
    requires: dict[str, str] = Field(default_factory=dict, description="package -> lowest version")
    files: dict[FileName, FileEntry] = Field(max_length=MAX_FILES)

    @property
    def bundle_id(self) -> str:
        """SHA-256 (hex) of the manifest without ``name`` and ``created``: the id of the bundle, of whatever name."""
        return hashlib.sha256(dump_manifest(self.model_copy(update={"name": "", "created": ""}))).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size_bytes for entry in self.files.values())


def fingerprint(encoder_sha256: str, spec: InputSpec) -> str:
    """SHA-256 (hex) of one variant's file together with its preprocessing: what a head must share with its encoder."""
    content = {"encoder": encoder_sha256, "input": TypeAdapter(InputSpec).dump_python(spec, mode="json")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON; equal manifests give equal bytes."""
    return json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """The manifest that ``raw`` holds, consistent in itself.

    Raises:
        BundleDamaged: not JSON, not of the expected form, or in contradiction with itself; every mistake is listed.
        BundleError: written for another schema version; the message says which side to upgrade.
    """
    content = _json_object(raw, where)
    _check_version(content.get("schema_version"), where)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes_of(error, Manifest)[:10])}") from error
    if mistakes := _contradictions(manifest):
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes)}")
    if dump_manifest(manifest) != raw:
        raise BundleDamaged(f"{where}: manifest: not written as headwater writes it; export the model again")
    return manifest


def _json_object(raw: bytes, where: str) -> Mapping[str, Any]:
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{where}: manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        content = json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BundleDamaged(f"{where}: manifest cannot be read: {cause(error)}; fetch the bundle again") from error
    if not isinstance(content, dict):
        raise BundleDamaged(f"{where}: manifest is {type(content).__name__}, expected a JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_version(version: object, where: str) -> None:
    if isinstance(version, int) and version > SCHEMA:
        raise BundleError(
            f"{where} has bundle schema {version}, this side reads {SCHEMA}; upgrade headwater on this device"
        )
    if isinstance(version, int) and version < SCHEMA:
        raise BundleError(f"{where} has bundle schema {version}, this side reads {SCHEMA}; export the model again")


def _contradictions(manifest: Manifest) -> list[str]:
    wanted = [*(variant.file for variant in manifest.variants.values()), manifest.golden]
    if manifest.global_head is not None:
        wanted.append(manifest.global_head)
    mistakes = [f"'{name}' is referred to and not among the files" for name in wanted if name not in manifest.files]
    mistakes += [f"'{name}' is a reserved name" for name in (MANIFEST, CHECKSUM) if name in manifest.files]
    if manifest.total_bytes > MAX_BUNDLE_BYTES:
        mistakes.append(f"files of {manifest.total_bytes} bytes, at most {MAX_BUNDLE_BYTES} are carried")
    if "fp32" not in manifest.variants:
        mistakes.append("no fp32 variant")
    return mistakes or list(_wrong_fingerprints(manifest))


def _wrong_fingerprints(manifest: Manifest) -> Iterator[str]:
    for precision, variant in manifest.variants.items():
        expected = fingerprint(manifest.files[variant.file].sha256, manifest.task.input)
        if variant.fingerprint != expected:
            yield (
                f"{precision} fingerprint {variant.fingerprint[:16]}…, expected {expected[:16]}… for this encoder and "
                "input"
            )

"""The manifest of a bundle: every other file with its size and SHA-256, the task, and where the encoder comes from.

The **bundle id** is the SHA-256 of the manifest without its name, its time, the figures of int8 and its lineage, so of
all that a device computes with: the manifest names every file with its hash. It is the id that coordinator, agents,
logs and reports show, and exporting one encoder again gives it again. The **fingerprint** belongs to one variant of the
encoder (fp32 or int8): features, heads and figures of one variant are of no use with another.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from ..core.config import mistakes_of
from ..core.errors import BundleDamaged, BundleError, cause
from ..core.storage import (
    sha256_of,
)
from ..core.task import EncoderTask, Frozen, InputSpec, Task, parse_json
from ..identity.signed_request import canonical
from ..methods.values import Grade
from .trust import (
    Files,
    Release,
    Scores,
    Target,
)

SCHEMA: Literal[3] = 3
"""The version of the manifest's form that is written of encoders that a run has trained."""

NO_METHOD = "none"
"""The ``method`` in the manifest of a bundle whose encoder no run has trained."""

LEAVE_ENCODER = ("afl", "fedcof", "linear_probe")
"""The methods that leave the encoder as it is (`Method.leaves_encoder`), for devices that cannot load a method.

A bundle has the name of its method alone, and a method may need torch; a test compares the names with the methods.
"""

NEWEST_SCHEMA: Literal[4] = 4
"""The newest version that is read.

It is written of encoders that no run has trained, which may have no classes, and of those with shared statistics.
"""

OLDEST_SCHEMA = 2
"""The oldest version of the manifest's form that is read."""

MANIFEST = "manifest.json"
"""The name of the first file in a bundle."""

CHECKSUM = "manifest.sha256"
"""The name of the second file: the manifest's SHA-256, so that a flipped bit in a free-text field is noticed, too."""

RELEASE = "release.json"
"""The name of the last file of a signed bundle."""

MAX_BUNDLE_BYTES = 1 << 30
"""The most bytes of all files of a bundle together."""

MAX_MANIFEST_BYTES = 256 * 1024
"""The most bytes of a manifest."""

EncoderPrecision = Literal["fp32", "int8"]


def _kind_of_task(value: Any) -> str:
    """Return which kind of task a manifest has: one with classes, or that of an encoder alone."""
    names = value.get("class_names") if isinstance(value, dict) else getattr(value, "class_names", None)
    return "encoder" if names in ([], ()) else "task"


AnyTask = Annotated[Annotated[Task, Tag("task")] | Annotated[EncoderTask, Tag("encoder")], Discriminator(_kind_of_task)]
"""A task with classes, or that of an encoder alone."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,98}$")]
"""A file name without folders or a leading dot, as long as a plain tar header can hold."""


class FileEntry(Frozen):
    """Size and hash of one file of the bundle."""

    sha256: Sha256
    size_bytes: int = Field(ge=0, le=MAX_BUNDLE_BYTES)


class Parity(Frozen):
    """The difference between the exported encoder and the trained one, or the file given, measured by the exporter."""

    max_abs: float = Field(
        ge=0, description="largest difference fp32 ONNX - torch (or the file given), over all batches, in feature units"
    )
    scale: float = Field(
        ge=0, description="largest absolute feature value; the gate is max_abs <= 1e-4 * max(1, scale)"
    )
    batches: tuple[int, ...] = Field(description="batch sizes compared")
    int8_cosine: float | None = Field(
        None,
        description="mean cosine of int8 and fp32 features; None where no int8 was made, or only clients have inputs",
    )


class DomainAnswers(Frozen):
    """Correct answers on one domain by heads that were fitted again on features of fp32 and of int8.

    The int8 variant took its ranges from other domains. The sum of two counts the answers of both domains.
    """

    support: int = Field(ge=0, description="samples that answered, each once, by a head fitted on others of the domain")
    fp32: int = Field(ge=0, description="right answers on fp32 features")
    int8: int = Field(ge=0, description="right answers on int8 features")
    both: int = Field(ge=0, description="samples that are answered right on both")

    @model_validator(mode="after")
    def _check_counts(self) -> DomainAnswers:
        """Require counts that are possible: no more answers than samples, and an overlap between its bounds."""
        fewer, more = sorted((self.fp32, self.int8))
        if not max(0, fewer + more - self.support) <= self.both <= fewer <= more <= self.support:
            raise ValueError(
                f"{self.fp32} correct on fp32, {self.int8} on int8, {self.both} on both, of {self.support}: impossible"
            )
        return self

    @property
    def loss(self) -> float:
        """The accuracy that int8 loses, -1..1; a negative one is a gain."""
        return (self.fp32 - self.int8) / max(self.support, 1)

    @property
    def noise(self) -> float:
        """The most that chance adds to `loss` in 19 of 20 cases: 1.645 standard errors of paired answers."""
        only_fp32 = self.fp32 - self.both
        only_int8 = self.int8 - self.both
        total = max(self.support, 1)
        variance = max(only_fp32 + only_int8 - (only_fp32 - only_int8) ** 2 / total, 0.0)
        return 1.645 * math.sqrt(variance) / total

    def __add__(self, other: DomainAnswers) -> DomainAnswers:
        return DomainAnswers(
            support=self.support + other.support,
            fp32=self.fp32 + other.fp32,
            int8=self.int8 + other.int8,
            both=self.both + other.both,
        )


class Quantization(Frozen):
    """The origin of the int8 variant and its cost; without an int8 variant, the reason why there is none."""

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
    """The place of the statistics of one batch norm in the fp32 file: the byte at which each begins, as float32."""

    mean_at: int = Field(ge=0, le=MAX_BUNDLE_BYTES)
    variance_at: int = Field(ge=0, le=MAX_BUNDLE_BYTES)
    channels: int = Field(ge=1, le=1 << 20)


class FreeNorm(Frozen):
    """Batch norm of the fp32 encoder that a device may estimate again on its own inputs; see `own_norm`."""

    probe: FileName = Field(description="graph that is appended to the fp32 file to estimate statistics")
    layers: tuple[NormLayer, ...] = Field(min_length=1, max_length=1024, description="in order of the graph")


class HeadCard(Frozen):
    """A head that a device may fit on this encoder, and how exactly it follows the method."""

    exactness: Grade
    reason: str
    params: dict[str, Any] = Field(default_factory=dict, description="defaults that this method gives the head")


class Lineage(Frozen):
    """The origin of a bundle's encoder, as counts and hashes: no client is named, because every device reads it."""

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
    """The description of a bundle, which names every other file in it."""

    schema_version: Literal[2, 3, 4] = SCHEMA
    name: str = Field(description="run or release that it came from")
    created: str = Field(description="ISO 8601 UTC, for people")
    headwater_version: str
    method: str = Field(description="method that has trained the encoder; none: no run has")
    method_params: dict[str, Any] = Field(default_factory=dict)
    norm: Literal["global", "local_stats", "local_all"] = "global"
    norm_note: str = Field("", description="how batch norm was settled for one common encoder")
    task: AnyTask
    feature_dim: int = Field(ge=1, le=1 << 20)
    variants: dict[EncoderPrecision, Variant]
    opset: int
    exporter: Literal["dynamo", "legacy", "file"] = Field(description="file: it was an ONNX file before")
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
    shared_statistics: str | None = Field(
        None,
        description="file with 'gram' (d (d + 1) / 2,), 'sums' (K, d), 'shares' (K,): means over all clients' samples",
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

    @property
    def is_trained_by_devices(self) -> bool:
        """Whether devices of a federation have trained the encoder, so that it has learned from their samples."""
        return self.method != NO_METHOD and self.method not in LEAVE_ENCODER


def files_of(manifest: Manifest) -> Files:
    """Return the part of a bundle that signatures cover: its id, the hash of its task, and its files."""
    raw = dump_manifest(manifest)
    targets = {name: Target.of(entry.size_bytes, entry.sha256) for name, entry in manifest.files.items()}
    task = hashlib.sha256(canonical(manifest.task.model_dump(mode="json"))).hexdigest()
    return Files(manifest.bundle_id, task, {MANIFEST: Target.of(len(raw), sha256_of(raw)), **targets})


def variant_figures(manifest: Manifest) -> dict[str, Any]:
    """Return the cost and accuracy of each variant as JSON; accuracies and milliseconds are None if not measured.

    ``accuracy`` (0..1) is that of heads fitted again on held-out domains, over all their answers; ``domains`` has that
    of each domain.
    """
    quantization = manifest.quantization or Quantization()
    total = sum(quantization.held_out.values(), DomainAnswers(support=0, fp32=0, int8=0, both=0))
    variants = {}
    for precision, variant in manifest.variants.items():
        variants[precision] = {
            "bytes": manifest.files[variant.file].size_bytes,
            "latency_ms": quantization.latency_ms.get(precision),
            "accuracy": getattr(total, precision) / total.support if total.support else None,
        }
    if "int8" in variants:
        variants["int8"]["cosine"] = manifest.parity.int8_cosine
    domains = {
        name: {"support": domain.support, "fp32": domain.fp32 / domain.support, "int8": domain.int8 / domain.support}
        for name, domain in quantization.held_out.items()
        if domain.support
    }
    return {"variants": variants, "domains": domains, "ranges": quantization.ranges, "note": quantization.note}


def origin(manifest: Manifest, release: Release | None = None) -> dict[str, Any] | None:
    """Return where a bundle comes from and its scores, as JSON; None where the bundle does not say.

    ``release`` is its verified signed metadata, which has the reports of devices.
    """
    lineage = manifest.lineage
    reported = None if release is None else release.reported
    if lineage is None and reported is None:
        return None
    # 1. The run that the encoder comes from, with its scores on the clients.
    run_fields: dict[str, Any] = {}
    run_scores = None
    if lineage is not None:
        run_fields = lineage.model_dump(mode="json", exclude={"scores"})
        run_scores = None if lineage.scores is None else lineage.scores.model_dump()
    # 2. The accuracies of its variants where it was exported, as far as they were measured.
    variants = variant_figures(manifest)["variants"]
    accuracies = {name: variant["accuracy"] for name, variant in variants.items()}
    scored = {
        "run": run_scores,
        "devices": None if reported is None else reported.model_dump(),
        "held_out": {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None},
        "parity_max_abs": manifest.parity.max_abs,
        "int8_cosine": manifest.parity.int8_cosine,
    }
    return {"method": manifest.method, **run_fields, "scored": scored}


def fingerprint(encoder_sha256: str, spec: InputSpec) -> str:
    """Return the SHA-256 (hex) of a variant's file and its preprocessing, which a head must share with its encoder."""
    content = {"encoder": encoder_sha256, "input": spec.model_dump(mode="json")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_SINCE_3 = ("free_norm", "quantization")
"""The fields of `Manifest` that schema 2 does not have: there None, their default, is not written."""


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; equal manifests give equal bytes."""
    content = manifest.model_dump(mode="json")
    if manifest.lineage is None:  # as in bundles that were made before it was written
        del content["lineage"]
    if manifest.shared_statistics is None:
        del content["shared_statistics"]
    if manifest.schema_version < 3:
        content = {name: value for name, value in content.items() if value is not None or name not in _SINCE_3}
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Return the manifest that ``raw`` holds, consistent in itself.

    Raises:
        BundleDamaged: The bytes are not JSON, lack the expected form, or contradict themselves; every mistake is
            listed.
        BundleError: The manifest has another schema version; the message says which side to upgrade.
    """
    # 1. The form: JSON of a schema that this side reads, with the fields of a manifest.
    content = _parse_content(raw, where)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes_of(error, Manifest)[:10])}") from error
    # 2. The fields among each other. Most refer to files, so they are looked at only when these are in order.
    mistakes = _mistakes_in_files(manifest)
    if not mistakes:
        mistakes = _mistakes_in_batch_norm(manifest)
    if not mistakes:
        mistakes = _mistakes_in_fingerprints(manifest)
    if mistakes:
        raise BundleDamaged(f"{where}: manifest: {'; '.join(mistakes)}")
    # 3. The bytes: there is one way to write a manifest, so that its hash says what is in it.
    if dump_manifest(manifest) != raw:
        raise BundleDamaged(f"{where}: manifest: not written as headwater writes it; export the model again")
    return manifest


def _parse_content(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that ``raw`` holds, of a schema that this side reads.

    Raises:
        BundleDamaged: There are too many bytes, or they are not a JSON object.
        BundleError: The manifest has another schema version.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleDamaged(f"{where}: the manifest has {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        content = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise BundleDamaged(f"{where}: manifest cannot be read: {cause(error)}; fetch the bundle again") from error
    if not isinstance(content, dict):
        raise BundleDamaged(f"{where}: the manifest is {type(content).__name__}, expected a JSON object")
    version = content.get("schema_version")
    if isinstance(version, int) and not OLDEST_SCHEMA <= version <= NEWEST_SCHEMA:
        advice = "upgrade headwater on this device" if version > NEWEST_SCHEMA else "export the model again"
        raise BundleError(
            f"{where} has bundle schema {version}, this side reads {OLDEST_SCHEMA}..{NEWEST_SCHEMA}; {advice}"
        )
    return content


def _mistakes_in_files(manifest: Manifest) -> list[str]:
    """Return the contradictions between the files of a manifest and the fields that refer to them."""
    files = manifest.files
    needed = _files_referred_to(manifest)
    mistakes = [f"'{name}' is referred to and not among the files" for name in needed if name not in files]
    mistakes += [f"'{name}' is among the files and not referred to" for name in files if name not in needed]
    mistakes += [f"'{name}' is a reserved name" for name in (MANIFEST, CHECKSUM, RELEASE) if name in files]
    total = sum(entry.size_bytes for entry in files.values())
    if total > MAX_BUNDLE_BYTES:
        mistakes.append(f"the files have {total} bytes, at most {MAX_BUNDLE_BYTES} are allowed")
    if "fp32" not in manifest.variants:
        mistakes.append("no fp32 variant")
    if manifest.global_head is not None and not manifest.task.num_classes:
        mistakes.append("a shared classifier of no classes")
    return mistakes


def _files_referred_to(manifest: Manifest) -> list[str]:
    """Return the names of the files that other fields of a manifest refer to."""
    names = [variant.file for variant in manifest.variants.values()]
    names.append(manifest.golden)
    if manifest.global_head is not None:
        names.append(manifest.global_head)
    if manifest.shared_statistics is not None:
        names.append(manifest.shared_statistics)
    if manifest.free_norm is not None:
        names.append(manifest.free_norm.probe)
    return names


def _mistakes_in_batch_norm(manifest: Manifest) -> list[str]:
    """Return a mistake for each batch norm whose statistics do not lie within the fp32 file."""
    if manifest.free_norm is None:
        return []
    size = manifest.files[manifest.variants["fp32"].file].size_bytes
    ends = [max(layer.mean_at, layer.variance_at) + 4 * layer.channels for layer in manifest.free_norm.layers]
    return [f"batch norm ends at byte {end} of an encoder of {size} bytes" for end in ends if end > size]


def _mistakes_in_fingerprints(manifest: Manifest) -> list[str]:
    """Return a mistake for each variant whose fingerprint does not follow from its file and the task's input."""
    mistakes = []
    for precision, variant in manifest.variants.items():
        expected = fingerprint(manifest.files[variant.file].sha256, manifest.task.input)
        if variant.fingerprint != expected:
            mistakes.append(
                f"{precision} fingerprint {variant.fingerprint[:16]}…, expected {expected[:16]}… for this encoder and "
                "input"
            )
    return mistakes


def checksum_line(raw: bytes) -> bytes:
    """Return the content of `CHECKSUM` for a manifest of these bytes: its SHA-256 in hexadecimal, and a newline."""
    return sha256_of(raw).encode() + b"\n"

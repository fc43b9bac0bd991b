"""A frozen encoder on a device: inputs in, features (n, d) float32 out. The only importer of onnxruntime here.

Of a large encoder the device makes its own .ort file from the bundle's .onnx once, and maps it into memory: ResNet18
then loads in 5 ms and 62 MB instead of 155 ms and 188 MB. It is made in a child process, whose memory goes when it
ends, and bound to the ONNX file, the runtime's version and the processor with its extensions. A small encoder is loaded
from its .onnx within milliseconds.

A graph is read before it is loaded (`graph.check`), and runs for the first time in a child process with limits of
memory and time, so that one that crashes or never ends does so there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ..bundle import graph_check
from ..bundle.manifest import EncoderPrecision
from ..bundle.unpacked import Bundle, open_folder
from ..core.capabilities import processor
from ..core.child_process import Child, function_command
from ..core.children import answer_of_child
from ..core.errors import BundleDamaged, DataError, HeadwaterError, MissingCapability, StateError
from ..core.limits import FreedMemory, end_with, give_freed_memory_back, limit_resources
from ..core.locks import private_files
from ..core.storage import (
    mapped,
    oldest_first,
    read_record,
    read_regular,
    read_tensors,
    sha256_file,
    size_of,
    write_record,
    write_tensors,
)
from ..data import Samples
from . import self_test
from .batch_norm import OwnNorm, encoder_with_statistics, own_share

_log = logging.getLogger(__name__)

_WANTED = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
_LARGE_INPUT = 3 * 64 * 64
"""Inputs above this many values go one by one: at 224 x 224 a batch of 4 takes 21 MB more and is no faster."""

_LEAST_TO_MAP = 4_000_000
"""Encoders with smaller files, bytes, are not mapped: a start holds them three times; the child process takes 60 MB."""

_OWN = "own-"
"""How the names of files of encoders with the device's own batch norm begin."""

_OWN_KEPT = 2
"""How many of the newest of these files are kept."""

_FEATURE_FILE = re.compile(r"features-[0-9a-f]{32}(-own-[0-9a-f]{32})?-[0-9a-f]{4}-[0-9a-f]{32}\.safetensors")
"""Name of a file of cached features; somebody may have put others that begin so into the folder."""

_FEATURE_FILES = 15
"""Files of features that stay for one encoder beside the newest one."""

_ALL_FEATURE_FILES = 64
"""Files of features that stay in one folder, whatever encoders they are of."""

TRIAL_S = 300.0
"""How many seconds a trial may take: two batches, and the start of ONNX Runtime."""

TRIAL_CPU_S = 120
"""How many seconds of a processor a trial may take."""

Progress = Callable[[int, int], None]
"""Called with (inputs done, inputs in all)."""


@dataclass(frozen=True)
class Encoder:
    """A session that is ready to run.

    ``fingerprint`` is that of the bundle's variant, or of the device's batch norm ``norm``: features and heads are
    bound to it. ``providers`` are those in effect, which may be fewer than those requested. ``why_norm``: why its
    batch norm is the device's own, or the shipped one, where there was a choice. ``freed`` gives back the memory that
    single inputs took.
    """

    session: Any
    input_name: str
    input_shape: tuple[int, ...]
    feature_dim: int
    precision: EncoderPrecision
    fingerprint: str
    providers: tuple[str, ...]
    format: Literal["ort", "onnx"]
    norm: OwnNorm | None = None
    why_norm: str = ""
    freed: FreedMemory = field(default_factory=FreedMemory)

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        precision: EncoderPrecision = "fp32",
        threads: int = 1,
        *,
        cache: bool = True,
        norm: OwnNorm | None = None,
    ) -> Encoder:
        """Open the bundle's encoder, on the fastest provider there is, after its self-test has passed on this device.

        ``threads`` 0 = ONNX Runtime's choice; ``cache=False`` writes nothing beside the bundle, loads the .onnx,
        and runs its trial and its self-test each time. With ``norm`` these batch norm statistics take the place of the
        bundle's (fp32 alone), after the self-test of the encoder as it was shipped.

        Raises:
            MissingCapability: onnxruntime is not installed.
            StateError: the bundle has no variant of that precision, or ``norm`` is for another encoder.
            BundleDamaged: the graph may not run here or did not end in its trial, ONNX Runtime cannot load the file,
                its output has another size than the manifest promises, or this device computes other features than
                the exporter.
        """
        variant = bundle.variant(precision)
        runtime = onnxruntime()
        model = _Model(bundle.folder / variant.file, bundle.manifest.files[variant.file].sha256, bundle.made)
        # With batch norm of the device's own, the encoder is first tested as it was shipped.
        if norm is not None:
            if precision != "fp32":
                raise StateError(f"own batch norm is computed in fp32, not in {precision}; fit the head again")
            cls.open(bundle, precision, threads, cache=cache)  # what the exporter computed is computed here as well
            content = functools.partial(encoder_with_statistics, bundle, norm.variant, norm.statistics)
            model = _Model(Path(f"{_OWN}{norm.fingerprint[:16]}.onnx"), norm.fingerprint, bundle.made, content)
        else:
            _try_once(bundle, precision, record=cache)
        # A large file is mapped into memory from its .ort twin, where there is a single provider; others are loaded.
        providers = [name for name in _WANTED if name in runtime.get_available_providers()]
        is_large = (bundle.folder / variant.file).stat().st_size >= _LEAST_TO_MAP
        twin = _mapped(model, runtime) if cache and is_large and len(providers) == 1 else None
        session = _ort_session(runtime, twin, threads, precision) if twin is not None else None
        kind: Literal["ort", "onnx"] = "onnx" if session is None else "ort"
        if session is None:
            session = _onnx_session(runtime, model, providers, threads)
        result = cls(
            session=session,
            input_name=session.get_inputs()[0].name,
            input_shape=bundle.manifest.task.input_shape,
            feature_dim=bundle.manifest.feature_dim,
            precision=precision,
            fingerprint=variant.fingerprint if norm is None else norm.fingerprint,
            providers=tuple(session.get_providers()),
            format=kind,
            norm=norm,
        )
        # The self-test counts for this processor, runtime and providers, and is repeated after a change of any of them.
        give_freed_memory_back()
        _log.debug("encoder_loaded precision=%s format=%s providers=%s", precision, kind, ",".join(result.providers))
        device = {**arithmetic(), "providers": list(result.providers)}
        self_test.run(bundle, precision, result.features, device, record=cache, norm=norm)
        return result

    @property
    def batch_size(self) -> int:
        """Inputs that are run at once."""
        return batch_size(self.input_shape)

    def features(self, inputs: np.ndarray, progress: Progress | None = None) -> np.ndarray:
        """Return features (n, d) float32 of preprocessed ``inputs`` (n, *input_shape).

        Raises:
            DataError: inputs of another shape than the task's.
            BundleDamaged: the encoder does not run, or returns another shape than (n, d).
        """
        if inputs.shape[1:] != self.input_shape:
            raise DataError(
                f"inputs {inputs.shape}, expected (n, {', '.join(map(str, self.input_shape))}); see the task"
            )
        result = np.empty((len(inputs), self.feature_dim), np.float32)
        for start in range(0, len(inputs), self.batch_size):
            batch = np.ascontiguousarray(inputs[start : start + self.batch_size], np.float32)
            result[start : start + len(batch)] = self._run(batch)
            if progress is not None:
                progress(start + len(batch), len(inputs))
        # What a batch took, 9 MB for ResNet18, is unused from now on. Single inputs may come one after the other.
        if len(inputs) > 1:
            give_freed_memory_back()
        else:
            self.freed.give_back()
        return result

    def _run(self, batch: np.ndarray) -> np.ndarray:
        """Return features of one batch; what ONNX Runtime allocates for it is free when this returns."""
        try:
            features = self.session.run(None, {self.input_name: batch})[0]
        # ONNX Runtime's exceptions have no common base besides this one.
        except Exception as error:
            raise BundleDamaged(f"the encoder does not run: {_first_line(error)}") from error
        if features.shape != (len(batch), self.feature_dim):
            raise BundleDamaged(f"the encoder returns {features.shape}, expected ({len(batch)}, {self.feature_dim})")
        return np.asarray(features, np.float32)


def batch_size(shape: tuple[int, ...]) -> int:
    """Return inputs of this shape that are run at once."""
    return 1 if int(np.prod(shape)) > _LARGE_INPUT else 32


def cost_of(bundle: Bundle, precision: EncoderPrecision) -> graph_check.Cost:
    """Return what the encoder takes for one batch on a device, by reading its graph.

    Raises:
        BundleDamaged: it is none that may run, or that gives features of the promised size.
    """
    variant = bundle.variant(precision)
    shape = bundle.manifest.task.input_shape
    expected = (batch_size(shape), bundle.manifest.feature_dim)
    cost = graph_check.check(mapped(bundle.folder / variant.file), [(expected[0], *shape)], where=variant.file)
    if cost.outputs != (expected,):
        shapes = [list(shape_of_output) for shape_of_output in cost.outputs]
        raise BundleDamaged(f"{variant.file}: results are {shapes}, the manifest promises {list(expected)}")
    return cost


def _try_once(bundle: Bundle, precision: EncoderPrecision, *, record: bool) -> None:
    """Try the encoder in a child process, unless it is recorded that it has passed on this processor and runtime.

    Raises:
        BundleDamaged: it does not run, does not end, or computes something else than the exporter did.
    """
    cost = cost_of(bundle, precision)
    path = bundle.made / "trial.json"
    conditions = {"bundle_id": bundle.id, **arithmetic()}
    passed = read_record(path, conditions).get("passed", []) if record else []
    if precision not in passed:
        try_out(bundle.folder, precision, _trial_memory(bundle, precision, cost))
        if record:
            write_record(path, conditions, {"passed": sorted({*passed, precision})})


def _trial_memory(bundle: Bundle, precision: EncoderPrecision, cost: graph_check.Cost) -> int:
    """Return what the graph takes, and four times its file: ONNX Runtime copies weights while it loads them."""
    size = bundle.manifest.files[bundle.variant(precision).file].size_bytes
    return graph_check.budget_bytes(cost.memory_bytes + 4 * size) + graph_check.REST_BYTES


def try_out(folder: Path, precision: EncoderPrecision, memory_bytes: int, probed: int = 0) -> None:
    """Run the self-test of a bundle's encoder, or its probe on ``probed`` inputs, in a child that gets so much memory.

    Raises:
        BundleDamaged: the test fails, or the child crashes or takes longer than `TRIAL_S`.
        StateError: no child can be started.
    """
    question = {
        "folder": str(folder.resolve()), "precision": precision, "memory_bytes": memory_bytes, "probed": probed,
        "parent": os.getpid(),
    }  # fmt: skip
    where = "trial of the probe" if probed else f"trial of the {precision} encoder"
    try:
        result = answer_of_child(__name__, trial.__name__, question, TRIAL_S)
    except subprocess.TimeoutExpired as error:
        raise BundleDamaged(f"{where}: it did not end within {TRIAL_S:g} s; export it again", is_public=True) from error
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        ending = f"it ended with {getattr(error, 'returncode', 'no answer')}"
        limits = f"{memory_bytes >> 20} MiB of memory and {TRIAL_CPU_S} s of a processor are allowed"
        raise BundleDamaged(f"{where}: {ending}; {limits}; export it again", is_public=True) from error
    except OSError as error:
        raise StateError(f"{where}: no process can be started: {error}; free memory, then try again") from error
    if result:
        raise BundleDamaged(f"{where}: {result['message']}", is_public=result["is_public"])


def trial() -> None:
    """Run as the child of `try_out`: its question comes as JSON on stdin, what is wrong goes to stdout."""
    question = json.load(sys.stdin)
    end_with(question["parent"])
    runtime = onnxruntime()
    precision = question["precision"]
    limit_resources(question["memory_bytes"], TRIAL_CPU_S)
    result: dict[str, Any] = {}
    try:
        bundle = open_folder(Path(question["folder"]))
        if question["probed"]:
            _run_probes(bundle, question["probed"])
        else:
            _run_encoder(runtime, bundle, precision)
    except HeadwaterError as error:
        result = {"message": str(error)[:2000], "is_public": error.is_public}
    except MemoryError:
        result = {"message": "it takes more memory than it may; export a smaller encoder", "is_public": True}
    sys.stdout.write(json.dumps(result) + "\n")


def _run_encoder(runtime: ModuleType, bundle: Bundle, precision: EncoderPrecision) -> None:
    """Run the self-test of an encoder on the CPU, then its largest batch, which takes the most memory.

    Raises:
        BundleDamaged: The self-test fails.
    """
    file = bundle.folder / bundle.variant(precision).file
    session = _onnx_session(runtime, _Model(file, "", bundle.made), ["CPUExecutionProvider"], 1)
    shape = bundle.manifest.task.input_shape
    size = bundle.manifest.feature_dim
    name = session.get_inputs()[0].name
    encoder = Encoder(session, name, shape, size, precision, "", ("CPUExecutionProvider",), "onnx")
    self_test.check(bundle, precision, encoder.features)
    encoder.features(np.zeros((batch_size(shape), *shape), np.float32))  # the largest batch, which takes the most


def _run_probes(bundle: Bundle, count: int) -> None:
    """Return the probe with as many inputs as `precision.estimated` runs it on."""
    task = bundle.manifest.task
    golden = self_test.prepared(bundle.golden()["raw"], task.input)
    for rows, share in ((count, own_share(count)), (len(golden) + min(len(golden), count), 0.0)):
        run_probe(probe_of(bundle), task.input.kind, np.resize(golden, (rows, *task.input_shape)), share)


def features_of(
    samples: Samples, encoder: Encoder, cache: Path | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Return features (n, d) float32 of ``samples``; with ``cache`` (a folder) they are computed once.

    They are found again by the fingerprint of the encoder and the inputs themselves, so a changed picture is
    always noticed. Where they are missing or damaged they are computed again; of samples that are known in part, only
    the others are computed.
    """
    if cache is None or not len(samples):
        return encoder.features(samples.inputs, progress)
    names = _FeatureNames.of_encoder(encoder)
    path = cache / f"{names.stem}-{samples.digest[:32]}.safetensors"
    # 1. The same samples as before are found by the digest of them all.
    cached = _read_features(path, encoder.feature_dim)[1]
    if cached.shape == (len(samples), encoder.feature_dim):
        with contextlib.suppress(OSError):
            os.utime(path)  # most recently used
        return cached
    # 2. Otherwise files of other samples are searched for each of these inputs.
    digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in samples.inputs]
    older_files = oldest_first(cache.glob(f"{names.stem}-*.safetensors"))
    stored = _find_rows(older_files, set(digests), encoder.feature_dim)
    # 3. The encoder runs for those that are in none of them.
    missing = [number for number, digest in enumerate(digests) if digest not in stored]
    result = np.empty((len(samples), encoder.feature_dim), np.float32)
    result[missing] = encoder.features(samples.inputs[missing], progress)
    for number, digest in enumerate(digests):
        if digest in stored:
            result[number] = stored[digest]
    # 4. All of them are saved as one file.
    rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
    with private_files():  # features are made from private samples; the folder may be one of many people
        write_tensors(path, {"features": result, "rows": rows})
    # 5. The oldest files go: of this encoder, or of all estimates for it, and of all encoders together.
    if encoder.norm is not None:
        older_files = [path for path in feature_files(cache) if path.name.startswith(f"{names.family}-")]
    all_files = feature_files(cache)
    for old in (*older_files[:-_FEATURE_FILES], *all_files[:-_ALL_FEATURE_FILES]):
        old.unlink(missing_ok=True)
    return result


@dataclass(frozen=True)
class _FeatureNames:
    """The beginnings of the names of an encoder's files of cached features."""

    family: str
    """The same for all estimates of a device's own batch norm for one encoder, of which few files stay."""

    stem: str
    """The same for one encoder with its batch norm, on one library that runs it."""

    @classmethod
    def of_encoder(cls, encoder: Encoder) -> _FeatureNames:
        """Return the names for an encoder."""
        providers = hashlib.sha256(",".join(encoder.providers).encode()).hexdigest()[:4]
        if encoder.norm is None:
            family = f"features-{encoder.fingerprint[:32]}"
            return cls(family, f"{family}-{providers}")
        # Each estimate of a device's own batch norm has another fingerprint.
        family = f"features-{encoder.norm.variant[:32]}-own"
        return cls(family, f"{family}-{encoder.fingerprint[:32]}-{providers}")


def _find_rows(older_files: Sequence[Path], digests: set[bytes], feature_dim: int) -> dict[bytes, np.ndarray]:
    """Return the features (d,) of inputs by digest, as far as they are in one of the files; the newest file counts."""
    stored: dict[bytes, np.ndarray] = {}
    for older_file in reversed(older_files):
        names, features = _read_features(older_file, feature_dim)
        for name, row in zip(map(bytes, names), features, strict=True):
            if name in digests and name not in stored:
                stored[name] = row.copy()  # a view would keep the whole file in memory
        if len(stored) == len(digests):
            break
    return stored


def feature_files(cache: Path) -> list[Path]:
    """Return the files of cached features in a folder, which may hold others, the one last used at the end."""
    return oldest_first(path for path in cache.glob("features-*.safetensors") if _FEATURE_FILE.fullmatch(path.name))


def remove_features(cache: Path, fingerprints: Iterable[str]) -> int:
    """Remove the cached features of all encoders but those with these fingerprints of variants; returns their number.

    Features with batch norm of the device's own belong to the variant that they were estimated for.
    """
    kept_prefixes = tuple(f"features-{fingerprint[:32]}-" for fingerprint in fingerprints)
    removed = [path for path in feature_files(cache) if not path.name.startswith(kept_prefixes)]
    for path in removed:
        path.unlink(missing_ok=True)
    return len(removed)


def trim_features(cache: Path, most_bytes: int, fingerprint: str) -> int:
    """Remove the least recently used features until they take at most ``most_bytes``; returns how many files went.

    Two files stay whatever they take: the features that the encoder with this fingerprint was used for last, those of
    the training and the held-out samples of its head.
    """
    files = feature_files(cache)
    # A name ends with the encoder's fingerprint, the providers and the digest of the samples.
    of_head = [path for path in files if path.name.split("-")[-3:-2] == [fingerprint[:32]]][-2:]
    sizes = {path: size_of(path) for path in files}
    used = sum(sizes.values())
    removed = 0
    for path in files:
        if used <= most_bytes:
            break
        if path not in of_head:
            used = used - sizes[path]
            removed = removed + 1
            path.unlink(missing_ok=True)
    return removed


def _read_features(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return digests (n, 16) uint8 of the inputs, and their features (n, size).

    Where the file cannot be used, n is 0.
    """
    with contextlib.suppress(HeadwaterError):
        content = read_tensors(path)
        rows = content.get("rows", np.empty(0))
        features = content.get("features", np.empty(0))
        is_whole = rows.shape == (len(features), 16) and features.shape[1:] == (size,)
        if is_whole and rows.dtype == np.uint8 and features.dtype == np.float32 and np.isfinite(features).all():
            return rows, features
    return np.empty((0, 16), np.uint8), np.empty((0, size), np.float32)


def arithmetic() -> dict[str, str]:
    """Return what decides how, and how fast, an encoder computes here: processor with its extensions, and runtime.

    Whatever was measured, tested or optimized is good only where these are the same: a folder may move with its disk.
    """
    return {"processor": processor(), "onnxruntime": onnxruntime().__version__}


def onnxruntime() -> ModuleType:
    """Return the module ``onnxruntime``, imported with its telemetry switched off.

    Raises:
        MissingCapability: it is not installed.
    """
    # Later would be too late: importing it writes a device id below the home folder and starts an upload thread.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime as module
    except ImportError as error:
        raise MissingCapability.package("onnxruntime", "agent", "running an encoder") from error
    result: ModuleType = module
    return result


def try_probe(bundle: Bundle, count: int) -> None:
    """Run the bundle's probe on ``count`` inputs in a child process.

    Raises:
        BundleDamaged, StateError: as `try_out`.
    """
    cost = graph_check.check(probe_of(bundle), [(count, *bundle.manifest.task.input_shape), ()], where="probe")
    try_out(bundle.folder, "fp32", _trial_memory(bundle, "fp32", cost), count)


def probe_of(bundle: Bundle, encoder: bytes | None = None) -> bytes:
    """Return the probe of batch norm statistics as one ONNX model, with the fp32 encoder or ``encoder``, its new form.

    Raises:
        BundleDamaged: the bundle has none.
    """
    if bundle.manifest.free_norm is None:
        raise BundleDamaged("the bundle has no batch norm that a device may estimate again")
    if encoder is None:
        encoder = read_regular(bundle.folder / bundle.variant("fp32").file)
    return encoder + read_regular(bundle.folder / bundle.manifest.free_norm.probe)


def run_probe(content: bytes, kind: str, inputs: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return batch norm statistics (s,) and features (n, d) float32 of ``inputs`` (n, ...) by a model of `probe_of`.

    ``kind``: that of the inputs; ``share``: how much of the statistics is that of the inputs, 0..1.

    Raises:
        BundleDamaged: the graph may not run here, or does not run.
    """
    graph_check.check(content, [inputs.shape, ()], where="probe")
    model = _Model(Path("probe"), "", Path(), lambda: content)
    session = _onnx_session(onnxruntime(), model, ["CPUExecutionProvider"], 1)
    feed = {kind: inputs, "own_share": np.array(share, np.float32)}
    try:
        statistics, features = session.run(["statistics", "own_features"], feed)
    # ONNX Runtime's exceptions have no common base besides this one.
    except Exception as error:
        raise BundleDamaged(f"batch norm cannot be estimated: {str(error)[:300]}") from error
    return np.asarray(statistics, np.float32), np.asarray(features, np.float32)


def write_ort(onnx: str, target: str) -> None:
    """Write ONNX Runtime's own format for this machine; called in a child process."""
    runtime = onnxruntime()
    options = _options(runtime, 1)
    # ALL stores weights in the layout of this machine (blocked on x86): 25 ms instead of 33 for ResNet18, and no more
    # memory, because they are mapped. Loading the .onnx at this level would hold them three times.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = target
    options.add_session_config_entry("session.save_model_format", "ORT")
    runtime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class _Model:
    """An ONNX file, an id of its content, and the folder of what is made from it.

    ``content`` gives it where there is no file, nor is there to be one.
    """

    path: Path
    id: str
    made: Path
    content: Callable[[], bytes] | None = None


def _mapped(model: _Model, runtime: ModuleType) -> Path | None:
    """Return the .ort twin of ``model``, made where it is missing or damaged; None where it cannot be made."""
    onnx = model.path
    stem = f"{onnx.name}.{model.id[:16]}.{runtime.__version__}.{processor()}"
    target = model.made / f"{stem}.ort"
    note = model.made / f"{stem}.json"
    conditions = {"encoder": model.id, **arithmetic()}
    if target.is_file() and sha256_file(target) == read_record(note, conditions).get("sha256"):
        return target
    temporary = model.made / f".{stem}.{os.getpid()}.tmp"
    source = onnx
    try:
        model.made.mkdir(exist_ok=True)
        if model.content is not None:
            source = temporary.with_suffix(".onnx.tmp")  # so that it is swept after a kill
            source.write_bytes(model.content())
        command = function_command(__name__, write_ort.__name__, str(source.resolve()), str(temporary.resolve()))
        # It works in the root, where only the system's owner may write.
        Child(command, folder=Path(os.sep)).finish(limit_s=600).check()
        write_record(note, conditions, {"sha256": sha256_file(temporary)})
        temporary.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("ort_not_made file=%s reason=%s: the .onnx is loaded instead", onnx.name, type(error).__name__)
        temporary.unlink(missing_ok=True)
        return None
    finally:
        if model.content is not None:
            source.unlink(missing_ok=True)
    kind, most_kept = (onnx.name, 1) if model.content is None else (_OWN, _OWN_KEPT)
    twins = sorted(model.made.glob(f"{kind}*.ort"), key=lambda path: (path == target, path.stat().st_mtime_ns))
    for old in twins[:-most_kept]:
        for file in (old, old.with_suffix(".json")):
            file.unlink(missing_ok=True)
    return target


def _options(runtime: ModuleType, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # An arena would keep what a run needs for the next one, 6 MB for ResNet18, and is no faster.
    options.enable_cpu_mem_arena = False
    # Spinning threads burn a core between two inferences.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _ort_session(runtime: ModuleType, path: Path, threads: int, precision: EncoderPrecision) -> Any | None:
    """Open an .ort file, whose weights stay in the file and are mapped into memory; None where it cannot be loaded."""
    options = _options(runtime, threads)
    options.add_session_config_entry("session.load_model_format", "ORT")
    options.add_session_config_entry("session.use_memory_mapped_ort_model", "1")
    options.add_session_config_entry("session.use_ort_model_bytes_directly", "1")
    if precision == "fp32":
        # Weights of int8 are packed for the processor when loaded: mapped ones would lie beside them unused.
        options.add_session_config_entry("session.use_ort_model_bytes_for_initializers", "1")
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # Whatever is wrong with a cache, the original is still there.
    except Exception as error:  # noqa: BLE001
        _log.warning("ort_not_loaded file=%s reason=%s: the .onnx is loaded instead", path.name, _first_line(error))
        return None


def _onnx_session(runtime: ModuleType, model: _Model, providers: list[str], threads: int) -> Any:
    """Open an .onnx file with the first of the providers that can run it; engines of TensorRT are made once.

    Raises:
        BundleDamaged: ONNX Runtime cannot load it.
    """
    engines = str(model.made / "engines")
    settings: dict[str, dict[str, Any]] = {
        "TensorrtExecutionProvider": {
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": engines,
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": engines,
        }
    }
    source = str(model.path) if model.content is None else model.content()
    try:
        return runtime.InferenceSession(
            source, _options(runtime, threads), providers=[(name, settings.get(name, {})) for name in providers]
        )
    # ONNX Runtime's exceptions have no common base besides this one.
    except Exception as error:
        raise BundleDamaged(f"{model.path.name}: ONNX Runtime cannot load it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

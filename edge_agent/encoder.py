"""A frozen encoder on a device: inputs in, features (n, d) float32 out. The only importer of onnxruntime here.

The device makes its own .ort file from the bundle's .onnx once, and maps it into memory: ResNet18 then loads in
5 ms and 62 MB instead of 155 ms and 188 MB. It is made in a child process, whose memory goes when it ends, and bound to
the ONNX file, the runtime's version and the processor with its extensions.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from . import self_test
from .bundle import Bundle, EncoderPrecision
from .capabilities import processor
from .errors import BundleDamaged, DataError, MissingCapability
from .limits import give_freed_memory_back
from .storage import read_json, sha256_file, write_json

_log = logging.getLogger(__name__)

_WANTED = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
_LARGE_INPUT = 3 * 64 * 64
"""Inputs above this many values go one by one: at 224 x 224 a batch of 4 takes 21 MB more and is no faster."""

Progress = Callable[[int, int], None]
"""Called with (inputs done, inputs in all)."""


@dataclass(frozen=True)
class Encoder:
    """A session that is ready to run.

    ``fingerprint`` is that of the bundle's variant, which features and heads are bound to. ``providers`` are those in
    effect, which may be fewer than those requested.
    """

    session: Any
    input_name: str
    input_shape: tuple[int, ...]
    feature_dim: int
    precision: EncoderPrecision
    fingerprint: str
    providers: tuple[str, ...]
    format: Literal["ort", "onnx"]

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        precision: EncoderPrecision = "fp32",
        threads: int = 1,
        *,
        cache: bool = True,
    ) -> Encoder:
        """The bundle's encoder, on the fastest provider there is, after its self-test has passed on this device.

        ``threads`` 0 = ONNX Runtime's choice; ``cache=False`` writes nothing beside the bundle, loads the .onnx and
        runs the self-test each time.

        Raises:
            MissingCapability: onnxruntime is not installed.
            StateError: the bundle has no variant of that precision.
            BundleDamaged: ONNX Runtime cannot load the file, its output has another size than the manifest promises, or
                this device computes other features than the exporter.
        """
        variant = bundle.variant(precision)
        onnx = bundle.folder / variant.file
        runtime = onnxruntime()
        wanted = [name for name in _WANTED if name in runtime.get_available_providers()]
        mapped = _mapped(onnx, bundle.manifest.files[onnx.name].sha256, runtime) if cache and len(wanted) == 1 else None
        session = _ort_session(runtime, mapped, threads, precision) if mapped is not None else None
        kind: Literal["ort", "onnx"] = "onnx" if session is None else "ort"
        if session is None:
            session = _onnx_session(runtime, onnx, wanted, threads)
        result = cls(
            session=session,
            input_name=session.get_inputs()[0].name,
            input_shape=bundle.manifest.task.input_shape,
            feature_dim=bundle.manifest.feature_dim,
            precision=precision,
            fingerprint=variant.fingerprint,
            providers=tuple(session.get_providers()),
            format=kind,
        )
        give_freed_memory_back()
        _log.debug("encoder_loaded precision=%s format=%s providers=%s", precision, kind, ",".join(result.providers))
        device = {**arithmetic(), "providers": list(result.providers)}
        self_test.run(bundle, precision, result.features, device, record=cache)
        return result

    @property
    def batch_size(self) -> int:
        """Inputs that are run at once."""
        return 1 if int(np.prod(self.input_shape)) > _LARGE_INPUT else 32

    def features(self, inputs: np.ndarray, progress: Progress | None = None) -> np.ndarray:
        """Features (n, d) float32 of preprocessed ``inputs`` (n, *input_shape).

        Raises:
            DataError: inputs of another shape than the task's.
            BundleDamaged: the encoder does not run, or returns another shape than (n, d).
        """
        if inputs.shape[1:] != self.input_shape:
            raise DataError(
                f"inputs {inputs.shape}, expected (n, {', '.join(map(str, self.input_shape))}); see the task"
            )
        result = np.empty((len(inputs), self.feature_dim), np.float32)
        for begin in range(0, len(inputs), self.batch_size):
            batch = np.ascontiguousarray(inputs[begin : begin + self.batch_size], np.float32)
            result[begin : begin + len(batch)] = self._run(batch)
            if progress is not None:
                progress(begin + len(batch), len(inputs))
        give_freed_memory_back()  # 9 MB for ResNet18, unused between two requests
        return result

    def _run(self, batch: np.ndarray) -> np.ndarray:
        """Features of one batch; what ONNX Runtime allocates for it is free when this returns."""
        try:
            features = self.session.run(None, {self.input_name: batch})[0]
        # ONNX Runtime's exceptions have no common base besides this one.
        except Exception as error:
            raise BundleDamaged(f"the encoder does not run: {_first_line(error)}") from error
        if features.shape != (len(batch), self.feature_dim):
            raise BundleDamaged(f"the encoder returns {features.shape}, expected ({len(batch)}, {self.feature_dim})")
        return np.asarray(features, np.float32)


def arithmetic() -> dict[str, str]:
    """What decides how, and how fast, an encoder computes here: processor with its extensions, and runtime.

    Whatever was measured, tested or optimized is good only where these are the same: a folder may move with its disk.
    """
    return {"processor": processor(), "onnxruntime": onnxruntime().__version__}


def onnxruntime() -> ModuleType:
    """The module ``onnxruntime``, imported with its telemetry switched off.

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


def _mapped(onnx: Path, sha256: str, runtime: ModuleType) -> Path | None:
    """The .ort twin of ``onnx``, made where it is missing or damaged; None where it cannot be made."""
    stem = f"{onnx.name}.{sha256[:16]}.{runtime.__version__}.{processor()}"
    target, note = onnx.with_name(f"{stem}.ort"), onnx.with_name(f"{stem}.json")
    known = read_json(note)
    if known is not None and target.is_file() and sha256_file(target) == known.get("sha256"):
        return target
    temporary = onnx.with_name(f".{stem}.{os.getpid()}.tmp")
    try:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        code = f"from {__name__} import write_ort; write_ort({str(onnx.resolve())!r}, {str(temporary.resolve())!r})"
        # The working folder comes first on a child's import path: the root, where only the system's owner may write.
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": path},
            cwd=os.sep,
        )
        write_json(note, {"sha256": sha256_file(temporary)})
        temporary.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("ort_not_made file=%s reason=%s: the .onnx is loaded instead", onnx.name, type(error).__name__)
        temporary.unlink(missing_ok=True)
        return None
    for old in {*onnx.parent.glob(f"{onnx.name}.*.ort"), *onnx.parent.glob(f"{onnx.name}.*.json")} - {target, note}:
        old.unlink(missing_ok=True)
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


def _onnx_session(runtime: ModuleType, path: Path, providers: list[str], threads: int) -> Any:
    engines = str(path.parent / "engines")
    settings: dict[str, dict[str, Any]] = {
        "TensorrtExecutionProvider": {
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": engines,
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": engines,
        }
    }
    try:
        return runtime.InferenceSession(
            str(path), _options(runtime, threads), providers=[(name, settings.get(name, {})) for name in providers]
        )
    # ONNX Runtime's exceptions have no common base besides this one.
    except Exception as error:
        raise BundleDamaged(f"{path.name}: ONNX Runtime cannot load it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

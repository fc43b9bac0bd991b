"""The model of one client as one ONNX file: what it answers in the simulation, for any runtime.

The file takes what a program has at hand, pixels of an image of the task's size or a window in the units of the sensor,
as files of 'edge-agent export' do, and answers with probabilities. All of it is traced from the very code that answers
in the simulation, and compared with that on all test samples of the client.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_agent.client import Session
from edge_agent.core.errors import ExportRejected, HeadwaterError, StateError, UsageError
from edge_agent.core.storage import check_writable, write_atomic
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import Samples
from edge_agent.data.preprocess import for_channels
from edge_agent.heads import Head
from edge_agent.methods import Method
from edge_agent.methods.families import FittedHead, Tuned
from edge_agent.methods.values import Client
from edge_agent.personal.encoder import onnxruntime
from edge_agent.personal.one_file import METADATA, OUTPUTS, PREPARATION, add_raw_input, describe_input
from edge_agent.training.finetune import has_copy, with_copy_loaded

from ...shadowed import check_export
from .restored import RestoredRun

TOLERANCE = 1e-4
"""The largest difference between probabilities of the file and of the simulation that is allowed."""

OUTPUT = "probabilities"


def write_personal_file(run: RestoredRun, client: str, path: Path) -> Path:
    """Write the model of a client of a finished run as one ONNX file, and return its path.

    Raises:
        UsageError: The method's answer has no form as ONNX operators, the client has no test samples to check it on, or
            no file can be written there.
        MissingCapability: The package ``onnx`` is not installed.
        StateError: The file would answer otherwise than the simulation.
    """
    check_export()
    check_writable(path.parent)
    raw = run.raw_tests_of(client)
    if not len(raw.labels):
        raise UsageError(f"client '{client}' has no test samples to check a file on; choose another client")
    model = run.model_of(client)
    content = _file_of(model.session, model.client, run.method, str(raw.inputs.dtype))
    # The file answers as the simulation does, on all test samples.
    expected = model.predict_proba(raw.ready().inputs)
    try:
        largest = _largest_difference(content, expected, _as_input(raw), run.task)
    # ONNX Runtime has no common class of errors for a graph that was traced wrongly.
    except Exception as error:
        raise _refusal(run.method, error) from error
    if not largest <= TOLERANCE:  # written as "not below", so that NaN fails, too
        raise StateError(
            f"answers of the file differ from those of client '{client}' by {largest:.2g}, expected {TOLERANCE:g} at "
            f"most; nothing was written: method '{run.method.name}' answers by more than its torch module"
        )
    about = {
        "format": 1,
        "input": describe_input(run.task.input, str(raw.inputs.dtype)),
        "preparation": PREPARATION[run.task.input.kind],
        "outputs": {OUTPUT: OUTPUTS[OUTPUT]},
        "labels": list(run.task.class_names),
        "client": client,
        "run_id": run.run,
        "method": run.method.name,
        "checked_samples": len(raw.labels),
        "largest_difference": largest,
    }
    write_atomic(path, _described(content, about))
    return path


def _file_of(session: Session, client: Client, method: Method, dtype: str) -> bytes:
    """Return the model of a client as an ONNX graph from raw inputs to probabilities.

    Raises:
        UsageError: The method's answer has no form as ONNX operators.
        MissingCapability: The package ``onnx`` is not installed.
    """
    import onnx

    from export.encoder import to_onnx

    task = client.task
    head: Head | None = None
    with ExitStack() as stack:
        # 1. What answers, as every evaluation has it: with the statistics of its own samples, and its tuned copy.
        stack.enter_context(session.own_statistics(client))
        if isinstance(method, FittedHead) and type(method).predict is FittedHead.predict:
            head = method.fitted(client)
            answering: nn.Module = client.model.encoder
        elif isinstance(method, Tuned) and type(method).predict is Tuned.predict:
            stack.enter_context(_tuned(method, client))
            answering = _Softmax(client.model)
        elif type(method).predict is Method.predict:
            answering = _Softmax(client.model)
        else:
            answering = _Predicting(method, client)
        # 2. Traced. The older exporter traces what a method's own code does as well.
        try:
            exported = to_onnx(answering, task, "legacy", outputs=("features" if head is not None else OUTPUT,))
            graph = onnx.load_model_from_string(exported.model)
            # 3. With what programs have at hand as its input.
            add_raw_input(graph, task.input, len(task.class_names), head=head, dtype=dtype)
            onnx.checker.check_model(graph, full_check=True)
        # The tracing of a method's own code may fail in any way, or leave a graph without its input.
        except Exception as error:
            raise _refusal(method, error) from error
    return bytes(graph.SerializeToString())


def _refusal(method: Method, error: Exception) -> UsageError:
    """Return the error of a method whose code cannot be written as a file."""
    if isinstance(error, HeadwaterError) and not isinstance(error, ExportRejected):
        raise error
    reason = " ".join(str(error).split())[:200]
    return UsageError(
        f"method '{method.name}' answers by code that has no form as ONNX operators ({reason}); use .model, or a "
        "method that answers by its torch module, such as fedper"
    )


def _tuned(method: Tuned, client: Client) -> AbstractContextManager[None]:
    """Load the client's tuned copy, which is made first if there is none, into its model for a context."""
    if not has_copy(client):
        method.personalize(client, {})
    return with_copy_loaded(client)


class _Softmax(nn.Module):
    """A model of logits, answering with probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities (n, K)."""
        return torch.softmax(self.model(inputs), dim=1)


class _Predicting(nn.Module):
    """A client that answers by its method's own code."""

    def __init__(self, method: Method, client: Client) -> None:
        super().__init__()
        self.model = client.model
        self._method = method
        self._client = client

    def __deepcopy__(self, _memo: dict[int, object]) -> _Predicting:
        """Return the same object: the client's random generators cannot be copied, and tracing changes nothing."""
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities (n, K)."""
        return self._method.predict(self._client, inputs)


def _largest_difference(content: bytes, expected: np.ndarray, inputs: np.ndarray, task: Task) -> float:
    """Return the largest difference between the probabilities of a file and those expected."""
    session = onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
    (answers,) = session.run([OUTPUT], {task.input.kind: inputs})
    return float(np.max(np.abs(answers - expected)))


def _as_input(samples: Samples) -> np.ndarray:
    """Return the inputs of samples in the form that the file takes: pixels (n, height, width, channels), or windows."""
    spec = samples.input
    if not isinstance(spec, ImageInput):
        std, mean = (for_channels(values, spec.channels, (-1, 1)) for values in (spec.std, spec.mean))
        return np.ascontiguousarray(samples.inputs * std + mean, np.float32)
    pixels = samples.inputs
    if pixels.dtype != np.uint8:  # normalised already
        std, mean = (for_channels(values, spec.channels, (-1, 1, 1)) for values in (spec.std, spec.mean))
        pixels = ((pixels * std + mean) * 255.0).astype(np.float32)
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))


def _described(content: bytes, about: dict[str, Any]) -> bytes:
    """Return the file with a description in its metadata."""
    import onnx

    graph = onnx.load_model_from_string(content)
    entry = graph.metadata_props.add()
    entry.key = METADATA
    entry.value = json.dumps(about)
    return bytes(graph.SerializeToString())

"""A bundle from a network that no run has trained: an ONNX file, a class in a Python file, one of torchvision."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.bundle.manifest import NEWEST_SCHEMA
from edge_agent.core import config
from edge_agent.core.class_names import parse_class_names
from edge_agent.core.errors import ExportRejected, UsageError, cause
from edge_agent.core.task import EncoderTask, Task
from edge_agent.personal import self_test

from ..build import synthetic_inputs
from ..calibration import Calibration
from ..domains import domains_of
from ..encoder import Exported
from ..packing import BundleOptions, Checked, Graphs, Origin, Report, check_passed, head_gates, pack_checked, timed_step
from ..parity import Gate, graph_gates
from .compare import compare, varied_gate
from .cut import Cut, cut_encoder
from .dequantize import dequantize, is_quantized
from .features import FeaturePoint, find_features
from .graph_file import inputs_of, opset_of, read_graph, sides_of
from .input_form import InputForm, choose_form
from .networks import export_network, is_in_python, load_class, load_torchvision
from .preprocessing import TORCHVISION, Preprocessing, read_preprocessing
from .settings import ForeignSettings

_NO_CALIBRATION = "not made: --calibration SOURCE names inputs that it takes its ranges from"
_BESIDE = ("preprocessor_config.json", "config.json")
"""Names of files that say how a network's inputs are prepared, where they lie beside it."""


@dataclass(frozen=True)
class ForeignReport:
    """The result of making a bundle of somebody else's network."""

    report: Report
    point: FeaturePoint
    form: InputForm
    pooling: str
    """How one row of features is made; empty where the network has one."""

    notes: tuple[str, ...] = ()
    """In what the bundle differs from the network as it was, for people."""


@dataclass(frozen=True)
class Network:
    """A network that somebody else has made, and what is known about its inputs."""

    model: Any
    """The graph, an `onnx.ModelProto`."""

    name: str
    form: InputForm
    gates: tuple[Gate, ...] = ()
    """The checks that it went through while it became a graph."""

    notes: tuple[str, ...] = ()
    rounded: Any = None
    """The graph as it was quantized; None where it was not."""


def bundle_network(source: str, out: Path, settings: ForeignSettings) -> ForeignReport:
    """Make a bundle of a network that no run has trained, check it, and write it to ``out``.

    Args:
        source: An ONNX file, ``PATH.py:CLASS``, or the name of a network of torchvision.
        out: The file to write.
        settings: What the network's file does not say.

    Raises:
        UsageError: The source or an option is at fault.
        ExportRejected: The network is none that devices run, or a gate failed; nothing is written.
        WeightsError: The weights are those of another network.
    """
    seconds = dict[str, float]()
    # 1. The network as a graph, and where its features are.
    with timed_step(seconds, "read"):
        # What a user's network prints is no part of the result, which may be JSON on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            network = _open(source, settings)
        form = network.form
        point = find_features(network.model, settings.features)
    # 2. The encoder: from what a device prepares to rows of features.
    with timed_step(seconds, "cut"):
        cut = cut_encoder(
            network.model, point, form, settings.pool, any_batch=settings.any_batch, rounded=network.rounded
        )
    # 3. Its gates: a graph that fails one is neither quantized nor packed.
    with timed_step(seconds, "gates"):
        origin, notes = _origin(point, form, cut, settings, network.name)
        checked = _check(network, form, cut, origin)
    # 4. The int8 variant, and the file.
    calibration, is_given = _calibration(origin.task, settings)
    options = BundleOptions(settings.name or network.name, int8=is_given, why_no_int8=_NO_CALIBRATION)
    report = pack_checked(checked, calibration, out, options, seconds)
    all_notes = (*network.notes, *notes)
    return ForeignReport(report, point, form, cut.pooling.text, all_notes)


def _open(source: str, settings: ForeignSettings) -> Network:
    """Return the network that a source names."""
    given = Preprocessing()
    if settings.preprocessing is not None:
        given = read_preprocessing(settings.preprocessing)
    is_file = source.endswith(".onnx") or _exists(source)
    if is_file and not is_in_python(source):
        return _open_file(Path(source), given, settings)
    notes: list[str] = []
    if is_in_python(source):
        network = load_class(source, settings.weights)
        notes += _notes_on_preprocessing(settings)
    else:
        network = load_torchvision(source, settings.weights)
        if settings.preprocessing is None:
            given = read_preprocessing(f"{TORCHVISION}{source}")
    form = choose_form(_sides_in_torch(given, settings), given, settings)
    model, gate = export_network(network, form)
    return Network(model, network.name, form, (gate,), (*network.notes, *given.notes, *notes))


def _exists(source: str) -> bool:
    """Return whether a source is a path at which there is something."""
    try:
        return Path(source).exists()
    except OSError:  # too long for a name, or below a folder that may not be looked into
        return False


def _open_file(path: Path, given: Preprocessing, settings: ForeignSettings) -> Network:
    """Return the network in an ONNX file.

    Raises:
        UsageError: Weights were named, which the file has.
    """
    if settings.weights is not None:
        raise UsageError(f"--weights {settings.weights}: {path} has its own weights; leave the option out")
    model = read_graph(path)
    form = choose_form(sides_of(inputs_of(model)[0]), given, settings)
    notes = [*given.notes, *_notes_on_preprocessing(settings, path.parent)]
    if not is_quantized(model):
        return Network(model, path.stem, form, notes=tuple(notes))
    notes.append(
        "the network was quantized: its weights are float32 in the bundle, whose int8 is made by --calibration"
    )
    return Network(dequantize(model), path.stem, form, notes=tuple(notes), rounded=model)


def _notes_on_preprocessing(settings: ForeignSettings, folder: Path | None = None) -> list[str]:
    """Return a note where nothing says how inputs are prepared, and which file in the network's folder may say it."""
    is_said = settings.mean or settings.std or settings.pixel_range or settings.normalize_each
    if settings.preprocessing is not None or is_said:
        return []
    note = (
        "nothing says how inputs are prepared (--preprocessing, --mean, --std): pixels are 0..1, recordings as they are"
    )
    beside = [] if folder is None else [folder / name for name in _BESIDE if (folder / name).is_file()]
    if beside:
        note += f"; {beside[0]} lies beside the network and was not read"
    return [note]


def _sides_in_torch(given: Preprocessing, settings: ForeignSettings) -> list[None]:
    """Return as many unknown sides as the input of a network in torch has, which does not say them."""
    layout = settings.layout or given.layout
    if layout is not None:
        return [None] * len(layout)
    is_window = (settings.kind or given.kind) == "window"
    return [None] * (3 if is_window else 4)


def _origin(
    point: FeaturePoint, form: InputForm, cut: Cut, settings: ForeignSettings, name: str
) -> tuple[Origin, list[str]]:
    """Return what the manifest says of the encoder, and notes on it."""
    # 1. The task, which has classes where --classes names them.
    names = () if settings.classes is None else parse_class_names(settings.classes)
    content = {"input": form.spec, "encoder": name[:200]}
    task: Task = config.parse(EncoderTask, content, where="the network's name")
    if names:
        task = config.parse(Task, {**content, "class_names": names}, where="--classes")
    # 2. The network's own classifier, which all devices share where it answers for these classes.
    classifier = None
    notes: list[str] = []
    if names:
        obstacle = _why_not_shared(point, cut, len(names))
        if obstacle:
            notes.append(f"no shared classifier: {obstacle}")
        else:
            classifier = point.classifier
    return Origin(task, cut.feature_dim, classifier, schema_version=NEWEST_SCHEMA), notes


def _why_not_shared(point: FeaturePoint, cut: Cut, num_classes: int) -> str:
    """Return why the network's own classifier cannot be shared, for a task of so many classes; empty: it can."""
    if point.classifier is None:
        return "no linear layer with constant weights alone leads from features to classes"
    count, width = point.classifier["weight"].shape
    if cut.pooling.text or width != cut.feature_dim:
        return "the network's takes other features than one row for each input"
    if count != num_classes:
        return f"the network's knows {count} classes, --classes names {num_classes}"
    return ""


def _check(network: Network, form: InputForm, cut: Cut, origin: Origin) -> Checked:
    """Return the encoder as one that has passed its gates.

    Raises:
        ExportRejected: Some failed; all of them are listed.
    """
    gates = [
        *network.gates,
        *head_gates(origin.global_head, origin.task, cut.feature_dim),
        *graph_gates(cut.model, origin.task),
    ]
    # ONNX Runtime opens only a graph that has passed the checks that read it.
    check_passed(gates, network.name)
    inputs = _probe_inputs(origin.task)
    try:
        parity_gate, parity = compare(cut, form, inputs, was_quantized=network.rounded is not None)
        gates += [parity_gate, varied_gate(cut, inputs)]
    except Exception as error:  # ONNX Runtime's errors, of indices that are out of range, say, have no common base
        raise ExportRejected(
            f"encoder '{network.name}': ONNX Runtime cannot run it ({cause(error)[:300]}); nothing was written; name "
            "--features before that, or export the network again"
        ) from error
    check_passed(gates, network.name)
    exported = Exported(cut.model, "file", opset_of(network.model))
    return Checked(Graphs(exported, None), origin, gates, parity)


def _probe_inputs(task: Task) -> np.ndarray:
    """Return inputs (8, ...) float32 by which the encoder is compared: prepared synthetic ones, then random ones."""
    prepared = self_test.prepared(self_test.raw_inputs(task.input), task.input)[::2]
    return np.concatenate([prepared, synthetic_inputs(task, len(prepared))])


def _calibration(task: Task, settings: ForeignSettings) -> tuple[Calibration, bool]:
    """Return the inputs that int8 takes its ranges from, and whether some were given."""
    if settings.calibration:
        return Calibration.from_domains(domains_of(settings.calibration, task, labelled=None)), True
    return Calibration.from_inputs(synthetic_inputs(task, 1)), False

"""The form in which a network takes its input, and what is put in front of it so that it takes a device's.

Devices give images as (n, channels, height, width) and windows of recordings as (n, channels, length). A network with
other axes, with blue before red, or whose windows are normalized one by one gets a few nodes in front.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from edge_agent.core.errors import UsageError
from edge_agent.core.task import ImageInput, InputSpec, WindowInput

from .preprocessing import Preprocessing
from .settings import ForeignSettings, Layout

PREFIX = "headwater/"
"""The beginning of the names of nodes and constants that are added to a graph."""

_EPSILON = 1e-7
"""What is added to the variance of a window, as Hugging Face's feature extractors do."""

_IMAGE_LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC")
_RANKS: dict[Layout, int] = {"NCHW": 4, "NHWC": 4, "NCL": 3, "NLC": 3, "NL": 2, "N1CL": 4, "N1LC": 4}

Sides = Sequence[int | None]
"""The sides of a network's input; None for one that has a name instead of a number."""


@dataclass(frozen=True)
class Steps:
    """Nodes that are put in front of a graph or behind it, with their constants."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    result: str = ""
    """The name of the last node's result; that of the source where there are no nodes."""

    def then(self, operator: str, inputs: Sequence[str], label: str, **attributes: Any) -> Steps:
        """Return these steps and one more node, whose result has the name of ``label``."""
        name = f"{PREFIX}{label}"
        node = helper.make_node(operator, list(inputs), [name], name=name, **attributes)
        return Steps([*self.nodes, node], self.constants, name)

    def with_constant(self, array: np.ndarray, label: str) -> Steps:
        """Return these steps and one more constant, which has the name `constant_name` of ``label``."""
        return Steps(self.nodes, [*self.constants, numpy_helper.from_array(array, constant_name(label))], self.result)


def constant_name(label: str) -> str:
    """Return the name of the constant with this label."""
    return f"{PREFIX}{label}.value"


@dataclass(frozen=True)
class InputForm:
    """What a device prepares, and how the network takes it."""

    spec: InputSpec
    layout: Layout
    bgr: bool = False
    normalize_each: bool = False

    def given_shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape of the network's own input for a batch."""
        return self.arrange(np.zeros((batch, *self.spec.shape), np.float32)).shape

    def arrange(self, inputs: np.ndarray) -> np.ndarray:
        """Return a device's inputs (n, ...) float32 as the network takes them; `steps` does the same in the graph."""
        if self.bgr:
            inputs = inputs[:, ::-1]
        if self.normalize_each:
            axes = tuple(range(1, inputs.ndim))
            mean = inputs.mean(axis=axes, keepdims=True)
            inputs = (inputs - mean) / np.sqrt(inputs.var(axis=axes, keepdims=True) + _EPSILON)
        if self.layout == "NHWC":
            inputs = inputs.transpose(0, 2, 3, 1)
        if self.layout in {"NLC", "N1LC"}:
            inputs = inputs.transpose(0, 2, 1)
        if self.layout == "NL":
            inputs = inputs[:, 0]
        if self.layout in {"N1CL", "N1LC"}:
            inputs = inputs[:, None]
        return np.ascontiguousarray(inputs, np.float32)

    def steps(self, source: str) -> Steps:
        """Return the nodes that turn a device's input, of the name ``source``, into the network's."""
        steps = Steps(result=source)
        if self.bgr:
            steps = steps.with_constant(np.array([2, 1, 0], np.int64), "bgr")
            steps = steps.then("Gather", [steps.result, constant_name("bgr")], "bgr", axis=1)
        if self.normalize_each:
            steps = self._normalizing(steps)
        if self.layout == "NHWC":
            steps = steps.then("Transpose", [steps.result], "transpose", perm=[0, 2, 3, 1])
        if self.layout in {"NLC", "N1LC"}:
            steps = steps.then("Transpose", [steps.result], "transpose", perm=[0, 2, 1])
        if self.layout in {"NL", "N1CL", "N1LC"}:
            # The first side stays what it is; the number of the others follows from the spec.
            shape = np.array([0, *self.given_shape(1)[1:]], np.int64)
            steps = steps.with_constant(shape, "reshape")
            steps = steps.then("Reshape", [steps.result, constant_name("reshape")], "reshape")
        return steps

    def _normalizing(self, steps: Steps) -> Steps:
        """Return steps that end with each window at mean 0 and deviation 1; of one channel, see `choose_form`."""
        source = steps.result
        steps = steps.with_constant(np.array(_EPSILON, np.float32), "epsilon")
        # The mean over time, by an operator that is the same in all versions of ONNX.
        steps = steps.then("GlobalAveragePool", [source], "mean")
        steps = steps.then("Sub", [source, steps.result], "centred")
        centred = steps.result
        steps = steps.then("Mul", [centred, centred], "square")
        steps = steps.then("GlobalAveragePool", [steps.result], "variance")
        steps = steps.then("Add", [steps.result, constant_name("epsilon")], "positive")
        steps = steps.then("Sqrt", [steps.result], "deviation")
        return steps.then("Div", [centred, steps.result], "normalized")


def choose_form(sides: Sides, given: Preprocessing, settings: ForeignSettings) -> InputForm:
    """Return the form of a network's input, from its declared sides, a file of preprocessing and the options.

    Args:
        sides: The sides of the network's input, the batch first.
        given: What a file of preprocessing says.
        settings: The options, which count more than the file.

    Raises:
        UsageError: They contradict each other, or leave something open; all of it is listed.
    """
    layout = settings.layout or given.layout or _guess_layout(sides, settings.kind or given.kind)
    if _RANKS[layout] != len(sides):
        raise UsageError(
            f"--layout {layout}: has {_RANKS[layout]} axes, the network's input has {len(sides)} {_text(sides)}"
        )
    wrong = [side for letter, side in zip(layout, sides, strict=True) if letter == "1" and side not in {1, None}]
    if wrong:
        raise UsageError(
            f"the network's input {_text(sides)} as {layout} has {wrong[0]} where 1 is expected; name another "
            "--layout or --kind"
        )
    is_image = layout in _IMAGE_LAYOUTS
    wanted = settings.kind or given.kind
    if wanted is not None and (wanted == "image") != is_image:
        raise UsageError(
            f"the network's input {_text(sides)} as {layout} is {'an image' if is_image else 'a window'}, the "
            f"preprocessing is of kind {wanted}; name another --layout, or another file"
        )
    choose = _image_form if is_image else _window_form
    return choose(_named_sides(layout, sides), layout, given, settings)


def _guess_layout(sides: Sides, kind: str | None) -> Layout:
    """Return the layout that an input with these sides most likely has."""
    if len(sides) == 2:
        return "NL"
    if len(sides) == 3:
        return "NCL"
    if kind == "window":
        return "N1CL"
    is_last = sides[3] in {1, 3} and sides[1] not in {1, 3}
    return "NHWC" if is_last else "NCHW"


def _named_sides(layout: Layout, sides: Sides) -> dict[str, int | None]:
    """Return the sides by their letters: C, H, W, L."""
    return {letter: side for letter, side in zip(layout, sides, strict=True) if letter not in {"N", "1"}}


def _image_form(
    sides: dict[str, int | None], layout: Layout, given: Preprocessing, settings: ForeignSettings
) -> InputForm:
    """Return the form of an input of images."""
    mistakes = [*_idle_options(settings, ("length", "stride", "normalize_each"), "images")]
    height, width = _size(settings) or (given.height, given.width)
    height = _agreed("height", sides["H"], height, "--size", mistakes)
    width = _agreed("width", sides["W"], width, "--size", mistakes)
    channels = _agreed(
        "channels", sides["C"], settings.channels or given.channels or _count(settings), "--channels", mistakes
    )
    mean, std = _normalization(given, settings)
    for name, values in (("mean", mean), ("std", std)):
        if channels is not None and len(values) not in {1, channels}:
            mistakes.append(f"{name} has {len(values)} values, the network's input has {channels} channel(s)")
    bgr = settings.bgr or given.bgr
    if bgr and channels == 1:
        mistakes.append("blue before red, but the network's input has 1 channel")
    _refuse(mistakes)
    # `_agreed` has put every number that is missing among the mistakes.
    content = {"channels": channels, "height": height, "width": width, "mean": mean, "std": std}
    return InputForm(_spec(ImageInput, content), layout, bgr=bgr)


def _window_form(
    sides: dict[str, int | None], layout: Layout, given: Preprocessing, settings: ForeignSettings
) -> InputForm:
    """Return the form of an input of recordings."""
    mistakes = [*_idle_options(settings, ("size", "bgr"), "windows")]
    length = _agreed("length", sides["L"], settings.length or given.length, "--length", mistakes)
    known = 1 if layout == "NL" else sides["C"]
    channels = _agreed("channels", known, settings.channels or given.channels, "--channels", mistakes)
    mean, std = _normalization(given, settings)
    for name, values in (("mean", mean), ("std", std)):
        if channels is not None and len(values) not in {1, channels}:
            mistakes.append(f"{name} has {len(values)} values, the network's input has {channels} channel(s)")
    normalize_each = settings.normalize_each or given.normalize_each
    if normalize_each and channels not in {1, None}:
        mistakes.append(f"windows are normalized one by one of 1 channel only, the network's input has {channels}")
    _refuse(mistakes)
    stride = settings.stride or max(1, (length or 2) // 2)
    content = {"kind": "window", "channels": channels, "length": length, "stride": stride, "mean": mean, "std": std}
    return InputForm(_spec(WindowInput, content), layout, normalize_each=normalize_each)


def _idle_options(settings: ForeignSettings, names: Sequence[str], inputs: str) -> Iterator[str]:
    """Yield the options among ``names`` that were given and that mean nothing for such inputs."""
    for name in names:
        if getattr(settings, name):
            yield f"--{name.replace('_', '-')} is of no use for {inputs}; leave it out, or name another --kind"


def _agreed(name: str, of_network: int | None, wanted: int | None, flag: str, mistakes: list[str]) -> int | None:
    """Return the number on which network and preprocessing agree; None, with a mistake noted, where there is none."""
    if of_network is None and wanted is None:
        mistakes.append(f"{name} is given by neither the network nor the preprocessing; give {flag}")
    if of_network is not None and wanted is not None and of_network != wanted:
        mistakes.append(f"{name} is {wanted} in the preprocessing, {of_network} in the network's input")
        return None
    return wanted if of_network is None else of_network


def _size(settings: ForeignSettings) -> tuple[int, int] | None:
    """Return height and width as --size gives them."""
    if settings.size is None:
        return None
    numbers = [int(part) for part in settings.size.split("x")]
    return numbers[0], numbers[-1]


def _count(settings: ForeignSettings) -> int | None:
    """Return the number of channels that a mean or a std of three values says."""
    is_rgb = any(values is not None and len(values) == 3 for values in (settings.mean, settings.std))
    return 3 if is_rgb else None


def _normalization(given: Preprocessing, settings: ForeignSettings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the std of the task: of pixels in units of 0..1, whatever the network counts them in.

    Raises:
        UsageError: A std is not above 0, or there is no number at all.
    """
    mean = given.mean if settings.mean is None else settings.mean
    std = given.std if settings.std is None else settings.std
    pixel_range = settings.pixel_range or given.pixel_range
    if not mean or not std:
        raise UsageError("mean or std holds no number; give one, or one for each channel")
    if min(std) <= 0 or not all(map(math.isfinite, (*mean, *std))):
        raise UsageError(
            f"std holds {min(std):g} or mean is not finite; inputs are divided by std, so give values above 0"
        )
    return tuple(value / pixel_range for value in mean), tuple(value / pixel_range for value in std)


def _spec(kind: type[ImageInput | WindowInput], content: dict[str, Any]) -> InputSpec:
    """Return the input spec with these fields.

    Raises:
        UsageError: A number is out of the range that devices have.
    """
    from edge_agent.core import config

    return config.parse(kind, content, where="the network's input")


def _refuse(mistakes: list[str]) -> None:
    """Raise `UsageError` with all mistakes, if there are any."""
    if mistakes:
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise UsageError(f"preprocessing and network do not go together; nothing was written\n{lines}")


def _text(sides: Sides) -> str:
    """Return the sides of an input for people."""
    return f"[{', '.join('?' if side is None else str(side) for side in sides)}]"

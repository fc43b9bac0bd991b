"""The task that is learned: inputs, classes and encoder. Coordinator, agents, bundles and heads share one `Task`.

Preprocessing is part of the task because an encoder is only defined together with it: the same spec is executed when
training, when exporting, and on the device, and it enters the encoder's fingerprint.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

if TYPE_CHECKING:  # an agent that waits for work has no arrays yet: numpy, 16 MB, comes with the first of them
    import numpy as np

Tensors: TypeAlias = "dict[str, np.ndarray]"
"""Named arrays: model parts, checkpoints, updates and heads. One codec serves them all (`wire.tensors`)."""

State: TypeAlias = Tensors
"""The arrays that a method keeps at the coordinator between rounds, in the form of checkpoints."""

RUNNING_STATISTICS = ("running_mean", "running_var")
"""The last part of the names of tensors that hold the running statistics of batch norm."""

Spec = TypeVar("Spec", "ImageInput", "WindowInput")


class Frozen(BaseModel):
    """Base of every message and configuration model: immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # where a field may hold anything, NaN must not turn into null unseen
    )


def parse_json(raw: bytes) -> Any:
    """Return the JSON value in UTF-8 text, in which repeated keys, NaN and infinity are mistakes.

    Raises:
        ValueError: The bytes are not UTF-8 or not JSON, repeat a key, or hold NaN or infinity.
        RecursionError: The JSON is nested too deeply.
    """
    # As text: from bytes, json would guess UTF-16 and UTF-32 as well.
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, which must have different names."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _no_constant(name: str) -> None:
    """Refuse the constants NaN, Infinity and -Infinity, which Python's JSON parser would accept."""
    raise ValueError(f"{name} is not a number")


def _check_normalization(spec: Spec) -> Spec:
    """Require that mean and std have one value or one for each channel, and that every std is above 0."""
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) not in {1, spec.channels}:
            raise ValueError(f"{name} has {len(values)} values, expected 1 or {spec.channels}, one for each channel")
    if min(spec.std) <= 0:
        raise ValueError(f"std holds {min(spec.std)}; inputs are divided by it, so every value must be above 0")
    return spec


class ImageInput(Frozen):
    """The input of images, which become float32 (channels, height, width) = (pixel / 255 - mean) / std."""

    kind: Literal["image"] = Field("image", description="image, or window for sensor recordings")
    channels: Literal[1, 3] = Field(3, description="1 = grey, 3 = RGB")
    height: int = Field(32, ge=4, le=2048, description="pixels after resizing")
    width: int = Field(32, ge=4, le=2048, description="pixels after resizing")
    resize: Literal["bilinear"] = Field("bilinear", description="interpolation")
    antialias: bool = Field(True, description="triangle filter widened when shrinking, as Pillow does")
    mean: tuple[float, ...] = Field((0.5,), description="one value, or one for each channel, in units of 0..1")
    std: tuple[float, ...] = Field((0.5,), description="one value, or one for each channel, in units of 0..1")

    _can_be_normalized = model_validator(mode="after")(_check_normalization)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return (self.channels, self.height, self.width)


class WindowInput(Frozen):
    """The input of recordings, which become float32 windows (channels, length) = (value - mean) / std by channel."""

    kind: Literal["window"] = Field("window", description="image, or window for sensor recordings")
    channels: int = Field(6, ge=1, le=1024, description="values in one sample of a recording")
    length: int = Field(100, ge=4, le=65536, description="samples in one window")
    stride: int = Field(50, ge=1, le=65536, description="samples between the starts of two windows")
    mean: tuple[float, ...] = Field((0.0,), description="one value, or one for each channel, in sensor units")
    std: tuple[float, ...] = Field((1.0,), description="one value, or one for each channel, in sensor units")

    _can_be_normalized = model_validator(mode="after")(_check_normalization)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input without the batch axis."""
        return (self.channels, self.length)


InputSpec = Annotated[ImageInput | WindowInput, Field(discriminator="kind")]


MAX_LABEL = 200
"""The most characters of a name of a class or encoder."""

_CONTROLS = frozenset({"Cc", "Zl", "Zp"})
"""Unicode categories of control characters and line breaks."""

_STEERING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Unicode's bidirectional classes of characters that change the direction of writing."""


def _check_label(name: str) -> str:
    """Return a name that logs, tables and reports can show without being distorted by it."""
    # Most names are printable ASCII, which the look-ups of each letter would take ten times as long to find out.
    is_printable = (name.isascii() and name.isprintable()) or not any(
        unicodedata.category(letter) in _CONTROLS or unicodedata.bidirectional(letter) in _STEERING for letter in name
    )
    if len(name) > MAX_LABEL or not is_printable:
        raise ValueError(
            f"expected at most {MAX_LABEL} characters, none of them a control character, a line break or a change of "
            "the direction of writing"
        )
    return name


Label = Annotated[str, AfterValidator(_check_label)]
"""A name of a class or encoder, which may come from a peer and is shown to people."""


class Task(Frozen):
    """Inputs, classes and encoder of one federation's learning problem."""

    input: InputSpec = Field(default_factory=ImageInput)
    class_names: tuple[Label, ...] = Field(
        min_length=1, max_length=10_000, description="label map: position is the label"
    )
    encoder: Label = Field("small_cnn", description="an encoder in edge_agent/models")
    encoder_params: dict[str, Any] = Field(default_factory=dict, description="parameters of that encoder")
    peft: Label | None = Field(
        None, description="of a run: what of the encoder learns, a file in edge_agent/training/peft; run.peft sets it"
    )
    peft_params: dict[str, Any] = Field(
        default_factory=dict, description="of a run: parameters of peft; run.peft_params sets them"
    )

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write a task whose whole encoder learns without the fields of peft, which peers of before do not know."""
        fields: dict[str, Any] = handler(self)
        if self.peft is None:
            fields.pop("peft", None)
            fields.pop("peft_params", None)
        return fields

    def with_peft(self, peft: str | None, params: dict[str, Any] | None = None) -> Task:
        """Return the task with this choice of what of the encoder learns; None: all of it."""
        return self.model_copy(update={"peft": peft, "peft_params": dict(params or {})})

    @property
    def num_classes(self) -> int:
        """The number of classes, K."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one preprocessed input without the batch axis."""
        return self.input.shape


class EncoderTask(Task):
    """The task of an encoder that no run has trained: it has no classes, and the data of each device bring theirs.

    Only bundles have such a task; what is trained together has classes.
    """

    class_names: tuple[Label, ...] = Field((), max_length=0, description="none")

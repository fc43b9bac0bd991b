"""The choices for a bundle of an encoder that no run has trained: its features, its inputs, its classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from edge_agent.core.task import Frozen


def _split_numbers(value: Any) -> Any:
    """Return the numbers in texts like ``0.5,0.4``, one behind the other."""
    if isinstance(value, str):
        return value.split(",")
    if not isinstance(value, Iterable):
        return value
    numbers: list[Any] = []
    for part in value:
        if isinstance(part, str):
            numbers += part.split(",")
        else:
            numbers.append(part)
    return tuple(numbers)


Numbers = Annotated[tuple[float, ...], BeforeValidator(_split_numbers)]
"""Numbers, also as text with commas between them."""

Layout = Literal["NCHW", "NHWC", "NCL", "NLC", "NL", "N1CL", "N1LC"]
"""The order of the axes of a network's input: batch N, channels C, height H, width W, length L."""

Pool = Literal["auto", "mean", "first", "flatten"]
"""How one row of features is made where the network has a map or a row for each token."""


class ForeignSettings(Frozen):
    """Everything about the bundle that the network's file does not say, or that differs from what it says."""

    features: str | None = Field(
        None,
        max_length=500,
        description="name of the tensor that is the features; default: the input of the last classifier",
    )
    pool: Pool = Field(
        "auto", description="of features with more axes than two: mean, first (token) or flatten; default: mean"
    )
    preprocessing: str | None = Field(
        None,
        max_length=4096,
        description="preprocessor_config.json (Hugging Face), config.json (timm) or torchvision:NAME",
    )
    kind: Literal["image", "window"] | None = Field(
        None, description="image or window (recordings); default: by the axes of the network's input"
    )
    size: str | None = Field(
        None, pattern=r"^[0-9]{1,4}(x[0-9]{1,4})?$", description="size of images in pixels, 224 or HEIGHTxWIDTH"
    )
    channels: int | None = Field(None, ge=1, le=1024, description="1 = grey, 3 = RGB, or values in a sample")
    length: int | None = Field(None, ge=4, le=65536, description="samples in a window")
    stride: int | None = Field(
        None, ge=1, le=65536, description="samples between the starts of two windows; default: half of the length"
    )
    mean: Numbers | None = Field(
        None, description="What is taken off the inputs: one number, or one for each channel, 0.485,0.456,0.406"
    )
    std: Numbers | None = Field(
        None, description="What the inputs are then divided by: one number, or one for each channel"
    )
    pixel_range: float | None = Field(
        None, gt=0, le=65536, description="white before mean and std are applied, 255 or 1; default: 1"
    )
    layout: Layout | None = Field(None, description="order of the axes, such as NHWC or NLC; default: by their lengths")
    bgr: bool = Field(False, description="the network takes blue, green, red")
    normalize_each: bool = Field(False, description="each window gets mean 0 and deviation 1 by itself, as for wav2vec")
    any_batch: bool = Field(
        False, description="make a batch axis of one input free; checked by running several inputs at once"
    )
    classes: str | None = Field(
        None, description="class names with commas, or a file with one a line; default: those of each device's data"
    )
    weights: Path | None = Field(None, description="of a torchvision network or a class: .safetensors, or .pth")
    calibration: tuple[str, ...] = Field(
        (),
        description="Data source from which int8 takes its ranges, and, where it has labels, on which it is compared; "
        "default: no int8",
    )
    name: str | None = Field(None, max_length=200, description="name of the bundle; default: that of the model")

"""Preprocessing as the configuration files of other projects state it: Hugging Face, timm, torchvision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from edge_agent.core.config import mistakes_of
from edge_agent.core.errors import ConfigError, UsageError, cause
from edge_agent.core.storage import read_regular
from edge_agent.core.task import parse_json

from .settings import Layout

_MOST_BYTES = 1 << 20
"""The most bytes of a configuration file."""

TORCHVISION = "torchvision:"
"""What stands before the name of a network of torchvision, whose preprocessing is that of its weights."""

_BILINEAR = {2, "bilinear", "random"}
"""How configuration files call the interpolation that devices have; `random` is timm's choice while training."""

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Names of Pillow's interpolations by their numbers."""


@dataclass(frozen=True)
class Preprocessing:
    """What a configuration file says about inputs; None where it says nothing."""

    kind: Literal["image", "window"] | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    length: int | None = None

    mean: tuple[float, ...] = (0.0,)
    """What is taken off: of pixels in units in which white is `pixel_range`."""

    std: tuple[float, ...] = (1.0,)
    """What the rest is divided by, in the same units."""

    pixel_range: float = 1.0
    layout: Layout | None = None
    bgr: bool = False
    normalize_each: bool = False

    notes: tuple[str, ...] = ()
    """What devices do otherwise than the file says, for people."""


def _as_row(value: Any) -> Any:
    """Return a single number as a tuple of it; anything else stays as it is."""
    return (value,) if isinstance(value, int | float) else value


_Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_row), Field(min_length=1)]
"""One number for all channels, or one for each."""


class _Foreign(BaseModel):
    """Base of other projects' files: what is not known is not looked at."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class _Size(_Foreign):
    """A size as Hugging Face has it."""

    height: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1)
    shortest_edge: int | None = Field(None, ge=1)


class _HuggingFaceImages(_Foreign):
    """The file ``preprocessor_config.json`` of networks for images."""

    size: _Size | int | None = None
    crop_size: _Size | int | None = None
    do_resize: bool = True
    do_center_crop: bool = False
    do_rescale: bool = True
    do_normalize: bool = True
    do_flip_channel_order: bool = False
    rescale_factor: float = Field(1 / 255, gt=0)
    rescale_offset: bool = False
    image_mean: _Numbers = (0.5, 0.5, 0.5)
    image_std: _Numbers = (0.5, 0.5, 0.5)
    resample: int | str | None = None


class _HuggingFaceSounds(_Foreign):
    """The file ``preprocessor_config.json`` of networks for sounds."""

    feature_extractor_type: str = ""
    sampling_rate: int | None = Field(None, ge=1)
    feature_size: int = Field(1, ge=1)
    do_normalize: bool = True
    num_mel_bins: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    mean: float = 0.0
    std: float = Field(1.0, gt=0)


class _Timm(_Foreign):
    """The part ``pretrained_cfg`` of timm's ``config.json``."""

    input_size: tuple[int, int, int]
    mean: _Numbers = (0.485, 0.456, 0.406)
    std: _Numbers = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    crop_pct: float = Field(0.875, gt=0)


def read_preprocessing(location: str) -> Preprocessing:
    """Return the preprocessing that a file states, or that of a network of torchvision.

    Args:
        location: ``preprocessor_config.json`` of Hugging Face, ``config.json`` of timm, or ``torchvision:NAME``.

    Raises:
        UsageError: There is no such file or network.
        ConfigError: The file is of neither form, has mistakes, or asks for what devices cannot do.
    """
    if location.startswith(TORCHVISION):
        return torchvision_preprocessing(location.removeprefix(TORCHVISION))
    content = _read(Path(location))
    timm = content.get("pretrained_cfg", content if "input_size" in content else None)
    if isinstance(timm, dict):
        return _from_timm(_parse(_Timm, timm, location))
    extractor = str(content.get("feature_extractor_type", ""))
    if "sampling_rate" in content:
        return _from_sounds(_parse(_HuggingFaceSounds, content, location), location, extractor)
    if {"image_mean", "size", "do_normalize", "do_resize"} & content.keys():
        return _from_images(_parse(_HuggingFaceImages, content, location))
    mistake = (
        "neither preprocessor_config.json of Hugging Face (image_mean, size) nor config.json of timm (pretrained_cfg); "
        "give --size, --mean and --std instead"
    )
    raise ConfigError(location, [mistake])


def torchvision_preprocessing(name: str) -> Preprocessing:
    """Return the preprocessing of the newest weights of a network of torchvision.

    Raises:
        UsageError: It has no such network, or the network none for images.
    """
    from .torchvision_names import torchvision_presets

    preset = torchvision_presets(name)
    size = preset.crop_size[0]
    notes = _resizing_notes(preset.resize_size[0], size, preset.interpolation.value)
    return Preprocessing("image", 3, size, size, mean=tuple(preset.mean), std=tuple(preset.std), notes=notes)


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UsageError: There is no such file.
        ConfigError: It is too large or not a JSON object.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(str(path), [f"{size} bytes, a configuration has at most {_MOST_BYTES}"])
        content = parse_json(read_regular(path))
    except OSError as error:
        raise UsageError(
            f"--preprocessing {path}: cannot be read: {cause(error)}; expected preprocessor_config.json, timm's "
            f"config.json, or {TORCHVISION}NAME"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), [f"invalid JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), [f"is {type(content).__name__}, expected a JSON object"])
    return content


def _parse(kind: type[Any], content: dict[str, Any], location: str) -> Any:
    """Return the parts of a file that are known.

    Raises:
        ConfigError: Some are not of the expected form; all of them are listed.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError(location, mistakes_of(error, kind)) from error


def _from_timm(timm: _Timm) -> Preprocessing:
    """Return the preprocessing of a network of timm."""
    channels, height, width = timm.input_size
    notes = _resizing_notes(math.floor(height / timm.crop_pct), height, timm.interpolation)
    return Preprocessing("image", channels, height, width, mean=timm.mean, std=timm.std, notes=notes)


def _from_images(file: _HuggingFaceImages) -> Preprocessing:
    """Return the preprocessing of a network for images of Hugging Face."""
    resized = _sides(file.size)
    cropped = _sides(file.crop_size) if file.do_center_crop else (None, None)
    height, width = cropped if cropped[0] is not None else resized
    notes = _resizing_notes(resized[0], height, "bilinear" if file.resample is None else file.resample)
    # Hugging Face computes pixel * rescale_factor (- 1), then takes the mean off: in units in which white is 255 times
    # the factor.
    mean = file.image_mean if file.do_normalize else (0.0,)
    std = file.image_std if file.do_normalize else (1.0,)
    if file.do_rescale and file.rescale_offset:
        mean = tuple(value + 1 for value in mean)
    pixel_range = 255 * file.rescale_factor if file.do_rescale else 255.0
    channels = max(len(mean), len(std))
    return Preprocessing(
        "image",
        channels if channels > 1 else None,
        height,
        width,
        mean=mean,
        std=std,
        pixel_range=pixel_range,
        bgr=file.do_flip_channel_order,
        notes=notes,
    )


def _from_sounds(file: _HuggingFaceSounds, location: str, extractor: str) -> Preprocessing:
    """Return the preprocessing of a network for sounds of Hugging Face.

    Raises:
        ConfigError: The network takes spectrograms that devices do not compute.
    """
    rate = "" if file.sampling_rate is None else f" of {file.sampling_rate} samples per second"
    if file.num_mel_bins is not None and file.max_length is not None:
        note = (
            f"the network takes log-mel energies of a recording{rate}; those of the source 'wav:' "
            f"(mels={file.num_mel_bins}) are made otherwise than its own: heads learn from what they get"
        )
        # Hugging Face's extractor for spectrograms divides by twice the std.
        layout: Layout = "NLC"
        result = Preprocessing("window", file.num_mel_bins, length=file.max_length, layout=layout, notes=(note,))
        return replace(result, mean=(file.mean,), std=(2 * file.std,)) if file.do_normalize else result
    if file.feature_size != 1:
        mistake = (
            f"{extractor or 'the extractor'} makes {file.feature_size} features from sound that devices do not "
            "compute; export the network with that step inside"
        )
        raise ConfigError(location, [mistake])
    option = "" if file.sampling_rate is None else f"&rate={file.sampling_rate}"
    note = f"the network takes sound{rate}, -1..1: on a device 'wav:FOLDER?form=signal{option}'"
    return Preprocessing("window", 1, normalize_each=file.do_normalize, notes=(note,))


def _sides(size: _Size | int | None) -> tuple[int | None, int | None]:
    """Return height and width of a size; a short side counts for both."""
    if size is None:
        return None, None
    if isinstance(size, int):
        return size, size
    return size.height or size.shortest_edge, size.width or size.shortest_edge


def _resizing_notes(resized: int | None, used: int | None, interpolation: int | str) -> tuple[str, ...]:
    """Return what a device does otherwise: it resizes the whole picture, bilinearly, and cuts nothing off."""
    notes = []
    if resized is not None and used is not None and resized != used:
        notes.append(
            f"the network's own preprocessing resizes to {resized} and cuts out {used}; devices resize the whole "
            f"picture to {used}"
        )
    if interpolation not in _BILINEAR:
        name = _RESAMPLING.get(interpolation, interpolation) if isinstance(interpolation, int) else interpolation
        notes.append(f"the network's own preprocessing resizes by '{name}'; devices resize bilinearly")
    return tuple(notes)

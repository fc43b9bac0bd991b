"""Local data of a device: a source string in, preprocessed samples out. They never leave the device.

A source is ``kind:where?option=value&option=value``: ``images:photos``, ``npz:day1.npz?inputs=x&labels=y``,
``idx:mnist?split=train``, ``windows:watch.npz?subject=3``, ``digits:rendered?n=500``, ``python:my_data:load``. A kind
is a file in this folder; packages of others join through the entry-point group ``headwater.data``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
from pydantic import ValidationError

from ..config import mistakes_of
from ..errors import ConfigError, DataError, nearest
from ..registry import Registry
from ..task import ImageInput, InputSpec, WindowInput
from . import preprocess
from .base import Options, Raw, Samples
from .splitting import split, standardised

__all__ = ["Options", "Raw", "Samples", "check", "images_from_files", "load", "registry", "split", "standardised"]

_log = logging.getLogger(__name__)
_SHOWN = 20

registry = Registry("data source", __name__, entry_points="headwater.data", besides=("preprocess", "splitting"))


def load(source: str, input: InputSpec | None = None, class_names: Sequence[str] | None = None) -> Samples:  # noqa: A002 - the task's word
    """Samples of ``source``, preprocessed by ``input`` and labelled by ``class_names``; None = what the data suggest.

    Classes are matched by name, so that a device may hold some of the task's classes, in any order.

    Raises:
        UnknownName: no such kind of source.
        ConfigError: unknown or impossible options; all of them are listed.
        DataError: data are missing, empty, unreadable or of another form; everything found wrong is listed.
        MissingCapability: a package that this kind needs is not installed.
    """
    raw = _read(source)
    if not len(raw.items):
        raise DataError(f"{source}: no samples; check the place and the options")
    spec = input if input is not None else _natural(raw)
    inputs, counts, groups = _execute(raw, spec, source)
    labels, names = _match_names(raw, class_names, source)
    labels = np.repeat(labels, counts)
    places = tuple(name for name, count in zip(raw.names, counts, strict=False) for _ in range(count))
    if len(found := np.unique(labels)) == 1:
        _log.warning("one_class source=%s class=%s: a head on these data can only answer that", source, names[found[0]])
    return Samples(inputs, labels, names, spec, groups, places)


def check(source: str) -> None:
    """Return quietly when ``source`` is well formed and its file or folder is there; nothing is read.

    Raises:
        UnknownName: no such kind of source.
        ConfigError: unknown or impossible options.
        DataError: nothing at that place.
    """
    kind, where, given = parse_source(source)
    member = registry.load(kind)
    _options(member.Options, given, source)
    if getattr(member, "NEEDS_PATH", False) and not Path(where).expanduser().exists():
        raise DataError(f"{source}: there is no '{where}'; check the path (relative ones count from where you start)")


def images_from_files(paths: Sequence[str], spec: ImageInput) -> np.ndarray:
    """Inputs (n, *spec.shape) float32 for image files without labels.

    Raises:
        DataError: files that cannot be read; all of them are listed.
        MissingCapability: Pillow is not installed.
    """
    from .images import ImageFiles

    files = ImageFiles([Path(path) for path in paths])
    raw = Raw("image", files, np.zeros(len(paths), np.int64), ("",), names=tuple(paths))
    return _execute(raw, spec, "input")[0]


def parse_source(source: str) -> tuple[str, str, dict[str, str]]:
    """Kind, place and options of a source string.

    Raises:
        ConfigError: not of the form kind:where?option=value.
    """
    kind, _, rest = source.partition(":")
    where, _, query = rest.rpartition("?") if "?" in rest else (rest, "", "")
    kind, _, query = kind.partition("?") if "?" in kind else (kind, "", query)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"data source '{source}'", [f"options '{query}' are not name=value&name=value"]) from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"data source '{source}'", [f"an option occurs twice in '{query}'"])
    return kind, where, options


def _read(source: str) -> Raw:
    kind, where, given = parse_source(source)
    member = registry.load(kind)
    raw: Raw = member.read(where, _options(member.Options, given, source))
    return raw


def _options(model: type[Options], given: Mapping[str, str], source: str) -> Options:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"data source '{source}'", mistakes_of(error, model)) from error


def _natural(raw: Raw) -> InputSpec:
    if raw.natural is not None:
        return raw.natural
    if raw.kind == "image":
        return _natural_image(raw)
    first = np.asarray(raw.items[0])
    if raw.kind == "recording":
        return WindowInput(channels=first.shape[-1])
    return WindowInput(channels=first.shape[0], length=first.shape[1], stride=first.shape[1])


def _natural_image(raw: Raw) -> ImageInput:
    """Channels and size of the first image, sizes limited to 4..224."""
    pixels = preprocess.height_width_channels(raw.items[0])
    height, width = (min(max(side, 4), 224) for side in pixels.shape[:2])
    return ImageInput(channels=1 if pixels.shape[2] == 1 else 3, height=height, width=width)


def _execute(raw: Raw, spec: InputSpec, source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs (m, *shape), how many inputs each item gave (n,), and the groups (m,)."""
    if isinstance(spec, ImageInput):
        return _execute_images(raw, spec, source)
    return _execute_windows(raw, spec, source)


def _execute_images(raw: Raw, spec: ImageInput, source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    if raw.kind != "image":
        raise DataError(
            f"{source} holds {raw.kind}s, the task wants images {spec.shape}; choose data that fit the task"
        )
    inputs = np.empty((len(raw.items), *spec.shape), np.float32)

    def fill(row: int) -> None:
        inputs[row] = preprocess.image_pixels(raw.items[row], spec)

    _for_all(raw, fill, source, "images")
    return preprocess.normalise_images(inputs, spec), np.ones(len(inputs), np.int64), raw.groups


def _execute_windows(raw: Raw, spec: WindowInput, source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    if raw.kind == "image":
        raise DataError(f"{source} holds images, the task wants windows {spec.shape}; choose data that fit the task")
    found: list[np.ndarray] = []

    def fill(row: int) -> None:
        item = np.asarray(raw.items[row])
        found.append(preprocess.cut(item, spec) if raw.kind == "recording" else _whole_window(item, spec))

    _for_all(raw, fill, source, f"{raw.kind}s")
    counts = np.array([len(windows) for windows in found])
    groups = raw.groups if raw.kind == "window" else np.arange(len(found)) if raw.groups is None else raw.groups
    return (
        preprocess.normalise_windows(np.concatenate(found), spec),
        counts,
        None if groups is None else np.repeat(groups, counts).astype(np.int64),
    )


def _whole_window(item: np.ndarray, spec: WindowInput) -> np.ndarray:
    if item.shape != spec.shape:
        raise DataError(f"has shape {item.shape}, expected {spec.shape}")
    if not np.isfinite(item).all():
        raise DataError("holds NaN or infinity")
    return item[None].astype(np.float32)


def _for_all(raw: Raw, fill: Callable[[int], None], source: str, what: str) -> None:
    """Call ``fill`` for each row, and report all rows that failed at once."""
    failed = ((row, _mistake(fill, row)) for row in range(len(raw.items)))
    mistakes = [f"{raw.names[row] if raw.names else row}: {mistake}" for row, mistake in failed if mistake]
    if mistakes:
        more = f"\n  … and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        lines = "\n".join(f"  - {mistake}" for mistake in mistakes[:_SHOWN])
        raise DataError(f"{source}: {len(mistakes)} of {len(raw.items)} {what} cannot be used\n{lines}{more}")


def _mistake(fill: Callable[[int], None], row: int) -> str:
    try:
        fill(row)
    except DataError as error:
        return str(error)
    return ""


def _match_names(raw: Raw, class_names: Sequence[str] | None, source: str) -> tuple[np.ndarray, tuple[str, ...]]:
    if class_names is None:
        return raw.labels.astype(np.int64), raw.class_names
    position = {name: place for place, name in enumerate(class_names)}
    occurring = np.unique(raw.labels)
    if unknown := [raw.class_names[label] for label in occurring if raw.class_names[label] not in position]:
        hints = (f"'{name}' (nearest: {nearest(name, class_names) or 'none'})" for name in unknown[:_SHOWN])
        raise DataError(
            f"{source}: classes {', '.join(hints)} are not the task's; it knows {', '.join(list(class_names)[:50])}"
        )
    table = np.array([position.get(name, -1) for name in raw.class_names], np.int64)
    return table[raw.labels], tuple(class_names)

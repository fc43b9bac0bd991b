"""Which columns of a table hold inputs and labels: those that the user names, or those of usual names or types."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import DataError, MissingCapability
from ..base import near
from ..preprocess import has_pillow
from .cells import array_in, image_in
from .kinds import holds_images, is_list, is_text
from .table import ColumnOptions, Table, listed

INPUT_KEYS = ("image", "img", "x", "input", "inputs")
"""Names of columns, and keys of rows, that hold inputs; the first one that is there counts."""

LABEL_KEYS = ("label", "labels", "y", "target", "class")
"""Names of columns, and keys of rows, that hold labels; the first one that is there counts."""

_OF_ANOTHER_FORM = (ValueError, KeyError, TypeError, RecursionError)
"""Errors of JSON that is damaged, or has not the keys that are looked up."""


@dataclass(frozen=True)
class Form:
    """The form of a column's cells: ``image`` (encoded or a path), or numbers with so many axes."""

    kind: Literal["image", "window", "recording"]
    axes: int = 0
    """The axes of the numbers in a cell; 0 for an encoded image or a path."""

    shape: tuple[int, ...] = ()
    """The shape of flat lists; empty for nested ones, which have their own."""

    def reader(self, table: Table) -> Callable[[Any], Any]:
        """Return the function that makes an item of a cell.

        Raises:
            MissingCapability: The cells are images, and Pillow is not installed.
        """
        if self.axes:
            return lambda cell: array_in(cell, self.shape)
        if not has_pillow():
            raise MissingCapability.package("PIL", "agent", "reading image files")
        return lambda cell: image_in(cell, table.folder)


@dataclass(frozen=True)
class Chosen:
    """The columns that hold inputs and labels; ``unlabelled``: why there are none of labels."""

    input: str
    form: Form
    label: str | None = None
    unlabelled: str = ""


def choose_columns(table: Table, features: Mapping[str, Any], options: ColumnOptions) -> Chosen:
    """Return the columns to read.

    Args:
        table: The table.
        features: What `features_of` returns for it.
        options: What the user says about it.

    Raises:
        DataError: A column is missing or there twice, or its type holds nothing of the kind; all mistakes are listed.
    """
    types = _types_by_column(table)
    mistakes = _mistakes_in_names(types, options)
    # 1. What was not named is a column with the usual name, or the only one of its type.
    input_column = options.input or _usual(types, INPUT_KEYS, _features_with(features, "Image"))
    if input_column is None:
        mistakes.append(f"no column with one of the usual names of inputs ({', '.join(INPUT_KEYS)}); say input=COLUMN")
    class_columns = _features_with(features, "ClassLabel")
    label_column = options.label or _usual(types, LABEL_KEYS, class_columns)
    # 2. The types of the columns that are there.
    for name in (options.group, options.user):
        if name in types:
            _check_name_type(types[name], name, mistakes)
    form = None
    if input_column in types:
        form = _form_of(types[input_column], options, input_column, mistakes)
    if label_column in types:
        _check_label_type(types[label_column], label_column, mistakes)
    if mistakes or input_column is None or form is None:
        raise DataError(f"{table.where}: {'; '.join(mistakes)}; it has the columns {listed(types)}")
    # 3. Data without labels are good enough to predict.
    if label_column is not None:
        return Chosen(input_column, form, label_column)
    which = f", and several of classes: {', '.join(class_columns)}" if class_columns else ""
    reason = (
        f"{table.where}: no column with one of the usual names of labels ({', '.join(LABEL_KEYS)}){which}; it has "
        f"{listed(types)}; say label=COLUMN"
    )
    return Chosen(input_column, form, unlabelled=reason)


def _types_by_column(table: Table) -> dict[str, Any]:
    """Return the type of each column, in their order.

    Raises:
        DataError: Two columns have one name.
    """
    names = table.schema.names
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{table.where}: several columns have the name {listed(repeated)}; rename all but one")
    return dict(zip(names, table.schema.types, strict=True))


def _mistakes_in_names(columns: Collection[str], options: ColumnOptions) -> list[str]:
    """Return a line for each option that names a column that is not there."""
    mistakes = []
    for option in ("input", "label", "group", "user"):
        name = getattr(options, option)
        if name is not None and name not in columns:
            mistakes.append(f"no column '{name}' ({option}={name}){near(name, [*columns])}")
    return mistakes


def _usual(columns: Iterable[str], names: Sequence[str], typed: Sequence[str]) -> str | None:
    """Return the column with one of the usual names, else the only one of the type; None where there is none."""
    by_lower = {column.lower(): column for column in reversed([*columns])}
    for name in names:
        if name in by_lower:
            return by_lower[name]
    return typed[0] if len(typed) == 1 else None


def features_of(schema: Any) -> dict[str, Any]:
    """Return Hugging Face's description of the columns, which its library writes into the schema; empty without one."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except _OF_ANOTHER_FORM:  # by another program: the types of the columns say the rest
        return {}
    if not isinstance(features, dict):
        return {}
    return {name: feature for name, feature in features.items() if name in schema.names}


def _features_with(features: Mapping[str, Any], type_name: str) -> list[str]:
    """Return the columns whose feature has this type, such as ``Image``."""
    typed = []
    for name, feature in features.items():
        if isinstance(feature, dict) and feature.get("_type") == type_name:
            typed.append(name)
    return typed


def _form_of(kind: Any, options: ColumnOptions, name: str, mistakes: list[str]) -> Form | None:
    """Return the form of a column of inputs by its type; None, with a line in ``mistakes``, where it holds none."""
    import pyarrow as pa

    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    # 1. Encoded images and paths.
    if holds_images(storage):
        if options.kind in {None, "image"}:
            return Form("image")
        mistakes.append(f"column '{name}' holds images, and kind={options.kind} was given; leave kind out")
        return None
    # 2. Numbers in lists.
    axes, element = _nesting(storage)
    if not axes or not _is_number(element):
        mistakes.append(f"column '{name}' holds {kind}, expected images as bytes or paths, or lists of numbers")
        return None
    if options.shape and axes > 1:
        stated = ",".join(map(str, options.shape))
        mistakes.append(f"shape={stated} is for flat lists, and column '{name}' has {axes} axes")
        return None
    # 3. Flat lists have the shape of the options, or that of their type where it is one of tensors.
    shape: tuple[int, ...] = ()
    if axes == 1:
        shape = tuple(options.shape or getattr(kind, "shape", ()))
    count = len(shape) or axes
    if count == 1:
        mistakes.append(
            f"column '{name}' holds flat lists; say their shape: shape=HEIGHT,WIDTH for images, or "
            "kind=window&shape=CHANNELS,LENGTH"
        )
        return None
    return _form_of_numbers(options, name, shape or axes, mistakes, is_float=pa.types.is_floating(element))


def _nesting(kind: Any) -> tuple[int, Any]:
    """Return how deep the lists of a type are nested, and the type of what the innermost ones hold."""
    axes = 0
    while is_list(kind):
        kind = kind.value_type
        axes += 1
    return axes, kind


def _is_number(kind: Any) -> bool:
    """Return whether cells of this type are whole or decimal numbers, or true and false."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _form_of_numbers(
    options: ColumnOptions, name: str, form: tuple[int, ...] | int, mistakes: list[str], *, is_float: bool
) -> Form | None:
    """Return the form of numbers; None, with a line in ``mistakes``, where they may be several things.

    Args:
        options: The options, which may say what the numbers are.
        name: The column.
        form: The shape of flat lists, or the axes of nested ones.
        mistakes: Lines about what is wrong.
        is_float: Whether the numbers are decimal ones.
    """
    shape: tuple[int, ...] = ()
    if isinstance(form, int):
        count = form
    else:
        shape = form
        count = len(shape)
    if options.kind is None and is_float and count == 2:
        mistakes.append(f"column '{name}' holds floats with two axes: say kind=image, kind=window or kind=recording")
        return None
    kind = options.kind or "image"
    most = 3 if kind == "image" else 2
    if not 2 <= count <= most:
        expected = "height,width or height,width,channels" if kind == "image" else "two axes"
        mistakes.append(f"column '{name}' has inputs with {count} axes as {kind}, expected {expected}")
        return None
    return Form(kind, count, shape)


def _check_label_type(kind: Any, name: str, mistakes: list[str]) -> None:
    """Add a line to ``mistakes`` where a column's type holds no labels."""
    if not _is_number(kind) and not is_text(kind):
        mistakes.append(f"column '{name}' holds {kind}, expected labels as integers or text")


def _check_name_type(kind: Any, name: str, mistakes: list[str]) -> None:
    """Add a line to ``mistakes`` where a column's type tells no recordings or users apart."""
    import pyarrow as pa

    if not pa.types.is_integer(kind) and not is_text(kind):
        mistakes.append(f"column '{name}' holds {kind}, expected integers or text that tell samples apart")

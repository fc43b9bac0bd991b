"""Columns of Arrow tables as inputs and labels: what the sources ``arrow`` and ``parquet`` share. No data source.

A table has a row for each sample. A column of inputs holds encoded images (bytes, or Hugging Face's struct of bytes and
path), paths of images, or numbers in lists, nested or of a fixed size. A column of labels holds integers or text. Cells
are read one by one when they are asked for, so that a table need not fit into memory. Nothing in a table is executed.

pyarrow comes with the extra ``tables`` and is imported by `import_pyarrow` alone, once a table is read.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from ..core.errors import DataError, HeadwaterError, MissingCapability, cause
from .base import Integers, PartOptions, Raw, Strings, Users, labels_by_name, near
from .preprocess import has_pillow

if TYPE_CHECKING:
    from types import ModuleType

INPUT_KEYS = ("image", "img", "x", "input", "inputs")
"""Names of columns, and keys of rows, that hold inputs; the first one that is there counts."""

LABEL_KEYS = ("label", "labels", "y", "target", "class")
"""Names of columns, and keys of rows, that hold labels; the first one that is there counts."""

_SHOWN = 20
"""Columns or rows that a message lists."""

_OF_ANOTHER_FORM = (ValueError, KeyError, TypeError, RecursionError)
"""Errors of JSON that is damaged, or has not the keys that are looked up."""

_LONGEST_NAME = 256
"""The most characters of a class, a recording or a user."""

_UNLABELLED = -1
"""The label by which Hugging Face's data sets say that a sample has none."""


class ColumnOptions(PartOptions):
    """The options of a table: the meaning of its columns."""

    input: str | None = Field(None, description="column of inputs")
    label: str | None = Field(None, description="column of classes, integers or text; of decimal numbers: targets")
    group: str | None = Field(None, description="column that tells recordings apart; they are held out whole")
    user: str | None = Field(None, description="column of the users who made the samples, for partition users")
    kind: Literal["image", "window", "recording"] | None = Field(
        None, description="what numbers in lists are; default: image for integers or three axes"
    )
    shape: Integers = Field((), description="of one input, where a cell is one flat list")
    class_names: Strings = Field((), description="names of the labels 0, 1, 2 …; default: those in the table")
    split: str | None = Field(None, description="part to take, or all; default: train where there is one")


def import_pyarrow(purpose: str) -> ModuleType:
    """Return the package ``pyarrow``.

    Args:
        purpose: What it is needed for, as a clause of a message.

    Raises:
        MissingCapability: It is not installed.
    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingCapability.package("pyarrow", "tables", purpose) from error


@contextlib.contextmanager
def damage_as_data_error(where: str) -> Iterator[None]:
    """Let an error that reading a damaged table raises be one about data.

    Names and texts that are no UTF-8, and numbers that lead out of the file, are only noticed when they are used, and
    pyarrow has many ways to say so.

    Args:
        where: What is read, with which the message begins.

    Raises:
        DataError: The table is damaged.
    """
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        raise DataError(
            f"{where}: cannot be read: {cause(error)}; it is damaged or was not copied whole: copy or save it again"
        ) from error


class Table(Protocol):
    """A table whose columns are read on demand."""

    where: str
    """The kind and the location of the source, with which messages begin."""

    folder: Path
    """The folder from which paths in cells count."""

    schema: Any
    """The ``pyarrow.Schema``: names and types of the columns."""

    rows: int

    def column(self, name: str) -> Any:
        """Return a whole column as a ``pyarrow.ChunkedArray``, without an extension type.

        Raises:
            DataError: The column is damaged.
        """

    def cells(self, name: str) -> Sequence[Any]:
        """Return the cells of a column as ``pyarrow.Scalar``, each read when it is asked for."""

    def release(self) -> None:
        """Drop from memory what was read of mapped files."""

    def row_name(self, row: int) -> str:
        """Return the name of a row for people, which says in which file it is."""


def read_table(table: Table, options: ColumnOptions) -> Raw:
    """Return the samples of a table.

    Raises:
        DataError: Columns are missing or of types that hold no inputs or labels; all mistakes are listed.
    """
    if not table.rows:
        raise DataError(f"{table.where}: the table has no rows, expected at least one sample")
    features = _features_of(table.schema)
    # 1. Which columns hold what. Every mistake in names and types is reported at once.
    chosen = _choose_columns(table, features, options)
    # 2. A random part has the same rows whatever is read of them; in their order, because files are read forwards.
    rows = np.arange(table.rows)
    if options.n is not None and options.n < table.rows:
        rows = np.sort(np.random.default_rng(options.seed).permutation(table.rows)[: options.n])
    # 3. Columns of one value for each sample are read whole; inputs are not.
    labels = _read_labels(table, chosen.label, features, options, rows)
    groups = None
    if options.group is not None:
        groups = _codes(table, options.group, rows)[0]
    users = None
    if options.user is not None:
        numbers, names = _codes(table, options.user, rows)
        users = Users(numbers, names)
    cells = table.cells(chosen.input)
    items = _Cells(cells, rows, chosen.form.reader(table))
    reason = labels.reason or chosen.unlabelled
    return Raw(
        chosen.form.kind, items, labels.positions, labels.names, groups, unlabelled=reason, targets=labels.targets,
        are_whole=groups is not None, users=users, row_name=lambda row: table.row_name(int(rows[row])),
        release=table.release,
    )  # fmt: skip


def check_table(table: Table, options: ColumnOptions) -> None:
    """Check that a table has columns of inputs and labels; no cell is read.

    Raises:
        DataError: See `read_table`.
    """
    if not table.rows:
        raise DataError(f"{table.where}: the table has no rows, expected at least one sample")
    _choose_columns(table, _features_of(table.schema), options)


class _Cells(Sequence[Any]):
    """The cells of some rows as images or arrays, each made when it is asked for."""

    def __init__(self, cells: Sequence[Any], rows: np.ndarray, read: Callable[[Any], Any]) -> None:
        self._cells = cells
        self._rows = rows
        self._read = read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the item at ``index``; DataError where its cell holds none."""
        if isinstance(index, slice):
            return _Cells(self._cells, self._rows[index], self._read)
        try:
            return self._read(self._cells[int(self._rows[index])])
        except HeadwaterError:
            raise
        # As `damage_as_data_error`; whoever asks for the item names it.
        except Exception as error:
            raise DataError(f"cannot be read: {cause(error)}; the file is damaged, copy or save it again") from error


# --- which columns ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
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
            return lambda cell: _array_in(cell, self.shape)
        if not has_pillow():
            raise MissingCapability.package("PIL", "agent", "reading image files")
        return lambda cell: _image_in(cell, table.folder)


@dataclass(frozen=True)
class _Chosen:
    """The columns that hold inputs and labels; ``unlabelled``: why there are none of labels."""

    input: str
    form: _Form
    label: str | None = None
    unlabelled: str = ""


def _choose_columns(table: Table, features: Mapping[str, Any], options: ColumnOptions) -> _Chosen:
    """Return the columns to read.

    Raises:
        DataError: A column is missing, or its type holds nothing of the kind; all mistakes are listed.
    """
    columns = list(table.schema.names)
    listed = _listed(columns)
    mistakes: list[str] = []
    # 1. Names that were given have to exist.
    for option in ("input", "label", "group", "user"):
        name = getattr(options, option)
        if name is not None and name not in columns:
            mistakes.append(f"no column '{name}' ({option}={name}){near(name, columns)}")
    # 2. What was not given is a column with the usual name, or the only one of its type.
    name_of_input = options.input or _usual(columns, INPUT_KEYS, _features_with(features, "Image"))
    if name_of_input is None:
        mistakes.append(f"no column with one of the usual names of inputs ({', '.join(INPUT_KEYS)}); say input=COLUMN")
    class_columns = _features_with(features, "ClassLabel")
    name_of_label = options.label or _usual(columns, LABEL_KEYS, class_columns)
    # 3. The types of the columns.
    for name in (options.group, options.user):
        if name is not None and name in columns:
            _check_name_type(table.schema.field(name).type, name, mistakes)
    form = None
    if name_of_input is not None and name_of_input in columns:
        form = _form_of(table.schema.field(name_of_input).type, options, name_of_input, mistakes)
    if name_of_label is not None and name_of_label in columns:
        _check_label_type(table.schema.field(name_of_label).type, name_of_label, mistakes)
    if mistakes or name_of_input is None or form is None:
        raise DataError(f"{table.where}: {'; '.join(mistakes)}; it has the columns {listed}")
    if name_of_label is not None:
        return _Chosen(name_of_input, form, name_of_label)
    which = f", and several of classes: {', '.join(class_columns)}" if class_columns else ""
    reason = (
        f"{table.where}: no column with one of the usual names of labels ({', '.join(LABEL_KEYS)}){which}; it has "
        f"{listed}; say label=COLUMN"
    )
    return _Chosen(name_of_input, form, unlabelled=reason)


def _usual(columns: Sequence[str], names: Sequence[str], typed: Sequence[str]) -> str | None:
    """Return the column with one of the usual names, else the only one of the type; None where there is none."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    for name in names:
        if name in by_lower:
            return by_lower[name]
    return typed[0] if len(typed) == 1 else None


def _features_of(schema: Any) -> dict[str, Any]:
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


def _form_of(kind: Any, options: ColumnOptions, name: str, mistakes: list[str]) -> _Form | None:
    """Return the form of a column of inputs by its type; None, with a line in ``mistakes``, where it holds none."""
    import pyarrow as pa

    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    # 1. Encoded images and paths.
    if _holds_images(storage):
        if options.kind in {None, "image"}:
            return _Form("image")
        mistakes.append(f"column '{name}' holds images, and kind={options.kind} was given; leave kind out")
        return None
    # 2. Numbers in lists.
    axes = 0
    while _is_list(storage):
        storage = storage.value_type
        axes += 1
    is_number = pa.types.is_integer(storage) or pa.types.is_floating(storage) or pa.types.is_boolean(storage)
    if not axes or not is_number:
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
    return _form_of_numbers(options, name, shape or axes, mistakes, is_float=pa.types.is_floating(storage))


def _form_of_numbers(
    options: ColumnOptions, name: str, form: tuple[int, ...] | int, mistakes: list[str], *, is_float: bool
) -> _Form | None:
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
    return _Form(kind, count, shape)


def _holds_images(kind: Any) -> bool:
    """Return whether cells of this type are encoded images, paths of images, or structs of both."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        names = {kind.field(number).name for number in range(kind.num_fields)}
        return "bytes" in names
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_text(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_label_type(kind: Any, name: str, mistakes: list[str]) -> None:
    """Add a line to ``mistakes`` where a column's type holds no labels."""
    import pyarrow as pa

    is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
    if not is_number and not _is_text(kind):
        mistakes.append(f"column '{name}' holds {kind}, expected labels as integers or text")


def _check_name_type(kind: Any, name: str, mistakes: list[str]) -> None:
    """Add a line to ``mistakes`` where a column's type tells no recordings or users apart."""
    import pyarrow as pa

    if not pa.types.is_integer(kind) and not _is_text(kind):
        mistakes.append(f"column '{name}' holds {kind}, expected integers or text that tell samples apart")


def without_extension(column: Any) -> Any:
    """Return a ``pyarrow.ChunkedArray`` as what an extension type stores, such as the lists of a tensor; not copied."""
    import pyarrow as pa

    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


# --- columns of one value for each sample ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    """The labels of the chosen rows.

    Attributes:
        positions: Positions (n,) int64 in ``names``.
        names: The classes.
        targets: Numbers to predict (n,), where the column holds decimal numbers.
        reason: Why there are no labels; empty where there are.
    """

    positions: np.ndarray
    names: tuple[str, ...] = ()
    targets: list[float] | None = field(default=None)
    reason: str = ""


def _read_labels(
    table: Table, name: str | None, features: Mapping[str, Any], options: ColumnOptions, rows: np.ndarray
) -> _Labels:
    """Return the labels of the chosen rows; without a column of them all are -1.

    Raises:
        DataError: Cells are empty, or hold numbers that are no class; the rows are listed.
    """
    unknown = np.full(len(rows), _UNLABELLED)
    if name is None:
        return _Labels(unknown)
    import pyarrow as pa

    kind = table.schema.field(name).type
    where = f"{table.where}, column '{name}'"
    if _is_text(kind):
        codes, names = _codes(table, name, rows)
        values: np.ndarray = codes
        if options.class_names:
            values = np.array(names)[codes]
        return _Labels(*labels_by_name(values, options.class_names or names, where))
    values = _numbers(table, name, rows)
    if pa.types.is_floating(kind):
        reason = f"{where} holds decimal numbers, expected integers or text"
        return _Labels(unknown, targets=values.tolist(), reason=reason)
    # Hugging Face's own sets without labels, such as hidden test parts, have -1 in all rows.
    is_unlabelled = values == _UNLABELLED
    if is_unlabelled.all():
        return _Labels(unknown, reason=f"{where}: all rows have the label -1, which means none")
    if is_unlabelled.any():
        raise DataError(
            f"{where}: {int(is_unlabelled.sum())} rows have the label -1, which means none: "
            f"{_rows_listed(table, rows[is_unlabelled])}; leave them out, or say label=COLUMN"
        )
    names = options.class_names or _names_of_classes(features, name)
    return _Labels(*labels_by_name(values, names, where))


def _names_of_classes(features: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the names of a ``ClassLabel``; empty where the column is none."""
    feature = features.get(name)
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
        return ()
    return tuple(names)


def _numbers(table: Table, name: str, rows: np.ndarray) -> np.ndarray:
    """Return the numbers (n,) of a column in the chosen rows: int64, or float64 where it holds decimal ones.

    Raises:
        DataError: Cells are empty; their rows are listed.
    """
    column = table.column(name)
    _check_filled(table, name, column, rows)
    values: np.ndarray = np.asarray(column.to_numpy())[rows]
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def _codes(table: Table, name: str, rows: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the position (n,) int64 of each chosen row's value among the column's values as text, and these, sorted.

    Raises:
        DataError: Cells are empty; their rows are listed.
    """
    import pyarrow as pa

    column = table.column(name)
    _check_filled(table, name, column, rows)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    codes: np.ndarray = np.concatenate([np.asarray(chunk.indices) for chunk in column.chunks])[rows]
    values = column.chunk(0).dictionary.to_pylist()
    used = np.unique(codes)
    long = [code for code in used.tolist() if len(str(values[code])) > _LONGEST_NAME]
    if long:
        raise DataError(
            f"{table.where}, column '{name}': {len(long)} values are longer than {_LONGEST_NAME} characters, the first "
            f"begins '{str(values[long[0]])[:40]}'; expected names, name another column"
        )
    # Integers in the order of numbers, text in that of the alphabet.
    order = sorted(used.tolist(), key=lambda code: values[code])
    positions: np.ndarray = np.full(len(values), -1, np.int64)
    positions[order] = np.arange(len(order))
    return np.asarray(positions[codes]), tuple(str(values[code]) for code in order)


def _check_filled(table: Table, name: str, column: Any, rows: np.ndarray) -> None:
    """Check that a column has a value in each chosen row.

    Raises:
        DataError: Cells are empty; their rows are listed. Or there are not as many as rows.
    """
    if len(column) != table.rows:
        raise DataError(
            f"{table.where}, column '{name}': {len(column)} cells in {table.rows} rows; the file is damaged, copy or "
            "save it again"
        )
    if not column.null_count:
        return
    empty = np.asarray(column.is_null())[rows]
    if empty.any():
        raise DataError(
            f"{table.where}, column '{name}': {int(empty.sum())} cells are empty: {_rows_listed(table, rows[empty])}; "
            "fill them, or leave these rows out"
        )


def _rows_listed(table: Table, rows: np.ndarray) -> str:
    """Return the names of the first rows for a message, and how many more there are."""
    return _listed([table.row_name(int(row)) for row in rows[: _SHOWN + 1]], len(rows))


def _listed(names: Iterable[str], count: int | None = None) -> str:
    """Return the first of ``count`` names for a message, and how many more there are."""
    names = list(names)
    total = len(names) if count is None else count
    text = ", ".join(names[:_SHOWN]) or "none"
    if total > _SHOWN:
        text += f" and {total - _SHOWN} more"
    return text


# --- cells of inputs -------------------------------------------------------------------------------------------------


def _image_in(cell: Any, folder: Path) -> Any:
    """Return the image of a cell, as a Pillow image.

    Raises:
        DataError: The cell is empty, or what it holds cannot be read as an image.
    """
    from .images import decode_image, decoded

    value = cell.as_py()
    path = None
    if isinstance(value, dict):  # Hugging Face's Image: the bytes, or where they are
        path = value.get("path")
        value = value.get("bytes")
    if isinstance(value, bytes):
        return decode_image(io.BytesIO(value))
    path = value if isinstance(value, str) else path
    if not path:
        raise DataError("holds no image: neither bytes nor a path")
    file = folder / path
    if not file.is_file():
        raise DataError(f"names the image '{path}', which is not there; expected a path from {folder}, or bytes")
    return decoded(file)


def _array_in(cell: Any, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of a cell as an array with one axis for each depth of its lists.

    Args:
        cell: A ``pyarrow.ListScalar``.
        shape: The shape of a flat list; empty: that of the lists.

    Raises:
        DataError: The cell, a list or a number in it is empty, the lists have unequal lengths, or not so many numbers.
    """
    if not cell.is_valid:
        raise DataError("holds no input: the cell is empty")
    values = cell.values
    axes = [len(values)]
    while _is_list(values.type):
        axes.append(_common_length(values))
        values = values.flatten()
    if values.null_count:
        raise DataError(f"has {values.null_count} empty numbers; fill them, or leave this row out")
    flat = np.asarray(values.to_numpy(zero_copy_only=False))
    if not flat.size:
        raise DataError("holds an empty list; expected numbers")
    expected = tuple(shape) or tuple(axes)
    if flat.size != np.prod(expected, dtype=np.int64):
        raise DataError(f"has {flat.size} numbers, expected {' x '.join(map(str, expected))}")
    return flat.reshape(expected)


def _common_length(lists: Any) -> int:
    """Return the length that all lists of an array have.

    Raises:
        DataError: A list is empty, or they have unequal lengths.
    """
    if lists.null_count:
        raise DataError("has an empty list in it; fill it, or leave this row out")
    lengths = np.unique(np.asarray(lists.value_lengths()))
    if len(lengths) > 1:
        raise DataError(f"has lists of {lengths[0]} to {lengths[-1]} numbers side by side; expected one length")
    return int(lengths[0]) if len(lengths) else 0


# --- parts of a set --------------------------------------------------------------------------------------------------

_TEST_PARTS = ("test", "validation", "valid", "val", "dev")


def parts_among(splits: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the training and test part among the parts of a set; None where it has not both.

    Without a part called test, that for validation is one.
    """
    if "train" not in splits:
        return None
    for name in _TEST_PARTS:
        if name in splits:
            return "train", name
    return None


def choose_splits(splits: Sequence[str], split: str | None, where: str) -> tuple[str, ...]:
    """Return the parts of a set that an option asks for.

    Args:
        splits: The names of all parts.
        split: The option; None: the training part, or the only one.
        where: The source, for messages.

    Raises:
        DataError: There is no such part, or no default among several.
    """
    if split == "all":
        return tuple(splits)
    if split is None and len(splits) == 1:
        return tuple(splits)
    if split is None and "train" in splits:
        return ("train",)
    listed = _listed(splits)
    if split is None:
        raise DataError(f"{where}: has the parts {listed}; say which one (split=NAME, or split=all)")
    if split not in splits:
        raise DataError(f"{where}: no part '{split}'{near(split, splits)}; it has {listed}, or say split=all")
    return (split,)


def mistakes_in_types(schemas: Iterator[tuple[str, Any]], first: Any) -> list[str]:
    """Return a line for each table whose columns have other names or types than those of the first.

    Args:
        schemas: Name and schema of each further table.
        first: The schema of the first one.
    """
    mistakes = []
    for name, schema in schemas:
        differing = [column for column in first.names if column not in schema.names]
        differing += [
            f"{column} ({schema.field(column).type}, expected {first.field(column).type})"
            for column in first.names
            if column in schema.names and schema.field(column).type != first.field(column).type
        ]
        if differing:
            mistakes.append(f"{name} lacks, or has in another type: {_listed(differing)}")
    return mistakes

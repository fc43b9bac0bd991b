"""Data of the calling program: arrays, data sets and rows become one archive, and clients' rows a partition file.

Samples have one of these forms: a pair ``(X, y)`` of arrays, ``(X, y, X_test, y_test)``, a torch ``Dataset`` of pairs
(x, y), or rows like ``{"image": …, "label": …}``, as Hugging Face's data sets, lists of dictionaries and tables of
pandas have them. X holds images (n, h, w, c) or (n, c, h, w), integers 0..255 or floats 0..1, or windows
(n, channels, length) of floats; y integers or text.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from edge_agent import data
from edge_agent.config import NAME_PATTERN
from edge_agent.data import partition
from edge_agent.data.preprocess import height_width_channels
from edge_agent.errors import DataError, UsageError

from .datasets import Pools, Shares, held_out
from .failures import Failure

log = logging.getLogger(__name__)

_ARCHIVE, _PARTITION = "clients.npz", "clients.json"

IMAGE_KEYS = ("image", "img", "x", "input", "inputs")
"""What the input of a row is called, in the order in which they are looked for."""

LABEL_KEYS = ("label", "labels", "y", "target", "class")
"""What the label of a row is called."""

FORMS = (
    "a pair (X, y) of arrays, (X, y, X_test, y_test), a torch Dataset of pairs (x, y), or rows like "
    "{'image': ..., 'label': ...}"
)

_SHOWN_CLIENTS = 5
"""Clients that a warning names."""

_SHOWN_KEYS = 10
"""Keys of a row that an error names."""

_PARTS = frozenset({"train", "test", "validation", "val"})
"""Names of the parts of one data set, which nobody calls clients by."""


@dataclass(frozen=True)
class Labelled:
    """Inputs (n, ...) and labels (n,)."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Given:
    """What somebody gave as samples: those to train on, and held-out ones where they were given apart."""

    train: Labelled
    test: Labelled | None = None

    @property
    def parts(self) -> tuple[Labelled, ...]:
        """Training samples first, then those that are held out."""
        return (self.train,) if self.test is None else (self.train, self.test)


@dataclass(frozen=True)
class Saved:
    """Where samples were written: a data source, and the file of the partition; empty: no partition was given."""

    source: str
    partition: str = ""


def is_source(given: Any) -> TypeGuard[str | Sequence[str]]:
    """Whether data are given by the name of a source, or by several."""
    if isinstance(given, str):
        return True
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(name, str) for name in given)


def save_clients(samples: Mapping[str, Any], folder: Path, *, test_fraction: float, seed: int) -> Saved:
    """Write a mapping of client -> samples into ``folder``; ``test_fraction`` is held out where no test part is given.

    Raises:
        DataError: names the client and the field.
        UsageError: the mapping has the parts of one data set, not clients.
    """
    if not samples:
        raise DataError("data: the mapping has no client")
    given = {_client_name(name): _read(f"data of client '{name}'", one) for name, one in samples.items()}
    first, known = next(iter(given.items()))
    for name, one in given.items():
        for part in one.parts:
            _check_same_form(f"data of client '{name}', X", part, f"client '{first}'", known.train)
    parts = [part for one in given.values() for part in one.parts]
    source, loaded = _write(folder, parts)
    # Rows lie in the archive in the order of the clients, of each first those to train on.
    shares: Shares = {}
    begin = 0
    for name, one in given.items():
        middle = begin + len(one.train.labels)
        rows = np.arange(begin, middle)
        if one.test is None:
            shares[name] = held_out(loaded.train, rows, test_fraction, seed)
            begin = middle
        else:
            begin = middle + len(one.test.labels)
            shares[name] = rows, np.arange(middle, begin)
    settings = {"test_fraction": test_fraction, "seed": seed}
    return Saved(source, _write_partition(folder, settings, loaded, shares))


def check_is_clients(samples: Mapping[Any, Any], *, has_rule: bool) -> None:
    """Return quietly where a mapping may be client -> samples.

    Args:
        samples: What was given as data.
        has_rule: Whether a partition or a number of clients was given, too, so that the data should be one pool.

    Raises:
        UsageError: It has the parts of one data set, or its columns.
    """
    keys = {name for name in samples if isinstance(name, str)}
    # One key such as "train" may be the name of the only client, unless a rule asks for one pool.
    has_names_of_parts = bool(keys) and keys <= _PARTS
    if has_names_of_parts and (len(keys) > 1 or has_rule):
        raise UsageError(
            f"data: a mapping with the keys {', '.join(sorted(keys))} looks like the parts of one data set, expected "
            "client -> samples; give one part and a rule (data=parts['train'], partition='iid', clients=10), or call "
            "the clients otherwise"
        )
    image = _key_among(keys, IMAGE_KEYS)
    label = _key_among(keys, LABEL_KEYS)
    if image is None or label is None:
        return
    # The samples of a client called "image" are a pair (X, y); a column is none.
    if not isinstance(samples[image], tuple):
        raise UsageError(
            f"data: a mapping with the keys {image} and {label} looks like the columns of one data set, expected "
            f"client -> samples; give data=(columns['{image}'], columns['{label}']) and a rule"
        )


def _key_among(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the key that is one of ``names``, in upper or lower case; of several the one named first."""
    spelling = {key.lower(): key for key in keys}
    for name in names:
        if name in spelling:
            return spelling[name]
    return None


def save_pool(samples: Any, folder: Path) -> Saved:
    """Write samples that a rule, or a mapping of rows, divides among clients into ``folder``.

    Raises:
        DataError: they have none of the forms, or a wrong one; names the field.
        UsageError: they have a test part, which no rule divides.
    """
    given = _read("data", samples)
    if given.test is not None:
        raise UsageError(
            "data: (X, y, X_test, y_test) is for one client, in a mapping client -> samples; a rule divides one pool: "
            "give (X, y), of which each client holds out test_fraction"
        )
    source, _ = _write(folder, [given.train])
    return Saved(source)


def save_rows(
    rows: Mapping[str, Any], source: str, folder: Path, *, base: Path, test_fraction: float, seed: int
) -> str:
    """Write a mapping of client -> rows of ``source`` into ``folder`` as a partition; returns its file.

    Rows are indices (n,), of which ``test_fraction`` is held out, or a pair of indices to train on and to hold out.
    ``base``: relative paths in ``source`` count from here.

    Raises:
        DataError: names the client: its rows are no indices, beyond the samples, or given twice.
    """
    if not rows:
        raise DataError("partition: the mapping has no client")
    loaded = partition.read_pools(source, folder=base)
    pools = Pools(loaded.train, loaded.test)
    tested = len(pools.train if pools.test is None else pools.test)
    shares: Shares = {}
    for name, given in rows.items():
        where = f"partition of client '{_client_name(name)}'"
        if _is_pair_of_rows(given):
            train = _row_array(f"{where}, training rows", given[0], len(pools.train))
            test = _row_array(f"{where}, test rows", given[1], tested, may_be_empty=True)
            if pools.test is None and (common := np.intersect1d(train, test)).size:
                raise DataError(f"{where}: row {common[0]} is to be trained on and held out; leave it out of one")
            shares[name] = train, test
        elif pools.test is not None:
            raise DataError(f"{where}: these data have their own test part; give a pair (training rows, test rows)")
        else:
            shares[name] = held_out(pools.train, _row_array(where, given, len(pools.train)), test_fraction, seed)
    if pools.test is None:
        _warn_of_leaks(shares)
    folder.mkdir(parents=True, exist_ok=True)
    return _write_partition(folder, {"test_fraction": test_fraction, "seed": seed}, pools, shares)


def _warn_of_leaks(shares: Shares) -> None:
    """Log which clients hold out samples that others train on: accuracies on those are too high."""
    training_rows = {name: set(train.tolist()) for name, (train, _) in shares.items()}
    for name, (_, test) in shares.items():
        held_out_rows = set(test.tolist())
        leaked_rows: set[int] = set()
        others = []
        for other, rows in training_rows.items():
            shared_rows = rows & held_out_rows
            if other != name and shared_rows:
                others.append(other)
                leaked_rows |= shared_rows
        if not others:
            continue
        log.warning(
            "held_out_rows_are_trained_on client=%s rows=%d by=%s: its accuracies are too high; give each row to "
            "one client",
            name,
            len(leaked_rows),
            ",".join(others[:_SHOWN_CLIENTS]),
        )


def _is_pair_of_rows(given: Any) -> bool:
    """Whether these are rows to train on and rows to hold out, and not one list of two rows."""
    return isinstance(given, tuple) and len(given) == 2 and all(np.ndim(rows) == 1 for rows in given)


def _row_array(where: str, given: Any, most: int, *, may_be_empty: bool = False) -> np.ndarray:
    """Check indices of rows; returns them (n,) int64."""
    rows = _array(where, given)
    if not rows.size and may_be_empty:
        return np.zeros(0, np.int64)
    if rows.dtype.kind == "b":
        raise DataError(f"{where}: a mask of {rows.size} values; expected indices, np.flatnonzero(mask)")
    if rows.dtype.kind == "O":
        raise DataError(
            f"{where}: {type(given).__name__}, expected indices (n,) of integers as a list or an array, or a pair "
            "(training rows, test rows)"
        )
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
        raise DataError(f"{where}: {rows.dtype} of shape {rows.shape}, expected indices (n,) of integers, at least one")
    if rows.min() < 0 or rows.max() >= most:
        raise DataError(f"{where}: rows {rows.min()} to {rows.max()}, expected 0 to {most - 1}")
    if len(np.unique(rows)) < len(rows):
        raise DataError(f"{where}: a row is given twice; expected each at most once")
    return rows.astype(np.int64)


def _write(folder: Path, parts: Sequence[Labelled]) -> tuple[str, Pools]:
    """Write samples one after another into an archive; returns its source and the samples as they are read again."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = np.concatenate([part.inputs for part in parts])
    np.savez(folder / _ARCHIVE, inputs=inputs, labels=np.concatenate([part.labels for part in parts]))
    is_windows = inputs.ndim == 3 and inputs.dtype.kind == "f"
    source = f"npz:{folder / _ARCHIVE}"
    if is_windows:
        source += "?kind=window"
    return source, Pools(data.load(source, compact=True), None)


def _write_partition(folder: Path, settings: Mapping[str, Any], pools: Pools, shares: Shares) -> str:
    path = folder / _PARTITION
    partition.divided("clients", settings, pools.mark, shares).write(path)
    return str(path)


def _client_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        example = f"'client-{name}'" if isinstance(name, int | np.integer) else "'porch-2'"
        raise DataError(
            f"data of client {name!r}: expected a name of lower-case letters, digits, '-' and '_', such as {example}"
        )
    return name


# --- one client's samples, or a pool ---------------------------------------------------------------------------------


def _read(where: str, given: Any) -> Given:
    """Read samples of any of the forms.

    Raises:
        DataError: they have none of them; ``where`` and the field are named.
    """
    if isinstance(given, tuple) and len(given) == 4:
        train = _labelled(where, given[0], given[1])
        test = _labelled(f"{where}, test part", given[2], given[3])
        _check_same_form(f"{where}, X_test", test, "X", train)
        return Given(train, test)
    is_pair = isinstance(given, tuple | list) and len(given) == 2 and not _is_item(given[0])
    if is_pair:
        return Given(_labelled(where, given[0], given[1]))
    if isinstance(given, np.ndarray):
        raise DataError(f"{where}: an array without labels; expected {FORMS}")
    if isinstance(given, Path):
        raise DataError(
            f"{where}: a path; files are named by the source that reads them, such as 'images:{given}' or 'npz:{given}'"
        )
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # a table, whose rows are no items
        return Given(_stack(where, given.to_dict("records")))
    is_sized = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if not is_sized or isinstance(given, str | bytes | tuple | Mapping):
        hint = "; of a data set without a length give list(dataset)" if hasattr(given, "__iter__") else ""
        raise DataError(f"{where}: {type(given).__name__}, expected {FORMS}{hint}")
    return Given(_stack(where, given))


def _is_item(value: Any) -> bool:
    """Whether this is one sample of a data set: a row, or a pair (x, y)."""
    return isinstance(value, Mapping) or (isinstance(value, tuple) and len(value) == 2)


def _stack(where: str, dataset: Any) -> Labelled:
    """All samples of a data set, whose items are pairs (x, y) or rows.

    Raises:
        DataError: an item cannot be got or has another form; it is named by its index, with the place of the error.
    """
    if not len(dataset):
        raise DataError(f"{where}: the data set is empty; expected at least one sample")
    inputs: list[np.ndarray] = []
    labels: list[str | int] = []
    keys: tuple[Any, Any] = (0, 1)
    for index in range(len(dataset)):
        item_name = f"{where}, item {index}"
        try:
            item = dataset[index]
        # Whatever a user's data set raises is its own matter; the message says where it happened.
        except Exception as error:
            raise DataError(f"{item_name}: {type(error).__name__}: {error}{Failure.of(error).where}") from error
        if index == 0 and isinstance(item, Mapping):
            keys = _keys_of(where, item)
        x, y = _pair_of(item_name, item, keys)
        pixels = _input_array(f"{item_name}, X", x)
        if inputs and pixels.shape != inputs[0].shape:
            raise DataError(
                f"{item_name}, X: shape {pixels.shape}, and item 0 has {inputs[0].shape}; expected items of one shape, "
                "resize them or convert images to one mode"
            )
        inputs.append(pixels)
        labels.append(_label_of(f"{item_name}, y", y))
        if isinstance(labels[-1], str) != isinstance(labels[0], str):
            raise DataError(f"{item_name}, y: {y!r}, and item 0 has {labels[0]!r}; expected text for all, or integers")
    return _labelled(where, np.stack(inputs), np.asarray(labels))


def _pair_of(where: str, item: Any, keys: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return input and label of an item: a pair, or a row that has them under ``keys``."""
    if isinstance(item, Mapping):
        missing = [str(key) for key in keys if key not in item]
        if missing:
            raise DataError(f"{where}: a row without {' and '.join(missing)}; expected the keys of the first row")
        return item[keys[0]], item[keys[1]]
    kind = type(item).__name__
    if isinstance(item, tuple | list):
        if len(item) == 2:
            return item[0], item[1]
        kind += f" of {len(item)}"
    raise DataError(f"{where}: {kind}, expected (x, y), or a row like {{'image': ..., 'label': ...}}")


def _input_array(where: str, value: Any) -> np.ndarray:
    """Return an input as an array; a Pillow image as its pixels, whatever its mode: a palette is no grey image."""
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        return height_width_channels(value)
    return _array(where, value)


def _label_of(where: str, value: Any) -> str | int:
    """Return a label as text or as an integer; numbers that are no integers are no labels."""
    if isinstance(value, str):
        return value
    try:
        return operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {value!r}, expected an integer or text") from error


def _keys_of(where: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Keys of the input and of the label of a row."""
    image = next((key for key in IMAGE_KEYS if key in row), None)
    label = next((key for key in LABEL_KEYS if key in row), None)
    if image is None or label is None:
        shown = ", ".join(str(key) for key in [*row][:_SHOWN_KEYS])
        if len(row) > _SHOWN_KEYS:
            shown += f" and {len(row) - _SHOWN_KEYS} more"
        raise DataError(
            f"{where}: rows with the keys {shown}; expected one of {', '.join(IMAGE_KEYS)} and one "
            f"of {', '.join(LABEL_KEYS)}: rename the columns, or give (X, y)"
        )
    return image, label


def _labelled(where: str, X: Any, y: Any) -> Labelled:  # noqa: N803 - as scikit-learn calls it
    """Check inputs and labels."""
    inputs = _array(f"{where}, X", X)
    labels = _text_of_objects(_array(f"{where}, y", y))
    if inputs.ndim not in {3, 4} or inputs.dtype.kind not in "iufb":
        raise DataError(
            f"{where}, X: {inputs.dtype} of shape {inputs.shape}, expected images (n, h, w, c) or (n, c, h, w), or "
            "windows (n, channels, length)"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise DataError(f"{where}, y: {labels.dtype} of shape {labels.shape}, expected (n,) integers or text")
    if len(inputs) != len(labels):
        raise DataError(f"{where}: X has {len(inputs)} samples, y has {len(labels)}; expected one label for each")
    if not len(inputs):
        raise DataError(f"{where}: X is empty; expected at least one sample")
    if inputs.dtype.kind == "f":
        if not np.isfinite(inputs).all():
            raise DataError(f"{where}, X: holds NaN or infinity")
        if inputs.ndim == 4 and (inputs.min() < 0 or inputs.max() > 1):
            raise DataError(
                f"{where}, X: values from {inputs.min():.3g} to {inputs.max():.3g}, expected floats 0..1 or integers "
                "0..255; the model normalises them itself, see input={'mean': ..., 'std': ...}"
            )
    return Labelled(inputs, labels)


def _text_of_objects(labels: np.ndarray) -> np.ndarray:
    """Return an array of Python objects that are all text as text, as columns of tables are; others as they are."""
    is_text = labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.ravel())
    return labels.astype(str) if is_text and labels.size else labels


def _check_same_form(where: str, part: Labelled, whose: str, known: Labelled) -> None:
    """Check that samples have the form of those that are known."""
    own, expected = part.inputs, known.inputs
    if own.shape[1:] != expected.shape[1:] or own.dtype.kind != expected.dtype.kind:
        raise DataError(
            f"{where}: {own.dtype} of shape {own.shape}; {whose} has {expected.dtype} of shape {expected.shape}, "
            "expected the same form"
        )
    if (part.labels.dtype.kind == "U") != (known.labels.dtype.kind == "U"):
        raise DataError(
            f"{where.rpartition(',')[0]}, y: {part.labels.dtype}; {whose} has {known.labels.dtype}, expected text for "
            "all, or integers"
        )


def _array(where: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: no array ({error})") from error

"""Write samples of the calling program as an archive, and the rows of its clients as a partition file.

Samples have one of these forms: a pair ``(X, y)`` of arrays, ``(X, y, X_test, y_test)``, a torch ``Dataset`` of pairs
(x, y) such as those of torchvision, a ``DataLoader`` of batches of them, or rows like ``{"image": …, "label": …}``, as
in data sets of Hugging Face, lists of dictionaries and tables of pandas. X holds images (n, h, w, c) or (n, c, h, w),
integers 0..255 or floats 0..1, or windows (n, channels, length) of floats; y integers or text.
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
from edge_agent.core.config import NAME_PATTERN
from edge_agent.core.errors import DataError, UsageError
from edge_agent.core.reading import each
from edge_agent.data import partition
from edge_agent.data.columns import INPUT_KEYS, LABEL_KEYS
from edge_agent.data.preprocess import height_width_channels

from .datasets import Pools, Shares, split_rows
from .failures import Failure

log = logging.getLogger(__name__)

_ARCHIVE = "clients.npz"
_PARTITION = "clients.json"

FORMS = (
    "a pair (X, y) of arrays, (X, y, X_test, y_test), a torch Dataset of pairs (x, y), a DataLoader, or rows like "
    "{'image': ..., 'label': ...}"
)

_SHOWN_CLIENTS = 5
"""The number of clients that a warning names."""

_SHOWN_KEYS = 10
"""The number of keys of a row that an error names."""

_PARTS = frozenset({"train", "test", "validation", "val"})
"""Names of the parts of one data set; a mapping with them is not one of clients."""


@dataclass(frozen=True)
class Labelled:
    """Inputs (n, ...) with their labels (n,)."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class LabelledParts:
    """Samples to train on, with held-out ones where the caller gives these separately."""

    train: Labelled
    test: Labelled | None = None

    @property
    def parts(self) -> tuple[Labelled, ...]:
        """The training samples, then the held-out ones where there are any."""
        return (self.train,) if self.test is None else (self.train, self.test)


@dataclass(frozen=True)
class Saved:
    """The data source and the partition file that samples were written to; an empty partition: none was given."""

    source: str
    partition: str = ""


def is_source(given: Any) -> TypeGuard[str | Sequence[str]]:
    """Return whether data are given by the name of a source, or by several."""
    if isinstance(given, str):
        return True
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(name, str) for name in given)


def save_clients(samples: Mapping[str, Any], folder: Path, *, test_fraction: float, seed: int) -> Saved:
    """Write a mapping of client -> samples into ``folder``; ``test_fraction`` is held out where no test part is given.

    Raises:
        DataError: Samples of a client have none of the forms, or another one than the first client's.
        UsageError: The mapping has the parts of one data set, not clients.
    """
    if not samples:
        raise DataError("data: the mapping is empty, expected client -> samples for at least one client")
    # 1. Read the samples of all clients; they have to fit into one archive.
    clients = {_client_name(name): _read(f"data of client '{name}'", raw) for name, raw in samples.items()}
    first_name, first_client = next(iter(clients.items()))
    archived = list[Labelled]()
    for name, client in clients.items():
        for part in client.parts:
            _check_same_form(f"data of client '{name}', X", part, f"client '{first_name}'", first_client.train)
        archived.extend(client.parts)
    source, loaded = _write(folder, archived)
    # 2. The archive has the clients in their order, and of each client the training samples first.
    shares: Shares = {}
    begin = 0
    for name, client in clients.items():
        middle = begin + len(client.train.labels)
        rows = np.arange(begin, middle)
        if client.test is None:
            shares[name] = split_rows(loaded.train, rows, test_fraction, seed)
            begin = middle
        else:
            begin = middle + len(client.test.labels)
            shares[name] = rows, np.arange(middle, begin)
    settings = {"test_fraction": test_fraction, "seed": seed}
    return Saved(source, _write_partition(folder, settings, loaded, shares))


def check_is_clients(samples: Mapping[Any, Any], *, has_rule: bool) -> None:
    """Return quietly where a mapping may be client -> samples.

    Args:
        samples: What was given as data.
        has_rule: Whether a partition or a number of clients was given, too, so that the data should be one pool.

    Raises:
        UsageError: The mapping has the parts of one data set, or its columns.
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
    image = _key_among(keys, INPUT_KEYS)
    label = _key_among(keys, LABEL_KEYS)
    if image is None or label is None:
        return
    # The samples of a client called "image" are a pair (X, y); a column is not a pair.
    if not isinstance(samples[image], tuple):
        raise UsageError(
            f"data: a mapping with the keys {image} and {label} looks like the columns of one data set, expected "
            f"client -> samples; give data=(columns['{image}'], columns['{label}']) and a rule"
        )


def _key_among(keys: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the key that is one of ``names``, in upper or lower case; the first in ``names`` if there are several."""
    spelling = {key.lower(): key for key in keys}
    for name in names:
        if name in spelling:
            return spelling[name]
    return None


def save_pool(samples: Any, folder: Path) -> Saved:
    """Write samples that a rule, or a mapping of rows, divides among clients into ``folder``.

    Raises:
        DataError: The samples have none of the forms.
        UsageError: The samples have a test part, which a rule cannot divide.
    """
    pool = _read("data", samples)
    if pool.test is not None:
        raise UsageError(
            "data: (X, y, X_test, y_test) is for one client, in a mapping client -> samples; a rule divides one pool: "
            "give (X, y), of which each client holds out test_fraction"
        )
    source, _ = _write(folder, [pool.train])
    return Saved(source)


def save_rows(
    rows: Mapping[str, Any], source: str, folder: Path, *, base: Path, test_fraction: float, seed: int
) -> str:
    """Write a mapping of client -> rows of ``source`` as a partition.

    Args:
        rows: Client -> indices (n,), of which ``test_fraction`` is held out, or -> (training rows, test rows).
        source: The data source.
        folder: Where the partition file is written.
        base: The folder from which relative paths in ``source`` count.
        test_fraction: Share of the rows that is held out.
        seed: Seed of that choice.

    Returns:
        The path of the partition file.

    Raises:
        DataError: Rows of a client are not indices of samples, or a row is given twice.
    """
    if not rows:
        raise DataError("partition: the mapping is empty, expected client -> rows for at least one client")
    loaded = partition.read_pools(source, folder=base)
    pools = Pools(loaded.train, loaded.test)
    shares: Shares = {}
    for name, rows_of_client in rows.items():
        where = f"partition of client '{_client_name(name)}'"
        if _is_pair_of_rows(rows_of_client):
            shares[name] = _read_pair_of_rows(where, rows_of_client, pools)
        elif pools.test is not None:
            raise DataError(f"{where}: these data have their own test part; give a pair (training rows, test rows)")
        else:
            training_rows = _row_array(where, rows_of_client, len(pools.train))
            shares[name] = split_rows(pools.train, training_rows, test_fraction, seed)
    if pools.test is None:
        _warn_of_leaks(shares)
    folder.mkdir(parents=True, exist_ok=True)
    return _write_partition(folder, {"test_fraction": test_fraction, "seed": seed}, pools, shares)


def _warn_of_leaks(shares: Shares) -> None:
    """Log which clients hold out samples that other clients train on, because accuracies on these are too high."""
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
    """Return whether ``given`` is a pair (training rows, test rows), not a list of two rows."""
    return isinstance(given, tuple) and len(given) == 2 and all(np.ndim(rows) == 1 for rows in given)


def _read_pair_of_rows(where: str, pair: tuple[Any, Any], pools: Pools) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's training rows and test rows, each as (n,) int64.

    Raises:
        DataError: They are not indices of samples, or have one in common where both are of one pool.
    """
    tested = pools.train if pools.test is None else pools.test
    train = _row_array(f"{where}, training rows", pair[0], len(pools.train))
    test = _row_array(f"{where}, test rows", pair[1], len(tested), may_be_empty=True)
    if pools.test is None:
        common = np.intersect1d(train, test)
        if common.size:
            raise DataError(f"{where}: row {common[0]} is among training and test rows; leave it out of one")
    return train, test


def _row_array(where: str, given: Any, most: int, *, may_be_empty: bool = False) -> np.ndarray:
    """Return row indices as (n,) int64.

    Args:
        where: What the rows are, for messages.
        given: The indices, as a list or an array.
        most: The number of samples, which all indices have to be below.
        may_be_empty: Whether no index is allowed, too.

    Raises:
        DataError: These are no indices of samples, or one of them occurs twice.
    """
    rows = _array(where, given)
    if not rows.size and may_be_empty:
        return np.zeros(0, np.int64)
    _check_are_indices(where, given, rows)
    # Every index names a sample, and no sample is named twice.
    lowest = rows.min()
    highest = rows.max()
    if lowest < 0 or highest >= most:
        raise DataError(f"{where}: rows {lowest} to {highest}, expected 0 to {most - 1}")
    if len(np.unique(rows)) < len(rows):
        raise DataError(f"{where}: a row is given twice, expected each at most once; use numpy.unique(rows)")
    return rows.astype(np.int64)


def _check_are_indices(where: str, given: Any, rows: np.ndarray) -> None:
    """Require that ``rows``, which ``given`` was read as, is a list of at least one integer.

    Raises:
        DataError: It is something else; a mask and a list of other objects have messages of their own.
    """
    kind = rows.dtype.kind
    if kind == "b":
        raise DataError(f"{where}: a mask of {rows.size} values; expected indices, np.flatnonzero(mask)")
    if kind == "O":
        raise DataError(
            f"{where}: {type(given).__name__}, expected indices (n,) of integers as a list or an array, or a pair "
            "(training rows, test rows)"
        )
    if rows.ndim != 1 or kind not in "iu" or not rows.size:
        raise DataError(f"{where}: {rows.dtype} of shape {rows.shape}, expected indices (n,) of integers, at least one")


def _write(folder: Path, parts: Sequence[Labelled]) -> tuple[str, Pools]:
    """Write samples as one archive, and return its data source with the samples read back from it."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = np.concatenate([part.inputs for part in parts])
    np.savez(folder / _ARCHIVE, inputs=inputs, labels=np.concatenate([part.labels for part in parts]))
    is_windows = inputs.ndim == 3 and inputs.dtype.kind == "f"
    source = f"npz:{folder / _ARCHIVE}"
    if is_windows:
        source += "?kind=window"
    return source, Pools(data.load(source, compact=True), None)


def _write_partition(folder: Path, settings: Mapping[str, Any], pools: Pools, shares: Shares) -> str:
    """Write the rows of each client as a partition file, and return its path.

    Args:
        folder: Where the file is written.
        settings: What the rows follow from, such as the seed.
        pools: The samples that the rows are of.
        shares: Client -> its training rows and its test rows.
    """
    path = folder / _PARTITION
    partition.divided("clients", settings, pools.mark, shares).write(path)
    return str(path)


def _client_name(name: Any) -> str:
    """Return the name of a client.

    Raises:
        DataError: It is not a text of the allowed characters.
    """
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        example = f"'client-{name}'" if isinstance(name, int | np.integer) else "'porch-2'"
        raise DataError(
            f"data of client {name!r}: expected a name of lower-case letters, digits, '-' and '_', such as {example}"
        )
    return name


# --- one client's samples, or a pool ---------------------------------------------------------------------------------


def _read(where: str, given: Any) -> LabelledParts:
    """Read samples of any of the forms.

    Raises:
        DataError: The samples have none of the forms; the message begins with ``where``.
    """
    # 1. Arrays with a held-out part, or without one.
    if isinstance(given, tuple) and len(given) == 4:
        return _read_parts(where, given)
    if _is_pair_of_arrays(given):
        X, y = given  # noqa: N806 - as scikit-learn calls it
        return LabelledParts(_check_labelled(where, X, y))
    # 2. What is often given by mistake, with what to do about it.
    if isinstance(given, np.ndarray):
        raise DataError(f"{where}: an array without labels; expected {FORMS}")
    if isinstance(given, Path):
        raise DataError(
            f"{where}: a path; files are named by the source that reads them, such as 'images:{given}' or 'npz:{given}'"
        )
    # 3. A table of pandas: its index gives columns, so it is read as a list of its rows.
    if _is_table(given):
        return LabelledParts(_stack(where, given.to_dict("records")))
    # 4. Batches, which may come from processes and in an order of their own.
    if _is_loader(given):
        return LabelledParts(_read_batches(where, given))
    # 5. A data set whose samples are read by index.
    if _is_data_set(given):
        return LabelledParts(_stack(where, given))
    hint = ""
    if hasattr(given, "__iter__"):
        hint = "; of a data set without a length give list(dataset)"
    raise DataError(f"{where}: {type(given).__name__}, expected {FORMS}{hint}")


def _read_parts(where: str, given: tuple[Any, Any, Any, Any]) -> LabelledParts:
    """Read (X, y, X_test, y_test), both parts of which have to be of one form."""
    X, y, X_test, y_test = given  # noqa: N806 - as scikit-learn calls them
    train = _check_labelled(where, X, y)
    test = _check_labelled(f"{where}, test part", X_test, y_test)
    _check_same_form(f"{where}, X_test", test, "X", train)
    return LabelledParts(train, test)


def _is_pair_of_arrays(given: Any) -> bool:
    """Return whether ``given`` is a pair (X, y), and not a list of two samples."""
    return isinstance(given, tuple | list) and len(given) == 2 and not _is_item(given[0])


def _is_table(given: Any) -> bool:
    """Return whether ``given`` looks like a table of pandas."""
    return hasattr(given, "columns") and hasattr(given, "to_dict")


def _is_loader(given: Any) -> bool:
    """Return whether ``given`` looks like a ``DataLoader`` of torch, which is not imported to find out."""
    has_parts = all(hasattr(given, name) for name in ("dataset", "batch_size", "collate_fn", "__iter__"))
    return has_parts and not hasattr(given, "__getitem__")


def _read_batches(where: str, loader: Any) -> Labelled:
    """Read all batches of a loader, which are pairs (X, y) or mappings with a key of each.

    Raises:
        DataError: A batch cannot be read or has another form; the message has its number, and where that was raised.
    """
    if type(getattr(loader, "sampler", None)).__name__ == "RandomSampler":
        log.warning(
            "loader_shuffles: its samples come in another order each time, so that a seed does not give the same "
            "partition again; give one with shuffle=False"
        )
    parts: list[Labelled] = []
    keys: tuple[Any, Any] = (0, 1)
    batches = iter(loader)
    while True:
        batch_name = f"{where}, batch {len(parts)}"
        try:
            batch = next(batches, None)
        # A user's data set may raise anything; the message says where.
        except Exception as error:
            raise DataError(f"{batch_name}: {type(error).__name__}: {error}{Failure.of(error).where}") from error
        if batch is None:
            break
        if not parts and isinstance(batch, Mapping):
            keys = _find_keys(where, batch)
        part = _check_labelled(batch_name, *_pair_of(batch_name, batch, keys))
        if parts:
            _check_same_form(f"{batch_name}, X", part, "batch 0", parts[0])
        parts.append(part)
    if not parts:
        raise DataError(f"{where}: the loader gives no batches; expected at least one sample")
    inputs = np.concatenate([part.inputs for part in parts])
    return Labelled(inputs, np.concatenate([part.labels for part in parts]))


def _is_data_set(given: Any) -> bool:
    """Return whether ``given`` has samples by index and a length, and is none of the other things that have these."""
    if isinstance(given, str | bytes | tuple | Mapping):
        return False
    return hasattr(given, "__getitem__") and hasattr(given, "__len__")


def _is_item(value: Any) -> bool:
    """Return whether ``value`` is one sample of a data set: a row, or a pair (x, y)."""
    is_row = isinstance(value, Mapping)
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_row or is_pair


def _stack(where: str, dataset: Any) -> Labelled:
    """Read all samples of a data set whose items are pairs (x, y) or rows.

    Raises:
        DataError: An item cannot be read or has another form; the message has its index and where the error was raised.
    """
    if not len(dataset):
        raise DataError(f"{where}: the data set is empty; expected at least one sample")
    inputs: list[np.ndarray] = []
    labels: list[str | int] = []
    keys: tuple[Any, Any] = (0, 1)
    for index in each(range(len(dataset)), "samples"):
        item_name = f"{where}, item {index}"
        try:
            item = dataset[index]
        # A user's data set may raise anything; the message says where.
        except Exception as error:
            raise DataError(f"{item_name}: {type(error).__name__}: {error}{Failure.of(error).where}") from error
        if index == 0 and isinstance(item, Mapping):
            keys = _find_keys(where, item)
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
    return _check_labelled(where, np.stack(inputs), np.asarray(labels))


def _pair_of(where: str, item: Any, keys: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the input and the label of an item, which is a pair, or a row that has them under ``keys``."""
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
    """Return an input as an array; of a Pillow image the pixels, because the values of a palette are not brightness."""
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        return height_width_channels(value)
    return _array(where, value)


def _label_of(where: str, value: Any) -> str | int:
    """Return a label as text or as an integer; other numbers are refused, because 2.5 is not a class."""
    if isinstance(value, str):
        return value
    try:
        return operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {value!r}, expected an integer or text") from error


def _find_keys(where: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the keys of the input and of the label of a row.

    Raises:
        DataError: The row has none of `INPUT_KEYS`, or none of `LABEL_KEYS`.
    """
    image = next(filter(row.__contains__, INPUT_KEYS), None)
    label = next(filter(row.__contains__, LABEL_KEYS), None)
    if image is not None and label is not None:
        return image, label
    shown = ", ".join(str(key) for key in [*row][:_SHOWN_KEYS])
    if len(row) > _SHOWN_KEYS:
        shown += f" and {len(row) - _SHOWN_KEYS} more"
    raise DataError(
        f"{where}: rows with the keys {shown}; expected one of {', '.join(INPUT_KEYS)} and one "
        f"of {', '.join(LABEL_KEYS)}: rename the columns, or give (X, y)"
    )


def _check_labelled(where: str, X: Any, y: Any) -> Labelled:  # noqa: N803 - as scikit-learn calls it
    """Return inputs and labels as arrays after checks of their shape, type and values."""
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
        _check_values(where, inputs)
    return Labelled(inputs, labels)


def _check_values(where: str, inputs: np.ndarray) -> None:
    """Require that floats are finite, and that those of images (n, h, w, c) or (n, c, h, w) are in 0..1."""
    if not np.isfinite(inputs).all():
        raise DataError(f"{where}, X: holds NaN or infinity")
    is_image = inputs.ndim == 4
    if is_image and (inputs.min() < 0 or inputs.max() > 1):
        raise DataError(
            f"{where}, X: values from {inputs.min():.3g} to {inputs.max():.3g}, expected floats 0..1 or integers "
            "0..255; the model normalises them itself, see input={'mean': ..., 'std': ...}"
        )


def _text_of_objects(labels: np.ndarray) -> np.ndarray:
    """Return ``labels`` as an array of text if all are text, as columns of tables are; otherwise unchanged."""
    is_text = labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.ravel())
    return labels.astype(str) if is_text and labels.size else labels


def _check_same_form(where: str, part: Labelled, whose: str, known: Labelled) -> None:
    """Require that samples have the same form as the first client's, so that all fit into one archive."""
    inputs = part.inputs
    expected = known.inputs
    if inputs.shape[1:] != expected.shape[1:] or inputs.dtype.kind != expected.dtype.kind:
        raise DataError(
            f"{where}: {inputs.dtype} of shape {inputs.shape}; {whose} has {expected.dtype} of shape {expected.shape}, "
            "expected the same form"
        )
    if (part.labels.dtype.kind == "U") != (known.labels.dtype.kind == "U"):
        raise DataError(
            f"{where.rpartition(',')[0]}, y: {part.labels.dtype}; {whose} has {known.labels.dtype}, expected text for "
            "all, or integers"
        )


def _array(where: str, value: Any) -> np.ndarray:
    """Return a value as an array; a tensor of torch is copied from its device.

    Raises:
        DataError: The value is not an array of one shape and type.
    """
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: not an array ({error}), expected values of one shape and type") from error

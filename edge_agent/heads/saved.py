"""Heads on disk: ``head.json`` and one file of arrays whose name holds its hash.

The JSON file is written last and names the arrays, so a crash leaves the old pair or the new one. Loading checks
everything and runs no code that came with the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from ..bundle.manifest import EncoderPrecision
from ..core.config import mistakes_of
from ..core.errors import FingerprintMismatch, HeadwaterError, StateError, cause, remedy
from ..core.storage import read_regular, write_atomic
from ..core.task import Frozen, InputSpec, Tensors
from ..personal.batch_norm import OwnNorm
from ..personal.confidence import Confidence
from ..personal.local.models import MAJORITY, HeadInput, LocalFeatures, candidates
from ..wire.tensors import decode, encode, first_non_finite
from . import create, numeric
from .base import Head
from .blend import BlendHead
from .numeric import NumericHead

SCHEMA: Literal[1] = 1
CARD = "head.json"
BEFORE = "before.json"
"""The head that was replaced by the last one, for `restore`; its arrays stay beside it."""
MAX_CARD_BYTES = 1 << 20
MAX_ARRAYS_BYTES = 1 << 28
_CONFIDENCE = "confidence."
_LOCAL = "local."
_LEARNED = "learned"
_SHA256 = r"^[0-9a-f]{64}$"
_ARRAYS_FILE = re.compile(r"arrays-[0-9a-f]{16}\.safetensors")
"""Names of the arrays of heads: no other file in the folder is ours to remove."""


class LocalCard(Frozen):
    """Features of the raw inputs that a head takes: the name of their kind, and the inputs that they are of."""

    name: str = Field(max_length=64)
    input: InputSpec
    split: int = Field(
        0, ge=0, le=1 << 20, description="the encoder's features that come before these; 0: it takes these alone"
    )


class SavedCard(Frozen):
    """The content of ``head.json``."""

    schema_version: Literal[1] = SCHEMA
    head: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$", description="a file name in edge_agent/heads")
    params: dict[str, Any]
    fingerprint: str = Field(pattern=_SHA256, description="of the encoder that it was fitted on")
    variant: str | None = Field(
        None, pattern=_SHA256, description="with its own batch norm: fingerprint of the bundle's variant that has it"
    )
    precision: EncoderPrecision
    answers: Literal["classes", "numbers"] = Field("classes", description="numbers: a head in edge_agent/heads/numeric")
    class_names: tuple[str, ...] = Field(max_length=10_000)
    feature_dim: int = Field(ge=1, le=1 << 20)
    metrics: dict[str, float | int | str | None]
    arrays_file: str = Field(pattern=r"^arrays-[0-9a-f]{16}\.safetensors$", description="beside head.json")
    arrays_sha256: str = Field(pattern=_SHA256)
    local: LocalCard | None = Field(None, description="the model whose features the head takes; none: the encoder's")


@dataclass(frozen=True)
class SavedHead:
    """A fitted head, and what it is bound to. ``norm``: batch norm of its encoder where that is not the bundle's.

    ``takes``: the features that it takes: the encoder's, those of a model without the encoder, or both. ``learned``
    (n,) int64: digests of the samples that it was fitted on (`Samples.row_digests`); None: they were not saved.
    """

    head: Head
    fingerprint: str
    precision: EncoderPrecision
    class_names: tuple[str, ...]
    metrics: Mapping[str, float | int | str | None]
    confidence: Confidence = field(default_factory=Confidence)
    norm: OwnNorm | None = None
    takes: HeadInput = field(default_factory=HeadInput)
    learned: np.ndarray | None = None

    @property
    def title(self) -> str:
        """The name for people: the head's, or that of the model that works without the encoder."""
        return title_of(self.head, self.takes)

    def is_unknown(self, rows: np.ndarray) -> np.ndarray | None:
        """Return which of the ``rows`` (n, d) that the head takes are unlike the training samples, (n,) bool.

        None: there is no rule for that.
        """
        return self.confidence.is_unknown(self.takes.encoded(rows))

    def predict_proba(self, features: np.ndarray) -> np.ndarray:
        """Return class probabilities (n, K) float64 for ``features`` (n, d), calibrated where the head is.

        Raises:
            StateError: The features have another size than those on which the head was fitted.
        """
        return self.confidence(self.head.predict_proba(features))


@dataclass(frozen=True)
class SavedNumeric:
    """A fitted numeric head, and what it is bound to; ``learned`` as of `SavedHead`."""

    head: NumericHead
    fingerprint: str
    precision: EncoderPrecision
    metrics: Mapping[str, float | int | str | None]
    norm: OwnNorm | None = None
    learned: np.ndarray | None = None


_LONGEST_TITLE = 64
"""The longest name of a head that reports of devices hold."""


def title_of(head: Head, takes: HeadInput) -> str:
    """Return the name for people of a head that takes these features."""
    if takes.local is None:
        return head.name
    if not takes.split:
        return takes.local.name
    of_encoder = head.params.first if isinstance(head, BlendHead) else "encoder"
    return f"{head.name} of {of_encoder} and {takes.local.name}"[:_LONGEST_TITLE]


def save(folder: Path, saved: SavedHead) -> Path:
    """Write a fitted head into ``folder``; the one there stays for `restore`. Returns the path of its JSON file.

    Raises:
        StateError: The head has not been fitted, or its arrays hold NaN or infinity.
    """
    confidence = {f"{_CONFIDENCE}{name}": array for name, array in saved.confidence.arrays().items()}
    taken = saved.takes.local
    learned = {} if taken is None else {f"{_LOCAL}{name}": array for name, array in taken.learned.items()}
    local = None if taken is None else LocalCard(name=taken.name, input=taken.input, split=saved.takes.split)
    return _store(folder, saved, {**saved.head.arrays, **confidence, **learned}, saved.class_names, "classes", local)


def save_numeric(folder: Path, saved: SavedNumeric) -> Path:
    """Save a numeric head; see `save`."""
    return _store(folder, saved, saved.head.arrays, (), "numbers")


def _store(
    folder: Path,
    saved: SavedHead | SavedNumeric,
    arrays: Tensors,
    class_names: tuple[str, ...],
    answers: Literal["classes", "numbers"],
    local: LocalCard | None = None,
) -> Path:
    """Write a head and its card into ``folder``, where it becomes the head in use; returns the path of the card.

    Raises:
        StateError: The head has not been fitted, or holds numbers that are not finite.
    """
    head = saved.head
    if not head.arrays:
        raise StateError(f"head '{head.name}' cannot be saved: it has not been fitted")
    broken_array = first_non_finite(head.arrays)
    if broken_array is not None:
        raise StateError(f"head '{head.name}' cannot be saved: array '{broken_array}' holds NaN or infinity")
    norm = {} if saved.norm is None else saved.norm.arrays()
    learned = {} if saved.learned is None else {_LEARNED: saved.learned}
    data = encode({**arrays, **norm, **learned})
    digest = hashlib.sha256(data).hexdigest()
    card = SavedCard(
        head=head.name,
        params=head.params.model_dump(mode="json"),
        fingerprint=saved.fingerprint,
        variant=None if saved.norm is None else saved.norm.variant,
        precision=saved.precision,
        answers=answers,
        class_names=class_names,
        feature_dim=head.feature_dim,
        metrics=dict(saved.metrics),
        local=local,
        arrays_file=f"arrays-{digest[:16]}.safetensors",
        arrays_sha256=digest,
    )
    write_atomic(folder / card.arrays_file, data)
    _replace(folder, json.dumps(card.model_dump(mode="json")).encode())
    return folder / CARD


def _replace(folder: Path, card: bytes) -> None:
    """Make ``card`` the head in use, and the one in use the one before; arrays of neither are removed."""
    new = SavedCard.model_validate_json(card)
    kept = {new.arrays_file}
    with contextlib.suppress(OSError, HeadwaterError):  # a damaged head is not worth returning to
        before = _read_card(folder / CARD)
        _read_arrays(folder, before)
        if before.model_copy(update={"metrics": new.metrics}) != new:  # the same head fitted again is not another one
            write_atomic(folder / BEFORE, _read(folder / CARD, MAX_CARD_BYTES))
    with contextlib.suppress(HeadwaterError):
        kept.add(_read_card(folder / BEFORE).arrays_file)
    write_atomic(folder / CARD, card)
    for path in folder.glob("arrays-*.safetensors"):
        is_of_a_head = _ARRAYS_FILE.fullmatch(path.name) is not None
        if is_of_a_head and path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def adopt(source: Path, folder: Path, fingerprints: Mapping[EncoderPrecision, str]) -> None:
    """Make the head in the folder ``source``, which was fitted on one of these variants, the one in use in ``folder``.

    The one in use stays there for `restore`, and for `load` until its successor's bundle is in use.

    Raises:
        HeadwaterError: See `load`, for the head in ``source``; the head in use stays.
    """
    load(source, fingerprints)
    raw = _read(source / CARD, MAX_CARD_BYTES)
    name = SavedCard.model_validate_json(raw).arrays_file
    write_atomic(folder / name, _read(source / name, MAX_ARRAYS_BYTES))
    _replace(folder, raw)


def settle(folder: Path, fingerprints: Mapping[EncoderPrecision, str]) -> None:
    """Make the head before the last one the one in use where it alone belongs to an encoder with these fingerprints.

    So it is after a kill between a new head and its bundle; a next new head would take the place of the old one.
    """
    with contextlib.suppress(FileNotFoundError, HeadwaterError):
        if load(folder, fingerprints).fingerprint != _read_card(folder / CARD).fingerprint:
            write_atomic(folder / CARD, _read(folder / BEFORE, MAX_CARD_BYTES))


def restore(folder: Path, fingerprints: Mapping[EncoderPrecision, str]) -> SavedHead:
    """Make the head before the last one the one in use, if it belongs to an encoder with these ``fingerprints``.

    The head that was in use takes its place, so that doing it twice changes nothing.

    Raises:
        StateError: There is no earlier head, or its files are damaged.
        FingerprintMismatch: The earlier head was fitted on another encoder.
    """
    if not (folder / BEFORE).is_file():
        raise StateError(f"{folder}: no earlier head to return to")
    result = load(folder, fingerprints, BEFORE)
    _replace(folder, _read(folder / BEFORE, MAX_CARD_BYTES))
    return result


def load(folder: Path, fingerprints: Mapping[EncoderPrecision, str] | None = None, name: str = CARD) -> SavedHead:
    """Return the head in ``folder``; with ``fingerprints``, only if it was fitted on one of these encoder variants.

    Where it was not, and the head before the last one was, it is that one: a device that was killed after it had saved
    the head for a new bundle, and before that bundle was in use, answers with the old pair.

    Raises:
        StateError: The folder holds no head, or its files are damaged.
        TensorsError: The file of arrays is not a tensor container.
        FingerprintMismatch: The head was fitted on the features of another encoder or another variant of it.
        UnknownName: This installation has no head of that name.
        ConfigError: The saved parameters are not parameters of that head.
    """
    try:
        card, arrays, norm, seen = _open(folder, fingerprints, "classes", name)
    except FingerprintMismatch:
        if name == BEFORE or not (folder / BEFORE).is_file():
            raise
        with contextlib.suppress(HeadwaterError):
            return load(folder, fingerprints, BEFORE)
        raise
    split = 0 if card.local is None else card.local.split
    confidence = Confidence.from_arrays(_take_prefixed(arrays, _CONFIDENCE), split or card.feature_dim)
    learned = _take_prefixed(arrays, _LOCAL)
    head = create(card.head, card.params)
    _check_classes(folder, arrays, len(card.class_names))
    head.load(arrays, len(card.class_names), card.feature_dim)
    _probe(folder, card, head.predict_proba)
    takes = HeadInput() if card.local is None else _head_input(folder, card, card.local, learned)
    bound = card.fingerprint, card.precision, card.class_names, card.metrics
    return SavedHead(head, *bound, confidence, norm, takes, seen)


def load_numeric(folder: Path, fingerprints: Mapping[EncoderPrecision, str] | None = None) -> SavedNumeric:
    """Return the numeric head in ``folder``; otherwise as `load`."""
    card, arrays, norm, seen = _open(folder, fingerprints, "numbers")
    head = numeric.create(card.head, card.params)
    head.load(arrays, card.feature_dim)
    _probe(folder, card, head.predict)
    return SavedNumeric(head, card.fingerprint, card.precision, card.metrics, norm, seen)


def is_numeric(folder: Path) -> bool:
    """Return whether the head in ``folder`` answers with numbers.

    Raises:
        StateError: The folder holds no head, or its card is damaged.
    """
    return _read_card(folder / CARD).answers == "numbers"


def class_names(folder: Path) -> tuple[str, ...]:
    """Return classes of the head in ``folder``, in its order; none where there is no head, or a damaged one."""
    try:
        return _read_card(folder / CARD).class_names
    except HeadwaterError:
        return ()


def _open(
    folder: Path,
    fingerprints: Mapping[EncoderPrecision, str] | None,
    answers: Literal["classes", "numbers"],
    name: str = CARD,
) -> tuple[SavedCard, Tensors, OwnNorm | None, np.ndarray | None]:
    card = _read_card(folder / name)
    if card.answers != answers:
        raise StateError(
            f"{folder}: head '{card.head}' answers with {card.answers}, expected {answers}; fit another head"
        )
    if fingerprints is not None and card.precision not in fingerprints:
        raise FingerprintMismatch(
            f"head '{card.head}' was fitted on {card.precision} features, the encoder runs in "
            f"{' or '.join(fingerprints)}; run it in {card.precision}, or fit again"
        )
    variant = card.variant or card.fingerprint
    if fingerprints is not None and variant != fingerprints[card.precision]:
        raise FingerprintMismatch(
            f"head '{card.head}' was fitted on {card.precision} encoder {variant[:16]}…, this bundle's is "
            f"{fingerprints[card.precision][:16]}…; use the bundle that it was fitted with, or fit again"
        )
    arrays = _read_arrays(folder, card)
    norm = None if card.variant is None else OwnNorm.of(arrays, card.variant)
    if norm is not None and norm.fingerprint != card.fingerprint:
        raise StateError(f"{folder}: the batch norm statistics are not those that it was fitted on; fit the head again")
    learned = arrays.pop(_LEARNED, None)
    if learned is not None and (learned.ndim != 1 or learned.dtype != np.int64):
        raise StateError(
            f"{folder}: '{_LEARNED}' is {learned.dtype}{list(learned.shape)}, expected int64 (n,); fit the head again"
        )
    return card, arrays, norm, learned


def _take_prefixed(arrays: Tensors, prefix: str) -> Tensors:
    """Return the arrays whose names begin so, taken out of ``arrays``, by the rest of their names."""
    return {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}


def _head_input(folder: Path, head: SavedCard, card: LocalCard, learned: Tensors) -> HeadInput:
    """Return what a saved head takes that does not take the encoder's features alone.

    Raises:
        StateError: No kind of local model has that name, or its features are not as many as the head takes.
    """
    if card.name != MAJORITY and card.name not in candidates(card.input):
        known_names = ", ".join((MAJORITY, *candidates(card.input)))
        raise StateError(f"{folder}: local model '{card.name}', expected one of {known_names}; fit it again")
    features = LocalFeatures(card.name, card.input, learned)
    try:
        count = features(np.zeros((1, *card.input.shape), np.float32)).shape[1]
    except (ArithmeticError, LookupError, TypeError, ValueError, StateError) as error:
        raise StateError(f"{folder}: the arrays do not fit '{card.name}' ({error}); fit it again") from error
    if card.split + count != head.feature_dim:
        raise StateError(
            f"{folder}: the head takes {head.feature_dim} features, and there are {count} of '{card.name}' and "
            f"{card.split} of the encoder; fit it again"
        )
    return HeadInput(features, card.split)


def _read_card(path: Path) -> SavedCard:
    """Return the card of the head in a folder.

    Raises:
        StateError: There is none, or it is damaged.
    """
    raw = _read(path, MAX_CARD_BYTES)
    try:
        content = json.loads(raw)
        if isinstance(content, dict) and content.get("schema_version", SCHEMA) != SCHEMA:
            version = content["schema_version"]
            raise StateError(f"{path}: head schema {version!r}, this side reads {SCHEMA}; fit the head again")
        return SavedCard.model_validate(content)
    except ValidationError as error:
        raise StateError(f"{path}: {'; '.join(mistakes_of(error, SavedCard))}; fit the head again") from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path}: is not JSON ({error}); fit the head again") from error


def _read_arrays(folder: Path, card: SavedCard) -> Tensors:
    """Return the arrays that belong to a card.

    Raises:
        StateError: They are missing or damaged, or hold NaN or infinity.
    """
    path = folder / card.arrays_file
    data = _read(path, MAX_ARRAYS_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    if digest != card.arrays_sha256:
        raise StateError(f"{path}: SHA-256 {digest[:16]}…, expected {card.arrays_sha256[:16]}…; fit the head again")
    arrays = decode(data)
    name = first_non_finite(arrays)
    if name is not None:
        raise StateError(f"{path}: array '{name}' holds NaN or infinity; fit the head again")
    return arrays


def _check_classes(folder: Path, arrays: Tensors, num_classes: int) -> None:
    classes = arrays.get("only_class", arrays.get("classes"))
    if classes is None or classes.dtype != np.int64 or classes.ndim != 1 or not classes.size:
        raise StateError(f"{folder}: the head does not say which classes it knows; fit the head again")
    if classes[0] < 0 or classes[-1] >= num_classes or (np.diff(classes) <= 0).any():
        raise StateError(
            f"{folder}: classes {classes[:10]}, expected ascending labels below {num_classes}; fit it again"
        )


def _probe(folder: Path, card: SavedCard, predict: Callable[[np.ndarray], np.ndarray]) -> None:
    """One prediction on zeros: arrays of the wrong form fail here and not in service."""
    try:
        with np.errstate(all="ignore"):
            answer = predict(np.zeros((2, card.feature_dim), np.float32))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{folder}: the arrays do not fit head '{card.head}' ({error}); fit it again") from error
    if not np.isfinite(answer).all():
        raise StateError(f"{folder}: head '{card.head}' predicts NaN or infinity; fit it again")


def _read(path: Path, limit: int) -> bytes:
    try:
        data = read_regular(path, limit + 1)
    except OSError as error:
        advice = remedy(error) or "expected a head saved by 'edge-agent fit'"
        raise StateError(f"{path}: cannot be read: {cause(error)}; {advice}") from error
    if len(data) > limit:
        raise StateError(f"{path}: more than {limit} bytes; expected a head saved by 'edge-agent fit'")
    return data

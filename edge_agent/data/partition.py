"""Which client gets which samples: one pool of labelled samples divided among clients, simulated or not.

A partition is a small file with every client's rows, and a hash to compare partitions: another method, another machine
or another day can work on the same split.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from ..core.config import NAME_PATTERN, DataConfig, mistakes_of
from ..core.errors import ConfigError, DataError, StateError, UnknownName, nearest
from ..core.reading import Progress
from ..core.storage import read_json, write_atomic
from ..core.task import Frozen, InputSpec, Task
from . import Samples, load, location, parse_source, part_names, source_kind, split, with_options
from . import check as check_source
from .splitting import numbered_apart

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
FORMAT = 1

Row = Annotated[int, Field(ge=0)]


class Share(Frozen):
    """One client's rows: ``train`` in the training pool, ``test`` in the test pool (or in the only one there is)."""

    train: tuple[Row, ...] = Field(min_length=1)
    test: tuple[Row, ...] = ()


class Pool(Frozen):
    """The mark by which a pool is recognised: the number of its samples, and a hash of their labels."""

    train_samples: int = Field(ge=0)
    test_samples: int | None = Field(None, ge=0, description="None: clients hold back a part of what they get")
    labels_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, train_labels: np.ndarray, test_labels: np.ndarray | None) -> Pool:
        """Return the mark of a pool with these labels."""
        pools = [train_labels]
        test_samples = None
        if test_labels is not None:
            pools.append(test_labels)
            test_samples = len(test_labels)
        digest = hashlib.sha256()
        for labels in pools:
            digest.update(len(labels).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(labels, "<i8").data)
        return cls(train_samples=len(train_labels), test_samples=test_samples, labels_sha256=digest.hexdigest())


class Division(Frozen):
    """Client -> rows, the pool that they are rows of, and by which rule."""

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    rule: str = Field(max_length=64)
    settings: dict[str, Any] = Field(default_factory=dict)
    pool: Pool
    clients: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Share] = Field(min_length=1)

    @property
    def sha256(self) -> str:
        """Hash of pool and rows (hex): equal where all clients get the same samples, by any rule."""
        rows = {name: {"train": share.train, "test": share.test} for name, share in self.clients.items()}
        content = {"pool": self.pool.model_dump(mode="json"), "clients": rows}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Keep it in a file; on disk when this returns."""
        content = {**self.model_dump(mode="json"), "sha256": self.sha256}
        write_atomic(path, json.dumps(content, separators=(",", ":"), sort_keys=True).encode())

    @classmethod
    def read(cls, path: Path) -> Division:
        """Return the division in a file.

        Raises:
            DataError: The file does not exist, is damaged, or was not written by `write`.
        """
        try:
            content = read_json(path)
        except StateError as error:
            raise DataError(f"{path}: damaged, it is not JSON; copy the partition again") from error
        if content is None:
            raise DataError(
                f"{path}: no such file; expected a partition that 'headwater partition' or a simulation has written"
            )
        stated = content.pop("sha256", None)
        try:
            read = cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"partition {path}", mistakes_of(error, cls)[:20]) from error
        if stated != read.sha256:
            raise DataError(
                f"{path}: its rows have the hash {read.sha256[:16]}, the file states {str(stated)[:16]}; copy it again"
            )
        read.check_rows(str(path))
        return read

    def share(self, client: str, where: str) -> Share:
        """Return the rows of one client.

        Raises:
            DataError: The partition has no such client; the message suggests the nearest name.
        """
        result = self.clients.get(client)
        if result is None:
            close = nearest(client, self.clients)
            hint = f"did you mean '{close}'?" if close else f"the first is '{next(iter(self.clients))}'."
            raise DataError(
                f"{where}: no client '{client}' among {len(self.clients)}: {hint} "
                "Name one of them as data.client, or as the id"
            )
        return result

    def check_rows(self, where: str) -> None:
        """Check that all rows lie in their pools and that no client has one of them twice.

        Raises:
            DataError: A client has a row twice, or one that the pool does not have; the message names the first such
                client.
        """
        for name, share in self.clients.items():
            # Where there is one pool alone, a client's training and test rows are rows of it, and none is both.
            if self.pool.test_samples is None:
                fits = _are_rows(share.train + share.test, self.pool.train_samples)
            else:
                fits = _are_rows(share.train, self.pool.train_samples) and _are_rows(share.test, self.pool.test_samples)
            if not fits:
                raise DataError(f"{where}: client '{name}' has a row twice, or one that the pool does not have")

    def check_pool(self, pool: Pool, where: str) -> None:
        """Check that this is the pool that the rows belong to.

        Raises:
            DataError: The pool is not the one for which the partition was made.
        """
        if pool != self.pool:
            raise DataError(
                f"{where}: made for {_described(self.pool)}, the data are {_described(pool)}; "
                "give the data that it was made for"
            )


def _are_rows(rows: Sequence[int], count: int) -> bool:
    """Return whether rows are those of a pool with ``count`` samples, and none is there twice."""
    return max(rows, default=-1) < count and len(set(rows)) == len(rows)


def divided(
    rule: str, settings: Mapping[str, Any], pool: Pool, shares: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Division:
    """Return a division of rows given as arrays (train, test) for each client."""
    clients = {
        name: Share.model_construct(train=tuple(train.tolist()), test=tuple(test.tolist()))
        for name, (train, test) in shares.items()
    }
    return Division.model_construct(
        format=FORMAT, rule=rule, settings=dict(settings), pool=pool, clients=dict(sorted(clients.items()))
    )


def _described(pool: Pool) -> str:
    """Return how many samples a pool has, and the begin of the hash of their labels, for a message."""
    test = "" if pool.test_samples is None else f" and {pool.test_samples} test"
    return f"{pool.train_samples} training{test} samples with labels {pool.labels_sha256[:12]}"


RULES_OF_SEVERAL = ("domains", "subjects")
"""Rules whose pool has one source for each client; they need no partition file."""


@dataclass(frozen=True)
class Pools:
    """All samples, images of 8 bits as such (`Samples.ready`): ``test`` None where each client holds back a part.

    ``owners``: the rows of ``train`` of each client, where the data define them; ``tested``: likewise of ``test``.
    """

    train: Samples
    test: Samples | None = None
    owners: Mapping[str, np.ndarray] = field(default_factory=dict)
    tested: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def mark(self) -> Pool:
        """The mark by which the pools are recognised."""
        test_labels = None if self.test is None else self.test.labels
        return Pool.of(self.train.labels, test_labels)

    def like(self, division: Division) -> Self:
        """Return these pools, without the test samples if no client in ``division`` has any."""
        if division.pool.test_samples is not None:
            return self
        return replace(self, test=None)

    def rows_of(self, share: Share) -> tuple[Samples, Samples]:
        """Return copies of one client's training and test samples."""
        test_pool = self.train if self.test is None else self.test
        train = self.train.take(np.asarray(share.train, np.int64)).ready()
        test = test_pool.take(np.asarray(share.test, np.int64)).ready()
        if self.test is None:
            return train, test
        # Recordings of two pools are different ones, even where their numbers are equal.
        return train, numbered_apart(train, test)


def parts_of(source: str, folder: Path | None = None) -> tuple[str, str] | None:
    """Return the sources of its training and test part, where it keeps them apart and ``source`` names neither.

    A relative path counts from ``folder``.

    Raises:
        UnknownName: No kind of source has this name.
        ConfigError: ``source`` does not have the form kind:where?option=value.
        DataError: The parts cannot be told, because the data are missing or damaged.
    """
    kind, where, options = parse_source(source)
    if "split" not in source_kind(kind).options.model_fields or "split" in options:
        return None
    names = part_names(source, folder)
    if names is None:
        return None
    train, test = (with_options(kind, where, {**options, "split": part}) for part in names)
    return train, test


def read_pools(
    source: str,
    input: InputSpec | None = None,  # noqa: A002 - the task's word
    class_names: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Pools:
    """Return the pools of one source, compact, preprocessed and labelled as `edge_agent.data.load` does.

    Its rows are counted, so that none is left out; ``strict``: files beside them that are not read are an error, too.
    ``progress``: as of `edge_agent.data.load`, for each of the pools.

    Raises:
        HeadwaterError: See `edge_agent.data.load`.
    """
    read = functools.partial(load, folder=folder, compact=True, strict=strict or None, progress=progress)
    parts = parts_of(source, folder)
    if parts is None:
        return Pools(read(source, input, class_names))
    train = read(parts[0], input, class_names)
    return Pools(train, read(parts[1], train.input, train.class_names))


@dataclass(frozen=True)
class Own:
    """The rows of one client in a partition that it shares with others."""

    division: Division
    share: Share
    where: str

    @classmethod
    def of(cls, path: Path, client: str) -> Own:
        """Return a client's rows from the file at ``path``.

        Raises:
            DataError: The file or the client does not exist, or the clients of the rule are sources of their own.
            ConfigError: The file is not a partition.
            StateError: The file is damaged.
        """
        division = Division.read(path)
        if division.rule in RULES_OF_SEVERAL:
            raise DataError(
                f"{path}: partition {division.rule} joins one source for each client; "
                f"give '{client}' its own as data.source, and leave data.partition out"
            )
        return cls(division, division.share(client, str(path)), str(path))

    def taken_from(self, pools: Pools) -> tuple[Samples, Samples]:
        """Return the client's training and test samples.

        Raises:
            DataError: The pools are not those for which the partition was made.
        """
        pools = pools.like(self.division)
        self.division.check_pool(pools.mark, self.where)
        return pools.rows_of(self.share)


def own_samples(
    config: DataConfig,
    client: str,
    spec: InputSpec,
    class_names: Sequence[str] | None,
    *,
    own_classes: bool = False,
    labelled: bool | None = True,
    progress: Progress | None = None,
) -> tuple[Samples, Samples]:
    """Return training and test samples of a device: its rows of a partition, or its source, split or with a test set.

    A partition counts rows, so none of its source is left out, whether ``config.strict`` or not.

    ``own_classes`` (its source may hold others than ``class_names``), ``labelled`` and ``progress``: see
    `edge_agent.data.load`.

    Raises:
        HeadwaterError: See `edge_agent.data.load`; or the partition does not fit the data, or does not know the client;
            or test samples are cut from the same images or recordings as training samples.
    """
    if config.partition is not None:
        assignment = Own.of(config.partition, config.client or client)
        strict = bool(config.strict)
        pools = read_pools(config.source, spec, class_names, folder=config.folder, strict=strict, progress=progress)
        return assignment.taken_from(pools)
    read = functools.partial(load, folder=config.folder, strict=config.strict, labelled=labelled, progress=progress)
    samples = read(config.source, spec, class_names, own_classes=own_classes)
    if config.test is None:
        return split(samples, config.test_fraction, config.seed)
    test_classes = None if class_names is None else samples.class_names
    test = read(config.test, spec, test_classes)
    _check_apart(config, samples, test)
    return samples, numbered_apart(samples, test)


def _check_apart(config: DataConfig, train: Samples, test: Samples) -> None:
    """Check that the test set holds no image and no recording that trains, and warn where some inputs are equal."""
    places = [location(source, config.folder)[:2] for source in (config.source, config.test or "")]
    if places[0] == places[1]:
        common_names = sorted({*train.names} & {*test.names})
        if common_names:
            raise DataError(
                f"{config.test}: {len(common_names)} of its inputs ('{common_names[0]}' …) are also in "
                f"{config.source}; samples that train say nothing about new ones, give others for testing"
            )
    equal = len(_digests_of(train) & _digests_of(test))
    if equal:
        _log.warning(
            "shared_samples test=%s equal=%d of=%d: these inputs are also among the training samples, so accuracies on "
            "them are flattered",
            config.test,
            equal,
            len(test),
        )


def _digests_of(samples: Samples) -> set[bytes]:
    """Return a digest of each input."""
    return {hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in samples.inputs}


def is_collected(config: DataConfig) -> bool:
    """Return whether a device has only samples that were labelled on it (`edge_agent.data.collected`)."""
    return config.source.startswith("collected:")


def check_own(config: DataConfig, client: str, task: Task | None = None, *, own_classes: bool = False) -> None:
    """Check that the data of a device exist and that the partition has it; no sample is read.

    With a task the kind of its inputs has to be that of the data, and so have its classes, but with ``own_classes``.

    Raises:
        HeadwaterError: See `edge_agent.data.check` and `Own.of`.
    """
    # A partition may divide a source whose training and test part are sources of their own.
    parts = None if config.partition is None else parts_of(config.source, config.folder)
    sources = [*parts] if parts else [config.source]
    if config.test:
        sources.append(config.test)
    spec = None if task is None else task.input
    class_names = None if task is None or own_classes or is_collected(config) else task.class_names
    for source in sources:
        check_source(source, config.folder, spec, class_names)
    if config.partition is not None:
        Own.of(config.partition, config.client or client)


Rows = list[np.ndarray]
"""Positions (n,) int64 in a pool, one array for each client. Rules get the labels of the pool, (N,) int64."""

RULES = (
    "dirichlet",
    "domains",
    "fedpac",
    "fedrir_dirichlet",
    "fedrir_pathological",
    "iid",
    "pathological",
    "quantity",
    "subjects",
    "users",
)

ORIGINS = {
    "fedpac": "the generator of FedPAC's authors",
    "fedrir_dirichlet": "the generator of FedRIR's authors",
    "fedrir_pathological": "the generator of FedRIR's authors",
}
"""Rule -> whose generator it is, where it is that of a paper's authors."""

SPLIT_AT_RANDOM = ("fedrir_dirichlet", "fedrir_pathological")
"""Rules that draw a client's test samples from all of its samples alike, and not class by class."""

GROUPS = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
"""FedPAC's dominant classes; client i belongs to group i mod 5."""

IID_SHARE = 0.2
"""FedPAC's s: this share of a client's samples is spread evenly over all classes."""

MAX_DRAWS = 10_000
"""Draws of a Dirichlet partition before it counts as impossible: some seconds."""


def check_rule(name: str) -> None:
    """Check the name of a rule.

    Raises:
        UnknownName: No rule has this name; the message suggests the nearest name.
    """
    if name not in RULES:
        raise UnknownName("partition", name, RULES)


def fedpac(labels: np.ndarray, clients: int, *, size: int = 600, first: int = 0, iid_share: float = IID_SHARE) -> Rows:
    """Divide as FedPAC's official code (Xu, Tong, Huang, ICLR 2023): 20 % even over ten classes, 80 % of three of them.

    ``iid_share`` is another share than 20 %, the s of the paper: 0 leaves each client three classes, 1 is even.
    Nothing is random. A pointer for each class moves through its samples (in the order of the pool, from ``first`` on)
    as clients take from it, and returns to 0 when a request would overrun: then clients share samples.

    Raises:
        DataError: There are not ten classes, or a class has fewer samples than a client takes of it.
    """
    by_class = [np.flatnonzero(labels == label) for label in range(10)]
    if (len(labels) and int(labels.max()) > 9) or not all(map(len, by_class)):
        raise DataError(
            f"partition fedpac: the pool has {len(np.unique(labels))} classes, the rule is made for ten; "
            "use dirichlet, pathological or iid"
        )
    even = int(size * iid_share + 1e-9)
    takes = [[*_spread(range(10), even), *_spread(dominant, size - even)] for dominant in GROUPS]
    for take in takes[:clients]:
        _check_supply(take, size, by_class)
    pointers = [first] * 10
    dealt: Rows = []
    for client in range(clients):
        pieces = []
        for label, count in takes[client % len(GROUPS)]:
            start = pointers[label] if pointers[label] + count <= len(by_class[label]) else 0
            pointers[label] = start + count
            pieces.append(by_class[label][start : start + count])
        rows = np.concatenate(pieces)
        if len(np.unique(rows)) < len(rows):
            raise DataError(
                f"partition fedpac: client {client} of {size} samples would get some of {len(labels)} twice, because a "
                "class is used up between its even and its dominant part; lower --size or use more data"
            )
        dealt.append(rows)
    return dealt


def _check_supply(take: Sequence[tuple[int, int]], size: int, by_class: Sequence[np.ndarray]) -> None:
    """Check that each class has as many samples as a client of ``size`` samples takes of it.

    Args:
        take: What the client takes: (class, count), a class perhaps twice.
        size: The samples of a client.
        by_class: The rows of each class.

    Raises:
        DataError: A class has fewer samples.
    """
    needs: Counter[int] = Counter()
    for label, count in take:
        needs[label] += count
    for label, needed in sorted(needs.items()):
        if needed > len(by_class[label]):
            raise DataError(
                f"partition fedpac: a client of {size} samples takes {needed} of class {label}, the pool has "
                f"{len(by_class[label])}; lower --size or use more data"
            )


def _spread(classes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return (class, count) in the order in which a client takes them; the last class takes the remainder."""
    equal_count = count // len(classes)
    last_count = count - equal_count * (len(classes) - 1)
    return [*((label, equal_count) for label in classes[:-1]), (classes[-1], last_count)]


def dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int = 10) -> Rows:
    """Spread each class over the clients by Dirichlet(alpha), as in FedML (He et al., 2020).

    Clients with N / clients samples get nothing more; the draw is repeated until all clients have ``min_size``.

    Raises:
        DataError: There are too few samples, or no draw gave every client ``min_size`` samples.
    """
    _check_pool(len(labels), clients, min_size, "dirichlet")
    counts = np.bincount(labels)
    smallest = -1
    poorest = 0
    for _ in range(MAX_DRAWS):
        cuts = _draw_cuts(counts, clients, alpha, rng)
        if cuts is None:
            continue
        sizes = np.diff(np.stack(cuts), axis=1).sum(axis=0)
        least = int(sizes.min())
        if least > smallest:
            smallest = least
            poorest = int(sizes.argmin())
        if least >= min_size:
            dealt: list[Rows] = [[] for _ in range(clients)]
            for label, cut in enumerate(cuts):
                rows = rng.permutation(np.flatnonzero(labels == label))
                for client in range(clients):
                    dealt[client].append(rows[cut[client] : cut[client + 1]])
            return [rng.permutation(np.concatenate(pieces)) for pieces in dealt]
    best = "no client could be given samples" if smallest < 0 else f"the best left client {poorest} with {smallest}"
    raise DataError(
        f"partition dirichlet: alpha {alpha:g} with {clients} clients left one with fewer than {min_size} samples in "
        f"each of {MAX_DRAWS} draws ({best}); raise --alpha, lower --min-size or use fewer clients"
    )


def _draw_cuts(counts: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray] | None:
    """Draw the places (clients + 1,) at which the samples of each class are cut; None where a class found no taker."""
    held = np.zeros(clients, np.int64)
    fair = counts.sum() / clients
    cuts = []
    for count in counts:
        shares = rng.dirichlet(np.full(clients, alpha)) * (held < fair)
        total = shares.sum()
        if not total > 0:  # all of a tiny alpha's mass lies on clients that are full, or underflowed
            return None
        inner = (np.cumsum(shares / total) * count).astype(np.int64)[:-1]
        cuts.append(np.concatenate([[0], inner, [count]]))
        held += np.diff(cuts[-1])
    return cuts


def pathological(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, classes_each: int = 2, min_size: int = 10
) -> Rows:
    """Give each client a few classes, as in the code of FedRIR and PFLlib: class 0 goes to the first clients.

    A class goes to the first ceil(clients / classes * classes_each) clients that still need one; all but the last of
    them take a random number between a tenth and the whole of an equal share, the last one takes the rest.

    Raises:
        DataError: A client would get no class or fewer than ``min_size`` samples, or ``classes`` exceeds their number.
    """
    counts = np.bincount(labels)
    if classes_each > len(counts):
        raise DataError(f"partition pathological: {classes_each} classes for each client, the data have {len(counts)}")
    takers = int(np.ceil(clients / len(counts) * classes_each))
    needs = np.full(clients, classes_each)
    dealt = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label, count in enumerate(counts):
        chosen = np.flatnonzero(needs)[:takers]
        if not len(chosen):
            break
        rows = np.flatnonzero(labels == label)
        equal_share = count / len(chosen)
        smallest = int(equal_share / 10)
        sizes = rng.integers(smallest, max(int(equal_share), smallest + 1), len(chosen) - 1)
        for client, piece in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
            dealt[client].append(piece)
        needs[chosen] -= 1
    result = [np.concatenate(pieces) for pieces in dealt]
    least = max(1, min_size)
    short = [client for client, rows in enumerate(result) if len(rows) < least]
    if short:
        raise DataError(
            f"partition pathological: client {short[0]} gets {len(result[short[0]])} samples, expected at least "
            f"{least} ({len(short)} of {clients} clients fall short); use more data, fewer clients or a lower "
            "--min-size"
        )
    return result


FEDRIR_LEAST = 400
"""The least samples of a client in FedRIR's code: a batch of 100 in the quarter that is held out."""


def fedrir_dirichlet(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int | None = None
) -> Rows:
    """Spread each class by Dirichlet(alpha) as in FedRIR's code (Huang et al., WWW 2025): `dirichlet` with its bound.

    The draw is repeated until all clients have 400 samples, or half of an equal share where that is less. Its pool is
    the training and the test part together; a client's samples are split by `split_at_random`.

    Args:
        labels: The labels (N,) of the pool.
        clients: The number of clients.
        alpha: The parameter of the Dirichlet distribution.
        rng: Draws shares and samples.
        min_size: The least samples of a client; None: those of the authors' code.

    Raises:
        DataError: See `dirichlet`.
    """
    if min_size is None:
        min_size = min(FEDRIR_LEAST, len(labels) // clients // 2)
    return dirichlet(labels, clients, alpha, rng, min_size=min_size)


def split_at_random(rows: np.ndarray, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test rows of a client: a random ``share`` of all of them, whatever their classes, is tested.

    Rounded so that the test samples are the more, as in the code of FedRIR; at least one sample trains.
    """
    shuffled = rng.permutation(rows)
    kept = max(1, int((1.0 - share) * len(rows) + 1e-9))
    return shuffled[:kept], shuffled[kept:]


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator, *, size: int | None = None) -> Rows:
    """Return random parts without overlap, of ``size`` samples each or as equal as can be.

    Raises:
        DataError: There are too few samples.
    """
    _check_pool(len(labels), clients, size or 1, "iid")
    rows = rng.permutation(len(labels))
    if size is not None:
        rows = rows[: size * clients]
    return np.array_split(rows, clients)


def alike(train: Rows, train_labels: np.ndarray, test_labels: np.ndarray, rng: np.random.Generator) -> Rows:
    """Return test rows for each client: each class of the test pool in the proportions of its training rows.

    No test sample goes to two clients; a class without training samples has no test samples.

    Args:
        train: The training rows of each client.
        train_labels: The labels (n,) of the training pool.
        test_labels: The labels (m,) of the test pool.
        rng: Draws which test samples of a class a client gets.
    """
    classes = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    held = np.stack([np.bincount(train_labels[rows], minlength=classes) for rows in train]).astype(np.float64)
    dealt: list[Rows] = [[] for _ in train]
    for label in range(classes):
        rows = rng.permutation(np.flatnonzero(test_labels == label))
        total = held[:, label].sum()
        cuts = np.floor(np.cumsum(held[:, label]) / (total or 1.0) * len(rows) + 1e-9).astype(np.int64)
        for client, piece in enumerate(np.split(rows, cuts)[: len(train)]):
            dealt[client].append(piece)
    return [np.concatenate(pieces) for pieces in dealt]


def _check_pool(samples: int, clients: int, each: int, rule: str) -> None:
    """Check that there are samples enough for clients of at least ``each``.

    Raises:
        DataError: There are fewer.
    """
    if samples < clients * each:
        raise DataError(
            f"partition {rule}: {samples} samples for {clients} clients of at least {each}; "
            f"{clients * each} are needed: use more data, fewer clients or smaller parts"
        )


def quantity(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int = 10) -> Rows:
    """Draw sizes by Dirichlet(alpha) over clients, as in "Federated Learning on Non-IID Data Silos" (Li et al., 2022).

    Every sample goes to one client, drawn from all classes alike. Sizes are drawn again until all clients have
    ``min_size``; a small ``alpha`` gives a few clients nearly everything.

    Raises:
        DataError: There are too few samples, or no draw gave every client ``min_size`` samples.
    """
    _check_pool(len(labels), clients, min_size, "quantity")
    smallest = 0
    for _ in range(MAX_DRAWS):
        cuts = np.floor(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(labels) + 1e-9).astype(np.int64)[:-1]
        sizes = np.diff(cuts, prepend=0, append=len(labels))
        smallest = max(smallest, int(sizes.min()))
        if sizes.min() >= min_size:
            return np.split(rng.permutation(len(labels)), cuts)
    raise DataError(
        f"partition quantity: alpha {alpha:g} with {clients} clients left one with fewer than {min_size} samples "
        f"in each of {MAX_DRAWS} draws (the best with {smallest}); raise --alpha, lower --min-size or use fewer clients"
    )

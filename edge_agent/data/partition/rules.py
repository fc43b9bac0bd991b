"""Rules that divide a pool of labelled samples among clients: labels in, rows for each client out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...errors import DataError, UnknownName

Rows = list[np.ndarray]
"""Positions (n,) int64 in a pool, one array for each client."""

RULES = ("dirichlet", "domains", "fedpac", "iid", "pathological", "quantity", "subjects")

GROUPS = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
"""FedPAC's dominant classes; client i belongs to group i mod 5."""

UNIFORM_PERCENT = 20
"""FedPAC's s: this share of a client's samples is spread evenly over all classes."""

MAX_DRAWS = 10_000
"""Draws of a Dirichlet partition before it counts as impossible: some seconds."""


def check_rule(name: str) -> None:
    """Check the name of a rule.

    Raises:
        UnknownName: no such rule; the nearest name is suggested.
    """
    if name not in RULES:
        raise UnknownName("partition", name, RULES)


def fedpac(labels: np.ndarray, clients: int, *, size: int = 600, first: int = 0) -> Rows:
    """FedPAC's split (Xu, Tong, Huang, ICLR 2023, official code): 20 % even over ten classes, 80 % of three of them.

    Nothing is random. A pointer for each class moves through its samples (in the order of the pool, from ``first`` on)
    as clients take from it, and returns to 0 when a request would overrun: then clients share samples.

    Raises:
        DataError: not ten classes, or a class with fewer samples than one client takes of it.
    """
    by_class = [np.flatnonzero(labels == label) for label in range(10)]
    if (len(labels) and int(labels.max()) > 9) or not all(map(len, by_class)):
        raise DataError(
            f"partition fedpac: the pool has {len(np.unique(labels))} classes, the rule is made for ten; "
            "use dirichlet, pathological or iid"
        )
    takes = [_fedpac_takes(GROUPS[client % len(GROUPS)], size) for client in range(clients)]
    _check_enough(by_class, takes[: len(GROUPS)], size)
    pointers = dict.fromkeys(range(10), first)
    dealt = [
        np.concatenate([_take(by_class[label], pointers, label, count) for label, count in take]) for take in takes
    ]
    for client, rows in enumerate(dealt):
        if len(np.unique(rows)) < len(rows):
            raise DataError(
                f"partition fedpac: client {client} of {size} samples would get some of {len(labels)} twice, because a "
                "class is used up between its even and its dominant part; lower --size or use more data"
            )
    return dealt


def _fedpac_takes(dominant: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(class, count) in the order in which a client takes them; the last of each kind takes the remainder."""
    even = size * UNIFORM_PERCENT // 100
    return [*_spread(range(10), even), *_spread(dominant, size - even)]


def _spread(classes: Sequence[int], count: int) -> list[tuple[int, int]]:
    each = count // len(classes)
    last = count - each * (len(classes) - 1)
    return [*((label, each) for label in classes[:-1]), (classes[-1], last)]


def _check_enough(by_class: Sequence[np.ndarray], takes: Iterable[list[tuple[int, int]]], size: int) -> None:
    for take in takes:
        for label in range(10):
            needed = sum(count for wanted, count in take if wanted == label)
            if needed > len(by_class[label]):
                raise DataError(
                    f"partition fedpac: a client of {size} samples takes {needed} of class {label}, the pool has "
                    f"{len(by_class[label])}; lower --size or use more data"
                )


def _take(rows: np.ndarray, pointers: dict[int, int], label: int, count: int) -> np.ndarray:
    if pointers[label] + count > len(rows):
        pointers[label] = 0
    start = pointers[label]
    pointers[label] = start + count
    return rows[start : start + count]


def dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int = 10) -> Rows:
    """Each class is spread over the clients by Dirichlet(alpha), as in FedML (He et al., 2020).

    Clients with N / clients samples get nothing more; the draw is repeated until all clients have ``min_size``.

    Raises:
        DataError: fewer samples than that takes, or no draw gave all clients enough.
    """
    _check_pool(len(labels), clients, min_size, "dirichlet")
    counts = np.bincount(labels)
    smallest, poorest = -1, 0
    for _ in range(MAX_DRAWS):
        cuts = _draw_cuts(counts, clients, alpha, rng)
        if cuts is None:
            continue
        sizes = np.diff(np.stack(cuts), axis=1).sum(axis=0)
        least = int(sizes.min())
        if least > smallest:
            smallest, poorest = least, int(sizes.argmin())
        if least >= min_size:
            return _deal(labels, cuts, clients, rng)
    best = "no client could be given samples" if smallest < 0 else f"the best left client {poorest} with {smallest}"
    raise DataError(
        f"partition dirichlet: alpha {alpha:g} with {clients} clients left one with fewer than {min_size} samples in "
        f"each of {MAX_DRAWS} draws ({best}); raise --alpha, lower --min-size or use fewer clients"
    )


def _draw_cuts(counts: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray] | None:
    """For each class the places (clients + 1,) at which its samples are cut; None where a class found no taker."""
    held, fair, cuts = np.zeros(clients, np.int64), counts.sum() / clients, []
    for count in counts:
        shares = rng.dirichlet(np.full(clients, alpha)) * (held < fair)
        total = shares.sum()
        if not total > 0:  # all of a tiny alpha's mass lies on clients that are full, or underflowed
            return None
        inner = (np.cumsum(shares / total) * count).astype(np.int64)[:-1]
        cuts.append(np.concatenate([[0], inner, [count]]))
        held += np.diff(cuts[-1])
    return cuts


def _deal(labels: np.ndarray, cuts: Sequence[np.ndarray], clients: int, rng: np.random.Generator) -> Rows:
    """Shuffled samples of each class between its cuts."""
    dealt: list[Rows] = [[] for _ in range(clients)]
    for label, cut in enumerate(cuts):
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client in range(clients):
            dealt[client].append(rows[cut[client] : cut[client + 1]])
    return [rng.permutation(np.concatenate(pieces)) for pieces in dealt]


def pathological(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, classes_each: int = 2, min_size: int = 10
) -> Rows:
    """A few classes for each client, as in the code of FedRIR and PFLlib: class 0 goes to the first clients, and so on.

    A class goes to the first ceil(clients / classes * classes_each) clients that still need one; all but the last of
    them take a random number between a tenth and the whole of an equal share, the last one takes the rest.

    Raises:
        DataError: some client would get no class, or fewer than ``min_size`` samples; or more classes than there are.
    """
    counts = np.bincount(labels)
    if classes_each > len(counts):
        raise DataError(f"partition pathological: {classes_each} classes for each client, the data have {len(counts)}")
    takers = int(np.ceil(clients / len(counts) * classes_each))
    needs, dealt = np.full(clients, classes_each), [[np.empty(0, np.int64)] for _ in range(clients)]
    for label, count in enumerate(counts):
        chosen = np.flatnonzero(needs)[:takers]
        if not len(chosen):
            break
        rows, each = np.flatnonzero(labels == label), count / len(chosen)
        sizes = rng.integers(int(each / 10), max(int(each), int(each / 10) + 1), len(chosen) - 1)
        for client, piece in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
            dealt[client].append(piece)
        needs[chosen] -= 1
    return _at_least([np.concatenate(pieces) for pieces in dealt], min_size, "pathological")


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator, *, size: int | None = None) -> Rows:
    """Random parts without overlap, of ``size`` samples each or as equal as can be.

    Raises:
        DataError: fewer samples than that takes.
    """
    _check_pool(len(labels), clients, size or 1, "iid")
    rows = rng.permutation(len(labels))
    return np.array_split(rows if size is None else rows[: size * clients], clients)


def alike(train: Rows, train_labels: np.ndarray, test_labels: np.ndarray, rng: np.random.Generator) -> Rows:
    """Test rows for each client: every class of the test pool in the proportions in which the training rows share it.

    No test sample goes to two clients; a class without training samples has no test samples.
    """
    classes = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    held = np.stack([np.bincount(train_labels[rows], minlength=classes) for rows in train]).astype(np.float64)
    dealt: list[Rows] = [[] for _ in train]
    for label in range(classes):
        rows, total = rng.permutation(np.flatnonzero(test_labels == label)), held[:, label].sum()
        cuts = np.floor(np.cumsum(held[:, label]) / (total or 1.0) * len(rows) + 1e-9).astype(np.int64)
        for client, piece in enumerate(np.split(rows, cuts)[: len(train)]):
            dealt[client].append(piece)
    return [np.concatenate(pieces) for pieces in dealt]


def _check_pool(samples: int, clients: int, each: int, rule: str) -> None:
    if samples < clients * each:
        raise DataError(
            f"partition {rule}: {samples} samples for {clients} clients of at least {each}; "
            f"{clients * each} are needed: use more data, fewer clients or smaller parts"
        )


def _at_least(rows: Rows, least: int, rule: str) -> Rows:
    short = [client for client, mine in enumerate(rows) if len(mine) < max(1, least)]
    if short:
        client = short[0]
        raise DataError(
            f"partition {rule}: client {client} gets {len(rows[client])} samples, expected at least {max(1, least)} "
            f"({len(short)} of {len(rows)} clients fall short); use more data, fewer clients or a lower --min-size"
        )
    return rows


def quantity(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int = 10) -> Rows:
    """Sizes by Dirichlet(alpha) over the clients, as in "Federated Learning on Non-IID Data Silos" (Li et al., 2022).

    Every sample goes to one client, drawn from all classes alike. Sizes are drawn again until all clients have
    ``min_size``; a small ``alpha`` gives a few clients nearly everything.

    Raises:
        DataError: fewer samples than that takes, or no draw gave all clients enough.
    """
    if len(labels) < clients * min_size:
        raise DataError(
            f"partition quantity: {len(labels)} samples for {clients} clients of at least {min_size}; "
            f"{clients * min_size} are needed: use more data or fewer clients"
        )
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

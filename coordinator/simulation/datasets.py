"""The data of a simulation: read once, held once; the rows of a client are copied when its turn comes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import data
from edge_agent.client import Arrays
from edge_agent.core.errors import DataError, UsageError
from edge_agent.core.task import InputSpec, Task, Tensors
from edge_agent.data import Samples, partition
from edge_agent.data.partition import Division
from edge_agent.wire.tensors import decode, pieces

from .plan import CLIENTS, MIN_SIZE, SIZE, Plan

log = logging.getLogger(__name__)

_WEIGHTS = "weights."

Shares = dict[str, tuple[np.ndarray, np.ndarray]]
"""Client -> (training rows, test rows)."""


@dataclass(frozen=True)
class Pools(partition.Pools):
    """All samples, for sessions as arrays, and for processes as bytes that they share.

    ``weights``: what encoders begin with, by their own names; empty: fresh ones from the seed.
    """

    weights: Tensors = field(default_factory=dict)

    def arrays(self, share: partition.Share) -> tuple[Arrays, Arrays]:
        """One client's training and test samples, copied out of the pools."""
        train, test = self.rows_of(share)
        return Arrays(train.inputs, train.labels), Arrays(test.inputs, test.labels)

    def content(self) -> list[bytes | memoryview]:
        """Inputs, labels, recordings and weights as bytes in pieces; `from_memory` takes them joined."""
        parts = {"train": self.train, **({} if self.test is None else {"test": self.test})}
        inputs = {f"{name}.inputs": samples.inputs for name, samples in parts.items()}
        labels = {f"{name}.labels": samples.labels for name, samples in parts.items()}
        groups = {f"{name}.groups": samples.groups for name, samples in parts.items() if samples.groups is not None}
        weights = {_WEIGHTS + name: array for name, array in self.weights.items()}
        return [*pieces({**inputs, **labels, **groups, **weights})]

    @classmethod
    def from_memory(cls, memory: memoryview, task: Task) -> Pools:
        """The pools that are in ``memory``, which is not copied."""
        arrays = decode(memory)
        train, test = (
            Samples(
                arrays[f"{name}.inputs"],
                arrays[f"{name}.labels"],
                task.class_names,
                task.input,
                arrays.get(f"{name}.groups"),
            )
            if f"{name}.inputs" in arrays
            else None
            for name in ("train", "test")
        )
        if train is None:
            raise DataError("internal error: the shared memory holds no training samples; please report this")
        weights = {name.removeprefix(_WEIGHTS): arrays[name] for name in arrays if name.startswith(_WEIGHTS)}
        return cls(train, test, weights=weights)


def prepare(plan: Plan, saved: Path | None = None) -> tuple[Pools, Division, Task]:
    """The data, their partition among clients, and the task. ``saved``: a partition made before.

    Raises:
        UnknownName: no such kind of source.
        ConfigError: unknown or impossible options.
        DataError: data are missing, too few, or not those that a saved partition was made for.
        UsageError: data and partition do not go together.
    """
    path = saved or plan.saved_partition
    known = None if path is None else Division.read(path)
    rule = plan.partition if known is None else known.rule
    sources = _sources(plan, rule, plan.seed if known is None else known.settings.get("seed", plan.seed))
    spec = plan.input_for(data.natural_input(next(iter(sources.values())), folder=plan.folder), rule)
    pools = _load(plan, sources, spec)
    if known is not None:
        pools = pools.like(known)
        known.check_pool(pools.mark, str(path))
    division = known or divide(plan, pools)
    if plan.validation is not None and saved is None:
        division = without_test(division, pools.train, plan)
    if plan.standardise:
        rows = np.unique(np.concatenate([np.asarray(share.train, np.int64) for share in division.clients.values()]))
        spec = data.standardised(pools.train.take(rows))
        pools = _load(plan, sources, spec)
    pools = pools.like(division)
    names = pools.train.class_names
    encoder = plan.encoder_for(spec, rule)
    task = Task(input=spec, class_names=names, encoder=encoder, encoder_params=plan.encoder_params)
    return pools, division, task


def divide(plan: Plan, pools: Pools) -> Division:
    """The plan's rule applied to the pools; the same seed and labels give the same rows.

    Raises:
        DataError: the samples do not suffice.
        UsageError: another number of clients than the data name, or options without effect.
    """
    if pools.test is not None and "test_fraction" in plan.model_fields_set:
        raise UsageError(f"test_fraction = {plan.test_fraction}: these data have their own test part; leave it out")
    if pools.test is None and plan.test_size is not None:
        raise UsageError(f"test_size = {plan.test_size}: these data have no test part; --test-fraction holds one out")
    rng = np.random.default_rng(plan.seed)
    train = _train_rows(plan, pools, rng)
    if pools.test is None:
        shares = {name: held_out(pools.train, rows, plan.test_fraction, plan.seed) for name, rows in train.items()}
    else:
        tests = _test_rows(plan, pools, pools.test, train, rng)
        shares = {name: (rows, test) for (name, rows), test in zip(train.items(), tests, strict=True)}
    if idle := [name for name, (rows, _) in shares.items() if not len(rows)]:
        raise DataError(f"client '{idle[0]}' is left without training samples; use more data or fewer clients")
    if pools.test is None:
        _warn_of_shared_rows(shares)
    return partition.divided(plan.partition, plan.settings(), pools.mark, shares)


def _warn_of_shared_rows(shares: Shares) -> None:
    """Where clients share samples, held-out samples of one may be training samples of another."""
    trained = np.unique(np.concatenate([train for train, _ in shares.values()]))
    known = sum(int(np.isin(test, trained).sum()) for _, test in shares.values())
    if known:
        log.warning(
            "shared_samples known=%d: some clients train on samples that others are scored on, because this partition "
            "gives a sample to several clients; accuracies of a shared model are flattered",
            known,
        )


def _train_rows(plan: Plan, pools: Pools, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Client -> rows, which the data name, or which the rule gives."""
    if pools.owners:
        if plan.clients not in {None, len(pools.owners)}:
            owners = f"the data hold {len(pools.owners)} of them ({', '.join(pools.owners)})"
            raise UsageError(f"--clients {plan.clients} with partition {plan.partition}: {owners}; leave --clients out")
        return dict(pools.owners)
    labels = pools.train.labels
    clients = plan.clients or CLIENTS
    alpha = plan.alpha or 1.0
    min_size = plan.min_size or MIN_SIZE
    rules: dict[str, Callable[[], partition.Rows]] = {
        "fedpac": lambda: partition.fedpac(labels, clients, size=plan.size or SIZE, first=(plan.starts or (0, 0))[0]),
        "dirichlet": lambda: partition.dirichlet(labels, clients, alpha, rng, min_size=min_size),
        "quantity": lambda: partition.quantity(labels, clients, alpha, rng, min_size=min_size),
        "pathological": lambda: partition.pathological(
            labels, clients, rng, classes_each=plan.classes_each or 2, min_size=min_size
        ),
        "iid": lambda: partition.iid(labels, clients, rng, size=plan.size),
    }
    digits = len(str(clients - 1))
    return {f"c{number:0{digits}d}": rows for number, rows in enumerate(rules[plan.partition]())}


def _test_rows(
    plan: Plan, pools: Pools, test: Samples, train: Mapping[str, np.ndarray], rng: np.random.Generator
) -> partition.Rows:
    """Rows that the data name; FedPAC's by the same rule; else with each client's own mixture of classes."""
    if pools.tested:
        return [pools.tested[name] for name in train]
    if plan.partition == "fedpac":
        size = plan.test_size or plan.size or SIZE
        return partition.fedpac(test.labels, len(train), size=size, first=(plan.starts or (0, 0))[1])
    return partition.alike(list(train.values()), pools.train.labels, test.labels, rng)


def without_test(division: Division, train: Samples, plan: Plan) -> Division:
    """The same clients, evaluated on a part of their training samples, to try out settings.

    A client with a single sample keeps it for training.
    """
    share = plan.validation or 0.0
    rows = {name: np.asarray(own.train, np.int64) for name, own in division.clients.items()}
    shares = {name: held_out(train, mine, share, plan.seed) for name, mine in rows.items()}
    _warn_of_shared_rows(shares)
    settings = {**division.settings, "validation": share}
    return partition.divided(division.rule, settings, partition.Pool.of(train.labels, None), shares)


def held_out(samples: Samples, rows: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of one client, split as a device would split its samples."""
    mine = replace(samples, inputs=rows, names=(), labels=samples.labels[rows])
    mine = mine if samples.groups is None else replace(mine, groups=samples.groups[rows])
    train, test = data.split(mine, share, seed)
    return train.inputs, test.inputs


# --- sources ---------------------------------------------------------------------------------------------------------


def _sources(plan: Plan, rule: str, seed: int) -> dict[str, str]:
    """Owner -> source; a single '' where the samples have no owners. ``seed``: that of the partition."""
    if rule == "domains" and len(plan.data) > 1:
        return _distinct({source: source.partition(":")[2] or source for source in plan.data})
    if rule == "domains":
        domains = data.domains(plan.data[0], seed=seed, folder=plan.folder)
        if not domains:
            raise UsageError(
                f"partition domains with '{plan.data[0]}' alone: give --data once for each domain, or 'digits' for its "
                "six styles, or a set of several: digits5, domainnet, officecaltech, officehome or pacs, or "
                "'images:DIR' where DIR has a folder for each domain"
            )
        return _distinct({source: name for name, source in domains.items()})
    if rule == "subjects":
        subjects = data.subjects(plan.data[0], folder=plan.folder)
        if not subjects:
            raise UsageError(
                f"partition subjects with '{plan.data[0]}': expected windows:FILE or ucihar:DIR, without the option "
                "subject and with at least one subject left"
            )
        return {f"subject-{number}": source for number, source in subjects.items()}
    if len(plan.data) > 1:
        raise UsageError(f"{len(plan.data)} data sources for partition {rule}; expected one")
    return {"": plan.data[0]}


def _distinct(requested: Mapping[str, str]) -> dict[str, str]:
    """Distinct client names for sources, from the last part of each path."""
    named: dict[str, str] = {}
    for source, typed in requested.items():
        last = typed.partition("?")[0].rstrip("/").rpartition("/")[2].lower()
        name = re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:50] or "domain"
        while name in named:
            name = f"{name}-{len(named) + 1}"
        named[name] = source
    return named


def _load(plan: Plan, sources: Mapping[str, str], spec: InputSpec) -> Pools:
    if all(map(partition.parts_of, sources.values())) or list(sources) == [""]:
        parts = [partition.read_pools(source, spec, folder=plan.folder) for source in sources.values()]
        if list(sources) == [""]:
            return Pools(parts[0].train, parts[0].test)
        train = [own.train for own in parts]
        test = [own.test for own in parts if own.test is not None]
        return Pools(_joined(train), _joined(test), _rows_of(sources, train), _rows_of(sources, test))
    each = [data.load(source, spec, folder=plan.folder, compact=True) for source in sources.values()]
    return Pools(_joined(each), None, _rows_of(sources, each))


def _rows_of(owners: Iterable[str], each: Sequence[Samples]) -> dict[str, np.ndarray]:
    """Rows of each owner where their samples are joined."""
    ends = np.cumsum([len(samples) for samples in each])
    return {name: np.arange(end - len(own), end) for name, own, end in zip(owners, each, ends, strict=True)}


def _joined(parts: Sequence[Samples]) -> Samples:
    """One after another, labelled by the classes of all of them; groups of two sources stay distinct."""
    names = tuple(sorted({name for samples in parts for name in samples.class_names}, key=_natural_order))
    labels = []
    groups = []
    last = 0
    for samples in parts:
        table = np.array([names.index(name) for name in samples.class_names], np.int64)
        labels.append(table[samples.labels])
        if samples.groups is not None:
            groups.append(samples.groups + last)
            last = int(groups[-1].max(initial=last)) + 1
    is_compact = all(samples.inputs.dtype == np.uint8 for samples in parts)
    inputs = np.concatenate([(samples if is_compact else samples.ready()).inputs for samples in parts])
    joined = np.concatenate(groups) if len(groups) == len(parts) else None
    are_whole = joined is not None and all(samples.are_whole for samples in parts)
    return Samples(inputs, np.concatenate(labels), names, parts[0].input, joined, are_whole=are_whole)


def _natural_order(name: str) -> tuple[int, str]:
    """Numbers as numbers: class 10 after class 9."""
    return (int(name), "") if name.isascii() and name.isdigit() else (1 << 62, name)


def class_counts(division: Division, pools: Pools, class_names: tuple[str, ...]) -> dict[str, Any]:
    """A partition as JSON, with the training and test samples of each class that each client has."""
    tested = pools.train if pools.test is None else pools.test

    def counts(labels: np.ndarray, rows: tuple[int, ...]) -> list[int]:
        return np.bincount(labels[np.asarray(rows, np.int64)], minlength=len(class_names)).tolist()  # type: ignore[no-any-return]

    clients = [
        {"id": name, "train": counts(pools.train.labels, share.train), "test": counts(tested.labels, share.test)}
        for name, share in division.clients.items()
    ]
    used = {row for share in division.clients.values() for row in share.train}
    return {
        "rule": division.rule,
        "settings": division.settings,
        "hash": division.sha256,
        "classes": list(class_names),
        "clients": clients,
        "samples": {"train": len(pools.train), "used": len(used)},
    }

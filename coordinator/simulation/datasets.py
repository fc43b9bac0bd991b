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
from edge_agent.core.large_arrays import is_mapped
from edge_agent.core.task import InputSpec, Task, Tensors
from edge_agent.data import Samples, partition
from edge_agent.data.partition import Division
from edge_agent.wire.tensors import decode, pieces

from .index_tables import RULE as RULE_OF_TABLES
from .index_tables import is_table, read_table
from .plan import CLIENTS, MIN_SIZE, SIZE, Plan
from .users import with_users

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

    @property
    def is_on_disk(self) -> bool:
        """Whether inputs are kept on disk, because they are large."""
        parts = [self.train] if self.test is None else [self.train, self.test]
        return any(is_mapped(samples.inputs) for samples in parts)

    def arrays(self, share: partition.Share) -> tuple[Arrays, Arrays]:
        """Return one client's training and test samples, copied out of the pools."""
        train, test = self.rows_of(share)
        return Arrays(train.inputs, train.labels), Arrays(test.inputs, test.labels)

    def content(self) -> list[bytes | memoryview]:
        """Return inputs, labels, recordings and weights as bytes in pieces; `from_memory` takes them joined."""
        parts = {"train": self.train}
        if self.test is not None:
            parts["test"] = self.test
        inputs = {f"{name}.inputs": samples.inputs for name, samples in parts.items()}
        labels = {f"{name}.labels": samples.labels for name, samples in parts.items()}
        groups = {f"{name}.groups": samples.groups for name, samples in parts.items() if samples.groups is not None}
        weights = {_WEIGHTS + name: array for name, array in self.weights.items()}
        return [*pieces({**inputs, **labels, **groups, **weights})]

    @classmethod
    def from_memory(cls, memory: memoryview, task: Task) -> Pools:
        """Return the pools that are in ``memory``, which is not copied.

        Raises:
            DataError: There are no training samples.
        """
        arrays = decode(memory)
        train = _samples_in(arrays, "train", task)
        test = _samples_in(arrays, "test", task)
        if train is None:
            raise DataError("internal error: the shared memory holds no training samples; please report this")
        weights = {name.removeprefix(_WEIGHTS): arrays[name] for name in arrays if name.startswith(_WEIGHTS)}
        return cls(train, test, weights=weights)


def _samples_in(arrays: Tensors, part: str, task: Task) -> Samples | None:
    """Return the samples of a part that `Pools.content` has named so; None where there are none."""
    if f"{part}.inputs" not in arrays:
        return None
    groups = arrays.get(f"{part}.groups")
    return Samples(arrays[f"{part}.inputs"], arrays[f"{part}.labels"], task.class_names, task.input, groups)


def prepare(plan: Plan, saved: Path | None = None) -> tuple[Pools, Division, Task]:
    """Read the data, divide them among clients, and describe the task.

    Args:
        plan: The settings.
        saved: The file of a partition that was made before; it counts more than the one that the plan names.

    Raises:
        UnknownName: There is no such kind of source.
        ConfigError: Options are unknown or impossible.
        DataError: Data are missing, too few, or not those that a saved partition was made for.
        UsageError: Data and partition do not go together.
    """
    # 1. A saved partition brings its rule and its seed, by which sources of several domains are read.
    path = saved or plan.saved_partition
    existing = None
    table = None
    rule = plan.partition
    seed = plan.seed
    if path is not None and is_table(path):
        table = read_table(path)
        rule = RULE_OF_TABLES
    elif path is not None:
        existing = Division.read(path)
        rule = existing.rule
        seed = existing.settings.get("seed", seed)
    # 2. The samples, in the form in which the encoder takes them.
    sources = _sources(plan, rule, seed)
    spec = plan.input_for(data.natural_input(next(iter(sources.values())), folder=plan.folder), rule)
    pools = _load(plan, sources, spec, rule)
    # 3. Who gets which rows.
    if table is not None:
        existing = table.divide(pools)
    if existing is not None:
        pools = pools.like(existing)
        existing.check_pool(pools.mark, str(path))
    division = existing or divide(plan, pools)
    if plan.validation is not None and saved is None:
        division = without_test(division, pools.train, plan)
    # 4. Means and deviations are of training rows alone, so that these have to be known before.
    if plan.standardise:
        rows = np.unique(np.concatenate([np.asarray(share.train, np.int64) for share in division.clients.values()]))
        spec = data.standardised(pools.train.take(rows))
        pools = _load(plan, sources, spec, rule)
    pools = pools.like(division)
    names = pools.train.class_names
    encoder = plan.encoder_for(spec, rule)
    task = Task(input=spec, class_names=names, encoder=encoder, encoder_params=plan.encoder_params)
    task = task.with_peft(plan.peft, plan.peft_params)
    return pools, division, task


def divide(plan: Plan, pools: Pools) -> Division:
    """Apply the plan's rule to the pools; the same seed and labels give the same rows.

    Raises:
        DataError: The samples do not suffice.
        UsageError: The data name another number of clients, or options have no effect.
    """
    if pools.test is not None and "test_fraction" in plan.model_fields_set:
        raise UsageError(f"test_fraction = {plan.test_fraction}: these data have their own test part; leave it out")
    if pools.test is None and plan.test_size is not None:
        raise UsageError(f"test_size = {plan.test_size}: these data have no test part; --test-fraction holds one out")
    # The generator's draws are in this order for every rule, so that a seed gives the same partition.
    rng = np.random.default_rng(plan.seed)
    train = _train_rows(plan, pools, rng)
    if plan.rule in partition.SPLIT_AT_RANDOM:
        shares = _split_at_random(plan, pools, train, rng)
    elif pools.test is None:
        shares = {name: split_rows(pools.train, rows, plan.test_fraction, plan.seed) for name, rows in train.items()}
    else:
        tests = _test_rows(plan, pools, pools.test, train, rng)
        shares = {name: (rows, test) for (name, rows), test in zip(train.items(), tests, strict=True)}
    for name, (rows, _) in shares.items():
        if not len(rows):
            raise DataError(f"client '{name}' is left without training samples; use more data or fewer clients")
    if pools.test is None:
        _warn_of_shared_rows(shares)
    return partition.divided(plan.partition, plan.settings(), pools.mark, shares)


def _split_at_random(plan: Plan, pools: Pools, train: Mapping[str, np.ndarray], rng: np.random.Generator) -> Shares:
    """Return training and test rows of each client by `partition.split_at_random`.

    Raises:
        UsageError: The data have a test part of their own, or are cut from recordings.
    """
    if pools.test is not None:
        raise UsageError(
            f"partition {plan.partition} divides the training and the test part together: give both as one pool, "
            f"for example {plan.data[0]}?split=all"
        )
    if pools.train.groups is not None:
        raise UsageError(
            f"partition {plan.partition} draws test samples at random, and these are cut from recordings: pieces of "
            "one would train and be tested; choose dirichlet or pathological"
        )
    return {name: partition.split_at_random(rows, plan.test_fraction, rng) for name, rows in train.items()}


def _warn_of_shared_rows(shares: Shares) -> None:
    """Log how many held-out samples of some clients are training samples of others, where clients share samples."""
    trained = np.unique(np.concatenate([train for train, _ in shares.values()]))
    trained_by_others = sum(int(np.isin(test, trained).sum()) for _, test in shares.values())
    if trained_by_others:
        log.warning(
            "shared_samples known=%d: some clients train on samples that others are scored on, because this partition "
            "gives a sample to several clients; accuracies of a shared model are flattered",
            trained_by_others,
        )


def _train_rows(plan: Plan, pools: Pools, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return client -> training rows, which the data name, or which the rule gives.

    Raises:
        UsageError: The data name another number of clients than the plan.
    """
    if pools.owners:
        if plan.clients not in {None, len(pools.owners)}:
            owners = f"the data hold {len(pools.owners)} of them ({', '.join(pools.owners)})"
            raise UsageError(f"--clients {plan.clients} with partition {plan.partition}: {owners}; leave --clients out")
        return dict(pools.owners)
    clients = plan.clients or CLIENTS
    digits = len(str(clients - 1))  # names of one length, so that their order is that of their numbers
    rows_of_clients = _rows_by_rule(plan, pools.train.labels, clients, rng)
    return {f"c{number:0{digits}d}": rows for number, rows in enumerate(rows_of_clients)}


def _rows_by_rule(plan: Plan, labels: np.ndarray, clients: int, rng: np.random.Generator) -> partition.Rows:
    """Return the training rows of each client by the plan's rule, from the labels (n,) of the pool."""
    alpha = plan.alpha or 1.0
    min_size = plan.min_size or MIN_SIZE
    train_start, _ = plan.starts or (0, 0)
    iid_share = _iid_share(plan)
    rules: dict[str, Callable[[], partition.Rows]] = {
        "fedpac": lambda: partition.fedpac(
            labels, clients, size=plan.size or SIZE, first=train_start, iid_share=iid_share
        ),
        "dirichlet": lambda: partition.dirichlet(labels, clients, alpha, rng, min_size=min_size),
        "fedrir_dirichlet": lambda: partition.fedrir_dirichlet(labels, clients, alpha, rng, min_size=plan.min_size),
        # The authors' code asks for no least number of samples here.
        "fedrir_pathological": lambda: partition.pathological(
            labels, clients, rng, classes_each=plan.classes_each or 2, min_size=plan.min_size or 1
        ),
        "quantity": lambda: partition.quantity(labels, clients, alpha, rng, min_size=min_size),
        "pathological": lambda: partition.pathological(
            labels, clients, rng, classes_each=plan.classes_each or 2, min_size=min_size
        ),
        "iid": lambda: partition.iid(labels, clients, rng, size=plan.size),
    }
    return rules[plan.partition]()


def _iid_share(plan: Plan) -> float:
    """Return the share of a client's samples that FedPAC's rule spreads over all classes."""
    return partition.IID_SHARE if plan.iid_share is None else plan.iid_share


def _test_rows(
    plan: Plan, pools: Pools, test: Samples, train: Mapping[str, np.ndarray], rng: np.random.Generator
) -> partition.Rows:
    """Return the test rows of each client in the order of ``train``.

    The data name them, or FedPAC's rule does; otherwise each client's have its own mixture of classes.
    """
    if pools.tested:
        return [pools.tested[name] for name in train]
    if plan.partition == "fedpac":
        size = plan.test_size or plan.size or SIZE
        _, test_start = plan.starts or (0, 0)
        return partition.fedpac(test.labels, len(train), size=size, first=test_start, iid_share=_iid_share(plan))
    return partition.alike(list(train.values()), pools.train.labels, test.labels, rng)


def without_test(division: Division, train: Samples, plan: Plan) -> Division:
    """Return the same clients, evaluated on a part of their training samples, to try out settings.

    A client with a single sample keeps it for training.
    """
    share = plan.validation or 0.0
    shares = {}
    for name, client in division.clients.items():
        rows = np.asarray(client.train, np.int64)
        shares[name] = split_rows(train, rows, share, plan.seed)
    _warn_of_shared_rows(shares)
    settings = {**division.settings, "validation": share}
    return partition.divided(division.rule, settings, partition.Pool.of(train.labels, None), shares)


def split_rows(samples: Samples, rows: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test rows of one client, split as a device would split its samples."""
    # Row numbers in place of inputs: the split copies them, not the samples.
    own_samples = replace(samples, inputs=rows, names=(), labels=samples.labels[rows])
    if samples.groups is not None:
        own_samples = replace(own_samples, groups=samples.groups[rows])
    train, test = data.split(own_samples, share, seed)
    return train.inputs, test.inputs


# --- sources ---------------------------------------------------------------------------------------------------------


def _sources(plan: Plan, rule: str, seed: int) -> dict[str, str]:
    """Return owner -> source; a single '' where the samples have no owners. ``seed`` is the partition's.

    Raises:
        UsageError: There are fewer or more sources than the rule needs.
    """
    if rule == "domains":
        return _sources_of_domains(plan, seed)
    if rule == "subjects":
        return _sources_of_subjects(plan)
    if len(plan.data) > 1:
        raise UsageError(f"{len(plan.data)} data sources for partition {rule}; expected one")
    return {"": plan.data[0]}


def _sources_of_domains(plan: Plan, seed: int) -> dict[str, str]:
    """Return a name of each domain -> its source: those that the plan lists, or those that its only source has.

    Raises:
        UsageError: The only source has no domains.
    """
    if len(plan.data) > 1:
        return _distinct({source: source.partition(":")[2] or source for source in plan.data})
    domains = data.domains(plan.data[0], seed=seed, folder=plan.folder)
    if not domains:
        raise UsageError(
            f"partition domains with '{plan.data[0]}' alone: give --data once for each domain, or 'digits' for its "
            "six styles, or a set of several: digits5, domainnet, officecaltech, officehome or pacs, or "
            "'images:DIR' where DIR has a folder for each domain"
        )
    return _distinct({source: name for name, source in domains.items()})


def _sources_of_subjects(plan: Plan) -> dict[str, str]:
    """Return a name of each subject -> the source of this subject's samples.

    Raises:
        UsageError: The plan's source has no subjects.
    """
    subjects = data.subjects(plan.data[0], folder=plan.folder)
    if not subjects:
        raise UsageError(
            f"partition subjects with '{plan.data[0]}': expected windows:FILE or ucihar:DIR, without the option "
            "subject and with at least one subject left"
        )
    return {f"subject-{number}": source for number, source in subjects.items()}


def _distinct(requested: Mapping[str, str]) -> dict[str, str]:
    """Return distinct client names for sources, from the last part of each path."""
    named: dict[str, str] = {}
    for source, typed in requested.items():
        last = typed.partition("?")[0].rstrip("/").rpartition("/")[2].lower()
        name = re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:50] or "domain"
        while name in named:
            name = f"{name}-{len(named) + 1}"
        named[name] = source
    return named


def _load(plan: Plan, sources: Mapping[str, str], spec: InputSpec, rule: str) -> Pools:
    """Read the samples of all owners into one pool for training, and one for testing where the sources have it."""
    if list(sources) == [""]:
        parts = partition.read_pools(sources[""], spec, folder=plan.folder)
        pools = Pools(parts.train, parts.test)
        return with_users(pools, sources[""]) if rule == "users" else pools
    if not all(partition.parts_of(source, plan.folder) for source in sources.values()):
        pooled = [data.load(source, spec, folder=plan.folder, compact=True) for source in sources.values()]
        return Pools(_joined(pooled), None, _rows_of(sources, pooled))
    each = [partition.read_pools(source, spec, folder=plan.folder) for source in sources.values()]
    train = [pools.train for pools in each]
    test = [pools.test for pools in each if pools.test is not None]
    return Pools(_joined(train), _joined(test), _rows_of(sources, train), _rows_of(sources, test))


def _rows_of(owners: Iterable[str], each: Sequence[Samples]) -> dict[str, np.ndarray]:
    """Return the rows of each owner where their samples are joined."""
    rows = {}
    begin = 0
    for owner, samples in zip(owners, each, strict=True):
        end = begin + len(samples)
        rows[owner] = np.arange(begin, end)
        begin = end
    return rows


def _joined(parts: Sequence[Samples]) -> Samples:
    """Return the samples one after another, labelled by the classes of all parts; groups of two parts stay distinct."""
    # 1. One list of classes; the labels of each part become indices into it.
    names = set[str]()
    for samples in parts:
        names.update(samples.class_names)
    class_names = tuple(sorted(names, key=_natural_order))
    labels = []
    for samples in parts:
        indices = np.array([class_names.index(name) for name in samples.class_names], np.int64)
        labels.append(indices[samples.labels])
    # 2. Groups of two parts are different ones.
    groups = _joined_groups(parts)
    # 3. Inputs stay integers only where all are; otherwise all become what the encoder takes.
    is_compact = all(samples.inputs.dtype == np.uint8 for samples in parts)
    ready = parts if is_compact else [samples.ready() for samples in parts]
    inputs = np.concatenate([samples.inputs for samples in ready])
    are_whole = groups is not None and all(samples.are_whole for samples in parts)
    return Samples(inputs, np.concatenate(labels), class_names, parts[0].input, groups, are_whole=are_whole)


def _joined_groups(parts: Sequence[Samples]) -> np.ndarray | None:
    """Return the groups of all samples, numbered on from part to part; None where a part has none."""
    joined = []
    next_group = 0
    for samples in parts:
        if samples.groups is None:
            return None
        groups = samples.groups + next_group
        next_group = int(groups.max(initial=next_group)) + 1
        joined.append(groups)
    return np.concatenate(joined)


def _natural_order(name: str) -> tuple[int, str]:
    """Return a key that sorts numbers as numbers (class 10 after class 9), and names after all of them."""
    is_number = name.isascii() and name.isdigit()
    if is_number:
        return int(name), ""
    return 1 << 62, name


@dataclass(frozen=True)
class ClientCounts:
    """The samples of each class that a client has, in the order of the classes."""

    id: str
    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True)
class ClassCounts:
    """A partition, and the samples of each class that each client has."""

    division: Division
    classes: tuple[str, ...]
    clients: tuple[ClientCounts, ...]
    pool_samples: int
    """Training samples of the pool."""

    used_samples: int
    """Those of them that at least one client has."""

    def to_json(self) -> dict[str, Any]:
        """Return it as ``headwater partition --json`` and the summary of a simulation have it."""
        clients = [{"id": client.id, "train": [*client.train], "test": [*client.test]} for client in self.clients]
        return {
            "rule": self.division.rule,
            "settings": self.division.settings,
            "hash": self.division.sha256,
            "classes": [*self.classes],
            "clients": clients,
            "samples": {"train": self.pool_samples, "used": self.used_samples},
        }


def class_counts(division: Division, pools: Pools, class_names: tuple[str, ...]) -> ClassCounts:
    """Return the training and test samples of each class that each client of a partition has."""
    tested = pools.train if pools.test is None else pools.test

    def counts(labels: np.ndarray, rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(np.bincount(labels[np.asarray(rows, np.int64)], minlength=len(class_names)).tolist())

    clients = [
        ClientCounts(name, counts(pools.train.labels, share.train), counts(tested.labels, share.test))
        for name, share in division.clients.items()
    ]
    used = {row for share in division.clients.values() for row in share.train}
    return ClassCounts(division, class_names, tuple(clients), pool_samples=len(pools.train), used_samples=len(used))

"""The samples that a partition divides, and one client's part of them: the same on a device and in a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...config import DataConfig
from ...errors import DataError
from ...task import InputSpec, Task
from .. import Samples, load, parse_source, source_kind, split, with_options
from .. import check as check_source
from .division import Division, Pool, Share

if TYPE_CHECKING:
    from typing_extensions import Self

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
        """By what the pools are recognised."""
        return Pool.of(self.train.labels, None if self.test is None else self.test.labels)

    def like(self, division: Division) -> Self:
        """These pools; without the test samples where no client in ``division`` has any."""
        return self if division.pool.test_samples is not None else replace(self, test=None)

    def rows_of(self, share: Share) -> tuple[Samples, Samples]:
        """One client's training and test samples, copied out of the pools."""
        tested = self.train if self.test is None else self.test
        train, test = (np.asarray(rows, np.int64) for rows in (share.train, share.test))
        return self.train.take(train).ready(), tested.take(test).ready()


def parts_of(source: str) -> tuple[str, str] | None:
    """The sources of its training and test part, where this kind keeps them apart and ``source`` names neither.

    Raises:
        UnknownName: no such kind of source.
        ConfigError: not of the form kind:where?option=value.
    """
    kind, where, options = parse_source(source)
    if "split" not in source_kind(kind).options.model_fields or "split" in options:
        return None
    train, test = (with_options(kind, where, {**options, "split": part}) for part in ("train", "test"))
    return train, test


def read_pools(
    source: str,
    input: InputSpec | None = None,  # noqa: A002 - the task's word
    class_names: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
) -> Pools:
    """The pools of one source, compact, preprocessed and labelled as `edge_agent.data.load` does.

    Raises:
        HeadwaterError: as `edge_agent.data.load`.
    """
    parts = parts_of(source)
    if parts is None:
        return Pools(load(source, input, class_names, folder=folder, compact=True))
    train = load(parts[0], input, class_names, folder=folder, compact=True)
    return Pools(train, load(parts[1], train.input, train.class_names, folder=folder, compact=True))


@dataclass(frozen=True)
class Own:
    """What a client has of a partition that it shares with others."""

    division: Division
    share: Share
    where: str

    @classmethod
    def of(cls, path: Path, client: str) -> Own:
        """A client's rows from the file at ``path``.

        Raises:
            DataError: no such file, no such client, or a rule whose clients are sources of their own.
            ConfigError: not a partition.
            StateError: the file is damaged.
        """
        division = Division.read(path)
        if division.rule in RULES_OF_SEVERAL:
            raise DataError(
                f"{path}: partition {division.rule} joins one source for each client; "
                f"give '{client}' its own as data.source, and leave data.partition out"
            )
        return cls(division, division.share(client, str(path)), str(path))

    def taken_from(self, pools: Pools) -> tuple[Samples, Samples]:
        """The client's training and test samples.

        Raises:
            DataError: the pools are not those that the partition was made for.
        """
        pools = pools.like(self.division)
        self.division.check_pool(pools.mark, self.where)
        return pools.rows_of(self.share)


def own_samples(
    config: DataConfig, client: str, spec: InputSpec, class_names: Sequence[str]
) -> tuple[Samples, Samples]:
    """Training and test samples of a device: its rows of a shared partition, or all of its source, split.

    Raises:
        HeadwaterError: as `edge_agent.data.load`; or the partition does not fit the data, or does not know the client.
    """
    if config.partition is None:
        return split(load(config.source, spec, class_names, folder=config.folder), config.test_fraction, config.seed)
    own = Own.of(config.partition, config.client or client)
    return own.taken_from(read_pools(config.source, spec, class_names, folder=config.folder))


def check_own(config: DataConfig, client: str, task: Task | None = None) -> None:
    """Check that the data of a device exist and that the partition has it; no sample is read.

    With a task its classes and the kind of its inputs have to be those of the data.

    Raises:
        HeadwaterError: as `edge_agent.data.check`, or as `Own.of`.
    """
    parts = None if config.partition is None else parts_of(config.source)
    for source in parts or (config.source,):
        if task is None:
            check_source(source, config.folder)
        else:
            check_source(source, config.folder, task.input, task.class_names)
    if config.partition is not None:
        Own.of(config.partition, config.client or client)

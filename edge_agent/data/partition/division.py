"""Which rows of a pool each client has: a small file with every row, and a hash to compare partitions.

Another method, another machine or another day can work on the same split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from ...config import NAME_PATTERN, mistakes_of
from ...errors import ConfigError, DataError, StateError, nearest
from ...storage import read_json, write_atomic
from ...task import Frozen

FORMAT = 1

Row = Annotated[int, Field(ge=0)]


class Share(Frozen):
    """One client's rows: ``train`` in the training pool, ``test`` in the test pool (or in the only one there is)."""

    train: tuple[Row, ...] = Field(min_length=1)
    test: tuple[Row, ...] = ()


class Pool(Frozen):
    """By what a pool is recognised: how many samples, and their labels."""

    train_samples: int = Field(ge=0)
    test_samples: int | None = Field(None, ge=0, description="None: clients hold back a part of what they get")
    labels_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, train_labels: np.ndarray, test_labels: np.ndarray | None) -> Pool:
        """The mark of a pool with these labels."""
        digest = hashlib.sha256()
        for labels in (train_labels, *(() if test_labels is None else (test_labels,))):
            digest.update(len(labels).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(labels, "<i8").data)
        tested = None if test_labels is None else len(test_labels)
        return cls(train_samples=len(train_labels), test_samples=tested, labels_sha256=digest.hexdigest())


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
        """The division in a file.

        Raises:
            DataError: no such file, a damaged one, or not what `write` wrote.
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
        """The rows of one client.

        Raises:
            DataError: no such client; the nearest name is suggested.
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
            DataError: names the first client for which that is not so.
        """
        tested = self.pool.test_samples
        for name, share in self.clients.items():
            both = share.train + share.test if tested is None else share.test
            beyond = max(share.train) >= self.pool.train_samples or max(both, default=-1) >= (
                self.pool.train_samples if tested is None else tested
            )
            if beyond or len(set(share.train)) < len(share.train) or len(set(both)) < len(both):
                raise DataError(f"{where}: client '{name}' has a row twice, or one that the pool does not have")

    def check_pool(self, pool: Pool, where: str) -> None:
        """Check that this is the pool that the rows belong to.

        Raises:
            DataError: it is another one.
        """
        if pool != self.pool:
            raise DataError(
                f"{where}: made for {_told(self.pool)}, the data are {_told(pool)}; give the data that it was made for"
            )


def divided(
    rule: str, settings: Mapping[str, Any], pool: Pool, shares: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Division:
    """A division of rows given as arrays (train, test) for each client."""
    clients = {
        name: Share.model_construct(train=tuple(train.tolist()), test=tuple(test.tolist()))
        for name, (train, test) in shares.items()
    }
    return Division.model_construct(
        format=FORMAT, rule=rule, settings=dict(settings), pool=pool, clients=dict(sorted(clients.items()))
    )


def _told(pool: Pool) -> str:
    test = "" if pool.test_samples is None else f" and {pool.test_samples} test"
    return f"{pool.train_samples} training{test} samples with labels {pool.labels_sha256[:12]}"

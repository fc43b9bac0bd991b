"""Clients of a simulation that are the users who made the samples of one source: ``partition users``."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from edge_agent.core.errors import UsageError
from edge_agent.data.partition import Pools

log = logging.getLogger(__name__)

AnyPools = TypeVar("AnyPools", bound=Pools)

_LONGEST = 63
"""The most characters of a client's name."""


def with_users(pools: AnyPools, source: str) -> AnyPools:
    """Return the pools with the rows of each user; where there is a test part, users are tested on theirs.

    A user with test samples alone cannot train and is left out; one without any has none.

    Raises:
        UsageError: The source does not say who made its samples, or its test part is of other users.
    """
    if pools.train.users is None:
        raise UsageError(
            f"partition users with '{source}': these data do not say who made them; expected leaf:DIR, or the option "
            "user=COLUMN of arrow and parquet"
        )
    trained = pools.train.users.rows()
    names = client_names(trained)
    owners = {names[user]: rows for user, rows in trained.items()}
    if pools.test is None or pools.test.users is None:
        return replace(pools, owners=owners)
    tested = pools.test.users.rows()
    _check_same_users(trained, tested, source)
    none = np.zeros(0, np.int64)
    return replace(pools, owners=owners, tested={names[user]: tested.get(user, none) for user in trained})


def _check_same_users(trained: Collection[str], tested: Collection[str], source: str) -> None:
    """Check that users are in both parts; those in the test part alone are named in a warning.

    Raises:
        UsageError: No user is in both.
    """
    strangers = [user for user in tested if user not in trained]
    if len(strangers) == len(tested):
        raise UsageError(
            f"partition users with '{source}': its {len(tested)} test users are none of its {len(trained)} training "
            "users, as LEAF's script divides them with '-t user'; give split=all, of which each holds out "
            "test_fraction, or divide by '-t sample'"
        )
    if strangers:
        log.warning(
            "users_without_training_samples source=%s count=%d first=%s: they are left out",
            source,
            len(strangers),
            strangers[0],
        )


def client_names(users: Collection[str]) -> Mapping[str, str]:
    """Return user -> name of its client: lower case, with '-' for what such a name may not have; distinct ones."""
    names: dict[str, str] = {}
    taken = set[str]()
    for user in users:
        name = re.sub(r"[^a-z0-9_-]+", "-", user.lower()).strip("-_")[:_LONGEST] or "user"
        # Two users may differ in what a name may not have, or behind its end.
        number = 2
        distinct = name
        while distinct in taken:
            ending = f"-{number}"
            distinct = name[: _LONGEST - len(ending)] + ending
            number += 1
        taken.add(distinct)
        names[user] = distinct
    return names

"""The server's half of a secure sum: masks of those that dropped out are rebuilt and taken off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from functools import partial

import numpy as np

from edge_agent.privacy.secure_sum.keys import (
    PublicKeys,
    add_pair,
    at_zero,
    joined,
    outlier,
    pair_seed,
    private_key,
    stream,
    threshold,
)

from ...core.errors import CodecError, TrainingFailed


def unmasked(
    masked: Mapping[str, np.ndarray],
    keys: Mapping[str, PublicKeys],
    answers: Mapping[str, Mapping[str, bytes]],
    context: bytes,
    blame: Callable[[str], None] = lambda _: None,
) -> np.ndarray:
    """Return the server's last step: the sum (n,) uint64 of the integers of all who have delivered.

    ``masked``: client -> phase 2. ``keys``: of all clients of phase 0. ``answers``: client -> phase 3, of at least
    `threshold` clients, about those that have sent shares. ``blame`` is called with each whose answer was wrong, where
    the others are enough: found is a single wrong share of a secret.

    Raises:
        TrainingFailed: Too few clients have answered.
        CodecError: The shares do not give the client's secret, and it cannot be found which of them is wrong.
    """
    honest = dict(answers)
    while isinstance(secrets_of := _revealed(masked, keys, honest), str):
        blame(secrets_of)
        del honest[secrets_of]
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total += vector
    for client, secret in secrets_of.items():
        if client in masked:
            total -= stream(secret, len(total))
            continue
        key = private_key(secret)
        for other in masked:  # of each pair the one who has delivered has put the mask in; it is taken out
            add_pair(total, pair_seed(key, keys[other].mask, context), positive=other > client)
    return total


def _revealed(
    delivered: Container[str], keys: Mapping[str, PublicKeys], answers: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes] | str:
    """Return the secrets of all clients that have sent shares, or the one whose answer is wrong."""
    least = threshold(len(keys))
    if len(answers) < least:
        raise TrainingFailed(f"{len(answers)} of {len(keys)} clients have revealed their shares, it takes {least}")
    points = {point: client for point, client in enumerate(sorted(keys), 1) if client in answers}
    chosen = list(points)[:least]
    one_more = list(points)[: least + 1]
    factors = at_zero(chosen)
    result = {}
    for client in answers[points[chosen[0]]]:
        fits = partial(keys[client].is_of, delivered=client in delivered)
        with contextlib.suppress(CodecError):
            secret = joined(factors, [answers[points[point]][client] for point in chosen])
            if fits(secret):
                result[client] = secret
                continue
        wrong = outlier({point: answers[points[point]][client] for point in one_more}, fits)
        if len(one_more) == least or wrong is None:
            raise CodecError(
                f"the shares of '{client}' do not give its secret; it has made wrong ones, or one of "
                f"{', '.join(points[point] for point in one_more)} has revealed a wrong one"
            )
        return points[wrong]
    return result

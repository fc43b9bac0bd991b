"""The server's half of a secure sum: it rebuilds the secrets of the masks and removes these from the sum."""

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
    """Return the sum (n,) uint64 of the integers of all clients that have delivered, the server's last step.

    Args:
        masked: The vector (n,) uint64 of phase 2 of each client that has delivered.
        keys: The public keys of all clients.
        answers: The answer of phase 3 of each of at least `threshold` clients: shares of the secrets of all clients.
        context: The bytes that name the attempt, as for `Participant`.
        blame: Called with each client whose answer was wrong, if the others are enough; a single wrong share of a
            secret is found.

    Raises:
        TrainingFailed: Too few clients have answered.
        CodecError: The shares do not give the client's secret, and it cannot be found which of them is wrong.
    """
    # 1. The secrets, from the answers of clients that have not revealed a wrong share.
    honest = dict(answers)
    revealed = _revealed(masked, keys, honest)
    while isinstance(revealed, str):
        blame(revealed)
        del honest[revealed]
        revealed = _revealed(masked, keys, honest)
    # 2. The sum, in which the masks of pairs that have both delivered cancel.
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total += vector
    # 3. The other masks: the own one of each client that has delivered, and those of its pairs with each other client.
    for client, secret in revealed.items():
        if client in masked:
            total -= stream(secret, len(total))
            continue
        key = private_key(secret)
        for other in masked:
            add_pair(total, pair_seed(key, keys[other].mask, context), positive=other > client)
    return total


def _revealed(
    delivered: Container[str], keys: Mapping[str, PublicKeys], answers: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes] | str:
    """Return the secret of each client that has sent shares, or the name of a client whose answer is wrong."""
    least = threshold(len(keys))
    if len(answers) < least:
        raise TrainingFailed(f"{len(answers)} of {len(keys)} clients have revealed their shares, it takes {least}")
    points = {point: client for point, client in enumerate(sorted(keys), 1) if client in answers}
    # With one share more than needed, a single wrong one can be told.
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

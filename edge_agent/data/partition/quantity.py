"""Clients that differ in how much they have, not in what."""

from __future__ import annotations

import numpy as np

from ...errors import DataError
from .rules import MAX_DRAWS, Rows


def quantity(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, *, min_size: int = 10) -> Rows:
    """Sizes by Dirichlet(alpha) over the clients, as in "Federated Learning on Non-IID Data Silos" (Li et al., 2022).

    Every sample goes to one client, drawn from all classes alike. Sizes are drawn again until everybody has
    ``min_size``; a small ``alpha`` gives a few clients nearly everything.

    Raises:
        DataError: fewer samples than that takes, or no draw gave everybody enough.
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
        f"partition quantity: alpha {alpha:g} with {clients} clients left somebody with fewer than {min_size} samples "
        f"in each of {MAX_DRAWS} draws (the best with {smallest}); raise --alpha, lower --min-size or use fewer clients"
    )

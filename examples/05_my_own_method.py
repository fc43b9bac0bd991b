"""A federated method that does not ship, in this one file: FedAvg with the median instead of the mean.

Run it:  python examples/05_my_own_method.py        (about 20 s)

Or:      headwater simulate --method examples/05_my_own_method.py:MedianAvg --data digits --partition domains

A few clients that send nonsense do not move the median of a weight (Yin et al., ICML 2018, Algorithm 1, option I).
A package of yours offers its methods to others by an entry point:
[project.entry-points."headwater.methods"]  medianavg = "my_package:MedianAvg"
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coordinator import simulate
from edge_agent.core.task import State
from edge_agent.methods import Update
from edge_agent.methods.fedavg import FedAvg

ROUNDS = 5
CLIENTS = 5


class MedianAvg(FedAvg):
    """E epochs of SGD on everything, then the median of each weight."""

    source = "Yin, Chen, Ramchandran, Bartlett, ICML 2018"

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """The median over clients, which all count alike."""
        received = [update.tensors for update in updates]
        medians = {name: np.median([tensors[name] for tensors in received], axis=0) for name in received[0]}
        return {**state, **{name: median.astype(received[0][name].dtype) for name, median in medians.items()}}


def main() -> None:
    """Compare the new method with its parent."""
    for method in ("fedavg", MedianAvg):
        result = simulate(
            method,
            data="digits:optdigits?n=1000",
            clients=CLIENTS,
            rounds=ROUNDS,
            params={"lr": 0.05, "momentum": 0.9, "batch_size": 20, "local_epochs": 1},
        )
        print(f"{result.summary['method']:10} accuracy after {ROUNDS} rounds: {result.accuracy:.3f}")


if __name__ == "__main__":
    main()

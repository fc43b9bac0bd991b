"""A federation in one thread whose updates go through aggregators, and the means to kill these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation_duties import TinyDuties, quick_params
from federation_harness import Federation, Killed, vanish

from coordinator.aggregators.aggregator import Aggregator, Site
from coordinator.config import AggregatorsConfig
from coordinator.fleet.partitions import Partition
from coordinator.state.command_keys import CommandKeys
from coordinator.state.store import AGGREGATORS, BlobStore


class PartitionedFederation(Federation):
    """``partitions`` of the agents, each with an aggregator of its own from the start; 0: none."""

    def __init__(self, folder: Path, partitions: int, **options: Any) -> None:
        super().__init__(folder, keyed=True, **options)
        self.partitions = partitions
        self.config = self.config.model_copy(update={"aggregators": AggregatorsConfig(partitions=partitions)})
        self.aggregators: dict[str, Aggregator] = {}
        self.accepted: list[tuple[int, str]] = []
        """(Round, agent) of each update that counts, after `run_of`."""

        self.hook: Callable[[str, Aggregator], None] = lambda name, aggregator: None
        """Called before each step of an aggregator; may raise `Killed`."""

    def __enter__(self) -> PartitionedFederation:
        super().__enter__()
        for number in range(1, self.partitions + 1):
            self.add_aggregator(number)
        self.settle()
        return self

    def add_aggregator(self, number: int, name: str = "", of: int = 0) -> Aggregator:
        """Another aggregator for a partition."""
        self.boots += 1
        site = Site(
            Partition(number, of or self.partitions),
            self.topics,
            BlobStore(self.config.state / "blobs"),
            self.config.state / AGGREGATORS,
            CommandKeys.of(self.config.state, self.config.federation),
            name or f"sum{number}",
            f"g{self.boots}",
        )
        aggregator = self.aggregators[site.name] = Aggregator(site, self.broker.transport(), self.clock)
        aggregator.start()
        return aggregator

    def kill_aggregator(self, name: str) -> None:
        """As kill -9 does: what is on disk stays."""
        vanish(self.aggregators.pop(name).transport)

    def step(self) -> bool:
        busy = super().step()
        for name, aggregator in list(self.aggregators.items()):
            try:
                self.hook(name, aggregator)
                busy = aggregator.step(0) or busy
            except Killed:
                self.kill_aggregator(name)
                busy = True
        return busy


def run_of(
    folder: Path,
    partitions: int,
    method: str = "fedavg",
    rounds: int = 2,
    prepare: Callable[[PartitionedFederation], None] = lambda fed: None,
    **options: Any,
) -> tuple[str, PartitionedFederation]:
    """The hash of the last state of a run on real, tiny training, and the federation after it."""
    with PartitionedFederation(folder, partitions, tasks=TinyDuties, **options) as fed:
        prepare(fed)
        fed.request(method, rounds=rounds, params=quick_params(method))
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        fed.accepted = [(entry.round, entry.agent) for entry in fed.entries("update_accepted")]
        return fed.record.checkpoint, fed

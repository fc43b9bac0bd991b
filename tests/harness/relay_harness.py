"""A federation in one thread, some of whose agents are at sites with a relay, and the means to disturb these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faulty_broker import FaultyBroker
from federation_harness import Federation, Killed, vanish

from coordinator.config import AggregatorsConfig
from edge_agent.core.config import AgentBrokerConfig, BrokerConfig
from edge_agent.relay.relay import Relay
from edge_agent.relay.settings import RelayConfig
from edge_agent.wire.memory import MemoryTransport


class SiteFederation(Federation):
    """``sites``: the agents of each site; all others connect to the coordinator's broker themselves.

    ``sums``: the relays whose sums the coordinator takes.
    """

    def __init__(
        self, folder: Path, sites: Mapping[str, tuple[str, ...]], *, sums: tuple[str, ...] = (), **options: Any
    ) -> None:
        everybody = tuple(agent for agents in sites.values() for agent in agents)
        super().__init__(folder, agents=(*everybody, *options.pop("others", ())), **options)
        if sums:
            self.config = self.config.model_copy(update={"aggregators": AggregatorsConfig(sites=sums)})
        self.sites = sites
        self.site_brokers = {site: FaultyBroker() for site in sites}
        self.upstream: dict[str, MemoryTransport] = {}
        """Site -> its relay's connection to the coordinator's broker."""

        self.relays: dict[str, Relay] = {}
        self.hook: Callable[[str, Relay], None] = lambda site, relay: None
        """Called before each step of a relay; may raise `Killed`."""

        self.after_kill: Callable[[str], object] = lambda site: None
        """Called when a relay was killed."""

    def __enter__(self) -> SiteFederation:
        self.start_coordinator()
        for site in self.sites:
            self.add_relay(site)
        for name in self._first:
            self.add(name)
        return self

    def broker_of(self, name: str) -> FaultyBroker:
        site = next((site for site, agents in self.sites.items() if name in agents), None)
        return self.broker if site is None else self.site_brokers[site]

    def add_relay(self, site: str, **settings: Any) -> Relay:
        """The relay of a site, new or again on what it has on disk."""
        config = RelayConfig(
            id=site,
            state=self.folder / f"relay-{site}",
            broker=AgentBrokerConfig(url="mqtt://center"),
            site=BrokerConfig(url=f"mqtt://{site}"),
            **settings,
        )
        transport = self.upstream[site] = self.broker.transport()
        keys = self.keys()
        relay = self.relays[site] = Relay(
            config,
            transport,
            self.site_brokers[site].transport(),
            self.clock,
            lambda: self.now().timestamp(),
            None if keys is None else keys.of_agent(site),
        )
        relay.start()
        return relay

    def kill_relay(self, site: str) -> None:
        """As kill -9 does: what is on disk stays."""
        relay = self.relays.pop(site)
        vanish(relay._upstream)
        vanish(relay._site)

    def step(self) -> bool:
        busy = super().step()
        for site, relay in list(self.relays.items()):
            try:
                self.hook(site, relay)
                busy = relay.step(0) or busy
            except Killed:
                self.kill_relay(site)
                self.after_kill(site)
                busy = True
        return busy

"""The configuration of a relay."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from ..core.config import NAME_PATTERN, AgentBrokerConfig, BrokerConfig, FileKind, default_agent_id
from ..core.task import Frozen


class RelayConfig(Frozen):
    """The configuration of the relay of a site."""

    file_kind: ClassVar[FileKind] = FileKind(
        if_missing="--config FILE names another (example: configs/relay.toml)",
        foreign_keys=frozenset({"task", "cohort", "round", "run", "embedded", "data", "head", "training"}),
        foreign="this is the configuration of a coordinator or an agent; that of a relay has [broker] and [site] "
        "(example: configs/relay.toml)",
    )

    id: str = Field(
        default_factory=default_agent_id,
        pattern=NAME_PATTERN,
        description="name of the relay, and its MQTT user at the coordinator's broker; default: the host name",
    )
    federation: str = Field("home", pattern=NAME_PATTERN, description="name of the federation, as at the coordinator")
    state: Path = Field(Path("relay-state"), description="folder for models on their way, and the status")
    cache_bytes: int = Field(
        2 * 1024**3, ge=1 << 20, description="models kept on disk, at most 256 of them, oldest dropped first"
    )
    most_agents: int = Field(
        1000, ge=1, le=10_000, description="agents at the site; beyond it, those that are offline make room for others"
    )
    sum_updates: bool = Field(
        True, description="sum the updates of the site where the coordinator asks for it; false: they pass one by one"
    )
    broker: AgentBrokerConfig = Field(
        default_factory=AgentBrokerConfig,
        description="the coordinator's broker, to which the relay has the only connection",
    )
    site: BrokerConfig = Field(
        default_factory=BrokerConfig, description="the broker of the site, to which its agents connect"
    )

    @model_validator(mode="after")
    def _two_brokers(self) -> RelayConfig:
        shared = sorted(set(self.broker.urls) & set(self.site.urls))
        if shared:
            raise ValueError(
                f"broker.url and site.url both name {', '.join(shared)}; expected the coordinator's broker in [broker] "
                "and the site's own in [site]: a relay between a broker and itself would repeat each message for ever"
            )
        return self

"""Samples that the coordinator has, by domain: int8 takes its ranges from them, and is compared with fp32 on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_agent.core.errors import HeadwaterError
from edge_agent.data.partition import own_samples

from ..config import ExportConfig, HostedConfig

if TYPE_CHECKING:
    from edge_agent.core.task import Task
    from edge_agent.data import Samples

log = logging.getLogger(__name__)


def own_domains(task: Task, export: ExportConfig, hosted: Sequence[HostedConfig]) -> dict[str, Samples]:
    """Return the samples of ``export.calibration`` and the training samples of hosted clients, by domain.

    A hosted client whose data cannot be read is passed over: no run fails for that.

    Raises:
        HeadwaterError: a source of ``export.calibration`` cannot be read.
    """
    from export import domains_of
    from export.domains import spread_over

    domains = domains_of(export.calibration, task, export.folder)
    clients = {client.id: client for client in hosted}
    # Of many hosted clients some are enough for the ranges.
    for name in spread_over([*clients]):
        try:
            domains[name] = own_samples(clients[name].data, name, task.input, task.class_names)[0]
        except HeadwaterError as error:
            log.warning("no_calibration_data client=%s reason=%s", name, error)
    return {name: samples for name, samples in domains.items() if len(samples)}

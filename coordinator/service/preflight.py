"""What of a configuration can be found wrong before anything is done: all of it is told at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edge_agent import data, methods, models
from edge_agent.errors import ConfigError, UsageError
from edge_agent.methods import Method
from edge_agent.task import Task

from ..config import CoordinatorConfig
from ..hosted.preflight import check_hosted, check_settings, check_warmable

log = logging.getLogger(__name__)


def checked_method(
    config: CoordinatorConfig, name: str, params: dict[str, Any], where: str = "", *, paper: bool = False
) -> Method:
    """The method that a run would use, after a look at everything else that it would need.

    ``paper``: parameters that are not given have the paper's values.

    Raises:
        UsageError: the one mistake there is: an unknown method or encoder (the nearest name is suggested), parameters
            that they do not have, a task that the method cannot do, data for calibration that are not there.
        ConfigError: several of them, all listed.
        MissingCapability: a package that the method or the encoder needs is not installed.
    """
    made: list[Method] = []
    looks: tuple[Callable[[], object], ...] = (
        lambda: made.append(methods.create(name, params, paper=paper)),
        lambda: models.check(config.task),
        lambda: data.check(config.export.calibration, config.export.folder) if config.export.calibration else None,
        lambda: check_hosted(config),
        lambda: check_settings(config.warm_start, "[warm_start]"),
        lambda: check_settings(config.proxy, "[proxy]"),
    )
    mistakes = [mistake for look in looks if (mistake := _mistake(look)) is not None]
    later = (
        lambda: made[0].check(config.task),
        lambda: check_warmable(made[0], config.warm_start),
        lambda: _check_patience(made[0], config),
    )
    mistakes += [mistake for look in later if made and (mistake := _mistake(look)) is not None]
    path = config.run.weights
    if path is not None and not mistakes:  # else the model cannot be built, perhaps
        mistakes += filter(None, [_mistake(lambda: _check_weights(made[0], config.task, path))])
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise ConfigError(where or "this run", [line for mistake in mistakes for line in _lines(mistake)])
    return made[0]


def _check_patience(method: Method, config: CoordinatorConfig) -> None:
    if config.export.patience and method.needs_last_round:
        raise UsageError(
            f"export.patience = {config.export.patience} may end a run of method '{method.name}' before its last round,"
            " in which it does what it needs to answer; set export.patience = 0, or switch that off in the method"
        )


def check_defaults(config: CoordinatorConfig, where: Path | None) -> None:
    """Return quietly when a run with the defaults of ``[run]`` could begin.

    Raises:
        UsageError: as `checked_method`.
        MissingCapability: as `checked_method`.
    """
    checked_method(config, config.run.method, config.run.params, str(where or "coordinator.toml"))


def fresh_on_devices(method: Method, task: Task) -> tuple[str, ...]:
    """Names of the tensors that weights would set and that do not travel, sorted: on devices they begin fresh."""
    from edge_agent.training.weights import set_by_weights

    model = method.build(task)
    return tuple(sorted(set(set_by_weights(model)) - set(method.shared_names(model))))


def _check_weights(method: Method, task: Task, path: Path) -> None:
    from edge_agent.training.weights import read_weights

    if "encoder" not in method.shared:
        raise UsageError(f"weights {path} with method '{method.name}', which shares no encoder: nobody would get them")
    read_weights(method.build(task).encoder, path)


def without_lost_weights(config: CoordinatorConfig) -> CoordinatorConfig:
    """The configuration without weights that are not there: runs that have begun need them no more, new ones say so."""
    path = config.run.weights
    if path is None or path.exists():
        return config
    log.warning("weights_missing path=%s: runs that begin with them will be rejected", path)
    return config.model_copy(update={"run": config.run.model_copy(update={"weights": None})})


def _mistake(look: Callable[[], object]) -> UsageError | None:
    try:
        look()
    except UsageError as error:
        return error
    return None


def _lines(mistake: UsageError) -> Iterator[str]:
    if isinstance(mistake, ConfigError):
        yield from (f"{mistake.where}: {line}" for line in mistake.mistakes)
    else:
        yield str(mistake)

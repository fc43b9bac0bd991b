"""Checks of a configuration before anything starts; all mistakes are reported at once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_agent import data, methods, models
from edge_agent.core.config import DataConfig, check_tls
from edge_agent.core.errors import ConfigError, HeadwaterError, UsageError
from edge_agent.core.task import Task
from edge_agent.data.partition import check_own
from edge_agent.methods import Method
from edge_agent.privacy.accountant import cost, epsilon_of
from edge_agent.privacy.noise import objection

from ..config import CoordinatorConfig, DifferentialPrivacyConfig, OwnDataConfig
from ..hosted.placement import RAY_ADVICE
from ..processes.cluster import check_ray_is_installed
from ..rounds import aggregation
from ..state.release_keys import ReleaseKeys

log = logging.getLogger(__name__)


def checked_method(
    config: CoordinatorConfig,
    name: str,
    params: dict[str, Any],
    where: str = "",
    *,
    paper: bool = False,
    paper_for: str | None = None,
) -> Method:
    """Return the method that a run would use, after a check of everything else that the run would need.

    Args:
        config: The coordinator's configuration.
        name: The method's name.
        params: The parameters that are given.
        where: The file with them, for messages; empty: they are those of a request.
        paper: Whether parameters that are not given have the paper's values.
        paper_for: The data set for which they have them, where the published ones differ.

    Raises:
        UsageError: the one mistake there is: an unknown method or encoder (the nearest name is suggested), parameters
            that they do not have, a task that the method cannot do, data for calibration that are not there.
        ConfigError: several of them, all listed.
        MissingCapability: a package that the method or the encoder needs is not installed.
    """
    mistakes = list[UsageError]()

    def check(look: Callable[[], object]) -> None:
        try:
            look()
        except UsageError as error:
            mistakes.append(error)

    created = list[Method]()
    check(lambda: created.append(methods.create(name, params, paper=paper, paper_for=paper_for)))
    if config.hosted_ray is not None:
        check_ray_is_installed(RAY_ADVICE)
    # 1. What every method needs: an encoder for the task, and the data that the configuration names.
    check(lambda: models.check(config.task))
    for source in config.export.calibration:
        check(functools.partial(data.check, source, config.export.folder))
    mistakes += _unusable_data(config)
    # 2. What this method needs, where there is one.
    if created:
        method = created[0]
        check(lambda: _check_method(method, config))
        check(lambda: _check_signing(method, config))
        check(lambda: _check_warm_start(method, config))
        check(lambda: _check_patience(method, config))
        weights = config.run.weights
        if weights is not None and not mistakes:  # otherwise the model may not be buildable
            check(lambda: _check_weights(method, config.task, weights))
        if not mistakes:
            return method
    raise _join_mistakes(mistakes, where)


def _join_mistakes(mistakes: Sequence[UsageError], where: str) -> UsageError:
    """Return the one mistake there is as it is, or one error with a line for each of several."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = list[str]()
    for mistake in mistakes:
        if isinstance(mistake, ConfigError):
            lines.extend(f"{mistake.where}: {line}" for line in mistake.mistakes)
        else:
            lines.append(str(mistake))
    return ConfigError(where or "this run", lines)


def check_defaults(config: CoordinatorConfig, where: Path | None) -> None:
    """Return quietly when a run with the defaults of ``[run]`` could begin.

    Raises:
        UsageError: as `checked_method`.
        MissingCapability: as `checked_method`.
    """
    checked_method(config, config.run.method, config.run.params, str(where or "coordinator.toml"))


def fresh_on_devices(method: Method, task: Task) -> tuple[str, ...]:
    """Return the tensors that weights would set and that do not travel, sorted: on devices they begin fresh."""
    from edge_agent.training.weights import set_by_weights

    model = method.adapt(method.build(task), task)
    return tuple(sorted(set(set_by_weights(model)) - set(method.shared_names(model))))


def _check_method(method: Method, config: CoordinatorConfig) -> None:
    """Require that a method fits the task, the aggregation and the noise of the configuration."""
    method.check(config.task)
    if config.run.peft is not None or config.run.peft_params:
        _check_peft(method, config.run_task)
    reason = aggregation.refusal(method, config) or _noise_objection(method, config.privacy)
    if reason:
        raise UsageError(reason)


def _check_peft(method: Method, task: Task) -> None:
    """Require that something of the task's encoder learns and travels, which only the model itself can tell."""
    import torch

    models.check(task)
    method.check_peft(task)
    with torch.random.fork_rng(devices=[]):
        method.adapt(method.build(task), task)


def _check_signing(method: Method, config: CoordinatorConfig) -> None:
    """Bundles that a run sends by itself wait for nobody, and devices that trust keys refuse unsigned ones."""
    keys = ReleaseKeys(config.state)
    export = config.export
    if keys.sign_alone:
        return
    signing = keys.newest().roles["targets"]
    people = f"{signing.threshold} of {len(signing.keyids)} keys of people sign the releases of this federation"
    if export.release == "each_run" and (export.after_run or export.every):
        raise UsageError(
            f"export.release = 'each_run' releases a bundle before anybody can sign it, and {people}; set "
            "export.release = 'manual', or give the coordinator a key that signs alone ('headwater keys rotate "
            "--release-key')"
        )
    if config.cohort.tier != "train" and method.takes_contributions():
        raise UsageError(
            f"cohort.tier = '{config.cohort.tier}' sends devices without torch the encoder of each round before "
            f"anybody can sign it, and {people}; set cohort.tier = 'train'"
        )


def _check_warm_start(method: Method, config: CoordinatorConfig) -> None:
    """Require that a warm start reaches clients, which have the encoder only from a method that shares it."""
    if config.warm_start is not None and "encoder" not in method.shared:
        raise UsageError(
            f"[warm_start] with method '{method.name}', which shares no encoder: it would reach no client; "
            "leave it out (headwater run --no-warm-start)"
        )


def _check_patience(method: Method, config: CoordinatorConfig) -> None:
    """Require that no run ends early whose method computes in its last round what it evaluates."""
    patience = config.export.patience
    if patience and method.needs_last_round:
        raise UsageError(
            f"export.patience = {patience} may end a run of method '{method.name}' before its last round, in "
            "which it computes what it evaluates; set export.patience = 0, or switch that off in the method"
        )


def _noise_objection(method: Method, privacy: DifferentialPrivacyConfig) -> str:
    """Return why a run would fail under ``[privacy]`` after all devices were asked; empty where it would not."""
    if privacy.clip is None:
        return ""
    if privacy.epsilon is not None:
        first_round_epsilon = epsilon_of(cost(privacy.noise), privacy.delta)
        if first_round_epsilon > privacy.epsilon:
            return (
                f"privacy.epsilon = {privacy.epsilon:g} allows no round: the first one costs {first_round_epsilon:.3g} "
                f"with noise = {privacy.noise:g}; raise the budget or the noise"
            )
    return objection(method)


def _check_weights(method: Method, task: Task, path: Path) -> None:
    """Require that clients get the weights of a file, and that they fit the encoder of the task."""
    from edge_agent.training.weights import read_weights

    if "encoder" not in method.shared:
        raise UsageError(
            f"weights {path} with method '{method.name}', which shares no encoder: no client would get them"
        )
    read_weights(method.build(task).encoder, path)


def without_lost_weights(config: CoordinatorConfig) -> CoordinatorConfig:
    """Return the configuration without a missing file of weights: begun runs do not need it, new ones fail."""
    path = config.run.weights
    if path is None or path.exists():
        return config
    log.warning("weights_missing path=%s: runs that begin with them will be rejected", path)
    return config.model_copy(update={"run": config.run.model_copy(update={"weights": None})})


def _unusable_data(config: CoordinatorConfig) -> Iterator[ConfigError]:
    """Yield a mistake for each section whose samples are missing or whose device cannot be used; no sample is read."""
    hosted_mistakes = list(_mistakes_of_hosted(config))
    if hosted_mistakes:
        yield ConfigError("[[hosted]]", hosted_mistakes)

    sections: dict[str, OwnDataConfig | None] = {"[warm_start]": config.warm_start, "[proxy]": config.proxy}
    for name, section in sections.items():
        if section is None:
            continue
        mistakes = []
        try:
            data.check(section.data, section.folder)
        except UsageError as error:
            mistakes.append(f"data: {error}")
        for device in dict.fromkeys(section.device_names):
            mistakes.extend(_device_mistakes(device))
        if mistakes:
            yield ConfigError(name, mistakes)


def _mistakes_of_hosted(config: CoordinatorConfig) -> Iterator[str]:
    """Yield the mistakes of hosted clients: samples that are missing, and devices of this machine that are."""
    for client in config.hosted:
        try:
            check_own(client.data, client.id)
        except UsageError as error:
            yield f"{client.id}: {error}"
        # Devices of a cluster are those of its machines, where its workers look for them.
        if config.hosted_ray is None:
            yield from (f"{client.id}: {line}" for line in _device_mistakes(client.device))
    for device in dict.fromkeys(config.hosted_devices):
        yield from (f"hosted_devices: {line}" for line in _device_mistakes(device))


def _device_mistakes(device: str) -> list[str]:
    """Return the mistake of an option ``device``, if it has one."""
    reason = missing_device(device)
    return [f"device = '{device}': {reason}; use 'auto' or 'cpu'"] if reason else []


PARTS = ("split", "subject", "domain")
"""Options of sources that select samples: two values select two sets, unless one of them is all."""


def overlaps(config: CoordinatorConfig) -> list[str]:
    """Return warnings about samples that are used here and at a hosted client; sources are compared, not samples."""
    warnings = []
    for client in config.hosted:
        name = client.id
        source = client.data.source
        if config.warm_start is not None and _may_overlap(client.data, config.warm_start):
            warnings.append(
                f"[warm_start] learns from {config.warm_start.data}, and '{name}' holds back samples of {source} to "
                "test on: the encoder may have seen them, and accuracies come out too high; give one of them others"
            )
        if config.proxy is not None and _may_overlap(client.data, config.proxy):
            warnings.append(
                f"[proxy] scores on {config.proxy.data}, and '{name}' has samples of {source}: it may train on those "
                "that acc.proxy is scored on, which then comes out too high; give one of them others"
            )
    return warnings


def _may_overlap(client: DataConfig, own: OwnDataConfig) -> bool:
    """Return whether two sources may hold the same samples: of one kind and location, with no option that differs."""
    try:
        first_place, first = _locate(client.source, client.folder)
        second_place, second = _locate(own.data, own.folder)
    except (HeadwaterError, ValueError):  # reported by `checked_method`
        return False
    if first_place != second_place:
        return False
    # Two clients of one division have no sample in common.
    same_division = all(first.get(name) == second.get(name) for name in ("clients", "seed"))
    if same_division and first.get("client") != second.get("client"):
        return False
    return not any(_selects_others(first.get(name), second.get(name)) for name in PARTS)


def _locate(source: str, folder: Path | None) -> tuple[tuple[str, object], dict[str, Any]]:
    """Return kind and location of a source, and its options with their defaults.

    Raises:
        HeadwaterError, ValueError: The source is no valid one.
    """
    kind, location, options_given = data.location(source, folder)
    options = data.source_kind(kind).options.model_validate(options_given).model_dump()
    return (kind, location), options


def _selects_others(first: object, second: object) -> bool:
    """Return whether two values of an option of `PARTS` select two sets without a sample in common."""
    selects_all = {None, "all"}
    return first != second and first not in selects_all and second not in selects_all


def missing_device(requested: str) -> str:
    """Return why a device of torch cannot be used; empty where it can. Nothing is started on it."""
    import torch

    if requested == "auto":
        return ""
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if device.type == "cpu":
        return ""
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = device.index or 0
        return "" if number < count else f"this machine has {count} CUDA devices"
    if device.type == "mps":
        return "" if torch.backends.mps.is_available() else "this machine has no Apple GPU"
    return "expected auto, cpu, cuda or mps"


def check_private(config: CoordinatorConfig) -> None:
    """Return where no broker without TLS is reached over a network; `EmbeddedConfig` sees to the embedded one.

    Raises:
        UsageError: it is; the message says how to have certificates.
    """
    if config.broker is not None:
        check_tls(config.broker)

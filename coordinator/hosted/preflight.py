"""Checks of hosted clients, warm start and proxy before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_agent import data
from edge_agent.data.partition import check_own
from edge_agent.errors import ConfigError, HeadwaterError, UsageError
from edge_agent.methods import Method

from ..config import CoordinatorConfig, HostedConfig, ProxyConfig, WarmStartConfig


def check_hosted(config: CoordinatorConfig) -> None:
    """Return quietly when all hosted clients have their data and a device to compute on; no sample is read.

    Raises:
        ConfigError: they have not; all mistakes are listed.
        MissingCapability: a package that a source needs is not installed.
    """
    mistakes = [mistake for client in config.hosted for mistake in _mistakes(client)]
    if mistakes:
        raise ConfigError("[[hosted]]", mistakes)


def check_settings(settings: WarmStartConfig | ProxyConfig | None, where: str) -> None:
    """Return quietly when the samples are there and something can be computed on the device; no sample is read.

    Raises:
        ConfigError: it cannot; all mistakes are listed.
        MissingCapability: a package that the source needs is not installed.
    """
    if settings is None:
        return
    mistakes = []
    try:
        data.check(settings.data, settings.folder)
    except UsageError as error:
        mistakes.append(f"data: {error}")
    if missing := missing_device(settings.device):
        mistakes.append(f"device = '{settings.device}': {missing}; use 'auto' or 'cpu'")
    if mistakes:
        raise ConfigError(where, mistakes)


def check_warmable(method: Method, settings: WarmStartConfig | None) -> None:
    """Return quietly when what a warm start learns reaches the clients of this method.

    Raises:
        UsageError: it does not.
    """
    if settings is not None and "encoder" not in method.shared:
        raise UsageError(
            f"[warm_start] with method '{method.name}', which shares no encoder: nobody would get what is learned; "
            "leave it out (headwater run --no-warm-start)"
        )


PARTS = ("split", "subject", "domain")
"""Options of sources that select samples: two values select two sets, unless one of them is all."""


def overlaps(config: CoordinatorConfig) -> list[str]:
    """Warnings about samples that are used twice: here, and at a hosted client that tests on them."""
    return list(_overlaps(config))


def _overlaps(config: CoordinatorConfig) -> Iterator[str]:
    """Compares sources, not samples."""
    warm, proxy = config.warm_start, config.proxy
    for client in config.hosted:
        name, theirs = client.id, client.data
        if warm is not None and _same((theirs.source, theirs.folder), (warm.data, warm.folder)):
            yield (
                f"[warm_start] learns from {warm.data}, and '{name}' holds back samples of {theirs.source} to test on: "
                "the encoder may have seen them, and accuracies come out too high; give one of them others"
            )
        if proxy is not None and _same((theirs.source, theirs.folder), (proxy.data, proxy.folder)):
            yield (
                f"[proxy] scores on {proxy.data}, and '{name}' has samples of {theirs.source}: it may train on those "
                "that acc.proxy is scored on, which then comes out too high; give one of them others"
            )


def _same(one: tuple[str, Path], other: tuple[str, Path]) -> bool:
    """Whether two sources may hold the same samples: one kind, one place, and no option that keeps them apart."""
    try:
        (kind, place, first), (other_kind, other_place, second) = _taken_apart(*one), _taken_apart(*other)
    except (HeadwaterError, ValueError):  # which is told elsewhere
        return False
    if (kind, place) != (other_kind, other_place):
        return False
    shares = [(options.get("clients"), options.get("seed")) for options in (first, second)]
    if shares[0] == shares[1] and first.get("client") != second.get("client"):
        return False
    return not any(_are_parts(first.get(name), second.get(name)) for name in PARTS)


def _taken_apart(source: str, folder: Path) -> tuple[str, str, dict[str, object]]:
    """Kind, place and all options."""
    kind, place, given = data.location(source, folder)
    return kind, place, data.source_kind(kind).options.model_validate(given).model_dump()


def _are_parts(one: object, other: object) -> bool:
    return one != other and None not in {one, other} and "all" not in {one, other}


def _mistakes(client: HostedConfig) -> list[str]:
    result = []
    try:
        check_own(client.data, client.id)
    except UsageError as error:
        result.append(f"{client.id}: {error}")
    if missing := missing_device(client.device):
        result.append(f"{client.id}: device = '{client.device}': {missing}; use 'auto' or 'cpu'")
    return result


def missing_device(requested: str) -> str:
    """Why a device cannot be used; empty where it can. Nothing is started on it."""
    import torch

    if requested == "auto":
        return ""
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"this machine has {count} CUDA devices" if (device.index or 0) >= count else ""
    if device.type == "mps":
        return "" if torch.backends.mps.is_available() else "this machine has no Apple GPU"
    return "" if device.type == "cpu" else "expected auto, cpu, cuda or mps"

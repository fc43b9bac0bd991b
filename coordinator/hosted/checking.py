"""What can be found wrong with hosted clients before anything is done."""

from __future__ import annotations

from edge_agent import data
from edge_agent.data.partition import check_own
from edge_agent.errors import ConfigError, UsageError
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


def _mistakes(client: HostedConfig) -> list[str]:
    found = []
    try:
        check_own(client.data, client.id)
    except UsageError as error:
        found.append(f"{client.id}: {error}")
    if missing := missing_device(client.device):
        found.append(f"{client.id}: device = '{client.device}': {missing}; use 'auto' or 'cpu'")
    return found


def missing_device(wish: str) -> str:
    """Why nothing can be computed on a device; empty where something can. Nothing is begun on it."""
    import torch

    if wish == "auto":
        return ""
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"this machine has {count} CUDA devices" if (device.index or 0) >= count else ""
    if device.type == "mps":
        return "" if torch.backends.mps.is_available() else "this machine has no Apple GPU"
    return "" if device.type == "cpu" else "expected auto, cpu, cuda or mps"

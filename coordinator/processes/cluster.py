"""The connection to a Ray cluster, and what travels over it: the one place that imports Ray.

Left to itself Ray reports its usage, opens a web page, writes to the home folder and prints to standard output, which
is ours for JSON: all of that is switched off here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_agent.core.errors import MissingCapability, RunFailed
from edge_agent.core.installation import install_command

NAMESPACE = "headwater"
CONNECT_TIMEOUT_S = 10.0

SMALLEST_STORE_BYTES = 80 * 1024**2
"""Ray rejects less than 75 MiB."""

Bytes = np.ndarray
"""Bytes (n,) uint8: Ray passes arrays on without copying them."""


def as_bytes(content: Sequence[bytes | memoryview]) -> Bytes:
    """Join pieces of bytes into one array."""
    return np.frombuffer(b"".join(content), np.uint8)


@dataclass(frozen=True)
class Advice:
    """What errors about a cluster advise, in the words of the options that the caller has.

    Attributes:
        user: What needs Ray, such as ``engine ray``.
        without_ray: What to do where there is no Ray, or none can be started.
        without_address: What to do where no cluster answers at the address.
    """

    user: str
    without_ray: str
    without_address: str


def import_ray(advice: Advice) -> Any:
    """Import and return the package ``ray``.

    Raises:
        MissingCapability: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise _ray_is_missing(advice, str(error)) from error
    return ray


def check_ray_is_installed(advice: Advice) -> None:
    """Return quietly where the package ``ray`` is installed; it is not imported, which would take 60 MB.

    Raises:
        MissingCapability: It is not.
    """
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise _ray_is_missing(advice, "No module named 'ray'")


def _ray_is_missing(advice: Advice, reason: str) -> MissingCapability:
    return MissingCapability(
        f"{advice.user} needs the package ray ({reason}): {install_command('ray')}, or {advice.without_ray}"
    )


def reason_of_loss(error: Exception) -> str:
    """Return why an actor is gone, on one line: what has failed, and the error that Ray's text ends with."""
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()] or ["no reason was given"]
    reason = " / ".join(dict.fromkeys((lines[0], lines[-1])))
    return f"{type(error).__name__}: {reason}"


def _prepare_own_cluster(stack: contextlib.ExitStack, folder: str, cpus: int, store_bytes: int) -> dict[str, Any]:
    """Prepare this process to start a cluster of its own, and return the options of ``ray.init`` for it.

    Args:
        stack: Undoes with its context what is changed in this process.
        folder: Folder of the cluster's files.
        cpus: Number of processor cores of the cluster.
        store_bytes: Bytes that its object store has to hold at least.
    """
    options = {
        "address": "local",
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": max(store_bytes, SMALLEST_STORE_BYTES),
        "_temp_dir": folder,
    }
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": _token_of_own_clusters()}
    # Ray sets the mode itself when it starts a cluster, and leaves it set.
    changed = (*environment, "RAY_AUTH_MODE")
    stack.callback(os.environ.update, {name: os.environ[name] for name in changed if name in os.environ})
    for name in changed:
        stack.callback(os.environ.pop, name, None)
    os.environ.update(environment)
    logger = logging.getLogger("ray")  # it would advise on permanent clusters
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    return options


@functools.cache
def _token_of_own_clusters() -> str:
    """Return the token of all clusters that this process starts: Ray reads a token once, and keeps that one."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def connect_to_cluster(address: str | None, advice: Advice, *, cpus: int = 0, store_bytes: int = 0) -> Iterator[Any]:
    """Yield the package ``ray``, connected; a connection that this process has already is used and left as it is.

    Without an ``address`` a cluster is started here. It leaves no files, and only this process can use it: actors run
    whatever they are sent.

    Args:
        address: HOST:PORT of a running cluster, or ``auto`` for the one that this machine is a part of.
        advice: What its errors advise.
        cpus: Number of processor cores of a cluster that is started here.
        store_bytes: Bytes that its object store has to hold at least.

    Raises:
        MissingCapability: Ray is not installed.
        RunFailed: Nothing answers at the address, the cluster there rejects us, or no cluster could be started.
    """
    ray = import_ray(advice)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if ray.is_initialized():
            yield ray
            return
        options: dict[str, Any] = {"address": address}
        if address is None:
            folder = tempfile.TemporaryDirectory(prefix="headwater-ray-", ignore_cleanup_errors=True)
            options = _prepare_own_cluster(stack, stack.enter_context(folder), cpus, store_bytes)
        if threading.current_thread() is threading.main_thread():  # Ray replaces the handler
            stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        try:
            _check_answers(address)
            stack.callback(ray.shutdown)
            ray.init(**options, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            if address is None:
                message = f"no Ray cluster could be started on this machine ({reason}); {advice.without_ray}"
                raise RunFailed(message) from error
            raise RunFailed(
                f"no Ray cluster can be used at '{address}' ({reason}); run this on one of its machines "
                f"('ray start --head' makes one), with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set if it wants a token, "
                f"or {advice.without_address}"
            ) from error
        yield ray


def _check_answers(address: str | None) -> None:
    """Require that something answers at an address HOST:PORT, because Ray tries for minutes before it fails.

    Raises:
        OSError, OverflowError: Nothing does, or the port is no possible one.
    """
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()

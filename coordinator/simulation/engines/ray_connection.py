"""A connection to Ray: to an existing cluster, or to one of our own on this machine that ends with this process.

Left to itself Ray reports its usage, opens a web page, writes to the home folder and prints to standard output, which
is ours for JSON: all of that is switched off here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from edge_agent.errors import MissingCapability, RunFailed

NAMESPACE = "headwater"
CONNECT_TIMEOUT_S = 10.0
SMALLEST_STORE_BYTES = 80 * 1024**2
"""Ray rejects less than 75 MiB."""


@contextlib.contextmanager
def connected(address: str | None, *, cpus: int, store_bytes: int) -> Iterator[Any]:
    """The package ``ray``, connected; a connection that this process has already is used and left as it is.

    Without an ``address`` a cluster of ``cpus`` is started here, with a store for ``store_bytes``.

    Raises:
        MissingCapability: Ray is not installed.
        RunFailed: nothing answers at the address, or no cluster could be started.
    """
    ray = imported()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not ray.is_initialized():
            options = _own(stack, cpus, store_bytes) if address is None else _existing(address)
            stack.enter_context(_same_signals())
            stack.callback(ray.shutdown)
            try:
                ray.init(**options, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError) as error:
                raise RunFailed(_unreachable(address, error)) from error
        yield ray


def imported() -> Any:
    """The package ``ray``.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingCapability(
            f"engine ray needs the package ray ({error}): pip install 'headwater[ray]', or use --engine pool"
        ) from error
    return ray


def _existing(address: str) -> dict[str, Any]:
    """Options to connect; the port is tried first, because Ray itself tries for minutes before it fails."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise RunFailed(_unreachable(address, error)) from error
    return {"address": address}


def _own(stack: contextlib.ExitStack, cpus: int, store_bytes: int) -> dict[str, Any]:
    """Options for a cluster that leaves nothing behind and admits nobody: actors run whatever they are sent."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-ray-", ignore_cleanup_errors=True))
    stack.enter_context(_quiet())
    stack.enter_context(_environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}))
    return {
        "address": "local",
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": max(store_bytes, SMALLEST_STORE_BYTES),
        "_temp_dir": folder,
    }


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Ray's advice on permanent clusters."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _unreachable(address: str | None, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if address is None:
        return f"no Ray cluster could be started on this machine ({first}); try --engine pool"
    return (
        f"no Ray cluster can be used at '{address}' ({first}); run this on one of its machines "
        "('ray start --head' makes one), or leave --address out"
    )

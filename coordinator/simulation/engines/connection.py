"""A connection to Ray: to a cluster of somebody's, or to one of our own on this machine that goes when we go.

Ray is what people have on their clusters already, so we bring no scheduler of our own. Left to itself it reports how it
is used, opens a web page, writes to the home folder and prints to standard output, which is ours for JSON: none of that
happens here.
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
PATIENCE_S = 10.0
"""How long a machine may take to open its door."""

SMALLEST_STORE_BYTES = 80 * 1024**2
"""Ray refuses less than 75 MiB."""


@contextlib.contextmanager
def connected(address: str | None, *, cpus: int, store_bytes: int) -> Iterator[Any]:
    """The package ``ray``, connected; a connection that this process has already is used and left as it is.

    Without an ``address`` a cluster of ``cpus`` is started here, with a store for ``store_bytes``.

    Raises:
        MissingCapability: Ray is not installed.
        RunFailed: nobody answers at the address, or no cluster could be started.
    """
    ray = imported()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not ray.is_initialized():
            options = _own(stack, cpus, store_bytes) if address is None else _others(address)
            stack.enter_context(_same_signals())
            stack.callback(ray.shutdown)
            try:
                ray.init(**options, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError) as error:
                raise RunFailed(_unreachable(address, error)) from error
        yield ray


def _others(address: str) -> dict[str, Any]:
    """Where to connect to; knocked at first, because Ray goes on for minutes before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), PATIENCE_S).close()
        except (OSError, OverflowError) as error:
            raise RunFailed(_unreachable(address, error)) from error
    return {"address": address}


def imported() -> Any:
    """The package ``ray``.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingCapability(
            f"engine ray needs the package ray ({error}): pip install 'headwater[ray]', or take --engine pool"
        ) from error
    return ray


def _own(stack: contextlib.ExitStack, cpus: int, store_bytes: int) -> dict[str, Any]:
    """How to start a cluster that leaves nothing behind and lets nobody in: actors run whatever they are sent."""
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
    """Without advice on how to set up clusters that last."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; afterwards it is as it was."""
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

"""Methods that do not ship: this device's own copy, which has to be the one that the run was started with.

No code ever travels. A run that was started with ``--method my.py:Class`` announces the hash of that file, and an agent
trains by its own file, or by that of an installed package, only if it has the same hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from .. import methods
from ..core.config import TrainingConfig
from ..core.errors import MissingCapability
from ..core.registry import PinnedFile, own_name
from ..wire.messages.down import Job

_SHOWN = 16
"""Digits of a hash that tell two files apart in a message."""


def method_for(training: TrainingConfig, job: Job) -> str:
    """Return what `edge_agent.methods.create` takes for the method of a job.

    Raises:
        MissingCapability: this device has no copy of the method's file, or another one; it says what to do.
        UsageError: the file that the configuration names cannot be read.
    """
    if not job.method_sha256:
        return job.method
    other_hashes = []
    for reference in training.methods:
        if own_name(reference.rpartition(":")[2]) != job.method:
            continue
        pinned = PinnedFile.of("method", reference, training.folder)
        if pinned.sha256 == job.method_sha256:
            return str(pinned)
        other_hashes.append(pinned.sha256)
    installed = _hash_of_installed(job.method)
    if installed == job.method_sha256:
        return job.method
    wanted_hash = job.method_sha256[:_SHOWN]
    if installed:
        other_hashes.append(installed)
    if other_hashes:
        present = other_hashes[0][:_SHOWN]
        raise MissingCapability(
            f"method '{job.method}' of this device has another file than the run: its SHA-256 is {present}, the run's "
            f"{wanted_hash}; copy the operator's file to this device, or request the run with this one",
            is_public=True,
        )
    raise MissingCapability(
        f"the run uses method '{job.method}' from a file (SHA-256 {wanted_hash}), which this device does not have: "
        'copy that file to this device and name it in the agent\'s file, [training] methods = ["FILE.py:CLASS"], or '
        "install a package with it as an entry point; no code is sent",
        is_public=True,
    )


def _hash_of_installed(name: str) -> str:
    """Return the hash of the module of an entry point, without running it.

    It is empty where no package offers this method.
    """
    module = methods.registry.plugged_in(name)
    if not module:
        return ""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()

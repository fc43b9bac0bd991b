"""The coordinator's part of a run's method: here where it is the contract's own, else in the compute process.

A method's file may import torch, and most do for the part of the client. The coordinator that serves therefore loads
none: what it has to know of a method are a few values (`Described`), and what a method computes for the coordinator is
`Method`'s own code for most of them. Functions that a method defines itself are called in the compute process, which
reads states and updates from the blob store and writes new states there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from edge_agent import methods
from edge_agent.core.errors import RunFailed
from edge_agent.core.own_folders import FolderKind, holds_only, make_folder, remove_folder
from edge_agent.core.storage import read_tensors
from edge_agent.core.task import Tensors
from edge_agent.methods import Method
from edge_agent.methods.values import ClassStatistics
from edge_agent.wire.tensors import Spec

from ..config import AggregationConfig
from ..processes.compute import Compute, InlineCompute, Request
from .aggregation import StoredUpdates

CLASS_STATISTICS = TypeAdapter[ClassStatistics | None](ClassStatistics | None)

STEP_LIMIT_S = 600.0
"""How long one request may take."""

_FUNCTIONS = {
    "objection": ("objection",),
    "broadcast": ("broadcast",),
    "downlink": ("downlink",),
    "aggregate": ("aggregate", "mean", "broadcast"),
}
"""What the coordinator asks of a method in a round, and the functions of `Method` that compute it."""


class Described(Method):
    """A method whose class another process knows: what subclasses of `Method` decide are values here."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Make the method of the values that `describe` returns."""
        self._values = values
        self.shared = tuple(values["shared"])
        self.returned = None if values["returned"] is None else tuple(values["returned"])
        self.norm = values["norm"]
        self.weighting = values["weighting"]
        self.bounded_extras = dict(values["bounded_extras"])
        self.class_statistics = CLASS_STATISTICS.validate_python(values["class_statistics"])

    @property
    def name(self) -> str:
        """The method's name, see `Method.name`."""
        return str(self._values["name"])

    @property
    def needs_last_round(self) -> bool:
        """Whether only all rounds together give a result, see `Method.needs_last_round`."""
        return bool(self._values["needs_last_round"])

    def all_params(self) -> dict[str, Any]:
        """Return the parameters with their defaults, see `Method.all_params`."""
        return dict(self._values["params"])

    def takes_contributions(self) -> bool:
        """Return whether devices without torch can take part, see `Method.takes_contributions`."""
        return bool(self._values["takes_contributions"])

    def server_step_is_mean(self) -> bool:
        """Return whether the server's step is a mean of the updates, see `Method.server_step_is_mean`."""
        return bool(self._values["server_step_is_mean"])

    def one_pass(self) -> bool:
        """Return whether local training can be shortened, see `Method.one_pass`."""
        return bool(self._values["one_pass"])


def describe(method: Method) -> dict[str, Any]:
    """Return the values of a method for `Described`, as JSON; ``own`` names what it computes by its own functions."""
    kind = type(method)
    return {
        "name": method.name,
        "params": method.all_params(),
        "shared": list(method.shared),
        "returned": None if method.returned is None else list(method.returned),
        "norm": method.norm,
        "weighting": method.weighting,
        "bounded_extras": dict(method.bounded_extras),
        "class_statistics": CLASS_STATISTICS.dump_python(method.class_statistics, mode="json"),
        "needs_last_round": method.needs_last_round,
        "takes_contributions": method.takes_contributions(),
        "server_step_is_mean": method.server_step_is_mean(),
        "one_pass": method.one_pass(),
        "own": [
            what
            for what, functions in _FUNCTIONS.items()
            if any(getattr(kind, name) is not getattr(Method, name) for name in functions)
        ],
    }


def _is_earlier_answers(folder: Path) -> bool:
    """Return whether an earlier version, when it was killed, left the numbered files of answers there."""
    return folder.name in {"broadcast", "downlink"} and holds_only(folder, re.compile(r"[0-9]+|\..+\.tmp"))


ANSWERS_FOLDER = FolderKind("answers of the compute process", _is_earlier_answers)


@dataclass
class OwnFunctions:
    """What a method computes for the coordinator by functions of its own, called in the compute process.

    States are given by their digests in the blob store. Call these in the worker: they wait for the compute process.
    """

    names: frozenset[str] = frozenset()
    """What the method computes by functions of its own (keys of `_FUNCTIONS`); the contract's are called here."""

    request: Mapping[str, Any] = field(default_factory=dict)
    """Method, parameters and blob store, for the compute process."""

    compute: Compute = field(default_factory=InlineCompute)
    folder: Path = Path()
    """For the files of answers."""

    _asked: Request | None = None
    _is_cancelled: bool = False

    def objection(self, path: Path) -> str:
        """Return the method's objection to the update in this file, see `Method.objection`."""
        return str(self._ask("objection", path=str(path))["objection"])

    def broadcast(self, state: str) -> Tensors:
        """Return what all clients receive, see `Method.broadcast`."""
        return self._answers("broadcast", ("broadcast",), state=state)["broadcast"]

    def downlinks(self, state: str, clients: tuple[str, ...]) -> dict[str, Tensors]:
        """Return what each of these clients alone receives (`Method.downlink`), by one request."""
        return self._answers("downlink", clients, state=state)

    def aggregate(self, state: str, updates: StoredUpdates, settings: AggregationConfig) -> tuple[str, dict[str, Any]]:
        """Return the digest of the next state, and the decisions about single updates as JSON.

        Raises:
            TrainingFailed: No update has a positive weight.
        """
        of_round = {"updates": updates.as_json(), "settings": settings.model_dump(mode="json")}
        result = self._ask("aggregate", state=state, **of_round)
        return result["digest"], result["decisions"]

    def cancel(self) -> None:
        """End what is being computed, and compute nothing more: the run is over."""
        self._is_cancelled = True
        if self._asked is not None:
            self.compute.cancel(self._asked)

    def _ask(self, function: str, **fields: Any) -> dict[str, Any]:
        self._asked = request = {**self.request, "do": f"coordinator.runs.computations:{function}", **fields}
        try:
            if self._is_cancelled:
                raise RunFailed("request cancelled")
            return self.compute.submit(request, STEP_LIMIT_S)
        finally:
            self._asked = None

    def _answers(self, function: str, names: tuple[str, ...], **fields: Any) -> dict[str, Tensors]:
        into = {name: self.folder / function / str(n) for n, name in enumerate(names)}
        make_folder(self.folder / function, ANSWERS_FOLDER)
        try:
            self._ask(function, into={name: str(path) for name, path in into.items()}, **fields)
            return {name: read_tensors(path) for name, path in into.items()}
        finally:
            remove_folder(self.folder / function, ANSWERS_FOLDER)


def method_of(
    values: Mapping[str, Any], request: Mapping[str, Any], compute: Compute, folder: Path
) -> tuple[Method, OwnFunctions]:
    """Return a method and its own functions, which the compute process calls; the method itself where that is here.

    Args:
        values: What `describe` has returned in the compute process.
        request: Names method, parameters and blob store.
        compute: Calls functions in the compute process.
        folder: For the files of answers.
    """
    if compute.is_here:
        return methods.create(request["method"], request["params"]), OwnFunctions()
    about = {"method": request["method"], "params": request["params"], "blobs": request["blobs"]}
    return Described(values), OwnFunctions(frozenset(values["own"]), about, compute, folder)


def specs_as_json(specs: Mapping[str, Spec]) -> dict[str, list[Any]]:
    """Return shapes and dtypes as JSON."""
    return {name: [spec.dtype.str, list(spec.shape)] for name, spec in specs.items()}


def specs_from_json(body: Mapping[str, Any]) -> dict[str, Spec]:
    """Return shapes and dtypes from the JSON of `specs_as_json`."""
    return {name: Spec(np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in body.items()}

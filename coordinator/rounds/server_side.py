"""The coordinator's part of a run's method: here where it is the contract's own, else in the compute process.

A method's file may import torch, and most do for the part of the client. The coordinator that serves therefore loads
none: what it has to know of a method are a few values (`Described`), and what a method computes for the coordinator is
`Method`'s own code for most of them. Functions that a method defines itself are called in the compute process, which
reads states and updates from the blob store and writes new states there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import methods
from edge_agent.core.errors import RunFailed
from edge_agent.core.own_folders import FolderKind, holds_only, make_folder, remove_folder
from edge_agent.core.storage import read_tensors, write_tensors
from edge_agent.core.task import Tensors
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.methods import Method
from edge_agent.wire.tensors import Spec

from ..config import AggregationConfig
from ..processes.compute import Compute, InlineCompute, Request
from .aggregation import StoredUpdates
from .compute_requests import (
    Aggregated,
    AggregateRequest,
    AnswersRequest,
    Forms,
    MethodValues,
    NextState,
    NextStateRequest,
    Objection,
    ObjectionRequest,
    OfMethod,
    Travelling,
)

STEP_LIMIT_S = 600.0
"""How long one request may take."""

_FUNCTIONS = {
    "objection": ("objection",),
    "broadcast": ("broadcast",),
    "downlink": ("downlink",),
    "aggregate": ("aggregate", "mean", "fold", "next_state", "broadcast"),
    "fold": ("fold",),
    "next_state": ("next_state",),
}
"""What the coordinator asks of a method in a round, and the functions of `Method` that compute it."""


class Described(Method):
    """A method whose class another process knows: what subclasses of `Method` decide are values here."""

    def __init__(self, values: MethodValues) -> None:
        """Make the method of the values that `describe` returns."""
        self.values = values
        self.shared = values.shared
        self.returned = values.returned
        self.norm = values.norm
        self.weighting = values.weighting
        self.bounded_extras = values.bounded_extras
        self.class_statistics = values.class_statistics

    @property
    def name(self) -> str:
        """The method's name, see `Method.name`."""
        return self.values.name

    @property
    def needs_last_round(self) -> bool:
        """Whether only all rounds together give a result, see `Method.needs_last_round`."""
        return self.values.needs_last_round

    def all_params(self) -> dict[str, Any]:
        """Return the parameters with their defaults, see `Method.all_params`."""
        return dict(self.values.params)

    def takes_contributions(self) -> bool:
        """Return whether devices without torch can take part, see `Method.takes_contributions`."""
        return self.values.takes_contributions

    def server_step_is_mean(self) -> bool:
        """Return whether the server's step is a mean of the updates, see `Method.server_step_is_mean`."""
        return self.values.server_step_is_mean

    def server_step_is_sum(self) -> bool:
        """Return whether the server's step needs no more than a sum of the updates, see `Method.server_step_is_sum`."""
        return self.values.server_step_is_sum

    def one_pass(self) -> bool:
        """Return whether local training can be shortened, see `Method.one_pass`."""
        return self.values.one_pass


def describe(method: Method) -> MethodValues:
    """Return the values of a method for `Described`; ``own`` names what it computes by its own functions."""
    if isinstance(method, Described):
        return method.values
    return MethodValues(
        name=method.name,
        params=method.all_params(),
        shared=method.shared,
        returned=method.returned,
        norm=method.norm,
        weighting=method.weighting,
        bounded_extras=dict(method.bounded_extras),
        class_statistics=method.class_statistics,
        needs_last_round=method.needs_last_round,
        takes_contributions=method.takes_contributions(),
        server_step_is_mean=method.server_step_is_mean(),
        server_step_is_sum=method.server_step_is_sum(),
        one_pass=method.one_pass(),
        own=tuple(request for request, functions in _FUNCTIONS.items() if _defines_any(type(method), functions)),
    )


def _defines_any(kind: type[Method], functions: Iterable[str]) -> bool:
    """Return whether a class of methods defines one of these functions itself, instead of inheriting the contract's."""
    return any(getattr(kind, name) is not getattr(Method, name) for name in functions)


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

    about: OfMethod = field(default_factory=lambda: OfMethod(method=""))
    """Method, parameters and blob store, for the compute process."""

    compute: Compute = field(default_factory=InlineCompute)
    folder: Path = Path()
    """For the files of answers."""

    _asked: Request | None = None
    _is_cancelled: bool = False

    def objection(self, path: Path) -> str:
        """Return the method's objection to the update in this file, see `Method.objection`."""
        request = ObjectionRequest(**vars(self.about), path=path)
        return Objection.from_json(self._ask("objection", request)).objection

    def broadcast(self, state: str) -> Tensors:
        """Return what all clients receive, see `Method.broadcast`."""
        return self._answers("broadcast", ("broadcast",), state)["broadcast"]

    def downlinks(self, state: str, clients: tuple[str, ...]) -> dict[str, Tensors]:
        """Return what each of these clients alone receives (`Method.downlink`), by one request."""
        return self._answers("downlink", clients, state)

    def aggregate(self, state: str, updates: StoredUpdates, settings: AggregationConfig) -> Aggregated:
        """Return the digest of the next state, and the decisions about single updates.

        Raises:
            TrainingFailed: No update has a positive weight.
        """
        request = AggregateRequest(**vars(self.about), state=state, updates=updates, settings=settings)
        return Aggregated.from_json(self._ask("aggregate", request))

    def next_state(self, state: str, total: WeightedSum) -> str:
        """Return the digest of the state that the method makes of the sum of a round's updates.

        Raises:
            TrainingFailed: No update has a positive weight.
        """
        folder = self.folder / "next_state"
        make_folder(folder, ANSWERS_FOLDER)
        try:
            path = folder / "total"
            write_tensors(path, total.to_tensors(), durable=False)
            request = NextStateRequest(**vars(self.about), state=state, total=path)
            return NextState.from_json(self._ask("next_state", request)).digest
        finally:
            remove_folder(folder, ANSWERS_FOLDER)

    def cancel(self) -> None:
        """End what is being computed, and compute nothing more: the run is over."""
        self._is_cancelled = True
        if self._asked is not None:
            self.compute.cancel(self._asked)

    def _ask(self, function: str, request: Travelling) -> dict[str, Any]:
        """Return the result of a function of `coordinator.runs.computations`, as the JSON of the pipe.

        Raises:
            RunFailed: The run is over.
            HeadwaterError, OSError: See `Compute.submit`.
        """
        self._asked = {"do": f"coordinator.runs.computations:{function}", **request.to_json()}
        try:
            if self._is_cancelled:
                raise RunFailed("request cancelled")
            return self.compute.submit(self._asked, STEP_LIMIT_S)
        finally:
            self._asked = None

    def _answers(self, function: str, names: tuple[str, ...], state: str) -> dict[str, Tensors]:
        """Return name -> tensors of a function that writes one file of tensors for each of the names.

        The files lie in a folder that is removed after they were read. They have numbers for names, because a name may
        come from a peer.
        """
        folder = self.folder / function
        into = {name: folder / str(number) for number, name in enumerate(names)}
        make_folder(folder, ANSWERS_FOLDER)
        try:
            self._ask(function, AnswersRequest(**vars(self.about), state=state, into=into))
            return {name: read_tensors(path) for name, path in into.items()}
        finally:
            remove_folder(folder, ANSWERS_FOLDER)


def method_of(values: MethodValues, about: OfMethod, compute: Compute, folder: Path) -> tuple[Method, OwnFunctions]:
    """Return a method and its own functions, which the compute process calls; the method itself where that is here.

    Args:
        values: What `describe` has returned in the compute process.
        about: Method, parameters and blob store.
        compute: Calls functions in the compute process.
        folder: For the files of answers.
    """
    if compute.is_here:
        return methods.create(about.method, about.params), OwnFunctions()
    about = OfMethod(method=about.method, params=about.params, blobs=about.blobs)
    return Described(values), OwnFunctions(frozenset(values.own), about, compute, folder)


def forms_of(specs: Mapping[str, Spec]) -> Forms:
    """Return shapes and dtypes for an answer of the compute process."""
    return {name: (spec.dtype.str, spec.shape) for name, spec in specs.items()}


def specs_from_forms(forms: Forms) -> dict[str, Spec]:
    """Return shapes and dtypes from an answer of the compute process."""
    return {name: Spec(np.dtype(dtype), shape) for name, (dtype, shape) in forms.items()}

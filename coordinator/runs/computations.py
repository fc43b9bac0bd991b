"""What a run needs torch for, and what a method computes for the coordinator by functions of its own.

The functions are called through `coordinator.processes.compute`, in a child process of a coordinator that serves. They
get and return the JSON of the pipe, which is read at once into a request of `coordinator.rounds.compute_requests` and
made of an answer there; tensors are in the blob store of the state folder, or in the files ``into``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_agent import methods
from edge_agent.bundle.manifest import variant_figures
from edge_agent.core.storage import mapped, write_tensors
from edge_agent.core.task import State, Tensors
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.methods import Method
from edge_agent.wire.tensors import decode, pieces, specs_of

from ..rounds.compute_requests import (
    Aggregated,
    AggregateRequest,
    AnswersRequest,
    BeginRequest,
    Begun,
    Exported,
    ExportRequest,
    NextState,
    NextStateRequest,
    Nothing,
    Objection,
    ObjectionRequest,
    OfMethod,
    OfModel,
    StepCount,
)
from ..rounds.server_side import describe, forms_of
from ..state.store import BlobStore
from .calibration import own_domains
from .release import NORM_NOTES

Request = Mapping[str, Any]
"""A request as JSON, as the pipe carries it."""


def begin(body: Request) -> dict[str, Any]:
    """Answer a `BeginRequest` with `Begun`."""
    import torch

    from edge_agent.training.parts import norm_names, to_arrays

    request = BeginRequest.from_json(body)
    method = _method(request)
    task = request.task
    torch.default_generator.manual_seed(request.seed)
    model = method.build(task)
    if request.is_new and request.weights is not None:
        request.weights.load_into(model)
    model = method.adapt(model, task)
    fresh = to_arrays(model, method.shared_names(model))
    norm = to_arrays(model, norm_names(model, fresh)) if "encoder" in method.shared else {}
    returned = {name: fresh[name] for name in method.returned_names(model)}
    begun = Begun(
        method=describe(method),
        returned=forms_of(specs_of(returned)),
        extras=forms_of(specs_of(method.sends(model, task))),
        norm=forms_of(specs_of(norm)),
        digest=_blobs(request).put(*pieces(method.start(fresh))) if request.is_new else None,
    )
    return begun.to_json()


# --- a method's own functions ----------------------------------------------------------------------------------------


def objection(body: Request) -> dict[str, Any]:
    """Answer an `ObjectionRequest` with `Objection`."""
    request = ObjectionRequest.from_json(body)
    why = _method(request).objection(decode(mapped(request.path)))
    return Objection(objection=why).to_json()


def broadcast(body: Request) -> dict[str, Any]:
    """Write what all clients receive to the file that an `AnswersRequest` has under that name."""
    request = AnswersRequest.from_json(body)
    answer = _method(request).broadcast(_state(request, request.state))
    write_tensors(request.into["broadcast"], answer, durable=False)
    return Nothing().to_json()


def downlink(body: Request) -> dict[str, Any]:
    """Write what each client alone receives to the file that an `AnswersRequest` has for it."""
    request = AnswersRequest.from_json(body)
    method = _method(request)
    state = _state(request, request.state)
    for client, path in request.into.items():
        write_tensors(path, method.downlink(state, client), durable=False)
    return Nothing().to_json()


def aggregate(body: Request) -> dict[str, Any]:
    """Answer an `AggregateRequest` with `Aggregated`."""
    request = AggregateRequest.from_json(body)
    blobs = _blobs(request)
    before = _state(request, request.state)
    state, decisions = request.updates.aggregate(blobs, _method(request), before, request.settings)
    return Aggregated(digest=blobs.put(*pieces(state)), decisions=decisions.to_fact()).to_json()


def next_state(body: Request) -> dict[str, Any]:
    """Answer a `NextStateRequest` with `NextState`."""
    request = NextStateRequest.from_json(body)
    total = WeightedSum.from_tensors(decode(mapped(request.total)))
    after = _method(request).next_state(_state(request, request.state), total)
    return NextState(digest=_blobs(request).put(*pieces(after))).to_json()


# --- export ----------------------------------------------------------------------------------------------------------


def export_bundle(body: Request) -> dict[str, Any]:
    """Write the bundle of an `ExportRequest`, and answer with `Exported`.

    Raises:
        ExportRejected: A gate failed; an earlier bundle at ``path`` stays.
    """
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, synthetic_inputs

    request = ExportRequest.from_json(body)
    config = request.export
    task = request.task
    is_release = request.purpose == "release"
    method = _method(request)
    state = _state(request, request.state)
    # The next round replaces the bundle of a round: only a release is worth the time that int8 takes.
    has_int8 = config.int8 and is_release
    domains = own_domains(task, config, request.hosted) if has_int8 else {}
    # The legacy exporter saves seconds of each round; the gates are the same.
    is_quick = not is_release and config.exporter == "auto"
    exporter = "legacy" if is_quick else config.exporter
    norm_note = NORM_NOTES[method.norm] if request.pooled else ""
    client_ranges = _tensors(request, request.client_ranges) if is_release else {}
    model = _model(request, method, state)
    # A bundle of one round is for contributions, which need no statistics of others.
    statistics = method.shared_statistics(state) if is_release else None
    trained = TrainedEncoder(model, method, task, method.global_head(state), statistics, norm_note, request.lineage)
    if domains:
        calibration = Calibration.from_domains(domains, client_ranges)
    else:
        calibration = Calibration.from_inputs(synthetic_inputs(task, seed=request.seed), client_ranges)
    options = BundleOptions(request.run, exporter=exporter, int8=has_int8, own_norm=is_release)
    report = build_bundle(trained, calibration, request.path, options)
    parity = report.manifest.parity
    variants = variant_figures(report.manifest)["variants"]
    held_out = {name: variant["accuracy"] for name, variant in variants.items() if variant["accuracy"] is not None}
    exported = Exported(
        bundle_id=report.manifest.bundle_id,
        parity_max_abs=float(parity.max_abs),
        int8_cosine=parity.int8_cosine,
        held_out=held_out,
    )
    return exported.to_json()


def count_steps(body: Request) -> dict[str, Any]:
    """Answer the request of a model, `OfModel`, with `StepCount`."""
    import torch

    from edge_agent.training.ranges import activation_ranges

    request = OfModel.from_json(body)
    model = _model(request, _method(request), _state(request, request.state))
    ranges = activation_ranges(model.part("encoder"), torch.zeros(2, *request.task.input_shape))
    return StepCount(steps=len(ranges)).to_json()


# --- inside ----------------------------------------------------------------------------------------------------------


def _method(request: OfMethod) -> Method:
    return methods.create(request.method, request.params)


def _blobs(request: OfMethod) -> BlobStore:
    return BlobStore(request.blobs)


def _tensors(request: OfMethod, digest: str) -> Tensors:
    """Return the tensors with that digest; none where it is empty."""
    return decode(mapped(_blobs(request).check(digest))) if digest else {}


@functools.lru_cache(maxsize=1)
def _mapped(path: Path, digest: str) -> State:
    """Return a state; several requests need the same one after another."""
    return decode(mapped(BlobStore(path).check(digest)))


def _state(request: OfMethod, digest: str) -> State:
    return dict(_mapped(request.blobs, digest))


def _model(request: OfModel, method: Method, state: State) -> Any:
    from export import model_from_state

    return model_from_state(method, request.task, {**state, **_tensors(request, request.pooled)})

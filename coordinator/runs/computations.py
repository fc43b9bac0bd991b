"""What a run needs torch for, and what a method computes for the coordinator by functions of its own.

The functions are called through `coordinator.processes.compute`, in a child process of a coordinator that serves. They
get JSON and return JSON; tensors are in the blob store of the state folder, or in the files ``into``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from edge_agent import methods
from edge_agent.bundle.manifest import Lineage, variant_figures
from edge_agent.core.storage import mapped, write_tensors
from edge_agent.core.task import State, Task, Tensors
from edge_agent.methods import Method
from edge_agent.wire.tensors import decode, pieces, specs_of

from ..config import AggregationConfig, ExportConfig, HostedConfig
from ..rounds.aggregation import StoredUpdates
from ..rounds.request import Weights
from ..rounds.server_side import describe, specs_as_json
from ..state.store import BlobStore
from .calibration import own_domains
from .release import NORM_NOTES

_HOSTED = TypeAdapter(tuple[HostedConfig, ...])

Request = Mapping[str, Any]


def begin(request: Request) -> dict[str, Any]:
    """Return the method for `server_side.Described`, the forms of what travels, and the first state's ``digest``.

    Args:
        request: Names method, task and blob store; ``seed`` and ``weights`` are the run's; ``is_new`` says whether the
            run has no state yet.
    """
    import torch

    from edge_agent.training.parts import norm_names, to_arrays

    method = _method(request)
    task = Task.model_validate(request["task"])
    torch.default_generator.manual_seed(request["seed"])
    model = method.build(task)
    if request["is_new"] and request["weights"] is not None:
        Weights.model_validate(request["weights"]).load_into(model)
    fresh = to_arrays(model, method.shared_names(model))
    norm = to_arrays(model, norm_names(model, fresh)) if "encoder" in method.shared else {}
    returned = {name: fresh[name] for name in method.returned_names(model)}
    return {
        "method": describe(method),
        "returned": specs_as_json(specs_of(returned)),
        "extras": specs_as_json(specs_of(method.sends(model, task))),
        "norm": specs_as_json(specs_of(norm)),
        "digest": _blobs(request).put(*pieces(method.start(fresh))) if request["is_new"] else None,
    }


# --- a method's own functions ----------------------------------------------------------------------------------------


def objection(request: Request) -> dict[str, Any]:
    """Return as ``objection`` why the update in the file ``path`` cannot be honest; empty when it can."""
    return {"objection": _method(request).objection(decode(mapped(Path(request["path"]))))}


def broadcast(request: Request) -> dict[str, Any]:
    """Write what all clients receive to the file ``into["broadcast"]``."""
    write_tensors(Path(request["into"]["broadcast"]), _method(request).broadcast(_state(request)), durable=False)
    return {}


def downlink(request: Request) -> dict[str, Any]:
    """Write what each client alone receives to the file that ``into`` has for it."""
    method = _method(request)
    state = _state(request)
    for client, path in request["into"].items():
        write_tensors(Path(path), method.downlink(state, client), durable=False)
    return {}


def aggregate(request: Request) -> dict[str, Any]:
    """Return the ``digest`` of the next state, and the ``decisions`` about single updates."""
    updates = StoredUpdates.from_json(request["updates"])
    settings = AggregationConfig.model_validate(request["settings"])
    blobs = _blobs(request)
    state, decisions = updates.aggregate(blobs, _method(request), _state(request), settings)
    return {"digest": blobs.put(*pieces(state)), "decisions": decisions.body()}


# --- export ----------------------------------------------------------------------------------------------------------


def export_bundle(request: Request) -> dict[str, Any]:
    """Write the bundle to ``path``, and return its id and how far its encoder is from torch.

    Raises:
        ExportRejected: A gate failed; an earlier bundle at ``path`` stays.
    """
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, synthetic_inputs

    config = ExportConfig.model_validate(request["export"])
    task = Task.model_validate(request["task"])
    is_release = request["purpose"] == "release"
    method = _method(request)
    state = _state(request)
    hosted = _HOSTED.validate_python(request["hosted"])
    # The next round replaces the bundle of a round: only a release is worth the time that int8 takes.
    has_int8 = config.int8 and is_release
    domains = own_domains(task, config, hosted) if has_int8 else {}
    # The legacy exporter saves seconds of each round; the gates are the same.
    is_quick = not is_release and config.exporter == "auto"
    exporter = "legacy" if is_quick else config.exporter
    norm_note = NORM_NOTES[method.norm] if request["pooled"] else ""
    client_ranges = _tensors(request, "client_ranges") if is_release else {}
    lineage = None if request["lineage"] is None else Lineage.model_validate(request["lineage"])
    model = _model(request, method, task, state)
    # A bundle of one round is for contributions, which need no statistics of others.
    statistics = method.shared_statistics(state) if is_release else None
    trained = TrainedEncoder(model, method, task, method.global_head(state), statistics, norm_note, lineage)
    if domains:
        calibration = Calibration.from_domains(domains, client_ranges)
    else:
        calibration = Calibration.from_inputs(synthetic_inputs(task, seed=request["seed"]), client_ranges)
    options = BundleOptions(request["run"], exporter=exporter, int8=has_int8, own_norm=is_release)
    report = build_bundle(trained, calibration, Path(request["path"]), options)
    parity = report.manifest.parity
    variants = variant_figures(report.manifest)["variants"]
    return {
        "bundle_id": report.manifest.bundle_id,
        "parity_max_abs": float(parity.max_abs),
        "int8_cosine": parity.int8_cosine,
        "held_out": {
            name: variant["accuracy"] for name, variant in variants.items() if variant["accuracy"] is not None
        },
    }


def count_steps(request: Request) -> dict[str, Any]:
    """Return the number of ``steps`` of the encoder whose activations have ranges."""
    import torch

    from edge_agent.training.ranges import activation_ranges

    task = Task.model_validate(request["task"])
    model = _model(request, _method(request), task, _state(request))
    return {"steps": len(activation_ranges(model.part("encoder"), torch.zeros(2, *task.input_shape)))}


# --- inside ----------------------------------------------------------------------------------------------------------


def _method(request: Request) -> Method:
    return methods.create(request["method"], request["params"])


def _blobs(request: Request) -> BlobStore:
    return BlobStore(Path(request["blobs"]))


def _tensors(request: Request, which: str) -> Tensors:
    return decode(mapped(_blobs(request).check(request[which]))) if request[which] else {}


@functools.lru_cache(maxsize=1)
def _mapped(path: Path, digest: str) -> State:
    """Return a state; several requests need the same one after another."""
    return decode(mapped(BlobStore(path).check(digest)))


def _state(request: Request) -> State:
    return dict(_mapped(Path(request["blobs"]), request["state"]))


def _model(request: Request, method: Method, task: Task, state: State) -> Any:
    from export import model_from_state

    return model_from_state(method, task, {**state, **_tensors(request, "pooled")})

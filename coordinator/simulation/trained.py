"""The trained model of a run in a state folder: its latest checkpoint, and the bundle of its encoder.

The state folder is that of a coordinator or of a simulation, whose clients have the samples to compare int8 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import UsageError

from ..config import ExportConfig, HostedConfig
from ..rounds.request import Request
from ..shadowed import check_export
from ..state.store import StateFolder
from ..views.runs import RunRecord, replay

if TYPE_CHECKING:
    from edge_agent.data import Samples
    from edge_agent.methods import Method
    from export import Report


def export_run(
    folder: Path,
    out: Path,
    settings: ExportConfig,
    *,
    run: str | None = None,
    calibration: Sequence[str] = (),
    hosted: Sequence[HostedConfig] = (),
) -> tuple[Report, RunRecord]:
    """Freeze the encoder of a run in a state folder, check it, quantize it, and write it as one bundle file.

    ``run``: default: the latest one with a closed round. ``calibration``: labelled data sources, one for each domain,
    that int8 takes its ranges from and is compared on; default: those of the settings and of ``hosted`` clients, or of
    all clients of a simulation.

    Raises:
        UsageError: no run has a closed round.
        ExportRejected: the bundle does not pass its checks.
    """
    check_export()
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, domains_of, synthetic_inputs

    from ..runs.calibration import own_domains
    from ..runs.lineage import lineage_of
    from ..runs.release import NORM_NOTES, sha256_of_encoder, sign
    from .results import training_samples
    from .setup import read_plan

    latest = TrainedModel.of(folder, run)
    task = latest.request.task
    method = latest.method
    domains: Mapping[str, Samples] = {}
    if settings.int8 and calibration:
        domains = domains_of(calibration, task)  # as typed; those of the configuration count from its folder
    elif settings.int8:
        domains = own_domains(task, settings, hosted)
        plan = read_plan(folder)
        if not domains and plan is not None:
            domains = training_samples(plan, folder)
    with StateFolder(folder).look() as state:
        sha256 = sha256_of_encoder({**latest.state, **latest.pooled})
        lineage = lineage_of(state, latest.record.run, latest.request, sha256)
    norm_note = NORM_NOTES[method.norm] if latest.pooled else ""
    classifier = method.global_head(latest.state)
    statistics = method.shared_statistics(latest.state)
    trained = TrainedEncoder(latest.model, method, task, classifier, statistics, norm_note, lineage)
    if domains:
        inputs = Calibration.from_domains(domains, latest.client_ranges)
    else:
        inputs = Calibration.from_inputs(synthetic_inputs(task, seed=latest.request.seed), latest.client_ranges)
    options = BundleOptions(latest.record.run, exporter=settings.exporter, int8=settings.int8)
    report = build_bundle(trained, inputs, out, options)
    sign(out, folder)
    return report, latest.record


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run as its latest checkpoint has it, with batch norm pooled where that stays with clients."""

    record: RunRecord
    request: Request
    method: Method
    model: Any
    state: dict[str, Any]
    pooled: dict[str, Any]
    client_ranges: dict[str, Any]

    def write_weights(self, out: Path) -> str:
        """Write the encoder's tensors by its own names as a safetensors file, and return the hash of the file."""
        from edge_agent.core.storage import write_tensors
        from edge_agent.training.parts import to_arrays

        encoder = self.model.encoder
        metadata = {"run": self.record.run, "round": str(self.record.round)}
        return write_tensors(out, to_arrays(encoder, encoder.state_dict()), metadata)

    @classmethod
    def of(cls, folder: Path, run: str | None = None) -> TrainedModel:
        """Return the trained model of a run in a state folder.

        Args:
            folder: The state folder of a coordinator or of a simulation.
            run: The run; None: the latest one with a closed round and its checkpoint.

        Raises:
            UsageError: No run has a closed round, or retention has removed the run's checkpoint.
        """
        from edge_agent import methods
        from edge_agent.wire.tensors import decode
        from export import model_from_state

        from ..runs.release import pooled_before, ranges_before
        from .own_parts import register
        from .results import pooled_batch_norm
        from .setup import read_plan

        # 1. What the run has left in the folder.
        with StateFolder(folder).look() as state:
            record = _record_with_checkpoint(state, run)
            weights = decode(state.blobs.read(record.checkpoint or ""))
            pooled = pooled_before(state, record.run, record.round)
            client_ranges = ranges_before(state, record.run, record.round)
        # 2. Methods and encoders from a user's files are those of the simulation's plan.
        plan = read_plan(folder)
        if plan is not None:
            register(plan)
        # 3. Batch norm that stays with clients is pooled by the coordinator, or from the files of simulated clients.
        request = Request.from_fact(record.request)
        method = methods.create(request.method_reference, request.params)
        if not pooled:
            pooled = pooled_batch_norm(folder, record.run, record.round, method, request.task)
        model = model_from_state(method, request.task, {**weights, **pooled})
        return cls(record, request, method, model, weights, pooled, client_ranges)


def _record_with_checkpoint(state: StateFolder, run: str | None) -> RunRecord:
    """Return the record of a run that has a closed round and its checkpoint; None: of the latest such run.

    Raises:
        UsageError: There is none, or retention has removed the checkpoint of ``run``.
    """
    names = list(reversed(state.journal.runs()))
    if run is not None:
        names = [run]
    for name in names:
        record = replay(state.journal, name)
        has_closed_round = record.round > 0 and record.checkpoint is not None
        if not has_closed_round:
            continue
        if not record.is_pruned:
            return record
        if run is not None:
            raise UsageError(
                f"the checkpoint of {run} was removed by retention ([retention] runs, 'headwater prune'); "
                "put the state folder back from a backup, or request the run again"
            )
    which = "there are no runs with"
    if run is not None:
        which = f"run '{run}' has"
    raise UsageError(f"{which} no closed round yet; nothing can be exported before the first one")

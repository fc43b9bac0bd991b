"""``headwater pretrain``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.errors import UsageError

from ..config import CoordinatorConfig, ExportConfig, load_config
from ..text import counted
from .options import Config, Json
from .output import console, present, ready_for, set_up_logging, table
from .run import request_for

if TYPE_CHECKING:
    from ..rounds.compute_requests import WarmStartRequest, WarmStartResult

Out = Annotated[Path, typer.Option("--out", "-o", help="File to write: the trained tensors, as safetensors.")]
Method = Annotated[
    str | None,
    typer.Option("--method", "-m", help="Method of the run to come; default: run.method.", show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of weights and order; default: run.seed.", show_default=False),
]
Wait = Annotated[
    float, typer.Option("--wait", min=1, max=86400, help="Seconds within which all processes have to come.")
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        help="Address of this machine at which the others reach this process; default: the one from which it reaches "
        "MASTER_ADDR.",
        show_default=False,
    ),
]


def pretrain(
    out: Out,
    config: Config = None,
    method: Method = None,
    seed: Seed = None,
    wait: Wait = 300.0,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Train the warm start of the configuration ahead of a run, on one machine or on several.

    Trains as [warm_start] says, and writes a file that 'headwater run --weights FILE --no-warm-start' begins with. With
    torchrun, or the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, several processes train one model; each
    machine needs the same configuration and samples. With the same [warm_start] parts the file has the same bits for
    any number of processes. The process of rank 0 writes it.

    Example: headwater pretrain --config coordinator.toml --out encoder.safetensors
    """
    from ..hosted.machines import Launch

    set_up_logging(quiet=True)
    launch = Launch.from_environment(os.environ)
    settings = load_config(config)
    request = _request(settings, method, seed, out)
    is_first = launch is None or launch.number == 0
    if is_first:
        ready_for(out)
    if launch is None:
        result = _train_alone(request)
    else:
        from ..hosted.machines import Meeting
        from ..hosted.own_data import train_warm_on_machines

        meeting = Meeting(launch, wait, lambda line: console.print(line, soft_wrap=True), address)
        done = train_warm_on_machines(request, meeting)
        if done is None:
            line = f"rank {launch.number} of {launch.processes} is done; rank 0 has the result"
            present({"rank": launch.number, "processes": launch.processes}, [line], as_json=as_json)
            return
        result = done
    _show(result, out, as_json=as_json)


def _request(settings: CoordinatorConfig, method: str | None, seed: int | None, out: Path) -> WarmStartRequest:
    """Return what is trained.

    Raises:
        UsageError: The configuration has no [warm_start], or a run of it could not begin.
    """
    from ..rounds.compute_requests import WarmStartRequest

    warm_start = settings.warm_start
    if warm_start is None:
        raise UsageError(
            "the configuration has no [warm_start]; add one with the data to train on, as in "
            "configs/coordinator-hosted.toml"
        )
    # What else a coordinator has on its machine is not needed for this, and is not on the other machines.
    absent = {"hosted": (), "hosted_ray": None, "hosted_devices": (), "proxy": None, "export": ExportConfig()}
    request = request_for(settings.model_copy(update=absent), method=method, seed=seed)
    return WarmStartRequest(
        method=request.method_reference,
        params=request.params,
        task=request.task,
        seed=request.seed,
        weights=request.weights,
        into=out.absolute(),
        settings=warm_start,
    )


def _train_alone(request: WarmStartRequest) -> WarmStartResult:
    """Train on the devices of this machine, as the coordinator would before a run."""
    from ..hosted.own_data import train_warm
    from ..rounds.compute_requests import WarmStartResult

    return WarmStartResult.from_json(train_warm(request.to_json()))


def _show(result: WarmStartResult, out: Path, *, as_json: bool) -> None:
    """Print what came out, and what to do with it."""
    from edge_agent.core.storage import sha256_file

    fields = {**result.to_json(), "path": str(out), "sha256": sha256_file(out)}
    accuracy = "unknown" if result.accuracy is None else f"{result.accuracy:.4f}"
    rows = [
        ("samples", f"{result.samples} of {result.data}, {counted(result.epochs, 'epoch')}"),
        ("acc.warm_start", accuracy),
        ("devices", result.device),
        ("SHA-256", fields["sha256"]),
    ]
    command = f"headwater run --weights {shlex.quote(str(out))} --no-warm-start"
    present(fields, [table("trained", ("what", "value"), rows, left=2), f"next: {command}"], as_json=as_json)

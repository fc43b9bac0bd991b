"""``headwater demo``: a real federation of processes on this machine, up to personal heads on devices.

Data are digits in four styles (see `edge_agent.data.digits`). Writers are split six ways, one part for each agent: the
two head-tier agents have styles that training agents know, few samples, and digits that no training agent has seen.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.bundle.starter import NAME
from edge_agent.core.children import stop_on_signals
from edge_agent.core.config import parse
from edge_agent.core.errors import HeadwaterError, UsageError
from edge_agent.core.own_folders import MARK, FolderKind, holds_only, make_folder, remove_folder
from edge_agent.core.registry import is_reference
from edge_agent.core.task import ImageInput, Task

from ..config import CoordinatorConfig, RunConfig, WebConfig
from ..state.noise import Compared, Gain, classify_gain, classify_mean_gain
from ..text import counted, listed
from .options import Given, Json, Verbose, from_model
from .output import console, present, set_up_logging, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..processes.supervisor import ChildProcess
    from ..runs.run_summary import RunSummary
    from ..state.run_lines import AgentLine
    from ..state.store import RunFolder
    from ..web.server import Settings


MARKER = ".headwater-demo"
"""File in the folder of a demonstration."""


_OF_A_DEMO = re.compile(
    rf"{re.escape(MARKER)}|{re.escape(MARK)}|coordinator|agents|logs|pictures|starter|(train|head)-[a-z]+\.toml|\..+\.tmp"
)
"""Names of what a demonstration makes in its folder; anything else there is somebody's own."""


def _is_earlier_demo(folder: Path) -> bool:
    return (folder / MARKER).is_file() and holds_only(folder, _OF_A_DEMO)


DEMO_FOLDER = FolderKind("demonstration", _is_earlier_demo)

TRAIN_STYLES = ("optdigits", "inverted", "photo", "rendered")
HEAD_STYLES = ("photo", "rendered")
STYLES = (*TRAIN_STYLES, *HEAD_STYLES)
HELD_OUT = 0.8
"""Share of each agent's samples that is held out: all devices learn from 60 to 80 samples."""

SAMPLES_OF_RENDERED = 400
EVALUATE_EVERY = 3

GAIN_WORDS = {
    Gain.ABOVE: "better",
    Gain.WITHIN: "as good as alone",
    Gain.BELOW: "better off alone",
    Gain.UNKNOWN: "",
}

SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg_ft": {"lr": 0.03, "momentum": 0.9, "local_epochs": 3, "batch_size": 16, "tune": "all"},
    "repper": {"augment": False, "global_head": True, "local_epochs": 4, "batch_size": 64, "lr": 3e-3},
}
"""Settings that are not the defaults of a method; the demonstration prints them.

Several epochs with small batches, because an agent has 60 to 80 images. RepPer's views flip images, which turns digits
into other digits; its shared classifier is for ``acc.global``."""


Folder = Annotated[
    Path, typer.Option("--dir", help="Folder for configurations, state and results; replaced each time.")
]


Web = Annotated[bool, typer.Option("--web", help="Show it live in a browser, and stay until Ctrl-C.")]

Serve = Annotated[
    bool, typer.Option("--serve", help="Let a new device answer at the end, on a page, and stay until Ctrl-C.")
]


@from_model(
    RunConfig,
    ("method", "rounds", "seed"),
    help={
        "method": "Method to train with; default: fedavg_ft.",
        "rounds": "Number of rounds; default: 6.",
        "seed": "Seed of weights, cohorts and agents; default: 0.",
    },
    bounds=True,
)
def demo(
    given: Given,
    folder: Folder = Path("headwater-demo"),
    web: Web = False,
    serve: Serve = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Go the whole way on this machine in one to two minutes: no network, no GPU, no download.

    Starts a broker, a coordinator and six agents, each in its own process. Four agents train the starter encoder
    further together, each on digits of another style; the frozen encoder then goes to two new agents without torch, of
    writers that were in no training data, and they fit personal heads. All have few samples. The bundle is released to
    the new ones at once, by export.release = "each_run"; elsewhere 'headwater release create' does that.

    Example: headwater demo --method fedavg --rounds 10

    Example: headwater demo --web

    Example: headwater demo --serve
    """
    from ..processes.compute import InlineCompute
    from ..service.app import coordinator
    from ..web.server import WebProcess
    from .demo_starter import accuracies_on_starter
    from .follow import follow
    from .run import request_for
    from .web import announcement

    set_up_logging(verbose=verbose, quiet=True)
    begin = time.monotonic()
    folder = folder.parent.resolve() / folder.name
    options = {"method": "fedavg_ft", "rounds": 6, "seed": 0, **given}
    _make_demo_folder(folder)
    config = _coordinator_config(folder, options["method"])
    request = request_for(config, **options, params=SETTINGS.get(options["method"], {}))
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(coordinator(config, compute=InlineCompute()))
        if web:
            view = WebProcess(_web_settings(config), announcement(config.state))
            stack.callback(view.stop)
            view.start()
        agents = stack.enter_context(_agents(folder, service.broker_url, options["seed"]))
        run = service.state.journal.request_run(request.to_fact())

        def step() -> None:
            service.step(service.idle_s())
            for name, agent in agents.items():
                if not agent.is_running:
                    raise HeadwaterError(f"agent {name} ended: {agent.exit_reason()}")

        follow(service.state, run, step)
        results = service.state.run(run)
        if not web:
            stack.close()  # ends coordinator and agents
        console.print("fitting heads on the starter encoder as it comes, to compare", soft_wrap=True)
        on_starter = accuracies_on_starter(_new_devices(options["seed"]), HELD_OUT, folder / "starter")
        _present(results, folder, on_starter, time.monotonic() - begin, as_json=as_json)
        if serve:
            page = stack.enter_context(_served_device(folder, config.task, options["seed"]))
            console.print(f"device head-{HEAD_STYLES[-1]} answers; open {page}", soft_wrap=True)
        if web or serve:
            _stay(step if web else None)


def _stay(step: Callable[[], None] | None) -> None:
    """Wait for Ctrl-C.

    Args:
        step: Moves coordinator and agents on meanwhile; None: they have ended.
    """
    what = "the page stays" if step is None else "the web view, the coordinator and the agents stay"
    console.print(f"{what} until Ctrl-C", soft_wrap=True)
    with stop_on_signals() as stop:
        while not stop.is_set():
            if step is None:
                stop.wait(1.0)
            else:
                step()


def _served_device(folder: Path, task: Task, seed: int) -> contextlib.AbstractContextManager[str]:
    """Return a context in which a new device answers, which gives the address of its page."""
    from .demo_page import served

    style = HEAD_STYLES[-1]
    log = folder / "logs" / "serve.log"
    source = _source(len(STYLES) - 1, style, seed)
    if not isinstance(task.input, ImageInput):
        raise UsageError("the demo's inputs are images")
    return served(folder / f"head-{style}.toml", source, task.input, log)


def _source(number: int, style: str, seed: int) -> str:
    """Return the data source of one of the demo's agents."""
    count = f"&n={SAMPLES_OF_RENDERED}" if style == "rendered" else ""
    return f"digits:{style}?client={number}&clients={len(STYLES)}&seed={seed}{count}"


def _new_devices(seed: int) -> dict[str, str]:
    """Return the data source of each new device."""
    first = len(TRAIN_STYLES)
    return {f"head-{style}": _source(first + number, style, seed) for number, style in enumerate(HEAD_STYLES)}


def _web_settings(config: CoordinatorConfig) -> Settings:
    """Return settings of a web view at the usual port of this machine, or at any free one where that is taken."""
    from ..web.server import Settings, listening

    web = WebConfig()
    try:
        listening(web).close()
    except UsageError:
        web = WebConfig(listen="127.0.0.1:0")
    return Settings.of(config, web, None)


def _present(
    results: RunFolder, folder: Path, on_starter: Mapping[str, float], seconds: float, *, as_json: bool
) -> None:
    """Print the results of the demonstration.

    Args:
        results: The folder of the run.
        folder: The folder of the demonstration.
        on_starter: New device -> the accuracy, 0..1, of a head on the starter encoder before anybody trained it.
        seconds: Duration of the whole demonstration.
        as_json: Whether to print JSON.

    Raises:
        HeadwaterError: The run left no summary.
    """
    from ..runs.run_summary import RunSummary
    from .run import footnotes

    summary = results.summary()
    if summary is None:
        raise HeadwaterError(f"{results.run} left no summary in {results.folder}; look at {folder / 'logs'}")
    names = ("run_id", "method", "rounds", "seed", "encoder_sha256", "agents", "faults", "warnings", "next_steps")
    result = {
        **{name: summary[name] for name in (*names, "bundle")},
        "starter": {device: round(accuracy, 4) for device, accuracy in on_starter.items()},
        "seconds": round(seconds, 1),
        "report": str(results.report_path),
        "folder": str(folder),
    }
    last_line = f"All of it took {seconds:.0f} s. Plots: {results.report_path}"
    shown = RunSummary.from_json(summary)
    lines = _describe_results(shown, on_starter, last_line)
    present(result, [gains_table(shown), *footnotes(shown), *lines], as_json=as_json)


def gains_table(summary: RunSummary) -> Table:
    """Return what each device gains, new devices first and the largest gain first; what is within noise is grey."""
    agents = sorted(summary.agents, key=_order_of_gain)
    gains = [_classify_gain(agent) for agent in agents]
    rows = []
    for agent, gain in zip(agents, gains, strict=True):
        points = _gain_points(agent)
        rows.append(
            (
                f"{agent.id} *" if agent.notes else agent.id,
                "new" if agent.tier == "head" else "trains",
                GAIN_WORDS[gain],
                "" if points is None else f"{points:+.1f}",
                *(agent.acc[scope] for scope in ("local", "global", "personal")),
                agent.samples,
            )
        )
    columns = ("device", "is", "with the shared encoder", "gain,\npoints", "acc.local\nalone", "acc.global\nshared")
    title = f"{summary.run_id}: {summary.method}, {counted(summary.rounds, 'round')}"
    result = table(title, (*columns, "acc.personal\npersonal", "samples"), rows, left=3)
    for row, gain in zip(result.rows, gains, strict=True):
        if gain is Gain.WITHIN:
            row.style = "bright_black"
    return result


def _order_of_gain(agent: AgentLine) -> tuple[bool, float]:
    """Return what sorts new devices before those that train, and larger gains before smaller and unknown ones."""
    gain = _gain_points(agent)
    return agent.tier != "head", math.inf if gain is None else -gain


def _classify_gain(agent: AgentLine) -> Gain:
    """Return whether a device's personal model is better than its best model alone by more than noise."""
    local = agent.acc["local"]
    return classify_gain(local, agent.acc["personal"], agent.support, better_alone=agent.better_alone)


def _gain_points(agent: AgentLine) -> float | None:
    """Return how many points ``acc.personal`` is above ``acc.local``; None where one of them is not known."""
    personal = agent.acc["personal"]
    local = agent.acc["local"]
    return None if personal is None or local is None else 100 * (personal - local)


def _describe_results(summary: RunSummary, on_starter: Mapping[str, float], last_line: str) -> Iterator[str]:
    """Yield what the table means, what to try next, and the commands that use the bundle.

    Args:
        summary: The summary of the run.
        on_starter: New device -> the accuracy, 0..1, of a head on the starter encoder before anybody trained it.
        last_line: A line on the demonstration itself, which comes before the commands.
    """
    from edge_agent.core.installation import program_command

    from ..runs.result_notes import describe_warnings

    yield from _describe_new_devices(summary, on_starter)
    unchanged = [agent for agent in summary.agents if _classify_gain(agent) is Gain.WITHIN]
    if unchanged:
        yield (
            f"As good as alone: the difference of {counted(len(unchanged), 'device')} is within the noise of "
            f"{min(agent.support or 0 for agent in unchanged)} held-out samples or more."
        )
    yield from (f"warning: {line}" for line in describe_warnings(summary.warnings))
    yield from (f"to try next: {next_step.message}" for next_step in summary.next_steps)
    if settings := SETTINGS.get(summary.method or ""):
        options = " ".join(f"--set {name}={json.dumps(value)}" for name, value in settings.items())
        yield f"Parameters that differ from the defaults of {summary.method}: {options}"
    yield last_line
    if summary.bundle is not None:
        yield "Next, on this machine or any other, without torch and without a network:"
        source = f"digits:{HEAD_STYLES[0]}?client={len(TRAIN_STYLES)}&clients={len(STYLES)}"
        program = program_command("edge-agent")
        path = shlex.quote(summary.bundle.path)
        yield f"  {program} fit --bundle {path} --data '{source}' --out my-head"
        yield f"  {program} evaluate --bundle {path} --data '{source}' --head my-head"
        yield f"  {program} serve --bundle {path} --head my-head"


def _describe_new_devices(summary: RunSummary, on_starter: Mapping[str, float]) -> Iterator[str]:
    """Yield the mean accuracies of the new devices: on the trained encoder, on the starter encoder, and alone."""
    # 1. The means over the new devices that have all three figures.
    agents = [agent for agent in summary.agents if agent.id in on_starter and _gain_points(agent) is not None]
    if not agents:
        return
    before = fmean(on_starter[agent.id] for agent in agents)
    personal = fmean(agent.acc["personal"] or 0.0 for agent in agents)
    local = fmean(agent.acc["local"] or 0.0 for agent in agents)
    who = "new device, without torch, gets" if len(agents) == 1 else f"{len(agents)} new devices, without torch, get"
    yield (
        f"The {who} {personal:.3f} with a personal head on the shared encoder, "
        f"{before:.3f} with one on the starter encoder before anybody trained it, {local:.3f} with the best model that "
        "each can fit alone."
    )
    # 2. How much of the gain is due to training together: the trained encoder against the starter encoder.
    compared = [Compared(on_starter[agent.id], agent.acc["personal"] or 0.0, agent.support or 0) for agent in agents]
    verdict = classify_mean_gain(compared)
    if verdict is Gain.ABOVE:
        yield "Training together helps them by more than noise."
    elif verdict is Gain.BELOW:
        yield "Training together harms them by more than noise: here the starter encoder as it comes is the better one."
    else:
        yield "The first two differ within noise: a pretrained encoder alone brings most of this gain."


def _make_demo_folder(folder: Path) -> None:
    """Make the folder of the demonstration anew; an earlier demonstration there is removed.

    Raises:
        UsageError: what is there is not an earlier demonstration, or cannot be removed.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise UsageError(f"{folder} is not empty and not of an earlier demo; choose another with --dir")
        others = sorted(path.name for path in folder.iterdir() if not _OF_A_DEMO.fullmatch(path.name))
        if others:
            raise UsageError(
                f"{folder} holds {listed(others)} beside the earlier demo, which would be removed as well; move that "
                "elsewhere, or choose another folder with --dir"
            )
        if not remove_folder(folder, DEMO_FOLDER):
            raise UsageError(
                f"{folder}: the earlier demo cannot be removed (see the warning); choose another with --dir"
            )
    make_folder(folder, DEMO_FOLDER)
    (folder / MARKER).touch()


def _coordinator_config(folder: Path, method: str) -> CoordinatorConfig:
    """Return the coordinator's configuration; its runs begin with the starter encoder where the method shares one."""
    from edge_agent import methods

    from .start_from import bundle_start

    task = Task(input=ImageInput(channels=3), class_names=tuple("0123456789"), encoder="starter_cnn")
    raw = {
        "federation": "demo",
        "state": str(folder / "coordinator"),
        "embedded": {"port": 0},
        "task": task.model_dump(mode="json"),
        "cohort": {"min_agents": len(TRAIN_STYLES)},
        "round": {"quorum": 1.0, "deadline_s": 300.0},
        "evaluate_every": EVALUATE_EVERY,
        # All devices are this machine's own. The one whose style is learned last changes the model most for a while:
        # bounded to a third of the sum it stays behind, then it looks suspect, and its style is never learned.
        "aggregation": {"max_share": None},
        # The older exporter takes 0.2 s for this encoder where the newer takes 7; the gates are the same.
        "export": {
            "release": "each_run",
            "exporter": "legacy",
            "calibration": [f"digits:{style}?n=128" for style in TRAIN_STYLES],
        },
    }
    config = parse(CoordinatorConfig, raw, where="the demo's configuration")
    config = bundle_start(NAME).configure(config)
    # The weights would reach no device by a method that shares no encoder. A method from a user's file, which is not
    # loaded here, is assumed to share it.
    shares_encoder = is_reference(method) or "encoder" in methods.create(method).shared
    if shares_encoder:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"weights": None})})


@contextlib.contextmanager
def _agents(folder: Path, url: str, seed: int) -> Iterator[dict[str, ChildProcess]]:
    """Run all agents as processes, each with a configuration file as one would write it by hand."""
    from edge_agent.core.child_process import module_command

    from ..processes.supervisor import ChildProcess

    agents: dict[str, ChildProcess] = {}
    try:
        for number, style in enumerate(STYLES):
            tier = "train" if number < len(TRAIN_STYLES) else "head"
            name = f"{tier}-{style}"
            path = folder / f"{tier}-{style}.toml"
            source = _source(number, style, seed)
            path.write_text(
                f'id = "{name}"\nfederation = "demo"\ntier = "{tier}"\nstate = "agents/{name}"\nheartbeat_s = 5\n\n'
                f'[broker]\nurl = "{url}"\n\n[data]\nsource = "{source}"\ntest_fraction = {HELD_OUT}\n',
                encoding="utf-8",
            )
            run_agent = module_command("edge_agent", "run", "--config", str(path))
            agents[name] = ChildProcess(run_agent, folder / "logs" / f"{name}.log")
        yield agents
    finally:
        for agent in agents.values():
            agent.terminate()
        for agent in agents.values():
            agent.stop()

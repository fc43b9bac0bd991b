"""Commands about the agent of this device: run and status."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from ..agent.health import look_at_disk, problem_of
from ..bundle import figure_rows
from ..bundle.trust import TrustStore
from ..core import formats
from ..core.config import AgentConfig, check_tls, load, read_file
from ..core.errors import BrokerAway, ConfigError, HeadwaterError, StateError
from ..core.limits import limit_threads
from ..core.locks import folder_lock
from ..core.logs import LogFormat, log_json
from ..core.storage import read_json
from ..core.time_and_text import show_time
from ..identity.certificates import show_utc
from ..version import __version__
from ..wire.seal import key_file
from . import output
from .scores import accuracy_notes, same_sitting_rows
from .where import add_agent, check_exists, config_of_folder, named

_REPORTED = (
    "version",
    "tier",
    "welcomed",
    "federation_id",
    "other_coordinator",
    "commands",
    "waits_for",
    "broker",
    "downloads",
    "uploads",
    "job",
    "working",
    "bundle_id",
    "candidate",
    "operator_pin",
    "rolled_back",
    "refit",
    "condition",
    "fault",
)


_AT_REST = {
    "version": None,
    "welcomed": False,
    "other_coordinator": None,
    "waits_for": None,
    "broker": None,
    "downloads": None,
    "uploads": None,
    "job": None,
    "working": False,
    "candidate": None,
    "refit": None,
}
"""Of what an agent wrote that no longer runs, this is over."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``edge-agent run``."""
    parser.add_argument("--config", type=Path, default=Path("agent.toml"), help="TOML file (default: agent.toml)")
    parser.add_argument("--no-wait", action="store_true", help="exit with 75 when the broker does not answer")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow a broker without TLS on another machine, and unsigned bundles from it",
    )
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), default="text", help="json: one JSON object a line on stderr"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run this device's agent: join a federation, train or personalize when asked, install encoders, until stopped.

    Data and configuration are checked first: a mistake in them ends the agent with exit code 2 before it needs a
    broker. While the broker is away the agent keeps trying until it is stopped, after random pauses of at most 30 s;
    --no-wait, or wait = false under [broker], makes it give up with exit code 75 when the first try fails. While no
    coordinator of its federation answers it keeps asking, and says so after 10 s. Log lines go to stderr; with
    --log-format json all that goes there is one JSON object a line.

    Example:
      edge-agent run --config agent.toml
    """
    if arguments.log_format == "json":
        log_json()
    logging.getLogger("edge_agent").setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    overrides = {"broker": {"wait": False}} if arguments.no_wait else {}
    config = load(AgentConfig, arguments.config, overrides)
    if not arguments.insecure:
        check_tls(config.broker)
    elif config.bundle.unsigned is None:
        config = config.model_copy(update={"bundle": config.bundle.model_copy(update={"unsigned": True})})
    limit_threads(config.training.threads)
    from ..agent import app

    try:
        app.run(config)
    except BrokerAway as error:
        raise BrokerAway(f"{error} ('edge-agent doctor --config {arguments.config}' tries the way)") from error
    return 0


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``edge-agent status``."""
    add_agent(parser)


def status(arguments: argparse.Namespace) -> int:
    """Show what the agent of this device does now, which encoder and head it runs, and what keeps it from its work.

    ``candidate`` is the bundle that is downloaded or waits for its time, ``operator_pin`` the release that the
    operator has this device stay with, ``pinned`` the bundle that the owner keeps, ``refused`` those that were tried
    and are not used, with reasons.

    ``condition`` is ok, fault (the last thing that it was asked for failed) or stalled (its disk cannot be written);
    the exit code is 1 unless it is ok. Bundle, head and its accuracies are those that are installed now, also while no
    agent runs; all figures of the head are in --json. It also shows samples that were added on this device, whether the
    head has learned from them, files that wait in the watch folder, how many images or recordings of the data source
    cannot be used, and what the agent has on its disk beside the bounds of its configuration. ``serves`` says where
    'edge-agent serve' answers for this device now, with its cameras and other sources, and ``inputs`` whether what it
    answers has changed since the head was fitted. With --state, in place of --config, what only the configuration says
    is left out: the bounds, the watch folder, and whether unsigned bundles are installed.

    Example:
      edge-agent status --config agent.toml --json
    """
    config, lacks_data = _config_of(arguments)
    # What the agent wrote about itself last; while none runs, what it said of its work holds no more.
    reported = read_json(config.state / "status.json") or {}
    running = _is_running(config.state)
    result: dict[str, Any] = {
        "id": config.id if arguments.state is None else reported.get("id"),
        "running": running,
        "state": str(config.state),
        **{key: reported.get(key) for key in _REPORTED},
        **({} if running else _AT_REST),
        "release": None,
        "trust": None,
        "pinned": None,
        "refused": [],
        "encoder": None,
        "figures": None,
        "lineage": None,
        "head": None,
        "metrics": None,
        "collected": None,
        "waiting": None,
        "serves": _server_of(config.state),
        "inputs": _inputs_of(config.state),
        "disk": None,
        "privacy": None,
    }
    if arguments.state is None:
        result["tier"] = result["tier"] or config.tier
    result["commands"] = _commands(config, result["commands"] or {}, by_folder=arguments.state is not None)
    # Where no agent has ever run, only commands by hand use the folder: there is no coordinator to command it.
    is_offline = arguments.state is not None and not reported and not result["commands"]["authenticated"]
    # What lies in the folder now. A part that cannot be read is the fault that is shown; the others are shown as well.
    try:
        trust = TrustStore(config.state / "bundles").described(time.time())
        takes_unsigned = config.takes_unsigned if arguments.state is None else None
        result["trust"] = {**trust, "unsigned": takes_unsigned if trust["root"] is None else False}
        result.update(_installed(config.state, reported, running=running))
        if is_offline and result["waits_for"]:
            add = f"'edge-agent add{named(arguments)} --label NAME FILE ...'"
            result["waits_for"] = f"labelled samples: {add} fits a head for this bundle"
    except HeadwaterError as error:
        result.update(condition="fault", fault=problem_of("bundle", error).as_json())
    try:
        result.update(_added(config))
    except HeadwaterError as error:
        result.update(condition="fault", fault=problem_of("data", error).as_json())
    if config.state.is_dir():
        from ..agent.local_state import disk_usage
        from ..privacy.policy import spent

        result["disk"] = disk_usage(config) if arguments.state is None else None
        result["privacy"] = spent(config)
    if lacks_data:
        missing = problem_of("data", ConfigError(str(arguments.config), ["data.source: is missing"]))
        remedy = f"name this device's data in {arguments.config}, [data] source, and start the agent"
        result.update(condition="fault", fault={**missing.as_json(), "message": "no data are named", "remedy": remedy})
    if config.state.is_dir() and (problem := look_at_disk(config.state)) is not None:
        result.update(condition="stalled", fault=problem)  # which the agent itself could not write down
    shown = {**result, "commands": None} if is_offline else result
    output.result(arguments, result, lambda: formats.pairs(_rows(shown)))
    return 0 if result["condition"] in {None, "ok"} else 1


def _is_running(state: Path) -> bool:
    """Return whether an agent holds the state folder."""
    if not state.is_dir():
        return False
    try:
        with folder_lock(state, "edge-agent status"):
            return False
    except StateError:
        return True


def _server_of(state: Path) -> dict[str, Any] | None:
    """Return where a server answers for this device now, and since when; None where none does."""
    from ..serving.announcement import find_server

    server = find_server(state)
    return None if server is None else server.model_dump(mode="json")


def _inputs_of(state: Path) -> dict[str, Any] | None:
    """Return how the inputs were that a server on this device answered last; None where none has said it."""
    from ..serving.inputs_state import read_record, record_file

    record = read_record(record_file(state))
    return None if record is None else record.model_dump(mode="json")


def _config_of(arguments: argparse.Namespace) -> tuple[AgentConfig, bool]:
    """Return the configuration that was named by its file or by its state folder, and whether it lacks its data."""
    if arguments.state is not None:
        check_exists(arguments.state, "an agent's state folder")
        return config_of_folder(arguments.state), False
    data = read_file(AgentConfig, arguments.config).get("data", {})
    lacks_data = isinstance(data, dict) and "source" not in data  # as 'edge-agent enroll' leaves it without --data
    return load(AgentConfig, arguments.config, {"data": {"source": "none"}} if lacks_data else {}), lacks_data


def _commands(config: AgentConfig, reported: dict[str, Any], *, by_folder: bool) -> dict[str, Any]:
    """Return how many commands were refused, and whether the device knows its coordinator's ones by a key."""
    has_key = key_file(config) is not None
    if by_folder:  # a key that only the configuration names is known from what the agent wrote
        has_key = has_key or bool(reported.get("authenticated"))
    return {"refused": 0, "replayed": 0, **reported, "authenticated": has_key}


def _installed(state: Path, reported: dict[str, Any], *, running: bool) -> dict[str, Any]:
    """Return bundle and head in the state folder: a bundle may have come there since the agent wrote its status."""
    head = read_json(state / "head" / "head.json") or {}
    if not (state / "bundles").is_dir():
        return {"head": head.get("head"), "metrics": head.get("metrics")}
    from ..agent.release_record import ReleaseRecord
    from ..bundle.installed import current_manifest, current_origin
    from ..bundle.manifest import variant_figures

    record = ReleaseRecord(state)
    pin = record.pinned()
    result: dict[str, Any] = {
        "pinned": None if pin is None else {**pin.model_dump(mode="json"), "holds": pin.holds(time.time())},
        "refused": [one.model_dump(mode="json") for one in record.refused()],
    }
    manifest = current_manifest(state / "bundles")
    if manifest is not None:
        result["bundle_id"] = manifest.bundle_id
        result["release"] = record.release_of(manifest.bundle_id)
        if (reported.get("candidate") or {}).get("bundle_id") == manifest.bundle_id:
            result["candidate"] = None  # the agent uses it by now, and has yet to say so
        result["encoder"] = {"name": manifest.task.encoder, "features": manifest.feature_dim, "method": manifest.method}
        result["figures"] = variant_figures(manifest)
        result["lineage"] = current_origin(state / "bundles")
        fingerprints = {variant.fingerprint for variant in manifest.variants.values()}
        if (head.get("variant") or head.get("fingerprint")) not in fingerprints:  # it was fitted for another bundle
            head = {}
        if not running:
            by_agent = reported.get("rolled_back") if reported.get("bundle_id") == manifest.bundle_id else None
            result["rolled_back"] = record.rolled_back() or by_agent
            result["waits_for"] = None if head else "'edge-agent run', which fits a head for this bundle"
    return {**result, "head": head.get("head"), "metrics": head.get("metrics")}


def _added(config: AgentConfig) -> dict[str, Any]:
    """Return the samples that were added on this device, and the files in its watch folder, unusable ones included.

    Raises:
        StateError: the collection is damaged.
    """
    from ..agent.new_samples import samples_folder

    result: dict[str, Any] = {}
    if (folder := samples_folder(config)).is_dir():
        from ..data.collected import Collection

        index = Collection(folder).index()
        learned = index.version == index.fitted
        result["collected"] = {"samples": len(index.samples), "classes": list(index.classes), "learned": learned}
    if config.data.watch is not None:
        result["waiting"] = sum(path.is_file() for path in config.data.watch.glob("[!.]*/[!.]*"))
    return result


_WITHOUT_KEYS = {True: "unsigned bundles are installed: ", False: "no bundle is installed: ", None: ""}
"""What follows where no keys are trusted, by whether unsigned bundles are installed; None: not known."""

_TEXTS: dict[str, Callable[[Any], str]] = {
    "version": lambda version: formats.other_version(version, __version__, "the agent"),
    "commands": lambda it: (
        f"authenticated; refused: {it['refused']} without a proof, {it['replayed']} recorded ones"
        if it["authenticated"]
        else "not authenticated; enroll the agent, or name its key in broker.command_key_file"
    ),
    "broker": formats.broker,
    "downloads": formats.ways,
    "uploads": formats.ways,
    "trust": lambda it: (
        f"{_WITHOUT_KEYS[it['unsigned']]}no keys are trusted"
        if it["root"] is None
        else f"root {it['root']} of federation '{it['federation']}'; newest version installed: "
        + (
            f"{it['version']}, {'expired' if it['expired'] else 'installable until'} {it['expires']}"
            if it["version"]
            else "none"
        )
    ),
    "candidate": lambda it: f"bundle {it['bundle_id'][:12]} (release {it['release']}) {it['state']}",
    "pinned": lambda it: (
        f"bundle {it['bundle_id'][:12]}, {'until ' + show_time(it['until']) if it['until'] else 'without end'}"
        f"{'' if it['holds'] else ', which is over'}: {it['reason']}"
    ),
    "operator_pin": lambda it: (
        f"release {it['release']}, {'until ' + it['until'] if it['until'] else 'without end'}: {it['reason']}; "
        "no other release comes before the operator ends it"
    ),
    "refit": lambda it: f"failed {it['tries']} times, next try {it['next_try']}: {it['reason']}",
    "collected": lambda it: (
        f"{it['samples']} samples of {len(it['classes'])} classes, {'' if it['learned'] else 'not '}in the head"
    ),
    "waiting": lambda count: f"{count} files in the watch folder",
    "disk": lambda it: (
        f"{it['runs']} runs (at most {it['keep_runs']}) of {it['runs_bytes'] / 1e6:.1f} MB; "
        f"downloads {it['downloads_bytes'] / 1e6:.1f} of {it['cache_bytes'] / 1e6:.0f} MB; "
        f"features {it['features'] / 1e6:.1f} of {it['features_bytes'] / 1e6:.0f} MB; "
        f"{it['free_bytes'] / 1e6:.0f} MB free, {it['min_free_bytes'] / 1e6:.0f} MB stay free"
    ),
}
"""How parts of the status are shown, where they are not None."""


_ALWAYS = ("bundle_id", "head", "condition")
"""What is shown also where there is none; everything else is left out then."""


def _values_to_show(status: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a status that say something; its version only where it is not that of this command."""
    known = {name: value for name, value in status.items() if name in _ALWAYS or value not in (None, "", [])}
    if known.get("version") == __version__:
        del known["version"]
    return known


def _rows(status: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what the command prints of a status: a name and a value for each line."""
    values = _values_to_show(status)
    # Bundle and release are one line.
    release = values.pop("release", None)
    if values.get("bundle_id"):
        bundle = status["bundle_id"][:12]
        values["bundle_id"] = f"{bundle}, release {release}" if release else bundle
    for name, value in values.items():
        if name in _ROWS:
            yield from _ROWS[name](value)
        elif name in _TEXTS:
            yield name, _TEXTS[name](value)
        elif isinstance(value, dict):
            yield name, ", ".join(f"{key} {formats.value_text(inner)}" for key, inner in value.items())
        elif isinstance(value, bool):
            yield name, output.yes_or_no(value)
        else:
            yield name, value


def _fault_rows(fault: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "fault", f"{fault.get('error')}: {fault.get('message')}"
    yield "remedy", f"{fault.get('remedy')} (fault of {show_time(fault.get('at'))})"


def _refused_rows(refused: list[dict[str, Any]]) -> Iterator[tuple[str, object]]:
    for bundle in refused:
        yield "refused", f"bundle {bundle['bundle_id'][:12]} at {show_time(bundle['at'])}: {bundle['reason']}"


_ACCURACIES = ("acc.personal", "acc.global", "acc.local")
_SHARES = ("false_alarms", "detected")
_NUMBERS = ("rmse.personal", "rmse.mean", "auroc")
"""The metrics of a head that answers with numbers which are shown to the owner of a device."""


def _metric_rows(metrics: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what the owner of a device can use of its head's metrics; ``--json`` has all of them."""
    for name in _ACCURACIES:
        if name in metrics:
            yield name, _accuracy_text(name, metrics)
    for name in _NUMBERS:
        if name in metrics:
            yield name, formats.number(metrics[name])
    if metrics.get("n_train") is not None:
        yield "learned from", f"{metrics['n_train']} samples to fit, {metrics.get('n_test') or 0} held out"
    yield from same_sitting_rows(metrics.get("same_sitting"))
    if "unknown_rate" in metrics:
        yield "unknown inputs", _unknown_text(metrics)
    else:
        yield from ((name, formats.percent(metrics[name])) for name in _SHARES if name in metrics)
    if metrics.get("n_skipped"):
        yield "skipped", f"{metrics['n_skipped']} cannot be used, first {metrics.get('skipped_first')}"
    if metrics.get("better_alone"):
        yield "note", output.BETTER_ALONE.removeprefix("note: ")


def _accuracy_text(name: str, metrics: dict[str, Any]) -> str:
    """Return one accuracy with what has to be known about it."""
    share = metrics[name]
    text = formats.percent(share)
    if name == "acc.global" and share is None and metrics.get("no_global"):
        return f"{text}  ({metrics['no_global']})"
    local_model = metrics.get("local_model") if name == "acc.local" else ""
    return text + accuracy_notes(share, local_model or "", one_class=bool(metrics.get("one_class")))


def _unknown_text(metrics: dict[str, Any]) -> str:
    """Return how often the head calls an input unknown that is like its samples."""
    rate = metrics["unknown_rate"]
    if rate is None:
        return "none: the head has no rule for them (too few samples, or not asked for)"
    text = f"false alarms {formats.percent(rate)} asked for"
    if metrics.get("false_alarms") is not None:
        text += f", {formats.percent(metrics['false_alarms'])} of the held-out samples"
    return text


def _server_rows(server: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "serves", f"answers at {server['url']} since {show_utc(server['since'])}"
    for source in server["sources"]:
        reason = f": {source['reason']}" if source["reason"] else ""
        yield "", f"{source['name']} {source['condition']} since {show_utc(source['since'])}{reason}"


def _inputs_rows(inputs: dict[str, Any]) -> Iterator[tuple[str, object]]:
    from ..serving.inputs_state import InputsState, describe

    yield "inputs", describe(InputsState(inputs["state"]), inputs["since"])


_ROWS: Mapping[str, Callable[[Any], Iterable[tuple[str, object]]]] = {
    "fault": _fault_rows,
    "refused": _refused_rows,
    "figures": figure_rows.variant_rows,
    "lineage": figure_rows.lineage_rows,
    "metrics": _metric_rows,
    "serves": _server_rows,
    "inputs": _inputs_rows,
}
"""Name of a value of a status -> the lines that it has; any other value has one line."""

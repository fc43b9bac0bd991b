"""``headwater release``: make runs' encoders available to devices, watch them, and take them back."""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent.errors import UsageError
from edge_agent.moments import moment_of

from ..state.journal import Entry, Kind, utc_now
from ..state.releases import Book, Plan, Release, book_of, plan_body, rollback_of
from ..state.store import StateFolder
from ..text import counted, listed
from .options import Config, Json, State, state_path
from .output import present, table

app = typer.Typer(
    help="Create, promote, hold or roll back releases.\n\nExample: headwater release status",
    no_args_is_help=True,
)

Run = Annotated[str | None, typer.Argument(help="Run whose bundle is released; default: the newest with one.")]
Number = Annotated[int | None, typer.Argument(min=1, help="Number of the release; default: the newest one.")]
DeviceName = Annotated[str, typer.Argument(help="The device's id.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the status and the journal.")]
SHOWN_DEVICES = 50


@app.command()
def create(
    run: Run = None,
    channel: Annotated[str, typer.Option("--channel", help="Whose devices get it, see 'channel' of an agent.")] = (
        "stable"
    ),
    canary: Annotated[str, typer.Option("--canary", help="Devices that get it first: 2, 10%, or all at once.")] = "10%",
    success: Annotated[int, typer.Option("--success", min=0, help="Successes that the canary needs; 0: all.")] = 0,
    max_failed: Annotated[str, typer.Option("--max-failed", help="More failures, such as 0 or 10%, stop it.")] = "10%",
    min_gain: Annotated[
        float | None, typer.Option("--min-gain", help="A device with less change of acc.personal counts as failed.")
    ] = None,
    auto_promote: Annotated[bool, typer.Option("--auto-promote", help="Do not pause after the canary.")] = False,
    window: Annotated[str, typer.Option("--window", help="Devices switch in this time of day, UTC: 02:00-05:00.")] = "",
    activate_at: Annotated[str, typer.Option("--activate-at", help="No device switches before: 2030-01-31T02:00.")] = (
        ""
    ),
    note: Annotated[str, typer.Option("--note", help="What is new.")] = "",
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Release the encoder of a finished run: to a canary first, then it pauses until it is promoted.

    More failures than --max-failed return all devices to the release before. A device fails on which the bundle does
    not work, that goes back to its pair because that is more accurate on its held-out samples, or that does not start
    with the new one. Shares count devices that were heard in the channel. Works while the coordinator serves, and
    before.

    Example: headwater release create run-0003 --canary 2 --window 02:00-05:00
    """
    plan = Plan(
        channel=channel,
        canary="" if canary == "all" else canary,
        success=success,
        max_failed=max_failed,
        min_gain=min_gain,
        auto_promote=auto_promote,
        window=window,
        activate_at=activate_at,
        note=note,
    )
    plan.check(utc_now())
    with StateFolder(state_path(config, state)).look() as folder:
        at_hand = _bundles(folder, run, ("bundle_exported",))
        if not at_hand and run is not None:  # it did not end, or is of this release alone
            at_hand = [one for one in _bundles(folder, run, ("release_made",)) if not one.body.get("rolls_back")]
        if not at_hand:
            if run is not None:
                folder.journal.replay(run)  # names the runs that there are
            of = "no run" if run is None else run
            raise UsageError(
                f"{of} has a bundle that can be released; a run exports one at its end where export.after_run is true, "
                "'headwater report' says why it did not"
            )
        chosen, book = at_hand[-1], book_of(folder.journal)
        book.check_fleet(plan)
        older = book.for_everybody(channel)
        body = {name: value for name, value in chosen.body.items() if name not in {"rolls_back", "plan"}}
        body |= {"plan": plan_body(plan), "by": _author(), "parent": older.bundle_id if older is not None else None}
        _release(folder, chosen.run, chosen.round, chosen.digest, body)
        _show(folder, len(book.releases) + 1, as_json=as_json)


@app.command()
def promote(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Give a release to everybody, new devices included; before the end of its canary, too.

    Example: headwater release promote 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        release = _chosen(book_of(folder.journal), number)
        if release.stage not in {"canary", "paused"}:
            raise UsageError(_is_already(release, "only one at its canary can be promoted"))
        _append(folder, "release_stage", release, stage="everybody")
        _show(folder, release.number, as_json=as_json)


@app.command()
def hold(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Give a release to no further device; those that run it keep it.

    Example: headwater release hold 3 --reason "complaints from the porch"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        release = _chosen(book_of(folder.journal), number)
        if not release.is_open:
            raise UsageError(_is_already(release, "only one that devices still get can be held"))
        if release.rolls_back:
            raise UsageError(
                f"release {release.number} is a rollback, which cannot be held: devices would stay with what it "
                f"undoes; 'headwater release rollback {release.number}' goes further back, a new release replaces it"
            )
        _append(folder, "release_held", release, reason=reason or f"held by {_author()}")
        _show(folder, release.number, as_json=as_json)


@app.command()
def resume(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Continue a release that is held; failures before this do not count any more.

    Example: headwater release resume 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        release = _chosen(book_of(folder.journal), number)
        if release.stage != "held":
            raise UsageError(_is_already(release, "only one that is held can be resumed"))
        _append(folder, "release_resumed", release)
        _show(folder, release.number, as_json=as_json)


@app.command()
def rollback(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Return all devices that run a release to the one before it, by another release of that one's bundle.

    Devices that run, or are to run, a newer release stay there.

    Example: headwater release rollback 3 --reason "wrong calibration"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        book = book_of(folder.journal)
        release = _chosen(book, number)
        if release.rolled_back_by:
            raise UsageError(_is_already(release, f"by release {release.rolled_back_by}"))
        older, body = rollback_of(book, release, reason or f"rolled back by {_author()}", _author())
        _release(folder, older.run, older.round, older.digest, body)
        _show(folder, len(book.releases) + 1, as_json=as_json)


@app.command()
def pin(
    device: DeviceName,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the status and the journal.")],
    number: Annotated[
        int | None, typer.Option("--release", min=1, help="Release that it is to run; default: the one that it runs.")
    ] = None,
    until: Annotated[str, typer.Option("--until", help="Date or time when the pin ends; default: at 'unpin'.")] = "",
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Keep one device on one release, whatever is released, held or rolled back.

    Example: headwater release pin porch --reason "measurements for the paper" --until 2030-01-31
    """
    if until and moment_of(until) <= utc_now():
        raise UsageError(f"--until {until} is over; give a date to come")
    with StateFolder(state_path(config, state)).look() as folder:
        book = book_of(folder.journal)
        known = book.devices.get(device)
        if known is None:
            raise UsageError(f"no device '{device[:80]}' was heard; known: {listed(sorted(book.devices)) or 'none'}")
        if number is None:
            running = [one for one in book.releases if one.bundle_id == known.runs]
            if not running:
                raise UsageError(f"{device} runs no release that is known here; name one with --release")
            number = running[-1].number
        release = _chosen(book, number)
        body = {"release": release.number, "reason": reason, "until": until, "by": _author()}
        folder.journal.append("device_pinned", agent=device, body=body)
        line = f"{device} stays with release {release.number}{f' until {until}' if until else ''}: {reason}"
        present({"device": device, **body}, [line], as_json=as_json)


@app.command()
def unpin(device: DeviceName, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """End the pin of a device: it follows its channel again.

    Example: headwater release unpin porch
    """
    with StateFolder(state_path(config, state)).look() as folder:
        if device not in (pins := book_of(folder.journal).pins):
            raise UsageError(f"'{device[:80]}' is not pinned; pinned: {listed(sorted(pins)) or 'none'}")
        folder.journal.append("device_unpinned", agent=device, body={"by": _author()})
        present({"device": device}, [f"{device} follows its channel again"], as_json=as_json)


@app.command()
def status(
    devices: Annotated[int, typer.Option("--devices", min=0, help="Most devices that are listed; 0: all.")] = (
        SHOWN_DEVICES
    ),
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show all releases, what they wait for, and which bundle each device runs and is to run.

    Example: headwater release status
    """
    with StateFolder(state_path(config, state)).look() as folder:
        book, now = book_of(folder.journal), utc_now()
    result = {"releases": [described(book, one, now) for one in book.releases], "devices": device_rows(book, now)}
    shown = result["devices"][:devices] if devices else result["devices"]
    present(result, _lines(result["releases"], shown, len(result["devices"])), as_json=as_json)


def described(book: Book, release: Release, now: datetime) -> dict[str, Any]:
    """A release as JSON: its plan, where it stands, where it comes from, and what it scored where."""
    body, on_devices = release.body, book.scores(release.bundle_id)
    lineage = {"run": release.run, "round": release.round, **body.get("lineage", {})}
    scored = {
        "run": lineage.pop("scores", None),
        "devices": None if on_devices is None else on_devices.model_dump(),
        "held_out": body.get("held_out", {}),
        "parity_max_abs": body.get("parity_max_abs"),
        "int8_cosine": body.get("int8_cosine"),
    }
    return {
        "release": release.number,
        "bundle_id": release.bundle_id,
        "stage": book.stage(release, now),
        "waits_for": waits_for(book, release, now),
        "rolls_back": release.rolls_back or None,
        "rolled_back_by": release.rolled_back_by or None,
        "by": body.get("by"),
        "signed": body.get("signed"),
        "at": release.at,
        "plan": asdict(release.plan),
        "canary": list(release.canary),
        "outcomes": {name: count for name, count in sorted(release.count.items()) if count},
        "lineage": {**lineage, "parent": body.get("parent")},
        "scored": scored,
        "results": {agent: asdict(result) for agent, result in sorted(release.results.items())},
    }


def waits_for(book: Book, release: Release, now: datetime) -> str:
    """What a release waits for, for whom and until when; empty where it is done."""
    number, pending = release.number, book.pending(release, now)
    whom = f": {listed(pending)}" if pending else ""
    if release.rolled_back_by:
        return ""
    if release.held:
        return f"{release.held}; continue with 'headwater release resume {number}', or 'rollback {number}'"
    wait_s, _ = release.plan.activation(now)
    until = f", which switch from {(now + timedelta(seconds=wait_s)).isoformat(timespec='minutes')} on"
    when = until if wait_s else ""
    if release.promoted:
        return f"waits for reports of {counted(len(pending), 'device')}{whom}{when}" if pending else ""
    if release.paused:
        return f"the canary succeeded; continue with 'headwater release promote {number}'"
    size = book.canary_size(release)
    if len(release.canary) < size:
        more = counted(size - len(release.canary), "more device")
        return f"waits for {more} of the canary to come online{whom}{when}"
    return f"waits for reports of {counted(len(pending), 'device')} of the canary{whom}{when}"


def device_rows(book: Book, now: datetime) -> list[dict[str, Any]]:
    """What each device runs and is to run, sorted by id; releases by number, None where no release fits."""
    rows = list[dict[str, Any]]()
    for agent, device in sorted(book.devices.items()):
        wanted, pin = book.wanted(device, now), book.pin(agent, now)
        runs = [one.number for one in book.releases if one.bundle_id == device.runs] if device.runs else []
        result = wanted.results.get(agent) if wanted is not None else None
        is_there = wanted is not None and wanted.number in runs
        rows.append(
            {
                "device": agent,
                "channel": device.channel,
                "bundle_id": device.runs,
                "runs": wanted.number if is_there and wanted is not None else runs[-1] if runs else None,
                "wanted": wanted.number if wanted is not None else None,
                "outcome": result.outcome if result is not None else None,
                "reason": result.reason if result is not None else "",
                "acc.personal": result.acc if result is not None else None,
                "pinned": None if pin is None else {"release": pin.release, "reason": pin.reason, "until": pin.until},
                "kept": device.kept,
            }
        )
    return rows


def open_releases(folder: StateFolder) -> list[dict[str, Any]]:
    """The releases that devices may get now, or that are held, in short: what each waits for."""
    book, now = book_of(folder.journal), utc_now()
    current = [*book.current(), *(one for one in book.releases if one.held and not one.rolled_back_by)]
    return [
        {
            "release": one.number,
            "channel": one.plan.channel,
            "stage": book.stage(one, now),
            "bundle_id": one.bundle_id,
            "waits_for": waits_for(book, one, now),
        }
        for one in sorted(current, key=lambda one: one.number)
    ]


def standing_of(release: dict[str, Any]) -> str:
    """One of `open_releases` as a line of text."""
    waits = f": {release['waits_for']}" if release["waits_for"] else ""
    return f"release {release['release']} ({release['channel']}, {release['stage']}){waits}"


def releases_of_run(folder: StateFolder, run: str) -> list[dict[str, Any]]:
    """The releases of a run as JSON, see `described`."""
    book, now = book_of(folder.journal), utc_now()
    return [described(book, one, now) for one in book.releases if one.run == run]


def _lines(releases: list[dict[str, Any]], devices: list[dict[str, Any]], count: int) -> Iterator[Table | str]:
    if not releases:
        yield "no releases yet; 'headwater release create' makes one of a run's bundle"
        return
    columns = ("release", "channel", "stage", "bundle", "run", "canary", "ok", "failed", "declined", "unable")
    rows = [
        (
            one["release"],
            one["plan"]["channel"],
            f"rolls back {one['rolls_back']}" if one["rolls_back"] else one["stage"],
            one["bundle_id"][:12],
            one["lineage"]["run"],
            len(one["canary"]) or "",
            *(one["outcomes"].get(name, 0) for name in ("ok", "failed", "declined", "unable")),
        )
        for one in releases
    ]
    yield table("releases", columns, rows, left=5)
    yield from _origins(releases)
    yield from (f"release {one['release']}: {one['waits_for']}" for one in releases if one["waits_for"])
    yield ""
    rows = [
        (one["device"], one["channel"], one["bundle_id"][:12], one["runs"], one["wanted"], one["outcome"], _why(one))
        for one in devices
    ]
    shown = f", {len(devices)} shown (--devices 0: all)" if len(devices) < count else ""
    yield table(f"{count} devices{shown}", ("device", "channel", "bundle", "runs", "wanted", "outcome", "note"), rows)


def _origins(releases: list[dict[str, Any]]) -> Iterator[Table | str]:
    """Where each release comes from, and acc.personal in its run and on the devices that installed it."""
    columns = (
        "release",
        "run",
        "round",
        "method",
        "seed",
        "clients",
        "partition",
        "parent",
        "signed by",
        "in the run",
        "devices",
    )
    rows = []
    for one in releases:
        of, scored = one["lineage"], one["scored"]
        seed, clients = (of.get(name, "") for name in ("seed", "clients"))
        hashes = ((of.get(name) or "")[:12] for name in ("partition_sha256", "parent"))
        run = (one["release"], of["run"], of["round"], of.get("method", ""), seed, clients)
        rows.append((*run, *hashes, _signers(one["signed"]), *(_scores(scored[name]) for name in ("run", "devices"))))
    yield ""
    yield table("where they come from; acc.personal: mean, worst tenth of clients", columns, rows, left=2)


def _signers(signed: Mapping[str, Any] | None) -> str:
    """Who has signed a release, and how many of how many keys have to."""
    if signed is None:
        return "nobody"
    names = ", ".join(one["name"] or f"{one['id'][:8]}…" for one in signed["signers"])
    return f"{names or 'nobody'}; {signed['threshold']} of {signed['keys']} needed"


def _scores(scores: Mapping[str, Any] | None) -> str:
    return "" if scores is None else f"{scores['mean']:.3f}, {scores['worst_tenth']:.3f} of {scores['clients']}"


def _why(device: dict[str, Any]) -> str:
    if pin := device["pinned"]:
        until = f" until {pin['until']}" if pin["until"] else ""
        return f"pinned{until}: {pin['reason']}"
    return str(device["kept"] or device["reason"])


def _chosen(book: Book, number: int | None) -> Release:
    """The release of that number; by default the newest that is no rollback and was not rolled back.

    Raises:
        UsageError: there is none.
    """
    if number is not None:
        release = book.get(number)
    else:
        release = next((one for one in reversed(book.releases) if not one.rolls_back and not one.rolled_back_by), None)
    if release is None:
        there = f"there are 1 to {len(book.releases)}" if book.releases else "'headwater release create' makes one"
        raise UsageError(f"no release {number or ''}".rstrip() + f"; {there}")
    return release


def _is_already(release: Release, why: str) -> str:
    return f"release {release.number} is at stage '{release.stage}'; {why}"


def _release(
    folder: StateFolder, run: str | None, number: int | None, digest: str | None, body: dict[str, Any]
) -> None:
    from ..state.release_keys import file_to_release  # loads cryptography

    content, signed = file_to_release(folder, run or "", body["bundle_id"], digest or "", utc_now())
    blob = folder.blobs.put(content)
    folder.journal.append("release_made", run=run, round=number, digest=blob, body={**body, "signed": signed})
    if blob not in folder.blobs:  # a coordinator at work removes what no entry names
        folder.blobs.put(content)


def _bundles(folder: StateFolder, run: str | None, kinds: tuple[Kind, ...]) -> list[Entry]:
    """Entries about bundles, of a run or all, whose file is here."""
    entries = folder.journal.entries(run, kinds)
    return [entry for entry in entries if entry.digest is not None and entry.digest in folder.blobs]


def _append(folder: StateFolder, kind: Kind, release: Release, **body: Any) -> None:
    folder.journal.append(kind, run=release.run or None, body={"release": release.number, "by": _author(), **body})


def _author() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "unknown"


def _show(folder: StateFolder, number: int, *, as_json: bool) -> None:
    book, now = book_of(folder.journal), utc_now()
    if (release := book.get(number)) is None:
        raise UsageError(f"release {number} was not made; 'headwater release status' shows all")
    waits = waits_for(book, release, now)
    what = f"undoes release {release.rolls_back}" if release.rolls_back else book.stage(release, now)
    line = f"release {number} of {release.run}, bundle {release.bundle_id[:12]}: {what}"
    present(described(book, release, now), [line, *([waits] if waits else [])], as_json=as_json)

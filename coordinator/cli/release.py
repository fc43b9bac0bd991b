"""``headwater release``: make runs' encoders available to devices, watch them, and take them back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent.errors import UsageError

from ..fleet import release_commands as commands
from ..fleet.release_commands import described, device_rows, waits_for
from ..state.journal import utc_now
from ..state.releases import Plan
from ..state.store import StateFolder
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

    More failures than --max-failed return all devices to the release before. A device fails that refuses the bundle,
    goes back to its pair because that is more accurate on its held-out samples, or does not start with the new one.
    Shares count devices that were heard in the channel. Works while the coordinator serves, and before.

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
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.create(folder, plan, run, commands.author()), as_json=as_json)


@app.command()
def promote(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Give a release to everybody, new devices included; before the end of its canary, too.

    Example: headwater release promote 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.promote(folder, number, commands.author()), as_json=as_json)


@app.command()
def hold(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Give a release to no further device; those that run it keep it.

    Example: headwater release hold 3 --reason "complaints from the porch"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.hold(folder, number, reason, commands.author()), as_json=as_json)


@app.command()
def resume(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Continue a release that is held; failures before this do not count any more.

    Example: headwater release resume 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.resume(folder, number, commands.author()), as_json=as_json)


@app.command()
def rollback(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Return all devices that run a release to the one before it. That is a new release, of the older bundle.

    Example: headwater release rollback 3 --reason "wrong calibration"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.rollback(folder, number, reason, commands.author()), as_json=as_json)


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
    with StateFolder(state_path(config, state)).look() as folder:
        body = commands.pin(folder, device, number, reason, until, commands.author())
        line = f"{device} stays with release {body['release']}{f' until {until}' if until else ''}: {reason}"
        present({"device": device, **body}, [line], as_json=as_json)


@app.command()
def unpin(device: DeviceName, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """End the pin of a device: it follows its channel again.

    Example: headwater release unpin porch
    """
    with StateFolder(state_path(config, state)).look() as folder:
        commands.unpin(folder, device, commands.author())
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
        book, now = commands.book_of(folder), utc_now()
    result = {"releases": [described(book, one, now) for one in book.releases], "devices": device_rows(book, now)}
    shown = result["devices"][:devices] if devices else result["devices"]
    present(result, _lines(result["releases"], shown, len(result["devices"])), as_json=as_json)


def _lines(releases: list[dict[str, Any]], devices: list[dict[str, Any]], count: int) -> Iterator[Table | str]:
    if not releases:
        yield "no releases yet; 'headwater release create' makes one of a run's bundle"
        return
    columns = ("release", "channel", "stage", "bundle", "run", "canary", "ok", "failed", "declined")
    rows = [
        (
            one["release"],
            one["plan"]["channel"],
            f"rolls back {one['rolls_back']}" if one["rolls_back"] else one["stage"],
            one["bundle_id"][:12],
            one["lineage"]["run"],
            len(one["canary"]) or "",
            *(one["outcomes"].get(name, 0) for name in ("ok", "failed", "declined")),
        )
        for one in releases
    ]
    yield table("releases", columns, rows, left=5)
    yield from (f"release {one['release']}: {one['waits_for']}" for one in releases if one["waits_for"])
    yield ""
    rows = [
        (one["device"], one["channel"], one["bundle_id"][:12], one["runs"], one["wanted"], one["outcome"], _why(one))
        for one in devices
    ]
    shown = f", {len(devices)} shown (--devices 0: all)" if len(devices) < count else ""
    yield table(f"{count} devices{shown}", ("device", "channel", "bundle", "runs", "wanted", "outcome", "note"), rows)


def _why(device: dict[str, Any]) -> str:
    if pin := device["pinned"]:
        until = f" until {pin['until']}" if pin["until"] else ""
        return f"pinned{until}: {pin['reason']}"
    return str(device["kept"] or device["reason"])


def _show(folder: StateFolder, number: int, *, as_json: bool) -> None:
    book, now = commands.book_of(folder), utc_now()
    if (release := book.get(number)) is None:
        raise UsageError(f"release {number} was not made; 'headwater release status' shows all")
    waits = waits_for(book, release, now)
    what = f"undoes release {release.rolls_back}" if release.rolls_back else release.stage
    line = f"release {number} of {release.run}, bundle {release.bundle_id[:12]}: {what}"
    present(described(book, release, now), [line, *([waits] if waits else [])], as_json=as_json)

"""``headwater release``: make runs' encoders available to devices, watch them, and take them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.errors import UsageError

from ..fleet import release_commands as commands
from ..fleet.release_commands import find_release, tiers_without_releases
from ..journal.store import utc_now
from ..state.release_rows import ReleaseRow, device_rows
from ..state.store import StateFolder
from ..text import listed
from ..views.releases import Book, Plan, Release, book_of
from .follow import is_serving
from .options import Config, Json, State, one_of, state_path
from .output import present
from .release_text import device_lines, other_tiers, release_line, release_lines

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
    new_channel: Annotated[
        bool, typer.Option("--new-channel", help="No device of the channel was heard, they are yet to come.")
    ] = False,
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
    """Release the encoder of a finished run.

    A canary gets it first, then it pauses until it is promoted. Devices of tier head take releases, others do not.
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
    with StateFolder(state_path(config, state)).look() as folder:
        made = commands.create(folder, plan, run, commands.current_user(), new_channel=new_channel)
        _show(folder, made, as_json=as_json)


@app.command()
def promote(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Give a release to everybody.

    New devices get it, too; the canary need not have ended.

    Example: headwater release promote 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.promote(folder, number, commands.current_user()), as_json=as_json)


@app.command()
def hold(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Give a release to no further device.

    Those that run it keep it.

    Example: headwater release hold 3 --reason "complaints from the porch"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.hold(folder, number, reason, commands.current_user()), as_json=as_json)


@app.command()
def resume(number: Number = None, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """Continue a release that is held.

    Failures before this do not count any more.

    Example: headwater release resume 3
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.resume(folder, number, commands.current_user()), as_json=as_json)


@app.command()
def rollback(
    number: Number = None, reason: Reason = "", config: Config = None, state: State = None, as_json: Json = False
) -> None:
    """Return devices to the release before.

    Devices that run the release, or are to run it, get another release of that one's bundle. Those that run, or are to
    run, a newer release stay there.

    Example: headwater release rollback 3 --reason "wrong calibration"
    """
    with StateFolder(state_path(config, state)).look() as folder:
        _show(folder, commands.rollback(folder, number, reason, commands.current_user()), as_json=as_json)


@app.command()
def pin(
    device: DeviceName,
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="RELEASE",
            min=1,
            help="The one that it is to run; default: that which it runs.",
            show_default=False,
        ),
    ] = None,
    reason: Reason = "",
    number_option: Annotated[
        int | None,
        typer.Option("--release", metavar="RELEASE", min=1, help="The same as RELEASE, as earlier versions named it."),
    ] = None,
    until: Annotated[str, typer.Option("--until", help="Date or time when the pin ends; default: at 'unpin'.")] = "",
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Keep one device on one release.

    It stays there whatever is released, held or rolled back.

    Example: headwater release pin porch 3 --reason "measurements for the paper" --until 2030-01-31
    """
    with StateFolder(state_path(config, state)).look() as folder:
        pinned, before = commands.pin(
            folder, device, one_of(number, number_option, "RELEASE"), reason, until, commands.current_user()
        )
    ends = f" until {pinned.until}" if pinned.until else ""
    lines = [f"{device} stays with release {pinned.release}{ends}: {pinned.reason}"]
    if before is not None:
        ended = f", until {before.until}" if before.until else ", without end"
        lines.append(f"the pin before is replaced: release {before.release}{ended}: {before.reason}")
    present({"device": device, **pinned.model_dump()}, lines, as_json=as_json)


@app.command()
def unpin(device: DeviceName, config: Config = None, state: State = None, as_json: Json = False) -> None:
    """End the pin of a device.

    It follows its channel again.

    Example: headwater release unpin porch
    """
    with StateFolder(state_path(config, state)).look() as folder:
        commands.unpin(folder, device, commands.current_user())
        present({"device": device}, [f"{device} follows its channel again"], as_json=as_json)


@app.command()
def status(
    number: Annotated[int | None, typer.Argument(min=1, help="Only this release; default: all in force.")] = None,
    devices: Annotated[int, typer.Option("--devices", min=0, help="Most devices that are listed; 0: all.")] = (
        SHOWN_DEVICES
    ),
    config: Config = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show releases, and what devices run.

    Of each release in force: where it comes from, what it scored, what it waits for, and the next command.

    Example: headwater release status
    """
    path = state_path(config, state)
    with StateFolder(path).look() as folder:
        book = book_of(folder.journal)
        now = utc_now()
    if number is not None:
        find_release(book, number)
    releases = [ReleaseRow.from_release(book, release, now) for release in book.releases]
    rows = device_rows(book, now)
    asked_for = [release.to_json() for release in releases if number in {None, release.number}]
    result = {"releases": asked_for, "devices": [row.to_json() for row in rows]}
    shown = rows[:devices] if devices else rows
    others = tiers_without_releases(path)
    lines = [*release_lines(releases, number), *(device_lines(shown, len(rows), others) if releases else ())]
    present(result, lines, as_json=as_json)


def _show(folder: StateFolder, number: int, *, as_json: bool) -> None:
    book = book_of(folder.journal)
    now = utc_now()
    release = book.get(number)
    if release is None:
        raise UsageError(f"release {number} was not made; 'headwater release status' shows all")
    row = ReleaseRow.from_release(book, release, now)
    notes = [*_obstacles(book, release, folder.path)]
    present({**row.to_json(), "notes": notes}, [release_line(row), *row.steps, *notes], as_json=as_json)


def _obstacles(book: Book, release: Release, path: Path) -> Iterator[str]:
    """Yield what keeps a release from devices that its operator may expect to get it."""
    if not release.is_open:
        return
    channel = release.plan.channel
    if not book.sizes[channel]:
        yield from _say_empty_channel(book, channel, path)
    for other in book.current():
        is_older = other.number < release.number and other.plan.channel == channel
        if is_older and not other.promoted:
            yield f"note: release {other.number} of channel '{channel}' is at stage '{other.stage}', and is older"
    if not is_serving(path):
        yield "note: no coordinator serves; 'headwater serve' brings releases to devices"


def _say_empty_channel(book: Book, channel: str, path: Path) -> Iterator[str]:
    """Yield that no device of the channel was heard, and where the devices are instead."""
    others = sorted(name for name, size in book.sizes.items() if size)
    yield f"note: no device of channel '{channel}' was heard; channels with devices: {listed(others)}"
    for line in other_tiers(tiers_without_releases(path)):
        yield f"note: {line}"

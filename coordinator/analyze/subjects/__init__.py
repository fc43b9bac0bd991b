"""What can be analyzed: a simulation, a run of a coordinator, or a bundle, recognised by what lies at a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.errors import UsageError, nearest

from ..looks import Settings, Subject


@dataclass(frozen=True)
class Place:
    """Where to look: a path or a run's name, the state folder for names, and clients' data where those are given."""

    subject: str
    state: Path | None = None
    data: Sequence[str] = ()
    cache: Path | None = None


def find(place: Place, settings: Settings) -> Subject:
    """The subject at a place.

    Raises:
        UsageError: nothing there that can be analyzed, or data that are missing or too many.
        DataError: data that are not there, or do not fit.
        StateError: what is there is damaged.
    """
    path = Path(place.subject).expanduser()
    if (path / "simulation.json").is_file():
        from .simulation import Simulated

        return Simulated.at(path, place.data)
    if (path / "journal.db").is_file():
        return _run(path, None, place, settings)
    if (path.parent.parent / "journal.db").is_file() and path.parent.name == "runs":
        above = path.parent.parent
        if (above / "simulation.json").is_file():
            return find(Place(str(above), data=place.data), settings)
        return _run(above, path.name, place, settings)
    if path.is_file() or (path / "manifest.json").is_file() or (path / "bundles").is_dir():
        from .bundles import Bundled

        return Bundled.at(path, place, settings)
    if place.state is not None and not path.exists() and path.name == place.subject:
        return _run(place.state, place.subject, place, settings)
    raise UsageError(_nothing(path))


def _run(state: Path, run: str | None, place: Place, settings: Settings) -> Subject:
    from .runs import Recorded

    return Recorded.at(state, run, place, settings)


def _nothing(path: Path) -> str:
    expected = "expected a simulation's folder, a coordinator's state folder, a run's name, or a bundle file"
    if path.exists():
        return f"{path} is nothing that can be analyzed; {expected}"
    siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    hint = f"did you mean '{path.parent / close}'? " if close else ""
    return f"{path}: it is not there; {hint}{expected}"

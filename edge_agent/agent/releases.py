"""Which release of which federation this device took, and which one somebody rolled it back from by hand.

``releases.json`` in the state folder. A release that was rolled back from stays away, and so do those before it, until
the coordinator makes a newer one. Each federation counts its own releases, so that all of another one's are newer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ..errors import StateError
from ..store import read_json, write_json
from ..task import Frozen
from ..wire.messages import FederationId, Install


class _Taken(Frozen):
    """A bundle, the number of its release, and the federation that counts it; 0 where it came by hand."""

    bundle_id: str = ""
    release: int = Field(0, ge=0)
    federation: FederationId = ""


class RolledBack(Frozen):
    """Somebody put another bundle in place of ``source``."""

    source: _Taken
    runs: str
    """Id of the bundle that is to stay."""


class _Record(Frozen):
    taken: _Taken = _Taken()
    rolled_back: RolledBack | None = None


class ReleaseRecord:
    """The record in one agent's state folder."""

    def __init__(self, state: Path) -> None:
        self._path = state / "releases.json"

    def took(self, message: Install) -> None:
        """The bundle of this release is in use now."""
        taken = _Taken(bundle_id=message.bundle_id, release=message.release, federation=message.federation)
        self._write(_Record(taken=taken))

    def check(self) -> None:
        """Return quietly where the record can be read, or there is none yet.

        Raises:
            StateError: it is damaged.
        """
        self._read()

    def put_by_hand(self, bundle_id: str, instead_of: str) -> RolledBack | None:
        """A bundle was installed by hand, ``instead_of`` another (empty: of none); returns what stays away from now on.

        Installing again what was rolled back from ends the rollback.
        """
        before = self._read()
        if bundle_id == instead_of:
            return before.rolled_back
        if before.rolled_back is not None and bundle_id == before.rolled_back.source.bundle_id:
            self._write(_Record(taken=before.rolled_back.source))
            return None
        if before.rolled_back is not None:
            source = before.rolled_back.source
        elif instead_of:
            source = before.taken if before.taken.bundle_id == instead_of else _Taken(bundle_id=instead_of)
        else:
            return None
        now = RolledBack(source=source, runs=bundle_id)
        self._write(_Record(rolled_back=now))
        return now

    def why_declined(self, message: Install) -> str:
        """Why this device does not take a release; empty where it does."""
        found = self._read().rolled_back
        if found is None:
            return ""
        source = found.source
        newest = source.release if source.federation == message.federation else 0
        is_newer = message.bundle_id != source.bundle_id and message.release > newest
        return "" if is_newer else _in_words(found)

    def rolled_back(self) -> str:
        """That somebody put another bundle in place of a release, and which; empty where nobody did."""
        found = self._read().rolled_back
        return "" if found is None else _in_words(found)

    def _read(self) -> _Record:
        raw = read_json(self._path)
        try:
            return _Record() if raw is None else _Record.model_validate(raw)
        except ValidationError as error:
            raise StateError(
                f"{self._path}: not what an agent writes; remove it to take every release again"
            ) from error

    def _write(self, record: _Record) -> None:
        content: dict[str, Any] = record.model_dump(mode="json")
        write_json(self._path, content)


def _in_words(found: RolledBack) -> str:
    source = found.source
    of = f" (release {source.release})" if source.release else ""
    return (
        f"keeps bundle {found.runs[:12]}: somebody rolled this device back by hand from bundle "
        f"{source.bundle_id[:12]}{of}; it takes a newer release"
    )

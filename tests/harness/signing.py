"""Keys, roots and releases of a federation in tests; everything is drawn from a number, and time is given."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.state.release_keys import NewRelease, Public, role, root_of, sign_bundle
from edge_agent.bundle.trust import Envelope, public_bytes

NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
YEAR = timedelta(days=365)


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def publics(*numbers: int) -> list[Public]:
    return [Public(public_bytes(key(number)), f"person {number}") for number in numbers]


def now() -> float:
    return NOW.timestamp()


@dataclass
class Federation:
    """A federation whose keys are numbers: root keys and release keys, and how many of them have to sign."""

    name: str = "home"
    root_keys: tuple[int, ...] = (1,)
    root_threshold: int = 1
    keys: tuple[int, ...] = (11,)
    threshold: int = 1
    roots: list[Envelope] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rotate(*self.root_keys)

    def rotate(self, *signers: int, expires: datetime = NOW + 10 * YEAR, **changes: Any) -> Envelope:
        """A new root with these changes, signed by these keys, whether they may or not."""
        for name, value in changes.items():
            setattr(self, name, value)
        roles = (
            role(publics(*self.root_keys), self.root_threshold),
            role(publics(*self.keys), self.threshold),
        )
        made = root_of(self.name, len(self.roots) + 1, expires, *roles)
        for number in signers:
            made = made.with_signature(key(number))
        self.roots.append(made)
        return made

    def sign(self, path: Path, version: int, *signers: int, expires: datetime = NOW + YEAR, **options: Any) -> Path:
        """A signed copy of the bundle at ``path``."""
        out = path.with_name(f"{path.stem}-{self.name}-{version}.hwb")
        shutil.copy(path, out)
        chosen = [key(number) for number in signers or self.keys[: self.threshold]]
        sign_bundle(out, self.roots, chosen, NewRelease(version, expires, **options), again=True)
        return out

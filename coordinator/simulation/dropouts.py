"""Clients that are asked and never deliver: gone before they begin, or trained in vain. The seed says which."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

Fate = Literal["delivers", "vanishes", "trains_in_vain"]

_SALT = 0x0D0


@dataclass(frozen=True)
class Dropouts:
    """Each client of each round drops out with probability ``share``, half of them before and half after training."""

    share: float
    seed: int

    def fate(self, client: str, number: int, attempt: int = 1) -> Fate:
        """What becomes of a client in a round; another attempt at the round is another draw."""
        rng = np.random.default_rng([self.seed, _SALT, zlib.crc32(client.encode()), number, attempt])
        drawn = float(rng.random())
        if drawn >= self.share:
            return "delivers"
        return "vanishes" if drawn < self.share / 2 else "trains_in_vain"

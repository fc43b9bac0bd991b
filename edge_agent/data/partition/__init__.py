"""Who gets which samples: one pool of labelled samples divided among the clients of a simulation."""

from __future__ import annotations

from .division import Division, Pool, Share, divided
from .rules import RULES, Rows, alike, check_rule, dirichlet, fedpac, iid, pathological

__all__ = [
    "RULES",
    "Division",
    "Pool",
    "Rows",
    "Share",
    "alike",
    "check_rule",
    "dirichlet",
    "divided",
    "fedpac",
    "iid",
    "pathological",
]

"""Who gets which samples: one pool of labelled samples divided among clients, simulated or not."""

from __future__ import annotations

from .division import Division, Pool, Share, divided
from .pools import Own, Pools, check_own, own_samples, parts_of, read_pools
from .rules import RULES, Rows, alike, check_rule, dirichlet, fedpac, iid, pathological, quantity

__all__ = [
    "RULES",
    "Division",
    "Own",
    "Pool",
    "Pools",
    "Rows",
    "Share",
    "alike",
    "check_own",
    "check_rule",
    "dirichlet",
    "divided",
    "fedpac",
    "iid",
    "own_samples",
    "parts_of",
    "pathological",
    "quantity",
    "read_pools",
]

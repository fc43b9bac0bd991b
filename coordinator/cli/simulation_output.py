"""What a simulation's result says to people: a table of its rounds, and lines about the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from ..runs.result_warnings import lines
from ..text import counted, encoder_named
from .options import table

SHOWN_ROUNDS = 20


def rounds_table(result: dict[str, Any]) -> Table:
    """Some twenty rounds, evenly apart, and what came out at the end."""
    rounds = result["rounds"]
    apart = max(1, -(-len(rounds) // SHOWN_ROUNDS))
    shown = [one for one in rounds if one["round"] % apart == 0 or one["round"] in {1, len(rounds)}]
    columns = (
        "round",
        "acc.\nglobal",
        "acc.\npersonal",
        "std",
        "worst\n10 %",
        "after\ntraining",
        "loss",
        "s",
        "up\nMB",
        "down\nMB",
    )
    rows = [_row(one["round"], one) for one in shown]
    rows.append(_row("end", {"acc": result["last"]["acc"]}))
    title = f"{result['run_id']}: {result['method']}, {result['clients']} clients, partition {result['partition']}"
    return table(title, columns, rows)


def reading(result: dict[str, Any]) -> Iterator[str]:
    """What the numbers are, and where the rest is."""
    yield "acc: mean over clients of what they received in that round; end: after the last round and personalizing"
    for scope, last in result["last"]["acc"].items():
        yield (
            f"last {_NAMES[scope]}: {last['clients_mean']:.4f} ± {last['std']:.4f} over clients, "
            f"{last['samples_mean']:.4f} over samples, worst tenth {last['worst10']:.4f}"
        )
    for scope, best in result["best"].items():
        after = counted(int(best["rounds_done"]), "round")
        words = f"{best['clients_mean']:.4f} after {after}, chosen on the {result['scored_on']} samples"
        yield f"best {_NAMES[scope]}: {words}"
    yield from (f"warning: {line}" for line in lines(result["warnings"]))
    yield from (f"missing at the end: client '{client}': {reason}" for client, reason in result["failed"].items())
    workers = f" with {counted(result['workers'], 'worker')}" if result["workers"] > 1 else ""
    yield (
        f"{result['seconds']:.1f} s of rounds on engine {result['engine']}{workers}, "
        f"partition {result['partition_hash'][:16]}, {encoder_named(result['encoder_sha256'])}"
    )
    if result["weights"]:
        yield f"the encoder began with {result['weights']['path']} (SHA-256 {result['weights']['sha256'][:16]})"
    if "stacked" in result:
        yield _stacked(result["stacked"])
    yield f"curves: {result['curves']}; page: {result['report']}; all figures: {result['folder']}/result.json"


def _stacked(figures: dict[str, Any]) -> str:
    jobs = f"{figures['jobs']} of {counted(figures['of'], 'job')} of training in one pass on {figures['device']}"
    bits = "" if figures["bits_of_serial"] else "; equal to one after another up to rounding, not bit for bit"
    return f"stacked: {jobs} ({figures['because']}){bits}"


_NAMES = {
    "global": "acc.global",
    "personal": "acc.personal",
    "local": "acc.local (each client alone: logistic regression on raw inputs)",
    "after": "acc.personal after local training",
    "new": "acc.new (clients that never trained: a head on the frozen encoder)",
    "new_global": "acc.global of clients that never trained",
}


def _row(name: object, one: dict[str, Any]) -> tuple[object, ...]:
    acc = one["acc"]
    means = [acc[scope]["clients_mean"] if scope in acc else None for scope in ("global", "personal", "after")]
    std, worst = (acc["personal"][name] if "personal" in acc else None for name in ("std", "worst10"))
    seconds, sent = one.get("seconds"), [one.get(name) for name in ("bytes_up", "bytes_down")]
    told = [None if size is None else f"{size / 1e6:.1f}" for size in sent]
    return (
        name,
        *means[:2],
        std,
        worst,
        means[2],
        one.get("loss"),
        None if seconds is None else f"{seconds:.1f}",
        *told,
    )

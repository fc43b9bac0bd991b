"""What a bundle says of itself, as rows of a name and a value: its variants, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.formats import percent


def variant_rows(figures: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return rows about the variants of a bundle's encoder, from what `bundle.variant_figures` returns.

    Of the held-out domains those are shown where int8 loses and gains most; --json has all.
    """
    rows: list[tuple[str, object]] = []
    for precision, variant in figures["variants"].items():
        parts = [f"{variant['bytes'] / 1e6:.2f} MB"]
        if variant["latency_ms"] is not None:
            parts.append(f"{variant['latency_ms']:.3f} ms per input where exported")
        if variant["accuracy"] is not None:
            parts.append(f"heads refitted there are right on {percent(variant['accuracy'])}")
        if variant.get("cosine") is not None:
            parts.append(f"cosine {variant['cosine']:.4f}")
        rows.append((precision, ", ".join(parts)))
    rows += _domain_rows(figures["domains"])
    if "int8" in figures["variants"] and figures["ranges"]:
        rows.append(("int8 ranges", figures["ranges"]))
    if figures["note"]:
        rows.append(("int8 note", figures["note"]))
    return rows


def _domain_rows(figures: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return rows about the held-out domains on which int8 loses and gains most; of a single one, its row."""
    domains = sorted(figures.items(), key=lambda item: item[1]["int8"] - item[1]["fp32"])
    if not domains:
        return []
    if len(domains) == 1:
        [(name, domain)] = domains
        return [(f"on {name}", _both_precisions(domain))]
    rows: list[tuple[str, object]] = []
    worst_name, worst = domains[0]
    best_name, best = domains[-1]
    if worst["int8"] < worst["fp32"]:
        what = f"of {len(domains)} domains int8 loses most here"
        rows.append((f"on {worst_name}", f"{_both_precisions(worst)}; {what}"))
    if best["int8"] > best["fp32"]:
        what = f"of {len(domains)} domains int8 gains most here"
        rows.append((f"on {best_name}", f"{_both_precisions(best)}; {what}"))
    if not rows:
        rows.append(("on domains", f"int8 is as often right as fp32 on each of {len(domains)} held-out domains"))
    return rows


def _both_precisions(domain: Mapping[str, Any]) -> str:
    """Return the accuracies of both precisions on one domain."""
    return f"fp32 {percent(domain['fp32'])}, int8 {percent(domain['int8'])} of {domain['support']} samples"


def lineage_rows(origin: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Return rows about where a bundle comes from and what it scored where, from what `bundle.origin` returns."""
    if origin is None:
        return [("lineage", "not in the bundle: it was made from no run, or by an earlier version")]
    rows: list[tuple[str, object]] = []
    if "run" in origin:
        of = f"{origin['run']}, round {origin['round']}, method {origin['method']}, seed {origin['seed']}"
        rows = [
            ("run", of),
            ("trained by", f"{origin['clients']} clients, partition {origin['partition_sha256'][:12]}"),
        ]
        begins = {"weights": "weights_sha256", "warm start": "warm_start_sha256", "parent bundle": "parent"}
        rows += [(name, origin[key][:12]) for name, key in begins.items() if origin[key]]
    scored = origin["scored"]
    for name, key in (("scored in the run", "run"), ("scored on devices", "devices")):
        if scored[key] is not None:
            rows.append((name, _score_text(scored[key])))
    if scored["held_out"]:
        accuracies = (f"{precision} {percent(share)}" for precision, share in scored["held_out"].items())
        rows.append(("scored where exported", ", ".join(accuracies)))
    parity = f"fp32 differs from the trained encoder by {scored['parity_max_abs']:.2g}"
    if scored["int8_cosine"] is not None:
        parity = f"{parity}; cosine of int8 {scored['int8_cosine']:.4f}"
    rows.append(("parity", parity))
    return rows


def _score_text(score: Mapping[str, Any]) -> str:
    """Return what a bundle scored for several clients: mean, worst tenth, and of how many samples."""
    clients = f"{score['clients']} clients"
    if score["support"]:
        clients = f"{clients}, {score['support']} held-out samples"
    return f"acc.personal {percent(score['mean'])}, worst tenth {percent(score['worst_tenth'])} ({clients})"

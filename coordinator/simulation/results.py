"""The results of a simulation, read from its journal: the same for a run that was stopped and resumed.

Only seconds and bytes of the round that it was stopped in count what was done since.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from edge_agent.data.partition import Division
from edge_agent.methods import Method
from edge_agent.task import Task, Tensors
from edge_agent.training.parts import norm_names, pooled_norm

from ..report.charts import Series, accuracy_floor, line_chart, standalone
from ..state.journal import Entry
from ..state.store import StateFolder
from .client_tasks import kept_in
from .plan import Plan
from .setup import CLIENTS, PARTITION, Prepared, planned

SCOPES = {"global": "acc.global", "personal": "acc.personal", "after": "acc.after.personal"}
"""Scope -> name of the metric. ``after``: personal once more, after local training."""

TRAINED = ("global", "personal")
"""Scopes of clients that train; the others are of new_clients."""

WORST_SHARE = 0.1


def result_of(state: StateFolder, run: str, prepared: Prepared) -> dict[str, Any]:
    """The run as one JSON object.

    ``acc`` of a round is the accuracy of the model that its clients received, before they trained; ``last`` that of all
    clients after the last round and after personalizing, new clients (``new``) with a head on the frozen encoder, and
    of each client alone (``local``), by logistic regression on raw inputs.
    ``scored_clients`` are those that train and have samples to be scored on.
    ``failed``: clients that are missing there, and why.
    ``best`` is chosen on the same samples, which ``scored_on`` names: test, or validation.
    """
    plan, division = prepared.plan, prepared.division
    record, summary = state.journal.replay(run), state.run(run).summary() or {}
    rounds = [round_of(state, run, number, division) for number in range(1, record.round + 1)]
    last = _last(summary, division, prepared.new_clients)
    scored = sum(bool(own.test) for client, own in division.clients.items() if client not in prepared.new_clients)
    return {
        "run_id": run,
        "method": plan.method_name,
        "params": summary.get("params", {}),
        "data": list(plan.data),
        "task": record.request.get("task", {}),
        "weights": _weights(plan, record.request.get("weights")),
        "partition": division.rule,
        "partition_settings": division.settings,
        "partition_hash": division.sha256,
        "scored_on": "validation" if "validation" in division.settings else "test",
        "clients": len(division.clients),
        "new_clients": plan.new_clients,
        "scored_clients": scored,
        "fraction": plan.fraction if plan.fraction_max is None else [plan.fraction, plan.fraction_max],
        "dropout": plan.dropout,
        "seed": plan.seed,
        "engine": prepared.choice.engine,
        "workers": prepared.choice.workers,
        "threads": plan.threads,
        "precision": plan.precision,
        "seconds": round(math.fsum(one["seconds"] or 0.0 for one in rounds), 3),
        "rounds": rounds,
        "best": best_of(rounds, record.round, last, scored),
        "last": {"rounds_done": record.round, "acc": last},
        "failed": summary.get("faults", {}),
        "warnings": summary.get("warnings", []),
        "encoder_sha256": record.outcome.get("encoder_sha256", ""),
    }


def _weights(plan: Plan, recorded: Mapping[str, Any] | None) -> dict[str, str] | None:
    """The file that the encoder began with; None: it was fresh."""
    return None if recorded is None else {"path": str(plan.weights_place), "sha256": recorded["sha256"]}


def round_of(state: StateFolder, run: str, number: int, division: Division) -> dict[str, Any]:
    """One closed round."""
    entries = state.journal.entries(run, ("round_closed", "update_accepted"), round=number)
    figures = next((entry.body for entry in entries if entry.kind == "round_closed"), {})
    told = _told(entries)
    losses = [metrics["loss"] for metrics in told.values() if "loss" in metrics]
    scores = {scope: _scores(told, metric) for scope, metric in SCOPES.items()}
    return {
        "round": number,
        "seconds": figures.get("seconds"),
        "clients": len(told),
        "acc": {scope: spread(result, division) for scope, result in scores.items() if result},
        "loss": fmean(losses) if losses else None,
        "bytes_up": figures.get("bytes_up"),
        "bytes_down": figures.get("bytes_down"),
    }


def spread(scores: Mapping[str, float], division: Division) -> dict[str, float]:
    """Over clients: mean, standard deviation, and mean of the worst tenth; and the mean over all test samples."""
    tested = {client: len(division.clients[client].test) for client in scores}
    total = sum(tested.values())
    worst = sorted(scores.values())[: max(1, math.ceil(WORST_SHARE * len(scores)))]
    result = {
        "clients": len(scores),
        "clients_mean": fmean(scores.values()),
        "samples_mean": math.fsum(scores[client] * tested[client] for client in scores) / (total or 1),
        "std": pstdev(scores.values()),
        "worst10": fmean(worst),
    }
    return {name: round(value, 6) for name, value in result.items()}


def best_of(
    rounds: Sequence[Mapping[str, Any]],
    done: int,
    last: Mapping[str, dict[str, float]],
    everybody: int,
    by: str = "clients_mean",
) -> dict[str, dict[str, float]]:
    """Scope -> the highest mean, and after how many rounds it was there; the earliest of equals.

    Only means over all clients that train and have test samples (``everybody`` is their number) count, of rounds as of
    the end: the mean of a few that were drawn is now high, now low, and the highest of many such means says nothing.
    """
    best: dict[str, dict[str, float]] = {}
    for scope, number, result in _every(rounds, done, last, everybody):
        if scope not in best or result[by] > best[scope][by]:
            best[scope] = {"rounds_done": number, **result}
    return best


def _every(
    rounds: Sequence[Mapping[str, Any]], done: int, last: Mapping[str, dict[str, float]], everybody: int
) -> Iterator[tuple[str, int, dict[str, float]]]:
    for one in rounds:
        for scope, result in one["acc"].items():
            if result.get("clients", everybody) >= everybody:
                yield scope, rounds_done(scope, one["round"]), result
    for scope, result in last.items():
        if scope == "local":  # the same whatever is trained
            continue
        if scope not in TRAINED or result.get("clients", everybody) >= everybody:
            yield scope, done, result


def rounds_done(scope: str, number: int) -> int:
    """How many rounds the model of a scope has behind it when it is evaluated in that round."""
    return number if scope == "after" else number - 1


def _told(entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """Metrics of each client in a round; the first update of a client is the one that counted."""
    told: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry.kind == "update_accepted" and entry.agent is not None:
            told.setdefault(entry.agent, dict(entry.body.get("metrics", {})))
    return told


def _scores(told: Mapping[str, Mapping[str, float]], metric: str) -> dict[str, float]:
    return {client: metrics[metric] for client, metrics in told.items() if metric in metrics}


def _last(summary: Mapping[str, Any], division: Division, new_clients: Collection[str]) -> dict[str, dict[str, float]]:
    told = {agent["id"]: agent["acc"] for agent in summary.get("agents", [])}
    trained = {client: acc for client, acc in told.items() if client not in new_clients}
    new = {client: acc for client, acc in told.items() if client in new_clients}
    result = {
        "global": _given(trained, "global"),
        "personal": _given(trained, "personal"),
        "local": _given(trained, "local"),
        "new": _given(new, "personal"),
        "new_global": _given(new, "global"),
    }
    return {scope: spread(scores, division) for scope, scores in result.items() if scores}


def _given(told: Mapping[str, Mapping[str, float | None]], scope: str) -> dict[str, float]:
    return {client: value for client, acc in told.items() if (value := acc.get(scope)) is not None}


_STYLES = {"global": "global", "personal": "personal", "after": "local"}
_NAMES = {"global": "acc.global", "personal": "acc.personal", "after": "after training"}


def curves(result: Mapping[str, Any]) -> str:
    """The SVG; accuracies of the model that existed after so many rounds."""
    series = list(_series(result))
    if not series:  # no client has test samples: an empty frame is clearer than a missing file
        series = [Series("no client has test samples", ((0.0, 0.0), (1.0, 0.0)), "plain")]
    low = accuracy_floor(y for line in series for _, y in line.points)
    text = f"Accuracy by rounds done: {', '.join(line.name for line in series)}"
    chart = line_chart(text, series, x_label="rounds done", y_label="accuracy", low=low, high=1.0)
    title = f"{result['method']}, {result['clients']} clients, partition {result['partition']}, seed {result['seed']}"
    return standalone(title, chart, [line.key for line in series])


def _series(result: Mapping[str, Any]) -> Iterator[Series]:
    rounds, last = result["rounds"], result["last"]
    for scope, style in _STYLES.items():
        for key, name, dashed in (("clients_mean", "mean", False), ("worst10", "worst tenth", True)):
            points = [
                (float(rounds_done(scope, one["round"])), one["acc"][scope][key])
                for one in rounds
                if scope in one["acc"]
            ]
            if scope in last["acc"]:
                points.append((float(last["rounds_done"]), last["acc"][scope][key]))
            if points:
                yield Series(f"{_NAMES[scope]}, {name}", tuple(points), style, is_dashed=dashed)


def pooled_batch_norm(folder: Path, run: str, number: int, method: Method, task: Task) -> Tensors:
    """Batch norm that stays with clients, pooled over those who have trained until round ``number``.

    Empty where ``folder`` holds no simulation, or none of it stays with them.

    Raises:
        StateError: what a client has kept is damaged.
    """
    if planned(folder) is None or "encoder" not in method.shared:
        return {}
    model = method.build(task)
    names = norm_names(model, method.shared_names(model))
    kept = list(_kept(folder, run, number, names)) if names else []
    return pooled_norm(kept) if kept else {}


def _kept(folder: Path, run: str, number: int, names: tuple[str, ...]) -> Iterator[tuple[float, Tensors]]:
    for client, share in Division.read(folder / PARTITION).clients.items():
        personal, _ = kept_in(folder / CLIENTS, client, run).before(number + 1)
        if all(name in personal for name in names):
            yield float(len(share.train)), {name: personal[name] for name in names}

"""The results of a simulation, read from its journal: the same for a run that was stopped and resumed.

Only seconds and bytes of the round that it was stopped in count what was done since.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from edge_agent.core.errors import HeadwaterError
from edge_agent.core.published import published_in
from edge_agent.core.task import Task, Tensors
from edge_agent.core.worst_tenth import mean_of_worst_tenth
from edge_agent.data import Samples
from edge_agent.data.partition import Division
from edge_agent.methods import Method
from edge_agent.methods.base import pooled_norm
from edge_agent.training.parts import norm_names
from export.domains import spread_over

from ..journal.entries import RoundClosed, UpdateAccepted
from ..journal.store import facts_of
from ..loggers.records import RoundResult, Spread
from ..report import write_report
from ..report.charts import Axis, Lines, Series, ends
from ..report.pictures import PAGE, Form, Format, picture
from ..report.run_charts import accuracy_floor
from ..runs.result_notes import local_models
from ..state.run_lines import AgentLine
from ..state.store import StateFolder
from ..views.runs import replay
from .client_tasks import state_files_in
from .datasets import class_counts, prepare
from .figures import BestScope, BestScores, EndScope, RoundFigures, RoundScope, RunFigures, Scores
from .plan import HOW_NOT_WHAT, Plan
from .setup import CLIENTS, PARTITION, Prepared, read_plan

log = logging.getLogger(__name__)

SCOPES: Mapping[RoundScope, str] = {"global": "acc.global", "personal": "acc.personal", "after": "acc.after.personal"}
"""Scope -> name of the metric. ``after``: personal once more, after local training."""

LAST_SCOPES: Mapping[EndScope, tuple[str, str]] = {
    "global": ("trained", "global"),
    "personal": ("trained", "personal"),
    "local": ("trained", "local"),
    "new": ("new", "personal"),
    "new_global": ("new", "global"),
}
"""Scope after the last round -> whether of clients that trained or of new ones, and the accuracy of each of them."""


def result_of(state: StateFolder, run: str, prepared: Prepared) -> RunFigures:
    """Return the figures of a run, which can be written as JSON.

    ``acc`` of a round is the accuracy of the model that its clients received, before they trained; ``last`` that of all
    clients after the last round and after personalizing, new clients (``new``) with a head on the frozen encoder, and
    of each client alone (``local``), by the best model on its raw inputs.
    """
    plan = prepared.plan
    division = prepared.division
    record = replay(state.journal, run)
    summary = state.run(run).summary() or {}
    weights = record.request.weights
    rounds = [round_of(state, run, number, division) for number in range(1, record.round + 1)]
    agents = _agents_by_group(summary, prepared)
    tested_clients = [client for client, share in division.clients.items() if share.test]
    figures: RunFigures = {
        "run_id": run,
        "name": plan.name,
        "tags": plan.tags,
        "note": plan.note,
        "method": plan.method_name,
        "params": summary.get("params", {}),
        "published": _published(prepared, summary.get("params", {})),
        "data": list(plan.data),
        "task": record.request.task,
        "weights": None if weights is None else {"path": str(plan.weights_path), "sha256": weights.sha256},
        "partition": division.rule,
        "partition_settings": division.settings,
        "partition_hash": division.sha256,
        "scored_on": "validation" if "validation" in division.settings else "test",
        "clients": len(division.clients),
        "new_clients": plan.new_clients,
        "head_clients": plan.head_clients,
        "scored_clients": len(set(tested_clients).difference(prepared.new_clients)),
        "fraction": plan.fraction if plan.fraction_max is None else [plan.fraction, plan.fraction_max],
        "dropout": plan.dropout,
        "seed": plan.seed,
        "engine": prepared.choice.engine,
        "workers": prepared.choice.workers,
        "threads": plan.threads,
        "precision": plan.precision,
        "seconds": round(math.fsum(row["seconds"] or 0.0 for row in rounds), 3),
        "rounds": rounds,
        "stopped": summary.get("stopped"),
        "last": {"rounds_done": record.round, "acc": _accuracies_at_end(agents, division)},
        "local_models": local_models(AgentLine.from_json(agent) for agent in agents["trained"]),
        "failed": summary.get("faults", {}),
        "warnings": summary.get("warnings", []),
        "next_steps": summary.get("next_steps", []),
        "encoder_sha256": record.encoder_sha256 or "",
        "best": {},
    }
    figures["best"] = best_of(figures)
    return figures


def _published(prepared: Prepared, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter -> its published value and who says it, where a simulation was to have the published ones."""
    plan = prepared.plan
    if not plan.paper and plan.paper_for is None:
        return {}
    stated = published_in(prepared.method.Params, params, plan.paper_for)
    return {name: asdict(value) for name, value in stated.items()}


def _agents_by_group(summary: Mapping[str, Any], prepared: Prepared) -> dict[str, list[Mapping[str, Any]]]:
    """Return the agents of a summary as ``trained`` and ``new`` ones; both are empty while there is no summary."""
    agents: dict[str, list[Mapping[str, Any]]] = {"trained": [], "new": []}
    for agent in summary.get("agents", []):
        group = "new" if agent["id"] in prepared.new_clients else "trained"
        agents[group].append(agent)
    return agents


def _accuracies_at_end(agents: Mapping[str, list[Mapping[str, Any]]], division: Division) -> dict[EndScope, Scores]:
    """Return the accuracies after the last round by the names of `LAST_SCOPES`; none of those nobody has."""
    spread_of_scopes: dict[EndScope, Scores] = {}
    for name, (group, scope) in LAST_SCOPES.items():
        scored = [agent for agent in agents[group] if agent["acc"].get(scope) is not None]
        if scored:
            spread_of_scopes[name] = spread({agent["id"]: agent["acc"][scope] for agent in scored}, division)
    return spread_of_scopes


def round_of(state: StateFolder, run: str, number: int, division: Division) -> RoundFigures:
    """Return the figures of one closed round."""
    return _figures_of(*_read_round(state, run, number), number, division)


def round_result(
    state: StateFolder, run: str, number: int, division: Division, rounds: int, *, is_replayed: bool
) -> RoundResult:
    """Return one closed round as those get it who watch the run.

    Args:
        state: The state folder of the simulation.
        run: Name of the run.
        number: The round's number.
        division: Each client's samples.
        rounds: Number of rounds that are planned.
        is_replayed: Whether it was closed before this process.
    """
    closed, metrics = _read_round(state, run, number)
    figures = _figures_of(closed, metrics, number, division)
    return RoundResult(
        round=number,
        rounds=rounds,
        clients=figures["clients"],
        acc={scope: spread_of(scores) for scope, scores in figures["acc"].items()},
        loss=figures["loss"],
        seconds=figures["seconds"],
        bytes_up=figures["bytes_up"],
        bytes_down=figures["bytes_down"],
        per_client=metrics,
        is_replayed=is_replayed,
    )


def spread_of(scores: Scores) -> Spread:
    """Return the accuracies of a scope in ``result.json`` as a value."""
    return Spread(
        mean=scores["clients_mean"],
        std=scores["std"],
        worst_tenth=scores["worst10"],
        samples_mean=scores["samples_mean"],
        clients=int(scores["clients"]),
    )


def _read_round(state: StateFolder, run: str, number: int) -> tuple[RoundClosed, dict[str, dict[str, float]]]:
    """Return what the journal has of a closed round: its figures, and client -> what it reported."""
    entries = state.journal.entries(run, ("round_closed", "update_accepted"), round=number)
    closed = facts_of(entries, RoundClosed)
    metrics: dict[str, dict[str, float]] = {}
    for entry in entries:
        fact = entry.fact
        if isinstance(fact, UpdateAccepted) and entry.agent is not None:  # the first update of a client counts
            metrics.setdefault(entry.agent, dict(fact.metrics))
    return closed[0] if closed else RoundClosed(), metrics


def _figures_of(
    figures: RoundClosed, metrics: Mapping[str, Mapping[str, float]], number: int, division: Division
) -> RoundFigures:
    """Return the figures of a round, from what the journal has of it."""
    losses = [reported["loss"] for reported in metrics.values() if "loss" in reported]
    accuracies: dict[RoundScope, Scores] = {}
    for scope, name in SCOPES.items():
        scores = {client: reported[name] for client, reported in metrics.items() if name in reported}
        if scores:
            accuracies[scope] = spread(scores, division)
    return {
        "round": number,
        "seconds": figures.seconds,
        "clients": len(metrics),
        "acc": accuracies,
        "loss": fmean(losses) if losses else None,
        "bytes_up": figures.bytes_up,
        "bytes_down": figures.bytes_down,
    }


def spread(scores: Mapping[str, float], division: Division) -> Scores:
    """Return mean, standard deviation and mean of the worst tenth over clients, and the mean over all test samples."""
    tested = {client: len(division.clients[client].test) for client in scores}
    total = sum(tested.values())
    samples_mean = math.fsum(scores[client] * tested[client] for client in scores) / (total or 1)
    return {
        "clients": len(scores),
        "clients_mean": round(fmean(scores.values()), 6),
        "samples_mean": round(samples_mean, 6),
        "std": round(pstdev(scores.values()), 6),
        "worst10": round(mean_of_worst_tenth(scores.values()), 6),
    }


def best_of(result: Mapping[str, Any], by: str = "clients_mean") -> dict[BestScope, BestScores]:
    """Return scope -> the highest mean, and after how many rounds it was reached; the earliest of equals.

    Only means over all clients that train and have test samples count, of rounds as of the end: the mean of a few that
    were selected varies from round to round, and the highest of many such means says nothing.
    """
    last = result["last"]
    all_clients = scored_clients(result)
    candidates = []
    for figures in result["rounds"]:
        for scope, scores in figures["acc"].items():
            candidates.append((scope, rounds_done(scope, figures["round"]), scores))
    for scope, scores in last["acc"].items():
        if scope != "local":
            candidates.append((scope, last["rounds_done"], scores))
    best: dict[BestScope, Any] = {}
    for scope, done, scores in candidates:
        is_of_a_selection = scores.get("clients", all_clients) < all_clients
        if is_of_a_selection and scope not in {"new", "new_global"}:
            continue
        if scope not in best or scores[by] > best[scope][by]:
            best[scope] = {"rounds_done": done, **scores}
    return best


def scored_clients(result: Mapping[str, Any]) -> int:
    """Return how many clients a whole round scores; results of earlier versions count all clients."""
    return int(result.get("scored_clients", int(result["clients"]) - int(result["new_clients"])))


def rounds_done(scope: str, number: int) -> int:
    """Return how many rounds the model of a scope has behind it when it is evaluated in that round."""
    if scope == "after":
        return number
    return number - 1


MOST_COUNTED = 1000
"""Clients up to which the summary has the class counts of all."""


def describe(state: StateFolder, run: str, prepared: Prepared) -> None:
    """Add what only a simulation knows to the summary of a finished run, and write its page with it."""
    plan = prepared.plan
    division = prepared.division
    folder = state.run(run)
    counts = class_counts(division, prepared.pools, prepared.task.class_names)
    if len(counts.clients) > MOST_COUNTED:
        counts = replace(counts, clients=())
    settings = plan.model_dump(mode="json", exclude_defaults=True, exclude={"folder", *HOW_NOT_WHAT})
    described = {"data": list(plan.data), "partition": counts.to_json(), "plan": settings}
    about = {"name": plan.name, "tags": plan.tags, "note": plan.note}
    written = {name: value for name, value in about.items() if value}
    folder.write_summary({**(folder.summary() or {}), **written, "simulation": described})
    write_report(folder)


_LINES = {
    "global": ("acc.global", "global"),
    "personal": ("acc.personal", "personal"),
    "after": ("after training", "plain"),
}
"""Scope -> name and role of its lines."""


def curves(result: Mapping[str, Any], kind: Format = "svg", form: Form = PAGE) -> bytes:
    """Return a picture file with the accuracies of the model that existed after so many rounds.

    Args:
        result: The content of ``result.json``.
        kind: The format of the file.
        form: For a page, or for one column of a paper.
    """
    series = []
    for scope, (name, role) in _LINES.items():
        means = curve(result, scope, "clients_mean")
        if means:
            series.append(Series(f"{name}, mean", tuple(means), role))
        worst = curve(result, scope, "worst10")
        if worst:
            series.append(Series(f"{name}, worst tenth", tuple(worst), role, dashed=True))
    low = accuracy_floor(y for line in series for _, y in line.points if y is not None)
    title = f"{result['method']}, {result['clients']} clients, partition {result['partition']}, seed {result['seed']}"
    summary = "No client has test samples."
    if series:
        summary = f"Accuracy by rounds done. {ends(series, 'after round')}"
    accuracy = Axis("accuracy on held-out samples", low=low, high=1.0)
    return picture([Lines(title, summary, Axis("rounds done"), accuracy, tuple(series))], kind, form=form)


def curve(result: Mapping[str, Any], scope: str, average: str) -> list[tuple[float, float]]:
    """Return (rounds done, accuracy) of the models of a scope; ``average`` is a name of `spread`."""
    scores = [(rounds_done(scope, figures["round"]), figures["acc"]) for figures in result["rounds"]]
    scores.append((result["last"]["rounds_done"], result["last"]["acc"]))
    return [(float(done), acc[scope][average]) for done, acc in scores if scope in acc]


def pooled_batch_norm(folder: Path, run: str, number: int, method: Method, task: Task) -> Tensors:
    """Return batch norm that stays with clients, pooled over those who have trained until round ``number``.

    Empty where ``folder`` holds no simulation, or none of it stays with them.

    Raises:
        StateError: The state of a client is damaged.
    """
    if read_plan(folder) is None or "encoder" not in method.shared:
        return {}
    model = method.adapt(method.build(task), task)
    names = norm_names(model, method.shared_names(model))
    if not names:
        return {}
    # A client that has not trained yet has no statistics; each other one counts by its samples.
    statistics = []
    for client, share in Division.read(folder / PARTITION).clients.items():
        personal, _ = state_files_in(folder / CLIENTS, client, run).before(number + 1)
        if all(name in personal for name in names):
            statistics.append((float(len(share.train)), {name: personal[name] for name in names}))
    if not statistics:
        return {}
    return pooled_norm(statistics)


def training_samples(plan: Plan, folder: Path) -> dict[str, Samples]:
    """Return the samples of each client, of 64 at most, that trained in a simulation; empty: they are gone."""
    try:
        pools, division, _ = prepare(plan, folder / PARTITION)
    except HeadwaterError as error:
        log.warning("no_training_samples simulation=%s reason=%s", folder, error)
        return {}
    new = plan.new_clients_of(tuple(division.clients))
    trained = spread_over([name for name in division.clients if name not in new])
    return {name: pools.rows_of(division.clients[name])[0] for name in trained}

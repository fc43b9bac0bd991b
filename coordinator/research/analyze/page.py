"""An analysis on disk: ``analysis.json``, a picture in each SVG file, and ``index.html`` with all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from edge_agent.storage import write_atomic, write_json

from ...report.charts import legend
from ...report.page import _POLICY, _table, megabytes, percent
from .charts import STYLE, Picture, standalone
from .pictures import pictures

PAGE, NUMBERS = "index.html", "analysis.json"


def write(result: Mapping[str, Any], out: Path) -> Path:
    """Where the page was written; files of an earlier analysis are replaced, and nothing is removed."""
    made = list(pictures(result))
    out.mkdir(parents=True, exist_ok=True)
    for picture in made:
        write_atomic(out / f"{picture.name}.svg", standalone(picture).encode())
    write_json(out / NUMBERS, result)
    write_atomic(out / PAGE, render(result, made).encode(errors="replace"))
    return out / PAGE


def render(result: Mapping[str, Any], made: Sequence[Picture]) -> str:
    """The page as HTML. It loads nothing and runs nothing."""
    style = files("coordinator.report").joinpath("report.css").read_text(encoding="utf-8")
    title = f"{result['run_id']} · {result['method']} · analysis"
    sections = (_head(result), _figures(made), *_tables(result), _left_out(result))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}\n{STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(result: Mapping[str, Any]) -> str:
    states = ", ".join(f"{one['round']}" for one in result["rounds"])
    facts = {
        "Method": result["method"],
        "Subject": f"{result['kind']} {result['subject']}",
        "Clients": len(result["clients"]) or "not known",
        "States after rounds": states or "none",
        "Numbers": "",
    }
    listed = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value)) if name != 'Numbers' else _link(NUMBERS)}</dd></div>"
        for name, value in facts.items()
    )
    return (
        f'<header><p class="over">Headwater analysis</p><h1>{escape(str(result["run_id"]))}</h1>'
        f"<dl>{listed}</dl></header>"
    )


def _link(name: str) -> str:
    return f'<a href="{escape(name)}">{escape(name)}</a>'


def _figures(made: Sequence[Picture]) -> str:
    shown = (
        f"<figure><h2>{escape(picture.title)}</h2>{picture.chart}{legend(picture.keys) if picture.keys else ''}"
        f"<figcaption>{escape(picture.caption)} {_link(picture.name + '.svg')}</figcaption></figure>"
        for picture in made
    )
    return f'<section class="charts" aria-label="Charts">{"".join(shown)}</section>' if made else ""


def _tables(result: Mapping[str, Any]) -> Iterator[str]:
    parts = ("all", "head", "tail")
    for scope, found in result["accuracy"].items():
        rows = [(name, *(percent(one[part]) for part in parts)) for name, one in found["clients"].items()]
        rows.append(("mean", *(percent(found[part]) for part in parts)))
        caption = (
            "Shares of test samples told right. Head classes: as many training samples as the client's mean class, or "
            "more; tail: the others that it has. Means of head and tail count classes alike."
        )
        heads = (("client", ""), *((part, "n") for part in parts))
        yield _table(f"Accuracy, {escape(scope)}", caption, heads, rows)
    sent = result["communication"]
    if sent is not None and sent["targets"]:
        yield _table(
            "Rounds and bytes to an accuracy", _COSTS, _TARGET_HEADS, [_target(one) for one in sent["targets"]]
        )


_COSTS = "Payload of all rounds that the first model with that mean accuracy over agents had behind it."
_TARGET_HEADS = (
    *(("scope", ""), ("target", "n"), ("rounds done", "n"), ("accuracy", "n")),
    *(("from agents", "n"), ("to agents", "n"), ("for an agent", "n")),
)


def _target(one: Mapping[str, Any]) -> tuple[str, ...]:
    begin = (f"acc.{one['scope']}", percent(one["target"]))
    if not one["reached"]:
        return (*begin, "not reached", percent(one["best"]), "–", "–", "–")
    sizes = (megabytes(one[name]) for name in ("bytes_up", "bytes_down", "bytes_per_agent"))
    return (*begin, str(one["rounds_done"]), percent(one["acc"]), *sizes)


def _left_out(result: Mapping[str, Any]) -> str:
    rows = [(one["what"], one["why"]) for one in result["left_out"]]
    if not rows:
        return ""
    return _table("Left out", "What could not be said, and why.", (("what", ""), ("why", "")), rows)

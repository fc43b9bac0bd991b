"""``headwater methods``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.table import Table

from edge_agent import methods as registry
from edge_agent.core.errors import UsageError
from edge_agent.core.published import published_of
from edge_agent.core.registry import absolute, is_reference, load_reference

from ..text import listed, plain
from .options import Json
from .output import present, print_json, show, table

if TYPE_CHECKING:
    from edge_agent.methods import MethodParams

Name = Annotated[str | None, typer.Argument(help="One method, or PATH.py:CLASS, in full; default: all, in short.")]
GRADE_MARKS: dict[str, str] = {"exact": "=", "same form": "≈", "approximate": "~"}
LISTED = "methods.json"
"""What the list shows of our own methods, made by tests/harness/reference.py: importing them takes seconds."""


def methods(name: Name = None, as_json: Json = False) -> None:
    """List all methods, or show one of them: what travels, what stays, parameters, source.

    Example: headwater methods repper
    """
    name = None if name is None else _loaded(name)
    if name is not None:
        one = {**describe(name), "params": parameters(name), "search": search_values(name)}
        present(one, _lines(one), as_json=as_json)
        return
    stored = {} if as_json else json.loads(files(__package__).joinpath(LISTED).read_bytes())
    rows = list[dict[str, Any]]()
    broken = dict[str, str]()
    for known in registry.names():
        try:
            rows.append(stored.get(known) or describe(known))
        except UsageError as error:  # a method of another package; the list shows the others
            broken[known] = str(error)
    if as_json:
        print_json({"methods": rows, "broken": broken})
        return
    names = ("method", "travels", "stays", "server step", "heads for devices", "source")
    cells = [(r["name"], r["travels"], r["stays"], r["server"], marked_heads(r), r["paper"]) for r in rows]
    legend = ", ".join(f"'{mark}' {grade}" for grade, mark in GRADE_MARKS.items())
    show(
        table("methods", names, cells, left=len(names)),
        f"Heads on the frozen encoder, against the method's own personal part: {legend}. 'methods NAME' says why.",
        *broken.values(),
    )


def _loaded(name: str) -> str:
    """Return a method's name; one in a file, ``PATH.py:CLASS``, is known to this process from then on.

    Raises:
        UsageError: There is no such file or class, or it is no method.
    """
    if not is_reference(name):
        return name
    return registry.add(load_reference("method", absolute(name)))


def describe(name: str) -> dict[str, Any]:
    """Return one method as its own file describes it.

    Raises:
        UnknownName: no such method.
    """
    from edge_agent.privacy.disclosure import (  # pydantic and all messages, which the list does without
        HEADINGS,
        section,
    )

    method = registry.create(name)
    doc = sys.modules[type(method).__module__].__doc__ or ""
    return {
        "name": name,
        "summary": _first_line(doc).partition(": ")[2] or _first_line(type(method).__doc__ or ""),
        **{key: plain(section(doc, heading)) for key, heading in HEADINGS.items()},
        "paper": method.source,
        "shared": list(method.shared),
        "returned": list(method.shared if method.returned is None else method.returned),
        "norm": method.norm,
        "own_norm": method.own_norm,
        "weighting": method.weighting,
        "heads": list(method.heads),
        "exactness": {head: list(method.card(head)) for head in method.heads},
    }


def _first_line(doc: str) -> str:
    """Return the first line of a docstring without its full stop."""
    return doc.strip().split("\n", 1)[0].rstrip(".")


def parameters(name: str) -> list[dict[str, Any]]:
    """Return the method's parameters in the order of its file: default, the paper's value, and meaning."""
    params = registry.get(name).Params
    defaults = {key: field.get_default(call_default_factory=True) for key, field in params.model_fields.items()}
    published = defaults | registry.paper_values(params)
    stated = published_of(params)
    without_effect = without_effect_in(params)
    return [
        {
            "name": key,
            "default": defaults[key],
            "paper": published[key],
            "published": [asdict(value) for value in stated.get(key, ())],
            "has_effect": key not in without_effect,
            "meaning": field.description or "",
        }
        for key, field in params.model_fields.items()
    ]


def without_effect_in(params: type[MethodParams]) -> frozenset[str]:
    """Return the parameters that a method inherits and ignores: Adam, where it is the only choice, has no momentum."""
    optimizers = get_args(params.model_fields["optimizer"].annotation)
    return frozenset({"momentum"}) if optimizers == ("adam",) else frozenset()


def said_by(published: Mapping[str, Any]) -> str:
    """Return who says a published value, and for which data set: ``authors' code, pacs``."""
    return ", ".join(word for word in (published["source"], published["data"]) if word)


PUBLISHED = ("name", "value", "source", "data set", "where")


def _where(published: Mapping[str, Any]) -> tuple[str, str]:
    """Return the data set of a published value, and where it is said."""
    return published["data"] or "any", published["location"]


def search_values(name: str) -> dict[str, str]:
    """Return parameter -> the values that 'headwater compare' and 'headwater sweep' try, as --space takes them."""
    space = registry.search_space(registry.get(name).Params)
    return {parameter: str(values) for parameter, values in space.items()}


def marked_heads(one: Mapping[str, Any]) -> str:
    """Return a method's device heads, each with the mark of its grade."""
    return " ".join(f"{GRADE_MARKS[one['exactness'][head][0]]}{head}" for head in one["heads"]) or "–"


def _lines(one: dict[str, Any]) -> Iterator[Table | str]:
    from edge_agent.privacy.disclosure import HEADINGS

    yield f"{one['name']}: {one['summary']}"
    known = [key for key in HEADINGS if one[key]]
    yield from (f"{key}: {one[key]}" for key in known)
    if len(known) < len(HEADINGS):
        missing = ", ".join(f"'{heading}:'" for key, heading in HEADINGS.items() if key not in known)
        yield f"its docstring does not say the rest: paragraphs that begin with {missing} appear here"
    yield f"parts sent to devices: {listed(one['shared']) or 'none'}; sent back: {listed(one['returned']) or 'none'}"
    yield f"norm: {one['norm']}, weighting: {one['weighting']}"
    own = "may use those of its inputs" if one["own_norm"] else "keeps those of the bundle"
    yield f"batch norm statistics of the exported encoder: a device {own}"
    for head in one["heads"]:
        yield f"head {head}: {', '.join(one['exactness'][head])}"
    yield ""
    rows = [
        (
            p["name"],
            str(p["default"]) if p["has_effect"] else "–",
            "" if p["paper"] == p["default"] else str(p["paper"]),
            p["meaning"],
        )
        for p in one["params"]
    ]
    names = ("name", "default", "--paper", "meaning")
    yield table("parameters (--param name=value); --paper: the published value where ours differs", names, rows, left=4)
    published = [
        (p["name"], "?" if value["value"] is None else str(value["value"]), value["source"], *_where(value))
        for p in one["params"]
        for value in p["published"]
    ]
    if published:
        yield table("published values: who says them, for which data", PUBLISHED, published, left=len(PUBLISHED))
    searched = "; ".join(f"{name} = {values}" for name, values in one.get("search", {}).items())
    yield f"searched by 'headwater compare' and 'headwater sweep': {searched or 'nothing'}"

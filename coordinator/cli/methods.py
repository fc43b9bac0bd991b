"""``headwater methods``."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent import methods as registry
from edge_agent.errors import UsageError

from .options import Json
from .output import print_json, show, table

if TYPE_CHECKING:
    from rich.table import Table

Name = Annotated[str | None, typer.Argument(help="One method, with its parameters; default: all, in short.")]
HEADINGS = ("Source", "Travels", "Stays", "Server", "Differs from the paper")
GRADE_MARKS: dict[str, str] = {"exact": "=", "same form": "≈", "approximate": "~"}
KEYS = ("source", "travels", "stays", "server", "differs")


def methods(name: Name = None, as_json: Json = False) -> None:
    """List all methods, or show one of them: what travels, what stays, parameters, source.

    Example: headwater methods repper
    """
    if name is not None:
        one = {**describe(name), "params": parameters(name)}
        print_json(one) if as_json else show(*_lines(one))
        return
    rows, broken = list[dict[str, Any]](), dict[str, str]()
    for known in registry.names():
        try:
            rows.append(describe(known) if as_json else from_source(known) or describe(known))
        except UsageError as error:  # one of another package's; the others are none the worse for it
            broken[known] = str(error)
    if as_json:
        print_json({"methods": rows, "broken": broken})
        return
    names = ("method", "travels", "stays", "server step", "heads for devices", "source")
    cells = [(r["name"], r["travels"], r["stays"], r["server"], _heads(r), r["paper"]) for r in rows]
    show(table("methods", names, cells, left=len(names)))
    legend = ", ".join(f"'{mark}' {grade}" for grade, mark in GRADE_MARKS.items())
    show(f"Heads on the frozen encoder, against the method's own personal part: {legend}. 'methods NAME' says why.")
    show(*broken.values())


def describe(name: str) -> dict[str, Any]:
    """One method as its own file describes it.

    Raises:
        UnknownName: no such method.
    """
    method = registry.create(name)
    doc = sys.modules[type(method).__module__].__doc__ or ""
    return {
        **_from_doc(name, doc),
        "paper": method.source,
        "shared": list(method.shared),
        "norm": method.norm,
        "weighting": method.weighting,
        "heads": list(method.heads),
        "exactness": {head: list(method.card(head)) for head in method.heads},
    }


def from_source(name: str) -> dict[str, Any] | None:
    """The fields of `describe` that a list shows, read from the method's source: no method is imported.

    None where the source does not have them as plain values, or the method is no file of ours.
    """
    try:
        tree = _source(name)
        kind = next(one for one in tree.body if isinstance(one, ast.ClassDef) and _assigned(one, "source") is not None)
        paper, heads, norm = (_constant(name, kind, attribute) for attribute in ("source", "heads", "norm"))
        exactness = _constant(name, kind, "exactness")
    except (OSError, StopIteration, LookupError, ValueError):
        return None
    grades = {head: exactness.get(head, ("approximate",))[0] for head in heads}
    if norm != "global":  # as `Method.card` has it
        grades = {head: "same form" if grade == "exact" else grade for head, grade in grades.items()}
    result = {"paper": paper, "heads": list(heads), "exactness": {head: [grade] for head, grade in grades.items()}}
    return {**_from_doc(name, ast.get_docstring(tree) or ""), **result}


@cache
def _source(module: str) -> ast.Module:
    spec = importlib.util.find_spec(f"{registry.__name__}.{module}") if module.isidentifier() else None
    if spec is None or spec.origin is None:
        raise LookupError(module)
    return ast.parse(Path(spec.origin).read_bytes())


def _assigned(kind: ast.ClassDef, name: str) -> ast.expr | None:
    for one in kind.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return one.value  # type: ignore[attr-defined, no-any-return]
        if isinstance(one, ast.FunctionDef) and one.name == name:
            raise LookupError(f"{name} is computed")
    return None


def _constant(module: str, kind: ast.ClassDef, name: str) -> Any:
    """The value of a class attribute, its own or the one that it inherits."""
    line = list(_ancestors(module, kind))
    for where, one in [*(pair for pair in line if pair[0] != "base"), *(pair for pair in line if pair[0] == "base")]:
        value = _assigned(one, name)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            return _constant(*_named(where, value.value.id), value.attr)
        if isinstance(value, ast.Call):  # grades(mlp=(…), lr=(…))
            return {word.arg: ast.literal_eval(word.value) for word in value.keywords}
        if value is not None:
            return ast.literal_eval(value)
    raise LookupError(name)


def _ancestors(module: str, kind: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    yield module, kind
    for base in kind.bases:
        if isinstance(base, ast.Name) and base.id != "ABC":
            yield from _ancestors(*_named(module, base.id))


def _named(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The class that is called ``name`` in ``module``, and the module that defines it."""
    for one in _source(module).body:
        if isinstance(one, ast.ClassDef) and one.name == name:
            return module, one
        if isinstance(one, ast.ImportFrom) and one.level == 1 and one.module:
            for alias in one.names:
                if (alias.asname or alias.name) == name:
                    return _named(one.module, alias.name)
    raise LookupError(name)


def _from_doc(name: str, doc: str) -> dict[str, str]:
    sections: Mapping[str, str] = dict(zip(KEYS, (section(doc, heading) for heading in HEADINGS), strict=True))
    return {"name": name, "summary": doc.split("\n", 1)[0].partition(": ")[2].rstrip("."), **sections}


def parameters(name: str) -> list[dict[str, Any]]:
    """The method's parameters in the order of its file: default, the paper's value, and meaning."""
    params = registry.get(name).Params
    defaults = {key: field.get_default(call_default_factory=True) for key, field in params.model_fields.items()}
    published = defaults | registry.paper_values(params)
    return [
        {"name": key, "default": defaults[key], "paper": published[key], "meaning": field.description or ""}
        for key, field in params.model_fields.items()
    ]


def section(doc: str, heading: str) -> str:
    """The text behind ``heading:`` in a method's docstring, up to the next heading."""
    taken: list[str] = []
    inside = False
    for line in doc.splitlines():
        begins = next((h for h in HEADINGS if line.startswith(f"{h}:")), None)
        if begins is not None:
            inside = begins == heading
        if inside:
            taken.append((line.partition(":")[2] if begins else line).strip())
    return " ".join(taken).strip()


def _heads(one: dict[str, Any]) -> str:
    """A method's device heads, each with the mark of its grade."""
    return " ".join(f"{GRADE_MARKS[one['exactness'][head][0]]}{head}" for head in one["heads"]) or "–"


def _lines(one: dict[str, Any]) -> Iterator[Table | str]:
    yield f"{one['name']}: {one['summary']}"
    for key in KEYS:
        yield f"{key}: {one[key]}"
    yield f"norm: {one['norm']}, weighting: {one['weighting']}"
    for head in one["heads"]:
        yield f"head {head}: {': '.join(one['exactness'][head])}"
    yield ""
    rows = [
        (p["name"], str(p["default"]), "" if p["paper"] == p["default"] else str(p["paper"]), p["meaning"])
        for p in one["params"]
    ]
    names = ("name", "default", "--paper", "meaning")
    yield table("parameters (--param name=value); --paper: the published value where ours differs", names, rows, left=4)

"""``headwater methods``."""

from __future__ import annotations

from typing import Any

from edge_agent import methods as registry

from .options import Json, console, print_json, table


def methods(as_json: Json = False) -> None:  # noqa: FBT001, FBT002 - typer options
    """All methods: what travels, what stays, which heads devices can fit, and where each comes from.

    Example: headwater methods --json
    """
    rows = [describe(name) for name in registry.names()]
    if as_json:
        print_json({"methods": rows})
        return
    cells = [(r["name"], r["travels"], r["stays"], " ".join(r["heads"]), r["source"]) for r in rows]
    console.print(table("methods", ("method", "travels", "stays", "device heads", "source"), cells, left=5))


def describe(name: str) -> dict[str, Any]:
    """One method as its own file describes it."""
    import sys

    method = registry.create(name)
    doc = sys.modules[type(method).__module__].__doc__ or ""
    return {
        "name": name,
        "summary": doc.split("\n", 1)[0].partition(": ")[2].rstrip("."),
        "source": section(doc, "Source"),
        "travels": section(doc, "Travels"),
        "stays": section(doc, "Stays"),
        "differs": section(doc, "Differs from the paper"),
        "shared": list(method.shared),
        "norm": method.norm,
        "weighting": method.weighting,
        "heads": list(method.heads),
        "exactness": {head: list(card) for head, card in method.exactness.items()},
    }


def section(doc: str, heading: str) -> str:
    """The text behind ``heading:`` in a method's docstring, up to the next heading."""
    headings = ("Source", "Travels", "Stays", "Differs from the paper")
    taken: list[str] = []
    inside = False
    for line in doc.splitlines():
        begins = next((h for h in headings if line.startswith(f"{h}:")), None)
        if begins is not None:
            inside = begins == heading
            line = line.partition(":")[2]  # noqa: PLW2901 - the rest of this line
        if inside:
            taken.append(line.strip())
    return " ".join(taken).strip()

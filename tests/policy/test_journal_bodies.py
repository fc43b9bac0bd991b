"""Only the journal and its views read the JSON of an entry; all others read typed facts."""

from __future__ import annotations

import ast
from pathlib import Path

COORDINATOR = Path(__file__).parents[2] / "coordinator"
MAY_READ = {"journal", "views"}
"""Folders of the coordinator."""


def reads_of_bodies(code: str) -> list[int]:
    """Lines that read an attribute ``body``; a method of that name is another matter."""
    tree = ast.parse(code)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "body" and id(node) not in called
    ]


def given_as_body(code: str) -> list[int]:
    """Lines that append an entry with anything but a fact."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and any(keyword.arg == "body" for keyword in node.keywords)
    ]


def test_reads_and_writes_of_bodies_are_found():
    assert reads_of_bodies("x = entry.body['a']\ny = one.body()\nz = [e.body for e in entries]") == [1, 3]
    assert given_as_body("journal.append('kind', body={})\njournal.append(fact, run=run)\nlist.append(1)") == [1]


def test_nothing_but_the_journal_and_its_views_reads_the_json_of_an_entry():
    found = []
    for path in sorted(COORDINATOR.rglob("*.py")):
        place = path.relative_to(COORDINATOR)
        if place.parts[0] not in MAY_READ:
            code = path.read_text(encoding="utf-8")
            found += [f"{place}:{line}" for line in sorted({*reads_of_bodies(code), *given_as_body(code)})]
    assert found == [], "read entry.fact, a class of coordinator.journal.entries"

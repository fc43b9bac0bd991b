"""Only the journal and its views read the JSON of an entry; all others read typed facts."""

from __future__ import annotations

import ast

MAY_READ = {"journal", "views"}
"""Folders of the coordinator."""


def reads_of_bodies(tree: ast.AST) -> list[int]:
    """Lines that read an attribute ``body``; a method of that name is another matter."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "body" and id(node) not in called
    ]


def given_as_body(tree: ast.AST) -> list[int]:
    """Lines that append an entry with anything but a fact."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and any(keyword.arg == "body" for keyword in node.keywords)
    ]


def test_reads_and_writes_of_bodies_are_found():
    reads = ast.parse("x = entry.body['a']\ny = one.body()\nz = [e.body for e in entries]")
    assert reads_of_bodies(reads) == [1, 3]
    appends = ast.parse("journal.append('kind', body={})\njournal.append(fact, run=run)\nlist.append(1)")
    assert given_as_body(appends) == [1]


def test_nothing_but_the_journal_and_its_views_reads_the_json_of_an_entry(sources):
    found = []
    for source in sources:
        package, _, place = source.name.partition(".")
        if package == "coordinator" and place.partition(".")[0] not in MAY_READ:
            lines = {*reads_of_bodies(source.tree), *given_as_body(source.tree)}
            found += [f"{source.name}:{line}" for line in sorted(lines)]
    assert found == [], "read entry.fact, a class of coordinator.journal.entries"

"""Names in syntax trees, for tests that read all sources: to write out the source of every node takes seconds."""

from __future__ import annotations

import ast


def dotted(node: ast.AST | None) -> str:
    """Return a name with its dots, as ``ast.unparse`` writes it; empty for every other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])

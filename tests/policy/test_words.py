"""One standard term for each concept: words that were replaced do not come back."""

from __future__ import annotations

import ast
import re

REPLACED = {
    "Answers": "Reports",
    "Area": "SharedBuffer",
    "Aside": "RunHooks",
    "AT_HOME": "SERVER_ONLY",
    "Choice": "EngineChoice",
    "Crew": "HostedAgents",
    "Crowd": "SimulatedClients",
    "Desk": "ComputeProcess",
    "Doubles": "DuplicateIds",
    "Duties": "TaskRunner",
    "Fleet": "RunContext",
    "Holding": "ClientSamples",
    "Kept": "ClientState",
    "KeptFiles": "ClientStateFiles",
    "Look": "FeatureView",
    "Orders": "WorkerInit",
    "Plain": "StandardUpdate",
    "Shelf": "BlobPlacement",
    "Subject": "AnalysisTarget",
    "Tally": "RoundStats",
    "Voice": "StatusWriter",
    "_Hand": "_Worker",
    "_bury": "_on_exit",
    "_hire": "_spawn",
    "anew": "again",
    "cause_of_death": "exit_reason",
    "closely": "details",
    "died_of": "exit_reason",
    "found": "result",
    "newcomers": "new_clients",
    "place": "index, path or location",
    "told": "metrics or received",
    "wish": "requested",
    "words": "message",
}
"""Replaced identifier -> its term."""

PHRASES = {
    r"held[- ]back": "held-out",
    r"told right": "accuracy on held-out samples",
    r"newcomers?": "new client",
    r"(go|goes|going|gone) on with": "resume, continue",
    r"begins? anew": "restart, start a new run",
    r"thrown away": "discarded",
    r"nobody waits": "request cancelled",
    r"is no JSON": "invalid JSON",
    r"last words": "stderr tail",
    r"asked for otherwise": "settings differ",
    r"mistake of ours": "internal error",
    r"held against": "rejected",
    r"by a spring": "with a proximal term",
    r"lends? it": "excluded from the combination",
}
"""Pattern of a replaced wording, in strings that people read -> what to write."""


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_replaced_identifiers_do_not_come_back(sources):
    again = [
        f"{source.name}:{line}: {name} (write {REPLACED[name]})"
        for source in sources
        for name, line in identifiers(source.tree)
        if name in REPLACED
    ]
    assert again == []


def test_replaced_wording_does_not_come_back(sources):
    again = [
        f"{source.name}:{node.lineno}: {match[0]} (write: {term})"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for pattern, term in PHRASES.items()
        for match in re.finditer(rf"\b{pattern}\b", node.value)
    ]
    assert again == []


def test_documents_use_the_terms(root):
    pages = [
        root / "README.md",
        *(path for folder in ("edge_agent", "coordinator", "configs") for path in (root / folder).rglob("*.md")),
    ]
    again = [
        f"{page.relative_to(root)}:{number}: {match[0]} (write: {term})"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for pattern, term in PHRASES.items()
        for match in re.finditer(rf"\b{pattern}\b", line)
    ]
    assert again == []

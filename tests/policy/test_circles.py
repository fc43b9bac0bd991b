"""No import circles in any package, a bound on the floors of the coordinator, and the order of its folders.

Imports within functions and for type checking count as well: a module that needs them both ways has no clear place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST_FLOORS = 11
"""The longest chain of folders and root modules of ``coordinator`` that import each other.

Two of them are the journal and its views: what is stored, what follows from it, and the files of the state folder. Two
more are a run and its rounds.
"""

KNOWN_CIRCLES: set[str] = set()
"""A module of each circle that is still to be cut. This set only shrinks."""

ORDER = (
    {"cli"},
    {"web"},
    {"api", "research"},
    {"simulation"},
    {"service"},
    {"hosted", "blobs"},
    {"runs", "capacity"},
    {"aggregators"},
    {"rounds"},
    {"fleet", "report", "identity"},
    {"broker"},
    {"state", "processes"},
    {"views"},
    {"config"},
    {"journal", "loggers"},
    {"estimates", "plain_values", "shadowed", "text"},
)
"""Folders and root modules of ``coordinator``, the upper ones first; each imports only lower ones.

``hosted`` is above ``runs`` because its work beside the rounds (warm start, proxy) implements hooks of a run, and
``report`` is below because a run writes its page at the end; it reads nothing but the run's folder. ``config`` asks
``journal`` which stores a URL may name.
"""

Graph = Mapping[str, set[str]]


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected components of two or more), sorted."""
    reached = {node: reach(graph, node) for node in graph}
    groups = {tuple(sorted(other for other in reached[node] if node in reached[other])) for node in graph}
    return sorted(list(group) for group in groups if len(group) > 1)


def reach(graph: Graph, start: str) -> set[str]:
    found = set()
    todo = [start]
    while todo:
        for target in graph[todo.pop()] - found:
            found.add(target)
            todo.append(target)
    return found


def modules(sources) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports at any time.

    ``from package import name`` means the package, unless ``name`` is a module of it. The packages' front doors count
    like every other module: they import what they offer for type checkers, and so nothing below imports a front door.
    """
    names = {source.name for source in sources}
    graph = {source.name: set() for source in sources}
    for source in sources:
        for imported in source.imports:
            target = imported.name
            while target not in names and "." in target:
                target = target.rpartition(".")[0]
            if target in names and target != source.name:
                graph[source.name].add(target)
    return graph


def parts(graph: Graph, package: str) -> dict[str, set[str]]:
    """The graph of the folders and root modules of a package."""
    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        own = part(module, package)
        if own:
            found.setdefault(own, set()).update(filter(None, (part(target, package) for target in targets)))
    return {name: targets - {name} for name, targets in found.items()}


def part(module: str, package: str) -> str:
    names = module.split(".")
    return names[1] if names[0] == package and len(names) > 1 and names[1] != "__main__" else ""


def longest_chain(graph: Graph) -> list[str]:
    """The longest chain of imports in a graph without circles."""
    known: dict[str, list[str]] = {}

    def chain(node: str) -> list[str]:
        if node not in known:
            below: Iterable[list[str]] = (chain(target) for target in sorted(graph[node]))
            known[node] = [node, *max(below, key=len, default=[])]
        return known[node]

    return max((chain(node) for node in sorted(graph)), key=len)


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert circles(graph) == [["b", "c"]]
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]


def test_no_modules_import_each_other(sources):
    assert [group for group in circles(modules(sources)) if not KNOWN_CIRCLES & set(group)] == []


def test_no_module_of_edge_agent_imports_its_front_door(sources):
    importers = [
        f"{source.name}:{imported.line}"
        for source in sources
        for imported in source.imports
        if imported.name == "edge_agent" and source.name.startswith("edge_agent.")
    ]
    assert importers == [], "import the module that defines the name; the version is in `edge_agent.version`"


def test_the_coordinator_has_few_floors(sources):
    graph = parts(modules(sources), "coordinator")
    assert circles(graph) == []
    chain = longest_chain(graph)
    assert len(chain) <= MOST_FLOORS, " -> ".join(chain)


def test_folders_of_the_coordinator_import_lower_ones_only(sources):
    graph = parts(modules(sources), "coordinator")
    height = {name: level for level, names in enumerate(ORDER) for name in names}
    assert graph.keys() <= height.keys(), "a new folder has its place in the order"
    upward = {
        (name, target)
        for name, targets in graph.items()
        for target in targets
        if height[target] < height[name] or (height[target] == height[name] and target != name)
    }
    assert upward == set()

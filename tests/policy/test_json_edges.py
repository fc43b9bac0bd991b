"""Loose JSON stays at the edges of the coordinator: what travels between its modules has named fields.

A function or field whose type is an object of any JSON (``dict[str, Any]``, ``Mapping[str, Any]``) belongs to a pair
such as ``to_json`` and ``from_json`` of a class with named fields, or to a module that reads or writes JSON at an edge.
`EDGES` has a sentence for each of these modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

CONVERSIONS = {"to_json", "from_json", "as_json", "to_body", "from_body", "body"}
"""Methods of classes with named fields that make their JSON, or read it."""

EDGES = {
    "api": "the public functions take and return JSON, as the command line prints it; a notebook reads it by key",
    "broker.serve": "the configuration of amqtt, a package of others",
    "cli.agents": "the JSON of a certificate's row, printed by the module that makes it",
    "cli.analyze": "the JSON of an analysis, whose keys are those of its file, as tables",
    "cli.bench": "the JSON of a measurement, printed as it is",
    "cli.bundle": "the JSON that the command prints",
    "cli.export": "the JSON that the command prints",
    "cli.follow": "the summary of a run as --json prints it, which may be one of a later version",
    "cli.keys": "the JSON that the command prints",
    "cli.methods": "the generated list of methods, methods.json, and what the command prints of it",
    "cli.output": "prints JSON",
    "cli.run": "parameters of a method, which only the method's own class knows",
    "cli.simulate": "the JSON of a simulation, result.json, and the options of the command line",
    "cli.start_from": "the options of the command line of a simulation",
    "config": "parameters of a method, which only the method's own class knows",
    "hosted.own_data": "functions of the compute process, which get the JSON of the pipe and read it at once",
    "hosted.run_hooks": "the JSON of the pipe to the compute process",
    "identity.port": "the JSON of the enrolment port",
    "journal.entries": "bodies of entries, which become facts here",
    "journal.postgres": "rows of the database",
    "journal.postgres_connection": "rows of the database, and the parameters of libpq",
    "journal.sqlite": "rows of the database",
    "journal.store": "rows of a journal, whose hashes are over their JSON",
    "processes.cluster": "options of Ray, a package of others",
    "processes.compute": "the JSON of the pipe to the compute process",
    "report": "the summary of a run as its file would have it, for a run that has none yet",
    "report.figures": "files that agents have contributed to, of which every value may have another form",
    "report.page": "the plan of a simulation as TOML",
    "report.run_charts": "the partition in the summary of a simulation, which is shown as it is",
    "rounds.compute_requests": "parameters of a method, which only the method's own class knows",
    "rounds.context": "the JSON of the pipe to the compute process",
    "rounds.request": "parameters of a method, which only the method's own class knows",
    "rounds.server_side": "the JSON of the pipe to the compute process, and parameters of a method",
    "runs.audit": "lines of metrics.jsonl as they were read: whether they are well-formed is what is examined",
    "runs.computations": "functions of the compute process, which get the JSON of the pipe and read it at once",
    "runs.result_notes": "parts of summary.json",
    "runs.run_summary": "summary.json, which becomes a RunSummary here",
    "service.coordinator": "status.json, which is made here",
    "service.preflight": "parameters of a method, which only the method's own class knows",
    "service.status": "status.json",
    "simulation.engines.pool": "set-up of worker processes",
    "simulation.engines.ray_cluster": "options of Ray, a package of others",
    "simulation.figures": "parts of result.json whose keys are those of a method, a task, a log or a warning",
    "simulation.finished": "the summary of a run, whose agents the result reads by key",
    "simulation.index_tables": "index tables of other programs, in JSON",
    "simulation.logged": "result.json, see simulation.results",
    "simulation.notebook.result": "result.json, whose rows a notebook reads by key",
    "simulation.notebook.personal_file": "the metadata of an ONNX file",
    "simulation.own_data": "pools that a user's program gives by name",
    "simulation.plan": "parameters of a method or an encoder, which only its own class knows, and simulation.json",
    "simulation.results": "result.json, which is a public format: api, files and --json have the same keys",
    "simulation.settings": "parameters of an encoder and of an input, as in simulation.plan",
    "simulation.trained": "tensors of a state by name",
    "simulation.setup": "simulation.json, and parameters of a method",
    "state.release_keys": "the signatures of a bundle as the journal has them",
    "state.release_rows": "lineage and signatures as the journal has them, which become fields here",
    "state.run_lines": "lines of metrics.jsonl, which become fields here",
    "state.status_file": "status.json, which becomes a Status here",
    "state.store": "metrics.jsonl and summary.json",
    "views.candidate": "accuracies in a file that agents have contributed to",
    "views.timeline": "what --json prints of an event beside its text",
    "web.folder_view": "status.json, compared with the one before as it is",
    "web.pages": "files that agents have contributed to, of which every value may have another form",
    "web.run_curves": "lines of metrics.jsonl, of which every value may have another form",
}
"""Module of the coordinator -> the JSON that it reads or writes."""

ROOMS = {"research": "analyses, tables and measurements are files of JSON, and what users do not run stays in its room"}
"""The same for whole rooms."""

_LOOSE = ("dict[str, Any]", "Mapping[str, Any]")


def loose_names(tree: ast.AST) -> Iterator[str]:
    """Yield functions that take or return loose JSON, and fields that hold it, but for `CONVERSIONS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            annotations = [*(argument.annotation for argument in arguments), node.returns]
            if node.name not in CONVERSIONS and any(map(_is_loose, annotations)):
                yield node.name
        elif isinstance(node, ast.ClassDef):
            fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
            yield from (f"{node.name}.{ast.unparse(field.target)}" for field in fields if _is_loose(field.annotation))


def _is_loose(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(loose in ast.unparse(annotation) for loose in _LOOSE)


def found_in(sources) -> dict[str, list[str]]:
    """Module below the coordinator -> where it has loose JSON."""
    found = {}
    for source in sources:
        package, _, place = source.name.partition(".")
        if package == "coordinator" and place.partition(".")[0] not in ROOMS:
            names = list(loose_names(source.tree))
            if names:
                found[place] = names
    return found


def test_loose_json_is_found():
    tree = ast.parse(
        "class A:\n    x: dict[str, Any]\n    y: int\n    def to_json(self) -> dict[str, Any]: ...\n"
        "    def show(self) -> list[dict[str, Any]]: ...\ndef take(body: Mapping[str, Any]): ...\ndef fine(n: int): ..."
    )
    assert sorted(loose_names(tree)) == ["A.x", "show", "take"]


def test_loose_json_is_in_the_modules_of_an_edge_alone(sources):
    found = found_in(sources)
    more = {module: names for module, names in found.items() if module not in EDGES}
    assert more == {}, "give what travels a class with named fields, or say in EDGES which JSON the module reads"
    assert sorted(EDGES.keys() - found.keys()) == [], "these modules have none any more"

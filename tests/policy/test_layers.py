"""Imports go one way: coordinator -> export -> edge_agent, and within edge_agent from the upper floors to the lower."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from coordinator.cli import RESEARCH

FLOORS = [
    (
        "L0",
        r"edge_agent|edge_agent\.version|edge_agent\.(core|wire|run_folder|bundle|identity|privacy)(\..+)?|edge_agent\.methods(\.(base|values))?",
    ),
    ("L3", r"edge_agent\.(training|models|client)(\..+)?|edge_agent\.methods\..+"),
    ("L1", r"edge_agent\.(heads|data|personal)(\..+)?"),
    ("L2", r"edge_agent\..+"),
    ("export", r"export(\..+)?"),
    ("coordinator", r"coordinator(\..+)?"),
]
BASIC = {"numpy", "pydantic", "tomli"}
THIRD_PARTY = {
    "L0": BASIC,
    "L1": BASIC,
    "L2": BASIC,
    "L3": BASIC | {"torch", "torchvision"},
    "export": BASIC | {"torch", "torchvision", "onnx", "onnxscript"},
}
ALSO = {
    r"edge_agent\.wire\.mqtt": {"paho"},
    r"edge_agent\.wire\.seal": {"cryptography"},
    r"edge_agent\.(personal\.encoder)": {"onnxruntime"},
    r"edge_agent\.personal\.one_file": {"onnx"},
    r"edge_agent\.training\.bundle_weights": {"onnx"},
    r"edge_agent\.data(\..+)?": {"PIL"},
    r"edge_agent\.data\._sound_files": {"soundfile", "soxr"},
    r"edge_agent\.data\.(arrow|columns\..+|parquet)": {"pyarrow"},
    r"edge_agent\.data\.torchvision_sets": {"torchvision"},
    r"edge_agent\.data\.video": {"cv2"},
    r"edge_agent\.data\.sets\.digits5": {"scipy"},
    r"edge_agent\.heads\..+": {"sklearn"},
    r"export\.(parity|quantize)": {"onnxruntime"},
    r"edge_agent\.agent(\..+)?": {"torch"},
    r"edge_agent\.(identity\..+|privacy\.secure_sum\..+|bundle\.trust)": {"cryptography"},
}
"""Modules that may import more, each its own package; what a floor forbids altogether is in HEAVY."""

HEAVY = {"torch", "torchvision", "onnx", "onnxscript", "sklearn", "scipy", "pyarrow"}
INNER = {
    "L0": {"L0"},
    "L1": {"L0", "L1"},
    "L2": {"L0", "L1", "L2"},
    "L3": {"L0", "L1", "L3"},
    "export": {"L0", "L1", "L3", "export"},
}
FORBIDDEN_TO_METHODS = r"edge_agent\.(wire\.mqtt|wire\.transport|agent|cli|core\.children)(\..+)?|paho.*"
OURS = {"edge_agent", "export", "coordinator"}


def floor(module: str) -> str:
    return next(name for name, pattern in FLOORS if re.fullmatch(pattern, module))


def foreign(source):
    """(top-level package, when, line) of imports that are neither ours nor of the standard library."""
    for imported in source.imports:
        top = imported.name.split(".")[0]
        if top not in OURS and top not in sys.stdlib_module_names:
            yield top, imported.when, imported.line


def also_allowed(module: str) -> set[str]:
    return set().union(*(packages for pattern, packages in ALSO.items() if re.fullmatch(pattern, module)))


@pytest.mark.parametrize(
    "module, name",
    [
        ("edge_agent", "L0"),
        ("edge_agent.version", "L0"),
        ("edge_agent.wire.tensors", "L0"),
        ("edge_agent.methods", "L0"),
        ("edge_agent.methods.base", "L0"),
        ("edge_agent.methods.values", "L0"),
        ("edge_agent.methods.fedper", "L3"),
        ("edge_agent.models", "L3"),
        ("edge_agent.heads.lr", "L1"),
        ("edge_agent.run_folder.client_state", "L0"),
        ("edge_agent.agent.tasks.runner", "L2"),
        ("edge_agent.cli", "L2"),
        ("coordinator.broker.serve", "coordinator"),
    ],
)
def test_floors_are_told_apart(module, name):
    assert floor(module) == name


def test_packages_of_others_stay_on_their_floor(sources):
    wrong = [
        f"{source.name}:{line} imports {top}"
        for source in sources
        if (kind := floor(source.name)) in THIRD_PARTY
        for top, when, line in foreign(source)
        if when != "types" and top not in THIRD_PARTY[kind] | also_allowed(source.name)
    ]
    assert wrong == []


def test_heavy_packages_are_never_imported_by_loading_a_device_module(sources):
    wrong = [
        f"{source.name}:{line} imports {top} when loaded"
        for source in sources
        if floor(source.name) in {"L0", "L1", "L2"} and not source.path.name.startswith("_")
        for top, when, line in foreign(source)
        if when == "load" and top in HEAVY | {"onnxruntime", "cryptography"}
    ]
    assert wrong == []


def test_floors_of_ours_are_loaded_downwards_only(sources):
    wrong = [
        f"{source.name}:{imported.line} loads {imported.name}"
        for source in sources
        if (kind := floor(source.name)) in INNER
        for imported in source.imports
        if imported.when == "load" and imported.name.split(".")[0] in OURS and floor(imported.name) not in INNER[kind]
    ]
    assert wrong == []


def test_the_device_command_line_is_imported_by_itself_alone(sources):
    """What both command lines use lies in `edge_agent.core`, `bundle` or `wire`."""
    wrong = [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        for imported in source.imports
        if re.fullmatch(r"edge_agent\.cli(\..+)?", imported.name)
        and not re.fullmatch(r"edge_agent\.(cli(\..+)?|__main__)", source.name)
    ]
    assert wrong == []


OPENING = {
    "coordinator.state.journal_location",
    "coordinator.state.backup",
    "coordinator.service.standby",
    "coordinator.journal.postgres",
}
"""Who opens the file of a journal, and so knows that it is one of SQLite; all others know the contract.

A journal in a database is copied to such a file."""


def test_which_database_the_journal_is_in_is_known_where_it_is_opened_alone(sources):
    knowing = {
        source.name
        for source in sources
        for imported in source.imports
        if imported.name.startswith("coordinator.journal.sqlite")
    }
    assert knowing == OPENING


def test_nobody_imports_an_upper_package_even_when_called(sources):
    above = {"edge_agent": {"export", "coordinator"}, "export": {"coordinator"}, "coordinator": set()}
    wrong = [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        for imported in source.imports
        if imported.name.split(".")[0] in above[source.name.split(".")[0]]
    ]
    assert wrong == []


RUN_AGENTS = r"coordinator\.(simulation|hosted|research\.bench)(\..+)?"
"""What runs agents, or lets clients do what agents do; whatever else both sides use is in a room below the agent."""


def test_of_the_other_side_only_what_runs_agents_imports_the_agent(sources):
    wrong = [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        if source.name.split(".")[0] in {"coordinator", "export"} and not re.fullmatch(RUN_AGENTS, source.name)
        for imported in source.imports
        if re.fullmatch(r"edge_agent\.agent(\..+)?", imported.name)
    ]
    assert wrong == []


def test_only_the_commands_of_researchers_import_their_room(sources):
    """What serves and simulates neither loads it nor needs its extra, whenever an import runs.

    The front door offers two functions of it, which it imports by name when they are used.
    """
    room = r"coordinator\.research(\..+)?"
    importers = {
        source.name
        for source in sources
        for imported in source.imports
        if re.fullmatch(room, imported.name) and not re.fullmatch(room, source.name) and imported.when != "types"
    }
    assert importers == {f"coordinator.cli.{command}" for command in RESEARCH}


def test_a_method_does_not_know_that_mqtt_exists(sources):
    wrong = [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        if floor(source.name) == "L3"
        for imported in source.imports
        if re.fullmatch(FORBIDDEN_TO_METHODS, imported.name)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "package, only",
    [
        ("paho", {"edge_agent.wire.mqtt"}),
        ("onnxruntime", {"edge_agent.personal.encoder", "export.parity", "export.quantize"}),
        ("amqtt", {"coordinator.broker.serve"}),
        ("ray", {"coordinator.processes.cluster"}),
    ],
)
def test_package_has_few_doors(sources, package, only):
    """One importer each, so that its pitfalls (telemetry, sessions, transactions) are settled in one place."""
    doors = {
        source.name for source in sources for top, when, _ in foreign(source) if top == package and when != "types"
    }
    assert doors <= only


BLOCKED = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is not installed on this device")

blocked = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
for module in sys.argv[2].split(","):
    importlib.import_module(module)
print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""


def load_without(blocked, modules):
    """Top-level modules that are there after importing ``modules`` where ``blocked`` are not installed."""
    command = [sys.executable, "-W", "error", "-c", BLOCKED, ",".join(sorted(blocked)), ",".join(modules)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_of(sources, floors):
    """Modules of these floors that a device imports; private ones may be the body of a child process."""
    named = [s.name for s in sources if floor(s.name) in floors and not s.path.name.startswith(("_", "__main__"))]
    packages = [s.name for s in sources if floor(s.name) in floors and s.path.name == "__init__.py"]
    return sorted({*named, *packages})


def test_ground_floor_needs_nothing_but_its_packages(sources):
    blocked = HEAVY | {
        "onnxruntime",
        "PIL",
        "cryptography",
        "safetensors",
        "amqtt",
        "typer",
        "rich",
        "matplotlib",
    }
    loaded = load_without(blocked, modules_of(sources, {"L0"}))
    assert "edge_agent" in loaded
    assert not loaded & blocked


def test_device_without_torch_onnx_and_scikit_learn_loads_every_module_up_to_its_command_line(sources):
    blocked = HEAVY | {"amqtt", "typer", "rich", "safetensors", "matplotlib", "cryptography"}
    modules = modules_of(sources, {"L0", "L1", "L2"})
    assert len(modules) > 30
    loaded = load_without(blocked, modules)
    assert not loaded & blocked
    assert "onnxruntime" not in loaded, "an idle agent has not loaded an encoder"


def test_blocking_is_what_makes_the_difference(sources):
    """The test above could pass because nothing is blocked: a training module must fail under it."""
    with pytest.raises(AssertionError, match="torch is not installed on this device"):
        load_without({"torch"}, ["edge_agent.training.loops"])

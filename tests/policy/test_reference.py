from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import reference

from coordinator import compare, simulate, sweep
from coordinator.research.compare.settings import check_fields
from coordinator.research.compare.shared_settings import SharedSettings
from coordinator.simulation.plan import Plan
from coordinator.simulation.settings import Settings
from edge_agent.cli import main
from edge_agent.core.errors import ConfigError


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


@pytest.mark.parametrize(
    "path", ["edge_agent/methods", "edge_agent/heads", "edge_agent/data", "configs", "configs/brokers"]
)
def test_reference_page_says_what_the_code_says(root, pages, path):
    page = root / path / "README.md"
    assert page.read_text(encoding="utf-8") == pages[page.relative_to(root)], "python tests/harness/reference.py"


def test_the_list_of_methods_shows_what_their_classes_say(root, pages):
    """'headwater methods' reads this file instead of importing torch and all methods."""
    listed = root / "coordinator/cli/methods.json"
    assert listed.read_text(encoding="utf-8") == pages[listed.relative_to(root)], "python tests/harness/reference.py"


def test_the_typed_settings_of_simulate_are_the_fields_of_a_plan(root):
    place = root / "coordinator/simulation/settings.py"
    assert place.read_text(encoding="utf-8") == reference.settings_module(), "python tests/harness/reference.py"
    arguments = set(inspect.signature(simulate).parameters) - {"settings", "out", "watch"}
    assert Settings.__annotations__.keys() & arguments == set()
    assert Settings.__annotations__.keys() >= Plan.model_fields.keys() - arguments - {"folder"}
    assert Settings.__total__ is False


def test_the_typed_settings_of_comparisons_are_what_these_leave_to_all_simulations(root):
    place = root / "coordinator/research/compare/shared_settings.py"
    assert place.read_text(encoding="utf-8") == reference.shared_settings_module(), "python tests/harness/reference.py"
    for call in (compare, sweep):
        assert SharedSettings.__annotations__.keys() & inspect.signature(call).parameters.keys() == set()
        assert inspect.signature(call).parameters["settings"].annotation == "Unpack[SharedSettings]"
    check_fields(dict.fromkeys(SharedSettings.__annotations__, 1))
    with pytest.raises(ConfigError) as caught:
        check_fields(dict.fromkeys(Plan.model_fields.keys() - SharedSettings.__annotations__.keys(), 1))
    refused = {mistake.partition(":")[0] for mistake in caught.value.mistakes}
    left_out = Plan.model_fields.keys() - SharedSettings.__annotations__.keys() - refused
    assert left_out == {"data", "folder"}
    assert SharedSettings.__total__ is False


@pytest.mark.parametrize(
    "annotation, code",
    [
        (Annotated[int, "at least 0"], "int"),
        (Path | None, "str | Path | None"),
        (Literal["a", "b"], 'Literal["a", "b"]'),
        (tuple[str, ...], "tuple[str, ...]"),
        (dict[str, int], "Mapping[str, Any]"),
    ],
)
def test_a_fields_type_is_written_as_the_type_of_an_argument(annotation, code):
    assert reference.type_as_code(annotation) == code


def test_every_key_of_the_configuration_has_a_meaning(pages):
    text = next(text for path, text in pages.items() if path.parts[0] == "configs")
    assert [line for line in text.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    for key in ("quorum", "deadline_s", "min_gain", "password_file", "partition"):
        assert f"\n| `{key}` |" in text


def test_options_of_edge_agent_that_pages_name_exist(root, capsys):
    """Those of ``edge-agent COMMAND … --option`` in a line or between backticks."""
    named: dict[str, set[str]] = {}
    for page in [*root.glob("*.md"), *(path for path in root.glob("*/**/*.md") if ".venv" not in path.parts)]:
        for command, rest in re.findall(r"\bedge-agent ([a-z]+)\b([^`\n]*)", page.read_text(encoding="utf-8")):
            named.setdefault(command, set()).update(re.findall(r"--[a-z][a-z-]*", rest))
    assert {"--param", "--label"} <= set().union(*named.values())
    for command, options in named.items():
        if not options:
            continue
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert options <= set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)), command

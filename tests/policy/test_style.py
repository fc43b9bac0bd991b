from __future__ import annotations

import ast
import itertools
import re
import sys

import pytest
from syntax import dotted

DRAWERS = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "manager",
    "managers",
    "misc",
    "const",
    "constants",
    "shared",
}
DEPENDENCIES = {
    *("numpy", "pydantic", "paho", "safetensors", "tomli", "onnxruntime", "PIL", "pillow", "sklearn", "torch"),
    *("torchvision", "onnx", "onnxscript", "amqtt", "typer", "rich", "starlette", "uvicorn"),
    *("cryptography", "matplotlib", "prometheus_client", "ray", "pytest", "xdist", "hypothesis", "ruff", "mypy"),
}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "skops"}
UNSAFE_CALLS = {"torch.load", "torch.save", "np.save", "joblib.load", "eval", "exec", "pd.read_pickle"}


REMOVES_FOLDERS = {"shutil.rmtree", "rmtree", "shutil.move", "move", "os.removedirs", "removedirs", "os.renames"}
"""Names in the code by which a folder goes with what is in it, or is moved across disks, which removes it."""


def functions(source):
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_module_is_a_drawer(sources):
    names = {source.name for source in sources if set(source.name.split(".")) & DRAWERS}
    assert names == set(), "name what it does"


def test_no_module_is_named_like_a_dependency_or_the_standard_library(sources):
    """One day somebody runs a file from its own folder, and ``import x`` finds the wrong one."""
    taken = DEPENDENCIES | (set(sys.stdlib_module_names) - {"__main__"})
    clashes = {source.name for source in sources if source.name.split(".")[-1] in taken and "." in source.name}
    assert clashes == set()


WEIGHTS_READER = "export.foreign.weights"
"""The module that reads what ``torch.save`` wrote, at the coordinator alone, by torch's reader of weights only."""


def reads_weights_only(source, call):
    """Whether a call in that module says in so many words that nothing but weights is read."""
    safe = {(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords}
    return source.name == WEIGHTS_READER and ("weights_only", "True") in safe


def test_nothing_can_run_code_out_of_data(sources):
    wrong = [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        for imported in source.imports
        if imported.name.split(".")[0] in UNSAFE_MODULES
    ]
    for source in sources:
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Call)
                and dotted(node.func) in UNSAFE_CALLS
                and not reads_weights_only(source, node)
            ):
                wrong.append(f"{source.name}:{node.lineno} calls {dotted(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{source.name}:{node.lineno} allows pickle")
    assert wrong == []


def test_arrays_are_loaded_with_pickle_forbidden_in_so_many_words(sources):
    silent = [
        f"{source.name}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"np.load", "numpy.load"}
        and "allow_pickle" not in {keyword.arg for keyword in node.keywords}
    ]
    assert silent == []


def test_input_is_never_checked_by_assert(sources):
    asserts = [f"{s.name}:{node.lineno}" for s in sources for node in ast.walk(s.tree) if isinstance(node, ast.Assert)]
    assert asserts == [], "python -O removes them; raise an error of edge_agent.core.errors"


MACHINE = re.compile(r"(?<![\w.])(/home/\w|/root/|/work/|/Users/|[A-Z]:\\\\|/mnt/\w)|\.\./shared\b")


def test_no_path_of_a_developers_machine(root, sources):
    others = [
        path for folder in ("configs", "examples", "tests", ".ci", ".github") for path in (root / folder).rglob("*")
    ]
    texts = [
        path for path in others if path.is_file() and path.suffix in {".py", ".toml", ".md", ".conf", "", ".service"}
    ]
    wrong = [
        f"{path.relative_to(root)}:{number}"
        for path in [*(source.path for source in sources), *texts, root / "README.md", root / "pyproject.toml"]
        if path.resolve() != __import__("pathlib").Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line, found",
    [
        ("open('/home/ann/x')", True),
        ("cd /work/x", True),
        ("../shared/a", True),
        ("fl/1/home/a", False),
        ("a/root/b", False),
    ],
)
def test_machine_paths_are_recognised(line, found):
    assert bool(MACHINE.search(line)) is found


def test_no_glob_asks_for_folders_only(root, sources):
    """Before Python 3.11 a pattern that ends in a slash matches files, too: ask each path with ``is_dir``."""
    tests = (path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py"))
    tests = (text for text in tests if re.search(r"/['\"]\)", text))
    wrong = [
        ast.unparse(node)
        for tree in (*(source.tree for source in sources), *map(ast.parse, tests))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"glob", "rglob"}
        and node.args
        and ast.unparse(node.args[0]).endswith(("/'", '/"'))
    ]
    assert wrong == []


def test_no_test_waits_for_the_clock(root):
    """Waiting for an event with a time limit is fine; sleeping is how tests become slow and still fail at times."""
    wrong = []
    for path in (root / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "sleep" not in text:
            continue
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        sleeping = (call for call in calls if dotted(call.func) in {"time.sleep", "sleep"})
        wrong.extend(f"{path.relative_to(root)}:{call.lineno}" for call in sleeping)
    assert wrong == []


def test_every_exception_of_the_linter_has_a_reason(root):
    """Between ``[tool.ruff.lint]`` and the next tool, a line that names a rule ends with a comment."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    section = text[text.index("[tool.ruff.lint]") : text.index("[tool.ruff.lint.flake8-annotations]")]
    rules = [line for line in section.splitlines() if re.match(r'\s+"[A-Z]+[0-9]*",', line)]
    assert len(rules) > 20
    assert [line for line in rules if not re.search(r"#\s+\S+ \S+", line)] == []


def test_the_linter_reads_every_folder_of_the_packages(root, sources):
    """``extend-exclude`` names folders at any depth: that of a state folder once hid the package ``state``."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    (excluded,) = re.findall(r"^extend-exclude = \[(.*)\]$", text, re.MULTILINE)
    names = set(re.findall(r'"([^"]+)"', excluded))
    assert {part for source in sources for part in source.path.relative_to(root).parts} & names == set()


def test_silenced_lint_names_its_rule_and_says_why(sources):
    """``# noqa: X - why`` or, where the line has no room, a comment on the line above."""
    wrong = []
    for source in sources:
        lines = source.text.splitlines()
        for number, line in enumerate(lines, 1):
            if "# noqa" not in line:
                continue
            says_why = re.search(r"# noqa: [A-Z0-9, ]+ - \S+", line) or lines[number - 2].strip().startswith("#")
            if not says_why:
                wrong.append(f"{source.name}:{number}")
    assert wrong == []


def test_only_the_guarded_function_removes_folders(sources):
    """`own_folders.remove_folder` removes what this program has made, and follows no link."""
    wrong = [
        f"{source.name}:{node.lineno} {dotted(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if dotted(node) in REMOVES_FOLDERS
    ]
    wrong += [
        f"{source.name}:{imported.line} imports {imported.name}"
        for source in sources
        for imported in source.imports
        if imported.name in REMOVES_FOLDERS
    ]
    assert [place for place in wrong if not place.startswith("edge_agent.core.own_folders:")] == []
    assert any(place.startswith("edge_agent.core.own_folders:") for place in wrong), "the search finds nothing"


def test_each_constant_of_a_device_has_a_docstring_of_its_own(sources):
    """One text below ``A, B = 1, 2`` has to say which of its halves is about which."""
    shared = [
        f"{source.name}:{statement.lineno}"
        for source in sources
        if source.name.split(".")[0] == "edge_agent"
        for statement, following in itertools.pairwise(source.tree.body)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    ]
    assert shared == []

from __future__ import annotations

import ast
import re

import pytest

from edge_agent.core import errors

LINE = re.compile(r"^(?P<branch>[│├└─ ]*)(?P<name>\w+)\s+exit\s+(?P<code>\d+)\s+\S", re.MULTILINE)


def subclasses(root):
    return {root}.union(*(subclasses(child) for child in root.__subclasses__()))


def drawn():
    """name -> (parent's name, exit code) as the drawing at the top of the module shows it."""
    found = {}
    path = []
    for line in LINE.finditer(errors.__doc__):
        depth = len(line["branch"]) // 4
        path = [*path[:depth], line["name"]]
        found[line["name"]] = (path[depth - 1] if depth else None, int(line["code"]))
    return found


def test_the_drawn_tree_is_the_tree():
    real = {
        kind.__name__: (None if kind is errors.HeadwaterError else kind.__bases__[0].__name__, kind.exit_code)
        for kind in subclasses(errors.HeadwaterError)
        if kind.__module__ == errors.__name__
    }
    assert len(real) > 15
    assert drawn() == real


def test_all_errors_of_the_packages_are_in_the_tree(sources):
    """Classes that end an expected failure live in one module, so that a caller can look them up."""
    names = {kind.__name__ for kind in subclasses(errors.HeadwaterError)} | {"Exception", "ValueError", "RuntimeError"}
    strays = [
        f"{source.name}.{node.name}"
        for source in sources
        if source.name != "edge_agent.core.errors"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and {ast.unparse(base).split(".")[-1] for base in node.bases} & names
    ]
    assert strays == []


def test_every_error_is_raised_somewhere(sources):
    """An error that nothing raises promises a check that is not made."""
    parents = {kind.__bases__[0] for kind in subclasses(errors.HeadwaterError)}
    leaves = {
        kind.__name__ for kind in subclasses(errors.HeadwaterError) - parents if kind.__module__ == errors.__name__
    }
    # Some are raised by their own class method, or by their name from what a child process has told.
    used = {
        name for name in leaves for source in sources if source.name != "edge_agent.core.errors" and name in source.text
    }
    assert leaves - used == set()


def test_exit_codes_are_the_documented_ones():
    codes = {kind.exit_code for kind in subclasses(errors.HeadwaterError)}
    assert codes == {1, 2, 3, 4, 5, 75}


TEXT_TESTS = {"startswith", "endswith", "find", "index", "count", "partition"}
"""Methods of texts by which something may be decided."""


def decisions_on_messages(tree):
    """Yield the lines that look into the text of a caught error, which is for people: fields and classes decide."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq | ast.NotEq):
            texts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_TESTS:
            texts = [node.func.value]
        else:
            continue
        yield from (text.lineno for text in texts if ast.unparse(text) in {"str(error)", "str(failure)", "error.args"})


@pytest.mark.parametrize("code", ["x = 'a' in str(error)", "if str(error).endswith('a'): pass", "str(error) == 'a'"])
def test_decisions_on_messages_are_recognised(code):
    assert [*decisions_on_messages(ast.parse(code))] == [1]


def test_no_device_decides_on_the_text_of_an_error(sources):
    wrong = [
        f"{source.name}:{line}"
        for source in sources
        if source.name.split(".")[0] == "edge_agent"
        for line in decisions_on_messages(source.tree)
        # What a reader of a bundle says of bad JSON is cut to its first line for the message of another error.
        if source.name != "edge_agent.bundle.trust"
    ]
    assert wrong == []

"""The project as the policy tests see it: every source file, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("edge_agent", "export", "coordinator")


@dataclass(frozen=True)
class Imported:
    """Target of an import statement; ``when`` is ``load``, ``call`` (in a function) or ``types`` (TYPE_CHECKING)."""

    name: str
    when: str
    line: int


@dataclass(frozen=True)
class Source:
    path: Path

    @cached_property
    def name(self) -> str:
        """Path below the project, as a dotted module name; a package is its folder's name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> list[Imported]:
        return list(_imports(self.tree, self.package, "load"))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def _imports(node, package, when):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Imported(alias.name, when, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from _targets(child, package, when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, package, "types" if when == "types" else "call")
        elif isinstance(child, ast.If) and any(
            "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(child.test)
        ):
            yield from _imports(ast.Module(child.body, []), package, "types")
            yield from _imports(ast.Module(child.orelse, []), package, when)
        else:
            yield from _imports(child, package, when)


def _targets(statement, package, when):
    """``from ..a import b`` may mean module ``a`` or module ``a.b``: the longer one where there is such a file."""
    base = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
    origin = ".".join([*base, *([statement.module] if statement.module else [])])
    for alias in statement.names:
        longer = f"{origin}.{alias.name}"
        place = ROOT.joinpath(*longer.split("."))
        is_module = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
        yield Imported(longer if is_module else origin, when, statement.lineno)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    found = [Source(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 20, "the packages are where they should be"
    return found

"""Sizes of the three packages, as a report: ``python -m tests.policy.sizes [PACKAGE]``. No test fails on them.

A code line is one that is neither blank, nor comment, nor docstring; the string below an attribute is its docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[2]
PACKAGES = ("edge_agent", "export", "coordinator")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> set[int]:
    """Numbers of the code lines of a Python source."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in LAYOUT)
    return {line for span in lines for line in span} - docstrings


def functions(text: str) -> list[int]:
    """Code lines of each function, nested ones included."""
    lines = code_lines(text)
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [len(lines & set(range(node.lineno, node.end_lineno + 1))) for node in nodes]


def main() -> None:
    """Print a line for each package, then one for each module of the package that was named."""
    print(f"{'package':12} {'modules':>7} {'code lines':>10} {'lines of a function: median / p90 / largest':>45}")
    totals = [0, 0]
    for package in PACKAGES:
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py")]
        code = sum(len(code_lines(text)) for text in texts)
        sizes = [size for text in texts for size in functions(text)]
        spread = f"{median(sizes):.0f} / {quantiles(sizes, n=10)[-1]:.0f} / {max(sizes)}"
        print(f"{package:12} {len(texts):7} {code:10} {spread:>45}")
        totals = [totals[0] + len(texts), totals[1] + code]
    print(f"{'all':12} {totals[0]:7} {totals[1]:10}")
    for package in sys.argv[1:]:
        for path in sorted((ROOT / package).rglob("*.py")):
            print(f"{len(code_lines(path.read_text(encoding='utf-8'))):6}  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""Each page of measured results names the commands that make its figures, and those have the options that it gives."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest

from coordinator.cli import COMMANDS as HEADWATER
from edge_agent.cli import COMMANDS as EDGE_AGENT

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "examples/results").glob("*.md"))
PROGRAMS = {"headwater": ("coordinator", HEADWATER), "edge-agent": ("edge_agent", EDGE_AGENT)}
GROUPS = {"bench", "keys", "release"}
"""Commands that have commands of their own, each with its options."""

CODE = re.compile(r"^```(\w*)\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def passages(path):
    """What backticks hold, and blocks without a language, each with the lines that go on joined."""
    for language, block, inline in CODE.findall(path.read_text(encoding="utf-8")):
        if not language:
            yield re.sub(r"\\\n\s*", " ", block or inline)


def commands(passage):
    """Program and words of each command of ours in a passage."""
    for line in re.split(r"[\n;]| && ", passage):
        match = re.search(r"\b(headwater|edge-agent) ([a-z]+)\b(.*)|\bpython (tests/\S+\.py)(.*)", line)
        if match and match[4]:
            yield match[4], match[5].split()
        elif match and match[2] in PROGRAMS[match[1]][1]:
            yield match[1], [match[2], *match[3].split()]


@pytest.fixture(scope="module")
def options_of():
    """A function that gives the options of a command of ours or of a script, each looked up once."""
    cached = {}

    def look_up(program, words):
        if program.endswith(".py"):
            return set(OPTION.findall((ROOT / program).read_text(encoding="utf-8")))
        named = tuple(words[: 2 if words[0] in GROUPS and len(words) > 1 else 1])
        if (program, named) not in cached:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
                importlib.import_module(f"{PROGRAMS[program][0]}.cli").main([*named, "--help"])
            assert not ended.value.code, named
            cached[program, named] = set(OPTION.findall(shown.getvalue()))
        return cached[program, named]

    return look_up


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_of_results_names_what_makes_it(page):
    text = page.read_text(encoding="utf-8")
    makers = [program for passage in passages(page) for program, _ in commands(passage)]
    makers += re.findall(r"`pytest -m \w+ (tests/[\w/.]+)`", text)
    assert makers, "no command is named that makes these figures"
    scripts = [ROOT / maker for maker in makers if maker.startswith("tests/")]
    assert [script for script in scripts if not script.exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_beside_results_have_the_options_that_the_page_gives_them(page, options_of):
    """Options in a variable of a block, such as ``rounds="--paper …"``, are those of the block's commands."""
    wrong = []
    for passage in passages(page):
        called = list(commands(passage))
        known = set().union(*(options_of(program, words) for program, words in called))
        if called:
            wrong += [f"{option} in: {passage.strip()}" for option in OPTION.findall(passage) if option not in known]
    assert wrong == []

"""Every folder of the three packages says what lives there, what may not, and in which order to read it."""

from __future__ import annotations

import ast
import re

import pytest

LEAST_SENTENCES = 2
READING_ORDER = re.compile(r"Read in this order: (.*?\.)(?:\s|$)", re.DOTALL)
NAME = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def rooms(sources):
    return [source for source in sources if source.path.name == "__init__.py"]


def sentences(text: str) -> list[str]:
    """Split a docstring where a full stop or a question mark is followed by the beginning of a sentence."""
    return [part for part in re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text.strip()) if part]


def named_first(text: str) -> list[str]:
    """Return the names in the reading order of a docstring; empty where it has none."""
    order = READING_ORDER.search(text)
    return [] if order is None else NAME.findall(order[1])


@pytest.mark.parametrize(
    "text, count",
    [
        ("One.", 1),
        ("The wire: topics, messages.", 1),
        ("The wire. Nothing here imports torch.", 2),
        ("A room\nof files.\n\nRead `a` first.", 2),
    ],
)
def test_sentences_are_counted(text, count):
    assert len(sentences(text)) == count


def test_the_reading_order_is_found():
    text = "A room. Read in this order: `first` (what is said), `second.part` ``literal`` and `third`. Not `fourth`."
    assert named_first(text) == ["first", "second.part", "third"]


def test_every_package_has_a_docstring_of_two_sentences(sources):
    short = []
    for room in rooms(sources):
        docstring = ast.get_docstring(room.tree) or ""
        if len(sentences(docstring)) < LEAST_SENTENCES:
            short.append(room.name)
    assert short == [], "say what lives in the room, what may not, and in which order to read it"


def test_every_folder_with_code_is_a_package(sources):
    folders = {source.path.parent for source in sources}
    packages = {room.path.parent for room in rooms(sources)}
    assert folders == packages


def test_what_a_room_says_to_read_is_there(sources):
    missing = []
    for room in rooms(sources):
        for name in named_first(ast.get_docstring(room.tree) or ""):
            path = room.path.parent.joinpath(*name.split("."))
            if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists():
                missing.append(f"{room.name}: {name}")
    assert missing == [], "correct the reading order in the docstring of the room"

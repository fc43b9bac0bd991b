"""A small table in its own folder, and the command that makes it again."""

from __future__ import annotations

import functools

import pytest
from reproduction_harness import write_table


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with 60 images of 4 x 4 in three classes, and a table about them; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path)
    return tmp_path


@pytest.fixture
def call(call):
    """``headwater reproduce`` with these words."""
    return functools.partial(call, "reproduce")

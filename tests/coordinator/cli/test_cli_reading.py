from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from coordinator.cli import compare
from coordinator.cli import reading as cli_reading
from coordinator.cli.reading import drawn_reading, shown_reading
from edge_agent import data
from edge_agent.core import reading


@pytest.fixture
def archive(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 2)
    return f"npz:{tmp_path / 'a.npz'}"


def shown(monkeypatch, archive, **options):
    out = io.StringIO()
    monkeypatch.setattr(cli_reading, "console", Console(file=out, highlight=False, **options))
    with shown_reading():
        data.load(archive)
    return out.getvalue()


def test_in_a_pipe_a_step_that_takes_long_prints_lines(monkeypatch, archive):
    assert shown(monkeypatch, archive) == "", "this one is short"
    monkeypatch.setattr(reading, "LINE_S", 0.0)
    lines = shown(monkeypatch, archive).splitlines()
    assert lines[0].startswith("read 1 of 2 arrays, ")
    assert lines[-1].startswith("read 20 of 20 images, ")


def test_on_a_terminal_a_line_is_redrawn_and_removed(monkeypatch, archive):
    monkeypatch.setattr(reading, "FIRST_S", 0.0)
    monkeypatch.setattr(reading, "REDRAW_S", 0.0)
    drawn = shown(monkeypatch, archive, force_terminal=True, width=80)
    assert "read 20 of 20 images, " in drawn
    assert drawn.endswith("\x1b[2K"), "the line is removed"


def test_a_comparison_shows_it_in_its_own_bar_or_by_lines(monkeypatch, archive):
    for name in ("LINE_S", "FIRST_S", "REDRAW_S"):
        monkeypatch.setattr(reading, name, 0.0)
    for options, expected in (({}, "read 20 of 20 images, "), ({"force_terminal": True, "width": 80}, "read ")):
        out = io.StringIO()
        for module in (cli_reading, compare):
            monkeypatch.setattr(module, "console", Console(file=out, highlight=False, **options))
        with compare.shown_progress():
            data.load(archive)
        assert expected in out.getvalue()


def test_what_is_drawn_replaces_what_was_drawn_before(monkeypatch, archive):
    for name in ("FIRST_S", "REDRAW_S"):
        monkeypatch.setattr(reading, name, 0.0)
    drawn = []
    with drawn_reading(drawn.append):
        data.load(archive)
    assert drawn[0].startswith("read 1 of 2 arrays, ")
    assert drawn[-1].startswith("read 20 of 20 images, ")

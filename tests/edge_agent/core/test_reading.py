from __future__ import annotations

import numpy as np
import pytest

from edge_agent import cli, data
from edge_agent.core import reading
from edge_agent.core.reading import Report, each, each_line, shown_by


def said_by(is_redrawn, step_s, total=1600):
    """What a step of so many files says, each of which takes ``step_s`` seconds."""
    now = [0.0]
    said = []
    report = Report("sounds", lambda text, last: said.append((text, last)), is_redrawn=is_redrawn, clock=lambda: now[0])
    for done in range(1, total + 1):
        now[0] += step_s
        report(done, total)
    return said


def test_a_long_step_says_how_many_of_how_many_and_how_fast_each_ten_seconds():
    said = said_by(is_redrawn=False, step_s=1 / 16)  # 1,600 of them take 100 seconds
    assert said[0] == ("read 160 of 1600 sounds, 16 a second", False)
    assert said[-1] == ("read 1600 of 1600 sounds, 16 a second", True)
    assert len(said) == 10


def test_on_a_terminal_a_line_is_drawn_after_a_second_and_ten_times_a_second():
    said = said_by(is_redrawn=True, step_s=1 / 64, total=128)
    assert said[0] == ("read 64 of 128 sounds, 64 a second", False)
    assert said[1][0].startswith("read 71 of 128"), "7/64 s are the first that are more than a tenth"
    assert said[-1] == ("read 128 of 128 sounds, 64 a second", True)
    assert said_by(is_redrawn=True, step_s=1 / 256, total=128) == [], "over in half a second"


def test_a_slow_rate_has_two_digits():
    assert said_by(is_redrawn=False, step_s=8.0, total=3)[0][0] == "read 2 of 3 sounds, 0.12 a second"


def test_each_yields_the_same_items_whether_they_are_shown_or_not():
    reports = []

    def show(what):
        return lambda done, total: reports.append((what, done, total))

    assert list(each([5, 6], "files")) == [5, 6]
    assert list(each_line(iter(["a\n", "b\n"]), 4)) == ["a\n", "b\n"]
    with shown_by(show):
        assert list(each([5, 6], "files")) == [5, 6]
        with shown_by(None):
            assert list(each_line(iter(["x" * 3_000_000, "y"]), 3_000_001)) == ["x" * 3_000_000, "y"]
    assert list(each([7], "files")) == [7]
    assert reports == [("files", 1, 2), ("files", 2, 2), ("MB", 3, 4), ("MB", 4, 4)]


def test_a_source_reports_its_files_and_its_samples(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "1.csv").write_text("x,y\n" + "1,2\n" * 200, encoding="utf-8")
    reports = []
    with shown_by(lambda what: lambda done, total: reports.append((what, done, total))):
        data.load(f"csv:{tmp_path / 'set'}")
    steps = dict.fromkeys(what for what, _, _ in reports)
    assert list(steps) == ["MB", "files", "recordings"]
    assert ("files", 2, 2) in reports
    assert reports[-1] == ("recordings", 2, 2)
    counts = []
    data.load(f"csv:{tmp_path / 'set'}", progress=lambda done, total: counts.append((done, total)))
    assert counts == [(done, total) for _, done, total in reports]


@pytest.fixture
def archive(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((20, 8, 8), np.uint8), labels=np.arange(20) % 2)
    return f"npz:{tmp_path / 'a.npz'}"


def test_a_command_of_a_device_prints_lines_where_there_is_no_terminal(archive, monkeypatch, capsys):
    def read(_arguments):
        """Read an archive."""
        data.load(archive)
        return 0

    monkeypatch.setattr("edge_agent.cli.collect.classes", read)
    command = ["classes", "list"]
    assert cli.main(command) == 0
    assert capsys.readouterr().err == "", "over before the first line"
    monkeypatch.setattr(reading, "LINE_S", 0.0)
    assert cli.main(command) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("read 20 of 20 images, ")


def test_on_a_terminal_of_a_device_the_last_line_stays(archive, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(reading, "FIRST_S", 0.0)
    with shown_by(cli._show_reading):
        data.load(archive)
    drawn = capsys.readouterr().err
    assert drawn.startswith("\rread 1 of 2 arrays, ")
    assert drawn.endswith("a second\x1b[K\n")
    assert "\rread 20 of 20 images, " in drawn

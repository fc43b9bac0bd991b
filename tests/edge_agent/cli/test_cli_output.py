"""How values are shown in tables."""

from __future__ import annotations

import pytest

from coordinator.cli.output import text
from edge_agent.agent.health import problem_of
from edge_agent.cli import output
from edge_agent.core.errors import UsageError
from edge_agent.core.formats import value_text
from edge_agent.data import LeftOut


@pytest.mark.parametrize(
    "value, shown", [(1e-5, "1e-05"), (-0.00049, "-0.00049"), (0.0005, "0.001"), (0.0, "0.000"), (2.5, "2.500")]
)
def test_small_numbers_keep_their_digits(value, shown):
    assert value_text(value) == text(value) == shown


def test_what_is_not_known_is_a_dash():
    assert [value_text(value) for value in (None, "", 0, "x")] == ["–", "–", "0", "x"]


def test_files_that_are_left_out_share_a_line_where_folder_and_reason_are_the_same():
    """Ten photos in a folder too deep hid which photo was broken."""
    deep = [LeftOut(f"star/more/{number}.jpg", "is too deep") for number in range(10)]
    lines = output.skipped(
        [LeftOut("car/a.heic", "is of another form"), *deep, LeftOut("cup/b.jpg", "cannot be read: no such form")]
    )
    assert lines == [
        "left out because they cannot be used: 12",
        "  car/a.heic: is of another form",
        "  star/more/0.jpg and 9 more in its folder: is too deep",
        "  cup/b.jpg: cannot be read: no such form",
    ]
    assert output.skipped(deep[:2]) == ["left out because they cannot be used: 2", *(f"  {line}" for line in deep[:2])]
    assert output.skipped([LeftOut(f"{name}/x.jpg", "cannot be read") for name in "abcdefg"])[-1] == "  … and 2 more"
    assert output.skipped([]) == []


def test_remedy_on_the_device_does_not_send_to_where_it_is_shown():
    problem = problem_of("work", UsageError("no"))
    assert (problem.remedy, problem.as_json()["remedy"]) == (
        "see 'edge-agent status' on the device",
        "see the message",
    )


def test_a_step_that_takes_long_prints_plain_lines_where_there_is_no_terminal(capsys):
    now = [0.0]
    report = output.progress("samples", clock=lambda: now[0])
    for done in range(1, 1601):
        now[0] += 95 / 1600  # seconds that a folder of 1,600 sounds took, without a word
        report(done, 1600)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "samples 169/1600", "after ten seconds"
    assert lines[-1] == "samples 1600/1600"
    assert len(lines) == 10


def test_a_short_step_prints_nothing_where_there_is_no_terminal(capsys):
    report = output.progress("samples", clock=lambda: 0.0)
    for done in range(1, 101):
        report(done, 100)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_one_line_is_redrawn_ten_times_a_second(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    report = output.progress("samples", clock=lambda: now[0])
    for done in range(1, 1001):
        now[0] += 1 / 1024
        report(done, 1000)
    drawn = capsys.readouterr().err
    assert drawn.endswith("\rsamples 1000/1000\n")
    assert drawn.count("\n") == 1
    assert drawn.count("\r") == 11, "the first, nine each 103/1024 s, and the end"

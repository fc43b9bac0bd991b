"""JSON log lines: one object a line, with the values of a message as keys, whatever peers have written into them."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import re
import sys

import pytest

from edge_agent.core.logs import RESERVED, JsonLines, LoggedStream, log_json, parts_of

HOSTILE = 'evil" run=run-9 level=critical\n{"event":"forged"}\x1b[31m\u2028'


def line_of(message, *args, level=logging.INFO, exc_info=None):
    record = logging.LogRecord("coordinator.x", level, "x.py", 1, message, args, exc_info)
    record.created = 1_700_000_000.25
    text = JsonLines().format(record)
    assert text.isascii()
    assert "\n" not in text
    return json.loads(text)


def test_values_of_a_message_become_keys_with_their_types():
    line = line_of("round_closed run=%s round=%d seconds=%.3f acc.personal=%s", "run-0001", 7, 1.23456, None)
    assert line == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "info",
        "logger": "coordinator.x",
        "event": "round_closed",
        "run": "run-0001",
        "round": 7,
        "seconds": 1.235,
        "acc.personal": None,
    }


@pytest.mark.parametrize(
    "message, args, event, values, text",
    [
        ("release_%s release=%d reason=%s", ("held", 3, "a b"), "release_held", {"release": 3, "reason": "a b"}, None),
        ("%s agent=%s", ("agent_back", "a0"), "agent_back", {"agent": "a0"}, None),
        ("waiting for=%s whom=%s", ("an agent", "-"), "waiting", {"for": "an agent", "whom": "-"}, None),
        ("left_out run=%s %s", ("r", "slow"), "left_out", {"run": "r"}, "left_out run=r slow"),
        ("late run=%s: %d%% of it", ("r", 5), "late", {"run": "r"}, "late run=r: 5% of it"),
        ("Task %r is slow", ("x",), "log", {}, "Task 'x' is slow"),
        ("too few values %s %s", ("x",), "log", {}, "too few values %s %s ('x',)"),
        ("loss_seen loss=%s", (math.nan,), "loss_seen", {"loss": "nan"}, None),
    ],
)
def test_event_and_text(message, args, event, values, text):
    line = line_of(message, *args)
    assert (line["event"], line.get("text")) == (event, text)
    assert {key: value for key, value in line.items() if key not in RESERVED} == values


def test_what_a_peer_writes_stays_within_its_own_value():
    line = line_of("agent_fault agent=%s message=%s run=%s", "a0", HOSTILE, "run-0001")
    assert (line["message"], line["run"], line["level"], line["event"]) == (HOSTILE, "run-0001", "info", "agent_fault")


def test_a_traceback_is_part_of_its_line():
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        line = line_of("run_broke run=%s", "r", level=logging.ERROR, exc_info=sys.exc_info())
    assert line["level"] == "error"
    assert "ValueError: evil" in line["traceback"]


def test_other_output_is_logged_line_by_line():
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    stream = LoggedStream(handler)
    print("one\ntwo", "three", file=stream)
    stream.write("without an end")
    assert [json.loads(line)["line"] for line in out.getvalue().splitlines()] == ["one", "two three"]
    stream.finish()
    assert json.loads(out.getvalue().splitlines()[-1])["line"] == "without an end"


def test_json_takes_over_what_was_set_up_before(monkeypatch):
    root = logging.getLogger()
    out = io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", out)
    log_json()
    logging.getLogger("edge_agent").warning("agent_lost agent=%s", "a0")
    print("plain", file=sys.stderr)
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["agent_lost", "output"]


def test_every_message_of_ours_names_an_event_and_no_reserved_key(request):
    """Read from the sources: the first argument of each call of ``log``, or the second of ``log.log``."""
    root = request.config.rootpath
    seen = 0
    wrong = []
    for path in (path for name in ("edge_agent", "export", "coordinator") for path in (root / name).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\blog\s*\.", text):  # most files log nothing, and need not be parsed
            continue
        for node in ast.walk(ast.parse(text)):
            function = getattr(node, "func", None)
            if not isinstance(function, ast.Attribute) or getattr(function.value, "id", "") != "log":
                continue
            given = node.args[1] if function.attr == "log" else node.args[0] if node.args else None
            if not isinstance(given, ast.Constant):
                continue
            seen += 1
            args = tuple(1 for _ in re.findall(r"%[^%]", given.value.replace("%%", "")))
            event, values, _ = parts_of(given.value, args)
            names = {part.partition("=")[0] for part in given.value.split() if "=%" in part}
            is_named = event != "log" or given.value.startswith("%s ")
            if not is_named or names & {*RESERVED} or not names <= values.keys():
                wrong.append(f"{path.name}:{node.lineno} {given.value}")
    assert seen > 100
    assert wrong == []

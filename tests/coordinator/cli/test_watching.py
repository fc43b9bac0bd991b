"""What an operator watches: ``status --watch``, ``agents`` and ``logs``, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from federation_harness import Federation
from terminals import COLOUR, ESCAPE, Terminal
from typer.testing import CliRunner

from coordinator.cli import command_tree
from coordinator.cli import main as headwater
from coordinator.cli.follow import agents_now
from coordinator.cli.output import fitted, table
from coordinator.cli.status import Selection, _Changes, gather_status
from coordinator.journal.entries import fact_of
from coordinator.state.fleet_rows import HeardAgent
from coordinator.state.log_file import MOST_BYTES, NAME, LogReader, logging_to
from coordinator.state.status_file import RunUnderWay
from coordinator.state.timeline import Timeline
from edge_agent.wire.messages import codec, up


def told(command, fed, *words):
    result = CliRunner().invoke(command_tree([command]), [command, "--state", str(fed.config.state), *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def agents(fed, *words):
    result = CliRunner().invoke(command_tree(["agents"]), ["agents", *words, "--state", str(fed.config.state)])
    assert result.exit_code == 0, result.output
    return result.stdout


def fault(fed, name, message="no samples", boot=None):
    boot = boot or fed.agents[name].boot
    said = up.Fault(error="DataError", code="data", message=message, remedy="add some", boot=boot)
    fed.coordinator.handle(name, "up", codec.encode(said))


@pytest.fixture
def fed(tmp_path):
    """A finished run of three agents, whose coordinator logs into its state folder; then one of them has a fault."""
    with Federation(tmp_path, agents=3) as federation, logging_to(federation.config.state):
        federation.settle()
        federation.request(rounds=2)
        federation.finish()
        fault(federation, "a1")
        federation.wait(3)
        federation.coordinator.catch_up()
        yield federation


@pytest.fixture(autouse=True)
def as_served(caplog):
    """Log levels of 'headwater serve'."""
    caplog.set_level(logging.INFO, logger="coordinator")


# --- agents ----------------------------------------------------------------------------------------------------------


def test_agents_are_one_row_each_with_faults_first(fed):
    out = agents(fed)
    assert out.startswith("3 agents: 1 fault, 2 online")
    rows = [line.split() for line in out.splitlines() if re.match(r"a\d ", line)]
    assert [row[0] for row in rows] == ["a1", "a0", "a2", "a1"], "the table, then the remedy"
    assert rows[0][:4] == ["a1", "*", "fault", "train"]
    assert "0.500" in rows[1]
    assert "a1 *: DataError: no samples; add some (at " in out
    found = json.loads(agents(fed, "--json"))
    assert found["states"] == {"fault": 1, "online": 2}
    assert [one["id"] for one in found["agents"]] == ["a1", "a0", "a2"]
    assert found["agents"][1]["acc"] == {"local": None, "global": None, "personal": 0.5}


@pytest.mark.parametrize(
    "words, expected",
    [
        (("--faults",), ["a1"]),
        (("--find", "2"), ["a2"]),
        (("--sort", "name"), ["a0", "a1", "a2"]),
        (("--sort", "name", "--reverse", "--limit", "2"), ["a2", "a1"]),
        (("--sort", "acc.personal"), ["a2", "a1", "a0"]),
        (("show", "--sort", "acc.local"), ["a0", "a1", "a2"]),
    ],
)
def test_agents_are_selected_and_sorted(fed, words, expected):
    for name, acc in (("a2", 0.1), ("a1", 0.2)):
        fed.coordinator.roster.trained(name, {"acc.personal": acc})
    fed.wait(2)
    assert [one["id"] for one in json.loads(agents(fed, *words, "--json"))["agents"]] == expected


def test_one_agent_is_shown_with_its_history(fed):
    fault(fed, "a1", "another")
    fed.wait(2)
    out = agents(fed, "a1")
    assert re.search(r"^state +fault$", out, re.MULTILINE)
    assert re.search(r"^fault +DataError: another$", out, re.MULTILINE)
    assert re.search(r"^remedy +add some$", out, re.MULTILINE)
    assert re.search(r"^better off alone +no$", out, re.MULTILINE)
    assert len(re.findall(r" fault: DataError: ", out)) == 2, "both of them, from the log"
    found = json.loads(agents(fed, "a1", "--json"))
    assert [one["message"] for one in found["history"]["faults"]] == ["no samples", "another"]
    (accuracy,) = found["history"]["accuracy"]
    assert (accuracy["run"], accuracy["round"], accuracy["acc"]["personal"]) == ("run-0001", None, 0.5)


def test_unknown_agent_has_a_hint_and_not_the_whole_fleet(fed, capsys):
    with pytest.raises(SystemExit) as ended:
        headwater(["agents", "a11", "--state", str(fed.config.state)])
    err = capsys.readouterr().err
    assert (ended.value.code, "did you mean 'a1'?" in err, "a0" in err) == (2, True, False)


def test_agents_that_are_known_from_runs_alone_are_not_heard(fed):
    fed.kill_coordinator()
    fed.agents.clear()
    fed.start_coordinator()
    fed.wait(5)
    found = json.loads(agents(fed, "--json"))
    assert {one["state"] for one in found["agents"]} <= {"not heard", "offline"}
    assert [one["acc"]["personal"] for one in found["agents"]] == [0.5] * 3


def test_sub_commands_about_certificates_stay(capsys):
    with pytest.raises(SystemExit) as ended:
        headwater(["agents", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in ("show", "certificates", "revoke", "rename"))
    assert not re.search(r"^  list ", out, re.MULTILINE), "the old name works and is not advertised"


# --- logs ------------------------------------------------------------------------------------------------------------


def test_timeline_of_a_run_has_rounds_waits_and_its_end(fed):
    out = told("logs", fed)
    texts = [line.split("Z ", 1)[1] for line in out.splitlines()]
    assert texts[0] == "requested: fedavg, 2 rounds, seed 0"
    assert texts.count("round 1 begins with 3 agents: a0, a1, a2") == 1
    assert any(text.startswith("round 2 is closed; ") for text in texts)
    assert texts[-1].startswith("finished, encoder ")
    assert "update of a0" not in out
    assert told("logs", fed, "run-0001", "--last", "1").count("\n") == 1
    found = json.loads(told("logs", fed, "--json"))
    assert [one["text"] for one in found["events"]] == texts
    assert [one["at"] for one in found["events"]] == sorted(one["at"] for one in found["events"])


def test_timeline_by_agent_and_level(tmp_path):
    with Federation(tmp_path, agents=()) as fed, logging_to(fed.config.state):
        for name in ("a0", "a1", "a2"):
            fed.add(name, seconds=5)
        fed.settle()
        fed.request(rounds=2)
        fed.until(lambda: fed.coordinator.collector.open_round)
        run = fed.coordinator.loop.run.id
        fed.coordinator.state.journal.append(
            fact_of("update_refused", {"reason": "too \x1b[31mlarge\nnorm"}), run=run, round=1, agent="a2"
        )
        fault(fed, "a1")
        fed.finish()
        waits = [line for line in told("logs", fed).splitlines() if " waits: round 1: " in line]
        assert any(re.search(r", not yet from a0, a1, a2 \(\d+\.\d s\)$", line) for line in waits)
        warned = told("logs", fed, "--level", "warning").splitlines()
        assert any(line.endswith("WARNING update of a2 for round 1 rejected: too  [31mlarge norm") for line in warned)
        assert any("WARNING agent fault: agent a1" in line and "remedy add some" in line for line in warned)
        assert all(" WARNING " in line or " ERROR " in line for line in warned)
        of_one = told("logs", fed, "--agent", "a2", "--level", "debug")
        assert "update of a2 for round 2" in of_one
        assert "update of a1" not in of_one
        assert "agent fault" not in of_one
        assert "round 1 begins with 3 agents" in of_one


def test_follow_ends_with_the_run_and_shows_each_event_once(fed):
    lines = [json.loads(line) for line in told("logs", fed, "--follow", "--json").splitlines()]
    assert lines == json.loads(told("logs", fed, "--json"))["events"]


def test_follow_reads_on_where_it_was(tmp_path):
    with Federation(tmp_path, agents=2) as fed, logging_to(fed.config.state):
        fed.settle()
        fed.request(rounds=3)
        timeline = Timeline(fed.coordinator.state, "run-0001")
        seen = []
        for _ in range(400):
            fed.wait(0.1)
            seen += timeline.read_new()
            if timeline.is_over:
                break
        seen += timeline.read_new()
        whole = Timeline(fed.coordinator.state, "run-0001").read_new()
        plain = [re.sub(r" \(\d+\.\d s\)$", "", one.text) for one in seen]
        assert sorted(plain) == sorted(re.sub(r" \(\d+\.\d s\)$", "", one.text) for one in whole)
        assert sum(one.kind == "round_closed" for one in seen) == 3


@pytest.mark.parametrize("words, code", [(("run-0009",), 2), (("run-0001", "--level", "loud"), 2), (("../x",), 2)])
def test_wrong_names_are_mistakes(fed, capsys, words, code):
    with pytest.raises(SystemExit) as ended:
        headwater(["logs", *words, "--state", str(fed.config.state)])
    assert ended.value.code == code
    assert "Traceback" not in capsys.readouterr().err


def test_log_file_is_bounded_and_read_across_its_rotation(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("coordinator"), "propagate", False)
    log = logging.getLogger("coordinator.test")
    reader = LogReader(tmp_path)
    seen = []
    log.setLevel(logging.INFO)
    with logging_to(tmp_path):
        for number in range(3):
            for _ in range(MOST_BYTES // 3 // 4000):
                log.info("filled number=%d with=%s", number, "x" * 3800)
            log.info("counted number=%d", number)
            seen += [line.values["number"] for line in reader.new() if line.event == "counted"]
        for number in range(3, 6):
            for _ in range(MOST_BYTES // 3 // 4000):
                log.info("filled number=%d with=%s", number, "x" * 3800)
            log.info("counted number=%d", number)
            seen += [line.values["number"] for line in reader.new() if line.event == "counted"]
    assert seen == list(range(6))
    sizes = [path.stat().st_size for path in tmp_path.glob(f"{NAME}*")]
    assert (len(sizes), max(sizes) <= MOST_BYTES) == (2, True)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob(f"{NAME}*")} == {0}
    (tmp_path / NAME).write_bytes(b'[]\nnone\n{"time": 3}\n{"time": "now"}\n{"time"')
    (tmp_path / f"{NAME}.1").unlink()
    assert [line.time for line in LogReader(tmp_path).new()] == ["now"]


def log_line(name, size=300):
    return json.dumps({"time": f"2030-01-01 {name}", "event": name, "text": "x" * size}) + "\n"


class GrowingLog:
    """A log file with its reader; `rotate` renames it as the handler does."""

    def __init__(self, folder):
        self.path = folder / NAME
        self.older = folder / f"{NAME}.1"
        self.reader = LogReader(folder)

    def add(self, *names, size=300):
        with self.path.open("a") as file:
            file.writelines(log_line(name, size) for name in names)

    def rotate(self):
        self.path.replace(self.older)

    def new(self):
        return [line.event for line in self.reader.new()]


@pytest.fixture
def growing(tmp_path):
    return GrowingLog(tmp_path)


def test_lines_before_and_after_two_rotations_between_looks_are_read(growing):
    growing.add("one", "two")
    assert growing.new() == ["one", "two"]
    growing.add("three")
    growing.rotate()
    growing.add("four")
    growing.rotate()  # 'three' is gone with its file
    growing.add("five")
    assert growing.new() == ["four", "five"]
    growing.add("six")
    growing.rotate()
    assert growing.new() == [], "the new file is not there yet"
    growing.add("seven")
    assert growing.new() == ["six", "seven"]


def test_a_log_file_that_was_cut_is_read_from_its_beginning(growing):
    growing.add("old")
    growing.rotate()
    growing.add("one", "two")
    assert growing.new() == ["old", "one", "two"]
    os.truncate(growing.path, 0)
    assert growing.new() == []
    growing.add("three", size=0)
    assert growing.new() == ["three"]
    growing.path.write_text(log_line("four"))  # the same inode, and longer than what was read
    assert growing.new() == ["four"]
    growing.path.unlink()
    assert growing.new() == []
    growing.add("five")
    assert growing.new() == ["five"]


def test_a_line_that_is_half_written_is_read_once_when_it_is_whole(growing):
    line = log_line("one")
    for end in (1, 20, len(line) - 1):
        growing.path.write_text(line[:end])
        assert growing.new() == []
    growing.path.write_text(line)
    assert growing.new() == ["one"]
    assert growing.new() == []


# --- watching --------------------------------------------------------------------------------------------------------


def test_in_a_pipe_a_change_is_one_line(fed, capsys):
    changes = _Changes(as_json=False)

    def look():
        changes(gather_status(fed.coordinator.state, Selection(), is_watched=True))
        return [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]

    first = look()
    assert "fleet: 3 known, 3 online, 1 fault, 0 stalled" in first
    assert "acc.personal: 0.500, worst tenth 0.500, of 3 agents" in first
    assert any(line.startswith("a1: DataError: no samples; add some") for line in first)
    fed.wait(5)
    assert look() == [], "time that passes is no change"
    fed.coordinator.handle("a1", "h", codec.encode(up.Heartbeat(boot=fed.agents["a1"].boot)))
    fed.wait(2)
    assert look() == ["fleet: 3 known, 3 online, 0 fault, 0 stalled", "a1: over"]


def test_of_a_large_fleet_only_agents_with_faults_are_watched(tmp_path):
    with Federation(tmp_path, agents=()) as fed:
        fed.settle()
        for number in range(250):
            said = up.Hello(software="x", tier="train", samples=1, boot="b1", connection=1)
            fed.coordinator.handle(f"m{number:04d}", "up", codec.encode(said))
            fed.coordinator.roster.trained(f"m{number:04d}", {"acc.personal": number / 249})
        fault(fed, "m0123", boot="b1")
        fed.wait(40)
        watched = gather_status(fed.coordinator.state, Selection(), is_watched=True)
        assert [row.agent.id for row in watched.page.agents] == ["m0123"]
        assert watched.written.accuracies["personal"].mean == pytest.approx(0.5)
        assert watched.written.accuracies["personal"].worst_tenth == pytest.approx(12 / 249), "mean of 0 to 24"


def seen_numbers(lines):
    return {number for line in lines for number in re.findall(r"\b0\.\d{3}\b", line)}


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_width_of_a_terminal_wraps_a_number(fed, columns):
    state = fed.config.state
    for number, name in enumerate(fed.agents):
        fed.coordinator.roster.trained(name, {"acc.personal": 0.111 * (number + 1), "acc.global": 0.222})
    fed.wait(2)
    with Terminal("coordinator", "agents", "--state", state, COLUMNS=str(columns)) as terminal:
        assert terminal.end() == 0
        assert {"0.111", "0.222", "0.333"} <= seen_numbers(terminal.lines)
        rows = [line for line in terminal.lines if "*:" not in line]
        assert max(map(len, rows)) <= columns


@pytest.mark.parametrize(
    "settings, is_coloured, is_redrawn",
    [
        ({}, False, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"term": "dumb"}, False, False),
    ],
    ids=["colour", "no colour", "dumb"],
)
def test_watching_ends_quietly_and_keeps_to_the_terminal(fed, settings, is_coloured, is_redrawn):
    words = ("coordinator", "status", "--watch", "--every", "0.2", "--state", fed.config.state)
    with Terminal(*words, columns=44, rows=60, **settings) as terminal:
        terminal.read(until="worst tenth" if is_redrawn else "acc.personal")
        if is_redrawn:
            terminal.read(until="\x1b[1A")
        assert terminal.end(signal.SIGINT) == 0
        assert (COLOUR.search(terminal.text) is not None) is is_coloured
        assert ("\x1b" in terminal.text) is is_redrawn
        assert "Traceback" not in terminal.text
        if is_redrawn:
            assert max(map(len, terminal.lines)) <= 44
            assert terminal.text.count("\x1b[?25h") >= 1, "the cursor is there again"


def test_a_table_that_does_not_fit_is_one_line_for_each_cell():
    made = table("agents", ("agent", "acc.\nlocal", "note"), [("porch", 0.25, None), ("hall", 0.5, "x")], left=1)
    assert fitted(made, 200) is made
    assert str(fitted(made, 17)) == "agents\nporch\n  acc. local: 0.250\nhall\n  acc. local: 0.500\n  note: x"


def test_two_watch_a_run_while_it_goes_on(fed):
    """Readers take no lock that the coordinator needs."""
    done = threading.Event()

    def watch():
        for _ in range(20):
            gather_status(fed.coordinator.state, Selection())
        done.set()

    thread = threading.Thread(target=watch)
    thread.start()
    fed.request(rounds=2)
    fed.finish()
    thread.join(60)
    assert done.is_set()


# --- following a run -------------------------------------------------------------------------------------------------


def test_agents_of_a_run_are_shown_with_what_they_do_and_their_accuracies():
    def agent(name, **fields):
        return {"id": name, "present": True, "condition": "ok", "bundle_id": "", "acc": {}, "fault": None, **fields}

    agents = [
        agent("a0", acc={"global": 0.25, "personal": 0.5}),
        agent("a1"),
        agent("a2"),
        agent("a3", condition="fault", fault={"error": "DataError"}),
        agent("a4", present=False),
        agent("a5", bundle_id="0123456789"),
        agent("a6"),
    ]
    run = {"id": "run-0001", "round": 3, "cohort": ["a0", "a1", "a2"], "accepted": ["a0"], "rejected": {"a2": "why"}}
    cells = agents_now(RunUnderWay.from_body(run), [HeardAgent.from_body(agent) for agent in agents]).cells
    expected = ["sent, 3", "at work, 3", "rejected, 3", "DataError", "offline", "bundle 01234567", "ready"]
    assert [row[1] for row in cells] == expected
    assert cells[0][2:] == ["–", "0.250", "0.500"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 100])
def test_demo_is_a_live_table_on_a_terminal(tmp_path, columns):
    words = ("coordinator", "demo", "--rounds", "5", "--dir", tmp_path / "demo")
    with Terminal(*words, columns=columns, rows=40) as terminal:
        terminal.read(until="at work, ", limit_s=120)
        terminal.read(until="sent, ", limit_s=120)
        assert terminal.end() == 0
        drawn = terminal.text[: terminal.text.rindex("\x1b[?25h")]
        assert "train-photo" in drawn
        cut = [line for line in ESCAPE.sub("", drawn).replace("\r", "\n").split("\n") if len(line.rstrip()) > columns]
        assert cut == [], "what is drawn again fits"
        assert re.search(r"acc\. personal: 0\.\d{3}|0\.\d{3} +0\.\d{3}", ESCAPE.sub("", terminal.text))
        assert "Next, on this machine" in terminal.text


@pytest.mark.slow
def test_demo_in_a_pipe_is_plain_lines(tmp_path):
    words = [sys.executable, "-m", "coordinator", "demo", "--rounds", "2", "--dir", str(tmp_path / "demo")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert "run-0001: round 2 of 2 is closed" in done.stderr

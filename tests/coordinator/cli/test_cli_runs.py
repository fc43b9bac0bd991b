"""``headwater run``, ``cancel``, ``report`` and ``serve`` as people type them: queue, codes, what is said to whom."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.cli.export import near_one
from coordinator.cli.follow import Invocation, _TimeLeft, _waiting, follow, result_of
from coordinator.cli.run import next_steps, result_parts
from coordinator.config import load_config
from coordinator.journal.entries import fact_of
from coordinator.journal.store import utc_now
from coordinator.runs.run_summary import RunSummary
from coordinator.state.release_keys import ReleaseKeys, new_key, read_public, write_key
from coordinator.state.status_file import Status
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent.core.errors import StateError

TASK = """
[task]
class_names = ["up", "down"]
encoder = "linear"
encoder_params = { feature_dim = 4 }
input = { kind = "image", channels = 1, height = 4, width = 4 }
"""
AWAY = '[broker]\nurl = "mqtt://127.0.0.1:1"\n'
RUN = {"method": "fedavg", "params": {}, "rounds": 3, "seed": 0, "task": {}}


@pytest.fixture
def away(tmp_path) -> Path:
    """A configuration whose broker does not answer."""
    path = tmp_path / "away.toml"
    path.write_text(f'state = "state"\n{AWAY}{TASK}[run]\nmethod = "fedavg"\n')
    return path


def states(folder: Path) -> list[tuple[str, str]]:
    with StateFolder(folder).look() as state:
        return [(run, replay(state.journal, run).status) for run in state.journal.runs()]


def add_run(state: StateFolder, *, closed: int = 0, end: str | None = None) -> str:
    """A run as a coordinator leaves it: so many rounds are closed, and it has ended or not."""
    run = state.journal.request_run(fact_of("run_requested", RUN))
    state.journal.append(fact_of("run_started", {}), run=run, digest="0" * 64)
    for number in range(1, closed + 1):
        state.journal.append(fact_of("round_opened", {"cohort": ["a"]}), run=run, round=number)
        state.journal.append(fact_of("round_closed", {}), run=run, round=number, digest="0" * 64)
        state.run(run).append_metrics({"kind": "round", "round": number, "agents": ["a"]})
    if end is not None:
        state.run(run).write_summary({"run_id": run, "method": "fedavg", "status": "finished", "agents": []})
        state.journal.append(fact_of(end, {}), run=run)
    return run


# --- run -------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_waited_for_is_queued_without_a_broker_or_a_coordinator(call, away, tmp_path):
    code, out, err = call("run", "--config", away, "--no-wait")
    assert (code, err) == (0, "")
    assert out.startswith("run-0001 is in the queue: no coordinator is serving; 'headwater serve --config")
    assert "'headwater run --resume run-0001 --config" in out
    assert states(tmp_path / "state") == [("run-0001", "requested")]


def test_the_second_queued_run_says_which_one_is_ahead_and_how_to_get_rid_of_it(call, away):
    call("run", "--config", away, "--no-wait")
    out = call("run", "--config", away, "--no-wait")[1]
    assert "run-0002 is queued behind run-0001, which has not begun with its 10 rounds" in out
    assert f"'headwater cancel run-0001 --config {away}' takes it out of the queue" in out
    found = json.loads(call("run", "--config", away, "--no-wait", "--json")[1])
    assert found == {"run_id": "run-0003", "serving": False, "queued_behind": ["run-0001", "run-0002"]}


def test_a_run_beside_a_coordinator_at_work_is_its_to_do(call, away, tmp_path):
    with StateFolder(tmp_path / "state").open("headwater serve"):
        code, out, _ = call("run", "--config", away, "--no-wait")
    assert (code, out) == (0, "run-0001 is in the queue: the coordinator at work here does it\n")


def test_a_run_beside_a_coordinator_that_began_with_other_settings_says_so(call, away, tmp_path):
    began_with = load_config(away)
    away.write_text(away.read_text() + "\n[privacy]\nclip = 1.0\nnoise = 1.0\n")
    with StateFolder(tmp_path / "state").open("headwater serve") as state:
        status = state.path / "status.json"
        status.write_text(json.dumps({"settings": began_with.digests()}))
        code, _, err = call("run", "--config", away, "--no-wait")
        assert code == 0
        assert "note: the coordinator at work began with other values of [privacy], and the run goes by those" in err
        status.write_text(json.dumps({"settings": load_config(away).digests()}))
        assert call("run", "--config", away, "--no-wait")[2] == ""


def test_status_tells_what_a_run_is_queued_behind(call, away):
    for _ in range(2):
        call("run", "--config", away, "--no-wait")
    out = call("status", "--config", away)[1]
    assert "queued behind run-0001" in next(line for line in out.splitlines() if line.startswith("run-0002"))


@pytest.mark.parametrize("command", [["serve"], ["run"]])
def test_a_run_without_a_broker_that_is_to_be_there_exits_with_75(call, away, command, tmp_path):
    away.write_text(away.read_text().replace(':1"\n', ':1"\nwait = false\n'))
    code, out, err = call(*command, "--config", away)
    assert (code, out) == (75, "")
    assert "mqtt://127.0.0.1:1" in err
    assert "Errno" not in err


def test_what_a_follower_is_told_names_the_broker_the_queue_or_the_silence():
    waiting = {"for": "the broker at mqtt://hub cannot be reached (x); trying again until it can", "whom": []}
    said = _waiting(Status({"broker_away": True, "waiting": waiting}), "run-0001")
    assert said == f"{waiting['for']}; 'headwater doctor --config FILE' tries the coordinator's way to the broker"
    now = {"run": {"id": "run-0001", "round": 2, "rounds": 9}, "waiting": {"for": "w", "whom": ["a"]}}
    assert _waiting(Status(now), "run-0002") == "queued behind run-0001, which is in round 2 of 9"
    assert _waiting(Status(now), "run-0001") == "w, not yet from a"
    silent = _waiting(Status({**now, "at": "2020-01-01T00:00:00.000+00:00"}), "run-0001")
    assert silent.startswith("nothing heard from the coordinator since 2020-01-01 00:00:00 UTC")
    assert silent.endswith("'headwater doctor --config FILE' tries the coordinator's way to the broker")
    assert _waiting(Status({**now, "at": "soon"}), "run-0001") == "w, not yet from a"


def test_a_run_that_hears_no_agent_names_the_commands_to_try(call, tmp_path):
    waits = {"run": {"id": "run-0001", "round": 2, "rounds": 9}, "waiting": {"for": "w", "whom": ["a"]}}
    hint = "no agent is heard: 'edge-agent doctor --config FILE' on a device says what keeps it away"
    for known in (0, 1):
        said = _waiting(Status({**waits, "fleet": {"agents": known, "online": 0}}), "run-0001")
        assert said.startswith(f"w, not yet from a; {hint}")
        assert "'headwater doctor --config FILE'" in said
    assert _waiting(Status({**waits, "fleet": {"agents": 1, "online": 1}}), "run-0001") == "w, not yet from a"

    with StateFolder(tmp_path / "state").open("headwater serve") as state:
        add_run(state, closed=1)
        waiting = {"for": "round 2 needs 2 train agents", "whom": [], "seconds_left": None}
        now = utc_now().isoformat()
        fleet = {"agents": 0, "online": 0}
        content = {"at": now, "run": waits["run"], "waiting": waiting, "agents": [], "fleet": fleet}
        (tmp_path / "state" / "status.json").write_text(json.dumps(content))
        out = call("status", "--state", tmp_path / "state")[1]
    assert f"advice: {hint}" in out
    assert "'edge-agent doctor --config FILE' says what keeps it away" in out
    out = call("status", "--state", tmp_path / "state")[1]
    assert "advice: 'headwater serve' starts it; 'headwater doctor --config FILE' tries" in out


def replaced(folder: Path) -> None:
    """Somebody removes the state folder, and a run of the same name finishes in a new one."""
    shutil.rmtree(folder)
    with StateFolder(folder).open("another coordinator") as state:
        add_run(state, closed=3, end="run_finished")
        run_id = replay(state.journal, "run-0001").request.id
        state.run("run-0001").write_summary({"run_id": "run-0001", "id": run_id})


def test_a_followed_run_whose_state_folder_is_replaced_does_not_end_with_another_run(tmp_path):
    with StateFolder(tmp_path / "state").look(create=True) as state:
        run = add_run(state, closed=1)
        looks = iter(range(20))

        def step():
            if next(looks) == 2:
                replaced(state.path)

        with pytest.raises(StateError, match="run-0001 can no longer be followed: its state folder"):
            follow(state, run, step)


def test_a_result_with_another_run_id_is_not_taken_for_that_of_the_followed_run(tmp_path):
    with StateFolder(tmp_path / "state").look(create=True) as state:
        run = add_run(state, closed=1, end="run_finished")
        record = follow(state, run)
        assert result_of(state, record)["run_id"] == run
        replaced(state.path)
        with pytest.raises(StateError, match="a run-0001 there now is another run"):
            result_of(StateFolder(state.path), record)


def test_resuming_takes_only_an_unfinished_run_and_no_other_wishes(call, away, tmp_path):
    with StateFolder(tmp_path / "state").open("test") as state:
        add_run(state, closed=3, end="run_finished")
    code, _, err = call("run", "--config", away, "--resume", "run-0001")
    assert code == 2
    assert "run-0001 is finished already" in err
    code, _, err = call("run", "--config", away, "--resume", "run-0009")
    assert code == 2
    assert "did you mean 'run-0001'" in err
    code, _, err = call("run", "--config", away, "--resume", "run-0001", "--seed", "0", "--no-wait")
    assert code == 2
    assert "leave out --seed, --no-wait" in err


def test_a_run_says_what_of_the_encoder_learns(call, away, tmp_path):
    """By options, which replace the choice of the configuration with its parameters, or by the configuration."""
    text = away.read_text()
    call("run", "--config", away, "--peft", "lora", "--peft-param", "rank=2", "--no-wait")
    away.write_text(text + 'peft = "lora"\npeft_params = { rank = 3 }\n')
    call("run", "--config", away, "--no-wait")
    call("run", "--config", away, "--peft", "lora", "--no-wait")
    with StateFolder(tmp_path / "state").look() as state:
        tasks = [replay(state.journal, run).request.task for run in state.journal.runs()]
    assert [task["peft"] for task in tasks] == ["lora"] * 3
    assert [task["peft_params"] for task in tasks] == [{"rank": 2}, {"rank": 3}, {}]


def test_a_choice_that_cannot_be_is_refused_before_the_run_is_queued(call, away, tmp_path):
    """The encoder is one linear layer: it has no batch norm, and nothing is left to freeze before its last layer."""
    for choice, mistake in (("bn", "no normalisation layers"), ("last_block", "left to freeze"), ("lorra", "'lora'")):
        code, _, err = call("run", "--config", away, "--peft", choice, "--no-wait")
        assert code == 2
        assert mistake in err
    code, _, err = call("run", "--config", away, "--resume", "run-0001", "--peft", "lora")
    assert code == 2
    assert "leave out --peft" in err
    assert not (tmp_path / "state").exists()


def test_all_mistakes_of_a_run_are_told_at_once(call, away):
    away.write_text(away.read_text().replace('"linear"', '"linaer"'))
    code, _, err = call("run", "--config", away, "--method", "fedavgg")
    assert code == 2
    assert "did you mean 'fedavg'" in err
    assert "did you mean 'linear'" in err


# --- cancel ----------------------------------------------------------------------------------------------------------


def test_cancel_ends_a_queued_run_and_says_so(call, away, tmp_path):
    call("run", "--config", away, "--no-wait")
    code, out, err = call("cancel", "run-0001", "--config", away)
    assert (code, out, err) == (0, "run-0001 is cancelled after round 0 of 10\n", "")
    assert states(tmp_path / "state") == [("run-0001", "cancelled")]
    assert json.loads((tmp_path / "state/runs/run-0001/summary.json").read_text())["status"] == "cancelled"
    assert re_line(call("status", "--config", away)[1], "run-0001").split()[:3] == ["run-0001", "fedavg", "cancelled"]


def re_line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_cancel_as_json_is_one_object(call, away):
    call("run", "--config", away, "--no-wait")
    found = json.loads(call("cancel", "run-0001", "--config", away, "--json")[1])
    assert found == {"run_id": "run-0001", "status": "cancelled", "round": 0, "cancelled": True}


@pytest.mark.parametrize("run, hint", [("run-0001", "run-0001 is cancelled already"), ("run-0002", "unknown run")])
def test_what_is_over_or_unknown_cannot_be_cancelled(call, away, run, hint):
    call("run", "--config", away, "--no-wait")
    call("cancel", "run-0001", "--config", away)
    code, out, err = call("cancel", run, "--config", away)
    assert (code, out) == (2, "")
    assert hint in err


# --- report ----------------------------------------------------------------------------------------------------------


def test_report_takes_the_latest_finished_run_and_not_one_under_way(call, tmp_path):
    with StateFolder(tmp_path).open("test") as state:
        add_run(state, closed=3, end="run_finished")
        add_run(state, closed=1)
    code, out, err = call("report", "--state", tmp_path)
    assert (code, out.strip(), err) == (0, str(tmp_path / "runs/run-0001/report.html"), "")


def test_report_of_an_unfinished_run_says_so_in_the_page_and_on_stderr(call, tmp_path):
    with StateFolder(tmp_path).open("test") as state:
        add_run(state, closed=2)
    code, out, err = call("report", "--state", tmp_path)
    assert (code, err) == (0, "run-0001 has not finished (running): it stands at round 2 of 3\n")
    assert "This run has not finished: round 2 of 3 is closed." in Path(out.strip()).read_text()


def test_report_of_an_unknown_run_is_a_mistake_of_the_caller(call, tmp_path):
    with StateFolder(tmp_path).open("test") as state:
        add_run(state, closed=1)
    code, out, err = call("report", "--state", tmp_path, "--run", "run-0007")
    assert (code, out) == (2, "")
    assert "unknown run 'run-0007': did you mean 'run-0001'?" in err
    assert not (tmp_path / "runs/run-0007").exists()


def test_a_folder_that_is_made_for_a_file_is_said(call, tmp_path):
    users = tmp_path / "new" / "users"
    code, _, err = call("password", "porch", "--users", users, "--out", tmp_path / "p")
    assert (code, err) == (0, f"made the folder {users.parent}\n")
    code, _, err = call("password", "porch", "--users", users, "--out", tmp_path)
    assert code == 2
    assert "is a folder; name a file in it" in err


@pytest.mark.parametrize(
    "cosine, shown",
    [(0.98765, "0.988"), (0.9999873, "0.999987"), (1 - 2.3e-8, "0.999999977"), (1.0, "1.000"), (None, "–")],
)
def test_a_cosine_near_one_is_told_from_one(cosine, shown):
    assert near_one(cosine) == shown


# --- serve -----------------------------------------------------------------------------------------------------------


def test_serve_refuses_wrong_defaults_of_runs_before_it_starts(call, away, tmp_path):
    away.write_text(f"{away.read_text()}params = {{ lr = -1, local_epoch = 2 }}\n")
    code, out, err = call("serve", "--config", away)
    assert (code, out) == (2, "")
    assert "lr = -1" in err
    assert "did you mean 'local_epochs'?" in err
    assert not (tmp_path / "state").exists()


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "coordinator", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    )


def told(process: subprocess.Popen[str], number: int, ready: str) -> tuple[int, str]:
    """Send a signal once the process has said ``ready``; its exit code, and all that it said on stderr."""
    said = []
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    with contextlib.closing(process.stderr):
        for line in process.stderr:
            said.append(line)
            if ready in line:
                process.send_signal(number)
                break
        said.append(process.stderr.read())
    code = process.wait(60)
    watchdog.cancel()
    process.stdout.close()
    return code, "".join(said)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["int", "term"])
def test_serve_stopped_by_ctrl_c_says_130_and_by_systemd_0(away, tmp_path, number, code):
    with StateFolder(tmp_path / "state").open("test") as state:
        add_run(state, closed=1)
    found, said = told(started(tmp_path, "serve", "--config", away), number, "broker_away")
    assert (found, said.splitlines()[-1]) == (code, "stopped; the next start resumes from here"), said
    assert "run-0001 stands at round 1 of 3 and is done first; 'headwater cancel run-0001 --config" in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["int", "term"]
)
def test_a_run_that_is_interrupted_says_how_to_go_on_with_it_and_how_to_drop_it(away, tmp_path, number):
    code, said = told(started(tmp_path, "run", "--config", away), number, "queued with 10 rounds")
    assert code == 130, said
    last = said.splitlines()[-1]
    stands = ("run-0001 has not begun with its 10 rounds", "run-0001 stands at round 0 of 10")
    assert last.startswith(tuple(f"{words} and stays in the queue; " for words in stands))
    assert all(f"headwater {words} " in last for words in ("run --resume run-0001", "serve", "cancel run-0001"))
    assert "the broker" in said or "broker_away" in said
    assert states(tmp_path / "state")[0][1] in {"requested", "running"}


def test_a_run_ends_with_the_bundle_id_that_status_shows():
    bundle = {"bundle_id": "0123456789ab" + "f" * 52, "path": "state/runs/run-0001/run-0001.hwb"}
    summary = {"seconds": 1.0, "encoder_sha256": "e" * 64, "agents": [], "faults": {}, "bundle": bundle}
    assert [*result_parts(RunSummary.from_json(summary))][
        -1
    ] == "1.0 s, bundle 0123456789ab in state/runs/run-0001/run-0001.hwb"


def test_a_run_ends_with_the_commands_that_bring_its_bundle_to_devices(tmp_path):
    state = tmp_path / "state"
    summary = {"run_id": "run-0001"}
    invocation = Invocation(Path("c.toml"), None)
    with StateFolder(state).look(create=True) as folder:
        assert [*next_steps(state, RunSummary.from_json(summary), invocation)] == []
        summary["bundle"] = {"bundle_id": "a" * 64, "path": "b.hwb"}
        create = "'headwater release create run-0001 --config c.toml'"
        assert [*next_steps(state, RunSummary.from_json(summary), invocation)] == [
            f"next: {create} releases it to devices"
        ]
        for name in ("alice", "bob", "carol"):
            write_key(tmp_path / name, new_key(), name=name)
        people = [read_public(tmp_path / f"{name}.pub") for name in ("alice", "bob", "carol")]
        ReleaseKeys(state).create("home", utc_now(), people, 2)
        (line,) = next_steps(state, RunSummary.from_json(summary), invocation)
        assert line.startswith("next: 2 of 3 people sign it ('headwater keys sign b.hwb --key FILE'), then 'headwater ")
        folder.journal.append(fact_of("release_made", {"bundle_id": "a" * 64}), run="run-0001", digest="b" * 64)
        assert [*next_steps(state, RunSummary.from_json(summary), invocation)] == []


def test_time_left_leaves_the_first_round_out_which_starts_the_agents(monkeypatch):
    """Round 1 takes 18 s and each other 2 s: 23 rounds are left after the second one."""
    clock = iter((0.0, 18.0, 20.0, 22.0))
    monkeypatch.setattr("coordinator.cli.follow.time.monotonic", lambda: next(clock))
    time_left = _TimeLeft()
    assert [time_left.after(closed, 25) for closed in range(4)] == [None, None, 46.0, 44.0]

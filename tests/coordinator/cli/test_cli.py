"""``headwater`` as people type it: help, mistakes, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from coordinator import cli as headwater
from coordinator.broker import EmbeddedBroker
from coordinator.cli.follow import _Lines
from coordinator.cli.methods import _lines as method_lines
from coordinator.cli.methods import describe, parameters
from coordinator.cli.output import console, show, table
from coordinator.cli.run import result_parts
from coordinator.journal.entries import RoundOpened, RunRequested, fact_of
from coordinator.journal.store import utc_now
from coordinator.runs.run_summary import RunSummary
from coordinator.state.store import StateFolder
from coordinator.views.runs import OpenRound, RunRecord
from edge_agent import __version__, methods
from edge_agent.privacy.disclosure import HEADINGS, section

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(set(headwater.COMMANDS) - {"bench"})

TASK = """
[task]
class_names = ["up", "down"]
encoder = "linear"
encoder_params = { feature_dim = 4 }
input = { kind = "image", channels = 1, height = 4, width = 4 }
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "coordinator.toml"
    path.write_text(f'federation = "test"\nstate = "state"\n\n[embedded]\nport = 0\n{TASK}', encoding="utf-8")
    return path


def finished_run(folder: Path) -> str:
    """A state folder with one finished run, as a coordinator leaves it."""
    with StateFolder(folder).open("test") as state:
        run = state.journal.request_run(
            fact_of("run_requested", {"method": "fedavg", "params": {}, "rounds": 1, "seed": 0, "task": {}})
        )
        agent = {
            "id": "porch", "tier": "train", "samples": 7, "head": "model", "rss_mb": 400.0, "torch_loaded": True,
            "acc": {"local": 0.5, "global": None, "personal": 0.75}, "bytes_up": 1500, "bytes_down": 2_500_000,
        }  # fmt: skip
        state.run(run).append_metrics({"kind": "agent", **agent})
        state.run(run).write_summary({"run_id": run, "method": "fedavg", "rounds": 1, "agents": [agent]})
        state.journal.append(fact_of("run_started", {}), run=run, digest="0" * 64)
        state.journal.append(fact_of("run_failed", {"reason": "nobody [came]"}), run=run)
    return run


@pytest.mark.parametrize("command", [*COMMANDS, "bench"])
def test_every_command_has_help_with_an_example(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: headwater {command}" in out
    if command != "bench":
        assert re.search(rf"Example:\s+headwater {command}\b", out)


def test_every_example_of_the_help_has_options_that_exist(call):
    for command in COMMANDS:
        out = call(command, "--help")[1]
        example = re.search(r"Example: (.*?)\n\n", out, re.DOTALL)[1]
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", example):
            assert re.search(rf"{option}\b[ ,]", out.split("Options:")[1]), (command, option)


def test_help_lists_all_commands_in_80_columns(call):
    out = call("--help")[1]
    assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in [*COMMANDS, "bench"])
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_summaries_of_sub_commands_are_whole(call):
    for group in ("agents", "keys", "release"):
        assert "..." not in call(group, "--help")[1].split("Commands:")[1], group


def test_help_lists_the_commands_below_the_titles_of_what_they_are_for(call):
    out = call("--help")[1]
    listed = {}
    for title, lines in re.findall(r"^(\w[\w ]*):\n((?:  [a-z]+ .*\n)+)", out, re.MULTILINE):
        listed[title] = re.findall(r"^  ([a-z]+) ", lines, re.MULTILINE)
    assert listed == {title: list(commands) for title, commands in headwater.GROUPS.items()}
    assert next(iter(listed)) == "Start here"
    assert max(map(len, listed.values())) <= 8, "a title with more commands is a long list again"
    starts = {len(line) for line in re.findall(r"^(  [a-z]+ +)[A-Z]", out, re.MULTILINE)}
    assert len(starts) == 1, "the summaries stand below each other"


def test_version_is_that_of_the_package(call):
    from edge_agent import __version__

    assert call("--version") == (0, f"headwater {__version__}\n", "")


@pytest.mark.parametrize(
    "words, hint",
    [
        (["rnu"], "Did you mean 'run'"),
        (["run", "--round", "3"], "--rounds"),
        (["run", "--rounds", "0"], "1"),
        (["export"], "--out"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_right(call, words, hint):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert hint in err
    assert "Traceback" not in err


def test_unknown_method_is_told_before_anybody_works(call, config, tmp_path):
    code, out, err = call("run", "--config", config, "--method", "fedavgg")
    assert (code, out) == (2, "")
    assert "did you mean 'fedavg'?" in err
    assert not (tmp_path / "state").exists()


def test_all_wrong_parameters_are_told_at_once(call, config):
    code, _, err = call("run", "--config", config, "-p", "lr=-1", "-p", "local_epoch=2")
    assert code == 2
    assert "lr = -1" in err
    assert "did you mean 'local_epochs'?" in err


def test_parameters_without_an_equals_sign_are_refused(call, config):
    code, _, err = call("run", "--config", config, "-p", "lr")
    assert code == 2
    assert "--set lr: expected name=value, for example --set lr=VALUE" in err


def test_all_mistakes_of_a_configuration_are_told_at_once(call, config):
    config.write_text(config.read_text() + '[cohort]\nmin_agent = 2\n[runs]\nmethod = "x"\n')
    code, _, err = call("serve", "--config", config)
    assert code == 2
    assert "cohort.min_agent: unknown key; did you mean 'min_agents'?" in err
    assert "runs: unknown key; did you mean 'run'?" in err


@pytest.mark.parametrize("command", ["serve", "run", "status", "report"])
def test_missing_configuration_is_told_with_an_example(call, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(command)
    assert (code, out) == (2, "")
    assert "coordinator.toml" in err
    assert "--config" in err


def test_an_error_with_json_is_one_object_too(call, config):
    code, out, err = call("run", "--config", config, "--method", "fedavgg", "--json")
    found = json.loads(out)["error"]
    assert (code, found["kind"], found["exit_code"]) == (2, "UnknownName", 2)
    assert found["message"] in err


def test_wrong_usage_with_json_is_one_object_too(call):
    code, out, err = call("methods", "--json", "--nope")
    assert (code, json.loads(out)["error"]["exit_code"]) == (2, 2)
    assert "--nope" in err


def test_a_folder_that_cannot_be_written_is_no_traceback(call, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = call("password", "porch", "--users", tmp_path / "file" / "users")
    assert (code, out) == (2, "")
    assert "file" in err
    assert "Traceback" not in err


def test_second_coordinator_on_a_state_folder_is_refused(call, config, tmp_path):
    with StateFolder(tmp_path / "state").open("headwater serve"):
        code, _, err = call("serve", "--config", config)
    assert code == 1
    assert "is in use by headwater serve" in err


def test_broker_away_without_waiting_exits_with_75(call, tmp_path):
    path = tmp_path / "away.toml"
    path.write_text(f'state = "state"\n[broker]\nurl = "mqtt://127.0.0.1:1"\nwait = false\n{TASK}')
    code, out, err = call("serve", "--config", path)
    assert (code, out) == (75, "")
    assert "mqtt://127.0.0.1:1" in err
    assert "Traceback" not in err


def test_status_of_a_folder_where_no_coordinator_was(call, config):
    code, out, err = call("status", "--config", config)
    assert (code, out) == (1, "")
    assert "start the coordinator once" in err


def test_status_shows_runs_and_their_reasons(call, config, tmp_path):
    run = finished_run(tmp_path / "state")
    code, out, err = call("status", "--config", config)
    assert (code, err) == (0, "")
    assert re.search(rf"^{run} +fedavg +failed +0/1 +nobody \[came\]", out, re.MULTILINE)
    assert "not running" in out
    assert "no agents have been heard" in out


def test_status_says_who_is_better_off_alone_unless_the_summary_is_damaged(call, tmp_path):
    run = finished_run(tmp_path)
    with StateFolder(tmp_path).look() as state:
        folder = state.run(run)
        folder.write_summary({"warnings": [{"kind": "below_local", "message": "porch is better off alone"}]})
        assert "porch is better off alone" in call("status", "--state", tmp_path)[1]
    for damaged in ("{", '{"warnings": 7}', '{"updates": {"left_out": [{}]}}', '{"agents": [{"tier": "head"}]}'):
        folder.summary_path.write_text(damaged)
        code, out, err = call("status", "--state", tmp_path)
        assert (code, err, "better off alone" in out) == (0, "", False), damaged


def test_status_as_json_is_one_object(call, tmp_path):
    run = finished_run(tmp_path)
    code, out, err = call("status", "--state", tmp_path, "--json")
    found = json.loads(out)
    assert (code, err, found["serving"]) == (0, "", False)
    assert found["runs"] == [
        {
            "id": run,
            "method": "fedavg",
            "status": "failed",
            "round": 0,
            "rounds": 1,
            "reason": "nobody [came]",
            "queued_behind": None,
            "weights": None,
            "warm_start": None,
            "proxy": [],
            "proxy_failed": [],
        }
    ]


def test_status_knows_that_a_coordinator_is_at_work(call, tmp_path):
    with StateFolder(tmp_path).open("test"):
        assert json.loads(call("status", "--state", tmp_path, "--json")[1])["serving"] is True


def test_status_shows_the_broker_of_a_coordinator_at_work(call, tmp_path):
    left = [{"url": "mqtts://a", "reason": "refused"}, "of another version"]
    connection = {"url": "mqtts://b", "since": "2026-11-28T04:00:00+00:00", "left": left}
    (tmp_path / "status.json").write_text(json.dumps({"at": utc_now().isoformat(), "broker_connection": connection}))
    line = "broker: mqtts://b since 2026-11-28 04:00:00 UTC; not mqtts://a: refused\n"
    with StateFolder(tmp_path).open("test"):
        assert line in call("status", "--state", tmp_path)[1]
    assert line not in call("status", "--state", tmp_path)[1], "nobody serves"


@pytest.mark.broker
def test_doctor_tries_each_broker_of_a_list_and_names_those_that_fail(call, tmp_path):
    config = tmp_path / "coordinator.toml"
    with EmbeddedBroker() as broker:
        urls = json.dumps(["mqtt://127.0.0.1:1", broker.url])
        config.write_text(f'state = "state"\n[broker]\nurl = {urls}\n[task]\nclass_names = ["0", "1"]\n')
        code, said, _ = call("doctor", "--config", config, "--json")
    steps = {step["step"]: step["ok"] for step in json.loads(said)["broker"]}
    assert code == 75
    assert steps == {
        "name of mqtt://127.0.0.1:1": True,
        "tcp of mqtt://127.0.0.1:1": False,
        **{f"{step} of {broker.url}": True for step in ("name", "tcp", "login", "topics", "kind")},
    }
    # amqtt tells nobody what it is unless its $SYS topics are switched on.
    assert json.loads(said)["broker"][-1]["detail"] == "not known, which is no fault"


def test_status_and_doctor_name_the_version_that_serves_where_it_is_another(call, tmp_path):
    """After an upgrade whose link was not set, nothing said that the old version still served."""
    config = tmp_path / "coordinator.toml"
    config.write_text(f'state = "{tmp_path}"\n[task]\nclass_names = ["0", "1"]\n')
    note = f"version 0.0.7 runs, this command is of version {__version__}: restart 'headwater serve'"

    def are_told() -> set[bool]:
        status, doctor = (call(*words)[1] for words in (("status", "--state", tmp_path), ("doctor", "-c", config)))
        return {note in status, note in doctor}

    with StateFolder(tmp_path).open("headwater serve"):
        (tmp_path / "status.json").write_text(json.dumps({"version": "0.0.7", "at": utc_now().isoformat()}))
        assert are_told() == {True}
        (tmp_path / "status.json").write_text(json.dumps({"version": __version__, "at": utc_now().isoformat()}))
        assert are_told() == {False}
    (tmp_path / "status.json").write_text(json.dumps({"version": "0.0.7", "at": utc_now().isoformat()}))
    assert are_told() == {False}, "nobody serves"


@pytest.mark.usefixtures("pictures")
def test_report_names_the_page_and_writes_a_picture(call, tmp_path):
    run = finished_run(tmp_path)
    picture = tmp_path / "picture.svg"
    code, out, err = call("report", "--state", tmp_path, "--svg", picture)
    assert (code, out.strip()) == (0, str(tmp_path / "runs" / run / "report.html"))
    assert err == f"{run} has not finished (failed): it stands at round 0 of 1\n"
    assert "porch: acc.local 0.500, acc.personal 0.750" in picture.read_text()
    assert 'xmlns="http://www.w3.org/2000/svg"' in picture.read_text()


def test_report_before_the_first_run_says_what_to_do(call, tmp_path):
    code, _, err = call("report", "--state", tmp_path)
    assert code == 2
    assert "'headwater run' starts one" in err


def test_export_before_the_first_round_says_so(call, config, tmp_path):
    run = finished_run(tmp_path / "state")
    code, _, err = call("export", "--config", config, "--run", run, "--out", tmp_path / "b.hwb")
    assert code == 2
    assert "no closed round yet" in err
    assert not (tmp_path / "b.hwb").exists()


def test_runs_are_named_by_position_or_as_before_by_an_option(call, config, tmp_path):
    run = finished_run(tmp_path / "state")
    by_position = call("report", run, "--config", config)
    assert by_position == call("report", "--run", run, "--config", config)
    assert by_position[0] == 0
    code, _, err = call("export", run, "--config", config, "--out", tmp_path / "b.hwb")
    assert (code, "no closed round yet" in err) == (2, True)
    code, _, err = call("report", run, "--run", "run-0002", "--config", config)
    assert (code, "RUN is given twice, as run-0001 and as run-0002" in err) == (2, True)


def test_web_takes_a_port_alone_but_not_beside_an_address(call, tmp_path):
    code, _, err = call("web", "--state", tmp_path, "--port", 8470, "--listen", "127.0.0.1:1")
    assert (code, "names a port already" in err) == (2, True)
    code, _, err = call("web", "--state", tmp_path / "none", "--port", 0)
    assert (code, "no such folder" in err) == (2, True)


def test_export_of_an_unknown_run_names_the_nearest(call, config, tmp_path):
    finished_run(tmp_path / "state")
    code, _, err = call("export", "--config", config, "--run", "run-0009", "--out", tmp_path / "b.hwb")
    assert code == 2
    assert "did you mean 'run-0001'?" in err


def test_enrolled_agent_gets_a_password_that_only_its_owner_reads(call, tmp_path):
    from coordinator.broker.access import is_password, read_passwords

    users = tmp_path / "users"
    secret = tmp_path / "porch.password"
    code, out, _ = call("password", "porch", "--users", users, "--out", secret)
    assert code == 0
    assert secret.stat().st_mode & 0o077 == 0
    assert users.stat().st_mode & 0o077 == 0
    assert is_password(secret.read_text().strip(), read_passwords(users)["porch"])
    assert secret.read_text().strip() not in out


def test_name_that_cannot_be_a_user_leaves_no_file(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("password", "a/b", "--users", "users")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_methods_lists_every_method_and_one_in_full(call):
    code, out, _ = call("methods")
    assert code == 0
    assert all(re.search(rf"^{name} +\S", out, re.MULTILINE) for name in methods.names())
    code, out, _ = call("methods", "fedavg")
    assert code == 0
    assert "AISTATS 2017" in out
    assert re.search(r"^local_epochs +1 +– +E, passes", out, re.MULTILINE)


def test_a_method_of_others_that_lacks_something_does_not_hide_the_rest(call, monkeypatch):
    monkeypatch.setitem(methods.registry._extra, "lacking", dict)
    code, out, _ = call("methods")
    assert code == 0
    assert re.search(r"^fedavg +\S", out, re.MULTILINE)
    assert re.search(r"^method 'lacking' \(.*\): expected one subclass", out, re.MULTILINE)
    assert list(json.loads(call("methods", "--json")[1])["broken"]) == ["lacking"]
    code, _, err = call("simulate", "--method", "lacking", "--data", "digits?n=90", "--out", "sim")
    assert code == 2
    assert "expected one subclass of" in err


def test_a_method_whose_docstring_says_little_shows_no_empty_lines_and_how_to_fill_them():
    whole = {**describe("fedper"), "params": []}
    own = {**whole, "travels": "", "stays": ""}
    text = [line for line in method_lines(own) if isinstance(line, str)]
    assert not [line for line in text if line.endswith(": ")]
    assert "its docstring does not say the rest: paragraphs that begin with 'Travels:', 'Stays:' appear here" in text
    assert not [line for line in method_lines(whole) if "docstring" in str(line)]


def test_methods_as_json_is_what_their_files_say(call):
    found = {row["name"]: row for row in json.loads(call("methods", "--json")[1])["methods"]}
    assert found.keys() == set(methods.names())
    assert found["fedper"]["shared"] == ["encoder"]
    one = json.loads(call("methods", "fedper", "--json")[1])
    assert {p["name"]: p["default"] for p in one["params"]}["lr"] == 0.01


@pytest.mark.parametrize("name, own", [("fedavg", True), ("fedpac", False)])
def test_a_method_says_whose_batch_norm_statistics_a_device_uses(call, name, own):
    assert json.loads(call("methods", name, "--json")[1])["own_norm"] is own
    says = "a device may use those of its inputs" if own else "a device keeps those of the bundle"
    assert says in " ".join(call("methods", name)[1].split())


def test_a_method_shows_defaults_and_published_values_side_by_side(call):
    code, out, err = call("methods", "dualfed")
    assert code == 0, err
    row = next(line.split() for line in out.splitlines() if line.startswith("contrastive_weight"))
    assert row[1:3] == ["1.0", "40.0"]
    same = next(line for line in out.splitlines() if line.startswith("temperature"))
    assert same.split()[1:3] == ["0.2", "–"], "a published value stands there only where ours differs"
    told = {one["name"]: one for one in json.loads(call("methods", "dualfed", "--json")[1])["params"]}
    assert (told["batch_size"]["default"], told["batch_size"]["paper"]) == (32, 256)
    assert (told["temperature"]["default"], told["temperature"]["paper"]) == (0.2, 0.2)


def test_a_method_says_who_published_each_value_and_for_which_data(call):
    code, out, err = call("methods", "dualfed")
    assert code == 0, err
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    stated = [row[1:] for row in rows if row[0] == "contrastive_weight"][1:]
    assert ["40.0", "authors' code", "pacs", "script for PACS"] in stated
    assert ["?", "not published", "domainnet", "the script is cut off"] in stated
    told = {one["name"]: one for one in json.loads(call("methods", "dualfed", "--json")[1])["params"]}
    assert told["batch_size"]["published"] == [{"value": 256, "source": "paper", "location": "Sec. 5.3", "data": ""}]
    assert told["smallest_batch"]["published"] == []


@pytest.mark.parametrize("name, shown", [("repper", "–"), ("fedavg", "0.5")])
def test_momentum_that_adam_ignores_has_no_default_to_show(call, name, shown):
    out = call("methods", name)[1]
    rows = [line.split() for line in out.splitlines() if line.startswith("momentum")]
    assert rows[0][1] == shown


def test_a_method_in_a_file_is_shown_as_any_other(call, tmp_path, monkeypatch):
    monkeypatch.setattr(methods.registry, "_extra", {})
    (tmp_path / "own.py").write_text(
        "from edge_agent.methods.fedprox import FedProx\nclass Nearer(FedProx):\n    'FedProx, and more of it.'\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = call("methods", "own.py:Nearer", "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["name"] == "nearer"
    assert shown["summary"] == "FedProx, and more of it"
    assert "mu" in {parameter["name"] for parameter in shown["params"]}
    code, _, err = call("methods", "own.py:Neare")
    assert code == 2
    assert "did you mean 'Nearer'?" in err
    assert call("methods", "gone.py:Nearer")[0] == 2


def test_a_simulation_with_published_values_says_which_and_whose(call, tmp_path):
    words = ["-m", "fedpick", "-d", "digits:optdigits?n=40", "-n", "2", "-r", "1", "--engine", "serial", "--no-local"]
    words += ["--set", "local_epochs=0", "--out", str(tmp_path / "sim")]
    code, out, err = call("simulate", *words, "--paper-for", "digits5")
    assert code == 0, err
    assert "global_weight 10.0 (paper, digits5)" in out
    assert "batch_size 32 (others' code)" in out
    result = json.loads((tmp_path / "sim" / "result.json").read_text(encoding="utf-8"))
    assert result["params"]["global_weight"] == 10.0
    assert result["published"]["global_weight"] == {
        "value": 10.0, "source": "paper", "location": "Table III", "data": "digits5",
    }  # fmt: skip
    code, _, err = call("simulate", *words[:-1], str(tmp_path / "two"), "--paper-for", "digit5")
    assert code == 2
    assert "did you mean 'digits5'?" in err
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", methods.names())
def test_docstring_of_a_method_fills_its_row(name):
    row = describe(name)
    assert all(row[key] for key in ("summary", "source", "travels", "stays", "server", "differs", "paper"))
    assert all(json.dumps(parameter) for parameter in parameters(name))


def test_sections_of_a_docstring_end_where_the_next_begins():
    doc = "X: y.\n\nSource: a\nb.\nTravels: c.\nStays: d\nServer: m\nDiffers from the paper: e."
    found = [section(doc, h) for h in HEADINGS.values()]
    assert found == ["a b.", "c.", "d", "m", "e."]


def test_doctor_says_what_is_here(call):
    found = json.loads(call("doctor", "--json")[1])
    assert found["numpy"] == np.__version__
    code, out, _ = call("doctor")
    assert code == 0
    assert re.search(rf"^numpy +{re.escape(np.__version__)}", out, re.MULTILINE)


def test_doctor_refuses_a_configuration_that_serve_refuses(call, tmp_path):
    config = tmp_path / "coordinator.toml"
    text = '[task]\nclass_names = ["0", "1"]\n[run]\nmethod = "fedavg"\nparams = {{ {} }}\n'
    config.write_text(text.format("augmemt = false"))
    code, out, _ = call("doctor", "--config", config)
    assert code == call("serve", "--config", config)[0] == 2
    assert re.search(r"^runs: FAILED: .*augmemt", out, re.MULTILINE | re.DOTALL)
    config.write_text(text.format("local_epochs = 2"))
    code, out, _ = call("doctor", "--config", config)
    assert (code, "runs: ok: method fedavg, encoder" in out) == (0, True)


def test_tables_in_a_pipe_are_neither_cut_nor_wrapped_nor_taken_for_markup(capsys):
    long = "[bold]" + "x" * 150
    show(table("t", ("name", "acc.personal"), [(long, 0.5), ("b", None)]), "a line " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == [long, "0.500"]
    assert lines[4].split() == ["b", "–"]
    assert lines[5].strip() == ("a line " * 40).strip()


def test_the_same_fault_of_an_agent_is_said_in_full_once(capsys):
    lines = _Lines("run-0001")
    why = "class folders Mug, keys are not those of the task"
    for number in range(1, 6):  # it is asked again in rounds 3 and 5
        left_out = {"a": why} if number in {2, 4} else {}
        opened = OpenRound(number, 1, (), RoundOpened(left_out=left_out))
        lines(RunRecord("run-0001", RunRequested(rounds=5), round=number - 1, open_round=opened), "")
    without = [line for line in capsys.readouterr().err.splitlines() if "continues without" in line]
    assert without == [
        f"run-0001: round 2 continues without a: {why}",
        "run-0001: round 4 continues without a: as before (2 ×)",
    ]


def test_the_reason_of_a_failure_stands_once_below_the_table_of_a_run():
    why = "class folders Mug, keys are not those of the task"
    said = "agent 'a' failed and was left out at the end, last asked in round 5 of 8; it delivered no update"
    warning = {"kind": "left_out", "clients": ["a"], "message": f"{said}: {why}", "without_reason": said}
    summary = {
        "faults": {"a": why},
        "left_out": {"a": {"rounds": [2, 4, 5], "reason": why}},
        "warnings": [warning],
        "seconds": 1.0,
    }
    text = [part for part in result_parts(RunSummary.from_json(summary)) if isinstance(part, str)]
    assert [line for line in text if why in line] == [f"a was left out of 3 rounds (2, 4, 5): {why}"]
    assert f"warning: {said} (the reason is above)" in text
    alone = [
        part
        for part in result_parts(RunSummary.from_json({"warnings": [warning], "seconds": 1.0}))
        if isinstance(part, str)
    ]
    assert f"warning: {said}: {why}" in alone, "the reason stands nowhere else"


def test_progress_in_a_pipe_is_a_line_for_each_round_and_each_long_wait(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("coordinator.cli.follow.time.monotonic", lambda: now[0])
    assert not console.is_terminal
    lines = _Lines("run-0001")
    record = RunRecord("run-0001", RunRequested(rounds=2))
    waiting = "round 1: 0 of 2 updates are here (from a, b)"
    lines(record, waiting)
    lines(record, waiting)  # not yet worth a line
    now[0] = 5.0
    lines(record, waiting)
    lines(record, waiting)  # shown once
    lines(RunRecord("run-0001", RunRequested(rounds=2), round=1), "round 2: 0 of 2 updates are here (from a, b)")
    assert capsys.readouterr().err.splitlines() == [
        "run-0001: queued with 2 rounds",
        "run-0001: waits: round 1: 0 of 2 updates are here (from a, b)",
        "run-0001: round 1 of 2 is closed",  # an estimate needs a round beyond the first, which takes longest
    ]


def test_progress_in_a_pipe_says_once_who_takes_part(capsys):
    """A device that connected 0.2 s later was not in a run of one round, and nothing said so."""
    lines = _Lines("run-0001")
    opened = OpenRound(1, 1, ("hall", "porch"), RoundOpened())
    lines(RunRecord("run-0001", RunRequested(rounds=2), open_round=opened), "")
    later = OpenRound(2, 1, ("hall", "porch", "yard"), RoundOpened())
    lines(RunRecord("run-0001", RunRequested(rounds=2), round=1, open_round=later), "")
    assert capsys.readouterr().err.splitlines() == [
        "run-0001: queued with 2 rounds",
        "run-0001: round 1 begins with 2 agents: hall, porch",
        "run-0001: round 1 of 2 is closed",
    ]


def test_progress_estimates_what_is_left_from_the_rounds_that_it_has_seen(capsys, monkeypatch):
    """A command that begins to follow in round 10 does not count the nine before."""
    now = [0.0]
    monkeypatch.setattr("coordinator.cli.follow.time.monotonic", lambda: now[0])
    lines = _Lines("run-0001")
    for closed, at in ((10, 0.0), (11, 30.0), (12, 90.0), (100, 90.0)):
        now[0] = at
        lines(RunRecord("run-0001", RunRequested(rounds=100), round=closed), "")
    assert capsys.readouterr().err.splitlines() == [
        "run-0001: round 10 of 100 is closed",
        "run-0001: round 11 of 100 is closed; about 44 min left",
        "run-0001: round 12 of 100 is closed; about 1 h 6 min left",
        "run-0001: round 100 of 100 is closed",
    ]


def test_bench_serve_takes_the_starter_encoder_where_no_bundle_is_named(call, tmp_path):
    code, _, err = call("bench", "serve", "--head", tmp_path / "no-head", "--input", tmp_path / "no.png")
    assert code == 2
    said = f"headwater: --head {tmp_path / 'no-head'}, --input {tmp_path / 'no.png'}: no such file or folder"
    assert said in " ".join(err.split()), "the bundle is there"


def test_a_home_that_nobody_has_is_told(call, tmp_path):
    code, out, err = call("partition", "iid", "--data", "images:~nobody-of-this-name/x", "--clients", 2, "--json")
    assert code == 2
    assert "write the path out" in err
    assert json.loads(out)["error"]["kind"] == "UsageError"

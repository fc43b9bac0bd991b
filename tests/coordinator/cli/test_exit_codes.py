"""Exit codes of both programs as the table in edge_agent/README.md tells them."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from coordinator.broker import EmbeddedBroker
from coordinator.broker.access import set_password
from coordinator.cli import main as headwater
from coordinator.cli.follow import follow
from coordinator.config import CoordinatorConfig
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder
from edge_agent.cli import main as edge_agent
from edge_agent.core.config import AgentConfig
from edge_agent.core.errors import RunFailed
from edge_agent.core.locks import folder_lock
from edge_agent.core.storage import write_json

README = Path(__file__).parents[3] / "edge_agent/README.md"
COORDINATOR = """
state = "state"
[broker]
url = "{url}"
user = "coordinator"
wait = false
[task]
class_names = ["up", "down"]
encoder = "linear"
encoder_params = {{ feature_dim = 4 }}
input = {{ kind = "image", channels = 1, height = 4, width = 4 }}
[run]
method = "fedavg"
"""
AGENT = """
id = "porch"
tier = "head"
state = "agent"
[broker]
url = "{url}"
[data]
source = "digits:rendered?n=20"
"""
NOBODY = "mqtt://127.0.0.1:1"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files of both sides, whose broker is away."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(COORDINATOR.format(url=NOBODY))
    (tmp_path / "a.toml").write_text(AGENT.format(url=NOBODY))
    (tmp_path / "typo.toml").write_text(AGENT.format(url=NOBODY) + '[head]\nname = "lrr"\n')
    (tmp_path / "wrong.toml").write_text("rounds = 3\n")
    (tmp_path / "bad.hwb").write_bytes(b"no bundle" * 1000)
    return tmp_path


def code_of(words: str) -> int:
    """The exit code of a command line."""
    program, *rest = words.split()
    if program == "edge-agent":
        return edge_agent(rest)
    with pytest.raises(SystemExit) as ended:
        headwater(rest)
    return int(ended.value.code or 0)


def meaning(code: int) -> str:
    """What the table says of a code."""
    (row,) = re.findall(rf"^\| {code} \| (.*?) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    return row


@pytest.mark.parametrize(
    "words, code, because",
    [
        ("headwater doctor", 0, "done"),
        ("headwater status --config c.toml", 1, "a state folder without a journal"),
        ("headwater logs run-0001 --state .", 1, "a state folder without a journal"),
        ("edge-agent add --state . --label up x.png", 1, "a state folder without a journal or bundle"),
        ("headwater serve --config wrong.toml", 2, "configuration"),
        ("edge-agent run --config wrong.toml", 2, "configuration"),
        ("headwater serve --config nowhere.toml", 2, "files that are not there"),
        ("edge-agent status --config nowhere.toml", 2, "files that are not there"),
        ("edge-agent fit --bundle nowhere.hwb --data digits --out h", 2, "files that are not there"),
        ("edge-agent rollback --state nowhere", 2, "files that are not there"),
        ("edge-agent add --state nowhere --label up x.png", 2, "files that are not there"),
        ("edge-agent classes list --state nowhere", 2, "files that are not there"),
        ("edge-agent pin --state nowhere", 2, "files that are not there"),
        ("edge-agent unpin --state nowhere", 2, "files that are not there"),
        ("headwater bench serve --bundle bad.hwb --input nowhere.png", 2, "files that are not there"),
        ("headwater run --config c.toml --method fedavgg", 2, "unknown names"),
        ("headwater methods nosuch", 2, "unknown names"),
        ("edge-agent run --config typo.toml", 2, "unknown names"),
        ("edge-agent fit --bundle bad.hwb --data digits?n=20 --out h", 4, "bundle is damaged"),
        ("edge-agent import bad.hwb --state agent", 4, "bundle is damaged"),
        ("headwater analyze bad.hwb", 4, "bundle is damaged"),
        ("headwater serve --config c.toml", 75, "the broker is away"),
        ("headwater run --config c.toml", 75, "the broker is away"),
        ("edge-agent run --config a.toml --no-wait", 75, "the broker is away"),
        ("headwater doctor --config c.toml", 75, "`doctor`: broker or coordinator does not answer"),
        ("edge-agent doctor --config a.toml", 75, "`doctor`: broker or coordinator does not answer"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_command_ends_with_the_code_of_the_table(words, code, because):
    assert code_of(words) == code
    assert because in meaning(code)


def test_a_port_that_another_program_uses_ends_with_2(place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        broker = f"[embedded]\nport = {other.getsockname()[1]}\n"
        task = COORDINATOR[COORDINATOR.index("[task]") :].format()
        (place / "busy.toml").write_text(f'state = "busy"\n{broker}{task}')
        assert code_of("headwater serve --config busy.toml") == 2
    assert "a port that is in use" in meaning(2)


@pytest.mark.parametrize("words", ["run", "status", "doctor", "privacy"])
def test_a_missing_agent_file_names_the_commands_that_make_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert code_of(f"edge-agent {words} --config agent.toml") == 2
    said = capsys.readouterr().err
    assert "no such file; 'edge-agent enroll -' makes it" in said
    assert "'edge-agent import BUNDLE --state DIR'" in said


@pytest.mark.parametrize(
    "words, said",
    [
        ("edge-agent run --config c.toml", "it has run, task: this is the configuration of a coordinator"),
        ("edge-agent status --config c.toml", "it has run, task: this is the configuration of a coordinator"),
        ("edge-agent doctor --config c.toml", "it has run, task: this is the configuration of a coordinator"),
        ("headwater serve --config a.toml", "it has data, id, tier: this is the configuration of an agent"),
        ("headwater run --config a.toml", "it has data, id, tier: this is the configuration of an agent"),
        ("headwater serve --config none.toml", "no such file; 'headwater init DIR' makes one"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_file_of_the_other_program_is_recognised(words, said, capsys):
    """It listed five unknown keys instead."""
    assert code_of(words) == 2
    assert said in capsys.readouterr().err


def test_keys_that_tell_the_two_files_apart_are_in_one_of_them_alone():
    agent = set(AgentConfig.model_fields)
    coordinator = set(CoordinatorConfig.model_fields)
    assert AgentConfig.file_kind.foreign_keys <= coordinator - agent
    assert CoordinatorConfig.file_kind.foreign_keys <= agent - coordinator


@pytest.mark.parametrize("end", ["run_failed", "run_cancelled"])
def test_a_followed_run_that_fails_or_is_cancelled_ends_with_1(place, end):
    with StateFolder(place / "state").open("headwater serve") as state:
        run = state.journal.request_run(fact_of("run_requested", {"method": "fedavg", "rounds": 1}))
        real = state.journal.append
        real(fact_of("run_started", {}), run=run, digest="0" * 64)
        with pytest.raises(RunFailed, match=run) as ended:
            follow(state, run, lambda: real(fact_of(end, {"reason": "why"}), run=run))
    assert ended.value.exit_code == 1
    assert "a run that failed or was cancelled" in meaning(1)


def test_a_folder_in_use_and_a_fault_end_with_1(place):
    with folder_lock(place / "agent", "edge-agent porch"), folder_lock(place / "state", "headwater serve"):
        assert code_of("edge-agent run --config a.toml") == 1
        assert code_of("headwater serve --config c.toml") == 1
    assert "in use" in meaning(1)
    write_json(place / "agent" / "status.json", {"condition": "fault", "fault": {"error": "DataError"}})
    assert code_of("edge-agent status --config a.toml") == 1
    assert "`edge-agent status`: a fault" in meaning(1)


def test_a_missing_package_ends_with_5(place, monkeypatch):
    monkeypatch.setattr("edge_agent.core.capabilities.packages", dict)
    assert code_of("edge-agent run --config a.toml") == 5
    assert code_of("edge-agent doctor") == 5
    assert "package" in meaning(5)


@pytest.mark.broker
def test_a_refused_login_ends_with_2_and_not_as_if_trying_again_helped(place, capsys):
    """It was 75 of 'run' and 'serve', 1 of 'headwater doctor', and 2 of 'edge-agent doctor'."""
    set_password(place / "users", "porch", "right")
    with EmbeddedBroker(password_file=place / "users") as broker:
        (place / "pw").write_text("wrong\n")
        login = f'url = "{broker.url}"\npassword_file = "pw"'
        (place / "c.toml").write_text(COORDINATOR.replace('url = "{url}"', login).format())
        (place / "a.toml").write_text(AGENT.replace('url = "{url}"', f'{login}\nuser = "porch"').format())
        for words in (
            "headwater serve --config c.toml",
            "headwater run --config c.toml",
            "headwater doctor --config c.toml",
            "edge-agent run --config a.toml --no-wait",
            "edge-agent doctor --config a.toml",
        ):
            assert (words, code_of(words)) == (words, 2)
        capsys.readouterr()
        assert code_of("headwater doctor --config c.toml --json") == 2
        assert json.loads(capsys.readouterr().out)["broker"][-1]["step"] == "login", "one object, which is the answer"
    assert "a login that the broker refuses" in meaning(2)


@pytest.mark.parametrize("words", ["headwater partition iid", "edge-agent fit"])
def test_ctrl_c_while_a_command_is_loaded_ends_quietly(place, words, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert code_of(words) == 130
    assert capsys.readouterr() == ("", "")

"""`headwater password` with a Mosquitto that root starts, units without root's rights, and the way of doctor to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from mqtt_harness import NEEDS_MOSQUITTO
from paho.mqtt import client as mqtt

from coordinator.broker import find_mosquitto, held_port, settings_text
from coordinator.broker.access import (
    BROKER_ACCOUNT,
    add_rules,
    is_password,
    mosquitto_acl,
    read_passwords,
    set_password,
)
from coordinator.cli import main as headwater
from coordinator.config import CoordinatorConfig
from coordinator.service import app
from coordinator.state.command_keys import CommandKeys
from edge_agent.cli import main as edge_agent
from edge_agent.core.config import AgentConfig, BrokerConfig
from edge_agent.core.errors import ConfigError, StateError, UsageError
from edge_agent.wire.seal import read_key

PATIENCE_S = 20
ROOT = Path(__file__).parents[3]


def has_account(name: str) -> bool:
    import pwd

    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


AS_ROOT = [
    NEEDS_MOSQUITTO,
    pytest.mark.broker,
    pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="Mosquitto gives up only root's rights"),
    pytest.mark.skipif(os.name == "nt" or not has_account(BROKER_ACCOUNT), reason="no account for Mosquitto"),
]


@pytest.fixture
def open_folder():
    """A folder that other users may look into, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-enroll-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def enroll(*words) -> None:
    with pytest.raises(SystemExit) as ended:
        headwater(["password", *map(str, words)])
    assert ended.value.code == 0


@contextlib.contextmanager
def mosquitto(folder: Path, federations=("home",)):
    """Mosquitto as a system starts it: by root, without a user in its configuration. Yields its port and process."""
    for federation in federations:
        add_rules(folder / "acl", federation)
    with held_port("127.0.0.1", 0) as port:
        text = settings_text("127.0.0.1", port, (folder / "users", folder / "acl"))
        settings = folder / "mosquitto.conf"
        settings.write_text("\n".join(line for line in text.splitlines() if not line.startswith("user ")) + "\n")
        process = subprocess.Popen([find_mosquitto(), "-c", settings], stderr=subprocess.PIPE, text=True)
        try:
            wait_until_up(port, process)
            yield port, process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            process.stderr.close()


def wait_until_up(port, process):
    while process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"mosquitto ended with {process.returncode}: {process.stderr.read()}")


def is_let_in(port: int, user: str, folder: Path) -> bool:
    answers = []
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
    client.username_pw_set(user, (folder / f"{user}.password").read_text().strip())
    client.on_connect = lambda _c, _u, _f, reason, _p: answers.append(not reason.is_failure)
    client.connect("127.0.0.1", port)
    while not answers:
        assert client.loop(PATIENCE_S) == mqtt.MQTT_ERR_SUCCESS or answers
    client.disconnect()
    return answers[0]


def enroll_in(folder: Path, *users: str) -> None:
    for user in users:
        enroll(user, "--users", folder / "users", "--out", folder / f"{user}.password")


class TestMosquittoStartedByRoot:
    pytestmark = AS_ROOT

    def test_reads_the_password_file_and_everybody_stays_in_after_the_next_enrolment_and_a_reload(self, open_folder):
        enroll_in(open_folder, "coordinator", "porch")
        with mosquitto(open_folder) as (port, process):
            assert is_let_in(port, "porch", open_folder)
            enroll_in(open_folder, "attic")
            process.send_signal(signal.SIGHUP)
            deadline = 200
            while not is_let_in(port, "attic", open_folder) and deadline:
                deadline -= 1  # the signal is heeded between two turns of its loop
            assert [is_let_in(port, user, open_folder) for user in ("attic", "porch", "coordinator")] == [True] * 3

    def test_file_that_only_root_could_read_is_given_to_it(self, open_folder, capsys):
        users = open_folder / "users"
        set_password(users, "porch", "one")
        os.chown(users, 0, 0)
        users.chmod(0o600)
        enroll_in(open_folder, "attic")
        assert (users.owner(), users.stat().st_mode & 0o777) == (BROKER_ACCOUNT, 0o600)
        assert f"belongs to '{BROKER_ACCOUNT}' (mode 600)" in capsys.readouterr().out

    def test_serves_two_federations_and_keeps_their_agents_apart(self, open_folder):
        enroll_in(open_folder, "coordinator", "porch")
        heard = []
        with mosquitto(open_folder, ("home", "two")) as (port, _):
            boss, porch = (mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, reconnect_on_failure=False) for _ in range(2))
            for client, user in ((boss, "coordinator"), (porch, "porch")):
                client.username_pw_set(user, (open_folder / f"{user}.password").read_text().strip())
                client.connect("127.0.0.1", port)
            boss.on_message = lambda _c, _u, message: heard.append(message.topic)
            boss.on_subscribe = lambda *_: heard.append("listening")
            boss.on_connect = lambda client, *_: client.subscribe("fl/1/#", qos=1)
            while "listening" not in heard:
                boss.loop(1)
            spoken = ["fl/1/three/a/porch/up", "fl/1/home/a/porch/up", "fl/1/two/a/attic/up", "fl/1/two/a/porch/up"]
            for topic in spoken:
                porch.publish(topic, b"x", qos=1)
            while "fl/1/two/a/porch/up" not in heard:
                porch.loop(0.05)
                boss.loop(0.05)
        assert heard[1:] == ["fl/1/home/a/porch/up", "fl/1/two/a/porch/up"]


def test_owner_group_mode_and_the_lines_of_other_tools_stay(tmp_path):
    users = tmp_path / "users"
    others = ["attic:$6$salt$sha512crypt", "cellar:$argon2id$v=19$m=47104,t=1,p=1$c2FsdA$aGFzaA"]
    users.write_text("\n".join(others) + "\n")
    users.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(users, 12345, 54321)
    before = users.stat()
    assert not set_password(users, "porch", "one")
    assert set_password(users, "porch", "two")
    after = users.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    lines = users.read_text().splitlines()
    assert lines[:2] == others
    assert is_password("two", lines[2].removeprefix("porch:"))


def test_link_to_a_password_file_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    users = tmp_path / "users"
    users.symlink_to(tmp_path / "real" / "users")
    set_password(users, "porch", "one")
    assert users.is_symlink()
    assert list(read_passwords(tmp_path / "real" / "users")) == ["porch"]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be locked there")
def test_users_that_are_enrolled_at_once_are_all_there(tmp_path):
    threads = [threading.Thread(target=set_password, args=(tmp_path / "users", f"a{n}", "x")) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_passwords(tmp_path / "users")) == sorted(f"a{n}" for n in range(12))


def test_file_that_is_no_password_file_is_refused_and_stays(tmp_path):
    config = tmp_path / "agent.toml"
    config.write_text('id = "porch"\n')
    with pytest.raises(StateError, match="line 1 is not"):
        set_password(config, "porch", "one")
    assert config.read_text() == 'id = "porch"\n'


def test_account_that_is_not_there_is_named_and_nothing_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        headwater(
            ["password", "porch", "--users", str(tmp_path / "u"), "--out", str(tmp_path / "p"), "--account", "no-such"]
        )
    assert ended.value.code == UsageError.exit_code
    assert "no account 'no-such'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_key_of_commands_is_made_beside_the_password_and_can_be_made_again(tmp_path, capsys, monkeypatch):
    folder = tmp_path
    monkeypatch.chdir(folder)
    enroll("porch", "--users", "users", "--state", "coordinator")
    assert 'broker.command_key_file = "porch.commands.key"' in capsys.readouterr().out
    path = folder / "porch.commands.key"
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    config = AgentConfig(id="porch", broker={"command_key_file": path}, data={"source": "none:"})
    assert read_key(config) == CommandKeys.of(folder / "coordinator", "home").of_agent("porch")
    path.unlink()
    (folder / "coordinator.toml").write_text('state = "coordinator"\n')
    enroll("porch", "--users", "users")
    assert path.read_text() == first
    assert "--state" not in capsys.readouterr().out
    path.write_text(first.replace("porch", "attic"))
    with pytest.raises(ConfigError, match=r"key of agent 'attic' in federation 'home'; expected that of 'porch'"):
        read_key(config)
    path.write_text(first.replace('"key": "', '"key": "SECRET'))
    with pytest.raises(ConfigError, match="wrong or missing: key; 'headwater password'") as error:
        read_key(config)
    assert "SECRET" not in str(error.value)
    path.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        read_key(config)


def test_owner_without_a_name_is_shown_by_its_number(tmp_path, monkeypatch, capsys):
    def nameless(path):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(Path, "owner", nameless)
    with pytest.raises(SystemExit, match=r"^0$"):
        headwater(["password", "porch", "--users", str(tmp_path / "users"), "--out", str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out)["owner"] == str((tmp_path / "users").stat().st_uid)


def test_rules_of_federations_that_are_added_at_once_are_all_there(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    names = [f"f{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda name: add_rules(tmp_path / "acl", name), names))
    text = (tmp_path / "acl").read_text()
    assert all(mosquitto_acl(name) in text for name in names)


def test_rules_of_a_federation_are_added_once_and_other_lines_stay(tmp_path):
    acl = tmp_path / "acl"
    acl.write_text("user monitor\ntopic read $SYS/#")
    assert add_rules(acl, "home")
    assert add_rules(acl, "two")
    assert not add_rules(acl, "home")
    text = acl.read_text()
    assert text.startswith("user monitor\ntopic read $SYS/#\n")
    assert mosquitto_acl("home") in text
    assert mosquitto_acl("two") in text
    acl.write_text(text.replace("pattern read fl/1/home/ann\n", ""))
    assert add_rules(acl, "home"), "a rule of an earlier version is missing"
    assert acl.read_text() == text


# --- units -------------------------------------------------------------------------------------------------------


def agent_toml(folder: Path, port: int, **changes: str) -> Path:
    (folder / "pictures" / "cat").mkdir(parents=True, exist_ok=True)
    values = {"id": "porch", "user": "porch", "federation": "home", "password": "agent.password", **changes}
    path = folder / "agent.toml"
    path.write_text(
        'id = "{id}"\nfederation = "{federation}"\ntier = "head"\nstate = "state"\n[broker]\n'
        'url = "mqtt://127.0.0.1:{port}"\nuser = "{user}"\npassword_file = "{password}"\n'
        '[data]\nsource = "digits:rendered?n=20"\n'.format(port=port, **values)
    )
    return path


NO_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""A process of root without capabilities: as any user, it cannot read what others alone may read."""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
class TestAgentWithoutTheRightsOfRoot:
    pytestmark = AS_ROOT

    def doctor(self, config: Path, **environment: str):
        code = "import sys; from edge_agent.cli import main; sys.exit(main())"
        words = [*NO_RIGHTS, sys.executable, "-c", code, "doctor", "--json", "--timeout", "1", "--config", str(config)]
        done = subprocess.run(
            words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, {step["step"]: step for step in json.loads(done.stdout).get("broker", [])}

    def test_gets_in_with_the_password_that_the_unit_loads(self, open_folder):
        enroll_in(open_folder, "coordinator")
        secret = open_folder / "agent.password"
        enroll("porch", "--users", open_folder / "users", "--out", secret)
        os.chown(secret, 12345, 12345)
        with mosquitto(open_folder) as (port, _):
            config = agent_toml(open_folder, port)
            code, steps = self.doctor(config)
            assert (code, steps["login"]["ok"]) == (2, False)
            assert "permission denied" in steps["login"]["detail"]
            credentials = open_folder / "credentials"  # as systemd makes it of LoadCredential=
            credentials.mkdir()
            shutil.copy(secret, credentials / "agent.password")
            code, steps = self.doctor(config, CREDENTIALS_DIRECTORY=str(credentials))
            assert [steps[name]["ok"] for name in ("login", "topics", "coordinator")] == [True, True, False]
            assert code == 75, "there is no coordinator"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_units_are_what_systemd_understands(tmp_path):
    for unit in (ROOT / "configs/systemd").glob("*.service"):
        text = unit.read_text(encoding="utf-8")
        program = next(line for line in text.splitlines() if line.startswith("ExecStart=")).split()[0]
        copy = tmp_path / unit.name
        copy.write_text(text.replace(program, f"ExecStart={shutil.which('true')}"), encoding="utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=120, check=False
        )
        assert [line for line in done.stderr.splitlines() if copy.name in line] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("side", ["agent", "coordinator"])
def test_units_leave_an_exposure_of_at_most_three(side):
    unit = ROOT / f"configs/systemd/headwater-{side}.service"
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-300:]
    assert "LoadCredential=" in unit.read_text(encoding="utf-8")


# --- doctor ------------------------------------------------------------------------------------------------------


def asked(capsys, config: Path) -> tuple[int, dict]:
    code = edge_agent(["doctor", "--json", "--timeout", "2", "--config", str(config)])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def broker_with_users(open_folder):
    enroll_in(open_folder, "coordinator", "porch")
    shutil.copy(open_folder / "porch.password", open_folder / "agent.password")
    with mosquitto(open_folder) as (port, _):
        yield open_folder, port


class TestDoctor:
    pytestmark = AS_ROOT

    @pytest.mark.parametrize(
        "changes, step, words",
        [
            (
                {"password": "coordinator.password"},
                "login",
                ("another password", "headwater password", "configs/brokers"),
            ),
            ({"id": "kitchen"}, "topics", ("user 'porch'", "this one's is 'kitchen'", "change id or broker.user")),
            ({"federation": "two"}, "topics", ("federation 'two'", "--acl")),
        ],
        ids=["password", "id", "federation"],
    )
    def test_names_what_keeps_an_agent_out(self, broker_with_users, capsys, changes, step, words):
        folder, port = broker_with_users
        code, found = asked(capsys, agent_toml(folder, port, **changes))
        last = found["broker"][-1]
        assert (code, last["step"], last["ok"]) == (2, step, False)
        assert [word for word in words if word not in last["detail"]] == []
        assert last["detail"] in found["verdict"]

    def test_hears_the_coordinator_on_the_topics_of_the_agent(self, broker_with_users, capsys):
        folder, port = broker_with_users
        config = CoordinatorConfig.model_validate(
            {
                "state": folder / "coordinator",
                "task": {
                    "class_names": ["0", "1"],
                    "encoder": "small_cnn",
                    "input": {"kind": "image", "channels": 1, "height": 8, "width": 8},
                },
                "broker": BrokerConfig(
                    url=f"mqtt://127.0.0.1:{port}",
                    user="coordinator",
                    password_file=folder / "coordinator.password",
                ),
            }
        )
        stop = threading.Event()
        with app.coordinator(config) as service:
            thread = threading.Thread(target=service.serve, args=(stop,))
            thread.start()
            try:
                code, found = asked(capsys, agent_toml(folder, port))
            finally:
                stop.set()
                thread.join()
        assert [(step["step"], step["ok"]) for step in found["broker"]] == [
            (name, True) for name in ("name", "tcp", "login", "topics", "coordinator", "kind")
        ]
        assert code == 0
        assert service.roster.members() == [], "nobody has joined by it"


class TestDoctorOfTheCoordinator:
    pytestmark = AS_ROOT

    @pytest.mark.parametrize(
        "changes, code, step, words",
        [
            ({}, 0, "kind", "mosquitto version 2"),
            ({"federation": "two"}, 2, "topics", "--acl FILE --federation two"),
            ({"password": "porch.password"}, 2, "login", "headwater password coordinator"),
        ],
        ids=["right", "federation", "password"],
    )
    def test_logs_in_and_hears_itself(self, broker_with_users, capsys, changes, code, step, words):
        folder, port = broker_with_users
        values = {"federation": "home", "password": "coordinator.password", **changes}
        config = folder / "coordinator.toml"
        config.write_text(
            'federation = "{federation}"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\nuser = "coordinator"\n'
            'password_file = "{password}"\n[task]\nclass_names = ["0", "1"]\nencoder = "small_cnn"\n'
            'input = {{ kind = "image", channels = 1, height = 8, width = 8 }}\n'.format(port=port, **values)
        )
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            headwater(["doctor", "--json", "--config", str(config)])
        assert ended.value.code == code
        last = json.loads(capsys.readouterr().out)["broker"][-1]
        assert (last["step"], last["ok"]) == (step, code == 0)
        assert words in last["detail"]


def test_doctor_looks_at_state_data_and_head_of_the_configuration(tmp_path, capsys):
    config = agent_toml(tmp_path, 1)
    text = config.read_text().replace('"digits:rendered?n=20"', '"images:nowhere"')
    config.write_text(text + '[head]\nname = "lrr"\n')
    (tmp_path / "state").write_text("a file")
    code, found = asked(capsys, config)
    assert [(step["step"], step["ok"]) for step in found["agent"]] == [
        ("tier", True), ("state", False), ("data", False), ("privacy", True), ("commands", True), ("head", False)
    ]  # fmt: skip
    assert "not authenticated" in found["agent"][4]["detail"]
    assert "did you mean 'lr'" in found["agent"][5]["detail"]
    assert code == 2
    assert found["verdict"].startswith("not ready: state:")


@pytest.mark.parametrize("has_state", [False, True])
def test_a_relay_without_a_key_is_told_that_it_will_sum_nothing(tmp_path, capsys, monkeypatch, has_state):
    monkeypatch.chdir(tmp_path)
    options = ["--state", "state"] if has_state else []
    enroll("north", "--users", "users", "--relay-for", "porch", *options)
    said = capsys.readouterr().out
    assert "it is a relay, and may speak for: porch" in said
    assert ("sums no updates: name the coordinator's state folder" in said) is not has_state
    assert Path("north.commands.key").exists() is has_state

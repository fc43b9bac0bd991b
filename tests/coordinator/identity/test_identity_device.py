"""``edge-agent enroll``: what it refuses before a token is used, and the configuration that it writes."""

from __future__ import annotations

import importlib.util
import io
import json
from datetime import timedelta

import pytest
from identity_harness import DATA, Fleet

from coordinator.cli.enroll import enrolment
from coordinator.config import load_config
from coordinator.state.release_keys import ReleaseKeys
from coordinator.state.store import StateFolder
from edge_agent.cli import enroll
from edge_agent.core.config import AgentConfig, load
from edge_agent.core.errors import BrokerAway
from edge_agent.identity.certificates import IdentityFolder

DIGITS = DATA.format(0)


class Device:
    """One device that enrolls by files, so that nothing serves."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.issuer = enrolment(fleet.config, None)
        self.config = fleet.folder / "agent.toml"
        self.state = fleet.folder / "agent-state"
        self.request = fleet.folder / "request.json"
        self.answer = fleet.folder / "answer.json"

    def token(self, name, **others):
        return self.issuer.token(name, timedelta(days=1), **others).text()

    def call(self, token, *options):
        return self.fleet.device("enroll", token, "--config", self.config, "--state", self.state, *options)

    def enroll(self, token, *options, once=()):
        """Both halves; ``once``: options of the second alone."""
        code, out, err = self.call(token, "--csr", self.request, *options)
        if code == 0:
            assert self.fleet.call("sign", self.request, "--out", self.answer, "--config", self.fleet.config)[0] == 0
            code, out, err = self.call(token, "--answer", self.answer, *options, *once)
        return code, out, err

    @property
    def name(self):
        identity = IdentityFolder(self.state).read()
        return None if identity is None else identity.name


@pytest.fixture
def device(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Device(Fleet(tmp_path / "fleet", capsys).init())


def test_token_of_another_device_is_refused_unless_it_renames_this_one_or_is_wanted(device):
    assert device.enroll(device.token("porch"), "--data", DIGITS)[0] == 0
    code, _, err = device.call(device.token("garden"), "--csr", device.request)
    assert (code, "headwater agents rename porch garden" in err, device.name) == (2, True, "porch")
    assert device.enroll(device.token("garden", replaces="porch"))[0] == 0
    assert (device.name, load(AgentConfig, device.config).id) == ("garden", "garden")
    assert device.enroll(device.token("hall"), "--rename")[0] == 0
    assert (device.name, load(AgentConfig, device.config).id) == ("hall", "hall")


def test_device_that_was_enrolled_without_data_enrolls_again_and_gets_them(device):
    code, out, _ = device.enroll(device.token("porch"))
    assert (code, "name this device's data in" in out) == (0, True)
    code, out, err = device.enroll(device.token("porch"))
    assert (code, "name this device's data in" in out) == (0, True), err
    code, _, err = device.enroll(device.token("porch"), "--data", DIGITS)
    assert (code, load(AgentConfig, device.config).data.source) == (0, DIGITS), err
    code, _, err = device.call(device.token("porch"), "--csr", device.request, "--data", "digits:optdigits?n=9")
    assert (code, f"names the data '{DIGITS}'" in err) == (2, True)


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_device_that_will_train_is_said_to_take_no_releases(device, monkeypatch, has_torch):
    find_spec = importlib.util.find_spec

    def find_all_but_torch(name, *others):
        if name == "torch":
            return object() if has_torch else None
        return find_spec(name, *others)

    monkeypatch.setattr("importlib.util.find_spec", find_all_but_torch)
    out = device.enroll(device.token("porch"), "--data", DIGITS)[1]
    assert ('takes no releases then; tier = "head" in' in out) == has_torch
    device.config.write_text('tier = "head"\n' + device.config.read_text())
    assert "takes no releases" not in device.enroll(device.token("porch"))[1]


def test_the_tier_is_named_when_a_device_is_enrolled(device):
    out = device.enroll(device.token("porch"), "--data", DIGITS, "--tier", "train")[1]
    assert (load(AgentConfig, device.config).tier, "takes no releases" in out) == ("train", False)
    assert device.enroll(device.token("porch"), "--tier", "train")[0] == 0
    code, _, err = device.call(device.token("porch"), "--csr", device.request, "--tier", "head")
    assert (code, "says tier = \"train\", not 'head'; change it there" in err) == (2, True)


@pytest.mark.parametrize("source", ["nosuch:thing", "images:/nosuch", "npz:data.npz?nosuch=1"])
def test_data_that_are_not_there_use_no_token_up(device, source):
    code, _, err = device.call(device.token("porch"), "--csr", device.request, "--data", source)
    assert (code, "nosuch" in err, device.request.exists(), device.state.exists()) == (2, True, False, False)


def test_answer_that_is_not_there_is_a_mistake_of_the_command(device):
    code, _, err = device.call(device.token("porch"), "--answer", "nothere.json")
    assert (code, "--answer nothere.json: no such file" in err) == (2, True)


def test_token_of_a_renaming_says_whom_it_renames(device):
    code, out, _ = device.fleet.call("enroll", "porch", "--config", device.fleet.config, "--json")
    assert device.enroll(json.loads(out)["token"], "--data", DIGITS)[0] == code == 0
    _, out, _ = device.fleet.call("agents", "rename", "porch", "garden", "--config", device.fleet.config)
    assert device.enroll(out.strip())[0] == 0
    assert device.name == "garden"


def test_agent_with_the_certificate_of_another_id_ends_and_its_status_says_why(device):
    """The broker lets it in and drops what it says; it waited for ever for a coordinator that did not hear it."""
    assert device.enroll(device.token("porch"), "--data", DIGITS)[0] == 0
    device.config.write_text(device.config.read_text().replace('id = "porch"', 'id = "kitchen"'))
    code, _, err = device.fleet.device("run", "--config", device.config)
    assert (code, "it is for 'porch' in federation 'home', and the configuration for 'kitchen'" in err) == (2, True)
    code, out, _ = device.fleet.device("status", "--config", device.config, "--json")
    fault = json.loads(out)["fault"]
    assert (code, fault["error"], fault["code"]) == (1, "EnrolmentRefused", "identity")
    assert "change id and federation there" in fault["message"]


def test_enroll_says_each_reason_for_waiting_once(capsys):
    answers = [BrokerAway("nobody listens on port 1"), BrokerAway("nobody listens on port 1"), BrokerAway("cut")]

    def ask():
        if answers:
            raise answers.pop(0)
        return "certificate"

    assert enroll._patiently(ask, pause=lambda _: None) == "certificate"
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == ["nobody listens on port 1", "cut"]


class Terminal(io.StringIO):
    """An input at which a person sits."""

    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_printed_advice_asks_for_the_token_so_that_no_other_user_sees_it(device, monkeypatch, kind):
    code, token, advice = device.fleet.call("enroll", "porch", "--config", device.fleet.config)
    assert code == 0
    assert "edge-agent enroll - --data SOURCE" in advice
    monkeypatch.setattr("sys.stdin", kind(token))
    code, _, err = device.call("-", "--csr", device.request, "--data", DIGITS)
    assert code == 0, err
    assert err.startswith("token: ") == (kind is Terminal)
    assert json.loads(device.request.read_text())["name"] == "porch"


def test_backup_says_that_it_holds_the_root_key_until_that_is_moved_away(device, tmp_path):
    state = load_config(device.fleet.config).state
    with StateFolder(state).look(create=True):
        pass
    code, out, err = device.fleet.call("backup", tmp_path / "backup", "--config", device.fleet.config)
    assert code == 0, err
    said = " ".join(out.split())
    assert "root.key among them" in said
    keys = ReleaseKeys(tmp_path / "backup")
    assert keys.root_key.read_bytes() == ReleaseKeys(state).root_key.read_bytes(), "a restore can change keys"
    ReleaseKeys(state).root_key.unlink()
    code, out, _ = device.fleet.call("backup", tmp_path / "backup", "--config", device.fleet.config)
    said = " ".join(out.split())
    assert (code, "secret keys" in said, "root.key" in said, keys.root_key.exists()) == (0, True, False, False)

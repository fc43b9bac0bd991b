"""``headwater init`` and ``headwater agents``: what they refuse, and that they can be repeated."""

from __future__ import annotations

import json
import socket
from datetime import timedelta

import pytest
from identity_harness import Fleet

from coordinator.cli.enroll import enrolment
from coordinator.config import IdentityConfig, load_config
from coordinator.identity.enrolment import Enrolment
from coordinator.identity.serving import BrokerFiles, server_names
from coordinator.journal.entries import fact_of
from coordinator.journal.store import utc_now
from coordinator.state.store import StateFolder
from coordinator.views.releases import book_of
from edge_agent.identity.certificates import IdentityFolder


@pytest.fixture
def fleet(tmp_path, capsys):
    return Fleet(tmp_path / "fleet", capsys)


def test_longest_name_of_a_federation_is_taken(fleet):
    code, _, err = fleet.call("init", fleet.folder, "--host", "localhost", "--federation", "a" * 63)
    assert code == 0, err
    assert load_config(fleet.config).federation == "a" * 63


def test_classes_of_a_new_configuration_are_named_at_once(fleet, tmp_path):
    """Without them every device failed: the file had the ten digits until somebody edited it."""
    code, out, err = fleet.call("init", fleet.folder, "--host", "localhost", "--classes", 'cat, grüner "Apfel",dog')
    assert code == 0, err
    assert load_config(fleet.config).task.class_names == ("cat", 'grüner "Apfel"', "dog")
    assert "first: put the size of your inputs into [task]" in " ".join(out.split())
    code, _, err = fleet.call("init", fleet.folder / "other", "--host", "localhost", "--classes", "cat,cat")
    assert (code, "given twice: cat; give each name once" in err, (fleet.folder / "other").exists()) == (2, True, False)
    (tmp_path / "names.txt").write_text("fox\n\nhen\n")
    third = tmp_path / "third"
    assert fleet.call("init", third, "--host", "localhost", "--classes", tmp_path / "names.txt")[0] == 0
    assert load_config(third / "coordinator.toml").task.class_names == ("fox", "hen")
    code, _, err = fleet.call("init", "--config", fleet.config, "--classes", "a,b")
    assert (code, "--classes is for a new configuration" in err) == (2, True)


@pytest.mark.parametrize(
    "host", ["my host", "büro", "a" * 254, "foo:123", "https://x.y", "a..b", f"{'a' * 64}.example", "192.0.2.999"]
)
def test_host_that_no_url_can_name_is_refused_before_anything_is_written(fleet, host):
    code, _, err = fleet.call("init", fleet.folder, "--host", host)
    assert (code, err.count("options: 1 mistake"), err.count("host = "), "Traceback" in err) == (2, 1, 1, False)
    assert not fleet.folder.exists()


def test_name_of_the_machine_that_no_certificate_can_hold_is_left_out(fleet, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "büro")
    assert fleet.call("init", fleet.folder, "--host", "coordinator.example")[0] == 0
    assert server_names(load_config(fleet.config).identity)[0] == "coordinator.example"
    code, _, err = fleet.call("init", fleet.folder / "other")
    assert (code, "options: 1 mistake" in err) == (2, True)


def test_broker_and_enrolment_need_one_port_each(fleet):
    code, _, err = fleet.call("init", fleet.folder, "--host", "localhost", "--port", 1234, "--enroll-port", 1234)
    assert (code, "port and enroll_port are both 1234" in err, fleet.folder.exists()) == (2, True, False)


def test_second_init_says_how_the_host_is_changed(fleet):
    fleet.init()
    code, _, err = fleet.call("init", fleet.folder, "--host", "other.example")
    assert (code, "change it: identity.host in that file" in err, "--config" in err) == (2, True, False)


@pytest.mark.parametrize(
    "host, bind",
    [("2001:0DB8::5", "::"), ("::1", "::1"), ("192.0.2.5", "0.0.0.0"), ("localhost", "127.0.0.1")],
)
def test_host_is_listened_on_by_its_kind_and_its_certificate_is_made_once(fleet, host, bind):
    assert fleet.call("init", fleet.folder, "--host", host)[0] == 0
    config = load_config(fleet.config)
    assert config.identity.bind == bind
    files = BrokerFiles(Enrolment(config.state, config.federation, config.identity))
    assert not files.renew(utc_now()), "each renewal has the broker read its files again, every hour"


@pytest.mark.parametrize("has_config", [False, True], ids=["new folder", "configuration"])
def test_init_that_failed_is_repeated_with_the_same_authority(fleet, monkeypatch, has_config):
    words = ("init", fleet.folder, "--host", "localhost")
    if has_config:
        fleet.folder.mkdir()
        fleet.config.write_text('federation = "home"\nstate = "state"\n[task]\nclass_names = ["0", "1"]\n')
        words = ("init", "--config", fleet.config, "--host", "localhost")
    before = fleet.config.read_bytes() if has_config else None

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(BrokerFiles, "write", fail)
        code, _, err = fleet.call(*words)
        assert (code, "No space left" in err) == (1, True)
    assert (fleet.config.read_bytes() if fleet.config.exists() else None) == before
    made = (fleet.folder / "state" / "identity" / "ca.pem").read_bytes()
    if not has_config:
        code, _, err = fleet.call(*words, "--federation", "other")
        assert (code, "release keys of federation 'home', not of 'other'" in err) == (2, True)
    code, out, err = fleet.call(*words)
    assert code == 0, err
    config = load_config(fleet.config)
    assert isinstance(config.identity, IdentityConfig)
    assert Enrolment(config.state, config.federation, config.identity).authority.fingerprint in out
    assert (fleet.folder / "state" / "identity" / "ca.pem").read_bytes() == made


def test_rename_whose_token_was_lost_is_repeated_until_the_name_has_a_certificate(fleet):
    fleet.init()
    issuer = enrolment(fleet.config, None)
    for name, replaces in (("porch", ""), ("garden", "porch")):
        if replaces:
            for _ in range(2):  # the first token was lost
                code, _, err = fleet.call("agents", "rename", replaces, name, "--config", fleet.config)
                assert code == 0, err
        token = issuer.token(name, timedelta(days=1), replaces=replaces)
        issuer.certify(IdentityFolder(fleet.folder / "device").request("home", name, token.secret))
    code, _, err = fleet.call("agents", "rename", "porch", "garden", "--config", fleet.config)
    assert (code, "there is an agent 'garden' already" in err) == (2, True)


def test_revocation_says_what_it_ends_and_the_list_what_follows(fleet):
    fleet.init()
    issuer = enrolment(fleet.config, None)

    def revoke(name):
        code, out, err = fleet.call("agents", "revoke", name, "--config", fleet.config)
        assert code == 0, err
        return out

    def listed():
        _, out, _ = fleet.call("agents", "list", "--config", fleet.config, "--json")
        return {agent["name"]: (agent["state"], agent["renames"]) for agent in json.loads(out)["agents"]}

    token = issuer.token("porch", timedelta(days=1))
    assert listed() == {"porch": ("invited", None)}
    with StateFolder(issuer.ledger.folder.parents[1]).open("a coordinator"):
        code, _, err = fleet.call("agents", "porch", "--config", fleet.config)
    assert (code, "agent 'porch' (invited) was not heard yet" in err) == (2, True)
    assert "porch is invited no more" in revoke("porch")
    assert listed() == {"porch": ("revoked", None)}
    token = issuer.token("porch", timedelta(days=1))
    issuer.certify(IdentityFolder(fleet.folder / "device").request("home", "porch", token.secret))
    issuer.token("garden", timedelta(days=1), replaces="porch")
    assert listed() == {"garden": ("invited", "porch"), "porch": ("enrolled", None)}
    assert "porch is revoked" in revoke("porch")
    assert "porch was revoked before" in revoke("porch")
    issuer.token("porch", timedelta(days=1))
    assert listed()["porch"] == ("invited", None)
    assert "1 agents" not in fleet.call("agents", "certificates", "--config", fleet.config)[1]
    code, _, err = fleet.call("agents", "revoke", "hall", "--config", fleet.config)
    assert (code, "there is no agent 'hall'; known are: garden, porch" in err) == (2, True)


def test_request_that_is_not_there_is_a_mistake_of_the_command(fleet):
    fleet.init()
    code, _, err = fleet.call("sign", fleet.folder / "nothere.json", "--config", fleet.config)
    assert (code, "no such file" in err) == (2, True)


def test_a_revoked_device_counts_in_no_release_any_more(fleet):
    fleet.init()
    state = load_config(fleet.config).state
    for name in ("porch", "attic"):
        fleet.token(name)
    with StateFolder(state).look(create=True) as folder:
        folder.journal.append(fact_of("device_reported", {"runs": ""}), agent="porch")
    for name in ("porch", "attic"):
        assert fleet.call("agents", "revoke", name, "--config", fleet.config)[0] == 0
    with StateFolder(state).look() as folder:
        assert book_of(folder.journal).devices == {}
        assert [entry.agent for entry in folder.journal.entries(kinds=("device_retired",))] == ["porch"]

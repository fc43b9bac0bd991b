"""Identity from end to end, with real programs at a real Mosquitto: enroll, revoke, renew, return."""

from __future__ import annotations

import json
import re
import shutil
import stat
import time

import pytest
from identity_harness import DATA, Fleet
from mqtt_harness import NEEDS_MOSQUITTO

from coordinator.state.command_keys import CommandKeys
from edge_agent.core.config import AgentConfig, load
from edge_agent.identity.certificates import IdentityFolder
from edge_agent.wire.seal import read_key

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.broker]


@pytest.fixture
def fleet(tmp_path, capsys):
    with Fleet(tmp_path / "fleet", capsys) as fleet:
        yield fleet


def test_from_nothing_to_two_devices_over_tls_by_init_serve_and_one_command_for_each(fleet):
    begin = time.monotonic()
    fleet.init()
    fleet.start("serve", "coordinator", "serve", "--config", fleet.config)
    for number, name in enumerate(("porch", "hall")):
        token = fleet.token(name)
        assert "\n" not in token
        assert len(token) < 400
        code, out, err = fleet.enroll(token, name, number)  # it waits for the coordinator, which has just been started
        assert code == 0, err
        key = re.search(r"key +(SHA256:\S+)", out)[1]
        assert f"certified agent={name} key={key}" in fleet.said("serve"), "both sides show the same fingerprint"
        fleet.run(name)
    fleet.until(lambda: fleet.online() == {"porch", "hall"}, "both are online")
    took_s = time.monotonic() - begin
    with fleet.capsys.disabled():
        print(f"from nothing to two devices over TLS: {took_s:.1f} s")
    authority = re.search(r"authority=(SHA256:\S+)", fleet.said("serve"))[1]
    assert authority == IdentityFolder(fleet.folder / "hall").read().authority
    secret_files = [*(fleet.folder / "state/identity").rglob("*"), *fleet.folder.glob("*/identity/*")]
    assert len(secret_files) >= 12
    for path in secret_files:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for name in ("porch", "hall"):
        config = load(AgentConfig, fleet.folder / f"{name}.toml")
        keys = CommandKeys.of(fleet.folder / "state", config.federation)
        assert read_key(config) == keys.of_agent(name), "each knows the coordinator's commands by a key of its own"


@pytest.mark.slow
def test_a_run_signs_its_release_and_an_enrolled_device_takes_it_and_no_other(fleet):
    fleet.init().serve()
    for number, name in enumerate(("porch", "hall", "attic")):
        assert fleet.enroll(fleet.token(name), name, number)[0] == 0
    file = fleet.folder / "attic.toml"
    file.write_text(f'tier = "head"\n{file.read_text()}')
    for name in ("porch", "hall", "attic"):
        fleet.run(name)
    fleet.until(lambda: fleet.online() == {"porch", "hall", "attic"}, "all are online")
    code, _, err = fleet.call("run", "--config", fleet.config, "--method", "fedavg", "--rounds", 1, "--json")
    assert code == 0, err
    code, _, err = fleet.call("release", "create", "--config", fleet.config, "--canary", "all")
    assert code == 0, err
    fleet.until(lambda: "installed bundle=" in fleet.said("attic"), "the device has installed the release")
    code, out, _ = fleet.device("status", "--config", file, "--json")
    trust = json.loads(out)["trust"]
    assert (trust["root"], trust["federation"], trust["expired"]) == (1, "home", False)
    [path] = fleet.folder.glob("state/runs/*/*.hwb")
    root = fleet.folder / "state/identity/release/root.json"
    code, out, err = fleet.device("verify", path, "--root", root, "--json")
    assert code == 0, err
    assert json.loads(out)["release"] < trust["release"], "it was signed again when it was released"
    fleet.stop("attic")
    other = fleet.folder / "other.hwb"
    code, _, err = fleet.call("export", "--config", fleet.config, "--out", other)
    assert code == 0, err
    assert fleet.device("import", other, "--state", fleet.folder / "attic")[0] == 0  # signed by the same key, and newer
    assert fleet.device("import", path, "--state", fleet.folder / "attic")[0] == 4


def test_row_34_revoked_agent_loses_its_open_session_within_5_s_and_a_token_lets_its_name_in_again(fleet):
    fleet.init().serve()
    for number, name in enumerate(("porch", "hall")):
        assert fleet.enroll(fleet.token(name), name, number)[0] == 0
        fleet.run(name)
    fleet.until(lambda: fleet.online() == {"porch", "hall"}, "both are online")
    begin = time.monotonic()
    code, out, _ = fleet.call("agents", "revoke", "hall", "--config", fleet.config)
    assert code == 0
    assert "revoked" in out
    fleet.until(lambda: "broker_away" in fleet.said("hall"), "the open session of the revoked agent ends", 5)
    with fleet.capsys.disabled():
        print(f"open session ended {time.monotonic() - begin:.2f} s after the command")
    fleet.until(lambda: fleet.online() == {"porch"}, "the coordinator drops it", 5)
    fleet.until(lambda: fleet.said("hall").count("broker_away") >= 3, "it tries again and is refused")
    fleet.until(lambda: "certificate_refused" in fleet.said("hall"), "it asks why")
    assert "certificate: it was revoked at" in fleet.said("hall")
    code, out, _ = fleet.call("status", "--config", fleet.config)
    assert code == 0
    assert re.search(r"hall .*revoked", out)
    assert re.search(r"porch .*online", out)
    shown = ("status", "--config", fleet.folder / "hall.toml")
    fleet.until(lambda: "it was revoked at" in fleet.device(*shown)[1], "the device shows it", 5)
    assert fleet.device(*shown)[0] == 1
    assert fleet.said("hall").count(" connected ") == 1
    assert "broker_away" not in fleet.said("porch"), "nobody else notices"

    fleet.stop("hall")
    code, _, err = fleet.device("run", "--config", fleet.folder / "hall.toml", "--no-wait")
    assert code == 75
    assert "edge-agent doctor" in err
    shutil.rmtree(fleet.folder / "hall")  # wiped
    assert fleet.enroll(fleet.token("hall"), "hall", 1)[0] == 0
    fleet.run("hall")
    fleet.until(lambda: fleet.online() == {"porch", "hall"}, "it is back under its name")


def test_doctor_over_tls_ends_no_connection_of_its_own(fleet, caplog):
    fleet.init().serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    code, out, err = fleet.device("doctor", "--config", fleet.folder / "porch.toml")
    assert (code, "verdict: ready" in out) == (0, True), out
    assert "broker_away" not in caplog.text + err
    for harmless in ("already connected", "does not contain", "unexpected eof"):
        assert harmless not in fleet.said("serve")


@pytest.mark.slow
def test_standby_takes_folder_and_broker_over_from_a_coordinator_that_was_killed(fleet):
    fleet.init().serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"porch"}, "it is online")
    fleet.start("standby", "coordinator", "serve", "--standby", "--config", fleet.config)
    fleet.until(lambda: "standing_by holder=" in fleet.said("standby"), "the standby waits")
    fleet.kill("serve")
    fleet.until(lambda: "takes_over folder=" in fleet.said("standby"), "it takes over")
    fleet.until(lambda: fleet.said("standby").count("agent_joined agent=porch") == 1, "the agent is back")
    fleet.start("late", "coordinator", "serve", "--config", fleet.config)
    assert fleet.processes.pop("late").wait(60) != 0, "the first one does not start beside it"
    assert "is in use by headwater serve" in fleet.said("late")


@pytest.mark.slow
@pytest.mark.parametrize("former", ["in reach", "gone"])
def test_a_device_that_was_revoked_after_the_backup_does_not_come_back_with_it(fleet, former):
    """A drill: the backup is started beside the live primary, then in its place, with or without the former folder."""
    fleet.init().serve()
    for number, name in enumerate(("porch", "hall")):
        assert fleet.enroll(fleet.token(name), name, number)[0] == 0
        fleet.run(name)
    fleet.until(lambda: fleet.online() == {"porch", "hall"}, "both are online")
    backup = fleet.folder / "copy"
    assert fleet.call("backup", backup, "--config", fleet.config)[0] == 0
    assert fleet.call("agents", "revoke", "porch", "--config", fleet.config)[0] == 0
    fleet.until(lambda: fleet.online() == {"hall"}, "the revoked one is shut out")

    restore = ("serve", "--config", fleet.config, "--state", backup)
    code, _, err = fleet.call(*restore, "--accept-identities")
    assert code == 2, err
    assert f"serves at localhost:{fleet.enroll_port}" in err
    assert fleet.processes["serve"].poll() is None

    fleet.stop("serve")
    if former == "gone":
        shutil.rmtree(fleet.folder / "state")
    code, _, err = fleet.call(*restore)
    assert code == 2, err
    assert "is a backup made at 20" in err
    who = "1 agent: hall" if former == "in reach" else "2 agents: hall, porch"
    assert f"Its certificates admit {who}." in err
    known = "revoked after the backup, and not admitted: porch" if former == "in reach" else "no former state folder"
    assert known in err
    assert "'headwater serve --accept-identities' confirms it" in err
    if former == "gone":
        assert fleet.call("agents", "revoke", "porch", "--config", fleet.config, "--state", backup)[0] == 0

    fleet.start("restored", "coordinator", *restore, "--accept-identities")
    fleet.until(lambda: "agent_joined agent=hall" in fleet.said("restored"), "the other one is back")
    fleet.until(lambda: fleet.said("porch").count("it was revoked at") >= 1, "the revoked one is told that it is")
    assert "agent=porch" not in fleet.said("restored").replace("certificate_refused", "")
    fleet.stop("restored")
    fleet.start("again", "coordinator", *restore)
    fleet.until(lambda: "agent_joined agent=hall" in fleet.said("again"), "it is a backup no more, and asks nothing")


@pytest.mark.slow
def test_certificate_is_renewed_under_a_running_agent_over_its_own_connection(fleet):
    fleet.init(certificate_days=8 / 86_400, grace_days=1).serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    folder = IdentityFolder(fleet.folder / "porch")
    first = folder.read()
    fleet.run("porch")
    fleet.until(lambda: fleet.said("porch").count("certificate_renewed") >= 3, "three renewals")
    third = folder.read()
    assert third.not_after > first.not_after + 8, "the first certificate has expired meanwhile"
    assert third.serial != first.serial
    assert fleet.online() == {"porch"}
    assert fleet.said("porch").count(" connected ") == 1, "the connection stayed"
    assert "certified" not in fleet.said("serve").partition("agent_joined")[2], "the enrolment port was not asked"


@pytest.mark.slow
def test_device_returns_after_its_certificate_has_expired(fleet):
    fleet.init(certificate_days=4 / 86_400, grace_days=1).serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    folder = IdentityFolder(fleet.folder / "porch")
    ended = folder.read()
    fleet.until(lambda: time.time() > ended.not_after + 1, "the certificate expires on the shelf")
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"porch"}, "the device is back")
    assert "certificate_renewed" in fleet.said("porch")
    assert folder.read().serial != ended.serial


@pytest.mark.slow
def test_row_46_clone_of_a_device_is_found_and_one_of_the_two_ends(fleet):
    """The broker takes the id from the certificate: each of the two ends the other's session."""
    fleet.init().serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    shutil.copytree(fleet.folder / "porch", fleet.folder / "clone")
    config = (fleet.folder / "porch.toml").read_text()
    (fleet.folder / "clone.toml").write_text(config.replace("/fleet/porch", "/fleet/clone"))
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"porch"}, "the device is online")
    fleet.run("clone")
    fleet.until(lambda: fleet.processes["clone"].poll() is not None, "the clone is rejected and ends")
    assert fleet.processes.pop("clone").returncode == 2
    assert "the id 'porch' is in use" in fleet.said("clone")
    fleet.until(lambda: fleet.online() == {"porch"}, "the device stays")
    assert fleet.processes["porch"].poll() is None
    assert "duplicate_id agent=porch" in fleet.said("serve")


def test_doctor_checks_certificate_and_clock_and_leaves_a_running_agent_alone(fleet):
    fleet.init().serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    config = fleet.folder / "porch.toml"
    code, out, _ = fleet.device("doctor", "--config", config)
    assert code == 0, out
    assert "agent certificate: ok: holds until" in out
    assert re.search(r"agent clock: ok: [+-]0 s from the coordinator's", out)
    assert "broker coordinator: ok" in out
    assert "broker kind: ok: " in out
    assert "agent_refused" not in fleet.said("serve"), "each step proves who it is"
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"porch"}, "the device is online")
    fleet.until(lambda: '"welcomed": true' in (fleet.folder / "porch/status.json").read_text(), "it says so")
    code, out, _ = fleet.device("doctor", "--config", config)
    assert (code, "is connected and welcomed" in out) == (0, True), out
    assert fleet.said("porch").count(" connected ") == 1
    code, out, _ = fleet.call("doctor", "--config", fleet.config)
    assert code == 0
    for step in ("authority", "certificate", "mosquitto"):
        assert f"broker {step}: ok" in out
    assert "broker kind: ok: Mosquitto: one thread and no cluster" in out


@pytest.mark.slow
def test_list_shows_who_is_enrolled_invited_and_revoked(fleet):
    fleet.init().serve()
    fleet.token("attic", "--expires", "8w")
    for name in ("porch", "hall"):
        assert fleet.enroll(fleet.token(name), name)[0] == 0
    fleet.call("agents", "revoke", "hall", "--config", fleet.config)
    code, out, _ = fleet.call("agents", "list", "--config", fleet.config, "--json")
    states = {agent["name"]: agent["state"] for agent in json.loads(out)["agents"]}
    assert (code, states) == (0, {"attic": "invited", "porch": "enrolled", "hall": "revoked"})
    code, _, err = fleet.call("agents", "revoke", "nobody", "--config", fleet.config)
    assert (code, "known are: attic, hall, porch" in err) == (2, True)


@pytest.mark.slow
def test_renamed_device_keeps_its_folder_and_gets_its_id_in_the_configuration(fleet):
    fleet.init().serve()
    assert fleet.enroll(fleet.token("porch"), "porch")[0] == 0
    code, out, err = fleet.call("agents", "rename", "porch", "garden", "--config", fleet.config)
    assert code == 0, err
    code, said, err = fleet.device("enroll", out.strip(), "--config", fleet.folder / "porch.toml")
    assert code == 0, err
    assert "the id is 'garden' now" in said
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"garden"}, "it is online under its new name")


def test_device_that_reaches_the_broker_alone_enrolls_by_two_files(fleet):
    fleet.init()
    token = fleet.token("porch")
    request = fleet.folder / "request.json"
    answer = fleet.folder / "answer.json"
    options = ("--config", fleet.folder / "porch.toml", "--state", fleet.folder / "porch", "--data", DATA.format(0))
    code, said, err = fleet.device("enroll", token, *options, "--csr", request)
    assert (code, f"--answer answer.json --data '{DATA.format(0)}'" in said) == (0, True), err
    code, out, err = fleet.call("sign", request, "--out", answer, "--config", fleet.config)
    assert code == 0, err
    code, said, err = fleet.device("enroll", token, *options, "--answer", answer)
    assert code == 0, err
    assert re.search(r"key +(SHA256:\S+)", said)[1] in out, "both sides show the same fingerprint"
    fleet.serve()
    fleet.run("porch")
    fleet.until(lambda: fleet.online() == {"porch"}, "the device is online")
    request.write_bytes(request.read_bytes()[:-20])
    code, _, err = fleet.call("sign", request, "--config", fleet.config)
    assert (code, "no request; 'edge-agent enroll - --csr FILE'" in err) == (2, True)

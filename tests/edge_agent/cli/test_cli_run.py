"""``edge-agent run``, ``status`` and what all its commands have in common: help, mistakes, exit codes."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from edge_agent import __version__
from edge_agent.agent.release_record import ReleaseRecord
from edge_agent.bundle.installed import current_id, current_manifest, install
from edge_agent.cli import COMMANDS, main
from edge_agent.core.locks import folder_lock
from edge_agent.core.storage import write_json
from edge_agent.wire.messages.down import Install


@pytest.fixture(autouse=True)
def quiet_loggers():
    root = logging.getLogger()
    logger = logging.getLogger("edge_agent")
    handlers = root.handlers[:]
    level = logger.level
    yield
    root.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def config(tmp_path) -> Path:
    """An agent whose broker is not there."""
    path = tmp_path / "agent.toml"
    path.write_text(
        'id = "porch"\ntier = "head"\nstate = "state"\n\n[broker]\nurl = "mqtt://127.0.0.1:1"\n\n'
        '[data]\nsource = "digits:rendered?n=20"\n'
    )
    return path


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_that_parses(command, capsys):
    from edge_agent.cli import _parser

    said = help_of(command, capsys)
    assert "--json" in said
    example = re.search(rf"^example:\n  edge-agent ({command}\b.*)$", said, re.MULTILINE)
    assert example, said
    words = example[1].split()
    assert _parser(words).parse_args(words).command == command


def test_help_says_where_the_token_of_a_bundle_lies(capsys):
    said = " ".join(help_of("serve", capsys).split())
    assert "serve/token in the state folder, with --bundle or --head in the folder of --cache" in said


def test_help_lists_all_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(re.search(rf"^ +{command} +\w", said, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("words", [["rnu"], ["run", "--confg", "x"], []])
def test_wrong_usage_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_wrong_usage_is_one_line_that_names_the_command_and_similar_options(capsys):
    for words, said in (
        (["fit"], "edge-agent fit: the following arguments are required: --data, --out; "),
        (["status", "--confg=x"], "edge-agent status: unknown arguments: --confg=x, did you mean --config?; "),
        (["fit", "--bundl", "b.hwb"], "edge-agent fit: unknown arguments: --bundl, did you mean --bundle?; "),
        (["fit", "--bundle", "b.hwb", "--ou=x"], "edge-agent fit: unknown arguments: --ou=x, did you mean --out?; "),
        (["evaluat"], "edge-agent: no such command 'evaluat', did you mean 'evaluate'?; "),
        (["xyzzy", "--json"], "edge-agent: no such command 'xyzzy'; "),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert err.startswith(said)
        assert err.count("\n") == 1
        assert "--help' explains the options" in err


def test_the_program_alone_shows_its_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([])
    assert (ended.value.code, capsys.readouterr()) == (2, ("", said))


def test_status_of_a_state_folder_needs_no_configuration(tmp_path, capsys):
    state = tmp_path / "state"
    state.mkdir()
    write_json(state / "status.json", {"id": "porch", "tier": "head", "condition": "ok"})
    assert main(["status", "--state", str(state), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["tier"], found["running"], found["state"]) == ("porch", "head", False, str(state))
    assert found["disk"] is None, "its bounds are in the configuration alone"
    assert found["trust"] == {**found["trust"], "root": None, "unsigned": None}
    assert main(["status", "--state", str(state)]) == 0
    assert "no keys are trusted" in capsys.readouterr().out
    assert main(["status", "--state", str(tmp_path / "none")]) == 2
    assert "expected an agent's state folder" in capsys.readouterr().err


def test_missing_configuration_is_told(tmp_path, capsys):
    assert main(["run", "--config", str(tmp_path / "agent.toml")]) == 2
    said = capsys.readouterr()
    assert "agent.toml" in said.err
    assert said.out == ""


def test_all_mistakes_of_a_configuration_are_told_at_once(config, capsys):
    config.write_text(config.read_text() + '[haed]\nname = "lr"\n[training]\nthreads = -1\n')
    assert main(["run", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "haed: unknown key; did you mean 'head'?" in said
    assert "training.threads = -1" in said


def test_typo_in_the_kind_of_data_is_told_at_start_not_in_the_first_round(config, capsys):
    config.write_text(config.read_text().replace("digits:", "digit:"))
    assert main(["run", "--config", str(config), "--no-wait"]) == 2
    assert "did you mean 'digits'?" in capsys.readouterr().err


def test_broker_away_without_waiting_exits_with_75(config, capsys):
    assert main(["run", "--config", str(config), "--no-wait"]) == 75
    said = capsys.readouterr()
    assert "mqtt://127.0.0.1:1" in said.err
    assert "Traceback" not in said.err


def test_error_with_json_is_one_object(config, capsys):
    assert main(["run", "--config", str(config), "--no-wait", "--json"]) == 75
    found = json.loads(capsys.readouterr().out)["error"]
    assert (found["kind"], found["exit_code"]) == ("BrokerAway", 75)


def test_second_agent_on_a_state_folder_is_refused(config, capsys):
    with folder_lock(config.parent / "state", "edge-agent porch"):
        assert main(["run", "--config", str(config), "--no-wait"]) == 1
    assert "is in use by edge-agent porch" in capsys.readouterr().err


def test_status_of_an_agent_that_never_ran(config, capsys):
    assert main(["status", "--config", str(config)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^id +porch$", said, re.MULTILINE)
    assert re.search(r"^running +no$", said, re.MULTILINE)
    assert re.search(r"^head +–$", said, re.MULTILINE)
    assert not (config.parent / "state").exists(), "looking makes nothing"


def test_status_tells_what_a_running_agent_wrote(config, capsys):
    state = config.parent / "state"
    write_json(state / "status.json", {"tier": "head", "welcomed": True, "working": False, "bundle_id": "ab"})
    write_json(state / "head" / "head.json", {"head": "lr", "metrics": {"acc.personal": 0.9026548, "n_test": 113}})
    with folder_lock(state, "edge-agent porch"):
        assert main(["status", "--config", str(config)]) == 0
        said = capsys.readouterr().out
        assert main(["status", "--config", str(config), "--json"]) == 0
    assert re.search(r"^running +yes$", said, re.MULTILINE)
    assert re.search(r"^acc.personal +90.3 %$", said, re.MULTILINE)
    found = json.loads(capsys.readouterr().out)
    assert (found["running"], found["head"], found["metrics"]["n_test"]) == (True, "lr", 113)


def test_status_shows_the_broker_of_a_running_agent_and_which_others_it_left(config, capsys):
    state = config.parent / "state"
    left = [{"url": "mqtts://a", "reason": "its certificate is not trusted"}]
    connection = {"url": "mqtts://b", "since": "2026-11-28T04:00:00+00:00", "left": left}
    write_json(state / "status.json", {"tier": "head", "condition": "ok", "broker": connection})
    with folder_lock(state, "edge-agent porch"):
        assert status_of(config, capsys)["broker"] == connection
        main(["status", "--config", str(config)])
    line = r"^broker +mqtts://b since 2026-11-28 04:00:00 UTC; not mqtts://a: its certificate is not trusted$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
    assert status_of(config, capsys)["broker"] is None, "no agent runs"


@pytest.mark.parametrize("version, is_shown", [("0.0.7", True), (__version__, False), (None, False)])
def test_status_names_the_version_that_runs_where_it_is_not_that_of_the_command(config, capsys, version, is_shown):
    """After an upgrade whose link was not set, nothing said that the old version still ran."""
    state = config.parent / "state"
    write_json(state / "status.json", {"tier": "head", "condition": "ok", "version": version})
    with folder_lock(state, "edge-agent porch"):
        assert status_of(config, capsys)["version"] == version
        main(["status", "--config", str(config)])
    note = f"version 0.0.7 runs, this command is of version {__version__}: restart the agent"
    assert (note in capsys.readouterr().out) is is_shown
    assert status_of(config, capsys)["version"] is None, "no agent runs"


def test_status_says_why_a_fit_failed_and_when_it_is_tried_again(config, capsys):
    state = config.parent / "state"
    refit = {"tries": 3, "reason": "DataError: npz:day.npz: no such file", "next_try": "2026-01-01T12:00:00+00:00"}
    write_json(state / "status.json", {"tier": "head", "refit": refit})
    with folder_lock(state, "edge-agent porch"):
        main(["status", "--config", str(config)])
        said = capsys.readouterr().out
        assert status_of(config, capsys)["refit"] == refit
    expected = "failed 3 times, next try 2026-01-01T12:00:00+00:00: DataError: npz:day.npz: no such file"
    assert re.search(rf"^refit +{re.escape(expected)}$", said, re.MULTILINE)
    assert status_of(config, capsys)["refit"] is None, "no agent runs that would try"


def status_of(config: Path, capsys) -> dict:
    capsys.readouterr()
    main(["status", "--config", str(config), "--json"])
    return json.loads(capsys.readouterr().out)


def fitted_for(state: Path, bundle, accuracy: float) -> None:
    """As an agent leaves its state folder when it has fitted a head for a bundle."""
    card = {"head": "lr", "fingerprint": bundle.manifest.variants["fp32"].fingerprint}
    write_json(state / "head" / "head.json", {**card, "metrics": {"acc.personal": accuracy}})
    said = {"tier": "head", "welcomed": True, "working": True, "waits_for": None, "condition": "ok"}
    write_json(state / "status.json", {**said, "bundle_id": bundle.manifest.bundle_id, "job": {"run": "run-0001"}})


def test_status_shows_what_was_imported_or_rolled_back_to_while_no_agent_runs(config, make_bundle, capsys):
    """It went on to show the bundle, head and accuracy of the agent's last words."""
    state = config.parent / "state"
    old = make_bundle("old.hwb", seed=1)
    new = make_bundle("new.hwb", seed=2)
    assert main(["import", str(old.path), "--state", str(state)]) == 0
    fitted_for(state, old, 0.75)
    found = status_of(config, capsys)
    assert (found["bundle_id"], found["head"]) == (old.manifest.bundle_id, "lr")
    assert found["metrics"] == {"acc.personal": 0.75}
    assert (found["welcomed"], found["working"], found["job"], found["waits_for"]) == (False, False, None, None)

    assert main(["import", str(new.path), "--state", str(state)]) == 0
    found = status_of(config, capsys)
    assert (found["bundle_id"], found["head"], found["metrics"]) == (new.manifest.bundle_id, None, None)
    assert found["waits_for"] == "'edge-agent run', which fits a head for this bundle"
    assert f"by hand from bundle {old.manifest.bundle_id[:12]}" in found["rolled_back"]

    fitted_for(state, new, 0.5)
    assert main(["rollback", "--state", str(state)]) == 0
    found = status_of(config, capsys)
    assert (found["bundle_id"], found["head"], found["metrics"]) == (old.manifest.bundle_id, None, None)
    assert found["rolled_back"] is None, "the release that was rolled back from is there again"


def test_status_after_a_misspelt_head_name_shows_what_is_known(config, make_bundle, capsys):
    """Tier, federation, encoder and bundle were dashes beside the fault."""
    state = config.parent / "state"
    made = make_bundle("b.hwb")
    assert main(["import", str(made.path), "--state", str(state)]) == 0
    fitted_for(state, made, 0.75)
    write_json(state / "status.json", {"tier": "head", "federation_id": "f" * 32, "welcomed": True, "condition": "ok"})
    config.write_text(config.read_text() + '\n[head]\nname = "logistc"\n')
    assert main(["run", "--config", str(config), "--no-wait"]) == 2
    found = status_of(config, capsys)
    assert (found["tier"], found["federation_id"]) == ("head", "f" * 32)
    assert (found["bundle_id"], found["metrics"]) == (made.manifest.bundle_id, {"acc.personal": 0.75})
    assert found["encoder"] == {"name": made.manifest.task.encoder, "features": 24, "method": "fedavg"}
    assert (found["condition"], found["fault"]["error"], found["fault"]["kind"]) == ("fault", "UnknownName", "start")
    assert found["fault"]["remedy"] == "correct the agent's configuration and restart the agent"


def test_status_of_a_damaged_bundle_is_a_fault_with_its_remedy(config, make_bundle, capsys):
    state = config.parent / "state"
    assert main(["import", str(make_bundle("b.hwb").path), "--state", str(state)]) == 0
    (manifest,) = (state / "bundles").glob("*/manifest.json")
    manifest.write_text("{")
    found = status_of(config, capsys)
    assert (found["tier"], found["condition"], found["fault"]["kind"]) == ("head", "fault", "bundle")
    assert main(["status", "--config", str(config)]) == 1


@pytest.fixture
def pinnable(config, make_bundle, capsys):
    """An agent whose bundle came by release 7."""
    state = config.parent / "state"
    made = make_bundle("a.hwb")
    install(made.path, state / "bundles")
    about = {"run": "run-0001", "bundle_id": made.manifest.bundle_id, "release": 7, "federation": "ab" * 16}
    ReleaseRecord(state).note_installed(
        Install(**about, blob={"digest": "ab" * 32, "size_bytes": 1, "chunk_bytes": 1024})
    )
    return state


def test_status_names_the_release_of_the_bundle_and_shows_of_the_metrics_what_is_of_use(config, pinnable, capsys):
    """They were 20 lines of internal names, such as better_alone 0.000 and norm_inputs 0."""
    bundle = current_id(pinnable / "bundles")
    metrics = {
        "acc.personal": 0.75,
        "acc.global": None,
        "acc.local": 0.5,
        "local_model": "raw inputs + lr",
        "better_alone": 0.0,
        "norm_inputs": 0,
        "n_train": 60,
        "n_test": 20,
        "one_class": 0.0,
        "no_global": "the bundle has no shared classifier",
        "unknown_rate": 0.05,
        "false_alarms": 0.1,
        "cv.lr": 0.7,
    }
    fingerprints = [one.fingerprint for one in current_manifest(pinnable / "bundles").variants.values()]
    write_json(pinnable / "head" / "head.json", {"head": "lr", "metrics": metrics, "fingerprint": fingerprints[0]})
    write_json(pinnable / "status.json", {"candidate": {"bundle_id": bundle, "release": 7, "state": "is tried"}})
    with folder_lock(pinnable, "edge-agent porch"):
        assert main(["status", "--config", str(config)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert status_of(config, capsys)["metrics"] == metrics
    names = [line.split("  ")[0] for line in lines]
    assert f"{bundle[:12]}, release 7" in lines[names.index("bundle_id")]
    assert not {"candidate", "rolled_back", "refused", "pinned", "metrics"} & {*names}
    begin = names.index("head") + 1
    assert [" ".join(line.split()) for line in lines[begin : begin + 5]] == [
        "acc.personal 75.0 %",
        "acc.global – (the bundle has no shared classifier)",
        "acc.local 50.0 % raw inputs + lr",
        "learned from 60 samples to fit, 20 held out",
        "unknown inputs false alarms 5.0 % asked for, 10.0 % of the held-out samples",
    ]
    assert "0.000" not in "".join(lines)


def test_status_of_an_offline_device_names_what_can_be_done_there(config, make_bundle, capsys):
    """It said 'commands not authenticated; enroll the agent' where no agent is meant to run."""
    state = config.parent / "offline"
    made = make_bundle("b.hwb")
    assert main(["import", str(made.path), "--state", str(state)]) == 0
    capsys.readouterr()
    assert main(["status", "--state", str(state)]) == 0
    said = capsys.readouterr().out
    assert "authenticated" not in said
    assert f"'edge-agent add --state {state} --label NAME FILE ...' fits a head for this bundle" in said
    write_json(state / "status.json", {"tier": "head", "condition": "ok"})
    assert main(["status", "--state", str(state)]) == 0
    assert "not authenticated" in capsys.readouterr().out


def test_pin_needs_no_reason(config, pinnable, capsys, monkeypatch):
    monkeypatch.chdir(config.parent)
    assert main(["pin"]) == 0
    assert ", without end: pinned on the device" in capsys.readouterr().out


def test_pin_takes_the_agents_file_and_says_what_it_replaces(config, pinnable, capsys, monkeypatch):
    monkeypatch.chdir(config.parent)
    until = "2099-11-30T00:00+00:00"
    assert main(["pin", "--reason", "first\n\x1b[31mred", "--until", "2099-11-30"]) == 0
    said = capsys.readouterr().out
    assert f", until {until}: first  [31mred" in said
    assert "'edge-agent unpin' ends that" in said
    assert main(["pin", "--state", str(pinnable), "--reason", "again"]) == 0
    said = capsys.readouterr().out
    assert f"until {until}: first" in said
    assert f"'edge-agent unpin --state {pinnable}' ends that" in said
    assert main(["unpin", "--config", str(config)]) == 0
    assert "takes what is released" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (("pin", "--reason", " \n"), "--reason is empty"),
        (("pin", "--config", "none.toml", "--reason", "x"), "(--config FILE) or its state folder (--state DIR)"),
        (("rollback", "--config", "none.toml"), "(--config FILE) or its state folder (--state DIR)"),
    ],
)
def test_what_the_owner_must_name(config, pinnable, capsys, monkeypatch, words, message):
    monkeypatch.chdir(config.parent)
    assert main([*words]) == 2
    assert message in capsys.readouterr().err

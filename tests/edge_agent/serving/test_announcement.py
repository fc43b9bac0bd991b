"""What `edge-agent status` says of a server: only while it lives."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading

from serving_site import fill_state, png, settings_for_tests, square

from edge_agent.cli import main
from edge_agent.cli.where import config_of_folder
from edge_agent.serving.announcement import announced, find_server
from edge_agent.serving.pair_source import StatePair
from edge_agent.serving.service import Device, IoSettings, serving
from edge_agent.serving.sources.folder import FolderSource

WAIT_S = 60


def test_a_server_is_found_while_it_runs_and_no_longer(tmp_path):
    assert find_server(tmp_path) is None
    with announced(tmp_path, "http://127.0.0.1:8480/", now=lambda: 5.0):
        server = find_server(tmp_path)
        assert (server.url, server.since) == ("http://127.0.0.1:8480/", 5.0)
        with announced(tmp_path, "http://127.0.0.1:9999/"):  # a second one answers as well, and has no record
            assert find_server(tmp_path).url == "http://127.0.0.1:8480/"
    assert find_server(tmp_path) is None


def test_the_states_of_sources_are_in_the_record_from_the_start_and_after_each_change(make_bundle, tmp_path, capsys):
    state = tmp_path / "device"
    fill_state(state, make_bundle(global_head=True).path, tmp_path / "cache")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    settings = settings_for_tests()
    io = IoSettings(sources=(FolderSource(inbox),), every_s=0.0)
    device = Device(config_of_folder(state))
    pause = threading.Event()

    def source():
        return find_server(state).sources[0]

    with serving(StatePair(state), settings, device, io, lambda _service: None):
        assert source().name == "folder inbox"
        # Files that are there when the folder is opened do not count, so one more is written until one is answered.
        for number in itertools.count():
            if source().condition == "ok":
                break
            (inbox / f"{number}.png").write_bytes(png(square("red")))
            pause.wait(0.1)
        inbox.rename(tmp_path / "away")
        while source().condition != "lost":
            pause.wait(0.01)
        assert "the folder cannot be read" in source().reason
        assert main(["status", "--state", str(state)]) == 0
        assert "folder inbox lost since " in capsys.readouterr().out
    assert find_server(state) is None


def test_a_record_of_an_earlier_version_has_no_sources(tmp_path):
    with announced(tmp_path, "http://127.0.0.1:8480/"):
        (tmp_path / "serve/server.json").write_text('{"url": "http://127.0.0.1:1/", "since": 5.0}', encoding="utf-8")
        assert find_server(tmp_path).sources == ()


def test_without_a_state_folder_no_record_is_kept():
    with announced(None, "http://127.0.0.1:8480/"):
        pass


def test_a_damaged_record_and_a_folder_that_is_none_are_no_server(tmp_path):
    with announced(tmp_path, "http://127.0.0.1:8480/"):
        (tmp_path / "serve/server.json").write_text("{", encoding="utf-8")
        assert find_server(tmp_path) is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "serve").write_text("a file", encoding="utf-8")
    with announced(other, "http://127.0.0.1:8480/"):
        assert find_server(other) is None


def test_the_status_of_a_device_says_where_it_answers_until_the_server_is_killed(make_bundle, tmp_path, capsys):
    state = tmp_path / "device"
    fill_state(state, make_bundle(global_head=True).path, tmp_path / "cache")
    command = [sys.executable, "-m", "edge_agent", "serve", "--state", str(state), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            started = json.loads(server.stdout.readline())
            assert main(["status", "--state", str(state), "--json"]) == 0
            serves = json.loads(capsys.readouterr().out)["serves"]
            assert serves["url"] == started["url"]
            assert started["token"] not in json.dumps(serves)
            assert main(["status", "--state", str(state)]) == 0
            assert f"answers at {started['url']} since" in capsys.readouterr().out
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait(WAIT_S)
    assert main(["status", "--state", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serves"] is None

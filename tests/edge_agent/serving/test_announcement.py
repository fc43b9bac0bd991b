"""What `edge-agent status` says of a server: only while it lives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from serving_site import fill_state

from edge_agent.cli import main
from edge_agent.serving.announcement import announced, find_server

WAIT_S = 60


def test_a_server_is_found_while_it_runs_and_no_longer(tmp_path):
    assert find_server(tmp_path) is None
    with announced(tmp_path, "http://127.0.0.1:8480/", now=lambda: 5.0):
        server = find_server(tmp_path)
        assert (server.url, server.since) == ("http://127.0.0.1:8480/", 5.0)
        with announced(tmp_path, "http://127.0.0.1:9999/"):  # a second one answers as well, and has no record
            assert find_server(tmp_path).url == "http://127.0.0.1:8480/"
    assert find_server(tmp_path) is None


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

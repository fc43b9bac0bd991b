"""``edge-agent serve`` as a program: it answers until it is stopped, and again after it was killed."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import subprocess
import sys
import threading

import pytest
from serving_site import fill_state, fit_squares, png, square

from edge_agent.cli import main

STARTED_S = 60
RED = png(square("red"))


@pytest.fixture
def start():
    """A function that starts the command and returns the process and what it says when it answers."""
    processes = []

    def run(*arguments):
        command = [sys.executable, "-m", "edge_agent", "serve", "--port", "0", "--json", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stdout.readline()
        assert line, f"it has ended with {process.wait(STARTED_S)}"
        return process, json.loads(line)

    yield run
    for process in processes:
        process.kill()
        process.wait(STARTED_S)
        process.stdout.close()


def port_of(started):
    return int(started["url"].rstrip("/").rpartition(":")[2])


def classify(started):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(started), timeout=STARTED_S)
    connection.request("POST", "/classify", RED)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def test_it_answers_until_it_is_stopped(start, make_bundle, tmp_path):
    bundle = make_bundle().path
    head = fit_squares(bundle, tmp_path / "head", tmp_path / "cache")
    process, started = start("--bundle", bundle, "--head", head, "--cache", tmp_path / "cache")
    assert sorted(started["pair"]["classes"]) == ["blue", "green", "red"]
    assert classify(started)["class"] == "red"
    assert started["page"] == f"{started['url']}#token={started['token']}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(STARTED_S) == 0


def test_killed_it_answers_again_with_the_same_pair_and_token(start, make_bundle, tmp_path):
    fill_state(tmp_path / "state", make_bundle().path, tmp_path / "cache")
    process, before = start("--state", tmp_path / "state")
    answered = classify(before)
    process.kill()
    process.wait(STARTED_S)
    _, after = start("--state", tmp_path / "state")
    again = classify(after)
    assert after["token"] == before["token"]
    assert {**again, "ms": None} == {**answered, "ms": None}


def test_a_new_head_is_taken_while_it_runs(start, make_bundle, tmp_path):
    state = tmp_path / "state"
    fill_state(state, make_bundle().path, tmp_path / "cache")
    process, started = start("--state", state)
    before = classify(started)
    fit_squares(make_bundle().path, state / "head", tmp_path / "cache", head="ridge")
    # Progress is what counts: the process lives and answers, until it answers with the new head.
    while classify(started)["head"] == before["head"]:
        assert process.poll() is None
        threading.Event().wait(0.05)


def test_what_it_prints_for_other_machines_can_be_used_as_it_is(make_bundle, tmp_path):
    bundle = make_bundle(global_head=True).path
    command = [sys.executable, "-m", "edge_agent", "serve", "--port", "0", "--host", "0.0.0.0"]
    command += ["--bundle", str(bundle), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            rows = [process.stdout.readline().split(maxsplit=1) for _ in range(4)]
        finally:
            process.terminate()
            process.communicate(timeout=STARTED_S)
    printed = dict(rows)
    url, _, token = printed["page"].strip().partition("#token=")
    curl = shlex.split(printed["try"])
    assert curl == ["curl", "-H", f"Authorization: Bearer {token}", "--data-binary", "@FILE", f"{url}classify"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--state", "nowhere"], "nowhere: it is not there"),
        (["--bundle", "nowhere"], "nowhere: it is not there"),
        (["--config", "nowhere.toml"], "nowhere.toml: it is not there"),
        (
            [],
            "agent.toml: it is not there; name the agent's file (--config FILE) or its state folder (--state DIR), or",
        ),
        ([], "a head that 'edge-agent fit' has saved (--head DIR)"),
        (["--state", ".", "--head", "x"], "--head goes with --bundle"),
        (["--bundle", "b.hwb", "--port", "70000", "--vote", "0"], "port = 70000"),
        (["--bundle", "b.hwb", "--port", "70000", "--vote", "0"], "vote = 0"),
        (["--bundle", "b.hwb", "--mqtt", "http://x"], "is not mqtt://host"),
        (["--bundle", "b.hwb", "--camera", "webcam"], "expected auto, rpicam"),
        (["--bundle", "b.hwb", "--sound", "rate=1"], "rate"),
    ],
)
def test_mistakes_are_named(make_bundle, tmp_path, monkeypatch, capsys, arguments, says):
    make_bundle(global_head=True)
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments, "--cache", str(tmp_path / "cache")]) == 2
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_named(start, make_bundle, tmp_path, capsys):
    bundle = make_bundle(global_head=True).path
    _, started = start("--bundle", bundle, "--cache", tmp_path / "cache")
    port = port_of(started)
    assert main(["serve", "--bundle", str(bundle), "--cache", str(tmp_path / "cache"), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: cannot be listened on" in capsys.readouterr().err

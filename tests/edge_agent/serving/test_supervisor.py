"""The serving process that the agent supervises: it runs while the agent does, whatever happens to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading

import pytest
from serving_site import fill_state, png, square

from edge_agent.agent.app import _start_serving
from edge_agent.cli.where import config_of_folder
from edge_agent.core.config import AgentConfig, ServeConfig, load
from edge_agent.serving import supervisor
from edge_agent.serving.announcement import find_server
from edge_agent.serving.supervisor import ServingSupervisor

RED = png(square("red"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


@pytest.fixture
def config(bundle_path, tmp_path):
    """A device with a pair in use, and answers at a free port."""
    fill_state(tmp_path / "state", bundle_path, tmp_path / "cache")
    serve = ServeConfig(port=free_port())
    return config_of_folder(tmp_path / "state").model_copy(update={"serve": serve})


@pytest.fixture
def answers(config, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.02)
    running = ServingSupervisor(config)
    running.start()
    yield running
    running.close()


def test_the_status_of_the_device_says_where_it_answers(answers, config):
    classify(config.serve.port)
    assert find_server(config.state).url == f"http://127.0.0.1:{config.serve.port}/"


def test_a_process_that_ends_together_with_the_agent_is_no_failure(config, caplog):
    """Ctrl+C reaches the whole group, and the process ends a moment before the agent closes it."""
    running = ServingSupervisor(config)
    running.start()
    classify(config.serve.port)
    child = running._child
    child.terminate()
    child.wait()
    running.close()
    assert "answers_ended" not in caplog.text


def classify(port):
    """The answer at a port, once somebody answers there."""
    pause = threading.Event()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/classify", RED)
            return json.loads(connection.getresponse().read())
        except OSError:
            pause.wait(0.02)
        finally:
            connection.close()


def test_it_answers_again_after_it_was_killed_and_ends_with_the_agent(answers, config):
    port = config.serve.port
    before = classify(port)
    assert before["class"] == "red"
    first = answers._child.pid
    os.kill(first, signal.SIGKILL)
    pause = threading.Event()
    while answers._child is None or answers._child.pid == first:
        pause.wait(0.02)
    after = classify(port)
    assert {**after, "ms": None} == {**before, "ms": None}
    answers.close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_an_agent_without_the_table_starts_nothing(config):
    assert _start_serving(config.model_copy(update={"serve": None})) is None


def test_the_table_of_the_file_is_read_with_paths_that_count_from_it(tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(
        '[data]\nsource = "images:photos"\n[serve]\nport = 9000\ncamera = ["auto"]\nwatch = ["in"]\nvote = 3\n'
    )
    serve = load(AgentConfig, path).serve
    assert (serve.port, serve.camera, serve.watch, serve.vote) == (9000, ("auto",), (tmp_path / "in",), 3)
    assert serve.host == "127.0.0.1"

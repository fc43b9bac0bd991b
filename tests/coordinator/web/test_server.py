"""The web view as a process beside a coordinator: it restarts, ends with its owner, and bears slow and many clients."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from web_site import agent_status

from coordinator.config import CoordinatorConfig, WebConfig
from coordinator.journal.entries import fact_of
from coordinator.journal.store import utc_now
from coordinator.state.status_file import read_status
from coordinator.state.store import StateFolder
from coordinator.web import connections
from coordinator.web.access import Access, token_path
from coordinator.web.connections import MOST_CONNECTIONS
from coordinator.web.health import is_fresh
from coordinator.web.server import Settings, WebProcess, listening, login_text, serve
from edge_agent.core.child_process import module_command

LIMIT_S = 30.0
TASK = {
    "class_names": ["a", "b"],
    "encoder": "small_cnn",
    "input": {"kind": "image", "channels": 1, "height": 8, "width": 8},
}


class Running:
    """The view as a child process of this one."""

    def __init__(self, site, **web):
        self.ready = threading.Event()
        given = Settings(site.path, WebConfig(**{"listen": "127.0.0.1:0", **web}))
        self.process = WebProcess(given, lambda _: self.ready.set())

    def __enter__(self):
        self.process.start()
        assert self.ready.wait(LIMIT_S)
        return self

    def __exit__(self, *_):
        self.process.stop()

    @property
    def port(self):
        return int(self.process.url.rsplit(":", 1)[1].strip("/"))

    def get(self, path, timeout_s=LIMIT_S):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def until(self, path, status=200):
        """Ask again while the port is closed; the process is watched, not the clock."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if self.get(path)[0] == status:
                    return
            threading.Event().wait(0.05)
        raise AssertionError(f"{path} did not answer {status}")

    def stream(self, topic="fleet"):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        connection.sendall(f"GET /events?topic={topic}&seen= HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return connection


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.05)


def test_killed_process_is_restarted_at_its_port(site):
    site.status([agent_status("a")])
    with Running(site) as view:
        port = view.port
        pid = view.process.pid
        assert b'href="/agent?id=a"' in view.get("/")[1]
        os.kill(pid, signal.SIGKILL)
        view.until("/")
        assert (view.port, view.process.pid == pid) == (port, False)


def test_stream_brings_news_of_a_coordinator_that_was_restarted(site):
    with Running(site) as view, contextlib.closing(view.stream()) as stream:
        received = b""
        while received.count(b"event: news") < 1:
            received += stream.recv(4096)
        site.journal.append(fact_of("coordinator_started", {"federation": "f" * 32, "epoch": 2, "boot": "c"}))
        site.status([agent_status("new")])
        while received.count(b"event: news") < 2:
            received += stream.recv(4096)
        assert b'href="/agent?id=new"' in view.get("/")[1]


def test_streams_and_process_end_at_once_with_their_owner(site):
    code = (
        "import sys, threading; from pathlib import Path; from coordinator.config import WebConfig; "
        "from coordinator.web.server import Settings, WebProcess; "
        "view = WebProcess(Settings(Path(sys.argv[1]), WebConfig(listen='127.0.0.1:0')), "
        "lambda url: print(url, view.pid, flush=True)); view.start(); threading.Event().wait()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(site.path)], stdout=subprocess.PIPE, text=True)
    url, pid = owner.stdout.readline().split()
    with contextlib.closing(
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1][:-1])), LIMIT_S)
    ) as stream:
        stream.sendall(b"GET /events?topic=fleet&seen= HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert stream.recv(4096)
        owner.kill()
        owner.wait(LIMIT_S)
        owner.stdout.close()
        with contextlib.suppress(ConnectionResetError):
            while stream.recv(4096):
                pass
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and Path(f"/proc/{pid}").exists():
        threading.Event().wait(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_ten_clients_that_read_nothing_and_a_flood_leave_pages_to_others(site):
    site.run(5)
    site.status([agent_status(f"a{number}") for number in range(100)])
    with Running(site) as view:
        slow = [view.stream("fleet") for _ in range(10)]
        half = [socket.create_connection(("127.0.0.1", view.port), timeout=LIMIT_S) for _ in range(20)]
        for connection in half:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 1000)
        try:
            flood = [threading.Thread(target=lambda: [view.get("/") for _ in range(20)]) for _ in range(8)]
            for thread in flood:
                thread.start()
            assert view.get("/run?id=run-0001")[0] == 200
            for thread in flood:
                thread.join()
            assert view.get("/")[0] == 200
        finally:
            for connection in (*slow, *half):
                connection.close()


def test_idle_connections_and_half_requests_make_room_for_others(site):
    site.status([])
    with Running(site) as running, contextlib.ExitStack() as opened:
        for number in range(MOST_CONNECTIONS + 40):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            if number % 2:
                one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # its end never comes
        assert running.get("/")[0] == 200


UNFINISHED = (
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\ntoken="
)
"""A form whose end never comes."""

PIPELINED = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + UNFINISHED


@pytest.mark.parametrize("count", [MOST_CONNECTIONS - 1, MOST_CONNECTIONS + 44])
def test_unfinished_forms_leave_pages_probes_and_figures_to_others(site, count):
    site.status([])
    with Running(site) as running, contextlib.ExitStack() as opened:
        for _ in range(count):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            one.sendall(UNFINISHED.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
            assert one.recv(100).startswith(b"HTTP/1.1 100"), "the view has to wait for the body from now on"
        answers = [running.get(path)[0] for path in ("/live", "/metrics", "/", "/live")]
    assert answers == [200, 200, 200, 200]
    written = "".join(path.read_text() for path in (site.path / "web").glob("*.log"))
    assert "Traceback" not in written, "anybody could fill the log"


@contextlib.contextmanager
def serving_here(site):
    """The port of a view that serves in a thread of this process."""
    ready = threading.Event()
    stop = threading.Event()
    settings = Settings(site.path, WebConfig(listen="127.0.0.1:0"))
    urls = []
    with listening(settings.web) as at:
        thread = threading.Thread(target=serve, args=(settings, at, lambda url: (urls.append(url), ready.set()), stop))
        thread.start()
        try:
            assert ready.wait(LIMIT_S)
            yield int(urls[0].rsplit(":", 1)[1].strip("/"))
        finally:
            stop.set()
            thread.join(LIMIT_S)


def answered_until_closed(connection):
    """What comes before the other side closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            received += part
    return received


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", UNFINISHED, PIPELINED])
def test_request_that_does_not_arrive_in_time_is_closed(site, monkeypatch, sent):
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    site.status([])
    with serving_here(site) as port, contextlib.closing(socket.create_connection(("127.0.0.1", port), LIMIT_S)) as one:
        one.sendall(sent)
        assert answered_until_closed(one).count(b"HTTP/1.1 200") == (sent == PIPELINED)


def test_probes_are_answered_where_pages_are_refused(site, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 0)
    site.status([])
    answers = {}
    with serving_here(site) as port:
        for path in ("/", "/live", "/ready", "/metrics"):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as one:
                one.request("GET", path)
                answers[path] = one.getresponse().status
    assert answers == {"/": 503, "/live": 200, "/ready": 200, "/metrics": 200}


def test_figures_and_health_are_answered_beside_the_pages(site):
    site.status([agent_status("a")])
    with Running(site) as running:
        assert running.get("/live")[0] == 200
        assert running.get("/ready")[0] == 200
        status, content = running.get("/metrics")
    assert status == 200
    assert any(line.startswith(b"headwater_agents") for line in content.splitlines())


def test_serving_ends_when_it_is_asked_to_with_a_stream_open(site):
    ready = threading.Event()
    stop = threading.Event()
    settings = Settings(site.path, WebConfig(listen="127.0.0.1:0"))
    urls = []
    with listening(settings.web) as at:
        thread = threading.Thread(target=serve, args=(settings, at, lambda url: (urls.append(url), ready.set()), stop))
        thread.start()
        assert ready.wait(LIMIT_S)
        port = int(urls[0].rsplit(":", 1)[1].strip("/"))
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), LIMIT_S)) as stream:
            stream.sendall(b"GET /events?topic=fleet&seen= HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert stream.recv(4096)
            stop.set()
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_view_whose_address_is_taken_starts_when_it_is_free(site, caplog):
    taken = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(taken):
        view = Running(site, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        view.process.start()
        try:
            end = time.monotonic() + LIMIT_S
            while "choose another address" not in caplog.text and time.monotonic() < end:
                threading.Event().wait(0.05)
            assert "web_exited" in caplog.text
            assert "choose another address" in caplog.text
            assert not view.ready.is_set()
            taken.close()
            assert view.ready.wait(LIMIT_S)
        finally:
            view.process.stop()


def test_serve_opens_nothing_where_the_address_of_the_view_is_taken(tmp_path, capsys):
    from coordinator.cli import main

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        config = tmp_path / "coordinator.toml"
        config.write_text(
            f'state = "state"\n[embedded]\nport = 0\n[web]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
            '[task]\nclass_names = ["a", "b"]\nencoder = "small_cnn"\n'
            'input = { kind = "image", channels = 1, height = 32, width = 32 }\n'
        )
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--config", str(config)])
    assert ended.value.code == 2
    assert "choose another address" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_bad_requests_leave_nothing_in_a_log(site):
    with Running(site) as view:
        for _ in range(200):
            with contextlib.closing(socket.create_connection(("127.0.0.1", view.port), LIMIT_S)) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 400")
        logs = [path for path in (site.path / "web").iterdir() if "log" in path.name]
        assert sum(path.stat().st_size for path in logs) == 0


def test_what_the_view_logs_is_in_a_file_of_bounded_size(site):
    site.close()
    site.journal.path.write_bytes(b"no journal")
    with Running(site) as view:
        assert view.get("/metrics")[0] == 200
        logged = (site.path / "web" / "log.jsonl").read_text()
        assert "metrics_without_journal" in logged
        assert (site.path / "web" / "web.log").stat().st_size == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
def test_client_that_has_vanished_is_noticed_after_half_a_minute():
    with listening(WebConfig(listen="127.0.0.1:0")) as at, socket.create_connection(at.getsockname(), LIMIT_S):
        accepted, _ = at.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_login_address_is_printed_once_and_names_the_file_later(site):
    Access.of(site.path)
    token = token_path(site.path).read_text().strip()
    assert login_text(site.path, "http://x/", is_new=True).endswith(f"http://x/login#{token}")
    later = login_text(site.path, "http://x/", is_new=False)
    assert token not in later
    assert str(token_path(site.path)) in later


@pytest.mark.parametrize(
    "web, message",
    [
        ({"listen": "0.0.0.0:8470"}, "has no TLS"),
        ({"listen": "coordinator.example:8470"}, "has no TLS"),
        ({"listen": "127.0.0.1"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "65535"),
        ({"key": "x.pem"}, "key needs cert"),
    ],
)
def test_configuration_that_would_show_the_token_to_a_network_is_refused(web, message):
    with pytest.raises(ValidationError, match=message):
        CoordinatorConfig.model_validate({"task": TASK, "web": web})


@pytest.mark.parametrize(
    "more, secure",
    [
        ({"web": {"listen": "0.0.0.0:1", "insecure": True}}, False),
        ({"web": {"listen": "0.0.0.0:1"}, "identity": {"host": "c.example"}}, True),
        ({"web": {"listen": "127.0.0.1:1"}, "identity": {"host": "c.example"}}, False),
        ({"web": {"listen": "0.0.0.0:1", "cert": "x.pem"}}, True),
    ],
)
def test_on_a_network_the_certificate_of_init_is_used(tmp_path, more, secure):
    config = CoordinatorConfig.model_validate({"task": TASK, "state": str(tmp_path), **more})
    assert (Settings.of(config, config.web, None).cert is not None) is secure


def test_settings_survive_the_way_to_the_child(tmp_path):
    more = {"web": {"listen": "0.0.0.0:1", "hosts": ["x"]}, "identity": {"host": "c.example"}}
    config = CoordinatorConfig.model_validate({"task": TASK, "state": str(tmp_path), **more})
    settings = Settings.of(config, config.web, tmp_path / "coordinator.toml")
    assert Settings.parse(settings.text()) == settings
    assert settings.names == ("x", "c.example")


def test_certificate_of_the_federation_serves_the_view_over_tls(site, tmp_path):
    from coordinator.cli import main

    folder = tmp_path / "fleet"
    with pytest.raises(SystemExit):
        main(["init", str(folder), "--host", "localhost"])
        raise SystemExit
    config = CoordinatorConfig.model_validate(
        {
            "task": TASK,
            "state": str(folder / "state"),
            "identity": {"host": "localhost"},
            "web": {"listen": "0.0.0.0:0"},
        }
    )
    ready = threading.Event()
    stop = threading.Event()
    urls = []
    settings = Settings.of(config, config.web, None)
    with listening(settings.web) as at:
        thread = threading.Thread(target=serve, args=(settings, at, lambda url: (urls.append(url), ready.set()), stop))
        thread.start()
        try:
            assert ready.wait(LIMIT_S)
            assert urls[0].startswith("https://localhost:")
            context = ssl.create_default_context(cafile=str(folder / "state" / "identity" / "ca.pem"))
            port = int(urls[0].rsplit(":", 1)[1].strip("/"))
            connection = http.client.HTTPSConnection("localhost", port, timeout=LIMIT_S, context=context)
            with contextlib.closing(connection):
                connection.request("GET", "/")
                assert connection.getresponse().status == 200
        finally:
            stop.set()
            thread.join(LIMIT_S)


def test_command_shows_a_federation_whose_configuration_init_has_made(tmp_path):
    from coordinator.cli import main

    folder = tmp_path / "fleet"
    with contextlib.suppress(SystemExit):
        main(["init", str(folder), "--host", "localhost"])
    words = module_command(
        "coordinator", "web", "--config", str(folder / "coordinator.toml"), "--listen", "127.0.0.1:0"
    )
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline().startswith(f"web view of {folder / 'state'} at http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_command_shows_a_folder_and_ends_with_ctrl_c(site):
    site.status([agent_status("a")])
    words = module_command("coordinator", "web", "--state", str(site.path), "--listen", "127.0.0.1:0")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            assert b'href="/agent?id=a"' in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        rest = process.stderr.read()
        assert token_path(site.path).read_text().strip() not in line + rest, "stderr is no terminal here"
        assert str(token_path(site.path)) in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def fetched(port, path):
    """Status and content, asked for as a probe does: by an address that is none of the view's names."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("GET", path, headers={} if path == "/" else {"Host": f"10.1.2.3:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def assert_monitored(port):
    """Liveness, readiness and figures of a coordinator that serves."""
    assert fetched(port, "/live") == (200, b'{"live":true}')
    assert fetched(port, "/ready") == (200, b'{"ready":true,"reason":null}')
    status, figures = fetched(port, "/metrics")
    assert status == 200
    assert b"headwater_coordinator_up 1.0" in figures
    assert b"headwater_coordinator_starts_total 1.0" in figures


@pytest.mark.slow
def test_a_standby_that_takes_over_serves_although_the_address_of_its_view_is_taken(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken, contextlib.ExitStack() as stack:
        port = taken.getsockname()[1]
        config = tmp_path / "coordinator.toml"
        config.write_text(
            f'state = "state"\n[embedded]\nport = 0\n[web]\nlisten = "127.0.0.1:{port}"\n'
            '[task]\nclass_names = ["a", "b"]\nencoder = "small_cnn"\n'
            'input = { kind = "image", channels = 1, height = 32, width = 32 }\n'
        )
        first = stack.enter_context(contextlib.ExitStack())
        first.enter_context(StateFolder(tmp_path / "state").open("test"))
        words = module_command("coordinator", "serve", "--standby", "--config", str(config))
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        stack.callback(process.stderr.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        next(line for line in process.stderr if "standing by" in line)
        first.close()  # the coordinator that served is gone
        next(line for line in process.stderr if "serving federation" in line)
        logged = next(line for line in process.stderr if "web_exited" in line)
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another address" in logged
        wait_until(lambda: is_fresh(read_status(tmp_path / "state"), utc_now()))
        assert process.poll() is None
        taken.close()
        next(line for line in process.stderr if f" at http://127.0.0.1:{port}/" in line)
        assert_monitored(port)
        process.terminate()
        assert process.wait(LIMIT_S) == 0


def test_serve_starts_the_view_beside_it_and_ends_it(tmp_path):
    config = tmp_path / "coordinator.toml"
    config.write_text(
        'state = "state"\n[embedded]\nport = 0\n[web]\nlisten = "127.0.0.1:0"\n'
        '[task]\nclass_names = ["a", "b"]\nencoder = "small_cnn"\n'
        'input = { kind = "image", channels = 1, height = 32, width = 32 }\n'
    )
    words = module_command("coordinator", "serve", "--config", str(config))
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        line = next(one for one in process.stderr if " at http://" in one)
        port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
        page = fetched(port, "/")[1].decode()
        assert "No agent was heard yet" in page
        assert "No coordinator is at work" not in page
        assert_monitored(port)
        process.terminate()
        process.stderr.read()
        assert process.wait(LIMIT_S) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), LIMIT_S)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--state", "nowhere"), "no such folder"),
        (("--state", ".", "--listen", "0.0.0.0:1"), "needs TLS"),
        (("--state", ".", "--listen", "x"), "listen"),
    ],
)
def test_command_that_cannot_serve_says_why(arguments, message, tmp_path, monkeypatch, capsys):
    from coordinator.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["web", *arguments])
    assert message in capsys.readouterr().err

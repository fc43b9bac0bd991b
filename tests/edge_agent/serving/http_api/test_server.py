"""Requests in, responses out, under limits; and who may ask."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from serving_site import TOKEN, png, settings_for_tests, square

from edge_agent.core.errors import UsageError
from edge_agent.serving.http_api.access import Guard, host_name, load_or_create_token
from edge_agent.serving.http_api.messages import Access, Route, error_response, json_response
from edge_agent.serving.http_api.server import BodyBudget, HttpLimits, _ConnectionServer, _TimedReader
from edge_agent.serving.service import HttpSettings, Service, find_own_address

RED = png(square("red"))
WAIT_S = 30


@pytest.fixture
def echo(serve_routes):
    """A function that starts a server with a route that answers with what it was sent."""

    def start(limits=None, *, is_local=True, address=("127.0.0.1", 0)):
        def answer(request):
            return json_response({"body": request.body.decode(), "query": dict(request.query), "names": request.names})

        def break_down(_request):
            raise ValueError("a bug")

        routes = [
            Route("POST", "/echo/{name}", Access.ASK, answer),
            Route("GET", "/open", Access.OPEN, lambda _request: json_response({})),
            Route("POST", "/change", Access.CHANGE, answer),
            Route("GET", "/bug", Access.ASK, break_down),
        ]
        return serve_routes(routes, limits, is_local=is_local, address=address)

    return start


def ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response.status, (json.loads(raw) if raw else None), response.headers


def raw_exchange(port, *pieces, wait=True):
    """Send bytes and return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while wait and (part := connection.recv(65536)):
            answer += part
    return answer


def test_a_route_gets_body_query_and_names(echo):
    status, content, headers = ask(echo(), "POST", "/echo/cat?top=3&top=4", b"miau")
    assert (status, content) == (200, {"body": "miau", "query": {"top": "4"}, "names": {"name": "cat"}})
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_unknown_paths_and_methods_are_named(echo):
    server = echo()
    assert ask(server, "GET", "/nowhere")[0] == 404
    status, content, headers = ask(server, "GET", "/echo/x")
    assert (status, headers["Allow"]) == (405, "POST")
    assert "accepts POST, not GET" in content["error"]["message"]


def test_a_bug_is_a_response_and_the_connection_goes_on(echo):
    server = echo()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    for path, status in (("/bug", 500), ("/open", 200)):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()


def test_head_has_no_body(echo):
    server = echo()
    answer = raw_exchange(server.port, b"HEAD /open HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"Content-Length: 2" in head
    assert body == b""


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n", b"413"),
        (b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n", b"413"),
        (b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
        (
            b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"411",
        ),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + (b"A: " + b"b" * 9_000 + b"\r\n") * 5, b"431"),
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /open HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
    ],
)
def test_requests_that_are_too_large_or_malformed_end_the_connection(echo, request_bytes, status):
    server = echo(HttpLimits(body_bytes=1000))
    assert raw_exchange(server.port, request_bytes).split()[1] == status


@pytest.mark.parametrize(
    "line",
    [b"Content-Length : 50", b"no field", b" folded: 1", b"X: a\rContent-Length: 50", b"X: \0", b"X\x0b: 1", b": 1"],
)
def test_a_header_that_a_proxy_may_understand_otherwise_is_refused(echo, line):
    second = b"GET /open HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    first = b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n"
    answer = raw_exchange(echo().port, first + second)
    assert answer.split()[1] == b"400"
    assert answer.count(b"HTTP/1.1 ") == 1


def test_headers_take_little_memory_before_they_have_ended(echo, monkeypatch):
    """Each of 64 connections could hold 100 lines of 64 kB: without a token, 400 MB and three copies of them."""
    read = 0
    real = _TimedReader.readinto

    def counting(reader, buffer):
        nonlocal read
        count = real(reader, buffer)
        read += count
        return count

    monkeypatch.setattr(_TimedReader, "readinto", counting)
    with socket.create_connection(("127.0.0.1", echo().port), timeout=WAIT_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /open HTTP/1.1\r\n" + (b"A: " + b"b" * 60_000 + b"\r\n") * 90)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    assert read < 100_000


def test_a_client_that_asks_first_is_told_to_go_on_only_where_its_body_is_taken(echo):
    server = echo(HttpLimits(body_bytes=1000))
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        head = b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % 2)
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"ab")
        assert b'"body":"ab"' in connection.recv(65536)
        connection.sendall(head % 1001)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_refused_body_is_taken_so_that_its_sender_reads_why(echo):
    server = echo(HttpLimits(body_bytes=1000))
    head = b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
    # Sending all of it first is what simple clients do; a closed connection would end that with an error.
    assert raw_exchange(server.port, head, *[bytes(80_000)] * 100).startswith(b"HTTP/1.1 413")


def test_a_thread_that_cannot_be_started_costs_no_place(echo, monkeypatch):
    server = echo(HttpLimits(connections=2))
    real = threading.Thread.start
    failures = 5

    def start(thread):
        nonlocal failures
        if "process_request" in thread.name and failures:
            failures -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(5):
        assert raw_exchange(server.port) == b""
    assert failures == 0
    assert ask(server, "GET", "/open")[0] == 200


def test_a_body_that_comes_too_slowly_ends_its_connection_alone(echo):
    server = echo(HttpLimits(request_s=0.3))
    head = b"POST /echo/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nab"
    assert raw_exchange(server.port, head) == b""
    assert ask(server, "GET", "/open")[0] == 200


def test_a_connection_without_a_request_is_closed(echo):
    assert raw_exchange(echo(HttpLimits(idle_s=0.2)).port) == b""


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def hold_place(server, path="/echo/x", token=""):
    """Return a connection with a request under way: the server waits for its body."""
    connection = connect(server)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nExpect: 100-continue\r\n"
    connection.sendall(f"{head}Content-Length: 2\r\n\r\n".encode())
    assert connection.recv(100).startswith(b"HTTP/1.1 100")
    return connection


def get(connection, path="/open"):
    """Return whether a request over an open connection is answered, not ended."""
    try:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return connection.recv(1000) != b""
    except ConnectionError:
        return False


def test_more_connections_than_may_are_turned_away_and_others_go_on(echo):
    server = echo(HttpLimits(connections=3))
    held = [hold_place(server) for _ in range(3)]
    assert raw_exchange(server.port).startswith(b"HTTP/1.1 503")
    for connection in held:
        connection.sendall(b"ab")
        assert b'"body":"ab"' in connection.recv(65536)
    # They are idle now, so that one of them makes room.
    assert ask(server, "GET", "/open")[0] == 200
    for connection in held:
        connection.close()


def test_the_connection_that_has_been_idle_longest_makes_room_and_requests_under_way_go_on(echo):
    server = echo(HttpLimits(connections=3))
    with hold_place(server) as busy, connect(server) as first:
        assert get(first)  # it has its place once it has an answer
        with connect(server) as second, connect(server) as third:
            assert get(second)
            assert get(third)
            assert not get(first)
            assert get(second)
            assert get(third)
        busy.sendall(b"ab")
        assert b'"body":"ab"' in busy.recv(65536)


def test_connections_without_the_token_make_room_before_others(echo):
    server = echo(HttpLimits(connections=2), is_local=False)
    with hold_place(server, token=TOKEN) as known, connect(server) as stranger:
        known.sendall(b"ab")
        assert b'"body":"ab"' in known.recv(65536)
        assert get(stranger)  # has been idle for a shorter time
        with connect(server) as other:
            assert get(other)
            assert not get(stranger)
            assert get(known)


def test_idle_clients_keep_nobody_out(echo):
    server = echo(HttpLimits(connections=4))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server))
        # Only connections that are just being opened cannot make room yet.
        while ask(server, "GET", "/open")[0] != 200:
            pass


def test_bodies_share_a_budget():
    budget = BodyBudget(100)
    with budget.take(60) as first, budget.take(60) as second, budget.take(40) as third:
        assert (first, second, third) == (True, False, True)
    with budget.take(100) as all_of_it:
        assert all_of_it


def test_many_clients_that_hang_up_cost_nobody_an_answer(site):
    def hang_up(number):
        with socket.create_connection(("127.0.0.1", site.port), timeout=WAIT_S) as connection:
            head = f"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(RED)}\r\n\r\n"
            connection.sendall(head.encode() + RED[: len(RED) * (number % 3) // 2])

    threads = [threading.Thread(target=hang_up, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    assert site.classify(RED)["class"] == "red"
    for thread in threads:
        thread.join(WAIT_S)
    assert site.classify(RED)["class"] == "red"


# --- who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8480", "[::1]:8480", ""])
def test_this_machine_may_ask_without_a_token(host):
    assert Guard(TOKEN, is_local=True).refuse(Access.ASK, {"host": host}) is None


@pytest.mark.parametrize(
    "is_local, access, headers, status",
    [
        (True, Access.ASK, {"host": "evil.example"}, 421),
        (True, Access.OPEN, {"host": "evil.example"}, 421),
        (True, Access.ASK, {"host": "localhost:1", "origin": "http://evil.example"}, 403),
        (True, Access.ASK, {"host": "localhost:1", "origin": "null"}, 403),
        (True, Access.ASK, {"origin": "null"}, 403),
        (True, Access.ASK, {"host": "localhost:1", "origin": "http://["}, 403),
        (True, Access.ASK, {"host": "localhost:1", "sec-fetch-site": "cross-site"}, 403),
        (True, Access.ASK, {"host": "localhost:1", "sec-fetch-site": "same-origin"}, None),
        (True, Access.OPEN, {"host": "localhost:1", "sec-fetch-site": "cross-site"}, None),
        (True, Access.CHANGE, {"host": "localhost"}, 401),
        (True, Access.CHANGE, {"host": "localhost", "authorization": "Bearer wrong"}, 401),
        (True, Access.CHANGE, {"host": "localhost", "authorization": f"Basic {TOKEN}"}, 401),
        (False, Access.ASK, {"host": "camera.local"}, 401),
        (False, Access.ASK, {"host": "camera.local", "authorization": f"Bearer {TOKEN}é"}, 401),
        (True, Access.CHANGE, {"host": "localhost", "authorization": f"Bearer {TOKEN}"}, None),
        (False, Access.ASK, {"host": "camera.local", "authorization": f"bearer {TOKEN}"}, None),
        (False, Access.OPEN, {"host": "camera.local"}, None),
        (
            True,
            Access.CHANGE,
            {"host": "localhost:1", "origin": "http://localhost:1", "authorization": f"Bearer {TOKEN}"},
            None,
        ),
    ],
)
def test_who_may_ask(is_local, access, headers, status):
    refusal = Guard(TOKEN, is_local).refuse(access, headers)
    assert (None if refusal is None else refusal.status) == status


def test_a_name_that_was_allowed_counts():
    guard = Guard(TOKEN, is_local=True, hosts=frozenset({"porch.local"}))
    assert guard.refuse(Access.ASK, {"host": "porch.local:8480"}) is None


@pytest.mark.parametrize("header, name", [("A.b:1", "a.b"), ("[::1]:80", "::1"), ("", ""), ("[::1", "invalid")])
def test_the_name_in_a_host_header(header, name):
    assert host_name(header) == name


def test_a_token_is_made_once_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "serve" / "token"
    token = load_or_create_token(path)
    assert load_or_create_token(path) == token
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("short")
    with pytest.raises(Exception, match="too short"):
        load_or_create_token(path)


# --- addresses --------------------------------------------------------------------------------------------------------


def test_an_address_in_use_is_named(echo):
    server = echo()
    with pytest.raises(UsageError, match=f"127.0.0.1:{server.port}: cannot be listened on: .*end the other program"):
        echo(address=("127.0.0.1", server.port))


def test_an_address_that_cannot_be_listened_on_has_its_own_remedy(echo, tmp_path, monkeypatch):
    with pytest.raises(UsageError) as refused:
        echo(address=("203.0.113.1", 0))
    assert "name an address of this machine (--host)" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        echo(address=tmp_path / "nodir" / "x.sock")
    assert f"create the folder {tmp_path / 'nodir'}" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        echo(address=tmp_path / ("x" * 200))
    assert "path too long; name another path (--unix)" in str(refused.value)

    def fail(error):
        def raise_error(*_arguments):
            raise error

        monkeypatch.setattr(_ConnectionServer, "server_bind", raise_error)

    fail(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    with pytest.raises(UsageError) as refused:
        echo(address=("nowhere.invalid", 0))
    assert "the host name cannot be resolved; name an address of this machine (--host)" in str(refused.value)
    fail(PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(UsageError) as refused:
        echo(address=("127.0.0.1", 80))
    assert "choose a port from 1024 on" in str(refused.value)


def test_a_unix_socket_serves_its_owner_and_goes_at_the_end(echo, tmp_path):
    path = tmp_path / "s"
    server = echo(address=path)
    assert path.stat().st_mode & 0o777 == 0o660
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(path))
        connection.sendall(b"GET /open HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with pytest.raises(UsageError, match="another program listens"):
        echo(address=path)
    server.close()
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_taken_over_and_other_files_stay(echo, tmp_path):
    left_over = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left_over))
    echo(address=left_over)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(UsageError, match="not a socket"):
        echo(address=precious)
    assert precious.read_text() == "mine"


def test_names_of_any_language_are_sent_as_they_are():
    response = json_response({"class": "Kätzchen …", "file": "a\udcff.png"})
    assert "Kätzchen …".encode() in response.body
    assert json.loads(response.body) == {"class": "Kätzchen …", "file": "a\udcff.png"}


def test_errors_are_json():
    response = error_response(400, "DataError", "no image")
    assert json.loads(response.body) == {"error": {"kind": "DataError", "message": "no image"}}


def test_the_page_of_an_address():
    assert settings_for_tests().url(5) == "http://127.0.0.1:5/"
    assert HttpSettings(("192.0.2.7", 0), TOKEN).url(5) == "http://192.0.2.7:5/"
    assert HttpSettings(Path("/run/x"), TOKEN).url(0) == "unix:/run/x"
    assert HttpSettings(Path("/run/x"), TOKEN).is_local
    assert not HttpSettings(("0.0.0.0", 0), TOKEN).is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_page_of_all_addresses_is_one_that_other_machines_can_open(echo, monkeypatch, host):
    class Network(socket.socket):
        def connect(self, address):
            assert self.type == socket.SOCK_DGRAM
            if ":" in address[0]:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self):
            return ("192.168.1.23", 40000)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Network)
        assert HttpSettings((host, 0), TOKEN).url(5) == "http://192.168.1.23:5/"
    server = echo(is_local=False, address=("0.0.0.0", 0))
    with urllib.request.urlopen(HttpSettings((host, 0), TOKEN).url(server.port) + "open", timeout=WAIT_S) as response:
        assert response.status == 200


def test_a_machine_without_a_network_is_localhost(monkeypatch):
    class NoNetwork(socket.socket):
        def connect(self, _address):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", NoNetwork)
    assert find_own_address("::") == "localhost"


def test_a_service_without_a_pair_is_alive_and_not_ready(serve, tmp_path):
    from edge_agent.serving.pair_source import StatePair

    (tmp_path / "state").mkdir()
    site = serve(StatePair(tmp_path / "state"))
    assert site.ask("GET", "/live")[0] == 200
    status, content, headers = site.ask("GET", "/ready")
    assert (status, headers["retry-after"]) == (503, "5")
    status, content, _ = site.ask("POST", "/classify", RED)
    assert (status, content["error"]["kind"]) == (503, "NotReady")
    assert isinstance(site.service, Service)

"""Clients that come in hundreds, hang up, never read, send a byte now and then; a full disk; curl, Node, a browser."""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
import os
import selectors
import shutil
import socket
import subprocess
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import browser
from full_disk import FullDisk
from serving_site import TOKEN, fill_state, png, square

from edge_agent.cli.where import config_of_folder
from edge_agent.data.collected import Collection
from edge_agent.serving.http_api.messages import Access, Response, Route, json_response
from edge_agent.serving.http_api.server import HttpLimits
from edge_agent.serving.pair_source import StatePair
from edge_agent.serving.refit import Refit
from edge_agent.serving.service import Device

RED = png(square("red"))
WAIT_S = 30
LARGE_BYTES = 16 << 20


@pytest.fixture
def serving(serve_routes):
    """A function that starts a server with a small route, one that takes a body, and one with a large response."""

    def start(limits, address=("127.0.0.1", 0)):
        routes = [
            Route("GET", "/small", Access.OPEN, lambda _request: json_response({})),
            Route("POST", "/body", Access.ASK, lambda request: json_response({"size": len(request.body)})),
            Route("GET", "/large", Access.OPEN, lambda _request: Response(200, bytes(LARGE_BYTES))),
        ]
        return serve_routes(routes, limits, address=address)

    return start


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def is_answered(port):
    """Whether a client gets an answer now, or is turned away because the others have not gone yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", "/small")
        status = connection.getresponse().status
    except ConnectionError:
        return False
    finally:
        connection.close()
    assert status in {200, 503}
    return status == 200


def wait_for_an_answer(port):
    while not is_answered(port):
        threading.Event().wait(0.01)


# --- many clients -----------------------------------------------------------------------------------------------------


def test_two_hundred_clients_with_large_bodies_take_no_more_memory_than_all_bodies_may(serving):
    server = serving(HttpLimits())
    body_bytes = 4 << 20
    most_bodies = HttpLimits().all_bodies_bytes // body_bytes
    head = f"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body_bytes}\r\n\r\n".encode()
    answers = []
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(200):
            client = stack.enter_context(connect(server.port))
            selector.register(client, selectors.EVENT_READ)
            with contextlib.suppress(ConnectionError):  # it was turned away before it has said anything
                client.sendall(head + bytes(1000))
        # Some bodies are waited for; everybody else is told at once, or finds the connection closed.
        while len(answers) < 200 - most_bodies:
            for key, _ in selector.select(WAIT_S):
                selector.unregister(key.fileobj)
                try:
                    answers.append(key.fileobj.recv(65536))
                except ConnectionError:
                    answers.append(b"")
        peak = tracemalloc.get_traced_memory()[1]
    assert all(answer.startswith(b"HTTP/1.1 503 Service Unavailable") for answer in answers if answer)
    assert any(b"too many large requests at once" in answer for answer in answers)
    assert any(b"Retry-After: 1" in answer for answer in answers)
    assert peak < HttpLimits().all_bodies_bytes + (16 << 20)
    wait_for_an_answer(server.port)


def test_two_hundred_clients_at_once_get_an_answer_or_are_turned_away(site):
    outcomes = []
    begin = threading.Barrier(200)

    def ask():
        begin.wait(WAIT_S)
        try:
            outcomes.append(site.ask("POST", "/classify", RED)[0])
        except (ConnectionError, http.client.BadStatusLine):
            outcomes.append(0)

    threads = [threading.Thread(target=ask) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) == 200
    assert set(outcomes) <= {0, 200, 503}
    assert 200 in outcomes
    status = 0
    while status != 200:
        status = site.ask("POST", "/classify", RED)[0]
        assert status in {200, 503}


# --- slow and deaf clients --------------------------------------------------------------------------------------------


def test_a_client_that_never_reads_loses_its_place(serving):
    server = serving(HttpLimits(connections=1, request_s=0.2))
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for_an_answer(server.port)


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"POST /body HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
    ],
)
def test_a_byte_now_and_then_is_no_request(serving, begin):
    server = serving(HttpLimits(request_s=0.2, idle_s=0.2))
    with connect(server.port) as slow:
        slow.sendall(begin)
        slow.setblocking(False)
        ended = False
        while not ended:
            try:
                slow.send(b"x")
                ended = slow.recv(100) == b""
            except BlockingIOError:
                threading.Event().wait(0.01)
            except ConnectionError:
                ended = True
    assert is_answered(server.port)


@pytest.mark.parametrize("sent", [b"POST /bo", b"POST /body HTTP/1.1\r\nContent-Le", None])
def test_a_client_that_hangs_up_leaves_its_place(serving, sent):
    server = serving(HttpLimits(connections=2))
    whole = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n" + bytes(20)
    for _ in range(5):
        with connect(server.port) as client:
            client.sendall(whole if sent is None else sent)
        wait_for_an_answer(server.port)


def test_a_client_that_hangs_up_within_the_response_leaves_its_place(serving):
    server = serving(HttpLimits(connections=1))
    with connect(server.port) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    wait_for_an_answer(server.port)


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_at_any_write_of_a_correction_is_told_and_changes_nothing(serve, bundle_path, tmp_path):
    state = tmp_path / "state"
    fill_state(state, bundle_path, tmp_path / "cache")
    site = serve(StatePair(state), Device(config_of_folder(state)))
    site.service.corrections._refit = lambda _config: Refit("lr", 3, 1.0, 3, 3, 3)
    samples = Collection(state / "samples")
    head_id = site.classify(RED)["head_id"]

    def correct():
        body = json.dumps({"number": 1, "label": "brick"}).encode()
        return site.ask("POST", "/correct", body, {"Authorization": f"Bearer {TOKEN}"})

    failures = 0
    while True:
        with FullDisk(state, failures).mounted() as disk:
            status, content, _ = correct()
        if disk.has_room:
            break
        failures += 1
        assert (status, content["error"]["kind"]) == (507, "Disk")
        assert os.strerror(errno.ENOSPC).lower() in content["error"]["message"].lower()
        # Of the last write, the sync of the folder, the sample is there already, and may be given again.
        is_last = disk.writes[-1] == "fsync /samples" and "replace /samples/index.json" in disk.writes
        assert len(samples.index().samples) == is_last
        assert not [path for path in state.rglob("*") if path.name.endswith(".tmp")]
        assert site.classify(RED)["head_id"] == head_id
        assert site.ask("GET", "/history")[1]["answers"][0]["corrected"] == ""
    assert failures > 4
    assert (status, content["added"] + content["known"]) == (200, 1)
    assert [path.stem for path in samples.folder.glob("*.safetensors")] == [samples.index().samples[0].id]


# --- clients as people have them --------------------------------------------------------------------------------------


def run(*command, stdin=b""):
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture
def curl():
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")

    def ask(*arguments, stdin=b""):
        *content, status = run(program, "-sS", "-w", "\n%{http_code}", *arguments, stdin=stdin).rsplit(b"\n", 1)
        return int(status), b"".join(content)

    return ask


def test_curl_asks_and_reads_why_it_was_refused(site, curl, tmp_path):
    address = f"http://127.0.0.1:{site.port}"
    picture = tmp_path / "red.png"
    picture.write_bytes(RED)
    status, raw = curl("--data-binary", f"@{picture}", f"{address}/classify")
    assert (status, json.loads(raw)["class"]) == (200, "red")
    # Of a large body it waits for the word to go on, here for longer than the whole test may take.
    large = tmp_path / "large.png"
    large.write_bytes(RED + bytes(2 << 20))
    status, raw = curl("--expect100-timeout", "60", "--data-binary", f"@{large}", f"{address}/classify")
    assert (status, json.loads(raw)["class"]) == (200, "red")
    # It asks first, and sends nothing; or it sends without asking, and reads why all the same.
    large.write_bytes(bytes(17 << 20))
    for asks in (("--expect100-timeout", "60"), ("-H", "Expect:")):
        status, raw = curl(*asks, "--data-binary", f"@{large}", f"{address}/classify")
        assert (status, json.loads(raw)["error"]["kind"]) == (413, "TooLarge")
    status, raw = curl("-T", "-", "-X", "POST", f"{address}/classify", stdin=RED)
    assert (status, json.loads(raw)["error"]["kind"]) == (411, "NoLength")
    assert curl("-H", "Host: evil.example", f"{address}/status")[0] == 421
    assert curl("-H", "Origin: http://evil.example", f"{address}/status")[0] == 403
    assert curl("--path-as-is", f"{address}/history/../../etc/passwd/picture")[0] == 404
    assert curl("--http1.0", f"{address}/live")[0] == 200


def test_curl_asks_a_unix_socket(serving, curl, tmp_path):
    path = tmp_path / "s"
    serving(HttpLimits(), path)
    assert curl("--unix-socket", str(path), "--data-binary", "abc", "http://localhost/body") == (200, b'{"size":3}')


NODE = """
const [address, token] = process.argv.slice(1);
const image = Buffer.from(process.env.IMAGE, "base64");
const said = [];
const ask = async (path, options) => {
  const response = await fetch(address + path, options);
  const content = await response.json();
  said.push([response.status, content.error ? content.error.kind : content.class ?? ""]);
};
(async () => {
  await ask("/classify", { method: "POST", body: image });
  for (let i = 0; i < 3; i++) await ask("/classify", { method: "POST", body: Buffer.alloc(17 << 20) });
  await ask("/correct", { method: "POST", body: "{}" });
  await ask("/correct", { method: "POST", body: "{}", headers: { Authorization: `Bearer ${token}` } });
  await ask("/classify", { method: "POST", body: image });
  console.log(JSON.stringify(said));
})();
"""


def test_nodes_fetch_asks_and_reads_why_it_was_refused(site, monkeypatch):
    program = shutil.which("node")
    if program is None:
        pytest.skip("Node.js is not installed")
    if int(run(program, "-p", "process.versions.node.split('.')[0]")) < 18:
        pytest.skip("this Node.js has no fetch")
    monkeypatch.setenv("IMAGE", base64.b64encode(RED).decode())
    said = json.loads(run(program, "-e", NODE, f"http://127.0.0.1:{site.port}", TOKEN))
    too_large = [413, "TooLarge"]
    assert said == [[200, "red"], *[too_large] * 3, [401, "NoToken"], [400, "DataError"], [200, "red"]]


ATTACK = """async ([address, token]) => {
  const said = [];
  const image = new Blob([new Uint8Array(100)]);
  for (const [path, options] of [
    ["/status", {}], ["/status", { mode: "no-cors" }],
    ["/classify", { method: "POST", mode: "no-cors", body: image }],
    ["/correct", { method: "POST", mode: "no-cors", body: '{"number": 1, "label": "x"}' }],
    ["/correct", { method: "POST", body: "{}", headers: { Authorization: `Bearer ${token}` } }],
  ]) {
    try { said.push((await (await fetch(address + path, options)).text()).length); } catch { said.push("blocked"); }
  }
  return said;
}"""


def test_a_page_of_another_site_learns_and_changes_nothing(site):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>another site</title>")

        def log_message(self, *_arguments):
            pass

    other = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    try:
        with browser() as chromium:
            page = chromium.new_page()
            page.goto(f"http://localhost:{other.server_port}/")
            said = page.evaluate(ATTACK, [f"http://127.0.0.1:{site.port}", TOKEN])
            page.close()
    finally:
        other.shutdown()
        thread.join(WAIT_S)
        other.server_close()
    assert said == ["blocked"] * 5
    assert site.service.history.newest() is None

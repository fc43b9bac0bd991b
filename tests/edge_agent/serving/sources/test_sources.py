"""Cameras, addresses and folders: what they give, and what is said when they give nothing."""

from __future__ import annotations

import contextlib
import http.server
import os
import stat
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_site import png, square

from edge_agent.core.errors import MissingCapability, SourceLost, UsageError
from edge_agent.core.storage import read_regular
from edge_agent.serving.sources.capture import CaptureSource
from edge_agent.serving.sources.choose import create_camera_source, create_folder_source
from edge_agent.serving.sources.folder import FolderSource
from edge_agent.serving.sources.rpicam import JpegSplitter, RpicamSource
from edge_agent.serving.sources.snapshot import SnapshotSource
from edge_agent.serving.sources.source import Frame, NewestFrame

WAIT_S = 30
IMAGES = [png(square(label, number, size=24), "JPEG") for number, label in enumerate(("red", "green", "blue") * 3)]


def read(source, count=1):
    """Frames of an open source, as many as wanted."""
    frames = []
    while len(frames) < count:
        frame = source.read(WAIT_S)
        assert frame is not None, "no frame has come"
        frames.append(frame)
    return frames


# --- the stream of rpicam-vid ---


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_images_are_cut_wherever_the_stream_is_cut(sizes):
    stream = b"".join(IMAGES)
    splitter = JpegSplitter()
    found = []
    position = 0
    for size in [*sizes, len(stream)]:
        found += splitter.feed(stream[position : position + size])
        position += size
    assert found == IMAGES


def test_a_thumbnail_within_an_image_does_not_end_it():
    thumbnail = IMAGES[0]
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    whole = IMAGES[1][:2] + segment + IMAGES[1][2:]
    assert JpegSplitter().feed(whole + IMAGES[2]) == [whole, IMAGES[2]]


def test_fill_bytes_and_restarts_are_part_of_an_image():
    scan = b"\xff\xda\x00\x04ab" + b"\x12\xff\x00\x34\xff\xd3\x56"
    whole = b"\xff\xd8" + b"\xff\xff\xe0\x00\x04cd" + scan + b"\xff\xd9"
    assert JpegSplitter().feed(whole + IMAGES[0]) == [whole, IMAGES[0]]


@pytest.mark.parametrize("stream", [b"h264 and not images", b"\xff\xd8no marker here"])
def test_a_stream_of_something_else_is_refused(stream):
    with pytest.raises(SourceLost):
        JpegSplitter().feed(stream)


def test_an_image_that_never_ends_is_refused():
    splitter = JpegSplitter(most_bytes=1000)
    with pytest.raises(SourceLost, match="lower the camera's resolution"):
        for _ in range(100):
            splitter.feed(b"\xff\xd8\xff\xda\x00\x02" if not splitter._buffer else b"a" * 50)


@given(st.binary(max_size=300))
def test_any_bytes_are_images_or_refused(data):
    with contextlib.suppress(SourceLost):
        JpegSplitter().feed(b"\xff\xd8" + data)


@pytest.fixture
def rpicam(tmp_path, monkeypatch):
    """A function that puts a stand-in for ``rpicam-vid`` on the path: it writes pictures, then does as it is told."""
    stream = tmp_path / "stream.mjpeg"
    stream.write_bytes(b"".join(IMAGES))
    programs = tmp_path / "bin"
    programs.mkdir()

    def put(then):
        script = (
            f"#!{sys.executable}\nimport sys, time\n"
            "assert '--codec' in sys.argv and sys.argv[-2:] == ['--output', '-']\n"
            f"out = sys.stdout.buffer\nout.write(open({str(stream)!r}, 'rb').read())\nout.flush()\n{then}\n"
        )
        path = programs / "rpicam-vid"
        path.write_text(script, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return put


def test_the_newest_picture_of_the_program_is_given(rpicam):
    rpicam("time.sleep(60)")
    source = RpicamSource()
    source.open()
    try:
        frame = read(source)[0]
        while frame.raw != IMAGES[-1]:
            frame = read(source)[0]
    finally:
        source.close()


def test_a_program_that_ends_is_told_with_its_code(rpicam):
    rpicam("sys.exit(7)")
    source = RpicamSource()
    source.open()
    try:
        with pytest.raises(SourceLost, match="ended with code 7"):
            while True:
                source.read(WAIT_S)
    finally:
        source.close()


def test_without_the_program_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingCapability, match="rpicam-apps-lite"):
        RpicamSource().open()


def test_a_closed_camera_leaves_no_process(rpicam):
    rpicam("time.sleep(60)")
    source = RpicamSource()
    source.open()
    child = source._child
    source.close()
    assert not child.is_running


# --- OpenCV ---


class Capture:
    """What OpenCV gives of a camera that shows so many pictures and is then unplugged."""

    def __init__(self, pictures, is_there=True):
        self.pictures = list(pictures)
        self.is_there = is_there
        self.is_released = False

    def isOpened(self):
        return self.is_there

    def read(self):
        return (True, self.pictures.pop(0)) if self.pictures else (False, None)

    def release(self):
        self.is_released = True


@pytest.fixture
def camera(monkeypatch):
    pytest.importorskip("cv2", reason="OpenCV is not installed: pip install '.[camera]'")
    from edge_agent.serving.sources import capture as module

    def use(capture):
        monkeypatch.setattr(module, "opened", lambda _where: capture)
        return CaptureSource("0")

    return use


def test_a_picture_of_a_usb_camera_has_its_colours(camera):
    blue_first = np.zeros((16, 16, 3), np.uint8)
    blue_first[:, :, 0] = 250
    source = camera(Capture([blue_first]))
    source.open()
    import io

    from PIL import Image

    [frame] = read(source)
    with Image.open(io.BytesIO(frame.raw)) as image:
        assert np.asarray(image)[0, 0].tolist() == pytest.approx([0, 0, 250], abs=6)
    with pytest.raises(SourceLost, match="is it connected"):
        while True:
            source.read(WAIT_S)


def test_a_camera_that_is_not_there_says_so(camera):
    capture = Capture([], is_there=False)
    with pytest.raises(SourceLost, match="group 'video'"):
        camera(capture).open()
    assert capture.is_released


def test_no_password_is_in_a_name():
    assert CaptureSource("rtsp://me:secret@host/stream").name == "camera:rtsp://…@host/stream"
    assert CaptureSource("rtsp://me:se@cr/et@host/stream").name == "camera:rtsp://…@host/stream"
    assert CaptureSource("rtsp://host/stream?user=me&password=secret").name == "camera:rtsp://host/stream"
    assert SnapshotSource("http://me:secret@host:81/a.jpg?key=1").name == "http://host:81/a.jpg"


# --- snapshots ---


@pytest.fixture
def web():
    """A function that starts a server whose answers a test writes; returns its address."""
    servers = []

    def start(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            def log_message(self, *_arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/snapshot.jpg"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reply(handler, body, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_a_snapshot_is_fetched_with_the_password(web):
    seen = []

    def answer(handler):
        seen.append(handler.headers["Authorization"])
        reply(handler, IMAGES[0])

    address = web(answer).replace("//", "//me:sec%20ret@")
    assert SnapshotSource(address).read(1) == Frame(IMAGES[0])
    assert seen == ["Basic bWU6c2VjIHJldA=="]


def test_an_address_that_leads_elsewhere_is_not_followed(web):
    elsewhere = []
    other = web(lambda handler: elsewhere.append(1) or reply(handler, IMAGES[0]))
    address = web(lambda handler: reply(handler, b"", 302, Location=other))
    with pytest.raises(SourceLost, match="status 302"):
        SnapshotSource(address).read(1)
    assert elsewhere == []


def test_an_endless_answer_ends(web, monkeypatch):
    from edge_agent.serving.sources import snapshot

    monkeypatch.setattr(snapshot, "_MOST_BYTES", 200_000)

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"x" * 10_000)

    with pytest.raises(SourceLost, match="this is not a picture"):
        SnapshotSource(web(answer)).read(1)


def test_an_answer_of_a_byte_now_and_then_ends_in_time(web):
    """Each byte is within the time-out of the socket, so that the picture's own deadline has to end it."""
    is_over = threading.Event()
    sent = []

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        while len(sent) < 200 and not is_over.wait(0.05):
            sent.append(1)
            handler.wfile.write(b"x")

    with pytest.raises(SourceLost, match="too slowly"):
        SnapshotSource(web(answer), timeout_s=0.3).read(1)
    assert len(sent) < 100
    is_over.set()


@pytest.mark.parametrize("status, says", [(404, "status 404"), (401, "status 401"), (500, "status 500")])
def test_an_error_of_the_camera_is_told(web, status, says):
    with pytest.raises(SourceLost, match=says):
        SnapshotSource(web(lambda handler: reply(handler, b"", status))).read(1)


def test_nobody_at_the_address():
    with pytest.raises(SourceLost, match="cannot be fetched"):
        SnapshotSource("http://127.0.0.1:9/x.jpg", timeout_s=1).read(1)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/a.jpg", "http:///x"])
def test_only_addresses_of_http_are_fetched(address):
    with pytest.raises(UsageError):
        SnapshotSource(address)


# --- folders ---


def put(folder, name, raw, at):
    path = folder / name
    path.write_bytes(raw)
    os.utime(path, (at, at))


def test_new_files_are_given_once_and_oldest_first(tmp_path):
    put(tmp_path, "before.png", b"0", 10)
    source = FolderSource(tmp_path, now=lambda: 100.0)
    source.open()
    put(tmp_path, "b.png", b"2", 30)
    put(tmp_path, "a.png", b"1", 40)
    put(tmp_path, ".hidden.png", b"3", 20)
    assert [source.read(0) for _ in range(3)] == [Frame(b"2", "b.png"), Frame(b"1", "a.png"), None]
    put(tmp_path, "b.png", b"22", 50)
    assert source.read(0) == Frame(b"22", "b.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden.png", "a.png", "b.png", "before.png"]


def test_the_name_of_a_file_breaks_no_line_of_the_log(tmp_path):
    source = FolderSource(tmp_path, now=lambda: 100.0)
    source.open()
    put(tmp_path, "a\nsource_ok \udcff.png", b"one", 10)
    assert [frame.name for frame in read(source)] == ["a source_ok  .png"]


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch, caplog):
    source = FolderSource(tmp_path, now=lambda: 100.0)
    source.open()
    put(tmp_path, "a.png", b"one", 10)
    put(tmp_path, "b.png", b"two", 11)

    def forbidden(path, most_bytes):
        if path.name == "a.png":
            raise PermissionError(13, "Permission denied")
        return read_regular(path, most_bytes)

    monkeypatch.setattr("edge_agent.serving.sources.folder.read_regular", forbidden)
    assert [frame.name for frame in read(source)] == ["b.png"]
    assert "file=a.png reason=this user has no access" in caplog.text


def test_a_file_that_is_being_written_waits(tmp_path):
    now = 100.0
    source = FolderSource(tmp_path, now=lambda: now)
    source.open()
    put(tmp_path, "a.png", b"half", 99.9)
    assert source.read(0) is None
    put(tmp_path, "a.png", b"whole", 100.0)
    now = 101.0
    assert source.read(0) == Frame(b"whole", "a.png")


def test_a_folder_that_goes_is_lost_and_keeps_what_was_given(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    source = FolderSource(folder, now=lambda: 100.0)
    source.open()
    put(folder, "a.png", b"1", 10)
    assert source.read(0) == Frame(b"1", "a.png")
    folder.rename(tmp_path / "away")
    with pytest.raises(SourceLost, match="cannot be read"):
        source.read(0)
    (tmp_path / "away").rename(folder)
    source.open()
    assert source.read(0) is None


# --- what the command line names ---


@pytest.fixture
def with_opencv(monkeypatch):
    """OpenCV counts as installed; nothing here imports it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_without_opencv_a_usb_camera_says_at_once_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingCapability, match=r"needs 'cv2', which is not installed; .*\[camera\]"):
        create_camera_source("0")


@pytest.mark.parametrize(
    "text, name",
    [
        ("rpicam", "rpicam:0"),
        ("rpicam:1", "rpicam:1"),
        ("0", "camera:0"),
        ("/dev/video2", "camera:/dev/video2"),
        ("rtsp://host/s", "camera:rtsp://host/s"),
        ("http://host/a.jpg", "http://host/a.jpg"),
    ],
)
def test_cameras_by_their_text(text, name, with_opencv):
    assert create_camera_source(text).name == name


def test_auto_is_the_ribbon_cable_where_its_program_is(rpicam, monkeypatch, tmp_path, with_opencv):
    rpicam("pass")
    assert create_camera_source("auto").name == "rpicam:0"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert create_camera_source("auto").name == "camera:0"


@pytest.mark.parametrize("text", ["webcam", "rpicam:x", ""])
def test_texts_that_name_no_camera(text):
    with pytest.raises(UsageError, match="expected"):
        create_camera_source(text)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="create it first"):
        create_folder_source(tmp_path / "nothing")


# --- the place of the newest ---


def test_older_frames_are_dropped_and_counted():
    newest = NewestFrame()
    for number in range(3):
        newest.put(Frame(bytes([number])))
    assert newest.take(0) == Frame(b"\x02")
    assert newest.dropped == 2
    assert newest.take(0) is None
    newest.put(Frame(b"last"))
    newest.end("gone")
    assert newest.take(0) == Frame(b"last")
    with pytest.raises(SourceLost, match="gone"):
        newest.take(0)

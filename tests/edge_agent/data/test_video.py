"""Videos and cameras: a stand-in for OpenCV, and OpenCV itself where it is installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from edge_agent.core.errors import DataError, MissingCapability
from edge_agent.core.task import ImageInput
from edge_agent.data import load, split

SPEC = ImageInput(channels=3, height=8, width=8, mean=(0.0,), std=(1.0,))


class Capture:
    """What is used of ``cv2.VideoCapture``: a file's text gives rate and number of frames, blue counts the frames."""

    released = 0

    def __init__(self, where):
        self.position = -1
        if isinstance(where, int):
            self.rate = 30.0
            self.frames = 50 if where == 0 else 0
        else:
            try:
                self.rate, self.frames = map(float, Path(where).read_text().split())
            except (OSError, ValueError):
                self.rate = 0.0
                self.frames = 0

    def isOpened(self):
        return self.frames > 0

    def get(self, key):
        return self.rate

    def grab(self):
        self.position += 1
        return self.position < self.frames

    def retrieve(self):
        return True, np.full((8, 8, 3), (self.position, 0, 200), np.uint8)

    def read(self):
        return (True, self.retrieve()[1]) if self.grab() else (False, None)

    def release(self):
        Capture.released += 1


@pytest.fixture
def opencv(monkeypatch):
    fake = types.SimpleNamespace(VideoCapture=Capture, CAP_PROP_FPS=5, setNumThreads=lambda count: None)
    monkeypatch.setitem(sys.modules, "cv2", fake)


@pytest.fixture
def videos(tmp_path):
    """Two classes of two films of 10 frames per second: of 2.5 s, and of 1 s."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.mp4").write_text("10 25")
        (tmp_path / name / "b.avi").write_text("10 10")
    return tmp_path


def blues(samples):
    return np.rint(samples.inputs[:, 2, 0, 0] * 255).astype(int).tolist()


def test_a_frame_is_taken_each_so_many_seconds(opencv, videos):
    samples = load(f"video:{videos}", SPEC)
    assert blues(samples) == [0, 10, 20, 0, 0, 10, 20, 0]
    assert samples.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert samples.names[1] == "cat/a.mp4 1 s"
    assert np.allclose(samples.inputs[:, 0], 200 / 255), "red is first"
    assert blues(load(f"video:{videos}?every_s=0.5&limit=1", SPEC)) == [0, 5, 10, 15, 20] * 2
    train, test = split(samples, 0.5, 0)
    assert not {*train.groups.tolist()} & {*test.groups.tolist()}
    assert len(load(f"video:{videos / 'cat' / 'a.mp4'}", SPEC, labelled=False)) == 3


def test_videos_that_cannot_be_read_are_named(opencv, videos):
    (videos / "cat" / "broken.mkv").write_text("no video")
    with pytest.raises(
        DataError, match=r"1 of 9 images cannot be used\n  - cat/broken.mkv 0 s: cannot be read as a vid"
    ):
        load(f"video:{videos}", SPEC)
    assert len(load(f"video:{videos}", SPEC, strict=False)) == 8
    with pytest.raises(DataError, match=r"expected one sub-folder for each class, with files ending in .avi"):
        load(f"video:{videos / 'cat' / '..' / '..'}?limit=1", SPEC)
    with pytest.raises(DataError, match="has no label"):
        load(f"video:{videos / 'cat' / 'a.mp4'}", SPEC)


def test_a_camera_takes_pictures_now(opencv):
    released = Capture.released
    samples = load("camera:0?n=3&every_s=0&label=cat", SPEC)
    assert blues(samples) == [5, 7, 9], "the first five, and those that waited, are left out"
    assert samples.class_names == ("cat",)
    assert Capture.released == released + 1
    assert load("camera:0", SPEC, labelled=False).labels.tolist() == [-1]
    with pytest.raises(DataError, match=r"say what its pictures show \(label=NAME\)"):
        load("camera:0", SPEC)


@pytest.mark.parametrize(
    "source, words",
    [
        ("camera:7", "'7' cannot be opened; expected the number of a camera"),
        ("camera:rtsp://me:secret@porch/live", r"'rtsp://…@porch/live' cannot be opened"),
        ("camera:0?n=99&every_s=0", "picture 2[23] cannot be decoded"),
    ],
)
def test_cameras_that_give_nothing_are_explained(opencv, source, words):
    with pytest.raises(DataError, match=words):
        load(source, SPEC, labelled=False)


def test_without_opencv_the_extra_is_named(monkeypatch, videos):
    monkeypatch.setitem(sys.modules, "cv2", None)
    for source in (f"video:{videos}", "camera:0"):
        with pytest.raises(MissingCapability, match=r"needs 'cv2', .*pip install .*\.\[camera\]'"):
            load(source, SPEC)


def test_opencv_itself_reads_what_it_wrote(tmp_path):
    """Twelve frames at 4 per second, each of one grey that grows by 20: lossy, but told apart."""
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(tmp_path / "x.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, (32, 32))
    if not writer.isOpened():
        pytest.skip("this OpenCV writes no MJPG")
    for number in range(12):
        writer.write(np.full((32, 32, 3), (20 * number, 10, 230), np.uint8))
    writer.release()
    samples = load(f"video:{tmp_path / 'x.avi'}", SPEC, labelled=False)
    assert len(samples) == 3
    np.testing.assert_allclose(samples.inputs[:, 2].mean(axis=(1, 2)) * 255, [0, 80, 160], atol=6)
    np.testing.assert_allclose(samples.inputs[:, 0].mean(axis=(1, 2)) * 255, 230, atol=6)
    (tmp_path / "y.mp4").write_bytes(b"no video at all")
    with pytest.raises(DataError, match="cannot be read as a video"):
        load(f"video:{tmp_path / 'y.mp4'}", SPEC, labelled=False)

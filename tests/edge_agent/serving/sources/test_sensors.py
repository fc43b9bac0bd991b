"""Streams of samples: lines, windows, gaps, and that no sample is lost."""

from __future__ import annotations

import os
import threading
import tty
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from serving_site import settings_for_tests

from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import Busy, DataError, SourceEnded, SourceLost, UsageError
from edge_agent.core.task import Task, WindowInput
from edge_agent.heads import saved
from edge_agent.personal.personalizer import Personalizer, load_bundle
from edge_agent.serving.mqtt.topics import AnswerTopics
from edge_agent.serving.pair import Pair
from edge_agent.serving.predictor import Predictor
from edge_agent.serving.service import Device, IoSettings, Service
from edge_agent.serving.sources.choose import Subscriptions, create_sensor_source, create_topic_source
from edge_agent.serving.sources.mqtt_in import MqttLineSource, MqttSource
from edge_agent.serving.sources.samples import MOST_LINE_BYTES, LineReader, PlaybackSchedule, StreamLineSource
from edge_agent.serving.sources.sensor_feed import SensorFeed
from edge_agent.serving.sources.source import Frame
from edge_agent.wire.transport import Connected, Disconnected, Message

WAIT_S = 30
TASK = Task(
    input=WindowInput(channels=2, length=10, stride=5, mean=(1.0,), std=(2.0,)),
    class_names=("still", "shaken"),
    encoder="linear",
    encoder_params={},
)


@pytest.fixture
def pair(make_bundle, tmp_path):
    bundle = make_bundle(task=TASK).path
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    windows = (rng.normal(size=(40, 2, 10)) * np.where(labels, 5.0, 0.5)[:, None, None]).astype(np.float32)
    personal = Personalizer.open(bundle, cache=tmp_path / "cache")
    personal.fit(windows, np.array(TASK.class_names)[labels], head="lr")
    personal.save(tmp_path / "head")
    assert saved.load(tmp_path / "head").class_names == TASK.class_names
    return Pair.open(load_bundle(bundle, tmp_path / "cache"), tmp_path / "head")


class Given:
    """Lines that are there from the beginning."""

    name = "sensor test"

    def __init__(self, lines):
        self._lines = list(lines)

    def open(self):
        if not self._lines:
            raise SourceEnded("all")

    def read(self, wait_s):
        if not self._lines:
            raise SourceEnded("all")
        return self._lines.pop(0)

    def close(self):
        pass


def lines_of(samples, times=None):
    """A stream of samples (n, channels) with names of its columns."""
    names = ["time"] * (times is not None) + ["x", "y", "z"][: samples.shape[1]]
    yield (",".join(names) + "\n").encode()
    for number, row in enumerate(samples):
        at = [] if times is None else [times[number]]
        yield (",".join(f"{value:.6f}" for value in [*at, *row]) + "\n").encode()


class Watcher:
    """What was answered: the windows as the encoder saw them, and what they were called."""

    def __init__(self):
        self.inputs = []
        self.sources = []

    def on_answer(self, observation):
        self.inputs.append(observation.inputs[0])
        self.sources.append(observation.source)

    def on_switch(self, pair):
        pass


def answer_all(pair, lines, **options):
    """Answer a stream to its end; returns the feed and what was answered."""
    predictor = Predictor()
    watcher = Watcher()
    predictor.observe(watcher)
    predictor.switch(pair)
    feed = SensorFeed(Given(lines), predictor, **options)
    feed.start()
    feed._thread.join(WAIT_S)
    assert feed.state.condition == "ended", feed.state
    return feed, watcher


SAMPLES = np.random.default_rng(1).normal(size=(47, 2))


@pytest.mark.parametrize("hop", [None, 1, 5, 10, 13])
def test_windows_are_those_of_the_recording_cut_by_hand(pair, hop):
    feed, watcher = answer_all(pair, lines_of(SAMPLES), hop=hop)
    step = 5 if hop is None else hop
    expected = [(SAMPLES[start : start + 10].T - 1.0) / 2.0 for start in range(0, 47 - 10 + 1, step)]
    assert len(watcher.inputs) == len(expected)
    for window, by_hand in zip(watcher.inputs, expected, strict=True):
        np.testing.assert_allclose(window, by_hand, atol=1e-5)
    assert feed.state.samples == 47
    assert feed.as_json()["text"] == "ended after 47 samples"


def test_answers_carry_the_time_of_the_end_of_their_window(pair):
    times = 100 + 0.02 * np.arange(47)
    _, watcher = answer_all(pair, lines_of(SAMPLES, times))
    assert watcher.sources[:2] == ["sensor test at 100.180 s", "sensor test at 100.280 s"]
    _, watcher = answer_all(pair, lines_of(SAMPLES), rate=50.0)
    assert watcher.sources[:2] == ["sensor test at 0.200 s", "sensor test at 0.300 s"]
    _, watcher = answer_all(pair, lines_of(SAMPLES))
    assert watcher.sources[:2] == ["sensor test sample 10", "sensor test sample 15"]


def test_no_window_spans_a_gap_in_time(pair):
    times = 0.02 * np.arange(47)
    times[23:] += 3.0
    feed, watcher = answer_all(pair, lines_of(SAMPLES, times))
    by_hand = [*range(0, 23 - 10 + 1, 5), *range(23, 47 - 10 + 1, 5)]
    assert len(watcher.inputs) == len(by_hand)
    np.testing.assert_allclose(watcher.inputs[3], (SAMPLES[23:33].T - 1.0) / 2.0, atol=1e-5)
    assert feed.state.gaps == 1


def test_a_line_that_is_no_sample_ends_the_window_and_is_said_with_its_number(pair):
    lines = list(lines_of(SAMPLES))
    lines[13] = b"1.0,oops\n"
    feed, watcher = answer_all(pair, lines)
    assert feed.state.gaps == 1
    np.testing.assert_allclose(watcher.inputs[1], (SAMPLES[13:23].T - 1.0) / 2.0, atol=1e-5)
    lines[13] = b"1.0,2.0,3.0\n"
    predictor = Predictor()
    predictor.switch(pair)
    feed = SensorFeed(Given(lines[:14]), predictor)
    feed.start()
    feed._thread.join(WAIT_S)
    assert feed.state.gaps == 1


def test_many_such_lines_in_a_row_are_one_interruption(pair, caplog):
    lines = list(lines_of(SAMPLES))
    lines[13:13] = [b"oops\n"] * 100
    feed, _ = answer_all(pair, lines)
    assert feed.state.gaps == 1
    assert caplog.text.count("sample_not_read") == 1


def test_windows_wait_while_others_are_answered_and_none_is_lost(pair, monkeypatch):
    predictor = Predictor()
    watcher = Watcher()
    predictor.observe(watcher)
    predictor.switch(pair)
    answer = predictor.answer
    calls = []

    def often_busy(decode, source):
        calls.append(source)
        if len(calls) % 3:
            raise Busy(8, 1)
        return answer(decode, source)

    monkeypatch.setattr(predictor, "answer", often_busy)
    feed = SensorFeed(Given(lines_of(SAMPLES)), predictor)
    feed.start()
    feed._thread.join(WAIT_S)
    assert feed.state.answered == len(watcher.inputs) == 8
    assert len(calls) == 24


def test_an_encoder_of_other_channels_is_said(pair):
    feed, watcher = answer_all(pair, lines_of(np.zeros((12, 3))))
    assert watcher.inputs == []
    assert (feed.state.answered, feed.state.refused, feed.state.gaps) == (0, 12, 1)
    assert feed.as_json()["text"] == "ended after 0 samples"


def test_lines_that_are_no_samples_are_reported_once_and_counted(pair, caplog):
    lines = [b"time,x,y\n", *[b"0.1,high,low\n"] * 40, *[b"0.2,1,2\n"] * 3]
    feed, _ = answer_all(pair, lines)
    assert len([record for record in caplog.records if record.message.startswith("sample_not_read")]) == 1
    assert (feed.state.refused, feed.state.samples) == (40, 3)


@pytest.mark.parametrize(
    "line, expected",
    [
        (b"1, 2.5\n", [1.0, 2.5]),
        (b"1;2.5\n", [1.0, 2.5]),
        (b"1\t2.5\r\n", [1.0, 2.5]),
        (b"  1 2.5  \n", [1.0, 2.5]),
        (b"-1e3,+2\n", [-1000.0, 2.0]),
    ],
)
def test_a_sample_may_be_separated_in_several_ways(line, expected):
    assert LineReader().read(line).values.tolist() == expected


@pytest.mark.parametrize(
    "line, mistake",
    [
        (b"1,nan\n", "holds '1 nan'; expected only numbers"),
        (b"1,inf\n", "expected only numbers"),
        (b"1,\xff\n", "expected only numbers"),
        (b"1,2,3\n", "line 2 has 3 values, the lines before 2"),
        (b"1," * MOST_LINE_BYTES, "line 2 has more than 65536 bytes"),
    ],
)
def test_lines_that_are_no_samples(line, mistake):
    reader = LineReader()
    reader.read(b"0,0\n")
    with pytest.raises(DataError, match=mistake):
        reader.read(line)


def test_a_pipe_is_read_as_it_is_written_and_its_end_is_the_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    lines = StreamLineSource(path)
    lines.open()
    assert lines.read(0.01) is None
    with path.open("w", encoding="ascii") as writer:
        writer.write("1,2\n3,4\n")
        writer.flush()
        assert lines.read(WAIT_S) == b"1,2\n"
        assert lines.read(WAIT_S) == b"3,4\n"
    with pytest.raises(SourceEnded):
        lines.read(WAIT_S)
    with pytest.raises(SourceEnded):
        lines.open()


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    lines = StreamLineSource(tmp_path / "gone")
    lines.open()
    with pytest.raises(SourceLost, match="cannot be read"):
        lines.read(WAIT_S)


def test_a_recording_is_played_at_its_speed():
    due = PlaybackSchedule(10.0, None)
    assert [due(line) for line in (b"time,x\n", b"5.0,1\n", b"5.5,1\n", b"oops\n", b"7.0,1\n")] == [0, 0, 0.05, 0, 0.2]
    by_rate = PlaybackSchedule(2.0, 50.0)
    assert [by_rate(b"1,2\n") for _ in range(3)] == [0.0, 0.01, 0.02]


class Transport:
    """A transport that gives the events of a test."""

    def __init__(self, *events):
        self.events = list(events)
        self.filters = []
        self.started = 0

    def subscribe(self, *filters):
        self.filters += filters

    def start(self):
        self.started += 1

    def receive(self, timeout_s):
        return self.events.pop(0) if self.events else None

    def close(self):
        pass


def test_each_message_of_a_topic_is_answered_and_retained_ones_are_not():
    transport = Transport(
        Connected(1), Message("cam", b"old", retained=True), Message("cam", b"first"), Message("cam", b"second")
    )
    source = MqttSource(transport, "cam")
    source.open()
    source.open()
    assert (transport.filters, transport.started) == (["cam"], 1)
    assert [source.read(0.1) for _ in range(3)] == [Frame(b"first"), Frame(b"second"), None]
    transport.events = [Message("cam/porch", b"x")]
    assert MqttSource(transport, "cam/+").read(0.1).name == "cam/porch"
    transport.events = [Message("cam/\x1b[31mred", b"x")]
    assert "\x1b" not in MqttSource(transport, "cam/+").read(0.1).name
    transport.events = [Disconnected("unplugged", 1.0)]
    with pytest.raises(SourceLost, match="the broker is away: unplugged"):
        source.read(0.1)


def test_of_a_flood_of_messages_the_oldest_are_dropped_and_counted():
    transport = Transport(*[Message("cam", str(number).encode()) for number in range(40)])
    source = MqttSource(transport, "cam")
    source.open()
    first = source.read(0.1)
    assert (first.raw, first.dropped) == (b"24", 24)
    assert [source.read(0.1).raw for _ in range(15)] == [str(number).encode() for number in range(25, 40)]
    assert source.read(0.1) is None


def test_lines_of_messages_are_samples():
    transport = Transport(Message("imu", b"1,2\n3,4"), Message("imu", b""), Message("imu", b"5,6\n"))
    lines = MqttLineSource(transport, "imu")
    lines.open()
    assert [lines.read(0.1) for _ in range(4)] == [b"1,2", b"3,4", None, b"5,6"]
    transport.events = [Message("imu", b"1\n" * 20_001)]
    with pytest.raises(SourceLost, match="at most 20000 are accepted"):
        lines.read(0.1)


def test_a_sensor_for_an_encoder_of_images_is_refused_before_the_first_sample(source, tmp_path):
    recording = tmp_path / "walk.csv"
    recording.write_text("1,2,3\n")
    io = IoSettings(sensors=(create_sensor_source(str(recording), None, None, Subscriptions(None)),))
    service = Service(source, settings_for_tests(), Device(), io)
    try:
        with pytest.raises(UsageError, match=r"walk\.csv: a stream of samples.*'test'.*takes images"):
            service.start()
    finally:
        service.close()


def test_what_cannot_be_is_said_at_the_start(tmp_path):
    nowhere = Subscriptions(None)
    with pytest.raises(UsageError, match="name the broker with --mqtt"):
        create_topic_source("cam", nowhere)
    with pytest.raises(UsageError, match="is not there; expected -, mqtt:TOPIC"):
        create_sensor_source(str(tmp_path / "none"), None, None, nowhere)
    here = Subscriptions(BrokerConfig(url="mqtt://127.0.0.1:1"), AnswerTopics("porch").published)
    with pytest.raises(UsageError, match="the topic is empty"):
        create_sensor_source("mqtt:", None, None, here)
    assert create_sensor_source("mqtt:imu", None, None, here).name == "mqtt imu"
    assert create_sensor_source("-", None, None, nowhere).name == "sensor"
    assert create_topic_source("cam", here).name == "mqtt cam"
    assert create_topic_source("headwater-answers/garden/image", here).name == "mqtt headwater-answers/garden/image"


@pytest.mark.parametrize("topic", ["#", "+/+/image", "headwater-answers/porch/image", "homeassistant/device/#"])
def test_a_device_does_not_answer_its_own_answers(topic):
    here = Subscriptions(BrokerConfig(url="mqtt://127.0.0.1:1"), AnswerTopics("porch").published)
    with pytest.raises(UsageError, match="would answer its own answers; name another topic"):
        create_topic_source(topic, here)


def test_a_stream_that_was_interrupted_goes_on_with_its_columns_and_a_new_window(pair):
    """The broker was away: no window spans what was missed, and the names of the columns do not come again."""
    stream = list(lines_of(SAMPLES, 0.02 * np.arange(47)))
    lines = Given(stream)
    taken = iter(range(100))
    read = lines.read

    def read_with_a_break(wait_s):
        if next(taken) == 16:
            raise SourceLost("the broker is away")
        return read(wait_s)

    lines.read = read_with_a_break
    predictor = Predictor()
    watcher = Watcher()
    predictor.observe(watcher)
    predictor.switch(pair)
    feed = SensorFeed(lines, predictor)
    feed._stop.wait = lambda _seconds: False
    feed.start()
    feed._thread.join(WAIT_S)
    by_hand = [*range(0, 15 - 10 + 1, 5), *range(15, 47 - 10 + 1, 5)]
    assert len(watcher.inputs) == len(by_hand)
    np.testing.assert_allclose(watcher.inputs[2], (SAMPLES[15:25].T - 1.0) / 2.0, atol=1e-5)
    assert watcher.sources[2] == "sensor test at 0.480 s"
    assert feed.state.refused == 0


def test_a_serial_device_is_read_line_by_line():
    """A pseudo-terminal is what a serial port is to a program."""
    controller, device = os.openpty()
    tty.setraw(device)
    lines = StreamLineSource(Path(os.ttyname(device)))
    lines.open()
    os.write(controller, b"1,2\n3,")
    assert lines.read(WAIT_S) == b"1,2\n"
    assert lines.read(0.05) is None
    os.write(controller, b"4\n")
    assert lines.read(WAIT_S) == b"3,4\n"
    lines.close()
    os.close(controller)
    os.close(device)


def test_a_serial_device_that_is_unplugged_is_opened_again():
    controller, device = os.openpty()
    tty.setraw(device)
    path = Path(os.ttyname(device))
    lines = StreamLineSource(path)
    lines.open()
    os.write(controller, b"1,2\n")
    assert lines.read(WAIT_S) == b"1,2\n"
    os.close(device)
    os.close(controller)
    with pytest.raises(SourceLost, match=r"it cannot be read|it was disconnected") as lost:
        lines.read(WAIT_S)
    assert not isinstance(lost.value, SourceEnded)
    # The device that is plugged in again has the same name here, if the system gives it the same number.
    lines._path = Path("/dev/null")
    lines.open()
    with pytest.raises(SourceLost, match="it was disconnected"):
        lines.read(WAIT_S)
    lines.close()


def test_a_stream_that_is_slow_is_no_stream_that_is_lost(pair):
    """Nothing arrives for a while: the feed waits, and goes on where it was."""
    goes_on = threading.Event()
    lines = Given(lines_of(SAMPLES))
    read = lines.read
    taken = SimpleNamespace(count=0)

    def slowly(wait_s):
        taken.count += 1
        if taken.count == 20 and not goes_on.wait(WAIT_S):
            raise SourceLost("the test hangs")
        return None if taken.count % 2 else read(wait_s)

    lines.read = slowly
    predictor = Predictor()
    predictor.switch(pair)
    feed = SensorFeed(lines, predictor)
    feed.start()
    goes_on.set()
    feed._thread.join(WAIT_S)
    assert feed.state.answered == 8


@pytest.mark.parametrize("value", ["3e38", "1e300"])
def test_values_that_no_answer_can_be_given_for_are_refused_and_the_stream_goes_on(pair, value):
    """An answer of NaN would be no JSON: the page, MQTT and the list of the last answers would break for long."""
    rows = [f"{value},{value}\n".encode()] * 10 + [b"1,1\n"] * 10
    feed, watcher = answer_all(pair, rows, hop=10)
    assert (feed.state.refused, feed.state.answered) == (1, 1)
    assert len(watcher.inputs) == 1

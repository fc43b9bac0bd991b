"""The loop around a source: answers at the right times, and what is said of a source that is lost or frozen."""

from __future__ import annotations

import queue
import threading

import pytest
from serving_site import png, square

from edge_agent.core.errors import Busy, DataError, SourceEnded, SourceLost
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.pair import Pair
from edge_agent.serving.predictor import Predictor
from edge_agent.serving.service import Device, IoSettings, Service
from edge_agent.serving.sources import loop as module
from edge_agent.serving.sources.feed import FROZEN_AFTER, Feed
from edge_agent.serving.sources.source import Frame

WAIT_S = 30


class Scripted:
    """A source that does what a test says: frames, losses, and nothing more in the end."""

    needs_every_frame = True
    name = "script"

    def __init__(self, *steps):
        self.steps = queue.SimpleQueue()
        self.opened = 0
        for step in steps:
            self.steps.put(step)

    def open(self):
        self.opened += 1

    def read(self, wait_s):
        try:
            step = self.steps.get(timeout=0.005)
        except queue.Empty:
            return None
        if isinstance(step, Exception):
            raise step
        return step

    def close(self):
        pass


@pytest.fixture
def predictor(bundle, head):
    result = Predictor()
    result.switch(Pair.open(bundle, head))
    return result


class Seen:
    def __init__(self):
        self.answers = queue.SimpleQueue()

    def on_answer(self, observation):
        self.answers.put((observation.source, observation.answer.label))

    def on_switch(self, pair):
        pass


@pytest.fixture
def run(predictor, monkeypatch):
    """A function that starts the feed of a source; returns it with the answers that it causes."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    feeds = []

    def start(source):
        seen = Seen()
        predictor.observe(seen)
        feed = Feed(source, predictor, lambda pair: Decoder(pair.input), every_s=0.0, now=lambda: 0.0)
        feeds.append(feed)
        feed.start()
        return feed, seen.answers

    yield start
    for feed in feeds:
        feed.close()


def wait_for(is_reached):
    pause = threading.Event()
    while not is_reached():
        pause.wait(0.005)


def picture(label, number=0):
    return Frame(png(square(label, number)))


def test_each_frame_is_answered_under_the_name_of_its_source(run):
    feed, answers = run(Scripted(picture("red"), Frame(png(square("blue")), "b.png")))
    assert [answers.get(timeout=WAIT_S) for _ in range(2)] == [("script", "red"), ("script b.png", "blue")]
    wait_for(lambda: feed.state.answered == 2)
    assert feed.as_json()["text"] == "ok"


def test_a_source_that_is_lost_is_told_and_opened_again(run):
    source = Scripted(picture("red"), SourceLost("unplugged"))
    feed, answers = run(source)
    answers.get(timeout=WAIT_S)
    wait_for(lambda: feed.state.condition == "lost")
    assert "unplugged" in feed.as_json()["text"]
    source.steps.put(picture("green"))
    assert answers.get(timeout=WAIT_S) == ("script", "green")
    wait_for(lambda: feed.state.condition == "ok")
    assert source.opened >= 2


def test_a_camera_that_shows_the_same_picture_is_frozen_until_it_shows_another(run):
    same = picture("red")
    source = Scripted(*[same] * (FROZEN_AFTER + 3))
    feed, _ = run(source)
    wait_for(lambda: feed.state.condition == "frozen")
    wait_for(source.steps.empty)
    assert feed.state.answered == FROZEN_AFTER - 1
    assert "restart the camera" in feed.as_json()["text"]
    source.steps.put(picture("red", 1))
    wait_for(lambda: feed.state.condition == "ok")
    assert feed.state.answered == FROZEN_AFTER


def test_equal_files_of_a_folder_are_not_frozen(run):
    raw = png(square("red"))
    feed, answers = run(Scripted(*[Frame(raw, f"{number}.png") for number in range(FROZEN_AFTER + 2)]))
    for _ in range(FROZEN_AFTER + 2):
        answers.get(timeout=WAIT_S)
    wait_for(lambda: feed.state.answered == FROZEN_AFTER + 2)


def test_a_file_waits_while_the_inputs_of_others_come_first(run, predictor, monkeypatch):
    answer = predictor.answer
    refusals = iter([True, True, True])

    def answer_when_free(*arguments):
        if next(refusals, False):
            raise Busy(8, 1)
        return answer(*arguments)

    monkeypatch.setattr(predictor, "answer", answer_when_free)
    feed, answers = run(Scripted(Frame(png(square("blue")), "b.png")))
    assert answers.get(timeout=WAIT_S) == ("script b.png", "blue")
    wait_for(lambda: feed.state.answered == 1)


def test_what_was_dropped_or_not_answered_is_counted_for_page_and_metrics(run):
    frames = [Frame(b"broken", "a.png"), Frame(png(square("green")), "b.png", dropped=3)]
    feed, _ = run(Scripted(*frames, SourceLost("unplugged"), SourceLost("again"), picture("red")))
    wait_for(lambda: feed.state.answered == 2)
    assert feed.as_json()["text"] == "ok; 1 of 3 could not be answered; 3 dropped"
    assert (feed.state.refused, feed.state.dropped, feed.state.lost) == (1, 3, 1)


def test_a_frame_that_is_no_input_is_counted_and_the_next_is_answered(run):
    feed, answers = run(Scripted(Frame(b"broken"), picture("green")))
    assert answers.get(timeout=WAIT_S) == ("script", "green")
    wait_for(lambda: feed.state.answered == 1)
    assert feed.state.refused == 1


def test_the_page_and_the_metrics_show_sources(source):
    from serving_site import Site, settings_for_tests

    service = Service(
        source, settings_for_tests(), Device(), IoSettings(sources=(Scripted(picture("red")),), every_s=0.0)
    )
    service.start()
    try:
        site = Site(service)
        wait_for(lambda: service.feeds[0].state.answered == 1)
        [shown] = site.ask("GET", "/status")[1]["sources"]
        assert (shown["name"], shown["condition"], shown["answered"]) == ("script", "ok", 1)
        text = site.ask("GET", "/metrics")[1].decode()
        assert 'headwater_source_up{source="script"} 1' in text
        assert 'headwater_source_answered_total{source="script"} 1' in text
        assert site.ask("GET", "/history")[1]["answers"][0]["source"] == "script"
    finally:
        service.close()


def test_what_somebody_has_sent_breaks_no_line_of_the_log(predictor, caplog):
    class Quoting:
        def decode(self, _raw):
            raise DataError("first 'x\nsource_ok source=camera' in line 2")

    feed = Feed(Scripted(Frame(b"x", "a.csv"), SourceEnded("all")), predictor, lambda _pair: Quoting(), every_s=0)
    feed.start()
    feed._thread.join(WAIT_S)
    assert feed.state.refused == 1
    assert "'x source_ok source=camera'" in caplog.text


def test_a_source_that_does_not_come_back_does_not_hold_up_the_end(predictor, monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.01)
    is_asked = threading.Event()
    go_on = threading.Event()

    class Stuck(Scripted):
        def read(self, wait_s):
            is_asked.set()
            assert go_on.wait(WAIT_S)

    feed = Feed(Stuck(), predictor, lambda pair: Decoder(pair.input), every_s=0)
    feed.start()
    assert is_asked.wait(WAIT_S)
    closer = threading.Thread(target=feed.close)
    closer.start()
    closer.join(WAIT_S / 10)
    has_ended = not closer.is_alive()
    go_on.set()
    closer.join(WAIT_S)
    feed._thread.join(WAIT_S)
    assert has_ended

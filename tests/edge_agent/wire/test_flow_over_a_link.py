"""Sender, carousel and receivers together, over a link that loses what it likes."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from chunked_blobs import CHUNK, blob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.fleet.carousel import Carousel
from edge_agent.wire.blobs.chunks import Incoming, decode_frame
from edge_agent.wire.blobs.flow import REPORT_AFTER_S, UPLOAD_REPORT_BYTES, WINDOW_BYTES, Pace, Receiving, Sending


class World:
    """A clock, and messages that take 20 ms each way, in order; each is lost with probability ``loss``."""

    def __init__(self, loss: float, seed: int) -> None:
        self.now = 0.0
        self.loss = loss
        self.rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, object]] = []
        self._tickets = itertools.count()

    def post(self, action) -> None:
        if self.rng.random() >= self.loss:
            heapq.heappush(self._queue, (self.now + 0.02, next(self._tickets), action))

    def run(self, tick, is_over, limit_s: float) -> None:
        while not is_over():
            assert self.now < limit_s, f"not complete after {limit_s} s of simulated time"
            if self._queue and self._queue[0][0] <= self.now + 0.1:
                self.now, _, action = heapq.heappop(self._queue)
                action()
            else:
                self.now += 0.1
            tick()


def upload(folder, *, chunks: int, loss: float, seed: int, resume=()) -> tuple[bytes, int, float]:
    """What an agent and a coordinator do with one update, in few lines. Returns what arrived, chunks sent, seconds."""
    outgoing = blob_of(chunks)
    world = World(loss, seed)
    if resume:
        begun = Incoming(outgoing.ref, folder)
        for index in resume:
            begun.add(decode_frame(outgoing.frame(index)))
        begun.close()
    receiving = Receiving(Incoming(outgoing.ref, folder), 0.0, UPLOAD_REPORT_BYTES)
    way = Sending(outgoing, Pace(WINDOW_BYTES))
    state = {"chunks": 0, "heard": -100.0, "whole": False, "receipt": False}

    def on_missing(missing):
        state["heard"] = world.now
        way.lacks(missing, world.now)
        for frame in way.due(world.now):
            state["chunks"] += len(decode_frame(frame).data) // CHUNK
            world.post(lambda frame=frame: on_frame(frame))

    def on_manifest():
        if state["whole"]:
            world.post(on_receipt)
            return
        receiving.restart(world.now)
        report()

    def on_frame(frame):
        if state["whole"]:
            return
        if receiving.add(decode_frame(frame), world.now):
            receiving.incoming.finish(folder / "whole", durable=False)
            state["whole"] = True
            world.post(on_receipt)
        elif receiving.report_due(world.now):
            report()

    def report():
        missing = receiving.missing
        world.post(lambda: on_missing(missing))

    def on_receipt():
        state["receipt"] = True

    def tick():
        if not state["whole"] and receiving.report_due(world.now):
            report()
        if world.now - state["heard"] >= 5.0:
            state["heard"] = world.now
            world.post(on_manifest)

    world.run(tick, lambda: state["receipt"], limit_s=100_000.0)
    return (folder / "whole").read_bytes(), state["chunks"], world.now


@settings(max_examples=150)
@given(chunks=st.integers(1, 120), loss=st.sampled_from([0.0, 0.02, 0.1, 0.4]), seed=st.integers(0, 2**32))
def test_an_upload_always_completes(tmp_path_factory, chunks, loss, seed):
    arrived, sent, _ = upload(tmp_path_factory.mktemp("up"), chunks=chunks, loss=loss, seed=seed)
    assert arrived == bytes(blob_of(chunks).data)
    assert sent >= chunks


def test_an_upload_without_loss_sends_each_chunk_once(tmp_path):
    _, sent, seconds = upload(tmp_path, chunks=3000, loss=0.0, seed=1)
    assert sent == 3000
    assert seconds < 1


@pytest.mark.parametrize("seed", range(3))
def test_an_upload_with_losses_sends_little_more_than_what_was_lost(tmp_path, seed):
    """Of the frames each try is lost with probability 0.05: 1.053 tries are needed on average."""
    _, sent, _ = upload(tmp_path, chunks=30_000, loss=0.05, seed=seed)
    assert sent < 30_000 / 0.95 * 1.15


def test_a_resumed_upload_sends_only_what_is_missing(tmp_path):
    there = [index for index in range(200) if index % 50 > 20]
    _, sent, _ = upload(tmp_path, chunks=200, loss=0.0, seed=1, resume=there)
    assert sent == 200 - len(there)


def download(folder, *, chunks: int, loss: float, seed: int, count: int) -> tuple[int, int, float]:
    """One blob to ``count`` receivers that share the frames. Returns chunks sent, questions asked, seconds."""
    outgoing = blob_of(chunks)
    world = World(loss, seed)
    names = [f"agent{number}" for number in range(count)]
    receivings = {name: Receiving(Incoming(outgoing.ref, folder / name), 0.0, 64 * CHUNK) for name in names}
    carousel = Carousel(outgoing)
    done = set[str]()
    tally = {"chunks": 0, "questions": 0}

    def ask(name):
        tally["questions"] += 1
        receivings[name].restart(world.now)
        missing = receivings[name].missing
        world.post(lambda: on_want(name, missing))

    def on_want(name, missing):
        if (way := carousel.listeners.get(name)) is not None:
            on_report(name, missing)
        elif name not in done:
            way = Sending(outgoing, Pace(WINDOW_BYTES))
            way.lacks(missing, world.now)
            carousel.join(name, way, world.now)
        pump()

    def pump():
        if world.now < 0.05 and len(carousel.listeners) + len(done) < count:
            return
        for frame in carousel.due(world.now):
            tally["chunks"] += len(decode_frame(frame).data) // CHUNK
            for name in carousel.listeners:
                world.post(lambda name=name, frame=frame: on_frame(name, frame))

    def on_frame(name, frame):
        if name in done:
            return
        if receivings[name].add(decode_frame(frame), world.now):
            receivings[name].incoming.finish(folder / name / "whole", durable=False)
            done.add(name)
            carousel.leave(name)
        elif receivings[name].report_due(world.now):
            report(name)

    def report(name):
        missing = receivings[name].missing
        world.post(lambda: on_report(name, missing))

    def on_report(name, missing):
        if (way := carousel.listeners.get(name)) is not None:
            way.lacks(missing, world.now)
            carousel.changed()
            pump()

    def tick():
        for name in sorted(set(names) - done):
            if receivings[name].ask_due(world.now):
                ask(name)
            elif receivings[name].report_due(world.now):
                report(name)
        pump()

    for name in names:
        ask(name)
    world.run(tick, lambda: len(done) == count, limit_s=100_000.0)
    data = bytes(outgoing.data)
    assert all((folder / name / "whole").read_bytes() == data for name in names)
    return tally["chunks"], tally["questions"], world.now


@settings(max_examples=100)
@given(
    chunks=st.integers(1, 100),
    loss=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 4),
)
def test_a_broadcast_always_completes_for_everybody(tmp_path_factory, chunks, loss, seed, count):
    download(tmp_path_factory.mktemp("down"), chunks=chunks, loss=loss, seed=seed, count=count)


def test_a_broadcast_without_loss_sends_each_chunk_once_for_all(tmp_path):
    sent, questions, seconds = download(tmp_path, chunks=3000, loss=0.0, seed=1, count=5)
    assert (sent, questions) == (3000, 5)
    assert seconds < REPORT_AFTER_S


@pytest.mark.parametrize("seed", range(3))
def test_a_download_with_losses_asks_a_few_times_and_not_for_each_chunk(tmp_path, seed):
    """Of the frames 5 % are lost in the first pass, 0.25 % in the second."""
    sent, questions, _ = download(tmp_path, chunks=20_000, loss=0.05, seed=seed, count=1)
    assert questions <= 12
    assert sent < 20_000 * 1.25

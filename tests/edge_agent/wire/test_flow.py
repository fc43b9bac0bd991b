from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.errors import ChunkError
from edge_agent.wire.chunks import Incoming, Outgoing, decode_frame
from edge_agent.wire.flow import IDLE_S, REPORT_AFTER_S, REPORT_EVERY, STALL_S, Receiving, Sending

CHUNK = 64


def blob(chunks: int) -> Outgoing:
    return Outgoing.of(np.random.default_rng(chunks).bytes(chunks * CHUNK), CHUNK)


def sending(chunks=20, receivers=("a",), window=4, ranges=None, now=0.0) -> Sending:
    outgoing = blob(chunks)
    return Sending(outgoing, ranges or [(0, chunks)], receivers, ahead_bytes=window * CHUNK, now=now)


def sent(frames) -> list[int]:
    return [decode_frame(frame).index for frame in frames]


# --- the sender ------------------------------------------------------------------------------------------------------


def test_a_sender_stops_at_its_window_and_goes_on_with_each_report():
    way = sending(window=4)
    assert sent(way.due(0)) == [0, 1, 2, 3]
    assert sent(way.due(0)) == []
    way.saw("a", 1, 0)
    assert sent(way.due(0)) == [4]
    way.saw("a", 5, 0)
    assert sent(way.due(0)) == [5, 6, 7, 8]


def test_a_window_is_never_smaller_than_two_chunks():
    assert sent(sending(window=0).due(0)) == [0, 1]


def test_only_what_was_asked_for_is_sent():
    way = sending(ranges=[(1, 3), (17, 20)], window=100)
    assert sent(way.due(0)) == [1, 2, 17, 18, 19]
    assert way.done


@pytest.mark.parametrize("ranges", [[(0, 21)], [(-1, 3)], [(3, 3)]])
def test_ranges_outside_the_blob_are_refused(ranges):
    with pytest.raises(ChunkError):
        sending(ranges=ranges)
    with pytest.raises(ChunkError):
        sending().again(ranges)


def test_nothing_is_sent_when_nobody_is_left():
    way = sending(receivers=("a", "b"))
    way.leave("a")
    way.leave("b")
    way.leave("never there")
    assert (sent(way.due(0)), way.done, way.receivers) == ([], True, ())


def test_a_report_that_is_old_or_too_good_to_be_true_opens_no_window():
    way = sending(chunks=100, window=4)
    list(way.due(0))
    way.saw("a", 1_000_000, 0)  # a liar, or one who counted what another sender sent
    assert len(sent(way.due(0))) == 4
    way.saw("a", 1, 0)
    way.saw("stranger", 50, 0)
    assert sent(way.due(0)) == []


def test_the_slowest_receiver_that_still_moves_holds_up_the_others():
    way = sending(receivers=("fast", "slow"), window=4)
    list(way.due(0))
    way.saw("fast", 4, 0.1)
    way.saw("slow", 1, 0.1)
    assert sent(way.due(0.1)) == [4]


def test_a_laggard_does_not_stall_the_others_and_counts_again_when_it_moves():
    way = sending(chunks=40, receivers=("fast", "stuck"), window=4)
    list(way.due(0))
    way.saw("fast", 4, 0.5)
    assert sent(way.due(STALL_S - 0.01)) == []
    assert sent(way.due(STALL_S)) == [4, 5, 6, 7]
    way.saw("fast", 8, STALL_S)
    way.saw("stuck", 6, STALL_S)
    assert sent(way.due(STALL_S)) == [8, 9]


def test_when_everybody_is_stuck_nothing_is_sent_beyond_the_window():
    way = sending(receivers=("a", "b"), window=4)
    list(way.due(0))
    assert sent(way.due(10 * STALL_S)) == []
    way.leave("a")
    assert sent(way.due(10 * STALL_S)) == []


def test_a_lost_chunk_goes_first_and_no_longer_counts_as_under_way():
    way = sending(window=6)
    assert sent(way.due(0)) == [0, 1, 2, 3, 4, 5]
    way.saw("a", 4, 0)  # 0, 1, 3 and 5 have come; 2 and 4 cannot come any more
    way.again([(2, 3), (4, 5)])
    assert sent(way.due(0)) == [2, 4, 6, 7, 8, 9]


def test_a_gap_that_is_reported_again_while_its_repair_is_under_way_is_sent_once():
    way = sending(window=6)
    list(way.due(0))
    way.saw("a", 4, 0)
    way.again([(2, 3)])
    first = sent(way.due(0))
    way.saw("a", 5, 0)
    way.again([(2, 3)])
    assert first.count(2) + sent(way.due(0)).count(2) == 1


def test_chunks_still_under_way_are_not_taken_for_lost():
    """A receiver that resumes lacks a hole in the middle; what is on its way into the hole is no loss."""
    way = sending(chunks=20, ranges=[(5, 15)], window=6)
    assert sent(way.due(0)) == [5, 6, 7, 8, 9, 10]
    way.saw("a", 2, 0)
    way.again([(7, 15)])
    assert sent(way.due(0)) == [11, 12]


@settings(max_examples=200)
@given(st.data())
def test_the_window_is_never_exceeded_whatever_is_reported(data):
    receivers = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    way = sending(chunks=30, receivers=receivers, window=data.draw(st.integers(2, 9)))
    now, told, out = 0.0, dict.fromkeys(receivers, 0), 0
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["due", "saw", "leave", "wait"]))
        if step == "due":
            moving = [told[name] for name in told]
            burst = sent(way.due(now))
            out += len(burst)
            if burst and now < STALL_S:
                assert out - min(moving) <= way.ahead
            if burst:
                assert out - max(moving) <= way.ahead
        elif step == "saw" and told:
            name = data.draw(st.sampled_from(sorted(told)))
            seen = data.draw(st.integers(told[name], out))
            way.saw(name, seen, now)
            told[name] = seen
        elif step == "leave" and len(told) > 1:
            name = data.draw(st.sampled_from(sorted(told)))
            way.leave(name)
            del told[name]
        else:
            now += data.draw(st.floats(0, 1))


# --- the receiver ----------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver(tmp_path):
    """A receiver of 40 chunks and a function that hands it some of them."""
    outgoing = blob(40)
    receiving = Receiving(Incoming(outgoing.ref, tmp_path), 0.0)
    receiving.restart(0.0)

    def hear(*indexes, now):
        return [receiving.add(decode_frame(outgoing.frame(index)), now) for index in indexes]

    yield receiving, hear
    receiving.incoming.discard()


def test_a_report_is_due_after_so_many_frames(receiver):
    receiving, hear = receiver
    hear(*range(REPORT_EVERY - 1), now=0.1)
    assert not receiving.report_due(0.1)
    hear(REPORT_EVERY - 1, now=0.1)
    assert receiving.report_due(0.1)
    assert not receiving.report_due(0.1), "saying so counts as telling"


def test_a_report_is_due_after_a_while_when_there_is_news(receiver):
    receiving, hear = receiver
    assert not receiving.report_due(10 * REPORT_AFTER_S)
    hear(0, now=5.0)
    assert receiving.report_due(5.0)
    hear(1, now=5.1)
    assert not receiving.report_due(5.0 + REPORT_AFTER_S - 0.01)
    assert receiving.report_due(5.0 + REPORT_AFTER_S)
    assert not receiving.report_due(5.0 + 10 * REPORT_AFTER_S)


def test_duplicates_are_seen_too_because_they_filled_the_window(receiver):
    receiving, hear = receiver
    hear(0, 0, 0, now=0.1)
    assert (receiving.seen, receiving.incoming.chunks.present) == (3, 1)


def test_silence_is_answered_with_a_question_once_in_a_while(receiver):
    receiving, hear = receiver
    hear(0, now=0.5)
    assert not receiving.ask_due(0.5 + IDLE_S - 0.01)
    assert receiving.ask_due(0.5 + IDLE_S)
    assert not receiving.ask_due(0.5 + IDLE_S), "saying so counts as asking"
    assert receiving.ask_due(0.5 + 2 * IDLE_S)


def test_a_hole_is_asked_for_as_soon_as_the_end_has_passed(receiver):
    receiving, hear = receiver
    hear(*(i for i in range(39) if i != 7), now=0.1)
    assert not receiving.ask_due(0.1)
    hear(39, now=0.1)
    assert receiving.ask_due(0.1)
    assert not receiving.ask_due(0.1)


def test_a_repair_is_not_asked_for_again_with_each_of_its_chunks(receiver):
    receiving, hear = receiver
    lost = {3, 7, 21}
    hear(*(i for i in range(40) if i not in lost), now=0.1)
    assert receiving.ask_due(0.1)
    receiving.restart(0.1)
    questions = []
    for index in sorted(lost):
        hear(index, now=0.2)
        questions.append(receiving.ask_due(0.2))
    assert questions == [False, False, False]


def test_a_hole_in_the_repair_is_asked_for_when_the_repair_has_passed(receiver):
    receiving, hear = receiver
    hear(*(i for i in range(40) if i not in {3, 7, 21}), now=0.1)
    receiving.restart(0.1)
    hear(3, 21, now=0.2)
    assert receiving.ask_due(0.2)


def test_a_resumed_download_does_not_ask_with_each_chunk(tmp_path):
    outgoing = blob(10)
    first = Incoming(outgoing.ref, tmp_path)
    for index in (0, 9):
        first.add(decode_frame(outgoing.frame(index)))
    first.close()
    receiving = Receiving(Incoming(outgoing.ref, tmp_path), 0.0)
    receiving.restart(0.0)
    questions = []
    for index in range(1, 8):
        receiving.add(decode_frame(outgoing.frame(index)), 0.1)
        questions.append(receiving.ask_due(0.1))
    assert not any(questions)
    receiving.incoming.discard()


def test_nothing_is_asked_once_everything_is_there(receiver):
    receiving, hear = receiver
    assert hear(*range(40), now=0.1) == [False] * 39 + [True]
    assert not receiving.ask_due(100.0)


def test_gaps_are_counted_below_the_highest_chunk_since_the_last_question(receiver):
    receiving, hear = receiver
    hear(0, 1, 5, 6, 9, now=0.1)
    assert receiving.gaps() == ((2, 5), (7, 9))
    receiving.restart(0.2)
    assert receiving.gaps() == ()
    hear(2, now=0.3)
    assert receiving.gaps() == ()
    hear(4, now=0.3)
    assert receiving.gaps() == ((3, 4),)


def test_the_next_moment_of_interest_is_never_missed(receiver):
    receiving, hear = receiver
    hear(0, now=0.0)
    now, reports, questions = 0.0, [], []
    for _ in range(8):
        now += max(receiving.due_in(now), 1e-9)
        if receiving.ask_due(now):
            questions.append(round(now, 3))
        if receiving.report_due(now):
            reports.append(round(now, 3))
    assert reports == [REPORT_AFTER_S]
    assert questions[:2] == [IDLE_S, 2 * IDLE_S]


# --- both together, over a link that loses ---------------------------------------------------------------------------


class World:
    """A clock, and messages that take 20 ms each way, in order; each is lost with probability ``loss``."""

    def __init__(self, loss: float, seed: int) -> None:
        self.now, self.loss, self.rng = 0.0, loss, np.random.default_rng(seed)
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
    """What an agent and a coordinator do with one update, in few lines. Returns what arrived, frames sent, seconds."""
    outgoing, world = blob(chunks), World(loss, seed)
    if resume:
        begun = Incoming(outgoing.ref, folder)
        for index in resume:
            begun.add(decode_frame(outgoing.frame(index)))
        begun.close()
    receiving = Receiving(Incoming(outgoing.ref, folder), 0.0)
    state = {"way": None, "frames": 0, "heard": -100.0, "whole": False, "receipt": False}

    def pump():
        for frame in state["way"].due(world.now):
            state["frames"] += 1
            world.post(lambda frame=frame: on_frame(frame))

    def on_manifest():
        if state["whole"]:
            world.post(on_receipt)
            return
        receiving.restart(world.now)
        missing = receiving.incoming.chunks.missing()
        world.post(lambda: on_grant(missing))

    def on_grant(missing):
        state["heard"] = world.now
        state["way"] = Sending(outgoing, missing, ("coordinator",), ahead_bytes=16 * CHUNK, now=world.now)
        pump()

    def on_frame(frame):
        if state["whole"]:
            return
        if receiving.add(decode_frame(frame), world.now):
            receiving.incoming.finish(folder / "whole", durable=False)
            state["whole"] = True
            world.post(on_receipt)
        elif receiving.report_due(world.now):
            acknowledge()

    def acknowledge():
        seen, gaps = receiving.seen, receiving.gaps()
        world.post(lambda: on_ack(seen, gaps))

    def on_ack(seen, gaps):
        state["heard"] = world.now
        state["way"].saw("coordinator", seen, world.now)
        if gaps:
            state["way"].again(gaps)
        pump()

    def on_receipt():
        state["receipt"] = True

    def tick():
        if not state["whole"] and receiving.report_due(world.now):
            acknowledge()
        if world.now - state["heard"] >= 5.0:
            state["heard"] = world.now
            world.post(on_manifest)

    world.run(tick, lambda: state["receipt"], limit_s=3000.0)
    return (folder / "whole").read_bytes(), state["frames"], world.now


@settings(max_examples=150)
@given(chunks=st.integers(1, 120), loss=st.sampled_from([0.0, 0.02, 0.1, 0.4]), seed=st.integers(0, 2**32))
def test_an_upload_always_completes(tmp_path_factory, chunks, loss, seed):
    arrived, frames, _ = upload(tmp_path_factory.mktemp("up"), chunks=chunks, loss=loss, seed=seed)
    assert arrived == bytes(blob(chunks)._data)
    assert frames >= chunks


def test_an_upload_without_loss_sends_each_chunk_once(tmp_path):
    _, frames, seconds = upload(tmp_path, chunks=300, loss=0.0, seed=1)
    assert frames == 300
    assert seconds < 300 / 8 * 0.04 + 1


@pytest.mark.parametrize("seed", range(3))
def test_an_upload_with_losses_sends_little_more_than_what_was_lost(tmp_path, seed):
    """Of 600 chunks each try is lost with probability 0.05: 632 tries are needed on average."""
    _, frames, _ = upload(tmp_path, chunks=600, loss=0.05, seed=seed)
    assert frames < 600 / 0.95 * 1.1


def test_a_resumed_upload_sends_only_what_is_missing(tmp_path):
    there = [index for index in range(200) if index % 50 > 20]
    _, frames, _ = upload(tmp_path, chunks=200, loss=0.0, seed=1, resume=there)
    assert frames == 200 - len(there)


def download(folder, *, chunks: int, loss: float, seed: int, count: int) -> tuple[int, int, float]:
    """One blob to ``count`` receivers that share the frames. Returns frames sent, questions asked, seconds."""
    outgoing, world = blob(chunks), World(loss, seed)
    names = [f"agent{number}" for number in range(count)]
    receivings = {name: Receiving(Incoming(outgoing.ref, folder / name), 0.0) for name in names}
    done: set[str] = set()
    wanted: dict[str, tuple[tuple[int, int], ...]] = {}
    ways: list[Sending] = []
    tally = {"frames": 0, "questions": 0, "first": 0.0}

    def ask(name):
        tally["questions"] += 1
        receivings[name].restart(world.now)
        missing = receivings[name].incoming.chunks.missing()
        world.post(lambda: on_want(name, missing))

    def on_want(name, missing):
        for way in ways:
            way.leave(name)
        if not wanted:
            tally["first"] = world.now
        wanted[name] = missing

    def start():
        numbers = sorted({i for missing in wanted.values() for a, b in missing for i in range(a, b)})
        way = Sending(outgoing, [(i, i + 1) for i in numbers], wanted, ahead_bytes=32 * CHUNK, now=world.now)
        ways[:] = [*(w for w in ways if w.receivers), way]
        wanted.clear()

    def pump():
        for way in ways:
            for frame in way.due(world.now):
                tally["frames"] += 1
                for name in way.receivers:
                    world.post(lambda name=name, frame=frame: on_frame(name, frame))

    def on_frame(name, frame):
        if name in done:
            return
        if receivings[name].add(decode_frame(frame), world.now):
            receivings[name].incoming.finish(folder / name / "whole", durable=False)
            done.add(name)
            for way in ways:
                way.leave(name)
        elif receivings[name].report_due(world.now):
            report(name)

    def report(name):
        seen = receivings[name].seen
        world.post(lambda: [way.saw(name, seen, world.now) for way in ways])

    def tick():
        for name in set(names) - done:
            if receivings[name].ask_due(world.now):
                ask(name)
            elif receivings[name].report_due(world.now):
                report(name)
        if wanted and (len(wanted) + len(done) == count or world.now - tally["first"] >= 0.05):
            start()
        pump()

    for name in names:
        ask(name)
    world.run(tick, lambda: len(done) == count, limit_s=3000.0)
    data = bytes(outgoing._data)
    assert all((folder / name / "whole").read_bytes() == data for name in names)
    return tally["frames"], tally["questions"], world.now


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
    frames, questions, _ = download(tmp_path, chunks=300, loss=0.0, seed=1, count=5)
    assert (frames, questions) == (300, 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_download_with_losses_asks_a_few_times_and_not_for_each_chunk(tmp_path, seed):
    """Of 400 chunks 20 are lost in the first pass, one in the second: about three questions."""
    frames, questions, _ = download(tmp_path, chunks=400, loss=0.05, seed=seed, count=1)
    assert questions <= 12
    assert frames < 400 * 1.25

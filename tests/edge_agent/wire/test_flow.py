"""Flow control of a sender and of a receiver, each on its own."""

from __future__ import annotations

import pytest
from chunked_blobs import CHUNK, blob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.core.errors import ChunkError
from edge_agent.wire.blobs.chunks import Incoming, Outgoing, decode_frame
from edge_agent.wire.blobs.flow import (
    FIRST_BYTES,
    IDLE_S,
    MEASURED_S,
    REPORT_AFTER_S,
    WINDOW_BYTES,
    Meter,
    Pace,
    Receiving,
    Sending,
)

SIZE = 4096
"""Two chunks are what may be under way at first."""


def sending(chunks=40, *, pace=None, ranges=None) -> Sending:
    outgoing = Outgoing.of(bytes(chunks * SIZE), SIZE)
    way = Sending(outgoing, pace or Pace(WINDOW_BYTES))
    way.lacks(ranges or [(0, chunks)], 0.0)
    return way


def sent(way, now) -> list[int]:
    """Numbers of the chunks that are sent now."""
    return [index for start, stop in spans(way, now) for index in range(start, stop)]


def spans(way, now) -> list[tuple[int, int]]:
    """The chunks of each frame that is sent now."""
    frames = [decode_frame(frame) for frame in way.due(now)]
    return [(frame.index, frame.index + len(frame.data) // SIZE) for frame in frames]


def reports(way, now) -> list[bool]:
    return [decode_frame(frame).report for frame in way.due(now)]


# --- the sender ------------------------------------------------------------------------------------------------------


def test_two_chunks_are_sent_first_and_more_with_each_report():
    way = sending()
    assert sent(way, 0.0) == [0, 1]
    assert sent(way, 0.0) == []
    way.lacks([(2, 40)], 0.1)
    grown = sent(way, 0.1)
    assert grown == [2, 3, 4, 5, 6, 7], "at most three times as much"


def test_a_link_of_8_kb_a_second_has_one_second_of_it_under_way():
    """A chunk takes 0.512 s; the report comes 0.1 s after it."""
    way = sending(chunks=100)
    clock = 0.0
    assert sent(way, clock) == [0, 1]
    for number in range(1, 60):
        clock = number * 0.512 + 0.1
        way.lacks([(number, 100)], clock)
        assert sent(way, clock) == [number + 1]
        assert way.pace.under_way == 2 * SIZE
    assert way.pace.rate == pytest.approx(8000, rel=0.02)


@pytest.mark.parametrize("rate, chunks", [(40_000, 9), (200_000, 48)])
def test_what_is_under_way_follows_the_rate(rate, chunks):
    """Reports come at once, and the queue is never empty: what is under way settles at one second."""
    way = sending(chunks=3000)
    most = list[int]()
    clock = 0.0
    queue = list[tuple[int, int]]()
    for _ in range(100):
        queue += spans(way, clock)
        most.append(sum(stop - start for start, stop in queue))
        start, stop = queue.pop(0)
        clock += (stop - start) * SIZE / rate
        way.lacks([(stop, 3000)], clock)
    assert max(most[50:]) == pytest.approx(chunks, rel=0.25)
    assert way.pace.rate == pytest.approx(rate, rel=0.1)


def test_a_fast_link_has_the_whole_window_of_large_frames():
    way = sending(chunks=2000)
    clock = 0.0
    arrived = 0
    for _ in range(12):
        frames = [decode_frame(frame) for frame in way.due(clock)]
        arrived += sum(len(frame.data) // SIZE for frame in frames)
        clock += 0.002
        way.lacks([(arrived, 2000)], clock)
    assert way.pace.window(SIZE) == WINDOW_BYTES
    assert len(frames[0].data) == 14 * SIZE, "as many as fit into 60 KiB"


def test_reports_are_asked_for_after_each_half_of_the_window_and_at_the_end():
    way = sending(chunks=5)
    assert reports(way, 0.0) == [True, True]
    way.lacks([(2, 5)], 0.01)
    assert reports(way, 0.01) == [False, False, True]


def test_a_rate_that_falls_is_followed_and_one_late_report_is_not_believed_at_once():
    pace = Pace(WINDOW_BYTES)
    pace.rate = 100_000.0
    pace.round_trip_s = 0.05
    frame = pace.sent(0, 1, SIZE, 0.0)
    pace.arrived([frame], 4.0)
    assert pace.rate == pytest.approx(70_000)
    for number in range(1, 20):
        pace.arrived([pace.sent(0, 1, SIZE, 4.0 * number)], 4.0 * (number + 1))
    assert pace.rate == pytest.approx(SIZE / 4.0)
    assert pace.window(SIZE) == FIRST_BYTES


def test_small_messages_over_a_fast_link_do_not_make_it_slow():
    """4 KiB in 40 ms are 100 kB/s at least: the link was not full."""
    pace = Pace(WINDOW_BYTES)
    pace.arrived([pace.sent(0, 1, SIZE, 0.0)], 0.004)
    for number in range(10):
        pace.arrived([pace.sent(0, 1, SIZE, float(number))], number + 0.04)
    assert pace.rate == pytest.approx(SIZE / 0.004)


def test_only_what_was_asked_for_is_sent():
    way = sending(ranges=[(1, 2), (17, 18)])
    assert sent(way, 0) == [1, 17]
    assert way.is_over


@pytest.mark.parametrize("ranges", [[(0, 41)], [(-1, 3)], [(3, 3)]])
def test_ranges_outside_the_blob_are_refused_and_change_nothing(ranges):
    way = sending(ranges=[(0, 2)])
    with pytest.raises(ChunkError):
        way.lacks(ranges, 0.0)
    assert sent(way, 0.0) == [0, 1]


def test_what_is_under_way_is_not_sent_again_when_it_is_asked_for_again():
    way = sending()
    assert sent(way, 0.0) == [0, 1]
    for now in (0.5, 1.0, 1.4):
        way.lacks([(0, 40)], now)
        assert sent(way, now) == []


def test_it_is_sent_again_when_the_link_has_had_twice_the_time():
    """Of an unknown link 8192 B/s are expected: 0.5 + 2 * 0.5 s for the first chunk, and 1 s more for the second."""
    way = sending()
    sent(way, 0.0)
    way.lacks([(0, 40)], 1.6)
    assert sent(way, 1.6) == [0]
    way.lacks([(0, 40)], 2.4)
    assert sent(way, 2.4) == []


def test_a_receiver_that_was_busy_for_long_gets_nothing_twice():
    """A coordinator that syncs 45 MB reports late; what is behind the chunks that it reports still comes."""
    way = sending()
    assert sent(way, 0.0) == [0, 1]
    way.lacks([(1, 40)], 60.0)
    assert 1 not in sent(way, 60.0)


def test_the_time_doubles_while_nothing_arrives():
    way = sending(chunks=2)
    times = []
    now = 0.0
    sent(way, now)
    while len(times) < 4:
        now += 0.1
        way.lacks([(0, 2)], now)
        if sent(way, now):
            times.append(now)
    gaps = [b - a for a, b in zip(times[::2], times[2::2], strict=False)]
    assert gaps[0] > 2.5, "the first pair took 1.5 to 2.5 s"


def test_of_chunks_sent_twice_the_rate_is_not_measured():
    """Which of the two has arrived is unknown: if the first, the second would make the link look fast."""
    way = sending()
    sent(way, 0.0)
    way.lacks([(0, 40)], 3.0)
    sent(way, 3.0)
    way.lacks([(2, 40)], 3.01)
    assert way.pace.rate == 0.0
    assert way.pace.under_way == 0


def test_a_lost_chunk_is_sent_again_when_two_later_ones_have_arrived():
    way = sending()
    assert sent(way, 0.0) == [0, 1]
    way.lacks([(0, 1), (2, 40)], 0.1)
    assert sent(way, 0.1)[0] == 2, "neighbours may have changed places"
    way.lacks([(0, 1), (4, 40)], 0.2)
    assert sent(way, 0.2)[0] == 0


def test_chunks_still_under_way_are_not_taken_for_lost():
    """A receiver that resumes lacks a hole in the middle; what is on its way into the hole is no loss."""
    way = sending(ranges=[(5, 15)])
    assert sent(way, 0.0) == [5, 6]
    way.lacks([(6, 15)], 0.1)
    assert 6 not in sent(way, 0.1)


def test_what_lies_beyond_the_last_of_64_ranges_stays_as_it_was():
    way = sending(chunks=200)
    sent(way, 0.0)
    way.lacks([(number, number + 1) for number in range(2, 130, 2)], 0.1)
    assert list(way.need[129:]) == [1] * 71
    assert list(way.need[3:130:2]) == [0] * 63 + [1]


def test_a_cut_connection_has_everything_under_way_sent_again():
    way = sending()
    assert sent(way, 0.0) == [0, 1]
    way.cut()
    assert way.pace.under_way == 0
    assert sent(way, 0.1) == [0, 1]


def test_two_blobs_share_the_link():
    pace = Pace(WINDOW_BYTES)
    first = sending(pace=pace)
    second = sending(pace=pace)
    assert sent(first, 0.0) == [0, 1]
    assert sent(second, 0.0) == []
    first.arrived(0.1)
    assert sent(second, 0.1)[:2] == [0, 1]


@settings(max_examples=200)
@given(st.data())
def test_no_more_is_under_way_than_the_window_whatever_is_reported(data):
    """And no chunk is sent twice within the time that the link has for it, unless a later one has arrived."""
    way = sending(chunks=30)
    now = 0.0
    lacking = set(range(30))
    out = dict[tuple[int, int], float]()
    for _ in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.floats(0, 1))
        largest = 0
        for span in spans(way, now):
            assert now - out.get(span, -1e9) >= 0.5 or len(lacking) < 30
            out[span] = now
            largest = max(largest, way.pace.window(SIZE))
        assert not largest or way.pace.under_way <= largest
        for start, stop in data.draw(st.lists(st.sampled_from(sorted(out)), max_size=2)) if out else ():
            lacking -= set(range(start, stop))
        if lacking:
            way.lacks([(index, index + 1) for index in sorted(lacking)], now)
    assert {index for index, flag in enumerate(way.need) if flag} <= lacking


# --- the rate of a transfer ------------------------------------------------------------------------------------------


def test_a_meter_knows_the_rate_after_two_seconds_and_leaves_out_interruptions():
    meter = Meter()
    meter.begin(10.0)
    for number in range(1, 11):
        assert meter.rate == 0.0 or number * 0.5 > MEASURED_S
        meter.add(4000, 10.0 + 0.5 * number)
    assert meter.rate == pytest.approx(8000)
    meter.add(4000, 100.0)
    assert meter.rate == pytest.approx(44_000 / 7), "85 s without a byte count as two"


@pytest.mark.parametrize("apart_s", [0.01, 0.3, 1.0, 1.7])
def test_the_rate_is_that_of_the_last_ten_seconds(apart_s):
    """100 s at 1 kB/s, then 12 s at 100 kB/s: nothing of the slow time is left, whatever comes at once."""
    meter = Meter()
    now = 0.0
    meter.begin(now)
    for rate, seconds in ((1_000, 100), (100_000, 12)):
        end = now + seconds
        while now < end:
            now += apart_s
            meter.add(round(rate * apart_s), now)
        assert meter.rate == pytest.approx(rate, rel=0.001)
    assert len(meter._spans) <= 12


# --- the receiver ----------------------------------------------------------------------------------------------------

REPORT_CHUNKS = 8


@pytest.fixture
def receiver(tmp_path):
    """A receiver of 40 chunks and a function that hands it some of them."""
    outgoing = blob_of(40)
    receiving = Receiving(Incoming(outgoing.ref, tmp_path), 0.0, REPORT_CHUNKS * CHUNK)

    def hear(*indexes, now, report=False):
        return [receiving.add(decode_frame(outgoing.frame(index, report=report)), now) for index in indexes]

    yield receiving, hear
    receiving.incoming.discard()


def test_a_report_is_due_when_the_sender_asks_for_one(receiver):
    receiving, hear = receiver
    hear(0, now=0.1)
    assert not receiving.report_due(0.1)
    hear(1, now=0.1, report=True)
    assert receiving.report_due(0.1)
    assert not receiving.report_due(0.1), "saying so counts as telling"


def test_a_report_is_due_after_so_many_bytes(receiver):
    receiving, hear = receiver
    hear(*range(REPORT_CHUNKS - 1), now=0.1)
    assert not receiving.report_due(0.1)
    hear(REPORT_CHUNKS - 1, now=0.1)
    assert receiving.report_due(0.1)


def test_a_report_is_due_after_a_while_when_there_is_news(receiver):
    receiving, hear = receiver
    assert not receiving.report_due(10 * REPORT_AFTER_S)
    hear(0, now=5.0)
    assert receiving.report_due(5.0)
    hear(1, now=5.1)
    assert not receiving.report_due(5.0 + REPORT_AFTER_S - 0.01)
    assert receiving.report_due(5.0 + REPORT_AFTER_S)
    assert not receiving.report_due(5.0 + 10 * REPORT_AFTER_S)


def test_a_chunk_that_comes_twice_is_there_once(receiver):
    receiving, hear = receiver
    hear(0, 0, 0, now=0.1)
    assert receiving.incoming.chunks.present == 1
    assert receiving.missing == ((1, 40),)


def test_silence_is_answered_with_a_question_after_longer_and_longer_pauses(receiver):
    receiving, hear = receiver
    hear(0, now=0.5)
    now = 0.5
    asked = []
    while now < 30:
        now += 0.01
        if receiving.ask_due(now):
            asked.append(now)
    gaps = [b - a for a, b in zip([0.5, *asked], asked, strict=False)]
    assert [round(gap) for gap in gaps[:6]] == [1, 2, 4, 8, 8]
    assert asked[0] == pytest.approx(0.5 + IDLE_S, abs=0.02)
    hear(1, now=now)
    assert receiving.ask_due(now + IDLE_S + 0.01) is False, "30 s between two frames: this is no silence yet"


def test_a_receiver_behind_a_slow_link_is_patient(receiver):
    """A frame each second: four of them may be late before it asks."""
    receiving, hear = receiver
    for number in range(6):
        hear(number, now=float(number))
        assert not receiving.ask_due(number + 0.99)
    assert not receiving.ask_due(5 + 3.9)
    assert receiving.ask_due(5 + 4.0)


def test_a_receiver_whose_requests_take_long_to_be_answered_waits_for_twice_that(receiver):
    """An answer after 2 s: the next question follows 4 s of silence, and not one."""
    receiving, hear = receiver
    receiving.restart(0.0)
    hear(0, now=2.0)
    assert receiving.answer_s == 2.0
    assert not receiving.ask_due(5.9)
    assert receiving.ask_due(6.1)


def test_nothing_is_asked_once_everything_is_there(receiver):
    receiving, hear = receiver
    assert hear(*range(40), now=0.1) == [False] * 39 + [True]
    assert not receiving.ask_due(100.0)


def test_the_next_moment_of_interest_is_never_missed(receiver):
    receiving, hear = receiver
    hear(0, now=0.0)
    now = 0.0
    told = []
    questions = []
    for _ in range(8):
        now += max(receiving.due_in(now), 1e-9)
        if receiving.ask_due(now):
            questions.append(round(now, 3))
        if receiving.report_due(now):
            told.append(round(now, 3))
    assert told == [REPORT_AFTER_S]
    assert questions[:2] == [IDLE_S, 3 * IDLE_S]

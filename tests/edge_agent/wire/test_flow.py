"""Flow control of a sender and of a receiver, each on its own."""

from __future__ import annotations

import pytest
from chunked_blobs import CHUNK, blob_of
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.errors import ChunkError
from edge_agent.wire.chunks import (
    IDLE_S,
    REPORT_AFTER_S,
    REPORT_EVERY,
    STALL_S,
    Incoming,
    Receiving,
    Sending,
    decode_frame,
)


def sending(chunks=20, receivers=("a",), window=4, ranges=None, now=0.0) -> Sending:
    outgoing = blob_of(chunks)
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
    outgoing = blob_of(40)
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
    outgoing = blob_of(10)
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

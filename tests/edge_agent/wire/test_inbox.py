"""What waits between a network thread and its program: bounded, with the important first, and its age is known."""

from __future__ import annotations

import queue

import pytest

from edge_agent.wire.inbox import MESSAGE_BYTES, Inbox, Rank
from edge_agent.wire.transport import Connected, Message, Woken


class Seconds:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rank_of(message: Message) -> Rank:
    """Topics under ``h/`` are urgent, and those with ``=`` replace each other."""
    return Rank(is_urgent=message.topic.startswith("h/"), replaces=message.topic if "=" in message.topic else "")


def received(inbox: Inbox) -> list[object]:
    events = []
    while True:
        try:
            event = inbox.get(0)
        except queue.Empty:
            return events
        events.append((event.topic, event.payload) if isinstance(event, Message) else event)


def test_urgent_messages_come_first_and_others_in_their_order():
    inbox = Inbox(rank_of)
    inbox.put(Connected(1))
    for topic in ("a", "b", "h/1", "c", "h/2"):
        assert inbox.put_message(Message(topic, b"x"))
    assert received(inbox) == [("h/1", b"x"), ("h/2", b"x"), Connected(1), ("a", b"x"), ("b", b"x"), ("c", b"x")]


def test_a_message_that_is_repeated_takes_the_place_of_the_one_that_waits():
    inbox = Inbox(rank_of)
    for topic, payload in (("hello=a", b"1"), ("hello=b", b"1"), ("hello=a", b"22"), ("chunk", b"1"), ("chunk", b"2")):
        assert inbox.put_message(Message(topic, payload))
    assert inbox.waiting_bytes == 4 * MESSAGE_BYTES + 5
    assert received(inbox) == [("hello=a", b"22"), ("hello=b", b"1"), ("chunk", b"1"), ("chunk", b"2")]
    assert inbox.waiting_bytes == 0


def test_a_full_inbox_refuses_ordinary_messages_and_keeps_room_for_urgent_ones():
    inbox = Inbox(rank_of, limit_bytes=16 * (MESSAGE_BYTES + 10))
    taken = sum(inbox.put_message(Message("chunk", bytes(10))) for _ in range(100))
    assert taken == 14
    assert inbox.put_message(Message("h/1", bytes(10)))
    assert inbox.put_message(Message("h/2", bytes(10)))
    assert not inbox.put_message(Message("h/3", bytes(10))), "the bound holds for all of them"
    inbox.put(Connected(2))
    assert len(received(inbox)) == 17
    assert inbox.put_message(Message("chunk", bytes(10))), "once it is read again, all is well"


def test_messages_that_grow_when_they_are_repeated_stay_below_the_bound():
    limit_bytes = 100 * (MESSAGE_BYTES + 10)
    inbox = Inbox(rank_of, limit_bytes=limit_bytes)
    for topic in ("hello=a", "hello=b", "hello=c"):
        assert inbox.put_message(Message(topic, b"1"))
        inbox.put_message(Message(topic, bytes(limit_bytes // 2)))
    assert inbox.waiting_bytes <= limit_bytes
    assert received(inbox) == [("hello=a", bytes(limit_bytes // 2)), ("hello=b", b"1"), ("hello=c", b"1")]


def test_a_repetition_that_is_not_larger_is_taken_by_a_full_inbox():
    inbox = Inbox(rank_of, limit_bytes=16 * (MESSAGE_BYTES + 10))
    assert inbox.put_message(Message("hello=a", bytes(10)))
    while inbox.put_message(Message("chunk", bytes(10))):
        pass
    assert inbox.put_message(Message("hello=a", b"newest.txt"))
    assert inbox.get(0) == Message("hello=a", b"newest.txt")


def test_the_oldest_event_tells_how_far_the_reader_is_behind():
    clock = Seconds()
    inbox = Inbox(rank_of, clock=clock)
    assert inbox.oldest_s == 0
    inbox.put_message(Message("hello=a", b"1"))
    clock.now += 7
    inbox.put_message(Message("h/1", b"1"))
    inbox.put_message(Message("hello=a", b"2"))
    assert inbox.oldest_s == 7, "a repetition does not make it younger"
    inbox.get(0)
    assert inbox.oldest_s == 7, "the urgent one was handled first"
    inbox.get(0)
    assert inbox.oldest_s == 0


def test_waking_a_reader_that_is_stuck_many_times_leaves_one_event():
    inbox = Inbox()
    for _ in range(5):
        inbox.put(Woken())
    assert received(inbox) == [Woken()]


def test_waiting_for_nothing_ends_in_time():
    with pytest.raises(queue.Empty):
        Inbox().get(0.01)

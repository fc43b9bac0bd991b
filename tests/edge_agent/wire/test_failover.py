"""Which broker of a list a client connects to, when it leaves one, and when it returns."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from edge_agent.wire.failover import (
    CALM_S,
    FIRST_BACKOFF_S,
    LEAST_PAUSE_S,
    SILENCE_SHARE,
    Failover,
    LinkState,
    Strictness,
    Vigil,
    longest_pause_s,
    order_for,
)
from edge_agent.wire.transport import LeftBroker

URLS = ("mqtts://a", "mqtts://b", "mqtts://c")
CLIENTS = [f"device-{number}" for number in range(3000)]


class Clock:
    """A time that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Longest(random.Random):
    """Random pauses of the greatest length."""

    def uniform(self, low, high):
        return high


@pytest.fixture
def clock():
    return Clock()


def failover(clock, urls=URLS, **options):
    return Failover(urls, Longest(), clock, **options)


# --- the order -------------------------------------------------------------------------------------------------------


def test_clients_spread_evenly_over_the_brokers():
    firsts = Counter(order_for(client, URLS)[0] for client in CLIENTS)
    assert set(firsts) == set(URLS)
    assert max(firsts.values()) < 1.1 * len(CLIENTS) / len(URLS)


def test_clients_of_a_lost_broker_spread_evenly_over_the_others():
    seconds = Counter(order_for(client, URLS)[1] for client in CLIENTS if order_for(client, URLS)[0] == URLS[0])
    assert set(seconds) == set(URLS[1:])
    assert max(seconds.values()) < 1.1 * sum(seconds.values()) / 2


def test_the_order_of_the_file_does_not_matter_and_a_removed_broker_moves_its_own_clients_alone():
    for client in CLIENTS[:200]:
        order = order_for(client, URLS)
        assert order_for(client, URLS[::-1]) == order
        assert order_for(client, URLS[:2]) == tuple(url for url in order if url in URLS[:2])


def test_the_order_is_the_same_in_every_process_and_release():
    """A client of another release in the same place would load the brokers unevenly after each update."""
    assert [order_for(client, URLS) for client in ("porch", "attic", "home-coordinator")] == [
        ("mqtts://c", "mqtts://b", "mqtts://a"),
        ("mqtts://b", "mqtts://c", "mqtts://a"),
        ("mqtts://b", "mqtts://c", "mqtts://a"),
    ]


# --- after a failure -------------------------------------------------------------------------------------------------


def test_a_lost_broker_is_followed_by_the_next_one_and_pauses_grow_only_after_the_whole_list(clock):
    brokers = failover(clock)
    brokers.connected()
    tried = []
    pauses = []
    was_up = True
    for _ in range(10):
        tried.append(brokers.url)
        pauses.append(brokers.failed("refused", was_up=was_up))
        was_up = False
    assert tried == [*URLS, *URLS, *URLS, URLS[0]]
    short = FIRST_BACKOFF_S
    # The first broker was lost, which is no failed attempt: all three have failed with the fourth.
    assert pauses == [short, short, short, longest_pause_s(1), short, short, longest_pause_s(2), short, short, 4.0]


def test_a_single_broker_is_tried_again_with_growing_pauses_as_ever(clock):
    broker = failover(clock, URLS[:1])
    broker.connected()
    pauses = [broker.failed("reset", was_up=True), *(broker.failed("refused", was_up=False) for _ in range(3))]
    assert pauses == [longest_pause_s(failures) for failures in (0, 1, 2, 3)]
    assert broker.url == URLS[0]
    assert not broker.is_list


def test_pauses_are_random_so_that_a_fleet_does_not_come_at_once(clock):
    pauses = {Failover(URLS, random.Random(seed), clock).failed("reset", was_up=True) for seed in range(50)}
    assert len(pauses) == 50
    assert all(LEAST_PAUSE_S <= pause_s <= FIRST_BACKOFF_S for pause_s in pauses)


def test_a_list_that_has_failed_as_a_whole_gets_more_time_for_each_broker(clock):
    brokers = failover(clock)
    for _ in URLS:
        assert not brokers.is_patient
        brokers.failed("it does not answer the login", was_up=False)
    assert brokers.is_patient
    brokers.connected()
    brokers.failed("reset", was_up=True)
    assert not brokers.is_patient


def test_brokers_that_were_left_are_named_with_their_reasons_until_they_let_the_client_in(clock):
    brokers = failover(clock)
    brokers.failed("its certificate is not trusted", was_up=False)
    brokers.connected()
    assert brokers.left == (LeftBroker(URLS[0], "its certificate is not trusted"),)
    brokers.failed("reset", was_up=True)
    brokers.failed("refused", was_up=False)
    brokers.connected()
    assert brokers.url == URLS[0]
    assert brokers.left == (LeftBroker(URLS[1], "reset"), LeftBroker(URLS[2], "refused"))
    assert brokers.describe_left() == f"{URLS[1]}: reset; {URLS[2]}: refused"


# --- the way back ----------------------------------------------------------------------------------------------------


def test_a_client_stays_where_it_is_unless_it_is_to_return(clock):
    brokers = failover(clock)
    brokers.failed("reset", was_up=False)
    brokers.connected()
    clock.now += 1e9
    assert not brokers.is_return_due()


def test_a_client_tries_its_first_broker_after_a_while_and_again_until_it_is_let_in(clock):
    brokers = failover(clock, return_after_s=60.0)
    brokers.connected()
    clock.now += 1e6
    assert not brokers.is_return_due(), "it is at its first broker"
    brokers.failed("reset", was_up=True)
    brokers.connected()
    for _ in range(2):
        assert brokers.return_in_s() == 90.0
        clock.now += 89.0
        assert not brokers.is_return_due()
        clock.now += 1.0
        assert brokers.is_return_due()
        brokers.not_returned("refused")
    assert brokers.left == (LeftBroker(URLS[0], "refused"),)
    assert brokers.return_to_first() == FIRST_BACKOFF_S
    assert brokers.url == brokers.first == URLS[0]
    brokers.connected()
    assert brokers.left == ()


# --- silence ---------------------------------------------------------------------------------------------------------


def state(received=0, confirmed=0, *, is_queued=False):
    return LinkState(received, confirmed, is_queued)


def ask_where_due(vigil):
    if vigil.is_question_due:
        vigil.note_question()


def test_a_silent_broker_is_asked_once_and_is_lost_if_it_does_not_answer(clock):
    vigil = Vigil(3.5, clock)
    vigil.observe(state(received=10))
    assert not vigil.is_question_due
    assert vigil.due_in_s() == pytest.approx(1.75)
    clock.now += 1.75
    assert vigil.is_question_due
    vigil.note_question()
    assert not vigil.is_question_due
    assert vigil.due_in_s() == pytest.approx(1.75)
    clock.now += 1.7
    vigil.observe(state(received=10, confirmed=2))
    assert not vigil.is_lost
    clock.now += 0.05
    assert vigil.is_lost
    assert vigil.silence_s == pytest.approx(3.5)


def test_each_byte_that_arrives_is_a_sign_of_life(clock):
    vigil = Vigil(3.5, clock)
    for received in range(10):
        vigil.observe(state(received=received))
        clock.now += 1.75
        assert vigil.is_question_due
        vigil.note_question()
        assert not vigil.is_lost
    clock.now += 1.75
    assert vigil.is_lost


def test_a_slow_link_that_drains_its_queue_is_alive_and_one_that_does_not_move_is_lost(clock):
    """The question waits behind what is queued: at 64 kbit/s a megabyte takes two minutes."""
    vigil = Vigil(3.5, clock)
    for second in range(120):
        vigil.observe(state(confirmed=8000 * second, is_queued=True))
        ask_where_due(vigil)
        clock.now += 1.0
        assert not vigil.is_lost
    for _ in range(5):
        vigil.observe(state(confirmed=8000 * 119, is_queued=True))
        ask_where_due(vigil)
        clock.now += 1.0
    assert vigil.is_lost


def test_what_a_stopped_program_leaves_to_its_machine_is_no_sign_of_life(clock):
    """The system of a broker that was stopped confirms heartbeats and the question itself."""
    vigil = Vigil(3.5, clock)
    for second in range(4):
        vigil.observe(state(received=5, confirmed=100 * second))
        ask_where_due(vigil)
        clock.now += 1.0
    assert vigil.is_lost


def test_a_program_that_stood_still_itself_asks_before_it_judges(clock):
    vigil = Vigil(3.5, clock)
    vigil.observe(state(received=5))
    clock.now += 3600.0
    vigil.observe(state(received=5))
    assert not vigil.is_lost
    assert vigil.is_question_due
    vigil.observe(state(received=7))
    assert vigil.silence_s == 0


def test_a_system_that_does_not_tell_leaves_the_judgement_to_the_keep_alive(clock):
    vigil = Vigil(3.5, clock)
    for _ in range(100):
        vigil.observe(None)
        assert not vigil.is_question_due
        assert not vigil.is_lost
        clock.now += 1.0


def test_silence_is_judged_less_strictly_after_each_broker_that_was_left_for_it_and_strictly_again_after_a_while(clock):
    strictness = Strictness(5.0, 30.0, clock)
    limits = [strictness.limit_s]
    for _ in range(5):
        strictness.lost()
        limits.append(strictness.limit_s)
    first = 5.0 * SILENCE_SHARE
    assert limits == [first, 2 * first, 4 * first, 8 * first, 30.0, 30.0]
    clock.now += CALM_S
    assert strictness.limit_s == first

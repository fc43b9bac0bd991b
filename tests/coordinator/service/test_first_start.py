"""The first start on a backup asks first who serves, before it writes a word."""

from __future__ import annotations

import threading

import pytest
from federation_harness import Federation, vanish

from coordinator.config import CoordinatorConfig
from coordinator.service.app import coordinator
from coordinator.service.first_start import Decisions
from coordinator.service.inquiry import INQUIRY_S, Inquiry
from coordinator.service.listening import REFUSAL_S
from coordinator.state.backup import MARKER, back_up
from coordinator.state.store import StateFolder
from edge_agent.core.errors import StartStopped, UsageError
from edge_agent.wire.messages import codec, down
from edge_agent.wire.transport import Disconnected, Subscribed


def asked(fed, inquiry):
    """Step the question with the federation until it ends; returns the answer, and the seconds that it took."""
    began = fed.clock.now
    fed.until(lambda: inquiry.step(0), limit_s=60)
    return inquiry.answer, fed.clock.now - began


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=1) as federation:
        federation.request(rounds=1)
        federation.finish()
        yield federation


def begun(fed):
    transport = fed.broker.transport()
    transport.subscribe(fed.topics.coordinators)
    transport.start()
    return Inquiry("home", transport, clock=fed.clock, boot="q1")


def test_a_coordinator_that_serves_answers_with_how_far_its_journal_is(fed):
    answer, took_s = asked(fed, begun(fed))
    assert took_s <= 2
    assert (answer.federation, answer.epoch) == (fed.coordinator.federation_id, 1)
    assert (answer.entries, answer.newest_run) == (fed.state.journal.progress().entries, 1)
    assert answer.serving_s is not None
    assert fed.coordinator.status()["other_coordinator"] is None, "a question is no rival"
    assert fed.coordinator.status()["standby"] == []


def test_nobody_answers_for_longer_than_a_restart_takes(fed):
    fed.kill_coordinator()
    answer, took_s = asked(fed, begun(fed))
    assert answer is None
    assert INQUIRY_S <= took_s <= INQUIRY_S + 1


def test_a_broker_that_is_away_is_no_sign_that_nobody_serves(fed):
    inquiry = begun(fed)
    inquiry.step(0)
    inquiry.step(0)
    filters = list(inquiry._transport._filters)
    vanish(inquiry._transport)
    inquiry._subscribed_at = None
    for _ in range(5):
        fed.wait(INQUIRY_S)
        assert not inquiry.step(0)
    inquiry._transport._filters = filters
    inquiry._transport.start()
    answer, _ = asked(fed, inquiry)
    assert answer is not None


def test_answers_to_others_and_announcements_prove_nothing(fed):
    fed.kill_coordinator()
    inquiry = begun(fed)
    inquiry.step(0)
    for message in (
        down.Present(boot="zz", serving_s=9.0),
        down.Present(boot="zz", serving_s=9.0, answers="c1"),
        down.Present(boot="zz", standby=True, answers="q1"),
    ):
        fed.broker.route(fed.topics.coordinators, codec.encode(message))
    fed.broker.route(fed.topics.coordinators, b"\x00garbage")
    assert asked(fed, inquiry)[0] is None


def refused(fed):
    """A question whose broker refuses the topic of coordinators."""
    transport = fed.broker.transport()
    transport.subscribe("something/else")
    transport.start()
    inquiry = Inquiry("home", transport, clock=fed.clock)
    inquiry.step(0)
    inquiry.step(0)
    return inquiry


def test_a_broker_that_does_not_let_it_listen_is_named_with_the_right_that_is_missing(fed):
    inquiry = refused(fed)
    fed.wait(REFUSAL_S - 1)
    assert not inquiry.step(0)
    fed.wait(2)
    with pytest.raises(UsageError, match="has not let this process subscribe to fl/1/home/co for 120 s"):
        inquiry.step(0)


def test_a_refusal_that_passes_is_no_sign_that_nobody_serves(fed):
    """A cluster that elects leaders refuses subscriptions; only after it has granted them can anybody be heard."""
    inquiry = refused(fed)
    for _ in range(3):
        fed.wait(2 * INQUIRY_S)
        assert not inquiry.step(0)
    inquiry._transport.subscribe(fed.topics.coordinators)
    answer, took_s = asked(fed, inquiry)
    assert answer is not None
    assert took_s <= 2


def test_another_connection_is_given_as_long_as_the_first_one(fed):
    inquiry = refused(fed)
    fed.wait(REFUSAL_S - 1)
    vanish(inquiry._transport)
    inquiry._transport._events.put(Disconnected("its node has died", 0.1))
    inquiry.step(0)
    inquiry._transport._events.put(Subscribed(()))
    inquiry.step(0)
    fed.wait(REFUSAL_S - 1)
    assert not inquiry.step(0)


def test_a_question_ends_when_the_program_is_asked_to_stop(fed):
    stop = threading.Event()
    stop.set()
    assert Inquiry("home", fed.broker.transport(), clock=fed.clock).ask(stop) is None


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_start_that_is_stopped_before_the_answer_leaves_the_backup_as_it_was(fed, tmp_path, takes_over):
    """The broker is away, and whoever waits for it ends the command: that is no word that nobody serves."""
    with StateFolder(fed.config.state).look() as state:
        back_up(state, tmp_path / "backup")
    broker = {"url": "mqtt://127.0.0.1:9", "wait": True}
    config = CoordinatorConfig(federation="home", state=tmp_path / "backup", broker=broker, task=fed.config.task)
    stop = threading.Event()
    stop.set()
    decisions = Decisions(takes_over=takes_over)
    with pytest.raises(StartStopped), coordinator(config, stop, decisions=decisions):
        pass
    with StateFolder(tmp_path / "backup").look() as copy:
        assert len(copy.journal.entries(kinds=("coordinator_started",))) == 1, "it has not written its start"
    assert (tmp_path / "backup" / MARKER).exists()

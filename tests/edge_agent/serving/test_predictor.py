"""One input at a time, a few that wait, and a switch between two answers."""

from __future__ import annotations

import threading

import pytest
from serving_site import fit_squares, png, square

from edge_agent.core.errors import Busy, DataError, NotReady
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.pair import Pair
from edge_agent.serving.predictor import Predictor

WAIT_S = 30


def decode(pair):
    return Decoder(pair.input).decode(png(square("red")))


class Seen:
    def __init__(self):
        self.observations = []
        self.pairs = []

    def on_answer(self, observation):
        self.observations.append(observation)

    def on_switch(self, pair):
        self.pairs.append(pair)


@pytest.fixture
def pair(bundle, head):
    return Pair.open(bundle, head)


def test_without_a_pair_nothing_is_answered():
    with pytest.raises(NotReady, match="import a bundle"):
        Predictor().answer(decode, "test")


def test_whoever_looks_on_sees_the_answer_with_what_it_was_given_for(pair):
    predictor = Predictor(now=lambda: 1234.5)
    seen = Seen()
    predictor.observe(seen)
    predictor.switch(pair)
    answer = predictor.answer(decode, "test", b"raw", "image/png")
    [observation] = seen.observations
    assert seen.pairs == [pair]
    assert observation.answer is answer
    assert (observation.source, observation.raw, observation.content_type) == ("test", b"raw", "image/png")
    assert observation.at == 1234.5
    assert (observation.features == pair.features(observation.inputs)).all()


def test_times_are_those_of_the_clock(pair):
    ticks = iter([0.0, 0.010, 0.020, 0.050, 0.051])
    predictor = Predictor(clock=lambda: next(ticks))
    predictor.switch(pair)
    stages = predictor.answer(decode, "test").stages
    # 0 to 10 ms it was decoded, 20 to 50 ms encoded, and the head took the last one.
    assert (stages.decode, stages.encode, stages.head) == pytest.approx((10, 30, 1))


def test_one_decodes_at_a_time_and_too_many_are_turned_away(pair):
    predictor = Predictor(waiting=2)
    predictor.switch(pair)
    inside = threading.Semaphore(0)
    go_on = threading.Event()
    decoding = []
    most = []

    def slow(pair):
        decoding.append(1)
        most.append(len(decoding))
        inside.release()
        assert go_on.wait(WAIT_S)
        decoding.pop()
        return decode(pair)

    threads = [threading.Thread(target=predictor.answer, args=(slow, "test")) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=WAIT_S)
    # The first one decodes. The two others take the places of those who wait, sooner or later.
    while predictor.waiting < 2:
        threading.Event().wait(0.001)
    with pytest.raises(Busy, match="2 inputs are waiting") as refused:
        predictor.answer(decode, "test")
    assert refused.value.retry_s >= 1
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == [1, 1, 1]


def test_an_input_that_cannot_be_decoded_costs_no_place(pair):
    predictor = Predictor(waiting=0)
    predictor.switch(pair)

    def broken(pair):
        raise DataError("no image")

    for _ in range(3):
        with pytest.raises(DataError):
            predictor.answer(broken, "test")
    assert predictor.answer(decode, "test").label == "red"


def test_a_pair_that_is_replaced_meanwhile_answers_to_the_end(pair, bundle, bundle_path, tmp_path):
    other = Pair.open(bundle, fit_squares(bundle_path, tmp_path / "other", tmp_path / "cache", seed=5))
    predictor = Predictor()
    predictor.switch(pair)
    inside = threading.Event()
    go_on = threading.Event()

    def slow(pair):
        inside.set()
        assert go_on.wait(WAIT_S)
        return decode(pair)

    answers = []
    asking = threading.Thread(target=lambda: answers.append(predictor.answer(slow, "test")))
    asking.start()
    assert inside.wait(WAIT_S)
    switching = threading.Thread(target=predictor.switch, args=(other,))
    switching.start()
    go_on.set()
    asking.join(WAIT_S)
    switching.join(WAIT_S)
    assert answers[0].pair == pair.id
    assert answers[0].probabilities == pair.answer(decode(pair)).answer.probabilities
    assert predictor.answer(decode, "test").pair == other.id

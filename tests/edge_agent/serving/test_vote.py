"""What holds changes only after several equal answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edge_agent.serving.vote import Vote


class Seen:
    def __init__(self):
        self.changes = []
        self.confirmed = 0
        self.pairs = []

    def on_state(self, state, *, is_change):
        if is_change:
            self.changes.append((state.text, state.since))
        else:
            self.confirmed += 1

    def on_pair(self, pair):
        self.pairs.append(pair)


def observed(*texts):
    return [SimpleNamespace(answer=SimpleNamespace(state=text), at=float(at)) for at, text in enumerate(texts)]


@pytest.mark.parametrize(
    "count, texts, changes",
    [
        (1, "abba", [("a", 0), ("b", 1), ("a", 3)]),
        (2, "aabaabb", [("a", 1), ("b", 6)]),
        (3, "aaabbabbbb", [("a", 2), ("b", 8)]),
        (3, "ababab", []),
    ],
)
def test_so_many_equal_answers_change_what_holds(count, texts, changes):
    vote = Vote(count)
    seen = Seen()
    vote.observe(seen)
    for observation in observed(*texts):
        vote.on_answer(observation)
    assert seen.changes == changes


def test_an_answer_that_agrees_keeps_the_time_of_the_change():
    vote = Vote(2)
    seen = Seen()
    vote.observe(seen)
    for observation in observed(*"aabaa"):
        vote.on_answer(observation)
    assert (vote.state.text, vote.state.since) == ("a", 1.0)
    assert seen.confirmed == 2


def test_votes_for_a_pair_before_do_not_count_for_the_next():
    vote = Vote(2)
    seen = Seen()
    vote.observe(seen)
    first, second = observed("a", "a")
    vote.on_answer(first)
    vote.on_switch("pair")
    vote.on_answer(second)
    assert seen.changes == []
    assert seen.pairs == ["pair"]

"""Broken networks: whatever is lost, doubled, reordered or flipped on the way, the result has the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from faulty_broker import Faults
from federation_disturbances import restart_broker
from federation_duties import TASK, WIDE_TASK
from federation_harness import Federation

from edge_agent.methods import fedavg

ROUNDS = 3
PATIENT = {"deadline_s": 3600}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Task -> SHA-256 of the encoder after an undisturbed run."""
    hashes = {}
    for name, task in (("narrow", TASK), ("wide", WIDE_TASK)):
        with Federation(tmp_path_factory.mktemp(name), task=task) as fed:
            fed.request(rounds=ROUNDS)
            fed.finish()
            hashes[name] = fed.encoder_sha256
    return hashes


def faults(seed, **probabilities):
    return Faults(np.random.default_rng(seed), **probabilities)


NETWORKS = {
    "loses 5 %": {"lose": 0.05},
    "loses 20 %": {"lose": 0.2},
    "doubles 30 %": {"duplicate": 0.3},
    "reorders 30 %": {"reorder": 0.3},
    "flips a bit in 10 %": {"flip": 0.1},
    "does all of it": {"lose": 0.1, "duplicate": 0.1, "reorder": 0.1, "flip": 0.05},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_run_ends_with_the_same_bits_on_a_network_that(tmp_path, undisturbed, network, seed):
    with Federation(tmp_path, task=WIDE_TASK, faults=faults(seed, **NETWORKS[network]), round=PATIENT) as fed:
        fed.request(rounds=ROUNDS)
        took = fed.finish(3600)
        assert fed.encoder_sha256 == undisturbed["wide"]
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2"]] * ROUNDS
        for agent in fed.agents.values():
            agent.raise_if_rejected()
        assert took < 300, "recovery must not wait for deadlines"


@pytest.mark.parametrize("seed", [4, 5, 6, 7])
def test_small_models_on_a_very_bad_network_get_there_too(tmp_path, undisturbed, seed):
    bad = faults(seed, lose=0.3, duplicate=0.2, reorder=0.2, flip=0.1)
    with Federation(tmp_path, faults=bad, round=PATIENT) as fed:
        fed.request(rounds=ROUNDS)
        fed.finish(3600)
        assert fed.encoder_sha256 == undisturbed["narrow"]


def test_an_agent_that_has_not_heard_that_it_is_to_ask_for_itself_is_told_again(tmp_path, undisturbed):
    """The one message that took it out of a broadcast is lost, and so is the last report of another listener."""
    bad = faults(27, lose=0.1, duplicate=0.1, reorder=0.1, flip=0.05)
    with Federation(tmp_path, faults=bad, round=PATIENT) as fed:
        fed.request(rounds=ROUNDS)
        assert fed.finish(3600) < 300
        assert fed.encoder_sha256 == undisturbed["narrow"]


def test_flipped_control_messages_are_noticed(tmp_path):
    """A flipped digit in a job would be another learning rate, in a manifest another weight."""
    with Federation(
        tmp_path, faults=faults(8, flip=0.3, only=lambda topic: topic.endswith("/up")), round=PATIENT
    ) as fed:
        fed.request(rounds=ROUNDS)
        fed.finish(3600)
        assert fed.coordinator.rejected.total > 5
        assert {key.rpartition(" ")[2] for key in fed.coordinator.rejected.counts} == {"MessageError"}
        accepted = fed.entries("update_accepted")
        assert {entry.body["samples"] for entry in accepted} == {10}


def test_a_restarted_broker_costs_seconds_and_no_bits(tmp_path, undisturbed):
    """All connections break at once, again and again, at every moment of a run."""
    with Federation(tmp_path, task=WIDE_TASK, round=PATIENT) as fed:
        fed.request(rounds=ROUNDS)
        steps = 0
        while not fed.record.is_over and steps < 4000:
            if not fed.step():
                fed.clock.now += 0.25
            steps += 1
            if steps % 40 == 0 and steps < 1200:
                restart_broker(fed)
        assert fed.encoder_sha256 == undisturbed["wide"]
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2"]] * ROUNDS


def test_a_broker_that_is_away_during_training_loses_nothing(tmp_path):
    """The update is made while nobody can be reached; it goes out when the broker is back."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 2}, round=PATIENT) as fed:
        fed.add("a0", seconds=5)
        fed.add("a1", seconds=5)
        fed.request(rounds=1)
        fed.wait(1)
        fed.agents["a1"].transport.cut()
        fed.wait(60)
        assert fed.entries("update_accepted", agent="a1") == []
        fed.agents["a1"].transport.start()
        assert fed.until(lambda: fed.entries("round_closed")) < 10
        assert fed.tasks["a1"].done.count((fed.run, 1, "train")) == 1, "not trained twice"


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path):
    def run(place, seed):
        with Federation(tmp_path / place) as fed:
            fed.request(rounds=2, seed=seed)
            fed.finish()
            return fed.encoder_sha256

    assert run("one", 5) == run("two", 5)
    assert run("three", 6) != run("four", 5)


def test_the_order_in_which_updates_arrive_does_not_matter(tmp_path, monkeypatch):
    """Floating point addition is not associative: only a fixed order of folding gives the same bits, always."""
    real = fedavg.FedAvg.aggregate
    folded = []

    def aggregate(self, state, updates):
        updates = list(updates)
        folded.append([update.client for update in updates])
        return real(self, state, updates)

    monkeypatch.setattr(fedavg.FedAvg, "aggregate", aggregate)

    def run(place, seconds):
        with Federation(tmp_path / place, agents=(), task=WIDE_TASK, cohort={"min_agents": 4}) as fed:
            for name, duration in zip(("a0", "a1", "a2", "a3"), seconds, strict=True):
                fed.add(name, seconds=duration, samples=int(7 + 13 * ord(name[1]) % 11))
            fed.request(rounds=2)
            fed.finish()
            order = [entry.agent for entry in fed.entries("update_accepted", round=1)]
            return order, fed.encoder_sha256

    first, here = run("forward", (1, 2, 3, 4))
    second, there = run("backward", (4, 3, 2, 1))
    assert first == sorted(first)
    assert second == sorted(second, reverse=True)
    assert here == there
    assert folded == [["a0", "a1", "a2", "a3"]] * 4

"""kill -9 at every point: a run goes on in the round it was in, asks for nothing it has, ends in the same bits."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from federation_disturbances import Stranger, killed_at_append, lose
from federation_duties import TASK, WIDE_TASK
from federation_harness import Federation, Killed

from edge_agent.wire.blobs.chunks import CHUNK_BYTES, decode_frame
from edge_agent.wire.messages import down

ROUNDS = 2
WIDE_CHUNKS = 103


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What an undisturbed run does: encoder hash, journal appends, publishes; for the narrow and the wide task."""
    found = {}
    for name, task in (("narrow", TASK), ("wide", WIDE_TASK)):
        with Federation(tmp_path_factory.mktemp(name), task=task, capture=True) as fed:
            fed.request(rounds=ROUNDS)
            fed.finish()
            appended = [entry.kind for entry in fed.entries()][1:]
            messages = fed.coordinator.transport.traffic.messages_up
            found[name] = (fed.encoder_sha256, appended, messages)
    return found


def go_on_to_the_end(fed, restarts=1):
    """Restart whoever is dead, and finish."""
    for _ in range(restarts):
        fed.until(lambda: fed.coordinator is None or fed.record.is_over)
        if fed.coordinator is None:
            fed.start_coordinator()
    fed.finish()


def assert_nothing_twice(fed):
    """Each round was opened once and closed once, with each update once, and nobody trained a round twice."""
    assert [entry.round for entry in fed.entries("round_opened")] == list(range(1, ROUNDS + 1))
    assert [entry.round for entry in fed.entries("round_closed")] == list(range(1, ROUNDS + 1))
    accepted = [(entry.round, entry.agent) for entry in fed.entries("update_accepted")]
    assert sorted(accepted) == sorted((number, name) for number in range(1, ROUNDS + 1) for name in fed.agents)
    for tasks in fed.tasks.values():
        trained = [number for _, number, purpose in tasks.done if purpose == "train"]
        assert trained == list(range(1, ROUNDS + 1))


def test_the_sweep_covers_what_a_run_writes(undisturbed):
    """1 start, 2 rounds of (open, 3 updates, close), 3 reports, 1 end: 15 entries."""
    _, appended, messages = undisturbed["narrow"]
    expected = {"run_started": 1, "round_opened": 2, "update_accepted": 6, "round_closed": 2, "release_reported": 3}
    assert collections.Counter(appended) == {**expected, "run_finished": 1}
    assert messages > 20


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("number", range(15))
def test_a_coordinator_killed_around_an_entry_of_the_journal_ends_in_the_same_bits(
    tmp_path, undisturbed, number, before
):
    with Federation(tmp_path) as fed:
        fed.request(rounds=ROUNDS)
        with killed_at_append(fed, number, before=before):
            fed.until(lambda: fed.coordinator is None)
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed["narrow"][0]
        assert_nothing_twice(fed)
        summary = fed.state.run(fed.run).summary()
        assert [agent["id"] for agent in summary["agents"]] == ["a0", "a1", "a2"], "also when it died at the end"


@pytest.mark.parametrize("task", ["narrow", pytest.param("wide", marks=pytest.mark.slow)])
def test_a_coordinator_killed_at_any_message_ends_in_the_same_bits(tmp_path, undisturbed, task):
    """Every publish is a point of death; with 103 chunks a blob that is in the middle of transfers, too."""
    sha, _, messages = undisturbed[task]
    for number in range(1, messages + 1, 2 if task == "narrow" else 3):
        with Federation(tmp_path / str(number), task=TASK if task == "narrow" else WIDE_TASK) as fed:
            fed.request(rounds=ROUNDS)
            dies_at_publish(fed.coordinator.transport, number)
            go_on_to_the_end(fed)
            assert fed.encoder_sha256 == sha, number
            assert_nothing_twice(fed)


def dies_at_publish(transport, number, is_counted=lambda topic: True):
    real = transport.publish
    count = [0]

    def publish(topic, payload, **options):
        count[0] += is_counted(topic)
        if count[0] == number and is_counted(topic):
            raise Killed
        real(topic, payload, **options)

    transport.publish = publish


@pytest.mark.parametrize("seed", range(4))
def test_a_coordinator_that_is_killed_again_and_again_still_ends_in_the_same_bits(tmp_path, undisturbed, seed):
    dice = np.random.default_rng(seed)
    with Federation(tmp_path, task=WIDE_TASK) as fed:
        fed.request(rounds=ROUNDS)
        for _ in range(12):
            for _ in range(int(dice.integers(1, 60))):
                if not fed.step():
                    fed.clock.now += 0.1
            fed.kill_coordinator()
            fed.clock.now += float(dice.uniform(0, 3))
            fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == undisturbed["wide"][0]
        assert_nothing_twice(fed)


def test_receipted_updates_are_not_asked_for_again(tmp_path):
    """Killed with two of three receipts: only the third agent hears of the round again."""
    with Federation(tmp_path, agents=(), cohort={"min_agents": 3}, capture=True) as fed:
        for number, name in enumerate(("a0", "a1", "a2")):
            fed.add(name, seconds=1 + 5 * number)
        fed.request(rounds=1)
        fed.until(lambda: len(fed.entries("update_accepted")) == 2)
        fed.kill_coordinator()
        already = len(fed.broker.captured)
        fed.start_coordinator()
        fed.wait(1)
        again = fed.broker.captured[already:]
        asked = {topic for topic, payload in again if topic.endswith("/dn") and b'"type":"job"' in payload}
        assert asked == {fed.topics.down("a2")}
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2"]


def test_a_restarted_coordinator_does_not_close_on_those_it_has_yet_to_hear_of(tmp_path):
    """Four of five are here and that is a quorum; the fifth is working, and says so only after the restart."""
    round_config = {"quorum": 0.8, "grace_s": 60}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 5}) as fed:
        for name in ("a0", "a1", "a2", "a3"):
            fed.add(name, seconds=1)
        fed.add("a4", seconds=10)
        fed.request(rounds=1)
        fed.until(lambda: len(fed.entries("update_accepted")) == 4)
        fed.kill_coordinator()
        fed.clock.now += 2
        fed.start_coordinator()
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1", "a2", "a3", "a4"]


def test_a_restarted_coordinator_does_not_wait_long_for_those_who_never_come_back(tmp_path):
    round_config = {"quorum": 0.6, "grace_s": 300}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 3}) as fed:
        for name in ("a0", "a1"):
            fed.add(name, seconds=1)
        fed.add("a2", seconds=100)
        fed.request(rounds=1)
        fed.until(lambda: len(fed.entries("update_accepted")) == 2)
        fed.kill_coordinator()
        fed.kill("a2")
        fed.start_coordinator()
        assert fed.until(lambda: fed.entries("round_closed")) < 12


def frames(fed, name):
    return fed.published(fed.topics.up_chunks(name))


def chunks(fed, name):
    """Which chunks of which blob an agent has sent."""
    found = [decode_frame(payload) for payload in frames(fed, name)]
    return [(f.transfer, f.index + i) for f in found for i in range(-(-len(f.data) // CHUNK_BYTES))]


@pytest.mark.parametrize("sent", [1, 4, 8])
def test_an_agent_killed_in_the_middle_of_an_upload_sends_only_what_is_missing(tmp_path, undisturbed, sent):
    """After k frames of the update and a restart, the other chunks go out and none of those k frames again."""
    with Federation(tmp_path, task=WIDE_TASK, capture=True) as fed:
        fed.request(rounds=ROUNDS)
        ub = fed.topics.up_chunks("a1")
        dies_at_publish(fed.agents["a1"].transport, sent + 1, is_counted=lambda topic: topic == ub)
        fed.until(lambda: "a1" not in fed.agents)
        assert len(frames(fed, "a1")) == sent
        fed.add("a1")
        fed.finish()
        assert len(chunks(fed, "a1")) == len(set(chunks(fed, "a1"))) == WIDE_CHUNKS * ROUNDS
        assert [number for _, number, purpose in fed.tasks["a1"].done if purpose == "train"] == [2], "not trained again"
        assert fed.encoder_sha256 == undisturbed["wide"][0]


def test_a_coordinator_that_stops_politely_keeps_the_chunks_it_has(tmp_path):
    with Federation(tmp_path, agents=(), task=WIDE_TASK, cohort={"min_agents": 1}, capture=True) as fed:
        agent = Stranger(fed, "a0")
        agent.hello()
        fed.request(rounds=1)
        fed.settle()
        blob = agent.offer(fed.final)
        fed.settle()
        for index in (0, 1, 5):
            agent.chunk(blob.frame(index))
        fed.settle()
        fed.coordinator.close()
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.settle()
        agent.heard()
        agent.hello()
        agent.offer(fed.final)
        fed.settle()
        (grant,) = agent.heard(down.Grant)
        assert grant.missing == ((2, 5), (6, WIDE_CHUNKS))


def test_an_agent_killed_in_the_middle_of_training_does_the_round_again(tmp_path, undisturbed):
    def die(job):
        raise Killed

    with Federation(tmp_path) as fed:
        fed.tasks["a1"].before = die
        fed.request(rounds=ROUNDS)
        fed.until(lambda: "a1" not in fed.agents)
        fed.wait(5)
        fed.add("a1")
        fed.finish()
        assert fed.encoder_sha256 == undisturbed["narrow"][0]
        assert_nothing_twice(fed)


def test_an_agent_killed_between_training_and_receipt_sends_its_outbox(tmp_path, undisturbed):
    def die(job):
        raise Killed

    with Federation(tmp_path) as fed:
        fed.tasks["a1"].after = die
        fed.request(rounds=ROUNDS)
        fed.until(lambda: "a1" not in fed.agents)
        fed.add("a1")
        fed.finish()
        trained = [number for _, number, purpose in fed.tasks["a1"].done if purpose == "train"]
        assert trained == [2], "the update of round 1 came from the outbox"
        assert fed.encoder_sha256 == undisturbed["narrow"][0]


def test_a_lost_receipt_is_given_again_and_nothing_is_sent_twice(tmp_path, undisturbed):
    with Federation(tmp_path, task=WIDE_TASK, capture=True) as fed:
        lost = lose(fed.coordinator.transport, lambda message: isinstance(message, down.Receipt))
        fed.request(rounds=ROUNDS)
        fed.finish()
        assert len(lost) == 1
        for name in fed.agents:
            assert len(chunks(fed, name)) == len(set(chunks(fed, name))) == WIDE_CHUNKS * ROUNDS
            assert len(fed.entries("update_accepted", agent=name)) == ROUNDS
        assert all(agent.uploads._manifest is None for agent in fed.agents.values())
        assert fed.encoder_sha256 == undisturbed["wide"][0]


def test_a_receipt_lost_with_the_last_round_does_not_hold_the_end(tmp_path):
    """The round closes with the update whose receipt is lost; its agent is needed for the report right after."""
    with Federation(tmp_path, agents=2, heartbeat_s=300) as fed:
        lose(fed.coordinator.transport, lambda message: isinstance(message, down.Receipt))
        fed.request(rounds=1)
        assert fed.finish() < 10
        assert [agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]] == ["a0", "a1"]
        fed.wait(10)
        assert all(agent.uploads._manifest is None for agent in fed.agents.values()), "receipted in the end"


def test_an_update_of_a_round_that_closed_without_it_is_dropped_after_the_restart(tmp_path):
    """Dead with an update in the outbox while the others go on: told that it is late, and takes part again."""

    def die(job):
        raise Killed

    round_config = {"quorum": 0.6, "grace_s": 1}
    with Federation(tmp_path, agents=(), round=round_config, cohort={"min_agents": 2}) as fed:
        fed.add("a0", seconds=1)
        fed.add("a1", seconds=1)
        fed.add("a2")
        fed.tasks["a2"].after = die
        fed.settle()
        fed.request(rounds=6)
        fed.until(lambda: len(fed.entries("round_closed")) == 2)
        fed.add("a2")
        fed.finish()
        assert fed.metrics()[0]["agents"] == ["a0", "a1"]
        assert fed.metrics()[-1]["agents"] == ["a0", "a1", "a2"]
        late = [item for line in fed.metrics() for item in line["late"]]
        assert late == [{"agent": "a2", "round": 1}]


def test_figures_of_a_round_are_one_line_wherever_the_coordinator_died(tmp_path):
    """A line that was lost between journal and figures comes back from the journal, as it would have been."""
    lines = {}
    for name, number, before in (("undisturbed", 99, False), ("between", 5, False), ("earlier", 5, True)):
        with Federation(tmp_path / name) as fed:
            fed.request(rounds=ROUNDS)
            with killed_at_append(fed, number, before=before):
                fed.until(lambda fed=fed: fed.coordinator is None or fed.record.is_over)
            if number != 99:
                assert fed.metrics() == [], "dead before the figures"
                fed.start_coordinator()
            fed.finish()
            lines[name] = fed.metrics()
            assert [line["round"] for line in lines[name]] == list(range(1, ROUNDS + 1))
    timed = {"seconds", "waiting_s", "bytes_up", "bytes_down"}
    for name in ("between", "earlier"):
        for line, expected in zip(lines[name], lines["undisturbed"], strict=True):
            assert {k: v for k, v in line.items() if k not in timed} == {
                k: v for k, v in expected.items() if k not in timed
            }
    assert all(line[key] is not None for line in lines["between"] for key in timed)

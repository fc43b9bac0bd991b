"""What hostile agents, brokers that repeat themselves, and damaged answers do to aggregators and coordinator."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest
from aggregator_harness import PartitionedFederation, run_of
from federation_duties import WIDE_TASK, TinyDuties, quick_params
from federation_harness import Clock

from coordinator.aggregators import reports
from coordinator.aggregators.messages import Sealed, ServePartitions, Serving, Stored
from coordinator.aggregators.remote import PARTIAL_S
from coordinator.aggregators.reports import Reports
from coordinator.aggregators.requests import PassFiles
from coordinator.fleet import uploads
from coordinator.fleet.partitions import partition_of
from coordinator.rounds.bounds import Bounds, Measure, Measured, SumBounded
from coordinator.rounds.directions import MultiplyChanges, Products, Shares
from coordinator.state.command_keys import CommandKeys
from edge_agent import __version__
from edge_agent.core.errors import TensorsError, UsageError
from edge_agent.core.exact_sum import COARSE, LARGEST, ExactSum
from edge_agent.core.storage import write_atomic
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.wire.messages import fields, up
from edge_agent.wire.messages.proven import MAX_BYTES
from edge_agent.wire.tensors import pieces

METRICS = {f"{'m' * 60}{number:04}": 0.1234567890123456 for number in range(64)}
"""As many metrics with names as long as messages may have."""


def manifest_of(number=1, digest="a" * 64, **fields_of_it):
    blob = fields.BlobRef(digest=digest, size_bytes=100, chunk_bytes=100)
    return up.UpdateManifest(run=f"run-0001-{'0' * 32}", round=number, blob=blob, samples=1, **fields_of_it)


def sealed_of(fed):
    return Sealed(CommandKeys.of(fed.config.state, fed.config.federation).for_aggregators())


def recorded(fed, topic, kind):
    """The payloads of these messages between coordinator and aggregators, oldest first."""
    read = sealed_of(fed).to_aggregator if topic == fed.topics.aggregators_down else sealed_of(fed).from_aggregator
    return [payload for payload in fed.published(topic) if isinstance(read(payload), kind)]


def publish(fed, topic, payload):
    stranger = fed.broker.transport()
    stranger.start()
    stranger.publish(topic, payload)
    fed.settle()


# --- what agents send ------------------------------------------------------------------------------------------------


def test_updates_with_as_many_metrics_as_messages_may_have_come_in_several_messages():
    """Sixty-four of them are six times as large as a message between aggregator and coordinator may be."""
    agents = [f"a{number}" for number in range(130)]
    kept = Reports(Clock())
    for name in agents:
        manifest = manifest_of(digest=f"{int(name[1:]):064x}", metrics=METRICS)
        kept.add(Stored(manifest=manifest, agent=name, refused="\N{GREEK SMALL LETTER ALPHA}" * 1000))
    messages = list(kept.due("sum1", "b1"))
    sealed = Sealed(b"x" * 32)
    told = []
    for message in messages:
        payload = sealed.encode(message)
        assert len(payload) <= MAX_BYTES
        told += [stored.agent for stored in sealed.from_aggregator(payload).updates]
    assert told == agents
    assert len(messages) < len(agents) / 5


def test_offers_while_the_coordinator_is_away_do_not_pile_up(tmp_path):
    """They come every few seconds from each agent, with another number each time, and for hours."""
    with PartitionedFederation(tmp_path, 1, agents=2) as fed:
        fed.wait(2)
        fed.kill_coordinator()
        aggregator = fed.aggregators["sum1"]
        for number in range(1, 400):
            for name in ("a0", "a1"):
                fed.agents[name].link.send(manifest_of(number, digest=f"{number:064x}"), "1-of-1")
            fed.settle()
        assert len(aggregator._reports) <= 4
        fed.start_coordinator()
        fed.wait(10)
        assert len(aggregator._reports) == 0


def test_reports_of_strangers_are_bounded_and_leave_room_for_what_is_known(monkeypatch):
    monkeypatch.setattr(reports, "MOST_KEPT", 3)
    kept = Reports(Clock())
    for agent in "abcde":
        kept.add(Stored(manifest=manifest_of(), agent=agent))
    newer = Stored(manifest=manifest_of(2), agent="a")
    kept.add(newer)
    [message] = kept.due("sum1", "b1")
    assert [stored.agent for stored in message.updates] == ["a", "b", "c"]
    assert message.updates[0] == newer


def test_what_an_agent_says_while_a_report_is_under_way_comes_after_it():
    clock = Clock()
    kept = Reports(clock)
    first = Stored(manifest=manifest_of(1), agent="a")
    second = Stored(manifest=manifest_of(2), agent="a")
    kept.add(first)
    [message] = kept.due("sum1", "b1")
    for stored in (first, second):
        kept.add(stored)
    assert list(kept.due("sum1", "b1")) == []
    clock.now += reports.AGAIN_S
    assert list(kept.due("sum1", "b1")) == [message], "sent again until it is noted"
    assert kept.noted(message.number) == (first,)
    [following] = kept.due("sum1", "b1")
    assert following.updates == (second,)
    kept.noted(following.number)
    assert kept.noted(following.number) == ()
    assert len(kept) == 0


def test_what_nobody_notes_is_said_ever_more_seldom_and_at_once_to_another_coordinator():
    clock = Clock()
    kept = Reports(clock)
    kept.add(Stored(manifest=manifest_of(), agent="a"))
    sent_at = []
    for _ in range(600):
        sent_at += [clock.now] * len(list(kept.due("sum1", "b1")))
        clock.now += 0.5
    gaps = np.diff(sent_at)
    assert gaps[:4].tolist() == [2.0, 4.0, 8.0, 16.0]
    assert set(gaps[4:]) == {reports.LONGEST_AGAIN_S}
    list(kept.due("sum1", "b1"))
    assert list(kept.due("sum1", "b1")) == []
    kept.say_again()
    assert len(list(kept.due("sum1", "b1"))) == 1


def test_a_bug_that_one_message_meets_ends_no_aggregator(tmp_path, caplog):
    """As where a method of one's own refuses an update by an error that is none of ours."""

    def breaks(fed):
        aggregator = fed.aggregators["sum1"]
        real = aggregator._on_upload
        calls = []

        def on_upload(agent, kind, payload):
            calls.append(agent)
            if len(calls) == 1:
                raise ZeroDivisionError("of a method")
            real(agent, kind, payload)

        aggregator._on_upload = on_upload

    _, fed = run_of(tmp_path, 2, agents=4, prepare=breaks)
    assert "sum1" in fed.aggregators
    assert "message_broke" in caplog.text


def test_a_disk_that_is_full_as_a_queued_upload_begins_ends_no_aggregator(tmp_path, caplog):
    def full(fed):
        aggregator = fed.aggregators["sum1"]
        real = aggregator._collector.tick
        ticks = []

        def tick():
            ticks.append(1)
            if len(ticks) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            real()

        aggregator._collector.tick = tick

    _, fed = run_of(tmp_path, 1, agents=3, prepare=full)
    assert "sum1" in fed.aggregators
    assert "message_refused from=uploads" in caplog.text


# --- what brokers repeat ---------------------------------------------------------------------------------------------


def test_a_message_about_partitions_that_comes_again_does_not_count_commands_anew(tmp_path, caplog):
    """Agents obey no number that they have seen: the commands after it would be lost to them."""
    with PartitionedFederation(tmp_path, 2, agents=4, capture=True, tasks=TinyDuties) as fed:
        fed.wait(2)
        fed.kill_aggregator("sum2")
        fed.wait(5)
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        fed.finish()
        aggregator = fed.aggregators["sum1"]
        counts = {name: (count.term, count.commands) for name, count in aggregator._counts.items()}
        terms = dict(aggregator._assignment.terms)
        assert len(counts) == 2
        assert all(commands for _, commands in counts.values())
        for payload in recorded(fed, fed.topics.aggregators_down, ServePartitions):
            publish(fed, fed.topics.aggregators_down, payload)
        fed.wait(2)
        assert {name: (count.term, count.commands) for name, count in aggregator._counts.items()} == counts
        assert aggregator._assignment.terms == terms
        assert aggregator._unreadable == 0


def test_a_partition_of_an_earlier_term_is_not_taken_again(tmp_path, caplog):
    with PartitionedFederation(tmp_path, 1, agents=1, capture=True) as fed:
        fed.wait(2)
        first = recorded(fed, fed.topics.aggregators_down, ServePartitions)[-1]
        aggregator = fed.aggregators["sum1"]
        newest = sealed_of(fed).to_aggregator(first)
        partitions = tuple(served.model_copy(update={"term": 7}) for served in newest.partitions)
        later = newest.model_copy(update={"partitions": partitions})
        publish(fed, fed.topics.aggregators_down, sealed_of(fed).encode(later))
        assert set(aggregator._assignment.terms.values()) == {7}
        aggregator._obey(newest)
        assert set(aggregator._assignment.terms.values()) == {7}
        assert "late_message_ignored" in caplog.text


def test_a_recorded_message_of_presence_keeps_no_partition_for_an_aggregator_that_is_dead(tmp_path):
    with PartitionedFederation(tmp_path, 1, agents=1, capture=True) as fed:
        fed.wait(2)
        newest = recorded(fed, fed.topics.aggregators_up, Serving)[-1]
        fed.kill_aggregator("sum1")
        for _ in range(6):
            publish(fed, fed.topics.aggregators_up, newest)
            fed.wait(1)
        assert fed.coordinator.status()["aggregators"][0]["aggregator"] == ""


def test_an_aggregator_of_another_version_is_refused_by_name(tmp_path):
    """Its sums might have other bits."""
    with PartitionedFederation(tmp_path, 1, agents=1, capture=True) as fed:
        fed.wait(2)
        newest = sealed_of(fed).from_aggregator(recorded(fed, fed.topics.aggregators_up, Serving)[-1])
        other = newest.model_copy(update={"software": "0.0.9", "number": newest.number + 1})
        stranger = fed.broker.transport()
        stranger.start()
        stranger.publish(fed.topics.aggregators_up, sealed_of(fed).encode(other))
        with pytest.raises(UsageError, match=rf"of version 0\.0\.9, and the coordinator of {__version__}"):
            fed.settle()


# --- updates that are gone -------------------------------------------------------------------------------------------


def test_a_stored_update_that_was_removed_is_taken_from_its_agent_once_more(tmp_path):
    """As where a person removes old runs in the moment between the file and its entry."""
    with PartitionedFederation(tmp_path, 1, agents=3, tasks=TinyDuties) as fed:
        aggregator = fed.aggregators["sum1"]
        removed = []
        real = aggregator._reports.add

        def add(stored):
            if stored.is_stored and not removed:
                removed.append(stored.agent)
                aggregator.site.blobs.remove([stored.manifest.blob.digest])
            real(stored)

        aggregator._reports.add = add
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        fed.finish()
        assert removed
        assert fed.record.status == "finished"
        assert {entry.agent for entry in fed.entries("update_accepted")} == {"a0", "a1", "a2"}
        assert aggregator.stored == 4


@pytest.mark.parametrize("at_chunk", [1, 5, 20])
@pytest.mark.parametrize("most_open", [1, 64])
def test_files_that_are_removed_under_an_aggregator_cost_an_upload_and_no_update(
    tmp_path, monkeypatch, most_open, at_chunk
):
    """A file that was opened again after that lacked its first chunks, and was refused as damaged or written for ever.

    Of many uploads few files are open at once. A coordinator that did not hear an aggregator for three seconds removed
    its files, also where it was only slow.
    """
    monkeypatch.setattr(uploads, "MOST_OPEN_UPLOADS", most_open)
    chunks = []

    def removing(fed):
        aggregator = fed.aggregators["sum1"]
        real = aggregator._on_upload

        def on_upload(agent, kind, payload):
            chunks.extend([agent] * (kind == "ub"))
            if kind == "ub" and len(chunks) == at_chunk:
                fed.coordinator.aggregators._remove_partial("sum1")
            real(agent, kind, payload)

        aggregator._on_upload = on_upload

    with PartitionedFederation(tmp_path, 1, agents=6, task=WIDE_TASK) as fed:
        removing(fed)
        fed.request(rounds=1)
        fed.finish()
        assert len(chunks) > at_chunk
        assert {entry.agent for entry in fed.entries("update_accepted")} == {f"a{number}" for number in range(6)}
        assert not fed.entries("update_refused")


def test_an_aggregator_that_was_silent_for_some_seconds_finds_its_files_again(tmp_path):
    with PartitionedFederation(tmp_path, 1, agents=1) as fed:
        fed.wait(2)
        part = fed.config.state / "aggregators" / "partial" / "sum1" / "a0" / f"{'a' * 64}.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"half of it")
        aggregator = fed.aggregators.pop("sum1")
        fed.wait(10)
        assert fed.coordinator.status()["aggregators"][0]["aggregator"] == ""
        assert part.exists()
        fed.aggregators["sum1"] = aggregator
        fed.wait(5)
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.wait(2 * PARTIAL_S)
        assert part.exists()
        fed.kill_aggregator("sum1")
        fed.wait(PARTIAL_S + 10)
        assert not part.parent.parent.exists()


# --- answers ---------------------------------------------------------------------------------------------------------


def sum_of(*arrays):
    total = WeightedSum()
    for array in arrays:
        total.add(2.0, {"w": np.float32(array)})
    return total


ANSWERS = {
    "a size of nobody who was asked": (Measure(), [Measured("a", 1.0, {}), Measured("x", 1.0, {})]),
    "a size twice": (Measure(), [Measured("a", 1.0, {}), Measured("b", 1.0, {}), Measured("b", 1.0, {})]),
    "no size": (Measure(), []),
    "products of one of two": (MultiplyChanges(Shares({}), {}, has_way=False), {"a": Products({}, 0.0)}),
    "a sum of three": (SumBounded(), sum_of([1.0], [2.0], [3.0])),
    "a sum with one that is left out": (SumBounded(Bounds(opposed=("a",))), sum_of([1.0], [2.0])),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_about_other_updates_than_were_asked_for_is_refused(tmp_path, case):
    one_pass, answer = ANSWERS[case]
    files = PassFiles(tmp_path)
    request = "0" * 32
    write_atomic(tmp_path / f"pass-{request}.answer", *pieces(one_pass.pack(answer).to_tensors()))
    with pytest.raises(TensorsError, match="not about the 2 updates"):
        files.read_answer(request, one_pass, ("a", "b"))


@pytest.mark.parametrize(
    "one_pass, values",
    [
        (Measure(), {"sizes": [["a", 1.0]]}),
        (Measure(), {"sizes": [["a", "many", {}]]}),
        (Measure(), {"sizes": [["a", 1.0, 3]]}),
        (Measure(), {"sizes": 3}),
        (MultiplyChanges(Shares({}), {}, has_way=False), {"products": {"a": [3, 0.0]}}),
        (MultiplyChanges(Shares({}), {}, has_way=False), {"products": [["a"]]}),
        (MultiplyChanges(Shares({}), {}, has_way=False), {"products": {"a": [{}, None]}}),
    ],
)
def test_values_that_are_no_answer_are_an_error_of_ours(one_pass, values):
    packet = one_pass.pack(one_pass.join([[]] if isinstance(one_pass, Measure) else [{}]))
    with pytest.raises(TensorsError):
        one_pass.unpack(replace(packet, fields={**packet.fields, **values}))


@pytest.mark.parametrize(
    "coarse, fine, state",
    [
        (np.nan, 0.0, [1.0, 1.0, 0.0]),
        (np.inf, 0.0, [1.0, 1.0, 0.0]),
        (-3 * LARGEST, 0.0, [1.0, 1.0, 0.0]),
        (0.0, np.nan, [1.0, 1.0, 0.0]),
        (0.0, 1000 * COARSE, [1.0, 1.0, 0.0]),
        (0.0, 0.0, [1.0, 1e300, 0.0]),
    ],
)
def test_a_sum_that_calls_itself_exact_and_cannot_be_is_refused(coarse, fine, state):
    with pytest.raises(TensorsError):
        ExactSum.resumed(np.array([0.0, coarse]), np.array([0.0, fine]), np.array(state))


def test_a_sum_of_a_model_that_has_diverged_still_says_that_it_is_not_exact():
    total = ExactSum((2,))
    total.add(np.array([np.nan, 1e300]))
    assert not ExactSum.resumed(total.coarse, total.fine, total.state()).is_exact


def test_sums_of_other_shapes_are_refused_and_not_spread_over_a_model():
    with pytest.raises(TensorsError, match=r"shape \(1,\), expected one of shape \(3,\)"):
        SumBounded().join([sum_of([1.0, 2.0, 3.0]), sum_of([1.0])])
    counters = [WeightedSum(), WeightedSum()]
    counters[0].add(1.0, {"n": np.arange(3)})
    counters[1].add(1.0, {"n": np.arange(1)})
    with pytest.raises(TensorsError, match="counter 'n'"):
        SumBounded().join(counters)


def test_a_single_update_is_read_by_the_coordinator_which_takes_it_as_it_is():
    """The mean of one, by its weight and divided by it, may have other bits than the update."""
    value = np.float64(1) / 3
    total = WeightedSum()
    total.add(3.3, {"w": np.array([value])})
    parts = SumBounded().join([WeightedSum(), total])
    assert parts.only is None
    assert not SumBounded().is_exact(parts)
    assert SumBounded().is_exact(SumBounded().join([total, total]))


def test_answers_that_come_too_late_and_torn_files_do_not_stay(tmp_path):
    with PartitionedFederation(tmp_path, 2, agents=4, tasks=TinyDuties) as fed:
        folder = fed.config.state / "aggregators"
        folder.mkdir(exist_ok=True)
        late = folder / f"pass-{'7' * 32}.answer"
        late.write_bytes(b"too late")
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        fed.finish()
        assert not late.exists()
        assert list(folder.glob("pass-*")) == []
        torn = folder / f".{late.name}.0123abcd.tmp"
        torn.write_bytes(b"torn")
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.wait(2)
        assert not torn.exists()


def test_agents_of_both_partitions_are_there():
    """The tests above need some in each."""
    assert {partition_of(f"a{number}", 2).number for number in range(4)} == {1, 2}

"""Aggregators in a whole federation: the same bits whatever their number, and whoever is killed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from aggregator_harness import PartitionedFederation, run_of
from faulty_broker import Faults
from federation_duties import TinyDuties, quick_params
from federation_harness import Killed

from coordinator.aggregators import app
from coordinator.aggregators.aggregator import TICK_S
from coordinator.aggregators.messages import Dismissed, Noted, Sealed, ServePartitions
from coordinator.config import AggregatorsConfig, CoordinatorConfig
from coordinator.fleet.partitions import Partition, partition_of
from coordinator.fleet.uploads import Collector
from coordinator.rounds import server_step
from coordinator.state.command_keys import CommandKeys
from edge_agent.core.errors import StateError, UsageError
from edge_agent.wire.messages import down, fields, up

METHODS = ("fedavg", "fedper", "repper", "afl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Method -> last state of a run without aggregators, computed once."""
    known = {}

    def digest_of(method):
        if method not in known:
            known[method], _ = run_of(tmp_path_factory.mktemp(f"alone-{method}"), 0, method, agents=6)
        return known[method]

    return digest_of


@pytest.mark.parametrize("partitions", [1, 2, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_aggregators_gives_the_bits_of_none(tmp_path, alone, method, partitions):
    digest, fed = run_of(tmp_path, partitions, method, agents=6)
    assert digest == alone(method)
    aggregators = fed.aggregators.values()
    assert sum(aggregator.stored for aggregator in aggregators) == 6 * 2, "an update went past the aggregators"
    # Sizes, sums and products of directions, and the sum itself, in each of two rounds.
    busy = [aggregator for aggregator in aggregators if aggregator.stored]
    least = {"afl": 2 * 2}.get(method, 4 * 2)
    assert all(aggregator.passes_made >= least for aggregator in busy)


def test_a_coordinator_without_aggregators_prepares_no_passes(tmp_path, monkeypatch):
    """It had the compute process make each round's broadcast once more, and then read all updates itself."""

    def refuse(*_):
        raise AssertionError("a pass was prepared, and nobody is there to make it")

    monkeypatch.setattr(server_step, "combine", refuse)
    digest, _ = run_of(tmp_path, 0, agents=3)
    assert digest


def test_an_update_that_an_agent_of_the_version_before_sends_goes_to_the_coordinator(tmp_path, alone):
    """It knows no partitions, and uploads as ever; its part of the sum is found in the store."""

    def older(fed):
        agent = fed.agents["a3"]
        send = agent.uploads.offer
        agent.uploads.offer = lambda manifest, partition="": send(manifest)

    digest, fed = run_of(tmp_path, 4, agents=6, prepare=older)
    assert digest == alone("fedavg")
    assert sum(aggregator.stored for aggregator in fed.aggregators.values()) == 5 * 2


def test_the_coordinator_takes_what_no_aggregator_serves(tmp_path, alone):
    def without(fed):
        for name in list(fed.aggregators):
            fed.kill_aggregator(name)
        fed.wait(5)

    digest, _ = run_of(tmp_path, 4, agents=6, prepare=without)
    assert digest == alone("fedavg")


def test_one_aggregator_serves_all_partitions_where_the_others_are_gone(tmp_path, alone):
    def without(fed):
        for number in (1, 3, 4):
            fed.kill_aggregator(f"sum{number}")
        fed.wait(5)
        rows = fed.coordinator.status()["aggregators"]
        assert [row["aggregator"] for row in rows] == ["sum2"] * 4

    digest, fed = run_of(tmp_path, 4, agents=6, prepare=without)
    assert digest == alone("fedavg")
    assert fed.aggregators["sum2"].stored == 6 * 2


def test_an_aggregator_that_is_back_gets_its_partition_back(tmp_path, alone):
    def restarted(fed):
        fed.kill_aggregator("sum1")
        fed.wait(5)
        fed.add_aggregator(1, "again")
        fed.wait(2)
        assert fed.coordinator.status()["aggregators"][0]["aggregator"] == "again"

    digest, _ = run_of(tmp_path, 2, agents=6, prepare=restarted)
    assert digest == alone("fedavg")


# --- killed ----------------------------------------------------------------------------------------------------------

PHASES = {
    "as a manifest arrives": ("_on_upload", "up"),
    "as a chunk arrives": ("_on_upload", "ub"),
    "after a file was stored, before anybody knows": ("_send", "Receipt"),
    "after the coordinator was told": ("_on_noted", ""),
    "as it is asked for a pass": ("_make", ""),
    "after a pass was made, before it says so": ("_report_pass", ""),
    "as it gets partitions": ("_on_partitions", ""),
}


def dies_at(aggregator, function, about, times):
    """Let the aggregator die at the call number ``times`` of a function whose arguments mention ``about``."""
    real = getattr(aggregator, function)
    calls = []

    def call(*arguments):
        mentioned = [getattr(one, "__class__", type(one)).__name__ for one in arguments]
        texts = [one for one in arguments if isinstance(one, str)]
        if not about or about in mentioned or about in texts:
            calls.append(1)
            if len(calls) == times:
                raise Killed
        return real(*arguments)

    setattr(aggregator, function, call)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("method", ["fedavg", "afl"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_aggregator_that_is_killed_changes_no_bit(tmp_path, alone, phase, method, times):
    """The other one takes its partition over: nothing is lost, and nothing counts twice."""

    def deadly(fed):
        dies_at(fed.aggregators["sum1"], *PHASES[phase], times)

    digest, fed = run_of(tmp_path, 2, method, agents=6, prepare=deadly)
    assert digest == alone(method)
    expected = [(number, f"a{agent}") for number in (1, 2) for agent in range(6)]
    assert sorted(fed.accepted) == expected, "an update was lost, or counted twice"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_both_aggregators_killed_leave_all_to_the_coordinator(tmp_path, alone, phase, times):
    def deadly(fed):
        for aggregator in fed.aggregators.values():
            dies_at(aggregator, *PHASES[phase], times)

    digest, _ = run_of(tmp_path, 2, agents=6, prepare=deadly)
    assert digest == alone("fedavg")


@pytest.mark.parametrize("kind", ["update_accepted", "round_closed", "round_opened"])
def test_a_coordinator_that_is_killed_resumes_with_the_same_aggregators(tmp_path, alone, kind):
    with PartitionedFederation(tmp_path, 2, agents=6, tasks=TinyDuties) as fed:
        fed.request("fedavg", rounds=2, params=quick_params("fedavg"))
        fed.until(lambda: fed.entries(kind))
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        assert fed.record.checkpoint == alone("fedavg")


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_another_number_of_partitions_is_refused_by_name(tmp_path):
    with PartitionedFederation(tmp_path, 2, agents=2) as fed:
        fed.add_aggregator(3, "wrong", of=4)
        with pytest.raises(UsageError, match=r"has 2 partitions .* started for 3/4; start it with --partition K/2"):
            fed.wait(3)
        (refused,) = fed.coordinator.status()["refused_agents"]
        assert refused["id"].startswith("aggregator 3/4 at ")
        assert "has 2 partitions" in refused["message"]


def test_a_second_aggregator_of_a_partition_stands_by_and_is_named(tmp_path):
    with PartitionedFederation(tmp_path, 2, agents=2) as fed:
        fed.wait(2)
        fed.add_aggregator(1, "second")
        fed.wait(2)
        first = fed.coordinator.status()["aggregators"][0]
        assert (first["aggregator"], first["stands_by"]) == ("sum1", ("second",))
        assert not fed.aggregators["second"]._assignment.terms
        fed.kill_aggregator("sum1")
        fed.wait(5)
        assert fed.coordinator.status()["aggregators"][0]["aggregator"] == "second"


def test_messages_without_the_secret_change_nothing(tmp_path, caplog):
    with PartitionedFederation(tmp_path, 1, agents=1) as fed:
        stranger = fed.broker.transport()
        stranger.start()
        whom = {"whom": "sum1", "boot": fed.aggregators["sum1"].site.boot}
        forged = Sealed(b"x" * 32).encode(Dismissed(**whom, federation="f" * 32, epoch=9, reason="go"))
        for payload in (forged, b"", b"{}", b"x" * 100_000):
            stranger.publish(fed.topics.aggregators_down, payload)
            stranger.publish(fed.topics.aggregators_up, payload)
        fed.wait(2)
        assert fed.coordinator.status()["aggregators"][0]["aggregator"] == "sum1"
        assert "identity/master.key of the same state folder" in caplog.text


def test_a_coordinator_that_was_replaced_is_obeyed_no_more(tmp_path, caplog):
    with PartitionedFederation(tmp_path, 1, agents=1) as fed:
        fed.wait(2)
        aggregator = fed.aggregators["sum1"]
        newest = aggregator._assignment
        about = {"whom": "sum1", "boot": aggregator.site.boot, "federation": newest.federation}
        about["epoch"] = newest.epoch - 1
        digest = aggregator.site.blobs.put(b"an update")
        stranger = fed.broker.transport()
        stranger.start()
        sealed = Sealed(CommandKeys.of(fed.config.state, fed.config.federation).for_aggregators())
        for earlier in (
            ServePartitions(start="gone", partitions=(), **about),
            # It was suspended, and its successor has closed the round whose updates it looks for when it wakes.
            Noted(number=1, missing=(digest,), **about),
            Dismissed(reason="this federation has 7 partitions", **about),
        ):
            caplog.clear()
            stranger.publish(fed.topics.aggregators_down, sealed.encode(earlier))
            fed.settle()
            assert aggregator._assignment == newest
            assert "earlier_coordinator_ignored" in caplog.text


def test_an_update_that_was_removed_with_its_round_ends_no_aggregator(tmp_path):
    with PartitionedFederation(tmp_path, 1, agents=1) as fed:
        fed.wait(2)
        aggregator = fed.aggregators["sum1"]
        work = aggregator._assignment
        about = {"whom": "sum1", "boot": aggregator.site.boot, "federation": work.federation, "epoch": work.epoch}
        aggregator._on_noted(Noted(number=1, missing=("a" * 64,), **about))
        digest = aggregator.site.blobs.put(b"an update")
        with pytest.raises(StateError, match=r"does not find 1 update stored here, such as .*needs the state folder"):
            aggregator._on_noted(Noted(number=2, missing=(digest, "a" * 64), **about))


def test_an_aggregator_whose_broker_is_away_waits_for_it(tmp_path):
    """It looked again and again without a pause, and took a whole core."""
    with PartitionedFederation(tmp_path, 1, agents=1) as fed:
        fed.wait(2)
        aggregator = fed.aggregators["sum1"]
        aggregator.transport.cut()
        aggregator.step(0)
        fed.clock.now += 60
        waits = []
        aggregator.transport.receive = waits.append
        aggregator.step(10.0)
        assert waits == [TICK_S]


def test_an_update_of_a_run_that_nobody_knows_gets_its_answer(tmp_path):
    with PartitionedFederation(tmp_path, 1, agents=1, capture=True) as fed:
        fed.wait(2)
        agent = fed.agents["a0"]
        blob = fields.BlobRef(digest="a" * 64, size_bytes=100, chunk_bytes=100)
        foreign = up.UpdateManifest(run=f"run-0007-{'0' * 32}", round=1, blob=blob, samples=1)
        agent.link.send(foreign, "1-of-1")
        fed.wait(1)
        receipts = fed.messages(fed.topics.down("a0"), down.Receipt)
        assert [(receipt.accepted, "unknown run run-0007" in receipt.reason) for receipt in receipts] == [(False, True)]


def test_an_aggregator_on_another_folder_ends_and_says_so(tmp_path):
    with PartitionedFederation(tmp_path, 1, agents=3) as fed:
        aggregator = fed.aggregators["sum1"]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        aggregator.site = replace(aggregator.site, folder=elsewhere)
        fed.request(rounds=1)
        with pytest.raises(StateError, match="needs the state folder of its coordinator"):
            fed.finish()


def test_agents_are_divided_by_their_ids_alone():
    agents = [f"agent-{number}" for number in range(4000)]
    counts = Counter(partition_of(agent, 4).number for agent in agents)
    assert all(900 < count < 1100 for count in counts.values())
    assert partition_of("agent-7", 4) == partition_of("agent-7", 4)
    assert {partition_of(agent, 1).name for agent in agents} == {"1-of-1"}


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "a/b", "1/0", "1/9999", "-1/4", "1/4 "])
def test_a_partition_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="expected NUMBER/ALL, such as 2/4"):
        Partition.parse(text)


def test_a_file_that_another_process_has_taken_costs_one_upload_and_no_aggregator(tmp_path, alone, caplog):
    """While a partition changes hands two processes may write one file; one of them finishes it."""

    def taken(fed):
        aggregator = fed.aggregators["sum1"]
        chunk = Collector.chunk
        calls = []

        def gone(collector, agent, frame):
            calls.append(agent)
            if len(calls) == 1:
                raise FileNotFoundError(2, "No such file or directory")
            chunk(collector, agent, frame)

        real = aggregator._on_upload

        def on_upload(agent, kind, payload):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Collector, "chunk", gone)
                real(agent, kind, payload)

        aggregator._on_upload = on_upload

    digest, fed = run_of(tmp_path, 2, agents=6, prepare=taken)
    assert digest == alone("fedavg")
    assert "sum1" in fed.aggregators
    assert "no such file or folder" in caplog.text


# --- networks that lose messages, and other numbers of partitions ----------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_lost_and_repeated_messages_change_no_bit(tmp_path, alone, seed):
    """Some messages are lost, come twice, late, or damaged: also those between coordinator and aggregators."""
    rng = np.random.default_rng(seed)
    digest, fed = run_of(tmp_path, 2, agents=6, faults=Faults(rng, lose=0.1, duplicate=0.1, reorder=0.1, flip=0.05))
    assert digest == alone("fedavg")
    assert sorted(fed.accepted) == [(number, f"a{agent}") for number in (1, 2) for agent in range(6)]


def test_another_number_of_partitions_in_the_midst_of_a_run_changes_no_bit(tmp_path, alone):
    with PartitionedFederation(tmp_path, 2, agents=6, tasks=TinyDuties) as fed:
        fed.request("fedavg", rounds=2, params=quick_params("fedavg"))
        fed.until(lambda: fed.entries("update_accepted"))
        # The coordinator is restarted with four partitions: the aggregators of two end, and say why.
        fed.kill_coordinator()
        fed.config = fed.config.model_copy(update={"aggregators": AggregatorsConfig(partitions=4)})
        fed.start_coordinator()
        ended = []
        while fed.aggregators:
            try:
                fed.wait(1)
            except UsageError as error:
                ended.append(str(error))
                fed.kill_aggregator(next(name for name in fed.aggregators if name[-1] in str(error).split("/")[0]))
        assert len(ended) == 2
        for number in (1, 2, 3, 4):
            fed.add_aggregator(number, f"new{number}", of=4)
        fed.finish()
        assert fed.record.checkpoint == alone("fedavg")


# --- the command -----------------------------------------------------------------------------------------------------


def settings(tmp_path, **sections):
    """A configuration of two partitions, changed."""
    body = {"state": tmp_path / "state", "task": {"class_names": ["a"]}, "aggregators": {"partitions": 2}, **sections}
    return CoordinatorConfig.model_validate(body)


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"aggregators": {"partitions": 0}}, "partitions is not set; set it to 2"),
        ({"aggregators": {"partitions": 3}}, "partitions = 3, and --partition names one of 2; give --partition K/3"),
        ({"identity": {"host": "c.example"}}, "one session"),
        ({"round": {"mode": "buffered"}}, "synchronous rounds alone"),
        ({"privacy": {"secure_sum": True}, "cohort": {"min_agents": 3}}, "masked updates"),
    ],
)
def test_a_configuration_without_such_an_aggregator_is_refused(tmp_path, sections, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        app.check(settings(tmp_path, **sections), Partition(1, 2))


def test_all_mistakes_are_named_at_once(tmp_path):
    config = settings(tmp_path, aggregators={"partitions": 3}, round={"mode": "buffered"})
    with pytest.raises(UsageError, match=r"partitions = 3.*synchronous rounds alone"):
        app.check(config, Partition(1, 2))


def test_the_state_folder_of_another_federation_is_refused(tmp_path):
    """Otherwise it would wait for ever for a coordinator that nobody has started."""
    with PartitionedFederation(tmp_path, 2, agents=1) as fed:
        fed.coordinator.catch_up()
        fed.wait(2)
        state = fed.config.state
    app.check(settings(tmp_path, state=state, federation=fed.config.federation), Partition(1, 2))
    with pytest.raises(UsageError, match=rf"is of federation '{fed.config.federation}', and .* names 'attic'"):
        app.check(settings(tmp_path, state=state, federation="attic"), Partition(1, 2))


def test_an_aggregator_without_the_coordinators_secret_says_what_to_start_first(tmp_path):
    config = settings(tmp_path, broker={"url": "mqtt://127.0.0.1:9"})
    with pytest.raises(StateError, match=r"start the coordinator first"), app.aggregator(config, Partition(1, 2)):
        pass


def test_the_coordinators_own_broker_needs_a_fixed_port(tmp_path):
    config = settings(tmp_path, embedded={"port": 0})
    CommandKeys.of(config.state, config.federation)
    with pytest.raises(UsageError, match=r"another port at each start"), app.aggregator(config, Partition(1, 2)):
        pass


def test_a_partition_whose_aggregator_dies_is_served_again_within_four_seconds(tmp_path):
    """Three seconds of silence, then its agents are asked at once; by themselves they would wait for five more."""
    with PartitionedFederation(tmp_path, 2, agents=6) as fed:
        fed.wait(2)
        partition = Partition(1, 2).name
        fed.kill_aggregator("sum1")
        fed.request(rounds=1)
        begin = fed.clock()
        waiting = [agent for agent in fed.agents if partition_of(agent, 2).name == partition]
        assert waiting
        fed.until(lambda: len(fed.entries("update_accepted")) == 6)
        assert fed.clock() - begin < 4

"""Sums at a site: the same bits as from single updates, whoever is killed, and each update once."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from faulty_broker import Faults
from federation_duties import WIDE_TASK, FakeDuties, TinyDuties, quick_params
from federation_harness import Federation, Killed
from relay_harness import SiteFederation

from coordinator.config import AggregatorsConfig
from coordinator.runs.audit import audit
from edge_agent.core.errors import MessageError
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.relay.sums import GATHER_S, UNHEARD_S
from edge_agent.wire.blobs.chunks import Incoming, Outgoing
from edge_agent.wire.messages.down import Grant
from edge_agent.wire.messages.fields import BlobRef
from edge_agent.wire.messages.site_sums import (
    MEMBERS,
    SiteSays,
    SiteSeal,
    Speak,
    SummedUpdate,
    SumReady,
    SumReceipt,
    members_text,
)
from edge_agent.wire.packed import pack
from edge_agent.wire.tensors import pieces
from edge_agent.wire.transport import Message

NO_BOUNDS = {
    **dict.fromkeys(("max_norm", "max_weight", "max_share", "repeat_share", "min_cosine"), "none"),
    "max_class_mean": "none",
    "max_loss": "none",
}
FIVE = ("a0", "a1", "a2", "a3", "a4")


def run_of(fed, method="fedavg", rounds=2):
    with fed:
        fed.request(method, rounds=rounds, params=quick_params(method))
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        return fed.record.checkpoint, [(entry.round, entry.agent) for entry in fed.entries("update_accepted")]


@pytest.mark.parametrize("method", ["fedavg", "fedper", "repper", "fedavgm", "fedbn"])
def test_a_run_whose_site_sums_gives_the_same_bits(tmp_path, method):
    options = {"tasks": TinyDuties, "aggregation": NO_BOUNDS, "keyed": True}
    alone, counted_alone = run_of(Federation(tmp_path / "alone", agents=FIVE, **options), method)
    fed = SiteFederation(tmp_path / "site", {"north": FIVE[:4]}, sums=("north",), others=FIVE[4:], **options)
    summed, counted = run_of(fed, method)
    assert summed == alone
    assert sorted(counted) == sorted(counted_alone)
    assert fed.relays["north"].sums.summed == 4 * 2


def wide(kind, folder, *arguments, **options):
    return kind(folder, *arguments, tasks=FakeDuties, task=WIDE_TASK, aggregation=NO_BOUNDS, keyed=True, **options)


def at_north(folder, **options):
    return wide(SiteFederation, folder, {"north": FIVE}, sums=("north",), **options)


def finished(fed, rounds=3):
    fed.request(rounds=rounds)
    fed.finish(3600)
    assert each_once(fed)
    return fed.encoder_sha256


def each_once(fed):
    counts = Counter((entry.round, entry.agent) for entry in fed.entries("update_accepted"))
    return set(counts.values()) == {1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of three rounds without a relay."""
    with wide(Federation, tmp_path_factory.mktemp("undisturbed"), agents=FIVE) as fed:
        return finished(fed)


def test_one_sum_leaves_the_site_in_place_of_each_update(tmp_path, undisturbed):
    with at_north(tmp_path) as fed:
        assert finished(fed) == undisturbed
        sums = fed.relays["north"].sums
        assert (sums.sums, sums.summed) == (3, 15)
        update_bytes = len(fed.entries("update_accepted")) * 525_000
        assert fed.upstream["north"].traffic.bytes_up < 0.5 * update_bytes
        [row] = fed.coordinator.status()["sites"]
        assert (row["relay"], row["holds"], row["sums"], row["summed"]) == ("north", 0, 3, 15)
        assert not list((tmp_path / "relay-north" / "updates").glob("*")), "nothing is left of rounds that are over"


def test_a_relay_is_killed_at_any_moment(tmp_path, undisturbed):
    rng = np.random.default_rng(11)
    for attempt in range(20):
        with at_north(tmp_path / str(attempt)) as fed:
            steps = int(rng.integers(5, 160))
            counted = {"steps": 0}

            def kill(site, relay, steps=steps, counted=counted):
                counted["steps"] += 1
                if counted["steps"] == steps:
                    raise Killed

            fed.hook = kill
            fed.after_kill = fed.add_relay
            assert finished(fed) == undisturbed, f"killed after {steps} steps"


def test_a_relay_that_never_comes_back_loses_nothing(tmp_path, undisturbed):
    """Its agents find another way: they have kept their updates."""
    with at_north(tmp_path) as fed:

        def kill(site, relay):
            if len(relay.sums.holds) == 5:
                raise Killed

        fed.hook = kill
        fed.request(rounds=3)
        fed.until(lambda: not fed.relays)
        fed.sites = {}
        for name in FIVE:
            fed.kill(name)
            fed.add(name)
        fed.finish(3600)
        assert each_once(fed)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.parametrize("moment", ["on its way", "stored", "journaled"])
def test_the_coordinator_is_killed_with_a_sum(tmp_path, undisturbed, moment, monkeypatch):
    with at_north(tmp_path) as fed:
        fed.request(rounds=3)
        killed = []

        def kill(*_):
            if not killed:
                killed.append(moment)
                raise Killed

        if moment == "on its way":
            monkeypatch.setattr(fed.coordinator.sites, "chunk", kill)
        elif moment == "stored":
            monkeypatch.setattr(fed.coordinator.collector, "summed", kill)
        else:
            summed = fed.coordinator.collector.summed

            def after(*arguments):
                summed(*arguments)
                kill()

            monkeypatch.setattr(fed.coordinator.collector, "summed", after)
        fed.until(lambda: killed)
        fed.until(lambda: fed.coordinator is None)
        fed.wait(1)
        fed.start_coordinator()
        fed.finish(3600)
        assert each_once(fed)
        assert fed.encoder_sha256 == undisturbed


@pytest.mark.parametrize("fault", ["lose", "duplicate", "reorder", "flip"])
def test_messages_are_lost_repeated_reordered_and_damaged_on_both_sides(tmp_path, undisturbed, fault):
    with at_north(tmp_path) as fed:
        fed.broker.faults = Faults(np.random.default_rng(3), **{fault: 0.05})
        fed.site_brokers["north"].faults = Faults(np.random.default_rng(4), **{fault: 0.05})
        assert finished(fed) == undisturbed


def test_an_agent_that_is_late_is_summed_without(tmp_path, undisturbed):
    """Its update passes by itself, after the sum of the others."""
    with at_north(tmp_path) as fed:
        fed.kill("a3")
        fed.add("a3", seconds=60.0)
        assert finished(fed) == undisturbed
        sums = fed.relays["north"].sums
        assert sums.summed == 3 * 4


def test_an_update_that_is_no_number_is_refused_and_the_others_are_summed(tmp_path):
    with at_north(tmp_path, round={"quorum": 0.5}) as fed:
        put = fed.tasks["a1"].outbox.put

        def spoiled(tensors, *arguments, **options):
            first = next(iter(tensors))
            return put({**tensors, first: np.full_like(tensors[first], np.nan)}, *arguments, **options)

        fed.tasks["a1"].outbox.put = spoiled
        fed.request(rounds=1)
        fed.finish(3600)
        assert fed.record.status == "finished"
        assert [(entry.agent, entry.fact.reason) for entry in fed.entries("update_refused")] == [
            ("a1", "tensor 'encoder.0.weight' holds NaN or infinity; local training has diverged")
        ] or fed.entries("update_refused")[0].agent == "a1"
        assert fed.relays["north"].sums.summed == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": {}},
        {"aggregation": {**NO_BOUNDS, "rule": "median"}},
        {"aggregation": {**NO_BOUNDS, "max_loss": 4.0}},
        {"sums": ()},
    ],
)
def test_where_something_looks_at_single_updates_they_pass_one_by_one(tmp_path, settings):
    options = {"aggregation": NO_BOUNDS, "sums": ("north",), **settings}
    with SiteFederation(tmp_path, {"north": FIVE}, tasks=FakeDuties, task=WIDE_TASK, keyed=True, **options) as fed:
        fed.request(rounds=1)
        fed.finish(3600)
        assert fed.relays["north"].sums.summed == 0
        assert len(fed.entries("update_accepted")) == 5


def test_a_method_that_needs_single_updates_gets_them(tmp_path):
    options = {"tasks": TinyDuties, "aggregation": NO_BOUNDS, "keyed": True}
    alone, _ = run_of(Federation(tmp_path / "alone", agents=FIVE, **options), "fedpac")
    fed = SiteFederation(tmp_path / "site", {"north": FIVE}, sums=("north",), **options)
    assert run_of(fed, "fedpac")[0] == alone
    assert fed.relays["north"].sums.summed == 0


def test_a_site_of_two_sends_both_updates(tmp_path):
    with wide(SiteFederation, tmp_path, {"north": FIVE[:2]}, sums=("north",), others=FIVE[2:]) as fed:
        fed.request(rounds=1)
        fed.finish(3600)
        assert fed.relays["north"].sums.summed == 0


def test_a_run_with_sums_can_be_audited(tmp_path):
    with wide(SiteFederation, tmp_path, {"north": FIVE[:4]}, sums=("north",), others=FIVE[4:]) as fed:
        fed.run = ""
        fed.request(rounds=2, keep_updates=True)
        fed.finish(3600)
        result = audit(fed.state, fed.run, [tmp_path / name for name in FIVE])
        assert result.breaks == []
        assert (result.receipts, [one.confirmed for one in result.rounds]) == (10, [5, 5])
        assert [one.is_aggregation for one in result.rounds] == [True, True]


# --- hostile ---------------------------------------------------------------------------------------------------------


class Hostile:
    """A relay that says what a test wants, beside one that is honest."""

    def __init__(self, fed, relay="north", key_of="north"):
        self.fed = fed
        self.relay = relay
        self.seal = SiteSeal(fed.keys().of_agent(key_of))
        self.transport = fed.broker.transport()
        self.transport.subscribe(fed.topics.site_down(relay))
        self.transport.start()

    def say(self, message):
        self.transport.publish(self.fed.topics.site_up(self.relay), self.seal.encode(message))

    def receipts(self):
        found = []
        while (event := self.transport.receive(0)) is not None:
            if not isinstance(event, Message):
                continue
            with contextlib.suppress(MessageError):  # it hears itself as well
                message = self.seal.to_site(event.payload)
                if isinstance(message, SumReceipt):
                    found.append(message)
        return found

    def offer(self, members, total, *, run=None, number=1):
        """Offer a sum and send it; returns what the coordinator says."""
        run = run or self.fed.run_id
        about = {"run": run, "round": str(number), MEMBERS: members_text(tuple(members))}
        blob = Outgoing.of(pack(pieces(total.to_tensors(), about)))
        self.say(SumReady(run=run, round=number, blob=blob.ref))
        self.fed.settle()
        for index in range(blob.count):
            self.transport.publish(self.fed.topics.site_chunks(self.relay), blob.frame(index))
        self.fed.settle()
        return self.receipts()


@pytest.fixture
def waiting(tmp_path):
    """A round whose agents work for a long time, and a hostile relay in place of their own."""
    with at_north(tmp_path) as fed:
        for name in FIVE:
            fed.kill(name)
            fed.add(name, seconds=500.0)
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.coordinator.collector.open_round is not None)
        yield fed, Hostile(fed)


def update_of(fed):
    specs = fed.coordinator.collector.open_round.expected
    return {name: np.ones(spec.shape, spec.dtype) for name, spec in specs.items()}


def member(agent, samples=10):
    return SummedUpdate(agent=agent, digest=agent[-1] * 64, samples=samples)


def sum_of(fed, *weights):
    total = WeightedSum()
    for weight in weights:
        total.add(float(weight), update_of(fed))
    return total


def test_a_right_sum_is_taken_once(waiting):
    fed, relay = waiting
    members = [member("a0"), member("a1"), member("a2")]
    assert [one.is_accepted for one in relay.offer(members, sum_of(fed, 10, 10, 10))] == [True]
    assert [one.is_accepted for one in relay.offer(members, sum_of(fed, 10, 10, 10))] == [True]
    assert each_once(fed)
    assert len(fed.entries("update_accepted")) == 3


@pytest.mark.parametrize(
    "case",
    [
        "weight",
        "count",
        "twice",
        "stranger",
        "delivered",
        "other run",
        "late",
        "other tensors",
        "not finite",
        "no members",
    ],
)
def test_a_wrong_sum_is_refused_and_nothing_counts(waiting, case):
    fed, relay = waiting
    members = [member("a0"), member("a1"), member("a2")]
    total = sum_of(fed, 10, 10, 10)
    options = {}
    if case == "weight":
        total = sum_of(fed, 10, 10, 1000)
    elif case == "count":
        total = sum_of(fed, 10, 20)
    elif case == "twice":
        members = [member("a0"), member("a0"), member("a2")]
    elif case == "stranger":
        members = [member("a0"), member("a1"), member("x7")]
    elif case == "delivered":
        assert relay.offer(members, total)[0].is_accepted
        members = [member("a2"), member("a3"), member("a4")]
    elif case == "other run":
        options = {"run": "run-0009-" + "0" * 32}
    elif case == "late":
        options = {"number": 7}
    elif case == "other tensors":
        total = WeightedSum()
        for _ in range(3):
            total.add(10.0, {"other": np.ones(131_000, np.float32)})
    elif case == "not finite":
        next(iter(total._sums.values())).fine[:] = np.nan
    elif case == "no members":
        members = []
    before = len(fed.entries("update_accepted"))
    receipts = relay.offer(members, total, **options)
    assert [one.is_accepted for one in receipts] == [False]
    assert receipts[0].reason
    assert len(fed.entries("update_accepted")) == before


def test_a_relay_without_the_key_is_not_heard(waiting):
    fed, _ = waiting
    refused = fed.coordinator.status()["rejected_messages"]
    liar = Hostile(fed, key_of="south")
    liar.say(SiteSays(boot="x", software="1", holds=FIVE))
    fed.settle()
    assert fed.coordinator.status()["rejected_messages"] == refused + 1


def test_a_relay_that_is_not_in_the_list_is_not_heard(waiting):
    fed, _ = waiting
    refused = fed.coordinator.status()["rejected_messages"]
    Hostile(fed, relay="south", key_of="south").say(SiteSays(boot="x", software="1"))
    fed.settle()
    assert fed.coordinator.status()["rejected_messages"] == refused  # nobody listens to it


@pytest.mark.parametrize("agent, run", [("a0", "other"), ("x7", "this")])
def test_a_relay_speaks_to_its_own_agents_about_the_open_round_alone(waiting, agent, run):
    fed, relay = waiting
    refused = fed.coordinator.status()["rejected_messages"]
    named = fed.run_id if run == "this" else "run-0009-" + "0" * 32
    relay.say(Speak(agent=agent, command=Grant(run=named, digest="0" * 64, credits=1, missing=((0, 1),))))
    fed.settle()
    assert fed.coordinator.status()["rejected_messages"] == refused + 1


@pytest.mark.parametrize("payload", [b"", b"x" * 64, b"0" * 200_000, b"\xff" * 100], ids=["0", "64", "200000", "100"])
def test_what_is_no_message_costs_itself_alone(waiting, payload):
    fed, relay = waiting
    for topic in (fed.topics.site_up("north"), fed.topics.site_chunks("north"), fed.topics.site_down("north")):
        relay.transport.max_payload_bytes = 1 << 20
        relay.transport.publish(topic, payload)
    fed.settle()
    members = [member("a0"), member("a1"), member("a2")]
    assert relay.offer(members, sum_of(fed, 10, 10, 10))[0].is_accepted


def test_a_recorded_round_is_not_taken_again_by_a_relay(tmp_path):
    with at_north(tmp_path) as fed:
        fed.broker.capture = True
        fed.request(rounds=2)
        fed.finish(3600)
        fed.wait(6)
        relay = fed.relays["north"]
        recorded = [payload for topic, payload in fed.broker.captured if topic == fed.topics.site_down("north")]
        replayer = fed.broker.transport()
        replayer.start()
        for payload in recorded:
            replayer.publish(fed.topics.site_down("north"), payload)
        fed.settle()
        assert relay.sums.holds == ()
        assert relay.sums._round is None


def test_a_relay_waits_for_no_agent_that_has_delivered(waiting):
    fed, relay = waiting
    assert relay.offer([member("a0"), member("a1")], sum_of(fed, 10, 10))[0].is_accepted
    fed.wait(6)
    assert fed.relays["north"].sums._round.terms.agents == FIVE[2:]


def huge(text):
    return text.replace('"samples":10', f'"samples":1{"0" * 400}', 1)


def test_a_member_with_more_samples_than_a_device_can_have_costs_its_sum_alone(waiting, monkeypatch):
    """Python's own conversion of such a number raises what nothing would catch."""
    fed, relay = waiting
    whole = members_text
    monkeypatch.setitem(globals(), "members_text", lambda members: huge(whole(members)))
    members = [member("a0"), member("a1"), member("a2")]
    [receipt] = relay.offer(members, sum_of(fed, 10, 10, 10))
    assert not receipt.is_accepted
    assert "malformed" in receipt.reason


@pytest.mark.parametrize("value", [-1.0, 1e300])
def test_a_sum_with_values_that_no_update_could_have_is_refused(waiting, value):
    fed, relay = waiting
    total = sum_of(fed, 10, 10, 10)
    name, array_sum = next(iter(total._sums.items()))
    array_sum.coarse[:] = value
    if value < 0:
        collection = fed.coordinator.collector.open_round
        variance = f"{name}.running_var"
        collection.expected[variance] = collection.expected.pop(name)
        total._sums[variance] = total._sums.pop(name)
        total._dtypes[variance] = total._dtypes.pop(name)
    [receipt] = relay.offer([member("a0"), member("a1"), member("a2")], total)
    assert not receipt.is_accepted
    assert ("variance below 0" if value < 0 else "no exact sum") in receipt.reason


def test_sums_that_are_never_sent_leave_no_open_files_and_one_on_disk(waiting):
    fed, relay = waiting
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(50):
        blob = BlobRef(digest=f"{number:064x}", size_bytes=800_000, chunk_bytes=65_536)
        relay.say(SumReady(run=fed.run_id, round=1, blob=blob))
        fed.settle()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    assert len(list((fed.state.path / "sites" / "north").glob("*.part"))) == 1
    # The round ends without it.
    fed.coordinator.collector.pause()
    fed.wait(1)
    assert not list((fed.state.path / "sites" / "north").glob("*.part"))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_a_relay_is_told_that_its_sum_counts_once_the_journal_has_it(waiting, monkeypatch):
    """A full disk may take the entries back: then the agents keep their updates, and the relay its sum."""
    fed, relay = waiting
    members = [member("a0"), member("a1"), member("a2")]
    with monkeypatch.context() as lost:
        lost.setattr(fed.coordinator.collector, "has_sum", lambda *_: False)
        assert relay.offer(members, sum_of(fed, 10, 10, 10)) == []
        fed.wait(1)
        assert relay.receipts() == []
    assert [one.is_accepted for one in relay.offer(members, sum_of(fed, 10, 10, 10))] == [True]


def test_two_relays_with_one_id_are_named_in_the_status(waiting):
    fed, relay = waiting
    for _ in range(3):
        for boot, host in (("s1", "cellar"), ("s2", "roof")):
            relay.say(SiteSays(boot=boot, software="1", host=host))
            fed.settle()
    [refused] = fed.coordinator.status()["refused_agents"]
    assert refused["id"] == "north"
    assert "cellar and roof" in refused["message"]


def test_a_relay_that_was_restarted_is_one_relay(waiting):
    fed, relay = waiting
    for boot in ("s1", "s2", "s2", "s3"):
        relay.say(SiteSays(boot=boot, software="1", host="cellar"))
        fed.settle()
    assert fed.coordinator.status()["refused_agents"] == []


@pytest.mark.parametrize(
    "settings, reason",
    [
        (
            {"aggregation": {**NO_BOUNDS, "max_norm": 3.0, "rule": "median"}},
            "expected rule = 'mean', max_norm = 'none'",
        ),
        ({"round": {"mode": "buffered", "buffer": 2}}, "round.mode = 'buffered'"),
    ],
)
def test_the_status_says_why_no_sums_are_taken(tmp_path, settings, reason):
    options = {"aggregation": NO_BOUNDS, **settings}
    with SiteFederation(tmp_path, {"north": FIVE}, sums=("north",), keyed=True, **options) as fed:
        fed.settle()
        [row] = fed.coordinator.status()["sites"]
        assert reason in row["problem"]


def kill_with_a_sum(fed, monkeypatch):
    """Kill the coordinator when the first chunk of a sum comes."""

    def kill(*_):
        raise Killed

    with monkeypatch.context() as deadly:
        deadly.setattr(fed.coordinator.sites, "chunk", kill)
        fed.request(rounds=3)
        fed.until(lambda: fed.coordinator is None)


def test_a_restarted_coordinator_takes_the_sum_that_was_announced_before_its_round_was_open_again(
    tmp_path, undisturbed, monkeypatch
):
    with at_north(tmp_path) as fed:
        kill_with_a_sum(fed, monkeypatch)
        fed.start_coordinator()
        # It is announced when the coordinator serves, and before the coordinator has opened the round.
        ready = fed.relays["north"].sums._announced.sum
        seal = SiteSeal(fed.keys().of_agent("north"))
        run_ids = fed.coordinator._run_ids
        assert run_ids.name(ready.run) == fed.run
        said = []
        monkeypatch.setattr(fed.coordinator.sites, "_say", lambda *what: said.append(what))
        assert fed.coordinator.collector.open_round is None
        fed.coordinator.sites.heard("north", seal.encode(SumReady(run=ready.run, round=ready.round, blob=ready.ref)))
        assert said == []
        monkeypatch.undo()
        fed.finish(3600)
        assert each_once(fed)
        assert fed.encoder_sha256 == undisturbed
        assert fed.relays["north"].sums.summed == 15


def test_updates_pass_one_by_one_once_the_coordinator_takes_no_sums_any_more(tmp_path, undisturbed, monkeypatch):
    """Its configuration was changed while the relay had the updates of the open round."""
    with at_north(tmp_path) as fed:
        kill_with_a_sum(fed, monkeypatch)
        fed.config = fed.config.model_copy(update={"aggregators": AggregatorsConfig()})
        fed.start_coordinator()
        fed.wait(2 * UNHEARD_S)
        assert len(fed.entries("round_closed")) >= 1, "the round does not wait for its deadline"
        fed.finish(3600)
        assert each_once(fed)
        assert fed.encoder_sha256 == undisturbed


def test_parts_of_updates_do_not_stay_on_disk_after_their_round(tmp_path):
    with at_north(tmp_path, round={"quorum": 0.5}) as fed:
        folder = tmp_path / "relay-north" / "updates" / "a9"
        folder.mkdir(parents=True)
        (folder / f"{'0' * 64}.part").write_bytes(b"x")
        (folder / "note.txt").write_bytes(b"of somebody else")
        fed.request(rounds=1)
        fed.finish(3600)
        fed.wait(6)
        assert [path.name for path in folder.iterdir()] == ["note.txt"]


def test_two_agents_with_the_same_update_do_not_lose_it_by_each_other(tmp_path):
    with at_north(tmp_path) as fed:
        fed.kill("a3")
        fed.add("a3", seconds=10.0)
        fed.request(rounds=1)
        sums = fed.relays["north"].sums
        fed.until(lambda: sums._round is not None and len(sums._round.stored) == 4)
        agent, manifest = next(iter(sums._round.stored.items()))
        sums._round.stored["twin"] = manifest
        sums._pass_on(sums._round, "twin")
        assert (tmp_path / "relay-north" / "updates" / manifest.blob.digest).is_file()
        sums._pass_on(sums._round, agent)
        assert not (tmp_path / "relay-north" / "updates" / manifest.blob.digest).is_file()


def test_an_agent_that_moves_in_the_midst_of_its_upload_and_back_counts_once(tmp_path, undisturbed):
    with at_north(tmp_path) as fed:
        here = dict(fed.sites)
        moves = []

        def move(site, relay):
            open_round = relay.sums._round
            if open_round is None or len(moves) >= 6:
                return
            if "a2" in open_round.uploads and len(moves) % 2 == 0:
                fed.sites = {"north": ("a0", "a1", "a3", "a4")}
            elif len(moves) % 2 == 1 and fed.coordinator.collector.is_uploading("a2"):
                fed.sites = here
            else:
                return
            moves.append(open_round.terms.round)
            fed.kill("a2")
            fed.add("a2")

        fed.hook = move
        assert finished(fed) == undisturbed
        assert len(moves) >= 2


def test_an_agent_that_restarts_between_its_manifest_and_the_sum_counts_once(tmp_path, undisturbed):
    with at_north(tmp_path) as fed:
        restarted = set()

        def restart(site, relay):
            open_round = relay.sums._round
            if open_round is None or open_round.terms.round in restarted or "a1" not in open_round.stored:
                return
            restarted.add(open_round.terms.round)
            fed.kill("a1")
            fed.add("a1")

        fed.hook = restart
        assert finished(fed) == undisturbed
        assert restarted


def test_a_round_that_asks_another_agent_while_a_sum_is_made_takes_its_update_too(tmp_path):
    names = (*FIVE, "a5", "a6", "a7")
    cohort = {"min_agents": 3, "max_agents": 5}
    with wide(SiteFederation, tmp_path, {"north": names}, sums=("north",), cohort=cohort) as fed:
        lost = []

        def lose(site, relay):
            """An agent of the cohort dies when all others have delivered to the relay."""
            open_round = relay.sums._round
            if open_round is None or lost or len(open_round.stored) != 4:
                return
            lost.append(next(iter(set(open_round.terms.agents) - open_round.stored.keys())))
            fed.kill(lost[0])

        fed.hook = lose
        fed.settle()
        fed.request(rounds=2)
        fed.finish(7200)
        assert each_once(fed)
        assert fed.record.status == "finished"
        delivered = {entry.agent for entry in fed.entries("update_accepted") if entry.round == 1}
        assert len(delivered) == 5
        assert lost[0] not in delivered
        assert fed.relays["north"].sums.summed == 4 + 5


def test_the_sum_of_a_round_stays_with_its_updates_and_goes_with_its_run(tmp_path):
    """`keep_updates` keeps sums as well, and without it they go when their round is over."""
    for keeps in (True, False):
        with at_north(tmp_path / str(keeps)) as fed:
            fed.run = ""
            fed.request(rounds=2, keep_updates=keeps)
            fed.finish(3600)
            sums = {entry.digest for entry in fed.entries("update_accepted")}
            assert len(sums) == 2
            assert [digest in fed.state.blobs for digest in sorted(sums)] == [keeps, keeps]
            result = audit(fed.state, fed.run, [fed.folder / name for name in FIVE])
            assert result.breaks == []


def test_a_round_that_has_its_quorum_gets_what_the_site_has_within_its_grace_period(tmp_path):
    """One slow agent at the site would else cost the round the updates of all others there."""
    others = tuple(f"b{number}" for number in range(12))
    limits = {"quorum": 0.75, "grace_s": 8.0, "deadline_s": 600.0, "adaptive": False}
    with wide(SiteFederation, tmp_path, {"north": FIVE[:4]}, sums=("north",), others=others, round=limits) as fed:
        fed.kill("a3")
        fed.add("a3", seconds=60.0)
        fed.kill("b0")
        fed.add("b0", seconds=5.0)  # with it, the round has its quorum before the relay has waited for a3
        fed.request(rounds=1)
        fed.finish(3600)
        delivered = {entry.agent for entry in fed.entries("update_accepted")}
        assert {"a0", "a1", "a2"} <= delivered
        assert "a3" not in delivered
        assert fed.relays["north"].sums.summed == 3


def test_an_agent_that_offers_an_update_and_sends_nothing_does_not_hold_up_the_site(tmp_path, undisturbed):
    with at_north(tmp_path) as fed:
        fed.kill("a3")
        fed.add("a3", seconds=250.0)
        fed.request(rounds=1)
        sums = fed.relays["north"].sums
        fed.until(lambda: sums._round is not None and len(sums._round.stored) == 4)
        manifest = next(iter(sums._round.stored.values()))
        other = manifest.blob.model_copy(update={"digest": "0" * 64})
        assert sums.manifest("a3", manifest.model_copy(update={"blob": other}))
        begun_at = fed.clock.now
        fed.until(lambda: sums.sums == 1)
        assert GATHER_S <= fed.clock.now - begun_at < 2 * GATHER_S
        fed.finish(3600)
        assert each_once(fed)


def test_a_disk_that_fails_when_a_sum_is_complete_costs_no_open_file_and_the_sum_comes_again(waiting, monkeypatch):
    fed, relay = waiting
    members = [member("a0"), member("a1"), member("a2")]
    before = len(list(Path("/proc/self/fd").iterdir()))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Incoming, "finish", fail)
        assert relay.offer(members, sum_of(fed, 10, 10, 10)) == []
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [one.is_accepted for one in relay.offer(members, sum_of(fed, 10, 10, 10))] == [True]


def test_a_disk_that_fails_at_the_relay_lets_the_updates_pass_and_costs_no_open_file(
    tmp_path, undisturbed, monkeypatch
):
    finish = Incoming.finish

    def fail(incoming, path, **options):
        if "relay-north" in str(path) and "updates" in str(path):
            raise OSError(28, "No space left on device")
        finish(incoming, path, **options)

    monkeypatch.setattr(Incoming, "finish", fail)
    with at_north(tmp_path) as fed:
        fed.settle()
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert finished(fed) == undisturbed
        assert fed.relays["north"].sums.summed == 0
        assert not list((tmp_path / "relay-north" / "updates").rglob("*.part"))
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3

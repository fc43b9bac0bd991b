"""The five papers over a real Mosquitto, while somebody who may hear everything writes down every byte.

Each run has four agents that train and two without torch, five rounds, and an export at the end. All of them are
stepped in turn by one thread; the network threads, the broker and time are real.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict

import numpy as np
import paho.mqtt.client as paho
import pytest
from federation_harness import FederationInRealTime
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.broker import MosquittoBroker, find_mosquitto
from edge_agent import methods
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.core.storage import read_tensors
from edge_agent.core.task import ImageInput, Task
from edge_agent.training.parts import norm_names
from edge_agent.wire.blobs.chunks import CHUNK_BYTES, decode_frame, transfer_id
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.tensors import decode

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 160, "width": 8},
)
"""22,000 weights: each update takes two frames of 12 chunks at most."""

SMALL = {"local_epochs": 1, "batch_size": 16}
PARAMS = {
    "dualfed": {**SMALL, "projector_width": 16, "contrastive_weight": 2.0},
    "fedpac": {**SMALL, "min_class_count": 2},
    "fedpick": {**SMALL, "mask_width": 16},
    "repper": {**SMALL, "head": "lr"},
    "fedrir": {**SMALL, "specific_dim": 16},
}
HEADS = {"dualfed": "dualfed", "fedpac": "fedpac", "fedpick": "fedpick", "repper": "mlp", "fedrir": "fedrir_global"}
TRAIN = ("a0", "a1", "a2", "a3")
HEAD = ("h0", "h1")
KEPT = {
    "dualfed": {
        "personal.projector.0.weight",
        "personal.projector.2.running_mean",
        "personal.personal_head.weight",
        "shared.weight",
    },
    "fedpac": {"personal.head.weight"},
    "fedpick": {
        "personal.mask.0.weight",
        "personal.relevant_head.weight",
        "personal.irrelevant_head.weight",
        "shared.weight",
    },
    "repper": {"memory.personal.head.weight"},
    "fedrir": {"personal.generator.layers.0.weight", "personal.specific.layers.0.weight", "personal.head.weight"},
}
"""Some of what devices of a method keep: if these are not searched for, nothing is."""

ALSO_SENT = {"fedpac": ("personal.head.weight", "personal.head.bias")}
"""FedPAC's classifier is personal, and lent to the others: ``extra.head.weight``."""

ROUNDS = 5
SHORTEST = 16
"""Bytes of an array below which finding them somewhere says nothing."""


# --- everybody, and the listener ---------------------------------------------------------------------------------


class Listener:
    """A plain MQTT client that keeps every payload under every topic."""

    def __init__(self, config):
        self.heard = []
        self._last = threading.Event()
        self._ready = threading.Event()
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2, client_id="listener")
        client.on_connect = lambda *_: client.subscribe("#", qos=1)
        client.on_subscribe = lambda *_: self._ready.set()
        client.on_message = self._on_message
        client.connect(config.host, config.port)
        client.loop_start()
        assert self._ready.wait(10)

    def _on_message(self, client, userdata, message):
        if message.topic == "listener/last":
            self._last.set()
        else:
            self.heard.append((message.topic, message.payload))

    def close(self):
        """Once all has come that the broker took before this: it hands on in the order in which it took."""
        self._client.publish("listener/last", b"", qos=1)
        assert self._last.wait(10)
        self._client.disconnect()
        self._client.loop_stop()


class OverMosquitto:
    """A broker process in the place of the harness's broker in memory."""

    def __init__(self):
        self.process = MosquittoBroker()
        self.process.start()
        self.listener = Listener(self.process.config())
        self.captured = self.listener.heard
        self._clients = 0

    def transport(self, will=None):
        self._clients += 1
        return MqttTransport(self.process.config(), f"client-{self._clients}", will=will)

    def close(self):
        self.listener.close()
        self.process.stop()


class WatchedDuties(TaskRunner):
    """The real duties; after each job everything that the device keeps is looked at."""

    def __init__(self, config, tier):
        super().__init__(config, tier)
        self.on_disk = {}

    def do(self, job, received, encoder=None):
        done = super().do(job, received, encoder)
        self.look()
        return done

    def look(self):
        """Bytes -> name of every array in every file of the device, but what it fetched and what waits to be sent."""
        for path in self.config.state.rglob("*.safetensors"):
            place = path.relative_to(self.config.state).parts
            if place[0] in {"runs", "head", "features"} and "encoders" not in place:
                for name, array in read_tensors(path).items():
                    self.on_disk[np.ascontiguousarray(array).tobytes()] = name


class RealFederation(FederationInRealTime):
    """Six agents of a method over a real broker."""

    def __init__(self, folder, method, *, tier="train"):
        super().__init__(
            folder,
            agents=TRAIN,
            task=TASK,
            cohort={"tier": tier},
            export={"after_run": True, "int8": False, "exporter": "legacy"},
        )
        self.broker = OverMosquitto()
        self.method = method

    def __enter__(self):
        super().__enter__()
        for name in HEAD:
            self.add(name, tier="head")
        roster = self.coordinator.roster
        self.until(lambda: (*roster.present("train"), *roster.present("head")) == TRAIN + HEAD)
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self.broker.close()

    def add(self, name, tier="train"):
        number = (TRAIN + HEAD).index(name)
        config = AgentConfig(
            id=name,
            state=self.folder / name,
            data=DataConfig(source=f"digits:optdigits?n=64&client={number}&clients=6"),
            head=HeadConfig(name=HEADS[self.method] if name == "h0" else "lr", precision="fp32"),
        )
        tasks = self.tasks[name] = WatchedDuties(config, tier)
        transport = self.broker.transport(will_of(config, name))
        agent = Agent(config, transport, tasks, AgentRuntime(boot=f"boot-{name}"))
        self.agents[name] = agent
        agent.start()

    def kill(self, name, *, will=True):
        self.tasks[name].look()
        super().kill(name, will=will)


class Overheard:
    """A finished run, what devices kept of it, and what the listener has."""

    def __init__(self, folder, method, *, rounds=ROUNDS, tier="train"):
        with RealFederation(folder, method, tier=tier) as fed:
            run = fed.request(method, rounds=rounds, params=PARAMS[method])
            fed.finish(120.0)
            assert fed.record.status == "finished", fed.record.end
            self.summary = fed.state.run(run).summary()
            self.lines = fed.metrics()
        self.topics = fed.topics
        self.heard = fed.broker.captured
        self.tasks = fed.tasks
        self.blobs = assembled(self.heard)
        self.everything = self.haystack(self.heard)

    def messages(self, topic, kind):
        """Control messages of one kind on a topic, in order."""
        parse = codec.parse_from_agent if topic.endswith("/up") else codec.parse_from_coordinator
        found = [parse(payload) for where, payload in self.heard if where == topic]
        return [message for message in found if isinstance(message, kind)]

    def uploads(self, agent):
        """(Purpose, round) -> tensors of every update that the agent has announced; all of it must have come."""
        manifests = self.messages(self.topics.up(agent), up.UpdateManifest)
        digests = {(m.purpose, m.round): m.blob.digest for m in manifests}
        blobs = {key: self.blobs[transfer_id(digest)] for key, digest in sorted(digests.items())}
        assert [hashlib.sha256(blob).hexdigest() for blob in blobs.values()] == [digests[key] for key in blobs]
        return {key: decode(blob) for key, blob in blobs.items()}

    def during_rounds(self):
        """What was heard before any agent was asked for batch norm statistics or to personalize."""
        beyond = (place for place, item in enumerate(self.heard) if _asks_beyond(*item))
        return self.haystack(self.heard[: next(beyond, len(self.heard))])

    def haystack(self, heard):
        """Every payload as it came, and every blob put together from its chunks: an array may lie across two."""
        return b"\n".join([*(payload for _, payload in heard), *assembled(heard).values()])

    def private(self):
        """(device, name, bytes) of what devices kept at any time."""
        for device, tasks in self.tasks.items():
            for raw, name in tasks.on_disk.items():
                if len(raw) >= SHORTEST and any(raw):
                    yield device, name, raw

    def leaked(self):
        """(device, name, bytes) of what devices kept and the listener has."""
        return [found for found in self.private() if found[2] in self.everything]


def _asks_beyond(topic, payload):
    message = codec.parse_from_coordinator(payload) if topic.endswith("/dn") else None
    return isinstance(message, down.Job) and message.purpose in {"batch_norm_stats", "personalize"}


def assembled(heard):
    """Transfer -> bytes of each blob of which every chunk was heard; the same chunk twice holds the same bytes."""
    chunks = defaultdict(dict)
    counts = {}
    for topic, payload in heard:
        if topic.endswith(("/ub", "/db")) or "/b/" in topic:
            frame = decode_frame(payload)
            for begin in range(0, len(frame.data), CHUNK_BYTES):
                index = frame.index + begin // CHUNK_BYTES
                data = bytes(frame.data[begin : begin + CHUNK_BYTES])
                assert chunks[frame.transfer].setdefault(index, data) == data
            counts[frame.transfer] = frame.count
    whole = {transfer: found for transfer, found in chunks.items() if len(found) == counts[transfer]}
    return {transfer: b"".join(found[i] for i in range(len(found))) for transfer, found in whole.items()}


@pytest.fixture(scope="module")
def overheard(tmp_path_factory):
    """A function that gives the run of a method; each is done once."""
    runs = {}

    def of(method):
        if method not in runs:
            runs[method] = Overheard(tmp_path_factory.mktemp(method), method)
        return runs[method]

    return of


def declared(method, task=TASK):
    """(names in each update of a round, names in the update after the rounds) as the method states them."""
    made = methods.create(method, PARAMS[method])
    model = made.build(task)
    shared = made.shared_names(model)
    return {*shared, *made.sends(model, task)}, set(norm_names(model, shared))


# --- what is claimed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(PARAMS))
def test_five_rounds_end_with_reports_of_all_six_devices(overheard, method):
    run = overheard(method)
    assert [line["round"] for line in run.lines] == [1, 2, 3, 4, 5]
    assert run.summary["faults"] == {}
    reports = {agent["id"]: agent for agent in run.summary["agents"]}
    assert tuple(reports) == TRAIN + HEAD
    assert all(0 <= agent["acc"]["personal"] <= 1 for agent in reports.values())
    assert (reports["h0"]["head"], reports["h1"]["head"]) == (HEADS[method], "lr")
    assert {reports[name]["runs"] for name in HEAD} == {run.summary["bundle"]["bundle_id"]}


@pytest.mark.parametrize("method", sorted(PARAMS))
def test_every_upload_on_the_wire_holds_exactly_the_declared_tensors(overheard, method):
    run = overheard(method)
    in_rounds, after = declared(method)
    for name in TRAIN:
        uploads = run.uploads(name)
        rounds = [set(tensors) for (purpose, _), tensors in uploads.items() if purpose == "train"]
        later = [set(tensors) for (purpose, _), tensors in uploads.items() if purpose == "batch_norm_stats"]
        assert rounds == [in_rounds] * ROUNDS
        assert later == ([after] if after else [])
    frames = [decode_frame(payload) for topic, payload in run.heard if topic == run.topics.up_chunks("a0")]
    assert len(frames) > 2 * ROUNDS, "updates of several frames were put together"
    assert max(frame.count for frame in frames) > 12, "more chunks than a frame holds"
    assert not [name for name in HEAD if run.uploads(name) or run.topics.up_chunks(name) in dict(run.heard)]


@pytest.mark.parametrize("method", sorted(PARAMS))
def test_nothing_that_a_device_keeps_is_heard_but_what_the_method_says(overheard, method):
    """Kept at any time, searched as bytes in everything. The exceptions are those that the method's file states."""
    run = overheard(method)
    _, after = declared(method)
    searched = {name for _, name, _ in run.private()}
    assert searched >= KEPT[method] | {f"personal.{name}" for name in after} | {"features"}
    leaked = run.leaked()
    assert {(device[0], name) for device, name, _ in leaked} == (
        {("a", f"personal.{name}") for name in after}
        | {("a", name) for name in ALSO_SENT.get(method, ())}
    )  # fmt: skip
    early = run.during_rounds()
    pooled = [raw for device, name, raw in leaked if name.removeprefix("personal.") in after]
    assert not [raw for raw in pooled if raw in early], "batch norm that stays was heard before the pool was asked for"


@pytest.mark.parametrize("method", sorted(PARAMS))
def test_no_image_of_a_training_device_is_heard(overheard, method):
    run = overheard(method)
    images = [image.tobytes() for name in TRAIN for part in run.tasks[name].resources._data[1] for image in part.inputs]
    assert len(images) == 4 * 64
    assert not [image for image in images if image in run.everything]


@pytest.mark.parametrize("method", sorted(PARAMS))
def test_the_search_finds_what_does_travel(overheard, method):
    """Every uploaded array, also those that lie across two chunks."""
    run = overheard(method)
    arrays = [array.tobytes() for name in TRAIN for tensors in run.uploads(name).values() for array in tensors.values()]
    assert len(arrays) >= 4 * ROUNDS * 5
    assert all(raw in run.everything for raw in arrays)
    plain = b"\n".join(payload for _, payload in run.heard)
    assert not all(raw in plain for raw in arrays), "none lies across two chunks: the reassembly is not tested"


def test_the_search_finds_a_personal_classifier_that_is_sent_in_the_place_of_the_shared_one(tmp_path, monkeypatch):
    from edge_agent.methods import dualfed

    real = dualfed.DualFed.local_update

    def leaking(self, client, received):
        personal = client.model.state_dict()["personal_head.bias"]
        return {**real(self, client, received), "head.bias": personal.numpy().copy()}

    monkeypatch.setattr(dualfed.DualFed, "local_update", leaking)
    leaked = Overheard(tmp_path, "dualfed", rounds=1).leaked()
    assert {device for device, name, _ in leaked if name == "personal.personal_head.bias"} == set(TRAIN)


def test_devices_without_torch_take_part_in_fedpac_and_send_the_extra_arrays_alone(tmp_path):
    run = Overheard(tmp_path, "fedpac", tier="any")
    assert [set(line["agents"]) for line in run.lines] == [{*TRAIN, *HEAD}] * ROUNDS
    made = methods.create("fedpac", PARAMS["fedpac"])
    extras = set(made.sends(made.build(TASK), TASK))
    for name in HEAD:
        asked = [job.round for job in run.messages(run.topics.down(name), down.Job) if job.purpose == "contribute"]
        assert sorted(set(asked)) == [1, 2, 3, 4, 5]
        assert [set(tensors) for tensors in run.uploads(name).values()] == [extras] * ROUNDS
    assert [set(tensors) for tensors in run.uploads("a0").values()] == [declared("fedpac")[0]] * ROUNDS
    assert tuple(agent["id"] for agent in run.summary["agents"]) == TRAIN + HEAD
    assert {(device[0], name) for device, name, _ in run.leaked()} == {("a", name) for name in ALSO_SENT["fedpac"]}

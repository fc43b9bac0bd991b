"""Somebody who hears everything compares whole runs with the list of what leaves a device, and looks for canaries."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from federation_duties import TASK, quick_params
from federation_harness import Federation
from listed import is_listed, unlisted
from PIL import Image

from edge_agent import methods
from edge_agent.agent.event_loop import Agent, will_of
from edge_agent.agent.runtime import AgentRuntime
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.cli import main
from edge_agent.cli.privacy import of_method
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig, PrivacyConfig
from edge_agent.privacy.disclosure import EVERY, messages, tensors
from edge_agent.privacy.policy import Ledger
from edge_agent.wire import topics
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import codec, up
from edge_agent.wire.tensors import decode

PAPERS = ("dualfed", "fedpac", "fedpick", "repper", "fedrir")
NORMED = TASK.model_copy(update={"encoder": "small_cnn", "encoder_params": {"feature_dim": 4, "width": 2}})
TRAIN = ("a0", "a1")
HEAD = "h0"
OWN = "h1"


def images(folder, classes, seed):
    """Eight pictures for each class; folder and files have names that nobody else may learn."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for row in range(8):
            pixels = rng.integers(0, 80, (4, 4)) + 80 * (number % 3)
            Image.fromarray(pixels.astype(np.uint8), "L").save(folder / name / f"canary-file-{row}.png")
    return f"images:{folder}"


class OverImages(Federation):
    """Two devices that train, one that fits heads, and one of them with a class of its own."""

    def __init__(self, folder, **options):
        export = {"after_run": True, "int8": True, "exporter": "legacy", "client_ranges": True}
        super().__init__(folder, agents=TRAIN, task=NORMED, capture=True, export=export, **options)

    def __enter__(self):
        super().__enter__()
        self.add(HEAD, "head")
        self.add(OWN, "head")
        roster = self.coordinator.roster
        self.until(lambda: len(roster.present("train")) + len(roster.present("head")) == 4)
        return self

    def add(self, name, tier="train"):
        classes = ("a", "b", "c", "canary-own-class") if name == OWN else ("a", "b", "c")
        config = AgentConfig(
            id=name,
            state=self.folder / name,
            data=DataConfig(source=images(self.folder / f"canary-folder-{name}", classes, len(self.tasks))),
            head=HeadConfig(name="prototype", precision="fp32", own_classes=name == OWN, local=False),
        )
        self.tasks[name] = tasks = TaskRunner(config, tier)
        transport = self.broker.transport(will_of(config, f"b-{name}"))
        agent = Agent(config, transport, tasks, AgentRuntime(clock=self.clock, boot=f"b-{name}"))
        self.agents[name] = agent
        agent.start()


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """A function that gives the finished run of a method; each is done once."""
    runs = {}

    def of(method):
        if method not in runs:
            with OverImages(tmp_path_factory.mktemp(method)) as fed:
                fed.request(method, rounds=2, params=quick_params(method))
                fed.finish()
                assert fed.record.status == "finished", fed.record.end
                reports = {agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]}
                assert reports == {*TRAIN, HEAD, OWN}
            runs[method] = fed
        return runs[method]

    return of


def from_agents(fed):
    """(kind of topic, payload) of everything that agents have published."""
    for topic, payload in fed.broker.captured:
        try:
            yield fed.topics.sender(topic)[1], payload
        except topics.MessageError:
            assert topic == fed.topics.announce or topic.startswith((f"{fed.topics.root}/a/", f"{fed.topics.root}/b/",
                                                                     fed.topics.coordinators))  # fmt: skip


@pytest.mark.parametrize("method", PAPERS)
def test_every_field_of_every_message_of_a_run_is_on_the_list(heard, method):
    kinds = set()
    for kind, payload in from_agents(heard(method)):
        if kind in {"up", "h"}:
            assert unlisted(payload) == []
            kinds.add(json.loads(payload)["type"])
        elif kind == "s":
            state, boot, connection = payload.split()
            assert (state in {b"online", b"offline"}, boot[:2], connection.isdigit()) == (True, b"b-", True)
    assert kinds >= {"hello", "update", "report", "have", "want"}


@pytest.mark.parametrize("method", PAPERS)
def test_every_tensor_of_every_update_of_a_run_is_on_the_list(heard, method):
    fed = heard(method)
    listed = list(tensors(methods.create(method, quick_params(method))))
    purposes = set()
    for name in TRAIN:
        blobs = {}
        for payload in fed.published(fed.topics.up_chunks(name)):
            frame = decode_frame(payload)
            assert frame.count == 1, "a tiny update is one chunk"
            blobs[frame.transfer] = bytes(frame.data)
        updates = [decode(data) for data in blobs.values()]
        manifests = fed.messages(fed.topics.up(name), up.UpdateManifest)
        assert len(updates) == len({manifest.blob.digest for manifest in manifests})
        by_size = {manifest.blob.size_bytes: manifest.purpose for manifest in manifests}
        for data, update in zip(blobs.values(), updates, strict=True):
            purpose = by_size[len(data)]
            purposes.add(purpose)
            assert [one for one in update if not is_listed(listed, purpose, one)] == []
    after = {"batch_norm_stats"} if any(item.where == "batch_norm_stats" for item in listed) else set()
    assert purposes == {"train", "activation_ranges"} | after


@pytest.mark.parametrize("method", PAPERS)
def test_names_of_files_folders_and_own_classes_never_leave(heard, method):
    fed = heard(method)
    assert [topic for topic, payload in fed.broker.captured if b"canary" in payload or "canary" in topic] == []


def test_the_canaries_would_be_found(heard):
    """The same search for what does leave: the public classes are in the task, the method's name is in each job."""
    fed = heard("fedpac")
    assert [topic for topic, payload in fed.broker.captured if b'"class_names":["a","b","c"]' in payload]


def test_a_field_that_is_not_on_the_list_would_be_noticed():
    payload = codec.encode(up.Hello(software="1", tier="head", samples=3, facts={"hostname": "x", "cores": 1}))
    assert unlisted(payload) == ["facts.hostname"]
    assert unlisted(b'{"type":"report","where":{"lat":1}}') == ["where.lat"]


def test_the_list_has_each_field_once_and_each_with_a_meaning():
    items = list(messages())
    assert len({(item.where, item.name) for item in items}) == len(items)
    assert [item for item in items if not item.meaning] == []
    assert {item.name for item in items if item.where == EVERY} == {"v", "boot", "seq", "federation", "type", "crc"}


POLICIES = {
    "fedavg": ({"clip": 1.0, "noise": 1.0, "min_class_count": 9, "samples": "rounded"}, ""),
    "repper": ({"batch_norm_stats": False}, r"carry 'encoder\..*running_mean', privacy\.batch_norm_stats is false"),
    "fedpac": ({"samples": "rounded"}, "carry statistics of classes, which tell their sample counts"),
    "spherefed": (
        {"min_class_count": 3},
        "min_class_count of the run is 2, privacy.min_class_count requires at least 3",
    ),
    "scaffold": ({"noise": 1.0}, "for which no noise is defined"),
    "fedproto": ({"clip": 1.0}, r"'prototypes\.counts' of method 'fedproto' is counted"),
    "fedper": ({"methods": ()}, "privacy.methods allows none"),
    "fedprox": ({"methods": None}, ""),
}


@pytest.mark.parametrize("method", POLICIES)
def test_the_verdict_on_a_method_is_that_of_the_agent(method):
    policy, why = POLICIES[method]
    config = AgentConfig(data=DataConfig(source="none:"), privacy=PrivacyConfig(**policy))
    verdict = of_method(config, method)
    assert verdict["allowed"] is not bool(why)
    assert re.search(why, verdict["refused"] or "")


def test_clipping_and_noise_are_marked_and_what_has_none_is_withheld():
    for policy, mark in (({"clip": 1.0, "noise": 2.0}, "with noise"), ({"clip": 1.0}, "clipped"), ({}, "leaves")):
        config = AgentConfig(data=DataConfig(source="none:"), privacy=PrivacyConfig(**policy))
        states = {item["where"]: item["state"] for item in of_method(config, "fedavg")["tensors"]}
        assert states == {"train": mark, "activation_ranges": "without noise" if policy else "leaves"}
    config = AgentConfig(data=DataConfig(source="none:"), privacy=PrivacyConfig(activation_ranges=False, clip=1.0))
    assert {item["state"] for item in of_method(config, "fedavg")["tensors"]} == {"clipped", "withheld"}


def test_policy_shows_all_or_no_methods_small_deltas_and_noise_that_needs_the_coordinators_clip(tmp_path, capsys):
    path = tmp_path / "agent.toml"

    def shown(policy):
        path.write_text(f'[data]\nsource = "none:"\n[privacy]\n{policy}\n')
        code = main(["privacy", "--config", str(path)])
        out = capsys.readouterr()
        return code, " ".join((out.out.partition("\n\n")[0] + out.err).split())

    code, text = shown("")
    assert (code, "methods all" in text, "delta 1e-05" in text, "note:" in text) == (0, True, True, False)
    code, text = shown("methods = []\nnoise = 1.0")
    assert (code, "methods none" in text, "runs are refused whose coordinator has no clip" in text) == (0, True, True)
    code, text = shown('methods = ["fedavh"]')
    assert (code, "did you mean 'fedavg'" in text) == (2, True)


def test_what_the_updates_have_cost_is_shown(tmp_path, capsys):
    path = tmp_path / "agent.toml"
    path.write_text(f'state = "{tmp_path}"\n[data]\nsource = "none:"\n')
    assert main(["privacy", "--config", str(path)]) == 0
    assert "spent" not in capsys.readouterr().out
    ledger = Ledger(tmp_path, PrivacyConfig())
    ledger.note_without_noise()
    ledger.spend(2.0)
    assert main(["privacy", "--config", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.partition("spent by its updates so far\n")[2].split())
    assert re.match(r"epsilon 1\.9\d* .*updates_without_noise 1 ", shown)


def test_the_command_lists_what_the_policy_leaves(tmp_path, capsys):
    path = tmp_path / "agent.toml"
    path.write_text(
        '[data]\nsource = "none:"\n[privacy]\nmetrics = ["loss"]\nsamples = "rounded"\nmethods = ["fedavg"]\n'
    )
    assert main(["privacy", "--config", str(path), "--method", "fedpac", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    states = {(item["where"], item["name"]): item["state"] for item in printed["fields"]}
    assert states["hello", "samples"] == "rounded"
    assert states["update", "metrics.*"] == "as named"
    assert states["report", "acc_personal"] == "withheld"
    assert not printed["method"]["allowed"]
    assert "extra.centroids" in {item["name"] for item in printed["method"]["tensors"]}
    assert main(["privacy", "--config", str(path), "--method", "fedpac"]) == 0
    text = capsys.readouterr().out
    assert (
        "method fedpac (refused: method is 'fedpac', privacy.methods allows fedavg; updates of 'fedpac' carry" in text
    )
    assert "samples [rounded: privacy.samples]: training samples at hand" in text
    assert main(["privacy", "--config", str(path), "--method", "fedpaq"]) == 2

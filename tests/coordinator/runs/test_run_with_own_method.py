"""Runs with a method in a file: agents train by their own copy, which is compared by its hash."""

from __future__ import annotations

import hashlib
import json

import pytest
from federation_duties import SMALL, TASK, TinyDuties
from federation_harness import Federation

from coordinator.cli.run import request_for
from coordinator.config import load_config
from coordinator.journal.entries import fact_of
from coordinator.rounds.request import Request
from edge_agent import methods
from edge_agent.agent.own_method import method_for
from edge_agent.core.config import AgentConfig, TrainingConfig, load
from edge_agent.core.errors import ConfigError, MissingCapability, UsageError
from edge_agent.core.registry import PinnedFile
from edge_agent.wire.messages import down

SOURCE = """
from edge_agent.methods.fedavg import FedAvg

class Mine(FedAvg):
    \"\"\"FedAvg that counts nothing else.\"\"\"
"""


@pytest.fixture(autouse=True)
def _own_methods_are_forgotten(monkeypatch):
    monkeypatch.setattr(methods.registry, "_extra", dict(methods.registry._extra))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "operator" / "mine.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    return path


def copied(folder, text):
    folder.mkdir()
    (folder / "copy.py").write_text(text, encoding="utf-8")
    return TrainingConfig(methods=("copy.py:Mine",), folder=folder)


def finished(folder, file, trainings):
    """Two rounds of agents with these [training] sections."""

    def make(config, tier):
        return TinyDuties(config.model_copy(update={"training": trainings[config.id]}), tier)

    with Federation(folder, agents=tuple(trainings), tasks=make, capture=True, cohort={"min_agents": 1}) as fed:
        fed.until(lambda: len(fed.coordinator.roster.present("train")) == len(trainings))
        pinned = PinnedFile.of("method", f"{file}:Mine")
        request = Request("mine", SMALL, 2, 0, TASK, method_file=str(pinned))
        fed.run = fed.state.journal.request_run(fact_of("run_requested", request.body()))
        fed._looked_at = -1
        fed._run_ids[fed.run] = fed.record.request.id
        fed.finish()
        fed.ended = fed.record
        fed.result = fed.state.run(fed.run).summary()
        fed.rounds = fed.metrics()
        jobs = [job for name in trainings for job in fed.messages(fed.topics.down(name), down.Job)]
        fed.announced = {(job.method, job.method_sha256) for job in jobs}
    return fed


def test_agents_with_the_same_file_train_by_their_own_copy(tmp_path, file):
    own = {name: copied(tmp_path / f"copy-{name}", SOURCE) for name in ("a0", "a1")}
    fed = finished(tmp_path / "federation", file, own)
    assert fed.ended.status == "finished", fed.ended.end
    assert (fed.result["method"], fed.result["incomplete"]) == ("mine", None)
    assert [line["agents"] for line in fed.rounds] == [["a0", "a1"]] * 2
    assert fed.announced == {("mine", hashlib.sha256(SOURCE.encode()).hexdigest())}


def test_agents_without_the_file_or_with_another_are_left_out_and_told_what_to_do(tmp_path, file):
    own = {
        "a0": copied(tmp_path / "copy", SOURCE),
        "a1": TrainingConfig(),
        "a2": copied(tmp_path / "other", f"{SOURCE}\n# changed\n"),
    }
    fed = finished(tmp_path / "federation", file, own)
    assert fed.ended.status == "finished"
    assert fed.rounds[0]["agents"] == ["a0"]
    reasons = {one["agent"]: one["reason"] for one in (*fed.rounds[0]["rejected"], *fed.rounds[0]["left_out"])}
    wanted = hashlib.sha256(SOURCE.encode()).hexdigest()[:16]
    assert f"from a file (SHA-256 {wanted}), which this device does not have: copy that file" in reasons["a1"]
    assert '[training] methods = ["FILE.py:CLASS"]' in reasons["a1"]
    assert "has another file than the run: its SHA-256 is " in reasons["a2"]
    assert f"the run's {wanted}" in reasons["a2"]
    assert fed.ended.reason.startswith("1 of 3 updates in round 2")


def test_no_code_travels(tmp_path, file):
    fed = finished(tmp_path / "federation", file, {"a0": copied(tmp_path / "copy", SOURCE)})
    for topic in (fed.topics.down("a0"), fed.topics.down_chunks("a0"), fed.topics.up("a0"), fed.topics.up_chunks("a0")):
        assert not any(b"FedAvg that counts" in payload for payload in fed.published(topic))


def test_run_ends_with_a_reason_where_the_operators_file_has_changed(tmp_path, file):
    pinned = PinnedFile.of("method", f"{file}:Mine")
    file.write_text(f"{SOURCE}\n# changed\n", encoding="utf-8")
    with Federation(tmp_path / "federation", agents=1, tasks=TinyDuties) as fed:
        fed.run = fed.state.journal.request_run(
            fact_of("run_requested", Request("mine", {}, 1, 0, TASK, method_file=str(pinned)).body())
        )
        fed._looked_at = -1
        fed._run_ids[fed.run] = fed.record.request.id
        fed.finish()
        assert fed.record.status == "failed"
        assert "the file has changed: its SHA-256 is" in fed.record.reason


def test_what_runs_is_what_was_hashed_also_after_the_file_has_changed(tmp_path, file):
    """An agent lives for months, and its owner replaces the file meanwhile."""
    job = down.Job(run="run-1", round=1, rounds=1, seed=0, method="mine", task=TASK, blobs=(), deadline_s=9)
    training = copied(tmp_path / "copy", SOURCE)
    docs = []
    for text in (SOURCE, SOURCE.replace("nothing", "everything")):
        (tmp_path / "copy" / "copy.py").write_text(text, encoding="utf-8")
        asked = job.model_copy(update={"method_sha256": hashlib.sha256(text.encode()).hexdigest()})
        docs.append(methods.get(method_for(training, asked)).__doc__)
    assert docs == ["FedAvg that counts nothing else.", "FedAvg that counts everything else."]
    with pytest.raises(MissingCapability, match="another file than the run"):
        method_for(training, job.model_copy(update={"method_sha256": "0" * 64}))


CONFIG = """
[task]
class_names = ["a", "b", "c"]
encoder = "linear"
encoder_params = {feature_dim = 4}
input = {kind = "image", channels = 1, height = 4, width = 4}
"""


def test_command_takes_a_file_and_a_serving_coordinator_gets_its_place_and_hash(tmp_path, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    (tmp_path / "coordinator.toml").write_text(CONFIG, encoding="utf-8")
    settings = load_config(tmp_path / "coordinator.toml")
    request = request_for(settings, method="mine.py:Mine", params={"lr": 0.5})
    assert (request.method, request.params["lr"]) == ("mine", 0.5)
    assert request.method_reference == f"{file}:Mine#{hashlib.sha256(SOURCE.encode()).hexdigest()}"
    assert Request.from_fact(fact_of("run_requested", json.loads(request.to_fact().to_json()))) == request
    old = request.to_fact().without("method_file")
    assert Request.from_fact(old).method_reference == "mine", "journals of earlier versions"
    for given, words in (
        ("absent.py:Mine", "cannot be read: no such file"),
        ("mine.py:Other", "has no 'Other'"),
        ("mine.py:FedAvg", "there is one of this name already"),
    ):
        with pytest.raises(UsageError, match=words):
            request_for(settings, method=given)


def test_files_of_an_agent_count_from_its_configuration(tmp_path, file):
    toml = file.parent / "agent.toml"
    toml.write_text('id = "a0"\n[data]\nsource = "digits"\n[training]\nmethods = ["mine.py:Mine"]\n', encoding="utf-8")
    config = load(AgentConfig, toml)
    job = down.Job(run="run-1", round=1, rounds=1, seed=0, method="mine", task=TASK, blobs=(), deadline_s=9,
                   method_sha256=hashlib.sha256(SOURCE.encode()).hexdigest())  # fmt: skip
    assert method_for(config.training, job) == str(PinnedFile.of("method", f"{file}:Mine"))
    toml.write_text('id = "a0"\n[data]\nsource = "digits"\n[training]\nmethods = ["mine"]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected PATH\.py:CLASS"):
        load(AgentConfig, toml)

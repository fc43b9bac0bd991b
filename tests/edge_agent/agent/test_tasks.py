from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from edge_agent import client
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.agent.tasks.table import TASKS, state_before
from edge_agent.core.config import AgentConfig, DataConfig, TrainingConfig
from edge_agent.core.errors import DataError, MissingCapability, UnknownName
from edge_agent.core.task import ImageInput, Task
from edge_agent.run_folder.client_state import LAST_ROUND
from edge_agent.training.precision import StepTimes
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.fields import EXCHANGES, OUTSIDE_ROUNDS, Purpose

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={"feature_dim": 4},
)


def job(**changes):
    fields = {"run": "run-0001", "round": 1, "rounds": 2, "seed": 3, "method": "fedper", "params": {"local_epochs": 1}}
    return Job(**{**fields, "task": TASK, "blobs": (), "deadline_s": 60, **changes})


@pytest.fixture
def make(tmp_path):
    def make(tier="train", source="digits:optdigits?n=80", training=None, **data):
        training = TrainingConfig(**(training or {}))
        config = AgentConfig(
            id="dev", state=tmp_path / "state", data=DataConfig(source=source, **data), training=training
        )
        return TaskRunner(config, tier)

    return make


def received(value=0.1):
    return {
        "encoder.layers.1.weight": np.full((4, 64), value, np.float32),
        "encoder.layers.1.bias": np.zeros(4, np.float32),
    }


def test_a_head_tier_device_does_not_train_and_imports_nothing_for_it(make):
    with pytest.raises(MissingCapability, match="agent 'dev' is of tier 'head' and does not train"):
        make("head").do(job(), {})


def test_each_purpose_of_a_job_has_its_class():
    assert set(TASKS) == set(get_args(Purpose))
    assert len({type(task) for task in TASKS.values()}) == len(TASKS)


def test_only_the_exchanges_around_a_secure_sum_are_recorded_nowhere():
    assert {purpose for purpose, task in TASKS.items() if not task.is_recorded} == set(EXCHANGES)


@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_a_job_starts_from_the_state_before_its_round_or_after_it(purpose):
    """A job of a purpose beside the rounds is about the state that its round has left behind."""
    sum_id = "0" * 32 if purpose in EXCHANGES else ""
    expected = {"personalize": LAST_ROUND, **dict.fromkeys(OUTSIDE_ROUNDS, 8)}.get(purpose, 7)
    assert state_before(job(purpose=purpose, round=7, rounds=9, session=sum_id)) == expected


def test_a_training_job_leaves_the_update_in_the_outbox_and_the_rest_on_disk(make):
    tasks = make()
    manifest = tasks.do(job(), received())
    assert tasks.outbox.get() == manifest
    assert manifest.samples == 60, "80 samples, a quarter held back"
    kept = list((tasks.config.state / "runs" / "run-0001").glob("[!.]*"))
    assert [path.name for path in kept] == ["kept-0000001.safetensors"]


def test_doing_a_round_again_gives_the_same_bits(make):
    tasks = make()
    first = tasks.do(job(), received())
    tasks.do(job(round=2), received(0.2))
    assert tasks.do(job(), received()).blob.digest == first.blob.digest
    assert make().do(job(), received()).blob.digest == first.blob.digest, "also in a new process"


def test_the_report_tells_what_was_got_and_the_personal_part_is_kept(make):
    tasks = make()
    tasks.do(job(), received())
    report = tasks.do(job(purpose="personalize"), received(0.2))
    assert 0 <= report.acc_personal <= 1
    assert 0 <= report.acc_local <= 1
    assert report.acc_global is None, "FedPer shares no classifier"
    assert report.samples == 60
    assert report.torch_loaded
    assert 10 < report.rss_mb < 10_000


def test_a_new_run_with_another_method_does_not_reuse_the_old_session(make):
    tasks = make()
    tasks.do(job(), received())
    head = {"head.weight": np.zeros((10, 4), np.float32), "head.bias": np.zeros(10, np.float32)}
    manifest = tasks.do(job(run="run-0002", method="fedavg"), {**received(), **head})
    content = 4 * (4 * 64 + 4 + 40 + 10)
    assert content < manifest.blob.size_bytes < content + 1000


def test_a_device_without_data_says_so(make, tmp_path):
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 8, 8), np.uint8), y=np.zeros(0, np.int64))
    with pytest.raises(DataError, match="no samples"):
        make(source=f"npz:{tmp_path / 'empty.npz'}?inputs=x&labels=y").do(job(), received())


def test_a_method_that_this_release_does_not_have_is_named_with_the_nearest(make):
    with pytest.raises(UnknownName, match="did you mean 'fedper'"):
        make().do(job(method="fedperr"), received())


def test_a_fresh_device_runs_no_encoder(make):
    assert make("head").bundles.bundle_id == ""


def test_facts_are_plain_values(make):
    facts = make().facts()
    assert set(facts) == {"rss_mb", "torch_loaded", "cores"}
    assert facts["cores"] >= 1


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_precision_of_a_run_is_timed_once_and_outlives_a_restart(make, monkeypatch, caplog, faster):
    plain = make().do(job(run="run-0000"), received()).blob.digest
    asked = []

    def timed(*seconds):
        monkeypatch.setattr(client, "time_steps", lambda *_: asked.append(1) or StepTimes(*seconds))

    timed(*((0.001, 0.009) if faster == "float32" else (0.009, 0.001)))
    mixed = {"training": {"precision": "bfloat16"}}
    first = make(**mixed).do(job(), received()).blob.digest
    assert (first == plain) == (faster == "float32")
    lines = [record.message for record in caplog.records if "precision_not_used" in record.message]
    assert len(lines) == (faster == "float32")
    assert all("float32_ms=1.00 bfloat16_ms=9.00" in line for line in lines)
    timed(*((0.009, 0.001) if faster == "float32" else (0.001, 0.009)))
    again = make(**mixed)
    assert again.do(job(), received()).blob.digest == first
    assert len(asked) == 1
    (again.config.state / "runs/run-0001/precision.json").write_text("torn", encoding="utf-8")
    assert (make(**mixed).do(job(), received()).blob.digest == first) is False
    assert len(asked) == 2

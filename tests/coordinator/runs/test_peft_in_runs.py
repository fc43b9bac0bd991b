"""Runs in which a part of the encoder learns alone: what agents are sent and send, hostile updates, crashes, export."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from federation_duties import TinyDuties, quick_params
from federation_harness import Federation

from coordinator.config import NO_BOUNDS, CoordinatorConfig, DifferentialPrivacyConfig
from edge_agent import load_bundle, methods
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import ConfigError
from edge_agent.core.task import ImageInput, Task
from edge_agent.personal.encoder import Encoder
from edge_agent.training import peft
from edge_agent.training.parts import load_arrays
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down, up
from edge_agent.wire.tensors import decode

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 6, "width": 2},
)
LORA = TASK.with_peft("lora", {"rank": 2})
CHOICES = [LORA, TASK.with_peft("bn"), TASK.with_peft("last_block")]
every_choice = pytest.mark.parametrize("task", CHOICES, ids=lambda task: task.peft)
FEDAVG = quick_params("fedavg")


class Fleet(Federation):
    """Three agents that really train; the run that is requested has ``task``, and the coordinator ``[privacy]``."""

    def __init__(self, folder, task=LORA, privacy=None, **options):
        bounds = {"aggregation": {**NO_BOUNDS, "max_loss": None}, **options}
        super().__init__(folder, tasks=TinyDuties, capture=True, task=TASK, **bounds)
        settings = DifferentialPrivacyConfig.model_validate(privacy or {})
        self.config = self.config.model_copy(update={"privacy": settings})
        self.task = task


def run(folder, task=LORA, *, rounds=2, method="fedavg", params=None, **options):
    """A finished run; its state is ``last``."""
    with Fleet(folder, task, **options) as fed:
        fed.settle()
        fed.request(method, rounds=rounds, params=FEDAVG if params is None else params)
        fed.finish()
        assert fed.record.status == "finished", fed.record.reason
        fed.last = fed.final
        fed.lines = fed.metrics()
    return fed


def fresh(task, method="fedavg"):
    """The model that the run began with, and its method."""
    made = methods.create(method)
    torch.default_generator.manual_seed(0)
    return made.adapt(made.build(task), task), made


def sent_by(fed, agent):
    """The tensors of the updates that an agent has sent, in order; each came in one chunk."""
    return [decode(bytes(decode_frame(payload).data)) for payload in fed.published(fed.topics.up_chunks(agent))]


def step_until_round_is_closed(fed):
    """Until the first round is over, and not a step further."""
    while not fed.entries("round_closed"):
        fed.step()
        fed.clock.now += 0.01


# --- what travels ----------------------------------------------------------------------------------------------------


@every_choice
def test_updates_hold_what_learns_and_nothing_else_and_the_rest_stays(tmp_path, task):
    fed = run(tmp_path, task)
    model, method = fresh(task)
    start = model.state_dict()
    for agent in fed.tasks:
        first, second = sent_by(fed, agent)
        assert set(first) == set(second) == set(method.returned_names(model))
    assert model.frozen_names
    for name in model.frozen_names:
        np.testing.assert_array_equal(fed.last[name], start[name].numpy())
    for name in method.returned_names(model):
        assert not np.array_equal(fed.last[name], start[name].numpy()), name


@every_choice
def test_the_state_is_the_mean_of_the_updates(tmp_path, task):
    fed = run(tmp_path, task, rounds=1)
    updates = [sent_by(fed, agent)[0] for agent in fed.tasks]
    for name, array in updates[0].items():
        mean = np.mean([update[name].astype(np.float64) for update in updates], axis=0)
        np.testing.assert_allclose(fed.last[name], mean, rtol=0, atol=1e-6)
        assert array.dtype == fed.last[name].dtype


@every_choice
def test_the_bytes_that_are_announced_are_those_that_are_sent(tmp_path, task):
    fed = run(tmp_path, task)
    for agent in fed.tasks:
        announced = fed.messages(fed.topics.up(agent), up.UpdateManifest)
        frames = fed.published(fed.topics.up_chunks(agent))
        assert [manifest.blob.size_bytes for manifest in announced] == [len(decode_frame(f).data) for f in frames]
    for number, line in enumerate(fed.lines):
        frames = [fed.published(fed.topics.up_chunks(agent))[number] for agent in fed.tasks]
        assert line["bytes_up"] == sum(len(decode_frame(frame).data) for frame in frames)


@every_choice
def test_what_is_frozen_is_sent_once(tmp_path, task):
    fed = run(tmp_path, task, rounds=3)
    jobs = [job for job in fed.messages(fed.topics.down("a0"), down.Job) if job.purpose == "train"]
    assert len({job.blobs[0].digest for job in jobs}) == 1
    assert len({job.blobs[1].digest for job in jobs}) == 3
    assert fed.lines[0]["bytes_down"] - fed.lines[1]["bytes_down"] >= 3 * jobs[0].blobs[0].size_bytes
    assert fed.lines[1]["bytes_down"] == fed.lines[2]["bytes_down"]


def test_an_agent_that_comes_later_gets_what_is_frozen(tmp_path):
    with Fleet(tmp_path, agents=2) as fed:
        fed.settle()
        fed.request("fedavg", rounds=3, params=FEDAVG)
        step_until_round_is_closed(fed)
        fed.add("b0")
        fed.finish()
        assert fed.record.status == "finished"
        late = sent_by(fed, "b0")
        model, method = fresh(LORA)
        assert late
        assert set(late[0]) == set(method.returned_names(model))


# --- with other options of a run -------------------------------------------------------------------------------------


@every_choice
def test_a_secure_sum_gives_the_same_bits(tmp_path, task):
    plain = run(tmp_path / "plain", task)
    masked = run(tmp_path / "masked", task, privacy={"secure_sum": True})
    for name, array in plain.last.items():
        # A secure sum rounds to a grid; on it sums do not depend on their order.
        np.testing.assert_allclose(masked.last[name], array, rtol=0, atol=1e-5)
    for agent in masked.tasks:
        assert any("secure.masked" in update for update in sent_by(masked, agent))


@every_choice
def test_buffered_rounds_and_the_usual_bounds(tmp_path, task):
    """Two of three updates close a round; the defaults of [aggregation] bound what is sent, which is less than all."""
    settings = {"round": {"mode": "buffered", "buffer": 2}, "aggregation": {}, "cohort": {"min_agents": 1}}
    fed = run(tmp_path, task, rounds=4, **settings)
    model, method = fresh(task)
    start = model.state_dict()
    assert all(np.array_equal(fed.last[name], start[name].numpy()) for name in model.frozen_names)
    assert not any(np.array_equal(fed.last[name], start[name].numpy()) for name in method.returned_names(model))
    assert all(np.isfinite(array).all() for array in fed.last.values())


def test_noise_is_added_to_what_travels_alone(tmp_path):
    fed = run(tmp_path, rounds=1, privacy={"clip": 1.0, "noise": 0.5, "delta": 1e-3})
    model, method = fresh(LORA)
    start = model.state_dict()
    assert all(np.array_equal(fed.last[name], start[name].numpy()) for name in model.frozen_names)
    assert not any(np.array_equal(fed.last[name], start[name].numpy()) for name in method.returned_names(model))
    assert fed.lines[0]["agents"] == ["a0", "a1", "a2"]


@pytest.mark.parametrize("method", ["fedper", "fedbn", "fedadam", "fedrep"])
def test_other_methods_of_shared_encoders(tmp_path, method):
    fed = run(tmp_path, method=method, params=quick_params(method))
    model, made = fresh(LORA, method)
    returned = made.returned_names(model)
    assert all(set(update) == set(returned) for update in sent_by(fed, "a0"))
    assert all(name.rpartition(".")[2] == "lora_b" for name in returned if name.startswith("encoder."))


def test_a_method_that_cannot_do_it_fails_with_its_reason(tmp_path):
    with Fleet(tmp_path) as fed:
        fed.settle()
        fed.request("scaffold", rounds=1, params=quick_params("scaffold"))
        fed.finish()
        assert fed.record.status == "failed"
        assert "'scaffold' corrects every weight by control variates" in fed.record.reason


# --- hostile updates -------------------------------------------------------------------------------------------------


def lie_of(make):
    """Let an agent send what ``make`` makes of its honest update."""

    def prepare(fed, agent):
        tasks = fed.tasks[agent]
        real = tasks.outbox.put

        def put(tensors, *rest, **options):
            return real(make(dict(tensors)), *rest, **options)

        tasks.outbox.put = put

    return prepare


def with_frozen_weight(tensors):
    weight = np.zeros((2, 1, 3, 3), np.float32)
    return {**tensors, "encoder.layers.0.weight": weight}


def of_another_rank(tensors):
    return {name: np.repeat(a, 2, axis=1) if name.endswith("lora_b") else a for name, a in tensors.items()}


def under_other_names(tensors):
    return {name.replace("lora_b", "lora_c"): array for name, array in tensors.items()}


def of_full_precision(tensors):
    return {name: array.astype(np.float64) for name, array in tensors.items()}


def without_adapters(tensors):
    return {name: array for name, array in tensors.items() if not name.endswith("lora_b")}


@pytest.mark.parametrize(
    "make", [with_frozen_weight, of_another_rank, under_other_names, of_full_precision, without_adapters]
)
def test_an_update_of_other_tensors_is_rejected_and_costs_only_itself(tmp_path, make):
    with Fleet(tmp_path, cohort={"min_agents": 2}) as fed:
        lie_of(make)(fed, "a1")
        fed.settle()
        fed.request("fedavg", rounds=1, params=FEDAVG)
        fed.finish()
        (rejected,) = fed.entries("update_refused", agent="a1")
        assert re.search("bytes announced|expected|missing|unexpected", str(rejected))
        assert fed.record.status == "finished"
        honest = [sent_by(fed, agent)[0] for agent in ("a0", "a2")]
        for name, array in honest[0].items():
            np.testing.assert_allclose(fed.final[name], (array + honest[1][name]) / 2, atol=1e-6)


# --- crashes ---------------------------------------------------------------------------------------------------------


@every_choice
def test_a_run_whose_coordinator_and_agent_were_killed_ends_in_the_same_bits(tmp_path, task):
    undisturbed = run(tmp_path / "undisturbed", task, rounds=3)
    with Fleet(tmp_path / "killed", task) as fed:
        fed.settle()
        fed.request("fedavg", rounds=3, params=FEDAVG)
        step_until_round_is_closed(fed)
        assert not fed.record.is_over
        fed.kill_coordinator()
        fed.kill("a1")
        fed.start_coordinator()
        fed.add("a1")
        fed.finish()
        assert fed.record.status == "finished"
        assert fed.final.keys() == undisturbed.last.keys()
        for name, array in undisturbed.last.items():
            assert fed.final[name].tobytes() == array.tobytes(), name


# --- export and configuration ----------------------------------------------------------------------------------------


@every_choice
def test_the_bundle_of_a_run_is_an_ordinary_encoder(tmp_path, task):
    export = {"after_run": True, "int8": False, "exporter": "legacy"}
    with Fleet(tmp_path, task, export=export) as fed:
        fed.settle()
        fed.request("fedavg", rounds=2, params=FEDAVG)
        fed.finish()
        path = fed.state.run(fed.run).folder / f"{fed.run}.hwb"
        assert open_bundle(path).manifest.task == TASK
        adapted, _ = fresh(task)
        load_arrays(adapted, fed.final)
        inputs = np.random.default_rng(0).standard_normal((5, 1, 8, 8), dtype=np.float32)
        with torch.no_grad():
            expected = adapted.eval().features(torch.from_numpy(inputs)).numpy()
        encoder = Encoder.open(load_bundle(path))
        np.testing.assert_allclose(encoder.features(inputs), expected, rtol=1e-4, atol=1e-5)
        plain, _ = fresh(TASK)
        merged = peft.merge(fed.final, task)
        assert set(merged) == {name for name in plain.state_dict() if not name.endswith("num_batches_tracked")}


def test_the_report_of_a_run_says_what_learned_and_how_to_do_it_again(tmp_path):
    with Fleet(tmp_path) as fed:
        fed.settle()
        fed.request("fedavg", rounds=1, params=FEDAVG)
        fed.finish()
        summary = fed.state.run(fed.run).summary()
        assert (summary["peft"], summary["peft_params"]) == ("lora", {"rank": 2})
        page = fed.state.run(fed.run).report_path.read_text(encoding="utf-8")
        assert "What of the encoder learned" in page
        assert "--peft lora --peft-param rank=2" in page


def test_peft_is_a_setting_of_the_run_and_not_of_the_task():
    with pytest.raises(ValueError, match=r"task\.peft = 'lora' is a setting of a run; set run\.peft instead"):
        CoordinatorConfig.model_validate({"task": LORA})
    config = CoordinatorConfig.model_validate({"task": TASK, "run": {"peft": "lora", "peft_params": {"rank": 2}}})
    assert config.run_task == LORA


def test_a_configuration_that_no_run_could_use_is_refused_before_anything_starts():
    from coordinator.service.preflight import checked_method

    config = CoordinatorConfig.model_validate({"task": TASK, "run": {"peft": "lora", "peft_params": {"rnak": 2}}})
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        checked_method(config, "fedavg", {})
    config = CoordinatorConfig.model_validate({"task": TASK, "run": {"peft": "bn"}})
    with pytest.raises(ConfigError, match="nothing of the encoder would travel"):
        checked_method(config, "fedbn", {"norm": "local_all"})
    with pytest.raises(ConfigError, match="second network"):
        checked_method(config, "ditto", {})

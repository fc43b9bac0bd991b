"""Analytic federated learning over the protocol: devices of both tiers, those without torch alone, and hostile ones."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
import torch
from federation_duties import TinyDuties
from federation_harness import Federation

from coordinator.config import DifferentialPrivacyConfig
from edge_agent import methods
from edge_agent.agent import head_tier
from edge_agent.agent.head_tier import _contribution
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.config import AgentConfig, DataConfig, TrainingConfig
from edge_agent.core.errors import MissingCapability, UpdateRejected
from edge_agent.core.task import ImageInput, Task
from edge_agent.heads import FitData
from edge_agent.methods.afl import GRAM, SHARES, SUMS, solve, unpack
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down
from edge_agent.wire.tensors import decode

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 6, "width": 2},
)
PARAMS = {"min_class_count": 2, "scale": 1.0, "ridge": 1e-3}


class Fleet(Federation):
    """A federation whose coordinator has a section ``[privacy]``."""

    def __init__(self, folder, privacy, **options):
        super().__init__(folder, **options)
        settings = DifferentialPrivacyConfig.model_validate(privacy or {})
        self.config = self.config.model_copy(update={"privacy": settings})


def run(folder, *, train=2, head=2, tier="any", cohort=None, method="afl", rounds=1, privacy=None, params=PARAMS):
    """A finished run of agents that train, a0 …, and of devices without torch, h0 …; its state is ``last``."""
    around = {"cohort": {"tier": tier, **(cohort or {})}}
    with Fleet(folder, privacy, tasks=TinyDuties, capture=True, task=TASK, agents=train, **around) as fed:
        for number in range(head):
            fed.add(f"h{number}", tier="head")
        fed.settle()
        fed.request(method, rounds=rounds, params=params)
        fed.finish()
        fed.lines = [line for line in fed.metrics() if line["kind"] == "round"]
        fed.ended = fed.record
        fed.last = fed.final if fed.ended.status == "finished" else None
    return fed


def sent_by(fed, agent):
    """The tensors of the updates that an agent has sent, in order; each came in one chunk."""
    return [decode(bytes(decode_frame(payload).data)) for payload in fed.published(fed.topics.up_chunks(agent))]


def ridge_of_all(fed):
    """The ridge regression of the samples of all devices, on the encoder that the run began with."""
    torch.manual_seed(0)
    model = methods.create("afl").build(TASK).eval()
    gram = np.zeros((6, 6))
    sums = np.zeros((3, 6))
    counts = np.zeros(3)
    for tasks in fed.tasks.values():
        train, _ = tasks.read_samples(TASK)
        with torch.no_grad():
            features = model.features(torch.from_numpy(train.inputs.astype(np.float32))).double().numpy()
        gram += features.T @ features
        one_hot = np.eye(3)[train.labels]
        sums += one_hot.T @ features
        counts += one_hot.sum(axis=0)
    total = counts.sum()
    return solve(gram / total, sums / total, counts / total, 1e-3, has_intercept=True)


def test_both_tiers_send_statistics_alone_and_the_classifier_is_that_of_all_samples(tmp_path):
    fed = run(tmp_path)
    for agent in ("a0", "a1", "h0", "h1"):
        (update,) = sent_by(fed, agent)
        assert set(update) == {GRAM, SUMS, SHARES}
    weight, bias = ridge_of_all(fed)
    # Features of an encoder in ONNX and in torch differ by some 1e-7 of their size.
    np.testing.assert_allclose(fed.last["head.weight"], weight, atol=1e-4)
    np.testing.assert_allclose(fed.last["head.bias"], bias, atol=1e-4)
    assert fed.lines[0]["agents"] == ["a0", "a1", "h0", "h1"]


def test_the_encoder_stays_as_it_was(tmp_path):
    fed = run(tmp_path, rounds=2)
    torch.manual_seed(0)
    fresh = methods.create("afl").build(TASK).state_dict()
    assert all(np.array_equal(array, fresh[name]) for name, array in fed.last.items() if name.startswith("encoder."))
    bundles = {m.bundle.digest for m in fed.messages(fed.topics.down("h0"), down.Job) if m.purpose == "contribute"}
    assert len(bundles) == 1, "an encoder that nobody changes is exported once"


def test_a_federation_without_a_device_that_trains_has_its_round(tmp_path):
    fed = run(tmp_path, train=0, head=3, tier="head", cohort={"min_agents": 3})
    weight, _ = ridge_of_all(fed)
    np.testing.assert_allclose(fed.last["head.weight"], weight, atol=1e-4)
    assert fed.lines[0]["agents"] == ["h0", "h1", "h2"]


def test_devices_that_train_are_left_alone_where_those_without_torch_are_asked(tmp_path):
    fed = run(tmp_path, train=1, head=2, tier="head", cohort={"min_agents": 2})
    assert fed.lines[0]["agents"] == ["h0", "h1"]
    assert not [m for m in fed.messages(fed.topics.down("a0"), down.Job) if m.purpose == "train"]


@pytest.mark.parametrize("method, train, head", [("afl", 1, 3), ("fedpac", 1, 3), ("afl", 0, 4), ("fedpac", 0, 4)])
def test_the_least_number_of_agents_counts_all_that_can_take_part(tmp_path, method, train, head):
    fed = run(tmp_path, train=train, head=head, cohort={"min_agents": 4}, method=method, params={})
    assert fed.ended.status == "finished"
    assert len(fed.lines[0]["agents"]) == 4


def test_what_a_round_waits_for_names_the_devices_that_count(tmp_path):
    around = {"cohort": {"tier": "head", "min_agents": 3}}
    with Federation(tmp_path, tasks=TinyDuties, task=TASK, agents=1, **around) as fed:
        fed.add("h0", tier="head")
        fed.settle()
        fed.request("afl", rounds=1)
        fed.until(lambda: fed.coordinator.waiting.what.startswith("round 1"))
        assert "round 1 needs 3 agents of tier head, 2 more must come; here: h0" in fed.coordinator.waiting.what


def test_a_share_of_the_devices_is_drawn_from_all_alike(tmp_path):
    fed = run(tmp_path, train=2, head=4, cohort={"min_agents": 1, "fraction": 0.5})
    assert len(fed.lines[0]["agents"]) == 3


def test_a_method_without_such_a_half_is_refused_where_only_they_are_asked(tmp_path):
    fed = run(tmp_path, train=1, head=1, tier="head", cohort={"min_agents": 1}, method="fedavg", params={})
    assert fed.ended.status == "failed"
    assert re.search("'fedavg' has none; choose another, such as afl", fed.ended.reason)


def test_a_device_that_has_failed_is_replaced_by_one_of_the_other_tier(tmp_path):
    around = {"cohort": {"tier": "any", "min_agents": 2, "max_agents": 2}, "round": {"quorum": 1.0}}
    with Federation(tmp_path, tasks=TinyDuties, task=TASK, agents=2, **around) as fed:
        fed.settle()
        fed.tasks["a0"].do = fails
        fed.request("afl", rounds=1)
        fed.until(lambda: fed.entries("update_refused"))
        fed.add("h0", tier="head")
        fed.finish()
        assert fed.record.status == "finished"
        (line,) = [line for line in fed.metrics() if line["kind"] == "round"]
        assert line["agents"] == ["a1", "h0"]


def fails(*_):
    raise RuntimeError("no memory")


def test_hostile_statistics_are_refused_and_change_nothing(tmp_path):
    """The honest ones alone make the classifier."""
    with Federation(tmp_path, tasks=TinyDuties, capture=True, task=TASK, agents=3, cohort={"min_agents": 2}) as fed:
        real = fed.tasks["a1"].do

        def lie(job, received, encoder=None):
            if job.purpose == "train":
                import edge_agent.methods.afl as afl

                honest = afl.statistics
                try:
                    afl.statistics = lambda *given: {**honest(*given), SUMS: 1e6 * honest(*given)[SUMS]}
                    return real(job, received, encoder)
                finally:
                    afl.statistics = honest
            return real(job, received, encoder)

        fed.tasks["a1"].do = lie
        fed.settle()
        fed.request("afl", rounds=1, params=PARAMS)
        fed.finish()
        (refused,) = fed.entries("update_refused", agent="a1")
        assert "cannot be of the same samples" in str(refused)
        del fed.tasks["a1"]
        weight, _ = ridge_of_all(fed)
        np.testing.assert_allclose(fed.final["head.weight"], weight, atol=1e-4)


def test_the_scale_of_a_liar_is_bounded_by_the_others(tmp_path):
    """Statistics that agree with each other, of features a hundred times as long: the median of the round tells."""
    from coordinator.config import AggregationConfig
    from coordinator.rounds.aggregation import aggregate
    from edge_agent.methods import Update
    from edge_agent.methods.afl import statistics

    rng = np.random.default_rng(0)
    made = methods.create("afl", PARAMS)
    labels = np.arange(30) % 3
    updates = []
    for number in range(6):
        features = (rng.standard_normal((30, 6)) + np.eye(6)[labels]).astype(np.float32)
        scale = 100.0 if number == 5 else 1.0
        updates.append(Update(f"a{number}", 30.0, statistics(scale * features, labels, 3, made.params.model_dump())))
    assert made.objection(updates[5].tensors) == ""
    _, decisions = aggregate(made, {}, lambda: updates, AggregationConfig())
    assert list(decisions.clipped) == ["a5"]
    assert "second moments" in decisions.suspects["a5"]


def test_statistics_of_another_encoder_have_another_size_and_are_refused(tmp_path):
    with Federation(tmp_path, tasks=TinyDuties, task=TASK, agents=3, cohort={"min_agents": 2}) as fed:
        real = fed.tasks["a2"].do

        def other(job, received, encoder=None):
            import edge_agent.methods.afl as afl

            if job.purpose != "train":
                return real(job, received, encoder)
            honest = afl.statistics
            try:
                afl.statistics = lambda features, *rest: honest(features[:, :5], *rest)
                return real(job, received, encoder)
            finally:
                afl.statistics = honest

        fed.tasks["a2"].do = other
        fed.settle()
        fed.request("afl", rounds=1, params=PARAMS)
        fed.finish()
        (refused,) = fed.entries("update_refused", agent="a2")
        assert re.search("bytes announced|'extra.gram'", str(refused))
        assert fed.record.status == "finished"


@pytest.mark.parametrize("train, head, tier", [(3, 0, "train"), (2, 2, "any"), (0, 4, "head")])
def test_a_secure_sum_gives_the_same_bits_on_either_tier(tmp_path, train, head, tier):
    cohort = {"min_agents": train + head}
    plain = run(tmp_path / "plain", train=train, head=head, tier=tier, cohort=cohort)
    masked = run(tmp_path / "masked", train=train, head=head, tier=tier, cohort=cohort, privacy={"secure_sum": True})
    assert masked.last.keys() == plain.last.keys()
    assert all(masked.last[name].tobytes() == array.tobytes() for name, array in plain.last.items())
    for agent in masked.tasks:
        sent = sent_by(masked, agent)
        assert any("secure.masked" in update for update in sent)
        assert not any(GRAM in update for update in sent)


def test_a_device_without_torch_sends_nothing_for_a_sum_whose_keys_it_does_not_have(tmp_path):
    """A session that it knows nothing of would have it send its statistics without a mask."""
    config = AgentConfig(id="h0", state=tmp_path, data=DataConfig(source="none:"))
    of_run = {"run": "run-0001", "round": 1, "rounds": 1, "seed": 0, "task": TASK, "blobs": (), "deadline_s": 9.0}
    job = down.Job(method="afl", purpose="contribute", session="1" * 32, params={"min_class_count": 2}, **of_run)
    with pytest.raises(UpdateRejected, match="the keys of this secure sum are gone"):
        TaskRunner(config, "head").do(job, {}, tmp_path / "encoder.hwb")


def test_a_method_of_which_they_send_a_part_has_no_secure_sum_with_them(tmp_path):
    fed = run(
        tmp_path, train=2, head=2, cohort={"min_agents": 3}, method="fedpac", params={}, privacy={"secure_sum": True}
    )
    assert fed.ended.status == "failed"
    assert "devices without torch send a part only" in fed.ended.reason


def test_the_bundle_of_a_run_has_the_classifier_and_the_statistics_of_all(tmp_path):
    export = {"after_run": True, "int8": False, "exporter": "legacy"}
    with Federation(
        tmp_path, tasks=TinyDuties, task=TASK, agents=2, cohort={"tier": "any", "min_agents": 3}, export=export
    ) as fed:
        fed.add("h0", tier="head")
        fed.settle()
        fed.request("afl", rounds=1, params=PARAMS)
        fed.finish()
        path = fed.state.run(fed.run).folder / f"{fed.run}.hwb"
        manifest = open_bundle(path).manifest
        assert manifest.shared_statistics is not None
        assert "ridge_prior" in manifest.heads
        shared = decode(open_bundle(path).read(manifest.global_head))
        np.testing.assert_array_equal(shared["weight"], fed.final["head.weight"])
        # The bundle of the round itself, for contributions, carries no statistics of others.
        assert open_bundle(path.with_name("round.hwb")).manifest.shared_statistics is None
        # A device knows from which bundles it has to expect that they know its samples.
        of_others = AgentConfig(id="h9", state=tmp_path / "h9", data=DataConfig(source="none:"))
        assert head_tier.took_part(fed.tasks["h0"].config, open_bundle(path).manifest)
        assert not head_tier.took_part(of_others, open_bundle(path).manifest)


OWN = """
import numpy as np
from edge_agent.methods import Method


class Sizes(Method):
    returned = ()

    @staticmethod
    def contribute(data, received, rng):
        return {"extra.size": np.array([float(len(data.labels))])}
"""


def test_a_device_without_torch_takes_part_by_its_own_copy_of_a_method(tmp_path):
    """The half is in the method's file, which the device must have, with the hash that the run was started with."""
    path = tmp_path / "sizes.py"
    path.write_text(OWN)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    training = TrainingConfig(methods=("sizes.py:Sizes",), folder=tmp_path)
    config = AgentConfig(id="h0", state=tmp_path, data=DataConfig(source="none:"), training=training)
    of_run = {"run": "run-0001", "round": 1, "rounds": 1, "seed": 0, "task": TASK, "blobs": (), "deadline_s": 9.0}
    job = down.Job(method="sizes", method_sha256=sha256, **of_run)
    data = FitData(np.ones((4, 2), np.float32), np.array([0, 0, 1, 1]), 2)
    assert _contribution(config, job)(data, {}, np.random.default_rng(0))["extra.size"].tolist() == [4.0]
    other = config.model_copy(update={"training": TrainingConfig(folder=tmp_path)})
    with pytest.raises(MissingCapability, match="which this device does not have"):
        _contribution(other, job)


def test_a_packed_triangle_is_the_matrix():
    assert unpack(np.arange(3.0), 2).tolist() == [[0, 1], [1, 2]]

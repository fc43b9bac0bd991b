"""Batch norm that stays on devices: never in a round, once at the end for an encoder that others can use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federation_duties import TinyDuties
from federation_harness import Federation

from edge_agent import methods
from edge_agent.bundle.installed import install
from edge_agent.core.task import ImageInput, Task
from edge_agent.personal.encoder import Encoder
from edge_agent.run_folder.client_state import ClientStateFiles
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.tensors import decode
from export import model_from_state

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 6, "width": 2},
)
SMALL = {"local_epochs": 1, "batch_size": 8, "lr": 0.01}
LOCAL_STATS = "dualfed"
LOCAL_ALL = "fedpick"
AGENTS = ("a0", "a1", "a2")


class SharingDuties(TinyDuties):
    """a1 has fewer samples than the others, so that a plain mean and a weighted one differ."""

    def read_samples(self, task):
        train, test = super().read_samples(task)
        return (train.take(np.arange(9)), test) if self.config.id == "a1" else (train, test)


def finished(folder, method, *, keep_back=(), pool_norm=True, kill_at=None):
    fed = Federation(folder, tasks=SharingDuties, capture=True, task=TASK)
    export = fed.config.export.model_copy(update={"after_run": True, "pool_norm": pool_norm, "int8": False})
    fed.config = fed.config.model_copy(update={"export": export.model_copy(update={"exporter": "legacy"})})
    with fed:
        for name in keep_back:
            tasks = fed.tasks[name]
            privacy = tasks.config.privacy.model_copy(update={"batch_norm_stats": False})
            tasks.config = tasks.config.model_copy(update={"privacy": privacy})
        fed.request(method, rounds=2, params=SMALL)
        if kill_at is not None:
            while not kill_at(fed):
                if not fed.step():
                    fed.clock.now += 0.01
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        fed.pools = [(entry, decode(fed.state.blobs.read(entry.digest))) for entry in fed.entries("norm_pooled")]
        fed.last = fed.final
        fed.sha = fed.encoder_sha256
    return fed


def sent_by(fed, agent):
    frames = [decode_frame(payload) for payload in fed.published(fed.topics.up_chunks(agent))]
    assert all(frame.count == 1 for frame in frames), "the tiny model is one chunk"
    return [decode(bytes(frame.data)) for frame in frames]


def kept_of(fed, agent):
    return ClientStateFiles(fed.folder / agent / "runs" / fed.run_id).before(3)[0]


def pooled_of(fed):
    ((_, tensors),) = fed.pools
    return tensors


@pytest.mark.parametrize("method", [LOCAL_STATS, LOCAL_ALL])
def test_no_round_carries_batch_norm_that_stays_and_the_pool_carries_nothing_else(tmp_path, method):
    fed = finished(tmp_path, method)
    model = methods.create(method, SMALL).build(TASK)
    layers = {name.rsplit(".", 1)[0] for name in model.state_dict() if name.endswith("running_mean")}
    kinds = ("running_mean", "running_var") + (("weight", "bias") if method == LOCAL_ALL else ())
    staying = {f"{layer}.{kind}" for layer in layers for kind in kinds}
    for agent in AGENTS:
        *rounds, pool = sent_by(fed, agent)
        assert len(rounds) == 2
        assert not [name for tensors in rounds for name in tensors if name in staying]
        assert set(pool) == {name for name in staying if name.startswith("encoder.")}


def test_pooled_statistics_are_those_of_the_mixture_of_all_clients(tmp_path):
    fed = finished(tmp_path, LOCAL_STATS)
    pooled = pooled_of(fed)
    kept = [kept_of(fed, agent) for agent in AGENTS]
    shares = np.array([18, 9, 18]) / 45
    names = [name for name in pooled if name.endswith("running_mean")]
    assert names
    for name in names:
        means = np.array([arrays[name] for arrays in kept], np.float64)
        variances = np.array([arrays[name.replace("mean", "var")] for arrays in kept], np.float64)
        mixture = shares @ means
        spread = shares @ (variances + (means - mixture) ** 2)
        np.testing.assert_allclose(pooled[name], mixture, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(pooled[name.replace("mean", "var")], spread, rtol=1e-5, atol=1e-7)


def test_the_bundle_of_the_run_holds_the_pooled_encoder_and_says_so(tmp_path):
    fed = finished(tmp_path, LOCAL_ALL)
    summary = fed.state.run(fed.run).summary()
    bundle = install(Path(summary["bundle"]["path"]), tmp_path / "device")
    assert bundle.manifest.norm == "local_all"
    assert "weighted means" in bundle.manifest.norm_note
    inputs = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    state = {**fed.last, **pooled_of(fed)}
    model = model_from_state(methods.create(LOCAL_ALL, SMALL), TASK, state).eval()
    with torch.no_grad():
        expected = model.encoder(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(Encoder.open(bundle, "fp32").features(inputs), expected, atol=1e-4)


def test_pooling_leaves_what_clients_keep_for_themselves(tmp_path):
    with_pool = finished(tmp_path / "1", LOCAL_STATS)
    without = finished(tmp_path / "2", LOCAL_STATS, pool_norm=False)
    for agent in AGENTS:
        one = kept_of(with_pool, agent)
        other = kept_of(without, agent)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_without_pooling_there_is_no_export_and_the_summary_says_why(tmp_path):
    fed = finished(tmp_path, LOCAL_STATS, pool_norm=False)
    summary = fed.state.run(fed.run).summary()
    assert summary["bundle"] is None
    assert "export.pool_norm" in summary["bundle_why_not"]
    assert all(len(sent_by(fed, agent)) == 2 for agent in AGENTS)


def test_a_device_that_keeps_its_batch_norm_is_left_out_and_the_rest_is_pooled(tmp_path):
    fed = finished(tmp_path, LOCAL_STATS, keep_back=("a2",))
    ((entry, _),) = fed.pools
    assert entry.body["clients"] == ["a0", "a1"]
    assert len(sent_by(fed, "a2")) == 2


def test_a_coordinator_killed_while_it_pools_ends_with_the_same_encoder(tmp_path):
    calm = finished(tmp_path / "1", LOCAL_STATS)
    torn = finished(
        tmp_path / "2",
        LOCAL_STATS,
        kill_at=lambda fed: (
            (loop := fed.coordinator.loop) and loop.assignment and loop.assignment.spec.purpose == "batch_norm_stats"
        ),
    )
    assert torn.sha == calm.sha


def test_a_method_whose_batch_norm_travels_asks_for_nothing_more(tmp_path):
    fed = finished(tmp_path, "fedavg")
    assert not fed.pools
    assert all(len(sent_by(fed, agent)) == 2 for agent in AGENTS)

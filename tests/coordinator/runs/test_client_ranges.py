"""Activation ranges of clients in a federation: asked for once before an export, refused where a device says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from federation_duties import TinyDuties
from federation_harness import Federation

from coordinator.runs.release import ranges_objection
from edge_agent.bundle.archive import open_bundle
from edge_agent.wire.tensors import decode

AGENTS = ("a0", "a1", "a2")


class LyingDuties(TinyDuties):
    """a2 claims what cannot be; what it claims is in ``claim``."""

    claim = (1e9, -1e9)

    def do(self, job, received, encoder=None):
        if job.purpose == "activation_ranges" and self.config.id == "a2":
            session = self.session(job)
            real = session.activation_ranges
            ends = np.array(self.claim, np.float32)
            session.activation_ranges = lambda state: {"ranges": np.tile(ends, (len(real(state)["ranges"]), 1))}
        return super().do(job, received, encoder)


def finished(folder, *, tasks=TinyDuties, keep_back=(), kill=False, method="fedavg", **export):
    fed = Federation(folder, tasks=tasks)
    settings = {"after_run": True, "client_ranges": True, "exporter": "legacy", **export}
    fed.config = fed.config.model_copy(update={"export": fed.config.export.model_copy(update=settings)})
    with fed:
        for name in keep_back:
            runner = fed.tasks[name]
            privacy = runner.config.privacy.model_copy(update={"activation_ranges": False})
            runner.config = runner.config.model_copy(update={"privacy": privacy})
        fed.request(method, rounds=2, params={"local_epochs": 1, "batch_size": 8, "lr": 0.05})
        if kill:
            while not (
                (loop := fed.coordinator.loop)
                and loop.assignment
                and loop.assignment.spec.purpose == "activation_ranges"
            ):
                if not fed.step():
                    fed.clock.now += 0.01
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        fed.ranges = [decode(fed.state.blobs.read(entry.digest)) for entry in fed.entries("ranges_collected")]
        summary = fed.state.run(fed.run).summary()
        fed.manifest = open_bundle(Path(summary["bundle"]["path"])).manifest
        fed.refused = fed.entries("update_refused")
        fed.sha = fed.encoder_sha256
        fed.last = fed.final
    return fed


def test_each_client_is_asked_once_and_int8_takes_their_ranges(tmp_path):
    fed = finished(tmp_path)
    (ranges,) = fed.ranges
    assert set(ranges) == set(AGENTS)
    assert all(one.shape[1] == 2 and (one[:, 0] <= one[:, 1]).all() for one in ranges.values())
    assert fed.manifest.quantization.ranges == "activation ranges of 3 client(s)"
    assert "int8" in fed.manifest.variants


def test_ranges_are_those_of_the_encoder_that_is_exported(tmp_path):
    """The first step is the device's inputs, the last one its features, here by numpy."""
    fed = finished(tmp_path)
    for name, found in fed.ranges[0].items():
        inputs = fed.tasks[name].read_samples(fed.config.task)[0].inputs
        assert found[0].tolist() == pytest.approx([inputs.min(), inputs.max()])
        state = fed.last
        weight, bias = (
            next(a for n, a in state.items() if n.startswith("encoder") and n.endswith(k)) for k in ("weight", "bias")
        )
        features = inputs.reshape(len(inputs), -1) @ weight.T + bias
        assert found[-1].tolist() == pytest.approx([features.min(), features.max()], rel=1e-4)


def test_a_device_that_keeps_its_ranges_is_left_out(tmp_path):
    fed = finished(tmp_path, keep_back=("a1",))
    assert set(fed.ranges[0]) == {"a0", "a2"}
    assert fed.manifest.quantization.ranges.endswith("ranges of 2 client(s) left out: one in 3 can be outvoted")


def test_impossible_ranges_are_rejected_and_the_others_are_used(tmp_path):
    fed = finished(tmp_path, tasks=LyingDuties)
    assert set(fed.ranges[0]) == {"a0", "a1"}
    assert "end before they begin" in fed.refused[-1].body["reason"]


def test_a_coordinator_killed_while_it_asks_exports_the_same(tmp_path):
    calm = finished(tmp_path / "1")
    torn = finished(tmp_path / "2", kill=True)
    assert torn.sha == calm.sha
    assert torn.manifest.variants["int8"].fingerprint == calm.manifest.variants["int8"].fingerprint


@pytest.mark.parametrize("export", [{"client_ranges": False}, {"int8": False}])
def test_nobody_is_asked_where_nothing_would_come_of_it(tmp_path, export):
    assert finished(tmp_path, **export).ranges == []


def test_ranges_in_order_are_believed_and_outvoted_later():
    ends = np.array([[-1e30, 1e30], [0, 0]], np.float32)
    assert ranges_objection({"ranges": ends}) == ""
    assert ranges_objection({"ranges": ends[:, ::-1]}) == "1 of 2 activation ranges end before they begin"

"""Devices without torch while a run goes on: encoders each so many rounds, what they get steers, and they take part."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from federation_duties import TinyDuties
from federation_harness import Federation, TimedWorker

from coordinator.runs import computations, release
from coordinator.runs.release import stop_reason
from coordinator.state.run_lines import ReleaseLine
from edge_agent import methods
from edge_agent.core.task import ImageInput, Task
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down, up
from edge_agent.wire.tensors import decode

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 6, "width": 2},
)
FEDPAC = {"local_epochs": 1, "batch_size": 9, "lr": 0.05}


@pytest.fixture
def exports(monkeypatch):
    """Exports that write a few bytes; the list holds their names."""
    made = []

    def fake(request):
        path = Path(request["path"])
        made.append(path.stem)
        path.write_bytes(path.stem.encode() * 100)
        bundle_id = hashlib.sha256(path.stem.encode()).hexdigest()
        return {"bundle_id": bundle_id, "parity_max_abs": 0.0, "int8_cosine": None}

    monkeypatch.setattr(computations, "export_bundle", fake)
    return made


def federation(folder, **export):
    return Federation(folder, agents=2, export={"after_run": True, **export})


def releases(fed):
    return [line for line in fed.state.run(fed.run).metrics() if line["kind"] == "release"]


def gets(fed, name, accuracies):
    """From now on the device reports these figures, one for each bundle that it installs."""
    found = iter(accuracies)

    def install(message, path):
        fed.tasks[name].installed.append(message.bundle_id)
        return up.Report(run=message.run, samples=5, bundle_id=message.bundle_id, acc_personal=next(found))

    fed.tasks[name].install = install


def test_a_device_gets_an_encoder_each_k_rounds_and_its_figures_are_on_record(tmp_path, exports):
    with federation(tmp_path, every=2) as fed:
        fed.add("h1", tier="head")
        gets(fed, "h1", [0.25, 0.5, 0.75])
        fed.request(rounds=5)
        fed.finish()
        run = fed.run
        assert exports == [f"{run}-round-2", f"{run}-round-4", run]
        assert fed.tasks["h1"].installed == [hashlib.sha256(name.encode()).hexdigest() for name in exports]
        found = [(line["round"], line["mean"], line["acc"]["personal"]) for line in releases(fed)]
        assert found == [(2, 0.25, {"h1": 0.25}), (4, 0.5, {"h1": 0.5})]
        (agent,) = [a for a in fed.state.run(run).summary()["agents"] if a["id"] == "h1"]
        assert agent["acc"]["personal"] == 0.75
        assert [path.name for path in fed.state.run(run).folder.glob("*-round-*.hwb")] == [f"{run}-round-4.hwb"]


def test_a_run_stops_when_devices_get_nothing_more_from_it(tmp_path, exports):
    with federation(tmp_path, every=1, patience=2) as fed:
        fed.add("h1", tier="head")
        gets(fed, "h1", [0.5, 0.625, 0.625, 0.5, 0.9, 0.9, 0.9])
        fed.request(rounds=7)
        fed.finish()
        assert fed.record.status == "finished"
        assert [line["round"] for line in fed.metrics()] == [1, 2, 3, 4]
        summary = fed.state.run(fed.run).summary()
        assert summary["stopped"] == (
            "head-tier devices got acc.personal 0.625 from round 2 and at most 0.625 from 2 releases since"
        )


def test_a_run_that_needs_its_last_round_does_not_stop_before(tmp_path, exports, monkeypatch):
    monkeypatch.setattr(methods.get("fedavg"), "needs_last_round", True)
    with federation(tmp_path, every=1, patience=2) as fed:
        fed.add("h1", tier="head")
        gets(fed, "h1", [0.5, 0.625, 0.625, 0.5, 0.9, 0.9, 0.9])
        fed.request(rounds=7)
        fed.finish()
        assert [line["round"] for line in fed.metrics()] == [1, 2, 3, 4, 5, 6, 7]
        assert fed.state.run(fed.run).summary()["stopped"] is None


def test_a_rejected_export_during_a_run_costs_that_release_only(tmp_path, exports, monkeypatch):
    real = computations.export_bundle

    def sometimes(request):
        if request["path"].endswith("round-1.hwb"):
            raise release.ExportRejected("parity: 3.0, at most 0.0001 is allowed")
        return real(request)

    monkeypatch.setattr(computations, "export_bundle", sometimes)
    with federation(tmp_path, every=1) as fed:
        fed.add("h1", tier="head")
        fed.request(rounds=3)
        fed.finish()
        assert [line["round"] for line in releases(fed)] == [2]
        assert fed.record.status == "finished"


def test_a_late_answer_about_an_earlier_release_does_not_pass_for_one_about_the_last(tmp_path, exports):
    with federation(tmp_path, every=1) as fed:
        fed.add("h1", tier="head", seconds=release.RELEASE_DEADLINE_S + 30)
        fed.request(rounds=2)
        fed.finish()
        assert fed.tasks["h1"].installed == [hashlib.sha256(exports[0].encode()).hexdigest()]
        assert "h1" not in {agent["id"] for agent in fed.state.run(fed.run).summary()["agents"]}
        fed.wait(300)
        assert fed.tasks["h1"].installed[-1] == hashlib.sha256(fed.run.encode()).hexdigest()


@pytest.mark.parametrize(
    "means, patience, stops",
    [
        ([0.1, 0.2, 0.3], 1, False),
        ([0.3, 0.2], 1, True),
        ([0.3, 0.2], 2, False),
        ([0.3, 0.2, 0.1], 2, True),
        ([0.3, 0.2, 0.3], 2, True),
        ([0.3, 0.2, 0.4], 2, False),
        ([0.3, None, 0.2], 1, True),
        ([0.3, None], 1, False),
        ([], 1, False),
        ([0.3, 0.2], 0, False),
    ],
)
def test_when_a_run_stops(means, patience, stops):
    releases = [ReleaseLine(number, mean=mean) for number, mean in enumerate(means, 1)]
    assert bool(stop_reason(releases, patience)) is stops


# --- taking part -----------------------------------------------------------------------------------------------------


def with_head_tier(folder, *, kill_in_round=0, tier="any", method="fedpac"):
    fed = Federation(folder, tasks=TinyDuties, capture=True, task=TASK, agents=2, cohort={"tier": tier})
    with fed:
        fed.add("h1", tier="head")
        fed.settle()
        fed.request(method, rounds=2, params=FEDPAC)
        if kill_in_round:
            while not (
                (loop := fed.coordinator.loop) and loop.assignment and loop.assignment.spec.round == kill_in_round
            ):
                if not fed.step():
                    fed.clock.now += 0.01
            fed.kill_coordinator()
            fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        fed.last, fed.sha, fed.lines = fed.final, fed.encoder_sha256, fed.metrics()
    return fed


def sent_by(fed, agent):
    return [decode(bytes(decode_frame(payload).data)) for payload in fed.published(fed.topics.up_chunks(agent))]


def test_a_device_without_torch_sends_the_extra_arrays_and_nothing_else(tmp_path):
    fed = with_head_tier(tmp_path)
    made = methods.create("fedpac", FEDPAC)
    extras = made.sends(made.build(TASK), TASK)
    updates = sent_by(fed, "h1")
    assert [set(tensors) for tensors in updates] == [set(extras)] * 2
    assert all("extra.head.weight" in tensors for tensors in updates)
    assert all(any(name.startswith("encoder.") for name in tensors) for tensors in sent_by(fed, "a0"))


def test_devices_that_only_join_make_no_quorum_however_many_they_are(tmp_path):
    """Four have answered at once, which is 0.8 of five; the one that trains takes 50 s."""
    around = {"cohort": {"tier": "any"}, "round": {"quorum": 0.8, "grace_s": 1}}
    with Federation(tmp_path, tasks=TinyDuties, task=TASK, agents=(), **around) as fed:
        fed.add("a0", seconds=50)
        for name in ("h1", "h2", "h3", "h4"):
            fed.add(name, tier="head")
        fed.settle()
        fed.request("fedpac", rounds=1, params=FEDPAC)
        fed.finish()
        (line,) = (line for line in fed.metrics() if line["kind"] == "round")
    assert (line["agents"], line["missing"]) == (["a0", "h1", "h2", "h3", "h4"], [])


def test_its_statistics_are_those_of_the_encoder_of_the_round(tmp_path):
    import torch

    fed = with_head_tier(tmp_path)
    torch.manual_seed(0)  # the run's seed: the encoder of round 1 is the one that everybody starts from
    model = methods.create("fedpac", FEDPAC).build(TASK).eval()
    train, _ = fed.tasks["h1"].read_samples(TASK)
    with torch.no_grad():
        features = model.features(torch.from_numpy(train.inputs.astype(np.float32))).numpy()
    first = sent_by(fed, "h1")[0]
    labels = train.labels
    for label in range(3):
        mean = features[labels == label].mean(axis=0)
        np.testing.assert_allclose(first["extra.weighted_means"][label], mean * np.mean(labels == label), atol=1e-4)
        np.testing.assert_allclose(first["extra.centroids"][label], mean, atol=1e-4)
    assert first["extra.counts"].tolist() == np.bincount(labels, minlength=3).tolist()


def test_the_encoder_is_the_mean_of_those_who_train_it(tmp_path):
    fed = with_head_tier(tmp_path)
    last = [sent_by(fed, agent)[-1] for agent in ("a0", "a1")]
    name = next(name for name in last[0] if name.startswith("encoder.") and name.endswith("weight"))
    np.testing.assert_allclose(fed.last[name], (last[0][name] + last[1][name]) / 2, rtol=1e-5, atol=1e-7)


def test_it_gets_its_own_combination_back_and_its_accuracies_are_on_record(tmp_path):
    fed = with_head_tier(tmp_path)
    jobs = [m for m in fed.messages(fed.topics.down("h1"), down.Job) if m.purpose == "contribute"]
    assert {job.round for job in jobs} == {1, 2}
    assert all(job.bundle is not None for job in jobs)
    assert {"a0", "a1", "h1"} == set(fed.lines[1]["agents"])
    assert 0 <= fed.lines[1]["acc"]["personal"]["h1"] <= 1


def test_a_coordinator_killed_in_such_a_round_ends_with_the_same_state(tmp_path):
    calm = with_head_tier(tmp_path / "1")
    torn = with_head_tier(tmp_path / "2", kill_in_round=2)
    assert torn.sha == calm.sha
    assert torn.last.keys() == calm.last.keys()
    assert all(np.array_equal(torn.last[name], calm.last[name]) for name in calm.last)


def test_no_tensor_of_the_encoder_goes_down_to_it_beside_the_bundle(tmp_path):
    fed = with_head_tier(tmp_path)
    frames = [decode_frame(payload) for payload in fed.published(fed.topics.down_chunks("h1"))]
    tensors = [decode(bytes(frame.data)) for frame in frames if frame.count == 1 and b"extra." in bytes(frame.data)]
    assert tensors
    assert not [name for found in tensors for name in found if name.startswith("encoder.")]


def test_a_method_without_such_a_part_asks_devices_that_train_only(tmp_path):
    fed = with_head_tier(tmp_path, method="fedavg")
    assert not list(fed.messages(fed.topics.down("h1"), down.Job))
    assert fed.lines[0]["agents"] == ["a0", "a1"]


def test_a_device_that_is_asked_to_join_where_there_is_nothing_for_it_says_what_to_change(tmp_path):
    from edge_agent.agent.head_tier import contribute_round
    from edge_agent.core.config import AgentConfig, DataConfig
    from edge_agent.core.errors import MissingCapability

    config = AgentConfig(id="h1", state=tmp_path, data=DataConfig(source="none:"))
    job = down.Job(run="run-0001", round=1, rounds=2, seed=0, method="fedavg", task=TASK, blobs=(), deadline_s=9.0)
    with pytest.raises(MissingCapability, match=re.escape("cohort.tier should be 'train'")):
        contribute_round(config, job, {}, tmp_path, (None, None))


def test_an_update_that_is_offered_while_a_restarted_coordinator_freezes_the_encoder_is_kept(tmp_path, exports):
    """Its round is not over. Rejected as late, the update would be thrown away and trained again."""
    with Federation(
        tmp_path, agents=(), tasks=TinyDuties, task=TASK, cohort={"tier": "any", "min_agents": 2}, heartbeat_s=5
    ) as fed:
        for name, seconds in (("a0", 5), ("a1", 30)):
            fed.add(name, seconds=seconds)
        fed.add("h1", tier="head")
        fed.settle()
        fed.request("fedpac", rounds=1, params=FEDPAC)
        fed.until(lambda: fed.entries("update_accepted"))
        fed.kill_coordinator()
        fed.wait(40)

        def export_slowly(coordinator):
            coordinator.worker = TimedWorker(fed.clock, 8)

        fed.start_coordinator(export_slowly)
        fed.finish()
        assert not fed.entries("update_refused", agent="a1")
        assert fed.metrics()[0]["agents"] == ["a0", "a1"]

"""What a simulation has learned, as a bundle for devices and as weights for other runs, without any configuration."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from simulation_harness import run, small_plan, write_images

from coordinator.simulation.run import open_simulation
from coordinator.simulation.setup import Prepared
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.storage import read_tensors
from edge_agent.data.partition import Division
from edge_agent.training.parts import load_arrays


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz")


def test_a_simulated_encoder_becomes_a_bundle(images, tmp_path, call):
    result = run(small_plan(images), tmp_path / "sim")
    code, out, _ = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.hwb", "--json")
    assert code == 0
    manifest = open_bundle(tmp_path / "e.hwb").manifest
    assert manifest.bundle_id == json.loads(out)["bundle_id"]
    assert manifest.feature_dim == 4
    origin = manifest.lineage
    division = Division.read(tmp_path / "sim/partition.json").clients
    partition = json.dumps(sorted([name, len(share.train)] for name, share in division.items()))
    assert origin.partition_sha256 == hashlib.sha256(partition.encode()).hexdigest()
    assert (origin.clients, origin.encoder_sha256) == (len(division), result["encoder_sha256"])
    last = result["rounds"][-1]
    assert (origin.run, origin.round) == ("run-0001", last["round"])
    assert origin.scores.clients == last["acc"]["personal"]["clients"]
    assert origin.scores.mean == pytest.approx(result["last"]["acc"]["personal"]["clients_mean"])


def test_an_export_ends_with_the_command_that_uses_it(images, tmp_path, call):
    run(small_plan(images, rounds=1), tmp_path / "sim")
    _, out, _ = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.hwb")
    fit = f"next: edge-agent fit --bundle {tmp_path}/e.hwb --data images:FOLDER --out my-head"
    assert out.rstrip().splitlines()[-1] == fit
    _, out, _ = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.safetensors")
    assert out.rstrip().splitlines()[-1] == f"next: headwater run --weights {tmp_path}/e.safetensors"


def test_its_weights_are_what_another_run_begins_with(images, tmp_path, call):
    first = run(small_plan(images), tmp_path / "sim")
    code, out, _ = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.safetensors", "--json")
    assert code == 0
    assert json.loads(out)["tensors"] == len(load_file(tmp_path / "e.safetensors")) == 2
    hardly = {"lr": 1e-12, "local_epochs": 1}
    plan = small_plan(images, params=hardly, rounds=1, seed=9, weights=tmp_path / "e.safetensors")
    second = run(plan, tmp_path / "again")
    assert second["encoder_sha256"] == first["encoder_sha256"], "a step of 1e-12 is below what a float32 can tell"


def test_batch_norm_that_stays_with_clients_is_pooled_from_what_they_have_kept(tmp_path, call):
    """By hand: the mixture's mean is that of the means; its variance that of the second moments, less its square."""
    rng = np.random.default_rng(0)
    for name, count in (("few", 24), ("many", 72)):
        pictures = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        np.savez(
            tmp_path / f"{name}.npz", inputs=pictures, labels=np.arange(count) % 2, class_names=np.array(["a", "b"])
        )
    sources = tuple(f"npz:{tmp_path}/{name}.npz" for name in ("few", "many"))
    changes = {"data": sources, "partition": "domains", "clients": None, "encoder": "digits_cnn", "encoder_params": {}}
    run(small_plan("", "fedbn", rounds=1, **changes), tmp_path / "sim")
    code, _, err = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.safetensors", "--json")
    assert code == 0, err
    found = load_file(tmp_path / "e.safetensors")
    mean = next(name for name in found if name.endswith("running_mean"))
    shares = Division.read(tmp_path / "sim/partition.json").clients
    sizes = [len(share.train) for share in shares.values()]
    assert sizes[1] == 3 * sizes[0]
    kept = [load_file(tmp_path / f"sim/clients/{name}/runs/run-0001/kept-0000001.safetensors") for name in shares]
    means, variances = (
        np.stack([one[f"personal.encoder.{name}"] for one in kept]).astype(np.float64)
        for name in (mean, mean.replace("mean", "var"))
    )
    weights = (np.array(sizes) / sum(sizes))[:, None]
    expected = (weights * means).sum(axis=0)
    np.testing.assert_allclose(found[mean], expected, rtol=1e-5)
    moments = (weights * (variances + means**2)).sum(axis=0)
    np.testing.assert_allclose(found[mean.replace("mean", "var")], moments - expected**2, rtol=1e-5)
    assert not np.allclose(means[0], means[1])


@pytest.mark.parametrize("engine", ["serial", pytest.param("pool", marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm", ["local_stats", "local_all"])
def test_newcomers_get_the_pooled_batch_norm_as_devices_do_with_a_bundle(tmp_path, call, norm, engine):
    """Their accuracy with the shared model is that of the exported weights, put together by hand."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    pictures = rng.integers(0, 120, (120, 8, 8)).astype(np.uint8)
    pictures[np.arange(120), :, 2 * labels] += 50  # a brighter column
    np.savez(tmp_path / "s.npz", inputs=pictures, labels=labels, class_names=np.array(["a", "b", "c"]))
    changes = {"encoder": "small_cnn", "encoder_params": {"feature_dim": 12, "width": 4}, "rounds": 3, "new_clients": 1}
    workers = {"engine": engine, "workers": 1 if engine == "pool" else None}
    quick = {"lr": 0.1, "batch_size": 8, "local_epochs": 2, "norm": norm}
    plan = small_plan(f"npz:{tmp_path}/s.npz", params=quick, **changes, **workers)
    prepared = Prepared.of(plan).shared()
    with open_simulation(prepared, tmp_path / "sim") as simulation:
        result = simulation.finish()
        closed = simulation.state.journal.entries(kinds=("round_closed",))[-1]
        state = read_tensors(simulation.state.blobs.path(closed.digest))
    assert call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.safetensors")[0] == 0
    model = prepared.method.build(prepared.task)
    load_arrays(model, {name: array for name, array in state.items() if name in model.state_dict()})
    load_arrays(model.encoder, load_file(tmp_path / "e.safetensors"))
    _, test = prepared.pools.arrays(prepared.division.clients[prepared.new_clients[0]])
    inputs = torch.from_numpy(test.inputs)
    truth = torch.from_numpy(test.labels)
    with torch.no_grad():
        model.eval()
        found = (model(inputs).argmax(dim=1) == truth).double().mean().item()
    assert result["last"]["acc"]["new_global"]["clients_mean"] == pytest.approx(found, abs=1e-9)
    assert found > 0.7


def test_without_a_simulation_or_a_file_it_says_what_is_missing(tmp_path, call):
    code, _, err = call("export", "--out", tmp_path / "e.hwb")
    assert code == 2
    assert "coordinator.toml" in err
    code, _, err = call("export", "--state", tmp_path / "nothing", "--out", tmp_path / "e.hwb")
    assert code != 0
    assert "Traceback" not in err


def test_a_method_that_shares_no_encoder_has_nothing_to_export(images, tmp_path, call):
    run(small_plan(images, "local"), tmp_path / "sim")
    code, _, err = call("export", "--state", tmp_path / "sim", "--out", tmp_path / "e.safetensors")
    assert code != 0
    assert "shares no encoder" in err
    assert not (tmp_path / "e.safetensors").exists()

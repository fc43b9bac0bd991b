"""Analyses of coordinators' runs and of bundles, on data that are given by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from analysis_harness import analyzed, reasons, simulated
from simulation_harness import write_images

from coordinator.research.analyze.targets import LabelledSamples
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent import methods
from edge_agent.core.errors import DataError, UsageError
from edge_agent.wire.tensors import decode


@pytest.fixture(scope="module")
def bundle(coordinator, folder):
    from coordinator.rounds.request import Request
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, model_from_state, synthetic_inputs

    state = StateFolder(coordinator)
    with state.look():
        record = replay(state.journal, "run-0001")
        weights = decode(state.blobs.read(record.checkpoint))
    request = Request.from_fact(record.request)
    method = methods.create(request.method, request.params)
    task = request.task
    trained = TrainedEncoder(model_from_state(method, task, weights), method, task, method.global_head(weights))
    options = BundleOptions("run-0001", created="2025-01-01T00:00:00+00:00", exporter="legacy", int8=False)
    build_bundle(trained, Calibration.from_inputs(synthetic_inputs(task)), folder / "b.hwb", options)
    return folder / "b.hwb"


@pytest.fixture(scope="module")
def data(folder):
    return (
        f"north={write_images(folder / 'north.npz', seed=1)}",
        f"south={write_images(folder / 'south.npz', 50, names=('b', 'a'), seed=2)}",
    )


def test_a_run_and_its_bundle_say_the_same_of_the_same_samples(coordinator, bundle, data):
    of_run = analyzed(coordinator, *data, targets=(0.5,))
    of_bundle = analyzed(bundle, *data)
    assert [one["round"] for one in of_run["rounds"]] == [0, 2, 4]
    last = of_run["rounds"][-1]
    only = of_bundle["rounds"][0]
    for measure in ("separation", "sparsity", "fisher"):
        for client in ("north", "south"):
            expected = last[measure]["encoder"]["clients"][client]
            assert only[measure]["encoder"]["clients"][client] == pytest.approx(expected, rel=1e-3)
    assert of_run["accuracy"]["global"] == of_bundle["accuracy"]["global"]
    assert set(of_bundle["accuracy"]) == {"global", "lr"}
    assert of_run["communication"]["targets"]
    assert of_bundle["communication"] is None
    for result in (of_run, of_bundle):
        assert "they never leave their devices" in reasons(result).values()
        assert "so it would be 1" in reasons(result)["client-wise CKA"]
        assert "cka" not in result["rounds"][-1]


def test_without_data_a_run_tells_of_its_traffic(coordinator, runs):
    result = analyzed(coordinator, targets=(0.2,))
    assert result["communication"] == analyzed(runs("fedavg")[0], targets=(0.2,))["communication"]
    assert "--data" in reasons(result)["features and accuracies of classes"]
    assert (result["accuracy"], result["probe"], result["tsne"]) == ({}, None, [])


def test_one_runs_folder_is_enough(coordinator):
    assert analyzed(coordinator / "runs" / "run-0001")["run_id"] == "run-0001"


def test_an_encoder_that_is_not_whole_is_left_out(images, folder, data):
    """FedPick's batch norm stays on devices and was not pooled: without it there are no features."""
    path, _ = simulated(images, folder / "bn", "fedpick", encoder="small_cnn", encoder_params={}, rounds=1)
    (path / "simulation.json").unlink()
    result = analyzed(path, *data)
    assert "stay on devices" in reasons(result)["features after round 1"]
    assert result["rounds"] == [{"round": 0}, {"round": 1}]
    assert result["accuracy"] == {}


def test_a_bundle_is_analyzed_where_there_is_no_torch(bundle, data, tmp_path):
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'torchvision', 'onnx'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from coordinator.research.analyze import Location, Settings, analyze, find\n"
        "settings = Settings(tsne=0)\n"
        f"place = Location({str(bundle)!r}, data={tuple(data)!r})\n"
        "print(analyze(find(place, settings), settings)['kind'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "bundle"


@pytest.mark.parametrize(
    "given, message",
    [
        ((), "give --data NAME=SOURCE"),
        (("x=npz:{}/strange.npz",), "does not know"),
        (("x=npz:{}/empty.npz",), "no samples"),
        (("x=npz:{}/images.npz", "x=npz:{}/images.npz"), "occurs twice"),
        (("Ä=npz:{}/images.npz",), "cannot be a client's name"),
        (("npz:{}/nowhere.npz",), "nowhere.npz"),
    ],
)
def test_data_that_do_not_fit_are_refused(bundle, folder, given, message):
    write_images(folder / "strange.npz", 20, names=("a", "zebra"))
    np.savez(folder / "empty.npz", inputs=np.zeros((0, 4, 4), np.uint8), labels=np.zeros(0, int))
    with pytest.raises(UsageError, match=message):
        analyzed(bundle, *(one.format(folder) for one in given))


def test_a_source_without_a_name_is_called_after_its_place(bundle, folder, images):
    result = analyzed(bundle, images, f"b=npz:{folder / 'images.npz'}?inputs=inputs")
    assert result["clients"] == ["b", "images-npz"]
    assert result["rounds"][0]["overlap"]["mean"] == 1.0


def test_nobody_has_test_samples(bundle, folder):
    source = write_images(folder / "single.npz", 3)
    with pytest.raises(DataError, match="none of 1 clients has test samples"):
        analyzed(bundle, source)


def test_a_part_of_the_samples_is_drawn_without_repeating_any():
    part = LabelledSamples(np.arange(20.0)[:, None], np.arange(20))
    some = part.some(7, seed=3)
    assert len(set(some.labels.tolist())) == 7
    assert (some.inputs[:, 0] == some.labels).all()
    assert part.some(20, seed=3) is part

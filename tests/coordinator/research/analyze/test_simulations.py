"""Analyses of simulations against the layers worked out by hand, and what cannot be measured."""

from __future__ import annotations

import json
from statistics import fmean

import numpy as np
import pytest
from analysis_harness import analyzed, reasons, simulated
from federation_duties import SMALL
from simulation_harness import write_images

from coordinator.research.analyze import Location, Settings, find
from coordinator.state.store import StateFolder, states_of
from edge_agent import heads
from edge_agent.core.errors import StateError
from edge_agent.core.storage import read_tensors, write_tensors
from edge_agent.run_folder.client_state import ClientStateFiles
from edge_agent.wire.tensors import decode


@pytest.mark.parametrize("method", ["fedavg", "repper", "dualfed", "fedpick", "fedpac", "local"])
def test_accuracies_are_those_that_the_simulation_told(runs, method):
    path, told = runs(method)
    result = analyzed(path)
    for scope, found in result["accuracy"].items():
        assert found["all"] == pytest.approx(told["last"]["acc"][scope]["clients_mean"], abs=1e-6)
    raw = {"local"}  # of raw inputs: there is no layer to look at
    assert set(result["accuracy"]) == set(told["last"]["acc"]) - raw
    summary = json.loads((path / "runs" / "run-0001" / "summary.json").read_text())
    for agent in summary["agents"]:
        assert result["accuracy"]["personal"]["clients"][agent["id"]]["all"] == pytest.approx(agent["acc"]["personal"])


def test_separation_and_cka_are_those_of_the_layers_worked_out_by_hand(runs):
    """DualFed on a linear encoder without batch norm: features before and behind the projector, in numpy."""
    from coordinator.research.analyze.simulations import SimulationTarget

    path, _ = runs("dualfed")
    target = find(Location(str(path)), Settings())
    assert isinstance(target, SimulationTarget)
    probe = target.probe(Settings(probe=24))
    view = next(target.feature_views(2, Settings(), probe))
    state = StateFolder(path)
    with state.look():
        shared = decode(state.blobs.read(states_of(state, "run-0001")[2]))
    personal = ClientStateFiles(path / "clients" / "c0" / "runs" / "run-0001").before(3)[0]
    both = {**shared, **personal}
    weight, bias = (both[n] for n in sorted(n for n in both if n.startswith("encoder."))[::-1])
    mine = target.samples_of("c0").test
    features = mine.inputs.reshape(len(mine), -1) @ weight.T + bias
    assert view.kinds["encoder"] == pytest.approx(features, abs=1e-5)
    hidden = np.maximum(view.kinds["encoder"] @ both["projector.0.weight"].T + both["projector.0.bias"], 0)
    projected = norm(hidden, both, "projector.2") @ both["projector.3.weight"].T + both["projector.3.bias"]
    assert view.kinds["projector"] == pytest.approx(norm(projected, both, "projector.4"), abs=1e-4)
    result = analyzed(path, samples=1000)
    measured = next(one for one in result["rounds"] if one["round"] == 2)
    assert measured["separation"]["projector"]["clients"]["c0"] == pytest.approx(
        separation_of(view.kinds["projector"], view.labels), abs=1e-6
    )


def norm(values, tensors, name):
    scale = np.sqrt(tensors[f"{name}.running_var"] + 1e-5)
    return (values - tensors[f"{name}.running_mean"]) / scale * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def separation_of(features, labels):
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    apart = 1 - unit.astype(np.float64) @ unit.T.astype(np.float64)
    classes = np.unique(labels)
    table = np.array([[apart[np.ix_(labels == j, labels == k)].mean() for k in classes] for j in classes])
    return 1 - np.diag(table).mean() / table.mean()


def test_fresh_clients_agree_in_everything_and_trained_ones_do_not(runs):
    path, _ = runs("dualfed")
    first, *_, last = analyzed(path)["rounds"]
    assert first["round"] == 0
    assert first["cka"]["encoder"]["mean"] == pytest.approx(1.0)
    assert first["cka"]["projector"]["mean"] == pytest.approx(1.0)
    assert last["cka"]["projector"]["mean"] < 0.9999
    matrix = np.array(last["cka"]["projector"]["matrix"])
    assert (matrix == matrix.T).all()
    pairs = [matrix[0, 1], matrix[0, 2], matrix[1, 2]]
    assert last["cka"]["projector"]["mean"] == pytest.approx(fmean(pairs), abs=1e-4)


def test_a_mask_picks_the_features_that_the_classifier_sees(runs):
    """The relevant classifier on the picked features and the global one on all: their mean is the method's answer."""
    path, _ = runs("fedpick")
    target = find(Location(str(path)), Settings())
    probe = target.probe(Settings(probe=24))
    view = next(iter(target.feature_views(4, Settings(), probe)))
    assert set(np.unique(view.mask)) <= {0.0, 1.0}
    assert set(view.kinds) == {"encoder"}
    state = StateFolder(path)
    with state.look():
        shared = decode(state.blobs.read(states_of(state, "run-0001")[4]))
    personal = ClientStateFiles(path / "clients" / "c0" / "runs" / "run-0001").before(10**7)[0]
    both = {**shared, **personal}

    def answer(features, name):
        logits = features @ both[f"{name}.weight"].T + both[f"{name}.bias"]
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    together = answer(view.kinds["encoder"], "head") + answer(view.features_to_draw()["relevant"], "relevant_head")
    assert (together.argmax(axis=1) == view.answers["personal"]).all()
    result = analyzed(path, samples=1000)["rounds"][-1]
    assert result["selection"]["clients"]["c0"] == pytest.approx(view.mask.mean())
    assert result["overlap"]["by"] == "mask"
    assert {"encoder", "relevant", "irrelevant"} == set(result["fisher"])


def test_weights_of_combined_classifiers_and_their_groups(images, folder):
    """FedPAC's own partition knows groups; ten classes, as its rule asks for."""
    source = write_images(folder / "ten.npz", 1500, names=[str(n) for n in range(10)])
    params = {**SMALL, "min_class_count": 1}
    path, _ = simulated(
        source, folder / "groups", "fedpac", params=params, partition="fedpac", clients=10, size=60, rounds=2
    )
    result = analyzed(path)
    mixing = result["rounds"][-1]["mixing"]
    weights = np.array(mixing["weights"])
    assert weights.sum(axis=1) == pytest.approx(np.ones(10), abs=1e-3)
    assert mixing["groups"][0] == mixing["groups"][5] == "0, 1, 2"
    assert mixing["if_even"] == pytest.approx(0.2)
    by_hand = np.mean([weights[i, i % 5] + weights[i, i % 5 + 5] for i in range(10)])
    assert mixing["same_group"] == pytest.approx(by_hand, abs=1e-3)
    assert mixing["same_group"] > 0.95
    assert "mixing" not in result["rounds"][0]


def test_classes_of_a_client_are_told_from_most_to_fewest_training_samples(runs):
    path, _ = runs("fedavg")
    result = analyzed(path)
    one = result["accuracy"]["personal"]["clients"]["c1"]
    counts = [row["train"] for row in one["classes"]]
    assert counts == sorted(counts, reverse=True)
    right = sum(round(row["acc"] * row["test"]) for row in one["classes"] if row["acc"] is not None)
    assert one["all"] == pytest.approx(right / sum(row["test"] for row in one["classes"]))


def test_nearest_neighbours_on_all_features_are_the_device_head(runs):
    """The probe at 100 % is the head 'knn' on all features, fitted here on its own."""
    path, _ = runs("fedavg")
    result = analyzed(path, samples=1000)
    target = find(Location(str(path)), Settings())
    view = next(target.feature_views(4, Settings(), target.probe(Settings())))
    head = heads.create("knn")
    head.fit(heads.FitData(view.trained.inputs, view.trained.labels, 3), np.random.default_rng(0))
    expected = (head.predict_proba(view.kinds["encoder"]).argmax(axis=1) == view.labels).mean()
    assert result["probe"]["ratios"][-1] == 1.0
    assert result["probe"]["clients"]["c0"][-1] == pytest.approx(expected)


def test_the_same_numbers_every_time_and_only_numbers(runs):
    path, _ = runs("fedpick")
    first, second = (json.dumps(analyzed(path, tsne=1), allow_nan=False, sort_keys=True) for _ in range(2))
    assert first == second
    drawn = json.loads(first)["tsne"]
    assert [one["features"] for one in drawn] == ["relevant", "irrelevant"]
    assert all(len(one["points"]) == len(one["labels"]) for one in drawn)


def test_one_client_has_nobody_to_be_compared_with(images, folder):
    path, _ = simulated(images, folder / "alone", clients=1, rounds=1)
    result = analyzed(path)
    assert "there is one client only" in reasons(result).values()
    assert "cka" not in result["rounds"][-1]
    assert result["rounds"][-1]["separation"]["encoder"]["mean"] is not None


def test_a_client_of_one_class_has_no_separation_and_that_is_said(folder):
    """One domain with both classes, and one with a single class; the mean is that of the first alone."""
    sources = (
        write_images(folder / "both.npz", 60, names=("a", "b")),
        write_images(folder / "only.npz", 40, names=("a",)),
    )
    path, _ = simulated("", folder / "uneven", data=sources, partition="domains", clients=None, rounds=1)
    result = analyzed(path)
    found = result["rounds"][-1]["separation"]["encoder"]
    assert found["clients"]["only-npz"] is None
    assert found["mean"] == found["clients"]["both-npz"] is not None
    assert reasons(result)["separation and Fisher scores of client only-npz"] == "its test samples are of one class"
    assert set(result["probe"]["clients"]) == {"both-npz"}


def test_a_task_of_one_class_is_analyzed_as_far_as_it_goes(folder):
    path, _ = simulated(write_images(folder / "one.npz", 40, names=("a",)), folder / "single", clients=2, rounds=1)
    result = analyzed(path)
    assert result["rounds"][-1]["separation"]["encoder"]["mean"] is None
    assert result["probe"] is None
    assert result["accuracy"]["personal"]["all"] == 1.0


def test_clients_that_train_on_the_same_classes_are_a_group(folder):
    source = write_images(folder / "four.npz", 400, names=("a", "b", "c", "d"))
    path, _ = simulated(source, folder / "pat", partition="pathological", clients=4, rounds=1)
    groups = find(Location(str(path)), Settings()).groups()
    division = json.loads((path / "partition.json").read_text())["clients"]
    for client, share in division.items():
        classes = sorted({"abcd"[row % 4] for row in share["train"]})
        assert groups[client] == ", ".join(classes)
    assert len(set(groups.values())) == 2


def test_features_that_are_no_numbers_leave_their_client_out(images, folder):
    path, _ = simulated(images, folder / "nan", "local", rounds=1)
    for file in (path / "clients" / "c1" / "runs" / "run-0001").glob("kept-*.safetensors"):
        tensors = {name: np.array(array) for name, array in read_tensors(file).items()}
        name = next(name for name in tensors if name.startswith("personal.encoder"))
        tensors[name][...] = np.nan
        write_tensors(file, tensors)
    result = analyzed(path)
    assert "NaN" in reasons(result)["client c1 after round 1"]
    assert set(result["rounds"][-1]["separation"]["encoder"]["clients"]) == {"c0", "c2"}


def test_what_a_client_kept_is_damaged(images, folder):
    path, _ = simulated(images, folder / "torn", "local", rounds=1)
    for file in (path / "clients" / "c1" / "runs" / "run-0001").glob("kept-*.safetensors"):
        file.write_bytes(b"\0" * 40)
    with pytest.raises(StateError, match="client 'c1' after round"):
        analyzed(path)

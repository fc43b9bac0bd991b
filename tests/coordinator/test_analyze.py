"""Analyses of simulations, of coordinators' runs and of bundles."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from statistics import fmean

import numpy as np
import pytest

from coordinator.analyze import Place, Settings, analyze, find
from coordinator.analyze.looks import Part
from coordinator.cli import main
from coordinator.keeping import states_of
from coordinator.simulate import Plan, Prepared, open_simulation
from coordinator.store import StateFolder
from edge_agent import heads, methods
from edge_agent.agent.kept import KeptFiles
from edge_agent.errors import DataError, StateError, UsageError
from edge_agent.store import read_tensors, write_tensors
from edge_agent.wire.tensors import decode

SMALL = {"local_epochs": 1, "batch_size": 8, "lr": 0.05}
PARAMS = {
    "dualfed": {**SMALL, "contrastive_weight": 1.0, "projector_width": 8},
    "repper": {**SMALL, "augment": False, "head": "prototype"},
    "fedpac": {**SMALL, "min_class_count": 1},
}


def write_images(path, names=("a", "b", "c"), count=90, seed=0):
    """Images of 4 x 4 whose classes differ in brightness."""
    labels = np.arange(count) % len(names)
    noise = np.random.default_rng(seed).normal(60, 25, (count, 4, 4))
    inputs = np.clip(noise + 60 * labels[:, None, None], 0, 255).astype(np.uint8)
    np.savez(path, inputs=inputs, labels=labels, class_names=np.array(names))
    return f"npz:{path}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("analyses")


@pytest.fixture(scope="module")
def images(folder):
    return write_images(folder / "images.npz")


def simulated(images, out, method="fedavg", **changes):
    wished = {
        "method": method,
        "params": PARAMS.get(method, SMALL),
        "data": (images,),
        "clients": 3,
        "rounds": 4,
        "encoder": "linear",
        "encoder_params": {"feature_dim": 6},
        "device": "cpu",
        "engine": "serial",
        "keep_every": 2,
    }
    with open_simulation(Prepared.of(Plan(**{**wished, **changes})), out) as simulation:
        result = simulation.finish()
    return out, result


@pytest.fixture(scope="module")
def runs(folder, images):
    """Method -> (folder, result); each is run once."""
    made = {}

    def run(method):
        if method not in made:
            made[method] = simulated(images, folder / method, method)
        return made[method]

    return run


def analyzed(path, *data, **settings):
    chosen = Settings(**{"tsne": 0, "samples": 20, "probe": 24, **settings})
    return analyze(find(Place(str(path), data=data), chosen), chosen)


def reasons(result):
    return {one["what"]: one["why"] for one in result["left_out"]}


# --- states that are kept --------------------------------------------------------------------------------------------


def test_the_state_that_is_kept_is_that_of_a_run_that_ended_there(runs, images, folder):
    path, _ = runs("dualfed")
    short, _ = simulated(images, folder / "short", "dualfed", rounds=2, keep_every=0)
    states, ends = ({}, {})
    for place, found in ((path, states), (short, ends)):
        state = StateFolder(place)
        with state.look():
            found.update({n: state.blobs.read(sha) for n, sha in states_of(state, "run-0001").items()})
    assert sorted(states) == [0, 2, 4]
    assert sorted(ends) == [2]
    assert states[2] == ends[2]
    for client in ("c0", "c1", "c2"):
        kept, expected = (KeptFiles(p / "clients" / client / "runs" / "run-0001").before(3)[0] for p in (path, short))
        assert expected
        assert {n: a.tobytes() for n, a in kept.items()} == {n: a.tobytes() for n, a in expected.items()}


def test_without_keep_every_the_last_state_is_left_and_that_is_said(images, folder):
    path, _ = simulated(images, folder / "last", rounds=2, keep_every=0)
    result = analyzed(path)
    assert [one["round"] for one in result["rounds"]] == [2]
    assert "--keep-every" in reasons(result)["earlier rounds"]


def test_another_runs_end_leaves_kept_states_alone(images, folder):
    """Pruning looks at the journal: what one run keeps, the next one's rounds do not remove."""
    path, _ = simulated(images, folder / "again")
    state = StateFolder(path)
    with state.open("test"):
        from coordinator.keeping import blobs_in_use

        before = states_of(state, "run-0001")
        state.blobs.prune(blobs_in_use(state.journal))
        assert states_of(state, "run-0001") == before
        assert len(before) == 3


def test_a_state_whose_round_was_never_closed_does_not_count(images, folder):
    """Killed between the two entries: the blob is noted, the round is not over."""
    path, _ = simulated(images, folder / "killed", rounds=2, keep_every=1)
    state = StateFolder(path)
    with state.open("test"):
        known = states_of(state, "run-0001")
        state.journal.append("state_kept", run="run-0001", round=3, digest=state.blobs.put(b"half a round"))
        assert states_of(state, "run-0001") == known
        state.blobs.path(known[1]).unlink()
        assert list(states_of(state, "run-0001")) == [0, 2]


# --- simulations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "repper", "dualfed", "fedpick", "fedpac", "local"])
def test_accuracies_are_those_that_the_simulation_told(runs, method):
    path, told = runs(method)
    result = analyzed(path)
    for scope, found in result["accuracy"].items():
        assert found["all"] == pytest.approx(told["last"]["acc"][scope]["clients_mean"], abs=1e-6)
    assert set(result["accuracy"]) == set(told["last"]["acc"])
    summary = json.loads((path / "runs" / "run-0001" / "summary.json").read_text())
    for agent in summary["agents"]:
        assert result["accuracy"]["personal"]["clients"][agent["id"]]["all"] == pytest.approx(agent["acc"]["personal"])


def test_separation_and_cka_are_those_of_the_layers_worked_out_by_hand(runs):
    """DualFed on a linear encoder without batch norm: features before and behind the projector, in numpy."""
    from coordinator.analyze.subjects.simulation import Simulated

    path, _ = runs("dualfed")
    subject = find(Place(str(path)), Settings())
    assert isinstance(subject, Simulated)
    probe = subject.probe(Settings(probe=24))
    look = next(subject.looks(2, Settings(), probe))
    state = StateFolder(path)
    with state.look():
        shared = decode(state.blobs.read(states_of(state, "run-0001")[2]))
    personal = KeptFiles(path / "clients" / "c0" / "runs" / "run-0001").before(3)[0]
    both = {**shared, **personal}
    weight, bias = (both[n] for n in sorted(n for n in both if n.startswith("encoder."))[::-1])
    mine = subject.holding("c0").test
    features = mine.inputs.reshape(len(mine), -1) @ weight.T + bias
    assert look.views["encoder"] == pytest.approx(features, abs=1e-5)
    hidden = np.maximum(look.views["encoder"] @ both["projector.0.weight"].T + both["projector.0.bias"], 0)
    projected = norm(hidden, both, "projector.2") @ both["projector.3.weight"].T + both["projector.3.bias"]
    assert look.views["projector"] == pytest.approx(norm(projected, both, "projector.4"), abs=1e-4)
    result = analyzed(path, samples=1000)
    measured = next(one for one in result["rounds"] if one["round"] == 2)
    assert measured["separation"]["projector"]["clients"]["c0"] == pytest.approx(
        separation_of(look.views["projector"], look.labels), abs=1e-6
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
    subject = find(Place(str(path)), Settings())
    probe = subject.probe(Settings(probe=24))
    look = next(iter(subject.looks(4, Settings(), probe)))
    assert set(np.unique(look.mask)) <= {0.0, 1.0}
    assert set(look.views) == {"encoder"}
    state = StateFolder(path)
    with state.look():
        shared = decode(state.blobs.read(states_of(state, "run-0001")[4]))
    personal = KeptFiles(path / "clients" / "c0" / "runs" / "run-0001").before(10**7)[0]
    both = {**shared, **personal}

    def answer(features, name):
        logits = features @ both[f"{name}.weight"].T + both[f"{name}.bias"]
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    together = answer(look.views["encoder"], "head") + answer(look.drawn()["relevant"], "relevant_head")
    assert (together.argmax(axis=1) == look.answers["personal"]).all()
    result = analyzed(path, samples=1000)["rounds"][-1]
    assert result["selection"]["clients"]["c0"] == pytest.approx(look.mask.mean())
    assert result["overlap"]["by"] == "mask"
    assert {"encoder", "relevant", "irrelevant"} == set(result["fisher"])


def test_weights_of_combined_classifiers_and_their_groups(images, folder):
    """FedPAC's own partition knows groups; ten classes, as its rule asks for."""
    source = write_images(folder / "ten.npz", [str(n) for n in range(10)], 1500)
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
    subject = find(Place(str(path)), Settings())
    look = next(subject.looks(4, Settings(), subject.probe(Settings())))
    head = heads.create("knn")
    head.fit(heads.FitData(look.trained.inputs, look.trained.labels, 3), np.random.default_rng(0))
    expected = (head.predict_proba(look.views["encoder"]).argmax(axis=1) == look.labels).mean()
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
    sources = (write_images(folder / "both.npz", ("a", "b"), 60), write_images(folder / "only.npz", ("a",), 40))
    path, _ = simulated("", folder / "uneven", data=sources, partition="domains", clients=None, rounds=1)
    result = analyzed(path)
    found = result["rounds"][-1]["separation"]["encoder"]
    assert found["clients"]["only-npz"] is None
    assert found["mean"] == found["clients"]["both-npz"] is not None
    assert reasons(result)["separation and Fisher scores of client only-npz"] == "its test samples are of one class"
    assert set(result["probe"]["clients"]) == {"both-npz"}


def test_a_task_of_one_class_is_analyzed_as_far_as_it_goes(folder):
    path, _ = simulated(write_images(folder / "one.npz", ("a",), 40), folder / "single", clients=2, rounds=1)
    result = analyzed(path)
    assert result["rounds"][-1]["separation"]["encoder"]["mean"] is None
    assert result["probe"] is None
    assert result["accuracy"]["personal"]["all"] == 1.0


def test_clients_that_train_on_the_same_classes_are_a_group(folder):
    source = write_images(folder / "four.npz", ("a", "b", "c", "d"), 400)
    path, _ = simulated(source, folder / "pat", partition="pathological", clients=4, rounds=1)
    groups = find(Place(str(path)), Settings()).groups()
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


# --- runs and bundles ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coordinator(runs, folder):
    """A coordinator's state folder: a simulation's without what only a simulation has."""
    path, _ = runs("fedavg")
    for name in ("journal.db", "blobs", "runs"):
        source, target = path / name, folder / "coordinator" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return folder / "coordinator"


@pytest.fixture(scope="module")
def bundle(coordinator, folder):
    from coordinator.request import Request
    from export.bundle import export_bundle, model_from_state, synthetic_inputs

    state = StateFolder(coordinator)
    with state.look():
        record = state.journal.replay("run-0001")
        weights = decode(state.blobs.read(record.checkpoint))
    request = Request.from_body(record.request)
    method, task = methods.create(request.method, request.params), request.task
    export_bundle(
        model_from_state(method, task, weights),
        method,
        task,
        synthetic_inputs(task),
        folder / "b.hwb",
        name="run-0001",
        created="2025-01-01T00:00:00+00:00",
        global_head=method.global_head(weights),
        exporter="legacy",
        int8=False,
    )
    return folder / "b.hwb"


@pytest.fixture(scope="module")
def data(folder):
    return (
        f"north={write_images(folder / 'north.npz', seed=1)}",
        f"south={write_images(folder / 'south.npz', ('b', 'a'), 50, seed=2)}",
    )


def test_a_run_and_its_bundle_say_the_same_of_the_same_samples(coordinator, bundle, data):
    of_run, of_bundle = analyzed(coordinator, *data, targets=(0.5,)), analyzed(bundle, *data)
    assert [one["round"] for one in of_run["rounds"]] == [0, 2, 4]
    last, only = of_run["rounds"][-1], of_bundle["rounds"][0]
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


def test_a_bundle_is_analyzed_where_there_is_no_torch(bundle, data, folder):
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'torchvision', 'onnx'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from coordinator.analyze import Place, Settings, analyze, find\n"
        "settings = Settings(tsne=0)\n"
        f"place = Place({str(bundle)!r}, data={tuple(data)!r})\n"
        "print(analyze(find(place, settings), settings)['kind'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
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
    write_images(folder / "strange.npz", ("a", "zebra"), 20)
    np.savez(folder / "empty.npz", inputs=np.zeros((0, 4, 4), np.uint8), labels=np.zeros(0, int))
    with pytest.raises(UsageError, match=message):
        analyzed(bundle, *(one.format(folder) for one in given))


def test_a_source_without_a_name_is_called_after_its_place(bundle, folder, images):
    result = analyzed(bundle, images, f"b=npz:{folder / 'images.npz'}?inputs=inputs")
    assert result["clients"] == ["b", "images-npz"]
    assert result["rounds"][0]["overlap"]["mean"] == 1.0


def test_nobody_has_test_samples(bundle, folder):
    source = write_images(folder / "single.npz", count=3)
    with pytest.raises(DataError, match="none of 1 clients has test samples"):
        analyzed(bundle, source)


def test_a_part_of_the_samples_is_drawn_without_repeating_any():
    part = Part(np.arange(20.0)[:, None], np.arange(20))
    some = part.some(7, seed=3)
    assert len(set(some.labels.tolist())) == 7
    assert (some.inputs[:, 0] == some.labels).all()
    assert part.some(20, seed=3) is part


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run the command in this process and in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def called(*words):
        with pytest.raises(SystemExit) as ended:
            main(["analyze", *(str(word) for word in words)])
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return called


def test_pictures_page_and_numbers(call, runs, tmp_path):
    path, _ = runs("dualfed")
    code, out, err = call(path, "--out", "found", "--json", "--tsne", 1, "--target", 0.1)
    assert code == 0, err
    result = json.loads(out)
    assert json.loads((tmp_path / "found" / "analysis.json").read_text()) == result
    page = (tmp_path / "found" / "index.html").read_text()
    pictures = {path.name for path in (tmp_path / "found").glob("*.svg")}
    wanted = {"separation-rounds", "separation-clients", "cka-rounds", "cka-projector", "overlap", "tsne-c0", "probe"}
    assert {f"{name}.svg" for name in wanted | {"traffic", "classes-c0"}} <= pictures
    for name in pictures:
        assert ET.parse(tmp_path / "found" / name).getroot().tag.endswith("svg")
        assert f'href="{name}"' in page


def test_tables_for_people_say_what_is_left_out(call, runs):
    code, out, _ = call(runs("fedpick")[0], "--tsne", 0)
    assert code == 0
    assert "run-0001: fedpick, 3 clients, simulation" in out
    assert "left out: sparsity before aggregation" in out
    assert "selection" in out


def test_names_from_data_cannot_break_the_page(call, folder, tmp_path):
    names = ("<script>alert(1)</script>", '"quoted" & co')
    source = write_images(folder / "hostile.npz", names, 60)
    path, _ = simulated(source, folder / "hostile", rounds=1, clients=2)
    code, _, err = call(path, "--out", "o", "--json", "--tsne", 1)
    assert code == 0, err
    assert "<script" not in (tmp_path / "o" / "index.html").read_text()
    for picture in (tmp_path / "o").glob("*.svg"):
        ET.parse(picture)


def test_other_files_in_the_folder_stay(call, runs, tmp_path):
    (tmp_path / "mine.svg").write_text("mine")
    code, _, err = call(runs("fedavg")[0], "--out", ".", "--json", "--tsne", 0)
    assert code == 0, err
    assert (tmp_path / "mine.svg").read_text() == "mine"


@pytest.mark.parametrize(
    "words, message",
    [
        (("dualfet",), "did you mean"),
        (("run-0009", "--state", "{coordinator}"), "did you mean 'run-0001'?"),
        (("nothing-like-it",), "it is not there"),
        (("{folder}",), "nothing that can be analyzed"),
        (("{dualfed}", "--data", "digits:photo"), "knows its data"),
        (("{dualfed}", "--target", "1.5", "--samples", "0"), "--samples 0: expected 1 or more; --target 1.5"),
        (("{dualfed}", "--head", "lrr"), "did you mean 'lr'?"),
        (("{dualfed}", "--out", "{folder}/images.npz"), "is a file"),
    ],
)
def test_mistakes_end_with_exit_code_2(call, runs, coordinator, folder, tmp_path, words, message):
    (tmp_path / "dualfed").mkdir()
    places = {"coordinator": coordinator, "folder": folder, "dualfed": runs("dualfed")[0]}
    code, out, err = call(*(word.format(**places) for word in words))
    assert (code, out) == (2, "")
    assert message in err


def test_a_simulation_that_has_not_begun(call, runs, tmp_path):
    path, _ = runs("fedavg")
    (tmp_path / "young").mkdir()
    shutil.copy(path / "simulation.json", tmp_path / "young")
    StateFolder(tmp_path / "young").journal.open().close()
    code, _, err = call("young")
    assert code == 2
    assert "no round of this simulation has closed yet" in err


# --- asking for states to be kept ------------------------------------------------------------------------------------


def test_the_file_says_how_many_states_to_keep_and_the_option_wins(tmp_path):
    from coordinator.cli.run import request_for
    from coordinator.config import CoordinatorConfig

    raw = {"task": {"class_names": ["a", "b"], "encoder": "linear"}, "run": {"keep_every": 5}}
    config = CoordinatorConfig.model_validate({**raw, "state": tmp_path})
    assert request_for(config, None, None, None, {}).keep_every == 5
    assert request_for(config, None, None, None, {}, 0).keep_every == 0


def test_a_request_from_before_states_could_be_kept_keeps_none():
    from coordinator.request import Request
    from edge_agent.task import Task

    request = Request("fedavg", {}, 3, 0, Task(class_names=("a",)), keep_every=4)
    body = request.body()
    assert Request.from_body(body) == request
    del body["keep_every"]
    assert Request.from_body(body).keep_every == 0


def test_keep_every_is_an_option_of_simulate(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("-d", images, "--encoder", "linear", "--clients", "2", "--rounds", "3", "--keep-every", "1", "--out", "s")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words, "--device", "cpu", "--engine", "serial"])
    assert not ended.value.code
    assert [one["round"] for one in analyzed(tmp_path / "s")["rounds"]] == [0, 1, 2, 3]

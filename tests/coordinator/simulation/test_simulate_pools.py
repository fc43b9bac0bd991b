"""Data of a simulation and who gets them: pools, partitions, tasks; and plans that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from simulation_harness import run, small_plan, write_idx, write_images

from coordinator.simulation import datasets
from coordinator.simulation import setup as simulation_folder
from coordinator.simulation.plan import Plan
from coordinator.simulation.setup import Prepared
from edge_agent.core.errors import ConfigError, DataError, UnknownName, UsageError


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images.npz", 90)


def prepared_pools(plan):
    return datasets.prepare(plan)


def test_idx_files_are_divided_by_their_own_training_and_test_part(tmp_path):
    plan = Plan(data=(write_idx(tmp_path / "idx"),), partition="fedpac", clients=5, size=50)
    datasets, division, task = prepared_pools(plan)
    assert (len(datasets.train), len(datasets.test)) == (400, 200)
    assert task.encoder == "fedpac_cnn"
    assert (task.input.mean, task.input.std) == ((0.1307,), (0.3081,))
    train, test = datasets.arrays(division.clients["c1"])
    for part in (train, test):  # 10 even, then 40 = 13 + 13 + 14 of classes 2, 3 and 4
        assert np.bincount(part.labels, minlength=10).tolist() == [1, 1, 14, 14, 15, 1, 1, 1, 1, 1]
    white = (1 - 0.1307) / 0.3081
    assert train.inputs.max() == pytest.approx(white, abs=1e-5)


def test_a_named_split_is_divided_alone_and_clients_hold_back_a_part(tmp_path):
    source = write_idx(tmp_path / "idx")
    datasets, division, _ = prepared_pools(Plan(data=(f"{source}?split=all",), clients=4))
    assert (len(datasets.train), datasets.test) == (600, None)
    sizes = {(len(share.train), len(share.test)) for share in division.clients.values()}
    assert all(train + test == 150 and abs(test - 150 / 4) <= 5 for train, test in sizes)
    rows = [row for share in division.clients.values() for row in share.train + share.test]
    assert sorted(rows) == list(range(600))


def test_missing_test_files_are_told(tmp_path):
    source = write_idx(tmp_path / "idx")
    for path in (tmp_path / "idx").glob("t10k*"):
        path.unlink()
    with pytest.raises(DataError, match="no test files"):
        prepared_pools(Plan(data=(source,)))


def test_the_six_styles_of_digits_are_domains(tmp_path):
    datasets, division, task = prepared_pools(Plan(data=("digits?n=12",), partition="domains"))
    assert list(division.clients) == ["inverted", "optdigits", "photo", "rendered", "slanted", "striped"]
    assert len(datasets.train) == 72
    assert task.class_names == tuple("0123456789")
    assert all(len(share.train) + len(share.test) == 12 for share in division.clients.values())


def test_folders_of_images_are_domains_with_the_classes_of_all(tmp_path):
    from PIL import Image

    root = tmp_path / "office"
    for domain, classes in (("Web Cam", "ab"), ("amazon", "bc")):
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 8), (60 * number, 10, 10)).save(root / domain / name / f"{number}.png")
    datasets, division, task = prepared_pools(Plan(data=(f"images:{root}",), partition="domains", encoder="linear"))
    assert list(division.clients) == ["amazon", "web-cam"]
    assert task.class_names == ("a", "b", "c")
    labels = {name: set(datasets.arrays(share)[0].labels.tolist()) for name, share in division.clients.items()}
    assert labels == {"amazon": {1, 2}, "web-cam": {0, 1}}


def recordings(path, people=(3, 7)):
    rng = np.random.default_rng(0)
    arrays = {
        "samples": rng.normal(5, 2, (len(people) * 2 * 400, 6)).astype(np.float32),
        "lengths": np.full(len(people) * 2, 400),
        "label": np.arange(len(people) * 2) % 2,
        "subject": np.repeat(people, 2),
        "label_names": np.array(["rest", "wave"]),
        "sampling_hz": np.array(50),
    }
    np.savez(path, **arrays)
    return f"windows:{path}"


def test_each_person_of_a_recording_is_a_client_and_time_splits_train_from_test(tmp_path):
    """Four recordings of seven windows (400 samples, 100 at a stride of 50): two test, one between is left out."""
    plan = Plan(data=(recordings(tmp_path / "watch.npz"),), partition="subjects", standardise=True)
    datasets, division, task = prepared_pools(plan)
    assert list(division.clients) == ["subject-3", "subject-7"]
    assert task.encoder == "cnn1d"
    assert len(datasets.train) == 28
    for share in division.clients.values():
        assert (len(share.train), len(share.test)) == (8, 4)
        assert max(share.train[:4]) + 1 < min(share.test[:2])
    rows = np.concatenate([share.train for share in division.clients.values()])
    np.testing.assert_allclose(datasets.train.inputs[rows].mean(axis=(0, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(datasets.train.inputs[rows].std(axis=(0, 2)), 1, atol=1e-4)


def test_a_saved_partition_gives_another_seed_the_same_split(tmp_path, images):
    first = run(small_plan(images, partition="dirichlet", alpha=0.5, min_size=5), tmp_path / "one")
    saved = str(tmp_path / "one" / simulation_folder.PARTITION)
    second = run(small_plan(images, partition=saved, clients=None, seed=9), tmp_path / "two")
    assert second["partition_hash"] == first["partition_hash"]
    assert second["partition"] == "dirichlet"
    assert second["encoder_sha256"] != first["encoder_sha256"]
    with pytest.raises(DataError, match="give the data that it was made for"):
        Prepared.of(small_plan("digits:optdigits?n=90", partition=saved, clients=None))


def test_a_saved_fedpac_partition_brings_its_normalisation_and_encoder(tmp_path):
    source = write_idx(tmp_path / "idx")
    _, division, task = prepared_pools(Plan(data=(source,), partition="fedpac", clients=5, size=50))
    division.write(tmp_path / "p.json")
    _, again, same = prepared_pools(Plan(data=(source,), partition=str(tmp_path / "p.json")))
    assert (again, same) == (division, task)


def test_the_seed_decides_who_gets_what(images):
    hashes = [prepared_pools(small_plan(images, seed=seed))[1].sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_input_fields_on_top_of_those_of_the_data(images):
    _, _, task = prepared_pools(small_plan(images, input={"mean": 0.25, "height": 8}))
    assert task.input.mean == (0.25,)
    assert task.input.shape == (1, 8, 4)
    with pytest.raises(ConfigError, match="did you mean 'height'"):
        prepared_pools(small_plan(images, input={"hight": 8}))


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({"partition": "fedpack"}, UnknownName, "unknown partition 'fedpack': did you mean 'fedpac'"),
        ({"method": "fedavgg"}, UnknownName, "did you mean 'fedavg'"),
        ({"data": ("npzz:x",)}, UnknownName, "did you mean 'npz'"),
        ({"data": ("digits:optdigit",)}, UnknownName, "did you mean 'optdigits'"),
        ({"encoder": "linaer"}, UnknownName, "did you mean 'linear'"),
        ({"clients": 0}, ValueError, "greater than or equal to 1"),
        ({"clients": 91}, DataError, "90 samples for 91 clients"),
        ({"partition": "dirichlet"}, ValueError, "needs alpha"),
        ({"alpha": 0.5}, ValueError, "alpha = 0.5 has no effect on partition iid"),
        (
            {"partition": "dirichlet", "alpha": 1e-9, "clients": 4},
            DataError,
            "alpha 1e-09 with 4 clients .*raise --alpha",
        ),
        ({"partition": "domains"}, UsageError, "give --data once for each domain"),
        ({"partition": "subjects"}, UsageError, "expected windows:FILE"),
        ({"partition": "fedpac"}, DataError, "the pool has 3 classes, the rule is made for ten"),
        ({"data": ("digits", "digits:photo")}, ValueError, "are for --partition domains"),
        ({"params": {"lrr": 1}}, ConfigError, "did you mean 'lr'"),
    ],
)
def test_what_cannot_be_is_told_before_a_folder_is_made(images, changes, kind, words):
    with pytest.raises(kind, match=words):
        Prepared.of(small_plan(images, **changes))


def test_a_number_of_clients_that_the_data_contradict_is_refused(tmp_path):
    plan = Plan(data=("digits?n=12",), partition="domains", clients=7)
    with pytest.raises(UsageError, match="--clients 7 with partition domains: the data hold 6 of them"):
        prepared_pools(plan)


def test_pools_of_images_are_bytes_until_a_client_has_its_turn(images, tmp_path):
    datasets, division, task = prepared_pools(small_plan(images))
    assert datasets.train.inputs.dtype == np.uint8
    size = sum(memoryview(piece).nbytes for piece in datasets.content())
    shared = type(datasets).from_memory(memoryview(b"".join(datasets.content())), task)
    assert size < 1.2 * (datasets.train.inputs.nbytes + datasets.train.labels.nbytes) + 1000
    for share in division.clients.values():
        for mine, theirs in zip(datasets.arrays(share), shared.arrays(share), strict=True):
            assert mine.inputs.dtype == np.float32
            np.testing.assert_array_equal(mine.inputs, theirs.inputs)


def test_workers_know_which_windows_are_of_one_recording(tmp_path):
    """So that acc.local of a client is the same on any engine: its folds keep recordings together."""
    plan = Plan(data=(recordings(tmp_path / "watch.npz"),), partition="subjects")
    datasets, division, task = prepared_pools(plan)
    shared = type(datasets).from_memory(memoryview(b"".join(datasets.content())), task)
    for share in division.clients.values():
        for mine, theirs in zip(datasets.rows_of(share), shared.rows_of(share), strict=True):
            assert len(np.unique(mine.groups)) == 2
            np.testing.assert_array_equal(mine.groups, theirs.groups)


def test_sources_of_bytes_and_of_floats_make_one_pool(tmp_path):
    rng = np.random.default_rng(0)
    names = np.array(["a", "b"])
    bytes_ = rng.integers(0, 256, (20, 8, 8, 3)).astype(np.uint8)
    floats = rng.random((20, 8, 8, 3)).astype(np.float32)
    for name, inputs in {"bytes": bytes_, "floats": floats}.items():
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=np.arange(20) % 2, class_names=names)
    sources = tuple(f"npz:{tmp_path}/{name}.npz" for name in ("bytes", "floats"))
    spec = {"mean": (0.0,), "std": (1.0,)}
    datasets, _, _ = prepared_pools(Plan(data=sources, partition="domains", input=spec))
    expected = np.concatenate([bytes_ / 255.0, floats]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(datasets.train.inputs, expected, atol=1e-6)

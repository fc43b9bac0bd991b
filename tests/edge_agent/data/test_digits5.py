from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import io

from edge_agent.core.errors import DataError, UnknownName
from edge_agent.core.installation import install_command
from edge_agent.core.task import ImageInput
from edge_agent.data import check, domains, load
from edge_agent.data.sets import digits5

SPEC = ImageInput(channels=3, height=28, width=28, mean=(0.0,), std=(1.0,))
COUNTS = {"train": 12, "test": 4}
LABELS = {"train": [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2], "test": [0, 9, 5, 0]}


def grey(part: str, side: int) -> np.ndarray:
    """Image number i is 10 i everywhere but in its upper left corner."""
    images = np.repeat(np.arange(COUNTS[part], dtype=np.uint8) * 10, side * side).reshape(-1, side, side)
    images[:, : side // 2, : side // 2] = 200
    return images


def colour(part: str, side: int) -> np.ndarray:
    """As `grey`, in the red channel; green is 40, blue 80."""
    red = grey(part, side)
    return np.stack([red, np.full_like(red, 40), np.full_like(red, 80)], axis=-1)


def one_hot(part: str) -> np.ndarray:
    return np.eye(10)[LABELS[part]]


def column(part: str, *, zero: int = 0) -> np.ndarray:
    return np.array([[zero if label == 0 else label] for label in LABELS[part]], np.uint8)


def five(folder):
    """The five files with the names, shapes and types that the collection of DomainNet's authors has."""
    parts = ("train", "test")
    mnist = {f"{part}_28": grey(part, 28)[..., None] for part in parts}
    mnist |= {f"{part}_32": grey(part, 32) for part in parts} | {f"label_{part}": one_hot(part) for part in parts}
    io.savemat(folder / "mnist_data.mat", mnist, do_compression=True)
    mnistm = {part: colour(part, 28) for part in parts} | {f"label_{part}": one_hot(part) for part in parts}
    io.savemat(folder / "mnistm_with_label.mat", mnistm)
    for part in parts:
        svhn = {"X": np.moveaxis(colour(part, 32), 0, -1), "y": column(part, zero=10)}
        io.savemat(folder / f"svhn_{part}_32x32.mat", svhn, do_compression=True)
    syn = {f"{part}_data": colour(part, 32) for part in parts} | {f"{part}_label": column(part) for part in parts}
    io.savemat(folder / "syn_number.mat", syn)
    cells = np.empty((2, 2), object)
    for row, part in enumerate(parts):
        cells[row] = [(grey(part, 28)[:, None] / 255.0).astype(np.float32), column(part).astype(np.int64)]
    io.savemat(folder / "usps_28x28.mat", {"dataset": cells})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return five(tmp_path_factory.mktemp("digits"))


@pytest.mark.parametrize("domain", digits5.DOMAINS)
@pytest.mark.parametrize("part", COUNTS)
def test_each_set_gives_its_images_and_labels(folder, domain, part):
    samples = load(f"digits5:{folder}?domain={domain}&split={part}", SPEC)
    assert samples.labels.tolist() == LABELS[part]
    assert samples.class_names == tuple("0123456789")
    shown = samples.inputs * 255
    np.testing.assert_allclose(shown[:, 0, 25, 25], np.arange(COUNTS[part]) * 10, atol=0.01)
    np.testing.assert_allclose(shown[:, 0, 2, 2], 200, atol=0.01)
    np.testing.assert_allclose(shown[:, 0, 25, 2], np.arange(COUNTS[part]) * 10, atol=0.01)
    others = [40, 80] if domain in {"mnistm", "svhn", "syn"} else [shown[1, 0, 25, 25]] * 2
    np.testing.assert_allclose(shown[1, 1:, 25, 25], others, atol=0.01)


def test_all_five_at_once_and_a_part_of_each(folder):
    assert len(load(f"digits5:{folder}", SPEC)) == 60
    assert len(load(f"digits5:{folder}?split=all", SPEC)) == 80
    some, again, other = (load(f"digits5:{folder}?n=3&seed={seed}", SPEC) for seed in (0, 0, 1))
    assert len(some) == 15
    assert (some.inputs == again.inputs).all()
    assert (some.inputs != other.inputs).any()
    assert len(load(f"digits5:{folder}?n=3&split=test", SPEC)) == 20
    places = (some.inputs[:, 0, 25, 25] * 255 / 10).round().astype(int)
    assert some.labels.tolist() == [LABELS["train"][place] for place in places]
    assert load(f"digits5:{folder}").input.shape == (3, 28, 28)


def test_each_set_is_a_domain(folder):
    found = domains(f"digits5:{folder}?split=test")
    assert list(found) == list(digits5.DOMAINS)
    assert [len(load(source, SPEC)) for source in found.values()] == [4] * 5
    assert list(domains(f"digits5:{folder}?domain=usps,syn")) == ["usps", "syn"]


def test_svhn_under_the_names_of_its_own_page(tmp_path):
    five(tmp_path)
    for part in COUNTS:
        (tmp_path / f"svhn_{part}_32x32.mat").rename(tmp_path / f"{part}_32x32.mat")
    assert load(f"digits5:{tmp_path}?domain=svhn&split=test", SPEC).labels.tolist() == LABELS["test"]


def test_numpy_archives_are_read_without_scipy(tmp_path):
    arrays = {part: colour(part, 28) for part in COUNTS} | {f"label_{part}": LABELS[part] for part in COUNTS}
    np.savez(tmp_path / "mnistm.npz", **arrays)
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "from edge_agent.data import load\n"
        "from edge_agent.core.errors import MissingCapability\n"
        f"print(load('digits5:{tmp_path}?domain=mnistm').labels.tolist())\n"
        f"open(r'{tmp_path}/usps_28x28.mat', 'wb').close()\n"
        "try:\n"
        f"    load('digits5:{tmp_path}?domain=usps')\n"
        "except MissingCapability as error:\n"
        "    print(error)\n"
        "assert not {'torch', 'sklearn', 'onnxruntime'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    labels, told = done.stdout.splitlines()
    assert labels == str(LABELS["train"])
    assert "reading Digits-Five needs 'scipy'" in told
    assert told.endswith(install_command("heads"))


def test_what_is_missing_is_told(tmp_path, folder):
    (tmp_path / "MNIST").mkdir()
    with pytest.raises(DataError, match=r"no mnist\.npz or mnist_data\.mat.*pickles are not read.*M3SDA.*SVHN"):
        check(f"digits5:{tmp_path}")
    with pytest.raises(UnknownName, match="Digits-Five domain 'mnist-m': did you mean 'mnistm'"):
        check(f"digits5:{folder}?domain=mnist-m")
    check(f"digits5:{folder}?split=all")


def cells(rows: int, columns: int) -> np.ndarray:
    """Cells that all hold the same: an image where labels belong."""
    made = np.empty((rows, columns), object)
    for row in range(rows):
        made[row] = [np.full((1, 1, 28, 28), 0.5)] * columns
    return made


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("syn_number.mat", {"train_data": colour("train", 32)}, "lacks the array train_label"),
        ("syn_number.mat", {"train_data": np.zeros((3, 32, 32, 3)), "train_label": [[1], [2]]}, "for 2 labels"),
        ("syn_number.mat", {"train_data": np.full((1, 32, 32, 3), 300.0), "train_label": [[1]]}, r"pixels 300\.\.300"),
        ("syn_number.mat", {"train_data": np.full((1, 8, 8, 3), np.nan), "train_label": [[1]]}, "not finite"),
        ("syn_number.mat", {"train_data": np.zeros((2, 8, 8, 3)), "train_label": [[1], [11]]}, r"labels 1\.\.11"),
        ("syn_number.mat", {"train_data": np.zeros((2, 8, 8, 3)), "train_label": ["a", "b"]}, "labels of type"),
        ("mnistm_with_label.mat", {"train": np.zeros((2, 8, 8, 3)), "label_train": np.ones((2, 10))}, "single 1"),
        ("usps_28x28.mat", {"dataset": np.zeros((2, 2))}, "cells"),
        ("usps_28x28.mat", {"dataset": cells(1, 2)}, r"cells \(1, 2\)"),
        ("usps_28x28.mat", {"dataset": cells(2, 2)}, "not whole numbers"),
        ("syn_number.mat", {"train_data": np.zeros((1, 8, 8, 3)), "train_label": [[1.5]]}, "not whole numbers"),
    ],
)
def test_arrays_of_another_form_are_refused(tmp_path, file, content, words):
    io.savemat(tmp_path / file, content)
    domain = {"syn_number.mat": "syn", "mnistm_with_label.mat": "mnistm", "usps_28x28.mat": "usps"}[file]
    with pytest.raises(DataError, match=words):
        load(f"digits5:{tmp_path}?domain={domain}", SPEC)


@pytest.mark.parametrize("cut", [0, 1, 100, 140, 0.4, 0.9])
@pytest.mark.parametrize("domain, file", [("syn", "syn_number.mat"), ("svhn", "svhn_train_32x32.mat")])
def test_files_that_were_cut_are_refused(folder, tmp_path, cut, domain, file):
    content = (folder / file).read_bytes()
    (tmp_path / file).write_bytes(content[: int(cut * len(content)) if isinstance(cut, float) else cut])
    with pytest.raises(DataError, match=rf"{file}' (cannot be read|lacks the array).*damaged or was not fetched whole"):
        load(f"digits5:{tmp_path}?domain={domain}", SPEC)


def test_files_that_are_no_matlab_files_or_promise_too_much_are_refused(tmp_path, folder, monkeypatch):
    path = tmp_path / "syn_number.mat"
    for content in (b"x" * 1000, b"\x89HDF\r\n\x1a\n" + bytes(600), b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            load(f"digits5:{tmp_path}?domain=syn", SPEC)
    monkeypatch.setattr(digits5, "MAX_BYTES", 30_000)
    with pytest.raises(DataError, match=r"syn_number\.mat' has \d+ bytes, expected at most 30000"):
        load(f"digits5:{folder}?domain=syn", SPEC)
    with pytest.raises(DataError, match=r"declares 36864 numbers for 'X', expected at most 30000"):
        load(f"digits5:{folder}?domain=svhn", SPEC)

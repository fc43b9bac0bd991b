"""Tables whose data are not here, on small made data: their rows run, and their settings reach the runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordinator.research.footing import footing_of
from coordinator.research.reproduce.cells import Reproduction, read_table


@pytest.fixture
def call(call, tmp_path, monkeypatch):
    """``headwater reproduce`` for one round in an empty folder."""
    monkeypatch.chdir(tmp_path)
    words = ("--rounds", "1", "--seeds", "0", "--engine", "serial", "--device", "cpu")
    return lambda name, *more: call(name, *words, *more)


def write_images(path, count, side, channels):
    """Images of noise with ten labels, one after another."""
    shape = (count, side, side, channels) if channels > 1 else (count, side, side)
    inputs = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    labels = np.arange(count) % 10
    np.savez(path, inputs=inputs, labels=labels, class_names=np.array([*"0123456789"]))


def cells_of(out):
    return {cell["row"]: cell for cell in json.loads(out)["cells"]}


def test_the_ablations_of_fedrir_are_four_methods():
    name = "fedrir-t5-cifar10"
    cells = Reproduction(name, read_table(name), Path("nowhere"), {"data": ("digits",)}).cells()
    parts = {cell.row.name: footing_of(cell.plan)["parts of the model"] for cell in cells}
    assert parts == {
        "FedRIR": "encoder, head, specific, generator, distiller",
        "FedRIR, r = 0": "encoder, head, specific, generator, distiller",
        "FedRIR without MCSL": "encoder, head",
        "FedRIR without ID": "encoder, head, specific, generator",
    }


def test_an_ablation_of_fedrir_runs_on_the_authors_split(call, tmp_path):
    write_images(tmp_path / "i.npz", 400, 32, 3)
    code, out, err = call("fedrir-t5-cifar10", "--row", "FedRIR without MCSL", "--data", "npz:i.npz", "--json")
    assert code == 0, err
    assert cells_of(out)["FedRIR without MCSL"]["ours"] is not None
    (folder,) = (tmp_path / "reproduce-fedrir-t5-cifar10").glob("*--seed0")
    partition = json.loads((folder / "partition.json").read_text())
    assert partition["rule"] == "fedrir_dirichlet"
    sizes = [(len(share["train"]), len(share["test"])) for share in partition["clients"].values()]
    assert all(train == int(0.75 * (train + test)) for train, test in sizes)


def test_the_last_round_of_a_hundred_clients_has_all_of_them():
    """`full_last_round` is tested with the simulation; here it is that the tables ask for it."""
    for name in ("fedpac-t1-fmnist-100", "fedpac-t1-cifar10-100"):
        cells = Reproduction(name, read_table(name), Path("nowhere"), {"data": ("digits",)}).cells()
        assert all(cell.plan.full_last_round and cell.plan.fraction == 0.3 for cell in cells)


def test_icons_of_themes_are_checked_theme_by_theme(call, tmp_path):
    for theme in ("One", "Two"):
        for name in ("copy", "cut"):
            for side in range(4):
                path = tmp_path / "icons" / theme / name / f"{side}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (40 * side, 0, 0)).save(path)
    code, out, err = call("fedpick-t2-icons", "--row", "FedPick", "--data", "images:icons", "--json")
    assert code == 0, err
    assert cells_of(out)["FedPick"]["footing"]["partition"] == "domains"
    code, _, err = call("fedpick-t2-icons", "--row", "FedAvg", "--data", "images:nowhere")
    assert code == 2
    assert "icons/README.md names the packages" in err


def test_new_clients_are_compared_by_the_head_that_they_fit(call, tmp_path):
    write_images(tmp_path / "i.npz", 800, 28, 1)
    words = ("--column", "random weights, the same network", "--row", "Head on the encoder as it came")
    code, out, err = call("repper-f6-fmnist", *words, "--data", "npz:i.npz", "--json")
    assert code == 0, err
    (cell,) = cells_of(out).values()
    folder = tmp_path / "reproduce-repper-f6-fmnist"
    result = json.loads(next(folder.glob("*/result.json")).read_text())
    assert cell["ours"] == pytest.approx(100 * result["last"]["acc"]["new"]["clients_mean"], abs=1e-3)
    assert cell["footing"]["metric"] == "head of a client that joined after training, mean over clients"


@pytest.mark.parametrize("name", ["dualfed-t1-digits", "dualfed-t1-icons", "fedpick-t2-icons", "fedpick-t2-styles"])
def test_digits_and_icons_are_not_mirrored(name):
    """A mirrored 2 is another sign, and a mirrored icon of "next" is that of "previous"."""
    cells = Reproduction(name, read_table(name), Path("nowhere"), {"data": ("digits",)}).cells()
    assert {cell.plan.augment for cell in cells} == {None}
    assert not any(cell.plan.params.get("augment", False) for cell in cells)


@pytest.mark.parametrize("name", ["fedpick-t2-office", "fedpick-t2-domainnet", "dualfed-t1-pacs"])
def test_photographs_and_drawings_are_flipped_and_turned_as_in_the_papers(name):
    cells = Reproduction(name, read_table(name), Path("nowhere"), {"data": ("digits",)}).cells()
    assert {cell.plan.augment for cell in cells} == {"flip_turn"}


@pytest.mark.parametrize("name", ["dualfed-t1-digits", "dualfed-t1-icons"])
def test_rows_of_dualfeds_table_take_steps_of_one_size_but_for_spherefed(name):
    """SphereFed's is ten times the others', as in the paper."""
    cells = Reproduction(name, read_table(name), Path("nowhere"), {"data": ("digits",)}).cells()
    sizes = {cell.row.name: cell.plan.params["lr"] for cell in cells}
    largest = sizes.pop("SphereFed")
    assert set(sizes.values()) == {0.1}
    assert largest == pytest.approx(10 * 0.1)

"""Objects of torch as the data of a simulation: loaders of batches, data sets of pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from coordinator.simulation.own_data import save_clients, save_pool
from edge_agent import data
from edge_agent.core.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 3, 6, 5), dtype=np.uint8)
LABELS = np.array([0, 1, 0, 1, 1, 0, 1])


def tensors():
    return TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(LABELS))


def read_back(samples, folder: Path):
    return data.load(save_pool(samples, folder).source, compact=True)


def test_batches_are_the_samples_in_their_order(tmp_path):
    loaded = read_back(DataLoader(tensors(), batch_size=3), tmp_path)
    assert np.array_equal(loaded.inputs, PIXELS)
    assert np.array_equal(loaded.labels, LABELS)


class Rows(Dataset):
    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return {"img": torch.from_numpy(PIXELS[index]).float() / 255, "label": int(LABELS[index])}


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(PIXELS, LABELS.tolist(), strict=True)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(lambda: DataLoader(Rows(), batch_size=4), id="batches of rows"),
        pytest.param(lambda: DataLoader(Stream(), batch_size=2), id="a stream without a length"),
        pytest.param(lambda: DataLoader(Subset(tensors(), range(7)), batch_size=7), id="a part of a set"),
        pytest.param(lambda: Subset(tensors(), range(7)), id="no loader"),
    ],
)
def test_other_forms_give_the_same_samples(samples, tmp_path):
    loaded = read_back(samples(), tmp_path)
    assert np.array_equal(loaded.labels, LABELS)
    spec = loaded.input.model_copy(update={"mean": (0.0,), "std": (1.0,)})
    source = save_pool(samples(), tmp_path / "again").source
    assert np.allclose(data.load(source, spec).inputs * 255, PIXELS, atol=1e-3)


def test_a_mapping_of_loaders_is_one_of_clients(tmp_path):
    loaders = {name: DataLoader(tensors(), batch_size=2) for name in ("ann", "bob")}
    assert len(data.load(save_clients(loaders, tmp_path, test_fraction=0.3, seed=0).source)) == 14


def test_an_order_that_changes_is_a_warning(tmp_path, caplog):
    read_back(DataLoader(tensors(), batch_size=3, shuffle=True), tmp_path)
    assert "loader_shuffles" in caplog.text


class Broken(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Uneven(Rows):
    def __getitem__(self, index):
        size = 6 if index < 4 else 5
        return torch.zeros(3, size, 5), 0


@pytest.mark.parametrize(
    "samples, message",
    [
        (Broken(), r"data, batch 2: OSError: the disk is gone"),
        (Uneven(), r"data, batch 2, X: .*\(2, 3, 5, 5\).*batch 0 has"),
        (TensorDataset(torch.from_numpy(PIXELS)), r"data, batch 0: list of 1, expected \(x, y\)"),
        (TensorDataset(torch.from_numpy(PIXELS), torch.rand(7)), r"data, batch 0, y: float32"),
        (TensorDataset(torch.zeros(0, 3, 6, 5), torch.zeros(0)), "the loader gives no batches"),
    ],
)
def test_what_is_wrong_is_named_with_its_batch(samples, message, tmp_path):
    with pytest.raises(DataError, match=message):
        save_pool(DataLoader(samples, batch_size=2), tmp_path)


def test_a_set_of_torchvision_is_one_of_pairs(tmp_path):
    from edge_agent.models import import_torchvision

    import_torchvision()
    from torchvision.datasets import FakeData

    made = FakeData(size=4, image_size=(3, 6, 5), num_classes=3)
    loaded = read_back(made, tmp_path)
    assert np.array_equal(loaded.inputs, np.stack([np.asarray(image).transpose(2, 0, 1) for image, _ in made]))

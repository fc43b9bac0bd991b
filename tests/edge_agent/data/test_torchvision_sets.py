"""Sets of torchvision, read by its own classes from files that are made here in their layout."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from edge_agent.core.errors import ConfigError, DataError, UnknownName
from edge_agent.data import check, load, location, torchvision_sets
from edge_agent.data.partition import parts_of, read_pools


def save_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(head + array.tobytes())


@pytest.fixture
def mnist(tmp_path):
    rng = np.random.default_rng(0)
    made = {}
    for part, stem, count in (("train", "train", 12), ("test", "t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) * 3 % 10).astype(np.uint8)
        save_idx(tmp_path / "MNIST" / "raw" / f"{stem}-images-idx3-ubyte", images)
        save_idx(tmp_path / "MNIST" / "raw" / f"{stem}-labels-idx1-ubyte", labels)
        made[part] = (images, labels)
    return tmp_path, made


def test_a_set_has_both_parts_its_pixels_and_the_names_of_its_classes(mnist):
    root, made = mnist
    pools = read_pools(f"torchvision:MNIST?root={root}")
    for part, name in ((pools.train, "train"), (pools.test, "test")):
        assert np.array_equal(part.inputs[:, 0], made[name][0])
        assert np.array_equal(part.labels, made[name][1])
    assert pools.train.class_names[3] == "3 - three"
    assert len(load(f"torchvision:MNIST?root={root}&split=all")) == 17
    check(f"torchvision:MNIST?root={root}")
    by_files = load(f"idx:{root / 'MNIST' / 'raw'}", compact=True)
    assert np.array_equal(by_files.inputs, pools.train.inputs), "the project's own reader"


def test_the_root_counts_from_the_folder_of_the_configuration(mnist, tmp_path_factory, monkeypatch):
    root, _ = mnist
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    source = f"torchvision:MNIST?root={root.name}&n=4"
    assert len(load(source, folder=root.parent)) == 4
    assert location(source)[1] == "MNIST"
    with pytest.raises(DataError, match=r"part train in '.*' cannot be read: .*nothing is downloaded here"):
        load(source)


def test_a_set_of_one_part_reads_the_labels_from_its_samples(tmp_path):
    for number, name in enumerate(["AnnualCrop", "Forest"]):
        folder = tmp_path / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for count in range(2 + number):
            Image.new("RGB", (8, 8), (50 * number, count, 0)).save(folder / f"{name}_{count}.png")
    source = f"torchvision:EuroSAT?root={tmp_path}"
    assert parts_of(source) is None
    found = load(source, compact=True)
    assert found.class_names == ("AnnualCrop", "Forest")
    assert found.labels.tolist() == [0, 0, 1, 1, 1]
    assert found.inputs[:, 0, 0, 0].tolist() == [0, 0, 50, 50, 50]
    with pytest.raises(DataError, match="has one part alone"):
        load(f"{source}&split=test")


def test_names_and_options_are_checked_and_the_nearest_is_named(mnist):
    root, _ = mnist
    with pytest.raises(UnknownName, match="did you mean 'FashionMNIST'"):
        load(f"torchvision:FashonMNIST?root={root}")
    with pytest.raises(UnknownName, match="unknown set of torchvision 'os'"):
        load("torchvision:os")
    with pytest.raises(ConfigError, match="did you mean 'root'"):
        load(f"torchvision:MNIST?rot={root}")
    with pytest.raises(DataError, match="no part 'valid', expected train, test or all"):
        load(f"torchvision:MNIST?root={root}&split=valid")
    for name in ("CIFAR10", "SVHN", "STL10", "GTSRB"):
        with pytest.raises(DataError, match=rf"torchvision:{name}: part train .*datasets\.{name}.*download=True"):
            load(f"torchvision:{name}?root={root}")


def test_images_without_a_class_are_not_a_class_of_their_own(mnist, monkeypatch):
    """STL10 has the label -1 for them."""
    root, _ = mnist
    torchvision = torchvision_sets._datasets()
    read = torchvision.MNIST._load_data

    def without_some(self):
        images, labels = read(self)
        labels[:2] = -1
        return images, labels

    monkeypatch.setattr(torchvision.MNIST, "_load_data", without_some)
    with pytest.raises(DataError, match=r"torchvision:MNIST: 2 of 12 images have no class .*choose another part"):
        load(f"torchvision:MNIST?root={root}")


def test_damaged_files_say_so(mnist):
    root, _ = mnist
    path = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="torchvision:MNIST: part train"):
        load(f"torchvision:MNIST?root={root}")


def test_torch_is_loaded_only_once_such_a_set_is_read():
    code = (
        "import sys; from edge_agent import data; "
        "kinds = [data.source_kind(name) for name in data.registry.names() if name != 'video']; "
        "print('torch' in sys.modules, 'torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]

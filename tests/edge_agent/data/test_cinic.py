from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from edge_agent.core.errors import ConfigError, DataError
from edge_agent.data import check, load
from edge_agent.data.sets import cinic


@pytest.fixture
def folder(tmp_path):
    """Two images of each class in each part, one of them grey; red or grey tells the class."""
    for place, part in enumerate(cinic.PARTS):
        for label, name in enumerate(cinic.CLASSES):
            where = tmp_path / "CINIC-10" / part / name
            where.mkdir(parents=True)
            Image.new("RGB", (32, 32), (20 * label, place, 0)).save(where / f"cifar10-{part}-{label}.png")
            Image.new("L", (32, 32), 20 * label).save(where / f"n0{label}_{label}.png")
    return tmp_path


@pytest.mark.parametrize("split, count", [("train", 20), ("valid", 20), ("test", 20), ("all", 60)])
def test_each_part_is_read_with_its_classes(folder, split, count):
    samples = load(f"cinic:{folder}?split={split}")
    assert samples.class_names == cinic.CLASSES
    assert samples.input.shape == (3, 32, 32)
    assert np.bincount(samples.labels).tolist() == [count // 10] * 10
    np.testing.assert_allclose((samples.inputs[:, 0, 5, 5] * 0.5 + 0.5) * 255, 20 * samples.labels, atol=1e-3)
    parts = {name.split("/")[0] for name in samples.names}
    assert parts == (set(cinic.PARTS) if split == "all" else {split})


def test_a_random_part_keeps_labels_with_images(folder):
    samples = load(f"cinic:{folder / 'CINIC-10'}?n=9&seed=2")
    assert len(samples) == 9
    assert [name.split("/")[1] for name in samples.names] == [cinic.CLASSES[label] for label in samples.labels]
    assert load(f"cinic:{folder}?n=9&seed=3").names != samples.names


def test_what_is_missing_or_unknown_is_told(folder, tmp_path):
    with pytest.raises(DataError, match=r"there is no 'train'.*datashare\.ed\.ac\.uk.*CC BY 4\.0"):
        check(f"cinic:{tmp_path / 'CINIC-10' / 'test'}")
    with pytest.raises(ConfigError, match="split"):
        check(f"cinic:{folder}?split=validation")
    (folder / "CINIC-10" / "valid" / "cat").rename(folder / "CINIC-10" / "valid" / "catt")
    with pytest.raises(DataError, match=r"'catt' is none of its classes \(did you mean 'cat'\?\)"):
        check(f"cinic:{folder}?split=valid")
    for path in (folder / "CINIC-10" / "test" / "frog").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no pictures of frog"):
        check(f"cinic:{folder}?split=test")
    check(f"cinic:{folder}")


def test_a_picture_that_was_cut_is_named(folder):
    path = folder / "CINIC-10" / "test" / "dog" / "n05_5.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"1 of 20 images.*\n.*test/dog/n05_5\.png"):
        load(f"cinic:{folder}?split=test")

"""Images held as the bytes that they are: a quarter of the memory, and the same inputs when somebody needs them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.core.task import ImageInput
from edge_agent.data import load, standardised
from edge_agent.data.partition import Share, read_pools

SPEC = ImageInput(channels=3, height=9, width=7, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def _file(path, inputs):
    np.savez(path, inputs=inputs, labels=np.arange(len(inputs)) % 2, class_names=np.array(["a", "b"]))
    return f"npz:{path}"


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(3)
    return _file(tmp_path / "photos.npz", rng.integers(0, 256, (40, 12, 10, 3)).astype(np.uint8))


def test_compact_images_are_bytes_that_become_the_same_inputs_bit_for_bit(photos):
    plain = load(photos, SPEC)
    compact = load(photos, SPEC, compact=True)
    assert (plain.inputs.dtype, compact.inputs.dtype) == (np.float32, np.uint8)
    assert compact.inputs.nbytes * 4 == plain.inputs.nbytes
    np.testing.assert_array_equal(compact.ready().inputs.view(np.uint32), plain.inputs.view(np.uint32))
    assert plain.ready() is plain
    rows = np.array([5, 3, 3])
    np.testing.assert_array_equal(compact.take(rows).ready().inputs, plain.inputs[rows])


def test_what_is_finer_than_bytes_stays_as_fine(tmp_path):
    floats = np.random.default_rng(0).random((6, 9, 7, 3)).astype(np.float32)
    source = _file(tmp_path / "floats.npz", floats)
    np.testing.assert_array_equal(load(source, SPEC, compact=True).inputs, load(source, SPEC).inputs)


def test_windows_are_as_they_were(tmp_path):
    samples = np.random.default_rng(0).normal(size=(600, 2)).astype(np.float32)
    np.savez(tmp_path / "w.npz", samples=samples, lengths=np.array([300, 300]), label=np.array([0, 1]))
    source = f"windows:{tmp_path / 'w.npz'}"
    np.testing.assert_array_equal(load(source, compact=True).inputs, load(source).inputs)


def test_a_client_gets_inputs_out_of_compact_pools(photos):
    pools = read_pools(photos, SPEC)
    plain = load(photos, SPEC)
    assert pools.train.inputs.dtype == np.uint8
    train, test = pools.rows_of(Share(train=(0, 7), test=(2,)))
    np.testing.assert_array_equal(train.inputs, plain.inputs[[0, 7]])
    np.testing.assert_array_equal(test.inputs, plain.inputs[[2]])


def test_mean_and_spread_are_those_of_the_pixels_compact_or_not(photos):
    pixels = load(photos, SPEC, compact=True).inputs / 255.0
    for samples in (load(photos, SPEC), load(photos, SPEC, compact=True)):
        found = standardised(samples)
        np.testing.assert_allclose(found.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(found.std, pixels.std(axis=(0, 2, 3)), rtol=1e-5)

"""Arrays on disk have the values of those in memory, and take no memory where nobody looks at them."""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coordinator.processes.pipe import SharedBuffer
from edge_agent import data
from edge_agent.core import large_arrays
from edge_agent.core.errors import DataError
from edge_agent.core.large_arrays import is_mapped, map_array, new_array, release
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import idx, npz

PIXELS = np.random.default_rng(0).integers(0, 256, (600, 3, 9, 8), dtype=np.uint8)
LABELS = np.arange(600) % 3


@pytest.fixture
def small_is_large(monkeypatch):
    """Everything from one byte on is kept on disk."""
    for module in (large_arrays, npz, idx):
        monkeypatch.setattr(module, "LARGE_BYTES", 1)


def loaded(source, **options):
    samples = data.load(source, **options)
    return samples, is_mapped(samples.inputs)


def test_a_mapped_array_begins_at_any_byte(tmp_path):
    values = np.arange(5000, dtype=np.int32)
    (tmp_path / "a").write_bytes(b"x" * 4099 + values.tobytes())
    with (tmp_path / "a").open("rb") as file:
        array = map_array(file, values.dtype, (50, 100), 4099)
    assert np.array_equal(array, values.reshape(50, 100))
    assert not array.flags.writeable
    assert is_mapped(array[3:])
    assert not is_mapped(array[[3]]), "chosen rows are copies in memory"


def test_what_was_written_stays_when_it_is_released(small_is_large):
    array = new_array((300, 100), np.float32)
    assert is_mapped(array)
    array[:] = 7
    release(array)
    release(memoryview(array))
    assert (array == 7).all()
    release(np.zeros(3))


def test_a_full_disk_leaves_the_array_in_memory(small_is_large, monkeypatch, caplog):
    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(large_arrays, "reserve", refuse)
    array = new_array((4, 4), np.uint8)
    assert not is_mapped(array)
    assert "not_on_disk" in caplog.text
    assert "TMPDIR" in caplog.text


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("size", [(9, 8), (5, 6)], ids=["as they are", "resized"])
def test_images_on_disk_have_the_bits_of_those_in_memory(tmp_path, request, compact, size):
    np.savez(tmp_path / "a.npz", inputs=PIXELS, labels=LABELS)
    spec = ImageInput(channels=3, height=size[0], width=size[1])
    source = f"npz:{tmp_path / 'a.npz'}"
    expected, was_mapped = loaded(source, input=spec, compact=compact)
    assert not was_mapped
    request.getfixturevalue("small_is_large")
    found, now_mapped = loaded(source, input=spec, compact=compact)
    assert now_mapped
    assert found.inputs.dtype == expected.inputs.dtype
    assert np.array_equal(found.inputs, expected.inputs)
    rows = np.array([599, 0, 255, 256])
    assert np.array_equal(found.take(rows).ready().inputs, expected.take(rows).ready().inputs)


def test_windows_on_disk_have_the_bits_of_those_in_memory(tmp_path, request):
    values = np.random.default_rng(0).normal(size=(600, 3, 8))
    values[7, 0, 0] = np.nan
    np.savez(tmp_path / "a.npz", inputs=values, labels=LABELS)
    spec = WindowInput(channels=3, length=8, mean=(0.5,), std=(2.0,))
    source = f"npz:{tmp_path / 'a.npz'}?kind=window"
    expected, _ = loaded(source, input=spec, strict=False)
    request.getfixturevalue("small_is_large")
    found, is_on_disk = loaded(source, input=spec, strict=False)
    assert is_on_disk
    assert np.array_equal(found.inputs, expected.inputs)
    assert len(found) == 599
    assert np.array_equal(found.inputs, ((np.delete(values, 7, axis=0).astype(np.float32) - 0.5) / 2))


def test_finer_images_among_others_are_kept(small_is_large):
    """One image of floats among those of 8 bits makes all of them floats."""
    images = [*PIXELS[:300], PIXELS[300].astype(np.float32) / 255]
    spec = ImageInput(channels=3, height=9, width=8, mean=(0.0,), std=(1.0,))
    raw = data.Raw("image", images, np.zeros(301, np.int64), ("a",))
    samples = data._samples(raw, spec, None, "X", compact=True)
    assert samples.inputs.dtype == np.float32
    assert np.allclose(samples.inputs * 255, PIXELS[:301], atol=1e-3)


def test_a_damaged_archive_is_refused_although_it_is_mapped(tmp_path, small_is_large):
    path = tmp_path / "a.npz"
    np.savez(path, inputs=PIXELS, labels=LABELS)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="array 'inputs' is damaged: its checksum differs"):
        data.load(f"npz:{path}")
    np.savez(path, inputs=np.asfortranarray(PIXELS), labels=LABELS)
    assert np.array_equal(data.load(f"npz:{path}", compact=True).inputs, PIXELS)
    whole = io.BytesIO()
    np.lib.format.write_array(whole, PIXELS)
    for content in (whole.getvalue()[:-1], whole.getvalue()[:100], b"no array"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("labels.npy", b"")
            archive.writestr("inputs.npy", content)
        with pytest.raises(DataError, match=r"promises|cannot be read"):
            data.load(f"npz:{path}")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", b"no array")
    with pytest.raises(DataError, match="cannot be read"):
        data.load(f"npz:{path}")


def test_idx_files_are_mapped_where_they_hold_what_they_declare(tmp_path, small_is_large):
    images = PIXELS[:, 0]
    for stem, array in (("train-images-idx3", images), ("train-labels-idx1", LABELS.astype(np.uint8))):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        (tmp_path / f"{stem}-ubyte").write_bytes(head + array.tobytes())
    found, is_on_disk = loaded(f"idx:{tmp_path}", compact=True)
    assert is_on_disk, "and not copied"
    assert np.array_equal(found.inputs[:, 0], images)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="declares"):
        data.load(f"idx:{tmp_path}")


def test_processes_share_large_inputs_by_a_file(small_is_large):
    array = new_array((300, 100), np.float32)
    array[:] = np.arange(100)
    buffer = SharedBuffer.of(b"ab", memoryview(array).cast("B"), on_disk=True)
    content = buffer.map()
    assert bytes(content[:2]) == b"ab"
    assert bytes(content[2:]) == array.tobytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's own figures")
def test_going_through_a_mapped_array_holds_a_small_part_of_it():
    def held_mb():
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("RssFile")).split()[1]) >> 10

    def total(array):
        return int(array[:: mmap.PAGESIZE].sum())

    size = large_arrays.LARGE_BYTES
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:
        file.truncate(size)
        array = map_array(file, np.dtype(np.uint8), (size,), 0)
    before = held_mb()
    assert total(array) == 0
    touched = held_mb() - before
    release(array)
    assert touched > 100, "of 128"
    assert held_mb() - before < 10

"""Files that would take far more memory than they have bytes, and files that have no end."""

from __future__ import annotations

import gzip
import io
import os
import re
import threading
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from PIL import Image, ImageFile

from edge_agent.bundle import archive as archive_module
from edge_agent.bundle import unpacked
from edge_agent.core.config import AgentConfig, load
from edge_agent.core.errors import DataError, HeadwaterError
from edge_agent.core.task import ImageInput
from edge_agent.data import expansion
from edge_agent.data import load as load_data
from edge_agent.data._sound_files import read_header
from edge_agent.data.images import decode_image
from edge_agent.data.npz import NpzOptions, load_array, load_arrays
from edge_agent.data.npz import read as read_npz
from edge_agent.data.preprocess import image_pixels
from edge_agent.data.tables import CsvOptions
from edge_agent.data.tables import read as read_csv
from edge_agent.heads import saved

LIMIT_S = 60.0
"""No function here waits for anything; one that does is stuck."""

EXPANDED_BYTES = 200 << 20


def peak_bytes(function, *arguments):
    """The most memory that Python and NumPy take while a function refuses, and what it says."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as refused:
            function(*arguments)
        return tracemalloc.get_traced_memory()[1], str(refused.value)
    finally:
        tracemalloc.stop()


def test_archive_of_zeros_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, inputs=np.zeros((EXPANDED_BYTES // 64, 8, 8), np.uint8), labels=np.zeros(1, np.int64))
    assert path.stat().st_size < EXPANDED_BYTES // 500
    peak, message = peak_bytes(read_npz, str(path), NpzOptions())
    assert peak < 4 << 20
    assert re.search(r"has 0\.\d MB and would expand to 210 MB; expected at most 34 MB.*numpy\.savez", message)


def test_array_that_promises_more_than_it_has_is_refused(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    path = tmp_path / "lies.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", head.getvalue() + bytes(64))
    peak, message = peak_bytes(load_arrays, path)
    assert peak < 4 << 20
    assert "promises 4398046511104 bytes and has" in message


def test_table_of_zeros_is_refused_while_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "SMALL_BYTES", 1 << 18)
    path = tmp_path / "zeros.csv.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"x,y\n" + b"0,0\n" * (1 << 20))
    assert path.stat().st_size < 10_000
    # Of the 262 kB that are read, each cell of two characters is a number of 8 bytes, and each row has its line.
    peak, message = peak_bytes(read_csv, str(path), CsvOptions())
    assert peak < 4 << 20, "the whole table takes 25 MB"
    assert re.search(r"expands to more than 0.3 MB.*unpack it first \(gunzip\)", message)


def test_what_honest_data_expand_to_is_read(tmp_path):
    images = np.random.default_rng(0).integers(0, 2, (4000, 16, 16)).astype(np.uint8)
    np.savez_compressed(tmp_path / "data.npz", inputs=images, labels=np.arange(4000) % 3)
    assert len(read_npz(str(tmp_path / "data.npz"), NpzOptions()).items) == 4000
    with gzip.open(tmp_path / "data.csv.gz", "wt") as file:
        file.write("x,y\n" + "".join(f"{row},{row * 2}\n" for row in range(20_000)))
    assert len(read_csv(str(tmp_path / "data.csv.gz"), CsvOptions()).items) == 1


def test_free_memory_bounds_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "available_bytes", lambda: 4 << 20)
    np.savez(tmp_path / "data.npz", inputs=np.zeros((2 << 20, 1), np.uint8), labels=np.zeros(1, np.int64))
    with pytest.raises(DataError, match="expected at most 1 MB, for its size and the free memory here"):
        load_arrays(tmp_path / "data.npz")


def read_configuration(path):
    return load(AgentConfig, path)


def read_head(path):
    return saved.load(path.parent)


def read_images(path):
    return load_data(f"images:{path.parent}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has none")
@pytest.mark.parametrize(
    "name, read",
    [
        ("b.hwb", archive_module.open_bundle),
        ("manifest.json", lambda path: unpacked.open_folder(path.parent)),
        ("head.json", read_head),
        ("agent.toml", read_configuration),
        ("data.npz", load_arrays),
        ("data.npy", load_array),
        ("data.csv", lambda path: read_csv(str(path), CsvOptions())),
        ("data.csv.gz", lambda path: read_csv(str(path), CsvOptions())),
        ("sound.wav", read_header),
        ("photo.png", read_images),
    ],
)
def test_file_without_an_end_is_refused_and_not_waited_for(tmp_path, name, read):
    path = tmp_path / "folder" / name
    path.parent.mkdir()
    os.mkfifo(path)
    outcome = []

    def try_it():
        try:
            outcome.append(read(path))
        except HeadwaterError as error:
            outcome.append(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcome, f"it waits for {name}"
    assert isinstance(outcome[0], HeadwaterError)


def test_archive_of_very_many_arrays_is_refused_at_once_and_briefly(tmp_path):
    path = tmp_path / "many.npz"
    empty = io.BytesIO()
    np.save(empty, np.zeros(0, np.uint8))
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(1001):
            archive.writestr(f"a{number}.npy", empty.getvalue())
    with pytest.raises(DataError, match=r"has 1001 arrays, expected at most 1000") as refused:
        load_arrays(path)
    assert len(str(refused.value)) < 500


def test_no_row_of_a_table_is_read_before_its_whole_length_is_known(tmp_path, monkeypatch):
    path = tmp_path / "zeros.csv.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"label,a\n")
        for _ in range(EXPANDED_BYTES >> 20):
            file.write(b"x,0\n" * (1 << 18))
    monkeypatch.setattr("edge_agent.data.tables._lines", lambda _: pytest.fail("a line was read"))
    with pytest.raises(DataError, match="expands to more than"):
        read_csv(str(path), CsvOptions(label="label"))


def test_a_table_with_too_many_columns_is_refused(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join("abcdefgh"[number % 8] for number in range((1 << 16) + 1)) + "\n")
    with pytest.raises(DataError, match="65537 columns, expected at most 65536"):
        read_csv(str(path), CsvOptions())


# --- images -----------------------------------------------------------------------------------------------------------


def test_no_program_is_started_to_read_an_image(tmp_path, monkeypatch):
    """Pillow gives EPS to Ghostscript, whatever the file is called."""
    started = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match="its form is not known; save it as JPEG or PNG"):
        decode_image(io.BytesIO(eps))
    assert not started.exists()


def test_an_image_that_memory_is_too_small_for_is_refused_before_it_is_decoded(monkeypatch):
    raw = io.BytesIO()
    Image.new("L", (4000, 4000)).save(raw, "PNG")
    monkeypatch.setattr("edge_agent.data.images.memory_budget_bytes", lambda: 40_000_000)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(
        DataError, match="16 million pixels, and the free memory here is enough for 10; make it smaller"
    ):
        decode_image(raw)


def test_the_limit_of_pixels_holds_where_another_thread_has_changed_the_filter_of_warnings(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr("warnings.simplefilter", lambda *_: warnings.filterwarnings("ignore"))
    raw = io.BytesIO()
    Image.new("L", (11, 11)).save(raw, "PNG")
    with pytest.raises(DataError, match="is too large to be decoded"):
        decode_image(raw)


@pytest.mark.parametrize("shape", [(1, 40_000), (40_000, 1, 3)])
def test_an_array_as_an_image_has_no_side_whose_weights_fill_the_memory(shape):
    """A body of 16 MB holds 4 million floats in one row; resizing it would need 7 GB of weights."""
    peak, message = peak_bytes(image_pixels, np.zeros(shape, np.float32), ImageInput(height=224, width=224))
    assert peak < 1 << 20
    assert "expected sides of at most 32768 pixels" in message


def taken_bytes(function, *arguments):
    """The most memory that Python and NumPy take for a function, and what is left of it afterwards."""
    tracemalloc.start()
    try:
        function(*arguments)
        left, peak = tracemalloc.get_traced_memory()
        return peak, left
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_pictures_become_grey_with_little_more_memory_than_they_have(mode):
    pixels = Image.new(mode, (1500, 2000))
    peak, _ = taken_bytes(image_pixels, pixels, ImageInput(channels=1, height=8, width=8))
    assert peak < 40_000_000  # 3 million pixels, as float64 of three colours 72 MB and more


def test_weights_of_odd_sizes_are_not_kept():
    spec = ImageInput(channels=1, height=8, width=256)

    def resize_several():
        for width in range(10_000, 10_003):
            image_pixels(np.zeros((8, width), np.float32), spec)

    assert taken_bytes(resize_several)[1] < 4_000_000

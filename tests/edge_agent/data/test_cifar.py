from __future__ import annotations

import contextlib
import os
import pickle
import struct
import warnings

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, DataError
from edge_agent.data import check, load
from edge_agent.data.sets import cifar
from edge_agent.data.sets.cifar import parse

FINE = ("apple", "bear", "boy", "clock")
COARSE = ("fruit", "people")
SMALL = {"cifar-10": {"train": 3, "test": 2}, "cifar-100": {"train": 7, "test": 4}}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cifar, "IMAGES", SMALL)


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def ten_binary(folder):
    """A label byte, then 1024 red, 1024 green, 1024 blue, row by row; five training files and one for testing."""
    folder.mkdir(parents=True)
    for number in range(1, 6):
        images = pixels(3, number)
        records = [bytes([(number + row) % 4]) + images[row].tobytes() for row in range(3)]
        (folder / f"data_batch_{number}.bin").write_bytes(b"".join(records))
    images = pixels(2, 9)
    (folder / "test_batch.bin").write_bytes(b"\x03" + images[0].tobytes() + b"\x00" + images[1].tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(FINE) + "\n\n")
    return folder


def hundred_binary(folder):
    """Two label bytes, the coarse one first."""
    folder.mkdir(parents=True)
    for name, count in (("train", 7), ("test", 4)):
        images = pixels(count, count)
        records = [bytes([row % 2, row % 4]) + images[row].tobytes() for row in range(count)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    (folder / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n")
    return folder


class Python2:
    """What cPickle of Python 2 wrote with protocol 2, instruction by instruction."""

    def __init__(self) -> None:
        self.places = 0

    def put(self) -> bytes:
        self.places += 1
        return b"q" + bytes([self.places]) if self.places < 256 else b"r" + struct.pack("<I", self.places)

    def text(self, value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode() + self.put()

    def number(self, value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    def items(self, values) -> bytes:
        parts = b"]" + self.put()
        for begin in range(0, len(values), 1000):
            some = values[begin : begin + 1000]
            parts += b"(" + b"".join(self.value(value) for value in some) + b"e"
        return parts

    def array(self, value: np.ndarray, by_column: bool = False) -> bytes:
        shape = b"".join(self.number(side) for side in value.shape)
        order = {1: b"\x85", 2: b"\x86"}[value.ndim]
        parts = b"cnumpy.core.multiarray\n_reconstruct\n" + self.put() + b"cnumpy\nndarray\n" + self.put()
        parts += b"K\x00\x85" + self.put() + b"U\x01b\x87" + self.put() + b"R" + self.put() + b"(K\x01" + shape
        parts += order + self.put() + b"cnumpy\ndtype\n" + self.put() + b"U\x02u1K\x00K\x01\x87" + self.put() + b"R"
        parts += self.put() + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t" + self.put() + b"b"
        parts += b"\x88" if by_column else b"\x89"
        data = value.tobytes(order="F" if by_column else "C")
        return parts + b"T" + struct.pack("<I", len(data)) + data + b"t" + self.put() + b"b"

    def value(self, value) -> bytes:
        kinds = {str: self.text, int: self.number, list: self.items, np.ndarray: self.array}
        return kinds[type(value)](value)

    def whole(self, content: dict) -> bytes:
        begin = b"\x80\x02}" + self.put() + b"("
        return begin + b"".join(self.text(key) + self.value(value) for key, value in content.items()) + b"u."


def batch(count: int, seed: int, **labels) -> bytes:
    names = [f"image_s_{number:06d}.png" for number in range(count)]
    about = {"batch_label": f"batch {seed}", **labels, "data": pixels(count, seed), "filenames": names}
    return Python2().whole(about)


def ten_python(folder):
    folder.mkdir(parents=True)
    for number in range(1, 6):
        labels = [(number + row) % 4 for row in range(3)]
        (folder / f"data_batch_{number}").write_bytes(batch(3, number, labels=labels))
    (folder / "test_batch").write_bytes(batch(2, 9, labels=[3, 0]))
    meta = {"num_cases_per_batch": 10000, "label_names": list(FINE), "num_vis": 3072}
    (folder / "batches.meta").write_bytes(Python2().whole(meta))
    return folder


def hundred_python(folder):
    folder.mkdir(parents=True)
    for name, count in (("train", 7), ("test", 4)):
        fine = [row % 4 for row in range(count)]
        coarse = [row % 2 for row in range(count)]
        (folder / name).write_bytes(batch(count, count, fine_labels=fine, coarse_labels=coarse))
    meta = {"fine_label_names": list(FINE), "coarse_label_names": list(COARSE)}
    (folder / "meta").write_bytes(Python2().whole(meta))
    return folder


TEN = {"cifar-10-batches-bin": ten_binary, "cifar-10-batches-py": ten_python}
HUNDRED = {"cifar-100-binary": hundred_binary, "cifar-100-python": hundred_python}


@pytest.mark.parametrize("name", TEN)
def test_either_version_of_cifar_10_gives_its_images_and_names(tmp_path, name):
    TEN[name](tmp_path / name)
    train, test = (load(f"cifar:{tmp_path}?split={split}") for split in ("train", "test"))
    assert (len(train), len(test), len(load(f"cifar:{tmp_path / name}?split=all"))) == (15, 2, 17)
    assert train.class_names == FINE
    assert train.labels[:5].tolist() == [1, 2, 3, 2, 3]
    assert test.labels.tolist() == [3, 0]
    assert test.input.shape == (3, 32, 32)
    blue = pixels(2, 9)[1, 2048:].reshape(32, 32) / 255
    np.testing.assert_allclose(test.inputs[1, 2] * 0.5 + 0.5, blue, atol=1e-6)


@pytest.mark.parametrize("name", HUNDRED)
def test_either_version_of_cifar_100_gives_fine_and_coarse_labels(tmp_path, name):
    HUNDRED[name](tmp_path / name)
    fine, coarse = (load(f"cifar:{tmp_path}?labels={kind}") for kind in ("fine", "coarse"))
    assert fine.class_names == FINE
    assert coarse.class_names == COARSE
    assert fine.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert coarse.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert (fine.inputs == coarse.inputs).all()
    np.testing.assert_allclose(fine.inputs[6, 0].ravel() * 0.5 + 0.5, pixels(7, 7)[6, :1024] / 255, atol=1e-6)


def test_a_random_part_keeps_images_and_labels_together(tmp_path):
    ten_binary(tmp_path / "cifar-10-batches-bin")
    whole = load(f"cifar:{tmp_path}")
    part, again, other = (load(f"cifar:{tmp_path}?n=4&seed={seed}") for seed in (0, 0, 1))
    rows = [int(np.flatnonzero((whole.inputs == image).all(axis=(1, 2, 3)))[0]) for image in part.inputs]
    assert len(rows) == 4
    assert part.labels.tolist() == whole.labels[rows].tolist()
    assert (part.inputs == again.inputs).all()
    assert (part.inputs != other.inputs).any()


def test_files_of_the_true_size_are_read(tmp_path, monkeypatch):
    monkeypatch.undo()
    ten_binary(tmp_path / "c")
    for path in (tmp_path / "c").glob("*.bin"):
        os.truncate(path, 30_730_000)
    assert len(load(f"cifar:{tmp_path / 'c'}?split=test&n=3")) == 3
    os.truncate(tmp_path / "c" / "test_batch.bin", 30_729_999)
    with pytest.raises(
        DataError, match=r"test_batch\.bin' has 30729999 bytes, expected 30730000 \(10000 images of 3073"
    ):
        load(f"cifar:{tmp_path / 'c'}?split=test&n=3")


def test_what_the_strict_reader_gives_is_what_python_would():
    content = batch(5, 1, labels=[0, 300, 2, 3, 1], other=[str(number) for number in range(2500)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pickle.loads(content, encoding="latin1")
    found = parse(content, "x")
    assert found.keys() == expected.keys()
    assert (found.pop("data") == expected.pop("data")).all()
    assert found == expected


def test_an_array_kept_by_columns_is_turned():
    tall = np.arange(600, dtype=np.uint8).reshape(200, 3)
    writer = Python2()
    content = b"\x80\x02}(" + writer.text("a") + writer.array(tall, by_column=True) + b"u."
    assert (parse(content, "x")["a"] == tall).all()


class Hostile:
    def __init__(self, call, *given) -> None:
        self.call = call
        self.given = given

    def __reduce__(self):
        return self.call, self.given


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_batch_is_refused_and_not_executed(tmp_path, protocol):
    folder = ten_python(tmp_path / "cifar-10-batches-py")
    ran = tmp_path / "ran"
    attack = pickle.dumps({"data": Hostile(os.system, f"touch {ran}"), "labels": [0]}, protocol=protocol)
    for name in ("batches.meta", "test_batch"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(attack + bytes(7000 if name == "test_batch" else 0))
        with pytest.raises(DataError, match="nothing of it was executed"):
            load(f"cifar:{tmp_path}?split=test")
        (folder / name).write_bytes(kept)
    assert not ran.exists()
    assert len(load(f"cifar:{tmp_path}?split=test")) == 2


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "protocol 2"),
        (b"\x80\x04}.", "protocol 2"),
        (b"\x80\x02}", "exhausted before seeing STOP"),
        (b"\x80\x02}U\xffab", "expected 255 bytes"),
        (b"\x80\x02}T\xff\xff\xff\xffab", "byte count < 0"),
        (b"\x80\x02}T\xff\xff\xff\x7fab", "expected 2147483647 bytes"),
        (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", r"it names 'os system'"),
        (b"\x80\x02c__builtin__\neval\n.", r"it names '__builtin__ eval'"),
        (b"\x80\x02ios\nsystem\n.", "instruction INST"),
        (b"\x80\x02cnumpy\n" + b"n" * 200, "byte"),
        (b"\x80\x02]K\x01aK\x02K\x03s.", "named values"),
        (b"\x80\x02}K\x01K\x02s.", "named values"),
        (b"\x80\x02}U\x01ah\x07s.", "7"),
        (b"\x80\x02}.}", "goes on after the dictionary"),
        (b"\x80\x02].", "not one dictionary"),
        (b"\x80\x02}}.", "not one dictionary"),
        (b"\x80\x02u.", "empty"),
        (b"\x80\x02cnumpy\ndtype\nU\x02i8K\x00K\x01\x87R.", "no array of bytes"),
        (b"\x80\x02cnumpy\nndarray\nU\x02u1\x85R.", "no array of bytes"),
        (b"\x80\x02]Nb.", "sets the state"),
        (b"\x80\x02cnumpy\ndtype\n}b.", "no array of bytes|sets the state"),
        (b"\x80\x02}r\xff\xff\xff\x7fU\x01a.", "not one dictionary"),
    ],
)
def test_programs_of_another_form_are_refused(content, words):
    with pytest.raises(DataError, match=words):
        parse(content, "x")


def test_a_name_that_is_a_deeply_nested_tuple_is_refused_and_not_hashed():
    """The hash of a tuple looks at all levels without a limit: a deep one would end the process."""
    nested = b")" + b"\x85" * 200_000
    for content in (b"\x80\x02}" + nested + b"K\x01s.", b"\x80\x02}(" + nested + b"K\x01u."):
        with pytest.raises(DataError, match="entries that are not named values"):
            parse(content, "x")


def test_a_name_may_be_of_either_kind_of_text():
    assert parse(b"\x80\x02}(U\x01aK\x01X\x01\x00\x00\x00bK\x02u.", "x") == {"a": 1, "b": 2}


def test_a_hostile_name_is_shown_in_part_and_printable():
    with pytest.raises(DataError) as caught:
        parse(b"\x80\x02cos\n\x1b[31m" + b"n" * 100_000 + b"\n.", "x")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "old, new, words",
    [
        (b"K\x02M\x00\x0c\x86", b"K\x03M\x00\x0c\x86", r"an array of \(3, 3072\) has 6144 bytes"),
        (b"K\x02M\x00\x0c\x86", b"J\xff\xff\xff\xffM\x00\x0c\x86", "not made of bytes"),
        (b"U\x02u1", b"U\x02O8", "no array of bytes"),
        (b"U\x01|", b"U\x01>", "sets the state"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(old, new, words):
    content = batch(2, 1, labels=[0, 1])
    assert content.count(old) == 1
    with pytest.raises(DataError, match=words):
        parse(content.replace(old, new), "x")


def test_no_damage_to_a_batch_has_another_end_than_an_error_of_ours():
    """A byte changed, or the rest cut off, at each place outside the long run of pixels."""
    content = Python2().whole({"labels": [0, 300], "data": pixels(1, 1), "names": ["a", "b"]})
    rng = np.random.default_rng(0)
    start = content.index(pixels(1, 1).tobytes()[:20])
    places = [*range(start), *range(start + 3072, len(content))]
    read = 0
    for place in places:
        with contextlib.suppress(DataError):
            read += isinstance(parse(content[:place] + bytes([rng.integers(256)]) + content[place + 1 :], "x"), dict)
        with pytest.raises(DataError):
            parse(content[:place], "x")
    assert 0 < read < len(places) / 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"labels": [0]}, "no list named 'labels' of one integer for each image"),
        ({"labels": ["a", "b"]}, "no list named 'labels'"),
        ({"labels": [0, 9]}, r"labels 0\.\.9, expected 0\.\.3"),
        ({"data": np.zeros((3, 2048), np.uint8)}, r"an array of \(3, 2048\) named 'data', expected \(2, 3072\)"),
        ({"data": "no" * 60}, "no array named 'data'"),
    ],
)
def test_batches_without_what_they_should_hold_are_refused(tmp_path, change, words):
    folder = ten_python(tmp_path / "p")
    content = {"data": pixels(2, 9), "labels": [3, 0], **change}
    filling = {"filenames": ["x" * 200] * (0 if isinstance(content["data"], np.ndarray) else 31)}
    (folder / "test_batch").write_bytes(Python2().whole({**content, **filling}))
    with pytest.raises(DataError, match=words):
        load(f"cifar:{folder}?split=test")


@pytest.mark.parametrize("size", [0, 6143, 7_000_000])
def test_a_batch_of_impossible_size_is_not_even_read(tmp_path, size):
    folder = ten_python(tmp_path / "p")
    os.truncate(folder / "test_batch", size)
    with pytest.raises(DataError, match=rf"test_batch' has {size} bytes, expected 6144\.\.10496"):
        load(f"cifar:{folder}?split=test")


def test_a_missing_set_says_what_was_expected_and_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"(?s)expected a folder cifar-10-batches-bin.*toronto\.edu.*licence"):
        load(f"cifar:{tmp_path}")
    folder = ten_binary(tmp_path / "b")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_4\.bin"):
        load(f"cifar:{folder}")
    (folder / "batches.meta.txt").unlink()
    with pytest.raises(DataError, match=r"'batches\.meta\.txt': no such file"):
        check(f"cifar:{folder}")


def test_what_cannot_be_asked_is_told(tmp_path):
    ten_binary(tmp_path / "cifar-10-batches-bin")
    with pytest.raises(DataError, match="cifar-10, which has no coarse labels"):
        load(f"cifar:{tmp_path}?labels=coarse")
    with pytest.raises(ConfigError, match="split"):
        load(f"cifar:{tmp_path}?split=valid")
    check(f"cifar:{tmp_path}")
    hundred_python(tmp_path / "cifar-100-python")
    with pytest.raises(DataError, match="holds cifar-10 and cifar-100; name the folder"):
        check(f"cifar:{tmp_path}")

from __future__ import annotations

import gzip
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent.core.config import DataConfig
from edge_agent.core.errors import ConfigError, DataError, MissingCapability, UnknownName
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import check, domains, from_files, label_array, load, parse_source, registry
from edge_agent.data.base import DataSource, LeftOut, Options, Raw
from edge_agent.data.images import files_by_class
from edge_agent.data.partition import Pool, divided, own_samples, read_pools

SPEC = ImageInput(channels=3, height=8, width=8, mean=(0.0,), std=(1.0,))


def paint(path: Path, colour, size=(10, 6), **save):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **save)


@pytest.fixture
def folder(tmp_path):
    for name, colour in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        for number in range(3):
            paint(tmp_path / "pictures" / name / f"{number}.png", colour)
    return tmp_path / "pictures"


def test_source_strings_are_taken_apart():
    assert parse_source("images:/a/b c") == ("images", "/a/b c", {})
    assert parse_source("npz:day 1.npz?inputs=x&labels=y") == ("npz", "day 1.npz", {"inputs": "x", "labels": "y"})
    assert parse_source("digits") == ("digits", "", {})
    assert parse_source("digits?n=3") == ("digits", "", {"n": "3"})
    assert parse_source("python:my.module:load?a=1") == ("python", "my.module:load", {"a": "1"})
    for bad in ("digits?n", "digits?n=1&n=2"):
        with pytest.raises(ConfigError):
            parse_source(bad)


def test_the_files_of_this_folder_are_the_kinds_of_sources():
    own = {
        "arrow",
        "camera",
        "csv",
        "digits",
        "idx",
        "images",
        "npz",
        "parquet",
        "python",
        "torchvision",
        "video",
        "wav",
        "windows",
    }
    public = {"cifar", "cinic", "digits5", "domainnet", "leaf", "officecaltech", "officehome", "pacs", "ucihar"}
    assert set(registry.names()) >= own | public
    assert not set(registry.names()) & {"base", "preprocess", "splitting"}


def test_unknown_kinds_and_options_name_the_nearest():
    with pytest.raises(UnknownName, match="'images'"):
        load("image:x")
    with pytest.raises(ConfigError, match="did you mean 'clients'"):
        load("digits:rendered?cliens=2")
    with pytest.raises(ConfigError, match=r"expected 0\.\.1"):
        load("digits:rendered?client=2&clients=2")


def test_a_folder_for_each_class_becomes_samples(folder):
    (folder / ".hidden").mkdir()
    (folder / "red" / "notes.txt").write_text("x")
    samples = load(f"images:{folder}", SPEC)
    assert samples.class_names == ("blue", "red")
    assert samples.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert samples.inputs.dtype == np.float32
    assert np.allclose(samples.inputs[0].reshape(3, -1).max(axis=1), [0, 0, 1])
    assert samples.names[0] == str(Path("blue") / "0.png")
    assert len(load(f"images:{folder}?limit=2", SPEC)) == 4


def test_classes_go_by_name_into_the_tasks_label_map(folder):
    samples = load(f"images:{folder}", SPEC, ("green", "red", "blue"))
    assert samples.labels.tolist() == [2, 2, 2, 1, 1, 1]
    with pytest.raises(DataError, match=r"'blue' .*'red' "):
        load(f"images:{folder}", SPEC, ("green", "bluu"))


def test_the_camera_is_turned_upright(tmp_path):
    image = Image.new("RGB", (16, 8), "black")
    image.paste((255, 255, 255), (0, 0, 8, 8))  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top
    (tmp_path / "d" / "a").mkdir(parents=True)
    image.save(tmp_path / "d" / "a" / "x.png", exif=exif)
    found = load(f"images:{tmp_path / 'd'}", SPEC).inputs[0, 0]
    assert found[0].min() > 0.9
    assert found[-1].max() < 0.1


def test_all_unreadable_images_are_listed_at_once(folder):
    (folder / "red" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    (folder / "red" / "text.png").write_bytes(b"no picture")
    (folder / "blue" / "empty.png").write_bytes(b"")
    good = (folder / "red" / "0.png").read_bytes()
    (folder / "red" / "cut.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"(?s)4 of 10.*empty\.png.*broken\.jpg.*cut\.png") as caught:
        load(f"images:{folder}", SPEC)
    assert str(caught.value).count("its form is not known; save it as JPEG or PNG") == 1, "each reason once"
    assert "blue/empty.png: cannot be read as an image: the file is empty" in str(caught.value)
    assert str(caught.value).endswith("Without --strict (strict = false, strict=False in Python) these are left out.")
    assert str(folder) not in str(caught.value).splitlines()[1], "names are enough"


def test_inputs_of_another_kind_say_how_they_are_given(folder):
    (folder / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"sounds are given as --data 'wav:FILE\?form=image'"):
        from_files([str(folder / "a.wav")], SPEC)
    for name, kind in (("a.wav", "wav:"), ("red/0.png", "images:")):
        with pytest.raises(DataError, match=rf"did you mean '{kind}.*as FILE"):
            load(str(folder / name))


def test_a_picture_that_unpacks_to_gigabytes_is_refused(tmp_path):
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "d" / "a").mkdir(parents=True)
    (tmp_path / "d" / "a" / "bomb.png").write_bytes(bomb)
    with pytest.raises(DataError, match=r"bomb\.png: is too large to be decoded: above 89 million pixels; make"):
        load(f"images:{tmp_path / 'd'}", SPEC)


def test_files_that_look_like_images_and_are_not_read_are_counted(folder):
    """Photos of a telephone, folders in folders of classes, and files beside these; other files are of no interest."""
    paint(folder / "red" / "more" / "a.png", "red")
    paint(folder / "loose.png", "red")
    for name in ("red/1.HEIC", "red/notes.txt", ".hidden.png", "red/.cache/x.png", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    source = f"images:{folder}"
    pool = Pool.of(np.array([0, 0, 0, 1, 1, 1]), None)
    divided("iid", {}, pool, {"c0": (np.array([0, 3]), np.array([4]))}).write(folder.parent / "p.json")
    of_partition = {"source": source, "partition": folder.parent / "p.json"}
    names = load(source, SPEC).class_names
    for samples in (load(source, SPEC), load(source, SPEC, strict=False), read_pools(source, SPEC).train):
        assert len(samples) == 6
        assert samples.skipped == (
            LeftOut("loose.png", "is beside the folders of classes, so it has none; move it into one"),
            LeftOut("red/1.HEIC", "is of a form that is not read; save it as JPEG or PNG"),
            LeftOut("red/more/a.png", "is in a folder inside that of a class; move it up"),
        )
    assert [len(part) for part in own_samples(DataConfig(**of_partition), "c0", SPEC, names)] == [2, 1]
    with pytest.raises(DataError, match="3 of 9 images cannot be used"):
        load(source, SPEC, strict=True)
    with pytest.raises(DataError, match="3 of 9 images cannot be used"):
        own_samples(DataConfig(**of_partition, strict=True), "c0", SPEC, names)
    (folder / "red" / "broken.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"1 of 10 images cannot be used\n  - red/broken.png: cannot be read"):
        load(source, SPEC)


def test_each_folder_is_read_once_and_no_file_is_looked_at(folder, monkeypatch):
    """Those inside a class are read, too; what lies deeper, or is hidden, is not."""
    for name in ("red/more/deep", "red/.cache"):
        paint(folder / name / "a.png", "red")
    read = []
    looked_at = []
    scandir = os.scandir
    is_file = Path.is_file
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda path: read.append(Path(path)) or scandir(path))
        patch.setattr(Path, "is_file", lambda path: looked_at.append(path) or is_file(path))
        assert len(files_by_class(folder, "images", (".png",), 2).paths) == 4
    assert sorted(read) == [folder, folder / "blue", folder / "red", folder / "red" / "more"]
    assert looked_at == []


def test_links_to_files_and_folders_are_read_and_those_to_themselves_are_not(folder):
    (folder / "red" / "link.png").symlink_to(folder / "blue" / "0.png")
    (folder / "red" / "loop.png").symlink_to("loop.png")
    (folder / "green").symlink_to(folder / "blue")
    files = files_by_class(folder, "images", (".png",))
    assert (files.class_names, np.bincount(files.labels).tolist()) == (("blue", "green", "red"), [3, 3, 4])


def test_a_folder_of_nothing_but_other_forms_says_which(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.HEIC").write_bytes(b"x")
    with pytest.raises(DataError, match=r"found 1 other files, first a/1\.HEIC: is of a form .*; save it as JPEG"):
        load(f"images:{tmp_path}")
    (tmp_path / "a" / "1.HEIC").rename(tmp_path / "a" / "1.mp3")
    with pytest.raises(DataError, match=r"first a/1\.mp3: .*convert it to WAV"):
        load(f"wav:{tmp_path}")


def test_missing_and_empty_folders_say_what_was_expected(tmp_path):
    with pytest.raises(DataError, match=r"x. is not there; expected a folder"):
        load(f"images:{tmp_path / 'x'}")
    with pytest.raises(DataError, match="sub-folder"):
        load(f"images:{tmp_path}")


def test_one_class_only_is_allowed(tmp_path, caplog):
    """What comes of it is reported with the head; samples may be added to those of other classes."""
    paint(tmp_path / "only" / "a.png", "red")
    assert load(f"images:{tmp_path}", SPEC).class_names == ("only",)
    assert not caplog.text


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr("edge_agent.data.images.has_pillow", lambda: False)
    with pytest.raises(MissingCapability, match=r"pip install .*\.\[agent\]'"):
        load(f"images:{folder}", SPEC)


def test_labels_may_be_numpy_integers_among_objects():
    """As pandas gives them where a column once held something else."""
    for given in ([np.int64(3), 1], [np.int8(3), np.uint64(1)]):
        found = label_array(np.array(given, object))
        assert (found.tolist(), found.dtype.kind) == ([3, 1], "i")
    assert label_array(np.array([np.str_("a"), "b"], object)).tolist() == ["a", "b"]
    for bad in (None, 1.0, np.float64(1), True, np.bool_(True)):
        with pytest.raises(DataError, match=r"y: label 1 is .*, expected text or an integer"):
            label_array(np.array([1, bad], object))


def test_single_files_become_inputs(folder):
    found = from_files([str(folder / "red" / "0.png")], SPEC)
    assert (found.inputs.shape, found.labels.tolist()) == ((1, 3, 8, 8), [-1])
    assert np.allclose(found.inputs[0, 0], 1)
    with pytest.raises(DataError, match=r"gone\.png"):
        from_files([str(folder / "red" / "0.png"), "gone.png"], SPEC)


def test_a_natural_spec_follows_the_images(folder):
    assert load(f"images:{folder}").input.shape == (3, 6, 10)


def test_arrays_of_images_with_text_labels(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((4, 8, 8), 255, np.uint8), y=np.array(["b", "a", "b", "a"]))
    samples = load(f"npz:{tmp_path / 'a.npz'}?inputs=x&labels=y", SPEC)
    assert samples.class_names == ("a", "b")
    assert samples.labels.tolist() == [1, 0, 1, 0]
    assert np.allclose(samples.inputs, 1)


def test_floats_and_bytes_give_the_same_inputs(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    found = []
    for name, inputs in {"bytes": pixels, "floats": pixels / 255.0}.items():
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=[0, 1])
        found.append(load(f"npz:{tmp_path / name}.npz", SPEC).inputs)
    assert np.allclose(found[0], found[1], atol=1e-6)


def test_arrays_of_windows_need_their_kind(tmp_path):
    windows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.savez(tmp_path / "w.npz", inputs=windows, labels=[0, 1], g=[5, 5], class_names=["a", "b"])
    with pytest.raises(DataError, match="kind=window"):
        load(f"npz:{tmp_path / 'w.npz'}")
    samples = load(f"npz:{tmp_path / 'w.npz'}?kind=window&groups=g", WindowInput(channels=3, length=4, stride=4))
    assert (samples.inputs == windows).all()
    assert samples.groups.tolist() == [5, 5]
    with pytest.raises(DataError, match=r"\(3, 4\), expected \(3, 5\)"):
        load(f"npz:{tmp_path / 'w.npz'}?kind=window", WindowInput(channels=3, length=5))


@pytest.mark.parametrize(
    "arrays, word",
    [
        ({"inputs": np.zeros((2, 8, 8), np.uint8)}, "labels"),
        ({"inputs": np.zeros((2, 8, 8), np.uint8), "labels": [0, 1, 2]}, "3 labels"),
        ({"inputs": np.zeros((2, 8), np.uint8), "labels": [0, 1]}, r"\[2, 8\]"),
        ({"inputs": np.zeros((2, 8, 8), np.uint8), "labels": [0.5, 1]}, "float64"),
        ({"inputs": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int)}, "no samples"),
        ({"inputs": np.zeros((1, 8, 8), np.uint8), "labels": [3], "class_names": ["a"]}, "0..0"),
    ],
)
def test_archives_of_another_form_are_refused(tmp_path, arrays, word):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=word):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_arrays_of_other_names_are_shown_with_how_to_take_them(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.arange(2))
    with pytest.raises(DataError, match=r"it has x, y; name those to take \(inputs=ARRAY&labels=ARRAY\)"):
        load(f"npz:{tmp_path / 'a.npz'}")
    assert len(load(f"npz:{tmp_path / 'a.npz'}?inputs=x&labels=y")) == 2


def test_pickled_objects_are_never_loaded(tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "p.npz", inputs=np.array([Payload()], object), labels=[0])
    with pytest.raises(DataError, match="no objects"):
        load(f"npz:{tmp_path / 'p.npz'}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\x93NUMPY", b"x" * 1000])
def test_files_that_are_no_archives_are_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError):
        load(f"npz:{tmp_path / 'a.npz'}")
    with pytest.raises(DataError):
        load(f"windows:{tmp_path / 'a.npz'}")


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", side) for side in array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    rng = np.random.default_rng(0)
    for stem, count, pack in (("train", 30, gzip.compress), ("t10k", 10, bytes)):
        suffix = ".gz" if pack is gzip.compress else ""
        images = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        (tmp_path / f"{stem}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (tmp_path / f"{stem}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(np.arange(count, dtype=np.uint8) % 10)))
    return tmp_path


def test_idx_files_packed_and_not(mnist):
    assert [len(load(f"idx:{mnist}?split={split}")) for split in ("train", "test", "all")] == [30, 10, 40]
    samples = load(f"idx:{mnist}?split=test")
    assert samples.class_names == tuple("0123456789")
    raw = (mnist / "t10k-images-idx3-ubyte").read_bytes()[16:]
    assert np.allclose(
        samples.inputs[:, 0] * 0.5 + 0.5, np.frombuffer(raw, np.uint8).reshape(10, 8, 8) / 255, atol=1e-6
    )


def test_idx_takes_a_random_part_and_other_names(mnist):
    part, same, other = (load(f"idx:{mnist}?n=5&seed={seed}") for seed in (0, 0, 1))
    assert (part.inputs == same.inputs).all()
    assert (part.inputs != other.inputs).any()
    assert load(f"idx:{mnist}?class_names=a,b,c,d,e,f,g,h,i,j").class_names[2] == "c"


def test_idx_files_that_lie_are_refused(mnist):
    path = mnist / "t10k-images-idx3-ubyte"
    good = path.read_bytes()
    lies = {
        "cut": good[:-1],
        "more": good + b"x",
        "type": b"\x00\x00\x0d\x03" + good[4:],
        "empty": b"",
        "huge": bytes([0, 0, 8, 3]) + struct.pack(">III", 1 << 31, 1 << 31, 1 << 31),
    }
    for content in lies.values():
        path.write_bytes(content)
        with pytest.raises(DataError):
            load(f"idx:{mnist}?split=test")
    path.write_bytes(idx(np.zeros((3, 8, 8), np.uint8)))
    with pytest.raises(DataError, match="3 images"):
        load(f"idx:{mnist}?split=test")
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load(f"idx:{mnist / 'nowhere'}")


def test_a_gzip_bomb_is_read_no_further_than_its_header_declares(mnist):
    import tracemalloc

    path = mnist / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((1, 8, 8), np.uint8)) + bytes(200 << 20)))
    tracemalloc.start()
    with pytest.raises(DataError, match="holds more"):
        load(f"idx:{mnist}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.fixture
def watch(tmp_path):
    """Four recordings of two people, two channels; every value says its recording."""
    lengths = np.array([20, 31, 9, 40], np.int32)
    samples = np.repeat(np.arange(4), lengths)[:, None] * np.ones((1, 2))
    np.savez(
        tmp_path / "w.npz",
        samples=samples.astype(np.float32),
        lengths=lengths,
        label=np.array([0, 1, 0, 1], np.int16),
        subject=np.array([1, 1, 2, 2], np.int16),
        side=np.array([0, 1, 0, 1], np.int16),
        label_names=np.array(["ROW", "PEN", "IDLE"]),
        channel_names=np.array(["ax", "ay"]),
        sampling_hz=np.int16(5),
    )
    return tmp_path / "w.npz"


def test_recordings_become_windows_with_their_recording_as_group(watch):
    spec = WindowInput(channels=2, length=10, stride=10)
    samples = load(f"windows:{watch}?subject=1", spec, ("PEN", "ROW"))
    assert samples.groups.tolist() == [0, 0, 1, 1, 1]
    assert samples.labels.tolist() == [1, 1, 0, 0, 0]
    assert (samples.inputs == samples.groups[:, None, None]).all()
    assert len(samples.names) == 5


def test_a_window_is_named_by_its_recording_and_its_first_sample(tmp_path):
    np.savez(tmp_path / "w.npz", samples=np.zeros((30, 2), np.float32), lengths=[10, 20], label=[0, 1])
    np.save(tmp_path / "r.npy", np.zeros((12, 2), np.float32))
    spec = WindowInput(channels=2, length=8, stride=4)
    assert load(f"windows:{tmp_path / 'w.npz'}", spec).names == tuple(
        f"recording {row} from sample {start}" for row, start in ((0, 0), (1, 0), (1, 4), (1, 8), (1, 12))
    )
    path = str(tmp_path / "r.npy")
    assert from_files([path], spec, positions=True).names == (f"{path} from sample 0", f"{path} from sample 4")
    assert from_files([path], spec).names == (path, path)


def test_people_can_be_chosen_and_left_out(watch):
    spec = WindowInput(channels=2, length=5, stride=5)
    assert set(load(f"windows:{watch}?exclude_subject=1", spec).groups) == {2, 3}
    assert set(load(f"windows:{watch}?subject=1,2&side=1", spec).groups) == {1, 3}
    with pytest.raises(DataError, match="subjects: 1, 2"):
        load(f"windows:{watch}?subject=3", spec)


def test_the_natural_window_is_two_seconds_half_overlapping(watch):
    spec = load(f"windows:{watch}?shortest=10").input
    assert (spec.channels, spec.length, spec.stride) == (2, 10, 5)


def test_recordings_shorter_than_a_window_are_named(watch):
    with pytest.raises(DataError, match=r"(?s)1 of 4 recordings.*recording 2: has 9 samples"):
        load(f"windows:{watch}", WindowInput(channels=2, length=10))


def test_recordings_with_nan_or_other_channels_are_named(watch):
    arrays = dict(np.load(watch))
    arrays["samples"][25] = np.nan
    np.savez(watch, **arrays)
    with pytest.raises(DataError, match="recording 1: holds NaN"):
        load(f"windows:{watch}", WindowInput(channels=2, length=5))
    with pytest.raises(DataError, match="4 of 4"):
        load(f"windows:{watch}", WindowInput(channels=6, length=5))


@pytest.mark.parametrize(
    "change, word",
    [
        ({"lengths": np.array([20, 31, 9, 41])}, "add up to 101"),
        ({"lengths": np.array([20, 31, -9, 58])}, "natural"),
        ({"label": np.array([0, 1])}, "label has shape"),
        ({"label": np.array([0, 1, 0, 9])}, "0..2"),
        ({"samples": np.zeros((100, 2), np.int32)}, "int32"),
    ],
)
def test_window_files_of_another_form_are_refused(watch, change, word):
    np.savez(watch, **{**dict(np.load(watch)), **change})
    with pytest.raises(DataError, match=word):
        load(f"windows:{watch}", WindowInput(channels=2, length=5))


def test_images_do_not_feed_a_window_task_nor_the_other_way(watch, folder):
    with pytest.raises(DataError, match="needs windows"):
        load(f"images:{folder}", WindowInput())
    with pytest.raises(DataError, match="needs images"):
        load(f"windows:{watch}", ImageInput())


def test_the_kind_of_data_is_looked_at_before_their_classes(watch, folder):
    """Data of another kind have other classes, too; adding those to a head would be the wrong advice."""
    for own_classes in (False, True):
        with pytest.raises(DataError, match="holds images, the task needs windows"):
            load(f"images:{folder}", WindowInput(), ("walk",), own_classes=own_classes)
    with pytest.raises(DataError, match="holds recordings, the task needs images"):
        check(f"windows:{watch}", None, SPEC, ("red",))


def test_decimal_labels_are_no_classes_of_a_device_either(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((4, 8, 8, 3), np.uint8), labels=np.array([0.5, 1.5, 0.5, 2.0]))
    for own_classes in (False, True):
        with pytest.raises(DataError, match=r"has numbers for labels .*expected integers or text"):
            load(f"npz:{tmp_path / 'a.npz'}", SPEC, ("red",), own_classes=own_classes)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(
        "import numpy as np\n"
        "def pictures(n='2'):\n    return np.zeros((int(n), 8, 8), np.uint8), np.arange(int(n))\n"
        "def recordings():\n    return [np.zeros((12, 2)), np.ones((7, 2))], ['x', 'y'], ['y', 'x']\n"
        "def fails():\n    raise RuntimeError('camera is off')\n"
        "def nothing():\n    return None\n"
        "value = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_data"
    sys.modules.pop("own_data", None)


def test_a_function_of_ones_own_gives_data(module):
    assert len(load(f"python:{module}:pictures?n=3", SPEC)) == 3
    samples = load(f"python:{module}:recordings", WindowInput(channels=2, length=5, stride=5))
    assert samples.class_names == ("y", "x")
    assert samples.labels.tolist() == [1, 1, 0]
    assert samples.groups.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "where, word",
    [
        ("own_data:fails", "camera is off"),
        ("own_data:nothing", "NoneType"),
        ("own_data:value", "no function"),
        ("own_data:missing", "missing"),
        ("no_such_module:f", "PYTHONPATH"),
        ("own_data", "module:function"),
        ("own_data:pictures?size=3", "size"),
    ],
)
def test_a_function_that_does_not_work_is_explained(module, where, word):
    with pytest.raises(DataError, match=word):
        load(f"python:{where}", SPEC)


@pytest.mark.parametrize("targets", [np.zeros(3), np.zeros(7), np.zeros((5, 1))])
def test_one_number_to_predict_is_expected_for_each_input(tmp_path, targets):
    np.savez(tmp_path / "t.npz", inputs=np.zeros((5, 8, 8), np.uint8), labels=targets)
    with pytest.raises(DataError, match=r"targets of shape .* for 5 inputs; expected one for each"):
        load(f"npz:{tmp_path / 't.npz'}", labelled=False)


def test_a_recording_whose_targets_cannot_be_cut_is_left_out_as_a_whole(monkeypatch):
    recordings = [np.full((8, 1), value, np.float32) for value in (1, 2, 3)]
    targets = [np.zeros(8), np.full(8, np.nan), np.full(8, 5.0)]
    raw = Raw("recording", recordings, np.zeros(3, np.int64), ("a",), targets=targets)
    monkeypatch.setitem(registry._extra, "plugged", DataSource(Options, lambda _where, _options: raw))
    samples = load("plugged:", WindowInput(channels=1, length=4, stride=4), strict=False)
    assert samples.inputs[:, 0, 0].tolist() == [1, 1, 3, 3]
    assert samples.targets.tolist() == [0, 0, 5, 5]
    assert samples.skipped == (LeftOut("1", "holds NaN or infinity"),)


def test_folders_of_pictures_are_classes_and_no_domains(tmp_path):
    """Only folders that hold the folders of classes are domains; calibration takes the others as one."""
    for place in ("cat", "dog"):
        (tmp_path / "one" / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "one" / place / "a.png")
        (tmp_path / "several" / "summer" / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "several" / "summer" / place / "a.png")
    assert domains(f"images:{tmp_path / 'one'}") == {}
    assert [*domains(f"images:{tmp_path / 'several'}")] == ["summer"]
    assert domains(f"images:{tmp_path / 'one' / 'cat'}") == {}

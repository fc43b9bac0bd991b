"""Tables of Hugging Face's library and of pyarrow: written by these, read here without the former."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from edge_agent.core.errors import ConfigError, DataError, MissingCapability, UnknownName
from edge_agent.core.task import WindowInput
from edge_agent.data import check, load, probe
from edge_agent.data.partition import parts_of, read_pools

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = ["cat", "dog"]
FEATURES = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


def pixels_of(count, seed=0, shape=(9, 8, 3)):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image_table(pixels, labels, features=FEATURES, **columns):
    cells = [{"bytes": png(image), "path": None} for image in pixels]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, kind), "label": pa.array(labels, pa.int64()), **columns})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def save_arrow(folder, *tables):
    """The layout of ``Dataset.save_to_disk``: streams of record batches, and their names."""
    folder.mkdir(parents=True)
    files = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(files, tables, strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))


@pytest.fixture
def saved(tmp_path):
    """A set with two parts, of which the training part has two files."""
    root = tmp_path / "set"
    images = pixels_of(8)
    save_arrow(root / "train", image_table(images[:3], [0, 1, 1]), image_table(images[3:5], [0, 1]))
    save_arrow(root / "test", image_table(images[5:], [1, 0, 1]))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return root, images


def test_a_saved_set_has_its_parts_its_classes_and_its_pixels(saved):
    root, images = saved
    pools = read_pools(f"arrow:{root}")
    assert pools.train.class_names == ("cat", "dog")
    assert pools.train.labels.tolist() == [0, 1, 1, 0, 1]
    assert pools.test.labels.tolist() == [1, 0, 1]
    assert np.array_equal(pools.train.inputs, images[:5].transpose(0, 3, 1, 2))
    assert np.array_equal(pools.test.inputs, images[5:].transpose(0, 3, 1, 2))
    assert len(load(f"arrow:{root}?split=all")) == 8
    assert len(load(f"arrow:{root}")) == 5, "a device trains on the training part"
    check(f"arrow:{root}")
    probe(f"arrow:{root}")


def test_a_relative_path_is_looked_for_below_the_folder_that_counts(saved):
    root, _ = saved
    assert parts_of("arrow:set", root.parent) == ("arrow:set?split=train", "arrow:set?split=test")
    assert len(read_pools("arrow:set", folder=root.parent).test) == 3
    assert parts_of("arrow:train", root) is None, "a set of one part holds out a share of each client"


def test_a_random_part_has_labels_and_pixels_of_the_same_rows(saved):
    root, images = saved
    every = load(f"arrow:{root}?split=all", compact=True)
    some = load(f"arrow:{root}?split=all&n=4&seed=3", every.input, compact=True)
    assert len(some) == 4
    for pixels, label in zip(some.inputs, some.labels, strict=True):
        (row,) = [row for row, image in enumerate(images) if np.array_equal(image.transpose(2, 0, 1), pixels)]
        assert every.labels[row] == label


def test_images_may_be_bytes_or_paths_from_the_folder(tmp_path):
    images = pixels_of(2)
    (tmp_path / "set" / "pictures").mkdir(parents=True)
    Image.fromarray(images[1]).save(tmp_path / "set" / "pictures" / "b.png")
    cells = [{"bytes": png(images[0]), "path": "a.png"}, {"bytes": None, "path": "pictures/b.png"}]
    pq.write_table(pa.table({"img": cells, "label": ["x", "y"]}), tmp_path / "set" / "all.parquet")
    found = load(f"parquet:{tmp_path / 'set'}", compact=True)
    assert np.array_equal(found.inputs, images.transpose(0, 3, 1, 2))
    assert found.class_names == ("x", "y")
    table = pa.table({"img": [png(image) for image in images], "label": [1, 2]})
    pq.write_table(table, tmp_path / "bytes.parquet")
    assert np.array_equal(load(f"parquet:{tmp_path / 'bytes.parquet'}", compact=True).inputs, found.inputs)


def test_numbers_in_lists_become_windows_recordings_or_images(tmp_path):
    values = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 24)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    nested = pa.array(values.tolist(), pa.list_(pa.list_(pa.float32())))
    spec = WindowInput(channels=3, length=8, stride=8)
    for name, column, options in (
        ("flat", flat, "kind=window&shape=3,8"),
        ("tensors", tensors, "kind=window"),
        ("nested", nested, "kind=window"),
    ):
        pq.write_table(pa.table({"x": column, "y": ["a", "b"]}), tmp_path / f"{name}.parquet")
        found = load(f"parquet:{tmp_path / name}.parquet?{options}", spec)
        assert np.array_equal(found.inputs, values), name
    recording = WindowInput(channels=3, length=4, stride=4)
    long = pa.array(np.arange(24.0).reshape(1, 8, 3).tolist())
    pq.write_table(pa.table({"x": long, "y": ["a"]}), tmp_path / "long.parquet")
    found = load(f"parquet:{tmp_path / 'long.parquet'}?kind=recording", recording)
    assert found.inputs[1, :, 0].tolist() == [12.0, 13.0, 14.0], "the fifth sample of three channels"
    grey = pa.array(pixels_of(2, shape=(6, 5)).tolist())
    pq.write_table(pa.table({"x": grey, "y": [True, False]}), tmp_path / "grey.parquet")
    assert load(f"parquet:{tmp_path / 'grey.parquet'}").input.shape == (1, 6, 5)


def test_parquet_files_are_parts_by_their_names_and_may_be_chosen_by_a_pattern(tmp_path):
    images = pixels_of(7)
    folder = tmp_path / "data"
    folder.mkdir()
    for name, first, last in (("train-00000-of-00002", 0, 3), ("train-00001-of-00002", 3, 5), ("test-0", 5, 7)):
        labels = [row % 2 for row in range(first, last)]
        pq.write_table(image_table(images[first:last], labels), folder / f"{name}.parquet", row_group_size=2)
    pools = read_pools(f"parquet:{tmp_path}")
    assert np.array_equal(pools.train.inputs, images[:5].transpose(0, 3, 1, 2))
    assert np.array_equal(pools.test.inputs, images[5:].transpose(0, 3, 1, 2))
    source = f"parquet:{folder}/train-*.parquet"
    check(source)
    assert np.array_equal(load(source, compact=True).inputs, pools.train.inputs)
    assert parts_of(source) is None


def test_rows_of_parquet_are_read_in_any_order(tmp_path):
    from edge_agent.data.columns import ColumnOptions
    from edge_agent.data.parquet import SOURCE

    values = np.arange(500 * 16, dtype=np.float32).reshape(500, 4, 4)
    pq.write_table(pa.table({"x": values.tolist(), "y": [0] * 500}), tmp_path / "a.parquet", row_group_size=130)
    items = SOURCE.read(str(tmp_path / "a.parquet"), ColumnOptions(kind="window")).items
    for row in (499, 0, 64, 63, 130, 129, 131, 400):
        assert np.array_equal(items[row], values[row]), row


def test_users_and_recordings_are_columns(tmp_path):
    table = image_table(pixels_of(4), [0, 1, 0, 1], writer=["b", "a", "b", "a"], take=pa.array([7, 7, 3, 3]))
    pq.write_table(table, tmp_path / "a.parquet")
    found = load(f"parquet:{tmp_path / 'a.parquet'}?user=writer&group=take")
    assert {name: rows.tolist() for name, rows in found.users.rows().items()} == {"a": [1, 3], "b": [0, 2]}
    assert found.groups.tolist() == [1, 1, 0, 0]
    part = found.take(np.array([3, 0]))
    assert [part.users.names[number] for number in part.users.numbers] == ["a", "b"]


def test_columns_of_users_and_recordings_are_names_or_numbers(tmp_path):
    table = image_table(pixels_of(2), [0, 1], writer=[[1], [2]], take=[0.5, 1.5])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"'take' holds double, expected integers or text.*'writer' holds list"):
        load(f"parquet:{tmp_path / 'a.parquet'}?user=writer&group=take")


def test_every_wrong_name_of_a_column_is_reported_with_the_nearest(saved):
    root, _ = saved
    with pytest.raises(DataError) as caught:
        load(f"arrow:{root}?input=imge&label=lable&user=writer")
    for part in ("'imge' (input=imge) (did you mean 'image'?)", "(did you mean 'label'?)", "'writer'", "image, label"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"no part 'tset' \(did you mean 'test'\?\); it has train, test"):
        load(f"arrow:{root}?split=tset")


@pytest.mark.parametrize(
    "column, options, message",
    [
        (pa.array([[1.0, 2.0]]), "", r"flat lists; say their shape"),
        (pa.array([[[1.0, 2.0]]]), "", r"floats with two axes: say kind=image"),
        (pa.array([[1.0, 2.0]]), "?shape=3,4&kind=window", r"row 0: has 2 numbers, expected 3 x 4"),
        (pa.array([[[1.0, 2.0], [3.0]]]), "?kind=window", r"row 0: has lists of 1 to 2 numbers side by side"),
        (pa.array([[[1.0, None]]]), "?kind=window", r"row 0: has 1 empty numbers"),
        (pa.array([None], pa.list_(pa.list_(pa.float32()))), "?kind=window", r"row 0: holds no input"),
        (pa.array([1.5]), "", r"holds double, expected images as bytes or paths, or lists"),
        (pa.array([b"no image"]), "", r"row 0: cannot be read as an image"),
        (pa.array(["nowhere.png"]), "", r"names the image 'nowhere.png', which is not there"),
        (pa.array([b"x"]), "?kind=window", r"holds images, and kind=window was given"),
        (pa.array([[[[[1.0]]]]]), "", r"inputs with 4 axes as image"),
        (pa.array([{"bytes": 1, "path": 2}]), "", r"holds struct<bytes: int64, path: int64>, expected images as bytes"),
        (pa.array([[[1.0, float("nan")]]]), "?kind=image", r"row 0: image of float64 with NaN"),
        (pa.array([[[1, 300]]]), "", r"row 0: image of int64 with values 1\.\.300"),
    ],
)
def test_columns_and_cells_that_hold_no_input_say_so(tmp_path, column, options, message):
    pq.write_table(pa.table({"x": column, "y": ["a"]}), tmp_path / "a.parquet")
    spec = WindowInput(channels=1, length=4) if "window" in options else None
    with pytest.raises(DataError, match=message):
        load(f"parquet:{tmp_path / 'a.parquet'}{options}", spec)


def test_unequal_shapes_are_listed_with_their_rows(tmp_path):
    cells = [np.zeros((3, 8)).tolist(), np.zeros((3, 7)).tolist(), np.zeros((2, 8)).tolist()]
    pq.write_table(pa.table({"x": cells, "y": [0, 0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"(?s)2 of 3 windows.*row 1: has shape \(3, 7\).*row 2: has shape \(2, 8\)"):
        load(f"parquet:{tmp_path / 'a.parquet'}?kind=window", WindowInput(channels=3, length=8, stride=8))


def test_labels_that_are_missing_or_none_are_listed_by_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(image_table(pixels_of(4), [0, None, 1, None]), path)
    with pytest.raises(DataError, match=r"column 'label': 2 cells are empty: row 1, row 3"):
        load(f"parquet:{path}")
    pq.write_table(image_table(pixels_of(3), [0, -1, 1]), path)
    with pytest.raises(DataError, match=r"1 rows have the label -1.*row 1"):
        load(f"parquet:{path}")
    pq.write_table(image_table(pixels_of(3), [0, 5, 1]), path)
    with pytest.raises(DataError, match=r"labels 0\.\.5, expected 0\.\.1"):
        load(f"parquet:{path}")
    pq.write_table(image_table(pixels_of(2), [-1, -1]), path)
    with pytest.raises(DataError, match="all rows have the label -1"):
        load(f"parquet:{path}")
    assert len(load(f"parquet:{path}", labelled=False)) == 2, "good enough to predict"
    pq.write_table(image_table(pixels_of(2), [0, 1]).drop_columns(["label"]), path)
    with pytest.raises(DataError, match=r"no column with one of the usual names of labels.*it has image"):
        load(f"parquet:{path}")


def test_decimal_labels_are_targets(tmp_path):
    table = pa.table({"x": [np.zeros((2, 4)).tolist()] * 2, "y": [0.5, 1.5]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = load(f"parquet:{tmp_path / 'a.parquet'}?kind=window", labelled=None)
    assert found.targets.tolist() == [0.5, 1.5]


def test_targets_that_are_no_numbers_are_listed_by_row(tmp_path):
    table = pa.table({"x": [np.zeros((2, 4)).tolist()] * 3, "y": [0.5, float("nan"), float("inf")]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'y': 2 cells hold NaN or infinity: row 1, row 2; replace them"):
        load(f"parquet:{tmp_path / 'a.parquet'}?kind=window", labelled=None)


def test_whole_numbers_of_64_bits_keep_their_value_as_classes(tmp_path):
    numbers = pa.array([2**63 + 5, 1], pa.uint64())
    pq.write_table(pa.table({"x": pixels_of(2, shape=(4, 4)).tolist(), "y": numbers}), tmp_path / "a.parquet")
    assert load(f"parquet:{tmp_path / 'a.parquet'}").class_names == ("1", "9223372036854775813")


def test_names_that_occur_twice_are_listed(tmp_path):
    images = pa.array(pixels_of(2, shape=(4, 4)).tolist())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([images, pa.array([0, 1]), pa.array([0, 1])], ["x", "y", "y"]), path)
    with pytest.raises(DataError, match=r"several columns have the name y; rename all but one"):
        load(f"parquet:{path}")
    pq.write_table(pa.table({"x": images, "y": [0, 1]}), path)
    with pytest.raises(DataError, match=r"class names that occur twice: a; give each class its own"):
        load(f"parquet:{path}?class_names=a,a,b")
    with pytest.raises(ConfigError, match="shape"):
        load(f"parquet:{path}?shape=-1,-16")


def test_damaged_and_foreign_files_name_the_file_and_what_to_do(saved, tmp_path):
    root, _ = saved
    table = image_table(pixels_of(40), [0, 1] * 20)
    pq.write_table(table, tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet' cannot be read as a Parquet file.*copy or save it again"):
        load(f"parquet:{tmp_path / 'cut.parquet'}")
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"cannot be read as a Parquet file"):
        load(f"parquet:{tmp_path / 'text.parquet'}")
    for damage in (100, 3000, 20_000):
        hurt = bytearray(whole)
        hurt[damage : damage + 64] = bytes(64)
        (tmp_path / "hurt.parquet").write_bytes(hurt)
        with pytest.raises(DataError, match="hurt"):
            load(f"parquet:{tmp_path / 'hurt.parquet'}")
    file = root / "test" / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"arrow' cannot be read as an Arrow table.*copy or save it again"):
        load(f"arrow:{root}?split=test")
    file.unlink()
    with pytest.raises(DataError, match=r"lacks data-00000-of-00001\.arrow; copy the data set again"):
        load(f"arrow:{root}?split=test")
    (root / "test" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json' is damaged"):
        load(f"arrow:{root}?split=test")
    (root / "test" / "state.json").write_text('{"_data_files": [{"filename": "../train/state.json"}]}')
    with pytest.raises(DataError, match="lists no files in this folder"):
        load(f"arrow:{root}?split=test")
    (root / "dataset_dict.json").write_text('{"splits": "train"}')
    with pytest.raises(DataError, match="lists no parts"):
        load(f"arrow:{root}")


def test_tables_that_do_not_belong_together_or_are_empty_are_refused(tmp_path):
    pq.write_table(image_table(pixels_of(1), [0]), tmp_path / "a.parquet")
    pq.write_table(pa.table({"image": [1], "label": [0]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"differ from 'a\.parquet': b\.parquet lacks.*image \(int64, expected struct"):
        load(f"parquet:{tmp_path}")
    pq.write_table(image_table(pixels_of(1), [0]).slice(0, 0), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="the table has no rows"):
        load(f"parquet:{tmp_path / 'b.parquet'}")
    (tmp_path / "none").mkdir()
    for kind in ("arrow", "parquet"):
        with pytest.raises(DataError, match=r"expected"):
            load(f"{kind}:{tmp_path / 'none'}")
        with pytest.raises(DataError):
            load(f"{kind}:{tmp_path / 'nowhere'}")


def test_an_image_that_announces_more_pixels_than_memory_is_refused_in_its_row(tmp_path):
    header = b"P5 60000 60000 255\n"
    pq.write_table(pa.table({"x": [header], "y": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 0: is too large to be decoded"):
        load(f"parquet:{tmp_path / 'a.parquet'}")


def test_a_million_rows_of_one_stored_value_are_refused_before_memory_is_taken(tmp_path, monkeypatch):
    table = pa.table({"x": [b"x"] * 100_000, "y": pa.array([0] * 100_000)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    monkeypatch.setattr("edge_agent.data.parquet.memory_budget_bytes", lambda: 1 << 16)
    with pytest.raises(DataError, match="states 100000 rows, and the free memory here is enough"):
        load(f"parquet:{tmp_path / 'a.parquet'}")


def test_texts_that_are_stored_once_and_unpack_to_much_more_are_refused(tmp_path, monkeypatch):
    """One text in each of many rows: here 60 MB in a file of some kilobytes."""
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * 30_000]))
    schema = pa.schema([("image", pa.list_(pa.list_(pa.uint8()))), ("label", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(4):
            writer.write_table(
                pa.table({"image": [[[1, 2], [3, 4]]] * 500, "label": texts.dictionary_decode()}, schema)
            )
    assert path.stat().st_size < 60_000
    with pytest.raises(DataError, match=r"1 values are longer than 256 characters, the first begins 'xxx"):
        load(f"parquet:{path}")
    monkeypatch.setattr("edge_agent.data.parquet.memory_budget_bytes", lambda: 1 << 16)
    with pytest.raises(DataError, match="column 'label' takes more than 0 MB"):
        load(f"parquet:{path}")


@pytest.mark.parametrize("form", ["bytes", "a list of fixed size"])
def test_large_inputs_that_are_stored_once_are_unpacked_a_few_at_once(tmp_path, monkeypatch, form):
    """Forty rows of four megabytes in a file of kilobytes: without a bound all of them are in memory together."""
    path = tmp_path / "a.parquet"
    if form == "bytes":
        column = pa.array([b"x" * (4 << 20)] * 40)
        options, message = "", "row 0: cannot be read as an image"
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(40 << 19)), 1 << 19)
        options, message = "?shape=3,3&kind=image", "row 0: has 524288 numbers, expected 3 x 3"
    pq.write_table(pa.table({"image": column, "label": [0] * 40}), path, compression="zstd")
    assert path.stat().st_size < 200_000
    monkeypatch.setattr("edge_agent.data.parquet.memory_budget_bytes", lambda: 16 << 20)
    pool = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(pool)
    pa.set_memory_pool(counting)
    try:
        with pytest.raises(DataError, match=message):
            load(f"parquet:{path}{options}")
    finally:
        pa.set_memory_pool(pool)
    assert counting.max_memory() < 80 << 20
    monkeypatch.setattr("edge_agent.data.parquet.memory_budget_bytes", lambda: 1 << 16)
    with pytest.raises(DataError, match=r"a\.parquet' has rows of \d+ MB, and the free memory here allows for 0 MB"):
        load(f"parquet:{path}{options}")


def test_a_path_without_its_kind_names_the_likely_one(saved, tmp_path):
    root, _ = saved
    pq.write_table(image_table(pixels_of(1), [0]), tmp_path / "a.parquet")
    for path, kind in ((root, "arrow"), (root / "train", "arrow"), (tmp_path / "a.parquet", "parquet")):
        with pytest.raises((DataError, UnknownName), match=f"did you mean '{kind}:"):
            load(str(path))


def test_without_pyarrow_the_message_names_the_extra(saved, monkeypatch):
    root, _ = saved
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingCapability, match=r"needs 'pyarrow', which is not installed.*tables"):
        load(f"arrow:{root}")


def test_without_pillow_the_message_names_its_extra(saved, monkeypatch):
    root, _ = saved
    monkeypatch.setattr("edge_agent.data.columns.choice.has_pillow", lambda: False)
    with pytest.raises(MissingCapability, match=r"reading image files needs 'PIL'"):
        load(f"arrow:{root}")


def test_nothing_of_it_is_imported_for_other_sources():
    code = (
        "import sys; from edge_agent import data; data.registry.load('arrow'); data.registry.load('parquet'); "
        "print('pyarrow' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


def test_what_the_library_itself_has_written_is_read(tmp_path):
    """The same rows by the library's own reader."""
    datasets = pytest.importorskip("datasets")
    images = pixels_of(5)
    signal = datasets.Array2D((3, 7), "float32")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES), "signal": signal}
    )
    columns = {
        "image": [Image.fromarray(image) for image in images],
        "label": [1, 0, 0, 1, 1],
        "signal": np.random.default_rng(0).normal(size=(5, 3, 7)).astype(np.float32).tolist(),
    }
    made = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(train=made, validation=made.select([4, 2])).save_to_disk(tmp_path / "set")
    made.to_parquet(tmp_path / "a.parquet")
    pools = read_pools(f"arrow:{tmp_path / 'set'}")
    read_back = datasets.load_from_disk(tmp_path / "set")
    for ours, theirs in ((pools.train, read_back["train"]), (pools.test, read_back["validation"])):
        assert np.array_equal(ours.inputs, np.stack([np.asarray(row["image"]).transpose(2, 0, 1) for row in theirs]))
        assert ours.labels.tolist() == theirs["label"][:]
    signals = load(f"arrow:{tmp_path / 'set'}?input=signal&kind=window")
    assert np.array_equal(signals.inputs, np.array(read_back["train"]["signal"][:], np.float32))
    assert np.array_equal(load(f"parquet:{tmp_path / 'a.parquet'}", compact=True).inputs, pools.train.inputs)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_whatever_is_damaged_in_a_file_is_an_error_about_data(tmp_path, kind):
    """Bytes are changed at random: a few of 1,500 such files ended in a traceback at first."""
    table = image_table(pixels_of(12), [0, 1] * 6, writer=["a", "b", "c"] * 4)
    if kind == "arrow":
        save_arrow(tmp_path / "set", table)
        path = tmp_path / "set" / "data-00000-of-00001.arrow"
        source = f"arrow:{tmp_path / 'set'}?user=writer"
    else:
        path = tmp_path / "a.parquet"
        pq.write_table(table, path, row_group_size=5)
        source = f"parquet:{path}?user=writer"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for position in rng.integers(0, len(whole), 6):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load(source)
        except DataError:
            refused += 1
    assert refused > 50

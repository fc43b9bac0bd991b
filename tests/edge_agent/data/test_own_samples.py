"""A device's own samples: all of a source, split; or its rows of a partition that it shares with others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_agent import data
from edge_agent.agent.data_check import check
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig, DataConfig, parse
from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.data import partition

SPEC = ImageInput(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
NAMES = ("a", "b", "c")


@pytest.fixture
def source(tmp_path):
    """30 images of one grey each: image n is n / 255 and of class n mod 3."""
    inputs = np.broadcast_to(np.arange(30, dtype=np.uint8)[:, None, None], (30, 4, 4))
    np.savez(tmp_path / "x.npz", inputs=inputs, labels=np.arange(30) % 3, class_names=np.array(NAMES))
    return f"npz:{tmp_path / 'x.npz'}"


@pytest.fixture
def divided(tmp_path):
    """A partition of those 30 among c0 and c1, out of order; no test pool."""
    shares = {"c0": (np.array([7, 2, 29]), np.array([4, 0])), "c1": (np.array([1]), np.array([5]))}
    pool = partition.Pool.of(np.arange(30) % 3, None)
    path = tmp_path / "partition.json"
    partition.divided("iid", {}, pool, shares).write(path)
    return path


def greys(samples):
    return np.rint(samples.inputs[:, 0, 0, 0] * 255).astype(int).tolist()


def own(agent="c0", **config):
    return partition.own_samples(DataConfig(**config), agent, SPEC, NAMES)


def test_rows_are_taken_in_the_order_in_which_the_partition_names_them(source, divided):
    train, test = own(source=source, partition=divided)
    assert (greys(train), train.labels.tolist()) == ([7, 2, 29], [1, 2, 2])
    assert (greys(test), test.labels.tolist()) == ([4, 0], [1, 0])
    assert greys(own("porch", source=source, partition=divided, client="c1")[0]) == [1], "whatever the id"


def test_without_a_partition_a_source_is_split_as_ever(source):
    train, test = own(source=source, test_fraction=0.5, seed=3)
    expected = data.split(data.load(source, SPEC, NAMES), 0.5, 3)
    assert (greys(train), greys(test)) == (greys(expected[0]), greys(expected[1]))


def idx(folder, train, test):
    folder.mkdir()
    for stem, labels in (("train", train), ("t10k", test)):
        pixels = np.broadcast_to(np.arange(len(labels), dtype=np.uint8)[:, None, None], (len(labels), 4, 4))
        for name, array in (("images-idx3", pixels), ("labels-idx1", np.asarray(labels, np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
            (folder / f"{stem}-{name}-ubyte").write_bytes(header + array.tobytes())
    return f"idx:{folder}"


@pytest.mark.parametrize("has_test_pool", [True, False])
def test_test_rows_are_of_the_test_part_where_the_partition_was_made_with_one(tmp_path, has_test_pool):
    labels = [0, 1, 2, 0, 1, 2]
    tests = [2, 1, 0]
    source = idx(tmp_path / "idx", labels, tests)
    pool = partition.Pool.of(np.array(labels), np.array(tests) if has_test_pool else None)
    partition.divided("iid", {}, pool, {"c0": (np.array([3, 5]), np.array([2]))}).write(tmp_path / "p.json")
    train, test = partition.own_samples(
        DataConfig(source=source, partition=tmp_path / "p.json"), "c0", SPEC, ("0", "1", "2")
    )
    assert (greys(train), train.labels.tolist()) == ([3, 5], [0, 2])
    assert (greys(test), test.labels.tolist()) == ([2], [0 if has_test_pool else 2])


def test_a_training_agent_gets_its_rows_and_tells_how_many(tmp_path, source, divided):
    config = AgentConfig(id="c0", state=tmp_path / "s", data=DataConfig(source=source, partition=divided))
    tasks = TaskRunner(config, "train")
    train, test = tasks.read_samples(Task(input=SPEC, class_names=NAMES))
    assert (greys(train), greys(test), tasks.samples) == ([7, 2, 29], [4, 0], 3)


def test_an_unknown_client_is_told_with_the_nearest_and_how_many_there_are(source, divided):
    config = DataConfig(source=source, partition=divided)
    for look in (
        lambda: own("c10", source=source, partition=divided),
        lambda: check(AgentConfig(id="c10", data=config)),
    ):
        with pytest.raises(DataError, match=r"no client 'c10' among 2: did you mean 'c[01]'\?"):
            look()
    with pytest.raises(DataError, match="among 2: the first is 'c0'"):
        own("porch", source=source, partition=divided)


def test_a_partition_of_other_data_is_refused(tmp_path, source, divided):
    np.savez(tmp_path / "x.npz", inputs=np.zeros((30, 4, 4), np.uint8), labels=np.arange(30)[::-1] % 3)
    with pytest.raises(DataError, match=r"made for 30 training samples with labels .* the data are 30"):
        partition.own_samples(DataConfig(source=source, partition=divided), "c0", SPEC, ("0", "1", "2"))


def test_clients_that_are_sources_need_no_partition(tmp_path, source, divided):
    content = json.loads(divided.read_text())
    divided.write_text(json.dumps({**content, "rule": "domains"}))
    with pytest.raises(DataError, match=r"give 'c0' its own as data.source, and leave data.partition out"):
        own(source=source, partition=divided)


def test_a_missing_partition_is_told_before_anything_begins(tmp_path, source):
    with pytest.raises(DataError, match=r"nowhere\.json: no such file"):
        check(AgentConfig(id="c0", data=DataConfig(source=source, partition=tmp_path / "nowhere.json")))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"partition": "p.json", "test_fraction": 0.5}, "test_fraction with a partition"),
        ({"partition": "p.json", "seed": 1, "test_fraction": 0.5}, "seed and test_fraction with a partition"),
        ({"client": "c0"}, "client = 'c0' without partition"),
        ({"partition": "p.json", "test": "npz:y"}, "test = 'npz:y' with a partition"),
        ({"test_fraction": 0.5, "test": "npz:y"}, "test_fraction with test = 'npz:y'"),
        ({"test": "npz:x"}, "test = 'npz:x' is the source itself"),
    ],
)
def test_what_means_nothing_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        parse(AgentConfig, {"data": {"source": "npz:x", **given}}, where="test")


def test_the_partition_counts_from_the_file_that_names_it(tmp_path):
    config = parse(AgentConfig, {"data": {"source": "npz:x", "partition": "p.json"}}, where="test", base=tmp_path)
    assert config.data.partition == tmp_path / "p.json"


def test_a_test_source_is_held_out_as_a_whole_and_counts_from_the_same_folder(tmp_path, source):
    np.savez(
        tmp_path / "y.npz", inputs=np.full((4, 4, 4), 99, np.uint8), labels=[0, 1, 2, 0], class_names=np.array(NAMES)
    )
    train, test = own(source="npz:x.npz", test="npz:y.npz", folder=tmp_path)
    assert (len(train), greys(test), test.labels.tolist()) == (30, [99] * 4, [0, 1, 2, 0])
    with pytest.raises(DataError, match=r"there is no .*nowhere\.npz"):
        partition.check_own(DataConfig(source=source, test="npz:nowhere.npz", folder=tmp_path), "c0")


def test_inputs_that_train_and_test_are_told(tmp_path, source, caplog):
    np.savez(tmp_path / "y.npz", inputs=np.full((4, 4, 4), 7, np.uint8), labels=[1] * 4, class_names=np.array(NAMES))
    own(source=source, test=f"npz:{tmp_path / 'y.npz'}")
    assert "shared_samples" in caplog.text
    assert "equal=1 of=4" in caplog.text


def test_no_recording_stands_on_both_sides(tmp_path):
    """Two sources may name overlapping windows of one recording; their inputs need not be equal."""
    arrays = {"samples": np.zeros((60, 2), np.float32), "lengths": [30, 30], "label": [0, 1], "subject": [1, 2]}
    np.savez(tmp_path / "w.npz", **arrays)
    spec = WindowInput(channels=2, length=10, stride=5)
    where = f"windows:{tmp_path / 'w.npz'}"
    with pytest.raises(DataError, match=r"5 of its inputs \('recording 1 from sample 0' …\) are also in"):
        partition.own_samples(DataConfig(source=where, test=f"{where}?subject=2"), "c0", spec, ("0", "1"))
    config = DataConfig(source=f"{where}?subject=1", test=f"{where}?subject=2")
    assert [len(part) for part in partition.own_samples(config, "c0", spec, ("0", "1"))] == [5, 5]


def test_what_cannot_be_used_is_left_out_unless_strict_or_in_a_partition(tmp_path):
    """A partition counts rows: without the second of three recordings, row 2 would be another one."""
    arrays = {"samples": np.zeros((60, 2), np.float32), "lengths": [30, 4, 26], "label": [0, 1, 1]}
    np.savez(tmp_path / "w.npz", **arrays)
    spec = WindowInput(channels=2, length=10, stride=10)
    source = f"windows:{tmp_path / 'w.npz'}"
    take = lambda **given: partition.own_samples(DataConfig(source=source, **given), "c0", spec, ("0", "1"))
    train, test = take()
    assert (len(train), len(test), sorted({*train.groups.tolist()})) == (3, 2, [0, 2])
    assert [str(item) for item in train.skipped] == ["recording 1: has 4 samples, one window needs 10; record longer"]
    pool = partition.Pool.of(np.array([0, 0, 0, 1, 1]), None)
    partition.divided("iid", {}, pool, {"c0": (np.array([0]), np.array([4]))}).write(tmp_path / "p.json")
    for given in ({"strict": True}, {"partition": tmp_path / "p.json"}):
        with pytest.raises(DataError, match="1 of 3 recordings cannot be used"):
            take(**given)

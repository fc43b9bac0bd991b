"""LEAF's sets in their own layout, made as its scripts write them: files of users, divided by sample or by user."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import check, load
from edge_agent.data.partition import parts_of, read_pools
from edge_agent.data.sets.leaf import CHARACTERS, WRITTEN

PLAY = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows"


def writers(count, samples, seed=0):
    """User -> (pixels (n, 784) uint8, labels (n,)), as FEMNIST has them."""
    rng = np.random.default_rng(seed)
    return {
        f"f{number:04d}_{number % 7:02d}": (
            rng.integers(0, 256, (samples, 784), dtype=np.uint8),
            rng.integers(0, 62, samples),
        )
        for number in range(count)
    }


def content_of(users, **more):
    """A file as data_to_json.py writes it: pixels divided by 255, as lists."""
    data = {name: {"x": (pixels / 255).tolist(), "y": labels.tolist()} for name, (pixels, labels) in users.items()}
    counts = [len(labels) for _, labels in users.values()]
    return {"users": [*users], "num_samples": counts, "user_data": data, **more}


def save(root, part, *contents):
    (root / part).mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(contents):
        name = f"all_data_{number}_niid_0_keep_0_{part}_9.json"
        (root / part / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def femnist(tmp_path):
    """Five writers in two files, each of whom has six training and two test samples."""
    made = writers(5, 8)
    train = {name: (pixels[:6], labels[:6]) for name, (pixels, labels) in made.items()}
    test = {name: (pixels[6:], labels[6:]) for name, (pixels, labels) in made.items()}
    names = list(made)
    for part, users in (("train", train), ("test", test)):
        files = [{name: users[name] for name in group} for group in (names[3:], names[:3])]
        # By sample, LEAF's script leaves empty entries of users with one sample in user_data, and hierarchies for them.
        contents = [content_of(file, hierarchies=[None] * 9) for file in files]
        contents[0]["user_data"]["f9999_00"] = {"x": [], "y": []}
        save(tmp_path, part, *contents)
    return tmp_path, made


def test_writers_keep_their_pixels_their_classes_and_their_test_parts(femnist):
    root, made = femnist
    pools = read_pools(f"leaf:{root}")
    assert pools.train.class_names == WRITTEN
    assert (WRITTEN[9], WRITTEN[10], WRITTEN[35], WRITTEN[36], WRITTEN[61]) == ("9", "A", "Z", "a", "z")
    assert pools.train.input.shape == (1, 28, 28)
    for pool, first, last in ((pools.train, 0, 6), (pools.test, 6, 8)):
        rows = pool.users.rows()
        assert list(rows) == sorted(made)
        for name, (pixels, labels) in made.items():
            assert np.array_equal(pool.inputs[rows[name]].reshape(-1, 784), pixels[first:last])
            assert np.array_equal(pool.labels[rows[name]], labels[first:last])
    check(f"leaf:{root}")
    assert parts_of(f"leaf:{root}") == (f"leaf:{root}?split=train", f"leaf:{root}?split=test")


def test_users_are_chosen_by_name_or_drawn_the_same_in_both_parts(femnist):
    root, _ = femnist
    only = load(f"leaf:{root}?user=f0002_02&split=all")
    assert only.users.names == ("f0002_02",)
    assert len(only) == 8
    drawn = set()
    for seed in range(8):
        pools = read_pools(f"leaf:{root}?users=2&seed={seed}")
        assert pools.train.users.names == pools.test.users.names
        assert len(pools.train) == 12
        drawn.add(pools.train.users.names)
    assert len(drawn) > 2, "another seed draws others"


def test_texts_become_positions_among_the_eighty_characters(tmp_path):
    windows = [PLAY[start : start + 80] for start in range(10)]
    following = [PLAY[start + 80] for start in range(10)]
    data = {"HAMLET_HAMLET": {"x": windows[:8], "y": following[:8]}}
    content = {"users": ["HAMLET_HAMLET"], "num_samples": [8], "user_data": data, "hierarchies": ["HAMLET"]}
    save(tmp_path, "train", content)
    data = {"HAMLET_HAMLET": {"x": windows[8:], "y": following[8:]}}
    save(tmp_path, "test", {"users": ["HAMLET_HAMLET"], "num_samples": [2], "user_data": data})
    pools = read_pools(f"leaf:{tmp_path}")
    assert pools.train.input == WindowInput(channels=1, length=80, stride=1)
    assert pools.train.class_names[:3] == ("newline", "space", "!")
    assert pools.train.class_names[3:] == tuple(CHARACTERS[3:])
    text = "".join(CHARACTERS[int(value)] for value in pools.train.inputs[3, 0])
    assert text == PLAY[3:83]
    assert CHARACTERS[pools.test.labels[1]] == PLAY[89]


def test_numbers_of_other_sets_are_windows_or_images_as_the_options_say(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 60)).astype(np.float32)
    data = {"x": values.astype(float).tolist(), "y": [0, 1, 2, 0]}
    save(tmp_path, "all_data", {"users": ["0"], "num_samples": [4], "user_data": {"0": data}})
    found = load(f"leaf:{tmp_path}?kind=window&shape=1,60")
    assert np.array_equal(found.inputs[:, 0], values)
    assert found.class_names == ("0", "1", "2")
    assert parts_of(f"leaf:{tmp_path}") is None, "files that are not divided are held out from"
    with pytest.raises(DataError, match=r"inputs of 60 numbers, and no shape was given; say shape=HEIGHT,WIDTH"):
        load(f"leaf:{tmp_path}")
    with pytest.raises(DataError, match="shape=6,9 was given"):
        load(f"leaf:{tmp_path}?shape=6,9")
    with pytest.raises(DataError, match="not divided into train and test"):
        load(f"leaf:{tmp_path}?split=test")


def test_one_file_is_read_as_the_folder_that_holds_it_alone(tmp_path):
    save(tmp_path, "all_data", content_of(writers(3, 4)))
    (file,) = (tmp_path / "all_data").iterdir()
    folder_samples = load(f"leaf:{tmp_path}")
    (file.parent / "users.json").write_text('{"a": "file of something else"}')
    file_samples = load(f"leaf:{file}")
    assert np.array_equal(file_samples.inputs, folder_samples.inputs)
    assert np.array_equal(file_samples.labels, folder_samples.labels)
    assert parts_of(f"leaf:{file}") is None
    with pytest.raises(DataError, match="one file is not divided into train and test"):
        load(f"leaf:{file}?split=test")


def test_pixels_beside_other_numbers_are_not_taken_for_bytes(tmp_path):
    exact = writers(1, 1)
    data = content_of(exact)
    data["users"].append("other")
    data["num_samples"].append(1)
    data["user_data"]["other"] = {"x": [[0.1234] * 784], "y": [3]}
    save(tmp_path, "all_data", data)
    spec = ImageInput(channels=1, height=28, width=28, mean=(0.0,), std=(1.0,))
    found = load(f"leaf:{tmp_path}", spec)
    ((pixels, _),) = exact.values()
    assert np.allclose(found.inputs[0].ravel(), pixels[0] / 255, atol=1e-6)
    assert np.allclose(found.inputs[1], 0.1234, atol=1e-6)


def test_every_mistake_of_every_file_is_listed_at_once(tmp_path):
    good = writers(1, 2)
    ((name, _),) = good.items()
    counted_wrong = content_of(good) | {"num_samples": [5]}
    ragged = content_of(good)
    ragged["user_data"][name]["x"][1] = [0.5] * 3
    words = content_of(good)
    words["user_data"][name]["y"][0] = "seven"
    many = content_of(good)
    many["user_data"][name]["y"][0] = 10**17
    texts = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": ["abc", "ab"], "y": ["a", "b"]}}}
    letters = {"users": ["b"], "num_samples": [1], "user_data": {"b": {"x": ["a§"], "y": ["ß"]}}}
    missing = content_of(good) | {"user_data": {}}
    save(
        tmp_path, "train", counted_wrong, ragged, words, many, texts, letters, missing, {"users": "all"}, {"users": []}
    )
    save(tmp_path, "test", content_of(good))
    with pytest.raises(DataError) as caught:
        load(f"leaf:{tmp_path}?user=f0000_99")
    message = str(caught.value)
    assert "all_data_0_niid_0_keep_0_train_9.json, user 'f0000_00': num_samples is 5, and there are 2 inputs" in message
    assert "'users' is str, expected a list of names" in message
    assert "'user_data' is missing, expected an object" in message
    assert "no lists x and y in user_data" in message
    assert "no user 'f0000_99' (did you mean 'f0000_00'?)" in message
    with pytest.raises(DataError) as caught:
        load(f"leaf:{tmp_path}")
    message = str(caught.value)
    for part in (
        "inputs are no lists of numbers of one length",
        "labels are <U",
        "has the label 100000000000000000, expected classes 0..65535",
        "user 'a': expected texts of one length",
        "user 'b': characters that are not among LEAF's 80: '§', 'ß'",
    ):
        assert part in message, part


def test_damaged_files_and_folders_without_them_say_what_is_expected(femnist, tmp_path_factory):
    root, _ = femnist
    file = next((root / "train").iterdir())
    whole = file.read_bytes()
    for content, problem in (
        (whole[: len(whole) // 2], "cannot be read"),
        (b"[1, 2]", "holds list"),
        (b'{"users": [NaN]}', "NaN is not a number"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff\xfe", "it is not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=f"{problem}.*download it again"):
            load(f"leaf:{root}")
    for path in (root / "train").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"there are no \.json files in .*train"):
        load(f"leaf:{root}")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(DataError, match=r"no folders train and test, and no \.json files.*'num_samples'"):
        load(f"leaf:{empty}")
    (empty / "train").mkdir()
    with pytest.raises(DataError, match="there is a folder train alone"):
        load(f"leaf:{empty}")
    with pytest.raises(ConfigError, match="users"):
        load(f"leaf:{root}?users=0")


def test_a_file_that_would_not_fit_into_memory_is_refused_before_it_is_parsed(femnist, monkeypatch):
    root, _ = femnist
    monkeypatch.setattr("edge_agent.data.sets.leaf.memory_budget_bytes", lambda: 1 << 14)
    with pytest.raises(DataError, match=r"MB of memory to parse, and 0 MB are free here; write files of fewer users"):
        load(f"leaf:{root}")


def test_a_small_file_of_very_many_lists_is_refused_before_it_is_parsed(femnist, monkeypatch):
    """Three bytes become seventy: the size of the file alone would be let through."""
    root, _ = femnist
    file = next((root / "train").iterdir())
    file.write_bytes(b"[" + b"[]," * 100_000 + b"1]")
    monkeypatch.setattr("edge_agent.data.sets.leaf.memory_budget_bytes", lambda: 1 << 20)
    with pytest.raises(DataError, match=r"takes about 17 MB of memory to parse, and 4 MB are free here"):
        load(f"leaf:{root}")


def test_more_users_than_there_are_is_a_mistake(femnist):
    root, _ = femnist
    with pytest.raises(DataError, match="users=9, and 5 have samples; ask for fewer"):
        load(f"leaf:{root}?users=9")

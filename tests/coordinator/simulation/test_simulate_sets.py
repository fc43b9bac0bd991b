"""Sets of several domains or people in a simulation: each a client, with the test part that the set has for it."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from PIL import Image

from coordinator.simulation import datasets
from coordinator.simulation.plan import Plan
from edge_agent.core.errors import DataError, UsageError
from edge_agent.data.sets import officecaltech, pacs, ucihar

SMALL = {"encoder": "linear", "input": {"height": 4, "width": 4, "mean": 0.0, "std": 1.0}}


def prepared(source, **changes):
    return datasets.prepare(Plan(data=(source,), **{"partition": "domains", **SMALL, **changes}))


def paint(path, *colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), colour).save(path)


@pytest.fixture
def pacs_folder(tmp_path):
    """Red tells the domain, green the class, blue the part; three training images of a class and one for testing."""
    names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    for place, domain in enumerate(pacs.FACTS.domains):
        lists = {"train": [], "crossval": []}
        for label, name in enumerate(names):
            for number in range(4):
                part = "crossval" if number == 3 else "train"
                paint(tmp_path / "kfold" / domain / name / f"{number}.png", 50 * place, 30 * label, 255 * (number == 3))
                lists[part].append(f"{domain}/{name}/{number}.png {label + 1}")
        for part, lines in lists.items():
            (tmp_path / f"{domain}_{part}_kfold.txt").write_text("\n".join(lines))
    return tmp_path


def colours(part):
    return (part.inputs[:, :, 0, 0] * 255).round().astype(int)


def test_each_domain_trains_and_tests_on_its_own_official_parts(pacs_folder):
    found, division, task = prepared(f"pacs:{pacs_folder}")
    assert list(division.clients) == list(pacs.FACTS.domains)
    assert task.num_classes == 7
    assert (len(found.train), len(found.test)) == (4 * 21, 4 * 7)
    for place, share in enumerate(division.clients.values()):
        train, test = found.arrays(share)
        assert set(colours(train)[:, 0]) == set(colours(test)[:, 0]) == {50 * place}
        assert set(colours(train)[:, 2]) == {0}
        assert set(colours(test)[:, 2]) == {255}
        assert (colours(test)[:, 1] == 30 * test.labels).all()
        assert np.bincount(train.labels).tolist() == [3] * 7


def test_fewer_training_images_of_each_domain_leave_the_test_part_whole(pacs_folder):
    _, division, _ = prepared(f"pacs:{pacs_folder}?n=5&domain=photo,sketch")
    assert {name: (len(share.train), len(share.test)) for name, share in division.clients.items()} == {
        "photo": (5, 7),
        "sketch": (5, 7),
    }
    hashes = {prepared(f"pacs:{pacs_folder}?n=5", seed=seed)[1].sha256 for seed in (0, 0, 1)}
    assert len(hashes) == 2


def test_a_saved_partition_of_domains_is_used_again(pacs_folder, tmp_path):
    _, division, _ = prepared(f"pacs:{pacs_folder}")
    division.write(tmp_path / "partition.json")
    _, again, _ = prepared(f"pacs:{pacs_folder}", partition=str(tmp_path / "partition.json"))
    assert again == division


def test_validation_of_domains_never_sees_their_test_parts(pacs_folder):
    found, division, _ = prepared(f"pacs:{pacs_folder}", validation=0.34)
    assert found.test is None
    assert {len(share.test) for share in division.clients.values()} == {7}
    rows = [row for share in division.clients.values() for row in share.train + share.test]
    assert sorted(rows) == list(range(84))


def test_a_split_that_was_chosen_is_the_only_part_and_clients_hold_some_of_it_back(pacs_folder):
    found, division, _ = prepared(f"pacs:{pacs_folder}?split=train", test_fraction=0.34)
    assert found.test is None
    assert {(len(share.train), len(share.test)) for share in division.clients.values()} == {(14, 7)}


def test_domains_of_a_set_without_official_split(tmp_path):
    for domain in officecaltech.FACTS.domains:
        for label in range(10):
            for number in range(5):
                paint(tmp_path / domain / f"thing_{label}" / f"{number}.png", 20 * label, 40 * number, 0)
    found, division, _ = prepared(f"officecaltech:{tmp_path}")
    assert {(len(share.train), len(share.test)) for share in division.clients.values()} == {(40, 10)}
    for share in division.clients.values():
        train, test = found.arrays(share)
        assert len({*map(tuple, colours(train)), *map(tuple, colours(test))}) == 50


def idx(path, array):
    content = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", side) for side in array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content))


def test_sources_given_one_by_one_keep_their_parts_where_all_of_them_have_some(tmp_path):
    for place, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        for stem, count in (("train", 20), ("t10k", 10)):
            idx(tmp_path / name / f"{stem}-images-idx3-ubyte.gz", np.full((count, 4, 4), 100 * place, np.uint8))
            idx(tmp_path / name / f"{stem}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 2)
    both = tuple(f"idx:{tmp_path / name}" for name in ("one", "two"))
    found, division, _ = datasets.prepare(Plan(data=both, partition="domains", encoder="linear"))
    assert {(len(share.train), len(share.test)) for share in division.clients.values()} == {(20, 10)}
    assert len(found.test) == 20
    mixed = (both[0], f"{both[1]}?split=test")
    found, division, _ = datasets.prepare(Plan(data=mixed, partition="domains", encoder="linear", test_fraction=0.5))
    assert found.test is None
    assert {name: (len(share.train), len(share.test)) for name, share in division.clients.items()} == {
        "one": (10, 10),
        "two": (6, 4),
    }


@pytest.fixture
def har(tmp_path):
    """Three people with two recordings of eight windows each; two of them in the training part."""
    for part, people in (("train", (1, 3)), ("test", (2,))):
        (tmp_path / part / "Inertial Signals").mkdir(parents=True)
        rows = [(person, 1 + turn) for person in people for turn in range(2) for _ in range(8)]
        (tmp_path / part / f"subject_{part}.txt").write_text("".join(f"{person}\n" for person, _ in rows))
        (tmp_path / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for _, label in rows))
        for signal in ucihar.SIGNALS:
            lines = "".join(128 * f"{person:16.7e}" + "\n" for person, _ in rows)
            (tmp_path / part / "Inertial Signals" / f"{signal}_{part}.txt").write_text(lines)
    (tmp_path / "activity_labels.txt").write_text("1 WALKING\n2 SITTING\n")
    return tmp_path


def test_each_person_of_uci_har_is_a_client_and_time_splits_each_recording(har):
    """Of eight windows two test; the one before them, which shares samples with them, is left out."""
    found, division, task = datasets.prepare(Plan(data=(f"ucihar:{har}",), partition="subjects"))
    assert list(division.clients) == ["subject-1", "subject-2", "subject-3"]
    assert task.encoder == "cnn1d"
    assert task.class_names == ("sitting", "walking")
    for name, share in division.clients.items():
        assert (len(share.train), len(share.test)) == (10, 4)
        assert {float(part.inputs.min()) for part in found.arrays(share)} == {float(name[-1])}
    _, division, _ = datasets.prepare(Plan(data=(f"ucihar:{har}?split=train&exclude_subject=1",), partition="subjects"))
    assert list(division.clients) == ["subject-3"]


def test_what_cannot_be_divided_so_is_told(pacs_folder, har, tmp_path):
    for rule, source, words in (
        ("domains", f"ucihar:{har}", "a set of several: digits5, domainnet"),
        ("subjects", f"pacs:{pacs_folder}", "expected windows:FILE or ucihar:DIR"),
        ("subjects", f"ucihar:{har}?subject=1", "without the option subject"),
    ):
        with pytest.raises(UsageError, match=words):
            datasets.prepare(Plan(data=(source,), partition=rule))
    with pytest.raises(DataError, match="no PACS in"):
        prepared(f"pacs:{tmp_path / 'nowhere'}")

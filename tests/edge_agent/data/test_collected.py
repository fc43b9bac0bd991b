"""Samples that a person labels on a device: what stays, what is dropped, and what classes are called."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from edge_agent.core.errors import DataError, StateError, UsageError
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import Samples, load
from edge_agent.data.collected import Collection, labelled
from edge_agent.data.splitting import same_sitting

SPEC = ImageInput(channels=1, height=4, width=4, mean=(0.5,), std=(0.25,))
DIGITS = tuple("0123456789")


def images(count, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 1, 4, 4), dtype=np.uint8)
    return Samples(pixels, np.full(count, -1), (), SPEC)


@pytest.fixture
def collection(tmp_path):
    return Collection(tmp_path / "samples")


def counts(collection):
    labels = [entry.label for entry in collection.index().samples]
    return {label: labels.count(label) for label in dict.fromkeys(labels)}


def test_samples_come_back_normalised_and_a_quarter_is_held_out(collection):
    given = images(8)
    assert collection.add(labelled(given, "scarf")).added == 8
    train, test = collection.combined(None, SPEC, DIGITS)
    assert (len(train), len(test)) == (6, 2)
    expected = (given.inputs / 255 - 0.5) / 0.25
    np.testing.assert_allclose(train.inputs, expected[[0, 1, 3, 4, 5, 7]], atol=1e-5)
    np.testing.assert_allclose(test.inputs, expected[[2, 6]], atol=1e-5)
    assert train.class_names == ("scarf",)
    read = load(f"collected:{collection.folder}", SPEC)
    np.testing.assert_allclose(read.inputs, expected, atol=1e-5)


def test_more_samples_do_not_move_others_to_the_other_side(collection):
    first = images(5)
    collection.add(labelled(first, "a"))
    before = {entry.id: entry.held_out for entry in collection.index().samples}
    collection.add(labelled(images(20, seed=1), "a"))
    after = {entry.id: entry.held_out for entry in collection.index().samples}
    assert before.items() <= after.items()
    assert sum(after.values()) == 6


def test_a_sample_that_is_added_again_is_kept_once_and_may_change_its_class(collection):
    collection.add(labelled(images(3), "a"))
    found = collection.add(labelled(images(3), "b"))
    assert (found.added, found.known) == (0, 3)
    assert counts(collection) == {"b": 3}
    assert len(list(collection.folder.glob("*.safetensors"))) == 3


def test_beyond_the_budget_the_oldest_of_the_largest_class_goes(collection):
    collection.add(labelled(images(6), "many"))
    oldest = [entry.id for entry in collection.index().samples][:3]
    collection.add(labelled(images(2, seed=1), "few"))
    found = collection.add(labelled(images(1, seed=2), "few"), budget=6)
    assert (found.added, found.dropped) == (1, 3)
    assert counts(collection) == {"many": 3, "few": 3}
    assert not {entry.id for entry in collection.index().samples} & set(oldest)
    assert len(list(collection.folder.glob("*.safetensors"))) == 6


def test_new_classes_stand_behind_the_others_and_renamed_ones_keep_their_place(collection):
    own = (Samples(np.zeros((4, 1, 4, 4), np.float32), np.arange(4), tuple("0123"), SPEC),) * 2
    collection.add(labelled(images(4), "scarf"))
    collection.add(labelled(images(4, seed=1), "2"))
    train, _ = collection.combined(own, SPEC, DIGITS)
    assert train.class_names == ("0", "1", "2", "3", "scarf")
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 4, 4, 2, 2, 2]
    collection.rename("1", "one", own[0].class_names)
    collection.add(labelled(images(1, seed=2), "hat"))
    train, _ = collection.combined(own, SPEC, DIGITS, before=train.class_names)
    assert train.class_names == ("0", "one", "2", "3", "scarf", "hat")
    collection.merge(["scarf", "hat"], "clothes", own[0].class_names)
    collection.remove(["3"], own[0].class_names)
    train, _ = collection.combined(own, SPEC, DIGITS, before=train.class_names)
    assert train.class_names == ("0", "one", "2", "clothes")
    assert train.labels.tolist() == [0, 1, 2, 3, 3, 3, 2, 2, 2, 3]
    collection.add(labelled(images(1, seed=3), "3"))  # a removed class that is added is there again
    train, _ = collection.combined(own, SPEC, DIGITS, before=train.class_names)
    assert train.class_names == ("0", "one", "2", "clothes", "3")
    collection.add(labelled(images(1, seed=4), "hat"))
    assert counts(collection)["clothes"] == 6


def test_classes_of_the_bundle_come_first_where_there_are_no_other_samples(collection):
    collection.add(labelled(images(1), "scarf"))
    assert collection.combined(None, SPEC, DIGITS)[0].class_names == ("scarf",)
    collection.add(labelled(images(1, seed=1), "4"))
    assert collection.combined(None, SPEC, DIGITS)[0].class_names == (*DIGITS, "scarf")
    assert collection.combined(None, SPEC, DIGITS, before=("scarf",))[0].class_names[0] == "scarf"


def test_classes_that_nobody_knows_any_more_go(collection):
    """A bundle for other classes replaces that of the digits; the head before knew these and 'scarf'."""
    collection.add(labelled(images(4), "scarf"))
    before = (*DIGITS, "scarf")
    assert collection.combined(None, SPEC, ("cat", "dog"), before)[0].class_names == ("scarf",)
    own = (Samples(np.zeros((2, 1, 4, 4), np.float32), np.arange(2), ("cat", "dog"), SPEC),) * 2
    train, _ = collection.combined(own, SPEC, ("cat", "dog"), before)
    assert train.class_names == ("scarf", "cat", "dog")
    assert [train.class_names[label] for label in train.labels] == ["cat", "dog", "scarf", "scarf", "scarf"]
    collection.rename("dog", "puppy", ("cat", "dog"))
    now = collection.combined(own, SPEC, ("cat", "dog"), ("scarf", "dog", "cat"))[0].class_names
    assert now == ("scarf", "puppy", "cat")


def test_classes_that_are_the_bundles_have_its_order(collection):
    own = (Samples(np.zeros((2, 1, 4, 4), np.float32), np.arange(2), ("cat", "dog"), SPEC),) * 2
    collection.add(labelled(images(4), "dog"))
    assert collection.combined(own, SPEC, ("cat", "dog"), ("dog", "cat"))[0].class_names == ("cat", "dog")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.rename("scraf", "hat"), r"did you mean 'scarf'"),
        (lambda c: c.rename("scarf", "0", DIGITS), "edge-agent classes merge scarf 0"),
        (lambda c: c.remove(["scarf", "9"]), "there are scarf"),
        (lambda c: c.merge(["scarf", "nope"], "x"), "no class 'nope'"),
    ],
)
def test_mistakes_change_nothing(collection, change, words):
    collection.add(labelled(images(2), "scarf"))
    before = collection.index()
    with pytest.raises(UsageError, match=words):
        change(collection)
    assert collection.index() == before


def test_windows_of_one_recording_stay_on_one_side_of_time(collection):
    spec = WindowInput(channels=2, length=8, stride=4, mean=(1.0, 2.0), std=(2.0, 3.0))
    signal = np.random.default_rng(0).normal(size=(84, 2)).astype(np.float32)
    windows = np.stack([signal[start : start + 8].T for start in range(0, 77, 4)])
    normal = (windows - np.array([[1.0], [2.0]])) / np.array([[2.0], [3.0]])
    given = Samples(normal.astype(np.float32), np.full(20, -1), (), spec, np.zeros(20, np.int64))
    assert collection.add(labelled(given, "walk")).added == 19  # one between the two parts overlaps both
    train, test = collection.combined(None, spec, ("run",))
    assert (len(train), len(test)) == (14, 5)
    np.testing.assert_allclose(test.inputs, normal[15:], atol=1e-5)
    assert len(np.unique(train.groups)) == 1
    assert same_sitting(train, test) == 1.0
    ready = replace(given, labels=np.zeros(20, np.int64), class_names=("walk",))
    for groups, share in ((np.arange(20), 5 / 7), (None, 5 / 7), (np.zeros(20, np.int64), 1.0)):
        own = replace(ready, groups=groups)
        parts = collection.combined((own.take(np.arange(18)), own.take(np.arange(18, 20))), spec, ("walk",))
        assert same_sitting(*parts) == share, "two of the device's other source, and five of the collection"
    read = load(f"collected:{collection.folder}", spec)
    np.testing.assert_allclose(read.inputs, np.delete(normal, 14, axis=0), atol=1e-5)


def test_a_collection_for_other_inputs_or_a_damaged_one_says_so(collection):
    with pytest.raises(DataError, match="edge-agent add"):
        collection.combined(None, SPEC, DIGITS)
    collection.add(labelled(images(2), "a"))
    with pytest.raises(StateError, match="another task"):
        collection.combined(None, SPEC.model_copy(update={"width": 5}), DIGITS)
    (collection.folder / "index.json").write_text(json.dumps({"samples": 3}))
    with pytest.raises(StateError, match="put it back from a backup"):
        collection.index()


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 300])
def test_impossible_labels_are_refused(label):
    with pytest.raises(DataError, match="label"):
        labelled(images(1), label)

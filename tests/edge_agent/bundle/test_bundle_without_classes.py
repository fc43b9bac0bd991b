"""Bundles that have no classes of their own: what a device does with them, and what they must not contain."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from edge_agent import Personalizer, data
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import BundleDamaged, DataError, UsageError
from edge_agent.core.task import EncoderTask, ImageInput, Task

GREY = ImageInput(channels=1, height=6, width=6)


@pytest.fixture
def bundle(make_bundle):
    return make_bundle(task=EncoderTask(input=GREY, encoder="theirs"))


@pytest.fixture
def samples():
    """Pictures of two kinds: bright above or below."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 100, (40, 6, 6), dtype=np.uint8)
    pictures[::2, :3] += 150
    pictures[1::2, 3:] += 150
    return pictures, np.array(["above", "below"] * 20)


def test_what_is_trained_together_has_classes():
    with pytest.raises(ValidationError):
        Task(input=GREY, class_names=())
    with pytest.raises(ValidationError):
        EncoderTask(input=GREY, class_names=("a",))


def test_the_manifest_has_a_task_without_classes(bundle):
    task = open_bundle(bundle.path).manifest.task
    assert isinstance(task, EncoderTask)
    assert task.num_classes == 0


def test_a_manifest_with_classes_has_a_task_like_any_other(make_bundle):
    assert type(open_bundle(make_bundle().path).manifest.task) is Task


def test_a_shared_classifier_of_no_classes_is_refused(make_bundle):
    with pytest.raises(BundleDamaged, match="a shared classifier of no classes"):
        make_bundle(task=EncoderTask(input=GREY, encoder="theirs"), global_head=True)


@pytest.mark.parametrize("own_classes", [False, True])
def test_a_head_has_the_classes_of_its_samples(bundle, samples, own_classes):
    pictures, labels = samples
    personalizer = Personalizer.open(bundle.path).fit(pictures, labels, own_classes=own_classes)
    assert personalizer.classes == ("above", "below")
    assert (personalizer.predict(pictures) == labels).mean() > 0.9


def test_samples_that_were_read_before_keep_their_classes(bundle, samples):
    pictures, labels = samples
    read = data.from_python(pictures, labels, GREY, (), own_classes=True)
    assert Personalizer.open(bundle.path).fit(read).classes == ("above", "below")


def test_classes_come_one_after_the_other(bundle, samples):
    pictures, labels = samples
    personalizer = Personalizer.open(bundle.path)
    personalizer.partial_fit(pictures[::2], labels[::2], head="prototype")
    personalizer.partial_fit(pictures[1::2], labels[1::2])
    assert personalizer.classes == ("above", "below")


def test_integers_are_names(bundle, samples):
    pictures, labels = samples
    personalizer = Personalizer.open(bundle.path).fit(pictures, (labels == "below").astype(int) + 7)
    assert personalizer.classes == ("7", "8")


def test_without_a_head_nobody_answers(bundle, samples):
    with pytest.raises((UsageError, DataError), match="fit"):
        Personalizer.open(bundle.path).predict(samples[0])

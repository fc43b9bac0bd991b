from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, DataError, MissingCapability, UnknownName
from edge_agent.data import load

DOMAINS = ("optdigits", "inverted", "photo", "rendered")


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    from edge_agent.data.digits import load as load_files

    images, labels = load_files()
    reference = load_digits()
    assert (labels == reference.target).all()
    assert np.abs(images - reference.images * (255 / 16)).max() <= 0.5


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_has_the_same_form_and_follows_its_seed(domain):
    first, again, other = (load(f"digits:{domain}?n=40&seed={seed}") for seed in (0, 0, 1))
    assert first.inputs.shape == (40, 3, 32, 32)
    assert first.class_names == tuple("0123456789")
    assert -1 <= first.inputs.min() < first.inputs.max() <= 1
    assert (first.inputs == again.inputs).all()
    assert (first.labels == again.labels).all()
    assert (first.inputs != other.inputs).any()


@pytest.mark.parametrize("domain", DOMAINS)
def test_devices_get_disjoint_parts(domain):
    parts = [load(f"digits:{domain}?n=60&client={client}&clients=3") for client in range(3)]
    pictures = [part.inputs[row].tobytes() for part in parts for row in range(60)]
    assert len(set(pictures)) == len(pictures)


def test_the_parts_of_all_devices_are_the_whole():
    sizes = [len(load(f"digits?client={client}&clients=4")) for client in range(4)]
    assert sum(sizes) == 1797
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_device_may_know_some_digits_only(domain):
    assert set(load(f"digits:{domain}?n=30&classes=2,7").labels) == {2, 7}


def test_more_rendered_digits_begin_with_the_same_ones():
    assert (load("digits:rendered?n=20").inputs[:5] == load("digits:rendered?n=5").inputs).all()


def test_a_photo_domain_is_harder_for_nearest_means_than_the_plain_one():
    """The domains must differ: class means of one domain do badly on another."""
    plain = load("digits?n=800")
    photo = load("digits:photo?n=800")
    means = np.stack([plain.inputs[plain.labels == label].mean(axis=0).ravel() for label in range(10)])

    def score(samples):
        rows = samples.inputs.reshape(len(samples), -1)
        nearest = ((rows[:, None] - means[None]) ** 2).sum(axis=2).argmin(axis=1)
        return (nearest == samples.labels).mean()

    assert score(plain) > 0.85
    assert score(photo) < 0.5


def test_asking_for_more_than_there_is_says_how_many_there_are():
    with pytest.raises(DataError, match="holds 449"):
        load("digits?n=500&client=1&clients=4")


def test_unknown_domains_and_classes_are_named():
    with pytest.raises(UnknownName, match="'photo'"):
        load("digits:foto")
    with pytest.raises(ConfigError, match=r"0\.\.9"):
        load("digits:rendered?classes=11")


def test_without_scikit_learn_the_rendered_digits_are_named_and_work(monkeypatch):
    from edge_agent.data import digits

    digits.load.cache_clear()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else real(name, *rest)
    )
    with pytest.raises(MissingCapability, match="digits:rendered"):
        load("digits")
    assert len(load("digits:rendered?n=3")) == 3


def test_loading_digits_imports_no_scikit_learn():
    code = (
        "import sys\n"
        "from edge_agent.data import load\n"
        "load('digits:photo?n=5'); load('digits:rendered?n=5')\n"
        "assert not {'sklearn', 'scipy', 'torch', 'onnxruntime'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

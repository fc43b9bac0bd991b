"""Two int8 variants of one encoder are two encoders: nothing computed with one is used with the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.bundle import installed
from edge_agent.core.errors import FingerprintMismatch
from edge_agent.data import load
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import load_head, personalize
from edge_agent.training.parts import encoder_and_head
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle


@pytest.fixture(scope="module")
def pair(task, tmp_path_factory):
    """One encoder, calibrated on inputs of two scales: the fp32 files are equal, the int8 files are not."""
    torch.manual_seed(0)
    model = encoder_and_head(task)
    folder = tmp_path_factory.mktemp("bundles")
    noise = np.random.default_rng(3).normal(size=(40, *task.input_shape)).astype(np.float32)
    opened = []
    for name, scale in (("narrow", 0.2), ("wide", 1.0)):
        report = build_bundle(
            TrainedEncoder(model, methods.create("fedavg"), task),
            Calibration.from_inputs(scale * noise),
            folder / f"{name}.hwb",
            BundleOptions(name, created="2026-01-02T03:04:05+00:00", exporter="legacy"),
        )
        opened.append(installed.install(report.path, folder / "installed", keep=2))
    return opened


def test_only_the_int8_variants_have_fingerprints_of_their_own(pair):
    narrow, wide = (bundle.fingerprints for bundle in pair)
    assert narrow["fp32"] == wide["fp32"]
    assert len({narrow["fp32"], narrow["int8"], wide["int8"]}) == 3
    assert pair[0].id != pair[1].id


def test_cached_features_of_one_are_not_those_of_the_other(pair, task, tmp_path):
    samples = load("digits:optdigits?n=60&classes=0,1,2", task.input)
    shared = [personalize(b, samples, Encoder.open(b, "int8"), FitOptions(cache=tmp_path)) for b in pair]
    alone = [personalize(b, samples, Encoder.open(b, "int8")) for b in pair]
    weights = [result.head.arrays["weight"] for result in shared]
    assert not np.array_equal(*weights)
    for with_cache, without in zip(shared, alone, strict=True):
        np.testing.assert_array_equal(with_cache.head.arrays["weight"], without.head.arrays["weight"])


def test_a_head_fitted_on_one_is_refused_with_the_other(pair, task, tmp_path):
    samples = load("digits:optdigits?n=60&classes=0,1,2", task.input)
    personalize(pair[0], samples, Encoder.open(pair[0], "int8")).save(tmp_path)
    assert load_head(tmp_path, pair[0]).precision == "int8"
    with pytest.raises(FingerprintMismatch, match="fit again"):
        load_head(tmp_path, pair[1])


def test_fp32_features_and_heads_serve_both(pair, task, tmp_path):
    samples = load("digits:optdigits?n=60&classes=0,1,2", task.input)
    personalize(pair[0], samples, Encoder.open(pair[0], "fp32")).save(tmp_path)
    assert load_head(tmp_path, pair[1]).precision == "fp32"

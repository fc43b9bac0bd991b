"""int8 only where it is faster by repeated timings and as accurate on local data; else fp32."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from edge_agent.bundle import installed
from edge_agent.core.errors import BundleDamaged
from edge_agent.data import load
from edge_agent.personal import encoder as encoder_module
from edge_agent.personal import precision as module
from edge_agent.personal import variants
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.precision import Refit, choose, count_right, open_encoder
from edge_agent.personal.variants import Timing, timed


@pytest.fixture
def bundle(make_bundle, tmp_path):
    return installed.install(make_bundle(dim=48, int8=True).path, tmp_path / "bundles")


def samples(bundle, count=240):
    task = bundle.manifest.task
    return load(f"digits?n={count}", task.input, task.class_names)


class Ticks:
    """A clock by which each pair of readings lies as far apart as the encoder is said to need."""

    def __init__(self, *durations: float) -> None:
        self.durations = itertools.cycle(durations)
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += next(self.durations)
        return self.now


def abba(fp32, int8):
    return Ticks(fp32, int8, int8, fp32)


@pytest.mark.parametrize(
    "fp32, int8, expected",
    [
        (0.4, 0.1, "int8"),
        (0.4, 0.38, "fp32"),  # saves 5 %
        (0.1, 0.4, "fp32"),
        (0.0010, 0.0006, "fp32"),  # saves 40 %, which are 0.4 ms
        (0.0100, 0.0090, "int8"),  # saves 10 % and 1 ms
        (0.0100, 0.0091, "fp32"),
    ],
)
def test_int8_must_be_clearly_faster_and_the_answer_is_kept(bundle, fp32, int8, expected):
    clock = abba(fp32, int8)
    assert choose(bundle, samples(bundle), clock=clock).precision == expected
    calls = clock.calls
    assert choose(bundle, samples(bundle), clock=abba(int8, fp32)).precision == expected, "a restart does not flip it"
    assert clock.calls == calls


def test_two_equal_encoders_are_never_told_apart_by_the_machines_drift(bundle):
    """A machine that slows down by 1 % with each run: in a fixed order the second would always lose."""
    drift = Ticks(*(0.010 * 1.01**turn for turn in range(160)))
    found = timed({name: Encoder.open(bundle, name) for name in ("fp32", "int8")}, drift)
    assert not found.is_faster
    assert found.int8_ms == pytest.approx(found.fp32_ms, rel=1e-3)


@pytest.mark.slow
def test_timings_under_load_choose_int8_for_equal_encoders_in_less_than_one_case_of_fifty(bundle):
    """Each run takes 10 ms, and one of three is interrupted for up to 30 ms more."""
    encoders = {name: Encoder.open(bundle, name) for name in ("fp32", "int8")}
    rng = np.random.default_rng(0)
    chosen = 0
    for _ in range(200):
        late = rng.uniform(0, 0.03, 160) * (rng.random(160) < 1 / 3)
        chosen += timed(encoders, Ticks(*(0.01 + late))).is_faster
    assert chosen < 4


def test_an_encoder_of_half_the_time_is_found_under_the_same_load(bundle):
    encoders = {name: Encoder.open(bundle, name) for name in ("fp32", "int8")}
    rng = np.random.default_rng(0)
    base = np.tile([0.02, 0.005, 0.005, 0.02], 40)
    late = rng.uniform(0, 0.01, 160) * (rng.random(160) < 1 / 3)
    assert timed(encoders, Ticks(*(base + late))).is_faster


def test_one_thread_is_timed_by_its_own_cpu_time_so_that_other_load_does_not_count(bundle, monkeypatch):
    import time

    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("wall clock"))
    assert choose(bundle, samples(bundle), threads=1).precision in {"fp32", "int8"}


def fast_int8(monkeypatch):
    monkeypatch.setattr(module, "timed", lambda *_: Timing(2.0, 1.0, is_faster=True))


def test_answers_are_counted_by_refitted_heads_on_samples_that_they_did_not_learn_from(bundle):
    """Against scikit-learn on features by hand; what is held out are quarters of each class."""
    given = samples(bundle)
    encoders = {name: Encoder.open(bundle, name) for name in ("fp32", "int8")}
    found = count_right(encoders, given, Refit(seed=5))
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    rows = encoders["fp32"].features(given.inputs)
    rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    share = (cross_val_predict(LogisticRegression(max_iter=2000), rows, given.labels, cv=4) == given.labels).mean()
    assert found["of"] == pytest.approx(len(given), abs=20)
    assert found["fp32"] / found["of"] == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("lost, expected", [(0, "int8"), (1, "int8"), (2, "fp32"), (40, "fp32")])
def test_half_a_point_is_the_most_that_int8_may_lose(bundle, monkeypatch, lost, expected):
    fast_int8(monkeypatch)
    monkeypatch.setattr(module, "count_right", lambda *_: {"fp32": 200, "int8": 200 - lost, "of": 240})
    choice = choose(bundle, samples(bundle))
    assert choice.precision == expected
    assert f"{100 * (200 - lost) / 240:.1f} %" in choice.why


def test_int8_features_that_lost_the_classes_are_not_used_however_fast(make_bundle, tmp_path, monkeypatch):
    """An int8 variant with one grid step for all weights: the self-test passes, the accuracy is gone."""
    fast_int8(monkeypatch)
    bundle = installed.install(make_bundle(dim=48, int8=True, int8_steps=2).path, tmp_path / "b")
    choice = choose(bundle, samples(bundle))
    assert choice.precision == "fp32"
    assert "int8 may lose 0.5 %" in choice.why


def test_too_few_samples_to_tell_half_a_point_mean_fp32(bundle, monkeypatch):
    fast_int8(monkeypatch)
    choice = choose(bundle, samples(bundle, 100))
    assert choice.precision == "fp32"
    assert "200 are needed" in choice.why


def test_no_recording_learns_and_answers(make_bundle, tmp_path, monkeypatch):
    """Windows of a recording overlap: a head that has learned from some of them knows the others."""
    bundle = installed.install(make_bundle(dim=48, int8=True).path, tmp_path / "b")
    given = replace(samples(bundle, 100), groups=np.arange(100) // 5)
    seen = []
    real = variants.folds
    monkeypatch.setattr(variants, "folds", lambda *all: seen.extend(real(*all)) or seen)
    found = count_right({name: Encoder.open(bundle, name) for name in ("fp32", "int8")}, given)
    assert seen
    assert all(not set(given.groups[fold.train]) & set(given.groups[fold.test]) for fold in seen)
    assert found["of"] == 100


def test_other_samples_are_compared_anew_and_the_same_ones_are_not(bundle, monkeypatch):
    fast_int8(monkeypatch)
    seen = []
    answers = {"fp32": 200, "int8": 200, "of": 240}
    monkeypatch.setattr(module, "count_right", lambda *given: seen.append(len(given[1])) or answers)
    for count in (240, 240, 220):
        choose(bundle, samples(bundle, count))
    assert seen == [240, 220]


@pytest.mark.parametrize("what", ["processor", "threads", "record"])
def test_it_is_decided_again_where_something_changed(bundle, monkeypatch, what):
    given = samples(bundle)
    first = abba(0.01, 0.02)
    choose(bundle, given, clock=first)
    if what == "processor":
        monkeypatch.setattr(encoder_module, "processor", lambda: "other")
    if what == "record":
        (bundle.made / "precision.json").write_bytes(b"[")
    again = abba(0.01, 0.02)
    choose(bundle, given, 2 if what == "threads" else 1, clock=again)
    assert again.calls == first.calls


def test_the_record_names_processor_runtime_and_variants(bundle):
    choose(bundle, samples(bundle), clock=abba(0.0123, 0.0119))
    record = json.loads((bundle.made / "precision.json").read_text())
    assert set(record["on"]) == {"processor", "onnxruntime", "providers", "threads", "fingerprints"}
    assert record["on"]["providers"] == {name: ["CPUExecutionProvider"] for name in ("fp32", "int8")}
    assert record["on"]["fingerprints"] == bundle.fingerprints
    assert record["timing"] == {"fp32_ms": 12.3, "int8_ms": 11.9, "is_faster": False}


def test_a_device_that_fails_the_self_test_of_int8_alone_uses_fp32(make_bundle, tmp_path, monkeypatch):
    fast_int8(monkeypatch)
    bundle = installed.install(make_bundle(dim=48, int8=True, int8_golden_error=1.0).path, tmp_path / "b")
    choice = choose(bundle, samples(bundle))
    assert (choice.precision, "self-test: int8" in choice.why) == ("fp32", True)
    assert open_encoder(bundle, "auto", samples(bundle)).precision == "fp32"
    with pytest.raises(BundleDamaged, match="self-test: int8"):
        open_encoder(bundle, "int8", None)


def test_a_device_that_fails_the_self_test_of_fp32_uses_neither(make_bundle, tmp_path):
    bundle = installed.install(make_bundle(int8=True, golden_error=1.0).path, tmp_path / "b")
    with pytest.raises(BundleDamaged, match="self-test: fp32"):
        choose(bundle, samples(bundle))


def test_nothing_is_measured_where_there_is_nothing_to_choose(bundle, make_bundle, tmp_path):
    def never() -> float:
        raise AssertionError("timed")

    alone = installed.install(make_bundle("alone.hwb").path, tmp_path / "alone")
    assert choose(alone, samples(alone), clock=never).why == "the bundle has no int8 variant"
    assert choose(bundle, None, clock=never).why == "no labelled samples to compare the accuracies on"

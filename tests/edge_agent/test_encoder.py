from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent import bundle as bundles
from edge_agent.encoder import Encoder, choose_precision
from edge_agent.errors import BundleDamaged, DataError, MissingCapability, StateError
from edge_agent.task import ImageInput


@pytest.fixture
def installed(make_bundle, tmp_path):
    made = make_bundle(int8=True)
    return made, bundles.install(made.path, tmp_path / "bundles")


def some_inputs(count: int, shape=(3, 8, 8)) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)


def test_features_are_those_of_a_matrix_product(installed):
    made, bundle = installed
    inputs = some_inputs(70)  # two whole batches of 32 and a rest
    encoder = Encoder.open(bundle, "fp32")
    found = encoder.features(inputs)
    assert found.dtype == np.float32
    assert np.allclose(found, made.features(inputs), atol=1e-5)
    assert encoder.features(inputs[:0]).shape == (0, 24)


def test_the_second_start_maps_the_file_that_the_first_one_made(installed):
    _, bundle = installed
    first = Encoder.open(bundle, "fp32")
    made = next(bundle.folder.glob("*.ort"))
    stamp = made.stat().st_mtime_ns
    second = Encoder.open(bundle, "fp32")
    assert (first.format, second.format) == ("ort", "ort")
    assert made.stat().st_mtime_ns == stamp
    assert (first.features(some_inputs(5)) == second.features(some_inputs(5))).all()


def test_a_damaged_cache_is_made_again_and_an_old_one_goes(installed):
    made, bundle = installed
    Encoder.open(bundle, "fp32")
    cached = next(bundle.folder.glob("encoder.onnx.*.ort"))
    good = cached.read_bytes()
    cached.write_bytes(good[:-9] + b"corrupted")
    old = bundle.folder / "encoder.onnx.0123456789abcdef.1.0.0.x.ort"
    old.write_bytes(b"")
    assert np.allclose(Encoder.open(bundle, "fp32").features(some_inputs(2)), made.features(some_inputs(2)), atol=1e-5)
    # Not compared as a whole: the runtime writes its string table in another order each time.
    assert not cached.read_bytes().endswith(b"corrupted")
    assert not old.exists()


def test_without_a_writable_place_the_onnx_file_is_loaded(installed, caplog, monkeypatch):
    made, bundle = installed

    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(subprocess, "run", refuse)
    encoder = Encoder.open(bundle, "fp32")
    assert encoder.format == "onnx"
    assert "ort_not_made" in caplog.text
    assert np.allclose(encoder.features(some_inputs(2)), made.features(some_inputs(2)), atol=1e-5)
    assert Encoder.open(bundle, "fp32", cache=False).format == "onnx"


def test_an_ort_file_that_does_not_load_falls_back(installed, monkeypatch, caplog):
    _, bundle = installed
    junk = bundle.folder / "junk.ort"
    junk.write_bytes(b"ORTM" * 10)
    monkeypatch.setattr("edge_agent.encoder._mapped", lambda *_: junk)
    assert Encoder.open(bundle, "fp32").format == "onnx"
    assert "ort_not_loaded" in caplog.text


def test_the_golden_features_are_reached_in_both_precisions(installed):
    _, bundle = installed
    for precision in ("fp32", "int8"):
        assert Encoder.open(bundle, precision).self_test(bundle.golden()) < 1e-5


def test_other_features_than_the_golden_ones_fail_the_self_test_with_numbers(make_bundle, tmp_path):
    bundle = bundles.install(make_bundle(golden_error=0.01).path, tmp_path / "bundles")
    encoder = Encoder.open(bundle, "fp32")
    with pytest.raises(BundleDamaged, match=r"0\.00\d+ of their scale.*0\.0001"):
        encoder.self_test(bundle.golden())
    with pytest.raises(BundleDamaged, match="features_fp32"):
        encoder.self_test({"inputs": bundle.golden()["inputs"]})
    with pytest.raises(BundleDamaged, match=r"\(3, 9\)"):
        encoder.self_test({**bundle.golden(), "features_fp32": np.zeros((3, 9), np.float32)})


def test_nan_features_fail_the_self_test(installed):
    _, bundle = installed
    golden = bundle.golden()
    inputs = golden["inputs"].copy()
    inputs[0] = np.nan
    with pytest.raises(BundleDamaged, match="nan"):
        Encoder.open(bundle, "fp32").self_test({**golden, "inputs": inputs})


def test_inputs_of_another_shape_are_refused(installed):
    _, bundle = installed
    with pytest.raises(DataError, match=r"3, 8, 8"):
        Encoder.open(bundle, "fp32").features(some_inputs(2, (3, 8, 9)))


def test_an_encoder_with_another_size_than_promised_is_refused(make_bundle, tmp_path):
    bundle = bundles.install(make_bundle(extra={"feature_dim": 23}).path, tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match=r"\(2, 24\), expected \(2, 23\)"):
        Encoder.open(bundle, "fp32").features(some_inputs(2))


def test_a_file_that_is_no_model_is_refused(installed):
    _, bundle = installed
    (bundle.folder / "encoder.onnx").write_bytes(b"\x08\x07 no model")
    with pytest.raises(BundleDamaged, match="refuses"):
        Encoder.open(bundle, "fp32")
    with pytest.raises(StateError, match="int8"):
        fewer = bundle.manifest.model_copy(update={"variants": {"fp32": bundle.variant("fp32")}})
        Encoder.open(bundles.Bundle(bundle.folder, fewer), "int8")


def test_large_inputs_go_one_by_one_and_small_ones_by_32(make_bundle, tmp_path):
    from edge_agent.task import Task

    task = Task(input=ImageInput(channels=3, height=65, width=64), class_names=("a",), encoder="linear")
    large = bundles.install(make_bundle(task=task).path, tmp_path / "large")
    seen: list[tuple[int, int]] = []
    Encoder.open(large, "fp32").features(some_inputs(3, (3, 65, 64)), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


class Ticks:
    """A clock by which each pair of readings lies as far apart as the encoder is said to need."""

    def __init__(self, *durations: float) -> None:
        self.durations, self.now, self.calls = itertools.cycle(durations), 0.0, 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += next(self.durations)
        return self.now


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
def test_int8_must_be_clearly_faster_and_the_answer_is_kept(installed, fp32, int8, expected):
    _, bundle = installed
    clock = Ticks(fp32, int8)
    assert choose_precision(bundle, clock=clock) == expected
    calls = clock.calls
    assert choose_precision(bundle, clock=Ticks(int8, fp32)) == expected, "a restart does not flip it"
    assert clock.calls == calls
    assert Encoder.open(bundle, "auto").precision == expected


def test_a_moment_of_other_load_does_not_decide(installed):
    """Two of five turns were disturbed, once each way; the medians are 20 and 10 ms."""
    _, bundle = installed
    turns = [(0.02, 0.01)] * 3 + [(0.02, 3.0), (0.001, 0.01)] + [(0.02, 0.01)] * 45
    assert choose_precision(bundle, clock=Ticks(*itertools.chain(*turns))) == "int8"


def test_the_numbers_that_are_told_are_those_that_decided(installed, caplog):
    _, bundle = installed
    caplog.set_level("INFO", "edge_agent")
    choose_precision(bundle, clock=Ticks(0.0123, 0.0119))
    assert "precision=fp32 why=a batch takes 12.300 ms in fp32 and 11.900 ms in int8" in caplog.text
    assert json.loads((bundle.folder / "precision.json").read_text())["median_ms"] == {"fp32": 12.3, "int8": 11.9}


def test_where_fp32_hardly_fits_into_memory_int8_is_taken_untimed(installed):
    _, bundle = installed
    size = (bundle.folder / "encoder.onnx").stat().st_size
    assert choose_precision(bundle, clock=Ticks(0.1, 0.4), cache=False, available_bytes=2 * size) == "fp32"
    assert choose_precision(bundle, clock=Ticks(0.1, 0.4), available_bytes=2 * size - 1) == "int8"


def test_one_variant_needs_no_clock(make_bundle, tmp_path):
    bundle = bundles.install(make_bundle().path, tmp_path / "bundles")

    def never() -> float:
        raise AssertionError("timed")

    assert choose_precision(bundle, clock=never) == "fp32"


def test_without_onnxruntime_the_extra_is_named(installed, monkeypatch):
    _, bundle = installed
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingCapability, match=r"headwater\[agent\]"):
        Encoder.open(bundle, "fp32")


def test_a_module_named_like_a_dependency_in_the_working_folder_is_not_run(installed, tmp_path, monkeypatch):
    """A child started in a folder that others can write to would import what lies there."""
    _, bundle = installed
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "numpy.py").write_text("raise SystemExit('trapped')")
    shutil.copy(trap / "numpy.py", bundle.folder / "numpy.py")
    monkeypatch.chdir(trap)
    assert Encoder.open(bundle, "fp32").format == "ort"


def test_resident_memory_after_running_stays_small(installed):
    """A process that has loaded and run an encoder of 20 KB shows what runtime and our own code cost."""
    _, bundle = installed
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from edge_agent import bundle\n"
        "from edge_agent.encoder import Encoder\n"
        f"e = Encoder.open(bundle.open_folder(Path({str(bundle.folder)!r})), 'fp32')\n"
        "e.features(np.zeros((40, 3, 8, 8), np.float32))\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')][0])\n"
        "assert not {'torch', 'onnx', 'sklearn', 'PIL'} & set(sys.modules)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc on this system")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 90 * 1024

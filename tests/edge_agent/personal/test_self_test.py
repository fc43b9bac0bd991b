"""A bundle that computes something else here than where it was made is noticed before its first answer."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from edge_agent.bundle import archive, installed
from edge_agent.cli import main
from edge_agent.core.errors import BundleDamaged
from edge_agent.core.task import Task, WindowInput
from edge_agent.personal import encoder as encoder_module
from edge_agent.personal import self_test
from edge_agent.personal.encoder import Encoder
from edge_agent.wire.tensors import decode, encode


def repacked(made, change, out):
    """The bundle packed again with ``change(fields, files)`` applied, and all hashes and fingerprints right."""
    opened = archive.open_bundle(made.path)
    files = {name: opened.read(name) for name in opened.manifest.files}
    fields = opened.manifest.model_dump(mode="json", exclude={"files", "schema_version"})
    fields["variants"] = {precision: variant["file"] for precision, variant in fields["variants"].items()}
    change(fields, files)
    archive.pack(out, fields, files)
    return out


def weight_of(factor, count=1, name="encoder.onnx"):
    """``count`` weights of the encoder multiplied by ``factor``, nothing else changed."""

    def change(_, files):
        import onnx

        graph = onnx.load_from_string(files[name])
        [tensor] = graph.graph.initializer
        values = onnx.numpy_helper.to_array(tensor).copy()
        values.reshape(-1)[np.random.default_rng(2).choice(values.size, count, replace=False)] *= factor
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        files[name] = graph.SerializeToString()

    return change


def head_with_nan(_, files):
    head = {name: array.copy() for name, array in decode(files["global_head.safetensors"]).items()}
    head["weight"][3, 5] = np.nan
    files["global_head.safetensors"] = encode(head)


def head_of_another_run(_, files):
    head = {name: array + np.float32(0.01) for name, array in decode(files["global_head.safetensors"]).items()}
    files["global_head.safetensors"] = encode(head)


def swapped_classes(fields, _):
    names = list(fields["task"]["class_names"])
    names[3], names[8] = names[8], names[3]
    fields["task"]["class_names"] = names


def input_with(**changes):
    def change(fields, _):
        fields["task"]["input"] = {**fields["task"]["input"], **changes}

    return change


DAMAGES = {
    "one weight times 100": (weight_of(100), "fp32 features differ"),
    "NaN in the shared classifier": (head_with_nan, "NaN"),
    "another shared classifier": (head_of_another_run, "shared classifier differ"),
    "swapped class names": (swapped_classes, "class names"),
    "another mean": (input_with(mean=[0.45]), "fp32 features differ"),
    "another spread": (input_with(std=[0.51]), "fp32 features differ"),
    "no antialias": (input_with(antialias=False), "grey levels"),
    "golden tensors of schema 1": (
        lambda _, files: files.update({"golden.safetensors": encode({"inputs": np.zeros(3, np.float32)})}),
        "golden tensors: class_names, features_fp32, raw",
    ),
}


@pytest.fixture
def good(make_bundle):
    return make_bundle(global_head=True)


@pytest.mark.parametrize(
    "command, damage",
    [*(("predict", damage) for damage in DAMAGES), *((other, "one weight times 100") for other in ("fit", "evaluate"))],
)
def test_no_command_answers_with_a_bundle_that_was_spoilt_before_it_was_packed(
    good, tmp_path, monkeypatch, capsys, damage, command
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    change, reason = DAMAGES[damage]
    bad = str(repacked(good, change, tmp_path / "bad.hwb"))
    words = {
        "fit": ["fit", "--bundle", bad, "--data", "digits?n=40", "--out", str(tmp_path / "head")],
        "evaluate": ["evaluate", "--bundle", bad, "--data", "digits?n=40"],
        "predict": ["predict", "--bundle", bad, "--data", "digits?n=5"],
    }[command]
    assert main([*words, "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "BundleDamaged"
    assert reason in error["message"]
    assert not (tmp_path / "head").exists()


def test_a_good_bundle_passes_whatever_packs_it(good, tmp_path):
    again = installed.install(repacked(good, lambda *_: None, tmp_path / "again.hwb"), tmp_path / "installed")
    assert Encoder.open(again).precision == "fp32"


def test_sensor_windows_are_tested_from_the_recording_on(make_bundle, tmp_path):
    task = Task(input=WindowInput(channels=3, length=16, stride=4), class_names=("a", "b"), encoder="linear")
    made = make_bundle(task=task)
    Encoder.open(installed.install(made.path, tmp_path / "good"))
    for change in (input_with(stride=5), input_with(mean=[0.1]), input_with(std=[1.1])):
        bad = installed.install(repacked(made, change, tmp_path / "bad.hwb"), tmp_path / "bad")
        with pytest.raises(BundleDamaged):
            Encoder.open(bad)


class Counted:
    """How often encoders were run on golden inputs."""

    def __init__(self, monkeypatch) -> None:
        self.count = 0
        real = self_test.check

        def counted(*given):
            self.count += 1
            return real(*given)

        monkeypatch.setattr(self_test, "check", counted)


def test_it_runs_once_for_each_variant_of_an_unpacked_bundle(make_bundle, tmp_path, monkeypatch):
    bundle = installed.install(make_bundle(int8=True).path, tmp_path / "b")
    tests = Counted(monkeypatch)
    for expected in (2, 2):
        for precision in ("fp32", "int8"):
            Encoder.open(bundle, precision)
        assert tests.count == expected


@pytest.mark.parametrize("what", ["processor", "runtime", "bundle", "record"])
def test_it_runs_again_where_something_changed(make_bundle, tmp_path, monkeypatch, what):
    bundle = installed.install(make_bundle(int8=True).path, tmp_path / "b")
    tests = Counted(monkeypatch)
    Encoder.open(bundle)
    record = bundle.made / "self_test.json"
    if what == "processor":
        monkeypatch.setattr(encoder_module, "processor", lambda: "other")
    elif what == "runtime":
        monkeypatch.setattr(encoder_module.onnxruntime(), "__version__", "0.0")
    elif what == "record":
        record.write_bytes(b"{")
    else:
        other = installed.install(make_bundle("other.hwb", seed=1).path, tmp_path / "b")
        shutil.copy(record, other.folder)
        bundle = other
    Encoder.open(bundle)
    assert tests.count == 2


def test_without_a_writable_folder_it_runs_each_time(make_bundle, tmp_path, monkeypatch):
    bundle = installed.install(make_bundle().path, tmp_path / "b")
    tests = Counted(monkeypatch)

    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr("edge_agent.core.storage.write_json", refuse)
    for expected in (1, 2):
        Encoder.open(bundle)
        assert tests.count == expected
    Encoder.open(bundle, cache=False)
    assert tests.count == 3


def test_a_failed_test_is_not_taken_for_a_passed_one_the_next_time(make_bundle, tmp_path):
    bundle = installed.install(make_bundle(golden_error=0.01).path, tmp_path / "b")
    for _ in range(2):
        with pytest.raises(BundleDamaged, match=r"0\.00\d+ of their scale.*at most 0\.0001"):
            Encoder.open(bundle)


def test_features_that_are_no_numbers_fail(make_bundle, tmp_path):
    bundle = installed.install(make_bundle().path, tmp_path / "b")
    with pytest.raises(BundleDamaged, match="nan"):
        self_test.check(bundle, "fp32", lambda inputs: np.full((len(inputs), 24), np.nan, np.float32))


@pytest.mark.parametrize("share, passes", [(0.9, True), (1.1, False)])
def test_tolerances_are_shares_of_the_largest_feature_or_of_each_row(make_bundle, tmp_path, share, passes):
    made = make_bundle(int8=True)
    bundle = installed.install(made.path, tmp_path / "b")
    golden = bundle.golden()
    for precision, tolerance in (("fp32", self_test.FP32_TOLERANCE), ("int8", self_test.INT8_TOLERANCE)):
        rows = golden[f"features_{precision}"]
        step = rows.max() if precision == "fp32" else rows
        off = rows + np.float32(share * tolerance) * step
        if passes:
            self_test.check(bundle, precision, lambda _, off=off: off)
        else:
            with pytest.raises(BundleDamaged, match=precision):
                self_test.check(bundle, precision, lambda _, off=off: off)


@pytest.mark.parametrize("rows, passes", [(3, True), (5, False)])
def test_int8_features_of_few_inputs_may_be_rounded_otherwise(make_bundle, tmp_path, rows, passes):
    """As on arm64, where the sums of ResNet18's branches are; damaged weights move the features of all inputs."""
    bundle = installed.install(make_bundle(int8=True).path, tmp_path / "b")
    off = bundle.golden()["features_int8"].copy()
    off[:rows] *= np.float32(1.05)
    if passes:
        self_test.check(bundle, "int8", lambda _: off)
    else:
        with pytest.raises(BundleDamaged, match=r"relative distance of 0\.05 in the median"):
            self_test.check(bundle, "int8", lambda _: off)


def test_one_infinite_int8_feature_fails(make_bundle, tmp_path):
    bundle = installed.install(make_bundle(int8=True).path, tmp_path / "b")
    off = bundle.golden()["features_int8"].copy()
    off[7, 3] = np.inf
    with pytest.raises(BundleDamaged, match="int8"):
        self_test.check(bundle, "int8", lambda _: off)


@pytest.mark.parametrize(
    "name, array",
    [
        ("raw", np.zeros((8, 8, 8, 1), np.uint8)),
        ("raw", np.zeros((8, 8, 8, 3), np.float32)),
        ("photo", np.zeros((40, 40, 3), np.uint8)),
        ("features_fp32", np.zeros((7, 24), np.float32)),
        ("class_names", np.zeros(31, np.uint8)),
        ("logits", np.zeros((8, 9))),
    ],
)
def test_golden_tensors_of_another_form_are_rejected_before_anything_is_computed(make_bundle, tmp_path, name, array):
    bundle = installed.install(make_bundle(global_head=True, spoilt={name: array}).path, tmp_path / "b")
    with pytest.raises(BundleDamaged, match=f"golden tensors: {name} missing, or not of the form"):
        self_test.check(bundle, "fp32", lambda _: pytest.fail("computed"))

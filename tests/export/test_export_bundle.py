from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import datetime, timedelta, timezone

import numpy as np
import onnx
import pytest
import torch

from edge_agent import methods
from edge_agent.bundle.archive import open_bundle, pack
from edge_agent.bundle.installed import install
from edge_agent.bundle.manifest import fingerprint
from edge_agent.core.errors import BundleDamaged, ExportRejected
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.personal.encoder import Encoder
from edge_agent.training.parts import encoder_and_head, to_arrays
from edge_agent.wire.tensors import decode
from export import (
    BundleOptions,
    Calibration,
    TrainedEncoder,
    build,
    build_bundle,
    int8,
    model_from_state,
    synthetic_inputs,
)

MOMENT = "2026-01-02T03:04:05+00:00"


@pytest.fixture(scope="module")
def model(task, images):
    torch.manual_seed(0)
    built = encoder_and_head(task).train()
    for _ in range(5):
        built(torch.from_numpy(images))
    return built


@pytest.fixture(scope="module")
def state(model):
    return to_arrays(model, methods.create("fedavg").shared_names(model))


@pytest.fixture(scope="module")
def report(model, state, task, images, tmp_path_factory):
    method = methods.create("fedavg", {"lr": 0.2})
    out = tmp_path_factory.mktemp("bundles") / "first.hwb"
    trained = TrainedEncoder(model, method, task, method.global_head(state))
    options = BundleOptions("run-7", created=MOMENT, exporter="legacy", own_norm=False)
    return build_bundle(trained, Calibration.from_inputs(images), out, options)


def export(model, task, images, out, method=None, global_head=None, **changes):
    trained = TrainedEncoder(model, method or methods.create("fedavg"), task, global_head)
    settings = {"name": "n", "created": MOMENT, "exporter": "legacy", "int8": False, "own_norm": False, **changes}
    return build_bundle(trained, Calibration.from_inputs(images), out, BundleOptions(**settings))


def test_the_bundle_opens_and_says_what_it_is(report, task):
    manifest = open_bundle(report.path).manifest
    assert manifest == report.manifest
    assert (manifest.name, manifest.created, manifest.method) == ("run-7", MOMENT, "fedavg")
    assert manifest.method_params["lr"] == 0.2
    assert manifest.task == task
    assert manifest.feature_dim == 12
    assert (manifest.exporter, manifest.opset, manifest.norm) == ("legacy", 17, "global")
    files = {precision: variant.file for precision, variant in manifest.variants.items()}
    assert files == {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
    assert manifest.requires == {"onnxruntime": "1.18"}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_fingerprint_of_a_variant_is_that_of_its_file_and_the_input(report, task, precision):
    variant = report.manifest.variants[precision]
    encoder = open_bundle(report.path).read(variant.file)
    assert variant.fingerprint == fingerprint(hashlib.sha256(encoder).hexdigest(), task.input)


def test_golden_features_are_torch_features_of_inputs_that_belong_to_nobody(report, model, images):
    golden = decode(open_bundle(report.path).read("golden.safetensors"))
    raw = golden["raw"]
    assert (raw.shape, raw.dtype) == ((8, 8, 8, 1), np.uint8)
    inputs = ((raw.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5).astype(np.float32)
    assert not any(np.array_equal(a, b) for a in inputs for b in images)
    with torch.no_grad():
        expected = model.eval().features(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(golden["features_fp32"], expected, atol=1e-5)
    rough = golden["features_int8"]
    cosines = (rough * expected).sum(1) / np.linalg.norm(rough, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.mean() > 0.98


def test_a_device_installs_it_and_its_self_test_passes(report, tmp_path, model):
    bundle = install(report.path, tmp_path)
    inputs = np.random.default_rng(1).normal(size=(3, 1, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = model.eval().features(torch.from_numpy(inputs)).numpy()
    encoder = Encoder.open(bundle, "fp32", cache=False)
    np.testing.assert_allclose(encoder.features(inputs), expected, atol=1e-4)
    Encoder.open(bundle, "int8", cache=False)


def test_golden_answers_are_those_of_the_shared_classifier(report, state):
    golden = decode(open_bundle(report.path).read("golden.safetensors"))
    expected = golden["features_fp32"].astype(np.float64) @ state["head.weight"].T + state["head.bias"]
    np.testing.assert_allclose(golden["logits"], expected, rtol=1e-12)


def test_golden_class_names_are_bound_to_their_order(report, task):
    golden = decode(open_bundle(report.path).read("golden.safetensors"))
    assert bytes(golden["class_names"]) == hashlib.sha256(json.dumps(list(task.class_names)).encode()).digest()


def inverted(path, out, count):
    """The bundle with ``count`` int8 weights of the other sign, and every hash and fingerprint right."""
    opened = open_bundle(path)
    files = {name: opened.read(name) for name in opened.manifest.files}
    graph = onnx.load_from_string(files["encoder.int8.onnx"])
    tensors = [one for one in graph.graph.initializer if one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1]
    values = [onnx.numpy_helper.to_array(one).copy() for one in tensors]
    flat = np.concatenate([one.reshape(-1) for one in values])
    flat[np.random.default_rng(0).choice(flat.size, count, replace=False)] *= -1
    for tensor, part, old in zip(
        tensors, np.split(flat, np.cumsum([one.size for one in values])[:-1]), values, strict=True
    ):
        tensor.CopyFrom(onnx.numpy_helper.from_array(part.reshape(old.shape), tensor.name))
    files["encoder.int8.onnx"] = graph.SerializeToString()
    fields = opened.manifest.model_dump(mode="json", exclude={"files", "schema_version"})
    fields["variants"] = {precision: variant["file"] for precision, variant in fields["variants"].items()}
    pack(out, fields, files)
    return out


@pytest.mark.parametrize("count", [100, 500])
def test_inverted_int8_weights_fail_the_self_test_of_int8_alone(tmp_path, count):
    """In an encoder of 155,000 weights; fp32 goes on serving."""
    task = Task(input=ImageInput(), class_names=tuple("0123456789"), encoder="small_cnn")
    torch.manual_seed(0)
    report = export(encoder_and_head(task), task, synthetic_inputs(task, 32), tmp_path / "b.hwb", int8=True)
    Encoder.open(install(report.path, tmp_path / "good"), "int8")
    bad = install(inverted(report.path, tmp_path / "bad.hwb", count), tmp_path / "bad")
    with pytest.raises(BundleDamaged, match="int8 features differ"):
        Encoder.open(bad, "int8")
    Encoder.open(bad, "fp32")


def test_head_cards_say_how_true_each_head_is(report):
    cards = report.manifest.heads
    assert set(cards) == {"lr", "svm", "mlp", "prototype"}
    assert cards["mlp"].exactness == cards["lr"].exactness == "approximate"
    assert "FedAvg has no personal part" in cards["mlp"].reason
    assert "not part of fedavg" in cards["lr"].reason


def test_head_cards_carry_the_parameters_of_the_method(model, task, images, tmp_path):
    report = export(model, task, images, tmp_path / "b.hwb", methods.create("repper", {"feature_norm": "l2"}))
    assert report.manifest.heads["svm"].params == {"feature_norm": "l2"}
    assert report.manifest.heads["svm"].exactness == "exact"


def test_the_shared_classifier_comes_along(report, tmp_path, state):
    head = install(report.path, tmp_path).global_head()
    np.testing.assert_array_equal(head["weight"], state["head.weight"])
    np.testing.assert_array_equal(head["bias"], state["head.bias"])


def test_calibration_inputs_are_hashed_not_shipped(report, images):
    expected = hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()
    assert report.manifest.calibration_sha256 == expected
    assert sorted(report.manifest.files) == [
        "encoder.int8.onnx", "encoder.onnx", "global_head.safetensors", "golden.safetensors"
    ]  # fmt: skip


def test_the_report_lists_gates_and_times(report):
    assert all(gate.passed for gate in report.gates)
    assert {
        "valid",
        "interface",
        "operators",
        "frozen",
        "self-contained",
        "budget",
        "parity",
        "int8",
        "global head",
    } == {gate.name for gate in report.gates}
    assert report.int8_note == ""
    assert report.manifest.parity.int8_cosine > 0.99
    assert set(report.seconds) == {"onnx", "gates", "int8", "pack"}


def test_without_int8_nothing_of_it_is_promised(model, task, images, tmp_path):
    report = export(model, task, images, tmp_path / "b.hwb")
    assert set(report.manifest.variants) == {"fp32"}
    assert report.manifest.calibration_sha256 is None
    assert report.manifest.parity.int8_cosine is None
    assert "features_int8" not in decode(open_bundle(report.path).read("golden.safetensors"))


def test_a_bundle_is_dated_now_unless_a_time_is_given(model, task, images, tmp_path):
    report = export(model, task, images, tmp_path / "b.hwb", created="")
    age = datetime.now(timezone.utc) - datetime.fromisoformat(report.manifest.created)
    assert timedelta(seconds=-1) < age < timedelta(minutes=5)


def test_the_same_model_gives_the_same_files_and_the_same_id(model, task, images, tmp_path):
    """Only how fast the variants were here may differ."""
    one, two = (export(model, task, images, tmp_path / name, int8=True).manifest for name in ("a", "b"))
    assert (one.files, one.bundle_id) == (two.files, two.bundle_id)
    plain = [manifest.model_copy(update={"quantization": None}) for manifest in (one, two)]
    assert plain[0] == plain[1]


def test_an_int8_variant_that_is_too_rough_is_left_out_with_the_reason(model, task, images, tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "MIN_COSINE", 1.01)
    report = export(model, task, images, tmp_path / "b.hwb", int8=True)
    assert "int8" not in report.manifest.variants
    assert report.int8_note.startswith("left out: mean cosine")
    assert [gate.name for gate in report.gates if not gate.passed] == ["int8"]


def test_a_quantizer_that_fails_does_not_fail_the_export(model, task, images, tmp_path, monkeypatch):
    def fail(quantizer, ranges):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(int8.Quantizer, "int8", fail)
    report = export(model, task, images, tmp_path / "b.hwb", int8=True)
    assert report.int8_note == "left out: the quantizer failed: no kernel for this"
    assert set(report.manifest.variants) == {"fp32"}


def foreign_graph(exported):
    graph = onnx.load_from_string(exported.model)
    graph.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    extra = onnx.helper.make_node("Dropout", [graph.graph.node[0].output[0]], ["spare"])
    graph.graph.node.append(extra)
    return dataclasses.replace(exported, model=graph.SerializeToString())


def other_weights(exported):
    graph = onnx.load_from_string(exported.model)
    first = graph.graph.initializer[0]
    changed = onnx.numpy_helper.to_array(first) * np.float32(1.5) + np.float32(0.1)
    first.CopyFrom(onnx.numpy_helper.from_array(changed, first.name))
    return dataclasses.replace(exported, model=graph.SerializeToString())


@pytest.mark.parametrize(
    "spoil, complaints",
    [(foreign_graph, ["interface", "operators", "frozen"]), (other_weights, ["parity"])],
)
def test_failed_gates_are_all_named_and_the_previous_bundle_stays(
    spoil, complaints, model, task, images, tmp_path, monkeypatch
):
    out = tmp_path / "b.hwb"
    export(model, task, images, out)
    before = out.read_bytes()
    real = build.to_onnx
    monkeypatch.setattr(build, "to_onnx", lambda *given: spoil(real(*given)))
    with pytest.raises(ExportRejected) as caught:
        export(model, task, images, out, name="second")
    for complaint in complaints:
        assert f"- {complaint}: " in str(caught.value)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["b.hwb"]


def test_a_shared_classifier_of_another_size_fails(model, task, images, tmp_path):
    wrong = {"weight": np.zeros((3, 11), np.float32), "bias": np.zeros(3, np.float32)}
    with pytest.raises(ExportRejected, match=r"global head: .*\(3, 11\).*\(3, 12\)"):
        export(model, task, images, tmp_path / "b.hwb", global_head=wrong)
    assert not (tmp_path / "b.hwb").exists()


@pytest.mark.parametrize(
    "inputs",
    [
        np.zeros((4, 1, 8, 9), np.float32),
        np.zeros((0, 1, 8, 8), np.float32),
        np.full((2, 1, 8, 8), np.nan, np.float32),
    ],
)
def test_calibration_inputs_of_another_form_are_refused(inputs, model, task, tmp_path):
    with pytest.raises(ExportRejected, match=r"expected finite \[n, 1, 8, 8\]"):
        export(model, task, inputs, tmp_path / "b.hwb")


def test_windows_are_exported_like_images(tmp_path):
    task = Task(input=WindowInput(channels=3, length=16), class_names=("walk", "run"), encoder="cnn1d")
    torch.manual_seed(0)
    report = export(encoder_and_head(task), task, synthetic_inputs(task, 20), tmp_path / "b.hwb", int8=True)
    assert report.int8_note == ""
    stride = task.input.stride
    assert decode(open_bundle(report.path).read("golden.safetensors"))["raw"].shape == (16 + 7 * stride, 3)
    Encoder.open(install(report.path, tmp_path / "installed"), "int8")


def test_a_state_becomes_a_model_again(state, task, model, images):
    random = torch.get_rng_state()
    found = model_from_state(methods.create("fedavg"), task, {**state, "extra.centroids": np.ones(3, np.float32)})
    assert torch.equal(torch.get_rng_state(), random)
    inputs = torch.from_numpy(images)
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(inputs), model.eval()(inputs))


def test_a_method_that_shares_no_encoder_has_nothing_to_export(task):
    with pytest.raises(ExportRejected, match="shares no encoder"):
        model_from_state(methods.create("local"), task, {})


def test_batch_norm_that_stayed_on_devices_must_be_pooled_first(state, task):
    method = methods.create("fedavg", {"norm": "local_stats"})
    sent = {name: array for name, array in state.items() if "running" not in name}
    with pytest.raises(ExportRejected, match=r"2 tensors of the encoder are not in the state.*norm local_stats"):
        model_from_state(method, task, sent)
    model_from_state(method, task, state)


def test_synthetic_inputs_are_standard_normal_and_repeatable(task):
    drawn = synthetic_inputs(task, 500)
    assert drawn.dtype == np.float32
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.02
    np.testing.assert_array_equal(drawn, synthetic_inputs(task, 500))

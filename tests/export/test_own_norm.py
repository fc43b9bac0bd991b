"""Batch norm that a device estimates on its own inputs, from the export to a saved head; torch is the oracle."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_agent import methods
from edge_agent.agent.head_tier import install_bundle, refit_current
from edge_agent.bundle import archive, unpacked
from edge_agent.bundle import installed as installed_module
from edge_agent.bundle import manifest as manifest_module
from edge_agent.cli import main
from edge_agent.core.config import AgentConfig, DataConfig, HeadConfig
from edge_agent.core.errors import BundleDamaged, ExportRejected, FingerprintMismatch, StateError, UsageError
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import Samples, load, split
from edge_agent.heads import saved
from edge_agent.personal import precision
from edge_agent.personal.batch_norm import encoder_with_statistics, grade, remains, sample
from edge_agent.personal.encoder import Encoder, features_of
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import load_head, personalize
from edge_agent.personal.personalizer import Personalizer
from edge_agent.personal.precision import estimate_norm, open_encoder, with_norm
from edge_agent.training.parts import encoder_and_head
from edge_agent.wire.messages.down import Install
from edge_agent.wire.messages.fields import BlobRef
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle
from export.batch_norm import free_batch_norm

TASK = Task(
    input=ImageInput(channels=1, height=16, width=16),
    class_names=tuple("0123456789"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 16, "width": 4},
)
SOURCE = "digits:optdigits?n=240"


def norms(module):
    return [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def model_of(*, spoilt: bool):
    """An encoder with batch norm of digits; ``spoilt``: of other inputs, so that most of its features are zero."""
    torch.manual_seed(0)
    model = encoder_and_head(TASK).train()
    inputs = torch.from_numpy(load(SOURCE, TASK.input, TASK.class_names).inputs)
    with torch.no_grad():
        for layer in norms(model):
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.normal_(0, 0.2)
        for _ in range(30):
            model(inputs)
        for layer in norms(model) if spoilt else ():
            layer.running_mean += 4 * layer.running_var.sqrt()
    return model.eval()


def export(path: Path, model, method="dualfed", norm_note="", **options) -> manifest_module.Manifest:
    inputs = load(SOURCE, TASK.input, TASK.class_names).inputs[:32]
    trained = TrainedEncoder(model, methods.create(method), TASK, norm_note=norm_note)
    choices = BundleOptions("n", int8=False, **options)
    return build_bundle(trained, Calibration.from_inputs(inputs), path, choices).manifest


@pytest.fixture(scope="module", params=[False, True], ids=["good", "spoilt"])
def either(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("own"), spoilt=request.param)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    return made(tmp_path_factory.mktemp("spoilt"), spoilt=True)


def made(folder, *, spoilt):
    model = model_of(spoilt=spoilt)
    export(folder / "b.hwb", model)
    return (
        model,
        installed_module.install(folder / "b.hwb", folder / "bundles"),
        load(SOURCE, TASK.input, TASK.class_names),
    )


def blended_by_torch(encoder, inputs, share):
    """The encoder (float64) with statistics of ``inputs`` blended in, layer after layer, by torch's own arithmetic."""
    result = copy.deepcopy(encoder).double().eval()

    def blend(layer, given):
        axes = [axis for axis in range(given[0].dim()) if axis != 1]
        layer.running_mean += share * (given[0].mean(axes) - layer.running_mean)
        layer.running_var += share * (given[0].var(axes, unbiased=False) - layer.running_var)

    handles = [layer.register_forward_pre_hook(blend) for layer in norms(result)]
    with torch.no_grad():
        result(torch.from_numpy(inputs).double())
    for handle in handles:
        handle.remove()
    return result


def test_statistics_lie_in_the_file_where_the_manifest_says(either):
    model, installed, _ = either
    layers = norms(model.part("encoder"))
    content = (installed.folder / "encoder.onnx").read_bytes()
    places = installed.manifest.free_norm.layers
    assert len(places) == len(layers) == 2
    for place, layer in zip(places, layers, strict=True):
        for begin, tensor in ((place.mean_at, layer.running_mean), (place.variance_at, layer.running_var)):
            np.testing.assert_array_equal(np.frombuffer(content, "<f4", place.channels, begin), tensor.numpy())


def test_layers_with_equal_statistics_have_their_own_constants():
    """An untrained encoder: every mean is 0, every variance 1, and the exporter writes them once for all layers."""
    free = free_batch_norm(encoder_and_head(TASK).part("encoder"), TASK)
    begins = [begin for layer in free.free_norm.layers for begin in (layer.mean_at, layer.variance_at)]
    assert len(set(begins)) == 2 * len(free.free_norm.layers)


@pytest.mark.parametrize("count", [8, 64])
def test_own_encoder_computes_what_torch_computes_with_blended_statistics(either, count):
    model, installed, samples = either
    inputs = samples.inputs[:count]
    others = samples.inputs[100:140]
    own = estimate_norm(installed, inputs)
    oracle = blended_by_torch(model.part("encoder"), inputs, count / (count + 16))
    expected = [array for layer in norms(oracle) for array in (layer.running_mean, layer.running_var)]
    np.testing.assert_allclose(own.statistics, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    encoder = Encoder.open(installed, norm=own)
    with torch.no_grad():
        features = oracle(torch.from_numpy(others).double()).numpy()
    np.testing.assert_allclose(encoder.features(others), features, atol=1e-4)
    shipped = Encoder.open(installed)
    assert (encoder.fingerprint, encoder.norm) == (own.fingerprint, own)
    assert own.fingerprint != shipped.fingerprint == own.variant


def test_a_probe_is_run_in_a_process_of_its_own_first(trials, spoilt, tmp_path):
    """A division of integers by zero, in the probe alone, fails there."""
    import onnx
    from onnx import TensorProto, helper

    _, installed, samples = spoilt
    assert estimate_norm(installed, samples.inputs[:20]).inputs == 20
    manifest = installed.manifest
    probe = onnx.ModelProto.FromString((installed.folder / manifest.free_norm.probe).read_bytes())
    [last] = [one for one in probe.graph.node if "own_features" in one.output]
    last.output[0] = "whole_features"
    probe.graph.node.extend([
        helper.make_node("Cast", ["own_share"], ["none"], to=TensorProto.INT64),
        helper.make_node("Div", ["none", "none"], ["crash"]),
        helper.make_node("Cast", ["crash"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["whole_features", "number"], ["own_features"]),
    ])  # fmt: skip
    files = {name: (installed.folder / name).read_bytes() for name in manifest.files}
    files[manifest.free_norm.probe] = probe.SerializeToString()
    fields = manifest.model_dump(mode="json", exclude={"schema_version", "files"})
    archive.pack(tmp_path / "b.hwb", fields | {"variants": {"fp32": "encoder.onnx"}}, files)
    with pytest.raises(BundleDamaged, match=r"trial of the probe: .* division by zero"):
        estimate_norm(installed_module.install(tmp_path / "b.hwb", tmp_path / "bundles"), samples.inputs[:20])


def test_own_encoder_is_made_once_and_two_are_kept(spoilt, monkeypatch):
    monkeypatch.setattr("edge_agent.personal.encoder._LEAST_TO_MAP", 0)
    _, installed, samples = spoilt
    for count in (10, 20, 30):
        own = estimate_norm(installed, samples.inputs[:count])
        assert Encoder.open(installed, norm=own).format == "ort"
    files = {path: path.stat().st_mtime_ns for path in installed.made.glob("own-*")}
    assert len(files) == 4, "two encoders with their checksums"
    Encoder.open(installed, norm=own)
    assert {path: path.stat().st_mtime_ns for path in installed.made.glob("own-*")} == files
    assert not list(installed.folder.glob("own-*.onnx")), "its .onnx can be made from the head at any time"
    assert not list(installed.folder.glob(".own-*"))


def test_statistics_that_are_not_those_of_the_head_fail_the_self_test(spoilt):
    _, installed, samples = spoilt
    own = estimate_norm(installed, samples.inputs[:32])
    other = estimate_norm(installed, samples.inputs[:32] * 0.5)
    forged = type(own)(own.variant, other.statistics, own.inputs, own.golden)
    with pytest.raises(BundleDamaged, match="self-test"):
        Encoder.open(installed, norm=forged)
    short = type(own)(own.variant, own.statistics[:-1], own.inputs, own.golden)
    with pytest.raises(StateError, match="fit the head again"):
        Encoder.open(installed, norm=short, cache=False)


@pytest.mark.parametrize("spoil", ["nothing of it", "cut short", "of another encoder"])
def test_damaged_probe_leaves_the_shipped_statistics_in_use(spoilt, tmp_path, spoil):
    _, installed, samples = spoilt
    copied = unpacked.Bundle(tmp_path / "b", installed.manifest)
    copied.folder.mkdir()
    for name in (*installed.manifest.files, "manifest.json", "manifest.sha256"):
        (copied.folder / name).write_bytes((installed.folder / name).read_bytes())
    probe = copied.folder / installed.manifest.free_norm.probe
    if spoil == "of another encoder":
        free = installed.manifest.free_norm.model_copy(update={"layers": installed.manifest.free_norm.layers[:-1]})
        copied = unpacked.Bundle(copied.folder, installed.manifest.model_copy(update={"free_norm": free}))
    else:
        probe.write_bytes(b"" if spoil == "nothing of it" else probe.read_bytes()[:100])
    encoder = with_norm(copied, "auto", samples)
    assert encoder.norm is None
    assert "do not run here" in encoder.why_norm


def test_auto_takes_own_statistics_where_a_head_is_better_with_them_and_leaves_them_where_worse(spoilt, monkeypatch):
    _, installed, samples = spoilt
    assert with_norm(installed, "auto", samples).norm is not None
    assert with_norm(installed, "shipped", samples).norm is None
    right = np.ones(100, bool)
    for wrong, expected in ((0, True), (1, True), (2, False), (30, False)):  # 2 lost of 2 is more than their root
        worse = np.arange(100) >= wrong
        monkeypatch.setattr(precision, "right_answers", lambda *_, worse=worse: {"shipped": right, "own": worse})
        assert (with_norm(installed, "auto", samples).norm is not None) is expected
    monkeypatch.setattr(precision, "right_answers", lambda *_: {"shipped": right[:0], "own": right[:0]})
    assert with_norm(installed, "auto", samples).norm is None, "nothing to compare on"


def test_auto_asks_for_better_answers_where_the_method_shares_batch_norm(tmp_path, monkeypatch):
    export(tmp_path / "b.hwb", model_of(spoilt=True), "fedavg")
    installed = installed_module.install(tmp_path / "b.hwb", tmp_path / "bundles")
    samples = load(SOURCE, TASK.input, TASK.class_names)
    right = np.ones(100, bool)
    for wrong, expected in ((0, False), (1, False), (2, True)):  # 2 gained of 2 is more than their root
        worse = np.arange(100) >= wrong
        monkeypatch.setattr(precision, "right_answers", lambda *_, worse=worse: {"shipped": worse, "own": right})
        assert (with_norm(installed, "auto", samples).norm is not None) is expected


@pytest.mark.parametrize(
    "method, norm_of_method", [("dualfed", "local_stats"), ("fedavg", "global"), ("fedbn", "local_all")]
)
def test_exactness_says_what_remains(tmp_path, method, norm_of_method):
    manifest = export(tmp_path / "b.hwb", model_of(spoilt=False), method, norm_note="pooled")
    installed = installed_module.install(tmp_path / "b.hwb", tmp_path / "bundles")
    own = estimate_norm(installed, load(SOURCE, TASK.input, TASK.class_names).inputs[:48])
    assert manifest.norm == norm_of_method
    assert remains(manifest, None) == "pooled"
    text = remains(manifest, own)
    assert "48 local inputs (75%)" in text
    assert ("gamma and beta" in text) is (norm_of_method == "local_all")
    assert grade("exact", own) == "same form"
    assert grade("exact", None) == "exact"
    assert grade("approximate", own) == "approximate"


def test_method_that_compares_features_of_clients_forbids_it(tmp_path):
    manifest = export(tmp_path / "b.hwb", model_of(spoilt=True), "fedpac")
    assert manifest.free_norm is None
    installed = installed_module.install(tmp_path / "b.hwb", tmp_path / "bundles")
    for wanted in ("auto", "own"):
        encoder = with_norm(installed, wanted, load(SOURCE, TASK.input, TASK.class_names))
        assert encoder.norm is None
        assert "not applicable" in encoder.why_norm


def test_encoder_without_batch_norm_and_folded_one_have_nothing_to_estimate(tmp_path, caplog):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.feature_dim = 16

        def forward(self, inputs):
            return torch.flatten(self.norm(self.norm(self.first(inputs))).mean(3), 1)[:, :16]

    assert free_batch_norm(nn.Sequential(nn.Flatten(), nn.Linear(256, 4)), TASK) is None
    with pytest.raises(ExportRejected, match="used twice"):
        free_batch_norm(Twice(), TASK)
    assert export(tmp_path / "folded.hwb", model_of(spoilt=False), own_norm=False).free_norm is None
    with pytest.raises(StateError, match="batch norm statistics of encoder"):
        encoder_with_statistics(
            installed_module.install(tmp_path / "folded.hwb", tmp_path / "bundles"), "0" * 64, np.zeros(3, np.float32)
        )


def test_a_bundle_can_be_made_without_free_batch_norm(tmp_path):
    assert export(tmp_path / "b.hwb", model_of(spoilt=False), own_norm=False).free_norm is None


def test_places_outside_the_file_are_rejected(spoilt, tmp_path):
    _, installed, _ = spoilt
    manifest = installed.manifest
    layers = manifest.free_norm.layers
    far = manifest.files["encoder.onnx"].size_bytes - 4 * layers[0].channels + 1
    free = manifest.free_norm.model_copy(
        update={"layers": (layers[0].model_copy(update={"mean_at": far}), *layers[1:])}
    )
    raw = manifest_module.dump_manifest(manifest.model_copy(update={"free_norm": free}))
    with pytest.raises(BundleDamaged, match="batch norm ends at byte"):
        manifest_module.parse_manifest(raw, "it")


def test_too_few_inputs_and_int8_are_told(spoilt):
    _, installed, samples = spoilt
    few = Samples(samples.inputs[:7], samples.labels[:7], samples.class_names, samples.input)
    assert with_norm(installed, "own", few).why_norm == "7 inputs, at least 8 are needed"
    assert with_norm(installed, "own", None).norm is None
    one = samples.take(np.flatnonzero(samples.labels == 3))
    assert "no two classes" in with_norm(installed, "auto", one).why_norm
    assert with_norm(installed, "own", one).norm is not None
    with pytest.raises(UsageError, match="int8 has the shipped one"):
        open_encoder(installed, "int8", samples, norm="own")
    with pytest.raises(ValueError, match="computed in fp32"):
        HeadConfig(precision="int8", norm="own")


def test_sample_is_spread_over_all_inputs_and_bounded():
    rows = np.arange(2000, dtype=np.float32)[:, None, None, None] * np.ones((1, 3, 32, 32), np.float32)
    chosen = sample(rows, np.random.default_rng(0))[:, 0, 0, 0]
    assert len(chosen) == 128
    counts = np.histogram(chosen, 4, (0, 2000))[0]
    assert counts.min() >= 16, "every quarter of a stream is in it"
    assert len(sample(np.zeros((100, 3, 224, 224), np.float32), np.random.default_rng(0))) == 16
    assert sample(rows[:50], np.random.default_rng(0)).shape == (50, 3, 32, 32)


def test_saved_head_answers_with_the_statistics_it_was_fitted_on(spoilt, tmp_path):
    _, installed, samples = spoilt
    train, test = split(samples, 0.25, 0)
    encoder = open_encoder(installed, "auto", train)
    result = personalize(installed, (train, test), encoder, FitOptions(cache=tmp_path / "features"))
    shipped = personalize(installed, (train, test), Encoder.open(installed), FitOptions(cache=tmp_path / "features"))
    assert result.scores.personal > shipped.scores.personal + 0.2
    assert result.metrics()["norm"] == "own"
    result.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head", installed)
    np.testing.assert_array_equal(loaded.norm.statistics, encoder.norm.statistics)
    again = Encoder.open(installed, loaded.precision, norm=loaded.norm)
    rows = again.features(test.inputs)
    np.testing.assert_array_equal(rows, encoder.features(test.inputs))
    assert np.mean(loaded.head.predict_proba(rows).argmax(1) == test.labels) == result.scores.personal


def test_cached_features_of_earlier_statistics_go(spoilt, tmp_path):
    _, installed, samples = spoilt
    shipped = features_of(samples, Encoder.open(installed), tmp_path)
    for count in range(20, 40):
        own = Encoder.open(installed, norm=estimate_norm(installed, samples.inputs[:count]), cache=False)
        rows = features_of(samples, own, tmp_path)
    np.testing.assert_array_equal(features_of(samples, own, tmp_path), rows)
    assert len(list(tmp_path.glob("features-*-own-*"))) <= 16
    np.testing.assert_array_equal(features_of(samples, Encoder.open(installed), tmp_path), shipped)


def test_head_of_other_statistics_or_another_bundle_is_refused(spoilt, tmp_path):
    _, installed, samples = spoilt
    encoder = with_norm(installed, "own", samples)
    personalize(installed, samples, encoder).save(tmp_path / "head")
    export(tmp_path / "other.hwb", model_of(spoilt=False))
    other = installed_module.install(tmp_path / "other.hwb", tmp_path / "bundles")
    with pytest.raises(FingerprintMismatch, match="fit again"):
        load_head(tmp_path / "head", other)
    head = saved.load(tmp_path / "head")
    forged = type(encoder.norm)(encoder.norm.variant, encoder.norm.statistics + 1, 9, encoder.norm.golden)
    saved.save(
        tmp_path / "forged", saved.SavedHead(head.head, head.fingerprint, "fp32", head.class_names, {}, norm=forged)
    )
    with pytest.raises(StateError, match="not those that it was fitted on"):
        load_head(tmp_path / "forged", installed)


def test_library_and_command_line_agree(spoilt, tmp_path, capsys):
    _, installed, samples = spoilt
    places = ["--bundle", str(installed.folder), "--cache", str(tmp_path / "cache")]
    command = ["fit", *places, "--data", SOURCE, "--out", str(tmp_path / "head")]
    assert main([*command, "--precision", "fp32", "--json"]) == 0
    assert '"norm": "own"' in capsys.readouterr().out
    assert main(["predict", *places, "--head", str(tmp_path / "head"), "--data", SOURCE, "--json"]) == 0
    capsys.readouterr()
    person = Personalizer.open(installed.folder).load(tmp_path / "head")
    assert person.encoder.norm is not None
    by_file = person.predict(samples)
    fitted = Personalizer.open(installed.folder).fit(samples)
    assert fitted.encoder.norm is not None
    fitted.save(tmp_path / "own")
    np.testing.assert_array_equal(
        Personalizer.open(installed.folder).load(tmp_path / "own").predict(samples), fitted.predict(samples)
    )
    assert np.mean(by_file == fitted.predict(samples)) > 0.8  # fitted on three quarters of them
    assert Personalizer.open(installed.folder, norm="shipped").fit(samples).encoder.norm is None


def test_agent_installs_restarts_and_rolls_back_with_the_statistics_of_its_head(tmp_path):
    config = AgentConfig(
        id="pi",
        state=tmp_path / "state",
        data=DataConfig(source=SOURCE),
        head=HeadConfig(precision="fp32", min_gain=0.0, blend=False),  # a blend would do without the encoder
    )
    export(tmp_path / "good.hwb", model_of(spoilt=True))
    manifest = archive.open_bundle(tmp_path / "good.hwb").manifest

    def install(path, manifest):
        blob = BlobRef(digest="0" * 64, size_bytes=1, chunk_bytes=1024)
        message = Install(run="r", bundle_id=manifest.bundle_id, blob=blob)
        return install_bundle(config, message, path)

    report = install(tmp_path / "good.hwb", manifest)
    assert report.metrics["norm.own"] == pytest.approx(128 / 144, abs=1e-3)
    current = installed_module.current(config.state / "bundles")
    head = load_head(config.state / "head", current)
    assert report.fingerprint == head.fingerprint == head.norm.fingerprint
    model = model_of(spoilt=True)
    with torch.no_grad():
        for layer in norms(model):
            layer.weight.zero_()  # nothing that statistics could repair
    export(tmp_path / "bad.hwb", model)
    after = install(tmp_path / "bad.hwb", archive.open_bundle(tmp_path / "bad.hwb").manifest)
    assert after.rolled_back
    assert (
        load_head(config.state / "head", installed_module.current(config.state / "bundles")).fingerprint
        == head.fingerprint
    )
    assert refit_current(config)[0] == current.id
    assert load_head(config.state / "head", current).fingerprint == head.fingerprint, "the same inputs, the same bits"

"""int8 is offered where heads lose nothing with it on domains that its ranges were not taken from."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_agent import cli, data, methods
from edge_agent.bundle import archive, installed, manifest
from edge_agent.bundle.archive import open_bundle
from edge_agent.bundle.manifest import DomainAnswers, variant_figures
from edge_agent.core.errors import BundleDamaged, ExportRejected
from edge_agent.core.task import ImageInput, Task
from edge_agent.personal.variants import refitted_answers
from edge_agent.training.parts import encoder_and_head
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, domains_of
from export.domains import choose_samples, describe_loss, range_inputs
from export.parity import mean_cosine, run
from export.quantize import Quantizer, merge_ranges

TASK = Task(input=ImageInput(channels=3, height=16, width=16), class_names=tuple("0123456789"), encoder="small_cnn")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return encoder_and_head(TASK).eval()


@pytest.fixture(scope="module")
def digits():
    return data.load("digits:optdigits?n=240", TASK.input, TASK.class_names)


def dimmed(samples, share):
    """The same pictures in less light: grey levels nearer to the middle of the range."""
    return replace(samples, inputs=(share * samples.inputs).astype(np.float32))


@pytest.fixture(scope="module")
def lights(digits):
    """Four places: one in dim light, the others in full light or nearly."""
    shares = {"dim": 0.03, "grey": 0.8, "clear": 0.9, "bright": 1.0}
    parts = {name: digits.take(np.arange(number, len(digits), 4)) for number, name in enumerate(shares)}
    return {name: dimmed(part, shares[name]) for name, part in parts.items()}


def export(model, domains, out, **changes):
    trained = TrainedEncoder(model, methods.create("fedavg"), TASK)
    settings = {"name": "n", "created": "2026-01-02T03:04:05+00:00", "exporter": "legacy", **changes}
    return build_bundle(trained, Calibration.from_domains(domains), out, BundleOptions(**settings))


def test_ranges_of_one_dim_place_pass_by_cosine_and_ruin_the_others(model, lights, tmp_path):
    """What the cosine on calibration inputs does not see; so a bundle says that nothing was measured."""
    graph = Quantizer(fp32 := fp32_of(model, tmp_path))
    int8 = graph.int8(graph.ranges(lights["dim"].inputs))
    assert mean_cosine(run(int8, lights["dim"].inputs), run(fp32, lights["dim"].inputs)) > 0.99
    features = {"fp32": run(fp32, lights["bright"].inputs), "int8": run(int8, lights["bright"].inputs)}
    right = refitted_answers(features, lights["bright"])
    assert right["fp32"].mean() - right["int8"].mean() > 0.05
    report = export(model, {"dim": lights["dim"]}, tmp_path / "b.hwb")
    assert "int8" in report.manifest.variants
    assert report.manifest.quantization.held_out == {}
    assert "not measured" in report.manifest.quantization.note
    assert "each with 20 labelled samples" in report.manifest.quantization.note


def fp32_of(model, folder):
    made = open_bundle(
        export(model, {"": dimmed(data.load("digits:optdigits?n=8", TASK.input), 1)}, folder / "f.hwb").path
    )
    return made.read("encoder.onnx")


def test_two_places_of_which_one_is_dim_show_the_loss_and_int8_is_left_out(model, digits, tmp_path):
    both = {"dim": dimmed(digits.take(np.arange(0, 240, 2)), 0.01), "bright": digits.take(np.arange(1, 240, 2))}
    report = export(model, both, tmp_path / "b.hwb")
    made = report.manifest.quantization
    assert "int8" not in report.manifest.variants
    assert made.held_out["bright"].loss > 0.05
    assert report.int8_note.startswith("left out: heads lose more than 0.5% on held-out domains: dim ")
    assert "; bright " in report.int8_note
    assert [gate.name for gate in report.gates if not gate.passed] == ["int8 accuracy"]


def test_ranges_over_all_places_hold_for_each_that_is_left_out(model, lights, tmp_path):
    report = export(model, lights, tmp_path / "b.hwb")
    made = report.manifest.quantization
    assert "int8" in report.manifest.variants
    assert set(made.held_out) == set(lights)
    assert made.ranges == "128 inputs of 4 domain(s)"
    assert made.note == ""
    assert all(one.support == 60 for one in made.held_out.values())
    assert set(made.latency_ms) == {"fp32", "int8"}
    assert min(made.latency_ms.values()) > 0


def test_features_stay_float_behind_the_last_layer(model, digits, tmp_path):
    """A step of 8 bits for all features is coarser than features that hardly vary; heads standardise those."""
    graph = Quantizer(fp32 := fp32_of(model, tmp_path))
    features = run(graph.int8(graph.ranges(digits.inputs)), digits.inputs)
    exact = run(fp32, digits.inputs)
    steps = [len(np.unique(column)) for column in features.T if np.ptp(column)]
    assert np.median(steps) > 100, "one step for all would leave a few values of each"
    spread = exact.std(axis=0)
    noise = (features - exact).std(axis=0)[spread > 0] / spread[spread > 0]
    assert np.median(noise) < 0.05


@pytest.mark.parametrize(
    "highs, expected",
    [
        ([3.0], 3.0),
        ([3.0, 5.0], 5.0),
        ([3.0, 5.0, 1e9], 5.0),
        ([3.0, 5.0, 4.0, 1e9], 5.0),
        ([0.0, 5.0, 4.0], 4.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7e9, 8e9], 6.0),
    ],
)
def test_one_wrong_range_in_four_does_not_widen_the_common_one(highs, expected):
    assert merge_ranges([{"x": (-high, 2 * high)} for high in highs]) == {"x": (-expected, 2 * expected)}


def test_ranges_are_the_extremes_that_onnx_runtime_observes(model, digits, tmp_path):
    """Against ONNX Runtime's own calibration of the same inputs."""
    from onnxruntime.quantization.calibrate import create_calibrator
    from onnxruntime.quantization.shape_inference import quant_pre_process

    (tmp_path / "a.onnx").write_bytes(fp32_of(model, tmp_path))
    quant_pre_process(str(tmp_path / "a.onnx"), str(tmp_path / "p.onnx"))
    calibrator = create_calibrator(tmp_path / "p.onnx", augmented_model_path=str(tmp_path / "c.onnx"))

    class Once:
        batches = iter([{"image": digits.inputs[:50]}])

        def get_next(self):
            return next(self.batches, None)

    calibrator.collect_data(Once())
    found = Quantizer((tmp_path / "a.onnx").read_bytes()).ranges(digits.inputs[:50])
    expected = {
        name: tuple(float(end.item()) for end in one.range_value) for name, one in calibrator.compute_data().items()
    }
    assert expected
    for name, ends in expected.items():
        assert found[name] == pytest.approx(ends, rel=1e-5, abs=1e-6)


def test_loss_and_noise_are_those_of_paired_answers():
    """Of 200 answers 9 are right on fp32 alone and 1 on int8 alone: 4 points lost, standard error by hand."""
    answers = DomainAnswers(support=200, fp32=180, int8=172, both=171)
    assert answers.loss == pytest.approx(0.04)
    pairs = np.array([1] * 9 + [-1] + [0] * 190)
    assert answers.noise == pytest.approx(1.645 * pairs.std() / np.sqrt(200))
    assert describe_loss({"a": answers}).startswith(
        "heads lose more than 0.5% on held-out domains: a 4.0 ± 2.6 points of 200"
    )


@pytest.mark.parametrize("fp32, int8, both", [(180, 179, 178), (100, 100, 60), (172, 180, 171), (180, 178, 177)])
def test_a_loss_within_noise_or_half_a_point_is_none(fp32, int8, both):
    assert describe_loss({"a": DomainAnswers(support=200, fp32=fp32, int8=int8, both=both)}) == ""


def test_many_small_losses_add_up():
    each = DomainAnswers(support=100, fp32=90, int8=88, both=87)
    assert describe_loss({"a": each}) == ""
    assert "all domains 2.0 ± " in describe_loss({str(number): each for number in range(12)})


def test_answers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="impossible"):
        DomainAnswers(support=10, fp32=5, int8=5, both=6)


def test_domains_have_equal_parts_of_the_ranges_and_all_classes(digits):
    few = digits.take(np.argsort(digits.labels, kind="stable"))  # as folders list them
    parts = range_inputs(choose_samples({"large": few, "small": few.take(np.arange(0, 240, 6))}))
    assert {name: len(part) for name, part in parts.items()} == {"large": 64, "small": 40}
    rows = [int(np.flatnonzero((few.inputs == one).all(axis=(1, 2, 3)))[0]) for one in parts["large"]]
    assert set(few.labels[rows]) == set(range(10))


def test_samples_that_are_not_of_this_task_are_refused_by_the_name_of_their_domain(model, digits, tmp_path):
    wrong = replace(digits, inputs=digits.inputs[:, :, :8])
    with pytest.raises(ExportRejected, match=r"calibration inputs of hall are \[64, 3, 8, 16\]"):
        export(model, {"porch": digits, "hall": wrong}, tmp_path / "b.hwb")


def test_a_source_of_several_domains_gives_each_of_them():
    found = domains_of(["digits?n=20", "digits:photo?n=10"], TASK)
    styles = ["optdigits", "inverted", "photo 2", "slanted", "striped", "rendered", "photo 6"]
    assert [*found] == styles
    assert {name: len(samples) for name, samples in found.items()} == {**dict.fromkeys(styles, 20), "photo 6": 10}


# --- what a bundle says ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(model, lights, tmp_path_factory):
    return export(model, lights, tmp_path_factory.mktemp("made") / "b.hwb")


def test_figures_do_not_change_what_the_bundle_is(made, model, lights, tmp_path):
    """Devices compute with the same files, whatever was measured and however long it took."""
    again = export(model, lights, tmp_path / "b.hwb").manifest
    assert again.bundle_id == made.manifest.bundle_id
    assert again.quantization.held_out == made.manifest.quantization.held_out


def test_bundles_of_before_are_read(made, tmp_path):
    opened = open_bundle(made.path)
    fields = opened.manifest.model_dump(mode="json", exclude={"files", "schema_version", "quantization"})
    fields["variants"] = {precision: variant["file"] for precision, variant in fields["variants"].items()}
    archive.pack(tmp_path / "old.hwb", fields, {name: opened.read(name) for name in opened.manifest.files})
    old = installed.install(tmp_path / "old.hwb", tmp_path / "installed")
    assert json.loads((old.folder / "manifest.json").read_bytes())["quantization"] is None
    assert old.id == made.manifest.bundle_id
    assert variant_figures(old.manifest)["variants"]["int8"]["accuracy"] is None


def test_impossible_figures_are_damage(made, tmp_path):
    opened = open_bundle(made.path)
    content = json.loads(manifest.dump_manifest(opened.manifest))
    content["quantization"]["held_out"]["dim"]["int8"] = 61
    with pytest.raises(BundleDamaged, match="61"):
        manifest.parse_manifest(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n", "b.hwb")


def test_import_and_status_show_both_variants(made, tmp_path, capsys):
    state = tmp_path / "state"
    assert cli.main(["import", str(made.path), "--state", str(state), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    held_out = made.manifest.quantization.held_out
    assert figures["domains"]["dim"] == {
        "support": 60, "fp32": held_out["dim"].fp32 / 60, "int8": held_out["dim"].int8 / 60
    }  # fmt: skip
    int8 = figures["variants"]["int8"]
    assert int8["accuracy"] == pytest.approx(sum(one.int8 for one in held_out.values()) / 240)
    assert int8["bytes"] == made.manifest.files["encoder.int8.onnx"].size_bytes
    assert int8["cosine"] == made.manifest.parity.int8_cosine
    config = tmp_path / "agent.toml"
    config.write_text(f'id = "a"\nstate = "{state}"\n[data]\nsource = "digits:optdigits?n=60"\n')
    cli.main(["status", "--config", str(config), "--json"])
    assert json.loads(capsys.readouterr().out)["figures"] == figures
    cli.main(["status", "--config", str(config)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("int8 ") and "heads refitted there are right on" in line for line in lines)
    assert any(line.split() == ["int8", "ranges", *figures["ranges"].split()] for line in lines)
    shares = {name: (one.int8 - one.fp32) for name, one in held_out.items()}
    ends = [
        line.split()[1]
        for line in lines
        if re.match(r"on \S+ .* of 60 samples; of 4 domains int8 (loses|gains) most here", line)
    ]
    least = min(shares.values())
    most = max(shares.values())
    expected = [least] if least < 0 else []
    if most > 0:
        expected.append(most)
    assert [shares[name] for name in ends] == expected
    command = ["fit", "--bundle", str(state), "--data", "digits:optdigits?n=60", "--out", str(tmp_path / "head")]
    assert cli.main([*command, "--cache", str(tmp_path / "cache")]) == 0
    assert "where exported" not in capsys.readouterr().out, (
        "what a head scores is not to be taken for figures of the bundle"
    )

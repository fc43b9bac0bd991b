"""Blends of head and local model: the share by brute force, the choice, and the way through all commands."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from scipy.optimize import minimize

from edge_agent import data
from edge_agent.cli import main
from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import Samples
from edge_agent.heads import saved
from edge_agent.heads.blend import BlendHead, floored_logarithms
from edge_agent.personal import blend, choice, fitting
from edge_agent.personal import personalize as personalize_module
from edge_agent.personal.blend import BLEND, BOTH, LOCAL, add_blends, best_share, try_blend
from edge_agent.personal.choice import MOST_CLASSES, HeadChoice, Trial
from edge_agent.personal.confidence import calibrate
from edge_agent.personal.detectors import Detector
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions, answers_in_folds, choose_model
from edge_agent.personal.local.models import HeadInput, LocalFeatures
from edge_agent.personal.one_file import TOLERANCE
from edge_agent.personal.personalize import bytes_saved, evaluate_heads, extract, load_head, personalize
from edge_agent.personal.personalizer import Personalizer, load_bundle
from edge_agent.serving.pair import Pair

CLASSES = ("cat", "dog", "owl", "elk")
IMAGES = Task(
    input=ImageInput(channels=3, height=16, width=16, mean=(0.5,) * 3, std=(0.25,) * 3),
    class_names=CLASSES,
    encoder="linear",
    encoder_params={},
)


def answers(rng, labels, skill, classes=4):
    """Probabilities that are right about so often: the larger ``skill``, the surer."""
    logits = rng.normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += skill
    shares = np.exp(logits)
    return shares / shares.sum(axis=1, keepdims=True)


def trial(name, parts, labels):
    result = Trial(name)
    for part, tested in zip(parts, labels, strict=True):
        result.add(part, tested)
    return result


@pytest.fixture
def folds():
    rng = np.random.default_rng(0)
    return rng, [rng.integers(0, 4, 60) for _ in range(5)]


@pytest.mark.parametrize("skills", [(2.0, 2.0), (3.0, 0.5), (0.2, 3.0), (1.0, 0.0)])
def test_the_share_is_that_of_the_least_loss_by_another_solver(folds, skills):
    rng, labels = folds
    first, second = ([answers(rng, part, skill) for part in labels] for skill in skills)
    right = np.concatenate(labels)
    logs = [floored_logarithms(np.concatenate(part)) for part in (first, second)]

    def loss(powers):
        logits = powers[0] * logs[0] + powers[1] * logs[1]
        total = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(right)), right]
        return total.sum() + blend.PULL * ((powers - 0.5) ** 2).sum()

    powers = minimize(loss, [0.5, 0.5], bounds=[(0, None), (0, None)], method="L-BFGS-B").x
    assert best_share(first, second, labels) == pytest.approx(powers[0] / powers.sum(), abs=0.02)


def test_a_model_that_knows_nothing_gets_no_share(folds):
    rng, labels = folds
    good = [answers(rng, part, 4.0) for part in labels]
    wrong = [answers(rng, (part + 1) % 4, 4.0) for part in labels]
    assert best_share(good, wrong, labels) == 1.0
    assert best_share(wrong, good, labels) == 0.0
    assert best_share(wrong, wrong, labels) == 1.0, "answers of both are worse than none: the head stays"


def test_no_sample_takes_part_in_its_own_answer(folds, monkeypatch):
    rng, labels = folds
    first, second = (trial(name, [answers(rng, part, 1.0) for part in labels], labels) for name in "ab")
    seen = []
    monkeypatch.setattr(blend, "best_share", lambda *parts: seen.append([len(part) for part in parts]) or 0.5)
    assert len(try_blend(first, second, labels).right) == 5
    assert seen == [[4, 4, 4]] * 5
    assert len(try_blend(first, second, labels[:1]).right) == 1


def test_the_blend_of_two_that_err_apart_is_chosen_and_a_useless_one_is_not(folds):
    rng, labels = folds
    head = trial("lr", [answers(rng, part, 1.5) for part in labels], labels)
    choice = HeadChoice("lr", (head,), "0.7")
    local = trial(LOCAL, [answers(rng, part, 1.5) for part in labels], labels)
    both = trial(BOTH, [answers(rng, part, 0.1) for part in labels], labels)
    found = add_blends(choice, local, both, labels)
    assert found.choice.name == BLEND
    assert [one.name for one in found.choice.trials] == [BLEND, "lr", BOTH, LOCAL]
    assert 0.3 < found.share < 0.7
    # A head that is as good as certain needs no help.
    sure = trial("lr", [answers(rng, part, 12.0) for part in labels], labels)
    noise = trial(LOCAL, [answers(rng, part, 0.0) for part in labels], labels)
    assert add_blends(HeadChoice("lr", (sure,), "1.0"), noise, both, labels).choice.name in {"lr", BLEND}
    assert add_blends(HeadChoice("lr", (sure,), "1.0"), noise, both, labels).share > 0.7
    assert add_blends(choice, local, both, labels, only_blend=True).choice.name == BLEND


def test_without_time_for_the_local_model_the_head_stays(folds):
    rng, labels = folds
    head = trial("lr", [answers(rng, part, 1.5) for part in labels], labels)
    local = trial(LOCAL, [answers(rng, part, 9.0) for part in labels[:2]], labels[:2])
    local.dropped = "no time for more than 2 of 5 folds"
    found = add_blends(HeadChoice("lr", (head,), "0.7"), local, Trial(BOTH), labels)
    assert (found.choice.name, found.share) == ("lr", 1.0)
    assert LOCAL in [one.name for one in found.choice.trials]
    asked_for = add_blends(HeadChoice("lr", (head,), "0.7"), local, Trial(BOTH), labels, only_blend=True)
    assert (asked_for.choice.name, asked_for.share) == (BLEND, 0.5)


def test_a_blend_that_leaves_the_local_model_no_share_is_not_chosen(folds, monkeypatch):
    rng, labels = folds
    head = trial("lr", [answers(rng, part, 1.5) for part in labels], labels)
    local = trial(LOCAL, [answers(rng, part, 1.5) for part in labels], labels)
    both = trial(BOTH, [answers(rng, part, 0.1) for part in labels], labels)
    monkeypatch.setattr(blend, "best_share", lambda first, *_: 0.5 if len(first) < len(labels) else 1.0)
    found = add_blends(HeadChoice("lr", (head,), "0.7"), local, both, labels)
    assert (found.choice.name, found.share) == ("lr", 1.0)
    assert add_blends(HeadChoice("lr", (head,), "0.7"), local, both, labels, only_blend=True).choice.name == BLEND


def test_answers_over_very_many_classes_are_not_kept():
    few = Trial("lr")
    few.add(np.full((3, MOST_CLASSES), 1 / MOST_CLASSES), np.zeros(3, int))
    many = Trial("lr")
    many.add(np.full((3, MOST_CLASSES + 1), 1 / (MOST_CLASSES + 1)), np.zeros(3, int))
    assert (len(few.answers), len(many.answers)) == (1, 0)
    assert many.loss(1) == pytest.approx(np.log(MOST_CLASSES + 1))


# --- from samples to answers ------------------------------------------------------------------------------------------


def pictures(labels, seed=0):
    """Images (n, 16, 16, 3): two classes differ in the brightness, two in the direction of stripes under noise."""
    rng = np.random.default_rng(seed)
    images = rng.integers(60, 140, (len(labels), 16, 16, 3))
    stripes = 60 * (np.arange(16) // 2 % 2)
    images[labels % 2 == 0] += stripes[None, :, None]
    images[labels % 2 == 1] += stripes[:, None, None]
    images += 40 * (labels // 2)[:, None, None, None]
    return images.clip(0, 255).astype(np.uint8)


@pytest.fixture
def made(make_bundle, tmp_path):
    return make_bundle(task=IMAGES).path, tmp_path / "cache"


@pytest.fixture
def fitted(made):
    path, cache = made
    labels = np.arange(160) % 4
    return Personalizer.open(path, cache=cache).fit(pictures(labels), np.array(CLASSES)[labels], head=BLEND)


def test_the_blend_answers_alike_saved_loaded_served_and_as_one_file(fitted, made, tmp_path):
    path, cache = made
    images = pictures(np.arange(12) % 4, seed=3)
    expected = fitted.predict_proba(images)
    assert isinstance(fitted.head.head, BlendHead)
    assert fitted.head.title == fitted.head.metrics["head"]
    assert fitted.head.title.startswith("blend of ")
    fitted.save(tmp_path / "head")
    again = Personalizer.open(path, cache=cache).load(tmp_path / "head")
    np.testing.assert_array_equal(again.predict_proba(images), expected)
    bundle = load_bundle(path, cache)
    pair = Pair.open(bundle, tmp_path / "head")
    inputs = data.from_arrays(images, np.array(["cat"] * 12), IMAGES.input, CLASSES).inputs
    for row, one in zip(expected, inputs, strict=True):
        result = pair.answer(one[None])
        assert list(result.answer.probabilities.values()) == pytest.approx(row.tolist())
        assert result.features.shape == (1, pair.encoder.feature_dim), (
            "unknown inputs are told by the encoder's features"
        )
    content = fitted.export(tmp_path / "one.onnx").read_bytes()
    session = onnxruntime.InferenceSession(content)
    np.testing.assert_allclose(session.run(["probabilities"], {"image": images})[0], expected, atol=TOLERANCE)
    unknown = session.run(["unknown"], {"image": images})[0]
    assert unknown.tolist() == again.is_unknown(images).tolist() == fitted.is_unknown(images).tolist()


def test_commands_fit_score_and_predict_with_a_blend(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = made
    labels = np.arange(160) % 4
    for number, (image, label) in enumerate(zip(pictures(labels), labels, strict=True)):
        folder = tmp_path / "photos" / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    words = ["--bundle", str(path), "--data", "images:photos", "--cache", "cache"]
    assert main(["fit", *words, "--head", "blend", "--out", "head", "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)
    assert fit["head"].startswith("blend of ")
    assert 0 <= fit["acc.encoder_part"] <= 1
    assert {row["head"] for row in fit["candidates"]} >= {BLEND, BOTH, LOCAL}
    assert main(["fit", *words, "--head", "blend", "--out", "head"]) == 0
    text = capsys.readouterr().out
    assert "its encoder part" in text
    assert "the local model)" in text
    assert main(["evaluate", *words, "--head", "head", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["acc.personal"] == pytest.approx(fit["acc.personal"])
    assert scored["acc.encoder_part"] == pytest.approx(fit["acc.encoder_part"])
    assert main(["predict", *words, "--head", "head", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    head = saved.load(tmp_path / "head")
    assert len(rows) == 160
    assert head.takes.split == Encoder.open(load_bundle(path, tmp_path / "cache"), "fp32").feature_dim
    assert main(["fit", *words, "--no-blend", "--out", "plain", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["head"].startswith(("blend", "lr of"))
    kind = "if this device has trained the encoder on these samples"
    assert kind not in text
    monkeypatch.setattr(blend, "_surest", lambda trials, _folds: trials[0])
    assert main(["fit", *words, "--out", "plain"]) == 0
    assert kind in capsys.readouterr().out
    assert main(["fit", *words, "--head", "blend", "--no-local", "--out", "none"]) == 2
    assert "fit without --no-local" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main(["fit", *words, "--head", "blend", "--param", "first=nope", "--out", "none"]) == 2
    assert "unknown head 'nope'" in capsys.readouterr().err


def test_one_class_and_few_samples_have_no_blend(made):
    path, cache = made
    bundle = load_bundle(path, cache)
    labels = np.zeros(20, int)
    one = data.from_arrays(pictures(labels), np.array(["cat"] * 20), IMAGES.input, CLASSES)
    encoder = Encoder.open(bundle, "fp32")
    result = personalize(bundle, (one, one.take(np.arange(0))), encoder, FitOptions("auto"))
    assert result.takes.local is None
    features = extract(bundle, (one, one.take(np.arange(0))), encoder, FitOptions("auto"))
    with pytest.raises(UsageError, match="more samples, of two classes"):
        choose_model(bundle, one, features.train_features, FitOptions(BLEND), features.local.model)
    two = data.from_arrays(pictures(np.array([0, 1])), np.array(["cat", "dog"]), IMAGES.input, CLASSES)
    assert personalize(bundle, (two, one), encoder, FitOptions("auto")).takes.local is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"split": 3}, r"expected \(n, 3\)"),
        ({"name": "raw inputs + knn"}, "of the encoder; fit it again"),
        ({"split": -1}, "split"),
    ],
)
def test_a_damaged_blend_is_refused(fitted, tmp_path, change, message):
    fitted.save(tmp_path / "head")
    path = tmp_path / "head" / "head.json"
    card = json.loads(path.read_text())
    card["local"] |= change
    path.write_text(json.dumps(card))
    with pytest.raises(StateError, match=message):
        saved.load(tmp_path / "head")


def test_a_head_of_other_inputs_than_the_bundle_has_is_refused(fitted, made, tmp_path):
    fitted.save(tmp_path / "head")
    path = tmp_path / "head" / "head.json"
    card = json.loads(path.read_text())
    card["local"]["input"]["mean"] = [0.1, 0.2, 0.3]
    path.write_text(json.dumps(card))
    with pytest.raises(StateError, match="inputs of another form"):
        load_head(tmp_path / "head", load_bundle(*made))


def test_a_blend_that_cannot_be_is_refused_before_heads_are_compared(made, monkeypatch):
    path, cache = made
    labels = np.arange(40) % 4
    person = Personalizer.open(path, cache=cache)
    person.fit(pictures(labels), np.array(CLASSES)[labels], head=BLEND)
    monkeypatch.setattr(fitting, "best_head", lambda *_: pytest.fail("heads were compared"))
    with pytest.raises(UsageError, match=r"head\.local = true"):
        person.partial_fit(pictures(labels), np.array(CLASSES)[labels])


def test_of_very_many_samples_the_local_part_learns_from_some(made, monkeypatch):
    path, cache = made
    labels = np.arange(160) % 4
    monkeypatch.setattr(fitting, "MOST_SAMPLES", 60)
    person = Personalizer.open(path, cache=cache).fit(pictures(labels), np.array(CLASSES)[labels], head=BLEND)
    assert person.head.head.params.second_samples == 60
    assert "60 samples" in next(one.dropped for one in person.choice.trials if one.name == BOTH)


def test_a_blend_learns_from_added_samples_as_well(made):
    """A refit with head auto compares anew; the digests of what was learned are those of the images."""
    path, cache = made
    bundle = load_bundle(path, cache)
    labels = np.arange(200) % 4
    every = data.from_arrays(pictures(labels), np.array(CLASSES)[labels], IMAGES.input, CLASSES)
    assert isinstance(every, Samples)
    encoder = Encoder.open(bundle, "fp32")
    parts = every.take(np.arange(150)), every.take(np.arange(150, 200))
    result = personalize(bundle, parts, encoder, FitOptions(BLEND))
    assert result.learned.tolist() == parts[0].row_digests().tolist()
    assert result.false_alarms is not None
    assert isinstance(result.confidence.unknown.detector, Detector)
    assert 0 <= result.encoder_share <= 1


def fit_on_pictures(made, options, count=160):
    """The features and the result of a fit on so many pictures, with a quarter of them held out."""
    path, cache = made
    bundle = load_bundle(path, cache)
    labels = np.arange(count) % 4
    every = data.from_arrays(pictures(labels), np.array(CLASSES)[labels], IMAGES.input, CLASSES)
    encoder = Encoder.open(bundle, "fp32")
    features = extract(bundle, every, encoder, options)
    return features, personalize(bundle, every, encoder, options)


@pytest.mark.parametrize("name", ["auto", BLEND])
def test_a_chosen_model_is_calibrated_by_the_answers_of_the_choice(made, monkeypatch, name):
    monkeypatch.setattr(fitting, "out_of_fold", lambda *_: pytest.fail("the folds were fitted once more"))
    features, result = fit_on_pictures(made, FitOptions(name, doubtful_labels=True))
    labels = features.train.labels
    assert sorted(result.answers.rows.tolist()) == list(range(120))
    right = result.answers.probabilities.argmax(axis=1) == labels[result.answers.rows]
    assert right.tolist() == result.choice.trials[0].all_right.tolist()
    assert not any(trial.answers for trial in result.choice.trials), "they are large"
    assert result.confidence.calibration == calibrate(
        result.answers.probabilities, labels[result.answers.rows], result.answers.folds
    )


def test_answers_of_the_choice_are_those_of_fits_on_the_same_folds(made):
    features, result = fit_on_pictures(made, FitOptions("auto", blend=False))
    again = answers_in_folds(
        features.bundle, result.head, features.train, features.train_features, FitOptions("auto", blend=False)
    )
    np.testing.assert_array_equal(result.answers.rows, again.rows)
    np.testing.assert_array_equal(result.answers.folds, again.folds)
    np.testing.assert_array_equal(result.answers.probabilities, again.probabilities)


def test_many_samples_are_calibrated_by_two_folds_of_heads_that_learned_from_all_others(made, monkeypatch):
    monkeypatch.setattr(choice, "MOST_ROWS", 60)
    monkeypatch.setattr(fitting, "MOST_ROWS", 60)
    features, result = fit_on_pictures(made, FitOptions("auto"))
    rows, _ = features.rows(result.takes)
    every = answers_in_folds(features.bundle, result.head, features.train, rows, FitOptions("auto"))
    assert np.unique(result.answers.folds).tolist() == [0, 1]
    is_answered = every.folds < 2
    np.testing.assert_array_equal(result.answers.rows, every.rows[is_answered])
    np.testing.assert_array_equal(result.answers.probabilities, every.probabilities[is_answered])


def test_doubtful_labels_of_many_samples_are_looked_for_by_heads_that_learn_from_some(made, monkeypatch):
    monkeypatch.setattr(choice, "MOST_ROWS", 60)
    monkeypatch.setattr(personalize_module, "MOST_ROWS", 60)
    learned = []
    fit_head = fitting.fit

    def noted(bundle, rows, *others):
        learned.append(len(rows))
        return fit_head(bundle, rows, *others)

    monkeypatch.setattr(fitting, "fit", noted)
    answered = []
    monkeypatch.setattr(personalize_module, "worst_samples", lambda _train, answers, *_: answered.append(answers) or [])
    fit_on_pictures(made, FitOptions("auto", doubtful_labels=True))
    assert max(learned) == 60, "of 96 in each fold"
    assert len(answered[-1].rows) == 120, "all samples are looked at"


def test_a_blend_that_was_not_measured_is_calibrated_by_fits_of_its_own(made, monkeypatch):
    monkeypatch.setattr(fitting, "BUDGET_S", -1.0)
    features, result = fit_on_pictures(made, FitOptions(BLEND))
    assert isinstance(result.head, BlendHead)
    rows, _ = features.rows(result.takes)
    again = answers_in_folds(features.bundle, result.head, features.train, rows, FitOptions(BLEND))
    np.testing.assert_array_equal(result.answers.probabilities, again.probabilities)


def test_the_cost_of_a_blend_includes_its_features_of_raw_inputs(made, monkeypatch):
    features, result = fit_on_pictures(made, FitOptions(BLEND))
    seconds = [0.0]
    of_inputs = LocalFeatures.__call__

    def slow(local, inputs):
        seconds[0] += len(inputs)
        return of_inputs(local, inputs)

    monkeypatch.setattr(LocalFeatures, "__call__", slow)
    timed = replace(features, options=FitOptions(clock=lambda: seconds[0]))
    (blended, alone), _ = evaluate_heads(timed, [BLEND, "lr"])
    if alone.takes.local is not None:
        blended, alone = alone, blended
    assert (blended.budget.answer_s, alone.budget.answer_s) == (1.0, 0.0)
    learned = LocalFeatures(result.takes.local.name, IMAGES.input, {"thresholds": np.zeros(1000, np.float32)})
    assert bytes_saved(blended.head, HeadInput(learned, 24)) == bytes_saved(blended.head, HeadInput()) + 4000

"""A pair answers as its parts do, names itself, and refuses heads of other encoders."""

from __future__ import annotations

import numpy as np
import pytest
from serving_site import COLOURS, fit_squares, png, square

from edge_agent.core.errors import FingerprintMismatch, StateError, UsageError
from edge_agent.personal.personalizer import Personalizer, load_bundle
from edge_agent.serving.answer import ClassAnswer, NumberAnswer
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.pair import SHARED, Pair


def prepared(pair, pixels):
    return Decoder(pair.input).decode(png(pixels))


@pytest.mark.parametrize("label", COLOURS)
def test_an_answer_is_that_of_the_personalizer(bundle, bundle_path, head, tmp_path, label):
    pair = Pair.open(bundle, head)
    personal = Personalizer.open(bundle_path, cache=tmp_path / "cache").load(head)
    pixels = square(label, 77)
    answer = pair.answer(prepared(pair, pixels)).answer
    shares = personal.predict_proba(pixels[None])[0]
    assert isinstance(answer, ClassAnswer)
    assert answer.label == label
    assert list(answer.probabilities.values()) == shares.tolist()
    assert answer.is_unknown is bool(personal.is_unknown(pixels[None])[0])


def test_a_strange_input_is_unknown(bundle, head):
    pair = Pair.open(bundle, head)
    checks = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)
    answer = pair.answer(prepared(pair, np.stack([checks] * 3, axis=2))).answer
    assert answer.is_unknown
    assert answer.state == "unknown"


def test_how_many_unknown_inputs_would_be_missed_is_known(bundle, head):
    pair = Pair.open(bundle, head)
    assert pair.unknown_text.startswith("misses about ")
    assert Pair.open(bundle, None).unknown_text == ""


def test_without_a_head_the_shared_classifier_answers(bundle):
    pair = Pair.open(bundle, None)
    answer = pair.answer(prepared(pair, square("red"))).answer
    assert (answer.pair.head, answer.pair.head_id, answer.is_unknown) == (SHARED, "", None)
    assert set(answer.probabilities) == set("0123456789")


def test_a_bundle_without_a_classifier_needs_a_head(make_bundle, tmp_path):
    bundle = load_bundle(make_bundle("bare.hwb").path, tmp_path / "cache")
    with pytest.raises(UsageError, match="no shared classifier"):
        Pair.open(bundle, None)


def test_a_head_of_another_encoder_is_refused(make_bundle, head, tmp_path):
    other = load_bundle(make_bundle("other.hwb", seed=9).path, tmp_path / "cache")
    with pytest.raises(FingerprintMismatch):
        Pair.open(other, head)


def test_a_folder_without_a_head_is_refused(bundle, tmp_path):
    with pytest.raises(StateError):
        Pair.open(bundle, tmp_path / "nothing")


def test_heads_that_have_learned_the_same_have_the_same_id(bundle, bundle_path, head, tmp_path):
    again = fit_squares(bundle_path, tmp_path / "again", tmp_path / "cache")
    other = fit_squares(bundle_path, tmp_path / "other", tmp_path / "cache", seed=1)
    ids = [Pair.open(bundle, folder).id for folder in (head, again, other)]
    assert ids[0] == ids[1]
    assert ids[0].head_id != ids[2].head_id
    assert ids[0].bundle == ids[2].bundle


def test_of_several_windows_the_mean_counts(bundle, head):
    pair = Pair.open(bundle, head)
    windows = np.concatenate([prepared(pair, square(label)) for label in ("red", "red", "blue")])
    answer = pair.answer(windows).answer
    shares = [pair.answer(window[None]).answer.probabilities["red"] for window in windows]
    assert answer.label == "red"
    assert answer.probability == pytest.approx(np.mean(shares))
    assert [window.label for window in answer.windows] == ["red", "red", "blue"]


def test_a_head_that_looks_for_anomalies_answers_with_a_score(bundle, bundle_path, tmp_path):
    normal = np.stack([square("green", number) for number in range(60)])
    personal = Personalizer.open(bundle_path, cache=tmp_path / "cache").fit(normal, head="mahalanobis")
    personal.save(tmp_path / "watch")
    pair = Pair.open(bundle, tmp_path / "watch")
    usual = pair.answer(prepared(pair, square("green", 99))).answer
    odd = pair.answer(prepared(pair, square("red", 99))).answer
    assert isinstance(usual, NumberAnswer)
    assert (usual.state, odd.state) == ("normal", "anomaly")
    assert odd.value == pytest.approx(personal.predict(square("red", 99)[None])[0])
    assert set(odd.as_json()) == {"score", "anomaly", "threshold", "bundle", "head", "head_id", "ms"}


def test_an_answer_as_json_has_every_field(bundle, head):
    pair = Pair.open(bundle, head)
    content = pair.answer(prepared(pair, square("red"))).answer.as_json()
    assert list(content) == ["class", "probability", "unknown", "probabilities", "bundle", "head", "head_id", "ms"]
    assert set(content["ms"]) == {"decode", "encode", "head"}
    assert content["head"] == "lr"
    assert content["bundle"] == bundle.id[:12]

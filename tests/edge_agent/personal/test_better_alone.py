"""A device that fares better without the encoder is told so, and can use its own model where that is allowed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_agent import Personalizer, data
from edge_agent.cli import main
from edge_agent.cli.agent import _rows
from edge_agent.core.errors import StateError, UsageError
from edge_agent.heads import saved
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.fitting import FitOptions
from edge_agent.personal.personalize import load_head, personalize


@pytest.fixture
def weak(make_bundle, tmp_path, monkeypatch):
    """A bundle whose encoder has two features: far too few for ten digits."""
    made = make_bundle(dim=2, global_head=True)
    monkeypatch.chdir(tmp_path)
    personalizer = Personalizer.open(made.path, cache=tmp_path / "cache")
    task = personalizer.bundle.manifest.task
    return made, personalizer.bundle, data.split(data.load("digits?n=400", task.input, task.class_names), 0.25, 0)


def answer(capsys, *words, code=0):
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_local_model_is_used_only_where_it_is_allowed(weak, tmp_path):
    _, bundle, (train, test) = weak
    encoder = Encoder.open(bundle, "fp32")
    plain = personalize(bundle, (train, test), encoder)
    assert plain.scores.better_alone
    assert plain.scores.local > plain.scores.personal + 0.3
    assert (plain.local, plain.title, plain.used_accuracy) == (None, "lr", plain.scores.personal)
    result = personalize(bundle, (train, test), encoder, FitOptions(allow_local=True))
    assert result.title == result.scores.local_model == result.metrics()["head"]
    assert result.used_accuracy == result.scores.local
    result.save(tmp_path / "head")
    again = load_head(tmp_path / "head", bundle)
    assert again.title == result.title
    assert (again.takes.local.name, again.takes.split) == (result.local.name, 0)
    answers = again.head.predict_proba(again.takes.local(test.inputs))
    assert (answers == result.local.predict_proba(test.inputs)).all()
    assert np.mean(answers.argmax(axis=1) == test.labels) == result.scores.local


def test_cross_validation_decides_where_few_samples_are_held_out(weak):
    """Four held-out samples show nothing beyond noise; the training samples do."""
    _, bundle, (train, test) = weak
    encoder = Encoder.open(bundle, "fp32")
    few = test.take(np.arange(4))
    result = personalize(bundle, (train, few), encoder, FitOptions(allow_local=True))
    assert not result.scores.better_alone
    assert result.title == result.scores.local_model
    same = train.take(np.flatnonzero(train.labels == 3))
    alone = personalize(bundle, (same, few), encoder, FitOptions(allow_local=True))
    assert alone.local is None, "one class: there is nothing to compare"


def test_without_the_yardstick_nothing_is_said_of_it(weak):
    _, bundle, parts = weak
    scores = personalize(bundle, parts, Encoder.open(bundle, "fp32"), FitOptions(local=False)).scores
    assert (scores.local, scores.local_model, scores.better_alone) == (None, "", False)


def test_fit_predict_and_evaluate_work_with_the_local_model(weak, tmp_path, capsys):
    made, bundle, (_, test) = weak
    words = ("--bundle", made.path, "--data", "digits?n=400", "--cache", tmp_path / "cache")
    fitted = answer(capsys, "fit", *words, "--out", "head", "--no-blend")
    assert fitted["better_alone"] is True
    steps = {next_step["step"]: next_step["message"] for next_step in fitted["next_steps"]}
    assert list(steps) == ["blend", "allow_local", "other_bundle"], "300 samples are not few"
    assert fitted["head"] == fitted["candidates"][0]["head"]
    assert main([*map(str, ("fit", *words, "--out", "head", "--no-blend"))]) == 0
    said = capsys.readouterr().out
    assert "this device is better off alone" in said
    assert [line for line in said.splitlines() if line.startswith("to try next: ")] == [
        f"to try next: {message}" for message in steps.values()
    ]
    blended = answer(capsys, "fit", *words, "--out", "head")
    assert not blended["better_alone"]
    assert blended["next_steps"] == []
    fitted = answer(capsys, "fit", *words, "--out", "head", "--allow-local", "--no-blend")
    assert [next_step["step"] for next_step in fitted["next_steps"]] == ["blend", "other_bundle"]
    fitted = answer(capsys, "fit", *words, "--out", "head", "--allow-local")
    assert fitted["head"] == fitted["local_model"]
    assert main([*map(str, ("fit", *words, "--out", "head", "--allow-local"))]) == 0
    assert "note: saved is the model of acc.local; acc.personal is that of head '" in capsys.readouterr().out
    scored = answer(capsys, "evaluate", *words, "--head", "head")
    assert (scored["head"], scored["acc.personal"]) == (fitted["head"], fitted["acc.local"])
    rows = answer(capsys, "predict", *words, "--head", "head")["predictions"]
    head = load_head(tmp_path / "head", bundle)
    expected = head.head.predict_proba(head.takes.local(data.load("digits?n=400", test.input).inputs))
    assert [row["class"] for row in rows] == [str(label) for label in expected.argmax(axis=1)]
    assert answer(capsys, "fit", *words, "--out", "head", "--no-local")["acc.local"] is None


def test_the_python_interface_compares_and_uses_it(weak, tmp_path):
    made, _, (train, test) = weak
    personalizer = Personalizer.open(made.path, cache=tmp_path / "cache")
    with pytest.raises(UsageError, match="local=True"):
        personalizer.fit(train).use_local()
    scores = personalizer.fit(train, local=True, blend=False).evaluate(test)
    assert scores["better_alone"]
    personalizer.use_local().save(tmp_path / "head")
    again = Personalizer.open(made.path, cache=tmp_path / "cache").load(tmp_path / "head")
    assert again.evaluate(test)["acc.personal"] == scores["acc.local"]
    assert np.mean(again.predict(test) == np.array(test.class_names)[test.labels]) == scores["acc.local"]


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"name": "magic + lr"}, "expected one of most frequent class"),
        ({"name": "gradients and colours + lr"}, "takes 192 features, and there are 84 of 'grad"),
    ],
)
def test_a_saved_local_model_that_cannot_be_is_refused(weak, tmp_path, damage, message):
    _, bundle, parts = weak
    personalize(bundle, parts, Encoder.open(bundle, "fp32"), FitOptions(allow_local=True)).save(tmp_path / "head")
    path = tmp_path / "head" / "head.json"
    card = json.loads(path.read_text())
    card["local"] |= damage
    path.write_text(json.dumps(card))
    with pytest.raises(StateError, match=message):
        saved.load(tmp_path / "head")


def test_the_status_says_it():
    rows = dict(_rows({"metrics": {"acc.local": 0.9, "better_alone": True}}))
    assert "this device is better off alone" in str(rows["note"])
    assert "note" not in dict(_rows({"metrics": {"acc.local": 0.9, "better_alone": False}}))

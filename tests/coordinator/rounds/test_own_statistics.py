"""Methods that do not ship with Headwater and send statistics: judged by what is sent, alike on both tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from federation_duties import TinyDuties
from federation_harness import Federation
from pydantic import Field

from coordinator.cli.run import footnotes
from coordinator.runs.result_notes import LastUpdates
from coordinator.runs.run_summary import RunSummary
from coordinator.state.run_lines import RoundLine
from coordinator.web.folder_view import FolderView
from edge_agent import heads, methods
from edge_agent.core.config import PrivacyConfig
from edge_agent.core.errors import PrivacyRefused
from edge_agent.core.task import ImageInput, Task
from edge_agent.data import Samples
from edge_agent.heads.ridge import RidgeHead
from edge_agent.methods.base import Method
from edge_agent.methods.values import MethodParams
from edge_agent.privacy.policy import UpdateFacts, check_update

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="small_cnn",
    encoder_params={"feature_dim": 6, "width": 2},
)
CONSENT = ["extra.cross", "extra.gram"]


def gram_and_cross(features, labels, least=1):
    """X^T X (d, d) and X^T Y (d, K) of the samples of classes that have at least so many."""
    counts = np.bincount(labels, minlength=3)
    counted = counts[labels] >= least
    rows = features[counted].astype(np.float64)
    targets = np.eye(3)[labels[counted]]
    return {"extra.gram": rows.T @ rows, "extra.cross": rows.T @ targets}


class Sums(Method):
    """A round of statistics: the encoder comes back as it was, with X^T X and X^T Y beside it."""

    least: ClassVar[int] = 1
    shared = ("encoder",)

    def sends(self, model, task):
        return {"extra.gram": np.zeros((6, 6)), "extra.cross": np.zeros((6, 3))}

    def local_update(self, client, received):
        features = client.model.features(client.train_inputs).detach().numpy()
        return {**self.sent(client), **gram_and_cross(features, client.train_labels.numpy(), self.least)}

    def aggregate(self, state, updates):
        return {**state, **self.mean(updates, lambda update, arrays: None, may_be_empty=True)}


class SumsHead(RidgeHead):
    """The half of `Sums` for devices without torch."""

    least: ClassVar[int] = 1

    @staticmethod
    def contribute(data, received, rng):
        return gram_and_cross(data.features, data.labels, SumsHead.least)


class ClaimingParams(MethodParams):
    min_class_count: int = Field(2, ge=1, description="never used")


class SingleSample(TinyDuties):
    """One sample of class c, 17 of the others."""

    def read_samples(self, task):
        if self._rows is None:
            train, test = super().read_samples(task)
            labels = np.arange(18, dtype=np.int64) % 2
            labels[0] = 2
            self._rows = Samples(train.inputs, labels, task.class_names, task.input), test
        return self._rows


@pytest.fixture
def sums(monkeypatch):
    """The method and its head, known to this process under one name."""
    monkeypatch.setattr(Sums, "name", "sums")
    for registry, kind in ((methods.registry, Sums), (heads.registry, SumsHead)):
        monkeypatch.setitem(registry._extra, "sums", kind)
    return Sums


def finished(folder, policies=None, *, duties=TinyDuties):
    """A round of one device that trains and two that do not; device -> its [privacy]."""

    def make(config, tier):
        policy = PrivacyConfig.model_validate((policies or {}).get(config.id, {}))
        return duties(config.model_copy(update={"privacy": policy}), tier)

    cohort = {"tier": "any", "min_agents": 1}
    with Federation(folder, tasks=make, task=TASK, agents=1, capture=True, cohort=cohort) as fed:
        for name in ("h1", "h2"):
            fed.add(name, tier="head")
        fed.settle()
        fed.request("sums", rounds=1, params={"local_epochs": 1})
        fed.finish()
        fed.ended = fed.record
        fed.result = fed.state.run(fed.run).summary()
    return fed


def refusals(fed):
    return {agent: one["reason"] for agent, one in fed.result["left_out"].items()}


def test_statistics_that_nobody_declared_leave_no_device_of_either_tier(tmp_path, sums):
    fed = finished(tmp_path)
    assert fed.ended.status == "failed"
    why = fed.ended.reason
    assert "method 'sums' sends 'extra.cross' float64 [6, 3], 'extra.gram' float64 [6, 6]" in why
    for agent in ("a0", "h1", "h2"):
        assert not fed.published(fed.topics.up_chunks(agent)), f"{agent} has sent its statistics"


def test_reason_is_the_same_on_both_tiers_and_names_the_consent_and_no_parameter_that_is_absent(tmp_path, sums):
    fed = finished(tmp_path, {"a0": {"statistics": CONSENT}})
    assert fed.ended.status == "finished"
    (why,) = {*refusals(fed).values()}
    assert {*refusals(fed)} == {"h1", "h2"}
    other = finished(tmp_path / "2", {"h1": {"statistics": ["*"]}, "a0": {"statistics": CONSENT}})
    assert refusals(other) == {"h2": why}
    assert f"privacy.statistics = {json.dumps(CONSENT)}" in why
    assert "headwater run -p" not in why


def test_a_parameter_that_is_declared_and_not_obeyed_changes_nothing(tmp_path, sums, monkeypatch):
    """X^T Y of a class of one sample has that sample's features in its column."""
    monkeypatch.setattr(Sums, "Params", ClaimingParams)
    some = {agent: {"statistics": ["extra.gram"]} for agent in ("a0", "h1", "h2")}
    fed = finished(tmp_path, some, duties=SingleSample)
    assert fed.ended.status == "failed"
    assert "'extra.cross' of method 'sums' holds values of 1 of 3 classes that have fewer than 2" in fed.ended.reason
    assert not fed.published(fed.topics.up_chunks("h1"))


def test_statistics_of_classes_that_obey_what_the_method_declares_need_no_consent(tmp_path, sums, monkeypatch):
    monkeypatch.setattr(Sums, "Params", ClaimingParams)
    monkeypatch.setattr(Sums, "least", 2)
    monkeypatch.setattr(SumsHead, "least", 2)
    some = {agent: {"statistics": ["extra.gram"]} for agent in ("a0", "h1", "h2")}
    fed = finished(tmp_path, some, duties=SingleSample)
    assert (fed.ended.status, refusals(fed)) == ("finished", {})
    assert fed.result["updates"] == {"round": 1, "accepted": 3, "expected": 3, "left_out": []}
    assert fed.result["incomplete"] is None


def test_run_of_which_two_of_three_were_refused_does_not_end_as_if_nothing_were(tmp_path, sums, call):
    fed = finished(tmp_path, {"a0": {"statistics": ["*"]}})
    note = fed.result["incomplete"]
    assert note.startswith("1 of 3 updates in round 1, without h1, h2: PrivacyRefused: method 'sums' sends")
    assert note.count("PrivacyRefused") == 1
    assert fed.ended.reason == note, "status and web show the reason of the journal"
    said = list(footnotes(RunSummary.from_json(fed.result)))
    assert f"incomplete: {note}" in said
    assert "\n".join(said).count("PrivacyRefused") == 1
    code, out, _ = call("status", "--state", fed.state.path, "--json")
    assert (code, json.loads(out)["runs"][-1]["reason"]) == (0, note)
    assert "1 of 3 updates in round 1" in (fed.state.run(fed.run).folder / "report.html").read_text()
    view = FolderView(fed.state.path)
    view.refresh(wait=True)
    assert view.runs[fed.run].reason == note


def test_updates_of_the_last_round_are_counted_with_those_that_were_left_out():
    record = {
        "round": 4,
        "agents": ["a", "b"],
        "missing": ["c"],
        "working": [],
        "rejected": [{"agent": "d", "reason": "NaN"}],
        "left_out": [{"agent": "e", "reason": "paused"}, {"agent": "f", "reason": "paused"}],
    }
    updates = LastUpdates.from_lines([RoundLine(3), RoundLine.from_json(record)])
    assert updates.note == "2 of 6 updates in round 4, without d: NaN; without e, f: paused"
    assert LastUpdates.from_lines([]).note == ""


# --- one update ------------------------------------------------------------------------------------------------------

FACTS = UpdateFacts(
    method="sums",
    is_shipped=False,
    declared_least=2,
    shared=frozenset({"encoder.weight", "table.rows"}),
    model_shapes={"table.rows": (3, 6), "encoder.weight": (6, 6), "head.weight": (3, 6), "head.bias": (3,)},
    features=6,
    class_counts=np.array([5, 1, 0]),
    buffers=frozenset({"table.rows"}),
    received={"table.rows": np.ones((3, 6))},
)
ENCODER = {"encoder.weight": np.ones((6, 6), np.float32)}
ROWS = np.array([1.0, 0, 0])[:, None] * np.ones((3, 6))


@pytest.mark.parametrize(
    "arrays, refused",
    [
        ({}, ""),
        ({"extra.head.weight": np.ones((3, 6)), "extra.head.bias": np.ones(3)}, ""),
        ({"extra.control.encoder.weight": np.ones((6, 6))}, ""),
        ({"extra.means": ROWS, "extra.counts": np.array([5, 0, 0])}, ""),
        ({"extra.means": ROWS.T}, ""),
        ({"table.rows": np.ones((3, 6))}, ""),
        ({"table.rows": ROWS}, ""),
        ({"table.rows": np.full((3, 6), 2.0)}, "holds values of 1 of 3 classes"),
        ({"extra.means": np.ones((3, 6))}, "holds values of 1 of 3 classes"),
        ({"extra.means": np.ones((6, 3))}, "holds values of 1 of 3 classes"),
        ({"extra.counts": np.array([5, 1, 0])}, "holds values of 1 of 3 classes"),
        ({"extra.shares": np.array([0.8, 0.2, 0.0])}, "cannot tell"),
        ({"extra.logits": np.zeros((50, 3))}, "cannot tell"),
        ({"extra.one": np.zeros(1)}, "cannot tell"),
        ({"extra.encoder.weight": np.ones((6, 7))}, "cannot tell"),
        ({"head.weight": np.ones((3, 6))}, "cannot tell"),
        ({"samples": np.ones((5, 64))}, "cannot tell"),
    ],
)
def test_an_update_is_judged_by_its_names_shapes_and_counts(arrays, refused):
    if not refused:
        check_update(PrivacyConfig(), {**ENCODER, **arrays}, FACTS)
        return
    with pytest.raises(PrivacyRefused, match=refused):
        check_update(PrivacyConfig(), {**ENCODER, **arrays}, FACTS)
    check_update(PrivacyConfig(statistics=("*",)), {**ENCODER, **arrays}, FACTS)


@pytest.mark.parametrize("array", [np.diag([3.0, 0, 0]), np.ones((3, 3))])
def test_with_as_many_features_as_classes_own_statistics_need_consent(array):
    """X^T Y (d, K) looks like class sums (K, d) there, and the features of a single sample are a column of it."""
    square = replace(FACTS, features=3, model_shapes={"encoder.weight": (6, 6)})
    with pytest.raises(PrivacyRefused, match="cannot tell"):
        check_update(PrivacyConfig(), {**ENCODER, "extra.cross": array}, square)
    zeros = np.zeros((3, 3))
    zeros[0] = 1
    check_update(PrivacyConfig(), {**ENCODER, "extra.means": zeros}, replace(square, is_shipped=True))


def test_device_may_ask_for_more_samples_than_the_method_says():
    six = {**ENCODER, "extra.means": ROWS}
    check_update(PrivacyConfig(min_class_count=5), six, FACTS)
    with pytest.raises(PrivacyRefused, match="fewer than 6 training samples here, the smallest 5"):
        check_update(PrivacyConfig(min_class_count=6), six, FACTS)


def test_device_that_rounds_its_counts_sends_no_statistics_of_classes():
    with pytest.raises(PrivacyRefused, match=r"privacy\.samples is 'rounded'"):
        check_update(PrivacyConfig(samples="rounded"), {"extra.means": ROWS}, FACTS)

"""The device decides: what its [privacy] does not allow is refused, and the coordinator goes on without it."""

from __future__ import annotations

import contextlib

import pytest
from federation_duties import TASK, TinyDuties, quick_params
from federation_harness import Federation

from edge_agent.agent.data_check import check
from edge_agent.core.config import AgentConfig, DataConfig, PrivacyConfig
from edge_agent.core.errors import UnknownName
from edge_agent.wire.messages import down, up

PAPERS = ("dualfed", "fedpac", "fedpick", "repper", "fedrir")
WITH_NORM = TASK.model_copy(update={"encoder": "small_cnn", "encoder_params": {"feature_dim": 8, "width": 2}})


def with_policies(policies):
    """The real duties on tiny data; device -> its [privacy]."""

    def make(config, tier):
        policy = PrivacyConfig.model_validate(policies.get(config.id, {}))
        return TinyDuties(config.model_copy(update={"privacy": policy}), tier)

    return make


@contextlib.contextmanager
def federation(folder, policies, **options):
    with Federation(folder, tasks=with_policies(policies), capture=True, cohort={"min_agents": 1}, **options) as fed:
        fed.until(lambda: len(fed.coordinator.roster.present("train")) == 3)
        yield fed


def finished(folder, method, policies, *, params=None, rounds=3, **options):
    with federation(folder, policies, **options) as fed:
        fed.request(method, rounds=rounds, params={**quick_params(method), **(params or {})})
        fed.finish()
        fed.ended = fed.record  # the journal closes with the federation
        assert fed.run_id
        fed.conditions = {one["id"]: one for one in fed.coordinator.status()["agents"]}
    return fed


def summary_of(fed):
    assert fed.ended.status == "finished", fed.ended.end
    return fed.state.run(fed.run).summary()


@pytest.mark.parametrize("method", PAPERS)
def test_a_device_that_does_not_allow_the_method_is_left_out_with_its_reason_and_the_run_goes_on(tmp_path, method):
    fed = finished(tmp_path, method, {"a2": {"methods": ["fedavg"]}})
    summary = summary_of(fed)
    reason = f"PrivacyRefused: method is '{method}', privacy.methods allows fedavg"
    assert summary["left_out"] == {"a2": {"rounds": [1, 2, 3], "reason": reason}}
    assert [agent["id"] for agent in summary["agents"]] == ["a0", "a1"]
    assert summary["faults"] == {}
    assert [warning for warning in summary["warnings"] if "a2" in warning["clients"]] == []
    lines = fed.metrics()
    assert [line["agents"] for line in lines] == [["a0", "a1"]] * 3
    assert [line["left_out"] for line in lines] == [[{"agent": "a2", "reason": reason}]] * 3
    assert [line["rejected"] for line in lines] == [[]] * 3
    assert (fed.conditions["a2"]["condition"], fed.conditions["a2"]["fault"]) == ("ok", None)
    asked = [job for job in fed.messages(fed.topics.down("a2"), down.Job) if job.run == fed.run_id]
    assert {job.round for job in asked} == {1}, "it is asked once"
    assert not fed.published(fed.topics.up_chunks("a2"))


@pytest.mark.parametrize("method", PAPERS)
def test_the_default_policy_lets_every_method_of_the_papers_through(tmp_path, method):
    assert len(summary_of(finished(tmp_path, method, {}, rounds=1))["agents"]) == 3


@pytest.mark.parametrize("method", ["fedpac", "fedproto", "spherefed"])
def test_statistics_of_classes_with_too_few_samples_are_refused_whatever_the_coordinator_asks_for(tmp_path, method):
    fed = finished(tmp_path, method, {"a0": {"min_class_count": 6}, "a1": {"min_class_count": 7}},
                   params={"min_class_count": 6}, rounds=1)  # fmt: skip
    why = "PrivacyRefused: min_class_count of the run is 6, privacy.min_class_count requires at least 7 "
    why += "(headwater run -p min_class_count=7)"
    assert summary_of(fed)["left_out"] == {"a1": {"rounds": [1], "reason": why}}


@pytest.mark.parametrize("method", ["fedavg", "fedpick", "repper"])
def test_methods_without_statistics_of_classes_have_no_least_count_to_meet(tmp_path, method):
    fed = finished(tmp_path, method, {"a1": {"min_class_count": 1000}}, rounds=1)
    assert summary_of(fed)["left_out"] == {}


def test_a_restart_with_another_policy_brings_the_device_back(tmp_path):
    policies = {"a2": {"methods": ["repper"]}}
    with federation(tmp_path, policies) as fed:
        fed.request("fedavg", rounds=9, params=quick_params("fedavg"))
        while fed.record.round < 1:
            if not fed.step():
                fed.clock.now += 0.01
        assert not fed.record.is_over
        policies.clear()
        fed.kill("a2")
        fed.add("a2")
        fed.finish()
    assert [line["agents"] for line in fed.metrics()][-1] == ["a0", "a1", "a2"]


def test_an_update_that_waited_for_the_coordinator_follows_the_policy_that_was_set_since(tmp_path):
    policies = {}
    with federation(tmp_path, policies) as fed:
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        while not (tmp_path / "a0" / "outbox" / "update.json").exists():
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        fed.kill("a0")
        before = len(fed.messages(fed.topics.up("a0"), up.UpdateManifest))
        policies["a0"] = {"clip": 1.0, "noise": 5.0, "metrics": []}
        fed.start_coordinator()
        fed.add("a0")
        fed.finish()
        sent = fed.messages(fed.topics.up("a0"), up.UpdateManifest)[before:]
        assert {(one.samples, len(one.metrics)) for one in sent} == {(1, 0)}, "with noise all count alike"
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2"]]


def test_a_restarted_coordinator_knows_who_refused(tmp_path):
    with federation(tmp_path, {"a2": {"methods": ["repper"]}}) as fed:
        fed.request("fedavg", rounds=9, params=quick_params("fedavg"))
        while fed.record.round < 1:
            if not fed.step():
                fed.clock.now += 0.01
        assert not fed.record.is_over
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        asked = {job.round for job in fed.messages(fed.topics.down("a2"), down.Job)}
    assert asked == {1}


def test_a_run_that_every_device_refuses_fails_at_once_with_their_reasons(tmp_path):
    fed = finished(tmp_path, "fedavg", {name: {"methods": ["repper"]} for name in ("a0", "a1", "a2")})
    assert fed.ended.status == "failed"
    assert "a0, a1, a2: PrivacyRefused: method is 'fedavg', privacy.methods allows repper" in fed.ended.reason


@pytest.mark.parametrize("norm, refused", [("global", {"a1"}), ("local_stats", set())])
def test_running_statistics_of_batch_norm_stay_at_a_device_that_says_so(tmp_path, norm, refused):
    fed = finished(tmp_path, "fedavg", {"a1": {"batch_norm_stats": False}}, params={"norm": norm}, rounds=1,
                   task=WITH_NORM)  # fmt: skip
    left_out = summary_of(fed)["left_out"]
    assert set(left_out) == refused
    assert all("privacy.batch_norm_stats is false" in one["reason"] for one in left_out.values())


def from_agent(fed, name, kind):
    return fed.messages(fed.topics.up(name), kind)


def test_only_the_metrics_that_the_policy_names_leave(tmp_path):
    fed = finished(tmp_path, "fedavg", {"a1": {"metrics": ["loss"]}, "a2": {"metrics": []}}, rounds=1)
    sent = {name: from_agent(fed, name, up.UpdateManifest)[0].metrics for name in ("a0", "a1", "a2")}
    assert set(sent["a0"]) == {"loss", "acc.global", "acc.personal"}
    assert set(sent["a1"]) == {"loss"}
    assert sent["a2"] == {}


def test_rounded_sample_counts_are_powers_of_two_everywhere(tmp_path):
    fed = finished(tmp_path, "fedavg", {"a1": {"samples": "rounded"}}, rounds=1)
    counts = {name: from_agent(fed, name, up.UpdateManifest)[0].samples for name in ("a0", "a1")}
    assert counts == {"a0": 18, "a1": 16}


def test_rounded_counts_refuse_methods_whose_statistics_tell_them(tmp_path):
    fed = finished(tmp_path, "fedpac", {"a1": {"samples": "rounded"}}, rounds=1)
    (reason,) = [one["reason"] for one in summary_of(fed)["left_out"].values()]
    assert "which tell their sample counts" in reason


def test_an_unknown_method_in_the_policy_is_a_mistake_with_the_nearest_name():
    with pytest.raises(UnknownName, match="did you mean 'fedpac'"):
        check(AgentConfig(data=DataConfig(source="none:"), privacy=PrivacyConfig(methods=("fedpaq",))))

"""Whole runs with clipping and noise: what is spent is counted on both sides, and a spent budget ends them."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from federation_duties import TASK, TinyDuties, quick_params
from federation_harness import Federation
from scipy import stats

from coordinator.cli.run import footnotes
from coordinator.config import CoordinatorConfig, DifferentialPrivacyConfig
from coordinator.runs.run_summary import RunSummary
from coordinator.service.preflight import checked_method
from coordinator.state.privacy_spent import PrivacySpent
from edge_agent.core.config import PrivacyConfig, parse
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.core.storage import read_json
from edge_agent.privacy.accountant import cost, epsilon_of
from edge_agent.privacy.policy import LEDGER_FILE
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down, up
from edge_agent.wire.tensors import decode

PAPERS = ("dualfed", "fedpac", "fedpick", "repper", "fedrir")


@contextlib.contextmanager
def federation(folder, policies=None, *, agents=3, min_agents=3, round=None, **privacy):  # noqa: A002 - of the section
    def make(config, tier):
        policy = PrivacyConfig.model_validate((policies or {}).get(config.id, {}))
        entropy = itertools.count(zlib.crc32(config.id.encode()) << 32).__next__
        return TinyDuties(config.model_copy(update={"privacy": policy}), tier, entropy=entropy)

    # A device whose own noise is much stronger than that of the others looks like an attacker.
    unbounded = {"max_norm": None, "max_loss": None}
    cohort = {"min_agents": min_agents}
    fed = Federation(folder, agents=agents, tasks=make, capture=True, cohort=cohort, round=round, aggregation=unbounded)
    configure(fed, **privacy)
    with fed:
        fed.until(lambda: len(fed.coordinator.roster.present("train")) == agents)
        yield fed


def configure(fed, **privacy):
    fed.config = fed.config.model_copy(update={"privacy": DifferentialPrivacyConfig.model_validate(privacy)})


def restart(fed, **privacy):
    """The coordinator with another [privacy]."""
    fed.kill_coordinator()
    configure(fed, **privacy)
    fed.start_coordinator()
    fed.until(lambda: len(fed.coordinator.roster.present("train")) == 3)


def run(fed, method="fedavg", rounds=3, **params):
    fed.request(method, rounds=rounds, params={**quick_params(method), **params})
    fed.finish()
    return fed.state.run(fed.run).summary()


@pytest.mark.parametrize("method", PAPERS)
def test_runs_of_all_five_papers_finish_with_noise_and_say_what_they_spent(tmp_path, method):
    with federation(tmp_path, clip=1.0, clip_statistics=20.0, noise=2.0) as fed:
        summary = run(fed, method, rounds=3)
    assert summary["status"] == "finished"
    # Three rounds of z = 2: exactly one release of z = 2 / sqrt(3).
    assert summary["privacy"] == {
        "epsilon": round(epsilon_of(3 / 4, 1e-5), 4), "epsilon_left": None, "delta": 1e-5, "rounds_without_noise": 0,
        "clip": 1.0, "noise": 2.0,
    }  # fmt: skip


def test_budget_ends_the_run_before_it_is_exceeded_and_over_all_runs(tmp_path):
    with federation(tmp_path, clip=1.0, noise=4.0, epsilon=3.0) as fed:
        summary = run(fed, rounds=50)
        affordable = max(n for n in range(1, 50) if epsilon_of(n / 16, 1e-5) <= 3.0)
        assert [line["round"] for line in fed.metrics()] == list(range(1, affordable + 1))
        assert "the privacy budget is spent" in summary["stopped"]
        (note,) = [line for line in footnotes(RunSummary.from_json(summary)) if line.startswith("differential privacy")]
        assert any(
            line.startswith("ended early: the privacy budget is spent")
            for line in footnotes(RunSummary.from_json(summary))
        )
        assert note == (
            f"differential privacy: epsilon {summary['privacy']['epsilon']:g} spent, "
            f"{summary['privacy']['epsilon_left']:g} left (delta 1e-05)"
        )
        assert 0 <= summary["privacy"]["epsilon_left"] < 3.0 - summary["privacy"]["epsilon"] + 1e-3
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        fed.finish()
        assert fed.record.status == "failed"
        assert "the privacy budget is spent" in fed.record.reason


def test_a_restarted_coordinator_spends_no_round_twice(tmp_path):
    with federation(tmp_path, clip=1.0, noise=4.0) as fed:
        fed.request("fedavg", rounds=6, params=quick_params("fedavg"))
        while fed.record.round < 3:
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        spent = fed.state.run(fed.run).summary()["privacy"]["epsilon"]
    assert spent == round(epsilon_of(6 / 16, 1e-5), 4)


@pytest.mark.parametrize("change", ["noise", "min_agents"])
def test_a_round_is_not_resumed_with_another_noise_than_its_updates_have(tmp_path, change):
    """Two of three updates are here when the coordinator is restarted with more noise, or another part of it."""
    first = {} if change == "noise" else {"clip": 1.0, "noise": 4.0}
    with federation(tmp_path, **first) as fed:
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        while fed.record.open_round is None or len(fed.record.open_round.updates) < 2:
            if not fed.step():
                fed.clock.now += 0.01
        if change == "min_agents":
            cohort = fed.config.cohort.model_copy(update={"min_agents": 2})
            fed.config = fed.config.model_copy(update={"cohort": cohort})
        restart(fed, clip=1.0, noise=4.0)
        fed.finish()
        assert fed.record.status == "failed"
        assert "round 1 was opened under privacy terms" in fed.record.reason
        assert not fed.state.journal.entries(fed.run, ("round_closed",)), "nothing counts as noisy"


def test_a_round_waits_for_as_many_updates_as_its_noise_was_divided_among(tmp_path):
    """A quorum of two of five would leave noise of 4 * sqrt(2 / 5) = 2.53 in the sum: epsilon 1.53 of at most 1.2."""
    slow = {"quorum": 0.4, "grace_s": 1.0, "deadline_s": 30.0, "adaptive": False}
    with federation(tmp_path, agents=5, min_agents=5, round=slow, clip=1.0, noise=4.0, epsilon=1.2) as fed:
        for name in ("a0", "a1", "a2"):
            fed.kill(name)
            fed.add(name, seconds=25.0)
        fed.until(lambda: len(fed.coordinator.roster.present("train")) == 5)
        summary = run(fed, rounds=1)
        (line,) = fed.metrics()
    assert (len(line["agents"]), line["noise_multiplier"]) == (5, 4.0)
    assert summary["privacy"]["epsilon"] == round(epsilon_of(cost(4.0), 1e-5), 4)


def test_a_round_that_never_gets_as_many_updates_fails_with_the_number_that_it_needs(tmp_path):
    short = {"quorum": 0.4, "grace_s": 1.0, "deadline_s": 5.0, "adaptive": False, "max_attempts": 2}
    with federation(tmp_path, round=short, clip=1.0, noise=4.0) as fed:
        fed.kill("a0")
        fed.add("a0", seconds=1e6)
        fed.until(lambda: len(fed.coordinator.roster.present("train")) == 3)
        fed.request("fedavg", rounds=1, params=quick_params("fedavg"))
        fed.finish()
        assert fed.record.status == "failed"
        assert "round 1 missed its quorum 2 times: 2 of 3 updates" in fed.record.reason


def test_rounds_without_noise_are_counted_beside_epsilon(tmp_path):
    with federation(tmp_path) as fed:
        run(fed, rounds=2)
        restart(fed, clip=1.0, noise=4.0)
        privacy = run(fed, rounds=1)["privacy"]
        ledger = read_json(fed.folder / "a0" / LEDGER_FILE)
    assert (privacy["epsilon"], privacy["rounds_without_noise"]) == (round(epsilon_of(cost(4.0), 1e-5), 4), 2)
    assert (ledger["updates"], ledger["without_noise"]) == (1, 2)
    spent = PrivacySpent.from_body(privacy)
    unbounded = replace(spent, epsilon=None)
    assert unbounded.text.startswith("differential privacy: more spent than any epsilon bounds, no")
    assert spent.text.endswith("(delta 1e-05); 2 rounds without noise, which epsilon does not cover")


def test_a_round_of_more_updates_than_the_least_has_more_noise_and_costs_less(tmp_path):
    with federation(tmp_path, clip=1.0, noise=4.0, min_agents=1) as fed:
        run(fed, rounds=1)
        (line,) = fed.metrics()
        jobs = fed.messages(fed.topics.down("a0"), down.Job)
    assert line["noise_multiplier"] == pytest.approx(4 * math.sqrt(3))
    assert jobs[0].privacy == down.Noise(clip=1.0, clip_statistics=1.0, noise=4.0)


@pytest.mark.parametrize("method, part", [("repper", 2 / math.sqrt(3)), ("fedpac", 2.0)])
def test_noise_is_divided_only_where_the_server_sees_to_a_sum(tmp_path, method, part):
    """FedPAC sends each client a combination of single classifiers: parts of the noise would not add up in it."""
    with federation(tmp_path, clip=1.0, noise=2.0) as fed:
        run(fed, method, rounds=1)
        (job, *_) = fed.messages(fed.topics.down("a0"), down.Job)
        (line,) = fed.metrics()
    assert job.privacy.noise == pytest.approx(part)
    assert line["noise_multiplier"] == 2.0


def uploads(fed, name):
    blobs = {}
    for payload in fed.published(fed.topics.up_chunks(name)):
        frame = decode_frame(payload)
        blobs[frame.transfer] = decode(bytes(frame.data))
    return list(blobs.values())


def test_what_is_on_the_wire_is_noise_of_the_size_that_was_asked_for_and_no_sample_count(tmp_path):
    """Clipped to almost nothing: what is left of the change is Gaussian with noise * clip, in each device's part."""
    with federation(tmp_path, clip=1.0, noise=2.0) as fed:
        run(fed, rounds=1, lr=1e-9)
        changes = [uploads(fed, name)[0] for name in ("a0", "a1", "a2")]
        manifests = [fed.messages(fed.topics.up(name), up.UpdateManifest)[0] for name in ("a0", "a1", "a2")]
    assert {manifest.samples for manifest in manifests} == {1}
    between = [np.concatenate([(one[n] - changes[0][n]).ravel() for n in one]) for one in changes[1:]]
    std = 2.0 / math.sqrt(3) * math.sqrt(2)  # of the difference of two devices' noise
    assert all(stats.kstest(numbers / std, "norm").pvalue > 1e-3 for numbers in between)


def test_the_devices_own_noise_and_budget_win(tmp_path):
    """a1 wants noise 5 of its own and has a budget for some rounds; then it refuses, and the others go on."""
    policies = {"a1": {"clip": 1.0, "noise": 5.0, "epsilon": 2.0}}
    with federation(tmp_path, policies, min_agents=2) as fed:
        summary = run(fed, rounds=8)
        rounds = [line["agents"] for line in fed.metrics()]
        ledger = read_json(fed.folder / "a1" / LEDGER_FILE)
    affordable = max(n for n in range(1, 9) if epsilon_of(n * cost(5.0), 1e-5) <= 2.0)
    assert 1 <= affordable < 8
    assert [("a1" in agents) for agents in rounds] == [True] * affordable + [False] * (8 - affordable)
    assert ledger == {"cost": pytest.approx(affordable * cost(5.0)), "updates": affordable, "without_noise": 0}
    assert "PrivacyRefused: the privacy budget is spent" in summary["left_out"]["a1"]["reason"]
    assert summary["privacy"] is None, "the run itself asks for nothing"


def test_a_device_sends_what_it_has_spent_as_metrics_with_its_updates(tmp_path):
    with federation(tmp_path, {"a1": {"clip": 1.0, "noise": 5.0, "epsilon": 9.0}}) as fed:
        run(fed, rounds=2)
        sent = [m.metrics for m in fed.messages(fed.topics.up("a1"), up.UpdateManifest)]
    assert sent[0]["epsilon"] == pytest.approx(epsilon_of(cost(5.0), 1e-5))
    assert sent[-1]["epsilon"] + sent[-1]["epsilon_left"] == pytest.approx(9.0)


def test_a_method_without_defined_noise_fails_at_once_with_the_reason(tmp_path):
    with federation(tmp_path, clip=1.0, noise=1.0) as fed:
        fed.request("scaffold", rounds=2, params=quick_params("scaffold"))
        fed.finish()
        assert fed.record.status == "failed"
        assert "for which no noise is defined" in fed.record.reason


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"privacy": {"noise": 1.0}}, "need clip"),
        ({"privacy": {"clip": 1.0, "epsilon": 1.0}}, "needs noise"),
        ({"privacy": {"clip": 1.0}, "round": {"mode": "buffered"}}, "buffered"),
        ({"privacy": {"clip": 1.0}, "cohort": {"tier": "any"}}, "cohort.tier = 'train'"),
    ],
)
def test_settings_that_give_no_guarantee_are_mistakes(more, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(CoordinatorConfig, {"task": TASK.model_dump(), **more}, where="coordinator.toml")


@pytest.mark.parametrize(
    "method, privacy, reason",
    [
        ("scaffold", {"clip": 1.0, "noise": 1.0}, "and [0-9]+ more arrays, for which no noise is defined"),
        ("fedproto", {"clip": 1.0, "noise": 1.0}, "is counted, no noise is defined for it"),
        ("fedavg", {"clip": 1.0, "noise": 1.0, "epsilon": 0.5}, r"allows no round: the first one costs 4\.38"),
        ("fedavg", {"clip": 1.0, "noise": 20.0, "epsilon": 0.5}, None),
        ("fedpac", {"clip": 1.0, "noise": 1.0}, None),
        ("scaffold", {}, None),
    ],
)
def test_run_that_privacy_would_end_is_not_taken(method, privacy, reason):
    config = parse(CoordinatorConfig, {"task": TASK.model_dump(), "privacy": privacy}, where="coordinator.toml")
    with pytest.raises(UsageError, match=reason) if reason else contextlib.nullcontext():
        checked_method(config, method, {})

"""Rounds whose updates are added up under masks: the same model as without, and nobody sees a single update."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from federation_duties import TASK, TinyDuties, quick_params
from federation_harness import Federation, Killed
from listed import unlisted
from scipy import stats

from coordinator.config import NO_BOUNDS, CoordinatorConfig, DifferentialPrivacyConfig
from coordinator.journal.entries import UpdateRefused
from coordinator.rounds import secure_sum
from coordinator.rounds.aggregation import refusal
from coordinator.rounds.secure import SecureSumRounds
from coordinator.rounds.secure_sum import SecureSum, disputed
from coordinator.runs.audit import audit
from coordinator.service.preflight import checked_method
from coordinator.views.runs import Rejection
from edge_agent import methods
from edge_agent.agent import secure
from edge_agent.agent.secure import SUMS_FILE, SecureSums
from edge_agent.core.config import PrivacyConfig, parse
from edge_agent.core.errors import CodecError, ConfigError, PrivacyRefused, StateError, TrainingFailed, UsageError
from edge_agent.core.storage import read_json
from edge_agent.methods import Update
from edge_agent.privacy.disclosure import SECURE_SUM
from edge_agent.privacy.policy import LEDGER_FILE
from edge_agent.privacy.secure_sum import tensors as secure_tensors
from edge_agent.privacy.secure_sum.fixed_point import FixedPoint
from edge_agent.privacy.secure_sum.keys import PRIME, SHARE_BYTES, at_zero
from edge_agent.privacy.secure_sum.tensors import KEYS, MASKED, REVEALED, SHARES
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import down, up
from edge_agent.wire.tensors import decode

WITH_NORM = TASK.model_copy(update={"encoder": "small_cnn", "encoder_params": {"feature_dim": 8, "width": 2}})
SECURE = {"task": TASK.model_dump(), "privacy": {"secure_sum": True}, "cohort": {"min_agents": 3}}


class Spied(TinyDuties):
    """Notes its update and weight before masks are put on; ends with its process before or after some jobs."""

    plain: dict
    dies: set
    fails = False

    def do(self, job, received, encoder=None):
        if self.fails and job.purpose == "train":
            raise TrainingFailed("the loss is not finite")
        if (self.config.id, job.round, job.purpose) in self.dies:
            self.dies.remove((self.config.id, job.round, job.purpose))
            raise Killed
        manifest = super().do(job, received, encoder)
        if (self.config.id, job.round, job.purpose, "after") in self.dies:
            self.dies.remove((self.config.id, job.round, job.purpose, "after"))
            raise Killed
        return manifest

    def read_samples(self, task):
        train, test = super().read_samples(task)
        rows = np.arange(9 + int(self.config.id[1:]) % 10)  # 9 to 18, so that weights differ
        return train.take(rows), test

    @property
    def secure_sums(self):
        sums = super().secure_sums

        def spied(job, given, update, weight, origin):
            copies = {name: np.array(array) for name, array in update.items()}
            self.plain[(self.config.id, job.round, job.session)] = copies, weight
            return type(sums).masked(sums, job, given, update, weight, origin)

        sums.masked = spied
        return sums


class Fleet(Federation):
    """``plain``: (agent, round, session) -> update and weight. ``dies``: (agent, round, purpose) at which one ends."""

    def __init__(self, folder, agents=3, *, policies=None, least=None, duties=Spied, aggregation=None, **options):
        self.plain = {}
        self.dies = set()
        self.policies = policies or {}
        self.privacy = DifferentialPrivacyConfig.model_validate(options.pop("privacy", {"secure_sum": True}))

        def make(config, tier):
            policy = PrivacyConfig.model_validate(self.policies.get(config.id, {}))
            one = duties(config.model_copy(update={"privacy": policy}), tier)
            one.plain = self.plain
            one.dies = self.dies
            return one

        cohort = {"min_agents": least or 3}
        super().__init__(folder, agents=agents, tasks=make, capture=True, cohort=cohort, aggregation=aggregation,
                         **options)  # fmt: skip
        self.config = self.config.model_copy(update={"privacy": self.privacy})

    def __enter__(self):
        super().__enter__()
        self.until(lambda: len(self.coordinator.roster.present("train")) == len(self._first))
        return self

    def ask(self, method="fedavg", rounds=2, **options):
        self.request(method, rounds=rounds, params=quick_params(method), **options)

    def summed(self, number):
        """The agents whose updates are in the round's sum, and its session."""
        (closed,) = self.entries("round_closed", round=number)
        session = self.entries("round_opened", round=number)[-1].body["session"]
        agents = [entry.agent for entry in self.entries("update_accepted", round=number)][-closed.body["clients"] :]
        return sorted(agents), session

    def jobs(self, purpose, agents=None):
        names = agents or self.topics_of_agents()
        every = (job for name in names for job in self.messages(self.topics.down(name), down.Job))
        return [job for job in every if job.purpose == purpose]

    def topics_of_agents(self):
        return sorted({*self._first, *self.agents})

    def uploads(self):
        """(Agent, tensors) of all that agents have uploaded; each is a single chunk."""
        for name in self.topics_of_agents():
            for payload in self.published(self.topics.up_chunks(name)):
                yield name, decode(bytes(decode_frame(payload).data))


def twin(updates, name):
    """The weighted mean of one array, number by number in exact arithmetic, of the same fixed-point numbers."""
    arrays = [(array[name].ravel(), weight) for array, weight in updates]
    total = sum(weight for _, weight in arrays)
    result = []
    for index in range(arrays[0][0].size):
        integers = [round(Fraction(float(array[index])) * weight * 2**24) for array, weight in arrays]
        result.append(np.float64(sum(integers) / 2**24) / np.float64(total))
    return np.array(result).astype(arrays[0][0].dtype).reshape(updates[0][0][name].shape)


@pytest.mark.parametrize("agents, gone", [(3, 0), (10, 0), (10, 1), (10, 3)])
def test_secure_sum_is_the_plain_sum_with_no_one_and_thirty_percent_dropouts(tmp_path, agents, gone):
    """Bit for bit that of the same fixed-point numbers, and within the step of rounding that of a run without masks."""
    gone = [f"a{index}" for index in (4, 0, 9)[:gone]]  # in the middle and at both ends: masks of both signs
    with Fleet(tmp_path / "masked", agents) as fed:
        fed.dies |= {(name, 1, "train") for name in gone}
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        here, session = fed.summed(1)
        assert here == sorted({f"a{index}" for index in range(agents)} - {*gone})
        final = fed.final
        updates = [fed.plain[(name, 1, session)] for name in here]
        assert len({weight for _, weight in updates}) > 1
        assert audit(fed.state, fed.run, [tmp_path / "masked" / name for name in here]).breaks == []
    for name, array in final.items():
        assert (array == twin(updates, name)).all()
    with Fleet(tmp_path / "plain", tuple(here), privacy={}, aggregation=NO_BOUNDS) as fed:
        fed.ask(rounds=1)
        fed.finish()
        plain = fed.final
    step = len(here) * 2.0**-25 / sum(weight for _, weight in updates)
    for name, array in plain.items():
        rounding = np.spacing(np.abs(array).max(initial=0.0))
        assert np.abs(array.astype(float) - final[name]).max(initial=0.0) <= step + rounding


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "fedbn", "repper"])
def test_models_of_whole_runs_stay_within_a_few_steps_of_those_without_masks(tmp_path, method):
    finals = []
    for folder, privacy in (("masked", {"secure_sum": True}), ("plain", {})):
        with Fleet(tmp_path / folder, 4, privacy=privacy, aggregation=NO_BOUNDS, task=WITH_NORM) as fed:
            fed.ask(method, rounds=3)
            fed.finish()
            assert fed.record.status == "finished", fed.record.end
            finals.append(fed.final)
    assert finals[0].keys() == finals[1].keys()
    floats = [name for name, array in finals[0].items() if array.dtype.kind == "f"]
    assert max(np.abs(finals[0][name] - finals[1][name]).max(initial=0.0) for name in floats) < 1e-4


def test_the_coordinator_receives_and_stores_no_single_update_and_no_sample_count(tmp_path):
    """All that agents have sent, and all files of the coordinator: a float of an update, plain or fixed, is in none."""
    with Fleet(tmp_path, 5) as fed:
        fed.ask(rounds=2, keep_updates=True)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        uploads = list(fed.uploads())
        final = fed.final
        manifests = [m for name in fed.topics_of_agents()
                     for m in fed.messages(fed.topics.up(name), up.UpdateManifest)]  # fmt: skip
        files = [path.read_bytes() for path in (tmp_path / "coordinator").rglob("*") if path.is_file()]
        sent = [payload for topic, payload in fed.broker.captured if topic.endswith(("/up", "/ub"))]
    assert {name for _, tensors in uploads for name in tensors} == {KEYS, SHARES, MASKED, REVEALED}
    assert {item.name for item in SECURE_SUM} == {KEYS, SHARES, MASKED, REVEALED}
    controls = [payload for topic, payload in fed.broker.captured if topic.endswith("/up")]
    assert [unlisted(payload) for payload in controls if unlisted(payload)] == []
    assert {manifest.samples for manifest in manifests} == {1}
    assert len(fed.plain) == 10
    everything = [*files, *sent]
    for update, weight in fed.plain.values():
        for array in update.values():
            fixed = np.rint(array.astype(np.float64) * weight * 2**24).astype(np.int64)
            for numbers in (array, array.astype(np.float64), array * np.float32(weight), fixed):
                part = numbers.ravel()[:3].tobytes()  # three numbers are enough to know it by
                assert not any(part in content for content in everything)
    masked = [tensors[MASKED] for _, tensors in uploads if MASKED in tensors]
    assert len(masked) == 10
    for vector in (np.concatenate(masked), sum(one.view(np.uint64) for one in masked[:4])):
        assert stats.chisquare(np.bincount(vector.view(np.uint8), minlength=256)).pvalue > 1e-4
    # The same search finds the mean, which the coordinator has: so it would find an update.
    mean = final["encoder.layers.1.weight"].ravel()[:3].tobytes()
    assert any(mean in content for content in files)


@pytest.mark.parametrize("purpose", ["secure_keys", "secure_shares", "train", "secure_unmask"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_agents_killed_at_any_job_count_as_dropouts_and_the_run_goes_on(tmp_path, purpose, when):
    with Fleet(tmp_path, 5) as fed:
        fed.dies.add(("a2", 1, purpose) if when == "before" else ("a2", 1, purpose, when))
        fed.ask(rounds=2, keep_updates=True)  # and states
        fed.until(lambda: not fed.dies)
        fed.until(lambda: fed.record.round >= 1)
        here, session = fed.summed(1)
        assert {*here} | {"a2"} == {f"a{index}" for index in range(5)}
        assert ("a2" in here) == (purpose == "secure_unmask")
        updates = [fed.plain[(name, 1, session)] for name in here]
        (closed,) = fed.entries("round_closed", round=1)
        after = decode(fed.state.blobs.read(closed.digest))
        fed.finish()
        assert fed.record.status == "finished"
    assert all((array == twin(updates, name)).all() for name, array in after.items())


@pytest.mark.parametrize("purpose", [
    pytest.param("secure_keys", marks=pytest.mark.slow),
    pytest.param("secure_shares", marks=pytest.mark.slow),
    "train",
    pytest.param("secure_unmask", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_agent_that_is_back_at_once_has_lost_its_keys_and_takes_part_in_the_next_round(tmp_path, purpose):
    with Fleet(tmp_path, 5) as fed:
        fed.dies.add(("a2", 1, purpose))
        fed.ask(rounds=4)
        while fed.dies:
            if not fed.step():
                fed.clock.now += 0.01
        fed.add("a2")
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        rounds = [line["agents"] for line in fed.metrics()]
    assert "a2" in rounds[-1]
    assert all(len(agents) >= 4 for agents in rounds)


@pytest.mark.parametrize("purpose", ["secure_keys", "secure_shares", "train", "secure_unmask"])
@pytest.mark.parametrize("answers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_coordinator_killed_in_a_round_repeats_it_with_fresh_keys_and_gets_the_same_model(tmp_path, purpose, answers):
    with Fleet(tmp_path / "whole", 4) as fed:
        fed.ask(rounds=2)
        fed.finish()
        expected = fed.encoder_sha256
    with Fleet(tmp_path / "killed", 4) as fed:
        fed.ask(rounds=2)

        def there():
            collection = fed.coordinator.collector.open_round
            is_phase = collection is not None and (collection.round, collection.purpose) == (2, purpose)
            return is_phase and len(collection.accepted) >= answers

        while not there():
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == expected
        assert audit(fed.state, fed.run, [tmp_path / "killed" / f"a{index}" for index in range(4)]).breaks == []
        sessions = {job.session for job in fed.jobs("secure_keys") if job.round == 2}
        asked = {(job.session, job.blobs) for job in fed.jobs("secure_unmask")}
    assert len(sessions) == 2
    assert len({session for session, _ in asked}) == len(asked), "no masks are taken off two different sums"


def unmasking(fed, answers=0):
    """Whether the first round's shares are being collected, and so many are here."""
    collection = fed.coordinator.collector.open_round
    return collection is not None and collection.purpose == "secure_unmask" and len(collection.accepted) >= answers


def test_once_shares_are_asked_for_a_round_is_repeated_with_the_same_agents_alone(tmp_path):
    """With others, the difference of the two sums would be a single update: a0 was late, and is here again."""
    with Fleet(tmp_path, 5, round={"quorum": 1.0}) as fed:
        fed.dies.add(("a0", 1, "train"))
        fed.ask(rounds=2)
        while not unmasking(fed, answers=2):
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        fed.add("a0")
        fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        assert [line["agents"] for line in fed.metrics()] == [["a1", "a2", "a3", "a4"], ["a0", "a1", "a2", "a3", "a4"]]
        assert len({job.session for job in fed.jobs("secure_keys") if job.round == 1}) == 2


def test_a_run_ends_where_the_agents_of_a_sum_that_was_begun_do_not_come_back(tmp_path):
    with Fleet(tmp_path, 5, round={"quorum": 1.0, "deadline_s": 60.0}) as fed:
        fed.ask(rounds=1)
        while not unmasking(fed, answers=2):
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        fed.kill("a3")
        fed.start_coordinator()
        fed.until(lambda: "begins again with the 5 agents" in fed.coordinator.waiting.what)
        assert fed.coordinator.waiting.whom == ("a3",)
        fed.finish()
        assert fed.record.status == "failed"
        assert "a3 did not come back; start another run with another seed" in fed.record.reason


def test_a_device_reveals_shares_for_one_sum_of_the_same_training_also_after_a_restart(tmp_path, monkeypatch):
    """The coordinator may ask with fresh keys and other agents, in any run: the device has the first sum on disk."""

    def asked(delivered, session, number=1, origin="1" * 64):
        names = [f"a{index}" for index in range(5)]
        everyone = {name: SecureSums(name, tmp_path) for name in names}
        job = down.Job(run="run-0001", round=number, rounds=9, seed=0, method="fedavg", task=TASK, blobs=(),
                       deadline_s=9, session=session * 32)  # fmt: skip
        sums = SecureSum("run-0001", number, session * 32, {}, 3)
        sums.take_keys([Update(name, 1.0, one.begin(job)) for name, one in everyone.items()])
        sums.take_shares([Update(name, 1.0, one.shares(job, sums.for_shares())) for name, one in everyone.items()])
        with pytest.raises(PrivacyRefused, match="no update was masked here"):
            everyone["a0"].unmask(job, sums.for_unmasking(delivered))
        everyone["a0"].masked(job, sums.for_training("a0"), {}, 1.0, origin)
        return everyone["a0"].unmask(job, sums.for_unmasking(delivered))

    asked(["a0", "a1", "a2", "a3"], "1")
    asked(["a3", "a2", "a1", "a0"], "2")
    with pytest.raises(PrivacyRefused, match="the difference of two sums would bare single updates"):
        asked(["a0", "a1", "a2", "a4"], "3", number=2)
    asked(["a0", "a1", "a2", "a4"], "3", origin="2" * 64)
    monkeypatch.setattr(secure, "MOST_SUMS", 2)
    asked(["a0", "a1", "a2", "a4"], "4", origin="3" * 64)
    assert list(read_json(tmp_path / SUMS_FILE)) == ["2" * 64, "3" * 64]
    (tmp_path / SUMS_FILE).write_bytes(b"{")
    with pytest.raises(StateError):
        asked(["a0", "a1", "a2", "a3"], "5")


def test_two_runs_of_the_same_request_take_masks_off_no_two_different_sums(tmp_path):
    """With one device off in the second, the difference of the sums would be its update and its sample count."""
    with Fleet(tmp_path, 5, round={"quorum": 1.0, "deadline_s": 60.0}) as fed:
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "finished"
        fed.kill("a0")
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "failed"
        assert "a0 did not come back; start another run with another seed" in fed.record.reason
        fed.ask(rounds=1, seed=1)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        fed.add("a0")
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        assert fed.summed(1)[0] == ["a0", "a1", "a2", "a3", "a4"]


def test_a_device_refuses_the_same_training_in_another_run_also_where_the_coordinator_asks(tmp_path, monkeypatch):
    with Fleet(tmp_path, 5, round={"quorum": 1.0, "deadline_s": 60.0, "max_attempts": 1}) as fed:
        fed.ask(rounds=1)
        fed.finish()
        fed.kill("a0")
        monkeypatch.setattr(SecureSumRounds, "_origin", lambda _: "another")
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "failed"
        assert "0 of 4 clients have revealed" in fed.record.reason


def test_too_few_survivors_reveal_nothing_and_the_run_ends_with_the_reason(tmp_path):
    """4 of 6 have to deliver; three fail in training, in each attempt."""
    with Fleet(tmp_path, 6, round={"quorum": 1.0, "max_attempts": 2, "deadline_s": 60.0}) as fed:
        fed.ask(rounds=1)
        for name in ("a0", "a3", "a5"):
            fed.tasks[name].fails = True
        fed.finish()
        assert fed.record.status == "failed"
        reason = fed.record.reason
        assert "no secure sum in 2 attempts" in reason
        assert "3 of 6 agents have delivered, it takes 4" in reason
        assert not fed.jobs("secure_unmask")
        assert len({job.session for job in fed.jobs("secure_keys")}) == 2


def test_a_round_that_lacked_survivors_is_repeated_with_fresh_keys(tmp_path):
    with Fleet(tmp_path, 4, round={"quorum": 1.0}) as fed:
        fed.dies |= {(name, 1, "train") for name in ("a0", "a3")}
        fed.ask(rounds=1)
        fed.until(lambda: not fed.dies)
        fed.add("a0")
        fed.add("a3")
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        here, session = fed.summed(1)
        updates = [fed.plain[(name, 1, session)] for name in here]
        assert all((array == twin(updates, name)).all() for name, array in fed.final.items())
        assert {job.session for job in fed.jobs("secure_unmask")} == {session}
        assert len({job.session for job in fed.jobs("train")}) == 2


def test_noise_of_differential_privacy_is_inside_the_mask(tmp_path):
    """Clipped to almost nothing: what is left of the mean's change is Gaussian, of all parts of the noise together."""
    privacy = {"secure_sum": True, "clip": 1.0, "noise": 2.0}
    with Fleet(tmp_path, 4, least=4, privacy=privacy) as fed:
        fed.request("fedavg", rounds=1, params={**quick_params("fedavg"), "lr": 1e-9})
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        here, session = fed.summed(1)
        updates = [fed.plain[(name, 1, session)] for name in here]
        (line,) = fed.metrics()
        final = fed.final
    assert line["noise_multiplier"] == 2.0
    assert {weight for _, weight in updates} == {1}
    assert all((array == twin(updates, name)).all() for name, array in final.items())
    differences = [np.concatenate([(one[n] - updates[0][0][n]).ravel() for n in one]) for one, _ in updates[1:]]
    std = 2.0 / math.sqrt(4) * math.sqrt(2)
    assert all(stats.kstest(numbers / std, "norm").pvalue > 1e-3 for numbers in differences)


def test_a_sum_that_was_begun_without_noise_does_not_go_on_with_it(tmp_path):
    with Fleet(tmp_path, 4) as fed:
        fed.ask(rounds=1)
        while not unmasking(fed, answers=2):
            if not fed.step():
                fed.clock.now += 0.01
        fed.kill_coordinator()
        privacy = DifferentialPrivacyConfig(secure_sum=True, clip=1.0, noise=2.0)
        fed.config = fed.config.model_copy(update={"privacy": privacy})
        fed.start_coordinator()
        fed.finish()
        assert fed.record.status == "failed"
        assert "round 1 was opened under privacy terms none" in fed.record.reason


def test_a_device_counts_masked_updates_without_noise_and_no_exchange_of_keys(tmp_path):
    with Fleet(tmp_path) as fed:
        fed.ask(rounds=2)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        assert read_json(tmp_path / "a0" / LEDGER_FILE) == {"cost": 0, "updates": 0, "without_noise": 2}


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more, reason", [
    ({"cohort": {"min_agents": 2}}, "min_agents = 3 or more"),
    ({"round": {"mode": "buffered"}}, "masks are of one round"),
    ({"aggregation": {"rule": "multi_krum"}}, "'multi_krum' looks at single updates"),
    ({"aggregation": {"rule": "clipped"}}, "'clipped' looks at single updates"),
    ({"aggregation": {"max_norm": 3.0}}, "no aggregation.max_norm"),
    ({"export": {"client_ranges": True}}, "export.client_ranges = false"),
    ({"hosted": [{"id": "h", "data": {"source": "none:"}}]}, r"no \[\[hosted\]\] clients"),
])  # fmt: skip
def test_settings_that_need_single_updates_are_refused_with_the_reason(more, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(CoordinatorConfig, {**SECURE, **more}, where="coordinator.toml")
    parse(CoordinatorConfig, SECURE, where="coordinator.toml")


def test_methods_whose_server_step_is_no_mean_are_refused(tmp_path):
    config = CoordinatorConfig.model_validate({**SECURE, "state": tmp_path})
    refused = {name for name in methods.names() if refusal(methods.create(name, {}), config)}
    assert {"fedpac", "scaffold", "fedfomo", "pfedhn"} <= refused
    assert refused.isdisjoint({"fedavg", "fedprox", "fedper", "fedbn", "fedadam", "repper", "dualfed", "fedpick"})
    with pytest.raises(UsageError, match="secure_sum = true needs a method whose server step is a mean of the updates"):
        checked_method(config, "fedpac", {})


def test_a_run_of_another_method_fails_at_once(tmp_path):
    with Fleet(tmp_path) as fed:
        fed.ask("fedpac")
        fed.finish()
        assert fed.record.status == "failed"
        assert "privacy.secure_sum = true needs a method" in fed.record.reason
        assert not fed.jobs("secure_keys")


def test_a_device_that_insists_refuses_runs_that_would_see_its_update(tmp_path):
    with Fleet(tmp_path / "plain", 4, policies={"a2": {"secure_sum": "required"}}, privacy={}) as fed:
        fed.ask(rounds=1)
        fed.finish()
        summary = fed.state.run(fed.run).summary()
        assert not fed.published(fed.topics.up_chunks("a2"))
    assert "PrivacyRefused: privacy.secure_sum is 'required'" in summary["left_out"]["a2"]["reason"]
    with Fleet(tmp_path / "masked", 4, policies={"a2": {"secure_sum": "required"}}) as fed:
        fed.ask(rounds=1)
        fed.finish()
        assert [line["agents"] for line in fed.metrics()] == [["a0", "a1", "a2", "a3"]]


def test_a_device_that_refuses_the_method_sends_no_key_and_is_left_out(tmp_path):
    with Fleet(tmp_path, 4, policies={"a2": {"methods": ["repper"]}}) as fed:
        fed.ask(rounds=2)
        fed.finish()
        summary = fed.state.run(fed.run).summary()
        asked = [job.round for job in fed.jobs("secure_keys", ["a2"])]
        assert not fed.published(fed.topics.up_chunks("a2"))
    assert "privacy.methods allows repper" in summary["left_out"]["a2"]["reason"]
    assert asked == [1]


def test_batch_norm_of_single_devices_is_not_asked_for(tmp_path):
    with Fleet(tmp_path, 3, task=WITH_NORM) as fed:
        fed.ask("fedbn", rounds=1)
        fed.finish()
        assert fed.record.status == "finished"
        assert not fed.jobs("batch_norm_stats")


@pytest.mark.parametrize("weight", [-1.0, 0.0, 3 * 1e9 + 1])
def test_weights_that_no_updates_have_are_refused(monkeypatch, weight):
    """An agent can send any integers under its mask; three have up to 10^9 samples each."""
    total = FixedPoint().encode(np.array([weight]), 1)
    monkeypatch.setattr(secure_sum, "unmasked", lambda *_: total)
    masked = [Update(name, 1.0, {MASKED: total.view(np.int64)}) for name in ("a", "b", "c")]
    with pytest.raises(CodecError, match=r"expected 1 to 3e\+09"):
        SecureSum("run-0001", 1, "1" * 32, {}, 3).mean(masked, [])


# --- hostile ---------------------------------------------------------------------------------------------------------


class Hostile(Spied):
    """a1 sends what ``change`` makes of its tensors for one kind of job."""

    purpose = ""
    change = staticmethod(lambda tensors: tensors)

    def _put(self, job, tensors, samples, metrics):
        if self.config.id == "a1" and job.purpose == self.purpose:
            tensors = self.change({name: array.copy() for name, array in tensors.items()})
        return super()._put(job, tensors, samples, metrics)


def zeros(tensors):
    return {name: np.zeros_like(array) for name, array in tensors.items()}


def twice(tensors):
    tensors[KEYS][32:64] = tensors[KEYS][:32]
    return tensors


def noise(tensors):
    rng = np.random.default_rng(0)
    return {name: rng.integers(1, 255, array.shape, np.uint8) for name, array in tensors.items()}


def one_moved(tensors):
    """a1's own row, at point 2 of 1 to 4: a0's seed would come out one too large."""
    shares = tensors[REVEALED]
    factor = at_zero((1, 2, 3, 4))[1]
    moved = (int.from_bytes(shares[0].tobytes(), "big") + pow(factor, -1, PRIME)) % PRIME
    shares[0] = np.frombuffer(moved.to_bytes(SHARE_BYTES, "big"), np.uint8)
    return tensors


def garbage(tensors):
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, 256, array.shape, np.uint8) for name, array in tensors.items()}


def wrong_for_a0(tensors):
    tensors[SHARES][0] ^= 1
    return tensors


def hostile(purpose, change):
    return type("Hostile", (Hostile,), {"purpose": purpose, "change": staticmethod(change)})


def test_one_agent_that_sends_garbage_shares_is_left_out_of_the_next_attempt(tmp_path):
    """All others name it; none of them has failed."""
    with Fleet(tmp_path, 6, duties=hostile("secure_shares", garbage), round={"quorum": 1.0}) as fed:
        fed.ask(rounds=2)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        here, session = fed.summed(1)
        updates = [fed.plain[(name, 1, session)] for name in here]
        assert here == ["a0", "a2", "a3", "a4", "a5"]
        assert len({job.session for job in fed.jobs("secure_keys") if job.round == 1}) == 2
        assert {*fed.state.run(fed.run).summary().get("left_out", {})} <= {"a1"}
        (closed,) = fed.entries("round_closed", round=1)
    assert "a1" not in closed.body["unanswered"]
    assert all(weight for _, weight in updates)


def test_a_victim_of_wrong_shares_for_it_alone_has_not_failed(tmp_path):
    with Fleet(tmp_path, 6, duties=hostile("secure_shares", wrong_for_a0), round={"quorum": 1.0}) as fed:
        fed.ask(rounds=4)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        opened = fed.entries("round_opened")
        faults = fed.entries("update_refused", agent="a0")
    assert all("a0" in entry.body["cohort"] and "a0" not in entry.body["left_out"] for entry in opened)
    assert len(faults) == 4
    assert all(entry.body["reason"].startswith("SharesWrong: a1: no shares for 'a0'") for entry in faults)


@pytest.mark.parametrize("accusations, expected", [
    ({"a": ["d"], "b": ["d"], "d": ["c"]}, "d"),  # the liar accuses one
    ({"d": ["a", "b", "c"]}, "d"),  # the liar accuses everybody
    ({"a": ["d"]}, "ad"),  # one of the two
    ({"a": ["d"], "d": ["a"], "b": []}, "ad"),
    ({"a": ["a", "nobody"], "b": []}, ""),
])  # fmt: skip
def test_whoever_is_in_dispute_with_most_is_left_out(accusations, expected):
    assert disputed(accusations, "abcd") == {*expected}


@pytest.mark.parametrize("fault, expected", [
    (up.Fault(error="SharesWrong", message="b, c: no shares for 'a' in this round", accused=("b", "c")), "bc"),
    (up.Fault(error="SharesWrong", message="b, c: no shares for 'a' in this round"), "bc"),  # of an earlier version
    (up.Fault(error="SharesWrong", message="no shares"), ""),
    (up.Fault(error="TrainingFailed", message="b: the loss became nan", accused=("b",)), ""),
])  # fmt: skip
def test_whom_a_device_accuses_is_known_by_a_field_of_its_fault(fault, expected):
    rejection = Rejection.from_fault(fault)
    assert rejection.accused == {*expected}
    assert Rejection.from_fact(rejection.to_fact()) == rejection


@pytest.mark.parametrize("reason, rejection", [
    ("SharesWrong: b, c: no shares for 'a'", Rejection(
        "SharesWrong: b, c: no shares for 'a'", "SharesWrong", frozenset("bc"))),
    ("PrivacyRefused: no noise", Rejection("PrivacyRefused: no noise", "PrivacyRefused")),
    ("tensor 'w' holds NaN", Rejection("tensor 'w' holds NaN")),
    ("", Rejection("")),
])  # fmt: skip
def test_rejections_in_journals_of_earlier_versions_are_read_as_they_were_meant(reason, rejection):
    assert Rejection.from_fact(UpdateRefused(reason=reason)) == rejection
    assert UpdateRefused(reason=reason).to_body() == {"reason": reason}, "earlier versions have no field for it"


def test_a_cohort_is_no_larger_than_devices_accept_in_a_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(secure_tensors, "MOST_CLIENTS", 4)
    with Fleet(tmp_path, 6) as fed:
        fed.ask(rounds=2)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        assert [len(line["agents"]) for line in fed.metrics()] == [4, 4]


def test_a_refusal_by_the_protocol_is_none_of_the_devices_policy(tmp_path):
    """It is asked again in later rounds, where one whose own [privacy] refuses is not before it is restarted."""
    with Fleet(tmp_path, 5) as fed:
        fed.ask(rounds=4)
        sums = fed.tasks["a2"].secure_sums
        shares = sums.shares
        sums.shares = lambda job, given: shares(job, given) if job.round > 1 else sums.of(job).shares({})
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        refused = [fault.error for fault in fed.messages(fed.topics.up("a2"), up.Fault)]
        assert refused == ["SumRefused"]
        rounds = [line["agents"] for line in fed.metrics()]
    assert "a2" not in rounds[0]
    assert "a2" in rounds[-1]


def too_long(tensors):
    return {name: np.zeros((*array.shape, 1), array.dtype) for name, array in tensors.items()}


@pytest.mark.parametrize("purpose, change", [
    ("secure_keys", zeros),
    ("secure_keys", twice),
    ("secure_keys", too_long),
    ("secure_shares", too_long),
    ("train", too_long),
    ("secure_unmask", noise),
    ("secure_unmask", one_moved),
    ("secure_unmask", too_long),
])  # fmt: skip
def test_one_agent_that_sends_nonsense_ends_no_round_of_the_others(tmp_path, purpose, change):
    with Fleet(tmp_path, 5, duties=hostile(purpose, change)) as fed:
        fed.ask(rounds=1)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
        here, session = fed.summed(1)
        updates = [fed.plain[(name, 1, session)] for name in here]
        assert all((array == twin(updates, name)).all() for name, array in fed.final.items())
    assert set(here) >= {"a0", "a2", "a3", "a4"}

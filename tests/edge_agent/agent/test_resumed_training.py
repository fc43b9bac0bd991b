"""An agent that is killed while it trains resumes within the epoch; one whose round is over stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from federation_duties import TinyDuties
from federation_harness import Federation, Killed

from edge_agent.core.errors import TrainingCancelled
from edge_agent.run_folder.layout import TRAINING_FILE
from edge_agent.training import loops
from edge_agent.wire.messages import fields

PARAMS = {"local_epochs": 3, "batch_size": 6}
STEPS = 3 * 3
"""18 samples."""


class CheckpointingDuties(TinyDuties):
    """A checkpoint as soon as there is a step; the next one 20 times as long after it as it took."""

    def __init__(self, config, tier="train"):
        training = config.training.model_copy(update={"checkpoint_s": 1e-9})
        super().__init__(config.model_copy(update={"training": training}), tier)


def encoder_and_steps(folder, monkeypatch, *, kill_at=0):
    """The encoder of a run of two agents, and the steps of both; ``kill_at``: the step before which one is killed."""
    done = []
    whole = loops._run_step

    def counted(client, *rest):
        if len(done) + 1 == kill_at:
            done.append("killed")
            raise Killed
        done.append(client.id)
        return whole(client, *rest)

    monkeypatch.setattr(loops, "_run_step", counted)
    with Federation(folder, agents=2, tasks=CheckpointingDuties) as fed:
        fed.request(rounds=2, params=PARAMS)
        if kill_at:
            fed.until(lambda: "killed" in done)
            (killed,) = {"a0", "a1"} - fed.agents.keys()
            (left,) = fed.folder.glob(f"{killed}/runs/*/{TRAINING_FILE}")
            assert left.stat().st_size
            fed.add(killed)
        fed.finish()
        assert not [*fed.folder.glob(f"*/runs/*/{TRAINING_FILE}")], "removed when the update is in the outbox"
        return fed.encoder_sha256, len(done) - bool(kill_at)


@pytest.mark.parametrize("kill_at", [5, STEPS + 8, 2 * STEPS + 3])
def test_a_killed_agent_resumes_its_epoch_with_the_same_bits(tmp_path, monkeypatch, kill_at):
    """Agents train one after another here, so steps 1 to 9 are the first agent's round 1, and so on."""
    sha, steps = encoder_and_steps(tmp_path / "undisturbed", monkeypatch)
    assert steps == 4 * STEPS
    again, more = encoder_and_steps(tmp_path / "killed", monkeypatch, kill_at=kill_at)
    assert again == sha
    in_round = (kill_at - 1) % STEPS
    assert steps <= more < steps + in_round, "at least one step before the kill was not done again"


def other_samples(_folder, monkeypatch):
    """As many as before, of other numbers: the user has exchanged files."""
    whole = TinyDuties.read_samples

    def exchanged(duties, task):
        train, test = whole(duties, task)
        return replace(train, inputs=train.inputs + 1), test

    monkeypatch.setattr(TinyDuties, "read_samples", exchanged)


def no_client_state(folder, _monkeypatch):
    """The user has removed a damaged file, as its error advises."""
    (state,) = folder.glob("a0/runs/*/kept-*")
    state.unlink()


@pytest.mark.parametrize("change, is_resumed", [(None, True), (other_samples, False), (no_client_state, False)])
def test_a_training_is_resumed_on_its_own_data_alone(tmp_path, monkeypatch, change, is_resumed):
    """Killed before step 5 of round 2 of one agent, whose data then change: all 9 steps are done again."""
    done = []
    whole = loops._run_step

    def counted(client, *rest):
        done.append(client.round)
        if len(done) == STEPS + 5:
            raise Killed
        return whole(client, *rest)

    monkeypatch.setattr(loops, "_run_step", counted)
    with Federation(tmp_path, agents=1, tasks=CheckpointingDuties) as fed:
        fed.request("fedper", rounds=2, params=PARAMS)
        fed.until(lambda: not fed.agents)
        assert [*tmp_path.glob(f"a0/runs/*/{TRAINING_FILE}")]
        if change is not None:
            change(tmp_path, monkeypatch)
        done.clear()
        fed.add("a0")
        fed.finish()
        assert fed.record.status == "finished"
        assert (done.count(2) < STEPS) is is_resumed


@pytest.mark.parametrize("after", [0, 4])
def test_a_cancelled_round_stops_its_training(tmp_path, monkeypatch, after):
    """Cancel comes from the loop's thread: while the worker makes the session, which takes seconds, or in step 4."""
    steps = []
    whole = loops._run_step
    with Federation(tmp_path, agents=1, tasks=CheckpointingDuties) as fed:
        (tasks,) = fed.tasks.values()

        def counted(client, *rest):
            steps.append(client.round)
            if len(steps) == after:
                tasks.cancel(fields.JobKey(fed.run_id, 1))
            return whole(client, *rest)

        monkeypatch.setattr(loops, "_run_step", counted)
        raised = []
        do = tasks.do
        session = tasks.session

        def made(job):
            if not after and not raised:
                tasks.cancel(fields.JobKey(fed.run_id, 1))
            return session(job)

        monkeypatch.setattr(tasks, "session", made)

        def noted(job, received, encoder=None):
            try:
                return do(job, received, encoder)
            except TrainingCancelled:
                raised.append(job.round)
                raise

        monkeypatch.setattr(tasks, "do", noted)
        fed.request(rounds=1, params=PARAMS)
        fed.finish()
        assert raised == [1]
        assert not fed.entries("update_refused"), "not a failure of the agent"
        most = max(STEPS, after + STEPS - 1)
        assert len(steps) <= most, "the round was open nevertheless, so the agent has resumed and delivered"
        assert fed.metrics()[0]["agents"] == ["a0"]


def test_a_cancel_message_reaches_the_training(tmp_path):
    with Federation(tmp_path, agents=2, round={"quorum": 0.5, "grace_s": 1.0}) as fed:
        fed.kill("a1")
        fed.add("a1", seconds=100)
        fed.settle()
        fed.request(rounds=1)
        fed.until(lambda: fed.entries("round_closed"))
        fed.settle()
        assert fed.tasks["a1"].cancelled == fields.JobKey(fed.run_id, 1)

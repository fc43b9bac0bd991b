"""States that are kept while a run goes on, for analyses of its rounds; and asking for them to be kept."""

from __future__ import annotations

import pytest
from analysis_harness import analyzed, reasons, simulated

from coordinator.cli import main
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder, prune_blobs, states_of
from edge_agent.run_folder.client_state import ClientStateFiles


def test_the_state_that_is_kept_is_that_of_a_run_that_ended_there(runs, images, folder):
    path, _ = runs("dualfed")
    short, _ = simulated(images, folder / "short", "dualfed", rounds=2, keep_every=0)
    states = {}
    ends = {}
    for place, found in ((path, states), (short, ends)):
        state = StateFolder(place)
        with state.look():
            found.update({n: state.blobs.read(sha) for n, sha in states_of(state, "run-0001").items()})
    assert sorted(states) == [0, 2, 4]
    assert sorted(ends) == [2]
    assert states[2] == ends[2]
    for client in ("c0", "c1", "c2"):
        kept, expected = (
            ClientStateFiles(p / "clients" / client / "runs" / "run-0001").before(3)[0] for p in (path, short)
        )
        assert expected
        assert {n: a.tobytes() for n, a in kept.items()} == {n: a.tobytes() for n, a in expected.items()}


def test_without_keep_every_the_last_state_is_left_and_that_is_said(images, folder):
    path, _ = simulated(images, folder / "last", rounds=2, keep_every=0)
    result = analyzed(path)
    assert [one["round"] for one in result["rounds"]] == [2]
    assert "--keep-every" in reasons(result)["earlier rounds"]


def test_another_runs_end_leaves_kept_states_alone(images, folder):
    """Pruning views at the journal: what one run keeps, the next one's rounds do not remove."""
    path, _ = simulated(images, folder / "again")
    state = StateFolder(path)
    with state.open("test"):
        before = states_of(state, "run-0001")
        prune_blobs(state)
        assert states_of(state, "run-0001") == before
        assert len(before) == 3


def test_a_state_whose_round_was_never_closed_does_not_count(images, folder):
    """Killed between the two entries: the blob is noted, the round is not over."""
    path, _ = simulated(images, folder / "killed", rounds=2, keep_every=1)
    state = StateFolder(path)
    with state.open("test"):
        known = states_of(state, "run-0001")
        state.journal.append(
            fact_of("state_kept", {}), run="run-0001", round=3, digest=state.blobs.put(b"half a round")
        )
        assert states_of(state, "run-0001") == known
        state.blobs.path(known[1]).unlink()
        assert list(states_of(state, "run-0001")) == [0, 2]


# --- asking for states to be kept ------------------------------------------------------------------------------------


def test_the_file_says_how_many_states_to_keep_and_the_option_wins(tmp_path):
    from coordinator.cli.run import request_for
    from coordinator.config import CoordinatorConfig

    raw = {"task": {"class_names": ["a", "b"], "encoder": "linear"}, "run": {"keep_every": 5}}
    config = CoordinatorConfig.model_validate({**raw, "state": tmp_path})
    assert request_for(config, None, None, None, {}).keep_every == 5
    assert request_for(config, None, None, None, {}, 0).keep_every == 0


def test_a_request_from_before_states_could_be_kept_keeps_none():
    from coordinator.rounds.request import Request
    from edge_agent.core.task import Task

    request = Request("fedavg", {}, 3, 0, Task(class_names=("a",)), keep_every=4)
    body = request.body()
    assert Request.from_fact(fact_of("run_requested", body)) == request
    del body["keep_every"]
    assert Request.from_fact(fact_of("run_requested", body)).keep_every == 0


def test_keep_every_is_an_option_of_simulate(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("-d", images, "--encoder", "linear", "--clients", "2", "--rounds", "3", "--keep-every", "1", "--out", "s")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words, "--device", "cpu", "--engine", "serial"])
    assert not ended.value.code
    assert [one["round"] for one in analyzed(tmp_path / "s")["rounds"]] == [0, 1, 2, 3]

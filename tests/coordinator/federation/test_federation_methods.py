"""Every method over the wire in memory, with real training on tiny data; and what must never be on the wire."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from federation_duties import SMALL, TASK, TinyDuties, quick_params
from federation_harness import Federation

from coordinator.processes.compute import InlineCompute
from edge_agent import methods
from edge_agent.run_folder.client_state import ClientStateFiles
from edge_agent.training.parts import to_arrays
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.tensors import decode


def finished(folder, method, compute=None, **options):
    fed = Federation(folder, tasks=TinyDuties, capture=True, compute=compute)
    with fed:
        fed.request(method, rounds=2, params=quick_params(method), **options)
        fed.finish()
        assert fed.record.status == "finished", fed.record.end
    return fed


def last_state(fed):
    with fed.state.look() as state:
        return state.journal.entries(fed.run, ("round_closed",))[-1].digest


def summary_of(fed):
    return fed.state.run(fed.run).summary()


@pytest.fixture(scope="module")
def first_of(tmp_path_factory):
    """A function that gives the first run of a method; each is done once."""
    runs = {}

    def first(method):
        if method not in runs:
            runs[method] = finished(tmp_path_factory.mktemp(method), method)
        return runs[method]

    return first


@pytest.mark.parametrize("method", methods.names())
def test_every_method_finishes_and_the_same_seed_gives_the_same_bits(first_of, tmp_path, method):
    first = first_of(method)
    second = finished(tmp_path, method)
    shas = {summary_of(fed)["encoder_sha256"] for fed in (first, second)}
    assert len(shas) == 1
    assert len(summary_of(first)["agents"]) == 3
    assert all(agent["acc"]["personal"] is not None for agent in summary_of(first)["agents"])
    assert summary_of(first)["faults"] == {}


class Elsewhere(InlineCompute):
    """As if in another process: requests and results are JSON, and the method's class is not known here."""

    is_here = False

    def __init__(self):
        self.asked = []

    def submit(self, request, limit_s=None):
        self.asked.append(request["do"].partition(":")[2])
        return json.loads(json.dumps(super().submit(json.loads(json.dumps(request)), limit_s)))


OWN = {
    "afl": {"objection", "aggregate"},
    "fedadam": {"aggregate"},
    "fedavgm": {"aggregate"},
    "fedas": {"objection", "aggregate"},
    "fedcof": {"objection", "aggregate"},
    "feddbe": {"objection", "aggregate"},
    "fedfomo": {"objection", "broadcast", "downlink", "aggregate"},
    "fedkd": {"objection", "broadcast", "aggregate"},
    "fedpac": {"objection", "broadcast", "downlink", "aggregate"},
    "fedproto": {"objection", "aggregate"},
    "pfedhn": {"broadcast", "downlink", "aggregate"},
    "pfedme": {"aggregate"},
    "scaffold": {"aggregate"},
    "spherefed": {"objection", "aggregate"},
}
"""What the compute process is asked in the rounds of a method; of others nothing."""


@pytest.mark.parametrize("method", methods.names())
def test_a_method_whose_class_only_the_compute_process_knows_gives_the_same_bits(first_of, tmp_path, method):
    compute = Elsewhere()
    there = finished(tmp_path, method, compute)
    assert last_state(there) == last_state(first_of(method))
    assert summary_of(there)["params"] == summary_of(first_of(method))["params"]
    assert {*compute.asked} == {"begin", *OWN.get(method, ())}
    assert not list((tmp_path / "coordinator" / "runs" / there.run).glob("*.safetensors")), (
        "answers are read and removed"
    )


def test_another_seed_gives_other_bits(tmp_path):
    first = finished(tmp_path / "1", "fedavg", seed=1)
    second = finished(tmp_path / "2", "fedavg", seed=2)
    assert summary_of(first)["encoder_sha256"] != summary_of(second)["encoder_sha256"]


def uploads(fed):
    """Tensors of each uploaded update: (agent, tensors)."""
    for name in fed.agents or ("a0", "a1", "a2"):
        pieces = [decode_frame(payload) for payload in fed.published(fed.topics.up_chunks(name))]
        for piece in pieces:
            assert piece.count == 1, "the tiny model is one chunk"
            yield name, decode(bytes(piece.data))


@pytest.mark.parametrize("method", methods.names())
def test_uploads_hold_exactly_the_names_that_the_method_declares(first_of, method):
    fed = first_of(method)
    made = methods.create(method, quick_params(method))
    declared = {*made.returned_names(made.build(TASK)), *made.sends(made.build(TASK), TASK)}
    sent = list(uploads(fed))
    assert len(sent) == 2 * 3
    assert all(set(tensors) == declared for _, tensors in sent)


def personal_arrays(fed):
    """Everything that the devices keep for themselves, after each round, as raw bytes of at least 12 bytes."""
    for name in ("a0", "a1", "a2"):
        files = ClientStateFiles(fed.folder / name / "runs" / fed.run_id)
        for number in (1, 2, 9_999_999):
            personal, memory = files.before(number + 1)
            for array in (*personal.values(), *memory.values()):
                raw = np.ascontiguousarray(array).tobytes()
                if len(raw) >= 12 and any(raw):
                    yield name, raw


@pytest.mark.parametrize("method", ["fedper", "repper"])
def test_personal_tensors_never_appear_in_anything_that_is_published(tmp_path, method):
    fed = finished(tmp_path, method)
    everything = b"\n".join(payload for _, payload in fed.broker.captured)
    kept = list(personal_arrays(fed))
    assert {name for name, _ in kept} == {"a0", "a1", "a2"}
    assert not [name for name, raw in kept if raw in everything]


def test_the_search_for_personal_tensors_would_find_them(tmp_path):
    """The same search on a tensor that does travel: it is there, byte for byte."""
    fed = finished(tmp_path, "fedper")
    everything = b"\n".join(payload for _, payload in fed.broker.captured)
    name, tensors = next(uploads(fed))
    assert name == "a0"
    assert all(array.tobytes() in everything for array in tensors.values())


def test_local_data_never_appear_in_anything_that_is_published(tmp_path):
    fed = finished(tmp_path, "fedavg")
    everything = b"\n".join(payload for _, payload in fed.broker.captured)
    for name in ("a0", "a1", "a2"):
        rng = np.random.default_rng(sum(map(ord, name)))
        labels = np.arange(24, dtype=np.int64) % 3
        inputs = rng.normal(size=(24, 1, 4, 4)).astype(np.float32) + labels[:, None, None, None]
        assert not [row for row in inputs if row.astype(np.float32).tobytes() in everything]


def test_a_method_whose_parameters_do_not_fit_fails_its_run_and_nothing_else(tmp_path):
    with Federation(tmp_path, tasks=TinyDuties) as fed:
        fed.request("fedavg", params={"lr": -1})
        fed.finish()
        assert fed.record.status == "failed"
        assert re.search("lr", fed.record.reason)
        fed.request("fedavg", rounds=1, params=SMALL)
        fed.finish()
        assert fed.record.status == "finished"


def test_an_encoder_that_cannot_be_built_fails_its_run_and_nothing_else(tmp_path):
    """The encoder's own parameters are checked by the encoder: whatever it raises costs the run, not the process."""
    with Federation(tmp_path, tasks=TinyDuties) as fed:
        good = fed.task
        fed.task = good.model_copy(update={"encoder_params": {"feature_dim": -3}})
        fed.request("fedavg")
        fed.finish()
        assert fed.record.status == "failed"
        assert "feature_dim" in fed.record.reason
        fed.task = good
        fed.request("fedavg", rounds=1, params=SMALL)
        fed.finish()
        assert fed.record.status == "finished"


def test_a_method_that_breaks_in_aggregate_fails_its_run_and_nothing_else(tmp_path, monkeypatch):
    from edge_agent.methods import fedper

    def broken(self, state, updates):
        raise ZeroDivisionError("a method of somebody else")

    monkeypatch.setattr(fedper.FedPer, "aggregate", broken)
    with Federation(tmp_path, tasks=TinyDuties) as fed:
        fed.request("fedper", params=SMALL)
        fed.finish()
        assert fed.record.status == "failed"
        assert "ZeroDivisionError: a method of somebody else" in fed.record.reason
        fed.request("fedavg", rounds=1, params=SMALL)
        fed.finish()
        assert fed.record.status == "finished"


def test_a_method_that_breaks_while_a_round_is_open_leaves_nothing_open(tmp_path, monkeypatch):
    from edge_agent.methods import fedper

    def broken(self, state, client):
        raise ZeroDivisionError

    monkeypatch.setattr(fedper.FedPer, "downlink", broken)
    with Federation(tmp_path, tasks=TinyDuties) as fed:
        fed.request("fedper", params=SMALL)
        fed.finish()
        assert fed.record.status == "failed"
        assert fed.coordinator.collector.open_round is None
        assert fed.coordinator.distributor._offers == {}
        assert all(agent.jobs.job is None for agent in fed.agents.values())


def test_arrays_of_a_model_are_what_the_state_starts_from(tmp_path):
    """Seed 3 gives the weights that torch's generator gives after ``manual_seed(3)``, on both sides."""
    import torch

    with Federation(tmp_path, agents=0) as fed:
        fed.request("fedavg", seed=3)
        fed.wait(1)
        torch.manual_seed(3)
        model = methods.create("fedavg", {}).build(TASK)
        expected = to_arrays(model, model.state_dict())
        for name, array in fed.final.items():
            np.testing.assert_array_equal(array, expected[name])

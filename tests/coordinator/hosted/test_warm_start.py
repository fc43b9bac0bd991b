"""A warm start: made once, before the first round, the same for the same seed, and kept whoever is killed when."""

from __future__ import annotations

import contextlib
import json
import sys
import threading

import numpy as np
import pytest
from federation_disturbances import killed_at_append
from federation_duties import SMALL, TASK, step_of
from federation_harness import Federation
from simulation_harness import write_images

from coordinator.config import CoordinatorConfig, WarmStartConfig
from coordinator.hosted.own_data import train_warm
from coordinator.hosted.run_hooks import OwnDataHooks
from coordinator.journal.entries import fact_of
from coordinator.processes import compute
from coordinator.processes.compute import ComputeProcess
from coordinator.rounds.request import Request
from coordinator.service.preflight import checked_method
from edge_agent import methods
from edge_agent.core import child_process
from edge_agent.core.children import InlineWorker
from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, RunFailed, UsageError
from edge_agent.core.storage import read_tensors


@pytest.fixture
def images(tmp_path):
    source = write_images(tmp_path / "own.npz", 120, dark=40, noise=10, step=70)
    return WarmStartConfig(data=source, epochs=8, lr=0.1, device="cpu")


WARM_START = "coordinator.hosted.own_data:train_warm"


def question(settings, into, method="fedavg", seed=1, **changes):
    told = {"method": method, "params": {}, "task": TASK.model_dump(mode="json"), "seed": seed, "into": str(into)}
    return {**told, "settings": {**settings.model_dump(mode="json"), **changes}}


class InProcess:
    """A `ComputeProcess` without a process; it records what it is asked."""

    def __init__(self):
        self.asked = []

    def submit(self, question):
        self.asked.append(question["do"].partition(":")[2])
        return train_warm(question)

    def cancel(self, question):
        self.asked.append("cancel")

    def end_if_idle(self):
        pass

    def close(self):
        pass


class Warmed(Federation):
    """A federation whose coordinator computes in this thread, however often it is started again."""

    def __init__(self, folder, settings, **options):
        super().__init__(folder, **options)
        self.settings = settings
        self.desk = InProcess()

    def start_coordinator(self):
        def prepare(coordinator):
            coordinator.hooks = OwnDataHooks(None, self.desk, InlineWorker())

        return super().start_coordinator(prepare)

    def request(self, method="fedavg", rounds=2, seed=3):
        asked = Request(method, SMALL, rounds, seed, self.task, warm_start=self.settings)
        self.run = self.state.journal.request_run(fact_of("run_requested", asked.body()))
        self._looked_at = -1
        return self.run


def test_the_encoder_learns_and_the_same_seed_gives_the_same_bits(tmp_path, images):
    first, again, other = (
        train_warm(question(images, tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    assert (first["samples"], first["tested"], first["epochs"], first["head"]) == (108, 12, 8, "shared")
    assert first["accuracy"] > 0.9, "brightness alone tells the classes apart"
    files = [(tmp_path / name).read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    assert other["samples"] == 108


def test_all_of_the_encoder_is_trained_before_devices_train_a_part_of_it(tmp_path, images):
    """The first state has the weights of a warm start without adapters, and those add nothing yet."""
    train_warm(question(images, tmp_path / "whole"))
    adapted = TASK.with_peft("lora", {"rank": 2})
    asked = {**question(images, tmp_path / "part"), "task": adapted.model_dump(mode="json")}
    assert train_warm(asked)["accuracy"] > 0.9
    whole = read_tensors(tmp_path / "whole")
    part = read_tensors(tmp_path / "part")
    assert part.keys() - whole.keys() == {"encoder.layers.1.lora_a", "encoder.layers.1.lora_b"}
    assert all(np.array_equal(part[name], array) for name, array in whole.items())
    assert not part["encoder.layers.1.lora_b"].any()


def test_what_is_written_is_the_first_state_of_the_method(tmp_path, images):
    """SCAFFOLD's has a control variate of zeros beside the model; FedPer's has no head, and another is discarded."""
    train_warm(question(images, tmp_path / "s", "scaffold"))
    scaffold = read_tensors(tmp_path / "s")
    model = {name for name in scaffold if name.split(".")[0] in {"encoder", "head"}}
    assert model
    assert all(not scaffold[name].any() for name in scaffold.keys() - model)
    told = train_warm(question(images, tmp_path / "p", "fedper"))
    assert told["head"] == "discarded"
    assert {name.split(".")[0] for name in read_tensors(tmp_path / "p")} == {"encoder"}


def test_a_run_begins_with_what_was_learned_and_says_so(tmp_path, images):
    with Warmed(tmp_path / "fed", images, agents=2) as fed:
        fed.request()
        fed.finish()
        (warm,) = fed.entries("warm_started")
        kinds = [entry.kind for entry in fed.entries()]
        summary = fed.state.run(fed.run).summary()
        expected = train_warm(question(images, tmp_path / "same", seed=3) | {"params": SMALL})
        sent = fed.final
    assert kinds[:4] == ["run_requested", "run_started", "warm_started", "round_opened"]
    assert {key: warm.body[key] for key in expected} == expected
    assert len(warm.body["encoder_sha256"]) == 64
    assert summary["warm_start"] == warm.body
    begun = read_tensors(tmp_path / "same")
    step = (step_of("a0") + step_of("a1")) / 2
    for name, array in begun.items():  # fake agents move each number by a step of theirs, twice as far in round 2
        np.testing.assert_allclose(sent[name], array + 3 * step, rtol=1e-5)


@pytest.mark.parametrize("number, before", [(1, True), (1, False), (3, True)])
def test_a_restart_does_not_repeat_what_is_in_the_journal(tmp_path, images, number, before):
    """Entry 0 is run_started, 1 warm_started: killed just before that it is made again, just after it is not."""
    with Warmed(tmp_path / "whole", images, agents=2) as fed:
        fed.request()
        fed.finish()
        sha = fed.encoder_sha256
    with Warmed(tmp_path / "killed", images, agents=2) as fed:
        fed.request()
        with killed_at_append(fed, number, before=before):
            fed.until(lambda: fed.coordinator is None)
        fed.start_coordinator()
        fed.finish()
        assert fed.encoder_sha256 == sha
        assert len(fed.entries("warm_started")) == 1
        assert fed.desk.asked == ["train_warm"] * (2 if (number, before) == (1, True) else 1)


def test_a_warm_start_that_cannot_be_made_fails_the_run_and_says_why(tmp_path, images):
    settings = images.model_copy(update={"lr": 1000.0, "weight_decay": 1000.0})
    with Warmed(tmp_path / "fed", settings, agents=1) as fed:
        fed.request()
        fed.finish()
        assert fed.record.status == "failed"
        assert "warm start: " in fed.record.reason
        assert "loss became" in fed.record.reason


def test_a_cancelled_run_does_not_keep_the_process_busy(tmp_path, images):
    class Never(InlineWorker):
        def submit(self, name, job, done):
            pass

    with Warmed(tmp_path / "fed", images, agents=1) as fed:
        fed.coordinator.hooks = OwnDataHooks(None, fed.desk, Never())
        run = fed.request()
        fed.settle()
        assert "before the first round" in fed.coordinator.status()["waiting"]["for"]
        fed.state.journal.append(fact_of("cancel_requested", {"reason": "enough"}), run=run)
        fed.wait(1)
        assert fed.record.status == "cancelled"
        assert fed.desk.asked == ["cancel"]


def test_mistakes_are_told_before_the_run():
    def configured(**warm):
        raw = {"task": TASK, "warm_start": {"data": "digits:optdigits?n=20", **warm}}
        return parse(CoordinatorConfig, raw, where="test")

    with pytest.raises(UsageError, match="'local', which shares no encoder: it would reach no client"):
        checked_method(configured(), "local", {})
    with pytest.raises(ConfigError) as caught:
        checked_method(configured(data="npz:nowhere", device="xpu9000"), "fedavg", {})
    assert len(caught.value.mistakes) == 2
    with pytest.raises(ConfigError, match=r"warm_start\.epoch: unknown key; did you mean 'epochs'"):
        configured(epoch=3)
    assert checked_method(configured(), "fedper", {}).name == "fedper"


def test_a_request_keeps_its_warm_start_through_the_journal(images):
    asked = Request("fedavg", {}, 1, 0, TASK, warm_start=images)
    assert Request.from_fact(fact_of("run_requested", json.loads(asked.to_fact().to_json()))) == asked
    assert Request.from_fact(asked.to_fact().changed(warm_start=None)).warm_start is None


# --- the process -----------------------------------------------------------------------------------------------------


def test_the_process_answers_what_is_computed_here_and_comes_back_when_it_is_killed(tmp_path, images):
    here = train_warm(question(images, tmp_path / "here"))
    asked = ComputeProcess(tmp_path / "words.log")
    try:
        there = asked.submit({"do": WARM_START, **question(images, tmp_path / "there")})
        assert there == here
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
        with pytest.raises(UsageError, match="unknown method 'fedavgg': did you mean 'fedavg'"):
            asked.submit({"do": WARM_START, **question(images, tmp_path / "x", "fedavgg")})
    finally:
        asked.close()


FAKE = """
import json, os, socket, struct, sys
end = socket.socket(fileno=0)
from pathlib import Path
tries = Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
end.recv(6, socket.MSG_WAITALL)
if len(tries.read_text()) < int(sys.argv[2]):
    sys.exit("no memory")
said = json.dumps({"tries": len(tries.read_text())}).encode()
end.sendall(struct.pack("<HI", 6, len(said)) + b"result" + said)
sys.stdin.read()
"""


@pytest.mark.parametrize("dies, answers", [(0, True), (2, True), (3, False)])
def test_a_process_that_dies_is_asked_again_and_at_last_given_up(tmp_path, monkeypatch, dies, answers):
    monkeypatch.setattr(compute, "COMMAND", (sys.executable, "-c", FAKE, str(tmp_path / "tries"), str(dies + 1)))
    asked = ComputeProcess(tmp_path / "words.log")
    try:
        if answers:
            assert asked.submit({}) == {"tries": dies + 1}
        else:
            with pytest.raises(RunFailed, match="crashed 3 times, the last time with exit code 1; last output: no mem"):
                asked.submit({})
    finally:
        asked.close()
    with pytest.raises(RunFailed, match="request cancelled"):
        asked.submit({})


def test_what_nobody_waits_for_is_not_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    asked = ComputeProcess(tmp_path / "words.log")
    ends = []
    long = {"do": "long"}
    queued = {"do": "queued"}

    def ask(question):
        with pytest.raises(RunFailed, match="request cancelled"):
            asked.submit(question)
        ends.append(question)

    at_work = threading.Thread(target=ask, args=(long,))
    at_work.start()
    pause = threading.Event()
    tries = 0
    while asked.pid is None and (tries := tries + 1) < 1000:
        pause.wait(0.01)
    asked.cancel(queued)
    ask_later = threading.Thread(target=ask, args=(queued,))
    assert at_work.is_alive(), "another question is none of its business"
    asked.cancel(long)
    at_work.join(10)
    asked.cancel(queued)
    ask_later.start()
    ask_later.join(10)
    assert ends == [long, queued]
    assert asked.pid is None
    asked.close()


def test_what_is_dropped_while_the_process_is_being_started_is_not_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    asked = ComputeProcess(tmp_path / "words.log")
    question = {"do": "long"}
    start = child_process.subprocess.Popen
    drops = threading.Thread(target=asked.cancel, args=(question,))

    def popen(*words, **options):
        drops.start()
        drops.join(0.2)
        return start(*words, **options)

    monkeypatch.setattr(child_process.subprocess, "Popen", popen)
    rejected = threading.Event()

    def ask():
        with pytest.raises(RunFailed, match="request cancelled"):
            asked.submit(question)
        rejected.set()

    threading.Thread(target=ask, daemon=True).start()
    assert rejected.wait(20)
    asked.close()


def test_a_process_that_cannot_be_started_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "COMMAND", (str(tmp_path / "no python"),))
    with pytest.raises(RunFailed, match="crashed 3 times, the last time with no such file or folder"):
        ComputeProcess(tmp_path / "words.log").submit({})


@pytest.mark.parametrize("name", methods.names())
def test_a_method_can_be_warmed_if_it_shares_an_encoder(images, name):
    config = parse(CoordinatorConfig, {"task": TASK, "warm_start": images.model_dump()}, where="test")
    is_shared = "encoder" in methods.create(name, {}).shared
    with contextlib.nullcontext() if is_shared else pytest.raises(UsageError, match="shares no encoder"):
        checked_method(config, name, {})

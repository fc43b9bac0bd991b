"""Benchmarks measure the right thing: shapes of results, arithmetic of figures, who pays. Never how fast it is."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from coordinator.bench import (
    bare_rounds,
    device,
    features,
    memory,
    noop,
    precision,
    processes,
    rounds,
    sample,
    simulate,
    stacked,
    tcp,
    transport,
    w1,
)
from coordinator.bench.figures import Row, caveat, machine, median, quantile, rounded
from coordinator.cli.app import app
from coordinator.cli.bench import chosen, size_bytes
from coordinator.state.journal import Journal
from edge_agent import data, methods, models
from edge_agent.agent.tasks import TaskRunner
from edge_agent.config import AgentConfig, DataConfig
from edge_agent.errors import MeasuringFailed, UsageError
from edge_agent.task import Task
from edge_agent.training.parts import to_arrays
from edge_agent.wire.messages import Job, Report
from edge_agent.wire.tensors import decode

TASK = Task(class_names=("a", "b"))


@pytest.mark.parametrize(
    "text, size",
    [("0.5MB", 500_000), ("45 MB", 45_000_000), ("500000", 500_000), ("64kb", 64_000), ("1GB", 1_000_000_000)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "45 TB", "-1MB", "nan", "inf MB", "1e99", "999", "2GB", "0.5 MB each"])
def test_sizes_that_cannot_be_meant_are_refused(text):
    with pytest.raises(UsageError, match="payload"):
        size_bytes(text)


def test_an_unknown_choice_names_the_known_ones():
    with pytest.raises(UsageError, match="--broker 'nats': expected one of all, mosquitto, amqtt"):
        chosen("--broker", "nats", "all", "mosquitto", "amqtt")


def test_middle_and_tail_of_values():
    """Of 1..10: the middle is between 5 and 6; nine of ten values do not exceed 9."""
    values = [float(v) for v in (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)]
    assert (median(values), quantile(values, 0.9), median([3.0, 1.0, 2.0])) == (5.5, 9.0, 2.0)
    assert np.isnan(median([]))
    assert np.isnan(quantile([], 0.9))


@pytest.mark.parametrize(
    "value, shown", [(0.12345678, 0.1235), (12345.678, 12346.0), (0.0, 0.0), (-0.00123456, -0.001235), (99.99, 99.99)]
)
def test_figures_keep_four_digits_that_count(value, shown):
    assert rounded(value) == shown


@pytest.mark.parametrize("value, budget, met", [(0.1, 0.1, True), (0.11, 0.1, False), (5.0, None, None)])
def test_a_budget_is_met_up_to_its_value(value, budget, met):
    assert Row("x", value, "s", budget).as_json()["met"] is met


def test_the_caveat_names_processor_cores_and_versions():
    here = machine()
    text = caveat(here, "No network.")
    assert here["processor"] in text
    assert f"{here['cores']} cores" in text
    assert f"torch {torch.__version__}" in text
    assert "No network." in text


def test_usage_agrees_with_what_the_process_knows_of_itself():
    used = processes.usage(os.getpid())
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    assert used.cpu_s == pytest.approx(seconds, abs=0.5)
    assert used.peak_mb <= own.ru_maxrss * 1024 / 1e6 * 1.02
    assert 0 < used.own_mb < used.rss_mb <= used.peak_mb * 1.02


def test_the_peak_is_forgotten_on_request_and_seen_again():
    """150 MB come and go: the peak falls by most of them once it is forgotten."""
    block = np.ones(150_000_000, np.uint8)
    high = processes.usage(os.getpid()).peak_mb
    del block
    processes.forget_peak(os.getpid())
    low = processes.usage(os.getpid()).peak_mb
    assert low < high - 100


def test_a_process_that_is_gone_is_named():
    with pytest.raises(MeasuringFailed, match="999999999"):
        processes.usage(999_999_999)


def test_a_measured_process_that_ends_tells_its_last_words(tmp_path):
    with processes.module("broken", ["--port", "none"], tmp_path, module="coordinator.bench.tcp") as measured:
        with pytest.raises(MeasuringFailed, match=r"(?s)broken ended with code 2.*invalid int value"):
            processes.answer(measured)


def test_waiting_ends_with_an_error_that_says_for_what(tmp_path):
    with pytest.raises(MeasuringFailed, match="the moon: not within 0 s"):
        processes.wait_for(lambda: False, [], what="the moon", limit_s=0.0, every_s=0.001)


def test_rounds_are_timed_from_the_end_of_one_to_the_end_of_the_next(tmp_path):
    """Opened at 0; closed at 0.5, 0.7 and 1.5 s: rounds of 0.5, 0.2 and 0.8 s, whatever is journalled between."""
    times = iter([0.0, 0.0, 0.1, 0.5, 0.5, 0.7, 0.7, 1.5])
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with Journal(tmp_path / "journal.db", now=lambda: start + timedelta(seconds=next(times))) as journal:
        run = journal.request_run({})
        for number in (1, 2, 3):
            journal.append("round_opened", run=run, round=number, body={"attempt": 1, "cohort": ["a"]})
            if number == 1:
                journal.append("update_refused", run=run, round=1, agent="a", body={"reason": "x"})
            journal.append("round_closed", run=run, round=number, digest="0" * 64, body={"clients": 1})
        assert rounds.round_seconds(journal, run) == [0.5, 0.2, 0.8]


def test_a_failed_run_gives_its_reason_and_no_figures(tmp_path):
    with Journal(tmp_path / "journal.db") as journal:
        run = journal.request_run({})
        journal.append("run_failed", run=run, body={"reason": "no quorum"})
        with pytest.raises(MeasuringFailed, match="no quorum"):
            rounds.round_seconds(journal, run)


def test_budgets_of_rounds_hold_for_the_payloads_that_they_were_set_for():
    plans = [rounds.Plan(payload_bytes=size) for size in (500_000, 45_000_000, 1_000_000)]
    assert [plan.round_budget_s() for plan in plans] == [0.1, 2.0, None]
    assert rounds.Plan(workload="w1").round_budget_s() is None


def test_the_idle_method_has_a_model_of_the_payload_that_was_asked_for():
    method = noop.Method(noop.Params(payload_bytes=80_000))
    model = method.build(TASK)
    arrays = to_arrays(model, method.shared_names(model))
    assert len(arrays) == noop.ARRAYS
    assert sum(array.nbytes for array in arrays.values()) == 80_000
    sent = method.local_update(SimpleNamespace(id="a"), arrays)
    assert sent.keys() == arrays.keys()
    assert all(np.allclose(sent[name] - arrays[name], 81, atol=1e-4) for name in arrays)


@pytest.fixture
def tasks(tmp_path):
    config = AgentConfig(id="a", state=tmp_path, data=DataConfig(source="npz:none"))
    return noop.NoDuties(config, "train")


def job(purpose="train", **params):
    return Job(
        purpose=purpose, run="run-0001", round=3, rounds=4, seed=0, method="noop", params=params, task=TASK, blobs=(),
        deadline_s=1.0,
    )  # fmt: skip


def sent(tasks: TaskRunner):
    manifest = tasks.outbox.get()
    return decode(tasks.outbox.path_of(manifest.blob.digest).read_bytes())


def test_every_round_carries_other_bytes_both_ways(tasks):
    """crc32(b'a') = 0xE8B7BE43 = 3904355907, modulo 97 it is 80: agent 'a' adds 81."""
    tasks.do(job(), {"x": np.zeros(4, np.float32)})
    once = sent(tasks)["x"]
    assert once.tolist() == [1 + 3904355907 % 97] * 4
    tasks.do(job(), {"x": once})
    assert sent(tasks)["x"].tolist() == [2 * (1 + 3904355907 % 97)] * 4


def test_uploads_of_another_size_than_the_download_can_be_asked_for(tasks):
    manifest = tasks.do(job(upload_bytes=4000), {"x": np.zeros(1, np.float32)})
    assert sent(tasks)["array"].nbytes == 4000
    assert manifest.samples == 1


def test_the_end_of_a_run_asks_the_idle_agent_for_nothing(tasks):
    assert isinstance(tasks.do(job("finish"), {}), Report)
    assert tasks.outbox.get() is None


def test_workload_w1_has_the_network_of_its_description():
    """conv 1x16x25+16, conv 16x32x25+32, 512x512+512 and 512x10+10 weights: 281,034 with the head."""
    w1.register()
    with contextlib.ExitStack() as stack:
        stack.callback(models.registry._extra.pop, w1.ENCODER)
        encoder = models.create(w1.task())
    weights = sum(weight.numel() for weight in encoder.parameters())
    assert weights + 512 * 10 + 10 == 281_034
    assert encoder(torch.zeros(2, 1, 28, 28)).shape == (2, 512)


@pytest.mark.broker
def test_an_idle_agent_without_torch_is_measured_in_a_process_of_its_own(tmp_path):
    found = {row.name: row.value for row in device.idle_rows(tmp_path, 1)}
    assert 20 < found["idle agent"] < 100
    assert found["idle agent, its own pages"] <= found["idle agent"]
    assert 0.05 < found["CPU until ready"] < 10


@pytest.fixture
def made_up_features(tmp_path):
    """Files of 40 features of size 8 in 3 classes, to fit on and to test on."""
    rng = np.random.default_rng(0)
    labels, means = np.arange(80) % 3, 3 * rng.standard_normal((3, 8), np.float32)
    points = means[labels] + rng.standard_normal((80, 8), np.float32)
    classifier = {"weight": means, "bias": np.zeros(3, np.float32)}
    paths = (tmp_path / "fit", tmp_path / "test")
    for path, part in zip(paths, (slice(40), slice(40, None)), strict=True):
        features.Features(points[part], labels[part], classifier).write(path)
    return paths


def test_a_head_is_fitted_in_a_process_of_its_own_beside_its_budgets(made_up_features, tmp_path):
    seconds, accuracy, memory = device.head_rows("lr", made_up_features, tmp_path)
    assert (seconds.name, seconds.unit, seconds.budget) == ("LR head, 600 x 512 x 10, CPU", "s", 0.12)
    assert 0.0001 < seconds.value < 5
    assert accuracy.value > 0.9
    assert (memory.name, memory.unit, memory.budget) == ("LR head, 600 x 512 x 10, the process", "MB", 60.0)
    assert 30 < memory.value < 100


def test_scikit_learn_is_measured_on_the_same_features(made_up_features, tmp_path):
    rows = {row.name: row for row in device.beside_scikit_learn(made_up_features, tmp_path)}
    assert rows["LR by scikit-learn, accuracy"].value > 0.9
    assert rows["LR by scikit-learn, the process"].value > 60
    assert rows["LR head, accuracy below that"].budget == 0.005


@pytest.mark.parametrize("name", sorted(device.HEADS))
def test_every_head_of_the_benchmark_is_fitted_with_its_own_defaults(name, made_up_features):
    found = sample.fit(name, *map(str, made_up_features))
    assert found["seconds"] > 0
    assert found.get("epochs") == (50 if name in {"dualfed", "fedpick"} else None)


def test_features_of_the_benchmark_are_computed_once_and_by_a_trained_encoder(tmp_path, monkeypatch):
    digits = data.load("digits:optdigits?n=300", w1.task().input, w1.task().class_names)
    asked = []
    monkeypatch.setattr(features, "_samples", lambda: asked.append(1) or (digits, digits))
    monkeypatch.setattr(features, "FIT", 200)
    with contextlib.ExitStack() as stack:
        stack.callback(models.registry._extra.pop, w1.ENCODER, None)
        fit, test = map(features.Features.read, features.real_features(tmp_path))
        features.real_features(tmp_path)
    assert asked == [1]
    assert (fit.features.shape, test.features.shape) == ((200, 512), (100, 512))
    assert fit.labels.tolist() + test.labels.tolist() == digits.labels.tolist()
    told = (test.features @ test.classifier["weight"].T + test.classifier["bias"]).argmax(axis=1)
    assert np.mean(told == test.labels) > 0.2, "better than one class in ten: it was trained"


def test_the_benchmarks_method_is_not_among_those_that_people_see():
    assert noop.NAME not in methods.names()


def test_plain_tcp_moves_every_byte_both_ways(tmp_path):
    down, up = tcp.seconds(2, 300_000, tmp_path)
    assert down > 0
    assert up > 0


@pytest.mark.broker
def test_transport_is_measured_in_both_directions(tmp_path):
    found = transport.measure(1, 200_000, ["amqtt"], tmp_path, repeats=1)
    assert [(leg["broker"], leg["direction"]) for leg in found["legs"]] == [("amqtt", "broadcast"), ("amqtt", "upload")]
    for leg in found["legs"]:
        assert leg["mb_per_s"] > 0
        assert leg["of_tcp"] == pytest.approx(leg["mb_per_s"] / found["tcp_mb_per_s"][leg["direction"]], rel=0.01)
        assert set(leg["cpu_s"]) == set(leg["peak_mb"]) == {"broker", "coordinator", "agents"}
        assert all(10 < size < 1000 for size in leg["peak_mb"].values())
    json.dumps(found)


def test_ratios_are_medians_of_pairs_and_not_of_all():
    """Load that falls on one pair falls on both: 2 / 1, 30 / 20 and 3 / 2 have the median 1.5."""
    turns = simulate.Turns(
        "fedavg",
        ours=((2, 4.4), (30, 4), (3, 4)),
        bare=((1, 4), (20, 4), (2, 4)),
        keeping=((1, 3), (10, 3), (2, 3)),
        evaluated=((2, 4.84), (30, 5), (3, 4)),
    )
    found = {row.name: row for row in turns.rows()}
    assert found["fedavg: round over bare loop"].value == 1.5
    assert found["fedavg: round over bare loop"].is_met is False
    assert found["fedavg: round over bare loop, CPU of all processes"].value == 1.0
    assert found["fedavg: round over bare loop that keeps freed memory, too"].value == 2.0
    assert found["fedavg: CPU of a round with evaluation over one without"].value == pytest.approx(1.1)
    seconds = {"ours": [2, 30, 3], "bare": [1, 20, 2], "keeping": [1, 10, 2], "evaluated": [2, 30, 3]}
    assert turns.seconds() == seconds


def test_the_bare_loop_does_the_work_of_its_method(monkeypatch):
    """30 samples in batches of 20 are two steps: five epochs of all weights; FedPAC: one of the head, five without."""
    monkeypatch.setitem(w1.PARAMS, "batch_size", 20)
    steps, step = [], torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self: (steps.append(len(self.param_groups[0]["params"])), step(self))
    )
    torch.manual_seed(0)
    inputs, labels = torch.randn(30, 1, 28, 28), torch.arange(30) % 10
    bare_rounds.fedavg(bare_rounds.fresh_model(), inputs, labels)
    assert steps == [8] * 10
    steps.clear()
    bare_rounds._fedpac(bare_rounds.fresh_model(), inputs, labels)
    assert steps == [2] * 2 + [6] * 10
    means = bare_rounds._means(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([4, 4, 9]))
    assert means[:, 0].tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 7]


def test_simulated_rounds_and_bare_ones_are_measured_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(w1, "has_fashion", lambda: False)
    size = simulate.Size(
        clients=2, samples=20, rounds=1, workers=1, many=0, methods=("fedavg",), has_evaluation=False
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(models.registry._extra.pop, w1.ENCODER, None)
        found = simulate.report(size, tmp_path)
    assert [len(found["seconds"]["fedavg"][kind]) for kind in ("ours", "bare", "keeping", "evaluated")] == [1, 1, 1, 0]
    assert [row.unit for row in found["rows"]] == ["s", "s", "x", "x", "x"]
    assert all(row.value > 0 for row in found["rows"])
    assert found["workers"] == 1


def test_memory_of_few_clients_and_of_many_is_that_of_as_many_updates(tmp_path, monkeypatch):
    """8 clients in 2 rounds send as many updates as 4 in 4; each simulation has a process of its own."""
    asked, most = [], {4: 1000.0, 8: 1050.0}
    monkeypatch.setattr(
        memory, "_in_a_process", lambda folder, clients, *rest: (asked.append((clients, *rest)), most[clients])[1]
    )
    rows = memory.memory_rows(8, 3, tmp_path / "memory")
    assert asked == [(4, 4, 3), (8, 2, 3)]
    assert [(row.value, row.unit, row.is_met) for row in rows] == [
        (1000, "MB", None),
        (1050, "MB", None),
        (1.05, "x", True),
    ]
    assert memory.proportional_mb(os.getpid()) > 50
    with pytest.raises(OSError, match="999999999"):
        memory.proportional_mb(999_999_999)


def test_memory_of_a_simulation_is_that_of_all_its_processes(tmp_path):
    with_one_worker = memory._in_a_process(tmp_path / "one", 1, 1, 1)
    assert 400 < with_one_worker < 3000


def test_stacked_rounds_are_measured_against_a_loop_on_the_same_device(tmp_path, monkeypatch):
    """The CPU has no target; a GPU's is a fifth of the loop's time: of 1 / 4 and 3 / 6 the median is 0.375."""
    turns = stacked.Against(7, (1.0, 3.0), (4.0, 6.0), {})
    rates = [(row.name, row.value, row.is_met) for row in turns.rows(on_gpu=True)]
    assert rates == [
        ("7 clients: rounds a second, engine stacked", 0.5, None),
        ("7 clients: rounds a second, one client after another", 0.2, None),
        ("7 clients: round over that loop", 0.375, False),
    ]
    monkeypatch.setattr(w1, "has_fashion", lambda: False)
    with contextlib.ExitStack() as stack:
        stack.callback(models.registry._extra.pop, w1.ENCODER, None)
        found = stacked.report(simulate.Size(clients=1, samples=20, rounds=1), tmp_path, "cpu")
    assert found["device"] == "cpu"
    assert (found["engine"]["1"]["jobs"], found["engine"]["1"]["of"]) == (0, 2), "there is nobody beside it"
    assert found["engine"]["5"]["of"] == 10
    assert set(found["engine"]["5"]["seconds_of_a_step"]) == {"one by one", "grouped", "unfolded"}
    assert [row.budget for row in found["rows"]] == [None] * 6
    assert all(row.value > 0 for row in found["rows"])


@pytest.mark.parametrize("command", ["transport", "round", "device", "simulate"])
def test_every_benchmark_shows_an_example(command):
    shown = CliRunner().invoke(app, ["bench", command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: headwater bench {command}" in " ".join(shown.stdout.split())


def test_precisions_and_layouts_are_measured_in_turns(monkeypatch):
    monkeypatch.setattr(precision, "NETWORKS", {"small_cnn": (1, 8)})
    monkeypatch.setattr(precision, "SAMPLES", 60)
    calls, autocast = [], torch.autocast

    def watched(*words, **how):
        calls.append(how["enabled"])
        return autocast(*words, **how)

    monkeypatch.setattr(torch, "autocast", watched)
    threads = torch.get_num_threads()
    try:
        found = precision.report(2, "cpu", 1)
    finally:
        torch.set_num_threads(threads)
    assert [row.unit for row in found["rows"]] == ["s", "x", "x"]
    assert all(row.value > 0 for row in found["rows"])
    assert calls == [False, False, True, True, False, False] * 3, "two batches of each variant, once to warm up"
    assert (found["device"], found["threads"]) == ("cpu", 1)

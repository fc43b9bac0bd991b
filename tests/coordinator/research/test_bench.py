"""Benchmarks measure the right thing: shapes of results, arithmetic of figures, who pays. Never how fast it is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from coordinator.cli import command_tree
from coordinator.journal.entries import fact_of
from coordinator.journal.sqlite import SqliteJournal
from coordinator.research.bench import device, device_child, measuring, rounds, simulate, workloads
from coordinator.research.bench.measuring import SimulationSize, caveat, machine, quantile, rounded, size_bytes
from edge_agent import data, methods, models
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.errors import MeasuringFailed, UsageError
from edge_agent.core.task import Task
from edge_agent.training.parts import to_arrays
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.up import Report
from edge_agent.wire.tensors import decode

TASK = Task(class_names=("a", "b"))


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What the benchmark registers in this process is forgotten after each test."""
    for registry in (methods.registry, models.registry):
        monkeypatch.setattr(registry, "_extra", dict(registry._extra))


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
    with pytest.raises(UsageError, match="broker = 'nats': Input should be 'all', 'mosquitto' or 'amqtt'"):
        command_tree(["bench"])(["bench", "round", "--broker", "nats"], standalone_mode=False)


@pytest.mark.parametrize(
    "requested, path, names",
    [
        ("all", None, ["amqtt"]),
        ("all", "/usr/sbin/mosquitto", ["mosquitto", "amqtt"]),
        ("mosquitto", None, ["mosquitto"]),  # starting it says how to install it
        ("amqtt", "/usr/sbin/mosquitto", ["amqtt"]),
    ],
)
def test_the_requested_broker_is_measured_or_all_that_are_installed(monkeypatch, requested, path, names):
    monkeypatch.setattr(rounds, "find_mosquitto", lambda: path)
    assert rounds.brokers(requested) == names


def test_tail_of_values():
    """Nine of ten values of 1..10 do not exceed 9."""
    assert quantile([float(v) for v in (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)], 0.9) == 9.0
    assert np.isnan(quantile([], 0.9))


@pytest.mark.parametrize(
    "value, shown", [(0.12345678, 0.1235), (12345.678, 12346.0), (0.0, 0.0), (-0.00123456, -0.001235), (99.99, 99.99)]
)
def test_figures_keep_four_digits_that_count(value, shown):
    assert rounded(value) == shown


def test_the_caveat_names_processor_cores_and_versions():
    here = machine()
    text = caveat(here, "No network.")
    assert here["processor"] in text
    assert f"{here['cores']} cores" in text
    assert f"torch {torch.__version__}" in text
    assert "No network." in text


def test_usage_agrees_with_what_the_process_knows_of_itself():
    used = measuring.usage(os.getpid())
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    assert used.cpu_s == pytest.approx(seconds, abs=0.5)
    assert used.peak_mb <= own.ru_maxrss * 1024 / 1e6 * 1.02
    assert 0 < used.own_mb < used.rss_mb <= used.peak_mb * 1.02


def test_the_peak_is_forgotten_on_request_and_seen_again():
    """150 MB come and go: the peak falls by most of them once it is forgotten."""
    block = np.ones(150_000_000, np.uint8)
    high = measuring.usage(os.getpid()).peak_mb
    del block
    measuring.forget_peak(os.getpid())
    low = measuring.usage(os.getpid()).peak_mb
    assert low < high - 100


def test_a_process_that_is_gone_is_named():
    with pytest.raises(MeasuringFailed, match="999999999"):
        measuring.usage(999_999_999)


def test_a_measured_process_that_ends_tells_its_last_words(tmp_path):
    with measuring.module("broken", ["hub"], tmp_path, module=rounds.PROGRAMS) as measured:
        with pytest.raises(MeasuringFailed, match=r"(?s)broken ended: exit code 2.*invalid choice: 'hub'"):
            measured.answer()


def test_waiting_ends_with_an_error_that_says_for_what(tmp_path):
    with pytest.raises(MeasuringFailed, match="the moon: not within 0 s"):
        measuring.wait_for(lambda: False, [], what="the moon", limit_s=0.0, every_s=0.001)


@pytest.mark.slow
def test_rounds_of_processes_are_measured(tmp_path):
    found = rounds.measure(measuring.RoundPlan(agents=1, payload="5000", rounds=2), "amqtt", tmp_path)
    assert len(found.seconds) == 1
    assert found.seconds[0] > 0


def test_rounds_are_timed_from_the_end_of_one_to_the_end_of_the_next(tmp_path):
    """Opened at 0; closed at 0.5, 0.7 and 1.5 s: rounds of 0.5, 0.2 and 0.8 s, whatever is journalled between."""
    times = iter([0.0, 0.0, 0.1, 0.5, 0.5, 0.7, 0.7, 1.5])
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with SqliteJournal(tmp_path / "journal.db", now=lambda: start + timedelta(seconds=next(times))) as journal:
        run = journal.request_run(fact_of("run_requested", {}))
        for number in (1, 2, 3):
            journal.append(fact_of("round_opened", {"attempt": 1, "cohort": ["a"]}), run=run, round=number)
            if number == 1:
                journal.append(fact_of("update_refused", {"reason": "x"}), run=run, round=1, agent="a")
            journal.append(fact_of("round_closed", {"clients": 1}), run=run, round=number, digest="0" * 64)
        assert rounds.round_seconds(journal, run) == [0.5, 0.2, 0.8]


def test_a_failed_run_gives_its_reason_and_no_figures(tmp_path):
    with SqliteJournal(tmp_path / "journal.db") as journal:
        run = journal.request_run(fact_of("run_requested", {}))
        journal.append(fact_of("run_failed", {"reason": "no quorum"}), run=run)
        with pytest.raises(MeasuringFailed, match="no quorum"):
            rounds.round_seconds(journal, run)


def test_the_idle_method_has_a_model_of_the_payload_that_was_asked_for():
    method = workloads.NoopMethod(workloads.NoopParams(payload_bytes=80_000))
    model = method.build(TASK)
    arrays = to_arrays(model, method.shared_names(model))
    assert len(arrays) == workloads.NOOP_ARRAYS
    assert sum(array.nbytes for array in arrays.values()) == 80_000
    sent = method.local_update(SimpleNamespace(id="a"), arrays)
    assert sent.keys() == arrays.keys()
    assert all(np.allclose(sent[name] - arrays[name], 81, atol=1e-4) for name in arrays)


@pytest.fixture
def tasks(tmp_path):
    config = AgentConfig(id="a", state=tmp_path, data=DataConfig(source="npz:none"))
    return workloads.NoopTasks(config, "train")


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
    assert isinstance(tasks.do(job("personalize"), {}), Report)
    assert tasks.outbox.get() is None


def test_workload_w1_has_the_network_of_its_description():
    """conv 1x16x25+16, conv 16x32x25+32, 512x512+512 and 512x10+10 weights: 281,034 with the head."""
    workloads.register()
    encoder = models.create(workloads.w1_task())
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
    labels = np.arange(80) % 3
    means = 3 * rng.standard_normal((3, 8), np.float32)
    points = means[labels] + rng.standard_normal((80, 8), np.float32)
    classifier = {"weight": means, "bias": np.zeros(3, np.float32)}
    paths = (tmp_path / "fit", tmp_path / "test")
    for path, part in zip(paths, (slice(40), slice(40, None)), strict=True):
        device.Features(points[part], labels[part], classifier).write(path)
    return paths


def test_a_head_is_fitted_in_a_process_of_its_own(made_up_features, tmp_path):
    seconds, accuracy, memory = device.head_rows("lr", made_up_features, tmp_path)
    assert (seconds.name, seconds.unit) == ("LR head, 600 x 512 x 10, CPU", "s")
    assert 0.0001 < seconds.value < 5
    assert accuracy.value > 0.9
    assert (memory.name, memory.unit) == ("LR head, 600 x 512 x 10, the process", "MB")
    assert 30 < memory.value < 100


@pytest.mark.parametrize("name", sorted(device.HEADS))
def test_every_head_of_the_benchmark_is_fitted_with_its_own_defaults(name, made_up_features):
    found = device_child.fit(name, *map(str, made_up_features))
    assert found["seconds"] > 0
    assert found.get("epochs") == (50 if name in {"dualfed", "fedpick"} else None)


def test_features_of_the_benchmark_are_computed_once_and_by_a_trained_encoder(tmp_path, monkeypatch):
    digits = data.load("digits:optdigits?n=300", workloads.w1_task().input, workloads.w1_task().class_names)
    asked = []
    monkeypatch.setattr(device, "_samples", lambda: asked.append(1) or (digits, digits))
    monkeypatch.setattr(device, "FIT", 200)
    fit, test = map(device.Features.read, device.real_features(tmp_path))
    device.real_features(tmp_path)
    assert asked == [1]
    assert (fit.features.shape, test.features.shape) == ((200, 512), (100, 512))
    assert fit.labels.tolist() + test.labels.tolist() == digits.labels.tolist()
    told = (test.features @ test.classifier["weight"].T + test.classifier["bias"]).argmax(axis=1)
    assert np.mean(told == test.labels) > 0.2, "better than one class in ten: it was trained"


def test_the_benchmarks_method_is_not_among_those_that_people_see():
    code = "from edge_agent import methods; print(*methods.names())"  # not here, where a test may have registered it
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "fedavg" in names
    assert workloads.NOOP not in names


@pytest.mark.parametrize("command", ["round", "device", "simulate"])
def test_every_benchmark_shows_an_example(command):
    shown = CliRunner().invoke(command_tree(["bench"]), ["bench", command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: headwater bench {command}" in " ".join(shown.stdout.split())


def test_an_encoder_is_measured_with_all_modules_of_an_agent(tmp_path, monkeypatch):
    """The modules are those of an agent that installs a bundle; the encoder itself stands in for one of a bundle."""
    opened = SimpleNamespace(input_shape=(1, 2, 2), features=lambda image: image.sum())
    monkeypatch.setattr("edge_agent.personal.encoder.Encoder.open", lambda *_: opened)
    monkeypatch.setattr("edge_agent.bundle.unpacked.open_folder", lambda _: None)
    found = device_child.encoder(str(tmp_path), "int8")
    assert found.keys() == {"load_s", "seconds"}


@pytest.mark.slow
def test_simulated_rounds_are_measured_without_and_with_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "has_fashion", lambda: False)
    size = SimulationSize(clients=2, samples=20, rounds=1, workers=1, method="fedavg")
    found = simulate.report(size, tmp_path)
    assert {kind: len(seconds) for kind, seconds in found["seconds"]["fedavg"].items()} == {"plain": 1, "evaluated": 1}
    assert [row.unit for row in found["rows"]] == ["s", "1/s", "s", "x", "MB"]
    assert all(row.value > 0 for row in found["rows"])
    assert (found["workers"], found["device"]) == (1, "cpu")


def test_stacked_rounds_are_measured_on_the_device_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "has_fashion", lambda: False)
    size = SimulationSize(clients=2, samples=20, rounds=1, method="fedavg", engine="stacked", device="cpu")
    found = simulate.report(size, tmp_path)
    assert found["engine"]["fedavg"]["of"] == 4, "two clients in a first round and in one that counts"
    assert found["device"] == "cpu"


def test_memory_of_a_process_counts_its_part_of_shared_pages():
    assert simulate.proportional_mb(os.getpid()) > 50
    with pytest.raises(OSError, match="999999999"):
        simulate.proportional_mb(999_999_999)

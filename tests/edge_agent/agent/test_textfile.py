"""An agent's figures for node_exporter's textfile collector, read by Prometheus' own client library."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from dataclasses import replace

import pytest
from federation_harness import Clock, Federation
from prometheus_client.parser import text_string_to_metric_families

from edge_agent import __version__
from edge_agent.agent.app import _serve
from edge_agent.agent.textfile import Figures, TextFile, text, write
from edge_agent.core.config import AgentConfig, DataConfig, MetricsConfig, PrivacyConfig
from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.storage import write_json
from edge_agent.wire.messages.up import Report

PLAIN = Figures(
    tier="head",
    bundle_id="0123456789abcdef",
    condition="fault",
    is_connected=True,
    is_working=False,
    samples=40,
    resident_bytes=41_000_000,
    disk_free_bytes=5_000_000_000,
    accuracies={"personal": 0.75, "global": None},
    updates={"accepted": 3},
    faults={"data": 2},
)


def parsed(written):
    found = {}
    for family in text_string_to_metric_families(written):
        assert family.documentation
        assert family.name.startswith("headwater_agent_")
        for sample in family.samples:
            found[(sample.name.removeprefix("headwater_agent_"), *sorted(sample.labels.items()))] = sample.value
    return found


def test_every_figure_is_read_back():
    found = parsed(text(PLAIN))
    assert found["info", ("bundle", "0123456789ab"), ("tier", "head"), ("version", __version__)] == 1
    assert (found["connected",], found["working",], found["samples",]) == (1, 0, 40)
    assert {key[1][1]: value for key, value in found.items() if key[0] == "condition"} == {
        "ok": 0,
        "fault": 1,
        "stalled": 0,
    }
    assert (found["resident_memory_bytes",], found["disk_free_bytes",]) == (41e6, 5e9)
    assert found["accuracy_ratio", ("scope", "personal")] == 0.75
    assert ("accuracy_ratio", ("scope", "global")) not in found, "what is not known has no value"
    assert found["updates_total", ("result", "accepted")] == 3
    assert found["faults_total", ("code", "data")] == 2
    assert found["faults_total", ("code", "disk")] == 0


def test_labels_are_escaped():
    hostile = 'a"}\n\\evil'
    found = parsed(text(Figures(**{**vars(PLAIN), "bundle_id": hostile})))
    assert ("info", ("bundle", hostile), ("tier", "head"), ("version", __version__)) in found


@pytest.mark.skipif(not hasattr(os, "umask"), reason="needs mode bits")
def test_the_file_is_for_everybody_to_read_whatever_the_mask(tmp_path):
    before = os.umask(0o077)
    try:
        write(tmp_path / "headwater.prom", PLAIN)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "headwater.prom").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["headwater.prom"]


def config(tmp_path, **more):
    data = DataConfig(source="digits:optdigits")
    return AgentConfig(id="a0", data=data, metrics=MetricsConfig(textfile=tmp_path / "x" / "headwater.prom"), **more)


def test_it_is_written_as_often_as_heartbeats(tmp_path):
    clock = Clock()
    asked = []
    textfile = TextFile(config(tmp_path, heartbeat_s=15), clock)
    for _ in range(31):
        textfile.tick(lambda: asked.append(clock()) or PLAIN)
        clock.now += 1
    assert asked == [1000.0, 1015.0, 1030.0]
    TextFile(AgentConfig(id="a0", data=DataConfig(source="digits:optdigits")), clock).tick(lambda: pytest.fail("asked"))


def test_the_file_says_when_it_was_written_and_at_the_end_that_nobody_is_connected(tmp_path):
    clock = Clock()
    wall = Clock()
    wall.now = 1_900_000_000.5
    textfile = TextFile(config(tmp_path), clock, wall)
    path = tmp_path / "x" / "headwater.prom"
    working = replace(PLAIN, is_working=True)
    textfile.tick(lambda: working)
    found = parsed(path.read_text())
    assert (found["written_timestamp_seconds",], found["connected",], found["working",]) == (1_900_000_000.5, 1, 1)
    wall.now += 7
    textfile.end(lambda: working)  # not due: written all the same
    found = parsed(path.read_text())
    assert (found["written_timestamp_seconds",], found["connected",], found["working",]) == (1_900_000_007.5, 0, 0)
    TextFile(AgentConfig(id="a0", data=DataConfig(source="digits:optdigits")), clock).end(lambda: pytest.fail("asked"))


@pytest.mark.parametrize("failure", [None, RuntimeError("broken")])
def test_an_agent_that_ends_leaves_no_healthy_file(tmp_path, failure):
    with Federation(tmp_path, agents=1) as fed:
        fed.settle()
        assert fed.agents["a0"].welcomed
        agent = fed.agents["a0"]
        stop = threading.Event()
        path = tmp_path / "x" / "headwater.prom"
        agent.config = agent.config.model_copy(update={"metrics": MetricsConfig(textfile=path)})
        during = []

        def step(limit_s):
            if path.exists():
                during.append(parsed(path.read_text())["connected",])
                stop.set()
                if failure is not None:
                    raise failure

        agent.step = step
        with contextlib.nullcontext() if failure is None else pytest.raises(RuntimeError, match="broken"):
            _serve(agent, stop)
        assert (during, parsed(path.read_text())["connected",]) == ([1], 0)


def test_a_folder_that_cannot_be_written_costs_one_line_and_no_work(tmp_path, caplog):
    (tmp_path / "x").write_text("a file where the folder should be")
    clock = Clock()
    textfile = TextFile(config(tmp_path), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            textfile.tick(lambda: PLAIN)
            clock.now += 100
        assert len(caplog.records) == 1
        assert "metrics_not_written" in caplog.text
        (tmp_path / "x").unlink()
        textfile.tick(lambda: PLAIN)
    assert (tmp_path / "x" / "headwater.prom").exists()


def test_only_files_that_the_collector_reads_are_accepted():
    with pytest.raises(ConfigError, match=r"reads only \.prom files"):
        from edge_agent.core.config import parse

        parse(MetricsConfig, {"textfile": "metrics.txt"}, where="agent.toml")


def test_figures_of_an_agent_in_a_federation(tmp_path):
    with Federation(tmp_path) as fed:
        fed.request(rounds=2)
        fed.finish()
        agent = fed.agents["a0"]
        agent.condition.note("data", DataError("no samples"))
        found = parsed(text(agent.figures()))
    assert found["updates_total", ("result", "accepted")] == 2
    assert found["accuracy_ratio", ("scope", "personal")] == 0.5, "what the duties report after the last round"
    assert found["faults_total", ("code", "data")] == 1
    assert found["connected",] == 1
    assert found["resident_memory_bytes",] > 1e6


def test_accuracies_before_the_first_report_are_those_of_the_saved_head_unless_withheld(tmp_path):
    with Federation(tmp_path, agents=1) as fed:
        fed.step()
        agent = fed.agents["a0"]
        saved = {"acc.personal": 0.9, "acc.local": 0.8, "better_alone": False}
        write_json(agent.config.state / "head" / "head.json", {"metrics": saved})
        assert agent.figures().accuracies == {"personal": 0.9, "global": None, "local": 0.8}
        agent.config = agent.config.model_copy(update={"privacy": PrivacyConfig(metrics=("acc.personal",))})
        assert agent.figures().accuracies == {"personal": 0.9, "global": None, "local": None}
        agent.jobs.last_report = Report(run="r" * 32, samples=1, acc_global=0.25, better_alone=True)
        assert agent.figures().accuracies == {"personal": None, "global": 0.25, "local": None}
        assert agent.figures().better_alone

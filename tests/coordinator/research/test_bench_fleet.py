"""``headwater bench fleet``: its agents speak the protocol to the end, and its figures are counted right."""

from __future__ import annotations

import json
import logging
import struct

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.broker import find_mosquitto
from coordinator.cli import command_tree
from coordinator.config import CoordinatorConfig, load_config
from coordinator.research.bench import fleet, fleet_mqtt
from coordinator.research.bench.measuring import FleetPlan
from coordinator.research.bench.workloads import number_of
from coordinator.state.store import StateFolder
from edge_agent import methods, models
from edge_agent.wire.tensors import decode

BYTES = 200_000
"""Of the model: four large frames."""


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    for registry in (methods.registry, models.registry):
        monkeypatch.setattr(registry, "_extra", dict(registry._extra))


def test_every_update_of_a_fleet_in_memory_is_in_the_model(tmp_path):
    """Two rounds of a mean of (model + number of the agent): the model moves by twice the mean of the numbers."""
    plan = FleetPlan(agents=7, payload=str(BYTES), rounds=2, idle_s=30)
    figures = fleet.measure_in_memory(plan, tmp_path)
    with StateFolder(tmp_path / "coordinator").look() as state:
        (run,) = state.journal.runs()
        started, *closed = state.journal.entries(run, ("run_started", "round_closed"))
        last = decode(state.blobs.read(closed[-1].digest))
    assert figures.updates == 14
    assert len(figures.seconds) == len(closed) == 2
    moved = 2 * np.mean([number_of(f"agent-{number}") for number in range(7)])
    assert all(abs(array - moved).max() < 1.01 for array in last.values())  # it began between 0 and 1
    assert started.digest != closed[-1].digest


def test_messages_and_bytes_of_a_fleet_are_counted(tmp_path):
    """Five agents: five hellos; three downloads; two uploads of at least four frames each, small ones at first."""
    plan = FleetPlan(agents=5, payload=str(BYTES), rounds=2, idle_s=30)
    figures = fleet.measure_in_memory(plan, tmp_path)
    counts = {kind: count for kind, (count, _) in figures.cpu_us.items()}
    assert (counts["hello"], counts["have"], counts["report"]) == (5, 15, 5)
    assert counts["last chunk"] == 5 * 2
    assert 5 * 2 * 3 <= counts["chunk"] <= 5 * 2 * 12
    assert 10 <= counts["heartbeat"] <= 12  # every 15 s, of which 30 s passed, and while the rounds took time
    rows = {row.name: row.value for row in figures.rows()}
    assert 1.0 < rows["received by agents / needed"] < 1.1  # frames and control messages beside the model
    assert 1.0 < rows["models published / needed"] < 1.01
    assert 1.0 < rows["other messages for each agent and round"] < 4.0
    assert rows["CPU for each update"] > 0


def test_agents_beyond_the_cohort_only_send_heartbeats(tmp_path):
    figures = fleet.measure_in_memory(FleetPlan(agents=6, cohort=2, payload=str(BYTES), rounds=1, idle_s=0), tmp_path)
    assert figures.updates == 2


def test_a_coordinator_over_a_broker_has_the_same_settings_as_one_in_memory(tmp_path):
    settings = fleet.settings(FleetPlan(agents=6, cohort=2))
    path = tmp_path / "coordinator.toml"
    fleet.write_config(path, {**settings, "state": "here", "broker": {"url": "mqtt://127.0.0.1:1"}})
    written = load_config(path)
    assert (written.state, written.broker.url) == (tmp_path / "here", "mqtt://127.0.0.1:1")
    own = CoordinatorConfig.model_validate({**settings, "state": written.state, "broker": written.broker})
    of_the_place = {"export": {"folder"}}  # in memory there is no file that it could be beside
    assert written.model_dump(exclude=of_the_place) == own.model_dump(exclude=of_the_place)
    assert (own.cohort.max_agents, own.export.after_run) == (2, False)


def packet(kind, body):
    return fleet_mqtt.packet(kind, body)


@pytest.mark.parametrize(
    "length, encoded", [(0, "00"), (127, "7f"), (128, "8001"), (16_383, "ff7f"), (16_384, "808001")]
)
def test_lengths_of_packets_are_those_of_the_standard(length, encoded):
    """The examples of MQTT 3.1.1, table 2.4."""
    assert packet(3, b"x" * length)[1 : -length or None].hex() == encoded


def test_packets_are_taken_apart_however_they_arrive():
    sent = packet(3, b"a" * 200) + packet(4, struct.pack(">H", 7)) + packet(3, b"")
    received = bytearray()
    result = []
    for position in range(len(sent)):
        received += sent[position : position + 1]
        result += list(fleet_mqtt.packets(received))
    assert [(kind, len(body)) for kind, _, body in result] == [(3, 200), (4, 2), (3, 0)]
    assert not received


@pytest.mark.slow
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_a_fleet_over_mosquitto_delivers_every_update():
    arguments = ["bench", "fleet", "--agents", "20", "--payload", str(BYTES), "--transport", "mosquitto"]
    result = CliRunner().invoke(command_tree(["bench"]), [*arguments, "--idle-s", "1", "--json"])
    logging.getLogger("coordinator").setLevel(logging.NOTSET)
    assert result.exit_code == 0, result.output
    figures = {row["name"]: row["value"] for row in json.loads(result.stdout)["figures"]}
    assert figures["updates aggregated"] == 40

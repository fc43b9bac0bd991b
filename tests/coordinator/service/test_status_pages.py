"""The status of a large fleet: a file of bounded size, and pages of agents, those with a problem first."""

from __future__ import annotations

import json
import re

import pytest
from federation_harness import Federation
from typer.testing import CliRunner

from coordinator.cli import command_tree
from coordinator.config import CoordinatorConfig
from coordinator.state.status_file import MOST_LISTED, read_agents
from edge_agent.wire.messages import codec, up

SIZE = 450
FAILING = ("m0391", "m0440")
AWAY = ("m0002", "m0333", "m0444")


def hello(fed, name, boot="b1"):
    message = up.Hello(software="x", tier="train", samples=1, boot=boot, connection=1)
    fed.coordinator.handle(name, "up", codec.encode(message))


@pytest.fixture
def fed(tmp_path):
    """450 agents, two of which have failed and three of which have left."""
    with Federation(tmp_path, agents=()) as federation:
        federation.settle()
        for number in range(SIZE):
            hello(federation, f"m{number:04d}")
        for name in FAILING:
            fault = up.Fault(error="DataError", message="no samples", remedy="add some", boot="b1")
            federation.coordinator.handle(name, "up", codec.encode(fault))
        for name in AWAY:
            federation.coordinator.handle(name, "up", codec.encode(up.Bye(boot="b1")))
        federation.wait(40)
        yield federation


def printed(fed, *arguments):
    command = ["status", "--state", str(fed.config.state), *arguments]
    result = CliRunner().invoke(command_tree(["status"]), command)
    assert result.exit_code == 0, result.output
    return result.stdout


def ids(fed, *arguments):
    return [agent["id"] for agent in json.loads(printed(fed, *arguments, "--json"))["agents"]]


def test_the_status_file_lists_no_more_agents_however_many_there_are(fed):
    path = fed.config.state / "status.json"
    size = path.stat().st_size
    listed = json.loads(path.read_bytes())["agents"]
    assert len(listed) == MOST_LISTED
    assert {*FAILING, *AWAY} <= {agent["id"] for agent in listed}
    for number in range(SIZE, 4 * SIZE):
        hello(fed, f"m{number:04d}")
    fed.wait(2)
    assert json.loads(path.read_bytes())["fleet"] == {
        "agents": 4 * SIZE,
        "online": 4 * SIZE - 3,
        "fault": 2,
        "stalled": 0,
    }
    assert path.stat().st_size <= size + 4096


@pytest.mark.parametrize("size", [MOST_LISTED, MOST_LISTED + 3])
def test_hosted_clients_that_are_away_are_listed_beside_all_others(tmp_path, size):
    """Three of them: as many as the agents that the status leaves out."""
    away = ["h0", "h1", "h2"]
    hosted = [{"id": name, "data": {"source": "images:digits"}} for name in away]
    fed = Federation(tmp_path, agents=())
    fed.config = CoordinatorConfig.model_validate({**fed.config.model_dump(), "hosted": hosted})
    with fed:
        fed.settle()
        for number in range(size):
            hello(fed, f"m{number:04d}")
        fed.wait(40)
        agents = [row.agent for row in read_agents(fed.config.state)]
        assert [agent.id for agent in agents] == [*(f"m{number:04d}" for number in range(size)), *away]
        assert [agent.is_present for agent in agents[-4:]] == [True, False, False, False]
        assert len(json.loads((fed.config.state / "status.json").read_bytes())["agents"]) == MOST_LISTED + len(away)


def test_an_open_round_of_a_large_cohort_is_counted_and_not_listed(tmp_path):
    with Federation(tmp_path, agents=(), cohort={"min_agents": SIZE}) as fed:
        fed.settle()
        for number in range(SIZE):
            hello(fed, f"m{number:04d}")
        fed.request(rounds=1)
        fed.until(lambda: fed.coordinator.collector.open_round)
        status = fed.coordinator.status()
        assert (status["run"]["cohort_size"], status["waiting"]["count"]) == (SIZE, SIZE)
        assert len(status["run"]["cohort"]) <= MOST_LISTED
        assert len(status["waiting"]["whom"]) <= MOST_LISTED


def test_a_page_shows_twenty_agents_and_problems_first(fed):
    out = printed(fed)
    assert len(re.findall(r"^m\d{4}", out, re.MULTILINE)) == 20 + len(FAILING)  # their notes follow the table
    assert "fleet: 450 agents, 447 online, 2 fault, 0 stalled; page 1 of 23 of 450 agents" in out
    assert ids(fed)[:6] == [*FAILING, *AWAY, "m0000"]


def test_pages_show_every_agent_once(fed):
    shown = [name for page in range(1, 6) for name in ids(fed, "--agents", "100", "--page", str(page))]
    assert sorted(shown) == [f"m{number:04d}" for number in range(SIZE)]
    assert not ids(fed, "--agents", "100", "--page", "6")
    assert len(ids(fed, "--agents", "0")) == SIZE


@pytest.mark.parametrize(
    "options, expected",
    [
        (("--only", "offline"), sorted(AWAY)),
        (("--only", "fault"), sorted(FAILING)),
        (("--only", "notes"), sorted(FAILING)),
        (("--only", "stalled"), []),
        (
            ("--find", "044"),
            ["m0044", "m0440", "m0441", "m0442", "m0443", "m0444", "m0445", "m0446", "m0447", "m0448", "m0449"],
        ),
        (("--find", "044", "--only", "offline"), ["m0444"]),
    ],
)
def test_agents_are_selected_by_condition_and_id(fed, options, expected):
    assert ids(fed, *options) == expected
    nobody = "none of 450 agents is chosen (--page, --only, --find)"
    assert (nobody in printed(fed, *options)) is not bool(expected), "and not that none has been heard"


def test_nobody_is_online_once_the_coordinator_has_ended(fed):
    assert "online" in printed(fed)
    fed.kill_coordinator()
    path = fed.config.state / "status.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"at": "2026-01-01T00:00:00+00:00"}))
    shown = printed(fed)
    assert "not running" in shown
    assert "unknown" in shown
    assert not re.search(r"mqtt +online", shown)
    result = CliRunner().invoke(
        command_tree(["agents"]), ["agents", "show", "m0001", "--state", str(path.parent), "--json"]
    )
    agent = json.loads(result.stdout)
    assert agent["state"] == "unknown"
    assert agent["last_seen_s"] > 86400, "it was heard before the status was written"

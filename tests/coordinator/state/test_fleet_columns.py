"""A column of the fleet's table is declared once: terminal, JSON and page follow."""

from __future__ import annotations

import contextlib
import json
from typing import get_args

import pytest
from web_site import FolderSite, agent_status

from coordinator.cli import main as headwater
from coordinator.cli.fleet import SortKey
from coordinator.state import fleet_columns
from coordinator.state.fleet_columns import COLUMNS, Column, Shape
from coordinator.web.fleet_table import SORTS
from edge_agent.core.locks import folder_lock

ADDED = Column(
    "sent",
    lambda row: int(row.bytes_up),
    Shape.NUMBER,
    ("traffic", "sent"),
    terminal="sent bytes",
    page="sent bytes",
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_columns, "COLUMNS", (*COLUMNS, ADDED))
    made = FolderSite(tmp_path / "state")
    made.run(1, ("porch",), end="run_finished")
    made.status([agent_status("porch", bytes_up=123456)])
    yield made
    made.close()


def test_devices_whose_inputs_have_changed_are_counted_on_terminal_and_page(site, capsys):
    agents = {"porch": 1.7e9, "hall": 0.0, "attic": None}
    site.status([agent_status(name, inputs_since=since) for name, since in agents.items()])
    text = "changed on 1 of 2 devices that tell it, first 2023-11-14 22:13 UTC"
    assert f"inputs: {text}" in printed(site, capsys)
    found = json.loads(printed(site, capsys, "--json"))
    assert found["inputs"] == text
    assert {agent["id"]: agent["inputs_since"] for agent in found["agents"]} == agents
    with site.client() as client:
        assert "Inputs: changed on 1 of 2 devices" in client.get("/").text


def printed(site, capsys, *words):
    with contextlib.suppress(SystemExit), folder_lock(site.path, "a coordinator"):
        headwater(["agents", *words, "--state", str(site.path)])
    return capsys.readouterr().out


def test_a_column_that_is_declared_once_is_in_the_table_of_the_terminal(site, capsys):
    head, _, row = printed(site, capsys).splitlines()[-3:]
    assert head.split()[-1] == row.split()[-1].replace("123456", "bytes")


def test_a_column_that_is_declared_once_is_in_json(site, capsys):
    (agent,) = json.loads(printed(site, capsys, "--json"))["agents"]
    assert agent["traffic"] == {"sent": 123456}


def test_a_column_that_is_declared_once_is_on_the_page(site):
    with site.client() as client:
        text = client.get("/").text
    assert "sent bytes" in text
    assert '<td class="n">123456</td>' in text


@pytest.mark.parametrize("shown", [{"terminal": "sent"}, {"option": "sent"}])
def test_a_column_of_the_terminal_without_its_keys_is_refused(shown):
    with pytest.raises(ValueError, match="column 'sent' is on the terminal"):
        Column("sent", lambda row: row.bytes_up, **shown)


def test_every_column_of_the_page_can_be_sorted_by():
    assert set(SORTS) == {column.name for column in fleet_columns.page_columns()}


def test_the_sort_options_of_the_command_are_those_of_the_columns():
    assert get_args(SortKey) == tuple(column.option for column in COLUMNS if column.option)

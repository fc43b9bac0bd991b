"""What a device tells of its inputs where its owner allows it: one number, counted over the fleet."""

from __future__ import annotations

import pytest
from release_site import ReleaseSite

from coordinator.state.fleet_rows import describe_inputs
from edge_agent.core.config import PrivacyConfig
from edge_agent.core.storage import write_json
from edge_agent.serving.announcement import announced
from edge_agent.serving.inputs_state import InputsRecord, InputsState, record_file

CHANGED_AT = 1_795_000_000.0
ALLOWED = PrivacyConfig(inputs_since=True)


@pytest.fixture
def site(tmp_path, capsys):
    with ReleaseSite(tmp_path, capsys, capture=True) as federation:
        yield federation


def note_inputs(site, name, state, since=0.0):
    """What the server of a device writes down."""
    file = record_file(site.folder / name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, InputsRecord(pair="p", state=state, since=since).model_dump(mode="json"))


def known(site):
    """Agent -> what the coordinator knows of its inputs."""
    return {member.id: member.inputs_since for member in site.coordinator.roster.members()}


def test_inputs_that_change_are_told_with_the_next_heartbeat_and_noted(site, capsys):
    with announced(site.folder / "porch", "http://127.0.0.1:1"):
        note_inputs(site, "porch", InputsState.AS_FITTED)
        site.device("porch", privacy=ALLOWED)
        site.wait(20)
        assert known(site) == {"porch": 0.0}
        note_inputs(site, "porch", InputsState.CHANGED, CHANGED_AT)
        site.wait(20)
        assert known(site) == {"porch": CHANGED_AT}
        (agent,) = site.coordinator.status()["agents"]
        note = "its inputs have changed since 2026-11-18 11:06 UTC: they are unlike what its head learned from"
        assert (agent["inputs_since"], agent["notes"]) == (CHANGED_AT, [note])
    site.wait(20)
    assert known(site) == {"porch": None}, "nobody answers there any more"


def test_without_the_owners_word_nothing_of_it_leaves(site):
    with announced(site.folder / "porch", "http://127.0.0.1:1"):
        note_inputs(site, "porch", InputsState.CHANGED, CHANGED_AT)
        site.device("porch")
        site.wait(20)
        assert known(site) == {"porch": None}
        assert not any(b"inputs_since" in sent for sent in [payload for _, payload in site.broker.captured])


def test_too_few_answers_tell_nothing(site):
    with announced(site.folder / "porch", "http://127.0.0.1:1"):
        note_inputs(site, "porch", InputsState.NOT_ENOUGH)
        site.device("porch", privacy=ALLOWED)
        site.wait(20)
        assert known(site) == {"porch": None}


@pytest.mark.parametrize(
    "since, said",
    [
        ([None, None], ""),
        ([None, 0.0, 0.0], "as fitted on all 2 devices that tell it"),
        (
            [0.0, CHANGED_AT + 60, CHANGED_AT, None],
            "changed on 2 of 3 devices that tell it, first 2026-11-18 11:06 UTC",
        ),
    ],
)
def test_the_fleet_counts_devices_whose_inputs_have_changed(since, said):
    assert describe_inputs(since) == said

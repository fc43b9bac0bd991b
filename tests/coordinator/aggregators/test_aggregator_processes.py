"""Aggregators as processes at a real broker: the same encoder with none, with two, and with one of them killed."""

from __future__ import annotations

import json

import pytest
from process_site import DIGITS, EVERYBODY, Site

from coordinator.state.status_file import read_status

AGENTS = ("a0", "a1", "a2", "a3")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A coordinator with two partitions, its two aggregators and four agents."""
    folder = tmp_path_factory.mktemp("aggregators")
    rules = f"{EVERYBODY}\n[aggregators]\npartitions = 2"
    with Site(folder, DIGITS, agents=AGENTS, rules=rules) as running:
        for number in (1, 2):
            aggregate(running, number)
        running.until(lambda: holders(running) == 2, "both aggregators serve")
        yield running


def aggregate(site, number):
    """Start the aggregator of a partition."""
    name = f"aggregator-{number}"
    site.start(name, "coordinator", "aggregate", "--partition", f"{number}/2", "--config", "coordinator.toml")


def holders(site):
    """How many aggregators serve, as the status has them."""
    path = site.folder / "state" / "status.json"
    rows = json.loads(path.read_text()).get("aggregators", []) if path.exists() else []
    return len({row["aggregator"] for row in rows} - {""})


@pytest.fixture(scope="module")
def plain(site):
    """The encoder of a run without a fault."""
    return site.finish(site.request(3))


def test_the_encoder_is_that_of_a_coordinator_alone(tmp_path, plain):
    with Site(tmp_path, DIGITS, agents=AGENTS) as alone:
        assert alone.finish(alone.request(3)) == plain


def test_both_have_taken_updates_and_made_passes(site, plain):
    for number in (1, 2):
        log = (site.folder / f"aggregator-{number}.log").read_text()
        assert "Traceback" not in log
        assert "serving" in log
        assert "round_taken" in log
    assert "pass_failed" not in (site.folder / "serve.log").read_text()
    status = read_status(site.folder / "state")
    assert status is not None


def test_an_aggregator_killed_by_kill_9_changes_no_bit(site, plain):
    run = site.request(3)
    site.until(lambda: len(site.opened(run)) >= 2, "round 2 opens")
    site.kill("aggregator-1")
    assert site.finish(run) == plain
    aggregate(site, 1)
    site.until(lambda: holders(site) == 2, "it serves again")


def test_a_coordinator_killed_by_kill_9_finds_its_aggregators_again(site, plain):
    run = site.request(3)
    site.until(lambda: len(site.opened(run)) >= 2, "round 2 opens")
    site.kill("serve")
    site.serve()
    assert site.finish(run) == plain
    assert holders(site) == 2

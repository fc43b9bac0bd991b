"""Releases from the operator's command to the encoder that a device serves with, over real bundles and heads."""

from __future__ import annotations

from collections import Counter

import pytest
from release_site import ReleaseSite

from edge_agent import bundle as bundles
from edge_agent.personalize import load_head
from edge_agent.wire import messages as wire

NAMES = tuple(f"d{number:02}" for number in range(20))


@pytest.fixture
def site(tmp_path, capsys):
    with ReleaseSite(tmp_path, capsys, capture=True) as opened:
        yield opened


def heads_fit(site):
    """Whether every device has a head that was fitted on the encoder in use."""
    for name in site.agents:
        bundle = bundles.current(site.folder / name / "bundles")
        load_head(site.folder / name / "head", bundle)
    return True


@pytest.mark.parametrize(
    "spoilt, max_failed, returning, why",
    [
        ({"dim": 1}, "1", 2, "acc.personal is 0."),
        ({"dim": 24, "golden_error": 1.0}, "1", 0, "self-test"),
        ({"dim": 24, "golden_error": 1.0}, "10%", 0, "self-test"),
    ],
    ids=["less accurate", "fails its self-test", "the first failure is enough"],
)
def test_a_bad_encoder_to_20_devices_stops_at_its_canary_of_2(site, make_bundle, spoilt, max_failed, returning, why):
    """With a single feature, which each device would take, their accuracy falls by more than the operator allows."""
    site.export(make_bundle("good.hwb", dim=24))
    site.release("create", "--canary", "all")
    for name in NAMES:
        site.add(name, tier="head")
    site.until(lambda: set(site.running().values()) == {1}, limit_s=60)
    site.export(make_bundle("bad.hwb", seed=5, **spoilt))
    bad = site.release("create", "--canary", 2, "--max-failed", max_failed, "--min-gain", "-0.05")
    assert bad["stage"] == "canary"
    site.until(lambda: len(site.stages()) == 3, limit_s=60)
    site.wait(30)
    assert site.stages() == ["everybody", "rolled back", "everybody"]
    saw = Counter(
        name
        for name in NAMES
        for message in site.messages(site.topics.down(name), wire.Install)
        if message.bundle_id == bad["bundle_id"]
    )
    assert len(saw) == 2, "18 never see it"
    assert set(saw) == set(site.coordinator.releases.book.releases[1].canary)
    assert set(site.table().values()) == {(3, 3)}
    back = [name for name in NAMES if site.messages(site.topics.down(name), wire.Install)[-1].release == 3]
    assert sorted(back) == sorted(saw)[:returning], "those that have switched return"
    assert {*site.running().values()} == {3}
    assert heads_fit(site)
    status = site.release("status")
    reason = status["releases"][2]["plan"]["note"]
    assert " of 2 devices failed" in reason
    assert why in reason
    site.restart(*NAMES[:3])
    site.wait(30)
    assert {*site.running().values()} == {3}, "the rollback stays"

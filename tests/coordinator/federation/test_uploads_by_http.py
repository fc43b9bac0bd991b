"""Real programs at a real broker whose large updates go by HTTP: the same bits, also where somebody is killed."""

from __future__ import annotations

import json
import re

import pytest
from identity_harness import free_ports
from process_site import EVERYBODY, LARGE, Site
from s3_site import S3Site, use_keys
from upload_site import HoldingProxy

pytestmark = pytest.mark.broker

MODEL = LARGE.model_copy(update={"encoder_params": {"feature_dim": 512}})
"""4096 * 512 numbers: 8.4 MB."""


def http_site(folder, port=0, more=""):
    return Site(folder, MODEL, rules=f'{EVERYBODY}\n[blobs]\nserve = "127.0.0.1:{port}"\n{more}')


def said(site, name):
    return (site.folder / f"{name}.log").read_text()


def accepted(site, run):
    """Each agent's updates that count, and their rounds."""
    return sorted((entry.agent, entry.round) for entry in site.entries(run, "update_accepted"))


ONCE = [("a0", 1), ("a1", 1), ("a2", 1)]


@pytest.fixture(scope="module")
def over_mqtt(tmp_path_factory):
    """The encoder of a round whose updates went in chunks."""
    with Site(tmp_path_factory.mktemp("mqtt"), MODEL) as site:
        return site.finish(site.request(1))


def test_updates_by_http_give_the_same_bits_and_the_status_says_the_way(tmp_path, over_mqtt):
    with http_site(tmp_path) as site:
        run = site.request(1)
        assert site.finish(run) == over_mqtt
        assert accepted(site, run) == ONCE
        for name in site.agents:
            assert re.search(r"update_sent digest=\w+ bytes=8\d{6} by=http", said(site, name)), said(site, name)
            assert "upload_ended" not in said(site, name)

        def status():
            return json.loads((tmp_path / "state" / "status.json").read_text())

        site.until(lambda: status()["traffic"]["update_bytes_by_http"] > 3 * 8_000_000, "the status says what came")
        assert status()["blobs"]["takes_updates"] is True
        assert status()["traffic"]["bytes_received"] < 1_000_000, "the broker carried messages alone"


def test_uploads_can_be_switched_off_while_downloads_go_by_http(tmp_path, over_mqtt):
    with http_site(tmp_path, more="uploads = false") as site:
        assert site.finish(site.request(1)) == over_mqtt
        assert all("update_sent" not in said(site, name) for name in site.agents)
        assert all("blob_fetched" in said(site, name) for name in site.agents)


@pytest.mark.parametrize("killed", ["a1", "serve"])
def test_who_is_killed_within_an_upload_goes_on_and_nothing_counts_twice(tmp_path, over_mqtt, killed):
    """A proxy holds all uploads in their middle, and cuts them when somebody is dead."""
    (port,) = free_ports(1)
    proxy = HoldingProxy(("127.0.0.1", port), 6_000_000)
    rules = f'{EVERYBODY}\n[blobs]\nserve = "127.0.0.1:{port}"\nurl = "http://127.0.0.1:{proxy.port}"'
    with Site(tmp_path, MODEL, rules=rules) as site:
        run = site.request(1)
        partial = tmp_path / "state" / "blobs" / "partial"
        site.until(lambda: len(list(partial.glob("*/*.chunks"))) == 3, "more than half of all updates is on disk")
        assert all("update_sent" not in said(site, name) for name in site.agents)
        assert site.entries(run, "update_accepted") == []
        site.kill(killed)
        proxy.cut()
        if killed == "serve":
            site.serve()
        else:
            site.agent(killed)
        assert site.finish(run) == over_mqtt
        assert accepted(site, run) == ONCE
        assert all("update_sent" in said(site, name) for name in site.agents)
        again = re.findall(r"update_sent digest=\w+ bytes=(\d+)", said(site, "a1"))
        assert 0 < int(again[-1]) < 5_000_000, "the rest alone"
        proxy.close()


def test_a_port_that_agents_do_not_reach_costs_no_round(tmp_path, over_mqtt):
    rules = f'{EVERYBODY}\n[blobs]\nserve = "127.0.0.1:0"\nurl = "http://127.0.0.1:1"'
    with Site(tmp_path, MODEL, rules=rules) as site:
        run = site.request(1)
        assert site.finish(run) == over_mqtt
        assert accepted(site, run) == ONCE
        for name in site.agents:
            assert "update_sent" not in said(site, name)
            assert re.search(r"upload_ended .* sent_bytes=0 reason=127\.0\.0\.1:1: ", said(site, name))


def test_by_way_of_a_store_that_checks_signatures_the_bits_are_the_same(tmp_path, over_mqtt, monkeypatch):
    pytest.importorskip("s3fs")
    store = S3Site()
    try:
        use_keys(monkeypatch, *store.keys["owner"])
        rules = f'{EVERYBODY}\n[blobs]\nstore = "s3://models/fl"\nendpoint = "{store.address}"'
        with Site(tmp_path, MODEL, rules=rules) as site:
            run = site.request(1)
            assert site.finish(run) == over_mqtt
            assert accepted(site, run) == ONCE
            for name in site.agents:
                assert "blob_fetched" in said(site, name)
                assert "update_sent" in said(site, name)
                assert "upload_ended" not in said(site, name)
            try:
                site.until(lambda: store.names("fl/") == [], "what is not needed any more is removed")
            except AssertionError as error:
                raise AssertionError(f"still in the store: {store.names('fl/')}") from error
        assert store.refused == []
    finally:
        store.close()

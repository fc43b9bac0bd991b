"""Real programs at a real broker whose large models go by HTTP: the same bits, also where somebody is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl

import pytest
from identity_harness import Fleet, free_ports
from mqtt_harness import NEEDS_MOSQUITTO
from process_site import EVERYBODY, LARGE, Site

from coordinator.blobs.endpoint import Address, BlobEndpoint
from coordinator.blobs.inflow import Inflow
from coordinator.blobs.opening import tls_of
from coordinator.blobs.signing import PathSigner
from coordinator.config import load_config
from coordinator.fleet.upload_urls import ExpectedUpload
from coordinator.journal.entries import fact_of
from coordinator.rounds.request import Request
from coordinator.state.store import StateFolder
from edge_agent.core.config import AgentConfig, load
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.mqtt import blob_tls_context

pytestmark = pytest.mark.broker

MODEL = LARGE.model_copy(update={"encoder_params": {"feature_dim": 512}})
"""4096 * 512 numbers: 8.4 MB."""


def http_site(folder, port=0):
    return Site(folder, MODEL, rules=f'{EVERYBODY}\n[blobs]\nserve = "127.0.0.1:{port}"')


def said(site, name):
    return (site.folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def over_mqtt(tmp_path_factory):
    """The encoder of a round whose models went in chunks."""
    with Site(tmp_path_factory.mktemp("mqtt"), MODEL) as site:
        return site.finish(site.request(1))


def test_models_by_http_give_the_same_bits_and_the_status_says_the_way(tmp_path, over_mqtt):
    with http_site(tmp_path) as site:
        run = site.request(1)
        assert site.finish(run) == over_mqtt
        for name in site.agents:
            log = said(site, name)
            assert re.search(r"blob_fetched digest=\w+ bytes=\d+ by=http", log), log
            assert "fetch_ended" not in log

        def status():
            return json.loads((tmp_path / "state" / "status.json").read_text())

        site.until(lambda: status()["traffic"]["blob_bytes_fetched"] > 0, "the status says what was fetched")
        assert status()["blobs"]["by"] == "own endpoint"
        assert status()["traffic"]["blob_bytes_published"] < 1_000_000


def test_an_agent_that_is_killed_while_it_fetches_goes_on_and_the_bits_are_the_same(tmp_path, over_mqtt):
    with http_site(tmp_path) as site:
        run = site.request(1)
        partial = tmp_path / "a1" / "cache" / "partial"
        site.until(
            lambda: any(partial.glob("*.part")) or "blob_fetched" in said(site, "a1"), "a1 fetches", every_s=0.001
        )
        site.kill("a1")
        site.agent("a1")
        assert site.finish(run) == over_mqtt


def test_a_coordinator_that_is_killed_while_agents_fetch_goes_on_and_the_bits_are_the_same(tmp_path, over_mqtt):
    """Its URLs end with it; agents ask the next start for others."""
    (port,) = free_ports(1)
    with http_site(tmp_path, port) as site:
        run = site.request(1)
        partial = tmp_path / "a1" / "cache" / "partial"
        site.until(
            lambda: any(partial.glob("*.part")) or "blob_fetched" in said(site, "a1"), "a1 fetches", every_s=0.001
        )
        site.kill("serve")
        site.serve()
        assert site.finish(run) == over_mqtt


def test_a_port_that_agents_do_not_reach_costs_no_round(tmp_path, over_mqtt):
    rules = f'{EVERYBODY}\n[blobs]\nserve = "127.0.0.1:0"\nurl = "http://127.0.0.1:1"'
    with Site(tmp_path, MODEL, rules=rules) as site:
        assert site.finish(site.request(1)) == over_mqtt
        for name in site.agents:
            assert "blob_fetched" not in said(site, name)
            assert re.search(r"fetch_ended .* next=chunks reason=127\.0\.0\.1:1: ", said(site, name))


@NEEDS_MOSQUITTO
def test_with_certificates_a_url_that_leaks_is_of_no_use_to_another_agent(tmp_path, capsys):
    """Two enrolled devices, and a stranger who trusts the authority but has no certificate."""
    with Fleet(tmp_path, capsys).init() as fleet:
        fleet.serve()
        for name in ("a", "b"):
            code, _, err = fleet.enroll(fleet.token(name), name)
            assert code == 0, err
        config = load_config(fleet.config)
        config = config.model_copy(update={"blobs": _blobs_of(fleet)})
        blob = Outgoing.of(bytes(range(256)) * 100)
        endpoint = BlobEndpoint(
            Address("127.0.0.1", 0),
            PathSigner(b"k" * 32, lambda: 0.0, 600.0),
            0,
            tls_of(config, config.blobs),
            names_clients=True,
            inflow=Inflow(lambda: None),
        )
        endpoint.start()
        try:
            endpoint.offered(blob)
            (url,) = endpoint.urls("a", blob.ref.digest)
            port, target = re.fullmatch(r"https://127\.0\.0\.1:(\d+)(/.*)", url).groups()

            def get(context):
                connection = http.client.HTTPSConnection("localhost", int(port), context=context, timeout=10)
                with contextlib.closing(connection):
                    connection.request("GET", target)
                    response = connection.getresponse()
                    return response.status, response.read()

            of_a, of_b = (
                blob_tls_context(load(AgentConfig, fleet.folder / f"{name}.toml").broker) for name in ("a", "b")
            )
            upload = ExpectedUpload("a", "run-0001", 1, blob.ref)
            (address,) = endpoint.uploads.expect(upload).urls

            def put(context, content):
                connection = http.client.HTTPSConnection("localhost", int(port), context=context, timeout=10)
                with contextlib.closing(connection):
                    connection.putrequest("PUT", address.partition(f":{port}")[2])
                    connection.putheader("Content-Length", str(blob.ref.size_bytes))
                    connection.endheaders(content)
                    return connection.getresponse().status

            assert get(of_a) == (200, bytes(blob.data))
            assert get(of_b) == (403, b"")
            # Another agent's upload is refused before it has sent a byte of it.
            assert put(of_b, b"") == 403
            assert list(endpoint.uploads.take_arrived()) == []
            assert put(of_a, bytes(blob.data)) == 200
            arrived = b"".join(bytes(part.frame.data) for part in endpoint.uploads.take_arrived())
            assert arrived == bytes(blob.data)
            stranger = ssl.create_default_context(cafile=fleet.folder / "state" / "identity" / "ca.pem")
            with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|EOF"):
                get(stranger)
            # Once the device is revoked, its URL and its certificate are of no use from the next connection on.
            assert fleet.call("agents", "revoke", "a", "--config", fleet.config)[0] == 0
            with pytest.raises(OSError, match=r"(?i)revoked|reset|closed|EOF"):
                get(of_a)
            with pytest.raises(OSError, match=r"(?i)revoked|reset|closed|EOF|broken pipe"):
                put(of_a, bytes(blob.data))
        finally:
            endpoint.close()


def _blobs_of(fleet):
    text = fleet.config.read_text() + '\n[blobs]\nserve = "0.0.0.0:8444"\n'
    path = fleet.folder / "with-blobs.toml"
    path.write_text(text)
    return load_config(path).blobs


@NEEDS_MOSQUITTO
def test_a_federation_with_certificates_needs_one_line_for_models_by_http(tmp_path, capsys):
    with Fleet(tmp_path, capsys).init() as fleet:
        (port,) = free_ports(1)
        fleet.config.write_text(fleet.config.read_text() + f'\n[blobs]\nserve = "0.0.0.0:{port}"\nabove_bytes = 100\n')
        fleet.serve()
        code, _, err = fleet.enroll(fleet.token("a"), "a")
        assert code == 0, err
        fleet.run("a")
        fleet.until(lambda: fleet.online() == {"a"}, "a is online")
        task = load_config(fleet.config).run_task
        wanted = Request("fedavg", {"local_epochs": 1}, 1, 5, task)
        with StateFolder(fleet.folder / "state").look(create=True) as state:
            state.journal.request_run(fact_of("run_requested", wanted.body()))
        fleet.until(lambda: "blob_fetched" in fleet.said("a"), "a fetches the model by HTTPS")
        assert f"host=localhost:{port}" in fleet.said("a")
        assert "fetch_ended" not in fleet.said("a")

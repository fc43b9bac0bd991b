"""A relay with a certificate of its own: enrolled by a token, for some agents alone, renewed and revoked."""

from __future__ import annotations

import json

import pytest
from identity_harness import DATA, Fleet
from mqtt_harness import NEEDS_MOSQUITTO

from coordinator.broker import MosquittoBroker

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.broker]


class RelayFleet(Fleet):
    """A federation with certificates, the broker of a site without, and agents there."""

    def relay_config(self):
        return self.folder / "relay.toml"

    def enroll_relay(self, token, *options):
        return self.device(
            *("enroll", token, "--relay", "--config", self.relay_config(), "--state", self.folder / "north", *options)
        )

    def at_site(self, name, url, number):
        """Enroll an agent, and have it connect to the broker of the site."""
        code, _, err = self.enroll(self.token(name), name, number)
        assert code == 0, err
        path = self.folder / f"{name}.toml"
        before, _, after = path.read_text().partition("[broker]\n")
        path.write_text(f'{before}[broker]\nurl = "{url}"\n\n[data]{after.partition("[data]")[2]}')
        self.run(name)


@pytest.fixture
def fleet(tmp_path, capsys):
    with RelayFleet(tmp_path / "fleet", capsys) as fleet:
        yield fleet


def test_a_relay_of_its_own_certificate_brings_the_agents_of_its_token_and_no_others(fleet):
    fleet.init().serve()
    token = fleet.token("north", "--relay-for", "porch", "--relay-for", "hall")
    code, out, err = fleet.enroll_relay(token)
    assert code == 0, err
    assert "edge-agent relay --config" in out
    with MosquittoBroker() as site:
        text = fleet.relay_config().read_text().replace("mqtt://127.0.0.1:1883", site.url)
        fleet.relay_config().write_text(text)
        fleet.start("north", "edge_agent", "relay", "--config", fleet.relay_config())
        for number, name in enumerate(("porch", "hall", "attic")):
            fleet.at_site(name, site.url, number)
        fleet.until(lambda: fleet.online() == {"porch", "hall"}, "the two agents of the relay's token are online")
        code, _, err = fleet.call("run", "--config", fleet.config, "--method", "fedavg", "--rounds", 1, "--json")
        assert code == 0, err
        assert "attic" not in fleet.online(), "it spoke for an agent that its token does not name"
        # A new token for one more agent counts while broker and coordinator serve.
        fleet.token("north", "--relay-for", "porch", "--relay-for", "hall", "--relay-for", "attic")
        fleet.until(lambda: fleet.online() == {"porch", "hall", "attic"}, "the third agent is online")
        code, _, err = fleet.call("agents", "revoke", "north", "--config", fleet.config)
        assert code == 0, err
        fleet.until(lambda: "upstream_disconnected" in fleet.said("north"), "the session of the relay ends")
        code, out, _ = fleet.device("relay", "--status", "--config", fleet.relay_config(), "--json")
        assert code == 0
        assert json.loads(out)["site"] is not None


def test_mistakes_of_a_relays_enrolment_are_named(fleet):
    fleet.init()
    code, _, err = fleet.call("enroll", "north", "--config", fleet.config, "--relay-for", "a b")
    assert (code, "'a b'" in err) == (2, True)
    token = fleet.token("north", "--relay-for", "*")
    code, _, err = fleet.enroll_relay(token, "--data", DATA.format(0))
    assert (code, "leave --data and --tier out" in err) == (2, True)

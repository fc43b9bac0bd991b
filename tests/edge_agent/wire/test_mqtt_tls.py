"""Certificates over MQTT: a private authority, and refusals that never fall back to plain text."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from broker_authority import Authority
from mqtt_harness import NEEDS_MOSQUITTO, wait_for

from coordinator.broker import MosquittoBroker
from edge_agent.core.config import BrokerConfig, TlsConfig
from edge_agent.core.errors import BrokerAway, ConfigError
from edge_agent.wire.broker_steps import walk_to_broker
from edge_agent.wire.failover import order_for
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed


class TlsMosquitto(MosquittoBroker):
    """Mosquitto that speaks TLS only and takes the client certificate's name for the user."""

    lines: tuple[str, ...] = ()

    def command(self):
        line = super().command()
        with Path(line[-1]).open("a", encoding="utf-8") as settings:
            settings.write("\n".join([*self.lines, ""]))
        return line


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder, "authority")
    stranger = Authority(folder, "stranger")
    cert, key = authority.issue("broker", "127.0.0.1")
    broker = TlsMosquitto()
    broker.lines = (
        f"cafile {authority.ca}",
        f"certfile {cert}",
        f"keyfile {key}",
        "require_certificate true",
        "use_identity_as_username true",
    )
    broker.start()
    ours = TlsConfig(ca=authority.ca, **dict(zip(("cert", "key"), authority.issue("porch"), strict=True)))
    theirs = dict(zip(("cert", "key"), stranger.issue("mallory"), strict=True))
    yield broker, ours, stranger, theirs
    broker.stop()


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_tls_with_an_own_authority_and_a_client_certificate_carries_bulk_in_both_directions(open_transport, tls):
    broker, ours, _, _ = tls
    config = BrokerConfig(url=f"mqtts://127.0.0.1:{broker.port}", tls=ours, wait=False)
    one = open_transport(config, "one")
    two = open_transport(config, "two")
    for transport, name in ((one, "one"), (two, "two")):
        transport.subscribe(f"fl/{name}")
        transport.start()
        wait_for(transport, Subscribed)
    chunks = [os.urandom(61_440) for _ in range(20)]
    for chunk in chunks:
        one.publish("fl/two", chunk)
        two.publish("fl/one", chunk)
    for transport in (one, two):
        assert [wait_for(transport, Message).payload for _ in chunks] == chunks


# paho leaves the socket of a failed handshake to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@NEEDS_MOSQUITTO
@pytest.mark.broker
@pytest.mark.parametrize(
    "case, reason",
    [
        ("only the system's authorities are trusted", "certificate is not trusted"),
        ("another authority is trusted", "certificate is not trusted"),
        ("the broker's certificate is for another name", "certificate is not trusted"),
        ("no client certificate", "."),
        ("a client certificate of another authority", "."),
        ("no TLS at all", "."),
    ],
)
def test_tls_that_does_not_fit_is_refused_and_never_falls_back_to_plain(open_transport, tls, case, reason):
    broker, ours, stranger, theirs = tls
    url = f"mqtts://127.0.0.1:{broker.port}"
    config = {
        "only the system's authorities are trusted": BrokerConfig(url=url, wait=False),
        "another authority is trusted": BrokerConfig(url=url, wait=False, tls=TlsConfig(ca=stranger.ca)),
        "the broker's certificate is for another name": BrokerConfig(
            url=f"mqtts://localhost:{broker.port}", wait=False, tls=ours
        ),
        "no client certificate": BrokerConfig(url=url, wait=False, tls=TlsConfig(ca=ours.ca)),
        "a client certificate of another authority": BrokerConfig(
            url=url, wait=False, tls=TlsConfig(ca=ours.ca, **theirs)
        ),
        "no TLS at all": BrokerConfig(url=f"mqtt://127.0.0.1:{broker.port}", wait=False),
    }[case]
    transport = open_transport(config)
    with pytest.raises(BrokerAway, match=reason):
        transport.start()
    transport.publish("fl/x", b"secret")
    assert transport.traffic.messages_up == 0


# As above.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_broker_of_a_list_with_another_authority_is_skipped_and_named(open_transport, tls, tmp_path):
    broker, ours, _, _ = tls
    cert, key = Authority(tmp_path, "impostor").issue("broker", "127.0.0.1")
    impostor = TlsMosquitto()
    impostor.lines = (f"certfile {cert}", f"keyfile {key}")
    with impostor:
        bad, good = (f"mqtts://127.0.0.1:{each.port}" for each in (impostor, broker))
        client = next(name for name in map(str, range(1000)) if order_for(name, [good, bad])[0] == bad)
        transport = open_transport(BrokerConfig(url=[good, bad], tls=ours), client)
        transport.subscribe("fl/here")
        transport.start()
        refused = wait_for(transport, Disconnected)
        connected = wait_for(transport, Connected)
        assert refused.reason.startswith(f"{bad}: ")
        assert "certificate is not trusted" in refused.reason
        assert (connected.broker, [left.url for left in connected.left]) == (good, [bad])
        wait_for(transport, Subscribed)
        transport.publish("fl/here", b"nothing is lost")
        assert wait_for(transport, Message).payload == b"nothing is lost"


# As above.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_a_broker_of_a_list_that_is_stopped_behind_tls_is_noticed_and_one_that_is_stopped_at_the_handshake_is_left(
    open_transport, tls
):
    broker, ours, _, _ = tls
    urls = [f"mqtts://127.0.0.1:{broker.port}", "mqtts://127.0.0.1:1"]
    transport = open_transport(BrokerConfig(url=urls, tls=ours, failover_s=2))
    transport.start()
    wait_for(transport, Connected)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        assert "it has not answered for" in wait_for(transport, Disconnected).reason
        wait_for(transport, Disconnected, lambda event: "connection refused" in event.reason)
        assert f"{urls[0]}: no answer in time" in wait_for(transport, Disconnected).reason
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert wait_for(transport, Connected).broker == urls[0]


@NEEDS_MOSQUITTO
@pytest.mark.broker
def test_doctor_says_which_authorities_are_trusted_and_what_to_correct(tls):
    broker, ours, stranger, _ = tls
    config = BrokerConfig(url=f"mqtts://127.0.0.1:{broker.port}", tls=ours)
    assert all(step.is_ok for step in walk_to_broker(config, ours.ca, 5.0))
    failed = list(walk_to_broker(config, stranger.ca, 5.0))[-1]
    assert (failed.name, failed.is_ok, failed.exit_code) == ("tls", False, BrokerAway.exit_code)
    assert re.search(rf"is not trusted \(.*\); trusted are those in {stranger.ca}: give the file of", failed.detail)
    assert failed.meaning == "and this device do not trust each other"


@pytest.mark.parametrize("broken", ["ca", "cert"])
def test_certificates_that_cannot_be_read_are_told_before_anything_is_sent(open_transport, tmp_path, broken):
    (tmp_path / "bad.pem").write_text("not a certificate", encoding="utf-8")
    for path in (tmp_path / "bad.pem", tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match="certificates cannot be loaded"):
            open_transport(BrokerConfig(url="mqtts://127.0.0.1", tls=TlsConfig(**{broken: path}))).start()

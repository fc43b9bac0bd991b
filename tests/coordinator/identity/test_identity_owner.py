"""Commands of root on the state folder of another user leave nothing there that this user cannot read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from identity_harness import free_ports

from coordinator.config import IdentityConfig
from coordinator.identity.authority import Authority
from coordinator.identity.enrolment import Enrolment
from coordinator.identity.ledger import identity_folder
from coordinator.identity.serving import BrokerFiles
from coordinator.state.command_keys import CommandKeys
from coordinator.state.release_keys import ReleaseKeys
from edge_agent.bundle.trust import TrustStore
from edge_agent.identity.certificates import IdentityFolder

pytestmark = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="root alone gives files away")

USER = 12345
DAY = timedelta(days=1)


@pytest.fixture
def state():
    """A state folder of another user, in a folder that everybody reaches."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        made = Path(folder) / "state"
        made.mkdir(0o700)
        os.chown(made, USER, USER)
        yield made


@contextlib.contextmanager
def as_user():
    """Inside, this process has the rights of the owner of the state folder."""
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def owners(folder):
    return {(path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o077) for path in folder.rglob("*")}


def test_coordinator_reads_what_root_enrolled_and_revoked(state, tmp_path):
    port, enroll_port = free_ports()
    config = IdentityConfig(host="localhost", bind="127.0.0.1", port=port, enroll_port=enroll_port)
    now = datetime.now(timezone.utc)
    Authority.create(identity_folder(state), "home", now)
    enrolment = Enrolment(state, "home", config)
    BrokerFiles(enrolment).write(now)
    CommandKeys.of(state, "home")
    ReleaseKeys(state).create("home", now)
    ReleaseKeys(state).next_version(now)
    token = enrolment.token("porch", DAY)
    enrolment.certify(IdentityFolder(tmp_path).request("home", "porch", token.secret))
    enrolment.revoke("porch")
    assert owners(state) == {(USER, USER, 0)}
    with as_user():
        again = Enrolment(state, "home", config)
        BrokerFiles(again).write(now)
        assert again.revoked().agents == ("porch",)
        assert again.ledger.get("porch").is_revoked
        assert ReleaseKeys(state).next_version(now)


def test_agent_reads_the_identity_that_root_enrolled(state, tmp_path):
    now = datetime.now(timezone.utc)
    authority = Authority.create(tmp_path, "home", now)
    folder = IdentityFolder(state)
    made = authority.for_client("porch", folder.pending_key().public_key(), now, DAY).public_bytes(Encoding.DER)
    folder.install(made, ca=authority.der, name="porch", federation="home", host="localhost", port=1)
    ReleaseKeys(tmp_path).create("home", now)
    TrustStore(state / "bundles").anchor(ReleaseKeys(tmp_path).roots()[-1])
    assert owners(state) == {(USER, USER, 0)}
    here = (folder.read(), folder.ca_der(), folder.key_fingerprint())
    with as_user():
        assert (folder.read(), folder.ca_der(), folder.key_fingerprint()) == here

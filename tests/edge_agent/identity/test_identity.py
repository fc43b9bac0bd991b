"""A certificate's renewal by a fake clock: when it is asked for, and that nothing heavy is loaded meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_agent.core.config import AgentConfig, DataConfig
from edge_agent.core.errors import EnrolmentRefused, StateError
from edge_agent.identity.certificates import Identity, IdentityFolder, check_identity
from edge_agent.identity.renewal import AGAIN_S, Renewal

DAY = 86_400.0
BEGIN = 1_800_000_000.0


@pytest.fixture
def state(tmp_path):
    """A state folder with a certificate of 30 days, as far as the dates go."""
    identity = Identity(
        federation="home",
        name="porch",
        serial="ab",
        not_before=BEGIN,
        not_after=BEGIN + 30 * DAY,
        host="localhost",
        port=1,
        authority="SHA256:" + "A" * 43,
    )
    folder = IdentityFolder(tmp_path)
    folder.path.mkdir()
    folder.file.write_text(identity.model_dump_json() + "\n")
    return tmp_path


def test_renewal_is_due_from_half_of_the_life_on_and_once_a_minute(state):
    wall = [BEGIN + 14.9 * DAY]
    renewal = Renewal(state, wall=lambda: wall[0])
    assert not renewal.is_due(0.0)
    wall[0] = BEGIN + 15.1 * DAY
    assert not renewal.is_due(AGAIN_S - 1), "it looks once a minute"
    assert renewal.is_due(AGAIN_S)
    assert not renewal.is_due(AGAIN_S + 1)
    assert renewal.is_due(2 * AGAIN_S)
    assert not renewal.is_expired()
    wall[0] = BEGIN + 30.1 * DAY
    assert renewal.is_expired()


def test_a_clock_that_was_set_back_asks_for_nothing(state):
    renewal = Renewal(state, wall=lambda: BEGIN - 365 * DAY)
    assert not renewal.is_due(0.0)
    assert not renewal.is_expired()


def config(state, name="porch", federation="home"):
    return AgentConfig(id=name, federation=federation, state=state, data=DataConfig(source="digits:optdigits"))


def test_doctor_names_what_is_wrong_with_a_certificate(state):
    assert check_identity(config(state), BEGIN + DAY) == (
        "holds until 2027-02-14 08:00 UTC; a running agent renews it from 2027-01-30 08:00 UTC on"
    )
    with pytest.raises(
        EnrolmentRefused, match=r"it expired at 2027-02-14 .*clock says 2027-02-16 .*'headwater enroll po"
    ):
        check_identity(config(state), BEGIN + 32 * DAY)
    with pytest.raises(EnrolmentRefused, match=r"it is valid from 2027-01-15 .*clock says 1970-01-01 .*set-ntp"):
        check_identity(config(state), 100.0)
    for other in (config(state, name="hall"), config(state, federation="lab")):
        with pytest.raises(
            EnrolmentRefused, match=r"it is for 'porch' in federation 'home', and the configuration for"
        ):
            check_identity(other, BEGIN + DAY)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"federation": "home"}\n-----BEGIN'])
def test_a_damaged_identity_is_named_with_what_to_do(state, content):
    IdentityFolder(state).file.write_bytes(content)
    with pytest.raises(StateError, match=r"the identity cannot be read .*'headwater enroll NAME' on the coordinator"):
        IdentityFolder(state).read()


def test_a_look_at_the_certificate_loads_no_cryptography(state):
    code = (
        "import sys; from pathlib import Path; from edge_agent.identity.renewal import Renewal; "
        "Renewal(Path(sys.argv[1])).is_due(0.0); print('cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(state)], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"

"""Paths of blobs: for one agent, one blob and a short time, and nobody can make another one."""

from __future__ import annotations

import pytest

from coordinator.blobs.signing import Grant, PathSigner

DIGEST = "a" * 64
OTHER = "b" * 64
KEY = b"k" * 32


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def signer(clock):
    return PathSigner(KEY, clock, 60.0)


def test_a_path_holds_for_its_agent_and_blob_until_its_end(signer, clock):
    path = signer.path("a-1", DIGEST)
    assert signer.grant(path) == Grant("a-1", DIGEST)
    clock.now += 60.0
    assert signer.grant(path) == Grant("a-1", DIGEST)
    clock.now += 0.1
    assert signer.grant(path) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.replace(DIGEST, OTHER),
        lambda path: path.replace("agent=a-1", "agent=a-2"),
        lambda path: path.replace("until=1060", "until=9999"),
        lambda path: path[:-1] + ("0" if path[-1] != "0" else "1"),
        lambda path: path + "&agent=a-2",
        lambda path: path.upper(),
        lambda path: path.partition("&proof")[0],
        lambda path: path.replace("/blobs/", "/blobs//"),
        lambda path: path.replace("/blobs/", "/x/../blobs/"),
        lambda path: path + "\n",
        lambda _: "",
    ],
    ids=[
        "other blob",
        "other agent",
        "later",
        "proof",
        "twice",
        "case",
        "no proof",
        "slashes",
        "dots",
        "line",
        "empty",
    ],
)
def test_a_changed_path_does_not_hold(signer, change):
    path = signer.path("a-1", DIGEST)
    changed = change(path)
    assert changed != path
    assert signer.grant(changed) is None


def test_a_path_of_another_process_does_not_hold(signer, clock):
    assert signer.grant(PathSigner(b"other" * 8, clock, 60.0).path("a-1", DIGEST)) is None

"""A bundle put by hand in place of a release stays until there is a newer release."""

from __future__ import annotations

import json

import pytest
from federation_harness import Federation

from coordinator.journal.entries import fact_of
from edge_agent.agent.release_record import ReleaseRecord
from edge_agent.agent.tasks.runner import TaskRunner
from edge_agent.bundle import installed
from edge_agent.cli import main
from edge_agent.core.config import DataConfig, HeadConfig
from edge_agent.core.errors import StateError
from edge_agent.personal.personalize import load_head
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages import down, up

A = "a" * 64
B = "b" * 64
C = "c" * 64
REF = Outgoing.of(b"x").ref


HOME = "1" * 32
AWAY = "2" * 32


def offer(bundle_id, release, federation=HOME):
    return down.Install(run="run-0001", bundle_id=bundle_id, release=release, blob=REF, federation=federation)


class HeadDuties(TaskRunner):
    """A device with digits, which takes any encoder."""

    def __init__(self, config, tier):
        changes = {
            "data": DataConfig(source="digits:optdigits?n=60"),
            "head": HeadConfig(name="prototype", precision="fp32", min_gain=-1),
        }
        super().__init__(config.model_copy(update=changes), tier)

    def check(self, task):
        pass


@pytest.fixture
def fed(tmp_path):
    with Federation(tmp_path, agents=(), tasks=HeadDuties, capture=True) as federation:
        yield federation


@pytest.fixture
def made(make_bundle):
    return [make_bundle(f"{name}.hwb", dim=16, seed=seed) for seed, name in enumerate("abc")]


def release(fed, bundle) -> str:
    digest = fed.state.blobs.put(bundle.path.read_bytes())
    if not fed.state.journal.runs():
        fed.state.journal.request_run(fact_of("run_requested", {}))
        fed.state.journal.append(fact_of("run_cancelled", {}), run="run-0001")
    body = {"bundle_id": bundle.manifest.bundle_id}
    fed.state.journal.append(fact_of("release_made", body), run="run-0001", round=1, digest=digest)
    return bundle.manifest.bundle_id


def runs(fed, name="porch") -> str:
    return next(agent["bundle_id"] for agent in fed.coordinator.status()["agents"] if agent["id"] == name)


def take(fed, bundle) -> str:
    wanted = release(fed, bundle)
    fed.agents["porch"]._hello()
    fed.until(lambda: runs(fed) == wanted, limit_s=60)
    return wanted


def by_hand(fed, capsys, *words) -> dict:
    fed.kill("porch")
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["import", "rollback"])
def test_a_rollback_by_hand_stays_until_there_is_a_newer_release(fed, made, capsys, command):
    """The coordinator put the newer one back within 4 s."""
    first = release(fed, made[0])
    fed.add("porch", tier="head")
    fed.until(lambda: runs(fed) == first, limit_s=60)
    old = made[0].manifest.bundle_id
    new = take(fed, made[1])
    state = fed.folder / "porch"
    words = ("import", made[0].path, "--state", state) if command == "import" else ("rollback", "--state", state)
    said = by_hand(fed, capsys, *words)
    assert (said["bundle_id"], said["declines"]) == (old, new)

    fed.add("porch", tier="head")
    fed.wait(120)
    assert runs(fed) == installed.current(state / "bundles").id == old
    assert load_head(state / "head", installed.current(state / "bundles")).head.name == "prototype"
    (note,) = next(agent["notes"] for agent in fed.coordinator.status()["agents"] if agent["id"] == "porch")
    assert f"this device was rolled back by hand from bundle {new[:12]} (release 2)" in note
    fed.kill_coordinator()
    fed.start_coordinator()
    fed.wait(60)
    assert runs(fed) == old
    assert take(fed, made[2]) != new
    assert [message.release for message in fed.messages(fed.topics.down("porch"), down.Install)][-1] == 3
    fed.wait(10)
    assert all(not agent["notes"] for agent in fed.coordinator.status()["agents"])


def test_a_first_bundle_that_was_imported_is_replaced_by_a_release(fed, made, capsys):
    state = fed.folder / "porch"
    assert main(["import", str(made[0].path), "--state", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["declines"] is None
    fed.add("porch", tier="head")
    fed.until(lambda: runs(fed) == made[0].manifest.bundle_id, limit_s=30)
    take(fed, made[1])


def test_a_declined_release_is_not_fetched(fed, made, capsys):
    first = release(fed, made[0])
    fed.add("porch", tier="head")
    fed.until(lambda: runs(fed) == first, limit_s=60)
    take(fed, made[1])
    by_hand(fed, capsys, "rollback", "--state", fed.folder / "porch")
    before = len(fed.messages(fed.topics.up("porch"), up.Want))
    fed.add("porch", tier="head")
    fed.wait(30)
    assert len(fed.messages(fed.topics.up("porch"), up.Want)) == before


def test_a_bundle_that_cannot_be_refitted_is_a_fault_with_its_remedy(fed, made):
    state = fed.folder / "porch"
    assert main(["import", str(made[0].path), "--state", str(state)]) == 0

    class Broken(HeadDuties):
        def refit(self):
            raise StateError("no room for a head")

    fed.make_tasks = Broken
    agent = fed.add("porch", tier="head")
    fed.wait(1)
    assert agent.condition.problem.kind == "bundle"


def test_record_of_what_is_declined(tmp_path):
    record = ReleaseRecord(tmp_path)
    assert record.why_declined(offer(A, 1), 0) == ""
    record.note_installed(offer(A, 1))
    record.note_installed(offer(B, 2))
    assert record.put_by_hand(A, B).source.release == 2
    again = ReleaseRecord(tmp_path)
    assert [bool(again.why_declined(offer(*each), 0)) for each in ((A, 1), (B, 2), (C, 2), (C, 3), (B, 3))] == [
        True, True, True, False, True,
    ]  # fmt: skip
    assert again.put_by_hand(C, A).source.bundle_id == B, "a second bundle by hand leaves the first rollback as it is"
    assert again.put_by_hand(B, C) is None, "what was rolled back from is there again"
    assert again.why_declined(offer(B, 2), 0) == ""
    again.put_by_hand(A, B)
    again.note_installed(offer(C, 3))
    assert again.why_declined(offer(B, 2), 0) == ""


def test_bundle_that_came_by_hand_and_was_replaced_by_hand_is_declined_by_its_id_alone(tmp_path):
    record = ReleaseRecord(tmp_path)
    assert record.put_by_hand(A, "") is None
    assert record.put_by_hand(B, A).source.release == 0
    assert [bool(record.why_declined(offer(*each), 0)) for each in ((A, 1), (C, 1))] == [True, False]


@pytest.mark.parametrize("content", ["[]", "{", '{"taken": 1}', '{"other": 1}'])
def test_damaged_record_says_what_to_do(tmp_path, content):
    (tmp_path / "releases.json").write_text(content)
    with pytest.raises(StateError, match="remove it"):
        ReleaseRecord(tmp_path).why_declined(offer(A, 1), 0)


def test_rollback_without_an_earlier_bundle_is_refused(tmp_path, capsys):
    assert main(["rollback", "--state", str(tmp_path)]) == 1
    assert "no earlier bundle" in capsys.readouterr().err
    assert main(["rollback", "--state", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("left_over", [HOME, ""], ids=["of another federation", "of an older version"])
def test_the_first_release_of_another_federation_is_newer_than_what_was_rolled_back(tmp_path, left_over):
    """Also where the record was copied from another device, or the device was told nothing of the change."""
    record = ReleaseRecord(tmp_path)
    record.note_installed(offer(B, 7, left_over))
    record.put_by_hand(A, instead_of=B)
    assert "release 7" in record.why_declined(offer(C, 1, left_over), 0)
    assert record.why_declined(offer(C, 1, AWAY), 0) == ""
    assert record.why_declined(offer(B, 1, AWAY), 0) != "", "the bundle that was rolled back from stays away"
    why = record.why_declined(offer(C, 1, left_over), 0)
    assert "release 7" in why, "back at the first one, its numbers count again"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"taken": 1}', '{"rolled_back": {"source": {"release": "x"}}}'])
def test_a_damaged_record_is_a_fault_and_the_device_keeps_its_bundle(fed, made, capsys, content):
    first = release(fed, made[0])
    fed.add("porch", tier="head")
    fed.until(lambda: runs(fed) == first, limit_s=60)
    record = fed.folder / "porch" / "releases.json"
    record.write_text(content)
    release(fed, made[1])
    fed.agents["porch"]._hello()
    fed.wait(5)
    assert runs(fed) == installed.current(fed.folder / "porch" / "bundles").id == first
    problem = fed.agents["porch"].condition.problem
    assert (problem.kind, problem.error) == ("bundle", "StateError")
    assert str(record) in problem.message
    assert "remove it" in problem.message
    (told,) = (agent["fault"] for agent in fed.coordinator.status()["agents"] if agent["id"] == "porch")
    assert told["error"] == "StateError"
    fed.kill("porch")
    for command in (["import", str(made[2].path)], ["rollback"]):
        assert main([*command, "--state", str(record.parent)]) == 1
        assert "remove it" in capsys.readouterr().err
    assert record.read_text() == content
    assert installed.current(record.parent / "bundles").id == first, "nothing was installed before the record was read"


@pytest.mark.parametrize("content", [None, b"", b"PK"], ids=["missing", "empty", "cut"])
def test_a_release_whose_file_is_damaged_is_told_and_the_device_keeps_its_bundle(fed, made, content, caplog):
    first = release(fed, made[0])
    fed.add("porch", tier="head")
    fed.until(lambda: runs(fed) == first, limit_s=60)
    release(fed, made[1])
    path = fed.state.blobs.path(fed.state.journal.entries(kinds=("release_made",))[-1].digest)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    fed.agents["porch"]._hello()
    fed.wait(5)
    trouble = fed.coordinator.status()["storage"]
    assert str(path) in trouble
    assert "put it back from a backup, or make a new release" in trouble
    assert str(path) in caplog.text
    assert "Traceback" not in caplog.text
    assert fed.messages(fed.topics.down("porch"), down.Install)[-1].bundle_id == first, "it was not announced"
    assert fed.agents["porch"].welcomed
    assert runs(fed) == installed.current(fed.folder / "porch" / "bundles").id == first
    path.write_bytes(made[1].path.read_bytes())
    fed.agents["porch"]._hello()
    fed.until(lambda: runs(fed) == made[1].manifest.bundle_id, limit_s=60)

"""Release keys: made by init or given, a threshold, changes of keys, and what a run and an export sign."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from types import SimpleNamespace

import pytest
from federation_harness import Killed
from full_disk import DyingProcess
from identity_harness import Fleet
from signing import NOW, Federation

from coordinator.config import CoordinatorConfig
from coordinator.journal.entries import fact_of
from coordinator.rounds.compute_requests import OfModel
from coordinator.runs import release as runs_release
from coordinator.service.preflight import checked_method
from coordinator.state import release_keys as state_release_keys
from coordinator.state.release_keys import (
    NewRelease,
    Public,
    ReleaseKeys,
    file_to_release,
    new_key,
    read_key,
    read_public,
    role,
    sign_bundle,
    signature_of,
    write_key,
)
from coordinator.state.store import BlobStore, StateFolder
from edge_agent.bundle import archive
from edge_agent.bundle.manifest import Lineage
from edge_agent.bundle.trust import Envelope, Key, Member, TrustStore, dump, parse, public_bytes
from edge_agent.cli import main as edge_agent
from edge_agent.core.errors import BundleUntrusted, StateError, UsageError
from edge_agent.core.task import ImageInput, Task

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8), class_names=("a", "b"), encoder="linear", encoder_params={}
)


@pytest.fixture
def fleet(tmp_path, capsys):
    with Fleet(tmp_path, capsys) as fleet:
        yield fleet


@pytest.fixture
def bundle(tmp_path):
    """A function that exports a bundle of a fresh model."""
    from edge_agent import methods
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, synthetic_inputs

    def make(name):
        method = methods.create("fedavg", {})
        path = tmp_path / f"{name}.hwb"
        trained = TrainedEncoder(method.build(TASK), method, TASK)
        calibration = Calibration.from_inputs(synthetic_inputs(TASK, 8))
        build_bundle(trained, calibration, path, BundleOptions(name, exporter="legacy", int8=False))
        return path

    return make


def keys_of(fleet):
    return ReleaseKeys(fleet.folder / "state")


def test_init_makes_keys_and_an_enrolled_device_trusts_them_and_follows_while_off(fleet, bundle, capsys):
    fleet.init()
    keys = keys_of(fleet)
    device = fleet.folder / "porch"
    assert json.loads(fleet.call("keys", "show", "--config", fleet.config, "--json")[1])["signs_here"]
    token = fleet.token("porch")
    files = (fleet.folder / "request.json", fleet.folder / "answer.json")
    options = ("--config", fleet.folder / "porch.toml", "--state", device, "--data", "digits:optdigits?n=60")
    assert fleet.device("enroll", token, *options, "--csr", files[0])[0] == 0
    assert fleet.call("sign", files[0], "--out", files[1], "--config", fleet.config)[0] == 0
    assert fleet.device("enroll", token, *options, "--answer", files[1])[0] == 0
    assert TrustStore(device / "bundles").newest_root().version == 1
    first = bundle("first")
    second = bundle("second")
    assert runs_release.sign(first, fleet.folder / "state") is not None
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test"]) == 0
    assert edge_agent(["import", str(second), "--state", str(device), "--no-self-test"]) == 4  # unsigned
    for _ in range(2):
        code, _, err = fleet.call("keys", "rotate", "--config", fleet.config)
        assert code == 0, err
    code, out, err = fleet.call("keys", "sign", second, "--config", fleet.config)
    assert (code, "signed by coordinator: 1 of 1 needed" in out, "warning" in out) == (0, True, False), err
    assert edge_agent(["import", str(second), "--state", str(device), "--no-self-test"]) == 0
    assert TrustStore(device / "bundles").newest_root().version == 3
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test"]) == 4  # older, and the old key
    assert fleet.call("keys", "sign", first, "--again", "--config", fleet.config)[0] == 0
    capsys.readouterr()
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signed"]
    for path in (keys.root_key, keys.release_key):
        assert path.stat().st_mode & 0o077 == 0
    code, out, _ = fleet.call("keys", "sign", first, "--again", "--min-agent", "99", "--config", fleet.config)
    assert (code, "warning: only agents of version 99 or newer install it" in out) == (0, True)


def test_two_of_three_people_sign_and_the_coordinator_does_not(fleet, bundle, caplog, capsys):
    people = ["alice", "bob", "carol"]
    for name in people:
        named = () if name == "bob" else ("--name", name.title())
        assert fleet.call("keys", "new", fleet.folder / f"{name}.key", *named)[0] == 0
    given = [word for name in people for word in ("--release-key", fleet.folder / f"{name}.key.pub")]
    words = ("--host", "localhost", "--port", fleet.port, "--enroll-port", fleet.enroll_port)
    assert fleet.call("init", fleet.folder / "new", *words, *given, "--threshold", 4)[0] == 2
    assert not (fleet.folder / "new").exists()
    code, out, err = fleet.call("init", fleet.folder / "new", *words, *given, "--threshold", 2)
    assert code == 0, err
    assert "people sign them, 2 of 3 keys" in out
    state = fleet.folder / "new" / "state"
    path = bundle("b")
    assert runs_release.sign(path, state) is None
    assert "people sign releases here" in caplog.text
    assert archive.open_bundle(path).release is None
    away = fleet.folder / "away"  # the people have these two files and no state folder
    away.mkdir()
    for name in ("root.json", "roots.json"):
        shutil.copy(ReleaseKeys(state).folder / name, away)
    root = parse(Envelope, (away / "root.json").read_bytes(), "root")

    def sign(name):
        return fleet.call("keys", "sign", path, "--key", fleet.folder / f"{name}.key", "--root", away / "roots.json")

    code, out, err = sign("alice")
    assert (code, f"by Alice: 1 of 2 needed; 1 more needed: 'headwater keys sign {path} --key" in out) == (0, True), err
    code, _, err = fleet.call(
        "keys", "sign", path, "--key", fleet.folder / "bob.key.pub", "--root", away / "roots.json"
    )
    assert (code, "the public half of a key; expected the file FILE without .pub" in err) == (2, True)
    assert "Alice had signed this version already" in sign("alice")[1]  # twice is once
    shown = fleet.call("keys", "show", "--key", fleet.folder / "alice.key.pub", "--json")[1]
    assert json.loads(shown)["id"] == signature_of(path)["signers"][0]["id"]
    with pytest.raises(BundleUntrusted, match="signed by 1 of"):
        archive.verify(path, root)
    assert sign("carol")[0] == 0
    assert archive.verify(path, root)[0].federation == "home"
    code, out, _ = fleet.device("verify", path, "--root", away / "root.json", "--json")
    stated = json.loads(out)
    assert (code, stated["root"], stated["threshold"]) == (0, 1, 2)
    assert {one["name"] for one in stated["signers"]} == {"Alice", "Carol"}
    code, _, err = fleet.call("keys", "new", fleet.folder / "eve.key", "--name", "E\tve")
    assert (code, "is no name of a key" in err) == (2, True)
    assert fleet.call("keys", "new", fleet.folder / "mallory.key")[0] == 0
    code, _, err = sign("mallory")
    assert (code, "none of the 3 that sign releases" in err) == (2, True)
    code, _, err = fleet.call("keys", "rotate", "--state", state)
    assert (code, "name all release keys" in err) == (2, True)


def test_a_change_of_keys_weakens_nothing_without_a_word(fleet, tmp_path, bundle):
    fleet.init()
    keys = keys_of(fleet)
    state = ("--state", fleet.folder / "state")
    for name in ("alice", "bob", "carol"):
        assert fleet.call("keys", "new", tmp_path / f"{name}.key", "--name", name.title())[0] == 0

    def names():
        root = keys.newest()
        return [root.roles["targets"].threshold, *sorted(root.names[one] for one in root.roles["targets"].keyids)]

    def rotate(*who, more=()):
        own = keys.release_key.with_name("release.key.pub")
        files = [own if name == "own" else tmp_path / f"{name}.key.pub" for name in who]
        words = [word for file in files for word in ("--release-key", file)]
        code, _, err = fleet.call("keys", "rotate", *words, *more, *state)
        return code, err

    assert rotate("own", "alice", "bob", more=("--threshold", 2)) == (0, "")
    before = set(keys.newest().roles["targets"].keyids)
    assert keys.release_key.exists(), "the new root names it"
    assert rotate() == (0, "")  # the coordinator's own alone is replaced
    assert names() == [2, "Alice", "Bob", "coordinator"]
    assert len(before & set(keys.newest().roles["targets"].keyids)) == 2
    assert Key.of(public_bytes(read_key(keys.release_key))).id in keys.newest().roles["targets"].keyids
    version = keys.newest().version
    code, err = rotate("own", "alice", "bob")
    assert (code, f"these keys count since root {version}" in err) == (2, True)
    code, err = rotate("alice", more=("--threshold", 1))
    assert (code, "the threshold of releases falls from 2 to 1; nothing was changed, --yes does it" in err) == (2, True)
    assert (rotate("alice")[0], keys.newest().version) == (2, version)  # 2 of 1
    assert rotate("alice", "bob", "carol") == (0, "")
    assert (names(), keys.release_key.exists()) == ([2, "Alice", "Bob", "Carol"], False)
    assert rotate(more=("--threshold", 3)) == (0, "")
    assert rotate("carol", more=("--threshold", 1, "--yes")) == (0, "")
    assert names() == [1, "Carol"]
    code, err = rotate("carol", more=("--key", tmp_path / "carol.key.pub"))
    assert (code, "the public half of a key" in err) == (2, True)
    (tmp_path / "carol.key.pub").write_text("0x12\n")
    code, err = rotate("carol")
    assert (code, "carol.key.pub: no public key; expected the file FILE.pub" in err) == (2, True)
    code, _, err = fleet.call("keys", "sign", bundle("b"), "--key", tmp_path / "carol.key", "--root", keys.root)
    assert (code, "root.json does; expected roots.json, which is beside that" in err) == (2, True)


def test_two_people_sign_an_older_bundle_for_a_new_release_by_the_commands_that_are_said(tmp_path, bundle):
    files = []
    for name in ("alice", "bob"):
        files.append(tmp_path / f"{name}.key")
        write_key(files[-1], new_key(), name=name)
    folder = StateFolder(tmp_path / "state")
    made = bundle("b")
    keys = ReleaseKeys(folder.path)
    with folder.look(create=True) as state:
        keys.create("home", NOW, [read_public(file.with_name(f"{file.name}.pub")) for file in files], 2)
        path = state.run("run-0001").folder / "run-0001.hwb"
        path.parent.mkdir(parents=True)
        shutil.copy(made, path)
        bundle_id = archive.open_bundle(path).manifest.bundle_id

        def sign(number, version, again=False):
            key = read_key(files[number])
            end = NOW + timedelta(days=1)
            sign_bundle(path, keys.roots(), [key], NewRelease(version, end), again=again)

        def advice(digest):
            with pytest.raises(UsageError) as caught:
                file_to_release(state, "run-0001", bundle_id, digest, NOW)
            return str(caught.value)

        sign(0, 7)
        sign(1, 7)
        digest = state.blobs.put(file_to_release(state, "run-0001", bundle_id, "", NOW)[0])
        body = {"bundle_id": bundle_id}
        state.journal.append(fact_of("release_made", body), run="run-0001", round=1, digest=digest)
        assert "--again" in advice(digest)
        sign(0, 8, again=True)
        assert "signed by 1 of" in advice(digest)
        assert "--again" not in advice(digest)
        sign(1, 9)
        _, signed = file_to_release(state, "run-0001", bundle_id, digest, NOW)
    assert (signed["version"], {one["name"] for one in signed["signers"]}) == (8, {"alice", "bob"})


def test_what_people_have_signed_is_not_released_where_no_device_may_install_it(tmp_path, bundle):
    write_key(tmp_path / "alice.key", new_key(), name="alice")
    folder = StateFolder(tmp_path / "state")
    made = bundle("b")
    keys = ReleaseKeys(folder.path)
    with folder.look(create=True) as state:
        keys.create("home", NOW, [read_public(tmp_path / "alice.key.pub")], 1)
        path = state.run("run-0001").folder / "run-0001.hwb"
        path.parent.mkdir(parents=True)
        shutil.copy(made, path)
        bundle_id = archive.open_bundle(path).manifest.bundle_id

        def advice(version, end=NOW + timedelta(days=1), **more):
            key = read_key(tmp_path / "alice.key")
            sign_bundle(path, keys.roots(), [key], NewRelease(version, end, **more), again=True)
            with pytest.raises(UsageError, match=f"keys sign {path} --key FILE --again") as caught:
                file_to_release(state, "run-0001", bundle_id, "", NOW)
            return str(caught.value)

        assert "expired at 20" in advice(7, end=NOW)
        assert "needs agents of version 99 (--min-agent), and this is headwater 0." in advice(8, min_agent="99")
        body = {"bundle_id": "ab" * 32, "signed": {"version": 20}}
        state.journal.append(fact_of("release_made", body), run="run-0002", round=1, digest="cd" * 32)
        assert "devices that have installed newer releases refuse" in advice(9)


def test_a_bundle_carries_the_newest_roots_that_have_room(bundle, tmp_path, monkeypatch):
    home = Federation()
    path = bundle("b")
    for _ in range(9):
        home.rotate(1)
    size = len(dump(home.roots[-1]))
    monkeypatch.setattr(state_release_keys, "MAX_BYTES", 5 * size)
    home.sign(path, 7)
    carried = parse(Member, archive.open_bundle(home.sign(path, 7)).release, "b").roots
    assert [one.signed["version"] for one in carried] in ([7, 8, 9, 10], [8, 9, 10])
    assert archive.verify(home.sign(path, 7), home.roots[7])[0].version == 7
    monkeypatch.setattr(state_release_keys, "MAX_BYTES", size)
    with pytest.raises(UsageError, match="use fewer keys"):
        home.sign(path, 8)


def test_a_change_of_root_keys_needs_the_old_ones_and_the_new_ones(fleet, tmp_path):
    fleet.init()
    for name in ("one", "two"):
        fleet.call("keys", "new", tmp_path / f"{name}.key")
    change = ["keys", "rotate", "--state", tmp_path / "state"]
    for name in ("one", "two"):
        change += ["--root-key", tmp_path / f"{name}.key.pub"]
    change += ["--root-threshold", 2, "--key", tmp_path / "one.key"]
    code, _, err = fleet.call(*change)
    assert (code, "root 2 is signed by 1 of the keys of root 2" in err) == (2, True)
    assert keys_of(fleet).newest().version == 1
    code, _, err = fleet.call(*change, "--key", tmp_path / "two.key")
    assert code == 0, err
    assert keys_of(fleet).newest().roles["root"].threshold == 2
    code, _, err = fleet.call("keys", "rotate", "--state", tmp_path / "state")
    assert (code, "root 3 is signed by 0 of the keys of root 2" in err) == (2, True)


def test_a_change_of_keys_is_signed_on_other_machines_and_brought_back(fleet, tmp_path, bundle):
    """Root keys of three people, two of which have to sign, none at the coordinator; then carol is replaced by dave."""
    fleet.init()
    state = tmp_path / "state"
    change = tmp_path / "change.json"
    for name in ("alice", "bob", "carol", "dave"):
        assert fleet.call("keys", "new", tmp_path / f"{name}.key", "--name", name.title())[0] == 0

    def roots(*names):
        return [word for name in names for word in ("--root-key", tmp_path / f"{name}.key.pub")]

    def sign(name):
        away = tmp_path / f"{name}-machine"
        away.mkdir(exist_ok=True)
        shutil.copy(change, away)  # that file and the key are all that is there
        code, out, err = fleet.call("keys", "sign", away / change.name, "--key", tmp_path / f"{name}.key")
        assert code == 0, err
        shutil.copy(away / change.name, change)
        return out

    first = ("--root-threshold", 2, "--out", change, "--state", state)
    code, out, err = fleet.call("keys", "rotate", *roots("alice", "bob", "carol"), *first)
    assert code == 0, err
    assert "root 2 is signed by 0 of the keys of root 2, 2 are needed: 2 more of" in out
    assert all(f"new: {name}" in out for name in ("Alice", "Bob", "Carol"))
    assert "no more: root.key" in out
    assert keys_of(fleet).newest().version == 1
    code, _, err = fleet.call("keys", "accept", change, "--state", state)
    assert (code, "2 more of" in err) == (2, True)
    assert "1 more of" in sign("alice")
    assert "complete: 'headwater keys accept" in sign("bob")
    code, out, err = fleet.call("keys", "accept", change, "--state", state)
    assert code == 0, err
    assert "Carol" in out
    keys_of(fleet).root_key.unlink()  # it signs nothing any more
    assert fleet.call("keys", "rotate", *roots("alice", "bob", "dave"), *first)[0] == 0
    assert "root 3 is signed by 1 of the keys of root 3, 2 are needed: 1 more of" in sign("dave")
    code, _, err = fleet.call("keys", "accept", change, "--state", state)
    assert (code, "root 3 is signed by 0 of the keys of root 2" in err) == (2, True)
    sign("carol")  # the old threshold still lacks one
    code, _, err = fleet.call("keys", "accept", change, "--state", state)
    assert (code, "root 3 is signed by 1 of the keys of root 2, 2 are needed: 1 more of" in err) == (2, True)
    assert ("Alice" in err, "Carol" in err) == (True, False)
    sign("alice")
    assert fleet.call("keys", "accept", change, "--state", state)[0] == 0
    assert keys_of(fleet).newest().version == 3
    code, _, err = fleet.call("keys", "sign", change, "--key", tmp_path / "bob.key", "--state", state)
    assert code == 0, err
    assert fleet.call("keys", "new", tmp_path / "mallory.key")[0] == 0
    code, _, err = fleet.call("keys", "sign", change, "--key", tmp_path / "mallory.key")
    assert (code, "neither in root 2 nor in root 3" in err) == (2, True)
    path = bundle("b")
    assert runs_release.sign(path, state) is not None  # the coordinator's release key has stayed


def test_the_coordinator_gets_its_new_key_when_the_change_that_others_sign_counts(fleet, tmp_path, bundle):
    fleet.init()
    keys = keys_of(fleet)
    change = tmp_path / "change.json"
    keys.root_key.rename(tmp_path / "root.key")
    before = keys.newest().roles["targets"].keyids
    words = ("keys", "rotate", "--out", change, "--state", tmp_path / "state")
    for _ in range(2):  # asked for twice: the key of the first file still counts
        assert fleet.call(*words)[0] == 0
    path = bundle("b")
    assert runs_release.sign(path, tmp_path / "state") is not None
    assert signature_of(path)["signers"] == [{"id": before[0], "name": "coordinator"}]
    assert fleet.call("keys", "sign", change, "--key", tmp_path / "root.key")[0] == 0
    assert fleet.call("keys", "accept", change, "--state", tmp_path / "state")[0] == 0
    assert runs_release.sign(path, tmp_path / "state") is not None
    (after,) = signature_of(path)["signers"]
    assert (after["id"], after["name"]) == (keys.newest().roles["targets"].keyids[0], "coordinator")
    assert after["id"] != before[0]


def test_status_names_who_signed_a_release_and_where_it_comes_from(fleet, bundle):
    fleet.init()
    path = bundle("b")
    state = fleet.folder / "state"
    origin = {"method": "fedavg", "seed": 7, "clients": 3, "partition_sha256": "ab" * 32}
    scores = {"clients": 3, "support": 30, "mean": 0.5, "worst_tenth": 0.25}
    body = {"bundle_id": archive.open_bundle(path).manifest.bundle_id, "lineage": {**origin, "scores": scores}}
    with StateFolder(state).look(create=True) as folder:
        digest = folder.blobs.put(path.read_bytes())
        folder.journal.append(fact_of("bundle_exported", body), run="run-0001", round=9, digest=digest)
    code, out, err = fleet.call("release", "create", "--canary", "all", "--state", state, "--json")
    assert code == 0, err
    signed = json.loads(out)["signed"]
    assert [one["name"] for one in signed["signers"]] == ["coordinator"]
    assert (signed["threshold"], signed["keys"]) == (1, 1)
    with StateFolder(state).look() as folder:
        (made,) = folder.journal.entries(kinds=("release_made",))
        result = {"outcome": "ok", "acc": 0.75, "support": 20}
        said = {"runs": body["bundle_id"], "release": 1, "result": result}
        folder.journal.append(fact_of("device_reported", said), agent="porch")
        assert archive.verify(folder.blobs.path(made.digest), keys_of(fleet).roots()[0])[0].version == signed["version"]
        content, _ = file_to_release(folder, "run-0001", body["bundle_id"], made.digest, NOW)
        (fleet.folder / "again.hwb").write_bytes(content)
    again, _ = archive.verify(fleet.folder / "again.hwb", keys_of(fleet).roots()[0])
    assert again.reported.model_dump() == {"clients": 1, "support": 20, "mean": 0.75, "worst_tenth": 0.75}
    code, out, _ = fleet.call("release", "status", "--state", state, "--json")
    (release,) = json.loads(out)["releases"]
    assert (release["scored"]["run"], release["scored"]["devices"]["mean"]) == (scores, 0.75)
    text = fleet.call("release", "status", "--state", state)[1]
    assert "coordinator; 1 of 1 needed" in text
    assert "acc.personal in the run 0.500, worst tenth 0.250 of 3 clients; on devices 0.750" in text


def test_versions_of_releases_grow_also_when_the_clock_goes_back(tmp_path):
    keys = ReleaseKeys(tmp_path)
    keys.create("home", NOW)
    made = [keys.next_version(at) for at in (NOW, NOW, NOW - timedelta(days=400), NOW + timedelta(days=1))]
    first = int(NOW.timestamp())
    assert made == [first, first + 1, first + 2, first + 86_400]
    end = state_release_keys.end_of(made[2], NOW - timedelta(days=400), timedelta(days=365))
    assert end == NOW + timedelta(days=365, seconds=2), "devices refuse what ends before the version of the newest one"


def test_the_key_that_signs_may_be_a_credential_of_systemd(tmp_path, bundle, monkeypatch):
    keys = ReleaseKeys(tmp_path / "state")
    path = bundle("b")
    keys.create("home", NOW)
    (tmp_path / "credentials").mkdir()
    keys.release_key.rename(tmp_path / "credentials" / "release.key")
    assert runs_release.sign(path, tmp_path / "state") is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    assert runs_release.sign(path, tmp_path / "state") is not None


def test_a_kill_at_any_step_of_a_change_of_keys_leaves_a_key_that_signs(tmp_path, bundle):
    state = tmp_path / "state"
    before = tmp_path / "before"
    path = bundle("b")
    keys = ReleaseKeys(state)
    keys.create("home", NOW)
    shutil.copytree(state, before)

    def change():
        own = keys.next_key()
        release = role([Public(public_bytes(own))], 1)
        keys.accept(keys.change(NOW, [read_key(keys.root_key)], release=release, own=own))

    with DyingProcess(state).mounted() as counting:
        change()
    versions = set()
    for at in range(len(counting.writes)):
        shutil.rmtree(state)
        shutil.copytree(before, state)
        with DyingProcess(state, at).mounted() as process, pytest.raises(Killed):
            change()
            pytest.fail(f"survived {process.writes[-1]}")
        versions.add(keys.newest().version)
        for again in (False, True):
            if again:
                change()
            assert keys.sign(path, NOW)[1:] == (1, 1), process.writes[-1]
    assert versions == {1, 2}


def test_a_key_that_may_not_sign_leaves_the_bundle_unsigned_and_says_so(tmp_path, bundle, caplog):
    keys = ReleaseKeys(tmp_path)
    path = bundle("b")
    keys.create("home", NOW)
    write_key(keys.release_key, new_key())  # as a credential of systemd is, after a change of keys
    assert runs_release.sign(path, tmp_path) is None
    assert "is none of the 1 that sign releases" in caplog.text
    assert archive.open_bundle(path).release is None


def test_keys_are_made_once_and_damaged_ones_are_told(tmp_path):
    keys = ReleaseKeys(tmp_path)
    with pytest.raises(StateError, match="'headwater keys init' makes them"):
        keys.roots()
    keys.create("home", NOW)
    with pytest.raises(UsageError, match="has release keys already"):
        keys.create("home", NOW)
    (keys.folder / "roots.json").write_bytes(b'{"roots": []}')
    with pytest.raises(StateError, match="damaged"):
        keys.roots()


def test_the_bundles_of_a_run_and_of_a_round_are_signed_for_their_purpose(tmp_path, bundle, monkeypatch):
    made = bundle("made")
    state = tmp_path / "state"
    ReleaseKeys(state).create("home", NOW)

    lineage = Lineage(run="run-0001", round=1, seed=0, clients=2, partition_sha256="0" * 64, encoder_sha256="1" * 64)
    model = OfModel(method="fedavg", task=TASK, state="")

    def ask(_function, asked, *_):
        yield
        shutil.copy(made, asked.path)
        return {"bundle_id": "0" * 64, "parity_max_abs": 0.0, "int8_cosine": None}

    blobs = BlobStore(state / "blobs")
    context = SimpleNamespace(
        config=CoordinatorConfig(task=TASK),
        state=SimpleNamespace(path=state, blobs=blobs, run=lambda _: SimpleNamespace(folder=tmp_path)),
        ask=ask,
    )
    monkeypatch.setattr(runs_release, "_lineage", lambda _: lineage)
    request = SimpleNamespace(method="fedavg")
    method = SimpleNamespace(all_params=dict)
    run = SimpleNamespace(
        id="run-0001", context=context, model_for_compute=lambda: model, request=request, method=method
    )
    for purpose in ("release", "round"):
        list(runs_release.export_bundle(run, purpose, purpose))
        release, _ = archive.verify(tmp_path / f"{purpose}.hwb", ReleaseKeys(state).roots()[0])
        assert release.purpose == purpose


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"export": {"release": "each_run"}}, "'each_run' releases a bundle before anybody can sign it, and 1 of 1"),
        ({"export": {"release": "each_run", "every": 2}}, "set export.release = 'manual'"),
        ({"cohort": {"tier": "any"}}, "cohort.tier = 'any' sends devices without torch"),
        ({}, None),
        ({"export": {"release": "each_run", "after_run": False}}, None),
    ],
)
def test_what_runs_would_send_unsigned_is_refused_beforehand_where_people_sign(tmp_path, settings, message):
    config = CoordinatorConfig(task=TASK, state=tmp_path, **settings)
    checked_method(config, "fedpac", {})  # there are no keys
    keys = ReleaseKeys(tmp_path)
    keys.create("home", NOW)
    checked_method(config, "fedpac", {})  # the coordinator signs
    keys.release_key.unlink()
    if message is None:
        checked_method(config, "fedpac", {})
    else:
        with pytest.raises(UsageError, match=message):
            checked_method(config, "fedpac", {})

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
from signing import NOW

from coordinator.config import CoordinatorConfig
from coordinator.runs import release as runs_release
from coordinator.state.release_keys import ReleaseKeys, new_key, read_key, role, write_key
from coordinator.state.store import BlobStore
from edge_agent import bundle as bundles
from edge_agent.cli import main as edge_agent
from edge_agent.errors import BundleUntrusted, StateError, UsageError
from edge_agent.task import ImageInput, Task
from edge_agent.trust import Envelope, TrustStore, parse, public_bytes

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
    from export import bundle, synthetic_inputs

    def make(name):
        method = methods.create("fedavg", {})
        path = tmp_path / f"{name}.hwb"
        bundle(method.build(TASK), method, TASK, synthetic_inputs(TASK, 8), path, name=name, int8=False)
        return path

    return make


def keys_of(fleet):
    return ReleaseKeys(fleet.folder / "state")


def test_init_makes_keys_and_an_enrolled_device_trusts_them_and_follows_while_off(fleet, bundle, capsys):
    fleet.init()
    keys, device = keys_of(fleet), fleet.folder / "porch"
    assert json.loads(fleet.call("keys", "show", "--config", fleet.config, "--json")[1])["signs_here"]
    token, files = fleet.token("porch"), (fleet.folder / "request.json", fleet.folder / "answer.json")
    options = ("--config", fleet.folder / "porch.toml", "--state", device, "--data", "digits:optdigits?n=60")
    assert fleet.device("enroll", token, *options, "--csr", files[0])[0] == 0
    assert fleet.call("sign", files[0], "--out", files[1], "--config", fleet.config)[0] == 0
    assert fleet.device("enroll", token, *options, "--answer", files[1])[0] == 0
    assert TrustStore(device / "bundles").newest_root().version == 1
    first, second = bundle("first"), bundle("second")
    assert runs_release.sign(first, fleet.folder / "state") is not None
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test"]) == 0
    assert edge_agent(["import", str(second), "--state", str(device), "--no-self-test"]) == 4  # unsigned
    for _ in range(2):
        code, _, err = fleet.call("keys", "rotate", "--config", fleet.config)
        assert code == 0, err
    code, out, err = fleet.call("keys", "sign", second, "--config", fleet.config)
    assert (code, "1 signature(s)" in out) == (0, True), err
    assert edge_agent(["import", str(second), "--state", str(device), "--no-self-test"]) == 0
    assert TrustStore(device / "bundles").newest_root().version == 3
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test"]) == 4  # older, and the old key
    assert fleet.call("keys", "sign", first, "--again", "--config", fleet.config)[0] == 0
    capsys.readouterr()
    assert edge_agent(["import", str(first), "--state", str(device), "--no-self-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signed"]
    for path in (keys.root_key, keys.release_key):
        assert path.stat().st_mode & 0o077 == 0


def test_two_of_three_people_sign_and_the_coordinator_does_not(fleet, bundle, caplog, capsys):
    people = ["alice", "bob", "carol"]
    for name in people:
        assert fleet.call("keys", "new", fleet.folder / f"{name}.key")[0] == 0
    given = [word for name in people for word in ("--release-key", fleet.folder / f"{name}.key.pub")]
    words = ("--host", "localhost", "--port", fleet.port, "--enroll-port", fleet.enroll_port)
    code, out, err = fleet.call("init", fleet.folder / "new", *words, *given, "--threshold", 2)
    assert code == 0, err
    assert "people sign them, 2 of 3 keys" in out
    state, path = fleet.folder / "new" / "state", bundle("b")
    assert runs_release.sign(path, state) is None
    assert "people sign releases here" in caplog.text
    assert bundles.open_bundle(path).release is None
    away = fleet.folder / "away"  # the people have these two files and no state folder
    away.mkdir()
    for name in ("root.json", "roots.json"):
        shutil.copy(ReleaseKeys(state).folder / name, away)
    root = parse(Envelope, (away / "root.json").read_bytes(), "root")

    def sign(name):
        return fleet.call("keys", "sign", path, "--key", fleet.folder / f"{name}.key", "--root", away / "roots.json")

    code, out, err = sign("alice")
    assert (code, "1 signature(s); 1 more needed" in out) == (0, True), err
    sign("alice")  # twice is once
    with pytest.raises(BundleUntrusted, match="signed by 1 of"):
        bundles.verify(path, root)
    assert sign("carol")[0] == 0
    assert bundles.verify(path, root)[0].federation == "home"
    code, out, _ = fleet.device("verify", path, "--root", away / "root.json", "--json")
    assert (code, json.loads(out)["root"]) == (0, 1)
    assert fleet.call("keys", "new", fleet.folder / "mallory.key")[0] == 0
    code, _, err = sign("mallory")
    assert (code, "none of the 3 that sign releases" in err) == (2, True)
    code, _, err = fleet.call("keys", "rotate", "--state", state)
    assert (code, "name all release keys" in err) == (2, True)


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


def test_versions_of_releases_grow_also_when_the_clock_goes_back(tmp_path):
    keys = ReleaseKeys(tmp_path)
    keys.create("home", NOW)
    made = [keys.next_version(at) for at in (NOW, NOW, NOW - timedelta(days=400), NOW + timedelta(days=1))]
    first = int(NOW.timestamp())
    assert made == [first, first + 1, first + 2, first + 86_400]


def test_the_key_that_signs_may_be_a_credential_of_systemd(tmp_path, bundle, monkeypatch):
    keys, path = ReleaseKeys(tmp_path / "state"), bundle("b")
    keys.create("home", NOW)
    (tmp_path / "credentials").mkdir()
    keys.release_key.rename(tmp_path / "credentials" / "release.key")
    assert runs_release.sign(path, tmp_path / "state") is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    assert runs_release.sign(path, tmp_path / "state") is not None


def test_a_kill_at_any_step_of_a_change_of_keys_leaves_a_key_that_signs(tmp_path, bundle):
    state, before, path = tmp_path / "state", tmp_path / "before", bundle("b")
    keys = ReleaseKeys(state)
    keys.create("home", NOW)
    shutil.copytree(state, before)

    def change():
        own = new_key()
        keys.rotate(NOW, [read_key(keys.root_key)], release=role([public_bytes(own)], 1), own=own)

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
    keys, path = ReleaseKeys(tmp_path), bundle("b")
    keys.create("home", NOW)
    write_key(keys.release_key, new_key())  # as a credential of systemd is, after a change of keys
    assert runs_release.sign(path, tmp_path) is None
    assert "is none of the 1 that sign releases" in caplog.text
    assert bundles.open_bundle(path).release is None


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


def test_the_bundle_of_a_run_is_signed_and_that_of_a_round_is_not(tmp_path, bundle, monkeypatch):
    made = bundle("made")
    state = tmp_path / "state"
    ReleaseKeys(state).create("home", NOW)

    def ask(_function, asked, *_):
        yield
        shutil.copy(made, asked["path"])
        return {"bundle_id": "0" * 64}

    blobs = BlobStore(state / "blobs")
    context = SimpleNamespace(
        config=CoordinatorConfig(task=TASK),
        state=SimpleNamespace(path=state, blobs=blobs, run=lambda _: SimpleNamespace(folder=tmp_path)),
        ask=ask,
    )
    monkeypatch.setattr(runs_release, "_lineage", lambda _: {})
    request, method = SimpleNamespace(method="fedavg"), SimpleNamespace(all_params=dict)
    run = SimpleNamespace(id="run-0001", context=context, model_for_compute=dict, request=request, method=method)
    for purpose in ("release", "round"):
        list(runs_release.export_bundle(run, purpose, purpose))
        assert (bundles.open_bundle(tmp_path / f"{purpose}.hwb").release is not None) == (purpose == "release")

"""Signed bundles on a head-tier device: who is trusted, and what a kill in the middle of a change leaves."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from federation_harness import Killed
from full_disk import DyingProcess
from signing import NOW, Federation, now

from edge_agent import methods
from edge_agent.agent.head_tier import contribute_round, install_bundle, trust_configured
from edge_agent.bundle import archive, installed
from edge_agent.bundle.trust import TrustStore, dump
from edge_agent.core.config import AgentBrokerConfig, AgentConfig, BundleConfig, DataConfig, HeadConfig, PrivacyConfig
from edge_agent.core.errors import BundleDamaged, BundleUntrusted, ConfigError, HeadwaterError
from edge_agent.data import Samples
from edge_agent.identity.signed_request import canonical
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import load_head
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Install


@pytest.fixture
def home():
    return Federation()


@pytest.fixture
def config(tmp_path):
    return AgentConfig(
        id="dev",
        state=tmp_path / "state",
        data=DataConfig(source="digits:optdigits?n=80"),
        head=HeadConfig(name="prototype", precision="fp32", local=False, min_gain=-1),
        broker=AgentBrokerConfig(url="mqtts://far.example"),
    )


def order(path):
    manifest = archive.open_bundle(path).manifest
    return Install(run="run-0001", bundle_id=manifest.bundle_id, blob=Outgoing.of(path.read_bytes()).ref)


def install(config, path):
    return install_bundle(config, order(path), path, now)


def allowing(config, **settings):
    return config.model_copy(update={"bundle": BundleConfig(**settings)})


def test_unsigned_bundles_come_from_this_machine_or_by_configuration_alone(config, make_bundle):
    made = make_bundle()
    with pytest.raises(BundleUntrusted, match=r"trusts no release keys.* enroll it, or set bundle\.trust"):
        install(config, made.path)
    near = config.model_copy(update={"broker": AgentBrokerConfig(url="mqtt://127.0.0.1")})
    with pytest.raises(BundleUntrusted):
        install(allowing(near, unsigned=False), made.path)
    assert install(near, made.path).bundle_id == made.manifest.bundle_id
    assert install(allowing(config, unsigned=True), made.path).bundle_id == made.manifest.bundle_id


def test_a_device_trusts_the_root_that_its_configuration_names(config, make_bundle, home, tmp_path):
    root = tmp_path / "root.json"
    root.write_bytes(dump(home.roots[0]))
    mine = allowing(config, trust=root)
    signed = home.sign(make_bundle().path, 7)
    assert install(mine, signed).acc_personal is not None
    with pytest.raises(BundleUntrusted, match="is not signed"):
        install(allowing(mine, trust=root, unsigned=True), make_bundle("o.hwb", seed=1).path)
    home.rotate(1, keys=(12,))
    root.write_bytes(dump(home.roots[1]))
    assert trust_configured(mine).newest_root().version == 2
    root.write_bytes(dump(Federation(name="other").roots[0]))
    with pytest.raises(ConfigError, match=r"bundle\.trust"):
        trust_configured(mine)
    root.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        trust_configured(mine)


def test_the_first_signed_bundle_is_trusted_where_the_operator_says_so(config, make_bundle, home):
    mine = allowing(config, first_use=True)
    with pytest.raises(BundleUntrusted):
        install(mine, make_bundle().path)
    home.rotate(1, keys=(12,))
    install(mine, home.sign(make_bundle().path, 7))
    assert TrustStore(mine.state / "bundles").newest_root().version == 2
    with pytest.raises(BundleUntrusted, match="signed by 0"):
        install(mine, Federation(keys=(13,)).sign(make_bundle("o.hwb", seed=1).path, 8))


def test_first_use_trusts_nobody_whose_bundle_is_not_installed(config, make_bundle, home):
    mine = allowing(config, first_use=True)
    store = TrustStore(config.state / "bundles")
    expired = home.sign(make_bundle().path, 7, expires=NOW - timedelta(days=1))
    with pytest.raises(BundleUntrusted, match="expired"):
        install(mine, expired)
    failing = home.sign(make_bundle(golden_error=0.5).path, 7)
    with pytest.raises(BundleDamaged, match="self-test"):
        install(mine, failing)
    rootless = home.sign(make_bundle().path, 7)
    content = json.loads(archive.open_bundle(rootless).release)
    archive.attach(rootless, canonical({**content, "roots": []}) + b"\n")
    with pytest.raises(BundleUntrusted, match="metadata cannot be read"):
        install(mine, rootless)
    assert store.known() is None
    install(mine, home.sign(make_bundle().path, 8))
    assert store.described(now())["version"] == 8


def test_a_device_that_was_off_for_two_changes_of_keys_follows_to_the_configured_root(
    config, make_bundle, home, tmp_path
):
    root = tmp_path / "root.json"
    mine = allowing(config, trust=root)
    TrustStore(config.state / "bundles").anchor(home.roots[0])
    for key in (12, 13):
        home.rotate(1, keys=(key,))
    root.write_bytes(dump(home.roots[-1]))
    made = make_bundle()
    assert install(mine, home.sign(made.path, 7)).bundle_id == made.manifest.bundle_id
    assert TrustStore(config.state / "bundles").newest_root().version == 3


def test_bundles_from_before_the_trust_keep_serving(config, make_bundle, home):
    near = config.model_copy(update={"broker": AgentBrokerConfig(url="mqtt://localhost")})
    first = make_bundle()
    install(near, first.path)
    TrustStore(config.state / "bundles").anchor(home.roots[0])
    assert installed.current(config.state / "bundles").id == first.manifest.bundle_id
    with pytest.raises(BundleUntrusted):
        install(near, first.path)
    install(near, home.sign(first.path, 7))
    assert installed.current(config.state / "bundles").id == first.manifest.bundle_id


def test_row_37_a_signed_bundle_that_is_bad_here_leaves_the_old_pair_and_the_counter(config, make_bundle, home):
    store = TrustStore(config.state / "bundles")
    store.anchor(home.roots[0])
    good = make_bundle("good.hwb", dim=48, seed=2)
    install(config, home.sign(good.path, 7))
    worse = make_bundle("worse.hwb", dim=1, seed=1)
    strict = config.model_copy(update={"head": config.head.model_copy(update={"min_gain": 0.0})})
    assert install(strict, home.sign(worse.path, 8)).rolled_back
    broken = make_bundle("broken.hwb", golden_error=0.5)
    assert "self-test" in install(config, home.sign(broken.path, 9)).rolled_back
    assert installed.current(config.state / "bundles").id == good.manifest.bundle_id
    assert store.described(now())["version"] == 7


def test_a_clock_that_is_a_year_off_postpones_and_the_running_pair_answers(config, make_bundle, home):
    TrustStore(config.state / "bundles").anchor(home.roots[0])
    good, better = (make_bundle(f"{dim}.hwb", dim=dim, seed=2) for dim in (24, 48))
    install(config, home.sign(good.path, 7))
    path = home.sign(better.path, 8)
    with pytest.raises(BundleUntrusted, match="set the clock"):
        install_bundle(config, order(path), path, lambda: (NOW + timedelta(days=400)).timestamp())
    assert answers_of(config)[0] == good.manifest.bundle_id
    assert install(config, path).bundle_id == better.manifest.bundle_id


PROBE = np.random.default_rng(5).normal(size=(6, 3, 8, 8)).astype(np.float32)


def answers_of(config):
    """The bundle in use, and what it and its head answer; refuses a pair of two halves."""
    bundle = installed.current(config.state / "bundles")
    head = load_head(config.state / "head", bundle)
    assert head.fingerprint == bundle.variant(head.precision).fingerprint
    return bundle.id, head.predict_proba(Encoder.open(bundle, "fp32").features(PROBE))


def test_row_38_a_kill_at_any_step_of_a_change_leaves_the_old_pair_or_the_new_one(config, make_bundle, home, tmp_path):
    config = config.model_copy(update={"data": DataConfig(source="digits:optdigits?n=30")})  # it is fitted 100 times
    TrustStore(config.state / "bundles").anchor(home.roots[0])
    old, new = (make_bundle(f"{dim}.hwb", dim=dim, seed=2) for dim in (24, 48))
    home.rotate(1, keys=(12,))  # the change of keys is one of the steps
    first = install(config, home.sign(old.path, 7))
    home.rotate(1, keys=(13,))
    signed = home.sign(new.path, 8)
    before = tmp_path / "before"
    shutil.copytree(config.state, before)
    with DyingProcess(config.state).mounted() as counting:
        install(config, signed)
    pairs = {first.bundle_id: None, new.manifest.bundle_id: answers_of(config)[1]}
    fresh(config, before)
    pairs[first.bundle_id] = answers_of(config)[1]
    steps = [at for at, what in enumerate(counting.writes) if "/features/" not in what]
    assert len(steps) > 40
    seen = []
    for at in steps:
        fresh(config, before)
        with DyingProcess(config.state, at).mounted() as process, pytest.raises(Killed):
            install(config, signed)
            pytest.fail(f"survived {process.writes[-1]}")
        bundle_id, answers = answers_of(config)
        np.testing.assert_array_equal(answers, pairs[bundle_id], err_msg=process.writes[-1])
        seen.append(bundle_id)
        assert install(config, signed).bundle_id == new.manifest.bundle_id
    changes = [one for one, other in itertools.pairwise(seen) if one != other]
    assert changes == [first.bundle_id]  # the old pair up to one step, the new one from then on


def fresh(config, before):
    shutil.rmtree(config.state)
    shutil.copytree(before, config.state)


def test_row_40_nothing_in_a_bundle_is_unpickled(config, make_bundle, tmp_path):
    import pickle

    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return canary.touch, ()

    payload = pickle.dumps(Payload())
    made = make_bundle(global_head=True)
    near = config.model_copy(update={"broker": AgentBrokerConfig(url="mqtt://localhost")})
    opened = archive.open_bundle(made.path)
    fields = made.manifest.model_dump(mode="json", exclude={"schema_version", "files", "variants"})
    fields["variants"] = {"fp32": "encoder.onnx"}
    for name in made.manifest.files:
        path = tmp_path / f"hostile-{name}.hwb"
        archive.pack(path, fields, {file: opened.read(file) for file in made.manifest.files} | {name: payload})
        with pytest.raises(HeadwaterError):
            install(near, path)
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists()


def test_signed_bundles_are_refused_soon_and_without_memory(config, make_bundle, home, tmp_path):
    """Unsigned, wrong key, expired, older, mixed: nothing but hashes and signatures is computed."""
    import resource

    TrustStore(config.state / "bundles").anchor(home.roots[0])
    good = make_bundle("good.hwb")
    other = make_bundle("other.hwb", seed=1)
    install(config, home.sign(good.path, 7))
    mixed = home.sign(other.path, 9)
    archive.attach(mixed, archive.open_bundle(home.sign(good.path, 8)).release)
    refused = {
        "unsigned": other.path,
        "wrong key": Federation(keys=(66,)).sign(make_bundle("key.hwb", seed=1).path, 9),
        "expired": home.sign(other.path, 10, expires=NOW - timedelta(days=1)),
        "older": home.sign(other.path, 6),
        "mixed": mixed,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, path in refused.items():
        begin = time.process_time()
        with pytest.raises(BundleUntrusted):
            install(config, path)
        assert time.process_time() - begin < 1, name
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 64


def test_the_encoder_of_a_round_counts_where_it_is_signed_for_that_and_is_never_installed(
    config, make_bundle, home, monkeypatch
):
    monkeypatch.setattr(methods, "contribution", lambda _: lambda data, received, rng: {"rows": data.features})
    config = config.model_copy(update={"privacy": PrivacyConfig(statistics=("rows",))})
    made = make_bundle()
    task = made.manifest.task
    of_run = {"run": "run-0001", "round": 1, "seed": 0, "method": "m", "method_sha256": "", "params": {}}
    job = SimpleNamespace(task=task, evaluate=False, **of_run)
    inputs = np.zeros((2, *task.input_shape), np.float32)
    samples = Samples(inputs, np.array([0, 1]), task.class_names, task.input)

    def contributes(path):
        return contribute_round(config, job, {}, path, (samples, samples), now)[0]["rows"].shape

    with pytest.raises(BundleUntrusted, match="trusts no release keys"):
        contributes(made.path)
    store = TrustStore(config.state / "bundles")
    store.anchor(home.roots[0])
    with pytest.raises(BundleUntrusted, match="is not signed"):
        contributes(made.path)
    with pytest.raises(BundleUntrusted, match="for purpose 'release', it came for 'round'"):
        contributes(home.sign(made.path, 8))
    one = home.sign(made.path, 9, purpose="round")
    assert contributes(one) == (2, 24)
    assert contributes(home.sign(made.path, 7, purpose="round")) == (2, 24)
    assert store.described(now())["version"] is None, "a round is no release that others are older than"
    with pytest.raises(BundleUntrusted, match="for purpose 'round', it came for 'release'"):
        install(config, one)

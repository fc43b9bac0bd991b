"""The attacks that The Update Framework names, on bundles of a device that trusts a federation's keys."""

from __future__ import annotations

import itertools
import json
import shutil
from datetime import timedelta

import pytest
from securesystemslib.formats import encode_canonical
from signing import NOW, YEAR, Federation, key, now, publics
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata
from tuf.ngclient._internal.trusted_metadata_set import TrustedMetadataSet

from coordinator.state.release_keys import role
from edge_agent import cli
from edge_agent.bundle import archive, installed, trust
from edge_agent.bundle.trust import (
    Envelope,
    Key,
    Member,
    Release,
    Root,
    Scores,
    TrustStore,
    canonical,
    check_signed,
    dump,
    read,
)
from edge_agent.core.errors import BundleDamaged, BundleError, BundleUntrusted, StateError


@pytest.fixture
def home():
    return Federation()


@pytest.fixture
def folder(tmp_path, home):
    """A device's folder of bundles that trusts the federation."""
    made = tmp_path / "device" / "bundles"
    TrustStore(made).anchor(home.roots[0])
    return made


@pytest.fixture
def install(folder):
    return lambda path, at=now: installed.install(path, folder, now=at)


def changed(path, edit):
    """A copy of a signed bundle whose signatures are edited: ``edit`` gets and returns them as JSON."""
    out = path.with_name(f"changed-{path.name}")
    shutil.copy(path, out)
    content = edit(json.loads(archive.open_bundle(path).release))
    archive.attach(out, canonical(content) + b"\n")
    return out


def test_a_signed_bundle_is_installed_and_verified_at_every_load(make_bundle, home, install, folder, monkeypatch):
    made = make_bundle()
    bundle = install(home.sign(made.path, 7))
    assert bundle.id == made.manifest.bundle_id
    asked = []
    original = Envelope.signers
    monkeypatch.setattr(Envelope, "signers", lambda *given: asked.append(given) or original(*given))
    assert installed.current(folder).id == bundle.id
    assert len(asked) == 1


def test_the_id_of_a_bundle_does_not_depend_on_its_signatures(make_bundle, home):
    made = make_bundle()
    signed = archive.open_bundle(home.sign(made.path, 7))
    assert signed.manifest == made.manifest
    assert archive.open_bundle(made.path).release is None
    archive.attach(signed.path, signed.release)  # again
    assert archive.open_bundle(signed.path).release == signed.release


# --- arbitrary software ----------------------------------------------------------------------------------------------


def test_row_35_unsigned_and_strange_bundles_are_refused_before_any_file_is_there(make_bundle, home, install, folder):
    made = make_bundle()
    install(home.sign(made.path, 7))
    kept = installed.current(folder).id
    other = make_bundle("other.hwb", seed=1)
    mallory = Federation(root_keys=(66,), keys=(77,))
    strange = mallory.sign(make_bundle("strange.hwb", seed=1).path, 9)
    unsigned = trust.unsigned(read(Release, read_member(home.sign(other.path, 9)).release, "release"))
    forged = []
    for number in (77, 1):  # a key of nobody, and a genuine one in a role that it does not have
        path = other.path.with_name(f"forged-{number}.hwb")
        shutil.copy(other.path, path)
        archive.attach(path, dump(Member(release=unsigned.with_signature(key(number)), roots=tuple(home.roots))))
        forged.append((path, "signed by 0 of"))
    for path, why in ((other.path, "is not signed"), (strange, "differs from the trusted one"), *forged):
        with pytest.raises(BundleUntrusted, match=why):
            install(path)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [kept[:24]]
    assert installed.current(folder).id == kept


def read_member(path):
    return trust.parse(Member, archive.open_bundle(path).release, str(path))


def test_row_35_a_flip_of_any_byte_of_a_signed_bundle_is_refused(make_bundle, home, install, folder):
    path = home.sign(make_bundle(global_head=True).path, 7)
    good = path.read_bytes()
    target = path.with_name("flipped.hwb")
    end = archive.open_bundle(path).end
    known = good.index(b'"roots":[{"signatures"', end)
    signatures = range(known, good.index(b'"signed"', known))  # of a root that is trusted already: they do not count
    for position in {*range(0, len(good), 97), *range(end, len(good), 5)} - {*signatures}:
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        target.write_bytes(bad)
        with pytest.raises(BundleError):
            install(target)
    assert not (folder / "current.json").exists()


def test_row_35_files_changed_on_the_device_are_refused_at_the_next_load(make_bundle, home, install, folder):
    bundle = install(home.sign(make_bundle().path, 7))
    other = install(home.sign(make_bundle("o.hwb", seed=1).path, 8))
    for name in ("encoder.onnx", "manifest.json", "manifest.sha256", "golden.safetensors"):
        shutil.copy(bundle.folder / name, other.folder / name)
    with pytest.raises(BundleUntrusted, match="its release is of bundle"):  # whole in itself, and not what was signed
        installed.current(folder)
    (other.folder / "release.json").unlink()
    with pytest.raises(BundleUntrusted, match="is not signed"):
        installed.current(folder)


# --- mix and match, extraneous dependencies --------------------------------------------------------------------------


def test_mix_and_match_a_release_of_another_bundle_is_refused(make_bundle, home, install):
    one, two = (home.sign(make_bundle(f"{seed}.hwb", seed=seed).path, 7 + seed) for seed in (0, 1))
    archive.attach(two, archive.open_bundle(one).release)
    with pytest.raises(BundleUntrusted, match=r"its release is of bundle .* encoder\.onnx"):
        install(two)


def test_extraneous_files_are_refused(make_bundle, home, install):
    path = home.sign(make_bundle().path, 7)

    def with_one_more(content):
        signed = content["release"]["signed"]
        signed["targets"]["extra.onnx"] = {"length": 3, "hashes": {"sha256": "0" * 64}}
        made = Envelope(signatures=(), signed=signed).with_signature(key(11))
        return {**content, "release": made.model_dump(mode="json")}

    with pytest.raises(BundleUntrusted, match=r"extra\.onnx"):
        install(changed(path, with_one_more))


# --- rollback, freeze, fast-forward ----------------------------------------------------------------------------------


def test_row_36_an_older_release_is_refused_also_after_a_restart(make_bundle, home, install, folder):
    old, new = (make_bundle(f"{seed}.hwb", seed=seed) for seed in (0, 1))
    first = home.sign(old.path, 7)
    second = home.sign(new.path, 8)
    install(first)
    install(second)
    with pytest.raises(BundleUntrusted, match=r"version 7 .* is older than version 8"):
        install(first)  # every call reads the counter from the disk: nothing else is kept
    another = home.sign(old.path, 8)
    with pytest.raises(BundleUntrusted, match="is older than version 8"):  # the same number for another bundle
        install(another)
    assert installed.current(folder).id == new.manifest.bundle_id
    install(second)  # once more, as after a kill between counter and switch
    assert installed.current(folder).id == new.manifest.bundle_id


def test_row_36_an_operator_goes_back_by_a_new_version_of_the_old_bundle(make_bundle, home, install, folder):
    old, new = (make_bundle(f"{seed}.hwb", seed=seed) for seed in (0, 1))
    install(home.sign(old.path, 7))
    install(home.sign(new.path, 8))
    install(home.sign(old.path, 9))
    assert installed.current(folder).id == old.manifest.bundle_id
    with pytest.raises(BundleUntrusted):
        install(home.sign(new.path, 8))


def test_row_36_expired_metadata_are_not_installed_and_what_runs_keeps_serving(make_bundle, home, install, folder):
    path = home.sign(make_bundle().path, 7, expires=NOW + timedelta(days=1))
    install(path)
    later = home.sign(make_bundle("n.hwb", seed=1).path, 8, expires=NOW + timedelta(days=2))
    for offset in (timedelta(days=2), timedelta(days=365 * 20)):
        with pytest.raises(BundleUntrusted, match=r"expired at .* this device's clock says"):
            install(later, lambda offset=offset: (NOW + offset).timestamp())
    assert (
        installed.current(folder).id == archive.open_bundle(path).manifest.bundle_id
    )  # at any time: no clock is asked
    assert TrustStore(folder).described((NOW + YEAR).timestamp())["expired"]
    install(later)


def test_a_clock_that_is_behind_does_not_bring_back_what_has_expired(make_bundle, home, folder):
    def install(path, days):
        return installed.install(path, folder, now=lambda: (NOW + timedelta(days=days)).timestamp())

    path = make_bundle().path
    second = timedelta(seconds=1)
    soon = home.sign(path, 7, expires=NOW + timedelta(days=30)).rename(folder.parent / "soon.hwb")
    install(home.sign(path, 8), 40)
    (folder / "newest.json").unlink()  # so that the time alone speaks against the one that has expired
    with pytest.raises(BundleUntrusted, match=r"clock says 1970-.*, and 2026-07-11T00:00:00Z is over"):
        install(soon, -NOW.timestamp() / 86400)
    with pytest.raises(BundleUntrusted, match="expired at"):  # a clock that is ahead is not noted
        install(soon, 5000)
    assert (folder / "time").read_text() == "2026-07-11T00:00:00Z"
    signed = int((NOW + timedelta(days=60)).timestamp())
    install(home.sign(path, signed, expires=NOW + YEAR), -100)
    late = home.sign(path, signed + 1, expires=NOW + timedelta(days=60) - second)
    with pytest.raises(BundleUntrusted, match=r"and 2026-07-31T00:00:00Z is over"):
        install(late, -100)  # newer than the newest, and over before that was signed
    assert TrustStore(folder).described(0)["expired"] is False
    (folder / "time").write_bytes(b"\xff no time")
    install(home.sign(path, signed + 2, expires=NOW + YEAR), 61)
    assert (folder / "time").read_text() == "2026-08-01T00:00:00Z"


def test_an_expired_root_installs_nothing(make_bundle, folder):
    home = Federation()
    home.roots.clear()
    root = home.rotate(1, expires=NOW)
    store = TrustStore(folder.parent / "other")
    store.anchor(root)
    with pytest.raises(BundleUntrusted, match="the root expired"):
        installed.install(home.sign(make_bundle().path, 7), folder.parent / "other", now=now)


def test_fast_forward_is_undone_by_a_change_of_keys(make_bundle, home, install, folder):
    bundle = make_bundle()
    install(home.sign(bundle.path, 1 << 53))  # by whoever stole the key
    with pytest.raises(BundleUntrusted, match="is older"):
        install(home.sign(bundle.path, 8))
    home.rotate(1, keys=(12,))
    install(home.sign(make_bundle("n.hwb", seed=1).path, 9))
    stolen = Federation(roots=[])
    stolen.roots[:] = home.roots[:1]
    with pytest.raises(BundleUntrusted, match="signed by 0"):
        install(stolen.sign(bundle.path, 1 << 53, 11))


def test_a_change_of_one_key_of_three_is_no_way_back(make_bundle, folder):
    home = Federation(keys=(11, 12, 13), threshold=2)
    folder = folder.parent / "other"
    TrustStore(folder).anchor(home.roots[0])
    old, new = (make_bundle(f"{seed}.hwb", seed=seed) for seed in (1, 2))
    older = home.sign(old.path, 5, 11, 13)
    installed.install(home.sign(new.path, 9, 11, 12), folder, now=now)
    home.rotate(1, keys=(11, 13, 14))  # 12 leaves
    archive.attach(older, dump(Member(release=read_member(older).release, roots=tuple(home.roots))))
    with pytest.raises(BundleUntrusted, match=r"version 5 .* is older than version 9"):
        installed.install(older, folder, now=now)
    home.rotate(1, keys=(13, 14, 15))  # 11 as well: both signers of release 9 may have been abused
    archive.attach(older, dump(Member(release=read_member(home.sign(old.path, 5)).release, roots=tuple(home.roots))))
    assert installed.install(older, folder, now=now).id == old.manifest.bundle_id


def test_a_root_with_fewer_signatures_is_the_same_root(make_bundle, folder):
    home = Federation(root_keys=(1, 2), root_threshold=1)
    folder = folder.parent / "other"
    TrustStore(folder).anchor(home.roots[0])
    home.roots[0] = home.roots[0].model_copy(update={"signatures": home.roots[0].signatures[:1]})
    made = make_bundle()
    assert installed.install(home.sign(made.path, 7), folder, now=now).id == made.manifest.bundle_id


# --- keys ------------------------------------------------------------------------------------------------------------


def test_two_of_three_keys_have_to_sign(make_bundle, tmp_path):
    home = Federation(keys=(11, 12, 13), threshold=2)
    folder = tmp_path / "bundles"
    TrustStore(folder).anchor(home.roots[0])
    for number, signers in enumerate(itertools.chain(itertools.combinations(home.keys, 1), [(11,)])):
        with pytest.raises(BundleUntrusted, match=r"signed by 1 of .* 2 of 3 are needed"):
            installed.install(home.sign(make_bundle().path, 7 + number, *signers), folder, now=now)
    for version, pair in enumerate(itertools.combinations(home.keys, 2), 20):
        installed.install(home.sign(make_bundle().path, version, *pair), folder, now=now)


def test_one_key_does_not_count_twice():
    """Neither its signature twice, nor the same key under another name."""
    home = Federation(keys=(11, 12), threshold=2)
    envelope = trust.unsigned(release_of(home)).with_signature(key(11))
    root = read(Root, home.roots[0], "root")
    twice = envelope.model_copy(update={"signatures": envelope.signatures * 2})
    renamed = envelope.signatures[0].model_copy(update={"keyid": "ab" * 32})
    keys = {**root.keys, "ab" * 32: Key.of(publics(11)[0].public)}
    both = root.roles["targets"].model_copy(update={"keyids": (*root.roles["targets"].keyids, "ab" * 32)})
    forged = root.model_copy(update={"keys": keys, "roles": {**root.roles, "targets": both}})
    for candidate, by in (
        (twice, root),
        (envelope.model_copy(update={"signatures": (*envelope.signatures, renamed)}), forged),
    ):
        with pytest.raises(BundleUntrusted, match="signed by 1"):
            check_signed(candidate, by, "targets", "release")


def release_of(home, version=7):
    return Release.model_validate(
        {
            "_type": "targets",
            "version": version,
            "expires": "2027-01-01T00:00:00Z",
            "targets": {"manifest.json": {"length": 1, "hashes": {"sha256": "0" * 64}}},
            "federation": home.name,
            "bundle_id": "1" * 64,
            "task": "2" * 64,
            "min_agent": "0.1",
        }
    )


def test_a_device_that_was_off_for_two_changes_of_keys_follows_them(make_bundle, home, install, folder):
    install(home.sign(make_bundle().path, 7))
    home.rotate(1, 2, root_keys=(2,))
    home.rotate(2, keys=(14, 15, 16), threshold=2)
    bundle = install(home.sign(make_bundle("n.hwb", seed=1).path, 8))
    assert installed.current(folder).id == bundle.id
    assert TrustStore(folder).newest_root().version == 3
    with pytest.raises(BundleUntrusted, match="signed by 0 of the keys of root 3"):  # the old key is worth nothing now
        old = Federation(roots=[])
        old.roots[:] = home.roots[:1]
        install(old.sign(make_bundle("o.hwb", seed=2).path, 9, 11))
    assert installed.rollback(folder).id != bundle.id  # what the old key had signed then may still serve


def test_roots_that_do_not_follow_are_refused(make_bundle, home, install):
    made = make_bundle()
    good = list(home.roots)
    for signers, why in (((2,), "root 2 is signed by 0 of the keys of root 1"), ((1,), "of the keys of root 2")):
        home.roots[:] = good
        home.rotate(*signers, root_keys=(2,))
        with pytest.raises(BundleUntrusted, match=why):
            install(home.sign(made.path, 7, 11))
    home.roots[:] = good
    home.root_keys = (1,)
    home.rotate(1)
    home.rotate(1)
    del home.roots[1]
    with pytest.raises(BundleUntrusted, match="those between are missing"):
        install(home.sign(made.path, 7, 11))


def test_another_federation_is_refused_with_its_own_keys_and_with_ours(make_bundle, home, install, folder):
    away = Federation(name="away")  # with the very same keys
    with pytest.raises(BundleUntrusted, match="root 1 is of federation 'away', trusted is 'home'"):
        install(away.sign(make_bundle().path, 7))
    away.rotate(1)
    home.roots.append(away.roots[1])
    with pytest.raises(BundleUntrusted, match="root 2 is of federation 'away'"):
        install(home.sign(make_bundle().path, 7))
    with pytest.raises(StateError, match=r"remove .* to trust another"):
        TrustStore(folder).anchor(away.roots[0])


def test_a_bundle_for_a_newer_agent_is_refused(make_bundle, home, install):
    with pytest.raises(BundleUntrusted, match=r"needs agents of version 99\.1, this is"):
        install(home.sign(make_bundle().path, 7, min_agent="99.1"))


# --- endless data, damaged metadata ----------------------------------------------------------------------------------


def test_endless_metadata_are_not_read(make_bundle, home, install):
    path = home.sign(make_bundle().path, 7)
    archive.attach(path, b" " * (trust.MAX_BYTES + 1))
    with pytest.raises(BundleDamaged, match="unexpected bytes"):
        install(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda it: {**it, "release": {**it["release"], "signatures": []}},
        lambda it: {**it, "release": {**it["release"], "signatures": it["release"]["signatures"] * 40}},
        lambda it: {**it, "roots": []},
        lambda it: {**it, "roots": it["roots"] * 300},
        lambda it: {**it, "more": 1},
        lambda it: {**it, "release": it["roots"][0]},
        lambda it: {**it, "release": {**it["release"], "signed": {"_type": "targets"}}},
        lambda it: {**it, "release": {**it["release"], "signed": {**it["release"]["signed"], "version": 1 << 60}}},
        lambda it: {**it, "release": {**it["release"], "signed": {**it["release"]["signed"], "expires": "never"}}},
        lambda it: [],
        lambda it: {"release": [[[[[]]]]], "roots": []},
    ],
)
def test_malformed_metadata_are_refused(make_bundle, home, install, folder, edit):
    path = changed(home.sign(make_bundle().path, 7), edit)
    try:
        install(path)
    except BundleError:
        assert not (folder / "current.json").exists()
    else:  # roots that the device knows already need not be there
        assert json.loads(archive.open_bundle(path).release)["roots"] == []


def test_a_damaged_counter_or_root_file_stops_installs_and_says_so(make_bundle, home, install, folder):
    path = home.sign(make_bundle().path, 7)
    install(path)
    for name in ("newest.json", "roots.json"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before[:-20])
        with pytest.raises(StateError, match=f"{name}.*remove"):
            install(path)
        (folder / name).write_bytes(before)
    install(path)


# --- compared with python-tuf ----------------------------------------------------------------------------------------


def of_tuf(envelope):
    return Metadata.from_dict(envelope.model_dump(mode="json"))


def test_metadata_are_those_of_tuf_in_its_canonical_form():
    home = Federation(keys=(11, 12), threshold=2)
    for envelope in (home.roots[0], trust.unsigned(release_of(home)).with_signature(key(11))):
        parsed = of_tuf(envelope)
        assert encode_canonical(envelope.signed).encode() == canonical(envelope.signed)
        assert parsed.signed.to_dict() == envelope.signed
        assert set(parsed.signatures) == {one.keyid for one in envelope.signatures}
    made = of_tuf(home.roots[0]).signed
    assert set(made.keys) == {public.id for public in publics(1, 11, 12)}


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_enough_signatures_are_what_tuf_finds_enough(threshold):
    home = Federation(keys=(11, 12, 13), threshold=threshold)
    root = read(Root, home.roots[0], "root")
    theirs = of_tuf(home.roots[0])
    for count in range(5):
        for signers in itertools.combinations((1, 11, 12, 13, 14), count):
            envelope = trust.unsigned(release_of(home))
            for number in signers:
                envelope = envelope.with_signature(key(number))
            if count == 3:  # one of them over something else
                wrong = envelope.signatures[0].model_copy(update={"sig": envelope.signatures[1].sig})
                envelope = envelope.model_copy(update={"signatures": (wrong, *envelope.signatures[1:])})
            assert accepts(lambda e=envelope: check_signed(e, root, "targets", "it"), BundleUntrusted) == accepts(
                lambda e=envelope: theirs.signed.verify_delegate("targets", canonical(e.signed), of_tuf(e).signatures),
                RepositoryError,
            )


def accepts(check, refusal):
    try:
        check()
    except refusal:
        return False
    return True


def test_changes_of_keys_are_followed_as_tuf_follows_them():
    """Every choice of signers of a second root, for a change of keys and of the threshold."""
    seen = set()
    for before, after in itertools.product((((1,), 1), ((1, 2), 2)), (((3,), 1), ((2, 3), 2), ((1, 2, 3), 2))):
        for count in range(4):
            for signers in itertools.combinations((1, 2, 3), count):
                home = Federation(root_keys=before[0], root_threshold=before[1])
                home.rotate(*signers, root_keys=after[0], root_threshold=after[1])
                first, second = home.roots
                ours = accepts(lambda f=first, s=second: trust.follow_roots([f], [s]), BundleUntrusted)
                raw = [json.dumps(one.model_dump(mode="json")).encode() for one in (first, second)]
                theirs = TrustedMetadataSet(raw[0], *envelope_type())
                assert ours == accepts(lambda t=theirs, r=raw: t.update_root(r[1]), RepositoryError)
                seen.add(ours)
    assert seen == {True, False}


def envelope_type():
    from tuf.ngclient.config import EnvelopeType

    return (EnvelopeType.METADATA,)


# --- commands --------------------------------------------------------------------------------------------------------


def test_verify_needs_the_file_and_a_root_alone(make_bundle, home, tmp_path, capsys):
    first = tmp_path / "root.json"
    first.write_bytes(dump(home.roots[0]))
    home.rotate(1, keys=(12, 13, 14), threshold=2)
    path = home.sign(make_bundle().path, 7)
    assert cli.main(["verify", str(path), "--root", str(first), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["root"], shown["federation"]) == (7, 2, "home")
    assert shown["lineage"] is None
    of = {"run": "run-0001", "round": 3, "seed": 7, "clients": 4, "partition_sha256": "a" * 64}
    made = make_bundle(extra={"lineage": {**of, "encoder_sha256": "b" * 64}})
    path = home.sign(made.path, 9, reported=Scores(clients=5, support=50, mean=0.75, worst_tenth=0.5))
    assert cli.main(["verify", str(path), "--root", str(first)]) == 0
    text = capsys.readouterr().out
    assert "run-0001, round 3, method fedavg, seed 7" in text
    assert "acc.personal 75.0 %, worst tenth 50.0 % (5 clients, 50 held-out samples)" in text
    one = home.sign(make_bundle().path, 8, 12)
    assert cli.main(["verify", str(one), "--root", str(first), "--json"]) == 4
    assert "signed by 1 of" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_import_trusts_a_root_from_a_file_and_nobody_else_from_then_on(make_bundle, home, tmp_path, capsys):
    root = tmp_path / "root.json"
    state = tmp_path / "state"
    root.write_bytes(dump(home.roots[0]))
    made = make_bundle()
    other = make_bundle("o.hwb", seed=1)
    assert cli.main(["import", str(other.path), "--state", str(state)]) == 0  # nobody is trusted yet
    signed = home.sign(made.path, 7, expires=NOW + 50 * YEAR)
    assert cli.main(["import", str(signed), "--state", str(state), "--root", str(root)]) == 0
    assert installed.rollback(state / "bundles").id == other.manifest.bundle_id  # it was there before
    assert cli.main(["import", str(make_bundle("p.hwb", seed=2).path), "--state", str(state)]) == 4
    assert "is not signed" in capsys.readouterr().err


def test_import_with_a_root_two_changes_ahead_finds_those_between_in_the_bundle_or_says_what_to_bring(
    make_bundle, home, tmp_path, capsys
):
    state = tmp_path / "state"
    folder = tmp_path / "roots"
    newest = tmp_path / "root.json"
    for number in (12, 13):
        home.rotate(1, keys=(number,))
    folder.mkdir()
    for number, root in enumerate(home.roots):
        (folder / f"{number}.json").write_bytes(dump(root))
    newest.write_bytes(dump(home.roots[-1]))
    unsigned = make_bundle().path
    signed = home.sign(make_bundle().path, 8, expires=NOW + 50 * YEAR)

    def imported(bundle, root):
        """Into a device that trusts root 1: exit code, what was said, and which root it trusts now."""
        shutil.rmtree(state, ignore_errors=True)
        TrustStore(state / "bundles").anchor(home.roots[0])
        words = ["import", str(bundle), "--state", str(state), "--no-self-test", "--root", str(root)]
        return cli.main(words), capsys.readouterr().err, TrustStore(state / "bundles").newest_root().version

    code, err, version = imported(unsigned, newest)
    assert (code, version) == (1, 1)
    assert "root 3 is 2 changes of keys later: root 2 is missing; bring roots.json" in err
    for root in (newest, folder):  # the bundle has root 2, too
        assert imported(signed, root)[::2] == (0, 3)
    code, err, version = imported(unsigned, folder)  # the roots count; the bundle is still not signed
    assert (code, "is not signed" in err, version) == (4, True, 3)
    forged = Federation(root_keys=(2,), keys=(19,))
    forged.rotate(2)
    (folder / "1.json").write_bytes(dump(forged.roots[1]))
    code, err, version = imported(unsigned, folder)
    assert (code, "root 2 is signed by 0 of the keys of root 1" in err, version) == (1, True, 1)
    (folder / "3.json").write_bytes(dump(home.roots[1]))
    code, err, version = imported(unsigned, folder)
    assert (code, "two roots of one version" in err, version) == (4, True, 1)


def test_a_threshold_beyond_the_keys_is_a_mistake():
    with pytest.raises(Exception, match=r"threshold 3 of 2 different keys; expected 1\.\.2"):
        role(publics(1, 2, 2), 3)

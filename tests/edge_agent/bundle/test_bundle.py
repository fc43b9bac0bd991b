from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from form_digest import fields_digest

from edge_agent.bundle import archive as archive_module
from edge_agent.bundle import installed as installed_module
from edge_agent.bundle import manifest as manifest_module
from edge_agent.bundle import unpacked
from edge_agent.bundle.trust import Scores
from edge_agent.core.errors import BundleDamaged, BundleError, HeadwaterError, StateError
from edge_agent.core.task import ImageInput


def test_packing_twice_gives_the_same_bytes_and_other_content_gives_others(make_bundle):
    first = make_bundle("a.hwb")
    second = make_bundle("b.hwb")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert make_bundle("c.hwb", seed=1).path.read_bytes() != first.path.read_bytes()


def test_an_ordinary_tar_program_can_read_a_bundle(make_bundle):
    made = make_bundle(global_head=True)
    with tarfile.open(made.path) as archive:
        members = archive.getmembers()
        assert [m.name for m in members][:2] == ["manifest.json", "manifest.sha256"]
        assert {m.name for m in members[2:]} == set(made.manifest.files)
        assert all(m.isreg() and m.mtime == 0 and m.uid == 0 for m in members)
        raw = archive.extractfile("manifest.json").read()
        assert archive.extractfile("manifest.sha256").read().decode().strip() == hashlib.sha256(raw).hexdigest()


def test_what_was_packed_is_read_back(make_bundle):
    made = make_bundle(int8=True, global_head=True)
    opened = archive_module.open_bundle(made.path)
    assert opened.manifest == made.manifest
    with tarfile.open(made.path) as archive:
        for name in made.manifest.files:
            assert opened.read(name) == archive.extractfile(name).read()


def test_the_fingerprint_follows_from_encoder_and_input_spec_alone():
    base = manifest_module.fingerprint("a" * 64, ImageInput())
    assert base == manifest_module.fingerprint("a" * 64, ImageInput())
    assert base != manifest_module.fingerprint("b" * 64, ImageInput())
    assert base != manifest_module.fingerprint("a" * 64, ImageInput(mean=(0.4,)))
    spec = {"antialias": True, "channels": 3, "height": 32, "kind": "image", "mean": [0.5], "resize": "bilinear"}
    by_hand = json.dumps(
        {"encoder": "a" * 64, "input": {**spec, "std": [0.5], "width": 32}}, sort_keys=True, separators=(",", ":")
    )
    assert base == hashlib.sha256(by_hand.encode()).hexdigest()


def test_a_flip_of_any_byte_is_refused(make_bundle):
    made = make_bundle(int8=True, global_head=True)
    good = made.path.read_bytes()
    target = made.path.with_name("flipped.hwb")
    for position in {*range(0, 3072, 3), *range(0, len(good), 31), *range(len(good) - 1024, len(good), 7)}:
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        target.write_bytes(bad)
        with pytest.raises(BundleError):
            archive_module.open_bundle(target)


def test_a_bundle_cut_short_or_too_long_is_refused(make_bundle):
    made = make_bundle()
    good = made.path.read_bytes()
    target = made.path.with_name("cut.hwb")
    for length in [0, 1, 511, 512, 513, 2000, len(good) // 2, len(good) - 1024, len(good) - 1]:
        target.write_bytes(good[:length])
        with pytest.raises(BundleDamaged):
            archive_module.open_bundle(target)
    target.write_bytes(good + b"\0")
    with pytest.raises(BundleDamaged, match="after the end"):
        archive_module.open_bundle(target)
    with pytest.raises(BundleDamaged, match="cannot be read"):
        archive_module.open_bundle(made.path.with_name("missing.hwb"))


def test_files_swapped_between_two_good_bundles_are_refused(make_bundle):
    one = make_bundle("one.hwb")
    two = make_bundle("two.hwb", seed=1)
    first = archive_module.open_bundle(one.path)
    second = archive_module.open_bundle(two.path)
    mixed = bytearray(one.path.read_bytes())
    begin = first.offsets["encoder.onnx"]
    size = one.manifest.files["encoder.onnx"].size_bytes
    assert size == two.manifest.files["encoder.onnx"].size_bytes
    mixed[begin : begin + size] = second.read("encoder.onnx")
    target = one.path.with_name("mixed.hwb")
    target.write_bytes(mixed)
    with pytest.raises(BundleDamaged, match=r"encoder\.onnx"):
        archive_module.open_bundle(target)


def rewritten(path: Path, change) -> Path:
    """The bundle written again by tarfile with its members changed, without tarfile's padding to 10 KiB at the end."""
    with tarfile.open(path) as archive:
        members = [(m, archive.extractfile(m).read()) for m in archive.getmembers()]
    members = change(members)
    target = path.with_name("rewritten.hwb")
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
        end = archive.offset
    target.write_bytes(target.read_bytes()[: end + 1024])
    return target


def with_manifest(members, edit):
    (info, raw), (check, _), *rest = members
    new = edit(raw)
    return [(info, new), (check, hashlib.sha256(new).hexdigest().encode() + b"\n"), *rest]


def edit_json(**changes):
    return lambda raw: json.dumps({**json.loads(raw), **changes}, indent=1, sort_keys=True).encode() + b"\n"


def variant(name: str) -> dict[str, str]:
    return {"file": name, "fingerprint": "0" * 64}


def member(name: str, data: bytes = b"x", **attributes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, data


HOSTILE = {
    "path traversal": lambda ms: [*ms, member("../evil")],
    "extra member": lambda ms: [*ms, member("zzz")],
    "missing member": lambda ms: ms[:-1],
    "member twice": lambda ms: [*ms, ms[-1]],
    "symlink": lambda ms: [*ms[:-1], member(ms[-1][0].name, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "hard link": lambda ms: [*ms[:-1], member(ms[-1][0].name, b"", type=tarfile.LNKTYPE, linkname="manifest.json")],
    "device": lambda ms: [*ms[:-1], member(ms[-1][0].name, b"", type=tarfile.CHRTYPE)],
    "another order": lambda ms: [*ms[:2], *reversed(ms[2:])],
    "manifest not first": lambda ms: [ms[1], ms[0], *ms[2:]],
    "owner": lambda ms: [member(ms[0][0].name, ms[0][1], uid=7), *ms[1:]],
    "not JSON": lambda ms: with_manifest(ms, lambda _: b"{"),
    "JSON list": lambda ms: with_manifest(ms, lambda _: b"[]"),
    "deep JSON": lambda ms: with_manifest(ms, lambda _: b"[" * 100_000),
    "duplicate key": lambda ms: with_manifest(ms, lambda raw: raw.replace(b"{", b'{"name": "x", ', 1)),
    "NaN": lambda ms: with_manifest(ms, lambda raw: raw.replace(b'"max_abs": 0.0', b'"max_abs": NaN')),
    "NaN in parameters": lambda ms: with_manifest(ms, edit_json(method_params={"lr": float("nan")})),
    "infinity in parameters": lambda ms: with_manifest(ms, edit_json(method_params={"lr": float("inf")})),
    "unknown key": lambda ms: with_manifest(ms, edit_json(surprise=1)),
    "wrong fingerprint": lambda ms: with_manifest(ms, edit_json(variants={"fp32": variant("encoder.onnx")})),
    "variant that is no file": lambda ms: with_manifest(ms, edit_json(variants={"fp32": variant("other.onnx")})),
    "no fp32": lambda ms: with_manifest(ms, edit_json(variants={"int8": variant("encoder.onnx")})),
    "written otherwise": lambda ms: with_manifest(ms, lambda raw: raw.replace(b"\n", b"\n ", 1)),
    "huge manifest": lambda ms: with_manifest(ms, lambda raw: raw + b" " * manifest_module.MAX_MANIFEST_BYTES),
    "climbing name": lambda ms: with_manifest(
        ms, lambda raw: raw.replace(b'"golden.safetensors": {', b'"../golden.safetensors": {')
    ),
    "huge declared size": lambda ms: with_manifest(
        ms, lambda raw: json.dumps({**json.loads(raw), "files": huge(json.loads(raw)["files"])}).encode()
    ),
}


def huge(files):
    return {name: {**entry, "size_bytes": 1 << 29} for name, entry in files.items()}


@pytest.mark.parametrize("attack", sorted(HOSTILE))
def test_a_bundle_made_by_an_attacker_is_refused(make_bundle, attack):
    made = make_bundle()
    with pytest.raises(BundleError):
        archive_module.open_bundle(rewritten(made.path, HOSTILE[attack]))


def test_the_attacks_are_refused_for_what_they_change(make_bundle):
    made = make_bundle()
    assert rewritten(made.path, lambda members: members).read_bytes() == made.path.read_bytes()
    renamed = rewritten(made.path, lambda ms: with_manifest(ms, edit_json(name="other")))
    assert archive_module.open_bundle(renamed).manifest.name == "other"


@pytest.mark.parametrize("version, advice", [(5, "upgrade headwater on this device"), (1, "export the model again")])
def test_another_schema_version_says_which_side_to_move(make_bundle, version, advice):
    made = make_bundle()
    target = rewritten(made.path, lambda ms: with_manifest(ms, edit_json(schema_version=version, new_field=1)))
    with pytest.raises(BundleError, match=advice):
        archive_module.open_bundle(target)


def test_a_bundle_of_schema_2_is_read_with_the_id_that_it_had(make_bundle, tmp_path):
    """Its manifest, as that version wrote it: without the fields that were added since."""
    made = make_bundle()
    raw = []

    def older(members):
        content = {**json.loads(members[0][1]), "schema_version": 2}
        del content["free_norm"], content["quantization"]
        raw.append(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
        return with_manifest(members, lambda _: raw[0])

    opened = archive_module.open_bundle(rewritten(made.path, older))
    assert (opened.manifest.free_norm, opened.manifest.quantization) == (None, None)
    unnamed = json.dumps({**json.loads(raw[0]), "name": "", "created": ""}, indent=1, sort_keys=True).encode() + b"\n"
    assert opened.manifest.bundle_id == hashlib.sha256(unnamed).hexdigest()
    assert installed_module.install(opened.path, tmp_path / "root").id == opened.manifest.bundle_id


def test_a_new_field_of_the_manifest_raises_the_schema_number():
    """A device of the version before then says that it needs an upgrade, not that the bundle is damaged."""
    known = (4, "ba20e7479e82868e")
    assert (manifest_module.NEWEST_SCHEMA, fields_digest(manifest_module.Manifest)) == known, (
        "raise bundle.NEWEST_SCHEMA for changed fields"
    )


def test_lineage_is_in_the_manifest_and_not_in_the_id_and_what_has_none_stays_as_it_was(make_bundle):
    of = {"run": "run-0001", "round": 3, "seed": 7, "clients": 4, "partition_sha256": "a" * 64}
    lineage = {
        **of,
        "encoder_sha256": "b" * 64,
        "scores": {"clients": 4, "support": 9, "mean": 0.5, "worst_tenth": 0.25},
    }
    plain = make_bundle("plain.hwb")
    made = make_bundle("made.hwb", extra={"lineage": lineage})
    assert b'"lineage"' not in manifest_module.dump_manifest(plain.manifest)
    assert manifest_module.origin(plain.manifest) is None
    opened = archive_module.open_bundle(made.path).manifest
    assert opened.bundle_id == plain.manifest.bundle_id
    stated = manifest_module.origin(opened)
    assert (stated["run"], stated["round"], stated["method"], stated["parent"]) == ("run-0001", 3, "fedavg", None)
    assert stated["scored"]["run"] == lineage["scores"]


def test_scores_of_clients_by_hand():
    shares = [(0.1 * number, 10) for number in range(11)]  # the worst tenth of 11 clients are 2
    assert Scores.of(shares).model_dump() == {"clients": 11, "support": 110, "mean": 0.5, "worst_tenth": 0.05}
    assert Scores.of([(0.5, 0)]).worst_tenth == 0.5
    assert Scores.of([]) is None


def test_packing_lists_what_is_wrong_with_a_manifest_and_leaves_no_file(tmp_path):
    with pytest.raises(BundleError, match="feature_dim"):
        archive_module.pack(tmp_path / "b.hwb", {"name": "x", "variants": {"fp32": "e"}}, {"e": b""})
    assert list(tmp_path.iterdir()) == []


def test_packing_refuses_a_manifest_that_refers_to_a_missing_file(make_bundle, tmp_path):
    with pytest.raises(BundleError, match="nowhere"):
        make_bundle(extra={"global_head": "nowhere"})
    assert list(tmp_path.iterdir()) == []


def test_installing_makes_a_bundle_current_and_rollback_the_one_before(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    one, two, three = (make_bundle(f"{seed}.hwb", seed=seed) for seed in range(3))
    assert installed_module.current(root) is None
    for made in (one, two, three):
        assert installed_module.install(made.path, root).manifest == made.manifest
        assert installed_module.current(root).manifest == made.manifest
    folders = {path.name[:16] for path in root.iterdir() if path.is_dir()}
    assert folders == {two.manifest.bundle_id[:16], three.manifest.bundle_id[:16]}
    assert installed_module.rollback(root).manifest == two.manifest
    assert installed_module.current(root).manifest == two.manifest
    with pytest.raises(StateError, match="no earlier bundle"):
        installed_module.rollback(root)


def test_two_exports_of_one_encoder_stand_side_by_side(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    one = make_bundle("1.hwb")
    two = make_bundle("2.hwb", global_head=True)
    assert one.manifest.variants == two.manifest.variants
    assert one.manifest.bundle_id != two.manifest.bundle_id
    installed_module.install(one.path, root)
    installed_module.install(two.path, root)
    assert installed_module.current(root).manifest == two.manifest
    assert installed_module.rollback(root).manifest == one.manifest


def test_the_same_content_of_another_name_and_time_is_the_same_bundle(make_bundle, tmp_path):
    """A run's encoder exported again by hand is what devices run already; another file or setting makes another one."""
    one = make_bundle("1.hwb")
    again = make_bundle("2.hwb", extra={"name": "again", "created": "2027-01-01T00:00:00Z"})
    other = make_bundle("3.hwb", extra={"method_params": {"lr": 0.5}})
    assert again.path.read_bytes() != one.path.read_bytes()
    assert again.manifest.bundle_id == one.manifest.bundle_id != other.manifest.bundle_id
    folders = {installed_module.install(made.path, tmp_path / "bundles").folder for made in (one, again)}
    assert len(folders) == 1


def test_installing_again_repairs_a_damaged_folder(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    made = make_bundle()
    installed = installed_module.install(made.path, root)
    (installed.folder / "encoder.onnx").write_bytes(b"rot")
    with pytest.raises(BundleDamaged, match=r"encoder\.onnx"):
        installed_module.current(root)
    installed_module.install(made.path, root)
    assert installed_module.current(root).manifest == made.manifest


def test_a_refused_bundle_changes_nothing(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    good = make_bundle("good.hwb")
    other = make_bundle("other.hwb", seed=1)
    installed_module.install(good.path, root)
    bad = bytearray(other.path.read_bytes())
    bad[-2000] ^= 1
    other.path.write_bytes(bad)
    with pytest.raises(BundleDamaged):
        installed_module.install(other.path, root)
    assert installed_module.current(root).manifest == good.manifest


def test_a_bundle_that_fails_its_check_does_not_become_current(make_bundle, tmp_path):
    root = tmp_path / "bundles"
    good = make_bundle("good.hwb")
    other = make_bundle("other.hwb", seed=1)
    installed_module.install(good.path, root)

    def refuse(bundle: unpacked.Bundle) -> None:
        raise BundleDamaged(bundle.id)

    with pytest.raises(BundleDamaged, match=other.manifest.bundle_id):
        installed_module.install(other.path, root, check=refuse)
    assert installed_module.current(root).manifest == good.manifest


@pytest.mark.parametrize("content", ['{"bundles": ["../../etc"]}', '{"bundles": "x"}', "[]", "{"])
def test_a_damaged_pointer_is_a_state_error(tmp_path, content):
    (tmp_path / "current.json").write_text(content)
    with pytest.raises(StateError):
        installed_module.current(tmp_path)


def test_unpacking_never_mixes_with_what_is_there(make_bundle, tmp_path):
    made = make_bundle()
    (tmp_path / "there").mkdir()
    with pytest.raises(BundleError, match="exists already"):
        unpacked.unpack(made.path, tmp_path / "there")
    unpacked.unpack(made.path, tmp_path / "new")
    assert unpacked.open_folder(tmp_path / "new").manifest == made.manifest


def test_a_folder_with_a_changed_manifest_or_a_linked_file_is_refused(make_bundle, tmp_path):
    made = make_bundle()
    unpacked.unpack(made.path, tmp_path / "f")
    onnx = tmp_path / "f" / "encoder.onnx"
    onnx.rename(tmp_path / "elsewhere")
    onnx.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleDamaged, match=r"encoder\.onnx"):
        unpacked.open_folder(tmp_path / "f")
    unpacked.unpack(made.path, tmp_path / "g")
    manifest = tmp_path / "g" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"test"', b'"best"'))
    with pytest.raises(BundleDamaged, match="checksum"):
        unpacked.open_folder(tmp_path / "g")


def test_a_global_head_of_another_size_is_refused(make_bundle, tmp_path):
    made = make_bundle(global_head=True)
    bundle = installed_module.install(made.path, tmp_path / "bundles")
    assert bundle.global_head()["weight"].shape == (10, 24)
    small = unpacked.Bundle(bundle.folder, made.manifest.model_copy(update={"feature_dim": 7}))
    with pytest.raises(BundleDamaged, match="global head"):
        small.global_head()


def test_a_precision_that_is_not_there_is_named(make_bundle, tmp_path):
    bundle = installed_module.install(make_bundle().path, tmp_path / "bundles")
    with pytest.raises(StateError, match="int8"):
        bundle.variant("int8")


def test_random_bytes_are_refused_by_our_own_errors(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    for size in (0, 100, 512, 5000):
        (tmp_path / "r.hwb").write_bytes(rng.bytes(size))
        with pytest.raises(HeadwaterError):
            archive_module.open_bundle(tmp_path / "r.hwb")


def test_a_file_that_nothing_refers_to_is_refused(make_bundle):
    made = make_bundle()
    opened = archive_module.open_bundle(made.path)
    fields = made.manifest.model_dump(mode="json", exclude={"schema_version", "files"})
    fields["variants"] = {"fp32": "encoder.onnx"}
    files = {name: opened.read(name) for name in made.manifest.files}
    with pytest.raises(BundleDamaged, match=r"'more\.ort' is among the files and not referred to"):
        archive_module.pack(made.path, fields, {**files, "more.ort": b"x"})

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import ConfigError, FingerprintMismatch, HeadwaterError, StateError, UnknownName
from edge_agent.heads import FitData, saved
from edge_agent.wire.tensors import encode

FINGERPRINT = "ab" * 32
NAMES = ("cat", "dog", "owl", "elk")


def fitted(name: str, params=None):
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 3] * 10)
    features = (rng.normal(size=(4, 5)) * 3)[labels] + rng.normal(size=(30, 5))
    head = heads.create(name, params)
    head.fit(FitData(features.astype(np.float32), labels, 4), np.random.default_rng(0))
    return head, features.astype(np.float32)


def store(folder, head):
    return saved.save(folder, saved.SavedHead(head, FINGERPRINT, "fp32", NAMES, {"acc.personal": 0.9}))


@pytest.mark.parametrize(
    "name, params", [("lr", {}), ("mlp", {"hidden": 4}), ("prototype", {}), ("svm", {"kernel": "rbf"}), ("svm", {})]
)
def test_a_head_from_disk_predicts_the_same_bits(tmp_path, name, params):
    head, features = fitted(name, params)
    store(tmp_path, head)
    found = saved.load(tmp_path, {"fp32": FINGERPRINT})
    assert (found.head.predict_proba(features) == head.predict_proba(features)).all()
    assert (found.head.name, found.class_names, found.metrics) == (name, NAMES, {"acc.personal": 0.9})
    assert found.head.params == head.params


def test_a_constant_head_survives_the_disk(tmp_path):
    head = heads.create("lr")
    head.fit(FitData(np.ones((2, 3), np.float32), np.array([2, 2]), 4), np.random.default_rng(0))
    store(tmp_path, head)
    assert saved.load(tmp_path).head.predict_proba(np.zeros((1, 3), np.float32)).tolist() == [[0, 0, 1, 0]]


def test_saving_again_replaces_the_pair_and_leaves_no_older_arrays(tmp_path):
    store(tmp_path, fitted("lr")[0])
    store(tmp_path, fitted("prototype")[0])
    assert saved.load(tmp_path).head.name == "prototype"
    store(tmp_path, fitted("mlp")[0])
    assert len(list(tmp_path.iterdir())) == 4  # the head and the one before


def test_the_head_before_comes_back_and_goes_again(tmp_path):
    fingerprints = {"fp32": FINGERPRINT}
    store(tmp_path, fitted("lr")[0])
    with pytest.raises(StateError, match="no earlier head"):
        saved.restore(tmp_path, fingerprints)
    store(tmp_path, fitted("prototype")[0])
    for name in ("lr", "prototype", "lr"):
        assert saved.restore(tmp_path, fingerprints).head.name == name
        assert saved.load(tmp_path).head.name == name
    with pytest.raises(FingerprintMismatch):
        saved.restore(tmp_path, {"fp32": "cd" * 32})
    assert saved.load(tmp_path).head.name == "lr"


def test_the_head_before_outlives_a_damaged_one_and_the_same_fit_again(tmp_path):
    fingerprints = {"fp32": FINGERPRINT}
    store(tmp_path, fitted("lr")[0])
    store(tmp_path, fitted("prototype")[0])
    saved.save(tmp_path, saved.SavedHead(fitted("prototype")[0], FINGERPRINT, "fp32", NAMES, {"seconds": 2.0}))
    assert saved.load(tmp_path).metrics == {"seconds": 2.0}
    for damaged in ("head.json", saved._read_card(tmp_path / "head.json").arrays_file):
        (tmp_path / damaged).write_bytes(b"damaged")
        store(tmp_path, fitted("prototype")[0])
    assert saved.restore(tmp_path, fingerprints).head.name == "lr"


def test_a_crash_between_the_two_files_leaves_the_old_head(tmp_path, monkeypatch):
    store(tmp_path, fitted("lr")[0])

    def crash(*_):
        raise OSError("no space left")

    monkeypatch.setattr(saved, "_replace", crash)
    with pytest.raises(OSError, match="no space"):
        store(tmp_path, fitted("prototype")[0])
    assert saved.load(tmp_path).head.name == "lr"


def test_a_head_of_another_encoder_is_refused_and_both_are_named(tmp_path):
    store(tmp_path, fitted("lr")[0])
    with pytest.raises(FingerprintMismatch, match=r"abab.*cdcd"):
        saved.load(tmp_path, {"fp32": "cd" * 32, "int8": FINGERPRINT})
    with pytest.raises(FingerprintMismatch, match=r"fp32.*int8"):
        saved.load(tmp_path, {"int8": FINGERPRINT})


def test_what_cannot_be_used_is_not_saved(tmp_path):
    with pytest.raises(StateError, match="not been fitted"):
        store(tmp_path, heads.create("lr"))
    head, _ = fitted("lr")
    head.arrays["bias"] = np.array([np.nan, 0, 0])
    with pytest.raises(StateError, match="bias"):
        store(tmp_path, head)
    assert list(tmp_path.iterdir()) == []


def edited(folder, **changes):
    card = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps({**card, **changes}))


def swapped(folder, arrays):
    """The arrays replaced by others, with name and hash set right: what an attacker would do."""
    data = encode(arrays)
    digest = hashlib.sha256(data).hexdigest()
    (folder / f"arrays-{digest[:16]}.safetensors").write_bytes(data)
    edited(folder, arrays_file=f"arrays-{digest[:16]}.safetensors", arrays_sha256=digest)


@pytest.mark.parametrize(
    "changes",
    [
        {"arrays_file": "../../etc/passwd"},
        {"arrays_file": "/etc/passwd"},
        {"arrays_file": "arrays-0000000000000000.safetensors"},
        {"arrays_sha256": "0" * 64},
        {"schema_version": 2},
        {"surprise": 1},
        {"class_names": []},
        {"class_names": ["a", "b"]},
        {"feature_dim": 0},
        {"feature_dim": 6},
        {"fingerprint": "x"},
        {"precision": "fp8"},
        {"head": "../lr"},
        {"metrics": {"acc": [1]}},
    ],
)
def test_a_card_changed_by_somebody_is_a_state_error(tmp_path, changes):
    store(tmp_path, fitted("lr")[0])
    edited(tmp_path, **changes)
    with pytest.raises(StateError):
        saved.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20)])
def test_a_card_that_is_no_json_object_is_a_state_error(tmp_path, content):
    (tmp_path / "head.json").write_bytes(content)
    with pytest.raises(StateError):
        saved.load(tmp_path)


def test_a_missing_head_says_what_was_expected(tmp_path):
    with pytest.raises(StateError, match="edge-agent fit"):
        saved.load(tmp_path)


def test_unknown_heads_and_parameters_are_named(tmp_path):
    store(tmp_path, fitted("lr")[0])
    edited(tmp_path, head="lrx")
    with pytest.raises(UnknownName, match="lr"):
        saved.load(tmp_path)
    edited(tmp_path, head="lr", params={"cc": 1})
    with pytest.raises(ConfigError, match="cc"):
        saved.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {**a, "weight": a["weight"][:, :3]},
        lambda a: {**a, "weight": a["weight"][:2]},
        lambda a: {**a, "weight": np.full_like(a["weight"], np.nan)},
        lambda a: {**a, "weight": a["weight"].reshape(-1)},
        lambda a: {**a, "bias": np.zeros(17)},
        lambda a: {k: v for k, v in a.items() if k != "weight"},
        lambda a: {k: v for k, v in a.items() if k != "classes"},
        lambda a: {**a, "classes": np.array([0, 1, 4])},
        lambda a: {**a, "classes": np.array([0, 3, 1])},
        lambda a: {**a, "classes": np.array([-1, 0, 1])},
        lambda a: {**a, "classes": np.array([0.0, 1.0, 3.0])},
        lambda a: {**a, "classes": np.zeros((1, 3), np.int64)},
        lambda a: {**a, "classes": np.zeros(0, np.int64)},
        lambda a: {**a, "feature_scale": np.zeros(5)},
        lambda _: {},
    ],
)
def test_arrays_changed_by_somebody_are_refused_by_our_own_errors(tmp_path, change):
    head, _ = fitted("lr")
    store(tmp_path, head)
    swapped(tmp_path, change(dict(head.arrays)))
    with pytest.raises(HeadwaterError):
        saved.load(tmp_path)


def test_a_flip_of_any_byte_of_the_arrays_is_refused(tmp_path):
    store(tmp_path, fitted("prototype")[0])
    path = next(tmp_path.glob("arrays-*"))
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(StateError, match="SHA-256"):
            saved.load(tmp_path)

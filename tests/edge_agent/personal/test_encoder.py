from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent.bundle import archive, unpacked
from edge_agent.bundle import installed as installed_module
from edge_agent.core.errors import BundleDamaged, DataError, MissingCapability, StateError
from edge_agent.core.own_folders import MARK
from edge_agent.core.storage import oldest_first
from edge_agent.core.task import ImageInput
from edge_agent.data import Samples
from edge_agent.personal import encoder as encoders
from edge_agent.personal.encoder import Encoder, features_of


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    """The encoders of these tests are small, and mapped nevertheless."""
    monkeypatch.setattr(encoders, "_LEAST_TO_MAP", 0)


@pytest.fixture
def installed(make_bundle, tmp_path):
    made = make_bundle(int8=True)
    return made, installed_module.install(made.path, tmp_path / "bundles")


def some_inputs(count: int, shape=(3, 8, 8)) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)


def test_features_are_those_of_a_matrix_product(installed):
    made, bundle = installed
    inputs = some_inputs(70)  # two whole batches of 32 and a rest
    encoder = Encoder.open(bundle, "fp32")
    found = encoder.features(inputs)
    assert found.dtype == np.float32
    assert np.allclose(found, made.features(inputs), atol=1e-5)
    assert encoder.features(inputs[:0]).shape == (0, 24)


def test_the_second_start_maps_the_file_that_the_first_one_made(installed):
    _, bundle = installed
    first = Encoder.open(bundle, "fp32")
    made = next(bundle.made.glob("*.ort"))
    stamp = made.stat().st_mtime_ns
    second = Encoder.open(bundle, "fp32")
    assert (first.format, second.format) == ("ort", "ort")
    assert made.stat().st_mtime_ns == stamp
    assert (first.features(some_inputs(5)) == second.features(some_inputs(5))).all()


def test_a_small_encoder_is_not_mapped_and_has_the_same_features(installed, monkeypatch):
    _, bundle = installed
    large = Encoder.open(bundle, "fp32")
    monkeypatch.undo()
    small = Encoder.open(bundle, "fp32")
    assert (large.format, small.format) == ("ort", "onnx")
    assert (large.features(some_inputs(40)) == small.features(some_inputs(40))).all()


def test_a_file_optimized_on_another_processor_is_not_used(installed, monkeypatch):
    """The folder moved with its disk: an .ort file holds the layout of the processor that made it."""
    _, bundle = installed
    Encoder.open(bundle, "fp32")
    [before] = bundle.made.glob("*.ort")
    monkeypatch.setattr("edge_agent.personal.encoder.processor", lambda: "x86_64-00000000")
    Encoder.open(bundle, "fp32")
    [after] = bundle.made.glob("*.ort")
    assert before.name != after.name
    assert "x86_64-00000000" in after.name


def test_a_damaged_cache_is_made_again_and_an_old_one_goes(installed):
    made, bundle = installed
    Encoder.open(bundle, "fp32")
    cached = next(bundle.made.glob("encoder.onnx.*.ort"))
    good = cached.read_bytes()
    cached.write_bytes(good[:-9] + b"corrupted")
    old = bundle.made / "encoder.onnx.0123456789abcdef.1.0.0.x.ort"
    old.write_bytes(b"")
    assert np.allclose(Encoder.open(bundle, "fp32").features(some_inputs(2)), made.features(some_inputs(2)), atol=1e-5)
    # Not compared as a whole: the runtime writes its string table in another order each time.
    assert not cached.read_bytes().endswith(b"corrupted")
    assert not old.exists()


def test_a_damaged_note_of_a_cache_makes_it_again(installed):
    _, bundle = installed
    Encoder.open(bundle, "fp32")
    [note] = bundle.made.glob("encoder.onnx.*.json")
    note.write_bytes(b'{"sha')
    assert Encoder.open(bundle, "fp32").format == "ort"
    assert note.read_bytes() != b'{"sha'


@pytest.mark.parametrize("name", ["self_test.json", "trial.json", "made"])
def test_no_file_of_a_bundle_is_taken_for_one_that_the_device_made(make_bundle, tmp_path, name):
    """Nor overwritten: the encoder has such a name here."""
    made = make_bundle()
    opened = archive.open_bundle(made.path)
    fields = made.manifest.model_dump(mode="json", exclude={"schema_version", "files"}) | {"variants": {"fp32": name}}
    files = {"golden.safetensors": opened.read("golden.safetensors"), name: opened.read("encoder.onnx")}
    archive.pack(made.path, fields, files)
    bundle = installed_module.install(made.path, tmp_path / "bundles")
    assert Encoder.open(bundle, "fp32").format == "ort"
    assert {path.name for path in bundle.folder.iterdir()} == {
        MARK, ".made", "manifest.json", "manifest.sha256", "golden.safetensors", name
    }  # fmt: skip
    unpacked.open_folder(bundle.folder)


def test_without_a_writable_place_the_onnx_file_is_loaded(installed, caplog, monkeypatch):
    made, bundle = installed

    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    encoder = Encoder.open(bundle, "fp32")
    assert encoder.format == "onnx"
    assert "ort_not_made" in caplog.text
    assert np.allclose(encoder.features(some_inputs(2)), made.features(some_inputs(2)), atol=1e-5)
    assert Encoder.open(bundle, "fp32", cache=False).format == "onnx"


def test_an_ort_file_that_does_not_load_falls_back(installed, monkeypatch, caplog):
    _, bundle = installed
    junk = bundle.folder / "junk.ort"
    junk.write_bytes(b"ORTM" * 10)
    monkeypatch.setattr("edge_agent.personal.encoder._mapped", lambda *_: junk)
    assert Encoder.open(bundle, "fp32").format == "onnx"
    assert "ort_not_loaded" in caplog.text


def test_inputs_of_another_shape_are_refused(installed):
    _, bundle = installed
    with pytest.raises(DataError, match=r"3, 8, 8"):
        Encoder.open(bundle, "fp32").features(some_inputs(2, (3, 8, 9)))


def test_an_encoder_with_another_size_than_promised_is_refused(make_bundle, tmp_path):
    golden = {"features_fp32": np.zeros((8, 23), np.float32)}
    bundle = installed_module.install(make_bundle(extra={"feature_dim": 23}, spoilt=golden).path, tmp_path / "bundles")
    with pytest.raises(BundleDamaged, match=r"\[\[32, 24\]\], the manifest promises \[32, 23\]"):
        Encoder.open(bundle, "fp32")


def test_a_file_that_is_no_model_is_refused(installed):
    _, bundle = installed
    (bundle.folder / "encoder.onnx").write_bytes(b"\x08\x07 no model")
    with pytest.raises(BundleDamaged, match="not an ONNX model"):
        Encoder.open(bundle, "fp32")
    with pytest.raises(StateError, match="int8"):
        fewer = bundle.manifest.model_copy(update={"variants": {"fp32": bundle.variant("fp32")}})
        Encoder.open(unpacked.Bundle(bundle.folder, fewer), "int8")


def test_large_inputs_go_one_by_one_and_small_ones_by_32(make_bundle, tmp_path):
    from edge_agent.core.task import Task

    task = Task(input=ImageInput(channels=3, height=65, width=64), class_names=("a",), encoder="linear")
    large = installed_module.install(make_bundle(task=task).path, tmp_path / "large")
    seen: list[tuple[int, int]] = []
    Encoder.open(large, "fp32").features(some_inputs(3, (3, 65, 64)), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_without_onnxruntime_the_extra_is_named(installed, monkeypatch):
    _, bundle = installed
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingCapability, match=r"pip install .*\.\[agent\]'"):
        Encoder.open(bundle, "fp32")


def test_a_module_named_like_a_dependency_in_the_working_folder_is_not_run(installed, tmp_path, monkeypatch):
    """A child started in a folder that others can write to would import what lies there."""
    _, bundle = installed
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "numpy.py").write_text("raise SystemExit('trapped')")
    shutil.copy(trap / "numpy.py", bundle.folder / "numpy.py")
    monkeypatch.chdir(trap)
    assert Encoder.open(bundle, "fp32").format == "ort"


def test_resident_memory_after_running_stays_small(installed):
    """A process that has loaded and run an encoder of 20 KB shows what runtime and our own code cost."""
    _, bundle = installed
    Encoder.open(bundle, "fp32")  # the self-test, which loads Pillow, runs once for each bundle and not in service
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from edge_agent.bundle import unpacked\n"
        "from edge_agent.personal.encoder import Encoder\n"
        f"e = Encoder.open(unpacked.open_folder(Path({str(bundle.folder)!r})), 'fp32')\n"
        "e.features(np.zeros((40, 3, 8, 8), np.float32))\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')][0])\n"
        "assert not {'torch', 'onnx', 'sklearn', 'PIL'} & set(sys.modules)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc on this system")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 90 * 1024


HELD = """
import sys
from pathlib import Path
import numpy as np
from edge_agent.bundle import installed
from edge_agent.personal import encoder as encoders
from edge_agent.personal.encoder import Encoder

def own_bytes():
    fields = Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()
    return int(fields[0]) * 1024

encoder = Encoder.open(installed.install(Path(sys.argv[1]), Path(sys.argv[2])), "fp32")
encoder.features(np.ones((1, 3, 8, 8), np.float32))
before = own_bytes()
for _ in range(3):
    encoder.features(np.ones((32, 3, 8, 8), np.float32))
print(own_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_what_a_run_needs_goes_back_to_the_system_when_it_is_over(make_bundle, tmp_path):
    """Features of 32 inputs are 5 MB in each layer: an arena keeps 10 MB; the answer itself is freed by its owner."""
    made = make_bundle(dim=40_000)
    command = [sys.executable, "-c", HELD, str(made.path), str(tmp_path / "bundles")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 7_000_000


def test_features_of_many_encoders_are_bounded_and_the_newest_stay(make_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_agent.personal.encoder._ALL_FEATURE_FILES", 3)
    cache = tmp_path / "features"
    names = []
    for seed in range(5):
        made = make_bundle(f"{seed}.hwb", seed=seed)
        encoder = Encoder.open(installed_module.install(made.path, tmp_path / "bundles"), "fp32", cache=False)
        task = made.manifest.task
        inputs = np.zeros((2, *task.input_shape), np.float32)
        features_of(Samples(inputs, np.zeros(2, np.int64), task.class_names, task.input), encoder, cache)
        (new,) = {path.name for path in cache.iterdir()} - {*names}
        os.utime(cache / new, ns=(seed, seed))
        names.append(new)
    assert {path.name for path in cache.iterdir()} == {*names[2:]}


def test_features_that_are_found_again_are_the_most_recently_used(make_bundle, tmp_path):
    made = make_bundle()
    cache = tmp_path / "features"
    encoder = Encoder.open(installed_module.install(made.path, tmp_path / "bundles"), "fp32", cache=False)
    task = made.manifest.task
    labels = np.zeros(2, np.int64)
    inputs = (np.full((2, *task.input_shape), number, np.float32) for number in range(2))
    one, other = (Samples(rows, labels, task.class_names, task.input) for rows in inputs)
    features_of(one, encoder, cache)
    (first,) = cache.iterdir()
    os.utime(first, ns=(1, 1))
    features_of(other, encoder, cache)
    (second,) = {*cache.iterdir()} - {first}
    os.utime(second, ns=(2, 2))
    features_of(one, encoder, cache)
    assert oldest_first([first, second]) == [second, first]

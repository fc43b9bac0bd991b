"""The device side on arm64, by emulating the processor: its own tests, and one bundle from the host.

The first run fetches some 80 MB of packages and takes a minute; HEADWATER_ARM64_ROOT keeps the folder for the next one.
Emulation says nothing about speed, memory or heat.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent import data, heads, methods
from edge_agent.bundle import installed
from edge_agent.core.task import ImageInput, Task
from edge_agent.heads import FitData
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalize import personalize
from edge_agent.personal.precision import estimate_norm, with_norm
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.pair import Pair

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("numpy", "pydantic", "paho-mqtt", "safetensors", "onnxruntime", "pillow", "pytest", "hypothesis")
LIGHT = (
    "edge_agent/heads/test_head_prototype.py",
    "edge_agent/heads/test_saved_heads.py",
    "edge_agent/data/test_splitting.py",
    "edge_agent/wire/test_tensors.py",
    "edge_agent/wire/test_chunks.py",
    "edge_agent/wire/test_chunk_assembly.py",
    "edge_agent/wire/test_blob_cache.py",
)
"""Tests that need neither torch nor onnx nor scikit-learn, and little computing."""

AWAY = 75
"""What the guest's recipe ends with where it cannot fetch something; whatever else goes wrong is a failure."""

IMAGES = 20
"""Emulated convolutions are some hundred times slower than real ones."""

TASK = Task(input=ImageInput(channels=3, height=32, width=32), class_names=tuple("0123456789"), encoder="small_cnn")


@pytest.fixture(scope="session")
def guest(tmp_path_factory) -> Path:
    """The guest's Python."""
    if sys.platform != "linux" or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("no apt-get and dpkg-deb here: the arm64 guest is made of Debian packages")
    kept = os.environ.get("HEADWATER_ARM64_ROOT")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("arm64")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(HERE / "build_root.sh"), str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    if done.returncode == AWAY:
        pytest.skip(f"apt or pip is out of reach here: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, f"no arm64 guest could be made: {done.stderr.strip()[-3000:]}"
    return folder / "python"


def run(guest: Path, *words: object, limit_s: float) -> str:
    """What a program in the guest says; it sees the packages of the project and nothing of the host's."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(guest.parent), "GUEST_PATH": str(ROOT)}
    command = [str(guest), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_guest_is_another_machine(guest):
    said = run(guest, "-c", "import platform; print(platform.machine())", limit_s=60)
    assert said.strip() == "aarch64"


def test_light_tests_pass_in_the_guest(guest, tmp_path):
    tests = [ROOT / "tests" / name for name in LIGHT]
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--strict-markers",  # the project's own name plugins that the guest has not
        "--import-mode=importlib",
        "-k",
        "not svm",
        f"--basetemp={tmp_path / 'guest'}",
    )
    said = run(guest, "-m", "pytest", *options, "-c", ROOT / "pyproject.toml", *tests, limit_s=900)
    last = said.strip().splitlines()[-1]
    print(last)
    assert "passed" in last
    assert "failed" not in last


def test_command_line_of_a_device_answers_in_the_guest(guest):
    said = run(guest, "-m", "edge_agent", "doctor", limit_s=120)
    assert "aarch64" in said
    assert "onnxruntime" in said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle of a small convolutional encoder, trained for one round, with images to try it on."""
    import torch

    from edge_agent.client import Arrays, ClientState, Session
    from edge_agent.training.parts import to_arrays
    from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, model_from_state

    folder = tmp_path_factory.mktemp("host")
    method = methods.create("fedavg", {"lr": 0.05, "momentum": 0.9, "local_epochs": 2})
    samples = data.load("digits:inverted?client=0&clients=3", TASK.input, TASK.class_names)
    arrays = Arrays(samples.inputs, samples.labels)
    session = Session(method, TASK, "host", arrays, arrays, seed=0, device="cpu")
    torch.manual_seed(0)
    model = method.build(TASK)
    state = method.start(to_arrays(model, method.shared_names(model)))
    state = session.train(state, ClientState(), round_number=1, rounds=1, evaluate=False).update
    path = folder / "b.hwb"
    trained = TrainedEncoder(model_from_state(method, TASK, state), method, TASK, method.global_head(state))
    options = BundleOptions("host", created="2026-01-01T00:00:00+00:00", exporter="legacy")
    build_bundle(trained, Calibration.from_inputs(samples.inputs[:64]), path, options)
    return path, samples, folder


def test_bundle_of_the_host_says_the_same_in_the_guest(guest, made):
    """fp32 within 1e-4 of the scale; int8, whose sums are the same bits everywhere, within 1e-5; the same labels.

    So too with batch norm statistics of the inputs: those of the host in the guest, and both estimate the same.
    """
    path, samples, folder = made
    bundle = installed.install(path, folder / "bundles")
    inputs = samples.inputs[:IMAGES]
    labels = samples.labels[:IMAGES]
    np.savez(folder / "inputs.npz", inputs=inputs, labels=labels)
    here = {precision: Encoder.open(bundle, precision).features(inputs) for precision in ("fp32", "int8")}
    result = personalize(bundle, samples, Encoder.open(bundle, "fp32"))
    result.save(folder / "head")
    own = with_norm(bundle, "own", samples)
    with_own = personalize(bundle, samples, own)
    with_own.save(folder / "own")

    given = (path, folder / "inputs.npz", folder / "head", folder / "own")
    run(guest, HERE / "in_guest.py", *given, folder / "out.npz", limit_s=600)
    with np.load(folder / "out.npz", allow_pickle=False) as there:
        assert str(there["machine"]) == "aarch64"
        scale = np.abs(here["fp32"]).max()
        difference = np.abs(there["fp32"] - here["fp32"]).max() / scale
        print(
            f"fp32 differs by {difference:.1e} of the scale, int8 by {np.abs(there['int8'] - here['int8']).max():.1e}"
        )
        assert difference <= 1e-4
        np.testing.assert_allclose(there["int8"], here["int8"], atol=1e-5 * np.abs(here["int8"]).max())
        np.testing.assert_array_equal(
            there["labels_by_saved_head"], result.head.predict_proba(here["fp32"]).argmax(axis=1)
        )
        expected = own.features(inputs)
        np.testing.assert_allclose(there["own"], expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_array_equal(
            there["labels_by_head_with_own_norm"], with_own.head.predict_proba(expected).argmax(axis=1)
        )
        np.testing.assert_allclose(there["statistics"], estimate_norm(bundle, inputs).statistics, rtol=1e-4, atol=1e-5)
        head = heads.create("lr")
        head.fit(FitData(here["fp32"], labels, TASK.num_classes), np.random.default_rng(0))
        np.testing.assert_array_equal(there["labels_by_own_head"], head.predict_proba(here["fp32"]).argmax(axis=1))


def test_server_of_the_guest_answers_as_that_of_the_host(guest, made):
    """Images as PNG files by HTTP: the same classes, and probabilities within 1e-3, in both precisions."""
    path, samples, folder = made
    bundle = installed.install(path, folder / "bundles")
    images = [png(normalised) for normalised in samples.inputs[:5]]
    for precision in ("fp32", "int8"):
        head = folder / f"served-{precision}"
        personalize(bundle, samples, Encoder.open(bundle, precision)).save(head)
        pair = Pair.open(bundle, head)
        here = [pair.answer(Decoder(pair.input).decode(image)).answer for image in images]
        with served(guest, path, head) as url:
            there = [ask(url, image) for image in images]
        assert [answer["class"] for answer in there] == [answer.label for answer in here]
        assert [answer["unknown"] for answer in there] == [answer.is_unknown for answer in here]
        for answered, expected in zip(there, here, strict=True):
            assert answered["probabilities"] == pytest.approx(dict(expected.probabilities), abs=1e-3)


def png(normalised: np.ndarray) -> bytes:
    """An image as a file, from an input (3, height, width) of the task."""
    pixels = normalised * np.reshape(TASK.input.std, (-1, 1, 1)) + np.reshape(TASK.input.mean, (-1, 1, 1))
    content = io.BytesIO()
    whole = np.clip(np.round(255 * pixels), 0, 255).astype(np.uint8)
    Image.fromarray(whole.transpose(1, 2, 0)).save(content, "PNG")
    return content.getvalue()


@contextlib.contextmanager
def served(guest: Path, bundle: Path, head: Path) -> Iterator[str]:
    """The address of ``edge-agent serve`` in the guest; its sockets are those of this machine."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(guest.parent), "GUEST_PATH": str(ROOT)}
    words = ["-m", "edge_agent", "serve", "--bundle", bundle, "--head", head, "--port", "0", "--json"]
    command = [str(guest), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def ask(url: str, image: bytes) -> dict[str, object]:
    """The answer of a server to an image."""
    request = urllib.request.Request(f"{url.rstrip('/')}/classify", data=image)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)

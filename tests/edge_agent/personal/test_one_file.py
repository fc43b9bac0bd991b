"""A personal model as one ONNX file: every head, both kinds of input, both precisions, by ONNX Runtime alone."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from browser import browser, seen
from PIL import Image

from edge_agent import heads
from edge_agent.core.errors import MissingCapability, StateError, UsageError
from edge_agent.core.graph import Graph
from edge_agent.core.storage import write_atomic
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.heads.lr import LogisticRegressionHead
from edge_agent.personal.one_file import METADATA, TOLERANCE, example_input, input_shape, write_one_file
from edge_agent.personal.personalizer import Personalizer

EXAMPLES = Path(__file__).parents[3] / "examples/one_file"
CLASSES = ("cat", "dog", "owl", "elk")
IMAGES = Task(
    input=ImageInput(channels=3, height=8, width=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)),
    class_names=CLASSES,
    encoder="linear",
    encoder_params={},
)
WINDOWS = Task(
    input=WindowInput(channels=3, length=16, stride=8, mean=(1.0, -2.0, 0.5), std=(2.0, 0.5, 1.5)),
    class_names=CLASSES,
    encoder="linear",
    encoder_params={},
)
TASKS = {"image": IMAGES, "window": WINDOWS}

FORMS = [
    ("svm", {"kernel": "rbf"}),
    ("svm", {"kernel": "rbf", "feature_norm": "standard"}),
    ("lr", {"feature_norm": "none"}),
    ("lr", {"feature_norm": "l2"}),
    ("mlp", {"hidden": 12}),
    ("prototype", {"feature_norm": "l2"}),
    ("knn", {"feature_norm": "standard", "mix": 0.3}),
    ("dualfed", {"ensemble": "logits", "projector_norm": False}),
    ("fedpick", {"mask": "soft"}),
    ("fedpick", {"selector": "fisher"}),
    ("fedpick", {"ensemble": "none"}),
    ("fedpac", {"c": None}),
]
"""Branches of what heads compute, beside those of their defaults."""

CASES = [
    *((name, {}, kind, precision) for name in heads.names() for kind in TASKS for precision in ("fp32", "int8")),
    *((name, params, "image", "fp32") for name, params in FORMS),
]


def raw_inputs(spec, count, seed=0):
    """Inputs as a program has them: pixels, or values of a sensor."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, ImageInput):
        return rng.integers(0, 256, (count, *input_shape(spec)), np.uint8)
    return rng.normal(size=(count, *input_shape(spec))).astype(np.float32)


def strange(spec, count):
    """Inputs unlike those of any class."""
    inputs = raw_inputs(spec, count, seed=7)
    return inputs if isinstance(spec, ImageInput) else -4 * coloured(spec, np.arange(count) % 4, seed=7)


def coloured(spec, labels, seed=0):
    """Inputs whose class shows: one in four values of those of a class is raised."""
    inputs = raw_inputs(spec, len(labels), seed).astype(np.float64)
    flat = inputs.reshape(len(labels), -1)
    for row, label in zip(flat, labels, strict=True):
        row[label :: len(CLASSES)] += 120 if isinstance(spec, ImageInput) else 2
    return np.clip(inputs, 0, 255).astype(np.uint8) if isinstance(spec, ImageInput) else inputs.astype(np.float32)


@pytest.fixture
def fit(make_bundle, tmp_path):
    """A function that fits a head on samples of a task."""

    def fit(
        head,
        params=None,
        *,
        kind="image",
        precision="fp32",
        count=60,
        classes=CLASSES,
        shared=True,
        wrong=0,
        **options,
    ):
        task = TASKS[kind]
        bundle = make_bundle(task=task, int8=True, int8_steps=8, global_head=shared, statistics=head == "ridge_prior")
        labels = np.arange(count) % len(classes)
        names = np.array([classes[label] for label in labels])
        names[:wrong] = np.roll(names[:wrong], 1)
        personal = Personalizer.open(bundle.path, precision=precision, cache=tmp_path / "cache")
        personal.fit(coloured(task.input, labels), names, head=head, params=params or {}, **options)
        return personal

    return fit


def run(content, inputs):
    """Answer by ONNX Runtime alone."""
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (declared,) = session.get_inputs()
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {declared.name: inputs}), strict=True))


@pytest.mark.parametrize(
    "head, params, kind, precision", CASES, ids=lambda value: value if isinstance(value, str) else json.dumps(value)
)
def test_the_file_answers_as_the_head_does(fit, head, params, kind, precision):
    personal = fit(head, params, kind=kind, precision=precision, count=40)
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    spec = TASKS[kind].input
    inputs = np.concatenate([strange(spec, 40), coloured(spec, np.arange(40) % 4, seed=8)])
    answers = run(written.content, inputs)
    np.testing.assert_allclose(answers["probabilities"], personal.predict_proba(inputs), atol=TOLERANCE)
    np.testing.assert_array_equal(answers["unknown"], personal.is_unknown(inputs))
    assert answers["unknown"].any()
    assert not answers["unknown"].all()
    assert answers["probabilities"].shape == (80, len(CLASSES))
    assert {entry.domain for entry in onnx.load_model_from_string(written.content).opset_import} <= {"", "ai.onnx"}


@pytest.mark.parametrize("head", ["lr", "knn", "dualfed"])
def test_without_a_shared_classifier_the_personal_one_answers(fit, head):
    personal = fit(head, shared=False)
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    inputs = raw_inputs(IMAGES.input, 20)
    np.testing.assert_allclose(run(written.content, inputs)["probabilities"], personal.predict_proba(inputs), atol=1e-5)


@pytest.mark.parametrize("classes", [("owl",), ("cat", "elk")])
def test_classes_that_the_device_does_not_have_are_never_answered(fit, classes):
    personal = fit("lr", classes=classes)
    inputs = raw_inputs(IMAGES.input, 9)
    probabilities = run(write_one_file(personal.bundle, personal.encoder, personal.head).content, inputs)[
        "probabilities"
    ]
    np.testing.assert_allclose(probabilities, personal.predict_proba(inputs), atol=1e-5)
    unseen = [number for number, name in enumerate(CLASSES) if name not in classes]
    assert not probabilities[:, unseen].any()


def test_own_classes_and_calibration_are_in_the_file(fit):
    personal = fit("lr", {"c": 1e5}, classes=("cat", "newt"), own_classes=True, count=80, wrong=30)
    assert personal.head.confidence.calibration is not None
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    inputs = raw_inputs(IMAGES.input, 9)
    np.testing.assert_allclose(run(written.content, inputs)["probabilities"], personal.predict_proba(inputs), atol=1e-5)
    assert written.about["labels"] == list(personal.classes)
    assert "newt" in written.about["labels"]
    assert written.about["temperature"] == personal.head.confidence.calibration.temperature


def test_without_a_rule_the_file_says_nothing_about_unknown_inputs(fit):
    personal = fit("lr", count=8, unknown=0)
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    assert [*written.about["outputs"]] == ["probabilities", "features"]
    assert [*run(written.content, raw_inputs(IMAGES.input, 2))] == ["probabilities", "features"]


@pytest.mark.parametrize("kind", ["image", "window"])
@pytest.mark.parametrize("head", ["ridge_regression", "mahalanobis"])
def test_heads_of_numbers(make_bundle, tmp_path, head, kind):
    spec = TASKS[kind].input
    personal = Personalizer.open(make_bundle(task=TASKS[kind]).path, cache=tmp_path / "cache")
    train = coloured(spec, np.arange(40) % 4)
    targets = np.arange(40) * 2.5 if head == "ridge_regression" else None
    personal.fit(train, targets, head=head)
    written = write_one_file(personal.bundle, personal.encoder, personal.numeric)
    inputs = raw_inputs(spec, 30, seed=3)
    expected = personal.predict(inputs)
    answers = run(written.content, inputs)
    if head == "ridge_regression":
        np.testing.assert_allclose(answers["value"], expected, rtol=1e-5)
        assert [*answers] == ["value", "features"]
    else:
        np.testing.assert_allclose(answers["score"], expected, rtol=1e-5)
        np.testing.assert_array_equal(answers["anomaly"], expected > personal.numeric.head.threshold)


def test_the_example_can_be_made_by_hand_and_has_its_answer(fit):
    personal = fit("lr")
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    (entry,) = onnx.load_model_from_string(written.content).metadata_props
    assert entry.key == METADATA
    about = json.loads(entry.value)
    by_hand = [[[7919 * ((y * 8 + x) * 3 + c) % 256 for c in range(3)] for x in range(8)] for y in range(8)]
    assert example_input(IMAGES.input).tolist() == by_hand
    answers = run(written.content, np.array([by_hand], np.uint8))
    np.testing.assert_allclose(about["example"]["answers"]["probabilities"], answers["probabilities"][0], atol=1e-6)
    assert about["input"] == {
        "name": "image",
        "dtype": "uint8",
        "shape": ["n", 8, 8, 3],
        "channels": "RGB",
        "resize": "bilinear, with antialiasing",
    }


def test_a_program_without_this_project_reads_it(fit, tmp_path):
    """The six lines of the guide, in a process that cannot import anything of ours."""
    personal = fit("svm")
    path = tmp_path / "model.onnx"
    path.write_bytes(write_one_file(personal.bundle, personal.encoder, personal.head).content)
    inputs = raw_inputs(IMAGES.input, 3)
    np.save(tmp_path / "x.npy", inputs)
    program = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["headwater"])
probabilities, = session.run(["probabilities"], {about["input"]["name"]: np.load(sys.argv[2])})
print(json.dumps([[about["labels"][row.argmax()], float(row.max())] for row in probabilities]))
assert not any(name.split(".")[0] in {"edge_agent", "export", "coordinator", "onnx"} for name in sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-I", "-c", program, str(path), str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=tmp_path,
    )
    answers = json.loads(finished.stdout)
    shares = personal.predict_proba(inputs)
    assert [name for name, _ in answers] == [CLASSES[row.argmax()] for row in shares]
    np.testing.assert_allclose([share for _, share in answers], shares.max(axis=1), atol=1e-5)


def test_a_head_without_operators_is_refused_with_what_to_do(fit, monkeypatch):
    personal = fit("lr")
    monkeypatch.delattr(LogisticRegressionHead.__mro__[1], "_write")
    with pytest.raises(UsageError, match="head 'lr' cannot be written as ONNX operators; fit another one"):
        write_one_file(personal.bundle, personal.encoder, personal.head)


def test_a_file_that_would_answer_differently_is_refused(fit, monkeypatch):
    personal = fit("lr")
    monkeypatch.setattr(Graph, "softmax", lambda graph, logits: graph.add("Softmax", logits, axis=0))
    with pytest.raises(StateError, match=r"differ from the head's by .*; nothing was written: fit the head again"):
        write_one_file(personal.bundle, personal.encoder, personal.head)


def test_a_model_without_the_encoder_is_a_file_without_it(make_bundle, tmp_path):
    personal = Personalizer.open(make_bundle(task=IMAGES).path, cache=tmp_path / "cache")
    labels = np.arange(40) % 4
    personal.fit(coloured(IMAGES.input, labels), np.array(CLASSES)[labels], head="lr", local=True)
    personal.use_local()
    content = write_one_file(personal.bundle, personal.encoder, personal.head).content
    session = onnxruntime.InferenceSession(content)
    assert [output.name for output in session.get_outputs()] == ["probabilities"]
    images = coloured(IMAGES.input, labels)
    (answers,) = session.run(None, {"image": images})
    np.testing.assert_allclose(answers, personal.predict_proba(images), atol=TOLERANCE)
    assert not any(
        name.startswith("encoder") for name in (one.name for one in onnx.load_from_string(content).graph.node)
    )


def test_without_the_package_onnx_it_says_how_to_get_it(fit, monkeypatch):
    personal = fit("lr")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingCapability, match=r"writing a model as one file.*\[onnx\]"):
        write_one_file(personal.bundle, personal.encoder, personal.head)


# --- programs in other languages -------------------------------------------------------------------------------------

HEADERS = [
    Path(folder)
    for folder in (
        os.environ.get("ONNXRUNTIME_INCLUDE", ""),
        "/usr/include/onnxruntime",
        "/usr/include/onnxruntime/core/session",
        "/usr/local/include/onnxruntime",
    )
    if folder and (Path(folder) / "onnxruntime_c_api.h").is_file()
]
LIBRARIES = [*(Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")]
WEB = Path(os.environ.get("ONNXRUNTIME_WEB", "/nowhere"))
"""The folder ``dist`` of the npm package onnxruntime-web."""


@pytest.fixture
def model(fit, tmp_path):
    """A fitted model, and the folder that its file and its description lie in."""
    personal = fit("svm")
    written = write_one_file(personal.bundle, personal.encoder, personal.head)
    write_atomic(tmp_path / "model.onnx", written.content)
    write_atomic(tmp_path / "model.json", json.dumps(written.about).encode())
    return personal, tmp_path


def test_the_python_example_answers_a_photo_as_predict_does(model):
    personal, folder = model
    photo = folder / "photo.png"
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (30, 44, 3), np.uint8)).save(photo)
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "answer.py", folder / "model.onnx", photo],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    name, share = finished.stdout.split()
    (expected,) = personal.predict_proba(photo)
    assert name == CLASSES[expected.argmax()]
    assert float(share) == pytest.approx(expected.max(), abs=1e-3)


@pytest.mark.skipif(
    not (HEADERS and LIBRARIES and shutil.which("cc")),
    reason="no C compiler, or no onnxruntime_c_api.h: name its folder by ONNXRUNTIME_INCLUDE",
)
def test_the_c_example_answers_as_predict_does(model):
    personal, folder = model
    program = folder / "answer"
    # The name by which the program looks for its library; the wheel has the library under its full version alone.
    (folder / "libonnxruntime.so.1").symlink_to(LIBRARIES[0])
    subprocess.run(
        ["cc", "-Wall", "-Werror", EXAMPLES / "answer.c", "-I", HEADERS[0], LIBRARIES[0], "-o", program],
        check=True,
        timeout=120,
    )
    pixels = raw_inputs(IMAGES.input, 1)
    finished = subprocess.run(
        [program, folder / "model.onnx", "8", "8", "3"],
        input=pixels.tobytes(),
        capture_output=True,
        check=True,
        timeout=120,
        env={"LD_LIBRARY_PATH": str(folder)},
    )
    shares = [float(line) for line in finished.stdout.split()]
    np.testing.assert_allclose(shares, personal.predict_proba(pixels)[0], atol=1e-5)


@contextlib.contextmanager
def files_served(folder):
    """Serve a folder to a browser on this machine; yields the address."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        """Say nothing on stderr."""


@pytest.mark.skipif(not (WEB / "ort.wasm.min.js").is_file(), reason="no onnxruntime-web: name it by ONNXRUNTIME_WEB")
def test_the_page_answers_in_a_browser_as_predict_does(model):
    personal, folder = model
    for file in (EXAMPLES / "index.html", *WEB.glob("ort.wasm.min.js"), *WEB.glob("ort-wasm-simd-threaded.[mw]*")):
        shutil.copy(file, folder)
    pixels = raw_inputs(IMAGES.input, 1)
    (expected,) = personal.predict_proba(pixels)
    photo = folder / "photo.png"
    Image.fromarray(pixels[0]).save(photo)
    with files_served(folder) as address, browser() as chromium, seen(chromium, f"{address}/index.html") as view:
        shares = view.page.evaluate(
            "pixels => answer(Uint8Array.from(pixels)).then(found => [...found])", pixels.ravel().tolist()
        )
        np.testing.assert_allclose(shares, expected, atol=1e-5)
        # The same photo by the page itself: it has the model's size, so that nothing is resized.
        view.page.set_input_files("input", photo)
        view.page.wait_for_selector("td")
        assert view.page.text_content("tr") == f"{CLASSES[expected.argmax()]}{100 * expected.max():.1f} %"
        assert view.troubles == []

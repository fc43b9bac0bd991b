"""``headwater bundle`` as people type it, and what the commands of a device do with a bundle that has no classes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from foreign_networks import edited, hugging_face_export, torchvision_export
from identity_harness import Fleet
from PIL import Image

from edge_agent.bundle.archive import open_bundle
from edge_agent.cli import main as edge_agent
from edge_agent.personal.personalizer import load_bundle
from edge_agent.serving.pair import Pair


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of pictures of two kinds: bright above, or bright on the left."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("above", "left"):
        (root / name).mkdir()
        for number in range(16):
            pixels = rng.integers(0, 120, (40, 40, 3), dtype=np.uint8)
            part = pixels[:20] if name == "above" else pixels[:, :20]
            part += 110
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def device(tmp_path, capsys, monkeypatch):
    """Run a command of a device: its exit code, and its result as JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: object):
        capsys.readouterr()
        code = edge_agent([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_from_a_file_to_answers(call, tmp_path, photos, device):
    """The commands fit, predict and evaluate, and the pair that serves, with the classes of the device's photos."""
    network = torchvision_export(tmp_path)
    bundle = tmp_path / "resnet.hwb"
    code, out, err = call("bundle", network, "--mean", "0.485,0.456,0.406", "--std", "0.25", "--out", bundle, "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (made["feature_dim"], made["classes"], made["signed"], made["layout"]) == (16, 0, None, "NCHW")
    assert made["input"]["mean"] == [0.485, 0.456, 0.406]
    assert all(gate["passed"] for gate in made["gates"])
    head = tmp_path / "head"
    code, fitted = device("fit", "--bundle", bundle, "--data", f"images:{photos}", "--out", head)
    assert code == 0
    assert fitted["acc.personal"] >= 0.9
    code, predicted = device(
        "predict", "--bundle", bundle, "--head", head, photos / "above/1.png", photos / "left/2.png"
    )
    assert [row["class"] for row in predicted["predictions"]] == ["above", "left"]
    assert device("evaluate", "--bundle", bundle, "--data", f"images:{photos}", "--head", head)[0] == 0
    assert device("evaluate", "--bundle", bundle, "--data", f"images:{photos}")[0] == 0
    pair = Pair.open(load_bundle(bundle, tmp_path / "cache"), head)
    assert pair.class_names == ("above", "left")


def test_a_device_collects_samples_for_such_a_bundle(call, tmp_path, photos, device):
    bundle = tmp_path / "resnet.hwb"
    state = tmp_path / "state"
    assert call("bundle", torchvision_export(tmp_path), "--out", bundle)[0] == 0
    assert device("import", bundle, "--state", state)[0] == 0
    code, added = device("add", "--state", state, "--data", f"images:{photos}")
    assert (code, added["added"]) == (0, 32)
    code, listed = device("classes", "list", "--state", state)
    assert [row["class"] for row in listed["classes"]] == ["above", "left"]


def test_without_a_head_it_says_that_one_is_needed(call, tmp_path, photos, capsys):
    bundle = tmp_path / "resnet.hwb"
    call("bundle", torchvision_export(tmp_path), "--out", bundle)
    assert edge_agent(["predict", "--bundle", str(bundle), str(photos / "above/1.png"), "--cache", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"'edge-agent fit --bundle {bundle} --data images:FOLDER --out my-head'" in said


def test_the_text_says_what_was_taken_and_what_comes_next(call, tmp_path):
    network = hugging_face_export(tmp_path)
    out = tmp_path / "vit.hwb"
    code, text, _ = call("bundle", network, "--preprocessing", tmp_path / "preprocessor_config.json", "--out", out)
    assert code == 0
    assert "the input of the classifier '/classifier/Gemm' (Gemm)" in text
    assert f"next: edge-agent fit --bundle {out}" in text


def test_a_federation_with_a_release_key_signs_it(tmp_path, capsys):
    with Fleet(tmp_path / "fleet", capsys) as fleet:
        fleet.init()
        out = tmp_path / "signed.hwb"
        code, text, err = fleet.call("bundle", torchvision_export(tmp_path), "--out", out, "-c", fleet.config, "--json")
        assert code == 0, err
        assert json.loads(text)["signed"] is not None
        assert open_bundle(out).release is not None


def test_a_folder_of_a_federation_that_is_not_there_costs_no_bundle(call, tmp_path):
    network = torchvision_export(tmp_path)
    out = tmp_path / "made.hwb"
    for option, message in (("--state", "no such folder"), ("--config", "no such file")):
        code, _, err = call("bundle", network, "--out", out, option, tmp_path / "gone")
        assert (code, out.exists()) == (2, False)
        assert message in err


def test_a_folder_without_a_release_key_is_told(call, tmp_path):
    out = tmp_path / "made.hwb"
    code, text, _ = call("bundle", torchvision_export(tmp_path), "--out", out, "--state", tmp_path)
    assert code == 0
    assert f"note: not signed: {tmp_path} has no release key" in text
    assert open_bundle(out).release is None


def test_neither_the_network_nor_a_device_is_replaced(call, tmp_path):
    network = torchvision_export(tmp_path)
    content = network.read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, message in ((network, "is the file of the network itself"), (pipe, "is a device, socket or pipe")):
        code, _, err = call("bundle", network, "--out", out)
        assert code == 2
        assert message in err
    assert network.read_bytes() == content
    assert pipe.is_fifo()


def rename_features(model):
    """Give the input of the classifier a name that would make a terminal write in red."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name == "/Flatten_output_0":
                    names[position] = "\x1b[31mpooled"


def test_texts_of_others_do_not_control_the_terminal(call, tmp_path):
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(
        json.dumps({"sampling_rate": 16000, "feature_size": 80, "feature_extractor_type": "\x1b[31mRed"})
    )
    code, _, err = call(
        "bundle", torchvision_export(tmp_path), "--preprocessing", settings, "--out", tmp_path / "made.hwb"
    )
    assert code == 2
    assert "[31mRed makes 80 features" in err
    assert "\x1b" not in err
    # Names of tensors and what a configuration says of pictures are shown with what was made.
    network = edited(torchvision_export(tmp_path), rename_features)
    settings.write_text(json.dumps({"size": 32, "image_mean": 0.5, "image_std": 0.5, "resample": "\x1b[31mred"}))
    code, out, _ = call("bundle", network, "--preprocessing", settings, "--out", tmp_path / "made.hwb")
    assert code == 0
    assert "[31mpooled" in out
    assert "resizes by ' [31mred'" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("gone.onnx",), 2, "no such file"),
        (("resnet81",), 2, "did you mean resnet18"),
        (("NETWORK", "--size", "big"), 2, "size"),
        (("NETWORK", "--pool", "average"), 2, "pool"),
        (("NETWORK", "--size", "48"), 2, "32 in the network's input"),
        (("NETWORK", "--features", "nothing"), 2, "no such tensor"),
        (("NETWORK", "--weights", "w.pth"), 2, "has its own weights"),
        (("NETWORK", "--preprocessing", "p.json"), 2, "cannot be read"),
        (("NETWORK", "--calibration", "images:nowhere"), 2, "nowhere"),
    ],
)
def test_mistakes_are_one_message_and_nothing_is_written(call, tmp_path, words, code, message):
    network = torchvision_export(tmp_path)
    out = tmp_path / "out" / "made.hwb"
    given = [str(network) if word == "NETWORK" else word for word in words]
    received, text, err = call("bundle", *given, "--out", out)
    assert (received, text) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert not out.parent.exists() or [*out.parent.iterdir()] == []

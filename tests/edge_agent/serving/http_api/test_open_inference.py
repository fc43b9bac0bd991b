"""The Open Inference Protocol, as a client of Triton speaks it, and by hand."""

from __future__ import annotations

import json
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from serving_site import COLOURS, named_source, png, square

from edge_agent.core.task import Task, WindowInput
from edge_agent.personal.personalizer import Personalizer, load_bundle
from edge_agent.serving.http_api import open_inference

SQUARES = np.stack([square(label, 321, size=20) for label in COLOURS])


@pytest.fixture
def triton(site):
    client = pytest.importorskip("tritonclient.http")
    connection = client.InferenceServerClient(f"127.0.0.1:{site.port}")
    yield connection
    connection.close()


def infer(site, model, content, tail=b"", headers=None):
    head = json.dumps(content).encode()
    length = {"Inference-Header-Content-Length": str(len(head))} if tail else {}
    return site.ask("POST", f"/v2/models/{model}/infer", head + tail, {**length, **(headers or {})})


def image_tensor(array, **more):
    data = {"data": array.reshape(-1).tolist()}
    return {"name": "image", "shape": list(array.shape), "datatype": "UINT8", **data, **more}


def test_tritons_client_finds_server_and_models(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("classifier")
    assert triton.is_model_ready("encoder", "1")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    described = triton.get_model_metadata("classifier")
    assert described["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
    assert [output["name"] for output in described["outputs"]] == ["probabilities", "class", "unknown"]


@pytest.mark.parametrize("is_binary", [True, False])
def test_tritons_client_gets_the_answers_of_classify(site, triton, is_binary):
    from tritonclient.http import InferInput, InferRequestedOutput

    tensor = InferInput("image", list(SQUARES.shape), "UINT8")
    tensor.set_data_from_numpy(SQUARES, binary_data=is_binary)
    outputs = [InferRequestedOutput(name, binary_data=is_binary) for name in ("probabilities", "class", "unknown")]
    result = triton.infer("classifier", [tensor], outputs=outputs, request_id="seven")
    labels = [text.decode() if isinstance(text, bytes) else text for text in result.as_numpy("class").tolist()]
    assert labels == list(COLOURS)
    assert result.as_numpy("unknown").tolist() == [False] * 3
    assert result.get_response()["id"] == "seven"
    for row, pixels in enumerate(SQUARES):
        answer = site.classify(png(pixels))
        expected = list(answer["probabilities"].values())
        assert np.allclose(result.as_numpy("probabilities")[row], expected, atol=1e-5)
        assert result.get_response()["parameters"]["head_id"] == answer["head_id"]


def test_tritons_client_gets_all_outputs_where_it_names_none(triton):
    from tritonclient.http import InferInput

    tensor = InferInput("image", list(SQUARES.shape), "UINT8")
    tensor.set_data_from_numpy(SQUARES)
    result = triton.infer("classifier", [tensor])
    assert result.as_numpy("probabilities").shape == (3, 3)
    assert [text.decode() for text in result.as_numpy("class").tolist()] == list(COLOURS)


def test_tritons_client_gets_the_encoders_features(site, triton):
    from tritonclient.http import InferInput

    pair = site.service.predictor.pair
    inputs = np.random.default_rng(0).normal(size=(4, *pair.encoder.input_shape)).astype(np.float32)
    tensor = InferInput(pair.encoder.input_name, list(inputs.shape), "FP32")
    tensor.set_data_from_numpy(inputs)
    features = triton.infer("encoder", [tensor]).as_numpy("features")
    assert (features == pair.encoder.features(inputs)).all()


def test_tritons_client_gets_an_error_it_understands(triton):
    from tritonclient.http import InferInput
    from tritonclient.utils import InferenceServerException

    tensor = InferInput("image", [1, 4, 4, 2], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 4, 4, 2), np.uint8))
    with pytest.raises(InferenceServerException, match=r"expected \[n, height, width, 3\]"):
        triton.infer("classifier", [tensor])
    with pytest.raises(InferenceServerException, match="did you mean 'classifier'"):
        triton.get_model_metadata("classifer")


def test_windows_are_answered_too(serve, make_bundle, tmp_path):
    spec = WindowInput(channels=2, length=16, stride=8, mean=(1.0,), std=(2.0,))
    task = Task(input=spec, class_names=("still", "wave"), encoder="linear", encoder_params={})
    path = make_bundle("windows.hwb", task=task).path
    times = np.arange(16)
    still = np.random.default_rng(0).normal(scale=0.1, size=(30, 2, 16))
    waves = np.sin(times + np.arange(30)[:, None, None]) + still
    personal = Personalizer.open(path, cache=tmp_path / "cache")
    personal.fit(np.concatenate([still, waves]), np.array(["still"] * 30 + ["wave"] * 30), head="lr")
    personal.save(tmp_path / "head")
    site = serve(named_source(load_bundle(path, tmp_path / "cache"), tmp_path / "head"))
    rows = np.stack([still[0], waves[0]]).astype(np.float32)
    tensor = {"name": "window", "shape": [2, 2, 16], "datatype": "FP32", "data": rows.tolist()}
    status, content, _ = infer(site, "classifier", {"inputs": [tensor]})
    assert status == 200, content
    by_name = {output["name"]: output for output in content["outputs"]}
    assert by_name["class"]["data"] == ["still", "wave"]
    assert np.allclose(by_name["probabilities"]["data"], personal.predict_proba(rows).reshape(-1), atol=1e-6)


def test_numbers_of_a_head_for_anomalies(serve, bundle, bundle_path, tmp_path):
    normal = np.stack([square("green", number) for number in range(60)])
    Personalizer.open(bundle_path, cache=tmp_path / "cache").fit(normal, head="mahalanobis").save(tmp_path / "watch")
    site = serve(named_source(bundle, tmp_path / "watch"))
    array = np.stack([square("green", 99), square("red", 99)])
    status, content, _ = infer(site, "classifier", {"inputs": [image_tensor(array)]})
    assert status == 200, content
    assert [output["name"] for output in content["outputs"]] == ["score", "anomaly"]
    assert content["outputs"][1]["data"] == [False, True]


def test_only_the_outputs_that_are_asked_for_come_back(site):
    content = {"inputs": [image_tensor(SQUARES)], "outputs": [{"name": "class"}]}
    _, answer, _ = infer(site, "classifier", content)
    assert [output["name"] for output in answer["outputs"]] == ["class"]


def test_texts_in_binary_have_their_lengths(site):
    outputs = [{"name": "class", "parameters": {"binary_data": True}}]
    _, raw, fields = infer(site, "classifier", {"inputs": [image_tensor(SQUARES[:1])], "outputs": outputs})
    tail = raw[int(fields["inference-header-content-length"]) :]
    assert tail == struct.pack("<I", 3) + b"red"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"name": "picture"}, "inputs 'picture'; expected one, 'image' UINT8"),
        ({"shape": [3, 20, 20]}, "has shape [3, 20, 20]"),
        ({"shape": [0, 20, 20, 3]}, "with 1 to 256 rows"),
        ({"shape": [10**6, 10**6, 10**6, 3]}, "with 1 to 256 rows"),
        ({"shape": [3, 10**6, 10**6, 3]}, "its shape [3, 1000000, 1000000, 3] needs 9000000000000"),
        ({"shape": [3, 20, 20, 4]}, "needs 4800"),
        ({"datatype": "COMPLEX"}, "is COMPLEX, expected UINT8"),
        ({"data": ["x"] * 3600}, "something else than numbers"),
        ({"data": [[1, 2], [3]]}, "has 3 values"),
        ({"data": None}, "has 0 values"),
        ({"parameters": {"binary_data_size": 3600}}, "has 0 bytes behind the JSON"),
        ({"datatype": "FP32", "data": [1e300] * 3600}, "NaN, infinity"),
        ({"shape": "x"}, "inputs.0.shape"),
    ],
)
def test_what_does_not_fit_says_why(site, change, says):
    status, content, _ = infer(site, "classifier", {"inputs": [image_tensor(SQUARES, **change)]})
    assert status == 400
    assert says in content["error"]


@pytest.mark.parametrize(
    "body, headers, says",
    [
        (b"{", {}, "the body is invalid JSON"),
        (b"[]", {}, "request"),
        (b"[" * 100_000, {}, "the body is invalid JSON"),
        (b"{}", {}, "inputs: is missing"),
        (b"{}", {"Inference-Header-Content-Length": "99"}, "expected a number of at most 2"),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, "expected a number"),
    ],
)
def test_a_body_that_is_none_of_the_protocol_says_why(site, body, headers, says):
    status, content, _ = site.ask("POST", "/v2/models/classifier/infer", body, headers)
    assert status == 400
    assert says in content["error"]


def test_unknown_models_versions_and_outputs(site):
    assert site.ask("GET", "/v2/models/nothing")[0] == 404
    assert site.ask("GET", "/v2/models/encoder/versions/7")[0] == 404
    content = {"inputs": [image_tensor(SQUARES)], "outputs": [{"name": "logits"}]}
    status, answer, _ = infer(site, "classifier", content)
    assert status == 400
    assert "it has probabilities, class, unknown" in answer["error"]


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["inputs", "name", "shape", "data", "datatype", "outputs"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_gives_an_answer_or_a_mistake(site, content):
    status, answer, _ = site.ask("POST", "/v2/models/classifier/infer", json.dumps(content).encode())
    assert status in {200, 400}
    assert "error" in answer or status == 200


@pytest.mark.parametrize("datatype, value", [("FP32", 3e38), ("FP64", 1e300)])
def test_values_too_large_for_features_are_refused(site, datatype, value):
    tensor = {"name": "image", "shape": [1, 3, 8, 8], "datatype": datatype, "data": [value] * 192}
    status, content, _ = infer(site, "encoder", {"inputs": [tensor]})
    assert status == 400
    assert "finite" in content["error"] or "beyond float32" in content["error"]


def test_a_shape_of_numbers_too_long_to_be_shown_is_refused(site):
    body = b'{"inputs":[{"name":"image","datatype":"UINT8","shape":[1,%b,%b,3],"data":[1]}]}' % (
        b"9" * 4000,
        b"9" * 4000,
    )
    status, content, _ = site.ask("POST", "/v2/models/classifier/infer", body)
    assert status == 400
    assert "inputs.0.shape.1" in content["error"]
    assert len(content["error"]) < 1000


def test_values_of_one_request_at_a_time_are_objects_in_memory(site, monkeypatch):
    present = 0
    most = 0
    real = open_inference._read_input

    def counting(*arguments):
        nonlocal present, most
        present += 1
        most = max(most, present)
        threading.Event().wait(0.02)
        present -= 1
        return real(*arguments)

    monkeypatch.setattr(open_inference, "_read_input", counting)
    tensor = image_tensor(SQUARES[:1])
    threads = [threading.Thread(target=infer, args=(site, "classifier", {"inputs": [tensor]})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1

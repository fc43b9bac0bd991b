"""An image in, an answer out, counted."""

from __future__ import annotations

import re

import pytest
from serving_site import COLOURS, png, square


@pytest.mark.parametrize("label", COLOURS)
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_is_answered(site, label, form):
    answer = site.classify(png(square(label, 41, size=40), form))
    assert answer["class"] == label
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert answer["unknown"] is False
    assert answer["head"] == "lr"


def test_what_is_no_image_says_what_was_expected(site):
    status, content, _ = site.ask("POST", "/classify", b"nonsense")
    assert status == 400
    assert content["error"]["kind"] == "DataError"
    assert "JPEG or PNG" in content["error"]["message"]


def test_a_form_is_not_read_and_says_how_to_send_a_file(site):
    boundary = b"--abc\r\n"
    form = boundary + b'Content-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + png(square("red"))
    fields = {"Content-Type": "multipart/form-data; boundary=abc"}
    status, content, _ = site.ask("POST", "/classify", form + b"\r\n--abc--\r\n", fields)
    assert status == 400
    assert "the body is a form" in content["error"]["message"]
    assert "--data-binary" in content["error"]["message"]


def test_metrics_count_answers_by_class_and_stage(site):
    for label, times in (("red", 2), ("blue", 3)):
        for number in range(times):
            site.classify(png(square(label, number)))
    status, raw, headers = site.ask("GET", "/metrics")
    text = raw.decode()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'headwater_predictions_total{class="red"} 2' in text
    assert 'headwater_predictions_total{class="blue"} 3' in text
    assert 'headwater_prediction_seconds_count{stage="encode"} 5' in text
    assert 'headwater_prediction_seconds_bucket{stage="head",le="+Inf"} 5' in text
    assert re.search(r'headwater_head_info\{bundle="[0-9a-f]{12}",head="lr",head_id="[0-9a-f]{12}"\} 1', text)


def test_metrics_are_read_by_prometheus_own_parser(site):
    parser = pytest.importorskip("prometheus_client.parser")
    site.classify(png(square("red")))
    families = {
        family.name for family in parser.text_string_to_metric_families(site.ask("GET", "/metrics")[1].decode())
    }
    assert families == {
        "headwater_predictions",
        "headwater_unknown",
        "headwater_prediction_seconds",
        "headwater_pair_switches",
        "headwater_head_info",
    }

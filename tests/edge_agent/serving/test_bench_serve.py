"""``headwater bench serve`` on a small model: its figures belong together."""

from __future__ import annotations

import pytest
from serving_site import fit_squares, png, square

from coordinator.research.bench.measuring import ServePlan
from coordinator.research.bench.serving import rows
from edge_agent.core.errors import MeasuringFailed


@pytest.fixture
def plan(bundle_path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    head = fit_squares(bundle_path, tmp_path / "fitted", tmp_path / "cache")
    photo = tmp_path / "red.png"
    photo.write_bytes(png(square("red")))
    return ServePlan(bundle=bundle_path, head=head, input=photo, rate=100, seconds=0.3)


def test_the_figures_belong_together(plan, tmp_path):
    figures = {row.name: row.value for row in rows(plan, tmp_path)}
    for name in ("answer at 100 a second", "of it overhead"):
        assert 0 < figures[f"{name}, p50"] <= figures[f"{name}, p90"] <= figures[f"{name}, p99"]
    assert figures["of it overhead, p50"] < figures["answer at 100 a second, p50"]
    for part in ("decoding", "encoder", "head"):
        assert 0 < figures[f"of it {part}, p50"] < figures["answer at 100 a second, p50"]
    assert figures["answers a second, one after the other"] > 1
    assert 20 < figures["memory after the first answer"] <= figures["memory at the most"] + 1
    assert figures["encoder alone, a bare loop of ONNX Runtime, p50"] > 0


def test_an_input_that_is_none_is_said(plan, tmp_path):
    plan.input.write_bytes(b"no image")
    with pytest.raises(MeasuringFailed, match=r"the server answers 400: .*DataError"):
        list(rows(plan, tmp_path))

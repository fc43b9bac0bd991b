"""Dashboard and alerts, held against the figures that the programs write."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import datetime, timezone

import pytest
import yaml

from coordinator.state.status_file import Status
from coordinator.views.counts import Counts, RoundOfRun
from coordinator.web.metrics import Snapshot, exposition
from edge_agent.agent.textfile import Figures, text

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
UNITS = {"none", "s", "bytes", "Bps", "ops", "percentunit"}
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed"
)


@pytest.fixture(scope="module")
def written():
    """Name -> names of labels of all that both programs can write."""
    privacy = {"epsilon": 1.0, "epsilon_left": 1.0, "delta": 1e-5, "rounds_without_noise": 0}
    status = {
        "federation": "home",
        "at": NOW.isoformat(),
        "run": {"round": 1, "rounds": 2, "privacy": privacy},
        "waiting": {"count": 1, "seconds_left": 1.0},
        "process": {"resident_bytes": 1},
    }
    counts = Counts(open_round=RoundOfRun("run-0001", 1), opened_at=NOW.isoformat())
    whole = Snapshot(
        NOW,
        Status(status),
        counts=counts,
        accuracies={"personal": [1.0]},
        disk_free_bytes=1,
        disk_size_bytes=2,
        state_bytes={"blobs": 1},
    )
    accuracies = {"personal": 1.0, "local": 1.0, "global": 1.0}
    agent = text(Figures("head", "b", "ok", True, False, 1, 1, 1, accuracies))
    names = {}
    for line in (exposition(whole).decode() + agent).splitlines():
        if not line.startswith("#"):
            name, labels = re.match(r"(\w+)(?:\{(.*)\})? ", line).groups()
            names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return names


@pytest.fixture(scope="module")
def dashboard(root):
    return json.loads((root / "configs/grafana/dashboard.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rules(root):
    (group,) = yaml.safe_load((root / "configs/grafana/alerts.yml").read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def check(expression, written):
    """Every figure and label in the expression is written by a program."""
    used = re.findall(r"(headwater_\w+)(?:\{([^}]*)\})?", expression)
    assert used, expression
    for name, labels in used:
        assert name in written, name
        for label in re.findall(r"(\w+)(?:=~|!=|=)", labels):
            assert label in written[name] | {"instance", "job"}, f"{name} has no label {label}"
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        assert {one.strip() for one in labels.split(",")} <= set().union(*(written[name] for name, _ in used))


def test_every_panel_draws_figures_that_exist_with_a_unit(dashboard, written):
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        assert panel["title"]
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            check(target["expr"], written)
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert any(label in written[name] for name, _ in re.findall(r"(headwater_\w+)()", target["expr"]))
            is_bytes = "_bytes" in target["expr"]
            assert is_bytes == (panel["fieldConfig"]["defaults"]["unit"] in {"bytes", "Bps"}), panel["title"]
    drawn = {name for panel in panels for one in panel["targets"] for name in re.findall(r"headwater_\w+", one["expr"])}
    assert len(drawn) > 25


def test_panels_fill_a_grid_of_24_columns_without_lying_on_each_other(dashboard):
    cells = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len({*ids}) == len(ids)
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & mine, panel["title"]
        cells |= mine
    assert len(cells) == 24 * (max(y for _, y in cells) + 1)


def test_the_dashboard_has_what_grafana_asks_for(dashboard):
    keys = {"title", "uid", "schemaVersion", "version", "panels", "templating", "time", "annotations", "refresh"}
    assert keys <= dashboard.keys()
    assert "id" not in dashboard, "Grafana gives one when it is loaded"
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {*re.findall(r"\$\{?(\w+)", json.dumps(dashboard))} <= {*variables, "value", "__all"}


def test_every_alert_uses_figures_that_exist_and_says_what_to_do(rules, written):
    assert len({rule["alert"] for rule in rules}) == len(rules) == 12
    for rule in rules:
        check(rule["expr"], written)
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "remedy"}


def test_every_alert_has_an_example_that_fires(root, rules):
    cases = yaml.safe_load((root / "configs/grafana/alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = re.findall(r'alertname="(\w+)"', json.dumps(cases).replace('\\"', '"'))
    assert {*fired} == {rule["alert"] for rule in rules}
    assert cases[0]["promql_expr_test"][0]["exp_samples"] == []


@promtool
def test_alerts_fire_and_stay_silent_as_their_examples_say(root):
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            ["promtool", *command],
            cwd=root / "configs/grafana",
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_can_read_every_expression_of_the_dashboard(tmp_path, dashboard):
    expressions = [one["expr"] for panel in dashboard["panels"] for one in panel.get("targets", ())]
    rules = [{"record": f"r{n}", "expr": expression} for n, expression in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", "rules.yml"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_finds_nothing_to_object_to_in_the_figures(written):
    status = {"federation": "home", "at": NOW.isoformat()}
    agent = text(Figures("head", "b", "ok", True, False, 1, 1, 1, {"personal": 1.0}))
    for page in (exposition(Snapshot(NOW, Status(status), counts=Counts())), agent.encode()):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, check=False, capture_output=True, timeout=60
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")

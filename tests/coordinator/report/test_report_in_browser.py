"""Reports in a real browser, without network: what is drawn, read by keyboard and screen reader, in both themes."""

from __future__ import annotations

import json

import pytest
from browser import VIEWS, browser, seen

from coordinator.report.charts import MOST_POINTS, Axis, Lines, Series, chart_json
from coordinator.report.figures import read_run
from coordinator.report.page import render

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title = 'hacked'</script><img src=x onerror=\"document.title = 'hacked'\">"
PARTITION = {
    "rule": "dirichlet",
    "classes": [f"class {number}" for number in range(10)],
    "clients": [{"id": f"c{client}", "train": [client * number for number in range(10)]} for client in range(20)],
}


def run_page(rounds=30, **changes):
    agents = [f"c{number}" for number in range(12)]
    records = [
        {
            "kind": "round", "round": number, "seconds": 30.0 if number == 1 else 1.0 + number % 3, "agents": agents,
            "waiting_s": 0.5, "bytes_up": 10_000 * number, "bytes_down": 5_000 * number, "missing": agents[:number % 2],
            "acc": {scope: {name: 1 - 1 / (number + index + 1) for index, name in enumerate(agents)}
                    for scope in ("global", "personal", "after")},
            "loss": dict.fromkeys(agents, 1 / number),
        }
        for number in range(1, rounds + 1)
    ]  # fmt: skip
    records += [
        {
            "kind": "agent", "id": HOSTILE if index == 3 else name, "tier": "train", "samples": 90, "support": 30,
            "acc": {"local": 0.8, "global": 0.7, "personal": 0.7 + index / 50}, "local_model": "raw inputs + lr",
            "better_alone": index == 0, "head": "model", "rss_mb": 96.0, "bytes_up": 1e6, "bytes_down": 1e6,
        }
        for index, name in enumerate(agents)
    ]  # fmt: skip
    summary = {"method": "fedpac", "params": {"lr": 0.1}, "rounds": rounds, "seed": 0, "status": "finished"}
    summary |= {"simulation": {"data": ["digits"], "partition": PARTITION, "plan": {"data": ["digits"]}}}
    return render(read_run("run-0001", {**summary, **changes}, records))


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(run_page(), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme, width", VIEWS)
def test_report_is_drawn_without_errors_requests_or_barriers(chromium, url, scheme, width):
    with seen(chromium, url, scheme, width) as view:
        assert view.requests == [url]
        assert view.violations() == []
        assert view.troubles == []
        assert view.page.title() != "hacked"
        assert view.page.locator("figure.chart").count() == 6
        assert view.page.locator("figure.chart canvas").count() == 4
        assert view.page.locator(".rows > li:not(.axis)").count() == 12
        assert view.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "only tables scroll sideways"
        hint = view.page.get_by_text("Swipe the table sideways")
        assert [one.is_visible() for one in hint.all()] == [width == 390] * 2
        ink, page = (
            ("rgb(29, 36, 48)", "rgb(251, 250, 247)")
            if scheme == "light"
            else ("rgb(231, 234, 240)", "rgb(20, 24, 31)")
        )
        style = view.page.evaluate(
            "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
        )
        assert style == [ink, page]


def test_curves_are_read_by_keyboard(chromium, url):
    with seen(chromium, url) as view:
        figure = view.page.locator("#curves-0")
        figure.locator(".canvas").focus()
        view.page.keyboard.press("End")
        live = figure.locator("[aria-live=polite]")
        live.get_by_text("rounds done 30: ").wait_for(state="attached")
        # By hand: the last point is the mean of the agents, .7 + index / 50 of 12.
        assert "acc.personal, mean 81.0 %" in live.text_content()
        view.page.keyboard.press("Home")
        live.get_by_text("rounds done 0: ").wait_for(state="attached")
        view.page.keyboard.press("ArrowRight")
        live.get_by_text("rounds done 1: ").wait_for(state="attached")
        assert figure.locator(".tip").is_visible()
        assert "acc.global, mean" in figure.locator(".tip").text_content()
        view.page.keyboard.press("Escape")
        assert figure.locator(".tip").is_hidden()
        assert view.troubles == []


def test_series_are_hidden_and_axes_become_logarithmic_by_buttons(chromium, url):
    with seen(chromium, url) as view:
        figure = view.page.locator("#curves-1")
        before = figure.locator("canvas").screenshot()
        figure.get_by_role("button", name="log").click()
        assert figure.get_by_role("button", name="log").get_attribute("aria-pressed") == "true"
        logarithmic = figure.locator("canvas").screenshot()
        assert logarithmic != before
        figure.get_by_role("button", name="training loss, mean").click()
        assert figure.locator("canvas").screenshot() != logarithmic
        assert view.violations() == []
        assert view.troubles == []


def test_a_live_page_replaces_a_chart_and_keeps_the_choices(chromium, url):
    series = Series("acc.personal, mean", tuple((float(n), n / 5000) for n in range(5000)), "personal")
    chart = Lines("Now", "It rises to 1.0.", Axis("round"), Axis("accuracy"), (series,), f"From {HOSTILE}")
    with seen(chromium, url) as view:
        figure = view.page.locator("#curves-0")
        figure.get_by_role("button", name="acc.personal, mean").click()
        view.page.evaluate(
            "(chart) => headwaterCharts.update('curves-0', chart)", json.loads(json.dumps(chart_json(chart)))
        )
        assert figure.locator("h3").text_content() == "Now"
        assert figure.get_attribute("aria-label") == "It rises to 1.0."
        assert figure.get_by_role("button", name="acc.personal, mean").get_attribute("aria-pressed") == "false"
        assert f"Drawn from {MOST_POINTS} of 5000 points" in figure.locator("figcaption").text_content()
        assert figure.locator("details table tr").count() == 101
        assert view.page.title() != "hacked"
        assert view.violations() == []
        assert view.troubles == []


def test_a_theme_that_is_chosen_overrides_the_systems(chromium, url):
    with seen(chromium, url, "dark") as view:
        canvas = view.page.locator("#curves-0 canvas")
        dark = canvas.screenshot()
        view.page.evaluate("document.documentElement.dataset.theme = 'light'")
        view.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert view.page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 36, 48)"
        assert canvas.screenshot() != dark


def test_a_narrower_window_draws_narrower_charts(chromium, url):
    with seen(chromium, url) as view:
        canvas = view.page.locator("#cost-0 .canvas")
        wide = canvas.bounding_box()["width"]
        view.page.set_viewport_size({"width": 390, "height": 800})
        view.page.wait_for_function("document.querySelector('#cost-0 .uplot').offsetWidth <= 360")
        assert canvas.bounding_box()["width"] < wide
        assert view.troubles == []

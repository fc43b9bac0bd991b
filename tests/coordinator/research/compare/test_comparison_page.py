"""The page of a comparison in a real browser, without network: what is drawn, in both themes, and for everyone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import VIEWS, browser, seen
from comparison_harness import comparison_of, made_up, row_of, run_of, trials_of

from coordinator.research.compare.outputs import write_outputs
from coordinator.research.compare.plots import figures
from coordinator.research.compare.row_statistics import compute_statistics

HOSTILE = "</script><script>document.title = 'hacked'</script><img src=x onerror=\"document.title = 'hacked'\">"[:80]


def charts_of(comparison):
    return {figure.name: figure.chart for figure in figures(comparison, compute_statistics(comparison))}


def test_curves_have_the_mean_over_seeds_with_its_deviation_as_a_band():
    """Two runs with 0.2, 0.5 and 0.4, 0.7: means 0.3 and 0.6, deviation sqrt(2) / 10; round 2 is in one of them."""
    runs = [run_of(0, [0.5], curve=((0, 0.2), (1, 0.5), (2, 0.9))), run_of(1, [0.7], curve=((0, 0.4), (1, 0.7)))]
    (series,) = charts_of(comparison_of(row_of("local", runs)))["curves"].series
    assert [x for x, _ in series.points] == [0, 1]
    assert [y for _, y in series.points] == pytest.approx([0.3, 0.6])
    assert [high - low for low, high in series.band] == pytest.approx([2 * 0.02**0.5, 2 * 0.02**0.5])


def test_one_run_has_a_curve_without_a_band():
    (series,) = charts_of(comparison_of(row_of("local", [run_of(0, [0.5], curve=((0, 0.2), (1, 0.5)))])))[
        "curves"
    ].series
    assert series.band == ()


def test_clients_stand_from_the_most_hurt_one_to_the_most_helped():
    """Means over two seeds against 0.5: c00 +0.1, c01 -0.2, c02 0.0."""
    local = row_of("local", [run_of(seed, [0.5] * 3) for seed in (0, 1)])
    fedavg = row_of("fedavg", [run_of(0, [0.6, 0.2, 0.4]), run_of(1, [0.6, 0.4, 0.6])])
    series, zero = charts_of(comparison_of(local, fedavg))["clients"].series
    assert [x for x, _ in series.points] == [0, 50, 100]
    assert [y for _, y in series.points] == pytest.approx([-20, 0, 10])
    assert zero.dashed
    assert {y for _, y in zero.points} == {0}


def test_differences_are_points_with_their_intervals():
    statistics = compute_statistics(made_up(methods=4, clients=6, seeds=4))
    chart = charts_of(made_up(methods=4, clients=6, seeds=4))["differences"]
    by_name = {row.name: row.marks for row in chart.rows}
    for row in statistics.rows:
        if row.to_baseline is not None:
            mark = by_name[row.name]["to local"]
            estimate = row.to_baseline.estimate
            expected = (100 * estimate.mean, 100 * estimate.low, 100 * estimate.high)
            assert (mark.value, mark.low, mark.high) == pytest.approx(expected)


def test_tuning_shows_the_best_score_so_far():
    row = row_of("local", [run_of(0, [0.5])], trials=trials_of([None, 0.4, 0.3, 0.6]), chosen=3)
    (series,) = charts_of(comparison_of(row, trials=4))["tuning"].series
    assert series.points == ((2, 0.4), (3, 0.4), (4, 0.6))


def test_without_results_there_is_nothing_to_draw():
    assert charts_of(comparison_of(row_of("local", []), seeds=(0,))) == {}


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    comparison = made_up(methods=10)
    hostile = row_of(HOSTILE, [run_of(seed, [0.4, 0.5], failure="" if seed else HOSTILE) for seed in range(6)])
    comparison = comparison.model_copy(update={"methods": (*comparison.methods, hostile), "title": f"x {HOSTILE}"})
    return write_outputs(comparison, folder)[0].as_uri()


@pytest.mark.browser
@pytest.mark.parametrize("scheme, width", VIEWS)
def test_page_is_drawn_without_errors_requests_or_barriers(chromium, url, scheme, width):
    with seen(chromium, url, scheme, width) as view:
        assert view.requests == [url]
        assert view.violations() == []
        assert view.troubles == []
        assert view.page.title() != "hacked"
        assert view.page.locator("figure.chart").count() == 4
        assert view.page.locator("figure.chart canvas").count() == 3
        assert view.page.locator("figure.chart table").count() == 4, "the numbers of each picture stand beside it"
        assert view.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "only tables scroll sideways"


@pytest.mark.browser
def test_page_leads_to_files_that_exist(chromium, url):
    with seen(chromium, url) as view:
        folder = url.removeprefix("file://").rpartition("/")[0]
        names = [link.get_attribute("href") for link in view.page.locator("main a").all()]
        assert {"table.tex", "table.csv", "curves.pdf", "clients.svg"} <= set(names)
        assert [name for name in names if not (Path(folder) / name).exists()] == []


@pytest.mark.browser
def test_printed_page_cuts_no_table(chromium, url):
    with seen(chromium, url, width=700) as view:
        view.page.emulate_media(media="print")
        cut = view.page.evaluate(
            "[...document.querySelectorAll('section > .scroll')]"
            ".filter((box) => box.scrollWidth > box.clientWidth + 1).length"
        )
        assert cut == 0

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.report import write_report
from coordinator.report.charts import percent
from coordinator.report.figures import AgentFigures, read_run
from coordinator.report.page import duration, megabytes, render
from coordinator.report.run_charts import accuracy, accuracy_floor, benefit, cost, wilson
from coordinator.state.store import RunFolder
from coordinator.views.values import as_number
from edge_agent.core.config import read_toml
from edge_agent.core.errors import StateError

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags, attributes and text."""

    def __init__(self, html):
        super().__init__()
        self.open = []
        self.tags = []
        self.attributes = []
        self.words = []
        self.charts = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.charts += [json.loads(data)] if data.startswith("{") else []
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def round_record(number, **changes):
    acc = {"global": {"a": 0.5, "b": 0.25 * number}, "personal": {"a": 0.75, "b": 0.8}}
    record = {"kind": "round", "round": number, "seconds": 1.5, "agents": ["a", "b"], "missing": [], "rejected": []}
    return {**record, "bytes_up": 3_000_000, "bytes_down": 1_000_000, "acc": acc, "loss": {"a": 0.1}, **changes}


def agent_record(name, **changes):
    record = {"kind": "agent", "id": name, "tier": "train", "samples": 1200, "head": "lr", "rss_mb": 96.4}
    acc = {"local": 0.7, "global": 0.6, "personal": 0.9}
    record |= {"local_model": "raw inputs + lr", "acc": acc}
    return {**record, "torch_loaded": False, "bytes_up": 2500, "bytes_down": 26_000_000, **changes}


SUMMARY = {
    "run_id": "run-0001",
    "method": "dualfed",
    "params": {"lr": 0.01},
    "rounds": 2,
    "seed": 3,
    "status": "finished",
    "seconds": 75.0,
    "encoder_sha256": "ab" * 32,
    "agents": ["a", "b"],
    "bundle": {"name": "run-0001"},
}


def test_notes_are_shown_only_where_there_are_any():
    plain = page_of(SUMMARY, [agent_record("a")])
    assert "note" not in plain.text.lower()
    marked = page_of(
        SUMMARY, [agent_record("a", rolled_back="keeps bundle <b>12</b>"), agent_record("c", one_class=True)]
    )
    assert "rolled back, keeps bundle <b>12</b>" in marked.text, "as text, not as markup"
    assert "its data have one class only" in marked.text


def test_gain_comes_first_and_is_grey_within_noise():
    """On 10 held-out samples 0.7 and 0.8 are one answer apart; on 10000 they are far apart."""
    acc = {"local": 0.7, "personal": 0.8}
    for support, style in ((10, "lead even"), (10_000, "lead gain")):
        agents = [agent_record("a", acc=acc, support=support)]
        markup = render(read_run("run-0001", SUMMARY, agents))
        first_card = markup[markup.index('<div class="card ') :].split("</div>")[0]
        assert first_card.startswith(f'<div class="card {style}"><h2>gain</h2><p class="big">+10.0</p>')
        assert ("; within noise" in first_card) == (support == 10)


def test_missing_and_bounded_updates_beyond_the_tenth_are_folded():
    rounds = [round_record(number, bounded={"a": "clipped (x 0.5)"}) for number in range(1, 14)]
    markup = render(read_run("run-0001", SUMMARY, rounds))
    open_rows, folded = markup.split("<summary>3 more rows</summary>")
    assert open_rows.count("clipped (x 0.5)") == 10
    assert folded.count("clipped (x 0.5)") == 3


def test_bars_show_the_waiting_that_the_caption_counts():
    """0.4 s of 32.4 s are less than a twentieth of the run, but the first bar would be too short without them."""
    rounds = [round_record(1, seconds=30.0, waiting_s=0.4), round_record(2, seconds=1.0), round_record(3, seconds=1.0)]
    _, (chart,) = cost(read_run("run-0001", SUMMARY, rounds).rounds)
    assert sum(series.points[0][1] for series in chart.series) == pytest.approx(30.4)
    assert "Round 1 took 30.4 s" in chart.caption


def page_of(summary, metrics):
    return Page(render(read_run("run-0001", summary, metrics)))


def test_report_shows_the_figures_of_the_run():
    """By hand: local 0.7, global (0.6 + 0.5) / 2, personal (0.9 + 0.8) / 2; traffic is the sum over two rounds."""
    agents = [agent_record("a"), agent_record("b", acc={"local": 0.7, "global": 0.5, "personal": 0.8})]
    page = page_of(SUMMARY, [round_record(1), round_record(2), *agents])
    for expected in (
        "Headwater run · run-0001",
        "dualfed, 2 rounds, 2 agents finished",
        "Method dualfed",
        "Rounds 2 of 2",
        "gain +15.0 percentage points, personal over alone; mean over 2 agents personal 85.0 %",
        "personal 85.0 % shared encoder, personal head or model (acc.personal); mean over 2 agents",
        "alone 70.0 % best model that each fits alone (acc.local); mean over 2 agents",
        "shared 55.0 % the shared model (acc.global); mean over 2 agents",
        "from agents 6.0 MB",
        "to agents 2.0 MB",
        "Duration 75.0 s",
        "a train 1 200 70.0 % raw inputs + lr 60.0 % 90.0 % lr 96 MB no 2.5 kB 26.0 MB",
        "2 rounds took 3.0 s in all, 1.50 s each.",
        "6.00 MB came from agents and 2.00 MB went to agents in all; each of 2 rounds moved 3.00 MB from and 1.00 MB",
        "headwater run --method dualfed --rounds 2 --seed 3 --set lr=0.01",
        "headwater report --run run-0001",
        "ab" * 32,
    ):
        assert expected in page.text
    titles = [chart["title"] for chart in page.charts]
    assert titles == [
        "Benefit of each device",
        "Accuracy by rounds done",
        "Training loss by round",
        "Samples of each agent",
    ]


def test_the_last_point_of_a_curve_is_the_number_on_the_card():
    """What agents report in round r is of the model with r - 1 rounds behind it; the end has all of them."""
    agents = [agent_record("a"), agent_record("b", acc={"local": 0.7, "global": 0.5, "personal": 0.8})]
    records = [round_record(1), round_record(2, acc={"personal": {"a": 0.7, "b": 0.2}, "after": {"a": 0.8, "b": 0.4}})]
    run = read_run("run-0001", SUMMARY, [*records, *agents])
    lines = {one.name: one.points for one in accuracy(run).series}
    assert lines["acc.personal, mean"] == ((0.0, 0.775), (1.0, pytest.approx(0.45)), (2.0, pytest.approx(0.85)))
    assert lines["acc.personal, mean"][-1][1] == run.final_mean("personal")
    assert lines["acc.personal, worst tenth"] == ((0.0, 0.75), (1.0, 0.2), (2.0, 0.8))
    assert lines["acc.personal after training, mean"] == ((2.0, pytest.approx(0.6)),)
    assert "After training: the same agents after the round's local training." in accuracy(run).caption


def test_devices_are_sorted_by_what_they_gain_with_intervals_of_their_support():
    agents = [
        agent_record("a", acc={"local": 0.9, "personal": 0.7}, better_alone=True, support=100),
        agent_record("b", acc={"local": 0.7, "personal": 0.8}, support=10),
        agent_record("c", acc={"personal": 0.8}),
    ]
    run = read_run("run-0001", SUMMARY, agents)
    chart = benefit(run.agents)
    assert [(row.name, row.note, row.tone) for row in chart.rows] == [
        ("b", "", ""),
        ("a", "better off alone", "bad"),
        ("c", "", ""),
    ]
    assert chart.summary == (
        "0 of 2 devices are more accurate with the federation than with the best model that each fits alone, by more "
        "than noise. The difference of 1 device is within noise. Better off alone by more than noise: a. The mean "
        "goes from 80.0 % to 75.0 % (−5.0 percentage points, within noise)."
    )
    mark = chart.rows[1].marks["acc.personal"]
    assert (mark.low, mark.high) == pytest.approx((0.6042, 0.7811), abs=1e-4), "R: prop.test(70, 100, correct=FALSE)"
    assert chart.rows[2].marks["acc.personal"].low is None


@pytest.mark.parametrize(
    "share, count, low, high",
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 10, 0.2366, 0.7634), (0.5, 0, 0, 1)],
)
def test_wilson_interval_by_the_published_formula(share, count, low, high):
    assert wilson(share, count) == pytest.approx((low, high), abs=1e-4)


def test_many_devices_are_cut_in_the_middle_and_counted_whole():
    agents = [agent_record(f"d{n:03}", acc={"local": 0.5, "personal": 0.5 + n / 1000}) for n in range(100)]
    chart = benefit(read_run("r", SUMMARY, agents).agents)
    assert [row.name for row in chart.rows] == [f"d{n:03}" for n in (*range(99, 69, -1), *range(29, -1, -1))]
    assert chart.caption.startswith("The 30 devices that gain most and the 30 that gain least, of 100.")
    assert chart.summary.startswith("99 of 100 devices are more accurate")


def test_a_slow_first_round_does_not_squash_the_others():
    rounds = [round_record(1, seconds=40.0, waiting_s=10.0)]
    rounds += [round_record(number, seconds=float(number)) for number in range(2, 5)]
    sentences, charts = cost(read_run("r", {}, rounds).rounds)
    assert sentences[0] == (
        "4 rounds took 59.0 s in all, 10.0 s of it waiting for enough agents; the median is 3.50 s, "
        "the longest is round 1 with 50.00 s."
    )
    assert charts[0].y.high == pytest.approx(4.4)
    assert charts[0].caption == "Round 1 took 50.0 s; its bar is broken."
    assert charts[0].series[0].name == "waiting for enough agents"
    assert len(charts) == 1, "bytes are the same in each round: a sentence has it"


def test_traffic_that_differs_is_drawn():
    rounds = [round_record(1, bytes_up=1_000_000), round_record(2, bytes_up=3_000_000)]
    _, charts = cost(read_run("r", {}, rounds).rounds)
    assert [chart.title for chart in charts] == ["Traffic of each round"]
    assert charts[0].series[0].points == ((1.0, 1.0), (2.0, 3.0))


def test_simulations_are_named_after_what_they_are(tmp_path):
    partition = {"rule": "dirichlet", "classes": ["x", "y"], "clients": [{"id": "a", "train": [3, 0], "test": [1, 0]}]}
    plan = {"method": "dualfed", "data": ["windows:/data/watch.npz"], "alpha": 0.3, "params": {"lr": 0.1}}
    summary = {**SUMMARY, "simulation": {"data": plan["data"], "partition": partition, "plan": plan}}
    page = page_of(summary, [agent_record("a")])
    assert "dualfed on windows:watch.npz, 1 client, dirichlet finished" in page.text
    assert "Headwater simulation · run-0001" in page.text
    assert page.charts[-1]["title"] == "Partition dirichlet of windows:watch.npz: training samples of each class"
    assert "1 client with 3 training samples of 1 of 2 classes each." in page.text
    settings = next(text for text in page.words if text.startswith("method = "))
    (tmp_path / "simulation.toml").write_text(settings, encoding="utf-8")
    assert read_toml(tmp_path / "simulation.toml") == plan


def test_axes_of_accuracies_begin_where_there_is_something_to_see():
    assert [accuracy_floor(values) for values in ([0.2, 0.9], [-0.5], [0.62], [0.97, 1.0], [])] == [
        0,
        -0.5,
        0.5,
        0.9,
        0,
    ]


def test_missing_and_refused_updates_are_listed_with_reasons():
    records = [round_record(1, missing=["b"]), round_record(2, rejected=[{"agent": "a", "reason": "not finite"}])]
    text = page_of(SUMMARY, records).text
    assert "1 b no update before the round closed" in text
    assert "2 a rejected: not finite" in text
    assert "Missing and rejected" not in page_of(SUMMARY, [round_record(1)]).text


def test_round_recorded_twice_counts_once_as_recorded_last():
    run = read_run("run-0001", {}, [round_record(1, seconds=9), round_record(2), round_record(1, seconds=1)])
    assert [(line.round, line.seconds) for line in run.rounds] == [(1, 1.0), (2, 1.5)]


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


def test_nothing_from_agents_or_requests_becomes_markup():
    records = [
        round_record(
            1,
            agents=[HOSTILE],
            missing=[HOSTILE],
            rejected=[{"agent": HOSTILE, "reason": HOSTILE}],
            acc={"global": {HOSTILE: 0.5}},
        ),
        agent_record(HOSTILE, tier=HOSTILE, head=HOSTILE),
    ]
    summary = {
        **SUMMARY,
        "method": HOSTILE,
        "status": HOSTILE,
        "params": {HOSTILE: HOSTILE},
        "bundle": {HOSTILE: HOSTILE},
    }
    page = page_of(summary, records)
    assert page.tags.count("script") == len(page.charts) + 2, "our two files and the charts' data"
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text.replace("\\", "")


def test_page_loads_nothing_from_anywhere():
    html = render(read_run("run-0001", SUMMARY, [round_record(1), agent_record("a")]))
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "use", "image"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name in {"src", "href", "xlink:href", "data", "style"}]
    assert "url(" not in html
    assert "@import" not in html
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in str(value))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    "round",
    "seconds",
    "agents",
    "missing",
    "rejected",
    "bytes_up",
    "acc",
    "loss",
    "id",
    "samples",
    "head",
    "rss_mb",
)


@given(
    st.dictionaries(st.sampled_from(tuple(SUMMARY)), json_values),
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["round", "agent", "x"])}, optional=dict.fromkeys(KEYS, json_values)
        )
    ),
)
def test_any_records_make_a_page(summary, records):
    page_of(summary, records)


def test_huge_and_negative_figures_make_a_page():
    records = [round_record(10**12, seconds=1e300, bytes_up=-5), round_record(1, acc={"global": {"a": -4e9}})]
    assert "nan" not in page_of(SUMMARY, records).text.lower()


def test_captions_explain_only_figures_that_are_there():
    agents = [AgentFigures(id=f"a{n}", acc={"personal": 0.5, "global": 0.4}, support=20) for n in range(2)]
    caption = benefit(agents).caption
    assert "acc.local" not in caption
    assert caption == "Shaded: 95 % Wilson intervals of acc.personal for the device's held-out samples."
    assert "best model that the device fits alone" not in caption
    assert benefit([AgentFigures(id="a", acc={"personal": 0.5})]).caption == "", "no interval without samples"
    both = [one.model_copy(update={"acc": {"personal": 0.5, "local": 0.4}}) for one in agents]
    assert "acc.local and acc.personal" in benefit(both).caption


def test_report_of_a_run_without_figures_is_refused(tmp_path):
    with pytest.raises(StateError, match="no figures yet"):
        write_report(RunFolder(tmp_path / "run-0001"))


def test_report_is_written_beside_the_figures_while_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run-0001")
    folder.append_metrics(round_record(1))
    path = write_report(folder)
    assert path == tmp_path / "run-0001" / "report.html"
    assert "2 agents running" in Page(path.read_text(encoding="utf-8")).text


def test_text_that_is_no_unicode_does_not_stop_the_report(tmp_path):
    folder = RunFolder(tmp_path / "run-0001")
    folder.append_metrics(agent_record("a", head="\ud800"))
    assert "?" in Page(write_report(folder).read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    "value, expected", [(1, 1.0), (0.5, 0.5), (True, None), (None, None), ("1", None), (1e999, None)]
)
def test_only_finite_numbers_are_numbers(value, expected):
    assert as_number(value) == expected


def test_whole_numbers_too_large_for_a_float_are_none():
    assert as_number(10**400) is None


@pytest.mark.parametrize(
    "seconds, text", [(None, "–"), (0.04, "0.0 s"), (119.9, "119.9 s"), (125, "2 min 5 s"), (7200, "2 h 0 min")]
)
def test_durations_in_the_unit_of_a_person(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_shares():
    assert (megabytes(1_500_000), megabytes(999), megabytes(None)) == ("1.5 MB", "1.0 kB", "–")
    assert (percent(0.876), percent(None)) == ("87.6 %", "–")


def test_pages_of_large_fleets_show_some_agents_and_count_all():
    page = page_of(SUMMARY, [agent_record(f"d{number}") for number in range(1001)])
    assert page.tags.count("tr") < 1300
    assert "The first 1000 of 1001; metrics.jsonl has all." in page.text

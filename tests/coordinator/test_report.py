from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.report import write_report
from coordinator.report.figures import as_number, read_run
from coordinator.report.page import duration, megabytes, percent, render
from coordinator.report.svg import Axis, nice_ceiling, nice_step
from coordinator.state.store import RunFolder
from edge_agent.errors import StateError

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags, attributes and text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
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
    assert "a *" in marked.text


def page_of(summary, metrics):
    return Page(render(read_run("run-0001", summary, metrics)))


def test_report_shows_the_figures_of_the_run():
    """By hand: local 0.7, global (0.6 + 0.5) / 2, personal (0.9 + 0.8) / 2; traffic is the sum over two rounds."""
    agents = [agent_record("a"), agent_record("b", acc={"local": 0.7, "global": 0.5, "personal": 0.8})]
    page = page_of(SUMMARY, [round_record(1), round_record(2), *agents])
    for expected in (
        "run-0001 finished",
        "Method dualfed",
        "Rounds 2 of 2",
        "acc.local 70.0 %",
        "acc.global 55.0 %",
        "acc.personal 85.0 %",
        "from agents 6.0 MB",
        "to agents 2.0 MB",
        "Duration 75.0 s",
        "a train 1 200 70.0 % raw inputs + lr 60.0 % 90.0 % lr 96 MB no 2.5 kB 26.0 MB",
        "ab" * 32,
    ):
        assert expected in page.text
    assert page.tags.count("figure") == 4
    assert page.tags.count("figcaption") == 4


def test_charts_are_told_in_words_for_those_who_cannot_see():
    page = page_of(SUMMARY, [round_record(1), round_record(2)])
    images = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(images) == 3, "nothing is known about single agents here"
    assert "acc.global, mean: 0.375 in round 1, 0.500 in round 2." in images[0]
    assert "acc.global, worst agent: 0.250 in round 1, 0.500 in round 2." in images[0]
    assert "3.0 s in all" in images[1]
    assert "6.00 MB from agents and 2.00 MB to agents" in images[2]


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
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text.replace("\\", "")


def test_page_loads_nothing_from_anywhere():
    html = render(read_run("run-0001", SUMMARY, [round_record(1), agent_record("a")]))
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name in {"src", "href", "xlink:href", "data"}]
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert not re.search(r"https?://", html)


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


def test_report_of_a_run_without_figures_is_refused(tmp_path):
    with pytest.raises(StateError, match="no figures yet"):
        write_report(RunFolder(tmp_path / "run-0001"))


def test_report_is_written_beside_the_figures_while_the_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run-0001")
    folder.append_metrics(round_record(1))
    path = write_report(folder)
    assert path == tmp_path / "run-0001" / "report.html"
    assert "run-0001 running" in Page(path.read_text(encoding="utf-8")).text


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


@pytest.mark.parametrize("raw, step", [(0.7, 1), (1, 1), (1.1, 2), (3, 5), (7, 10), (0.03, 0.05), (0, 1), (-1, 1)])
def test_steps_are_one_two_or_five(raw, step):
    assert nice_step(raw) == pytest.approx(step)


def test_axis_maps_ends_to_ends_and_has_round_ticks():
    axis = Axis(0.0, 1.0, 200.0, 0.0)
    assert (axis.at(0), axis.at(1), axis.at(0.25)) == (200, 0, 150)
    assert axis.ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ceiling(8.8) == 10

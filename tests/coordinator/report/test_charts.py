from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from seen_colours import VISIONS, ciede2000, contrast, distance

from coordinator.report.charts import (
    CLASSES,
    MOST_POINTS,
    MOST_TABLE_ROWS,
    ROLES,
    THEMES,
    Axis,
    Bars,
    Key,
    Lines,
    Mark,
    Matrix,
    Row,
    Rows,
    Scatter,
    Series,
    Span,
    Timeline,
    assets,
    chart_json,
    clean,
    downsample,
    ends,
    figure_html,
    inline_assets,
    percent,
    points,
)
from coordinator.report.pictures import FORMATS, format_of, picture
from edge_agent.core.errors import UsageError

pytestmark = pytest.mark.usefixtures("pictures")

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u2028\u202ename"
ASSETS = files("coordinator.report").joinpath("assets")


def every_kind(name="kitchen"):
    """One small chart of each kind, with ``name`` wherever an agent's name may stand."""
    line = Series(name, ((1.0, 0.25), (2.0, 0.5), (3.0, None)), "personal", band=((0.2, 0.3), (0.4, 0.6), (0.4, 0.6)))
    axes = Axis("round"), Axis("accuracy", low=0.0, high=1.0, can_log=True)
    keys = Key("acc.local", "local", "square"), Key("acc.personal", "personal")
    row = Row(name, {"acc.local": Mark(0.5, 0.4, 0.6), "acc.personal": Mark(0.75)}, name, "bad")
    return [
        Lines(name, name, *axes, (line,), name),
        Bars(name, name, *axes, (Series(name, ((1.0, 2.0),), "up"),), stacked=True),
        Scatter(name, name, *axes, (Series(name, ((0.5, 1.0), (0.25, 2.0)), "c3"),), bare=True),
        Rows(name, name, Axis("accuracy"), keys, (row,)),
        Matrix(name, name, "client", name, (name,), (name, "b"), ((0.5, None),), 0.0, 1.0),
        Timeline(name, name, Axis("time", "s", high=9.0), ((name, (Span(0.0, None, "bad", name),)),)),
    ]


class Elements(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.cells = []
        self.open = []
        self.data = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data += data
        if self.open and self.open[-1] in {"td", "th"}:
            self.cells.append(data)


def test_figure_holds_the_chart_as_data_a_sentence_and_a_table():
    page = Elements(figure_html(every_kind()[0], "acc"))
    assert ("figure", "id", "acc") in page.attributes
    assert ("figure", "aria-label", "kitchen") in page.attributes
    assert json.loads(page.data)["series"][0] == {
        "name": "kitchen", "role": "personal", "x": [1, 2, 3], "y": [0.25, 0.5, None],
        "low": [0.2, 0.4, 0.4], "high": [0.3, 0.6, 0.6],
    }  # fmt: skip
    assert page.cells == ["round", "kitchen", "1", "0.25 (0.2 to 0.3)", "2", "0.5 (0.4 to 0.6)", "3", "– (0.4 to 0.6)"]


@pytest.mark.parametrize("number", range(6))
def test_hostile_names_are_text_in_every_kind_of_chart(number):
    html = figure_html(every_kind(HOSTILE)[number], "f")
    page = Elements(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<" not in page.data
    assert "\u202e" not in html, "what follows keeps its direction"
    assert "\u2028" not in html
    assert json.loads(page.data)["title"] == clean(HOSTILE, 200)


@pytest.mark.parametrize("number", range(6))
def test_long_names_are_cut(number):
    assert len(figure_html(every_kind("x" * 10_000)[number], "f")) < 20_000


@pytest.mark.parametrize("number", range(6))
def test_figures_that_are_no_numbers_become_gaps(number):
    chart = every_kind()[number]
    assert json.dumps(chart_json(chart), allow_nan=False)
    lines = Lines("t", "s", Axis("x"), Axis("y"), (Series("a", ((1.0, math.nan), (2.0, math.inf)), "local"),))
    assert chart_json(lines)["series"][0]["y"] == [None, None]
    assert chart_json(lines)["table"]["rows"] == [("1", "–"), ("2", "–")]


def test_live_pages_get_the_table_with_the_chart():
    chart = chart_json(every_kind()[3])
    assert chart["kind"] == "rows"
    assert chart["rows"][0]["marks"] == {"acc.local": [0.5, 0.4, 0.6], "acc.personal": [0.75, None, None]}
    assert chart["table"] == {
        "columns": ("name", "acc.local", "acc.personal", "note"),
        "rows": [("kitchen", "0.5 (0.4 to 0.6)", "0.75", "kitchen")],
    }


def test_an_axis_that_begins_at_zero_says_so():
    assert chart_json(every_kind()[0])["y"] == {"label": "accuracy", "unit": "", "low": 0, "high": 1, "can_log": True}


def test_long_series_keep_their_ends_and_extremes_and_the_page_says_it():
    points = [(float(x), math.sin(x / 40)) for x in range(5000)]
    points[1234] = (1234.0, 7.0)
    points[4321] = (4321.0, -7.0)
    chart = Lines("t", "s", Axis("x"), Axis("y"), (Series("a", tuple(points), "local"),), "All agents.")
    kept = downsample(chart.series[0]).points
    assert len(kept) <= MOST_POINTS
    assert {(0.0, 0.0), (1234.0, 7.0), (4321.0, -7.0), points[-1]} <= set(kept)
    shown = chart_json(chart)
    assert shown["caption"] == "All agents. Drawn from 600 of 5000 points of a line, the extremes among them."
    assert len(shown["table"]["rows"]) == MOST_TABLE_ROWS
    assert [shown["table"]["rows"][row][0] for row in (0, -1)] == ["0", "4999"]


def test_ends_of_lines_in_a_sentence():
    line = Series("acc.global, mean", ((1.0, 0.5), (2.0, 0.25), (3.0, None)), "global")
    assert ends([line, Series("b", (), "local")]) == "acc.global, mean: 0.500 in round 1, 0.250 in round 2."


def test_vendored_files_are_those_whose_hash_is_written_down():
    lines = ASSETS.joinpath("SHA256SUMS").read_text().splitlines()
    named = dict(reversed(line.split("  ")) for line in lines)
    assert named.keys() == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
    for name, digest in named.items():
        assert hashlib.sha256(ASSETS.joinpath(name).read_bytes()).hexdigest() == digest


def test_scripts_are_small_and_request_and_evaluate_nothing():
    scripts = b"".join(content for name, content in assets().items() if name.endswith(".js"))
    assert len(gzip.compress(scripts, 9)) <= 60_000
    own = assets()["charts.js"].decode()
    assert not re.findall(r"https?:|fetch\(|XMLHttp|import\(|eval\(|new Function|innerHTML|outerHTML|\.cssText", own)
    assert not re.findall(r"new Function|eval\(|fetch\(|XMLHttp|import\(", assets()["uplot.js"].decode())
    assert "url(" not in assets()["charts.css"].decode()


def test_policy_of_a_page_that_stands_alone_allows_its_own_text_only():
    inline = inline_assets("p { margin: 0 }")
    assert inline.style.endswith("p { margin: 0 }")
    assert "unsafe" not in inline.policy
    assert inline.policy.count("'sha256-") == 3
    assert not any("</script" in text for text in inline.scripts)


def test_both_themes_name_every_role_and_readable_text():
    assert THEMES["light"].keys() == THEMES["dark"].keys() >= set(ROLES)
    for theme in THEMES.values():
        for ground in ("page", "sheet"):
            for text in ("ink", "soft", "good", "bad"):
                assert contrast(theme[text], theme[ground]) >= 4.5
            for role in set(ROLES) - {"down"}:  # the second of two bars, which its neighbour is compared with
                assert contrast(theme[role], theme[ground]) >= 3


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "roles, least",
    [
        ([f"c{number}" for number in range(CLASSES)], 18),
        (["local", "global", "personal", "c7"], 10),  # lines of one chart; where they are marks, shapes differ too
        (["good", "bad"], 14),
        (["up", "down"], 18),
        (["plain", "c1"], 18),
    ],
    ids=["classes", "scopes", "good and bad", "up and down", "times"],
)
def test_colours_that_meet_in_a_chart_stay_apart_for_all_readers(roles, least, theme, vision):
    """A difference of 1 in CIEDE2000 is just noticed."""
    colours = [THEMES[theme][role] for role in roles]
    assert min(distance(*pair, vision) for pair in itertools.combinations(colours, 2)) > least


@pytest.mark.parametrize(
    "first, second, difference",
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (50.0, 0.0, -2.5), 4.3065),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_differences_of_colours_are_those_that_are_published(first, second, difference):
    """Pairs of the table of Sharma, Wu and Dalal (2005)."""
    assert ciede2000(np.array(first), np.array(second)) == pytest.approx(difference, abs=5e-5)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", ["kitchen", "$a_1$ %s 日本 <b>&", HOSTILE])
def test_documents_get_the_same_chart_as_a_picture(number, name):
    chart = every_kind(name)[number]
    content = picture([chart, chart])
    assert content == picture([chart, chart]), "the same bytes each time"
    root = ET.fromstring(content)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == f"{clean(name)} {clean(name)}"
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(clean(name, 200)) >= 2, "text stays text, and no name is a formula"
    assert THEMES["light"]["ink"] in content.decode()


@pytest.mark.parametrize("kind, first", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg ")])
def test_pictures_are_of_the_format_of_their_file(kind, first):
    assert picture(every_kind()[:1], kind).startswith(first)
    assert format_of(f".{kind.upper()}") == kind


def test_other_formats_are_an_error_that_names_those_there_are():
    with pytest.raises(UsageError, match=r"'\.gif': expected one of \.svg, \.png, \.pdf"):
        format_of(".gif")
    with pytest.raises(UsageError, match="a name without a suffix"):
        format_of("")
    assert FORMATS == ("svg", "png", "pdf")


def test_shares_are_percentages_in_what_is_read_and_stay_shares_in_what_is_drawn():
    axis = Axis("accuracy", low=0.0, high=1.0, digits=1, is_share=True)
    series = Series("mean", ((1.0, 0.125), (2.0, None)), "global", band=((0.1, 0.25), (0.0, 0.0)))
    made = chart_json(Lines("t", "s", Axis("round"), axis, (series,)))
    assert (axis.text, made["y"]["share"], made["series"][0]["y"]) == ("accuracy (%)", True, [0.125, None])
    assert made["table"]["rows"][0] == ("1", "12.5 % (10.0 % to 25.0 %)")
    assert "share" not in made["x"]
    rows = Rows("t", "s", axis, (Key("acc", "local"),), (Row("a", {"acc": Mark(0.5, 0.25, 0.75)}),))
    assert chart_json(rows)["table"]["rows"] == [("a", "50.0 % (25.0 % to 75.0 %)")]
    assert b">100</text>" in picture([rows])
    assert (percent(None), points(0.05), points(-0.05), points(None)) == ("–", "+5.0", "−5.0", "–")


def test_long_title_above_all_panels_is_wrapped_and_not_cut_off():
    title = "FedPAC, Table 1: Fashion-MNIST, 20 clients (Xu, Tong, Huang, Personalized Federated Learning, ICLR 2023)"
    one, two = (picture(every_kind()[:1] * count, title=title).decode() for count in (1, 2))
    written = re.findall(r">([^<>]*)</(?:text|tspan)>", one)
    parts = [text for text in written if text.strip() and text in title and len(text) > 10]
    assert " ".join(parts) == title
    assert len(parts) > 1
    assert f">{title}<" in two, "there is room for it above two panels"


def test_ticks_of_rounds_are_whole_numbers_also_in_a_picture_of_two_rounds():
    line = Series("mean", ((0.0, 0.1), (1.0, 0.2), (2.0, 0.3)), "personal")
    chart = Lines("Accuracy", "Accuracy.", Axis("rounds done"), Axis("accuracy", low=0.0, high=1.0), (line,))
    drawn = picture([chart]).decode()
    assert ">2</text>" in drawn
    assert not re.search(r">[012]\.(?:25|5|50|75)</text>", drawn)


def test_a_bar_that_reaches_beyond_the_axis_is_broken_and_has_its_value():
    waits = Series("waits", ((1.0, 0.5), (2.0, 0.5)), "c1")
    works = Series("works", ((1.0, 14.5), (2.0, 2.0)), "plain")
    chart = Bars("Time", "Time.", Axis("round"), Axis("time", "s", 0.0, 3.0), (waits, works), stacked=True)
    assert chart.cut() == [(1.0, 15.0)]
    assert chart_json(chart)["cut"] == [[1, 15]]
    assert b">15 s</text>" in picture([chart])
    whole = Bars("Time", "Time.", Axis("round"), Axis("time", "s", 0.0), (waits, works), stacked=True)
    assert whole.cut() == []
    assert "cut" not in chart_json(whole)
    beside = Bars("Time", "Time.", Axis("round"), Axis("time", "s", 0.0, 14.6), (waits, works))
    assert beside.cut() == [], "bars beside each other are not added up"


def test_zeros_of_a_matrix_are_shown_as_the_table_shows_them():
    chart = Matrix("M", "M.", "class", "client", ("a",), ("c0", "c1"), ((0.0, 4.0),), 0.0, 4.0, digits=0, zero="·")
    drawn = picture([chart])
    assert "·".encode() in drawn
    assert b">0</text>" not in drawn
    assert chart_json(chart)["zero"] == "·"


def test_a_long_title_of_a_picture_is_broken_into_lines():
    title = "Partition dirichlet of digits:optdigits (alpha 0.3, clients 6, seed 0): training samples of each class"
    chart = Matrix(title, "M.", "class", "client", ("a",), ("c0",), ((1.0,),), 0.0, 1.0)
    assert title.encode() not in picture([chart]), "in one line it would squeeze the panel"
    assert b"Partition dirichlet of" in picture([chart])

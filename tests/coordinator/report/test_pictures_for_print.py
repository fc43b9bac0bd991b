"""Pictures for print: one column wide, legible in black and white, and for readers who see fewer colours."""

from __future__ import annotations

import itertools
import re

import pytest
from seen_colours import VISIONS, distance

from coordinator.report.charts import CLASSES, ROLES, Axis, Key, Lines, Mark, Matrix, Row, Rows, Series
from coordinator.report.pictures import COLUMN, OKABE_ITO, PAGE, _print_look, picture

pytestmark = pytest.mark.usefixtures("pictures")


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_for_print_stay_apart(vision):
    """A difference of 1 in CIEDE2000 is just noticed; the nearest pair is twelve times that, white included."""
    pairs = itertools.combinations((*OKABE_ITO, "#ffffff"), 2)
    assert min(distance(*pair, vision) for pair in pairs) > 12


def lines(count, points=20):
    series = [
        Series(f"method {index}", tuple((float(x), 0.5 + x / 100 + index / 50) for x in range(points)), f"c{index}",
               band=tuple((0.4 + x / 100, 0.6 + x / 100) for x in range(points)))
        for index in range(count)
    ]  # fmt: skip
    return Lines("A title", "A summary.", Axis("rounds done"), Axis("client mean", is_share=True), tuple(series))


def rows():
    marks = {"to local": Mark(1.0, -0.5, 2.5), "to best": Mark(-1.0)}
    keys = (Key("to local", "personal"), Key("to best", "global", "diamond"))
    return Rows(
        "A title", "A summary.", Axis("difference", "points"), keys, (Row("fedavg", marks), Row("ditto", marks))
    )


@pytest.mark.parametrize("chart", [lines(2), lines(10), rows()], ids=["two", "ten", "rows"])
def test_a_picture_for_print_is_one_column_wide_without_a_title(chart):
    svg = picture([chart], form=COLUMN).decode()
    assert "A summary." in svg
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])
    assert width == pytest.approx(3.3 * 72, abs=0.1)
    assert "A title" not in re.sub(r"<title>.*?</title>", "", svg)
    assert "A title" in picture([chart], form=PAGE).decode()
    sizes = {float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)}
    assert min(sizes) >= 7


def test_a_pdf_for_print_embeds_truetype_and_is_the_same_each_time():
    pdf = picture([lines(3)], "pdf", form=COLUMN)
    assert pdf == picture([lines(3)], "pdf", form=COLUMN)
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf


def test_each_of_ten_lines_differs_from_all_others_without_colour():
    looks = [_print_look(f"c{number}", 20) for number in range(CLASSES)]
    assert len({(look.marker, look.linestyle) for look in looks}) == CLASSES
    same_colour = [(i, j) for i, j in itertools.combinations(range(CLASSES), 2)
                   if COLUMN.colours[f"c{i}"] == COLUMN.colours[f"c{j}"]]  # fmt: skip
    assert same_colour == [(0, 7), (1, 8), (2, 9)]
    assert all(looks[i].linestyle != looks[j].linestyle for i, j in same_colour)


def matrix(columns):
    values = tuple(tuple(float(row * columns + column) for column in range(columns)) for row in range(3))
    names = tuple(f"c{column}" for column in range(columns))
    return Matrix("A title", "A summary.", "class", "client", ("a", "b", "c"), names, values, 0.0, 90.0, digits=0)


def test_a_matrix_without_numbers_has_a_scale_instead():
    """30 columns leave no room for numbers, 10 do; the scale ends at the value of a full cell."""
    texts = {count: re.findall(r"<text[^>]*>([^<]+)</text>", picture([matrix(count)]).decode()) for count in (10, 30)}
    assert "17" in texts[10]
    assert "90" not in texts[10]
    assert "17" not in texts[30]
    assert {"0", "45", "90"} <= set(texts[30])


def test_both_forms_have_a_colour_for_every_role():
    assert set(ROLES) <= PAGE.colours.keys()
    assert set(ROLES) <= COLUMN.colours.keys()


def test_legend_and_label_of_a_picture_for_print_do_not_overlap():
    """The baseline of the label is a line of the legend's 7 pt above the first baseline of the legend, or more."""
    svg = picture([lines(10)], form=COLUMN).decode()
    baselines = {text: float(y) for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]+)</text>', svg)}
    assert baselines["rounds done"] + 7 < baselines["method 0"]

"""Pictures for print: one column wide, legible in black and white, and for readers who see fewer colours."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from coordinator.report.charts import CLASSES, ROLES, Axis, Key, Lines, Mark, Row, Rows, Series
from coordinator.report.pictures import COLUMN, OKABE_ITO, PAGE, _print_look, picture

pytestmark = pytest.mark.usefixtures("pictures")

# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab_as_seen(colour, matrix):
    """CIELAB of a colour as somebody sees it whose vision the matrix simulates."""
    encoded = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    relative = TO_XYZ @ np.clip(np.array(matrix) @ linear, 0, 1) / WHITE
    root = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("matrix", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["all", "deuteranopia", "protanopia"])
def test_colours_for_print_stay_apart(matrix):
    """A difference of 2.3 in CIELAB is just noticed; the nearest pair is seven times that, white included."""
    seen = [lab_as_seen(colour, matrix) for colour in (*OKABE_ITO, "#ffffff")]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 16


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


def test_both_forms_have_a_colour_for_every_role():
    assert set(ROLES) <= PAGE.colours.keys()
    assert set(ROLES) <= COLUMN.colours.keys()


def test_legend_and_label_of_a_picture_for_print_do_not_overlap():
    """The baseline of the label is a line of the legend's 7 pt above the first baseline of the legend, or more."""
    svg = picture([lines(10)], form=COLUMN).decode()
    baselines = {text: float(y) for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]+)</text>', svg)}
    assert baselines["rounds done"] + 7 < baselines["method 0"]

"""``headwater analyze`` as people type it: numbers, pictures, a page, and mistakes."""

from __future__ import annotations

import functools
import json
import re
import shutil
import xml.etree.ElementTree as ET

import pytest
from analysis_harness import simulated
from browser import VIEWS, browser, seen
from simulation_harness import write_images

from coordinator.state.store import StateFolder


@pytest.fixture
def call(call, tmp_path, monkeypatch):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, "analyze")


@pytest.mark.usefixtures("pictures")
def test_pictures_page_and_numbers(call, runs, tmp_path):
    path, _ = runs("dualfed")
    code, out, err = call(path, "--out", "found", "--json", "--tsne", 1, "--target", 0.1)
    assert code == 0, err
    result = json.loads(out)
    assert json.loads((tmp_path / "found" / "analysis.json").read_text()) == result
    page = (tmp_path / "found" / "index.html").read_text()
    pictures = {path.name for path in (tmp_path / "found").glob("*.svg")}
    wanted = {"separation-rounds", "separation-clients", "cka-rounds", "cka-projector", "overlap", "tsne-c0", "probe"}
    assert {f"{name}.svg" for name in wanted | {"classes-c0"}} <= pictures
    assert "traffic.svg" not in pictures, "all rounds moved the same, which a sentence says"
    assert re.search(r"Each of \d+ rounds moved the same: ", page)
    for name in pictures:
        assert ET.parse(tmp_path / "found" / name).getroot().tag.endswith("svg")
        assert f'href="{name}"' in page


def test_tables_for_people_say_what_is_left_out(call, runs):
    code, out, _ = call(runs("fedpick")[0], "--tsne", 0)
    assert code == 0
    assert "run-0001: fedpick, 3 clients, simulation" in out
    assert "left out: sparsity before aggregation" in out
    assert "selection" in out


@pytest.mark.usefixtures("pictures")
def test_names_from_data_cannot_break_the_page(call, folder, tmp_path):
    names = ("<script>alert(1)</script>", '"quoted" & co')
    source = write_images(folder / "hostile.npz", 60, names=names)
    path, _ = simulated(source, folder / "hostile", rounds=1, clients=2)
    code, _, err = call(path, "--out", "o", "--json", "--tsne", 1)
    assert code == 0, err
    page = (tmp_path / "o" / "index.html").read_text()
    assert "<script>alert" not in page
    assert "\\u003cscript\\u003ealert(1)" in page, "as data of a chart"
    for picture in (tmp_path / "o").glob("*.svg"):
        ET.parse(picture)


def test_other_files_in_the_folder_stay(call, runs, tmp_path):
    (tmp_path / "mine.svg").write_text("mine")
    code, _, err = call(runs("fedavg")[0], "--out", ".", "--json", "--tsne", 0)
    assert code == 0, err
    assert (tmp_path / "mine.svg").read_text() == "mine"


@pytest.mark.browser
@pytest.mark.usefixtures("pictures")
def test_page_is_shown_without_errors_requests_or_barriers(call, runs, tmp_path):
    code, _, err = call(runs("dualfed")[0], "--out", "o", "--json", "--tsne", 1)
    assert code == 0, err
    address = (tmp_path / "o" / "index.html").as_uri()
    with browser() as chromium:
        for scheme, width in VIEWS:
            with seen(chromium, address, scheme, width) as view:
                assert view.requests == [address]
                assert view.violations() == []
                assert view.troubles == []
                assert view.page.locator(".matrix td").count() > 9
                assert view.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "words, message",
    [
        (("dualfet",), "did you mean"),
        (("run-0009", "--state", "{coordinator}"), "did you mean 'run-0001'?"),
        (("nothing-like-it",), "does not exist"),
        (("{folder}",), "cannot be analyzed"),
        (("{dualfed}", "--data", "digits:photo"), "has its own data"),
        (("{dualfed}", "--target", "1.5", "--samples", "0"), "samples = 0: Input should be greater"),
        (("{dualfed}", "--head", "lrr"), "did you mean 'lr'?"),
        (("{dualfed}", "--out", "{folder}/images.npz"), "is a file"),
    ],
)
def test_mistakes_end_with_exit_code_2(call, runs, coordinator, folder, tmp_path, words, message):
    (tmp_path / "dualfed").mkdir()
    places = {"coordinator": coordinator, "folder": folder, "dualfed": runs("dualfed")[0]}
    code, out, err = call(*(word.format(**places) for word in words))
    assert (code, out) == (2, "")
    assert message in err


def test_a_simulation_that_has_not_begun(call, runs, tmp_path):
    path, _ = runs("fedavg")
    (tmp_path / "young").mkdir()
    shutil.copy(path / "simulation.json", tmp_path / "young")
    StateFolder(tmp_path / "young").journal.open().close()
    code, _, err = call("young")
    assert code == 2
    assert "no round of this simulation has closed yet" in err

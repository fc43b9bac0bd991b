"""How a server notices that its inputs have changed, and where it shows that."""

from __future__ import annotations

import numpy as np
import pytest
from browser import browser, seen
from serving_site import TOKEN, fit_squares, png, square

from edge_agent.core.storage import read_json
from edge_agent.personal.drift import EVERY, WINDOW
from edge_agent.serving.history import History
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.inputs_state import InputsState, read_record, record_file
from edge_agent.serving.inputs_watch import STRANGEST, InputsWatch
from edge_agent.serving.pair import Pair
from edge_agent.serving.predictor import Predictor
from edge_agent.serving.service import Device

COLOURS = ("red", "green", "blue")


def lights_off(number):
    """A square as the camera shows it in the dark."""
    return png((square(COLOURS[number % 3], 900 + number) * 0.2).astype(np.uint8))


def as_ever(number):
    return png(square(COLOURS[number % 3], 500 + number))


class Site:
    """A predictor whose answers are watched, without a server."""

    def __init__(self, pair, file=None):
        self.told = []
        self.now = 1_000_000_000.0
        self.history = History()
        self.watch = InputsWatch(
            self.history, file, on_change=self.told.append, run_in_background=lambda work: work(), now=lambda: self.now
        )
        self.predictor = Predictor()
        self.predictor.observe(self.history)
        self.predictor.observe(self.watch)
        self.predictor.switch(pair)

    def answer(self, raw):
        self.now += 1
        self.predictor.answer(lambda pair: Decoder(pair.input).decode(raw), "test", raw, "image/png")

    @property
    def state(self):
        return self.watch.status.state


@pytest.fixture
def pair(bundle, bundle_path, tmp_path):
    return Pair.open(bundle, fit_squares(bundle_path, tmp_path / "many", tmp_path / "cache", count=40))


def test_inputs_as_ever_are_as_fitted_from_the_first_look_on(pair):
    site = Site(pair)
    assert site.watch.status.text == f"not enough answers yet, {WINDOW} more"
    for number in range(WINDOW - 1):
        site.answer(as_ever(number))
    assert site.state is InputsState.NOT_ENOUGH
    assert site.told == []
    site.answer(as_ever(WINDOW))
    assert site.state is InputsState.AS_FITTED
    assert site.told == [False]
    assert site.history.pinned() == []


def test_lights_that_go_off_are_told_within_200_answers_and_no_more_once_they_are_on(pair, tmp_path):
    file = record_file(tmp_path)
    site = Site(pair, file)
    for number in range(WINDOW):
        site.answer(as_ever(number))
    for number in range(200):
        site.answer(lights_off(number))
        if site.state is InputsState.CHANGED:
            break
    changed_at = site.now
    assert site.told == [False, True]
    assert site.watch.status.since == changed_at
    assert site.watch.status.text.startswith("changed since 2001-09-09 01:")
    assert read_record(file).since == changed_at
    for number in range(3 * WINDOW):
        site.answer(as_ever(number))
    assert site.state is InputsState.AS_FITTED
    assert site.told == [False, True, False]
    assert read_json(file)["state"] == "as fitted"


def test_the_strangest_inputs_are_kept_for_labelling_while_inputs_have_changed(pair):
    site = Site(pair)
    for number in range(WINDOW):
        site.answer(as_ever(number))
    for number in range(200):
        site.answer(lights_off(number))
    entries = site.history.pinned()
    assert len(entries) == STRANGEST
    assert all(entry.number > WINDOW for entry in entries)
    assert site.history.find(entries[0].number) is not None
    site.history.correct(entries[0].number, "night")
    shown = site.watch.as_json()["strangest"]
    assert [entry["number"] for entry in shown] == [entry.number for entry in entries]
    assert shown[0]["corrected"] == "night"


def test_another_head_begins_anew_and_the_same_one_goes_on(pair, bundle, bundle_path, tmp_path):
    site = Site(pair)
    for number in range(WINDOW + EVERY):
        site.answer(lights_off(number))
    assert site.state is InputsState.CHANGED
    site.predictor.switch(pair)
    assert site.state is InputsState.CHANGED
    other = fit_squares(bundle_path, tmp_path / "other", tmp_path / "cache", count=40, seed=1)
    site.predictor.switch(Pair.open(bundle, other))
    assert site.state is InputsState.NOT_ENOUGH
    assert site.history.pinned() == []


def test_a_restart_remembers_that_inputs_have_changed_for_the_same_pair_alone(pair, bundle, bundle_path, tmp_path):
    file = record_file(tmp_path)
    site = Site(pair, file)
    for number in range(WINDOW + EVERY):
        site.answer(lights_off(number))
    again = Site(pair, file)
    assert again.state is InputsState.CHANGED
    assert again.watch.status.since == site.watch.status.since
    assert again.told == [True]
    other = fit_squares(bundle_path, tmp_path / "other", tmp_path / "cache", count=40, seed=1)
    assert Site(Pair.open(bundle, other), file).state is InputsState.NOT_ENOUGH


@pytest.mark.parametrize("content", ["{", "[]", '{"pair": "x"}', '{"pair": "x", "state": "?", "since": 1}'])
def test_a_damaged_record_is_no_record(pair, tmp_path, content):
    file = record_file(tmp_path)
    file.parent.mkdir()
    file.write_text(content, encoding="utf-8")
    assert Site(pair, file).state is InputsState.NOT_ENOUGH


def test_a_full_disk_stops_no_answer(pair, tmp_path):
    (tmp_path / "serve").write_text("a file where the folder should be", encoding="utf-8")
    site = Site(pair, record_file(tmp_path))
    for number in range(WINDOW + EVERY):
        site.answer(lights_off(number))
    assert site.state is InputsState.CHANGED


def test_a_head_of_few_samples_says_why_it_notices_nothing(bundle, bundle_path, tmp_path):
    few = fit_squares(bundle_path, tmp_path / "few", tmp_path / "cache", count=10)
    site = Site(Pair.open(bundle, few))
    for number in range(WINDOW + EVERY):
        site.answer(lights_off(number))
    assert site.state is InputsState.NOT_ENOUGH
    assert site.watch.status.text == "the head learned from 30 samples; changes are noticed from 60 on"


def test_without_a_head_nothing_is_noticed(bundle):
    assert "keeps no training features" in Site(Pair.open(bundle, None)).watch.status.text


def test_page_and_metrics_show_it(serve, bundle, bundle_path, tmp_path):
    from serving_site import named_source

    head = fit_squares(bundle_path, tmp_path / "many", tmp_path / "cache", count=40)
    why_not = "corrections need the state folder of a device: 'edge-agent serve --state DIR'"
    site = serve(named_source(bundle, head), Device(why_not=why_not))
    assert "headwater_inputs_changed" not in site.ask("GET", "/metrics")[1].decode()
    # The reference is prepared beside the first answers.
    for number in range(3 * WINDOW):
        site.classify(lights_off(number))
    assert "headwater_inputs_changed 1" in site.ask("GET", "/metrics")[1].decode()
    address = f"http://127.0.0.1:{site.port}/#token={TOKEN}"
    with browser() as chromium:
        for scheme in ("light", "dark"):
            with seen(chromium, address, scheme, width=390) as view:
                view.page.wait_for_selector("#strangest button")
                assert view.page.locator("#strangest button").count() == STRANGEST
                assert "changed since" in view.page.inner_text("#facts")
                # At the top, before a person scrolls, it says so and what can be done.
                line = view.page.locator("#changed")
                assert line.get_attribute("role") == "status"
                assert "Inputs have changed since" in line.inner_text()
                assert f"Nothing can be corrected here: {why_not}" in line.inner_text()
                assert f"Nothing can be corrected here: {why_not}" in view.page.inner_text("#advice")
                assert line.bounding_box()["y"] < 300
                view.page.locator("#strangest button").first.click()
                view.page.wait_for_selector('#strangest button[aria-current="true"]')
                assert view.violations() == []
                assert view.page.evaluate("document.documentElement.scrollWidth") <= 390
                assert view.troubles == []
        # Where the inputs can be corrected, it says that instead.
        site.service.corrections.why_not = ""
        with seen(chromium, address, width=390) as view:
            view.page.wait_for_selector("#strangest button")
            for element in ("#changed", "#advice"):
                assert "the head learns from them" in view.page.inner_text(element)
                assert "Nothing can be corrected" not in view.page.inner_text(element)

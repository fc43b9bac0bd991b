"""The page: what it shows, how it looks to axe-core, and how a correction becomes a sample and a new head."""

from __future__ import annotations

import io
import json
import threading

import numpy as np
import pytest
from browser import VIEWS, browser, seen
from PIL import Image
from serving_site import COLOURS, TOKEN, Site, fill_state, png, square

from edge_agent.agent.head_tier import refit, why_not_from_added
from edge_agent.cli.where import config_of_folder
from edge_agent.core.config import ServeConfig, parse
from edge_agent.core.errors import StateError
from edge_agent.core.locks import waited_lock
from edge_agent.core.task import Task, WindowInput
from edge_agent.data import from_files
from edge_agent.data.collected import Collection, labelled
from edge_agent.data.pictures import image_type
from edge_agent.personal.personalizer import load_bundle
from edge_agent.serving.corrections import Corrections, FitState
from edge_agent.serving.history import History
from edge_agent.serving.http_api.page import content_security_policy
from edge_agent.serving.pair import Pair
from edge_agent.serving.pair_source import StatePair
from edge_agent.serving.refit import Refit
from edge_agent.serving.service import Device, HttpSettings, describe_what_leaves
from edge_agent.serving.settings import mqtt_settings

AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
REFIT = Refit("lr", 3, 1.0, 3, 3, 3)


def add_squares(state, folder, bundle, count=8):
    """Add squares of each colour to the samples of a device, as 'edge-agent add' does."""
    folder.mkdir(exist_ok=True)
    collection = Collection(state / "samples")
    for label in COLOURS:
        paths = []
        for number in range(count):
            path = folder / f"{label}-{number}.png"
            path.write_bytes(png(square(label, number)))
            paths.append(str(path))
        samples = from_files(paths, bundle.manifest.task.input, compact=True)
        collection.add(labelled(samples, label))


@pytest.fixture
def state(bundle_path, tmp_path):
    """A device whose head was fitted on samples that were added to it."""
    folder = tmp_path / "state"
    bundle = fill_state(folder, bundle_path, tmp_path / "cache")
    add_squares(folder, tmp_path / "photos", bundle)
    refit(config_of_folder(folder))
    return folder


@pytest.fixture
def device(serve, state) -> Site:
    return serve(StatePair(state), Device(config_of_folder(state)))


def correct(site, number, label, headers=AUTHORISED):
    return site.ask("POST", "/correct", json.dumps({"number": number, "label": label}).encode(), headers)


def wait_for(is_reached, still_goes_on=lambda: True):
    while not is_reached():
        assert still_goes_on()
        threading.Event().wait(0.01)


# --- history ---


def test_the_last_answers_are_listed_with_their_pictures(site):
    for number, label in enumerate(COLOURS):
        site.classify(png(square(label, number)))
    _, content, _ = site.ask("GET", "/history?after=1")
    assert [(answer["number"], answer["state"], answer["source"]) for answer in content["answers"]] == [
        (2, "green", "http"),
        (3, "blue", "http"),
    ]
    status, raw, headers = site.ask("GET", "/history/2/picture")
    assert (status, headers["content-type"], raw) == (200, "image/png", png(square("green", 1)))


def test_only_the_newest_answers_are_kept(site):
    for number in range(25):
        site.classify(png(square("red", number)))
    _, content, _ = site.ask("GET", "/history")
    assert [answer["number"] for answer in content["answers"]] == list(range(6, 26))
    assert site.ask("GET", "/history/5/picture")[0] == 404


def test_a_large_photo_is_kept_as_a_smaller_one(site):
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    site.classify(buffer.getvalue())
    _, raw, headers = site.ask("GET", "/history/1/picture")
    assert headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(raw)) as image:
        assert max(image.size) == 640


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_the_form_of_an_image_is_read_from_its_bytes(form):
    assert image_type(png(square("red"), form)) == f"image/{form.lower()}"
    assert image_type(b"<svg onload=alert(1)>") == ""


def test_what_a_sender_calls_its_bytes_is_not_handed_on(site):
    """A PPM image may hold any text, and an SVG document any script."""
    evil = b"P6\n#<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>\n8 8\n255\n" + bytes(192)
    site.ask("POST", "/classify", evil, {"Content-Type": "image/svg+xml"})
    _, raw, headers = site.ask("GET", "/history/1/picture")
    assert headers["content-type"] == "image/png"
    assert b"alert" not in raw


def windows_pair(make_bundle, tmp_path):
    spec = WindowInput(channels=2, length=10, stride=10)
    task = Task(input=spec, class_names=("still", "shaken"), encoder="linear", encoder_params={})
    bundle = make_bundle("windows.hwb", task=task, global_head=True).path
    return Pair.open(load_bundle(bundle, tmp_path / "cache"), None)


def test_a_table_that_begins_as_an_image_does_is_answered(site, make_bundle, tmp_path):
    site.service.predictor.switch(windows_pair(make_bundle, tmp_path))
    wide = b"BMI,age\n" + b"\n".join(b"%s,1" % (b"0." + b"1" * 60_000) for _ in range(10)) + b"\n"
    assert len(wide) > 512 << 10
    assert site.classify(wide)["class"] in {"still", "shaken"}
    assert site.ask("GET", "/history/1/picture")[2]["content-type"] == "image/svg+xml"


def test_pictures_stay_after_a_release_with_another_task(site, make_bundle, tmp_path):
    pixels = io.BytesIO()
    np.save(pixels, square("red"))
    site.classify(pixels.getvalue())
    before = site.service.predictor.pair
    site.service.predictor.switch(windows_pair(make_bundle, tmp_path))
    assert site.ask("GET", "/history/1/picture")[0] == 200
    recording = io.BytesIO()
    np.save(recording, np.zeros((10, 2), np.float32))
    site.classify(recording.getvalue())
    site.service.predictor.switch(before)
    assert site.ask("GET", "/history/2/picture")[0] == 200


def test_an_array_is_shown_as_a_picture(site):
    buffer = io.BytesIO()
    np.save(buffer, square("red"))
    site.classify(buffer.getvalue())
    _, raw, headers = site.ask("GET", "/history/1/picture")
    assert headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(raw)) as image:
        assert (np.asarray(image) == square("red")).all()


@pytest.mark.parametrize("number", ["0", "99", "x", "1e3", "9" * 30])
def test_pictures_that_are_not_there(site, number):
    assert site.ask("GET", f"/history/{number}/picture")[0] == 404


# --- status and page ---


def test_the_status_says_what_runs(device):
    _, content, _ = device.ask("GET", "/status")
    assert content["ready"]
    assert content["pair"]["takes"] == "images"
    assert content["pair"]["unknown"] == "", "18 samples are too few for a rule"
    assert sorted(content["classes"]) == sorted(COLOURS)
    assert (content["why_not_correct"], content["fit"]["state"]) == ("", "idle")


def test_the_page_runs_its_own_script_alone(site):
    status, raw, headers = site.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert policy == content_security_policy(raw.decode())
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("scheme, width", VIEWS)
def test_the_page_shows_answers_and_is_accessible(device, scheme, width):
    with browser() as chromium:
        for label in COLOURS:
            device.classify(png(square(label, 70)))
        with seen(chromium, f"http://127.0.0.1:{device.port}/#token={TOKEN}", scheme, width) as view:
            view.page.wait_for_selector("#list button")
            assert view.page.inner_text("#state") == "blue"
            assert view.page.locator("#list button").count() == 3
            assert sorted(view.page.inner_text("#knows").removeprefix("knows: ").split(", ")) == sorted(COLOURS)
            assert view.page.inner_text("#leaves") == "Nothing on this page is sent from the device."
            assert not view.page.is_visible("#changed")
            assert TOKEN not in view.page.url
            assert view.violations() == []
            assert view.page.evaluate("document.documentElement.scrollWidth") <= width
            assert view.troubles == []


def test_of_many_classes_the_page_names_some(site):
    names = [f"class {number}" for number in range(40)]
    status = site.ask("GET", "/status")[1]
    assert status["pair"]["knows"] == [*site.service.predictor.pair.class_names]
    with browser() as chromium, seen(chromium, f"http://127.0.0.1:{site.port}/") as view:
        view.page.locator("#knows:not(:empty)").wait_for()
        text = view.page.evaluate("(knows) => knowsText({ knows })", names)
        assert text == f"knows: {', '.join(names[:12])} and 28 more"
        long_text = view.page.evaluate("(knows) => knowsText({ knows })", ["x" * 100, "y" * 100])
        assert long_text == f"knows: {'x' * 100} and 1 more"
        assert view.page.evaluate("knowsText({ knows: [] })") == "answers with numbers"


@pytest.mark.parametrize(
    "host, options, says",
    [
        ("127.0.0.1", {}, "Nothing on this page is sent from the device."),
        (
            "0.0.0.0",
            {},
            "Nothing on this page is sent from the device. Other machines can open this page with the token.",
        ),
        (
            "127.0.0.1",
            {"mqtt": "mqtt://broker.lan"},
            "Answers, classes and changes of inputs are sent to mqtt://broker.lan; inputs are not.",
        ),
        (
            "127.0.0.1",
            {"mqtt": "mqtt://broker.lan", "share_image": True},
            "The last image, answers, classes and changes of inputs are sent to mqtt://broker.lan.",
        ),
    ],
)
def test_the_page_says_what_is_sent_from_the_device(host, options, says):
    mqtt = mqtt_settings(parse(ServeConfig, options, where="test"))
    assert describe_what_leaves(HttpSettings((host, 0), TOKEN), mqtt) == says


def test_the_status_says_what_leaves_and_whether_the_token_is_needed(site):
    status = site.ask("GET", "/status")[1]
    assert status["leaves"] == "Nothing on this page is sent from the device."
    assert status["needs_token"] is False


def test_a_correction_on_the_page_becomes_a_sample_and_a_new_head(device, state):
    with browser() as chromium:
        before = device.classify(png(square("red", 90)))
        with seen(chromium, f"http://127.0.0.1:{device.port}/#token={TOKEN}") as view:
            view.page.wait_for_selector("#list button")
            view.page.fill("#new", "brick")
            view.page.click("#make")
            view.page.locator("#state", has_text="brick").wait_for()
            wait_for(lambda: device.service.corrections.status.state is FitState.FITTED)
            device.service.watch.reload_if_changed()
            view.page.locator("#label option[value=brick]").wait_for(state="attached")
            assert view.troubles == []
    after = device.classify(png(square("red", 90)))
    assert "brick" in after["probabilities"]
    assert after["head_id"] != before["head_id"]
    assert [entry.label for entry in Collection(state / "samples").index().samples].count("brick") == 1


def test_without_the_token_a_correction_on_the_page_says_what_is_missing(device):
    with browser() as chromium:
        device.classify(png(square("red")))
        with seen(chromium, f"http://127.0.0.1:{device.port}/") as view:
            view.page.wait_for_selector("#list button")
            view.page.click("#wrong")
            view.page.locator("#problem:not(:empty)").wait_for()
            assert "Open the page by the address that was printed" in view.page.inner_text("#problem")


def test_names_of_classes_are_text_on_the_page(serve, bundle, head, tmp_path):
    from serving_site import named_source

    from edge_agent.heads import saved

    evil = "<img src=x onerror=alert(1)>"
    found = saved.load(head)
    named = saved.SavedHead(
        found.head, found.fingerprint, found.precision, (evil, *found.class_names[1:]), found.metrics, found.confidence
    )
    saved.save(tmp_path / "evil", named)
    site = serve(named_source(bundle, tmp_path / "evil"))
    site.classify(png(square("blue")))
    with browser() as chromium, seen(chromium, f"http://127.0.0.1:{site.port}/") as view:
        view.page.wait_for_selector("#list button")
        assert evil in view.page.inner_text("#bars")
        assert view.troubles == []


# --- corrections ---


def corrections_of(site, state, refit):
    return Corrections(config_of_folder(state), site.service.history, refit=refit)


def test_a_sample_of_the_page_is_the_sample_of_the_file(device, state, tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(png(square("red", 123, size=20)))
    device.classify(path.read_bytes())
    status, content, _ = correct(device, 1, "red")
    assert (status, content["added"]) == (200, 1)
    spec = device.service.predictor.pair.input
    added = Collection(state / "samples").add(labelled(from_files([str(path)], spec, compact=True), "red"))
    assert (added.added, added.known) == (0, 1)


@pytest.mark.parametrize(
    "body, status, says",
    [
        (b"{", 400, "the body is invalid JSON"),
        (b"{}", 400, "number: is missing"),
        (b'{"number": 1, "label": ""}', 400, "label"),
        (b'{"number": 7, "label": "red"}', 400, "answer 7 is no longer kept"),
        (b'{"number": 1, "label": "a\\u0007b"}', 400, "control character"),
    ],
)
def test_what_is_no_correction_says_why(device, body, status, says):
    device.classify(png(square("red")))
    found, content, _ = device.ask("POST", "/correct", body, AUTHORISED)
    assert found == status
    assert says in content["error"]["message"]


def test_a_correction_needs_the_token_and_the_same_origin(device):
    device.classify(png(square("red")))
    assert correct(device, 1, "red", {})[0] == 401
    assert correct(device, 1, "red", {**AUTHORISED, "Origin": "http://evil.example"})[0] == 403


def test_without_a_state_folder_the_reason_is_told(serve, source):
    site = serve(source, Device(why_not="corrections need a state folder"))
    site.classify(png(square("red")))
    assert site.ask("GET", "/status")[1]["why_not_correct"] == "corrections need a state folder"
    status, content, _ = correct(site, 1, "red")
    assert (status, content["error"]["message"]) == (400, "corrections need a state folder")


def test_corrections_while_a_fit_runs_are_one_more_fit(device, state):
    begun = threading.Semaphore(0)
    go_on = threading.Semaphore(0)
    fits = []

    def slow(config):
        fits.append(config.state)
        begun.release()
        assert go_on.acquire(timeout=30)
        return REFIT

    corrections = corrections_of(device, state, slow)
    pair = device.service.predictor.pair
    for number in range(4):
        device.classify(png(square("red", 200 + number)))
    corrections.correct(1, "red", pair)
    assert begun.acquire(timeout=30)
    for number in (2, 3, 4):
        corrections.correct(number, "red", pair)
    go_on.release()
    assert begun.acquire(timeout=30)
    assert corrections.status.state is FitState.FITTING
    go_on.release()
    wait_for(lambda: corrections.status.state is FitState.FITTED)
    assert len(fits) == 2


def test_every_correction_is_told_that_a_fit_follows(device):
    go_on = threading.Event()

    def fit(_config):
        assert go_on.wait(30)
        return REFIT

    device.service.corrections._refit = fit
    real = threading.Thread.start
    with pytest.MonkeyPatch.context() as patch:
        # The first fit begins only after its correction was answered.
        patch.setattr(threading.Thread, "start", lambda thread: None if thread.name == "fit" else real(thread))
        device.classify(png(square("red", 300)))
        assert correct(device, 1, "red")[1]["fit"]["state"] == "fitting"
    device.classify(png(square("red", 301)))
    assert correct(device, 2, "red")[1]["fit"]["state"] == "fitting"
    go_on.set()
    wait_for(lambda: device.service.corrections.status.state is FitState.FITTED)


def test_while_another_command_changes_the_samples_for_long_a_correction_is_put_off(device, state):
    device.service.corrections._wait_s = 0.05
    device.classify(png(square("red", 400)))
    count = len(Collection(state / "samples").index().samples)
    with waited_lock(state / "samples"):
        status, content, headers = correct(device, 1, "red")
    assert (status, content["error"]["kind"], headers["retry-after"]) == (503, "SamplesBusy", "5")
    assert "another program, such as 'edge-agent add'" in content["error"]["message"]
    assert len(Collection(state / "samples").index().samples) == count
    status, content, _ = correct(device, 1, "red")
    assert (status, content["added"]) == (200, 1)


@pytest.mark.parametrize(
    "error, state_after",
    [
        (StateError("it is in use", holder="edge-agent x"), FitState.AGENT_FITS),
        (StateError("no bundle"), FitState.FAILED),
        (OSError(28, "No space left on device"), FitState.FAILED),
    ],
)
def test_a_fit_that_fails_is_told(device, state, error, state_after):
    def fail(_config):
        raise error

    corrections = corrections_of(device, state, fail)
    device.classify(png(square("red")))
    corrections.correct(1, "red", device.service.predictor.pair)
    wait_for(lambda: corrections.status.state not in {FitState.IDLE, FitState.FITTING})
    assert corrections.status.state is state_after


def test_while_an_agent_holds_the_folder_it_fits(device, state):
    from edge_agent.core.locks import folder_lock

    device.classify(png(square("red")))
    with folder_lock(state, "edge-agent porch"):
        correct(device, 1, "red")
        wait_for(lambda: device.service.corrections.status.state is FitState.AGENT_FITS)


def test_a_head_of_the_agents_own_data_is_not_fitted_without_them(bundle_path, tmp_path):
    from edge_agent.heads import saved

    folder = tmp_path / "state"
    fill_state(folder, bundle_path, tmp_path / "cache")
    found = saved.load(folder / "head")
    metrics = {**found.metrics, "n_train": 40, "n_test": 20, "n_collected": 0}
    again = saved.SavedHead(
        found.head, found.fingerprint, found.precision, found.class_names, metrics, found.confidence
    )
    saved.save(folder / "head", again)
    assert "60 samples of the agent's data source" in why_not_from_added(config_of_folder(folder))


def test_a_head_of_added_samples_is_fitted_from_them(state):
    assert why_not_from_added(config_of_folder(state)) == ""


def test_history_finds_nothing_that_it_never_had():
    assert History().find(1) is None

"""Answers to a source for a program: each one when it is asked for, and the source ends with the program's interest."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from serving_site import COLOURS, png, square

from edge_agent.core.errors import UsageError
from edge_agent.core.task import Task, WindowInput
from edge_agent.personal.personalizer import Personalizer


@pytest.fixture
def colours(bundle_path, head, tmp_path):
    return Personalizer.open(bundle_path, cache=tmp_path / "cache").load(head)


@pytest.fixture
def motions(make_bundle, tmp_path):
    task = Task(
        input=WindowInput(channels=2, length=10, stride=5, mean=(1.0,), std=(2.0,)),
        class_names=("still", "shaken"),
        encoder="linear",
        encoder_params={},
    )
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    windows = (rng.normal(size=(40, 2, 10)) * np.where(labels, 5.0, 0.5)[:, None, None]).astype(np.float32)
    personal = Personalizer.open(make_bundle(task=task).path, cache=tmp_path / "cache")
    return personal.fit(windows, np.array(task.class_names)[labels], head="lr")


def threads_of_sources():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("source ")]


def test_files_that_are_put_into_a_folder_are_answered_until_nobody_asks(colours, tmp_path):
    folder = tmp_path / "inbox"
    folder.mkdir()
    answers = colours.stream(f"watch:{folder}")

    labels = list(COLOURS)
    over = threading.Event()

    def put():
        # What is in the folder before the first answer is asked for does not count, so they do not end.
        for number in itertools.count():
            (folder / f"{number:04}.png").write_bytes(png(square(labels[number % 3], 70)))
            if over.wait(0.05):
                return

    writer = threading.Thread(target=put)
    writer.start()
    try:
        assert {answer.label for answer in itertools.islice(answers, 6)} == set(labels)
        answers.close()
    finally:
        over.set()
        writer.join()
    assert threads_of_sources() == []


def test_a_recording_of_a_sensor_is_answered_window_for_window_to_its_end(motions, tmp_path):
    rng = np.random.default_rng(1)
    samples = np.concatenate([0.5 * rng.normal(size=(200, 2)), 5 * rng.normal(size=(200, 2))])
    path = tmp_path / "recording.csv"
    path.write_text("".join(f"{x:.6f},{y:.6f}\n" for x, y in samples), encoding="ascii")
    answers = list(motions.stream(f"sensor:{path}", rate=50))
    starts = range(0, 400 - 9, 5)
    windows = np.stack([samples[start : start + 10].T for start in starts]).astype(np.float32)
    assert [answer.label for answer in answers] == motions.predict(windows).tolist()
    assert threads_of_sources() == []


def test_the_next_window_is_answered_only_when_it_is_asked_for(motions, tmp_path):
    path = tmp_path / "recording.csv"
    path.write_text("1,1\n" * 10_000, encoding="ascii")
    answers = motions.stream(f"sensor:{path}")
    next(answers)
    next(answers)
    answers.close()
    assert threads_of_sources() == []


@pytest.mark.parametrize("text", ["cat.jpg", "camera:somewhere", "sensor:not-there.csv", "watch:not-there", ""])
def test_what_is_no_source_is_refused_by_name(colours, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"is not a source: expected camera:auto|expected auto|expected -|is not a folder"
    ):
        next(colours.stream(text))

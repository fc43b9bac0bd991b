"""Where data lie, and what is said when they do not: told before anything is read."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from edge_agent.core.errors import DataError, UnknownName
from edge_agent.core.task import ImageInput
from edge_agent.data import check, load, location, probe

SPEC = ImageInput(channels=3, height=8, width=8, mean=(0.0,), std=(1.0,))


@pytest.fixture
def folder(tmp_path):
    for name in ("red", "blue"):
        place = tmp_path / "pictures" / name
        place.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (10, 10), name).save(place / f"{number}.png")
    return tmp_path / "pictures"


def test_a_place_without_its_kind_is_answered_with_the_likely_one(folder, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    cases = {
        f"{folder}/": "images",
        f"{folder}?limit=2": "images",
        f"{tmp_path}/x.npz": "npz",
        f"{tmp_path}/mnist": "idx",
    }
    for source, kind in cases.items():
        for ask in (load, check):
            with pytest.raises(DataError, match=rf"did you mean '{kind}:{re.escape(source)}'\?"):
                ask(source)
    with pytest.raises(UnknownName):
        load("nowhere/")


def test_a_relative_place_counts_from_the_folder_that_is_given(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = f"images:{folder.name}?limit=1"
    check(source, folder.parent)
    assert len(load(source, SPEC, folder=folder.parent)) == 2
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(DataError, match=rf"there is no {tmp_path}/elsewhere/{folder.name}"):
        check(source, tmp_path / "elsewhere")
    check(f"images:{folder.resolve()}", tmp_path / "elsewhere")


def test_a_folder_without_pictures_is_found_before_anything_is_read(tmp_path):
    with pytest.raises(DataError, match="no images in the sub-folders"):
        check(f"images:{tmp_path}")
    with pytest.raises(DataError, match="module:function"):
        check("python:no_such_module:load")


def test_classes_that_the_task_does_not_know_are_told_with_those_that_are_lacking(folder):
    with pytest.raises(DataError) as told:
        load(f"images:{folder}", SPEC, ("green", "red", "bluu"))
    said = str(told.value)
    assert "does not know: 'blue' (did you mean 'bluu'?); it knows green, red, bluu" in said
    assert "the data have no green, bluu" in said
    assert "missing classes are fine" in said
    assert said.endswith("Those of a federation are class_names in [task] of its coordinator")


def test_data_of_which_nothing_can_be_used_are_told_from_those_with_a_broken_file(folder):
    source = f"images:{folder}"
    first, *others = sorted(folder.rglob("*.png"))
    first.write_bytes(b"no picture")
    probe(source)
    for file in others:
        file.write_bytes(b"no picture")
    check(source)
    with pytest.raises(DataError, match=r"none of 6 tried, of 6, can be used; first .*0\.png"):
        probe(source)
    probe("digits:optdigits")


def test_file_with_a_function_counts_from_the_folder_of_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "mine.py").write_text("def load():\n    return [[[0]]], [0]\n")
    monkeypatch.chdir("/")
    for source in ("mine.py:load", "python:mine.py:load", f"python:{tmp_path}/etc/mine.py:load"):
        check(source, tmp_path / "etc")
    assert location("mine.py:load", tmp_path / "etc")[1] == f"{tmp_path}/etc/mine.py:load"
    with pytest.raises(DataError, match=r"there is no file /mine\.py"):
        check("mine.py:load")

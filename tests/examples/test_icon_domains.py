"""The set of domains that is made of icon themes: which names become classes, and what its images are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent import data

SCRIPT = Path(__file__).parents[2] / "examples/icons/icon_domains.py"


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("icon_domains", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "icon_domains", module)  # where data classes look for their types
    spec.loader.exec_module(module)
    return module


def draw(path: Path, colour: tuple[int, ...], side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGBA", (side, side), colour).save(path)


@pytest.fixture
def themes(tmp_path):
    """Two themes with folders in either order; ``alias`` is another name of ``cut``, ``small`` has two sizes alone."""
    for number, (name, form) in enumerate({"One": "{0}x{0}/actions", "Two": "actions/{0}"}.items()):
        for side in (16, 22, 32, 128):
            folder = tmp_path / name / form.format(side)
            draw(folder / "copy.png", (10 + number, 0, 0, 255), side)
            draw(folder / "cut.png", (20 + number, 0, 0, 255), side)
            if side < 32:
                draw(folder / "small.png", (30, 0, 0, 255), side)
            (folder / "gone.png").symlink_to("nowhere.png")
        draw(tmp_path / name / "actions" / "alone.png", (1, 1, 1, 255), 16)
    for side in (16, 22, 32):
        (tmp_path / "One" / f"{side}x{side}" / "actions" / "alias.png").symlink_to("cut.png")
        draw(tmp_path / "Two" / "actions" / str(side) / "alias.png", (99, 0, 0, 255), side)
        draw(tmp_path / "Two" / "actions" / str(side) / "only-two.png", (99, 0, 0, 255), side)
    return tmp_path


def test_names_of_all_themes_become_classes_without_those_that_look_alike(script, themes, tmp_path):
    out = tmp_path / "out"
    assert script.write_domains(out, [themes], ("One", "Two")) == (2, 12)
    assert sorted(path.name for path in (out / "One").iterdir()) == ["alias", "copy"], "alias is the first of two names"
    assert sorted(path.name for path in (out / "Two" / "copy").iterdir()) == ["016.png", "022.png", "032.png"]
    domains = data.domains(f"images:{out}")
    assert list(domains) == ["One", "Two"]
    samples = data.load(domains["One"])
    assert samples.class_names == ("alias", "copy")
    assert len(samples.labels) == 6


def test_what_is_transparent_becomes_white(script, tmp_path):
    draw(tmp_path / "a.png", (0, 0, 0, 0), 4)
    assert np.asarray(script.on_white(tmp_path / "a.png")).min() == 255


@pytest.mark.parametrize(
    "names, said",
    [(("One", "Three", "Four"), "no theme Three, Four in"), (("One", "Empty"), "have 0 names in common")],
)
def test_themes_that_do_not_do_are_named_and_nothing_is_written(script, themes, tmp_path, names, said):
    (themes / "Empty").mkdir()
    with pytest.raises(script.UnusableThemes, match=said):
        script.write_domains(tmp_path / "out", [themes], names)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(script, themes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["icon_domains.py", "--out", str(themes), "--themes", str(themes)])
    assert script.main() == 2
    assert "is not empty; choose another --out" in capsys.readouterr().err


def test_a_folder_that_was_left_unfinished_does_not_count(script, themes, tmp_path):
    draw(tmp_path / ".out.unfinished" / "One" / "old" / "016.png", (0, 0, 0, 255), 16)
    script.write_domains(tmp_path / "out", [themes], ("One", "Two"))
    assert not (tmp_path / "out" / "One" / "old").exists()
    assert not (tmp_path / ".out.unfinished").exists()

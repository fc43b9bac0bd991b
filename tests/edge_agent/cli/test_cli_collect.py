"""Samples added one by one, classes changed, heads refitted and brought back, by the commands that a person types."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from edge_agent.cli import main
from edge_agent.core.locks import folder_lock
from edge_agent.heads import saved

COLOURS = {"cat": 0, "dog": 1, "tree": 2}


@pytest.fixture
def place(make_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_bundle(dim=200, global_head=True)
    assert main(["import", "b.hwb", "--state", "state", "--json"]) == 0
    rng = np.random.default_rng(0)
    for name, channel in COLOURS.items():
        for number in range(8):
            pixels = rng.integers(0, 60, (8, 8, 3), dtype=np.uint8)
            pixels[..., channel] += 190
            Image.fromarray(pixels).save(f"{name}{number}.png")
    return tmp_path


def answer(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def add(capsys, name, numbers=range(8), **options):
    files = [f"{name}{number}.png" for number in numbers]
    return answer(capsys, "add", "--state", "state", "--label", name, *files, **options)


def predicted(capsys, name):
    words = ("predict", "--bundle", "state", "--head", "state/head", "--input", f"{name}7.png")
    return answer(capsys, *words)["predictions"][0]["class"]


def states(capsys):
    return {row["class"]: row["state"] for row in answer(capsys, "classes", "list", "--state", "state")["classes"]}


def test_classes_are_added_one_after_the_other_without_touching_the_others(place, capsys):
    assert add(capsys, "cat")["refitted"] is True
    found = add(capsys, "dog", range(6))
    assert (found["added"], found["metrics"]["n_train"], found["metrics"]["n_test"]) == (6, 11, 3)
    assert [predicted(capsys, name) for name in ("cat", "dog", "tree")][:2] == ["cat", "dog"]
    assert add(capsys, "tree")["metrics"]["acc.personal"] > 0.9
    assert predicted(capsys, "tree") == "tree"
    assert saved.load(place / "state" / "head").class_names == ("cat", "dog", "tree")
    assert states(capsys) == {"cat": "trained", "dog": "trained", "tree": "trained"}
    found = add(capsys, "dog", range(6))
    assert (found["added"], found["known"]) == (0, 6)
    assert main(["classes", "list", "--state", "state"]) == 0
    assert "held out" in capsys.readouterr().out


def test_the_state_folder_stands_for_the_bundle_and_its_head(place, capsys):
    words = ("predict", "--bundle", "state", "--input", "dog7.png")
    assert answer(capsys, *words)["head"] is None
    assert main([*words]) == 0
    assert "answers of the bundle's shared classifier, which marks no input as unknown" in capsys.readouterr().out
    for name in ("cat", "dog"):
        add(capsys, name)
    found = answer(capsys, *words)
    assert (found["predictions"][0]["class"], found["head_folder"]) == ("dog", "state/head")
    assert answer(capsys, *words, "--head", "state")["head_folder"] == "state/head"
    assert main([*words]) == 0
    said = capsys.readouterr().out
    assert f"answers of {found['head']} in state/head, which has no rule for unknown inputs (too few samples" in said
    assert answer(capsys, "evaluate", "--bundle", "state", "--head", "state", "--data", "digits?n=20", code=2)


def test_the_head_before_comes_back_until_something_changes(place, capsys):
    add(capsys, "cat")
    add(capsys, "dog")
    add(capsys, "tree")
    assert answer(capsys, "rollback", "--state", "state", "--head")["classes"] == ["cat", "dog"]
    assert predicted(capsys, "tree") != "tree"
    assert states(capsys)["tree"] == "collected"
    assert answer(capsys, "rollback", "--state", "state", "--head")["classes"] == ["cat", "dog", "tree"]


def test_classes_are_renamed_merged_and_removed(place, capsys):
    for name in COLOURS:
        add(capsys, name)
    answer(capsys, "classes", "rename", "tree", "plant", "--state", "state")
    assert predicted(capsys, "tree") == "plant"
    assert saved.load(place / "state" / "head").class_names == ("cat", "dog", "plant")
    answer(capsys, "classes", "merge", "cat", "dog", "pet", "--state", "state")
    assert predicted(capsys, "dog") == "pet"
    answer(capsys, "classes", "remove", "plant", "--state", "state")
    assert list(states(capsys)) == ["pet"]
    before = (place / "state" / "head" / "head.json").read_bytes()
    refused = answer(capsys, "classes", "remove", "pet", "--state", "state", code=2)["error"]["message"]
    assert "no other class has samples, so no head could be fitted" in refused
    assert (place / "state" / "head" / "head.json").read_bytes() == before
    assert states(capsys)["pet"] == "trained"
    assert answer(capsys, "classes", "list", "--state", "state")["samples"] == 16
    assert predicted(capsys, "cat") == "pet"


def test_a_class_that_is_none_is_told_those_that_the_list_shows(place, capsys):
    """It named the ten classes of the bundle, which the list does not show."""
    add(capsys, "cat")
    add(capsys, "dog")
    for words in (("remove", "cow"), ("rename", "cow", "calf"), ("merge", "cow", "cat", "pet")):
        said = answer(capsys, "classes", *words, "--state", "state", code=2)["error"]["message"]
        assert said == "no class 'cow'; 'edge-agent classes list' shows cat, dog"


def test_what_changed_in_the_classes_is_told(place, capsys):
    for name in COLOURS:
        add(capsys, name)
    assert main(["classes", "rename", "tree", "plant", "--state", "state"]) == 0
    assert "tree → plant" in capsys.readouterr().out
    found = add(capsys, "tree", range(2))
    assert (found["known"], found["moved"], found["renamed"]) == (2, 0, {"tree": "plant"})
    assert main(["add", "--state", "state", "--label", "cat", "dog0.png", "dog1.png"]) == 0
    assert "2 were there already, 2 of them of another class till now" in capsys.readouterr().out
    taken = answer(capsys, "classes", "rename", "cat", "dog", "--state", "state", code=2)["error"]["message"]
    assert "'edge-agent classes merge cat dog dog' joins them" in taken
    missing = answer(capsys, "classes", "rename", "cow", "dog", "--state", "state", code=2)["error"]["message"]
    assert "no class 'cow'" in missing
    assert "merge" not in missing
    for words in (("rename", "cat", ""), ("merge", "cat", "dog", " ")):
        empty = answer(capsys, "classes", *words, "--state", "state", code=2)["error"]["message"]
        assert "expected the name of a class" in empty
    assert main(["classes", "merge", "cat", "dog", "dog", "--state", "state"]) == 0
    assert "cat, dog → dog" in capsys.readouterr().out
    removed = answer(capsys, "classes", "remove", "plant", "--state", "state")
    assert (removed["removed"], removed["samples_removed"]) == (["plant"], 8)


def test_a_new_accuracy_stands_beside_the_one_before(place, capsys):
    assert main(["add", "--state", "state", "--label", "cat", *(f"cat{number}.png" for number in range(8))]) == 0
    text = capsys.readouterr().out
    assert "the head knows one class alone, and answers every input so" in text
    assert "before" not in text
    first = answer(capsys, "add", "--state", "state", "--label", "dog", "dog0.png", "dog1.png", "dog2.png")
    assert first["acc.personal_before"] == 1.0
    words = ["add", "--state", "state", "--label", "tree", *(f"tree{number}.png" for number in range(8))]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    before = f"before {100 * first['metrics']['acc.personal']:.1f} % of 3 held-out samples, which were others in part"
    assert before in text
    assert "(95 %: " in text
    assert f"{saved.load(place / 'state' / 'head').head.name}, fitted again" in text


def test_a_class_that_makes_the_head_worse_is_told_with_the_way_back(place, capsys):
    for name in ("cat", "dog"):
        add(capsys, name)
    kind = saved.load(place / "state" / "head").head.name
    rng = np.random.default_rng(1)
    for number in range(40):  # foxes look as cats do, so held-out cats are taken for them
        pixels = rng.integers(0, 60, (8, 8, 3), dtype=np.uint8)
        pixels[..., 0] += 190
        Image.fromarray(pixels).save(f"fox{number}.png")
    found = add(capsys, "fox", range(40))
    rows = {row["name"]: row for row in found["per_class"]}
    assert (rows["cat"]["train"], rows["cat"]["held_out"], rows["cat"]["right_before"]) == (6, 2, 2)
    assert rows["cat"]["right"] < 2
    assert rows["fox"]["right_before"] is None, "the head before does not know it"
    first, second = found["warnings"]
    assert first.startswith("of 4 held-out samples of the classes known before, the head before answers 4 right and ")
    assert "which may be noise" in first
    assert first.endswith("'edge-agent rollback --head --state state' brings back the head before")
    assert "has 6 samples to fit, the fewest" in second
    assert answer(capsys, "rollback", "--state", "state", "--head")["head"] == kind
    assert main(["add", "--state", "state", "--label", "tree", *(f"tree{number}.png" for number in range(8))]) == 0
    text = capsys.readouterr().out
    assert "right before" in text
    assert "; chosen for " in text


def test_add_and_fit_compare_the_same_heads_on_the_same_data(place, capsys):
    fitted = answer(capsys, "fit", "--bundle", "b.hwb", "--data", "digits?n=100", "--out", "head")
    added = answer(capsys, "add", "--data", "digits?n=100", "--state", "state")["metrics"]
    compared = [{key for key in metrics if key.startswith("cv.")} for metrics in (fitted, added)]
    assert compared[0] == compared[1]
    assert "cv.tuned" in compared[0], "the classes are the bundle's, so its shared classifier is a candidate of both"


def test_a_data_source_is_added_with_its_own_labels_beside_those_of_the_agent(place, capsys):
    (place / "agent.toml").write_text('id = "dev"\nstate = "state"\n[data]\nsource = "digits?n=100"\nbudget = 6\n')
    found = answer(capsys, "add", "--data", "digits?n=10&seed=7", "--config", "agent.toml")
    assert (found["added"], found["dropped"]) == (10, 4)
    found = answer(capsys, "add", "--config", "agent.toml", "--label", "scarf", "cat0.png", "cat1.png")
    head = saved.load(place / "state" / "head")
    assert head.class_names == (*"0123456789", "scarf")
    assert found["metrics"]["n_train"] + found["metrics"]["n_test"] == 106
    assert found["metrics"]["no_global"].endswith("does not know scarf")
    alone = answer(capsys, "add", "--state", "state", "--label", "scarf", "cat2.png")
    assert (alone["refitted"], "give --config" in alone["not_refitted"]) == (False, True)


@pytest.mark.parametrize("way", [("--label", "cat"), ()])
def test_what_cannot_be_read_is_left_out_unless_strict(way, place, capsys):
    photos = place / "photos" / "cat"
    photos.mkdir(parents=True)
    for number in range(4):
        (place / f"cat{number}.png").rename(photos / f"{number}.png")
    (photos / "broken.png").write_bytes(b"no image")
    words = (
        "add",
        "--state",
        "state",
        *way,
        *(map(str, sorted(photos.iterdir())) if way else ("--data", "images:photos")),
    )
    assert main([*words, "--strict"]) == 2
    assert "Without --strict" in capsys.readouterr().err
    found = answer(capsys, *words)
    assert (found["added"], len(found["skipped"])) == (4, 1)
    assert "cat/broken.png: cannot be read as an image" in found["skipped"][0]
    assert main([*words]) == 0
    assert "left out" in capsys.readouterr().out
    assert main(["add", "--state", "state", "--label", "cat", str(photos / "broken.png")]) == 2, "nothing is left"
    assert "broken.png" in capsys.readouterr().err


def test_status_shows_added_samples_and_files_that_cannot_be_used(place, capsys):
    for name in ("cat", "dog"):
        (place / "photos" / name).mkdir(parents=True)
        for number in range(6):
            (place / f"{name}{number}.png").rename(place / "photos" / name / f"{number}.png")
    (place / "photos" / "cat" / "broken.png").write_bytes(b"no image")
    (place / "inbox" / "tree").mkdir(parents=True)
    (place / "inbox" / "tree" / "half.png").write_bytes(b"half")
    (place / "agent.toml").write_text(
        'id = "dev"\nstate = "state"\n[data]\nsource = "images:photos"\nwatch = "inbox"\n[head]\nown_classes = true\n'
    )
    found = answer(capsys, "status", "--config", "agent.toml")
    assert (found["collected"], found["waiting"], found["metrics"]) == (None, 1, None)
    files = [f"tree{number}.png" for number in range(4)]
    answer(capsys, "add", "--config", "agent.toml", "--label", "tree", *files)
    found = answer(capsys, "status", "--config", "agent.toml")
    assert found["collected"] == {"samples": 4, "classes": ["tree"], "learned": True}
    assert (found["metrics"]["n_skipped"], found["metrics"]["n_collected"]) == (1, 4)
    with folder_lock(place / "state", "edge-agent run"):
        answer(capsys, "add", "--config", "agent.toml", "--label", "tree", "tree4.png")
    assert main(["status", "--config", "agent.toml"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "collected 5 samples of 1 classes, not in the head" in lines
    assert "waiting 1 files in the watch folder" in lines
    assert any(line.startswith("skipped 1 cannot be used, first cat/broken.png: cannot be read") for line in lines)
    (place / "state" / "samples" / "index.json").write_text("{")
    found = answer(capsys, "status", "--config", "agent.toml", code=1)
    assert (found["condition"], found["fault"]["kind"]) == ("fault", "data")


def test_a_running_agent_fits_the_head_itself(place, capsys):
    with folder_lock(place / "state", "edge-agent run"):
        found = add(capsys, "cat")
    assert (found["added"], found["refitted"]) == (8, False)
    assert found["not_refitted"] == "the agent of this device is running and fits it"
    assert not (place / "state" / "head").exists()
    assert states(capsys) == {"cat": "collected"}


def test_the_first_fit_of_a_device_names_the_command_that_answers(place, capsys):
    capsys.readouterr()
    assert main(["add", "--state", "state", "--label", "cat", "cat0.png", "cat1.png"]) == 0
    next_line = capsys.readouterr().out.splitlines()[-1]
    assert next_line == "next: edge-agent predict --bundle state FILE ..., or edge-agent serve --state state"
    words = next_line.removeprefix("next: edge-agent ").partition(" FILE")[0].split()
    assert main([*words, "cat7.png"]) == 0
    assert main(["add", "--state", "state", "--label", "dog", "dog0.png", "dog1.png"]) == 0
    assert "next: " not in capsys.readouterr().out  # it is known by now


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("add", "--state", "state", "cat0.png"), 2, "--label is missing"),
        (("add", "--state", "state", "--label", "cat"), 2, "expected FILE"),
        (("add", "--state", "state", "--label", "a\nb", "cat0.png"), 2, "control character"),
        (
            ("add", "--state", "state", "--label", "cat", "cat0.png", "b.hwb", "--strict"),
            2,
            "cannot be read as an image",
        ),
        (("add", "--label", "cat", "cat0.png"), 2, "'edge-agent import starter --state DIR' makes one"),
        (
            ("add", "--state", "nowhere", "--label", "cat", "cat0.png"),
            2,
            "check the path, or, for a new one, install a bundle: 'edge-agent import BUNDLE --state nowhere'",
        ),
        (
            ("add", "--state", "empty folder", "--label", "cat", "cat0.png"),
            1,
            "no bundle is in use; install a bundle: 'edge-agent import BUNDLE --state",
        ),
        (("classes", "rename", "cat", "--state", "state"), 2, "rename OLD NEW"),
        (
            ("classes", "remove", "cow", "--state", "state"),
            2,
            "no class 'cow'; 'edge-agent classes list' shows none yet",
        ),
        (("rollback", "--state", "state", "--head"), 1, "no earlier head"),
    ],
)
def test_mistakes_are_clear_and_change_nothing(place, capsys, words, code, said):
    (place / "empty folder").mkdir()
    assert said in answer(capsys, *words, code=code)["error"]["message"]
    assert not (place / "state" / "samples" / "index.json").exists()


_WITH_LITTLE_ROOM = """
import resource, sys
sys.dont_write_bytecode = True  # it would be cut off at the limit, for all that import it later
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from edge_agent.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
@pytest.mark.parametrize("room", [100, 8000])
def test_the_head_before_answers_where_the_disk_takes_no_more(place, capsys, room):
    """Files cannot grow beyond ``room`` bytes: first no sample fits, then no head."""
    add(capsys, "cat")
    add(capsys, "dog")
    before = {path.name: path.read_bytes() for path in (place / "state" / "head").iterdir()}
    words = ("add", "--state", "state", "--label", "tree", *(f"tree{number}.png" for number in range(8)))
    done = subprocess.run(
        [sys.executable, "-c", _WITH_LITTLE_ROOM, str(room), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in (place / "state" / "head").iterdir()} == before
    assert predicted(capsys, "dog") == "dog"
    assert ("tree" in states(capsys)) is (room == 8000)
    assert add(capsys, "tree")["refitted"] is True
    assert predicted(capsys, "tree") == "tree"

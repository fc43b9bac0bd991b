from __future__ import annotations

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.task import WindowInput
from edge_agent.data import check, load, split, subjects
from edge_agent.data.sets import ucihar

ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
PEOPLE = {"train": [1] * 7 + [3] * 5, "test": [2] * 6}
LABELS = {"train": [5, 5, 5, 4, 4, 5, 5, 1, 1, 1, 1, 1], "test": [6, 6, 6, 6, 2, 2]}


def value(part: str, row: int, channel: int, time: int) -> float:
    return (100 if part == "test" else 0) + row + channel / 10 + time / 10_000


@pytest.fixture
def folder(tmp_path):
    """As the archive has it: fields of 16 characters, 128 in a line; each value says where it stands."""
    root = tmp_path / "UCI HAR Dataset"
    for part, people in PEOPLE.items():
        (root / part / "Inertial Signals").mkdir(parents=True)
        for channel, signal in enumerate(ucihar.SIGNALS):
            rows = [
                "".join(f"{value(part, row, channel, time):16.7e}" for time in range(128)) for row in range(len(people))
            ]
            (root / part / "Inertial Signals" / f"{signal}_{part}.txt").write_text("\n".join(rows) + "\n")
        (root / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in LABELS[part]))
        (root / part / f"subject_{part}.txt").write_text("".join(f"{person}\n" for person in people))
    (root / "activity_labels.txt").write_text("".join(f"{n} {name}\n" for n, name in enumerate(ACTIVITIES, 1)))
    return tmp_path


def test_windows_are_nine_signals_of_128_samples(folder):
    samples = load(f"ucihar:{folder}")
    assert samples.inputs.shape == (18, 9, 128)
    assert samples.inputs.dtype == np.float32
    assert samples.input == WindowInput(channels=9, length=128, stride=64)
    assert samples.class_names == tuple(name.lower() for name in ACTIVITIES)
    assert samples.labels.tolist() == [label - 1 for label in LABELS["train"] + LABELS["test"]]
    assert samples.inputs[2, 4, 100] == pytest.approx(value("train", 2, 4, 100), abs=1e-5)
    assert samples.inputs[13, 8, 127] == pytest.approx(value("test", 1, 8, 127), abs=1e-5)
    assert samples.names[7] == "subject 3"


def test_the_signals_are_in_the_order_that_the_documentation_names():
    assert (
        *("body_acc_x", "body_acc_y", "body_acc_z"),
        *("body_gyro_x", "body_gyro_y", "body_gyro_z"),
        *("total_acc_x", "total_acc_y", "total_acc_z"),
    ) == ucihar.SIGNALS


def test_parts_and_people_can_be_chosen(folder):
    sizes = {part: len(load(f"ucihar:{folder / 'UCI HAR Dataset'}?split={part}")) for part in ("train", "test", "all")}
    assert sizes == {"train": 12, "test": 6, "all": 18}
    three = load(f"ucihar:{folder}?subject=3")
    assert three.inputs[:, 0, 0].round().tolist() == [7, 8, 9, 10, 11]
    assert len(load(f"ucihar:{folder}?subject=1,2&exclude_subject=1")) == 6
    with pytest.raises(DataError, match="subjects of train: 1, 3"):
        load(f"ucihar:{folder}?subject=2&split=train")


def test_a_group_is_what_one_person_did_without_a_break(folder):
    assert load(f"ucihar:{folder}").groups.tolist() == [0] * 3 + [1] * 2 + [2] * 2 + [3] * 5 + [4] * 4 + [5] * 2


def test_what_is_held_back_shares_no_samples_with_training_windows(folder):
    """Windows overlap by half, so the one between the two parts of a group is left out; short groups only train."""
    train, test = split(load(f"ucihar:{folder}?subject=3"), 0.4, 0)
    assert train.inputs[:, 0, 0].round().tolist() == [7, 8]
    assert test.inputs[:, 0, 0].round().tolist() == [10, 11]


def test_people_become_sources_of_both_parts(folder):
    found = subjects(f"ucihar:{folder}?exclude_subject=3")
    assert list(found) == [1, 2]
    assert [len(load(source)) for source in found.values()] == [7, 6]
    assert list(subjects(f"ucihar:{folder}?split=train")) == [1, 3]
    assert subjects(f"ucihar:{folder}?subject=1") == {}
    assert subjects("digits") == {}


def test_a_missing_set_says_what_was_expected(tmp_path, folder):
    with pytest.raises(DataError, match=r"no UCI HAR data set .* expected activity_labels\.txt.*archive\.ics.*licence"):
        check(f"ucihar:{folder / 'UCI HAR Dataset' / 'train'}")
    (folder / "UCI HAR Dataset" / "test" / "Inertial Signals" / "body_gyro_y_test.txt").unlink()
    for look in (check, load):
        with pytest.raises(DataError, match=r"body_gyro_y_test\.txt"):
            look(f"ucihar:{folder}")
    check(f"ucihar:{folder}?split=train")
    (folder / "UCI HAR Dataset" / "train" / "subject_train.txt").unlink()
    with pytest.raises(DataError, match=r"'subject_train\.txt': no such file"):
        check(f"ucihar:{folder}?split=train")
    with pytest.raises(ConfigError, match="'subject'"):
        check(f"ucihar:{folder}?subjects=1")


@pytest.mark.parametrize(
    "file, change, words",
    [
        ("train/Inertial Signals/total_acc_z_train.txt", lambda t: t[: len(t) // 2], "has [67] lines, expected 12"),
        ("train/Inertial Signals/total_acc_z_train.txt", lambda t: t + t, "has 24 lines, expected 12"),
        ("train/Inertial Signals/total_acc_z_train.txt", lambda t: t.replace("e-01", "e+xx", 1), "cannot be read"),
        ("train/Inertial Signals/total_acc_z_train.txt", lambda t: t.replace(t[:16], "", 1), "cannot be read"),
        ("train/Inertial Signals/body_acc_x_train.txt", lambda t: "1.0 2.0\n" * 12, "has 2 numbers in each line"),
        ("train/Inertial Signals/body_acc_x_train.txt", lambda t: t.replace(t[:16], "  nan", 1), "NaN or infinity"),
        ("train/y_train.txt", lambda t: t + "3\n", r"subject_train\.txt' has 12 lines, expected 13"),
        ("train/y_train.txt", lambda t: t.replace("5", "5.5", 1), r"y_train\.txt' has '5\.5' in line 1"),
        ("train/y_train.txt", lambda t: t.replace("5", "0", 1), "has the label 0"),
        ("train/y_train.txt", lambda t: t.replace("5", "7", 1), "names 6 activities, expected 7"),
        ("train/subject_train.txt", lambda t: "-" + t, "has '-1' in line 1"),
        ("activity_labels.txt", lambda t: t.replace("2 ", "3 "), "count from 1"),
        ("activity_labels.txt", lambda t: "", "0 lines"),
    ],
)
def test_damaged_files_are_named_with_what_was_found(folder, file, change, words):
    path = folder / "UCI HAR Dataset" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=words):
        load(f"ucihar:{folder}?split=train")


def test_a_file_far_too_large_is_not_read(folder, monkeypatch):
    monkeypatch.setattr("edge_agent.data.sets._layouts.MAX_TEXT_BYTES", 1000)
    with pytest.raises(DataError, match=r"body_acc_x_train\.txt' has \d+ bytes, expected text of at most 1000"):
        load(f"ucihar:{folder}")

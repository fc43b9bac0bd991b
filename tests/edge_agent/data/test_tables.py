"""Tables as recordings and as inputs, and everything that can be wrong with a table."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import from_files, load, split

SPEC = WindowInput(channels=2, length=4, stride=2)


def write(path, header, rows, *, delimiter=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(delimiter.join(map(str, row)) for row in (header, *rows)) + "\n", encoding="utf-8")
    return path


def source(path, **options):
    return f"csv:{path}" + ("?" + "&".join(f"{name}={value}" for name, value in options.items()) if options else "")


def test_a_table_gives_the_windows_of_the_same_recordings_as_arrays(tmp_path):
    """Four recordings written twice: as arrays, and as one table whose rows are shuffled."""
    rng = np.random.default_rng(0)
    lengths = [9, 12, 7, 10]
    labels = [0, 1, 0, 1]
    samples = rng.normal(size=(sum(lengths), 2)).astype(np.float32)
    np.savez(tmp_path / "w.npz", samples=samples, lengths=lengths, label=labels, label_names=["run", "walk"])
    owner = np.repeat(np.arange(4), lengths)
    rows = [
        (step, f"r{owner[step]}", ["run", "walk"][labels[owner[step]]], repr(float(x)), repr(float(y)))
        for step, (x, y) in enumerate(samples)
    ]
    path = write(tmp_path / "t.csv", ("t", "file", "activity", "x", "y"), [rows[n] for n in rng.permutation(len(rows))])
    found = load(source(path, label="activity", recording="file", time="t"), SPEC, ("walk", "run"))
    expected = load(f"windows:{tmp_path / 'w.npz'}", SPEC, ("walk", "run"))
    np.testing.assert_array_equal(found.inputs, expected.inputs)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.groups, expected.groups)
    turned = load(source(path, label="activity", recording="file", time="t", columns="y,x"), SPEC)
    np.testing.assert_array_equal(turned.inputs, expected.inputs[:, ::-1])


def test_packed_files_other_delimiters_and_dates_are_read(tmp_path):
    rows = [(f"2026-03-01T10:00:{second:02d}Z", second, 2 * second, "on") for second in range(8)]
    path = write(tmp_path / "t.csv", ("when", "a", "b", "state"), rows[::-1], delimiter=";")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes()))
    for name in ("t.csv", "t.csv.gz"):
        found = load(source(tmp_path / name, label="state", time="when"), SPEC)
        assert found.inputs[:, 0].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
        assert found.class_names == ("on",)


def test_no_window_reaches_over_a_change_or_a_gap(tmp_path):
    """Times 0..9 but 5 is followed by 50: 45 is more than three times the usual step of 1."""
    times = [0, 1, 2, 3, 4, 5, 50, 51, 52, 53]
    rows = [(time, "a", time, 0) for time in times]
    found = load(source(write(tmp_path / "t.csv", ("t", "l", "x", "y"), rows), label="l", time="t"), SPEC)
    assert found.inputs[:, 0].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [50, 51, 52, 53]]
    rows = [(step, "a" if step < 5 else "b", step, 0) for step in range(10)]
    found = load(source(write(tmp_path / "t.csv", ("t", "l", "x", "y"), rows), label="l", columns="x,y"), SPEC)
    assert (found.inputs[:, 0].tolist(), found.labels.tolist()) == ([[0, 1, 2, 3], [5, 6, 7, 8]], [0, 1])


def test_windows_and_rows_are_named_by_their_lines(tmp_path):
    """Also where rows are sorted by time, and empty lines stand between them."""
    path = tmp_path / "t.csv"
    path.write_text("t,l,x,y\n3,a,3,0\n\n2,a,2,0\n1,a,1,0\n4,a,4,0\n5,a,5,0\n6,a,6,0\n", encoding="utf-8")
    found = load(source(path, label="l", time="t"), SPEC)
    assert found.inputs[:, 0].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert found.names == ("t.csv line 5", "t.csv line 2")
    lines = [f"{time},a,0,0,0,{time}" if time else "" for time in (3, 0, 2, 1, 4, 5, 6)]
    path.write_text("\n".join(["t,l,u,v,w,x", *lines]), encoding="utf-8")
    rows = load(source(path, label="l", time="t", row="window"), WindowInput(channels=1, length=4))
    assert rows.names == tuple(f"t.csv line {line}" for line in (5, 4, 2, 6, 7, 8))


def test_rows_with_missing_values_are_refused_or_cut_out(tmp_path):
    rows = [("a", step if step != 4 else "", 0) for step in range(9)]
    path = write(tmp_path / "t.csv", ("l", "x", "y"), rows)
    with pytest.raises(DataError, match="column 'x': 1 values are missing or not finite, first in line 6; gaps=cut"):
        load(source(path, label="l"), SPEC)
    found = load(source(path, label="l", gaps="cut"), SPEC)
    assert found.inputs[:, 0].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    for word in ("nan", "NaN", "inf", "NA", "null"):
        path = write(tmp_path / "t.csv", ("l", "x", "y"), [("a", 1, 2), ("a", word, 3)])
        with pytest.raises(DataError, match="first in line 3"):
            load(source(path, label="l"), SPEC)


@pytest.mark.parametrize(
    "text, options, words",
    [
        ("l,x,y\na,1,2\n", {"label": "lable", "columns": "x,z"}, r"no column 'z'; no column 'lable'"),
        ("l,x,y\na,1,zwei\na,2,drei\n", {"label": "l"}, "column 'y': 2 cells are no number, first 'zwei' in line 2"),
        (
            "l,x,y\na,1,2\nb,2,2\n",
            {},
            "column 'l': 2 cells are no number, .* in line 2; if it has the classes: label=l",
        ),
        ('l;x;y\na;"1,5";2\n', {"label": "l"}, r"first '1,5' in line 2; write decimals with a point"),
        ("l,x,y\na,1_000,2\n", {"label": "l"}, r"'x': 1 cells are no number \(it has an underscore\), first '1_000'"),
        ("l,x,y\na,1,2\na,1e300,-1e39\n", {"label": "l"}, r"'x': 1 cells are beyond .*'1e300' in line 3; .*'-1e39'"),
        (
            "l,x,y\na,1,2\na,1\na,1,2,3\n",
            {"label": "l"},
            "2 rows have 2 cells instead of 3, first line 3; correct or remove such",
        ),
        ("l,x,y\na,1,2\na,1\n", {"label": "l"}, "1 row has 2 cells instead of 3, first line 3; correct or remove such"),
        ("l,x,x\na,1,2\n", {"label": "l"}, "2 columns are named 'x'"),
        ("1,2,3\n4,5,6\n", {}, r"first line has numbers \(1, 2, 3\), expected names of columns"),
        (
            "l,x,y\n,1,2\na,2,3\n",
            {"label": "l"},
            "column 'l': 1 labels are missing, first in line 2; gaps=cut leaves these",
        ),
        ("t,x,y\n1,1,2\n1,2,3\n", {"time": "t"}, r"1 rows have the time of another one, first in line 3; .*recording="),
        ("t,x,y\nnoon,1,2\n", {"time": "t"}, "column 't': 1 cells are no number or date, first 'noon' in line 2"),
        ("t,x,y\n,1,2\n", {"time": "t", "gaps": "cut"}, "column 't': 1 values are missing .*; correct them"),
        ("l,x,y\n", {"label": "l"}, "has no rows of data$"),
        (
            "l,x,y\na,,2\na,,3\n",
            {"label": "l", "gaps": "cut"},
            "gaps=cut leaves out all 2, as values are missing in each",
        ),
        (
            "l,u,x,y\n" + "a,1,1,2\n" * 8,
            {"label": "l"},
            r"(?s)1 of 1.*\(8, 3\), expected \(time, 2\); .* choose 2 columns",
        ),
        ("l,x,y\n" + "a" * 257 + ",1,2\n", {"label": "l"}, "column 'l': 1 cells are longer than 256 characters"),
        ("", {"label": "l"}, "no column 'l'"),
        ("l\na\n", {"label": "l"}, "no column of values is left"),
        ("l,x,y\na,1,2\n", {"label": "l", "target": "x"}, "expected one of them"),
        ("l,x,y\na,1,2\n", {"columns": "x,y"}, r"no column of labels is named \(label=COLUMN\); without labels only"),
    ],
)
def test_tables_of_another_form_are_explained(tmp_path, text, options, words):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        load(source(tmp_path / "t.csv", **options), SPEC)


def test_a_file_without_options_says_how_to_give_some(tmp_path):
    path = write(tmp_path / "t.csv", ("l", "x", "y"), [("a", 1, 2)] * 9)
    with pytest.raises(
        DataError, match=r"column 'l': 9 cells are no number.*; --data 'csv:.*t\.csv\?columns=NAME,NAME'"
    ):
        from_files([str(path)], SPEC)


def test_files_that_are_no_tables_are_refused(tmp_path):
    for name, content in (
        ("t.csv", b"\xff\xfe\x00binary"),
        ("t.csv.gz", b"no gzip"),
        ("u.csv.gz", gzip.compress(b"a")[:9]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            load(source(tmp_path / name, label="l"), SPEC)
    with pytest.raises(DataError, match="cannot be read: "):
        load(source(tmp_path / "nowhere.csv", label="l"), SPEC)
    with pytest.raises(ConfigError, match="did you mean 'label'"):
        load(source(tmp_path / "t.csv", lable="l"), SPEC)


def test_a_line_without_end_is_not_read_whole(tmp_path):
    import tracemalloc

    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"l,x,y\n" + bytes(100 << 20)))
    tracemalloc.start()
    with pytest.raises(DataError):
        load(source(tmp_path / "t.csv.gz", label="l"), SPEC)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_recordings_of_a_column_or_of_files_are_held_out_whole(tmp_path):
    for number in range(8):
        rows = [(number, step) for step in range(12)]
        write(tmp_path / "d" / ("walk" if number % 2 else "run") / f"{number}.csv", ("x", "y"), rows)
    samples = load(source(tmp_path / "d"), SPEC)
    assert samples.class_names == ("run", "walk")
    train, test = split(samples, 0.25, seed=0)
    assert not {*train.groups.tolist()} & {*test.groups.tolist()}
    assert [len({*part.groups[part.labels == label].tolist()}) for part in (train, test) for label in (0, 1)] == [
        3,
        3,
        1,
        1,
    ]
    assert len(train) + len(test) == len(samples)
    names = {*split(samples, 0.25, seed=1)[1].names}
    assert names != {*test.names}, "the seed decides"


def test_the_only_recording_of_a_class_is_cut(tmp_path):
    rows = [("a", "r1", step, 0) for step in range(8)] + [("b", "r2", step, 0) for step in range(8)]
    path = write(tmp_path / "t.csv", ("l", "r", "x", "y"), rows)
    train, test = split(load(source(path, label="l", recording="r"), SPEC), 0.5, seed=0)
    assert train.labels.tolist() == test.labels.tolist() == [0, 1]  # of three windows the one between is left out


def test_people_who_did_everything_are_held_out_with_all_of_it(tmp_path):
    rows = [(person, activity, step, 0) for person in "pqrs" for activity in ("sit", "run", "lie") for step in range(8)]
    path = write(tmp_path / "t.csv", ("person", "activity", "x", "y"), rows)
    train, test = split(load(source(path, label="activity", recording="person"), SPEC), 0.25, seed=0)
    assert (len({*train.groups.tolist()}), len({*test.groups.tolist()})) == (3, 1)
    assert np.bincount(test.labels).tolist() == [3, 3, 3]


def test_rows_may_be_windows_or_images(tmp_path):
    rows = [("b", *range(number, number + 8)) for number in range(3)]
    path = write(tmp_path / "t.csv", ("l", *(f"v{n}" for n in range(8))), rows)
    found = load(source(path, label="l", row="window", shape="2,4"), SPEC)
    assert found.inputs[1].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert load(source(path, label="l", row="window")).input.shape == (1, 8)
    with pytest.raises(DataError, match="8 columns of values are not of shape 3,3; give shape=channels,length"):
        load(source(path, label="l", row="window", shape="3,3"))
    with pytest.raises(DataError, match=r"8 columns of values are not of shape 2,2; give shape=height,width or"):
        load(source(path, label="l", row="image"))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4))
    path = write(tmp_path / "i.csv", ("label", *(f"p{n}" for n in range(16))), [(5, *p.reshape(-1)) for p in pixels])
    spec = ImageInput(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
    found = load(source(path, label="label", row="image"), spec)
    np.testing.assert_allclose(found.inputs[:, 0], pixels / 255, rtol=1e-6)
    assert found.class_names == ("5",)


def test_columns_have_one_order_in_all_files(tmp_path):
    write(tmp_path / "d" / "a" / "1.csv", ("x", "y"), [(1, 2)] * 4)
    other = write(tmp_path / "d" / "b" / "1.csv", ("y", "x"), [(2, 1)] * 4)
    found = load(f"csv:{tmp_path / 'd'}", SPEC)
    assert found.inputs[:, :, 0].tolist() == [[1, 2], [1, 2]]
    write(other, ("z", "x"), [(2, 1)] * 4)
    with pytest.raises(DataError, match=r"columns of values z, x, '.*a/1.csv' has x, y; name those to use"):
        load(f"csv:{tmp_path / 'd'}", SPEC)


def test_numbers_to_predict_are_means_over_the_windows(tmp_path):
    rows = [(step, 0, 10 * step) for step in range(8)]
    path = write(tmp_path / "t.csv", ("x", "y", "heat"), rows)
    found = load(source(path, target="heat"), SPEC, labelled=False)
    assert found.targets.tolist() == [15.0, 35.0, 55.0]
    assert found.take(np.array([2, 0])).targets.tolist() == [55.0, 15.0]
    path = write(tmp_path / "r.csv", ("a", "b", "c", "d", "heat"), [(1, 2, 3, 4, 0.5), (5, 6, 7, 8, -2)])
    found = load(source(path, target="heat", row="window"), labelled=False)
    assert (found.inputs.shape, found.targets.tolist()) == ((2, 1, 4), [0.5, -2.0])


def test_single_tables_are_recordings_without_labels(tmp_path):
    path = write(tmp_path / "t.csv", ("x", "y"), [(step, -step) for step in range(6)])
    found = from_files([str(path)], SPEC)
    assert found.inputs[:, 1].tolist() == [[0, -1, -2, -3], [-2, -3, -4, -5]]
    with pytest.raises(DataError, match="expected names of columns"):
        from_files([str(write(path, (1, 2), [(3, 4)]))], SPEC)

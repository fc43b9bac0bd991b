"""Tables of clients and rows that other programs write, as partitions."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from coordinator.api import simulate
from coordinator.cli import main
from coordinator.simulation import datasets
from coordinator.simulation.index_tables import IndexTable, division_for_validation, is_table, read_table
from coordinator.simulation.plan import Plan
from edge_agent.core.errors import ConfigError, DataError
from edge_agent.core.task import WindowInput
from edge_agent.data import Samples
from edge_agent.data.partition import Division, Pools

ROWS = [
    ("a", 0, "train"), ("a", 3, "train"), ("a", 1, "test"), ("a", 2, "validation"),
    ("B", 4, ""), ("B", 5, "Train"), ("B", 6, "test"),
]  # fmt: skip
SHARES = {"a": ([0, 3], [1]), "b": ([4, 5], [6])}


def csv_of(rows, head="client,row,part"):
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n"


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "pool.npz", inputs=np.arange(8 * 16, dtype=np.uint8).reshape(8, 4, 4), labels=[0, 1] * 4)
    return f"npz:{tmp_path / 'pool.npz'}"


def exit_code_of(*words):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return ended.value.code or 0


def shares_of(division):
    return {name: ([*share.train], [*share.test]) for name, share in division.clients.items()}


def prepared(source, path):
    return datasets.prepare(Plan(data=(source,), partition=str(path), encoder="linear"))


def test_each_form_of_a_table_gives_the_same_partition(source, tmp_path):
    (tmp_path / "t.csv").write_text(csv_of(ROWS), encoding="utf-8")
    (tmp_path / "semicolons.csv").write_text("\ufeff" + csv_of(ROWS).replace(",", ";") + "\n\n", encoding="utf-8")
    objects = [dict(zip(("client", "row", "part"), row, strict=True)) for row in ROWS]
    (tmp_path / "objects.json").write_text(json.dumps(objects), encoding="utf-8")
    columns = {name: [row[name] for row in objects] for name in ("client", "row", "part")}
    (tmp_path / "columns.json").write_text(json.dumps({**columns, "note": "ours"}), encoding="utf-8")
    hashes = set()
    for name in ("t.csv", "semicolons.csv", "objects.json", "columns.json"):
        assert is_table(tmp_path / name)
        _, division, _ = prepared(source, tmp_path / name)
        assert shares_of(division) == SHARES
        hashes.add(division.sha256)
    assert len(hashes) == 1
    division.write(tmp_path / "partition.json")
    assert not is_table(tmp_path / "partition.json")
    assert not is_table(tmp_path / "nowhere.json")


def test_a_table_in_parquet_is_read(source, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    clients, rows, parts = map(list, zip(*ROWS, strict=True))
    pq.write_table(pa.table({"client": clients, "row": rows, "part": parts, "x": rows}), tmp_path / "t.parquet")
    assert shares_of(prepared(source, tmp_path / "t.parquet")[1]) == SHARES
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:300])
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        read_table(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"klient": clients}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"(?s)no column 'client' \(is 'klient' meant\?\).*no column 'row'"):
        read_table(tmp_path / "other.parquet")


def test_rows_for_validation_are_neither_trained_nor_tested_on_and_make_a_second_partition(source, tmp_path):
    (tmp_path / "t.csv").write_text(csv_of(ROWS), encoding="utf-8")
    pools, _, _ = prepared(source, tmp_path / "t.csv")
    second = division_for_validation(tmp_path / "t.csv", pools)
    assert shares_of(second) == {"a": ([0, 3], [2]), "b": ([4, 5], [])}
    (tmp_path / "t.csv").write_text(csv_of(ROWS[:3]), encoding="utf-8")
    assert division_for_validation(tmp_path / "t.csv", pools) is None


def test_test_rows_count_in_the_test_part_of_the_data_where_there_is_one(tmp_path):
    for part, count in (("train", 4), ("test", 3)):
        (tmp_path / part).mkdir()
        users = {"x": [[0.5] * 16] * count, "y": [0] * count}
        content = {"users": ["u"], "num_samples": [count], "user_data": {"u": users}}
        (tmp_path / part / "a.json").write_text(json.dumps(content), encoding="utf-8")
    source = f"leaf:{tmp_path}?shape=4,4"
    (tmp_path / "t.csv").write_text(csv_of([("a", 0, "train"), ("a", 0, "test"), ("a", 3, "validation")]))
    pools, division, _ = prepared(source, tmp_path / "t.csv")
    assert shares_of(division) == {"a": ([0], [0])}, "row 0 of either part is another sample"
    assert (division.pool.train_samples, division.pool.test_samples) == (4, 3)
    second = division_for_validation(tmp_path / "t.csv", pools)
    assert shares_of(second) == {"a": ([0], [3])}
    assert second.pool.test_samples is None
    (tmp_path / "t.csv").write_text(csv_of([("a", 0, "train"), ("a", 3, "test")]))
    with pytest.raises(ConfigError, match=r"rows of part test beyond 0\.\.2: 3 \(line 3\)"):
        prepared(source, tmp_path / "t.csv")


def test_all_mistakes_of_the_rows_are_listed_with_their_lines(source, tmp_path):
    rows = [("a", 0, ""), ("a", 0, "test"), ("a", 8, ""), ("a", 9, "test"), ("b", 1, "test"), ("c", 2, "validation")]
    (tmp_path / "t.csv").write_text(csv_of(rows), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepared(source, tmp_path / "t.csv")
    assert caught.value.mistakes == (
        "rows of part train beyond 0..7: 8 (line 4)",
        "rows of part test beyond 0..7: 9 (line 5)",
        "rows that their client has already, in the same or another part (line 3)",
        "2 clients without training samples: b, c",
    )


def test_all_cells_that_hold_something_else_are_listed_with_their_lines(tmp_path):
    rows = [("", 0, ""), ("a", "1.5", ""), ("a", -1, ""), ("a", "x", "tst"), ("b", 10**30, "")]
    (tmp_path / "t.csv").write_text(csv_of(rows), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_table(tmp_path / "t.csv")
    assert caught.value.mistakes == (
        "clients that are no names: expected text of at most 256 characters, or whole numbers (line 2)",
        "rows that are no whole numbers from 0 on (line 3, 4, 5, 6)",
        "unknown parts: expected train, test, validation (line 5)",
    )
    (tmp_path / "t.json").write_text('[{"client": 1, "row": true}, {"client": 2.5, "row": 1}, {"row": 3}]')
    with pytest.raises(ConfigError, match=r"(?s)no names.*\(line 2, 3\).*no whole numbers from 0 on \(line 1\)"):
        read_table(tmp_path / "t.json")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.csv", "client,row\n", "has no entries"),
        ("t.csv", "", "no column 'client'; it has none"),
        ("t.csv", "client,row\na,1,2\nb\n", r"(?s)3 cells instead of 2 \(line 2\).*1 cells instead of 2 \(line 3\)"),
        ("t.csv", "row,row,client\n1,2,a\n", "columns with one name"),
        ("t.csv", b"\xff\xfe", "cannot be read as an index table"),
        ("t.json", '{"client": ["a"], "row": 1}', "column 'row' is no list"),
        ("t.json", '{"client": ["a"], "row": [1, 2]}', "columns of different lengths: client 1, row 2"),
        ("t.json", "[1, {}]", r"entries that are no objects \(line 1\)"),
        ("t.json", "[" * 50_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_tables_say_what_is_expected(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((DataError, ConfigError), match=message):
        read_table(path)


def test_tables_that_would_not_fit_into_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """A million rows of one value take kilobytes in Parquet, an empty list two bytes in JSON."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    count = 1_000_000
    client = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["a"])
    pq.write_table(pa.table({"client": client, "row": pa.array(np.zeros(count, np.int64))}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    (tmp_path / "t.json").write_text("[" + "{}," * 100_000 + "{}]")
    (tmp_path / "t.csv").write_text("client,row\n" + "a,1\n" * 300_000)
    monkeypatch.setattr("coordinator.simulation.index_tables.memory_budget_bytes", lambda: 2 << 20)
    for name in ("t.parquet", "t.json", "t.csv"):
        assert is_table(tmp_path / name)
        with pytest.raises(DataError, match=r"MB of memory as an index table, and 8 MB are free here; name fewer rows"):
            read_table(tmp_path / name)


def test_a_text_in_place_of_a_name_is_refused_and_kept_in_part(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"client": ["x" * 100_000, "a"], "row": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"no names: expected text of at most 256 characters.*\(line 1\)"):
        read_table(tmp_path / "t.parquet")


def test_one_sample_of_several_clients_is_a_warning(source, tmp_path, caplog):
    (tmp_path / "t.csv").write_text(csv_of([("a", 0, ""), ("b", 0, ""), ("b", 1, "")]), encoding="utf-8")
    prepared(source, tmp_path / "t.csv")
    assert "shared_rows" in caplog.text
    assert "count=1" in caplog.text


def test_the_command_writes_partitions_that_simulations_read(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(csv_of(ROWS), encoding="utf-8")
    assert exit_code_of("partition", "--from", "t.csv", "--data", source, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["file"], shown["validation_file"]) == ("partition.json", "partition-validation.json")
    assert shares_of(Division.read(tmp_path / "partition.json")) == SHARES
    assert shares_of(Division.read(tmp_path / "partition-validation.json"))["a"] == ([0, 3], [2])
    by_table = simulate(
        "local", data=source, partition="t.csv", encoder="linear", rounds=1, local=False, engine="serial"
    )
    by_file = simulate(
        "local", data=source, partition="partition.json", encoder="linear", rounds=1, local=False, engine="serial"
    )
    assert by_table.clients == by_file.clients
    assert by_table.summary["partition_hash"] == by_file.summary["partition_hash"]


def test_the_command_says_what_is_missing(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(csv_of(ROWS), encoding="utf-8")
    (tmp_path / "p.json").write_text('{"pool": {}, "clients": {}}', encoding="utf-8")
    for arguments, message in (
        ([], "no rule: give one"),
        (["iid", "--from", "t.csv"], "rule iid and --from t.csv: give one of them"),
        (["--from", "u.csv"], "there is no such file"),
        (["--from", "p.json"], "no index table"),
    ):
        assert exit_code_of("partition", *arguments, "--data", source) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_the_clients_of_a_long_table_are_grouped_in_one_pass(tmp_path):
    """Looking through all lines for each client would take 400 million comparisons of text."""
    count = 200_000
    clients = np.repeat([f"c{number}" for number in range(2000)], count // 2000)
    table = IndexTable(tmp_path / "t.csv", clients, np.arange(count), np.zeros(count, np.int64), "0" * 64)
    labels = np.zeros(count, np.int64)
    spec = WindowInput(channels=1, length=4)
    pools = Pools(Samples(np.zeros((count, 1), np.float32), labels, ("a",), spec))
    begin = time.process_time()
    division = table.divide(pools)
    assert time.process_time() - begin < 10, "half a second here"
    assert division.clients["c1999"].train == tuple(range(count - 100, count))

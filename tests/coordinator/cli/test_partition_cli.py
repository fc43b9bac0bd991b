"""``headwater partition``: the file that it writes, what a simulation makes of it, and the picture."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from coordinator.report.pictures import picture
from coordinator.report.run_charts import MOST_CELLS, partition
from coordinator.simulation.datasets import Pools, divide
from coordinator.simulation.plan import Plan
from coordinator.simulation.setup import Prepared
from edge_agent.core.errors import UsageError
from edge_agent.core.task import ImageInput
from edge_agent.data import Samples
from edge_agent.data.partition import Division


@pytest.fixture
def call(call, tmp_path, monkeypatch):
    """The command in a folder with 90 images."""
    monkeypatch.chdir(tmp_path)
    labels = np.arange(90) % 3
    inputs = np.random.default_rng(0).integers(0, 256, (90, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "i.npz", inputs=inputs, labels=labels, class_names=np.array(["a", "b", "c"]))
    return functools.partial(call, "partition")


def test_the_file_says_who_has_what_and_the_counts_are_those_of_the_labels(call, tmp_path):
    code, out, err = call("dirichlet", "--alpha", 0.5, "--clients", 4, "--data", "npz:i.npz", "--json")
    assert code == 0, err
    told = json.loads(out)
    division = Division.read(tmp_path / "partition.json")
    assert told["hash"] == division.sha256
    for one in told["clients"]:
        share = division.clients[one["id"]]
        for part, rows in (("train", share.train), ("test", share.test)):
            assert one[part] == [sum(row % 3 == label for row in rows) for label in range(3)]
    assert sum(sum(one["train"]) + sum(one["test"]) for one in told["clients"]) == 90


def test_a_simulation_with_another_seed_takes_the_same_rows_and_says_the_same_hash(call, tmp_path):
    assert call("iid", "--clients", 3, "--data", "npz:i.npz", "--seed", 4, "--out", "mine.json")[0] == 0
    plan = Plan(data=("npz:i.npz",), folder=tmp_path, partition="mine.json", seed=9, device="cpu")
    assert Prepared.of(plan).division == Division.read(tmp_path / "mine.json")


def test_a_saved_file_is_looked_at_again(call):
    _, first, _ = call("pathological", "--classes-each", 1, "--clients", 3, "--data", "npz:i.npz", "--json")
    _, again, _ = call("partition.json", "--data", "npz:i.npz", "--out", "copy.json", "--json")
    first = json.loads(first)
    again = json.loads(again)
    assert again["clients"] == first["clients"]
    assert [sum(map(bool, one["train"])) for one in first["clients"]] == [1, 1, 1]


@pytest.mark.usefixtures("pictures")
def test_a_table_and_a_picture_for_people(call, tmp_path):
    code, out, err = call("iid", "--clients", 3, "--data", "npz:i.npz", "--plot", "plots/who.svg", "--seed", 7)
    assert code == 0, err
    drawn = (tmp_path / "plots" / "who.svg").read_text()
    assert all(word in drawn for word in ("iid", "npz:i.npz", "seed 7")), "the title says which partition it is"
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("c")][1:] == [
        ["c0", "23"], ["c1", "23"], ["c2", "23"],
    ] or "c0" in out  # fmt: skip
    assert ET.parse(tmp_path / "plots" / "who.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("clients", [1, 60, 61])
@pytest.mark.usefixtures("pictures")
def test_a_partition_of_any_size_is_one_picture(clients):
    told = {"rule": "iid", "classes": ["a", "b"], "clients": [{"id": f"c{n}", "train": [n, 3]} for n in range(clients)]}
    chart = partition(told, 1000)
    assert (chart.rows, len(chart.columns)) == (("a", "b"), clients)
    assert [line[-1] for line in chart.values] == [clients - 1, 3]
    assert picture([chart], "png").startswith(b"\x89PNG")
    assert picture([chart], "svg") == picture([chart], "svg")
    assert len(partition(told).columns) == min(clients, MOST_CELLS)
    assert ("Shown: the first 60 of 61 clients." in partition(told).caption) is (clients > 60)


@pytest.mark.parametrize(
    "words, said",
    [
        (("dirichlet", "--data", "npz:i.npz"), "  - partition dirichlet needs alpha"),
        (("quantity", "--data", "npz:i.npz"), "  - partition quantity needs alpha"),
        (("iid",), "no data"),
        (("idd", "--data", "npz:i.npz"), "did you mean 'iid'"),
        (("iid", "--data", "npz:i.npz", "--clients", 3, "--plot", "who.gif"), "'.gif'"),
        (("iid", "--data", "npz:i.npz", "--classes-each", 3), "classes_each = 3 has no effect on partition iid"),
        (("iid", "--data", "npz:i.npz", "--clients", 200), "90 samples for 200 clients"),
        (("pathological", "--data", "npz:i.npz", "--clients", 60), "client 0 gets"),
        (("fedrir_dirichlet", "--data", "npz:i.npz"), "partition fedrir_dirichlet needs alpha"),
        (("fedrir_dirichlet", "--alpha", 1, "--data", "digits:optdigits", "--size", 3), "size = 3 has no effect on"),
    ],
)
def test_what_cannot_be_is_told_in_words(call, words, said):
    code, _, err = call(*words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_fedrirs_rules_draw_test_samples_at_random_from_one_pool(call):
    words = ("--clients", 3, "--data", "npz:i.npz", "--json")
    code, out, err = call("fedrir_dirichlet", "--alpha", 5, *words)
    assert code == 0, err
    clients = json.loads(out)["clients"]
    for client in clients:
        held = sum(client["train"]) + sum(client["test"])
        assert sum(client["train"]) == int(0.75 * held)
        assert held >= 15, "half of an equal share of 90"
    code, out, err = call("fedrir_pathological", *words, "--out", "other.json", "--classes-each", 1)
    assert code == 0, err
    assert all(sum(count > 0 for count in client["train"]) == 1 for client in json.loads(out)["clients"])


@pytest.mark.parametrize(
    "tested, groups, said",
    [(True, None, r"give both as one pool, for example npz:i.npz\?split=all"), (False, np.arange(40), "recordings")],
)
def test_fedrirs_rules_refuse_a_test_part_of_the_datas_own_and_recordings(tested, groups, said):
    labels = np.arange(40) % 2
    pool = Samples(
        np.zeros((40, 1, 4, 4), np.uint8), labels, ("a", "b"), ImageInput(channels=1, height=4, width=4), groups
    )
    plan = Plan(data=("npz:i.npz",), partition="fedrir_pathological", clients=2)
    with pytest.raises(UsageError, match=said):
        divide(plan, Pools(pool, pool if tested else None))


def test_a_partition_that_others_rely_on_is_not_replaced(call, tmp_path):
    assert call("iid", "--clients", 3, "--data", "npz:i.npz")[0] == 0
    before = (tmp_path / "partition.json").read_bytes()
    for words in (("iid", "--seed", 1), ("partition.json", "--validation", 0.5, "--out", "partition.json")):
        code, _, err = call(*words, "--data", "npz:i.npz", *(("--clients", 3) if words[0] == "iid" else ()))
        assert code == 2
        assert "holds another partition" in err
    # Its table is shown all the same, and the file that the message proposes takes it.
    code, out, err = call("iid", "--seed", 1, "--clients", 3, "--data", "npz:i.npz")
    assert (code, "3 clients with" in out) == (2, True)
    proposed = re.search(r"for example --out (\S+),", err)[1]
    assert call("iid", "--seed", 1, "--clients", 3, "--data", "npz:i.npz", "--out", proposed)[0] == 0
    code, out, _ = call("partition.json", "--data", "npz:i.npz")
    assert code == 0
    assert "as it was" in out
    assert (tmp_path / "partition.json").read_bytes() == before
    assert call("iid", "--clients", 3, "--data", "npz:i.npz")[0] == 0, "the same partition again is no loss"


@pytest.mark.parametrize("content", ["my notes", '{"notes": 1}', "[]", ""])
def test_a_file_that_is_no_partition_is_not_replaced(call, tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    code, _, err = call("iid", "--clients", 3, "--data", "npz:i.npz", "--out", "a.txt")
    assert (code, err) == (2, "headwater: a.txt holds something else; choose another --out\n")
    assert (tmp_path / "a.txt").read_text() == content


def test_a_picture_that_cannot_be_is_told_before_anything_is_written(call, tmp_path):
    assert call("iid", "--clients", 3, "--data", "npz:i.npz", "--plot", "who")[0] == 2
    assert not (tmp_path / "partition.json").exists()


def test_options_without_effect_are_refused(call):
    for words, said in (
        (("partition.json", "--test-fraction", 0.5), "has no effect on a saved partition"),
        (("fedpac", "--test-size", 5, "--size", 20), "no test part"),
        (("iid", "--data", "npz:i.npz"), "given twice"),
    ):
        code, _, err = call(*words, "--data", "npz:i.npz")
        assert code == 2, words
        assert said in err


def test_samples_that_some_train_on_and_others_are_scored_on_are_told(call, caplog):
    """Ten classes of a hundred; clients come to the same samples again, and each holds back others of them."""
    labels = np.tile(np.arange(10), 100)
    inputs = np.zeros((1000, 4, 4), np.uint8)
    np.savez("ten.npz", inputs=inputs, labels=labels, class_names=np.array(list("abcdefghij")))
    assert call("fedpac", "--clients", 30, "--size", 60, "--data", "npz:ten.npz", "--out", "f.json")[0] == 0
    assert any("shared_samples" in record.message for record in caplog.records)
    caplog.clear()
    assert call("iid", "--clients", 10, "--data", "npz:ten.npz", "--out", "i.json")[0] == 0
    assert not caplog.records


def test_a_partition_of_domains_goes_with_any_seed(call, tmp_path):
    assert call("domains", "--data", "digits", "--seed", 3, "--out", "d.json")[0] == 0
    plan = Plan(data=("digits",), folder=tmp_path, partition="d.json", seed=8, device="cpu")
    assert Prepared.of(plan).division == Division.read(tmp_path / "d.json")

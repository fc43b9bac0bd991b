"""The users of a data set as the clients of a simulation."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coordinator.api import simulate
from coordinator.simulation import datasets
from coordinator.simulation.plan import Plan
from coordinator.simulation.users import client_names
from edge_agent.core.errors import UsageError

SMALL = {"encoder": "linear", "partition": "users"}


def save(path, users):
    """A file of LEAF; the pixels of a user are the user's number, so that rows can be told apart."""
    data = {name: {"x": [[number / 255] * 16] * len(labels), "y": labels} for name, (number, labels) in users.items()}
    counts = [len(labels) for _, labels in users.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": [*users], "num_samples": counts, "user_data": data}
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def leaf(tmp_path):
    save(tmp_path / "train" / "a.json", {"Ann B": (10, [0, 1, 0]), "bob": (20, [1, 1]), "eve": (40, [0])})
    save(tmp_path / "test" / "a.json", {"Ann B": (10, [1]), "bob": (20, [0, 1]), "strange": (30, [0])})
    return f"leaf:{tmp_path}?shape=4,4"


def test_each_user_trains_and_tests_on_its_own_samples(leaf, caplog):
    pools, division, _ = datasets.prepare(Plan(data=(leaf,), **SMALL))
    assert {name: (len(share.train), len(share.test)) for name, share in division.clients.items()} == {
        "ann-b": (3, 1), "bob": (2, 2), "eve": (1, 0),
    }  # fmt: skip
    for name, number in (("ann-b", 10), ("bob", 20)):
        for part in pools.rows_of(division.clients[name]):
            pixels = (part.inputs * 0.5 + 0.5) * 255
            assert np.allclose(pixels, number, atol=1e-3)
    assert "users_without_training_samples" in caplog.text
    assert "first=strange" in caplog.text


def test_a_run_of_users_is_one_of_these_clients(leaf):
    result = simulate("fedavg", data=leaf, partition="users", encoder="linear", rounds=1, local=False, engine="serial")
    assert sorted(result.clients) == ["ann-b", "bob", "eve"]


def test_without_a_test_part_each_user_holds_out_a_share(leaf, tmp_path):
    source = leaf.replace("?", "?split=train&")
    _, division, _ = datasets.prepare(Plan(data=(source,), test_fraction=0.5, **SMALL))
    assert division.pool.test_samples is None
    assert len(division.clients["ann-b"].test) == 1


def test_other_test_users_and_sources_without_users_say_what_to_do(leaf, tmp_path):
    save(tmp_path / "test" / "a.json", {"strange": (30, [0])})
    with pytest.raises(UsageError, match=r"its 1 test users are none of its 3 training users.*split=all"):
        datasets.prepare(Plan(data=(leaf,), **SMALL))
    with pytest.raises(UsageError, match="these data do not say who made them; expected leaf:DIR"):
        datasets.prepare(Plan(data=("digits:rendered?n=20",), **SMALL))
    with pytest.raises(UsageError, match="--clients 2 with partition users: the data hold 3 of them"):
        save(tmp_path / "test" / "a.json", {"bob": (20, [0])})
        datasets.prepare(Plan(data=(leaf,), clients=2, **SMALL))


def test_a_column_of_users_makes_clients(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    cells = [np.full((4, 4), number, np.uint8).tolist() for number in (10, 20, 10, 20, 20)]
    table = pa.table({"image": cells, "label": [0, 1, 1, 0, 1], "writer": [7, 5, 7, 5, 5]})
    pq.write_table(table, tmp_path / "a.parquet")
    plan = Plan(data=(f"parquet:{tmp_path / 'a.parquet'}?user=writer",), **SMALL)
    pools, division, _ = datasets.prepare(plan)
    assert {name: sorted((*share.train, *share.test)) for name, share in division.clients.items()} == {
        "5": [1, 3, 4], "7": [0, 2],
    }  # fmt: skip
    assert pools.train.inputs[division.clients["7"].train[0], 0, 0, 0] == 10


def test_names_of_clients_are_distinct_and_of_the_allowed_form():
    long = "X" * 70
    names = client_names(["Ann B", "ann-b", "ANN B", "§", "§§", long, long + "Y", "f0001_41"])
    assert [*names.values()][:5] == ["ann-b", "ann-b-2", "ann-b-3", "user", "user-2"]
    assert names[long] == "x" * 63
    assert names[long + "Y"] == "x" * 61 + "-2"
    assert names["f0001_41"] == "f0001_41"

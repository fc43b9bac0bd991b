"""What a table makes of rows that fail, of runs that were cut off, and of mistakes in it."""

from __future__ import annotations

import json

import pytest
from reproduction_harness import TABLE

from coordinator.research.reproduce.cells import Reproduction, read_table
from coordinator.runs.results import end_run
from coordinator.simulation.client_pool import SimulatedClients
from coordinator.state.store import StateFolder
from edge_agent.core.errors import ConfigError, RunFailed, StateError

BAD_ROW = '[[rows]]\nname = "Bad"\nmethod = "{method}"\nparams = {params}\nplan = {plan}\n'
LOCAL = ("t.toml", "--row", "local", "--column", "even")


@pytest.fixture
def trouble(monkeypatch):
    """Lets a run fail once: when clients are to work for the time of that number."""

    def at(number, error):
        work = SimulatedClients.work
        done = []

        def broken(self):
            done.append(1)
            if len(done) == number:
                raise error
            return work(self)

        monkeypatch.setattr(SimulatedClients, "work", broken)

    return at


def bad_rows(*rows):
    """The table with these rows more, each (method, params, plan)."""
    start = TABLE.index("[[promises]]")
    more = "".join(
        BAD_ROW.replace("Bad", f"Bad {number}").format(method=method, params=params, plan=plan)
        for number, (method, params, plan) in enumerate(rows, 1)
    )
    return TABLE[:start] + more + TABLE[start:]


# --- rows that failed, once more -------------------------------------------------------------------------------------


def test_a_row_that_an_engine_let_down_is_gone_on_with_where_it_was(place, call, trouble):
    whole = json.loads(call(*LOCAL, "--out", "whole", "--json")[1])
    trouble(5, RunFailed("workers cannot start"))
    code, out, err = call(*LOCAL)
    assert code == 1
    assert "Local, even, seed 0 failed: workers cannot start; --again tries once more" in err
    assert "failed: workers cannot start" in out
    assert "1 of 1" not in call(*LOCAL)[2], "not without --again"
    code, out, err = call(*LOCAL, "--again", "--json")
    assert code == 0, err
    assert "round 2 of 2" in err
    assert "round 1 of 2" not in err
    assert {**json.loads(out), "folder": ""} == {**whole, "folder": ""}
    assert not (place / "reproduce-t" / "local--even--seed0" / "failed.json").exists()


def test_a_row_that_stops_on_its_way_to_more_rounds_has_no_result_until_it_has_them(place, call, trouble):
    whole = json.loads(call(*LOCAL, "--out", "whole", "--json")[1])
    assert call(*LOCAL, "--rounds", 1)[0] == 0
    assert "1 of 2 rounds done" in call(*LOCAL, "--show")[1]
    trouble(1, RunFailed("workers cannot start"))
    code, out, _ = call(*LOCAL)
    assert code == 1
    assert "failed: workers cannot start" in out
    code, out, err = call(*LOCAL, "--again", "--json")
    assert code == 0, err
    assert "round 2 of 2" in err
    assert "round 1 of 2" not in err
    assert {**json.loads(out), "folder": ""} == {**whole, "folder": ""}


def test_a_row_whose_run_has_failed_for_good_is_begun_anew(place, call, trouble):
    trouble(5, RunFailed("no more"))
    assert call(*LOCAL)[0] == 1
    folder = place / "reproduce-t" / "local--even--seed0"
    with StateFolder(folder).open("test") as state:
        end_run(state, "run-0001", "run_failed", "no more")
    code, _, err = call(*LOCAL, "--again")
    assert code == 0, err
    assert "round 1 of 2" in err


def test_trying_again_keeps_what_a_run_has_done_although_it_is_asked_for_otherwise_now(place, call, trouble):
    trouble(5, RunFailed("workers cannot start"))
    assert call(*LOCAL)[0] == 1
    code, _, err = call(*LOCAL, "--rounds", 1, "--again")
    assert code == 2
    assert "rounds 2, now 1" in err
    assert "round 2 of 2" in call(*LOCAL, "--again")[2]


def test_a_row_that_was_mended_after_its_training_failed_begins_anew(place, call):
    wrong = TABLE.replace("lr = 0.01", "lr = 1e30")
    (place / "t.toml").write_text(wrong)
    words = ("t.toml", "--column", "even")
    code, _, err = call(*words)
    assert code == 1
    assert "loss became nan" in err
    assert "--resume" not in err
    local = (place / "reproduce-t" / "local--even--seed0" / "result.json").read_bytes()
    assert call(*words, "--again")[0] == 1
    (place / "t.toml").write_text(TABLE)
    code, _, err = call(*words)
    assert code == 2
    assert "fed-avg--even--seed0 has other settings" in err
    assert "remove it to restart that row" in err
    code, _, err = call(*words, "--again")
    assert code == 0, err
    assert (place / "reproduce-t" / "local--even--seed0" / "result.json").read_bytes() == local


def test_a_disk_that_is_full_ends_the_command_and_the_same_one_goes_on(place, call, trouble):
    trouble(5, StateError("no room"))
    code, _, err = call(*LOCAL)
    assert code == 1
    assert "Local, even, seed 0: reproduce-t/local--even--seed0: the simulation has stopped: no room; mend that" in err
    assert "; then the same command resumes" in err
    assert "--resume" not in err
    assert "round 1 of 2" not in call(*LOCAL)[2]


def test_a_damaged_run_that_was_not_asked_for_is_left_alone(place, call):
    assert call("t.toml", "--row", "fed avg", "--column", "odd")[0] == 0
    (place / "reproduce-t" / "fed-avg--odd--seed0" / "simulation.json").write_text("{")
    code, _, err = call(*LOCAL)
    assert code == 0, err


def test_clients_that_are_missing_at_the_end_are_told_in_the_verdict(place, call):
    assert call(*LOCAL)[0] == 0
    path = place / "reproduce-t" / "local--even--seed0" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "failed": {"c1": "why"}}))
    code, out, _ = call(*LOCAL, "--json")
    assert code == 0
    assert ", without 1 client" in json.loads(out)["cells"][0]["verdict"]


# --- mistakes of rows ------------------------------------------------------------------------------------------------


def test_mistakes_of_all_rows_are_told_at_once_before_anything_is_run(place, call):
    rows = (
        ("fedfoo", "{}", "{}"),
        ("fedavg", "{ lr = -1 }", '{ encoder = "small_cn" }'),
        ("local", "{}", "{ size = 9 }"),
    )
    (place / "t.toml").write_text(bad_rows(*rows))
    code, _, err = call(*LOCAL)
    assert code == 2
    assert "t.toml: 4 mistakes" in err
    for words in (
        "row 'Bad 1', columns 'even', 'odd': unknown method 'fedfoo'",
        "row 'Bad 2', columns 'even', 'odd': parameters of method 'fedavg': lr = -1",
        "row 'Bad 2', columns 'even', 'odd': unknown encoder 'small_cn': did you mean 'small_cnn'",
        "row 'Bad 3', column 'odd': plan: size = 9 has no effect on partition dirichlet",
    ):
        assert f"  - {words}" in err
    assert not (place / "reproduce-t").exists()


def test_a_mistake_of_all_rows_is_told_once(place, call):
    code, _, err = call("t.toml", "--rounds", 0, "--seeds", "0,1")
    assert code == 2
    assert "t.toml: 1 mistake\n  - all rows: plan: rounds = 0" in err


def test_what_a_row_is_to_begin_with_is_looked_for_before_another_is_run(place, call):
    (place / "x").write_text("no weights")
    (place / "t.toml").write_text(
        bad_rows(
            ("local", "{}", '{ data = "npz:other.npz" }'), ("local", "{}", '{ weights = "x" }'),
            ("local", "{}", '{ device = "cuda:99" }'),
        )
    )  # fmt: skip
    code, _, err = call("t.toml", "--column", "even")
    assert code == 2
    assert "t.toml: 3 mistakes" in err
    assert "row 'Bad 1', column 'even': npz:other.npz: there is no" in err
    assert "Get it from the shelf." in err
    assert "row 'Bad 2', column 'even': " in err
    assert "is no safetensors file" in err
    assert "row 'Bad 3', column 'even': training.device = 'cuda:99' cannot be used" in err
    assert not (place / "reproduce-t").exists()


def test_a_partition_that_is_not_there_is_looked_for_before_another_row_is_run(place, call):
    text = bad_rows(("local", "{}", '{ partition = "none.json" }')).replace("clients = 3\n", "", 1)
    (place / "t.toml").write_text(text.replace('plan = { partition = "dirichlet", alpha = 0.7, min_size = 2 }\n', ""))
    code, _, err = call("t.toml", "--column", "even")
    assert code == 2
    assert "row 'Bad 1', column 'even': " in err
    assert "none.json: no such file" in err
    assert not (place / "reproduce-t").exists()


def test_what_only_shows_when_a_row_begins_is_its_failure_and_the_others_are_run(place, call):
    rows = bad_rows(("fedavg", "{}", "{ new_clients = 3 }"), ("fedavg", "{}", "{ seed = 1 }"))
    (place / "t.toml").write_text(rows)
    code, out, err = call("t.toml", "--column", "even", "--json")
    assert code == 1
    assert "Bad 1, even, seed 0 failed: new_clients = 3 of 3 clients" in err
    told = {cell["row"]: cell["verdict"] for cell in json.loads(out)["cells"]}
    assert told["Bad 1"].startswith("failed: new_clients = 3 of 3")
    assert told["Bad 2"] == "nothing published"
    assert call("t.toml", "--row", "bad-2", "--column", "even")[0] == 0
    assert "| Bad 1 |" in (place / "reproduce-t" / "table.md").read_text(), "a failure is something that is there"
    (place / "t.toml").write_text(rows.replace("new_clients = 3", "new_clients = 1"))
    code, _, err = call("t.toml", "--column", "even", "--again")
    assert code == 0, err
    assert "1 of 1: Bad 1, even" in err


# --- mistakes of tables ----------------------------------------------------------------------------------------------


def test_mistakes_between_parts_of_a_table_are_counted_and_listed_one_by_one(place):
    text = TABLE.replace("paper = { even = 33.3 }", "paper = { eve = 33.3, od = 1.0 }")
    (place / "t.toml").write_text(text.replace('[[promises]]\nrow = "Local"', '[[promises]]\nrow = "Best"'))
    with pytest.raises(ConfigError) as told:
        read_table("t.toml")
    assert told.value.mistakes == (
        "Fed Avg: no column 'eve'", "Fed Avg: no column 'od'", "promise about 'Best', which is no row",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        (("[plan.params]\nlr = 0.05\nbatch_size = 8", "params = 3"), r"\[plan\]: params = 3: "),
        (("rounds = 2", 'rounds = "few"'), r"\[plan\]: rounds = 'few': "),
        (("min_size = 2 }", "params = [1] }"), r"plan of column 'odd': params = \[1\]: "),
        (("min_size = 2 }", "min_sise = 2 }"), "plan of column 'odd': min_sise: unknown key; did you mean 'min_size'"),
        (('scope = "global"', "plan = { data = 5 }"), "plan of row 'Fed Avg': data = 5: "),
        (('scope = "global"', 'plan = { partition = "idd" }'), "plan of row 'Fed Avg': unknown partition 'idd'"),
    ],
)
def test_fields_of_simulations_of_the_wrong_kind_are_mistakes_of_the_table(place, call, change, words):
    (place / "t.toml").write_text(TABLE.replace(*change))
    with pytest.raises(ConfigError, match=words):
        read_table("t.toml")
    assert call("t.toml", "--rounds", 1)[0] == 2


def test_a_field_that_only_other_parts_of_a_plan_allow_is_no_mistake_of_the_table(place):
    """``alpha`` means nothing without the column's partition."""
    (place / "t.toml").write_text(TABLE.replace("alpha = 0.7, ", "").replace('scope = "global"', "plan.alpha = 0.7"))
    with pytest.raises(ConfigError, match="row 'Local', column 'odd': plan: partition dirichlet needs alpha"):
        Reproduction("t", read_table("t.toml"), place).cells()

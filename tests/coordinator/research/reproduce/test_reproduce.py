"""A published table made again on small data: what is run, what is kept, and what is said about it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from reproduction_harness import TABLE
from safetensors.numpy import save_file

from coordinator.research.reproduce import outcome
from coordinator.research.reproduce.cells import Column, Reproduction, Row, Table, names, read_table
from coordinator.research.reproduce.outcome import panel
from coordinator.simulation.client_pool import SimulatedClients
from edge_agent.core.errors import ConfigError, UsageError

# --- the tables that come with the project ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_table_is_about_methods_and_settings_that_exist(name, tmp_path):
    table = read_table(name)
    changes = {} if "data" in table.plan else {"data": ("digits",)}
    cells = Reproduction(name, table, tmp_path, changes).cells()
    assert len(cells) == len(table.rows) * len(table.columns) * len(table.seeds)
    assert len({cell.folder for cell in cells}) == len(cells)
    assert table.get_data


def test_the_rows_of_a_table_share_their_settings_and_may_differ(place):
    cells = Reproduction("t", read_table("t.toml"), place / "out").cells()
    plans = {(cell.row.name, cell.column.name): cell.plan for cell in cells}
    assert plans["Local", "even"].params == {"lr": 0.05, "batch_size": 8}
    assert plans["Fed Avg", "odd"].params == {"lr": 0.01, "batch_size": 8}
    assert plans["Fed Avg", "odd"].alpha == 0.7
    assert plans["Fed Avg", "even"].partition == "iid"


def test_rows_rest_on_the_values_for_the_data_set_that_they_ask_for(place):
    """Its authors' step size for CIFAR-10 is 0.02, for Fashion-MNIST 0.01."""
    text = (place / "t.toml").read_text().replace("lr = 0.05\n", "").replace('method = "local"', 'method = "fedpac"')
    with_data_set = text.replace('name = "Local"\n', 'name = "Local"\nplan = { paper_for = "cifar-10" }\n', 1)
    (place / "t.toml").write_text(with_data_set)
    table = read_table("t.toml")
    compared = outcome.outcomes(table, Reproduction("t", table, place / "out", rows=("Local",)).cells())
    assert "step size 0.02" in compared[0].footing["optimizer"]


# --- where published values stand ------------------------------------------------------------------------------------


def test_pages_say_where_published_values_stand_and_how_they_were_come_by(place):
    text = (place / "t.toml").read_text()
    ways = {
        "": "Published values: a paper; as printed there.",
        'values = "worked out"\n': "Published values: a paper; worked out from the values printed there.",
        'values = "read from a figure"\n': "Published values: a paper; read from the figure, good to about a point.",
        'values = "quoted"\nquoted_in = "another, Table 3"\n': "Published values: a paper; quoted by another, Table 3.",
    }
    for stated, sentence_of_page in ways.items():
        (place / "s.toml").write_text(stated + text)
        assert list(outcome.source_lines(read_table("s.toml"))) == [sentence_of_page]
    elsewhere = text.replace("paper = { even = 33.3 }", 'paper = { even = 33.3 }\npaper_source = "its appendix"')
    (place / "s.toml").write_text(elsewhere)
    assert list(outcome.source_lines(read_table("s.toml")))[1:] == ["The published value of Fed Avg: its appendix."]
    (place / "s.toml").write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith("paper")))
    (line,) = outcome.source_lines(read_table("s.toml"))
    assert line == "No published values to compare with; rows and settings follow a paper."


@pytest.mark.parametrize("stated", ['values = "quoted"', 'quoted_in = "another, Table 3"'])
def test_a_quotation_names_who_quotes(place, stated):
    (place / "t.toml").write_text(f"{stated}\n{(place / 't.toml').read_text()}")
    with pytest.raises(ConfigError, match="quoted"):
        read_table("t.toml")


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pictures")
def test_a_table_is_run_written_and_compared_with_the_paper(place, call):
    code, out, err = call("t.toml", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [(one["row"], one["column"]) for one in told["cells"]] == [
        ("Local", "even"), ("Fed Avg", "even"), ("Local", "odd"), ("Fed Avg", "odd"),
    ]  # fmt: skip
    folder = place / "reproduce-t"
    result = json.loads((folder / "local--even--seed0" / "result.json").read_text())
    ours = 100 * result["last"]["acc"]["personal"]["clients_mean"]
    assert told["cells"][0]["ours"] == pytest.approx(ours, abs=1e-3)
    assert told["cells"][0]["difference"] == pytest.approx(ours - 40, abs=1e-3)
    assert told["cells"][3]["paper"] is None
    page = (folder / "table.md").read_text()
    assert "Published values: a paper; as printed there." in page
    assert f"| Local | 40.00 | {ours:.2f} |" in page
    assert "*Doubtful:* odd numbers" in page
    assert "- Fed Avg: smaller steps" in page
    assert "headwater reproduce t.toml" in page
    assert json.loads((folder / "table.json").read_text()) == told
    assert ET.parse(folder / "curves.svg").getroot().tag.endswith("svg")
    assert (folder / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_what_the_rows_rest_on_stands_in_all_outputs_and_differences_are_marked(place, call):
    text = (place / "t.toml").read_text()
    stated = '[published_footing]\naugmentation = "flips"\n[[rows]]\nname = "Local"'
    (place / "t.toml").write_text(text.replace('[[rows]]\nname = "Local"', stated, 1))
    code, out, _ = call("t.toml", "--column", "even")
    assert code == 0
    shared = "augmentation: none · encoder: linear (feature_dim 4)"
    local = "≠ Local: optimizer: SGD, step size 0.05, momentum 0.5, weight decay 0 · metric: personal model"
    other = "≠ Fed Avg: optimizer: SGD, step size 0.01, momentum 0.5, weight decay 0 · metric: shared model"
    paper = "the paper: augmentation: flips"
    page = (place / "reproduce-t" / "table.md").read_text()
    for words in (shared, local, other, paper):
        assert words in page
        assert words in " ".join(out.split())
    assert [line.rpartition("| ")[2] for line in page.splitlines() if line.startswith(("| Local", "| Fed Avg"))] == [
        "optimizer, metric |", "optimizer, metric |",
    ]  # fmt: skip
    table = json.loads((place / "reproduce-t" / "table.json").read_text())
    assert table["footing"]["even"]["all_rows"]["encoder"] == "linear (feature_dim 4)"
    assert set(table["footing"]["even"]["differences"]["Fed Avg"]) == {"optimizer", "metric"}
    assert table["cells"][0]["footing"]["partition"] == "iid, 3 clients"


def test_a_row_may_have_a_method_and_an_encoder_of_the_users_own(place, call):
    (place / "mine.py").write_text(
        "from torch import nn\n"
        "from edge_agent.methods.fedavg import FedAvg\n\n\n"
        "class Mine(FedAvg):\n    source = 'here'\n\n\n"
        "class Flat(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Flatten(), nn.Linear(16, 4))\n"
    )
    text = (place / "t.toml").read_text().replace('method = "fedavg"', 'method = "mine.py:Mine"')
    text = text.replace('encoder = "linear"\nencoder_params = { feature_dim = 4 }', 'encoder = "mine.py:Flat"')
    (place / "own.toml").write_text(text)
    words = ("own.toml", "--row", "Fed Avg", "--column", "even", "--rounds", 1)
    code, out, err = call(*words, "--json")
    assert code == 0, err
    (cell,) = json.loads(out)["cells"]
    assert cell["ours"] is not None
    assert cell["footing"]["parts of the model"] == "encoder, head"
    code, _, err = call(*words, "--json")
    assert code == 0, f"it is found again: {err}"
    (place / "own.toml").write_text(text.replace("mine.py:Mine", "mine.py:Yours"))
    code, _, err = call(*words)
    assert (code, "Yours" in err) == (2, True)


OWN_METHOD = """
from edge_agent.methods.fedavg import FedAvg


class Mine(FedAvg):
    def aggregate(self, state, updates):
        return super().aggregate(state, updates)
"""
OWN_ROW = ("t.toml", "--row", "Fed Avg", "--column", "even")


@pytest.fixture
def own_row(place):
    """The file of a user's own method, which a row of the table has."""
    file = place / "mine.py"
    file.write_text(OWN_METHOD)
    text = (place / "t.toml").read_text()
    (place / "t.toml").write_text(text.replace('method = "fedavg"', 'method = "mine.py:Mine"'))
    return file


def test_results_of_an_edited_method_are_not_mixed_with_those_before(own_row, call):
    assert call(*OWN_ROW)[0] == 0
    own_row.write_text(f"{OWN_METHOD}\n# changed\n")
    for words in ((), ("--seeds", "0,1"), ("--rounds", 3), ("--again",)):
        code, _, err = call(*OWN_ROW, *words)
        assert code == 2
        assert "fed-avg--even--seed0: its results are of another source of the method (SHA-256 " in err
        assert "remove it to restart that row" in err
    own_row.write_text(OWN_METHOD)
    assert call(*OWN_ROW)[0] == 0


def test_a_row_whose_own_method_failed_and_was_mended_starts_again(own_row, call):
    own_row.write_text(OWN_METHOD.replace("aggregate(self, state, updates)", "loss(self, client, received)"))
    code, out, err = call(*OWN_ROW)
    assert code == 1, err
    own_row.write_text(OWN_METHOD)
    code, out, err = call(*OWN_ROW, "--again")
    assert code == 0, err
    assert "failed" not in out


def test_what_is_done_is_not_done_again_and_one_more_seed_is_added(place, call):
    assert call("t.toml", "--column", "even")[0] == 0
    _, _, err = call("t.toml", "--column", "even", "--seeds", "0,1")
    assert [line for line in err.splitlines() if " of 2: " in line and "seed" in line] == [
        "1 of 2: Local, even, seed 1, 2 rounds",
        "2 of 2: Fed Avg, even, seed 1, 2 rounds",
    ]
    _, out, err = call("t.toml", "--column", "even", "--seeds", "0,1", "--json")
    assert "seed" not in err
    both = [
        100 * json.loads(path.read_text())["last"]["acc"]["personal"]["clients_mean"]
        for path in sorted(place.glob("reproduce-t/local--even--seed*/result.json"))
    ]
    cell = json.loads(out)["cells"][0]
    assert cell["seeds"] == 2
    assert cell["ours"] == pytest.approx((both[0] + both[1]) / 2, abs=1e-3)
    assert cell["std"] == pytest.approx(abs(both[0] - both[1]) / 2**0.5, abs=1e-3)


def test_a_stopped_table_goes_on_where_it_was(place, call, monkeypatch):
    """Ctrl-C in the second round of the second row; afterwards it is the table of an undisturbed run."""
    whole = json.loads(call("t.toml", "--column", "even", "--out", "whole", "--json")[1])
    work = SimulatedClients.work
    done = []

    def interrupted(self):
        done.append(1)
        if len(done) == 16:
            raise KeyboardInterrupt
        return work(self)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedClients, "work", interrupted)
        code, _, err = call("t.toml", "--column", "even", "--out", "cut")
    assert code == 130
    assert "the same command resumes" in err
    assert not (place / "cut" / "fed-avg--even--seed0" / "result.json").exists()
    assert "| 1 of 2 rounds done |" in (place / "cut" / "table.md").read_text()
    cut = json.loads(call("t.toml", "--column", "even", "--out", "cut", "--json")[1])
    assert {**cut, "folder": ""} == {**whole, "folder": ""}


def test_a_row_that_fails_is_told_and_the_others_go_on(place, call):
    text = TABLE.replace('method = "local"', 'method = "local"\nparams = { lr = 1e30 }')
    (place / "t.toml").write_text(text)
    code, out, err = call("t.toml", "--column", "even")
    assert code == 1
    assert "failed" in err
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line.startswith(("Local", "Fed Avg"))}
    assert "failed" in rows["Local"]
    assert "33.30" in rows["Fed Avg"]


def test_a_failed_row_is_run_again_when_that_is_asked_for(place, call):
    (place / "t.toml").write_text(TABLE.replace('method = "local"', 'method = "local"\nparams = { lr = 1e30 }'))
    assert call("t.toml", "--row", "local", "--column", "even")[0] == 1
    (place / "t.toml").write_text(TABLE)
    assert call("t.toml", "--row", "local", "--column", "even")[0] == 2, "it was asked for otherwise"
    (place / "t.toml").write_text(TABLE.replace('method = "local"', 'method = "local"\nparams = { lr = 1e30 }'))
    code, _, err = call("t.toml", "--row", "local", "--column", "even")
    assert code == 1
    assert "1 of 1" not in err, "not without --again"
    assert "1 of 1" in call("t.toml", "--row", "local", "--column", "even", "--again")[2]


def test_a_row_that_came_to_a_result_after_all_has_not_failed(place, call):
    assert call("t.toml", "--row", "local", "--column", "even")[0] == 0
    (place / "reproduce-t" / "local--even--seed0" / "failed.json").write_text('{"reason": "in use"}')
    code, out, _ = call("t.toml", "--row", "local", "--column", "even")
    assert code == 0
    assert "in use" not in out


def test_a_part_of_a_table_leaves_the_rest_of_it_there(place, call):
    assert call("t.toml", "--column", "even")[0] == 0
    assert call("t.toml", "--row", "local", "--column", "odd")[0] == 0
    page = (place / "reproduce-t" / "table.md").read_text()
    assert "## even" in page
    assert "| Fed Avg | 33.30 |" in page
    before = (place / "reproduce-t" / "table.md").stat().st_mtime_ns
    assert call("t.toml", "--show")[0] == 0
    assert call("t.toml", "--show", "--out", "nowhere")[0] == 0
    assert (place / "reproduce-t" / "table.md").stat().st_mtime_ns == before
    assert not (place / "nowhere").exists()


def test_a_table_is_gone_on_with_from_another_folder(place, call, monkeypatch):
    assert call("t.toml", "--row", "local", "--column", "even", "--data", f"npz:{place}/i.npz")[0] == 0
    (place / "sub").mkdir()
    monkeypatch.chdir(place / "sub")
    words = ("--row", "local", "--column", "even", "--out", "../reproduce-t")
    assert call("../t.toml", *words, "--data", "npz:../i.npz")[0] == 0
    assert call("../t.toml", *words, "--data", "npz:i.npz")[0] == 2


def test_the_command_in_the_table_says_all_that_was_asked_for(place, call):
    words = ("--row", "local", "--column", "even", "--seeds", "3", "--rounds", "1", "--data", "npz:i.npz")
    assert call("t.toml", *words)[0] == 0
    page = (place / "reproduce-t" / "table.md").read_text()
    command = page.split("```")[1].split()
    assert command[:2] == ["headwater", "reproduce"]
    assert call(*command[2:])[0] == 0
    assert set(words) <= set(command)


def test_best_is_chosen_by_the_tables_own_average_and_among_rounds_with_everybody(place):
    """Round 3 has the highest samples_mean of those with all three clients; round 4 has one client only."""
    table = read_table("t.toml").model_copy(update={"average": "samples_mean", "when": "best"})

    def scored(clients, clients_mean, samples_mean):
        return {"clients": clients, "clients_mean": clients_mean, "samples_mean": samples_mean}

    acc = [scored(3, 0.9, 0.5), scored(3, 0.2, 0.3), scored(3, 0.4, 0.7), scored(1, 1.0, 1.0)]
    result = {
        "clients": 3, "new_clients": 0, "last": {"rounds_done": 4, "acc": {"personal": scored(3, 0.6, 0.6)}},
        "rounds": [{"round": n, "acc": {"personal": one, "after": one}} for n, one in enumerate(acc, 1)],
    }  # fmt: skip
    assert outcome._percent(result, "personal", table.when, table.average) == pytest.approx(70.0)
    assert outcome._percent(result, "after", "last", table.average) == pytest.approx(70.0)


def test_runs_that_were_asked_for_otherwise_are_not_mixed_in(place, call):
    assert call("t.toml", "--row", "local", "--column", "even")[0] == 0
    code, _, err = call("t.toml", "--rounds", 1)
    assert code == 2
    assert "rounds 2, now 1" in err
    assert "--out" in err


def test_missing_data_are_told_with_where_to_get_them(place, call):
    (place / "i.npz").unlink()
    code, _, err = call("t.toml")
    assert code == 2
    assert "Get it from the shelf." in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("fedpac-t1-fmnist-2",), "did you mean 'fedpac-t1-fmnist-20'"),
        (("t.toml", "--row", "loca"), "did you mean 'local'"),
        (("t.toml", "--seeds", "a"), "--seeds 'a'"),
        (("t.toml", "--seeds", "1,1"), "given twice"),
        (("t.toml", "--rounds", "0"), "rounds"),
        (("absent.toml",), "absent.toml"),
    ],
)
def test_a_request_that_cannot_be_is_told(place, call, words, said):
    code, _, err = call(*words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "change, words",
    [
        (('name = "Fed Avg"', 'name = "local"'), "two rows would have the folder local"),
        (("paper = { even = 33.3 }", "paper = { eve = 33.3 }"), "no column 'eve'"),
        (('[[promises]]\nrow = "Local"', '[[promises]]\nrow = "Best"'), "'Best', which is no row"),
        (("tolerance = 5", "tolerance = 0"), "tolerance"),
        (
            ("tolerance = 5", 'tolerance = 5\npublished_footing = { augment = "flips" }'),
            "'augment', expected one of opt",
        ),
    ],
)
def test_a_table_with_mistakes_is_refused(place, change, words):
    (place / "t.toml").write_text(TABLE.replace(*change))
    with pytest.raises(ConfigError, match=words):
        read_table("t.toml")


def test_a_row_with_a_method_or_parameter_that_is_not_there_is_refused(place):
    table = read_table("t.toml")
    for change, words in (({"method": "fedfoo"}, "did you mean 'fedfomo'"), ({"params": {"warmth": 1}}, "warmth")):
        rows = (table.rows[0].model_copy(update=change),)
        with pytest.raises(UsageError, match=rf"row 'Local'(.|\n)*{words}"):
            Reproduction("t", table.model_copy(update={"rows": rows}), place).cells()


def test_rows_begin_with_weights_that_are_given_and_are_not_mixed_with_others(place, call):
    def write(value):
        save_file({"layers.1.weight": np.full((4, 16), value), "layers.1.bias": np.zeros(4)}, place / "w.safetensors")

    words = ("t.toml", "--row", "Local", "--column", "even", "--weights", "w.safetensors", "--json")
    write(0.25)
    code, _, err = call(*words)
    assert code == 0, err
    found = json.loads(next((place / "reproduce-t").glob("*/result.json")).read_text())
    assert found["weights"]["path"] == str(place / "w.safetensors")
    write(0.5)
    code, _, err = call(*words)
    assert (code, "started with other weights" in err) == (2, True)
    for name, reason in (("absent", "cannot be read"), ("t.toml", "is no safetensors file")):
        code, _, err = call(*words[:-2], name, "--out", "other")
        assert code == 2
        assert reason in err
        assert "shelf" not in err, "it is not the data that are missing"


def test_results_so_far_are_shown_without_files_that_are_not_there(place, call):
    code, out, _ = call("t.toml", "--show")
    assert code == 0
    assert "not run yet" in out
    assert "table.md" not in out
    assert not (place / "reproduce-t").exists()


def test_tables_are_listed(call):
    code, out, _ = call()
    assert code == 0
    assert all(name in out for name in names())


# --- verdicts --------------------------------------------------------------------------------------------------------


def found(values, table, **changes):
    base = outcome.Outcome(table.rows[0], table.columns[0], 1, (2,), None, None, None, None, None, 5.0, **changes)
    by_name = {row.name: row for row in table.rows}
    found_cells = []
    for name, (paper, ours) in values.items():
        by_seed = {} if ours is None else {0: ours}
        found_cells.append(replace(base, row=by_name[name], paper=paper, ours=ours, by_seed=by_seed))
    return found_cells


@pytest.mark.parametrize(
    "paper, ours, words",
    [
        (40.0, 44.9, "within 5"), (40.0, 45.2, "5.20 points above"), (40.0, 30.0, "10.00 points below"),
        (None, 30.0, "nothing published"), (40.0, None, "not run yet"),
    ],
)  # fmt: skip
def test_verdicts_in_words(place, paper, ours, words):
    assert found({"Local": (paper, ours)}, read_table("t.toml"))[0].verdict == words


def test_fewer_rounds_than_the_tables_are_told(place, call):
    table = read_table("t.toml")
    assert found({"Local": (40.0, 30.0)}, table, of_rounds=200)[0].verdict == "10.00 points below, 2 of 200 rounds"
    code, out, _ = call("t.toml", "--row", "local", "--column", "even", "--rounds", 1)
    assert code == 0
    assert "1 of 2 rounds" in out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"of_rounds": 1}, "within 5, 2 rounds in place of 1"),
        ({"of_seeds": 3}, "within 5, 1 of 3 seeds"),
        ({"of_seeds": 3, "trouble": "no memory"}, "within 5, 1 of 3 seeds, a seed failed"),
        ({"of_rounds": 2, "of_seeds": 1}, "within 5"),
    ],
)
def test_a_value_of_other_rounds_or_fewer_seeds_than_the_tables_says_so(place, changes, words):
    assert found({"Local": (40.0, 41.0)}, read_table("t.toml"), **changes)[0].verdict == words


@pytest.mark.parametrize("when, words", [("last", "after the last round, never the best"), ("best", "by test samples")])
def test_the_table_says_of_which_round_its_values_are(place, when, words):
    table = read_table("t.toml").model_copy(update={"when": when})
    assert words in outcome.caveat(table)


@pytest.mark.parametrize("local, other, holds", [(50, 49, True), (49, 50, False), (50, 50, False), (50, None, None)])
def test_the_order_that_a_paper_claims_is_looked_at(place, local, other, holds):
    table = read_table("t.toml")
    (order,) = outcome.check_orders(table, found({"Local": (None, local), "Fed Avg": (None, other)}, table))[:1]
    assert order.holds is holds
    assert order.to_json()["holds"] is holds
    assert isinstance(table, Table)


@pytest.mark.parametrize(
    "mine, others, words",
    [
        (50, {"a": 49, "b": 48}, "The paper's order holds: Best above a, b, by 1.00 points or more."),
        (50, {"a": 49.6, "b": 48}, "The paper's order holds: Best above a, b, by 0.40 points, which is within the noi"),
        (50, {"a": 51, "b": None}, "By the means the paper's order does **not** hold (Best above a, b): a came o"),
        (50, {"a": 49, "b": None}, "The paper's order holds so far: Best above a, by 1.00 points or more; these are 1"),
        (None, {"a": 49, "b": 48}, "The paper's order (Best above a, b) cannot be checked yet: there is nothing to"),
    ],
)
def test_the_order_in_words(place, mine, others, words):
    path = place / "order.toml"
    rows = "".join(f'[[rows]]\nname = "{name}"\nmethod = "local"\n' for name in ("Best", *others))
    text = (place / "t.toml").read_text()
    path.write_text(f'{text[: text.index("[[rows]]")]}{rows}[[promises]]\nrow = "Best"\n')
    table = read_table("order.toml")
    ours = {name: (None, value) for name, value in {"Best": mine, **others}.items()}
    (said,) = outcome.check_orders(table, found(ours, table))[0].sentences()
    assert said.startswith(words)


def curve_of(*means):
    """A result whose personal accuracy after 0, 1, ... rounds was so."""
    *before, last = [{"personal": {"clients_mean": mean}} for mean in means]
    rounds = [{"round": number, "acc": acc} for number, acc in enumerate(before, 1)]
    return {"rounds": rounds, "last": {"rounds_done": len(before), "acc": last}}


@pytest.mark.usefixtures("pictures")
def test_curves_have_the_published_value_a_band_over_seeds_and_say_what_they_are_of():
    column = Column(name="20 clients")
    rows = [Row(name="FedPAC", method="fedpac", paper={"20 clients": 91.8}), Row(name="Local", method="fedavg")]
    table = Table(title="T", source="S", measure="M", columns=(column,), rows=tuple(rows))
    plan = SimpleNamespace(data=("idx:/data/fmnist",))
    results = {"FedPAC": [curve_of(0.5, 0.7, 0.8), curve_of(0.3, 0.5)], "Local": [curve_of(0.4, 0.6)]}
    cells = [
        SimpleNamespace(row=row, column=column, plan=plan, result=result)
        for row in rows
        for result in [*results[row.name], None]
    ]
    chart = panel(table, column, cells)
    assert (chart.title, chart.y.text) == ("20 clients: idx", "accuracy, mean over clients (%)")
    mean, published, local = chart.series
    assert (mean.name, published.name) == ("FedPAC, mean of 2 seeds", "FedPAC, published 91.8 %")
    assert mean.points == ((0.0, pytest.approx(40.0)), (1.0, pytest.approx(60.0))), "rounds that both seeds have"
    assert mean.band == ((pytest.approx(30.0), pytest.approx(50.0)), (pytest.approx(50.0), pytest.approx(70.0)))
    assert (published.points, published.dashed, published.role) == (((0.0, 91.8), (1.0, 91.8)), True, mean.role)
    assert (local.name, local.band) == ("Local", ())


# --- more rounds than a first look had -------------------------------------------------------------------------------


def values_of(folder):
    """All figures of a table but for times."""
    content = json.loads((folder / "table.json").read_text())
    return {name: content[name] for name in ("cells", "promises")}


def test_rows_that_were_run_with_fewer_rounds_go_on_to_those_of_the_table(place, call):
    whole = ("t.toml", "--column", "even")
    code, out, err = call(*whole, "--rounds", 1, "--out", "parts")
    assert code == 0, err
    assert "1 of 2 rounds" in out
    assert "with fewer rounds than the table has, this may change" in out
    code, out, err = call(*whole, "--out", "parts")
    assert code == 0, err
    assert "round 1 of 2" not in err, "the first round is there"
    assert "may change" not in out
    assert call(*whole, "--out", "whole")[0] == 0
    assert values_of(place / "parts") == values_of(place / "whole")
    code, _, err = call(*whole, "--rounds", 1, "--out", "parts")
    assert code == 2
    assert "rounds 2, now 1" in err


def test_rows_whose_steps_depend_on_the_number_of_rounds_start_again_in_another_folder(place, call):
    text = (place / "t.toml").read_text().replace('method = "fedavg"', 'method = "spherefed"')
    (place / "t.toml").write_text(text)
    words = ("t.toml", "--row", "Fed Avg", "--column", "even")
    assert call(*words, "--rounds", 1)[0] == 0
    code, _, err = call(*words)
    assert code == 2
    assert "1 round cannot become 2" in err
    assert "its last round calibrates the classifier" in err
    assert "remove it to restart that row, or choose another --out" in err

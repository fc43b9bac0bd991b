"""What a program has of a simulation: a result that shows itself, is opened again, compared, and exported."""

from __future__ import annotations

import gc
import itertools
import json
import math
import pickle
from dataclasses import replace
from html.parser import HTMLParser
from statistics import fmean

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file

from coordinator import SimulationResult, simulate
from coordinator.simulation.notebook.clients import Clients
from coordinator.simulation.notebook.comparison import Difference, PairedComparison, Test
from coordinator.simulation.notebook.result import Rounds
from coordinator.simulation.notebook.run_folder import RunFolder
from coordinator.simulation.notebook.tables import ShownTable, spread_out
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent.core.errors import DataError, UnknownName, UsageError
from edge_agent.wire.tensors import decode

SETTINGS = {"data": "digits:optdigits?n=160", "partition": "dirichlet", "alpha": 1.0, "clients": 3, "engine": "serial"}
QUICK = {**SETTINGS, "rounds": 2, "local": False, "params": {"lr": 0.05}}


@pytest.fixture(scope="module")
def fedper(tmp_path_factory):
    return simulate("fedper", **QUICK, out=tmp_path_factory.mktemp("runs") / "fedper")


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return simulate("fedavg", **QUICK, out=tmp_path_factory.mktemp("runs") / "fedavg")


# --- how it shows itself ---------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Counts the tags of a page, and keeps its text."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *attrs))

    def handle_data(self, data):
        self.text += data


def shown_in(result):
    return [result, result.rounds, result.clients, result.confusion()]


def test_texts_fit_a_terminal(fedper, fedavg):
    for shown in (*shown_in(fedper), fedper.compare(fedavg)):
        lines = repr(shown).splitlines()
        assert 2 < len(lines) <= 20
        assert max(map(len, lines)) <= 80


def test_a_picture_is_one_line_where_it_cannot_be_shown(fedper):
    assert len(repr(fedper.plot())) <= 80
    assert "SVG" in repr(fedper.plot())


def test_html_has_a_caption_and_headings_of_rows_and_columns(fedper, fedavg):
    for shown in (*shown_in(fedper), fedper.compare(fedavg)):
        tags = Tags(shown._repr_html_()).tags
        names = [name for name, *_ in tags]
        assert names.count("caption") == 1
        assert ("th", ("scope", "col")) in tags
        assert names[names.index("tbody") :].count("tr") == tags.count(("th", ("scope", "row")))
        assert not {"script", "style", "img"} & set(names)


def test_names_of_data_are_text_and_never_tags(fedper):
    hostile = "<img src=x onerror=alert(1)>\u202e"
    summary = {**fedper.summary, "data": [hostile], "method": hostile, "partition": hostile}
    result = replace(fedper, summary=summary)
    clients = Clients.of({hostile: fedper.clients[0]}, RunFolder(fedper.folder))
    for shown in (result, clients):
        html = Tags(shown._repr_html_())
        assert "img" not in [name for name, *_ in html.tags]
        assert "<img" in html.text
        assert "\u202e" not in html.text
        assert "\u202e" not in repr(shown)


def test_a_long_table_shows_rows_at_equal_distances():
    assert spread_out(3) == [0, 1, 2]
    assert spread_out(1000, 5) == [0, 250, 500, 749, 999] or spread_out(1000, 5)[-1] == 999
    assert len(spread_out(1000, 8)) == 8
    table = ShownTable("c" * 200, ("a", "b"), (("x", "1"), ("yy", "22")), ("n" * 200,))
    first, head, *rows, note = table.text().splitlines()
    assert (len(first), len(note)) == (80, 80)
    assert [head, *rows] == ["a    b", "x    1", "yy  22"]


def test_rounds_are_a_list_that_shows_itself_as_a_table(fedper):
    lines = repr(fedper.rounds).splitlines()
    assert lines[1].split() == ["round", "acc.personal", "loss", "s", "up", "MB", "down", "MB"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]
    assert json.loads(json.dumps(fedper.rounds)) == [*fedper.rounds]
    many = Rounds({**fedper.rounds[0], "round": number} for number in range(1, 101))
    assert repr(many).splitlines()[-1] == "84 more; .to_pandas() has all"


def test_rounds_and_clients_are_tables_of_pandas(fedper):
    rounds = fedper.rounds.to_pandas()
    assert list(rounds["round"]) == [1, 2]
    clients = fedper.clients.to_pandas()
    assert list(clients.index) == ["c0", "c1", "c2"]
    assert clients["acc.personal"].mean() == pytest.approx(fedper.accuracy, abs=1e-6)
    confusion = fedper.confusion().to_pandas()
    assert isinstance(confusion, pd.DataFrame)
    assert confusion.to_numpy().sum() == sum(len(fedper.clients[name].samples[1]) for name in fedper.clients)


# --- its clients -----------------------------------------------------------------------------------------------------


def test_clients_are_the_mapping_that_they_were_and_have_positions(fedper):
    assert json.loads(json.dumps(fedper.clients))["c1"] == dict(fedper.clients["c1"])
    assert set(fedper.clients["c0"]) == {"acc.local", "acc.global", "acc.personal"}
    assert fedper.clients[1] is fedper.clients["c1"]
    assert fedper.clients[-1].id == "c2"
    assert fedper.clients[np.argmax([0.1, 0.3, 0.2])].id == "c1"
    for missing in (3, -4, "c9"):
        with pytest.raises(UnknownName, match=r"known: c0, c1, c2"):
            fedper.clients[missing]
    assert list(Clients.of({f"c{n}": {} for n in (10, 9, 1)}, fedper.clients.run)) == ["c1", "c9", "c10"]
    many = Clients.of({f"c{n}": {} for n in range(1000)}, fedper.clients.run)
    with pytest.raises(UsageError, match=r"'1000': there are 1000, 'c0' to 'c999', at positions 0 to 999"):
        many[1000]


@pytest.mark.parametrize("method", ["fedavg", "fedavg_ft", "repper", "fedpac", "fedbn", "fedpick"])
def test_a_model_answers_as_the_simulation_did_and_so_does_its_file(method, tmp_path):
    result = simulate(method, **QUICK)
    for name, client in result.clients.items():
        model = client.model
        _, test = client.samples
        right = model.predict_proba(test.inputs).argmax(axis=1) == test.labels
        assert right.mean() == pytest.approx(client["acc.personal"], abs=1e-6)
        path = client.export(tmp_path / f"{name}.onnx")
        kept = result.clients.run.restored().raw_tests_of(name)
        assert kept.inputs.dtype == np.uint8
        session = onnxruntime.InferenceSession(path.read_bytes())
        (answers,) = session.run(["probabilities"], {"image": kept.inputs.transpose(0, 2, 3, 1)})
        np.testing.assert_allclose(answers, model(test.inputs), atol=1e-5)
        # More inputs than a batch of the evaluation: the file is for any number of them.
        many = np.tile(kept.inputs.transpose(0, 2, 3, 1), (600 // len(test.labels) + 1, 1, 1, 1))
        (repeated,) = session.run(["probabilities"], {"image": many})
        np.testing.assert_allclose(repeated[-len(answers) :], answers, atol=1e-5)
        about = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}["headwater"])
        assert about["labels"] == [str(digit) for digit in range(10)]
        assert about["checked_samples"] == len(test.labels)


def test_windows_are_exported_in_the_units_of_the_sensor(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    windows = (rng.normal(size=(60, 2, 24)) * 50 + 100 * labels[:, None, None]).astype(np.float32)
    result = simulate(
        "fedper", data=(windows, labels), clients=2, rounds=1, engine="serial", standardise=True, local=False
    )
    path = result.clients[0].export(tmp_path / "personal.onnx")
    session = onnxruntime.InferenceSession(path.read_bytes())
    (answers,) = session.run(["probabilities"], {"window": windows})
    spec = result.clients.run.restored().task.input
    prepared = (windows - np.reshape(spec.mean, (-1, 1))) / np.reshape(spec.std, (-1, 1))
    np.testing.assert_allclose(answers, result.clients[0].model(prepared.astype(np.float32)), atol=1e-4)


def test_pixels_and_prepared_inputs_get_the_same_answer(fedper):
    model = fedper.clients[0].model
    kept = fedper.clients.run.restored().raw_tests_of("c0")
    prepared = kept.ready().inputs
    pixels = kept.inputs.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(model(pixels), model(prepared))
    names = np.asarray(model.classes)[kept.labels]
    assert model.score(pixels, names) == pytest.approx(fedper.clients[0].accuracy, abs=1e-6)
    with pytest.raises(UsageError, match=r"names: 17: of no class; expected names such as 0, 1, 2 and 7 more"):
        model.score(pixels, [17, *names[1:]])
    with pytest.raises(UsageError, match=rf"shape \(1,\), expected \({len(names)},\)"):
        model.score(pixels, names[:1])
    with pytest.raises(UsageError, match=r"float64 of shape \(2, 3\), expected uint8 of shape"):
        model(np.zeros((2, 3)))


def test_grey_pixels_need_no_axis_of_channels():
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2
    result = simulate("fedper", data=(pixels, labels), clients=2, rounds=1, engine="serial", local=False)
    model = result.clients[0].model
    np.testing.assert_array_equal(model(pixels), model(pixels[..., None]))


def test_models_share_nothing(fedper):
    one, other = fedper.clients[0].model, fedper.clients[1].model
    before = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    for tensor in other.module.state_dict().values():
        tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in one.module.state_dict().items())
    assert "client c0, 10 classes" in repr(one)


def test_a_method_that_answers_by_more_than_operators_is_refused(tmp_path):
    result = simulate("knn_per", **QUICK)
    with pytest.raises(UsageError, match="'knn_per' answers by code that has no form as ONNX operators"):
        result.clients[0].export(tmp_path / "personal.onnx")
    assert list(tmp_path.iterdir()) == []


def test_clients_without_a_model_are_left_out_of_the_confusion():
    result = simulate("fedavg", **QUICK, new_clients=1)
    confusion = result.confusion()
    assert (confusion.clients, confusion.left_out) == (("c0", "c1"), ("c2",))
    assert "left out, because they keep no model: c2" in repr(confusion)
    with pytest.raises(UsageError, match="which is not kept"):
        _ = result.clients["c2"].model
    with pytest.raises(UsageError, match="no model of theirs is kept"):
        result.clients["c2"].confusion()


def test_the_confusion_counts_each_test_sample_once(fedper, tmp_path):
    whole = fedper.confusion()
    each = [client.confusion() for client in fedper.clients.values()]
    assert sum(one.counts for one in each).tolist() == whole.counts.tolist()
    right = [client.accuracy * len(client.samples[1]) for client in fedper.clients.values()]
    assert np.trace(whole.counts) == pytest.approx(sum(right), abs=1e-4)
    labels = np.concatenate([client.samples[1].labels for client in fedper.clients.values()])
    assert whole.counts.sum(axis=1).tolist() == np.bincount(labels, minlength=10).tolist()
    assert whole.plot(tmp_path / "a.svg").svg == (tmp_path / "a.svg").read_text(encoding="utf-8")


@pytest.mark.usefixtures("pictures")
def test_a_plot_for_print_is_one_column_wide_without_a_title(fedper, tmp_path):
    plot = fedper.plot(tmp_path / "a.svg", for_print=True)
    assert 'width="237.6pt"' in plot.svg
    assert "partition" not in plot.svg
    assert "partition" in fedper.plot().svg
    assert plot.svg == (tmp_path / "a.svg").read_text(encoding="utf-8")


# --- open, pickle, temporary folders ---------------------------------------------------------------------------------


def test_a_result_is_opened_again_and_pickled(fedper):
    opened = SimulationResult.open(fedper.folder)
    copied = pickle.loads(pickle.dumps(fedper))
    fedper.clients.run.restored()  # what was read is not pickled
    assert len(pickle.dumps(fedper)) < 20_000
    for again in (opened, copied):
        assert (again.rounds, again.clients, again.accuracy) == (fedper.rounds, fedper.clients, fedper.accuracy)
        assert again.confusion().counts.tolist() == fedper.confusion().counts.tolist()


def test_a_result_finds_its_folder_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = simulate("fedper", **{**QUICK, "rounds": 1}, out="run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert result.clients[0].export("personal.onnx").is_file()
    assert result.confusion().counts.sum() > 0
    assert result.export("encoder.hwb").is_file()


def test_exported_weights_are_those_of_the_encoder_and_begin_another_simulation(fedper, fedavg, tmp_path):
    path = fedper.export(tmp_path / "weights.safetensors")
    with StateFolder(fedper.folder).look() as state:
        (run,) = state.journal.runs()
        trained = decode(state.blobs.read(replay(state.journal, run).checkpoint))
    trained = {name: array for name, array in trained.items() if name.startswith("encoder.")}
    written = {f"encoder.{name}": array for name, array in load_file(path).items()}
    assert len(trained) > 10
    assert all(array.tobytes() == written[name].tobytes() for name, array in trained.items())
    begun = simulate("fedavg", **{**QUICK, "rounds": 1}, weights=path, out=tmp_path / "begun")
    assert begun.rounds[0]["loss"] < fedavg.rounds[0]["loss"]


def test_folders_that_hold_no_finished_simulation_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        SimulationResult.open(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no simulation"):
        SimulationResult.open(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        SimulationResult.open(tmp_path / "notes.txt")


def test_an_unfinished_run_says_how_far_it_is(tmp_path):
    seen = itertools.count()

    def stop(job):
        if next(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate("fedper", **QUICK, out=tmp_path / "run", watch=stop)
    with pytest.raises(UsageError, match=r"has not finished \(1 of 2 rounds\).*--resume"):
        SimulationResult.open(tmp_path / "run")


def test_a_client_keeps_the_temporary_folder_of_its_run():
    result = simulate("fedper", **{**QUICK, "rounds": 1})
    client, folder = result.clients[0], result.folder
    copied = pickle.loads(pickle.dumps(result))
    del result
    gc.collect()
    assert len(client.model.predict(client.samples[1].inputs)) == len(client.samples[1])
    del client
    gc.collect()
    assert not folder.exists()
    with pytest.raises(UsageError, match="no such folder"):
        _ = copied.clients[0].model


def test_data_that_are_gone_are_named(tmp_path):
    file = tmp_path / "digits.npz"
    rng = np.random.default_rng(0)
    np.savez(file, inputs=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), labels=np.arange(40) % 2)
    result = simulate("fedper", data=f"npz:{file}", clients=2, rounds=1, engine="serial", local=False)
    file.unlink()
    with pytest.raises(DataError, match=r"digits\.npz"):
        result.confusion()


# --- comparison ------------------------------------------------------------------------------------------------------


def test_two_results_are_compared_client_by_client(fedper, fedavg):
    comparison = fedper.compare(fedavg)
    gains = [fedper.clients[name].accuracy - fedavg.clients[name].accuracy for name in fedper.clients]
    assert comparison.mean == pytest.approx(fmean(gains))
    assert fedavg.compare(fedper).mean == pytest.approx(-fmean(gains))
    # By hand: three clients, so 2 degrees of freedom and Student's quantile 4.302653.
    error = np.std(gains, ddof=1) / math.sqrt(3)
    assert comparison.standard_error == pytest.approx(error)
    assert comparison.interval == pytest.approx(
        (fmean(gains) - 4.302652729 * error, fmean(gains) + 4.302652729 * error), abs=1e-9
    )
    # Three clients are too few for a sign test: McNemar's, recounted from the models.
    right = []
    for result in (fedper, fedavg):
        answers = [
            client.model(client.samples[1].inputs).argmax(1) == client.samples[1].labels
            for client in result.clients.values()
        ]
        right.append(np.concatenate(answers))
    assert comparison.test.name.startswith("McNemar")
    assert (comparison.test.first, comparison.test.second) == (
        int(np.sum(right[0] & ~right[1])),
        int(np.sum(right[1] & ~right[0])),
    )
    table = comparison.to_pandas()
    assert table["difference"].tolist() == pytest.approx(gains)
    itself = fedper.compare(SimulationResult.open(fedper.folder))
    assert (itself.mean, itself.verdict, itself.test.p) == (0.0, "not distinguishable", 1.0)


def test_two_results_of_one_method_have_different_names(fedper):
    def named(**changes):
        return replace(fedper, summary={**fedper.summary, **changes})

    params = fedper.summary["params"]
    slower = named(params={**params, "lr": 0.01})
    assert fedper.compare(slower).names == ("lr=0.05", "lr=0.01")
    assert fedper.compare(named(params={**params, "lr": 0.01, "momentum": 0.25})).names[0] == "fedper (first)"
    assert named(name="mine").compare(replace(slower, summary={**slower.summary, "name": "yours"})).names == (
        "mine",
        "yours",
    )
    assert fedper.compare(fedper).names == ("fedper (first)", "fedper (second)")


def test_a_few_clients_are_compared_without_a_test_where_their_samples_are_gone(tmp_path):
    file = tmp_path / "digits.npz"
    rng = np.random.default_rng(0)
    np.savez(file, inputs=rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), labels=np.arange(60) % 2)
    given = {"data": f"npz:{file}", "clients": 2, "rounds": 1, "engine": "serial", "local": False}
    one, other = (simulate(method, **given) for method in ("fedper", "fedavg"))
    mean = one.compare(other).mean
    again = [replace(result, clients=pickle.loads(pickle.dumps(result.clients))) for result in (one, other)]
    file.unlink()
    comparison = again[0].compare(again[1])
    assert (comparison.mean, comparison.test) == (mean, None)
    assert "no test: McNemar's needs the models and samples" in repr(comparison)


def binomial_by_counting(first, second):
    """The exact two-sided sign test of counts, by adding up all outcomes that are no more probable."""
    n = first + second
    chances = [math.comb(n, k) / 2**n for k in range(n + 1)]
    return sum(chance for chance in chances if chance <= chances[first] * (1 + 1e-9))


@pytest.mark.parametrize("counts", [(0, 0), (3, 3), (6, 0), (1, 9), (12, 4)])
def test_the_test_is_the_exact_one(counts):
    assert Test.of("sign test over clients", *counts).p == pytest.approx(binomial_by_counting(*counts))


def compared(*gains, rounds=(5, 5)):
    clients = tuple(Difference(f"c{number}", 0.5 + gain, 0.5) for number, gain in enumerate(gains))
    return PairedComparison(("a", "b"), clients, None, rounds)


def test_the_verdict_needs_two_standard_errors():
    # Mean 0.02, standard error 0.01 exactly: (0.03, 0.01) has deviation 0.0141421, divided by the root of 2.
    assert compared(0.03125, 0.0).verdict == "not distinguishable"
    assert compared(0.03, 0.028).verdict == "a is better than b"
    assert compared(-0.03, -0.028).verdict == "b is better than a"
    assert compared(0.1, 0.1).verdict == "a is better than b"  # without any spread
    assert compared(0.0, 0.0).verdict == "not distinguishable"
    assert compared(0.4).interval is None
    assert "rounds" not in repr(compared(0.1, 0.2))
    assert "unequal rounds: a 5, b 3" in repr(compared(0.1, 0.2, rounds=(5, 3)))
    assert compared(0.4).verdict == "not distinguishable"  # one client, and no test


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seed": 1}, "partition: dirichlet of seed 0 .* and dirichlet of seed 1 .* give clients other samples"),
        ({"clients": 2}, "clients: 3 and 2"),
        ({"validation": 0.3}, "samples that are scored: test and validation"),
        ({"input": {"height": 16, "width": 16}}, "inputs: .*32.* and .*16"),
    ],
)
def test_results_on_other_samples_are_not_compared(fedper, changes, words):
    other = simulate("fedper", **{**QUICK, "rounds": 1, **changes})
    with pytest.raises(UsageError, match=f"not of the same test samples.*{words}"):
        fedper.compare(other)


def test_samples_of_the_caller_are_compared_by_their_content():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    labels = np.arange(40) % 2
    settings = {"clients": 2, "rounds": 1, "engine": "serial", "local": False}
    one, same = (simulate(method, data=(pixels, labels), **settings) for method in ("fedper", "fedavg"))
    assert one.summary["data"] != same.summary["data"]
    assert len(one.compare(same).clients) == 2
    darker = simulate("fedavg", data=(pixels // 2, labels), **settings)
    with pytest.raises(UsageError, match="other test samples of c0, c1"):
        one.compare(darker)


def test_the_state_folder_is_left_as_it_was(fedper):
    with StateFolder(fedper.folder).look() as state:
        before = state.journal.last_id()
    SimulationResult.open(fedper.folder).confusion()
    with StateFolder(fedper.folder).look() as state:
        assert state.journal.last_id() == before

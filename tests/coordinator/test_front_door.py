"""The Python interface: what the packages offer, a user's own parts, and what mistakes get."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

import coordinator
import edge_agent
import export
from coordinator.runs.run_summary import AgentFigures
from coordinator.simulation import own_data
from coordinator.simulation.failures import Failure, add_note
from coordinator.simulation.figures import (
    BestScores,
    ClientScore,
    EndFigures,
    MemoryFigures,
    RoundFigures,
    RoundRow,
    RunFigures,
    Scores,
    StackedFigures,
    Summary,
)
from coordinator.state.run_lines import AgentLine
from edge_agent import methods, models
from edge_agent.core.errors import ConfigError, DataError, RunFailed, UsageError
from edge_agent.data import load
from edge_agent.data.partition import Division

ROOT = Path(__file__).parents[2]
SMALL = {"data": "digits:optdigits?n=60", "clients": 2, "rounds": 1, "engine": "serial"}

OWN = """
import math
from torch import nn
from edge_agent import methods

class Plain(methods.get("fedavg")):
    pass

class Net(nn.Module):
    def __init__(self, task, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), width))
    def forward(self, inputs):
        return self.layers(inputs)

def load(n="60"):
    import numpy as np
    labels = np.arange(int(n)) % 3
    return np.full((int(n), 8, 8), 60, np.uint8) * labels[:, None, None].astype(np.uint8), labels
"""


@pytest.fixture(autouse=True)
def _own_parts_are_forgotten(monkeypatch):
    for registry in (methods.registry, models.registry):
        monkeypatch.setattr(registry, "_extra", dict(registry._extra))


def samples(n=20, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 8, 8), dtype=np.uint8), np.arange(n) % 2


@pytest.mark.parametrize("package", [coordinator, edge_agent, export])
def test_what_a_package_offers_is_what_is_documented(package):
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    table = re.search(rf"^\| `{package.__name__}`.*?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    documented = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) - {package.__name__}
    assert set(package.__all__) == documented
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = package.nothing_such


def test_the_front_door_loads_nothing_before_it_is_used():
    code = "import sys, coordinator, edge_agent, export; print(len({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize(
    "part",
    [
        coordinator.simulate,
        coordinator.federate,
        coordinator.workers,
        coordinator.load_config,
        coordinator.SimulationResult,
        coordinator.SimulationResult.open,
        coordinator.SimulationResult.compare,
        coordinator.SimulationResult.confusion,
        coordinator.SimulationResult.plot,
        coordinator.SimulationResult.export,
    ],
    ids=lambda part: part.__qualname__,
)
def test_the_example_in_a_docstring_runs_and_gives_what_it_says(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = [test for test in doctest.DocTestFinder(recurse=False).find(part) if test.examples]
    assert examples
    for test in examples:
        results = doctest.DocTestRunner().run(test)
        assert results.failed == 0


def test_keys_of_results_are_those_that_type_checkers_know():
    result = coordinator.simulate(**SMALL, evaluate_after=True, local=False, speeds="pi4", max_memory="16GB")
    assert result.summary.keys() == RunFigures.__annotations__.keys() | {
        *("start_s", "memory_bytes", "folder", "report", "curves")
    }
    assert Summary.__annotations__.keys() - result.summary.keys() == {"engine_trial", "stacked", "logs"}
    assert result.summary["rounds"][0].keys() == RoundFigures.__annotations__.keys()
    assert result.summary["rounds"][0]["acc"]["after"].keys() == Scores.__annotations__.keys()
    assert result.summary["best"]["after"].keys() == BestScores.__annotations__.keys()
    assert result.summary["last"].keys() == EndFigures.__annotations__.keys()
    assert result.summary["memory_bytes"].keys() == MemoryFigures.__annotations__.keys()
    assert RoundRow.__annotations__.keys() - result.rounds[0].keys() <= {"acc.global", "acc.personal", "acc.after"}
    assert result.rounds[0].keys() <= RoundRow.__annotations__.keys()
    assert set(result.clients[0]) == set(get_args(ClientScore))
    stacked = coordinator.simulate(**{**SMALL, "engine": "stacked"}, local=False)
    assert stacked.summary["stacked"].keys() == StackedFigures.__annotations__.keys()
    assert AgentFigures.__annotations__.keys() == AgentLine.__dataclass_fields__.keys()


def test_a_class_a_module_and_arrays_of_the_program_are_simulated(tmp_path):
    class Still(methods.get("fedavg")):
        pass

    class Flat(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(inputs)

    dataset = torch.utils.data.TensorDataset(torch.from_numpy(samples(seed=2)[0]), torch.from_numpy(samples(seed=2)[1]))
    clients = {"ann": samples(), "bob": samples(seed=1), "eve": dataset}
    result = coordinator.simulate(
        Still, data=clients, encoder=Flat, encoder_params={"width": 4}, rounds=2, params={"local_epochs": 1}
    )
    assert list(result.clients) == list(clients)
    assert [row["round"] for row in result.rounds] == [1, 2]
    assert 0 <= result.accuracy <= 1
    assert result.summary["method"] == "still"
    assert result.plot(tmp_path / "a.svg").svg.startswith("<svg")
    result.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"'\.gif': expected one of \.svg, \.png, \.pdf"):
        result.plot(tmp_path / "a.gif")
    assert edge_agent.load_bundle(result.export(tmp_path / "b.hwb"), tmp_path).manifest.feature_dim == 4
    with pytest.raises(UsageError, match="worker processes cannot import it"):
        coordinator.simulate(Still, data=clients, engine="pool")


def test_parts_in_a_file_are_the_same_on_the_command_line_and_in_worker_processes(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(OWN, encoding="utf-8")
    words = ["--method", "my.py:Plain", "--encoder", "my.py:Net", "--data", "my.py:load?n=40", "-n", "2", "-r", "1"]
    code, out, err = call("simulate", *words, "--engine", "pool", "--workers", "1", "--out", "a", "--json")
    assert code == 0, err
    result = coordinator.simulate(
        "my.py:Plain", encoder="my.py:Net", data="my.py:load?n=40", clients=2, rounds=1, engine="serial", out="b"
    )
    assert json.loads(out)["encoder_sha256"] == result.summary["encoder_sha256"]
    assert call("export", "--state", "a", "--out", "a.hwb", "--json")[0] == 0


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"method": "no.py:X"}, UsageError, "there is no file"),
        ({"method": "my.py:Plian"}, UsageError, "did you mean 'Plain'"),
        ({"method": "broken.py:X"}, UsageError, "importing .*broken.py failed: ZeroDivisionError"),
        ({"method": int}, UsageError, "'int': expected a subclass of edge_agent.methods.Method"),
        ({"method": type("FedPer", (methods.Method,), {})}, UsageError, "there is one of this name already"),
        ({"encoder": lambda: 5}, UsageError, "encoder 'lambda': expected a torch.nn.Module, got int"),
        ({"encoder": lambda: nn.Flatten(0)}, UsageError, r"gave shape \(.*expected features \(2, d\)"),
        ({"encoder": lambda: nn.Linear(3, 3)}, UsageError, r"encoder 'lambda': inputs of shape .* failed"),
        ({"encoder": nn.Flatten()}, UsageError, "expected a class or function"),
        ({"rouns": 3}, ConfigError, "did you mean 'rounds'"),
    ],
)
def test_own_parts_with_mistakes_get_one_clear_error(changed, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(error, match=words):
        coordinator.simulate(**{**SMALL, **changed})


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "mapping is empty"),
        ({"A b": samples()}, "client 'A b': expected a name"),
        ({"a": (samples()[0], [1, 0])}, "client 'a': X has 20 samples, y has 2"),
        ({"a": 5}, r"client 'a': int, expected a pair \(X, y\)"),
        ({"a": (np.zeros((4, 2)), [0, 1, 0, 1])}, r"client 'a', X: float64 of shape \(4, 2\)"),
        ({"a": (np.full((2, 1, 4, 4), 2.0), [0, 1])}, "client 'a', X: values from 2 to 2"),
        ({"a": (np.full((2, 1, 4, 4), np.nan), [0, 1])}, "client 'a', X: holds NaN"),
        ({"a": (samples()[0], np.zeros((20, 2)))}, "client 'a', y: float64"),
        ({"a": samples(), "b": (np.zeros((2, 4, 4), np.uint8), [0, 1])}, "client 'b', X: .*client 'a' has"),
    ],
)
def test_data_with_mistakes_name_the_client_and_the_field(given, words):
    with pytest.raises(DataError, match=words):
        coordinator.simulate(data=given)


class Items:
    """A data set as torch and Hugging Face have them: a length, and items by index."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pairs():
    inputs, labels = samples()
    return list(zip(inputs, labels, strict=True))


def rows():
    return [{"image": x, "label": int(y)} for x, y in pairs()]


def pictures():
    from PIL import Image

    return [{"img": Image.fromarray(x[..., 0]), "labels": int(y)} for x, y in pairs()]


def table():
    return pytest.importorskip("pandas").DataFrame(rows())


def named():
    """Labels as the column of a table has them: an array of Python objects."""
    inputs, labels = samples()
    return inputs, np.array([f"class {label}" for label in labels], dtype=object)


def row_counts(result):
    """Client -> number of training and of test rows."""
    division = Division.read(result.folder / "partition.json")
    return {name: (len(share.train), len(share.test)) for name, share in division.clients.items()}


IN_PROCESS = {"encoder": "linear", "rounds": 1, "engine": "serial", "local": False, "params": {"local_epochs": 1}}


@pytest.mark.parametrize(
    "form",
    [samples, lambda: [*samples()], lambda: Items(pairs()), pairs, lambda: Items(rows()), rows, pictures, table, named],
    ids=["pair", "list", "dataset", "list of pairs", "rows", "list of rows", "pictures", "table", "column of names"],
)
def test_samples_in_memory_are_divided_by_a_rule(form):
    result = coordinator.simulate(data=form(), partition="iid", clients=2, **IN_PROCESS)
    assert [*result.clients] == ["c0", "c1"]
    assert sum(map(sum, row_counts(result).values())) == 20


def test_a_mapping_of_rows_is_a_partition():
    shares = {"kitchen": np.arange(0, 12), "porch": ([12, 13, 14, 15], [16, 17])}
    result = coordinator.simulate(data=samples(), partition=shares, **IN_PROCESS)
    counts = row_counts(result)
    assert counts["porch"] == (4, 2)
    assert sum(counts["kitchen"]) == 12
    assert counts["kitchen"][1] > 0


def test_a_mapping_of_rows_divides_a_source_too():
    shares = {"a": range(20), "b": range(20, 50)}
    result = coordinator.simulate(data="digits:optdigits?n=60", partition=shares, test_fraction=0.5, **IN_PROCESS)
    counts = row_counts(result)
    assert sum(counts["a"]) == 20
    assert sum(counts["b"]) == 30
    assert counts["a"][1] >= 8


def test_colours_of_an_image_with_a_palette_are_no_positions_in_it():
    from PIL import Image

    red = Image.new("RGB", (8, 8), (255, 0, 0))
    source = own_data.save_pool([(red.convert("P"), 0), (red, 0)], Path(tempfile.mkdtemp())).source
    first, second = load(source).inputs
    assert np.abs(first - second).max() < 0.1


def test_error_in_a_data_set_of_the_caller_names_the_item_and_the_line():
    class Broken(Items):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError("no such photo")
            return super().__getitem__(index)

    with pytest.raises(
        DataError, match=r"item 3: KeyError: 'no such photo' \(.*test_front_door\.py, line \d+, in __getitem__"
    ):
        coordinator.simulate(data=Broken(pairs()), partition="iid", clients=2, **IN_PROCESS)


def test_rows_that_one_client_holds_out_and_another_trains_on_are_named(caplog):
    shares = {"a": (range(8), range(8, 10)), "b": (range(8, 18), range(18, 20))}
    coordinator.simulate(data=samples(), partition=shares, **IN_PROCESS)
    assert "held_out_rows_are_trained_on client=a rows=2 by=b" in caplog.text
    assert "client=b" not in caplog.text.partition("held_out_rows")[2].partition("held_out_rows")[2]


def test_clients_may_bring_their_own_test_samples():
    (x, y) = samples()
    both = {}
    both["a"] = x[:10], y[:10], x[10:], y[10:]
    both["b"] = samples()
    result = coordinator.simulate(data=both, **IN_PROCESS)
    counts = row_counts(result)
    assert counts["a"] == (10, 10)
    assert sum(counts["b"]) == 20
    assert counts["b"][1] > 0


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"data": np.zeros((4, 8, 8), np.uint8)}, DataError, "an array without labels; expected a pair"),
        ({"data": 5}, DataError, "int, expected a pair"),
        ({"data": None}, DataError, "NoneType, expected a pair"),
        ({"data": (x for x in ())}, DataError, r"generator, expected .* give list\(dataset\)"),
        ({"data": []}, DataError, "the data set is empty"),
        ({"data": [{"photo": 1, "label": 2}]}, DataError, "keys photo, label; expected one of image, img"),
        ({"data": [(np.zeros((8, 8)), 0), (np.zeros((9, 9)), 1)]}, DataError, r"item 1, X: shape \(9, 9\), and item 0"),
        ({"data": [(np.zeros((8, 8)), 0.5)]}, DataError, "item 0, y: 0.5, expected an integer or text"),
        ({"data": [(np.zeros((8, 8)), None)]}, DataError, "item 0, y: None"),
        ({"data": [(np.zeros((8, 8)), 0), (np.zeros((8, 8)), "a")]}, DataError, "item 1, y: 'a', and item 0 has 0"),
        ({"data": [{"x": np.zeros((8, 8)), "y": 1}, {"x": 1}]}, DataError, "item 1: a row without y"),
        ({"data": [(1, 2, 3)]}, DataError, "item 0: tuple of 3, expected"),
        ({"data": [dict.fromkeys(map(str, range(12)), 0)]}, DataError, "8, 9 and 2 more; expected one of"),
        ({"data": Path("photos")}, DataError, "'images:photos'"),
        ({"data": {"X": np.zeros((2, 8, 8)), "y": [0, 1]}}, UsageError, "looks like the columns of one data set"),
        ({"data": {"train": samples()}, "partition": "iid"}, UsageError, "looks like the parts of one data set"),
        ({"data": {0: samples()}}, DataError, "client 0: .* such as 'client-0'"),
        ({"data": {"a": samples(), "b": (samples()[0], ["x"] * 20)}}, DataError, "client 'b', y: <U1; client 'a' has"),
        ({"data": samples(), "partition": [[0], [1]]}, UsageError, "partition: list, expected a rule"),
        ({"data": samples(), "partition": {"a": {1, 2}}}, DataError, "client 'a': set, expected indices"),
        ({"data": samples(), "partition": {"a": np.arange(20) < 9}}, DataError, r"np\.flatnonzero\(mask\)"),
        ({"data": (*samples(), *samples())}, UsageError, "is for one client"),
        ({"data": {"train": samples(), "test": samples()}}, UsageError, "looks like the parts of one data set"),
        ({"data": samples(), "partition": {}}, DataError, "mapping is empty"),
        ({"data": samples(), "partition": {"A": [1]}}, DataError, "client 'A': expected a name"),
        ({"data": samples(), "partition": {"a": [1, 20]}}, DataError, "client 'a': rows 1 to 20, expected 0 to 19"),
        ({"data": samples(), "partition": {"a": [-1, 2]}}, DataError, "client 'a': rows -1 to 2"),
        ({"data": samples(), "partition": {"a": [1, 1]}}, DataError, "client 'a': a row is given twice"),
        ({"data": samples(), "partition": {"a": [0.5]}}, DataError, "client 'a': float64 of shape"),
        ({"data": samples(), "partition": {"a": [[0], [1, 2]]}}, DataError, "client 'a': not an array"),
        ({"data": samples(), "partition": {"a": ([1, 2], [2])}}, DataError, "row 2 is among training and test rows"),
        ({"data": samples(), "partition": {"a": [1]}, "clients": 2}, UsageError, "names the clients already"),
        ({"data": ["digits", "idx:x"], "partition": {"a": [1]}}, UsageError, "is for one data source, found 2"),
    ],
)  # fmt: skip
def test_data_and_rows_with_mistakes_get_one_clear_error(given, error, words):
    with pytest.raises(error, match=words):
        coordinator.simulate(**{**IN_PROCESS, **given})


def test_a_mapping_of_clients_is_a_partition_already():
    with pytest.raises(UsageError, match="clients: a mapping of clients is a partition already"):
        coordinator.simulate(data={"a": samples()}, clients=3)


@pytest.mark.slow
def test_a_script_without_a_guard_may_simulate_in_processes(tmp_path):
    script = tmp_path / "script.py"
    words = "{'data': 'digits:optdigits?n=60', 'clients': 2, 'rounds': 1, 'engine': 'pool', 'workers': 2}"
    script.write_text(f"import coordinator\nprint(coordinator.simulate(**{words}).accuracy)\n", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1


# --- errors of own parts ---------------------------------------------------------------------------------------------

BROKEN = """
from edge_agent.methods.fedavg import FedAvg

class Broken(FedAvg):
    def local_update(self, client, received):
        return self.helper(client)

    def helper(self, client):
        if client.round == 2:
            raise ValueError(f"my bug on {client.id}")
        return self.sent(client)
"""


@pytest.mark.parametrize("engine", [{"engine": "serial"}, {"engine": "pool", "workers": 1}])
def test_an_error_in_an_own_method_has_its_place_its_traceback_and_its_log(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "mine.py"
    file.write_text(BROKEN, encoding="utf-8")
    given = {**IN_PROCESS, "rounds": 3, "clients": 2, **engine}
    with pytest.raises(RunFailed) as caught:
        coordinator.simulate("mine.py:Broken", data="digits:optdigits?n=60", **given)
    line = BROKEN.splitlines().index('            raise ValueError(f"my bug on {client.id}")') + 1
    assert "ValueError: my bug on c" in str(caught.value)
    assert f"({file}, line {line}, in helper" in str(caught.value)
    message = "".join(traceback.format_exception(caught.value))
    assert f'File "{file}", line {line}, in helper' in message
    assert message.count("ValueError: my bug on c") >= 2, "in the message, and in the traceback of the client's process"
    (kept,) = tmp_path.glob("headwater-*")
    assert f"The folder of this run is kept: {kept}" in message
    if engine["engine"] == "pool":
        log = Path(re.search(r"whole traceback is in (\S+\.log)\)", str(caught.value))[1])
        assert log.is_relative_to(kept)
        assert f'File "{file}", line {line}, in helper' in log.read_text(encoding="utf-8")


BROKEN_PARTS = """
import torch
from edge_agent.methods.fedavg import FedAvg

def broken():
    raise KeyError("my bug")

class Aggregates(FedAvg):
    def aggregate(self, state, updates):
        return broken()

class Predicts(FedAvg):
    def predict(self, client, inputs):
        return broken()

class Objects(FedAvg):
    def objection(self, tensors):
        return broken()

class Nothing(FedAvg):
    def aggregate(self, state, updates):
        return None

class SendsTensors(FedAvg):
    def local_update(self, client, received):
        return {name: torch.tensor(array) for name, array in received.items()}
"""


@pytest.fixture
def broken_parts(tmp_path, monkeypatch):
    """The file; temporary folders are beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "parts.py"
    file.write_text(BROKEN_PARTS, encoding="utf-8")
    return file


@pytest.mark.parametrize("engine", ["serial", "stacked"])
@pytest.mark.parametrize("name", ["Aggregates", "Predicts", "Objects"])
def test_an_error_of_a_method_at_the_coordinator_or_in_evaluation_has_its_place_too(engine, name, broken_parts):
    given = {**IN_PROCESS, "clients": 2, "engine": engine, "stacked_always": engine == "stacked"}
    with pytest.raises(RunFailed, match=r"KeyError: 'my bug' \(.*parts\.py, line 6, in broken") as caught:
        coordinator.simulate(f"{broken_parts}:{name}", data="digits:optdigits?n=60", **given)
    (kept,) = broken_parts.parent.glob("headwater-*")
    assert f"The folder of this run is kept: {kept}" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "name, words",
    [
        ("Nothing", "Nothing.aggregate returned NoneType, expected a dict of name -> NumPy array"),
        ("SendsTensors", r"SendsTensors.local_update returned '.*' as Tensor, expected a NumPy array; .*numpy\(\)"),
    ],
)
def test_what_a_method_returns_in_a_wrong_form_is_named_with_the_function(name, words, broken_parts):
    with pytest.raises(RunFailed, match=words):
        coordinator.simulate(f"{broken_parts}:{name}", data="digits:optdigits?n=60", **{**IN_PROCESS, "clients": 2})


def test_a_run_that_is_stopped_after_its_first_round_is_kept_and_can_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = {**IN_PROCESS, "clients": 2, "rounds": 3, "partition": "iid"}

    def stop_in_round(number):
        def stop(job):
            if job.round == number:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        coordinator.simulate(data=samples(), **given, watch=stop_in_round(1))
    assert list(tmp_path.glob("headwater-*")) == []
    with pytest.raises(KeyboardInterrupt) as caught:
        coordinator.simulate(data=samples(), **given, watch=stop_in_round(2))
    (kept,) = tmp_path.glob("headwater-*")
    message = "".join(traceback.format_exception(caught.value))
    assert (
        f"Stopped after 1 closed round, and nothing is lost: simulate(..., out='{kept / 'run'}', resume=True)"
        in message
    )
    resumed = coordinator.simulate(data=samples(), **given, out=kept / "run", resume=True)
    whole = coordinator.simulate(data=samples(), **given)
    assert resumed.summary["encoder_sha256"] == whole.summary["encoder_sha256"]


def test_arguments_of_another_kind_are_refused_at_once_and_all_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {"params": "lr=1", "seed": "first", "pool": 2, "watch": None, "on_round": 3, "out": ""}
    with pytest.raises(ConfigError, match=r"simulate\(\): 7 mistakes") as caught:
        coordinator.simulate(data={"a": samples()}, test_fraction="half", **wrong)
    assert [mistake.partition(" = ")[0] for mistake in caught.value.mistakes] == [
        *("params", "seed", "test_fraction", "pool", "watch", "on_round", "out")
    ]
    with pytest.raises(UsageError, match=r"log = 3: expected a name"):
        coordinator.simulate(data=samples(), log=3)
    with pytest.raises(UsageError, match="no file can be written there"):
        coordinator.simulate(data=samples(), out="/proc/nowhere")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_numbers_and_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    params = {"lr": np.float32(0.5), "local_epochs": np.int64(1)}
    given = {**IN_PROCESS, "clients": np.int64(2), "params": params, "seed": np.int64(3), "out": "~/run"}
    result = coordinator.simulate(data=samples(), **given)
    assert (result.summary["params"]["lr"], result.summary["seed"]) == (0.5, 3)
    assert result.folder == tmp_path / "run"


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"agents": {}}, "agents: expected at least one"),
        ({"agents": ["kitchen"]}, "agents: expected at least one, as a mapping"),
        ({"agents": {"The Kitchen": "digits"}}, "agent 'The Kitchen': 1 mistake"),
        ({"rounds": 0}, "rounds = 0: expected a whole number, 1 or more"),
        ({"seed": "first"}, "seed = 'first': expected a whole number"),
        ({"params": {"lrr": 1}}, "did you mean 'lr'"),
    ],
)
def test_a_federation_with_mistakes_begins_nothing(changed, words, tmp_path):
    image = {"kind": "image", "channels": 1, "height": 16, "width": 16}
    task = {"input": image, "class_names": ["0", "1"], "encoder": "small_cnn"}
    config = coordinator.CoordinatorConfig.model_validate({"state": tmp_path / "fed" / "coordinator", "task": task})
    with pytest.raises(UsageError, match=words):
        coordinator.federate(**{"config": config, "agents": {"kitchen": "digits"}, **changed})
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_the_call_leave_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError):
        coordinator.simulate(data=samples(), partition="domains", **IN_PROCESS)
    assert list(tmp_path.glob("headwater-*")) == []


def test_a_traceback_is_the_cause_where_errors_take_no_notes():
    """As in Python 3.10."""

    class WithoutNotes(RunFailed):
        @property
        def add_note(self):
            raise AttributeError

    error = WithoutNotes("round 2 has failed")
    Failure(trace="Traceback: my bug\n").attach_to(error)
    add_note(error, "the folder is kept")
    assert str(error.__cause__) == "Traceback of the client's process:\nTraceback: my bug\nthe folder is kept"


WITH_TORCHVISION = """
from torch import nn
from torchvision import models, transforms

def net(task):
    network = models.squeezenet1_0(num_classes=4)
    return nn.Sequential(nn.Upsample(32), nn.Conv2d(task.input.channels, 3, 1), network)

def data(n="24"):
    import numpy as np
    from torchvision import datasets
    rows = [(np.asarray(image), int(label) % 2) for image, label in datasets.FakeData(int(n), (3, 8, 8))]
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows])
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"engine": "serial"}, {"engine": "pool", "workers": 2}])
def test_files_that_import_torchvision_are_loaded_in_every_process(engine, tmp_path):
    """In a process of its own: torchvision may be imported here already."""
    (tmp_path / "mine.py").write_text(WITH_TORCHVISION, encoding="utf-8")
    given = {**IN_PROCESS, "clients": 2, "encoder": "mine.py:net", "data": "mine.py:data", **engine}
    code = f"import coordinator; print(len(coordinator.simulate(**{given!r}).clients))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.parametrize("made", ["export/__init__.py", "export.py"])
def test_an_export_beside_a_script_is_named(made, tmp_path):
    """A project of machine learning has a folder of that name more often than not."""
    foreign = tmp_path / made
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("import coordinator\ncoordinator.simulate(data='digits')\n", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.strip().splitlines()[-1]
    place = tmp_path / made.partition("/")[0]
    assert last.startswith(f"edge_agent.core.errors.UsageError: {place}")
    assert "shadows Headwater's package 'export'" in last
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "methods"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"headwater: {place}")
    assert "Traceback" not in done.stderr

"""``headwater run --from``: what a run begins with, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coordinator import simulate
from coordinator.cli.start_from import Start
from coordinator.config import load_config
from coordinator.rounds.request import Request
from coordinator.state.store import StateFolder
from coordinator.views.runs import replay
from edge_agent import methods
from edge_agent.bundle.starter import bundle_path
from edge_agent.core.errors import UsageError
from edge_agent.core.task import EncoderTask, ImageInput
from edge_agent.training.weights import read_weights

CONFIG = """
state = "state"
[broker]
url = "mqtt://127.0.0.1:1"
[task]
class_names = ["cat", "dog", "cow"]
encoder = "{encoder}"
input = {{ kind = "{kind}", {sides} }}
"""
PICTURES = "channels = 1, height = 8, width = 8"


@pytest.fixture
def configured(tmp_path):
    """A function that writes a configuration and returns its path."""

    def write(encoder="small_cnn", kind="image", sides=PICTURES):
        path = tmp_path / "c.toml"
        path.write_text(CONFIG.format(encoder=encoder, kind=kind, sides=sides))
        return path

    return write


@pytest.fixture
def simulated(tmp_path):
    """A finished run of pictures of 8 x 8 of two classes, in the state folder of the configuration."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    pictures = rng.integers(0, 100, (40, 8, 8), dtype=np.uint8) + (100 * labels[:, None, None]).astype(np.uint8)
    rows = {"a": (pictures[:20], labels[:20]), "b": (pictures[20:], labels[20:])}
    return simulate("fedavg", data=rows, rounds=1, engine="serial", out=tmp_path / "state")


def requested(folder) -> Request:
    """The newest request in a state folder."""
    with StateFolder(folder).look() as state:
        return Request.from_fact(replay(state.journal, state.journal.runs()[-1]).request)


def test_the_starter_encoder_brings_its_network_and_inputs(call, configured, tmp_path):
    code, _, err = call("run", "--config", configured(), "--from", "starter", "--no-wait")
    assert code == 0
    assert "as in starter, this run has encoder starter_cnn (not small_cnn), inputs (3, 64, 64)" in " ".join(
        err.split()
    )
    request = requested(tmp_path / "state")
    assert request.task.encoder == "starter_cnn"
    assert request.task.class_names == ("cat", "dog", "cow")
    assert request.weights is not None
    assert request.weights.path == bundle_path("starter")


@pytest.mark.parametrize(
    "sides, said",
    [
        (
            "height = 64, width = 64",
            "were trained on other inputs: std 0.25 (here 0.5); --from starter takes both",
        ),
        ("height = 64, width = 64, std = [0.25]", ""),
        ("height = 32, width = 64, std = [0.25]", "were trained on other inputs: height 64 (here 32)"),
    ],
)
def test_weights_of_a_bundle_say_where_the_inputs_differ(call, configured, sides, said):
    """Network and shapes fit, and the run began with an encoder that saw other numbers than it had learned from."""
    options = ("--weights", "starter", "--no-wait")
    code, _, err = call("run", "--config", configured("starter_cnn", sides=sides), *options)
    assert code == 0
    err = " ".join(err.split())
    assert said in err
    assert ("trained on other inputs" in err) == bool(said)


def test_clients_get_the_weights_of_the_bundle(call, configured, tmp_path):
    call("run", "--config", configured(), "--from", "starter", "--no-wait")
    request = requested(tmp_path / "state")
    model = methods.create("fedavg").build(request.task)
    request.weights.load_into(model)
    expected, _ = read_weights(model.encoder, bundle_path("starter"))
    name = "stage3.1.conv2.weight"
    np.testing.assert_array_equal(model.encoder.state_dict()[name].numpy(), expected[name])


def test_an_earlier_run_is_continued_with_its_weights(simulated, call, configured, tmp_path):
    code, out, err = call("run", "--config", configured(), "--from", "run-0001", "--no-wait")
    assert (code, err) == (0, "")
    assert "note: as in" not in out
    request = requested(tmp_path / "state")
    model = methods.create("fedavg").build(request.task)
    request.weights.load_into(model)
    simulated.export(tmp_path / "b.hwb")
    kernels = [name for name in model.encoder.state_dict() if name.endswith("weight")]
    from_bundle, _ = read_weights(model.encoder, tmp_path / "b.hwb")
    for name in kernels:
        np.testing.assert_array_equal(model.encoder.state_dict()[name].numpy(), from_bundle[name])


def test_a_bundle_of_a_run_is_a_beginning(simulated, call, configured, tmp_path):
    simulated.export(tmp_path / "b.hwb")
    assert call("run", "--config", configured(), "--from", tmp_path / "b.hwb", "--no-wait")[0] == 0
    assert requested(tmp_path / "state").weights.path == tmp_path / "b.hwb"


@pytest.mark.parametrize(
    "options, said, unsaid",
    [
        (("--method", "afl"), ("random weights: --from starter (pictures)", "afl needs one round (--rounds 1)"), ""),
        (("--method", "afl", "--rounds", 1, "--from", "starter"), (), "note: afl"),
        (("--method", "fedavg"), (), "note:"),
    ],
)
def test_what_a_method_without_training_needs_is_said_before_its_run(call, configured, options, said, unsaid):
    code, _, err = call("run", "--config", configured(), *options, "--no-wait")
    text = " ".join(err.split())
    assert code == 0
    assert all(words in text for words in said)
    assert not unsaid or unsaid not in text


SIMULATION = """
method = "afl"
rounds = 1
data = "digits:rendered?n=40"
clients = 2
local = false
"""


def test_a_simulation_begins_with_the_encoder_that_its_file_names(call, tmp_path):
    """'from' was called unknown, with 'fraction_max' as the nearest name."""
    path = tmp_path / "sim.toml"
    path.write_text(f'from = "starter"\n{SIMULATION}')
    code, out, err = call("simulate", "--config", path, "--out", tmp_path / "sim", "--json")
    assert code == 0, err
    assert json.loads(out)["weights"]["path"] == str(bundle_path("starter"))


def test_a_bundle_in_the_file_of_a_simulation_counts_from_its_folder(call, tmp_path):
    path = tmp_path / "sim.toml"
    path.write_text(f'from = "gone.hwb"\n{SIMULATION}')
    code, _, err = call("simulate", "--config", path, "--out", tmp_path / "sim")
    assert code == 2
    assert f"--from {tmp_path / 'gone.hwb'}: there is no such file" in " ".join(err.split())


def test_options_that_are_no_settings_are_told_as_such(call, tmp_path):
    path = tmp_path / "sim.toml"
    path.write_text(f'out = "sim"\n{SIMULATION}')
    code, _, err = call("simulate", "--config", path)
    assert code == 2
    assert "out: no setting of a file; give it on the command line (--out)" in " ".join(err.split())


@pytest.mark.parametrize(
    "options, said",
    [
        (("--from", "run-0007"), "is neither a bundle file nor a run; there are no runs here yet"),
        (("--from", "starter", "--no-weights"), "--no-weights and --from contradict each other"),
        (("--from", "starter", "--weights", "w.safetensors"), "--weights and --from contradict each other"),
        (("--from", "starter", "--resume", "run-0001"), "keeps the settings of the run; leave out --from"),
        (("--from", "starter", "--method", "local"), "shares no encoder: no client would get them"),
    ],
)
def test_what_cannot_be_is_refused(call, configured, options, said):
    code, _, err = call("run", "--config", configured(), *options, "--no-wait" if "--resume" not in options else "-v")
    assert code == 2
    assert said in " ".join(err.split())


def test_weights_alone_do_not_say_their_network(call, configured, tmp_path):
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(b"weights")
    simulation = ("simulate", "-m", "afl", "-d", "digits", "--out", tmp_path / "sim")
    for words in (("run", "--config", configured(), "--no-wait"), simulation):
        code, _, err = call(*words, "--from", file)
        assert code == 2
        assert f"name the encoder, and the file by --weights {file}" in " ".join(err.split())


def test_a_simulation_is_told_how_a_run_becomes_a_file(call, tmp_path):
    code, _, err = call("simulate", "-m", "afl", "-d", "digits", "--out", tmp_path / "sim", "--from", "run-0001")
    assert code == 2
    assert "'headwater export' makes such a file of a run" in err


def test_recordings_need_an_encoder_of_recordings(call, configured):
    path = configured("cnn1d", "window", "channels = 3, length = 50")
    code, _, err = call("run", "--config", path, "--from", "starter", "--no-wait")
    assert code == 2
    assert "its encoder takes images" in err


def test_a_network_that_cannot_be_trained_here_is_refused(configured, tmp_path):
    task = EncoderTask(input=ImageInput(channels=3, height=224, width=224), encoder="theirs")
    start = Start("theirs.hwb", tmp_path / "theirs.hwb", task)
    with pytest.raises(UsageError, match="its network 'theirs' cannot be trained here"):
        start.configure(load_config(configured(), None))
    with pytest.raises(UsageError, match="its network 'theirs' cannot be trained here"):
        start.options({})


def test_parameters_and_normalization_that_give_way_are_named(configured, tmp_path):
    own = load_config(configured(), None).task
    task = EncoderTask(
        input=ImageInput(channels=1, height=8, width=8, mean=(0.25,), std=(0.5,)),
        encoder="small_cnn",
        encoder_params={"width": 3},
    )
    start = Start("theirs.hwb", tmp_path / "theirs.hwb", task)
    assert start.differences(own) == "encoder parameters {'width': 3} (not {}), mean (0.25,) (not (0.5,))"
    assert start.configure(load_config(configured(), None)).task.encoder_params == {"width": 3}


def test_the_configuration_stays_as_it_is(call, configured):
    path = configured()
    before = load_config(path, None)
    call("run", "--config", path, "--from", "starter", "--no-wait")
    assert load_config(path, None) == before


def test_the_queue_says_what_a_run_begins_with_as_json(call, configured):
    out = call("run", "--config", configured(), "--from", "starter", "--no-wait", "--json")[1]
    assert json.loads(out)["run_id"] == "run-0001"


def test_a_simulation_begins_with_the_starter_encoder(call, tmp_path):
    words = ("simulate", "-m", "afl", "-d", "digits:optdigits?n=120", "--clients", "3", "--rounds", "1", "--json")
    code, out, _ = call(*words, "--from", "starter", "--out", tmp_path / "sim", "--engine", "serial")
    assert code == 0
    assert json.loads(out)["weights"]["path"] == str(bundle_path("starter"))


@pytest.mark.parametrize(
    "options, said",
    [
        (("--from", "nowhere.hwb"), "there is no such file"),
        (("--from", "starter", "--encoder", "small_cnn", "--weights", "w"), "leave out --encoder, --weights"),
        (("--from", "starter", "--encoder-params", "width=3"), "leave out --encoder-params"),
        (("--from", "starter", "--resume"), "has an encoder already"),
    ],
)
def test_what_a_simulation_cannot_begin_with_is_refused(call, tmp_path, options, said):
    code, _, err = call("simulate", "-m", "afl", "-d", "digits", "--out", tmp_path / "sim", *options)
    assert code == 2
    assert said in " ".join(err.split())

"""FedRIR: what travels, prediction, moments that last, and inputs that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paper_methods import FEDRIR_MODES, FEDRIR_PARTS, fedrir, is_statistic, parts_of, tensors_of

from edge_agent import heads, methods
from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.errors import ConfigError, TrainingFailed
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.methods.fedrir import specific_features
from edge_agent.wire.tensors import decode, encode


def image_task(channels: int, height: int, width: int, encoder: str = "fedrir_cnn", **params) -> Task:
    size = ImageInput(channels=channels, height=height, width=width)
    return Task(input=size, class_names=("left", "middle", "right"), encoder=encoder, encoder_params=params)


# --- what travels ------------------------------------------------------------------------------------------------


@FEDRIR_MODES
def test_only_the_encoder_without_statistics_travels(federation, mode):
    fed = federation(fedrir(id_mode=mode))
    sent = fed.run_round()[0].tensors
    model = fed.clients["a"].model
    assert parts_of(model) == FEDRIR_PARTS
    everything = {name for name in model.state_dict() if name.startswith("encoder.") and not is_statistic(name)}
    assert set(sent) == everything == set(fed.state)
    assert any(name.endswith("layers.1.weight") for name in sent), "gamma and beta of batch norm travel"


def test_there_is_no_shared_classifier(federation):
    fed = federation(fedrir()).run()
    client = fed.clients["a"]
    assert fed.method.predict_global(client, client.train_inputs) is None
    assert fed.method.global_head(fed.state) is None


def test_all_clients_start_from_the_one_encoder_that_was_broadcast(federation):
    fed = federation(fedrir())
    for name in fed.clients:
        fed.download(name)
    encoders = [encode(tensors_of(client.model, "encoder")) for client in fed.clients.values()]
    assert len(set(encoders)) == 1


def test_the_encoder_starts_as_other_methods_start_it(task):
    def start(name: str) -> bytes:
        torch.manual_seed(3)
        return encode(tensors_of(methods.create(name).build(task), "encoder"))

    assert start("fedrir") == start("fedper")


# --- prediction ----------------------------------------------------------------------------------------------------


def test_prediction_uses_shared_features_and_means_of_its_own(federation, images):
    fed = federation(fedrir(), rounds=1).run()
    client = fed.clients["a"]
    (inputs, _) = images([0, 1, 2], seed=5)
    model = client.model.eval()
    with torch.no_grad():
        c = model.part("specific")(inputs)[0]
        logits = model.head(torch.cat([model.encoder(inputs), c], 1))
    assert c.shape == (3, 6)
    assert model.head.in_features == 12 + 6
    torch.testing.assert_close(fed.method.predict(client, inputs), logits.softmax(1))
    torch.testing.assert_close(specific_features(model, inputs), c)


@pytest.mark.parametrize(
    "params",
    [{}, {"id_mode": "vclub", "id_weight": 0.01}, {"without_id": True}, {"without_mcsl": True}, {"frozen_bn": "eval"}],
    ids=str,
)
def test_fedrir_learns_the_stripes(federation, images, params):
    method = fedrir(batch_size=15, local_epochs=3, lr=5e-3, **params)
    fed = federation(method, rounds=8, labels={name: [0, 1, 2] * 10 for name in "ab"}).run()
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    found = method.predict(fed.clients["a"], inputs).argmax(dim=1)
    assert (found == wanted).double().mean() > 0.9


# --- batches and moments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last, steps", [(True, 2), (False, 3)])
def test_a_partial_last_batch_is_left_out_as_asked(federation, drop_last, steps):
    fed = federation(fedrir(drop_last=drop_last))
    fed.update("a")  # 10 samples in batches of 4
    memory = fed.clients["a"].memory
    assert memory["optimizer.id.head.weight.step"] == steps
    assert memory["optimizer.mcsl.generator.layers.0.weight.step"] == steps


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_fewer_samples_than_a_batch_still_make_a_step(federation, samples):
    fed = federation(fedrir(batch_size=100), labels={"a": [0, 1, 2][:samples]})
    before = tensors_of(fed.clients["a"].model, "head")
    fed.update("a")
    assert fed.clients["a"].memory["optimizer.id.head.weight.step"] == 1
    assert not np.array_equal(before["head.weight"], tensors_of(fed.clients["a"].model)["head.weight"])


@FEDRIR_MODES
def test_moments_go_on_over_rounds_and_downloads(federation, mode):
    fed = federation(fedrir(id_mode=mode), rounds=3).run()
    memory = fed.clients["a"].memory
    labels = {name.split(".")[1] for name in memory}
    assert labels == {"mcsl", "id"} | ({"idm"} if mode == "vclub" else set())
    assert {float(array) for name, array in memory.items() if name.endswith(".step")} == {6.0}


def test_reset_moments_leave_no_trace(federation):
    kept, reset = (federation(fedrir(optimizer_state=mode), rounds=2) for mode in ("persist", "reset"))
    for fed in (kept, reset):
        fed.run_round()
    assert encode(kept.state) == encode(reset.state), "nothing is kept before the first round"
    for fed in (kept, reset):
        fed.run_round()
    assert encode(kept.state) != encode(reset.state)
    assert reset.clients["a"].memory == {}


@FEDRIR_MODES
def test_a_restart_between_rounds_changes_no_bit(task, images, mode):
    method = fedrir(id_mode=mode)
    inputs, labels = (tensor.numpy() for tensor in images([0, 1, 2] * 4, seed=1))
    data = Arrays(inputs, labels), Arrays(inputs[:3], labels[:3])

    def session() -> Session:
        return Session(method, task, "lamp", *data, seed=0, device="cpu")

    def play(one: Session, other: Session) -> bytes:
        start = {n: a for n, a in one._fresh.items() if n in one._shared}
        first = one.train(start, ClientState(), round_number=1, rounds=2, evaluate=False)
        kept = ClientState(decode(encode(first.kept.personal)), decode(encode(first.kept.memory)))
        second = other.train(first.update, kept, round_number=2, rounds=2, evaluate=False)
        return encode({**second.update, **second.kept.personal, **second.kept.memory})

    lasting = session()
    assert play(lasting, lasting) == play(session(), session())


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, named", [({"id_weight": 1e39}, "id_weight 1e.39"), ({"kld_weight": 1e39}, "kld_weight 1e.39")]
)
def test_a_weight_that_diverges_is_named(federation, params, named):
    fed = federation(fedrir(**params))
    before = dict(fed.clients["a"].memory)
    with pytest.raises(TrainingFailed, match=rf"client 'a': loss became .* {named}.*lower lr or"):
        fed.update("a")
    assert before.keys() == {name for name in fed.clients["a"].memory if ".id." in name}


def test_inputs_that_are_not_finite_stop_the_update(federation):
    fed = federation(fedrir())
    fed.clients["a"].train_inputs[0] = torch.nan
    with pytest.raises(TrainingFailed, match="look for extreme values in the data"):
        fed.update("a")


@pytest.mark.parametrize(
    "height, width, patch, message",
    [
        (30, 28, 4, r"height is 30, expected a multiple of 4 \(patch 4.*resize to 28"),
        (28, 27, 4, "width is 27, expected a multiple of 4"),
        (28, 28, 3, r"height is 28, expected a multiple of 12 \(patch 3, and the generator draws multiples of 4\)"),
        (30, 30, 2, r"height is 30, expected a multiple of 4 \(patch 2"),
        (8, 8, 16, "height is 8, expected a multiple of 16 .*resize to 16, or change patch"),
    ],
)
def test_sides_that_do_not_fit_are_refused_with_side_and_patch(height, width, patch, message):
    with pytest.raises(ConfigError, match=message):
        fedrir(patch=patch).build(image_task(1, height, width))


def test_both_sides_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        fedrir().build(image_task(1, 30, 31))
    assert len(caught.value.mistakes) == 2


def test_windows_are_refused_in_so_many_words():
    windows = Task(input=WindowInput(channels=2, length=16), class_names=("a", "b"), encoder="cnn1d")
    with pytest.raises(ConfigError, match=r"kind is 'window', FedRIR masks and redraws images; set without_mcsl"):
        fedrir().build(windows)
    assert parts_of(fedrir(without_mcsl=True).build(windows)) == {"encoder", "head"}


@pytest.mark.parametrize(
    "channels, height, width, patch", [(1, 8, 8, 4), (3, 12, 20, 2), (1, 16, 8, 8), (3, 28, 4, 1), (1, 36, 24, 12)]
)
def test_other_sides_that_4_divides_work(federation, channels, height, width, patch):
    task = image_task(channels, height, width)
    fed = federation(fedrir(patch=patch), task, rounds=1, labels={"a": []})
    client = fed.clients["a"]
    client.train_inputs = torch.randn(6, *task.input_shape, generator=torch.Generator().manual_seed(0))
    client.train_labels = torch.tensor([0, 1, 2, 0, 1, 2])
    fed.run()
    probabilities = fed.method.predict(client, client.train_inputs)
    assert probabilities.shape == (6, 3)
    assert torch.isfinite(probabilities).all()


def test_the_encoder_is_the_one_that_the_task_names():
    for encoder, width in (("small_cnn", 128), ("fedrir_cnn", 512), ("linear", 16)):
        model = fedrir(id_mode="official").build(image_task(1, 28, 28, encoder))
        assert model.head.in_features == width + 6
        assert model.part("distiller").mean[0].in_features == width, "official: from g to c"
        vclub = fedrir(id_mode="vclub").build(image_task(1, 28, 28, encoder))
        assert (vclub.part("distiller").mean[0].in_features, vclub.part("distiller").mean[2].out_features) == (6, width)


def test_the_paper_s_model_has_the_paper_s_sizes():
    model = methods.create("fedrir", paper=True).build(image_task(1, 28, 28))
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert sizes == {
        "encoder": 577_088, "specific": 1_101_888, "generator": 577_345, "distiller": 263_424, "head": 1024 * 3 + 3
    }  # fmt: skip


def test_momentum_is_refused_where_adam_has_none():
    with pytest.raises(ConfigError, match="momentum"):
        fedrir(momentum=0.5)


def test_device_heads_are_said_to_be_approximate():
    method = fedrir(lr=0.01, batch_size=7)
    assert method.heads[0] == "fedrir_global"
    assert method.exactness["fedrir_global"][0] == "approximate"
    head = heads.create("fedrir_global", method.head_params("fedrir_global"))
    assert (head.params.lr, head.params.batch_size) == (0.01, 7)

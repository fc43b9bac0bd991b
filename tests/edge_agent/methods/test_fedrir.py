from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import heads, methods
from edge_agent.errors import ConfigError, TrainingFailed
from edge_agent.methods import fedrir as fedrir_module
from edge_agent.methods.fedrir import specific_features
from edge_agent.task import ImageInput, Task, WindowInput
from edge_agent.training.session import Arrays, Kept, Session
from edge_agent.training.variational import SpecificEncoder
from edge_agent.wire.tensors import decode, encode

SMALL = {"local_epochs": 1, "batch_size": 4, "specific_dim": 6}
MODES = pytest.mark.parametrize("mode", ["official", "vclub"])
EVERY_PART = {"encoder", "head", "specific", "generator", "distiller"}


def fedrir(**params):
    return methods.create("fedrir", {**SMALL, **params})


def image_task(channels: int, height: int, width: int, encoder: str = "fedrir_cnn", **params) -> Task:
    size = ImageInput(channels=channels, height=height, width=width)
    return Task(input=size, class_names=("left", "middle", "right"), encoder=encoder, encoder_params=params)


def tensors_of(model, *parts: str) -> dict[str, np.ndarray]:
    state = model.state_dict()
    return {name: tensor.numpy().copy() for name, tensor in state.items() if not parts or name.split(".")[0] in parts}


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def parts_of(model) -> set[str]:
    return {name for name, _ in model.named_children()}


# --- what travels ------------------------------------------------------------------------------------------------


@MODES
def test_only_the_encoder_without_statistics_travels(federation, mode):
    fed = federation(fedrir(id_mode=mode))
    sent = fed.run_round()[0].tensors
    model = fed.clients["a"].model
    assert parts_of(model) == EVERY_PART
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


# --- the two stages ----------------------------------------------------------------------------------------------


def test_mcsl_trains_the_client_specific_encoder_and_the_generator_alone(federation):
    fed = federation(fedrir())
    client = fed.clients["a"]
    before, others = tensors_of(client.model), ("encoder", "head", "distiller")
    still = encode(tensors_of(client.model, *others))
    fed.method._learn_specific(client)
    assert encode(tensors_of(client.model, *others)) == still
    after = tensors_of(client.model, "specific", "generator")
    assert all(not np.array_equal(array, before[name]) for name, array in after.items())
    assert client.log["loss.mcsl"] > 0


@MODES
@pytest.mark.parametrize("frozen_bn", ["train", "eval"])
def test_id_leaves_the_client_specific_encoder_bit_for_bit_but_for_statistics(federation, mode, frozen_bn):
    fed = federation(fedrir(id_mode=mode, frozen_bn=frozen_bn))
    client = fed.clients["a"]
    before = tensors_of(client.model)
    fed.method._distill(client)
    moved = {name for name, array in tensors_of(client.model).items() if not np.array_equal(array, before[name])}
    frozen = {name for name in moved if name.startswith(("specific.", "generator."))}
    assert not {name for name in frozen if not is_statistic(name)}
    assert bool(frozen) is (frozen_bn == "train")
    trained = {name for name in before if name.startswith(("encoder.", "head.", "distiller."))}
    assert trained <= moved | {name for name in trained if is_statistic(name)}
    assert all(weight.requires_grad for weight in client.model.parameters())


def official_loss(model, inputs, labels):
    shared, own = model.encoder(inputs), model.part("specific")(inputs)[0].detach()
    mean, logvar = model.part("distiller")(shared)
    misfit = ((own - mean) ** 2 / logvar.exp() + logvar).sum(1).mean()
    return F.cross_entropy(model.head(torch.cat([shared, own], 1)), labels) + misfit


def train_official_by_hand(model, inputs, labels):
    optimizer = torch.optim.Adam(
        [p for part in ("encoder", "head", "distiller") for p in model.part(part).parameters()], lr=5e-4
    )
    official_loss(model, inputs, labels).backward()
    optimizer.step()


def train_vclub_by_hand(model, inputs, labels):
    shared, own = model.encoder(inputs), model.part("specific")(inputs)[0].detach()
    idm = torch.optim.Adam(model.part("distiller").parameters(), lr=5e-4)
    mean, logvar = model.part("distiller")(own)
    ((shared.detach() - mean) ** 2 / logvar.exp() + logvar).sum(1).mean().backward()
    idm.step()
    mean, logvar = (moment.detach() for moment in model.part("distiller")(own))
    q = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    everybody = torch.stack([q.log_prob(row.expand_as(mean)).sum(1) for row in shared])  # (j, i)
    bound = (q.log_prob(shared).sum(1) - everybody.mean(0)).mean()
    optimizer = torch.optim.Adam([*model.encoder.parameters(), *model.head.parameters()], lr=5e-4)
    optimizer.zero_grad()
    value = F.cross_entropy(model.head(torch.cat([shared, own], 1)), labels) + bound.clamp(min=0)
    gradients = torch.autograd.grad(value, [p for group in optimizer.param_groups for p in group["params"]])
    for parameter, gradient in zip([*model.encoder.parameters(), *model.head.parameters()], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("mode, by_hand", [("official", train_official_by_hand), ("vclub", train_vclub_by_hand)])
def test_one_step_of_id_equals_the_same_step_written_out(federation, mode, by_hand):
    fed = federation(fedrir(id_mode=mode, batch_size=100))
    client = fed.clients["a"]
    twin = copy.deepcopy(client.model).train()
    by_hand(twin, client.train_inputs, client.train_labels)
    fed.method._distill(client)
    expected = tensors_of(twin)
    for name, array in tensors_of(client.model).items():
        np.testing.assert_allclose(array, expected[name], atol=3e-5, rtol=1e-4, err_msg=name)


def test_one_step_of_mcsl_equals_the_same_step_written_out(federation):
    fed = federation(fedrir(batch_size=100, mask_ratio=0.0, kld_weight=0.3))
    client = fed.clients["a"]
    twin, draws = copy.deepcopy(client.model).train(), torch.Generator()
    draws.set_state(client.generator.get_state())
    order = copy.deepcopy(client.rng).permutation(client.samples)
    inputs = client.train_inputs[torch.from_numpy(order)]
    mean, logvar = twin.part("specific")(inputs)
    redrawn = twin.part("generator")(mean + torch.randn(mean.shape, generator=draws) * (logvar / 2).exp())
    kld = (-0.5 * (1 + logvar - mean**2 - logvar.exp())).sum(1).mean()
    parameters = [*twin.part("specific").parameters(), *twin.part("generator").parameters()]
    (((redrawn - inputs) ** 2).mean() + 0.3 * kld).backward()
    torch.optim.Adam(parameters, lr=5e-4).step()
    fed.method._learn_specific(client)
    expected = tensors_of(twin)
    for name, array in tensors_of(client.model).items():
        np.testing.assert_allclose(array, expected[name], atol=3e-5, rtol=1e-4, err_msg=name)


def test_masks_change_what_mcsl_learns_from_and_not_what_it_learns_to_draw(federation, monkeypatch):
    seen, drawn = [], []
    forward = SpecificEncoder.forward
    monkeypatch.setattr(SpecificEncoder, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    monkeypatch.setattr(F, "mse_loss", lambda a, b, loss=F.mse_loss: (drawn.append(b), loss(a, b))[1])
    fed = federation(fedrir(batch_size=100, mask_ratio=0.5))
    fed.method._learn_specific(fed.clients["a"])
    assert [(x == 0).float().mean().item() for x in seen] == [0.5]
    assert (drawn[0] != 0).all()


def test_id_sees_whole_images(federation, monkeypatch):
    seen = []
    forward = SpecificEncoder.forward
    monkeypatch.setattr(SpecificEncoder, "forward", lambda self, x: (seen.append(x), forward(self, x))[1])
    fed = federation(fedrir(batch_size=100))
    fed.method._distill(fed.clients["a"])
    assert all((x != 0).all() for x in seen)


def test_statistics_of_the_encoder_stay_its_clients_own(federation):
    fed = federation(fedrir())
    fed.run_round()
    name = "encoder.layers.1.running_mean"
    assert not np.array_equal(fed.personal("a")[name], fed.personal("b")[name])


# --- information distillation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [True, False])
def test_an_estimate_below_zero_pulls_at_nothing(federation, monkeypatch, floor):
    monkeypatch.setattr(fedrir_module, "vclub", lambda shared, *_: -shared.square().sum())
    encoders = []
    for weight in (1.0, 0.0):
        fed = federation(fedrir(id_mode="vclub", id_weight=weight, id_floor=floor))
        fed.method._distill(fed.clients["a"])
        encoders.append(encode(tensors_of(fed.clients["a"].model, "encoder", "head")))
    assert (encoders[0] == encoders[1]) is floor


@MODES
def test_the_weight_of_distillation_matters(federation, mode):
    one, other = (federation(fedrir(id_mode=mode, id_weight=weight, idm_steps=30)) for weight in (0.0, 1.0))
    for fed in (one, other):
        fed.run_round()
    assert encode(one.state) != encode(other.state)


def test_negatives_and_inner_steps_are_used(federation):
    states = []
    for params in ({}, {"negatives": "permutation"}, {"idm_steps": 4}):
        fed = federation(fedrir(id_mode="vclub", **params), seed=1)
        fed.run_round()
        states.append(encode({**fed.state, **fed.personal("a")}))
    assert len(set(states)) == 3


@MODES
def test_without_distillation_the_loss_is_cross_entropy(federation, mode):
    without = federation(fedrir(id_mode=mode, without_id=True))
    weightless = federation(fedrir(id_mode="official", id_weight=0.0))
    assert parts_of(without.clients["a"].model) == EVERY_PART - {"distiller"}
    for fed in (without, weightless):
        client = fed.clients["a"]
        client.model.load_state_dict(weightless.clients["a"].model.state_dict(), strict=False)
        fed.method._distill(client)
    one, other = (tensors_of(fed.clients["a"].model, "encoder", "head") for fed in (without, weightless))
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=1e-6, err_msg=name)


def test_without_mcsl_the_head_sees_shared_features_only(federation):
    fed = federation(fedrir(without_mcsl=True), rounds=1).run()
    client = fed.clients["a"]
    assert parts_of(client.model) == {"encoder", "head"}
    assert client.model.head.in_features == 12
    assert set(client.log) == {"loss"}


# --- prediction ----------------------------------------------------------------------------------------------------


def test_prediction_uses_shared_features_and_means_of_its_own(federation, images):
    fed = federation(fedrir(), rounds=1).run()
    client, (inputs, _) = fed.clients["a"], images([0, 1, 2], seed=5)
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


@MODES
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


@MODES
def test_a_restart_between_rounds_changes_no_bit(task, images, mode):
    method = fedrir(id_mode=mode)
    inputs, labels = (tensor.numpy() for tensor in images([0, 1, 2] * 4, seed=1))
    data = Arrays(inputs, labels), Arrays(inputs[:3], labels[:3])

    def session() -> Session:
        return Session(method, task, "lamp", *data, seed=0, device="cpu")

    def play(one: Session, other: Session) -> bytes:
        start = {n: a for n, a in one._fresh.items() if n in one._shared}
        first = one.train(start, Kept(), round_number=1, rounds=2, evaluate=False)
        kept = Kept(decode(encode(first.kept.personal)), decode(encode(first.kept.memory)))
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
        model = fedrir().build(image_task(1, 28, 28, encoder))
        assert model.head.in_features == width + 6
        assert model.part("distiller").mean[0].in_features == width, "official: from g to c"
        vclub = fedrir(id_mode="vclub").build(image_task(1, 28, 28, encoder))
        assert (vclub.part("distiller").mean[0].in_features, vclub.part("distiller").mean[2].out_features) == (6, width)


def test_the_paper_s_model_has_the_paper_s_sizes():
    model = methods.create("fedrir").build(image_task(1, 28, 28))
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

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import nn

from edge_agent import models
from edge_agent.core.errors import ConfigError, UnknownName, UsageError
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.models.torchvision_networks import networks

GREY = ImageInput(channels=1, height=28, width=28)
COLOUR = ImageInput(channels=3, height=32, width=32)
WINDOW = WindowInput(channels=6, length=50)


def task(encoder, spec=GREY, **params) -> Task:
    return Task(input=spec, class_names=("a", "b"), encoder=encoder, encoder_params=params)


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "encoder, spec, width",
    [
        ("small_cnn", GREY, 128),
        ("small_cnn", COLOUR, 128),
        ("small_cnn", ImageInput(channels=1, height=4, width=9), 128),
        ("fedpac_cnn", GREY, 128),
        ("fedpac_cnn", COLOUR, 128),
        ("fedpac_cnn", ImageInput(channels=3, height=16, width=20), 128),
        ("resnet18", COLOUR, 512),
        ("resnet34", ImageInput(channels=1, height=32, width=32), 512),
        ("mobilenet_v1", COLOUR, 1024),
        ("mobilenet_v1", ImageInput(channels=1, height=33, width=40), 1024),
        ("mobilenet_v2", COLOUR, 1280),
        ("mobilenet_v3_small", ImageInput(channels=1, height=32, width=48), 576),
        ("mobilenet_v3_large", COLOUR, 960),
        ("efficientnet_b0", COLOUR, 1280),
        ("resnet50", COLOUR, 2048),
        ("vit", ImageInput(channels=1, height=32, width=32), 192),
        ("cnn1d", WINDOW, 128),
        ("cnn1d", WindowInput(channels=1, length=8), 128),
        ("char_cnn", WindowInput(channels=1, length=80, stride=1), 256),
        ("char_lstm", WindowInput(channels=1, length=80, stride=1), 256),
        ("linear", WINDOW, 16),
        ("linear", GREY, 16),
    ],
)
def test_features_have_the_promised_form(encoder, spec, width):
    built = models.create(task(encoder, spec))
    features = built.eval()(torch.randn(2, *spec.shape))
    assert features.shape == (2, width)
    assert features.dtype == torch.float32
    assert torch.isfinite(features).all()
    assert built.feature_dim == width


def test_every_encoder_is_found_and_says_what_it_accepts():
    expected = {
        *("small_cnn", "fedpac_cnn", "resnet18", "resnet34", "cnn1d", "linear"),
        *("mobilenet_v1", "mobilenet_v2", "mobilenet_v3_small", "alexnet_bn", "digits_cnn", "fedrir_cnn"),
        *("mobilenet_v3_large", "efficientnet_b0", "resnet50", "vit"),
    }  # fmt: skip
    assert expected <= set(models.names())
    for name in models.names():
        encoder = models.get(name)
        assert set(encoder.accepts) <= {"image", "window"}, name
        assert encoder.build.__doc__, name
        assert encoder.build.__name__ == name


def test_every_encoder_of_a_family_is_listed():
    for file, listed in models.FAMILIES.items():
        family = importlib.import_module(f"edge_agent.models.{file}")
        assert sorted(name for name, member in vars(family).items() if isinstance(member, models.Encoder)) == [*listed]


def test_an_encoder_in_a_file_of_its_own_needs_no_listing(monkeypatch):
    module = ModuleType("bare")
    module.bare = models.Encoder(lambda task, _: nn.Flatten())
    monkeypatch.setattr(models.registry, "_extra", {"bare": module})
    assert models.get("bare") is module.bare


def test_what_is_no_encoder_does_not_hide_which_encoders_suit_the_inputs(monkeypatch):
    monkeypatch.setattr(models.registry, "_extra", {"bare": nn.Identity})
    with pytest.raises(
        ConfigError, match=r"(?s)encoder 'small_cnn'.*encoders for windows: char_cnn, char_lstm, cnn1d, linear$"
    ):
        models.check(task("small_cnn", WindowInput(channels=1, length=8)))


def test_what_is_no_encoder_is_refused(monkeypatch):
    monkeypatch.setattr(models.registry, "_extra", {"bare": nn.Identity})
    with pytest.raises(UsageError, match=r"encoder 'bare' .*: expected an edge_agent.models.Encoder"):
        models.create(task("bare"))


def test_fedpac_networks_have_the_published_number_of_weights():
    # conv(1,16,5) 416 + conv(16,32,5) 12,832 + fc(800,128) 102,528 = 115,776
    assert weights(models.create(task("fedpac_cnn"))) == 416 + 12_832 + 102_528
    # conv(3,16,5) 1,216 + conv(16,32,5) 12,832 + conv(32,64,3) 18,496 + fc(576,128) 73,856
    assert weights(models.create(task("fedpac_cnn", COLOUR))) == 1_216 + 12_832 + 18_496 + 73_856


def test_resnet18_without_its_classifier_has_the_known_number_of_weights():
    # torchvision states 11,689,512 for the whole network; fc(512, 1000) has 513,000 of them.
    assert weights(models.create(task("resnet18", COLOUR))) == 11_689_512 - 513_000


@pytest.mark.parametrize(
    "encoder, spec, expected",
    [
        # The authors and torchvision count whole networks for 1000 classes; the classifiers' weights are subtracted.
        ("resnet34", COLOUR, 21_797_672 - (512 + 1) * 1000),
        ("mobilenet_v1", COLOUR, 4_231_976 - (1024 + 1) * 1000),
        ("mobilenet_v2", COLOUR, 3_504_872 - (1280 + 1) * 1000),
        ("mobilenet_v3_small", COLOUR, 2_542_856 - (576 + 1) * 1024 - (1024 + 1) * 1000),
        ("mobilenet_v3_large", COLOUR, 5_483_032 - (960 + 1) * 1280 - (1280 + 1) * 1000),
        ("efficientnet_b0", COLOUR, 5_288_548 - (1280 + 1) * 1000),
        ("resnet50", COLOUR, 25_557_032 - (2048 + 1) * 1000),
        # DeiT-tiny has 5,717,416 with 1000 classes.
        ("vit", ImageInput(channels=3, height=224, width=224), 5_717_416 - (192 + 1) * 1000),
        # Convolutions without bias, and two weights of batch norm for each channel.
        ("cnn1d", WindowInput(channels=9, length=128), 9 * 32 * 7 + 32 * 64 * 5 + 64 * 128 * 3 + 2 * (32 + 64 + 128)),
    ],
)
def test_encoders_have_the_known_number_of_weights(encoder, spec, expected):
    assert weights(models.create(task(encoder, spec))) == expected


def test_grey_images_change_only_the_first_convolution():
    grey = models.create(task("resnet18", ImageInput(channels=1, height=32, width=32)))
    colour = models.create(task("resnet18", COLOUR))
    changed = [n for n, w in colour.state_dict().items() if w.shape != grey.state_dict()[n].shape]
    assert changed == ["conv1.weight"]


@pytest.mark.parametrize("params, mistakes", [({"patch": 12}, 1), ({"heads": 5}, 1), ({"patch": 12, "heads": 5}, 2)])
def test_a_transformer_of_impossible_sizes_is_refused(params, mistakes):
    with pytest.raises(ConfigError, match="encoder 'vit'") as refusal:
        models.create(task("vit", COLOUR, **params))
    assert len(refusal.value.mistakes) == mistakes


@pytest.mark.parametrize(
    "name, params", [("mobilenet_v3_large", {}), ("efficientnet_b0", {}), ("resnet50", {}), ("vit", {"patch": 8})]
)
def test_weights_of_torchvision_give_torchvisions_features(name, params):
    """Its own network with its classifier taken off is the reference."""
    torch.manual_seed(3)
    if name == "vit":
        sizes = {"num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
        theirs = networks().VisionTransformer(image_size=32, patch_size=8, **sizes)
        theirs.heads = nn.Identity()
    else:
        theirs = networks().get_model(name, weights=None)
        theirs.add_module("fc" if name == "resnet50" else "classifier", nn.Identity())
    ours = models.create(task(name, COLOUR, **params))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v1", "mobilenet_v2", "mobilenet_v3_small"])
def test_small_stem_keeps_small_images_larger(encoder):
    def last_side(stem: str) -> int:
        built = models.create(task(encoder, COLOUR, stem=stem)).eval()
        maps: list[int] = []
        parts = {"resnet18": "layer4", "mobilenet_v1": "layers.80"}
        last = built.get_submodule(parts.get(encoder, "features"))
        last.register_forward_hook(lambda _module, _inputs, output: maps.append(output.shape[-1]))
        built(torch.zeros(1, 3, 32, 32))
        return maps[0]

    sides = {stem: last_side(stem) for stem in ("imagenet", "small")}
    assert sides["imagenet"] == 1
    assert sides["small"] > 1


@pytest.mark.parametrize("encoder", ["mobilenet_v1", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"])
def test_batch_norm_statistics_follow_a_few_steps(encoder):
    built = models.create(task(encoder, COLOUR))
    momenta = {module.momentum for module in built.modules() if isinstance(module, nn.BatchNorm2d)}
    assert momenta == {0.1}


def test_same_seed_gives_the_same_weights():
    def fresh() -> torch.Tensor:
        torch.manual_seed(7)
        return torch.cat([p.flatten() for p in models.create(task("small_cnn")).parameters()])

    assert torch.equal(fresh(), fresh())


def test_a_typo_in_the_encoder_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'resnet18'"):
        models.create(task("resnet-18", COLOUR))


def test_unknown_and_impossible_parameters_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        models.create(task("small_cnn", widht=3, feature_dim=0))
    assert len(caught.value.mistakes) == 2
    assert "did you mean 'width'" in str(caught.value)
    assert "feature_dim = 0" in str(caught.value)


def test_a_parameter_called_task_is_refused_like_any_other():
    with pytest.raises(ConfigError, match="task: unknown key"):
        models.create(task("linear", WINDOW, task=1))


def test_encoders_without_parameters_refuse_any():
    with pytest.raises(ConfigError, match="width: unknown key"):
        models.create(task("fedpac_cnn", width=3))


@pytest.mark.parametrize("encoder, spec", [("cnn1d", GREY), ("small_cnn", WINDOW), ("resnet18", WINDOW)])
def test_encoders_refuse_the_other_kind_of_input(encoder, spec):
    with pytest.raises(ConfigError) as caught:
        models.create(task(encoder, spec))
    assert f"task.input.kind is '{spec.kind}'" in str(caught.value)
    assert ("cnn1d" if spec.kind == "window" else "small_cnn") in str(caught.value).split("encoders for")[1]


@pytest.mark.parametrize(
    "encoder, spec, needed",
    [
        ("fedpac_cnn", ImageInput(channels=1, height=28, width=15), 16),
        ("resnet18", ImageInput(height=31, width=64), 32),
        ("cnn1d", WindowInput(length=7), 8),
    ],
)
def test_inputs_that_are_too_small_are_refused_with_the_least_size(encoder, spec, needed):
    with pytest.raises(ConfigError, match=f"at least {needed} on each side"):
        models.create(task(encoder, spec))


@pytest.mark.parametrize("name", [n for n in models.names() if n != "resnet34"])
def test_the_smallest_accepted_input_really_works(name):
    encoder = models.get(name)
    side = max(encoder.smallest, 4)
    kind = encoder.accepts[0]
    spec = ImageInput(channels=3, height=side, width=side) if kind == "image" else WindowInput(channels=2, length=side)
    assert models.create(task(name, spec)).eval()(torch.zeros(1, *spec.shape)).shape[0] == 1


def test_characters_are_read_from_whole_numbers_one_after_another():
    """Against torch's own cell, fed character by character."""
    spec = WindowInput(channels=1, length=5, stride=1)
    built = models.create(task("char_lstm", spec, characters=7, embedding=3, feature_dim=4, layers=1)).eval()
    cell = nn.LSTMCell(3, 4)
    states = built.memory.state_dict()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in states.items()})
    text = torch.tensor([[6, 0, 2, 2, 5]])
    hidden = torch.zeros(1, 4)
    memory = torch.zeros(1, 4)
    for position in text[0]:
        hidden, memory = cell(built.embedding(position[None]), (hidden, memory))
    assert torch.allclose(built(text[:, None].float()), hidden, atol=1e-6)
    outside = torch.tensor([[[-3.0, 99.0, 2.0, 2.0, 5.0]]])
    assert torch.isfinite(built(outside)).all()


def test_an_encoder_of_characters_refuses_positions_that_were_normalised():
    spec = WindowInput(channels=1, length=80, std=(2.0,))
    for name in ("char_cnn", "char_lstm"):
        with pytest.raises(ConfigError, match=f"(?s){name}.*expected 0 and 1"):
            models.create(task(name, spec))


def test_the_number_of_a_character_is_the_row_of_its_embedding():
    """Rounding to the nearest number, as positions are floats in a window."""
    from edge_agent.models.characters import _positions

    assert _positions(torch.tensor([[[0.0, 1.0, 78.999, 79.0, -4.0, 1e6]]]), 80).flatten().tolist() == [
        0, 1, 79, 79, 0, 79,
    ]  # fmt: skip

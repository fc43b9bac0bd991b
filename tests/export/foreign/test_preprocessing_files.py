"""Configuration files of other projects: what a device's input becomes, against their own arithmetic worked by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.data.preprocess import normalise_images
from export.foreign.input_form import choose_form
from export.foreign.preprocessing import Preprocessing, read_preprocessing
from export.foreign.settings import ForeignSettings

CLIP = {
    "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
    "resample": 3, "size": 256,
}  # fmt: skip
TIMM = {
    "architecture": "mobilenetv3_small_100", "num_classes": 1000, "num_features": 1024,
    "pretrained_cfg": {
        "input_size": [3, 192, 224], "fixed_input_size": False, "interpolation": "bicubic", "crop_pct": 0.875,
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "classifier": "classifier",
    },
}  # fmt: skip
AST = {
    "feature_extractor_type": "ASTFeatureExtractor", "do_normalize": True, "feature_size": 1, "max_length": 1024,
    "mean": -4.25, "std": 4.5, "num_mel_bins": 128, "sampling_rate": 16000,
}  # fmt: skip


def read(tmp_path, content) -> Preprocessing:
    """Return the preprocessing that a file with this content states."""
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_preprocessing(str(path))


def network_input(given: Preprocessing, pixels: np.ndarray, **settings) -> np.ndarray:
    """Return what a device makes of pixels (height, width, 3) uint8 that need no resizing, as the network takes it."""
    form = choose_form([None, 3, *pixels.shape[:2]], given, ForeignSettings(**settings))
    prepared = normalise_images(pixels.transpose(2, 0, 1)[None].astype(np.float32), form.spec)
    return form.arrange(prepared)[0]


def test_one_number_for_all_channels(tmp_path, pixels):
    given = read(tmp_path, {"size": 8, "image_mean": 0.5, "image_std": 0.25})
    received = network_input(given, pixels)
    np.testing.assert_allclose(received, (pixels.transpose(2, 0, 1) / 255 - 0.5) / 0.25, atol=1e-5)


@pytest.mark.parametrize(
    "content", [{"size": 8, "image_mean": []}, {"pretrained_cfg": {"input_size": [3, 8, 8], "std": []}}]
)
def test_no_number_at_all(tmp_path, content):
    with pytest.raises(ConfigError, match="at least 1 item"):
        read(tmp_path, content)


def test_an_offset_belongs_to_the_scaling_of_pixels(tmp_path, pixels):
    """Without scaling Hugging Face takes nothing off, whatever it says of an offset."""
    content = {"size": 8, "do_rescale": False, "rescale_offset": True, "image_mean": 100.0, "image_std": 50.0}
    received = network_input(read(tmp_path, content), pixels)
    np.testing.assert_allclose(received, (pixels.transpose(2, 0, 1) - 100.0) / 50.0, atol=1e-4)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_sizes_and_numbers_of_clip(tmp_path):
    given = read(tmp_path, CLIP)
    assert (given.height, given.width, given.mean, given.std) == (224, 224, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    assert any("resizes to 256 and cuts out 224" in note for note in given.notes)
    assert any("bicubic" in note for note in given.notes)


def test_timm(tmp_path):
    given = read(tmp_path, TIMM)
    assert (given.channels, given.height, given.width) == (3, 192, 224)
    assert given.std == (0.229, 0.224, 0.225)
    assert any("resizes to 219 and cuts out 192" in note for note in given.notes)


def test_torchvision():
    given = read_preprocessing("torchvision:resnet18")
    assert (given.height, given.mean) == (224, (0.485, 0.456, 0.406))
    with pytest.raises(UsageError, match="did you mean resnet18"):
        read_preprocessing("torchvision:resnet81")


def own_arithmetic(pixels, *, factor=1 / 255, offset=0.0, mean=(0.0,), std=(1.0,)):
    """Return (pixel * factor - offset - mean) / std as channels, height, width, as Hugging Face computes it."""
    return ((pixels * factor - offset - np.array(mean)) / np.array(std)).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "changes, arithmetic",
    [
        ({}, {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}),
        ({"do_rescale": False}, {"factor": 1, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}),
        ({"do_normalize": False}, {}),
        ({"do_normalize": False, "do_rescale": False}, {"factor": 1}),
        (
            {"rescale_factor": 1 / 127.5, "rescale_offset": True, "do_normalize": False},
            {"factor": 1 / 127.5, "offset": 1},
        ),
        (
            {"rescale_factor": 1 / 127.5, "rescale_offset": True},
            {"factor": 1 / 127.5, "offset": 1, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)},
        ),
    ],
)
def test_every_way_to_count_pixels_gives_the_numbers_of_the_file(tmp_path, pixels, changes, arithmetic):
    base = {
        "size": {"height": 8, "width": 8},
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.4],
        "resample": 2,
    }
    given = read(tmp_path, {**base, **changes})
    expected = own_arithmetic(pixels, **arithmetic)
    assert np.allclose(network_input(given, pixels), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_blue_before_red(tmp_path, pixels):
    given = read(tmp_path, {"size": 8, "do_flip_channel_order": True, "do_normalize": False})
    assert np.allclose(network_input(given, pixels), (pixels / 255).transpose(2, 0, 1)[::-1], atol=1e-6)


def test_options_count_more_than_the_file(tmp_path, pixels):
    given = read(tmp_path, {"size": 8, "image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2]})
    received = network_input(given, pixels, mean="0", std="1", pixel_range=255)
    assert np.allclose(received, pixels.transpose(2, 0, 1), atol=1e-3)


def test_spectrograms_of_a_transformer_for_sounds(tmp_path):
    """The extractor's own formula is (x - mean) / (2 std), and its input is (batch, time, mel)."""
    form = choose_form([None, None, None], read(tmp_path, AST), ForeignSettings())
    assert (form.layout, form.spec.shape, form.spec.mean, form.spec.std) == ("NLC", (128, 1024), (-4.25,), (9.0,))


def test_features_of_sound_that_devices_do_not_compute(tmp_path):
    with pytest.raises(ConfigError, match="WhisperFeatureExtractor makes 80 features"):
        read(
            tmp_path, {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": 16000}
        )


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "invalid JSON"),
        ("[1]", "is list, expected a JSON object"),
        ({"hello": 1}, "neither preprocessor_config.json"),
        ({"size": "large", "image_std": ["x"]}, "image_std"),
        ({"pretrained_cfg": {"input_size": [3, 224]}}, "input_size"),
    ],
)
def test_files_that_say_nothing(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, content)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.json: cannot be read"):
        read_preprocessing(str(tmp_path / "gone.json"))

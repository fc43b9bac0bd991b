from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from edge_agent.core.errors import DataError
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import preprocess


@example((40, 59), (37, 37), 3, 238)  # two grey levels apart if the vertical pass comes first
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.integers(4, 40), st.integers(4, 40)),
    st.sampled_from([1, 3]),
    st.integers(0, 10_000),
)
def test_resizing_without_pillow_gives_its_bits(size, target, channels, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels), dtype=np.uint8)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    across = image.resize((target[1], size[0]), Image.Resampling.BILINEAR)
    expected = np.asarray(across.resize(target[::-1], Image.Resampling.BILINEAR)).reshape(*target, channels)
    found = preprocess.resize_numpy(pixels, *target, antialias=True)
    assert found.dtype == np.uint8
    assert (found == expected).all()
    assert (preprocess.resize(pixels, *target, antialias=True) == expected).all()
    at_once = np.asarray(image.resize(target[::-1], Image.Resampling.BILINEAR)).reshape(*target, channels)
    assert np.abs(found.astype(int) - at_once.astype(int)).max() <= 2  # whichever order this Pillow takes


def test_resizing_a_large_photo_in_row_blocks_is_the_same_as_pillow():
    pixels = np.random.default_rng(0).integers(0, 256, (700, 500, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((32, 48), Image.Resampling.BILINEAR))
    assert (preprocess.resize_numpy(pixels, 48, 32, antialias=True) == expected).all()


def test_without_antialias_the_result_is_torchs_plain_bilinear():
    import torch

    pixels = np.random.default_rng(0).uniform(0, 255, (17, 23, 3)).astype(np.float32)
    tensor = torch.tensor(pixels.transpose(2, 0, 1))[None]
    expected = torch.nn.functional.interpolate(tensor, (9, 8), mode="bilinear", align_corners=False)[0]
    found = preprocess.resize(pixels, 9, 8, antialias=False)
    assert np.allclose(found.transpose(2, 0, 1), expected.numpy(), atol=1e-3)


def test_halving_a_row_by_hand():
    """New pixel 0 sits at 1.0 and the triangle reaches 2: old centres 0.5, 1.5, 2.5 weigh .75, .75, .25 of 1.75."""
    row = np.array([[0, 100, 0, 100]], np.float32)[:, :, None]
    found = preprocess.resize_numpy(row, 1, 2, antialias=True)
    assert np.allclose(found.ravel(), [75 / 1.75, (25 + 75) / 1.75], rtol=1e-5)


def test_pixels_become_floats_by_the_spec():
    spec = ImageInput(channels=1, height=4, width=4, mean=(0.25,), std=(0.5,))
    pixels = preprocess.image_pixels(np.full((4, 4), 51, np.uint8), spec)[None].astype(np.float32)
    assert np.allclose(preprocess.normalise_images(pixels, spec), (51 / 255 - 0.25) / 0.5)


def test_each_channel_has_its_own_mean_and_spread():
    spec = ImageInput(channels=3, height=4, width=4, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
    found = preprocess.normalise_images(np.full((1, 3, 4, 4), 255, np.float32), spec)
    assert np.allclose(found[0, :, 0, 0], [0.9, 0.4, 0.175])
    with pytest.raises(DataError, match="2 values"):
        preprocess.normalise_images(np.zeros((1, 3, 4, 4), np.float32), spec.model_copy(update={"mean": (0.1, 0.2)}))


@pytest.mark.parametrize("form", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 4), (3, 6, 5), (1, 6, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_usual_layouts_become_channels_first(form, channels):
    spec = ImageInput(channels=channels, height=6, width=5)
    assert preprocess.image_pixels(np.zeros(form, np.uint8), spec).shape == (channels, 6, 5)


def test_grey_and_colour_convert_as_in_pillow():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    grey = preprocess.image_pixels(pixels, ImageInput(channels=1, height=8, width=8))
    assert np.abs(grey[0].astype(int) - np.asarray(Image.fromarray(pixels).convert("L"))).max() <= 1
    colour = preprocess.image_pixels(grey[0], ImageInput(channels=3, height=8, width=8))
    assert (colour == grey).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "I;16", "F"])
def test_every_pillow_mode_is_understood(mode):
    image = Image.new(mode, (5, 4)) if mode in {"I", "I;16", "F"} else Image.new("RGB", (5, 4), "white").convert(mode)
    assert preprocess.image_pixels(image, ImageInput(height=4, width=5)).shape == (3, 4, 5)


def test_sixteen_bit_grey_keeps_its_shades():
    wide = np.array([[0, 257 * 100], [257 * 200, 65535]] * 2, np.uint16).repeat(2, axis=1)
    found = preprocess.image_pixels(Image.fromarray(wide), ImageInput(channels=1, height=4, width=4))
    assert sorted(set(found.ravel().tolist())) == [0, 100, 200, 255]


@pytest.mark.parametrize(
    "item, word",
    [
        (np.zeros((4, 4, 2), np.uint8), r"\(4, 4, 2\)"),
        (np.zeros(4, np.uint8), r"\(4,\)"),
        (np.zeros((0, 4), np.uint8), r"\(0, 4, 1\)"),
        (np.full((4, 4), np.nan), "NaN"),
        (np.full((4, 4), 300), "300"),
        (np.full((4, 4), 2.0), "0..1"),
        (np.full((4, 4), "x"), "no numbers"),
    ],
)
def test_what_is_no_image_is_refused(item, word):
    with pytest.raises(DataError, match=word):
        preprocess.image_pixels(item, ImageInput(height=4, width=4))


def test_windows_are_cut_where_counting_says():
    recording = np.arange(22, dtype=np.float32).reshape(11, 2)
    found = preprocess.cut(recording, WindowInput(channels=2, length=4, stride=3))
    # 11 samples: windows begin at 0, 3 and 6; the next would need sample 12.
    assert found.shape == (3, 2, 4)
    assert found[1].tolist() == [[6, 8, 10, 12], [7, 9, 11, 13]]


@pytest.mark.parametrize(
    "recording, word",
    [
        (np.zeros((3, 2), np.float32), "3 samples"),
        (np.zeros((9, 3), np.float32), r"\(9, 3\)"),
        (np.full((9, 2), np.nan, np.float32), "NaN"),
    ],
)
def test_what_is_no_recording_is_refused(recording, word):
    with pytest.raises(DataError, match=word):
        preprocess.cut(recording, WindowInput(channels=2, length=4))


@given(st.integers(4, 50), st.integers(1, 60))
def test_the_gap_between_windows_is_the_smallest_that_separates_them(length, stride):
    gap = preprocess.windows_apart(WindowInput(length=length, stride=stride))
    assert (gap + 1) * stride >= length
    assert gap == 0 or gap * stride < length

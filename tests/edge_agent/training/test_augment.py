from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.training import augment

COLOUR = ImageInput(channels=3, height=16, width=12, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
GREY = ImageInput(channels=1, height=28, width=28, mean=(0.13,), std=(0.31,))
WINDOW = WindowInput(channels=4, length=20)
KINDS = [COLOUR, GREY, WINDOW]


def views_of(spec, inputs, seed=0) -> torch.Tensor:
    task = Task(input=spec, class_names=("a",))
    return augment.for_task(task)(inputs, torch.Generator().manual_seed(seed))


def inputs_for(spec, n=6) -> torch.Tensor:
    """Noise whose values are possible pixels, normalised."""
    noise = torch.rand(n, *spec.shape, generator=torch.Generator().manual_seed(5))
    if spec.kind == "window":
        return noise
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    return (noise - mean) / std


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: f"{s.kind}{s.channels}")
def test_views_keep_the_form_and_stay_finite(spec):
    inputs = inputs_for(spec)
    views = views_of(spec, inputs)
    assert views.shape == inputs.shape
    assert views.dtype == torch.float32
    assert torch.isfinite(views).all()


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: f"{s.kind}{s.channels}")
def test_views_follow_the_generator_alone(spec):
    inputs = inputs_for(spec)
    original = inputs.clone()
    assert torch.equal(views_of(spec, inputs, seed=1), views_of(spec, inputs, seed=1))
    assert not torch.equal(views_of(spec, inputs, seed=1), views_of(spec, inputs, seed=2))
    assert torch.equal(inputs, original)


@pytest.mark.parametrize("spec", KINDS, ids=lambda s: f"{s.kind}{s.channels}")
def test_equal_inputs_of_one_batch_get_different_views(spec):
    inputs = inputs_for(spec, 1).expand(8, *spec.shape).contiguous()
    views = views_of(spec, inputs).flatten(1)
    assert len(torch.unique(views, dim=0)) == 8


@pytest.mark.parametrize("spec", [COLOUR, GREY], ids=["colour", "grey"])
def test_image_views_stay_possible_pixels(spec):
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (spec.mean, spec.std))
    pixels = views_of(spec, inputs_for(spec, 64)) * std + mean
    assert pixels.min() >= -1e-5
    assert pixels.max() <= 1 + 1e-5


def test_a_batch_of_views_is_centred_on_the_images():
    # Flips and shifts are symmetric: over many views the picture's centre of mass stays in the middle.
    spot = torch.zeros(1, 1, 28, 28)
    spot[..., 13:15, 13:15] = 1.0
    views = augment.grey_views(spot.expand(4000, 1, 28, 28).contiguous(), torch.Generator().manual_seed(0))
    mass = views.sum(dim=(0, 1))
    place = torch.arange(28.0)
    rows = (mass.sum(dim=1) * place).sum() / mass.sum()
    columns = (mass.sum(dim=0) * place).sum() / mass.sum()
    assert rows.item() == pytest.approx(13.5, abs=0.1)
    assert columns.item() == pytest.approx(13.5, abs=0.1)


def test_grey_views_shift_by_at_most_two_of_28_pixels():
    spot = torch.zeros(1, 1, 28, 28)
    spot[..., 13:15, 13:15] = 1.0
    views = augment.grey_views(spot.expand(500, 1, 28, 28).contiguous(), torch.Generator().manual_seed(0))
    touched = torch.nonzero(views.sum(dim=(0, 1)) > 1e-3)
    # The spot covers 13..14; two pixels of shift, one of rotation and blur.
    assert touched.min() >= 13 - 3
    assert touched.max() <= 14 + 3


def test_half_of_the_grey_views_are_mirrored():
    left = torch.zeros(2000, 1, 28, 28)
    left[..., :, :8] = 1.0
    views = augment.grey_views(left, torch.Generator().manual_seed(0))
    brighter_right = (views[..., 20:].sum(dim=(1, 2, 3)) > views[..., :8].sum(dim=(1, 2, 3))).double().mean()
    assert brighter_right.item() == pytest.approx(0.5, abs=0.05)


def test_a_fifth_of_the_colour_views_have_no_colour():
    views = augment.colour_views(torch.rand(2000, 3, 8, 8), torch.Generator().manual_seed(0))
    spread = (views.max(dim=1).values - views.min(dim=1).values).amax(dim=(1, 2))
    assert (spread < 1e-6).double().mean().item() == pytest.approx(0.2, abs=0.04)


def test_erased_holes_are_rectangles_of_the_promised_size():
    views = augment._erase(torch.ones(1000, 1, 28, 28), torch.Generator().manual_seed(0), probability=1.0)
    for hole in (views[:, 0] == 0).numpy():
        rows = np.flatnonzero(hole.any(axis=1))
        columns = np.flatnonzero(hole.any(axis=0))
        assert hole.sum() == len(rows) * len(columns)
        assert len(rows) <= 10
        assert len(columns) <= 10


def test_a_crop_of_everything_is_the_image_itself():
    pixels = torch.rand(3, 3, 9, 7)
    whole = augment._resized_crop(3, torch.Generator().manual_seed(0), smallest=1.0, flip=False)
    whole = torch.eye(2, 3).expand(3, 2, 3) + 0 * whole
    torch.testing.assert_close(augment._warp(pixels, whole), pixels)


def test_crops_stay_inside_the_image():
    maps = augment._resized_crop(5000, torch.Generator().manual_seed(0), smallest=0.3, flip=True)
    sides = torch.diagonal(maps[:, :, :2], dim1=1, dim2=2).abs()
    centre = maps[:, :, 2]
    assert (centre.abs() + sides <= 1 + 1e-6).all()
    assert sides.max() <= 1
    assert (sides.prod(dim=1) >= 0.3 * 0.85).all()  # an aspect that would leave the image is cut
    assert (maps[:, 0, 0] < 0).double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_a_time_crop_of_a_ramp_is_a_flatter_ramp():
    # Linear interpolation of a straight line is a straight line; its slope is the share that was cut out.
    ramp = torch.arange(20.0).expand(50, 2, 20).contiguous()
    cropped = augment._time_crop(ramp, torch.Generator().manual_seed(0))
    slopes = cropped.diff(dim=2)
    torch.testing.assert_close(slopes, slopes[:, :, :1].expand_as(slopes), atol=1e-4, rtol=0)
    assert slopes.min() >= 0.7 - 1e-4
    assert slopes.max() <= 1 + 1e-4
    assert cropped.min() >= 0
    assert cropped.max() <= 19


def test_window_views_lose_a_tenth_of_the_channels():
    views = augment.window_views(torch.full((1000, 4, 20), 100.0), torch.Generator().manual_seed(0))
    lost = (views.abs().amax(dim=2) < 1).double().mean()
    assert lost.item() == pytest.approx(0.1, abs=0.02)


def test_flips_mirror_half_the_images_and_change_nothing_else():
    task = Task(input=ImageInput(channels=1, height=6, width=8), class_names=("a", "b"))
    images = torch.randn(40, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    found = augment.flips_and_turns(task, degrees=0.0)(images, torch.Generator().manual_seed(1))
    same = torch.isclose(found, images, atol=1e-4).flatten(1).all(dim=1)
    mirrored = torch.isclose(found, images.flip(3), atol=1e-4).flatten(1).all(dim=1)
    assert bool((same ^ mirrored).all())
    assert 10 < int(mirrored.sum()) < 30


def test_turns_keep_the_shape_of_what_is_turned():
    # A disc in the middle of an oblong picture is the same disc after any rotation.
    task = Task(input=ImageInput(channels=1, height=32, width=64, mean=(0.0,), std=(1.0,)), class_names=("a", "b"))
    y, x = torch.meshgrid(torch.arange(32) - 15.5, torch.arange(64) - 31.5, indexing="ij")
    disc = ((y**2 + x**2) < 100).float().expand(16, 1, 32, 64)
    turned = augment.flips_and_turns(task, degrees=180.0)(disc, torch.Generator().manual_seed(2))
    assert float((turned - disc).abs().mean()) < 0.02
    edge = ((x > 0).float()).expand(16, 1, 32, 64)
    turned = augment.flips_and_turns(task, degrees=180.0)(edge, torch.Generator().manual_seed(2))
    assert float((turned - edge).abs().mean()) > 0.2


def test_windows_are_not_turned():
    task = Task(input=WindowInput(channels=1, length=4), class_names=("a",))
    windows = torch.randn(3, 1, 4)
    assert torch.equal(augment.flips_and_turns(task)(windows, torch.Generator()), windows)


# --- crops and flips -------------------------------------------------------------------------------------------------


def test_crops_and_flips_are_those_cut_by_hand_from_a_black_frame():
    """Every view is one of the 81 places times two in an image that is framed with black, found by comparing them."""
    spec = ImageInput(channels=3, height=6, width=5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    inputs = inputs_for(spec, 40)
    views = augment.crops_and_flips(Task(input=spec, class_names=("a",)))(inputs, torch.Generator().manual_seed(1))
    mean, std = (np.array(value)[:, None, None] for value in (spec.mean, spec.std))
    places = set()
    for image, view in zip(inputs.numpy(), views.numpy(), strict=True):
        framed = np.pad(image * std + mean, ((0, 0), (4, 4), (4, 4)))
        candidates = {}
        for top in range(9):
            for left in range(9):
                cut = (framed[:, top : top + 6, left : left + 5] - mean) / std
                candidates[top, left, False] = cut
                candidates[top, left, True] = cut[:, :, ::-1]
        matches = [place for place, cut in candidates.items() if np.abs(cut - view).max() < 1e-5]
        assert len(matches) >= 1
        places.add(matches[0])
    assert len(places) > 30
    assert {flipped for _, _, flipped in places} == {False, True}


def test_windows_are_not_cropped():
    windows = inputs_for(WINDOW)
    task = Task(input=WINDOW, class_names=("a",))
    assert torch.equal(augment.crops_and_flips(task)(windows, torch.Generator()), windows)

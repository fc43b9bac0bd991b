"""Random views of preprocessed inputs: whole batches at once, on any device, every draw from the given generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

from ..core.task import ImageInput, Task

Augment = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
"""Views (n, ...) of preprocessed inputs (n, ...), drawn on the generator's device."""

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's "L"


def for_task(task: Task) -> Augment:
    """Return the usual views for the task's kind of input.

    Colour images: resized crop, flip, brightness, contrast, saturation, grey. Grey images: shift by up to 1/14,
    small rotation, flip, erasing. Windows: noise, scale, crop in time, missing channels.
    """
    spec = task.input
    if not isinstance(spec, ImageInput):
        return window_views
    return _on_pixels(colour_views if spec.channels == 3 else grey_views, spec)


def _on_pixels(views: Augment, spec: ImageInput) -> Augment:
    """Return views of pixels 0..1, as views of preprocessed inputs."""
    mean, std = (torch.tensor(v).expand(spec.channels).view(1, -1, 1, 1).clone() for v in (spec.mean, spec.std))

    def augment(inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        offset = mean.to(inputs)
        scale = std.to(inputs)
        return (views(inputs * scale + offset, generator) - offset) / scale

    return augment


def colour_views(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return views of RGB images (n, 3, h, w) with values 0..1: what contrastive learning usually takes."""
    n = len(pixels)
    cropped = _warp(pixels, _resized_crop(n, generator, smallest=0.3, flip=True))
    brightness, contrast, saturation = (_uniform((n, 1, 1, 1), generator, 0.6, 1.4).to(pixels) for _ in range(3))
    bright = (cropped * brightness).clamp(0, 1)
    contrasted = torch.lerp(_luma(bright).mean(dim=(2, 3), keepdim=True), bright, contrast).clamp(0, 1)
    coloured = torch.lerp(_luma(contrasted), contrasted, saturation).clamp(0, 1)
    is_grey = (_uniform((n, 1, 1, 1), generator, 0.0, 1.0) < 0.2).to(pixels.device)
    return torch.where(is_grey, _luma(coloured), coloured)


def grey_views(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return views of grey images (n, 1, h, w), values 0..1: a shift by 1/14 of a side, 10 degrees, flip, hole."""
    n = len(pixels)
    angle = _uniform(n, generator, -1.0, 1.0) * math.radians(10)
    flip = _signs(n, generator)
    moves = _uniform((n, 2), generator, -1.0, 1.0) * 2 * (1 / 14)
    rotation = torch.stack([angle.cos() * flip, -angle.sin(), angle.sin() * flip, angle.cos()], dim=1).view(n, 2, 2)
    return _erase(_warp(pixels, torch.cat([rotation, moves[:, :, None]], dim=2)), generator, probability=0.5)


def flips_and_turns(task: Task, degrees: float = 30.0) -> Augment:
    """Flip half of the images left to right, and rotate all by up to ``degrees``; windows are returned unchanged.

    30 degrees are what FedBN's code takes for the same photographs and drawings; DualFed's paper names no angle.
    """
    spec = task.input
    if not isinstance(spec, ImageInput):
        return lambda inputs, _: inputs

    def turned(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        n = len(pixels)
        (height, width) = pixels.shape[-2:]
        angle = _uniform(n, generator, -1.0, 1.0) * math.radians(degrees)
        flip = _signs(n, generator)
        stretch = height / width
        turns = [angle.cos() * flip, -angle.sin() * stretch, angle.sin() * flip / stretch, angle.cos()]
        rotation = torch.stack(turns, dim=1).view(n, 2, 2)
        still = torch.zeros(n, 2, 1, device=generator.device)
        return _warp(pixels, torch.cat([rotation, still], dim=2))

    return _on_pixels(turned, spec)


def crops_and_flips(task: Task, pad: int = 4) -> Augment:
    """Crop images out of a black frame of ``pad`` pixels at a random place, and flip half of them left to right.

    With 4 pixels these are the usual views of CIFAR's images in training. Windows are returned unchanged.
    """
    spec = task.input
    if not isinstance(spec, ImageInput):
        return lambda inputs, _: inputs

    def cropped(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        n = len(pixels)
        (height, width) = pixels.shape[-2:]
        moves = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=generator, device=generator.device)
        is_flipped = _uniform(n, generator, 0.0, 1.0) < 0.5
        # The rows and columns of each image in its frame; a flip reads the columns from right to left.
        rows = torch.arange(height, device=moves.device) + moves[0]
        columns = torch.arange(width, device=moves.device).expand(n, width)
        columns = torch.where(is_flipped[:, None], width - 1 - columns, columns) + moves[1]
        framed = F.pad(pixels, (pad, pad, pad, pad))
        image = torch.arange(n, device=pixels.device)[:, None, None, None]
        channel = torch.arange(pixels.shape[1], device=pixels.device)[None, :, None, None]
        at_row = rows.to(pixels.device)[:, None, :, None]
        at_column = columns.to(pixels.device)[:, None, None, :]
        return framed[image, channel, at_row, at_column]

    return _on_pixels(cropped, spec)


def window_views(windows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return views of standardised sensor windows (n, channels, length)."""
    n, channels, _ = windows.shape
    cropped = _time_crop(windows, generator)
    scale = 1 + 0.1 * _normal((n, channels, 1), generator)
    kept = (_uniform((n, channels, 1), generator, 0.0, 1.0) >= 0.1).float()
    noise = 0.05 * _normal(tuple(windows.shape), generator)
    return cropped * (scale * kept).to(windows) + noise.to(windows)


AUGMENTATIONS: Mapping[str, Callable[[Task], Augment]] = {
    "crop_flip": crops_and_flips,
    "flip_turn": flips_and_turns,
    "views": for_task,
}
"""Name -> views for a task, by which a simulation varies the inputs of all methods."""


def _time_crop(windows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a stretch of 0.7..1 of each window, brought back to full length (linear)."""
    n, _, length = windows.shape
    share = _uniform(n, generator, 0.7, 1.0)
    start = _uniform(n, generator, 0.0, 1.0) * (1 - share) * (length - 1)
    steps = torch.arange(length, device=generator.device)[None, :]
    position = (start[:, None] + steps * share[:, None]).to(windows).clamp(0, length - 1)
    before = position.floor().long().clamp(max=max(length - 2, 0))
    index = before[:, None, :].expand_as(windows)
    return torch.lerp(windows.gather(2, index), windows.gather(2, index + 1), (position - before)[:, None, :])


def _resized_crop(n: int, generator: torch.Generator, *, smallest: float, flip: bool) -> torch.Tensor:
    """Return affine maps (n, 2, 3) to windows of ``smallest``..1 of the area, aspect 3/4..4/3, perhaps mirrored."""
    side = _uniform(n, generator, smallest, 1.0).sqrt()
    aspect = (_uniform(n, generator, -1.0, 1.0) * math.log(4 / 3) / 2).exp()
    sides = torch.stack([side * aspect, side / aspect], dim=1).clamp(max=1.0)
    centre = _uniform((n, 2), generator, -1.0, 1.0) * (1 - sides)
    same = torch.ones(n, device=generator.device)
    mirror = torch.stack([_signs(n, generator) if flip else same, same], dim=1)
    return torch.cat([torch.diag_embed(sides * mirror), centre[:, :, None]], dim=2)


def _warp(pixels: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Return images sampled through affine maps (n, 2, 3); black (0) outside."""
    grid = F.affine_grid(maps.to(pixels), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _luma(pixels: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor(_GREY, dtype=pixels.dtype, device=pixels.device)
    return torch.einsum("nchw,c->nhw", pixels, weights)[:, None]


def _erase(pixels: torch.Tensor, generator: torch.Generator, *, probability: float) -> torch.Tensor:
    """Return a rectangle of up to a third of each side becomes black, in a share of the images."""
    n = len(pixels)
    (height, width) = pixels.shape[-2:]
    rows = _stretch(n, height, generator)
    columns = _stretch(n, width, generator)
    chosen = _uniform((n, 1, 1, 1), generator, 0.0, 1.0) < probability
    hole = rows[:, None, :, None] & columns[:, None, None, :] & chosen
    return pixels.masked_fill(hole.to(pixels.device), 0.0)


def _stretch(n: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return which of ``size`` positions (n, size) bool lie in a random stretch of 10 to 35 % of them."""
    length = _uniform(n, generator, 0.1, 0.35) * size
    start = _uniform(n, generator, 0.0, 1.0) * (size - length)
    position = torch.arange(size, device=generator.device)[None, :] + 0.5
    return (position >= start[:, None]) & (position < (start + length)[:, None])


def _uniform(shape: int | tuple[int, ...], generator: torch.Generator, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _signs(n: int, generator: torch.Generator) -> torch.Tensor:
    return (_uniform(n, generator, 0.0, 1.0) < 0.5).float() * 2 - 1


def mask_patches(images: torch.Tensor, ratio: float, patch: int, generator: torch.Generator) -> torch.Tensor:
    """Return images (n, c, h, w) of which floor(``ratio`` * number of patches) square patches are 0, in all channels.

    ``patch`` (pixels) divides height and width. Ratio 0 gives the very images.
    """
    rows = images.shape[2] // patch
    columns = images.shape[3] // patch
    hidden = math.floor(ratio * rows * columns + 1e-9)  # 0.29 of 100 patches is 28.999999999999996 of them
    if not hidden:
        return images
    draws = torch.rand(len(images), rows * columns, generator=generator, device=images.device)
    masked = draws.argsort(dim=1).argsort(dim=1) < hidden
    grid = masked.view(-1, 1, rows, columns)
    return images.masked_fill(grid.repeat_interleave(patch, 2).repeat_interleave(patch, 3), 0.0)

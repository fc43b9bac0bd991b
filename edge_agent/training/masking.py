"""Random patches of images set to zero, in each image others."""

from __future__ import annotations

import math

import torch


def mask_patches(images: torch.Tensor, ratio: float, patch: int, generator: torch.Generator) -> torch.Tensor:
    """Images (n, c, h, w) of which floor(``ratio`` * number of patches) square patches are 0, in all channels.

    ``patch`` (pixels) divides height and width. Ratio 0 gives the very images.
    """
    rows, columns = images.shape[2] // patch, images.shape[3] // patch
    hidden = math.floor(ratio * rows * columns + 1e-9)  # 0.29 of 100 patches is 28.999999999999996 of them
    if not hidden:
        return images
    draws = torch.rand(len(images), rows * columns, generator=generator, device=images.device)
    masked = draws.argsort(dim=1).argsort(dim=1) < hidden
    grid = masked.view(-1, 1, rows, columns)
    return images.masked_fill(grid.repeat_interleave(patch, 2).repeat_interleave(patch, 3), 0.0)

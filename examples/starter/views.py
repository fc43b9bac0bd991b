"""Training pictures of the starter encoder: things turned, lit and coloured at random, on random grounds, with clutter.

A picture's class is the thing on it, whatever is behind and before it: the encoder has to learn to leave that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import IterableDataset

SIDE = 64
"""Pixels of a training picture."""

_SHARES = (0.40, 0.12, 0.20, 0.08, 0.08, 0.12)
"""Share of clip art, emoji, characters, fractals, shapes and textures among the pictures."""

_CLIP_ART = 0
_CHARACTERS = 2
_TEXTURES = 5


class Views(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches without end: pictures (batch, 3, 64, 64) uint8, their classes and their clip-art folders (-1: none)."""

    def __init__(self, bank: Mapping[str, np.ndarray], batch: int, seed: int) -> None:
        self.batch = batch
        self.seed = seed
        self.sprites = torch.from_numpy(bank["sprites"])
        self.labels = torch.from_numpy(bank["label"])
        self.folders = torch.from_numpy(bank["folder"])
        self.rows = [torch.from_numpy(np.flatnonzero(bank["kind"] == kind)) for kind in range(_TEXTURES)]
        self.textures = torch.from_numpy(bank["textures"])
        self.grounds = torch.from_numpy(bank["grounds"])
        self.sprite_classes = int(bank["classes"])
        self.classes = self.sprite_classes + len(self.textures)
        """Number of classes, textures included."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        torch.set_num_threads(1)  # in a process of its own, beside the one that trains
        worker = torch.utils.data.get_worker_info()
        random = _Random(1000 * self.seed + (0 if worker is None else worker.id))
        while True:
            yield self._draw(random)

    def _draw(self, random: _Random) -> tuple[Tensor, Tensor, Tensor]:
        """Return one batch."""
        count = self.batch
        kinds = torch.multinomial(torch.tensor(_SHARES), count, replacement=True, generator=random.generator)
        classes = torch.empty(count, dtype=torch.long)
        folders = torch.full((count,), -1)
        things = torch.zeros(count, 4, SIDE, SIDE)
        for kind, rows in enumerate(self.rows):
            at = torch.nonzero(kinds == kind)[:, 0]
            chosen = rows[random.integers(len(rows), len(at))]
            things[at] = self.sprites[chosen].float() / 255
            classes[at] = self.labels[chosen]
            folders[at] = self.folders[chosen]
        # 1. The things in front of their grounds. Characters, and some others as silhouettes, get one colour.
        is_plain = (kinds == _CHARACTERS) | ((random.uniform(count) < 0.12) & (kinds < _TEXTURES))
        paint = random.uniform(count, 3, 1, 1).expand(-1, -1, SIDE, SIDE)
        colours = torch.where(is_plain[:, None, None, None], paint, random.recoloured(things[:, :3], 0.18))
        opacity = things[:, 3:]
        placed = random.placed(torch.cat([colours * opacity, opacity], dim=1), (0.45, 1.15), 0.28)
        pictures = self._grounds(random, count)
        pictures = pictures * (1 - placed[:, 3:]) + placed[:, :3]
        # 2. Textures fill the whole picture.
        at = torch.nonzero(kinds == _TEXTURES)[:, 0]
        chosen = random.integers(len(self.textures), len(at))
        pieces = random.placed(self.textures[chosen].float() / 255, (1.0, 2.2), 0.45, outside="reflection")
        pictures[at] = random.recoloured(pieces, 0.2)
        classes[at] = self.sprite_classes + chosen
        # 3. In a fifth of the pictures something small covers a part.
        at = torch.nonzero(random.uniform(count) < 0.2)[:, 0]
        self._put(random, pictures, at, (0.2, 0.45), 0.9, recolour=False)
        # 4. What a camera adds: light, lack of colour, blur, noise.
        pictures = _photographed(random, pictures)
        return pictures.clamp(0, 1).mul(255).to(torch.uint8), classes, folders

    def _grounds(self, random: _Random, count: int) -> Tensor:
        """Return grounds (count, 3, 64, 64): one colour, a gradient, or a texture, some of these with clutter."""
        chosen = random.integers(len(self.grounds), count)
        grounds = random.placed(self.grounds[chosen].float() / 255, (0.8, 2.5), 1.0, outside="reflection")
        draw = random.uniform(count)
        flat = random.uniform(count, 3, 1, 1).expand(-1, -1, SIDE, SIDE)
        is_extreme = random.uniform(count)[:, None, None, None] < 0.15
        black_or_white = (random.uniform(count, 1, 1, 1) < 0.5).float().expand_as(flat)
        across = torch.linspace(-1, 1, SIDE)[None, None, None, :]
        gradient = flat + 0.8 * (random.uniform(count, 3, 1, 1) - 0.5) * across
        shaped = draw[:, None, None, None]
        grounds = torch.where(shaped < 0.42, gradient, grounds)
        grounds = torch.where(shaped < 0.30, torch.where(is_extreme, black_or_white, flat), grounds)
        cluttered = torch.nonzero((random.uniform(count) < 0.45) & (draw > 0.42))[:, 0]
        for _ in range(2):
            self._put(random, grounds, cluttered, (0.5, 2.5), 1.0, recolour=True)
        return grounds

    def _put(
        self,
        random: _Random,
        pictures: Tensor,
        at: Tensor,
        scales: tuple[float, float],
        shift: float,
        *,
        recolour: bool,
    ) -> None:
        """Put a random piece of clip art on the pictures ``at`` these rows, in place."""
        rows = self.rows[_CLIP_ART]
        things = self.sprites[rows[random.integers(len(rows), len(at))]].float() / 255
        placed = random.placed(things, scales, shift)
        colours = random.recoloured(placed[:, :3], 0.2) if recolour else placed[:, :3]
        opacity = placed[:, 3:]
        pictures[at] = pictures[at] * (1 - opacity) + colours * opacity


class _Random:
    """Random numbers and random changes of pictures, from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers 0..1."""
        return torch.rand(*shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Return numbers with mean 0 and deviation 1."""
        return torch.randn(*shape, generator=self.generator)

    def integers(self, end: int, count: int) -> Tensor:
        """Return integers from 0 to below ``end``."""
        return torch.randint(end, (count,), generator=self.generator)

    def placed(self, images: Tensor, scales: tuple[float, float], shift: float, outside: str = "zeros") -> Tensor:
        """Return images (n, c, 64, 64), each scaled, turned, sheared, stretched and shifted at random.

        ``scales``: the smallest and the largest scale. ``shift``: the largest shift, in halves of a side. ``outside``:
        what lies beyond an image's edge, as for `torch.nn.functional.grid_sample`.
        """
        count = len(images)
        smallest, largest = scales
        scale = smallest * (largest / smallest) ** self.uniform(count)
        angle = 0.22 * self.normal(count)
        angle = torch.where(self.uniform(count) < 0.1, 2 * torch.pi * self.uniform(count), angle)
        stretch = torch.exp(0.12 * self.normal(count))
        shear = 0.12 * self.normal(count)
        cosine = torch.cos(angle)
        sine = torch.sin(angle)
        first = torch.stack([cosine * stretch, (sine + shear) * stretch], dim=1)
        second = torch.stack([-sine / stretch, cosine / stretch], dim=1)
        maps = torch.stack([first, second], dim=1) / scale[:, None, None]
        places = shift * (2 * self.uniform(count, 2) - 1)
        offsets = -torch.einsum("nij,nj->ni", maps, places)
        size = [count, images.shape[1], SIDE, SIDE]
        grid = functional.affine_grid(torch.cat([maps, offsets[:, :, None]], dim=2), size, align_corners=False)
        return functional.grid_sample(images, grid, mode="bilinear", padding_mode=outside, align_corners=False)

    def recoloured(self, colours: Tensor, strength: float) -> Tensor:
        """Return colours (n, 3, ...) mixed at random; some are inverted, some grey."""
        count = len(colours)
        is_inverted = self.uniform(count)[:, None, None, None] < 0.12
        colours = torch.where(is_inverted, 1 - colours, colours)
        is_grey = self.uniform(count)[:, None, None, None] < 0.18
        colours = torch.where(is_grey, colours.mean(dim=1, keepdim=True).expand_as(colours), colours)
        mixing = torch.eye(3) + strength * self.normal(count, 3, 3)
        mixed = torch.einsum("nij,njhw->nihw", mixing, colours - 0.5) + 0.5
        return mixed + 0.5 * strength * self.normal(count, 3, 1, 1)


def _photographed(random: _Random, pictures: Tensor) -> Tensor:
    """Return pictures (n, 3, 64, 64) in another light, some without colour, some blurred, all a little noisy."""
    count = len(pictures)
    contrast = torch.exp(0.25 * random.normal(count, 1, 1, 1))
    light = 0.1 * random.normal(count, 1, 1, 1) + 0.04 * random.normal(count, 3, 1, 1)
    pictures = (pictures - 0.5) * contrast + 0.5 + light
    is_grey = random.uniform(count)[:, None, None, None] < 0.15
    pictures = torch.where(is_grey, pictures.mean(dim=1, keepdim=True).expand_as(pictures), pictures)
    blurred = torch.nonzero(random.uniform(count) < 0.3)[:, 0]
    factor = 2 + int(random.integers(2, 1))
    smaller = functional.interpolate(pictures[blurred], scale_factor=1 / factor, mode="area")
    pictures[blurred] = functional.interpolate(smaller, size=SIDE, mode="bilinear")
    return pictures + 0.12 * random.uniform(count, 1, 1, 1) ** 3 * random.normal(count, 3, SIDE, SIDE)

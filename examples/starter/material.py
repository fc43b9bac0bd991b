"""The material of the starter encoder's training pictures: things to recognise, textures, and grounds to put them on.

``python examples/starter/material.py --packages DIR --out bank.npz`` takes about a minute. ``--packages`` is a folder
into which these Debian packages were unpacked (``apt-get download NAME``, ``dpkg -x NAME*.deb DIR/NAME``):
openclipart-png (dedicated to the public domain), fonts-noto-color-emoji, fonts-noto-core and fonts-noto-cjk (SIL Open
Font License). All else is made by formulas. No digit is among the characters.

Needs Pillow and fonttools.
"""

from __future__ import annotations

import argparse
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont, TTLibError
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

SIDE = 64
"""Pixels of a cut-out."""

KINDS = ("clip art", "emoji", "characters", "fractals", "shapes")
"""Kinds of cut-outs, by their numbers."""

_INNER = 60
"""Pixels of the longer side of what is shown in a cut-out."""

_LARGEST = 3000
"""Pixels of the sides of a picture that is read."""

_CHARACTERS = 1000
_CHINESE_EACH = 120
_LETTERS_EACH = 14
_FAMILIES_FOR_TEXT = ("Sans-", "Serif-", "Mono-", "Display-")
_LETTERS_AND_SIGNS = {"Lu", "Ll", "Lo", "So", "Sm"}
"""Categories of Unicode; those of digits are not among them."""

_FONTS_EACH = 10
_FRACTALS = 500
_SHAPES = 400
_TEXTURES = 500
_GROUNDS = 1200
_TEXTURE_SIDE = 128


def cut_out(image: Image.Image) -> np.ndarray | None:
    """Return what is visible of an RGBA picture in the middle of `SIDE` x `SIDE` pixels, (64, 64, 4) uint8.

    None where it is empty, tiny, or longer than six times its width.
    """
    box = image.getchannel("A").getbbox()
    if box is None:
        return None
    shown = image.crop(box)
    longer = max(shown.size)
    if longer < 24 or min(shown.size) * 6 < longer:
        return None
    scale = _INNER / longer
    size = (max(1, round(shown.width * scale)), max(1, round(shown.height * scale)))
    resampling = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    shown = shown.resize(size, resampling, reducing_gap=2.0)
    result = Image.new("RGBA", (SIDE, SIDE))
    result.paste(shown, ((SIDE - shown.width) // 2, (SIDE - shown.height) // 2))
    return np.asarray(result)


def _covered(sprite: np.ndarray) -> float:
    """Return the share of a cut-out, 0..1, that is not transparent."""
    return float(sprite[..., 3].mean() / 255)


def _rough_copy(sprite: np.ndarray) -> bytes:
    """Return the same bytes for pictures that are nearly equal."""
    return (sprite[::8, ::8] // 48).tobytes()


def clip_art(root: Path) -> tuple[list[np.ndarray], list[str]]:
    """Return the cut-outs of the clip art library, and the folder of each, such as ``food/fruit``."""
    sprites: list[np.ndarray] = []
    folders: list[str] = []
    seen = set[bytes]()
    for path in sorted(root.rglob("*.png")):
        folder = path.relative_to(root).parent.parts[:2]
        if folder[:1] == ("special",):
            continue
        sprite = _read(path)
        if sprite is None or not 0.08 < _covered(sprite) < 0.86 or _rough_copy(sprite) in seen:
            continue
        seen.add(_rough_copy(sprite))
        sprites.append(sprite)
        folders.append("/".join(folder))
    return sprites, folders


def _read(path: Path) -> np.ndarray | None:
    """Return the cut-out of a file; None where it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                return None if max(file.size) > _LARGEST else cut_out(file.convert("RGBA"))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None


def emoji(font_file: Path) -> list[np.ndarray]:
    """Return the cut-outs of a colour font's pictures, without skin tones, flags of countries and doubles."""
    font = ImageFont.truetype(str(font_file), 109)
    sprites: list[np.ndarray] = []
    seen = set[bytes]()
    for point in sorted(TTFont(font_file).getBestCmap()):
        is_skin_tone = 0x1F3FB <= point <= 0x1F3FF
        is_regional = 0x1F1E6 <= point <= 0x1F1FF
        if point < 0x2190 or point >= 0xE0000 or is_skin_tone or is_regional:
            continue
        image = Image.new("RGBA", (150, 150))
        ImageDraw.Draw(image).text((5, 5), chr(point), font=font, embedded_color=True)
        sprite = cut_out(image)
        if sprite is None or _rough_copy(sprite) in seen:
            continue
        seen.add(_rough_copy(sprite))
        sprites.append(sprite)
    return sprites


def characters(font_files: Iterable[Path]) -> list[list[np.ndarray]]:
    """Return the cut-outs of letters and signs of many scripts: for each character one of each of up to ten fonts."""
    by_character: dict[int, list[np.ndarray]] = {}
    for file in font_files:
        font = ImageFont.truetype(str(file), 80)
        for point in _chosen_characters(file):
            mask = Image.new("L", (200, 200))
            ImageDraw.Draw(mask).text((50, 40), chr(point), fill=255, font=font)
            image = Image.new("RGBA", mask.size)
            image.putalpha(mask)
            sprite = cut_out(image)
            if sprite is not None and 0.04 < _covered(sprite) < 0.8:
                by_character.setdefault(point, []).append(sprite)
    # Characters that several fonts have come first; among equals the order is arbitrary but fixed.
    ranked = sorted(by_character, key=lambda point: (-min(len(by_character[point]), 3), point * 2654435761 % 2**32))
    return [by_character[point][:_FONTS_EACH] for point in ranked[:_CHARACTERS]]


def _chosen_characters(file: Path) -> list[int]:
    """Return some letters and signs of a font, no digit: the Latin ones of text fonts, a few of each other script."""
    letters = _letters_in(file)
    latin = [point for point in letters if point < 128]
    # Greek, with 0x370, is the first script behind the letters of Latin.
    others = [point for point in letters if point >= 0x370]
    if len(others) >= 24:
        others = _sample(others, is_chinese=file.suffix == ".ttc")
    is_for_text = any(family in file.name for family in _FAMILIES_FOR_TEXT)
    return others + latin if is_for_text else others


def _letters_in(file: Path) -> list[int]:
    """Return the code points of the letters and signs that a font has, in order; none where it cannot be read."""
    try:
        points = sorted(TTFont(file, fontNumber=0, lazy=True).getBestCmap())
    except (TTLibError, TypeError):
        return []
    return [point for point in points if unicodedata.category(chr(point)) in _LETTERS_AND_SIGNS]


def _sample(points: list[int], *, is_chinese: bool) -> list[int]:
    """Return some of the code points, drawn at random but always the same."""
    seed = 5 if is_chinese else len(points)
    count = _CHINESE_EACH if is_chinese else _LETTERS_EACH
    return [int(point) for point in np.random.default_rng(seed).permutation(points)[:count]]


def fractals(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Return attractors of random iterated function systems of two to five affine maps, coloured by a gradient.

    After Kataoka et al., "Pre-training without Natural Images", ACCV 2020; a system whose attractor is too thin or
    escapes is drawn again.
    """
    sprites: list[np.ndarray] = []
    while len(sprites) < count:
        density = _attractor(rng)
        if density is None:
            continue
        sprite = np.zeros((SIDE, SIDE, 4), np.uint8)
        phases = rng.uniform(0, 2 * np.pi, 3)
        rows, columns = np.mgrid[:SIDE, :SIDE] / SIDE
        direction = rng.normal(size=2)
        slope = direction[0] * rows + direction[1] * columns
        for channel, phase in enumerate(phases):
            sprite[..., channel] = 127 + 120 * np.sin(phase + 2.5 * slope)
        sprite[..., 3] = 255 * density
        sprites.append(sprite)
    return sprites


def _attractor(rng: np.random.Generator) -> np.ndarray | None:
    """Return the density (64, 64), 0..1, of a random system's points; None where it does not fill a picture."""
    count = int(rng.integers(2, 6))
    maps = rng.uniform(-1, 1, (count, 2, 3))
    maps[:, :, :2] *= 0.85
    areas = np.abs(np.linalg.det(maps[:, :, :2])) + 0.02
    points = np.zeros((400, 2))
    visited = []
    for step in range(90):
        chosen = maps[rng.choice(count, size=len(points), p=areas / areas.sum())]
        points = np.einsum("nij,nj->ni", chosen[:, :, :2], points) + chosen[:, :, 2]
        if step > 15:
            visited.append(points)
    places = np.concatenate(visited)
    if not np.isfinite(places).all() or np.abs(places).max() > 1e3:
        return None
    low, high = np.quantile(places, [0.01, 0.99], axis=0)
    span = max(high - low)
    if span < 1e-3 or min(high - low) < 0.25 * span:
        return None
    pixels = (places - (low + high) / 2) / span * _INNER + SIDE / 2
    hits = np.histogram2d(pixels[:, 1], pixels[:, 0], bins=SIDE, range=[[0, SIDE], [0, SIDE]])[0]
    if (hits > 0).mean() < 0.06:
        return None
    return np.clip(hits / max(1, np.quantile(hits[hits > 0], 0.6)), 0, 1)


def shapes(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Return closed curves and polygons, filled or as outlines, some with a hole."""
    sprites: list[np.ndarray] = []
    while len(sprites) < count:
        mask = Image.new("L", (256, 256))
        pen = ImageDraw.Draw(mask)
        outline = _closed_curve(rng)
        if rng.random() < 0.6:
            pen.polygon(outline, fill=255)
        else:
            pen.line([*outline, outline[0]], fill=255, width=int(rng.integers(10, 36)))
        if rng.random() < 0.35:
            x, y = rng.uniform(90, 166, 2)
            radius = rng.uniform(15, 50)
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=0)
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        image = Image.new("RGBA", mask.size, colour)
        image.putalpha(mask)
        sprite = cut_out(image)
        if sprite is not None and _covered(sprite) > 0.06:
            sprites.append(sprite)
    return sprites


def _closed_curve(rng: np.random.Generator) -> list[tuple[float, float]]:
    """Return points of a closed curve in 256 x 256: Gielis's superformula, a wavy circle, or a polygon."""
    kind = rng.integers(3)
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    if kind == 0:
        symmetry = rng.integers(2, 13)
        powers = rng.uniform(0.3, 6, 3)
        inner = np.abs(np.cos(symmetry * angles / 4)) ** powers[1] + np.abs(np.sin(symmetry * angles / 4)) ** powers[2]
        radii = np.clip((inner + 1e-6) ** (-1 / powers[0]), 0, 3)
    elif kind == 1:
        waves = [rng.normal() * 0.3 / k * np.cos(k * angles + rng.uniform(0, 2 * np.pi)) for k in range(2, 7)]
        radii = 1 + np.sum(waves, axis=0)
    else:
        corners = int(rng.integers(3, 9))
        angles = np.arange(corners) * 2 * np.pi / corners
        if rng.random() < 0.5:
            angles = np.sort(rng.uniform(0, 2 * np.pi, corners))
        radii = rng.uniform(0.45, 1, corners) if rng.random() < 0.6 else np.ones(corners)
    x = radii * np.cos(angles) * rng.uniform(0.5, 1)
    y = radii * np.sin(angles)
    extent = max(np.ptp(x), np.ptp(y)) + 1e-9
    x = (x - (x.max() + x.min()) / 2) / extent * 240 + 128
    y = (y - (y.max() + y.min()) / 2) / extent * 240 + 128
    return list(zip(x.tolist(), y.tolist(), strict=True))


def texture(rng: np.random.Generator, side: int) -> np.ndarray:
    """Return a texture (side, side, 3) uint8: noise with a random spectrum, and in some a wave through it."""
    kind = rng.integers(4)
    frequencies = _stretched_frequencies(rng, side)
    centre = np.exp(rng.uniform(np.log(0.03), np.log(0.3)))
    width = rng.uniform(0.01, 0.06)

    def noise() -> np.ndarray:
        spectrum = np.exp(-(((frequencies - centre) / width) ** 2)) + 0.02 / frequencies
        if kind < 2:
            spectrum = frequencies ** -rng.uniform(0.6, 2.2)
        field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(side, side))) * spectrum, s=(side, side))
        field -= field.mean()
        return field / (field.std() + 1e-6)

    field = noise()
    if kind == 3:
        field = np.sign(field) * np.abs(field) ** rng.uniform(0, 0.4)
    if kind == 1 and rng.random() < 0.5:
        field = np.abs(field) - 1
    if rng.random() < 0.35:
        field = _waves(rng, field)
    dark, light = rng.uniform(0, 255, (2, 3))
    mix = 1 / (1 + np.exp(-field * rng.uniform(0.6, 2.5)))[..., None]
    image = dark + (light - dark) * mix
    if rng.random() < 0.5:
        image = image + noise()[..., None] * rng.uniform(5, 40) * rng.normal(size=3)
    return np.clip(image, 0, 255).astype(np.uint8)


def _stretched_frequencies(rng: np.random.Generator, side: int) -> np.ndarray:
    """Return the frequency of each coefficient of `numpy.fft.rfft2`, (side, side // 2 + 1), turned and stretched."""
    vertical = np.fft.fftfreq(side)[:, None]
    horizontal = np.fft.rfftfreq(side)[None]
    angle = rng.uniform(0, np.pi)
    stretch = np.exp(rng.normal() * 0.8)
    along = (horizontal * np.cos(angle) + vertical * np.sin(angle)) * stretch
    across = (vertical * np.cos(angle) - horizontal * np.sin(angle)) / stretch
    return np.sqrt(along**2 + across**2) + 1 / side


def _waves(rng: np.random.Generator, field: np.ndarray) -> np.ndarray:
    """Return a periodic pattern (side, side), bent a little by ``field``."""
    rows, columns = np.mgrid[: len(field), : len(field)] / len(field) * 2 * np.pi
    counts = rng.integers(1, 9, 4)
    wave = np.sin(counts[0] * columns + counts[1] * rows + 0.7 * field * rng.random())
    if rng.random() < 0.5:
        wave = wave * np.sin(counts[2] * rows - counts[3] * columns)
    return np.sign(wave) if rng.random() < 0.5 else 1.4 * wave


def bank(packages: Path) -> dict[str, np.ndarray]:
    """Return everything that training pictures are made of, as arrays.

    ``sprites`` (n, 4, 64, 64) uint8, their ``kind``, ``label`` and ``folder`` (-1: not of the clip art), ``textures``
    and ``grounds`` (n, 3, 128, 128) uint8; ``classes`` and ``folders`` say how many there are.
    """
    rng = np.random.default_rng(0)
    art, folders = clip_art(packages / "openclipart-png/usr/share/openclipart/png")
    font = next((packages / "fonts-noto-color-emoji").rglob("NotoColorEmoji.ttf"))
    letters = characters(_text_fonts(packages))
    # Each picture is a class of its own, but for characters, which several fonts draw.
    groups = [
        (0, [[sprite] for sprite in art]),
        (1, [[sprite] for sprite in emoji(font)]),
        (2, letters),
        (3, [[sprite] for sprite in fractals(rng, _FRACTALS)]),
        (4, [[sprite] for sprite in shapes(rng, _SHAPES)]),
    ]
    names = sorted(set(folders))
    rows = [(kind, sprite) for kind, classes in groups for sprites in classes for sprite in sprites]
    sizes = [len(sprites) for _, classes in groups for sprites in classes]
    folder = np.full(len(rows), -1)
    folder[: len(art)] = [names.index(name) for name in folders]
    return {
        "sprites": np.stack([sprite for _, sprite in rows]).transpose(0, 3, 1, 2),
        "kind": np.array([kind for kind, _ in rows]),
        "label": np.repeat(np.arange(len(sizes)), sizes),
        "folder": folder,
        "classes": np.array(len(sizes)),
        "folders": np.array(len(names)),
        "textures": _textures(rng, _TEXTURES),
        "grounds": _textures(rng, _GROUNDS),
    }


def _text_fonts(packages: Path) -> Iterator[Path]:
    """Give the font files whose characters are drawn."""
    yield from (
        path
        for path in sorted((packages / "fonts-noto-core").rglob("*.ttf"))
        if "UI" not in path.name and "Emoji" not in path.name
    )
    for weight in ("Regular", "Bold"):
        yield from sorted((packages / "fonts-noto-cjk").rglob(f"*{weight}*.ttc"))


def _textures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return textures (count, 3, 128, 128) uint8."""
    return np.stack([texture(rng, _TEXTURE_SIDE) for _ in range(count)]).transpose(0, 3, 1, 2)


def main() -> None:
    """Write the material to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    arrays = bank(arguments.packages)
    np.savez(arguments.out, **arrays)
    counts = np.bincount(arrays["kind"], minlength=len(KINDS))
    print(", ".join(f"{count} {kind}" for kind, count in zip(KINDS, counts, strict=True)))
    print(f"{int(arrays['classes'])} classes in {arguments.out}")


if __name__ == "__main__":
    main()

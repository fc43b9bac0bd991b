"""Colours as readers see them: how far apart two are, also for those with deuteranopia or protanopia."""

from __future__ import annotations

import numpy as np

# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
VISIONS = {
    "all": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
"""Name of a vision -> the matrix that simulates it."""

_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = _TO_XYZ.sum(axis=1)


def contrast(colour: str, ground: str) -> float:
    """Return the contrast of two colours (``#rrggbb``) as WCAG defines it, 1..21."""
    dark, light = sorted(float(_TO_XYZ[1] @ _linear(each)) for each in (colour, ground))
    return (light + 0.05) / (dark + 0.05)


def distance(colour: str, other: str, vision: str) -> float:
    """Return the difference of two colours (``#rrggbb``) in CIEDE2000, as somebody of that vision sees them."""
    return ciede2000(_lab_as_seen(colour, vision), _lab_as_seen(other, vision))


def _linear(colour: str) -> np.ndarray:
    """Return the linear RGB of a colour, 0..1."""
    encoded = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def _lab_as_seen(colour: str, vision: str) -> np.ndarray:
    """Return the CIELAB of a colour as somebody of that vision sees it."""
    relative = _TO_XYZ @ np.clip(VISIONS[vision] @ _linear(colour), 0, 1) / _WHITE
    root = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def ciede2000(first: np.ndarray, second: np.ndarray) -> float:
    """Return the difference of two colours in CIELAB by Sharma, Wu and Dalal (2005), whose letters are used here."""
    # 1. a is stretched for colours that are nearly grey.
    chroma = (np.hypot(*first[1:]) + np.hypot(*second[1:])) / 2
    g = 0.5 * (1 - _saturation(chroma))
    lightness = np.array([first[0], second[0]])
    a = (1 + g) * np.array([first[1], second[1]])
    b = np.array([first[2], second[2]])
    # 2. Lightness L, chroma C and hue h: their differences, and their means.
    c = np.hypot(a, b)
    h = np.degrees(np.arctan2(b, a)) % 360
    turn = (h[1] - h[0] + 180) % 360 - 180
    mean_h = (h[0] + turn / 2) % 360
    delta_l = lightness[1] - lightness[0]
    delta_c = c[1] - c[0]
    delta_h = 2 * np.sqrt(c[0] * c[1]) * np.sin(np.radians(turn / 2))
    mean_l = lightness.mean()
    mean_c = c.mean()
    # 3. How much each of them counts there.
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(size * np.cos(np.radians(times * mean_h + shift)) for size, times, shift in waves)
    s_l = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    s_c = 1 + 0.045 * mean_c
    s_h = 1 + 0.015 * mean_c * t
    rotation = -2 * _saturation(mean_c) * np.sin(np.radians(60 * np.exp(-(((mean_h - 275) / 25) ** 2))))
    parts = np.array([delta_l / s_l, delta_c / s_c, delta_h / s_h])
    return float(np.sqrt(parts @ parts + rotation * parts[1] * parts[2]))


def _saturation(chroma: float) -> float:
    """Return the share (0..1) that a chroma has in two corrections of CIEDE2000."""
    return float(np.sqrt(chroma**7 / (chroma**7 + 25.0**7)))

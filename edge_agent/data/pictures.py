"""Small pictures of inputs for people: encoded images made smaller, and arrays of pixels as files. No data source."""

from __future__ import annotations

import io

import numpy as np

from .preprocess import has_pillow

_STARTS = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"))
"""First bytes of encoded images that browsers show, and the subtype of their media type."""


def image_type(raw: bytes) -> str:
    """Return the media type of an encoded image that browsers show, from its first bytes; empty for anything else."""
    for start, kind in _STARTS:
        if raw.startswith(start):
            return f"image/{kind}"
    is_webp = raw.startswith(b"RIFF") and raw[8:12] == b"WEBP"
    return "image/webp" if is_webp else ""


def smaller_image(raw: bytes, longer_side: int) -> bytes:
    """Return an encoded image as a JPEG file with this longer side, pixels, upright; without Pillow as it is.

    The image was decoded before, so it is one.
    """
    if not has_pillow():
        return raw
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(raw)) as image:
        image.draft("RGB", (longer_side, longer_side))
        upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((longer_side, longer_side))
    buffer = io.BytesIO()
    upright.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def png_of(pixels: np.ndarray) -> bytes:
    """Return pixels (height, width, 1 or 3) uint8 as a PNG file."""
    from PIL import Image

    grey = pixels.shape[2] == 1
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if grey else pixels).save(buffer, "PNG")
    return buffer.getvalue()

"""A picture of few colours as a PNG in a data URL: the cells of a heat map, of which SVG needs one each. Pure."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Colour = tuple[int, int, int, int]
"""Red, green, blue, and how opaque it is: what shines through makes one picture do for light and dark pages."""


def data_url(pixels: npt.NDArray[np.uint8], palette: Sequence[Colour]) -> str:
    """pixels: [rows, columns], positions in the palette of at most 256 colours. One byte each, deflated."""
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(bytes(colour[:3]) for colour in palette)),
        (b"tRNS", bytes(colour[3] for colour in palette)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

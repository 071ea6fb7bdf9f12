"""The checksum of a file of weights, the same for who writes it and who loads it."""

import mmap
import zlib
from pathlib import Path

PIECE = 2**26
"""Bytes at a time: zlib lets other threads run within a piece."""


def checksum(path: Path | str) -> int:
    """CRC-32 of a whole file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        value = 0
        for start in range(0, len(view), PIECE):
            value = zlib.crc32(memoryview(view)[start : start + PIECE], value)
        return value

"""The checksum of a file of weights, the same for who writes it and who loads it."""

import mmap
from pathlib import Path

from xxhash import xxh3_64_intdigest


def checksum(path: Path | str) -> int:
    """XXH3 of a whole file, 64 bits: a load within the pause waits for it, and CRC-32 took six
    times as long."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return xxh3_64_intdigest(view)

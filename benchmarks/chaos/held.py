"""What a process really holds: the memory that it was given and has not given back.

Resident memory is more, and follows it only roughly: the C library keeps freed memory for later.
"""

from __future__ import annotations

import ctypes
import sys

NAMES = ("trainer_heap_mib", "trainer_python_blocks")
"""What `held` gives."""


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h, from 2.33 on): all in bytes but the numbers of blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keep")
    ]


def held() -> dict[str, float]:
    """Of this process: MiB that malloc has given out, mapped ones included, and blocks that Python has given out."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    heap = (found.uordblks + found.hblkhd) / 2**20
    return dict(zip(NAMES, (round(heap, 2), float(sys.getallocatedblocks())), strict=True))

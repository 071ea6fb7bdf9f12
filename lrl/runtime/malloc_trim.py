"""What a process has freed and its C library keeps: fragments of large tensors between small objects that live on."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give the system what is freed, where the C library keeps it for later and can be told not to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

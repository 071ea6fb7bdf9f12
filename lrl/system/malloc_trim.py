"""Return of freed memory to the system.

The C library keeps what large tensors have left between small objects that are still in use.
"""

import ctypes


def trim_heap() -> None:
    """Returns freed memory that the C library keeps; does nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

"""Return of freed memory to the system: fragments of large tensors between small objects that live
on."""

import ctypes


def trim_heap() -> None:
    """Returns freed memory that the C library keeps; does nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

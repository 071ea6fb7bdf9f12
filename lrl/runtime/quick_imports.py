"""Large imports without Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports in its block are not interrupted by the garbage collector, and it never looks at what they made.

    torch, transformers and vLLM make a million objects that stay, and the collector looks at them again and again: of
    the seconds until `lrl fit` knows its settings it took a third, of the start of a generator on a CPU a quarter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()

"""How much one core slows the other: the speed of each of two processes beside the other, as a
share of it alone.

    python -m benchmarks.both_cores

Two kinds of work: matrix products that fit a core's own cache, and sums of vectors far larger than
any. The first kind does not slow the other core; the second shares the way to memory. Training and
decoding are a mix of both, so this says how near to its larger side alone an overlapped step can
come on this machine, on this day.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from statistics import fmean, median

import torch

from benchmarks import arguments
from benchmarks.records import append, rounded

SECONDS = 2.0
"""Of each measurement."""
WORK: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
    "matrix products": lambda: product(torch.randn(256, 256), torch.randn(256, 256)),
    "sums in memory": lambda: total(torch.randn(8_000_000), torch.randn(8_000_000)),
}


def product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes work of half a MiB."""
    return lambda: a @ b


def total(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes work of 61 MiB."""
    return lambda: torch.add(a, b, out=a)


def speed(work: str, start: Barrier) -> float:
    """Measures the rounds a second of one process, which begins together with the others."""
    torch.set_num_threads(1)
    step, rounds = WORK[work](), 0
    start.wait(60)
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        step()
        rounds += 1
    return rounds / (time.perf_counter() - began)


def look(work: str, processes: int) -> float:
    """Returns the mean rounds a second of so many processes at once."""
    with multiprocessing.Manager() as manager, multiprocessing.Pool(processes) as pool:
        start = manager.Barrier(processes)
        return fmean(pool.starmap(speed, [(work, start)] * processes, chunksize=1))


def main() -> None:
    """Measures in turns and prints the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each look (%(default)s)")
    arguments.add_out(parser, "both_cores")
    settings = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    for work in WORK:
        shares = [look(work, 2) / look(work, 1) for _ in range(settings.repeats)]
        least, middle, most = (rounded(of(shares)) for of in (min, median, max))
        print(
            f"{work}: beside the other core {middle:.2f} of the speed alone ({least:.2f} to "
            f"{most:.2f})",
            flush=True,
        )
        append(
            settings.out,
            {"work": work, "share": [least, middle, most], "repeats": settings.repeats},
        )


if __name__ == "__main__":
    main()

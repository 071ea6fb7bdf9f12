"""Milliseconds of a program in the sandbox of `lrl.rewards.Code`, and as a plain process.

    python -m benchmarks.sandbox_cost
    python -m benchmarks.sandbox_cost --repeats 5     a rehearsal

A program of two lines is judged by one `assert`, by one pair of input and output, and by ten. The
ways take turns. `plain` is `isolation: none`: the same runner and limits without bubblewrap.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from lrl.rewards import Code

PAIR = {"input": "20\n", "output": "40\n"}
CASES: dict[str, tuple[str, Any]] = {
    "an assert": ("def double(x):\n    return 2 * x", "assert double(20) == 40"),
    "a pair": ("x = int(input())\nprint(2 * x)", [PAIR]),
    "ten pairs": ("x = int(input())\nprint(2 * x)", [PAIR] * 10),
}


def milliseconds(judge: Code, case: str) -> float:
    """Returns how long one verdict takes."""
    program, tests = CASES[case]
    began = time.perf_counter()
    reward = judge("", program, tests=tests)
    took = 1000 * (time.perf_counter() - began)
    assert reward == 1.0, judge.verdict(program, tests=tests)
    return took


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    ways = {
        "sandbox": Code(fenced=False),
        "plain": Code(fenced=False, isolation="none", python="/usr/bin/python3"),
    }
    took: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for case in CASES:
            for way, judge in ways.items():
                took.setdefault((case, way), []).append(milliseconds(judge, case))
    print(f"{repeats} repeats; load of the machine at the end {os.getloadavg()[0]:.1f}\n")
    print("| tests | sandbox, ms | plain, ms |\n|---|---|---|")
    for case in CASES:
        cells = [_cell(took[case, way]) for way in ways]
        print(f"| {case} | {' | '.join(cells)} |")


def _cell(values: list[float]) -> str:
    tenths = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.0f} ({tenths[0]:.0f} to {tenths[-1]:.0f})"


if __name__ == "__main__":
    main()

"""Runs one experiment: `python -m benchmarks.chaos EXPERIMENT`."""

from __future__ import annotations

import importlib
import sys

from benchmarks import arguments

MODULES = {
    "generators": "broken_run",
    "trainer": "broken_run",
    "nodes": "broken_run",
    "sync": "sync",
    "rewards": "rewards",
}
"""Each has a `table`, and `EXPERIMENTS`: settings, runs and how they are measured, by name."""


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in MODULES:
        raise SystemExit(f"python -m benchmarks.chaos {'|'.join(MODULES)} [--help]")
    found = importlib.import_module(f"benchmarks.chaos.{MODULES[name]}")
    settings, runs, measure = found.EXPERIMENTS[name]
    words = sys.argv[2:]
    arguments.run(f"chaos {name}", found.__doc__, settings, runs, measure, found.table, words)


if __name__ == "__main__":
    main()

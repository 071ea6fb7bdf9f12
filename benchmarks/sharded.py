"""A sharded policy (lrl.AsyncFSDP) beside a whole one: gradient, seconds a step, memory of each
rank. Prints a table.

    python -m benchmarks.sharded [--size 130m] [--steps 4] [--repeats 3]

The systems run in turns, with one thread a rank. The gradient is that of the first step, against
one process. Memory is what a rank holds beyond what its imports take, at the most: while it loads,
in a step, and while the whole weights are read. Rank 0 has the whole model while it loads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import arguments
from benchmarks.random_policy import SHAPES, llama, made_up_rows, make_policy, num_parameters
from benchmarks.records import append, rounded

SYSTEMS: dict[str, dict[str, Any]] = {
    "one process": {"strategy": "AsyncSingleDevice", "ranks": 1, "settings": {}},
    "AsyncDDP": {"strategy": "AsyncDDP", "ranks": 2, "settings": {}},
    "AsyncFSDP, each": {
        "strategy": "AsyncFSDP",
        "ranks": 2,
        "settings": {"reduce_gradients": "each"},
    },
    "AsyncFSDP, once": {
        "strategy": "AsyncFSDP",
        "ranks": 2,
        "settings": {"reduce_gradients": "once"},
    },
}
WARM_UP = 1
"""First steps that do not count: AdamW makes its state in them."""
HEAD = (
    "| system | gradient off by | s a step | load, rank 0 | load, rank 1 | step | read, rank 0 | "
    "read (MB/s) |\n|---|---|---|---|---|---|---|---|"
)


def run(name: str, policy: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Runs one system; returns what its ranks have measured."""
    folder.mkdir(parents=True, exist_ok=True)
    how = json.dumps(SYSTEMS[name] | {"steps": steps})
    subprocess.run(
        [sys.executable, "-m", "benchmarks.sharded_run", str(policy), str(folder), how], check=True
    )
    ranks = [
        json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(SYSTEMS[name]["ranks"])
    ]
    first = ranks[0]
    return {
        "step_s": median(first["step_s"][WARM_UP:]),
        "read_mb_s": first["read_bytes"] / median(first["read_s"]) / 1e6,
        "load_0": ranks[0]["peaks"]["load"],
        "load_1": ranks[-1]["peaks"]["load"],
        "step": max(rank["peaks"]["step"] for rank in ranks),
        "read_0": first["peaks"]["read"],
    }


def distance(folder: Path, alone: Path) -> float:
    """Returns how far the first gradient is from that of one process, as a share of its norm."""
    found, expected = (torch.load(each / "gradient.pt") for each in (folder, alone))
    squares = sum((found[name] - gradient).square().sum() for name, gradient in expected.items())
    return float((squares / sum(gradient.square().sum() for gradient in expected.values())).sqrt())


def row(name: str, found: dict[str, Any], weights: int) -> str:
    """Returns a line of the table; memory in multiples of the policy's weights."""
    memory = {where: found[where] / weights for where in ("load_0", "load_1", "step", "read_0")}
    return (
        f"| {name} | {found['gradient']:.1e} | {found['step_s']:.2f} | {memory['load_0']:.2f} | "
        f"{memory['load_1']:.2f} | {memory['step']:.2f} | {memory['read_0']:.2f} | "
        f"{found['read_mb_s']:.0f} |"
    )


def main() -> None:
    """Runs the systems in turns and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", choices=SHAPES, default="130m", help="of the policy (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="of a run, the first not counted (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system (%(default)s)")
    arguments.add_places(parser, "sharded", plot=False)
    settings = parser.parse_args()
    policy = settings.folder / settings.size
    weights = 4 * num_parameters(llama(settings.size))
    settings.folder.mkdir(parents=True, exist_ok=True)
    make_policy(llama(settings.size), [row["question"] for row in made_up_rows()], policy, "cpu")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for repeat in range(settings.repeats):
        for name in SYSTEMS:
            folder = settings.folder / f"{name.replace(', ', '-').replace(' ', '-')}-{repeat}"
            found[name].append(run(name, policy, folder, settings.steps))
            found[name][-1]["gradient"] = distance(
                folder, settings.folder / f"one-process-{repeat}"
            )
    print(
        f"{weights / 4e6:.0f} million parameters; memory as multiples of the weights "
        f"({weights / 1e6:.0f} MB)\n"
    )
    print(HEAD)
    for name, runs in found.items():
        result = {key: rounded(median(one[key] for one in runs)) for key in runs[0]}
        append(
            settings.out, {"system": name, "size": settings.size, "steps": settings.steps} | result
        )
        print(row(name, result, weights), flush=True)


if __name__ == "__main__":
    main()

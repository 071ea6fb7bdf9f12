"""The recipe `gsm8k` on one GPU, as it is written, with a policy of random weights: what a step of
it takes.

    python -m benchmarks.gpu.gsm8k_recipe --data FOLDER
    python -m benchmarks.gpu.gsm8k_recipe --data FOLDER --size tiny --device cpu --small     a rehearsal

FOLDER has `gsm8k/train.jsonl`, `gsm8k/test.jsonl` and `math500/test.jsonl`, for machines that reach
no hub. The policy has the shape of Qwen2.5-1.5B. Random weights end no response, so each has the
full length: a step is the longest that the recipe can have. The evaluations keep the first
`--problems` problems of theirs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import arguments, records
from benchmarks.gpu import report
from benchmarks.gpu.machine import MACHINES
from benchmarks.random_policy import SHAPES, llama, make_policy
from lrl.cli.recipes import recipes
from lrl.rollouts.sources import read_rows

MEASURED = slice(2, -1)
"""The first two steps fill the pipeline; the last one is followed by an evaluation."""
LEAST_STEPS = 4
SHARE = 0.4
"""Of the GPU's memory, for the generator: as in recipes/README.md."""
TAGS = (
    "time/step",
    "time/wait",
    "time/train",
    "time/sync",
    "time/sync_pause",
    "policy/mismatch_kl",
)
"""The last one has no value for a step without a token of lag 0."""
SMALL = {
    "groups_per_step": 2,
    "rollouts_per_group": 2,
    "max_response_tokens": 32,
    "reward_workers": 1,
}


def config(args: argparse.Namespace, policy: Path) -> dict[str, Any]:
    """Returns what is laid over the recipe: the policy, the files, and one device for both
    sides."""
    found = yaml.safe_load(recipes()["gsm8k"].read_text())
    callbacks = found["trainer"]["callbacks"]
    for each in callbacks:
        if each["class_path"] == "lrl.callbacks.Evaluation":
            prompts = each["init_args"]["prompts"]["init_args"]
            prompts["source"] = str(first_problems(args, prompts["source"]))
            prompts.pop("split", None)
    server = {"gpu_memory_utilization": SHARE} if args.device == "gpu" else {"kv_cache_gib": 0.2}
    machine = MACHINES[args.device]
    return {
        "model": {"init_args": {"model": str(policy)}},
        "data": {
            "init_args": {
                "prompts": {"init_args": {"source": str(args.data / "gsm8k/train.jsonl")}},
                **(SMALL if args.small else {}),
            }
        },
        "trainer": {
            "accelerator": machine.accelerator,
            "devices": 1,
            "max_steps": args.steps,
            "strategy": {"init_args": {"generator_devices": 0, "server": server}},
            "logger": {"init_args": {"save_dir": str(args.folder), "name": "", "version": "run"}},
            "callbacks": callbacks,
        },
    }


def first_problems(args: argparse.Namespace, name: str) -> Path:
    """Writes a file of the first problems of a data set's test."""
    path = args.folder / f"{name}.jsonl"
    with (args.data / name / "test.jsonl").open() as lines:
        path.write_text("".join(islice(lines, args.problems)))
    return path


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the run; returns its result.

    Raises:
        subprocess.CalledProcessError: The run failed.
    """
    policy = args.folder / f"policy-{args.size}"
    over = args.folder / "over.yaml"
    questions = [
        row["question"] for row in read_rows(str(args.data / "gsm8k/train.jsonl"), None, "train")
    ]
    make_policy(llama(args.size), questions, policy, MACHINES[args.device].device)
    over.write_text(yaml.safe_dump(config(args, policy)))
    program = [sys.executable, "-m", "lrl.cli.main"]
    subprocess.run([*program, "fit", "--config", "gsm8k", "--config", str(over)], check=True)
    board = EventAccumulator(str(args.folder / "run")).Reload()
    steps = sorted({event.step for event in board.Scalars("time/step")})[MEASURED]
    values = {
        tag: [event.value for event in board.Scalars(tag) if event.step in steps] for tag in TAGS
    }
    return {
        **records.origin(),
        "command": args.command,
        "machine": MACHINES[args.device]().name,
        "size": args.size,
        "steps": args.steps,
        **{tag: statistics.median(found) for tag, found in values.items() if found},
    }


def table(result: dict[str, Any]) -> str:
    """Returns a result as a Markdown table."""
    cells = {tag: f"{result[tag]:.3g}" if tag in result else "" for tag in TAGS}
    return report.table({"policy": result["size"]} | cells, result)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.gsm8k_recipe",
        description="The recipe gsm8k on one GPU, random weights.",
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the files of gsm8k and math500"
    )
    parser.add_argument(
        "--size", choices=list(SHAPES), default="1.5b", help="the policy (%(default)s)"
    )
    parser.add_argument(
        "--device", choices=list(MACHINES), default="gpu", help="cpu: a rehearsal (%(default)s)"
    )
    parser.add_argument(
        "--small", action="store_true", help="four responses of 32 tokens a step: a rehearsal"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="the first two and the last do not count (%(default)s)"
    )
    parser.add_argument("--problems", type=int, default=32, help="of each evaluation (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gsm8k_recipe"), help="of all files (%(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gsm8k_recipe/results.jsonl"),
        help="gets a line (%(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, appends the result to `--out` as a line of JSON, and prints it as a table."""
    parser = make_parser()
    args = arguments.parse(parser, argv)
    if args.steps < LEAST_STEPS:
        parser.error(
            f"--steps {args.steps}: the first two and the last are not measured; give at least "
            f"{LEAST_STEPS}."
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    result = measure(args)
    report.keep(args, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

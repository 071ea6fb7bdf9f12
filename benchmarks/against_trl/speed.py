"""lrl against TRL's GRPOTrainer at 5 million parameters: responses a second, with responses of
forced lengths.

    OMP_WAIT_POLICY=passive python -m benchmarks.against_trl.speed                          measure, then print
    OMP_WAIT_POLICY=passive python -m benchmarks.against_trl.speed --repeats 1 --steps 2    a rehearsal
    python -m benchmarks.against_trl.speed --print-only                                     print what is there

The sides alternate in each repeat. Both have the same: a policy of random weights trained in
float32, the prompts of every step, 8 x 16 responses a step, the number of tokens of each (all 64,
or long-tailed with mean 64 and at most 512), the reward, AdamW, one update a step and the gradient
clipped at 1; the other settings are those of `python -m benchmarks.against_trl`. TRL generates with
transformers' `generate`, see there for the reason. The counted steps of both sides are the same
ones; the first of TRL's and the first three of lrl's do not count.

Each side has all cores. TRL uses them all, for writing and for training in turn. lrl divides them
in the ways of `SYSTEMS`; its servers run on while TRL is measured, and sleep. lrl's waiting threads
sleep, as with `lrl fit`; TRL's spin, OpenMP's default, with which it is faster (3.9 s a step
instead of 4.2 s). A figure is the mean over a run's counted steps, then least, median and most of
the repeats. The ratio is that of the medians, for the fastest of lrl's ways and of TRL's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import arguments, few_shot, records, timed_run
from benchmarks.against_trl.runs import ROOT, TRL, trl_python
from benchmarks.against_trl.settings import SpeedJob
from benchmarks.lent_server import LentServer
from benchmarks.timed_run import GROUPS, LENGTHS, RESPONSES, WARM_UP, System
from lrl.quickstart.task import problems

CORES = len(os.sched_getaffinity(0))
HALF = max(1, CORES // 2)
LARGE = 8192
"""Tokens of a micro-batch for several threads that sleep while they wait for one another: the fewer
waits, the better. With `timed_run.MICRO_BATCH_TOKENS` the way that is best with this took 4.0 s a
step."""
SPLIT = System(title="lrl, halves, max_lag 1", server_threads=HALF, trainer_threads=HALF, max_lag=1)
TRAINER_ALL = System(
    title="lrl, all cores train, half write, max_lag 1",
    server_threads=HALF,
    trainer_threads=CORES,
    max_lag=1,
    micro_batch_tokens=LARGE,
)
SYSTEMS = {
    "split": SPLIT,
    "split-bfloat16": replace(SPLIT, title=SPLIT.title + ", written in bfloat16", dtype="bfloat16"),
    "trainer-all": TRAINER_ALL,
    "trainer-all-bfloat16": replace(
        TRAINER_ALL, title=TRAINER_ALL.title + ", written in bfloat16", dtype="bfloat16"
    ),
    "both-all": replace(
        TRAINER_ALL, title="lrl, all cores on both sides, max_lag 1", server_threads=CORES
    ),
    "shared": replace(
        TRAINER_ALL,
        title="lrl, in turn, max_lag 0",
        server_threads=CORES,
        max_lag=0,
        placement="shared",
    ),
}
"""lrl's ways to divide the cores. All train in float32; those in bfloat16 write in it, as its
recipes do."""
TRL_PIECES = {"trl": 1, "trl-pieces": 8}
"""TRL's ways to train a step: whole, and in pieces of 16 responses, which with 64 tokens are lrl's
micro-batches."""
TRL_WARM_UP = 1
PROMPT_TOKENS = 288
"""Of the longest prompt: 40 examples and the problem."""
PARTS = ("step", "writing", "wait", "train", "sync")


def measure_lrl(
    args: argparse.Namespace, servers: dict[System, LentServer], name: str, lengths: str
) -> dict[str, float]:
    """Returns the mean seconds of lrl's counted steps. It writes while it trains, so `writing` has
    no seconds of its own."""
    system, policy = SYSTEMS[name], timed_run.policy_5m(args.folder)
    times = timed_run.run(
        system,
        servers[system],
        policy,
        LENGTHS[lengths],
        args.steps,
        args.folder,
        prompts=str(few_shot.write(args.examples, args.folder)),
        prompt_tokens=PROMPT_TOKENS,
    )
    return timed_run.means(times) | {"writing": 0.0}


def measure_trl(args: argparse.Namespace, name: str, lengths: str) -> dict[str, float]:
    """Returns the mean seconds of TRL's counted steps: writing plus training, rewards and
    advantages included.

    Raises:
        RuntimeError: A response did not have its drawn length.
    """
    job, drawn = make_job(args, lengths, TRL_PIECES[name])
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["OMP_NUM_THREADS"] = str(CORES)
    words = [
        str(trl_python(args.venv.resolve())),
        "-m",
        "benchmarks.against_trl.trl_speed",
        json.dumps(asdict(job)),
    ]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    steps = records.read(job.clock)
    if [step["tokens"] for step in steps] != [sum(step) for step in drawn]:
        raise RuntimeError(
            f"TRL's responses do not have the lengths in {job.lengths}: the comparison would not "
            "be fair."
        )
    mean = {part: fmean(step[part] for step in steps[TRL_WARM_UP:]) for part in ("step", "writing")}
    return mean | {"wait": 0.0, "train": mean["step"] - mean["writing"], "sync": 0.0}


def make_job(
    args: argparse.Namespace, lengths: str, pieces: int = 1
) -> tuple[SpeedJob, list[list[int]]]:
    folder = (args.folder / f"trl-{lengths}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    first = (WARM_UP - TRL_WARM_UP) * GROUPS
    groups = range(first, first + (TRL_WARM_UP + args.steps) * GROUPS)
    drawn = [LENGTHS[lengths].of(group % len(problems()), group, RESPONSES) for group in groups]
    by_step = [sum(drawn[start : start + GROUPS], []) for start in range(0, len(drawn), GROUPS)]
    prompts = folder / "prompts.jsonl"
    paths = {"folder": str(folder), "lengths": str(folder / "lengths.json")}
    rows = few_shot.rows(args.examples)
    prompts.write_text("".join(json.dumps(rows[group % len(rows)]) + "\n" for group in groups))
    Path(paths["lengths"]).write_text(json.dumps(by_step))
    policy = str(timed_run.policy_5m(args.folder).resolve())
    shape = {"groups": GROUPS, "rollouts": RESPONSES, "steps": len(by_step), "lr": timed_run.LR}
    job = SpeedJob(
        seed=0, max_lag=0, policy=policy, prompts=str(prompts), pieces=pieces, **paths, **shape
    )
    job.clock.unlink(missing_ok=True)
    return job, by_step


def described(args: argparse.Namespace, lengths: str, name: str) -> dict[str, Any]:
    tokens = {"micro_batch_tokens": SYSTEMS[name].micro_batch_tokens} if name in SYSTEMS else {}
    if args.examples:
        tokens["examples"] = args.examples
    return {
        "system": name,
        "lengths": lengths,
        "steps": args.steps,
        "repeats": args.repeats,
        **tokens,
    }


def sweep(args: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (lengths, name): [] for lengths in args.lengths for name in args.systems
    }
    policy = timed_run.policy_5m(args.folder)
    ways = [SYSTEMS[name] for name in args.systems if name in SYSTEMS]
    with timed_run.servers_for(ways, policy, args.folder, PROMPT_TOKENS) as servers:
        for repeat in range(args.repeats):
            for (lengths, name), runs in found.items():
                if name in TRL_PIECES:
                    runs.append(measure_trl(args, name, lengths))
                else:
                    runs.append(measure_lrl(args, servers, name, lengths))
                logging.info("repeat %d, %s, %s: %s", repeat, lengths, name, runs[-1])
    for key, runs in found.items():
        seconds = {part: records.spread([run[part] for run in runs]) for part in PARTS}
        middle = median(run["step"] for run in runs)
        speed = {"answers_per_s": records.rounded(GROUPS * RESPONSES / middle), "trl": TRL}
        records.append(
            args.out, described(args, *key) | seconds | speed | {"command": args.command}
        )


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["lengths", "system", "responses/s", "step (s)", "spread", "writing (s)", "waits (s)"]
    lines, ratios = [], []
    for row in rows:
        name, (least, middle, most) = row["system"], row["step"]
        whole = "" if TRL_PIECES.get(name, 1) == 1 else ", in pieces"
        title = SYSTEMS[name].title if name in SYSTEMS else f"TRL {row['trl']}{whole}"
        cells = [row["lengths"], title, f"{row['answers_per_s']:.1f}", f"{middle:.2f}"]
        rest = (f"{row[part][1]:.2f}" for part in PARTS[1:])
        lines.append([*cells, f"{least:.2f} to {most:.2f}", *rest])
    for lengths in dict.fromkeys(row["lengths"] for row in rows):
        of = [row for row in rows if row["lengths"] == lengths]
        speeds = {row["system"]: row["answers_per_s"] for row in of}
        trl = max((speeds.pop(name) for name in TRL_PIECES if name in speeds), default=0.0)
        if trl and speeds:
            best = max(speeds, key=lambda name: speeds[name])
            ratios.append(
                f"\n{lengths}: {SYSTEMS[best].title} trains {speeds[best] / trl:.2f} times TRL's "
                "responses."
            )
    return "\n".join([records.markdown([*heads, "training (s)", "sync (s)"], lines), *ratios])


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.make_parser("against_trl.speed", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of every side (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a run that count (%(default)s)")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument(
        "--examples",
        type=int,
        default=0,
        help="solved problems before each problem, of six or seven tokens each (%(default)s)",
    )
    names = [*TRL_PIECES, *SYSTEMS]
    usual = [name for name in names if name not in ("both-all", "shared")]
    parser.add_argument("--systems", nargs="+", choices=names, default=usual, help="(%(default)s)")
    parser.add_argument(
        "--venv", type=Path, default=Path("runs/against_trl/venv"), help="TRL's (%(default)s)"
    )
    arguments.add_print_only(parser, "against_trl_speed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    def measure(args: argparse.Namespace) -> None:
        if os.environ.get("OMP_WAIT_POLICY") != "passive":
            raise SystemExit("Start with OMP_WAIT_POLICY=passive, as `lrl fit` sets it.")
        args.command = "OMP_WAIT_POLICY=passive " + args.command
        sweep(args)

    def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
        return [described(args, lengths, n) for lengths in args.lengths for n in args.systems]

    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit("OMP_NUM_THREADS would overrule each side's threads: unset it.")
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())

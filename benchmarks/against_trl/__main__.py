"""lrl against TRL's GRPOTrainer on the quickstart's task: accuracy over samples and over seconds.

    python -m benchmarks.against_trl                 run what is missing, then print
    python -m benchmarks.against_trl --print-only    print what is there

Three systems with three seeds each, one run after another, seeds outermost. A finished run has its
rows in `--out`, one for each scored step, and is not repeated.

The same on all sides:

- per seed the warmed-up policy of the quickstart, in float32, with its own tokenizer, which puts
  `<bos>` before the prompt; the token ids are compared before TRL trains
- the training problems, in the same order: each step takes the same 16 prompts (lrl with `max_lag:
  1` may take a group a step earlier or later)
- 16 prompts x 16 responses a step at temperature 1, without top-k and top-p; at most 32 tokens, the
  end token included
- reward 1 or 0 by the same function; advantage = reward minus the group's mean, not divided by a
  deviation
- the loss of a step is the sum over its response tokens divided by their number; one update per
  batch; no KL term
- AdamW, learning rate, its rise and fall by the same formula, no weight decay, gradient norm
  clipped at 1
- 60 steps; every tenth policy is saved, which the clocks of both sides include, and scored
  afterwards by one piece of code: greedy responses to the 500 held-out problems

Different:

- Objective: TRL's is the clipped surrogate of PPO and lrl's is AIPO. On-policy both have the
  gradient of the plain policy gradient; the difference is at work in lrl with `max_lag: 1` alone.
- Generation: TRL generates with transformers' `generate`, lrl with a vLLM server. TRL can use vLLM,
  but not without CUDA: its server mode moves weights by NCCL and refuses any other device, and the
  mode within the trainer's process loads weights in a way that leaves the output head of vLLM's CPU
  build as it was (`lrl/vllm_plugin/shared_memory_engine.py`). Its third way, transformers'
  continuous batching, runs on a CPU and is slower there than `generate`. So the seconds compare
  generation engines at least as much as trainers.
- Threads: each side has the number with which it is fastest. TRL has all cores for generating and
  for training, one after the other. In lrl trainer and generator have half of the cores each.
- Start-up is left out of the seconds and listed apart: lrl starts a vLLM server.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import arguments, records
from benchmarks.against_trl.runs import is_done, measure
from benchmarks.against_trl.settings import STEPS, SYSTEMS
from benchmarks.intervals import accuracy_interval
from lrl.quickstart.task import TEST_ROWS

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    steps = sorted({row["step"] for row in rows})
    heads = ["system", "seeds", *(f"step {step}" for step in steps[:-1])]
    heads += [f"step {steps[-1]} (95 % interval)", "training (s)", "one step (s)", "start (s)"]
    by_system = {name: [row for row in rows if row["system"] == name] for name in SYSTEMS}
    lines = [[SYSTEMS[name], *_cells(of, steps)] for name, of in by_system.items() if of]
    return records.markdown(heads, lines)


def _cells(rows: Sequence[Row], steps: Sequence[int]) -> list[str]:
    at = {step: [row for row in rows if row["step"] == step] for step in steps}
    last = at[steps[-1]]
    mean, low, high = accuracy_interval(_column(last, "accuracy"), TEST_ROWS)
    seconds = fmean(_column(last, "seconds"))
    return [
        str(len(last)),
        *(f"{fmean(_column(at[step], 'accuracy')):.3f}" for step in steps[:-1]),
        f"{mean:.3f} ({low:.3f} to {high:.3f})",
        f"{seconds:.0f}",
        f"{seconds / max(1, steps[-1]):.2f}",
        f"{fmean(_column(last, 'start_s')):.0f}",
    ]


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments.make_parser("against_trl", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (%(default)s)")
    arguments.add_print_only(parser, "against_trl")
    args = parser.parse_args(words)
    for seed in args.seeds:
        for system in args.systems:
            if not args.print_only and not is_done(args.out, system, seed, args.steps):
                measure(system, seed, args.steps, args.out, args.folder)
    rows = [row for row in records.read(args.out) if row["steps"] == args.steps]
    if not rows:
        raise SystemExit(f"{args.out} has no run of {args.steps} steps.")
    print(table(rows))


if __name__ == "__main__":
    main()

"""lrl against TRL's GRPOTrainer on the quickstart's task: accuracy over samples and over seconds.

    python -m benchmarks.against_trl                 run what is missing, then draw and print
    python -m benchmarks.against_trl --plot-only     draw and print what is there

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

import argparse
from collections.abc import Sequence

from benchmarks import arguments, records
from benchmarks.against_trl.report import draw, table
from benchmarks.against_trl.runs import is_done, measure
from benchmarks.against_trl.settings import STEPS, SYSTEMS


def main(words: Sequence[str] | None = None) -> None:
    """Runs what is missing, draws and prints."""
    chosen = _arguments(words)
    for seed in chosen.seeds:
        for system in chosen.systems:
            if not chosen.plot_only and not is_done(chosen.out, system, seed, chosen.steps):
                measure(system, seed, chosen.steps, chosen.out, chosen.folder)
    rows = [row for row in records.read(chosen.out) if row["steps"] == chosen.steps]
    if not rows:
        raise SystemExit(
            f"{chosen.out} holds no run of {chosen.steps} steps; leave out --plot-only to measure."
        )
    draw(rows, chosen.plot)
    print(table(rows))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_trl", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="optimizer steps of a run (%(default)s)"
    )
    arguments.add_places(parser, "against_trl")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()

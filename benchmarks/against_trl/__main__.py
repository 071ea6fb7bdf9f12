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

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lrl
from benchmarks import arguments, records
from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import (
    ANSWER_TOKENS,
    MAX_LAG,
    STEPS,
    SYSTEMS,
    TRL,
    Job,
    checkpoints,
    finish_reason,
    trl_python,
)
from benchmarks.arguments import Row
from benchmarks.intervals import accuracy_interval
from benchmarks.quickstart_run import policy_of
from lrl.quickstart.task import TEST_ROWS, correct, held_out
from lrl.training.model import open_tokenizer


def runs(args: argparse.Namespace) -> Iterator[Row]:
    for seed in args.seeds:
        for system in args.systems:
            run = {"system": system, "seed": seed, "steps": args.steps}
            yield from (run | {"step": step} for step in checkpoints(args.steps))


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    """Runs each job in the environment of its side, with the threads that suit it best."""
    for run in (one for one in missing if one["step"] == args.steps):
        print(f"{SYSTEMS[run['system']]}, seed {run['seed']}", flush=True)
        job = prepare(run["system"], run["seed"], args.steps, args.folder)
        if run["system"] == "trl":
            python = trl_python(args.folder.resolve() / "venv")
            job.run(python, "trl_side", threads=len(os.sched_getaffinity(0)))
        else:
            job.run(sys.executable, "lrl_side", threads=None)
        clock = {line["step"]: line for line in records.read(job.clock)}
        for step in checkpoints(args.steps):
            row = {"accuracy": accuracy(job.checkpoint(step)), "trl": TRL}
            yield run | row | clock[0] | clock[step]


def prepare(system: str, seed: int, steps: int, folder: Path) -> Job:
    policy = policy_of(seed)
    run = folder / f"{system}-seed{seed}-{steps}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    prompts = write_prompts(run / "prompts.jsonl", policy, seed, steps * settings.GROUPS)
    paths = {
        "policy": str(policy.resolve()),
        "prompts": str(prompts.resolve()),
        "folder": str(run.resolve()),
    }
    return Job(seed=seed, max_lag=MAX_LAG[system], steps=steps, **paths)


def write_prompts(path: Path, policy: Path, seed: int, number: int) -> Path:
    source = lrl.Prompts("lrl.quickstart.task:problems", seed=seed)
    source.load(open_tokenizer(str(policy)), settings.PROMPT_TOKENS)
    prompts = [source[index] for index in range(number)]
    lines = [
        {"prompt": one.text, "answer": one.columns["answer"], "token_ids": one.token_ids}
        for one in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@torch.no_grad()
def accuracy(folder: Path) -> float:
    """Returns the share of the held-out problems that the policy answers rightly with its likeliest
    tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = held_out()
    # All prompts are equally long.
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    greedy = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = model.generate(**batch, generation_config=greedy)[:, batch.input_ids.shape[1] :]
    rewards = []
    for row, tokens in zip(rows, found.tolist(), strict=True):
        ids = until_end(tokens, tokenizer.eos_token_id)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reason = finish_reason(ids, tokenizer.eos_token_id)
        rewards.append(correct(row["prompt"], text, answer=row["answer"], finish_reason=reason))
    return sum(rewards) / len(rewards)


def until_end(token_ids: list[int], eos: int) -> list[int]:
    return token_ids[: token_ids.index(eos) + 1] if eos in token_ids else token_ids


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("against_trl", __doc__)
    arguments.add(
        parser,
        seeds=([0, 1, 2], "of warm-up and order"),
        systems=(list(SYSTEMS), "that train", SYSTEMS),
        steps=(STEPS, "of a run"),
    )
    arguments.add_places(parser, "against_trl")
    return arguments.run(parser, argv, runs, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())

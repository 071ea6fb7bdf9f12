"""lrl against TRL's GRPOTrainer on the quickstart's task: accuracy over samples and over seconds.

A finished run has its rows in `--out`, one for each scored step, and is not repeated. Both sides
have the same first policy, prompts, batches, loss, optimizer and learning rate, and are scored by
one piece of code; docs/results/learning.md has all that is the same, and what is not.

TRL generates with transformers' `generate`. Its server mode moves weights by NCCL and refuses any
device but CUDA, and the mode within the trainer's process loads weights in a way that leaves the
output head of vLLM's CPU build as it was (`lrl/vllm_plugin/engines.py`). So the
seconds compare generation engines at least as much as trainers.

Each side has the threads with which it is fastest. TRL has all cores for generating and for
training, one after the other. In lrl trainer and generator have half of the cores each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

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
    write_rows,
)
from benchmarks.arguments import Row
from benchmarks.quickstart_run import policy_of
from lrl.quickstart.task import TEST_ROWS, correct, held_out
from lrl.training.model import open_tokenizer

SETTINGS: dict[str, Any] = {
    "seeds": ([0, 1, 2], "of warm-up and order"),
    "systems": (list(SYSTEMS), "that train", SYSTEMS),
    "steps": (STEPS, "of a run"),
}


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
    policy = policy_of(seed).resolve()
    run = folder.resolve() / f"{system}-seed{seed}-{steps}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    source = lrl.Prompts("lrl.quickstart.task:problems", seed=seed)
    source.load(open_tokenizer(str(policy)), settings.PROMPT_TOKENS)
    prompts = write_rows(
        run / "prompts.jsonl",
        [
            {"prompt": one.text, "answer": one.columns["answer"], "token_ids": one.token_ids}
            for one in (source[index] for index in range(steps * settings.GROUPS))
        ],
    )
    return Job(
        seed=seed,
        max_lag=MAX_LAG[system],
        steps=steps,
        policy=str(policy),
        prompts=str(prompts),
        folder=str(run),
    )


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
    lines = []
    for system, title in SYSTEMS.items():
        own = [row for row in rows if row["system"] == system]
        last = [row for row in own if row["step"] == steps[-1]]
        if not last:
            continue
        means = [fmean(row["accuracy"] for row in own if row["step"] == step) for step in steps]
        _, low, high = records.accuracy_interval([row["accuracy"] for row in last], TEST_ROWS)
        seconds = fmean(row["seconds"] for row in last)
        start_s = fmean(row["start_s"] for row in last)
        lines.append(
            [
                *(title, len(last), *(f"{mean:.3f}" for mean in means[:-1])),
                f"{means[-1]:.3f} ({low:.3f} to {high:.3f})",
                *(f"{seconds:.0f}", f"{seconds / max(1, steps[-1]):.2f}", f"{start_s:.0f}"),
            ]
        )
    return records.markdown(heads, lines)


if __name__ == "__main__":
    arguments.run("against_trl", __doc__, SETTINGS, runs, measure, table)

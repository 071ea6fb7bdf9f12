"""Runs, one after another: preparation, a process for its side, scores of its saved policies, rows.

TRL has an environment of its own, made on first use. Torch, transformers and other packages of both
have the versions of `requirements/cpu.txt`, so they make no difference between the two. The policies
of both sides are scored by one piece of code, apart from their clocks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lrl
from benchmarks import records
from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import (
    ANSWER_TOKENS,
    MAX_LAG,
    SYSTEMS,
    Job,
    checkpoints,
    finish_reason,
)
from lrl.quickstart.task import correct, held_out
from lrl.quickstart.warmup import make_policy
from lrl.training.model import open_tokenizer

TRL, ACCELERATE = "1.16.0", "1.15.0"
ROOT = Path(__file__).resolve().parents[2]
POLICIES = Path("runs/quickstart")


def is_done(out: Path, system: str, seed: int, steps: int) -> bool:
    last = {"system": system, "seed": seed, "steps": steps, "step": steps}
    return records.find(records.read(out), last) is not None


def measure(system: str, seed: int, steps: int, out: Path, folder: Path) -> None:
    print(f"{SYSTEMS[system]}, seed {seed}, {steps} steps", flush=True)
    job = prepare(system, seed, steps, folder)
    train(system, job, folder)
    clock = {line["step"]: line for line in records.read(job.clock)}
    for step, found in {
        step: accuracy(job.checkpoint(step)) for step in checkpoints(steps)
    }.items():
        row = {"system": system, "seed": seed, "steps": steps, "accuracy": found, "trl": TRL}
        records.append(out, row | clock[0] | clock[step])


def prepare(system: str, seed: int, steps: int, folder: Path) -> Job:
    policy = make_policy(POLICIES / f"policy-seed{seed}", seed)
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


def train(system: str, job: Job, folder: Path) -> None:
    """Runs the job in the environment of its side, with the threads that suit it best (see
    `__main__`)."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if system == "trl":
        python, side = str(trl_python(folder.resolve() / "venv")), "trl_side"
        environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    else:
        python, side = sys.executable, "lrl_side"
    words = [python, "-m", f"benchmarks.against_trl.{side}", json.dumps(asdict(job))]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)


def trl_python(folder: Path) -> Path:
    python, stamp = folder / "bin" / "python", folder / f"trl-{TRL}"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        wanted = [f"trl=={TRL}", f"accelerate=={ACCELERATE}"]
        wanted += ["torch", "transformers", "datasets", "psutil"]
        constraints = str(ROOT / "requirements" / "cpu.txt")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "-c", constraints, *wanted], check=True)
        stamp.touch()
    return python


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

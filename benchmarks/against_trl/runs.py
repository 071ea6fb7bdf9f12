"""Runs, one after another: preparation, a process for its side, scores of its saved policies,
rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import lrl
from benchmarks import records
from benchmarks.against_trl import settings
from benchmarks.against_trl.environment import ROOT, TRL, trl_python
from benchmarks.against_trl.scoring import accuracy
from benchmarks.against_trl.settings import MAX_LAG, SYSTEMS, Job, checkpoints
from lrl.quickstart.warmup import make_policy
from lrl.training.model import open_tokenizer

POLICIES = Path("runs/quickstart")


def is_done(out: Path, system: str, seed: int, steps: int) -> bool:
    """Returns whether the run's last row is there."""
    last = {"system": system, "seed": seed, "steps": steps, "step": steps}
    return records.find(records.read(out), last) is not None


def measure(system: str, seed: int, steps: int, out: Path, folder: Path) -> None:
    """Trains one system with one seed, scores its policies, appends a row for each.

    Raises:
        subprocess.CalledProcessError: The run failed; nothing is appended.
    """
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
    """Makes the policy if it is not there, the file of prompts, and an empty folder for the run."""
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
    """Writes the first `number` prompts in the order of this seed, with the token ids that a
    generator gets."""
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

"""The recipe `word_problems` with and without a calculator, over seeds; a sweep over bounds on lag
and objectives; and the recipe `agent`, where the calculator is the tool of an agent.

    python -m benchmarks.word_problems --device gpu                  all runs at once on one GPU
    python -m benchmarks.word_problems --only recipe-0               the recipe, on two CPU cores
    python -m benchmarks.word_problems --only recipe-0-bfloat16      the same in bfloat16
    python -m benchmarks.word_problems --only calculator-0           with the calculator
    python -m benchmarks.word_problems --only agent-0                the recipe `agent`
    python -m benchmarks.word_problems --device gpu --print-only     print all that is there

On a GPU the settings stay, but for the devices, bf16-mixed in the trainer and bfloat16 in the
generator. Runs that share a GPU say how accurate a policy gets, not how long a step takes alone.
The agent needs `pip install "pydantic-ai-slim[openai]"` beside lrl.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.gpu.machine import MACHINES

EVALUATED = "eval/held_out/"
KV_CACHE_BYTES = 2 << 30
"""Given, so that vLLM does not measure the memory that is free while other runs begin."""
BFLOAT16 = {"trainer.precision": "bf16-mixed", "trainer.strategy.server.dtype": "bfloat16"}
ON_GPU = {
    **BFLOAT16,
    "trainer.accelerator": "gpu",
    "trainer.devices": 1,
    "trainer.strategy.generator_devices": 0,
    "trainer.strategy.heartbeat_s": 300,
    "trainer.strategy.server.gpu_memory_utilization": 0.06,
    "trainer.strategy.server.enforce_eager": "true",
    "trainer.strategy.server.extra_args": f"{{kv-cache-memory-bytes: {KV_CACHE_BYTES}}}",
}
RECIPE = {"config": "word_problems", "model.model": "lrl.quickstart.smollm2:policy"}
PLAIN = {**RECIPE, "data.rewards": "lrl.rewards.GSM8K"}
CALCULATOR = {
    **PLAIN,
    "data.environment": "lrl.quickstart.calculator.ProseCalculator",
    "data.max_response_tokens": 64,
    "trainer.max_steps": 30,
}
SHORT = {
    **CALCULATOR,
    "trainer.max_steps": 20,
    "data.groups_per_step": 4,
    "data.max_skipped_per_step": 8,
}
"""Of the sweep over lags: half of the recipe's problems a step, so ten runs take two hours."""


def lag_of(lag: int) -> str:
    return "" if lag == 1 else f"-lag{lag}"


VARIATIONS: dict[str, dict[str, Any]] = {
    **{
        f"recipe-{seed}-bfloat16": RECIPE | BFLOAT16 | {"seed_everything": seed}
        for seed in range(3)
    },
    "recipe-0": RECIPE,
    "plain-0": PLAIN | {"trainer.max_steps": 60},
    **{f"calculator-{seed}": CALCULATOR | {"seed_everything": seed} for seed in range(3)},
    **{f"calculator-0{lag_of(lag)}": CALCULATOR | {"data.max_lag": lag} for lag in (0, 4)},
    **{f"calculator-0{lag_of(lag)}-short": SHORT | {"data.max_lag": lag} for lag in (0, 1, 4, 8)},
    **{
        f"calculator-0{lag_of(lag)}-{name}-short": SHORT
        | {"data.max_lag": lag, "model.objective": name}
        for name in ("PPO", "REINFORCE")
        for lag in (1, 4, 8)
    },
    "agent-0": {"config": "agent"},
}
"""The settings of each run. At lag 0 the three objectives have one gradient."""
SETTINGS: dict[str, Any] = {
    "device": ("cpu", "of the runs", MACHINES),
    "only": (list(VARIATIONS), "these runs", VARIATIONS),
    "at_once": (0, "runs that share the machine; 0: on a GPU all, on a CPU one"),
}


def train(name: str, args: argparse.Namespace) -> Row:
    logger = {"save_dir": args.folder, "name": "", "version": name}
    settings = VARIATIONS[name] | (ON_GPU if args.device == "gpu" else {})
    settings |= {f"trainer.logger.{setting}": value for setting, value in logger.items()}
    words = [f"--{setting}={value}" for setting, value in settings.items()]
    with (args.folder / f"{name}.log").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "lrl.cli.main", "fit", *words],
            check=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    board = EventAccumulator(str(args.folder / name)).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    return record(scalars)


def record(scalars: dict[str, list[tuple[int, float]]]) -> Row:
    shown = {
        tag.removeprefix(EVALUATED): [(step, records.rounded(value)) for step, value in found]
        for tag, found in scalars.items()
        if tag.startswith((f"{EVALUATED}reward", f"{EVALUATED}kind/"))
    }

    def values(name: str) -> list[float]:
        return [value for _, value in scalars.get(name, [])]

    by_step = {"reward": "reward/mean", "kl_behaviour": "policy/kl_behaviour", "ess": "policy/ess"}
    series = {name: list(map(records.rounded, values(tag))) for name, tag in by_step.items()}
    return {
        "evaluations": shown,
        **series,
        "lag_mean": records.rounded(statistics.fmean(values("policy/lag_mean"))),
        "step_s": records.rounded(statistics.median(values("time/step"))),
        "steps_s": records.rounded(sum(values("time/step"))),
        "mismatch_kl": records.rounded(statistics.median(values("policy/mismatch_kl"))),
    }


def table(found: Sequence[Row]) -> str:
    lines, sweep = [], []
    for one in found:
        names = ("reward", "reward_low", "reward_high")
        # Records before version 0.3 say `accuracy`.
        told = {name.replace("accuracy", "reward"): it for name, it in one["evaluations"].items()}
        curves = (told[name] for name in names)
        for (step, value), (_, low), (_, high) in zip(*curves, strict=True):
            accuracy = f"{value:.3f} ({low:.3f} to {high:.3f})"
            lines.append((one["name"], step, accuracy, one["step_s"]))
        if one["name"].endswith("-short"):
            kl, ess = (statistics.median(one[name]) for name in ("kl_behaviour", "ess"))
            sweep.append((one["name"], f"{one['lag_mean']:.1f}", f"{kl:.3f}", f"{ess:.2f}"))
    heads = ("run", "step", "accuracy of 240 (95 % interval)", "median step s")
    of_sweep = ("run", "mean lag", "KL(mu, pi) per token", "effective sample size")
    return "\n\n".join([records.markdown(heads, lines), records.markdown(of_sweep, sweep)])


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    at_once = args.at_once or (len(missing) if args.device == "gpu" else 1)
    made_with = {"machine": MACHINES[args.device]().name, "at_once": at_once}
    with ThreadPoolExecutor(at_once) as pool:
        started = {pool.submit(train, run["name"], args): run for run in missing}
        for ended in as_completed(started):
            yield started[ended] | ended.result() | made_with


def runs(args: argparse.Namespace) -> Iterator[Row]:
    yield from ({"name": name, "device": args.device} for name in args.only)


if __name__ == "__main__":
    arguments.run("word_problems", __doc__, SETTINGS, runs, measure, table)

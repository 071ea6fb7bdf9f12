"""The recipe `word_problems` with and without a calculator, over seeds; a sweep over bounds on lag
and objectives; and the recipe `agent`, where the calculator is the tool of an agent, beside
`lrl.environments.Tools` with the same prompt.

    python -m benchmarks.word_problems --device gpu                  all runs at once on one GPU
    python -m benchmarks.word_problems --only recipe-0               the recipe, on two CPU cores
    python -m benchmarks.word_problems --only recipe-0-bfloat16      the same in bfloat16
    python -m benchmarks.word_problems --only calculator-0           with the calculator
    python -m benchmarks.word_problems --only agent-0                the recipe `agent`
    python -m benchmarks.word_problems --only tools-0                lrl's tools in its place
    python -m benchmarks.word_problems --device gpu --print-only     print all that is there

All runs but `recipe-...` are without the recipe's penalty of length. On a GPU the settings stay, but
for the devices, bf16-mixed in the trainer and bfloat16 in the generator. Runs that share a GPU say
how accurate a policy gets, not how long a step takes alone.
The agent needs `pip install "pydantic-ai-slim[openai]"` beside lrl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import arguments, records
from benchmarks.gpu.machine import MACHINES
from lrl.cli.recipes import recipes

CALCULATOR = "lrl.quickstart.calculator.ProseCalculator"
MODEL = "lrl.quickstart.smollm2:policy"
TOOLS_MODEL = "lrl.quickstart.smollm2:tools_policy"
KV_CACHE_BYTES = 2 << 30
"""Given, so that vLLM does not measure the memory that is free while other runs begin."""
EVALUATED = "eval/held_out/"
TOOLS = {"tools": ["lrl.quickstart.calculator.calculate"]}
SHORT_STEPS = 20
"""Of a run of the lag sweep, with half of the recipe's problems a step: so ten of them are made on
two CPU cores in two hours."""
SHORT = {"groups_per_step": 4, "max_skipped_per_step": 8}
RECIPE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Variation:
    """One run."""

    calculator: bool
    seed: int = 0
    max_lag: int = 1
    steps: int = 30
    objective: str = "AIPO"
    agent: bool = False
    """Whether the calculator is the tool of an agent; else it continues the policy's text."""
    tools: bool = False
    """Whether it is the tool of `lrl.environments.Tools`, behind the agent's prompt."""
    lr: float | None = None
    """None for the recipe's."""
    length_penalty: bool = False
    """Whether the recipe's rewards stay; the recipe got its penalty after the other runs."""
    bfloat16: bool = False
    """Whether trainer and generator compute in it on a CPU, too."""

    @property
    def name(self) -> str:
        lag = "" if self.max_lag == 1 else f"-lag{self.max_lag}"
        other = "" if self.objective == "AIPO" else f"-{self.objective}"
        kind = "calculator" if self.calculator else "plain"
        if self.length_penalty:
            kind = "recipe"
        if self.called:
            kind = "agent" if self.agent else "tools"
        rate = "" if self.lr is None else f"-lr{self.lr:g}"
        short = "-short" if self.short else ""
        half = "-bfloat16" if self.bfloat16 else ""
        return f"{kind}-{self.seed}{lag}{other}{rate}{short}{half}"

    @property
    def short(self) -> bool:
        return self.calculator and self.steps == SHORT_STEPS and not self.called

    @property
    def called(self) -> bool:
        return self.agent or self.tools

    @property
    def recipe(self) -> str:
        return "agent" if self.called else "word_problems"


LAG_SWEEP = (
    *(Variation(True, max_lag=lag, steps=SHORT_STEPS) for lag in (0, 1, 4, 8)),
    *(
        Variation(True, max_lag=lag, objective=objective, steps=SHORT_STEPS)
        for objective in ("PPO", "REINFORCE")
        for lag in (1, 4, 8)
    ),
)
"""At lag 0 the ratios are 1, and the three objectives have one gradient."""
VARIATIONS = {
    one.name: one
    for one in (
        *(Variation(True, seed) for seed in range(3)),
        *(Variation(True, max_lag=lag) for lag in (0, 4)),
        *LAG_SWEEP,
        *(
            Variation(False, seed, steps=RECIPE_STEPS, length_penalty=True, bfloat16=True)
            for seed in range(3)
        ),
        Variation(False, steps=RECIPE_STEPS, length_penalty=True),
        Variation(False, steps=60),
        Variation(False, seed=1, steps=10),
        *(Variation(True, steps=20, agent=True, lr=lr) for lr in (None, 5e-5)),
        Variation(True, steps=20, tools=True),
    )
}


def over(one: Variation, args: argparse.Namespace) -> dict[str, Any]:
    data: dict[str, Any] = {"max_lag": one.max_lag}
    if one.calculator and not one.called:
        data |= {"environment": CALCULATOR, "max_response_tokens": 64}
    if not one.called and not one.length_penalty:
        data["rewards"] = [{"class_path": "lrl.rewards.GSM8K"}]
    trainer: dict[str, Any] = {
        "max_steps": one.steps,
        "logger": {"init_args": {"save_dir": str(args.folder), "name": "", "version": one.name}},
    }
    if one.tools:
        data |= {
            "environment": {"class_path": "lrl.environments.Tools", "init_args": TOOLS},
            "prompts": {"init_args": {"source": "benchmarks.tool_problems:problems"}},
        }
    if one.short:
        data |= SHORT
    if not one.length_penalty and not one.agent:
        trainer["callbacks"] = callbacks(one)
    if one.bfloat16:
        trainer |= {
            "precision": "bf16-mixed",
            "strategy": {"init_args": {"server": {"dtype": "bfloat16"}}},
        }
    if args.device == "gpu":
        server = {
            "gpu_memory_utilization": 0.06,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "extra_args": {"kv-cache-memory-bytes": KV_CACHE_BYTES},
        }
        strategy = {"generator_devices": 0, "heartbeat_s": 300, "server": server}
        trainer |= {
            "accelerator": "gpu",
            "devices": 1,
            "precision": "bf16-mixed",
            "strategy": {"init_args": strategy},
        }
    model: dict[str, Any] = {"model": args.model or (TOOLS_MODEL if one.called else MODEL)}
    if one.lr is not None:
        model["lr"] = one.lr
    if one.objective != "AIPO":
        model["objective"] = {"class_path": f"lrl.objectives.{one.objective}"}
    return {
        "seed_everything": one.seed,
        "model": {"init_args": model},
        "data": {"init_args": data},
        "trainer": trainer,
    }


def callbacks(one: Variation) -> list[dict[str, Any]]:
    recipe = yaml.safe_load(recipes()[one.recipe].read_text())
    found: list[dict[str, Any]] = recipe["trainer"]["callbacks"]
    for callback in found:
        if not callback["class_path"].endswith(".Evaluation"):
            continue
        settings = callback["init_args"]
        # On two cores an evaluation takes as long as five steps.
        settings["every_n_steps"] = SHORT_STEPS if one.short else 10
        if one.tools:
            settings["prompts"]["init_args"]["source"] = "benchmarks.tool_problems:held_out"
    return found


def run(one: Variation, args: argparse.Namespace) -> None:
    config, log = (args.folder / f"{one.name}.{kind}" for kind in ("yaml", "log"))
    config.write_text(yaml.safe_dump(over(one, args)))
    program = [sys.executable, "-m", "lrl.cli.main"]
    with log.open("w") as output:
        subprocess.run(
            [*program, "fit", "--config", one.recipe, "--config", config],
            check=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    board = EventAccumulator(str(args.folder / one.name)).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    made_with = {
        "device": args.device,
        "machine": MACHINES[args.device]().name,
        "at_once": args.at_once,
        "command": args.command,
    }
    called = {"calls": calls(args.folder / one.name)} if one.called else {}
    records.append(args.out, record(one, scalars) | called | made_with)


def calls(folder: Path) -> list[tuple[int, float]]:
    found = []
    for file in sorted(folder.glob("evaluation/*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        # The last user's message is the problem.
        results = sum(row["response"].rpartition("\nuser\n")[2].count("\ntool\n") for row in rows)
        found.append((int(file.stem[-6:]), round(results / len(rows), 4)))
    return found


def record(one: Variation, scalars: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    shown = {
        tag.removeprefix(EVALUATED): [(step, records.rounded(value)) for step, value in found]
        for tag, found in scalars.items()
        if tag.startswith((f"{EVALUATED}accuracy", f"{EVALUATED}kind/"))
    }
    by_step = {
        "reward": "reward/mean",
        "turns": "episodes/turns",
        "kl_behaviour": "policy/kl_behaviour",
        "ess": "policy/ess",
    }
    whole = {
        "lag_mean": (statistics.fmean, "policy/lag_mean"),
        "step_s": (statistics.median, "time/step"),
        "steps_s": (sum, "time/step"),
        "mismatch_kl": (statistics.median, "policy/mismatch_kl"),
    }

    def values(tag: str) -> list[float]:
        return [value for _, value in scalars.get(tag, [])]

    return {
        "name": one.name,
        **asdict(one),
        **(SHORT if one.short else {}),
        "evaluations": shown,
        **{name: [records.rounded(each) for each in values(tag)] for name, tag in by_step.items()},
        **{name: records.rounded(of(values(tag))) for name, (of, tag) in whole.items()},
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    lines, sweep = [], []
    for one in found:
        names = ("accuracy", "accuracy_low", "accuracy_high")
        curves = (one["evaluations"][name] for name in names)
        for (step, value), (_, low), (_, high) in zip(*curves, strict=True):
            accuracy = f"{value:.3f} ({low:.3f} to {high:.3f})"
            lines.append((one["name"], step, accuracy, one["step_s"]))
        if one["name"] in {each.name for each in LAG_SWEEP}:
            kl, ess = (statistics.median(one[name]) for name in ("kl_behaviour", "ess"))
            lag = f"{one['lag_mean']:.1f}"
            sweep.append((one["objective"], one["max_lag"], lag, f"{kl:.3f}", f"{ess:.2f}"))
    heads = ("run", "step", "accuracy of 240 (95 % interval)", "median step s")
    of_sweep = ("objective", "max_lag", "mean lag", "KL(mu, pi) per token", "effective sample size")
    return "\n\n".join([records.markdown(heads, lines), records.markdown(of_sweep, sweep)])


def measure(args: argparse.Namespace) -> None:
    made = records.read(args.out)
    left = [VARIATIONS[one["name"]] for one in runs_of(args) if not records.find(made, one)]
    args.at_once = args.at_once or (len(left) if args.device == "gpu" else 1)
    with ThreadPoolExecutor(max(1, args.at_once)) as runs:
        list(runs.map(lambda one: run(one, args), left))


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"name": name, "device": args.device} for name in args.only]


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.make_parser("word_problems", __doc__)
    parser.add_argument("--device", choices=list(MACHINES), default="cpu", help="(%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(VARIATIONS), default=list(VARIATIONS))
    parser.add_argument(
        "--at-once", type=int, help="runs that share the machine (a GPU: all; a CPU: 1)"
    )
    parser.add_argument("--model", help=f"the policy ({MODEL}, or {TOOLS_MODEL})")
    arguments.add_print_only(parser, "word_problems")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())

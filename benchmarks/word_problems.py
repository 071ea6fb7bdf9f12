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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.gpu.machine import MACHINES
from lrl.cli.recipes import recipes

MODEL = "lrl.quickstart.smollm2:policy"
TOOLS_MODEL = "lrl.quickstart.smollm2:tools_policy"
KV_CACHE_BYTES = 2 << 30
"""Given, so that vLLM does not measure the memory that is free while other runs begin."""
EVALUATED = "eval/held_out/"
SHORT_STEPS = 20
"""Of a run of the lag sweep, with half of the recipe's problems a step: so ten of them are made on
two CPU cores in two hours."""
SHORT = {"groups_per_step": 4, "max_skipped_per_step": 8}
REWARDS = {"rewards": [{"class_path": "lrl.rewards.GSM8K"}]}
KINDS: dict[str, Row] = {
    "recipe": {},
    "plain": REWARDS,
    "calculator": REWARDS
    | {
        "environment": "lrl.quickstart.calculator.ProseCalculator",
        "max_response_tokens": 64,
    },
    "agent": {},
    "tools": {
        "environment": {
            "class_path": "lrl.environments.Tools",
            "init_args": {"tools": ["lrl.quickstart.calculator.calculate"]},
        },
        "prompts": {"init_args": {"source": "benchmarks.tool_problems:problems"}},
    },
}
"""The recipe with its penalty of length, and without it; with the calculator, which continues the
policy's text; the recipe `agent`; `lrl.environments.Tools` behind the agent's prompt. Each has its
settings of data."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One run."""

    kind: str
    """From `KINDS`."""
    seed: int = 0
    max_lag: int = 1
    steps: int = 30
    objective: str = "AIPO"
    lr: float | None = None
    """None for the recipe's."""
    short: bool = False
    """Whether it is one of the lag sweep."""
    bfloat16: bool = False
    """Whether trainer and generator compute in it on a CPU, too."""

    @property
    def name(self) -> str:
        lag = "" if self.max_lag == 1 else f"-lag{self.max_lag}"
        other = "" if self.objective == "AIPO" else f"-{self.objective}"
        rate = "" if self.lr is None else f"-lr{self.lr:g}"
        short = "-short" if self.short else ""
        half = "-bfloat16" if self.bfloat16 else ""
        return f"{self.kind}-{self.seed}{lag}{other}{rate}{short}{half}"

    @property
    def called(self) -> bool:
        """Whether the calculator is called as a tool, and not in the policy's text."""
        return self.kind in ("agent", "tools")

    @property
    def recipe(self) -> str:
        return "agent" if self.called else "word_problems"


def short(max_lag: int, objective: str = "AIPO") -> Variation:
    return Variation("calculator", 0, max_lag, SHORT_STEPS, objective, short=True)


LAG_SWEEP = (
    *(short(lag) for lag in (0, 1, 4, 8)),
    *(short(lag, objective) for objective in ("PPO", "REINFORCE") for lag in (1, 4, 8)),
)
"""At lag 0 the ratios are 1, and the three objectives have one gradient."""
VARIATIONS = {
    one.name: one
    for one in (
        *(Variation("calculator", seed) for seed in range(3)),
        *(Variation("calculator", max_lag=lag) for lag in (0, 4)),
        *LAG_SWEEP,
        *(Variation("recipe", seed, steps=16, bfloat16=True) for seed in range(3)),
        Variation("recipe", steps=16),
        Variation("plain", steps=60),
        Variation("plain", seed=1, steps=10),
        *(Variation("agent", steps=20, lr=lr) for lr in (None, 5e-5)),
        Variation("tools", steps=20),
    )
}


def over(one: Variation, args: argparse.Namespace) -> Row:
    """Returns what changes in the recipe."""
    model: Row = {"model": args.model or (TOOLS_MODEL if one.called else MODEL)}
    if one.lr is not None:
        model["lr"] = one.lr
    if one.objective != "AIPO":
        model["objective"] = {"class_path": f"lrl.objectives.{one.objective}"}
    trainer: Row = {
        "max_steps": one.steps,
        "logger": {"init_args": {"save_dir": str(args.folder), "name": "", "version": one.name}},
    }
    if one.kind not in ("recipe", "agent"):
        trainer["callbacks"] = callbacks(one)
    strategy: Row = {"server": {"dtype": "bfloat16"}}
    if args.device == "gpu":
        strategy["server"] |= {
            "gpu_memory_utilization": 0.06,
            "enforce_eager": True,
            "extra_args": {"kv-cache-memory-bytes": KV_CACHE_BYTES},
        }
        strategy |= {"generator_devices": 0, "heartbeat_s": 300}
        trainer |= {"accelerator": "gpu", "devices": 1}
    if one.bfloat16 or args.device == "gpu":
        trainer |= {"precision": "bf16-mixed", "strategy": {"init_args": strategy}}
    data = KINDS[one.kind] | {"max_lag": one.max_lag} | (SHORT if one.short else {})
    return {
        "seed_everything": one.seed,
        "model": {"init_args": model},
        "data": {"init_args": data},
        "trainer": trainer,
    }


def callbacks(one: Variation) -> list[Row]:
    recipe = yaml.safe_load(recipes()[one.recipe].read_text())
    found: list[Row] = recipe["trainer"]["callbacks"]
    for callback in found:
        if not callback["class_path"].endswith(".Evaluation"):
            continue
        settings = callback["init_args"]
        # On two cores an evaluation takes as long as five steps.
        settings["every_n_steps"] = SHORT_STEPS if one.short else 10
        if one.kind == "tools":
            settings["prompts"]["init_args"]["source"] = "benchmarks.tool_problems:held_out"
    return found


def train(one: Variation, args: argparse.Namespace) -> Row:
    config, log = (args.folder / f"{one.name}.{kind}" for kind in ("yaml", "log"))
    config.write_text(yaml.safe_dump(over(one, args)))
    words = ["fit", "--config", one.recipe, "--config", str(config)]
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "lrl.cli.main", *words],
            check=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    board = EventAccumulator(str(args.folder / one.name)).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }
    called = {"calls": calls(args.folder / one.name)} if one.called else {}
    return record(one, scalars) | called


def calls(folder: Path) -> list[tuple[int, float]]:
    found = []
    for file in sorted(folder.glob("evaluation/*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        # The last user's message is the problem.
        results = sum(row["response"].rpartition("\nuser\n")[2].count("\ntool\n") for row in rows)
        found.append((int(file.stem[-6:]), round(results / len(rows), 4)))
    return found


def record(one: Variation, scalars: dict[str, list[tuple[int, float]]]) -> Row:
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


def table(found: Sequence[Row]) -> str:
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


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    at_once = args.at_once or (len(missing) if args.device == "gpu" else 1)
    made_with = {"machine": MACHINES[args.device]().name, "at_once": at_once}
    with ThreadPoolExecutor(at_once) as pool:
        started = {pool.submit(train, VARIATIONS[run["name"]], args): run for run in missing}
        for ended in as_completed(started):
            yield ended.result() | started[ended] | made_with


def runs(args: argparse.Namespace) -> Iterator[Row]:
    yield from ({"name": name, "device": args.device} for name in args.only)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("word_problems", __doc__)
    arguments.add(
        parser,
        device=("cpu", "of the runs", MACHINES),
        only=(list(VARIATIONS), "these runs", VARIATIONS),
        at_once=(0, "runs that share the machine; 0: on a GPU all, on a CPU one"),
        model=("", f"the policy; else {MODEL}, or {TOOLS_MODEL}"),
    )
    arguments.add_places(parser, "word_problems")
    return arguments.run(parser, argv, runs, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())

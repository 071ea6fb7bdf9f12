"""Keys and values of half-written responses at a sync: the cost and effect of recomputing and of
keeping them.

    python -m benchmarks.kv_cache                                 measure and print; about a quarter of an hour
    python -m benchmarks.kv_cache --repeats 1 --short-steps 6 --long-steps 4 --lags 1     a rehearsal
    python -m benchmarks.kv_cache --print-only                    print what is there

`recompute` and `keep` (`WeightSync.keys_and_values`) take turns, for short and long responses, at
each lag, on one server. The policy is the quickstart's:

- short: the quickstart's sums, responses of 4 to 32 tokens; `learned` is the greedy accuracy on 500
  held-out sums.
- long: the same prompts, but every response has a drawn length (`LONG`;
  `benchmarks.forced_lengths`), and the reward is the share of sevens in it, which the policy learns
  in a few steps; `learned` is its mean over the last five.

A figure is the mean over the steps after the first `WARM_UP`, then over the repeats.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import lightning as L

import lrl
from benchmarks import arguments, records
from benchmarks.forced_lengths import forced
from benchmarks.lent_server import Borrowing, LentServer, lent_server
from benchmarks.quickstart_run import CAPACITY, PROMPT_TOKENS, RESPONSE_TOKENS, held_out, policy_of
from lrl.callbacks import Throughput, WeightSync
from lrl.generators.generator import KeysAndValues
from lrl.planning.simulator.length_sampling import Lognormal
from lrl.quickstart.task import correct, problems

LONGEST = 448
LONG = Lognormal(192, 0.5, LONGEST)
"""Tokens of a long response: half have 192 or more, the mean is 213."""
WARM_UP = 3
"""First steps of a run that do not count: before the third most responses are of one version."""
LEARNING_RATES = {"short": 1e-4, "long": 3e-4}
GROUPS = {"short": 16, "long": 8}
RESPONSES = {"short": 16, "long": 8}
LAST = 5
"""Number of last steps whose mean reward is what was learned of long responses."""
FIGURES = {
    "step": "time/step",
    "pause": "time/sync_pause",
    "written_a_second": "throughput/generated_tokens_per_s",
    "read_again": "generators/recomputed_tokens",
    "ess": "policy/ess",
    "mismatch_kl": "policy/mismatch_kl",
    "kl": "policy/kl_behaviour",
}
"""The metric of each name in the records."""
HEAD = (
    "| responses | max_lag | keys and values | step (s) | tokens written a "
    "second | read again a step | pause (s) | mismatch_kl | kl_behaviour, by "
    "lag | ess | learned |\n" + "|---" * 11 + "|"
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of settings."""

    responses: str
    max_lag: int
    keys_and_values: KeysAndValues
    steps: int


def sevens(prompt: str, response: str, **columns: object) -> float:
    """Returns the share of the response's characters that are a 7."""
    return response.count("7") / max(1, len(response))


class Watch(L.Callback):
    """Keeps the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Keeps the metrics of the step that has just ended; a lag without a token in it keeps
        older ones."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        now = {f"policy/{name}" for name in pl_module.diagnostics.result()}
        old = {
            name
            for name in metrics
            if name.startswith(("policy/by_lag", "policy/mismatch")) and name not in now
        }
        rewards = [
            one.reward for group in trainer.datamodule.step_stream.groups for one in group.scored
        ]  # type: ignore[attr-defined]
        kept = {name: value for name, value in metrics.items() if name not in old}
        self.steps.append(kept | {"learned": fmean(rewards)})

    def mean(self, metric: str) -> float | None:
        """Returns the mean over the counted steps that had the metric."""
        values = [step[metric] for step in self.steps[WARM_UP:] if metric in step]
        return records.rounded(fmean(values)) if values else None

    def by_lag(self) -> dict[str, float | None]:
        """Returns the KL per token of each lag."""
        lags = sorted(
            {
                int(name.split("/")[2])
                for step in self.steps
                for name in step
                if "by_lag" in name and "policy" in name
            }
        )
        return {str(lag): self.mean(f"policy/by_lag/{lag}/kl_behaviour") for lag in lags}


def longer_policy(folder: Path) -> Path:
    """Returns the folder of the quickstart's policy with more rotary positions, for long
    responses."""
    policy = folder / "policy"
    if not policy.exists():
        shutil.copytree(policy_of(0), policy)
        config = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return policy


def measure(
    server: LentServer, cell: Cell, policy: Path, folder: Path, seed: int
) -> dict[str, Any]:
    """Makes one run."""
    L.seed_everything(seed, verbose=False)
    short = cell.responses == "short"
    watch = Watch()
    last = held_out(10**6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Borrowing(server, CAPACITY),
        callbacks=[
            WeightSync(keys_and_values=cell.keys_and_values),
            Throughput(),
            *([last] if short else []),
            watch,
        ],
        max_steps=cell.steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    objective = lrl.objectives.AIPO(rho=4.0)
    lr = LEARNING_RATES[cell.responses]
    module = lrl.PolicyModule(str(policy), objective=objective, lr=lr, warmup_steps=5)
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts("lrl.quickstart.task:problems", seed=seed),
        rewards=[correct if short else sevens],
        groups_per_step=GROUPS[cell.responses],
        rollouts_per_group=RESPONSES[cell.responses],
        max_lag=cell.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS if short else LONGEST,
        micro_batch_tokens=8192,
    )
    with nullcontext() if short else forced(LONG, len(problems())):
        trainer.fit(module, data)
    found: dict[str, Any] = {name: watch.mean(metric) for name, metric in FIGURES.items()}
    learned = (
        last.reports[-1][1].accuracy
        if short
        else fmean(step["learned"] for step in watch.steps[-LAST:])
    )
    return found | {"learned": records.rounded(learned), "kl_by_lag": watch.by_lag()}


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yields all combinations; the two settings of `keys_and_values` alternate fastest."""
    steps = {"short": args.short_steps, "long": args.long_steps}
    for responses, max_lag, how in product(args.responses, args.lags, get_args(KeysAndValues)):
        yield Cell(
            responses=responses, max_lag=max_lag, keys_and_values=how, steps=steps[responses]
        )


def sweep(args: argparse.Namespace) -> None:
    """Measures all combinations once per repeat."""
    policy = longer_policy(args.folder)
    settings = lrl.ServerSettings(
        max_model_len=PROMPT_TOKENS + LONGEST,
        max_num_seqs=CAPACITY,
        dtype=args.dtype,
        kv_cache_gib=1.0,
    )
    with lent_server(policy, settings, args.folder) as server:
        for repeat, cell in product(range(args.repeats), cells(args)):
            found = measure(server, cell, policy, args.folder / "run", seed=repeat)
            line = described(cell, args.dtype, repeat) | found
            records.append(args.out, line | {"command": args.command})
            logging.info("%s", line)


def described(cell: Cell, dtype: str, repeat: int) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    return {**vars(cell), "dtype": dtype, "repeat": repeat}


def row(cell: Cell, runs: Sequence[dict[str, Any]]) -> str:
    """Returns a line of the table."""

    def mean(name: str) -> float | None:
        values = [run[name] for run in runs if run[name] is not None]
        return fmean(values) if values else None

    forms = {
        "step": ".2f",
        "written_a_second": ",.0f",
        "read_again": ",.0f",
        "pause": ".3f",
        "mismatch_kl": ".1e",
    }
    numbers = [
        "" if (value := mean(name)) is None else format(value, form) for name, form in forms.items()
    ]
    lags = {
        lag: [run["kl_by_lag"][lag] for run in runs if run["kl_by_lag"].get(lag) is not None]
        for lag in "0124"
    }
    by_lag = ", ".join(f"{lag}: {fmean(values):.1e}" for lag, values in lags.items() if values)
    ess, learned = mean("ess"), mean("learned")
    spread = (
        f"{min(run['learned'] for run in runs):.3f} to {max(run['learned'] for run in runs):.3f}"
    )
    ends = [by_lag, "" if ess is None else f"{ess:.4f}", f"{learned:.3f} ({spread})"]
    return (
        "| "
        f"{' | '.join([cell.responses, str(cell.max_lag), cell.keys_and_values, *numbers, *ends])} "
        "|"
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_cache", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--responses", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="(%(default)s)"
    )
    parser.add_argument(
        "--lags", nargs="+", type=int, default=[1, 4], help="values of max_lag (%(default)s)"
    )
    parser.add_argument(
        "--short-steps", type=int, default=40, help="of a run with short responses (%(default)s)"
    )
    parser.add_argument(
        "--long-steps", type=int, default=20, help="of one with long responses (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of every cell (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the generator (%(default)s)",
    )
    parser.add_argument(
        "--print-only", action="store_true", help="print what is there; run nothing"
    )
    arguments.add_places(parser, "kv_cache", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    args = arguments.parse(make_parser(), argv)
    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit(
            "OMP_NUM_THREADS is set and would overrule the threads of trainer and generator: unset "
            "it."
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.print_only:
        sweep(args)
    made = records.read(args.out)
    lines = [HEAD]
    for cell in cells(args):
        found = [
            records.find(made, described(cell, args.dtype, repeat))
            for repeat in range(args.repeats)
        ]
        if runs := [run for run in found if run is not None]:
            lines.append(row(cell, runs))
    if len(lines) == 1:
        raise SystemExit(
            f"{args.out} has no measurement with these settings; leave out --print-only to measure."
        )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

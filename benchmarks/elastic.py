"""One run with one generator, then two, then one again: tokens a second before, with and after.

    python -m benchmarks.elastic                 30 steps of each
    python -m benchmarks.elastic --steps 5       a rehearsal

The quickstart's task and policy, with a learning rate of almost 0. A generator writes so few
responses at once that the trainer waits for it: one group, or as many as `--capacity` holds. The
second one joins by `lrl join` and leaves by `--leave`. All figures are the run's own, from its
TensorBoard file and from the ledger in its last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import arguments, records
from lrl.cli.recipes import recipes

log = logging.getLogger(__name__)

LRL = [sys.executable, "-c", "from lrl.cli.main import main; raise SystemExit(main())"]
WAIT_S = 1800.0
"""Deadline of everything that the benchmark waits for."""
LOOK_S = 1.0
STANDSTILL = 1e-12
"""A learning rate at which responses keep their length: at 5e-5 they grow, and tokens a second with
them."""
CALLBACKS = ("WeightSync", "Throughput")
COUNT = "fleet/reissued"
"""A counter that a run writes only once it is above zero."""
TAGS = ("time/step", "time/wait", "throughput/generated_tokens_per_s", "fleet/alive", "epoch")
"""Tags of each step; Lightning writes `epoch` last, so all others are there with it."""


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    names = ("steps", "groups", "responses", "capacity", "max_lag", "seed")
    return {name: getattr(args, name) for name in names} | {"lr": STANDSTILL}


def config_of(args: argparse.Namespace, folder: Path) -> Path:
    """Returns the quickstart's recipe without an end and without evaluations, which would write
    tokens too."""
    recipe = yaml.safe_load(recipes()["quickstart"].read_text())
    recipe["seed_everything"] = args.seed
    recipe["model"]["init_args"] |= {"lr": STANDSTILL, "schedule": "constant"}
    recipe["data"]["init_args"] |= {
        "groups_per_step": args.groups,
        "rollouts_per_group": args.responses,
        "max_lag": args.max_lag,
    }
    trainer = recipe["trainer"]
    trainer["max_steps"] = -1
    trainer["strategy"]["init_args"]["server"] = {
        "max_num_seqs": args.capacity,
        "kv_cache_gib": 0.5,
    }
    trainer["logger"]["init_args"] = {"save_dir": str(folder), "name": "run", "version": 0}
    kept = [f"lrl.callbacks.{name}" for name in CALLBACKS]
    trainer["callbacks"] = [
        callback for callback in trainer["callbacks"] if callback["class_path"] in kept
    ]
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(recipe))
    return config


class Run:
    """A run of `lrl fit`, seen from outside; leaving its context ends it.

    Args:
        args: The benchmark's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        folder = args.folder.resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder / "run" / "version_0"
        self._events: EventAccumulator | None = None
        with (folder / "output.log").open("wb") as output:
            self.process = subprocess.Popen(
                [*LRL, "fit", "--config", str(config_of(args, folder))],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the run with a checkpoint. SIGINT would do too, but not in a shell's background."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(WAIT_S)

    def series(self) -> list[dict[str, float]]:
        """Returns each step's figures so far, by the tags in `TAGS`."""
        if not any(self.folder.glob("events.*")):
            return []
        events = self._events = self._events or EventAccumulator(
            str(self.folder), size_guidance={"scalars": 0}
        )
        events.Reload()
        if any(tag not in events.Tags()["scalars"] for tag in TAGS):
            return []
        columns = [[event.value for event in events.Scalars(tag)] for tag in TAGS]
        counted = events.Scalars(COUNT) if COUNT in events.Tags()["scalars"] else []
        counts = {event.step: event.value for event in counted}
        steps = [event.step for event in events.Scalars(TAGS[0])]
        return [
            dict(zip(TAGS, values, strict=True)) | {COUNT: counts.get(step, 0.0)}
            for step, *values in zip(steps, *columns, strict=False)
        ]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits until `condition` holds; raises RuntimeError if the run ends, TimeoutError if it
        takes too long."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"The run ended before {what}; see {self.folder.parents[1] / 'output.log'}."
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {WAIT_S:g} s.")
            time.sleep(LOOK_S)

    def train_on(self, steps: int, alive: int) -> list[dict[str, float]]:
        """Waits for so many more steps, and returns their figures.

        Raises:
            RuntimeError: Not all of them had `alive` generators.
        """
        first = len(self.series())
        while first == 0 or self.series()[first - 1]["fleet/alive"] != alive:
            known = first
            self.wait_for(lambda known=known: len(self.series()) > known, "the next step")  # type: ignore[misc]
            first = len(self.series())
        self.wait_for(
            lambda: len(self.series()) >= first + steps, f"{steps} steps with {alive} generators"
        )
        found = self.series()[first : first + steps]
        if {step["fleet/alive"] for step in found} != {alive}:
            which = f"steps {first} to {first + steps - 1}"
            raise RuntimeError(f"Not all of {which} had {alive} generators; see {self.folder}.")
        return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the run, from its start to its record."""
    with Run(args) as run:
        before = run.train_on(args.steps, alive=1)
        started = time.monotonic()
        with (args.folder / "join.log").open("wb") as output:
            joining = subprocess.Popen([*LRL, "join", str(run.folder)], stdout=output)
        run.wait_for(lambda: run.series()[-1]["fleet/alive"] == 2, "the second generator")
        joined_s = time.monotonic() - started
        meanwhile = run.train_on(args.steps, alive=2)
        started = time.monotonic()
        subprocess.run([*LRL, "leave", str(run.folder)], check=True)
        left_s = time.monotonic() - started
        after = run.train_on(args.steps, alive=1)
        run.end()
        status = joining.wait(WAIT_S)
    return {
        "settings": settings_of(args),
        "before": phase(before),
        "with": phase(meanwhile),
        "after": phase(after),
        "joined_s": round(joined_s, 1),
        "left_s": round(left_s, 1),
        "status": status,
        "reissued": int(after[-1][COUNT]),
        **trained(run.folder, args.groups),
    }


def phase(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Returns tokens a second over all of `steps`, seconds a step, and the share of the trainer's
    time in waits."""
    seconds = sum(step["time/step"] for step in steps)
    tokens = sum(step["throughput/generated_tokens_per_s"] * step["time/step"] for step in steps)
    return {
        "tokens_per_s": records.rounded(tokens / seconds),
        "step_s": records.rounded(seconds / len(steps)),
        "wait": records.rounded(sum(step["time/wait"] for step in steps) / seconds),
    }


def trained(run: Path, groups: int) -> dict[str, int]:
    """Reads the ledger of the last checkpoint: groups that its steps trained, and groups lost or
    given up.

    Returns:
        `trained`, which has to be `expected`; `given_up`.
    """
    last = max((run / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    checkpoint = torch.load(last, weights_only=True)
    ledger = checkpoint["RolloutDataModule"]["ledger"]
    return {
        "trained": ledger["done_through"] + len(ledger["done_ahead"]),
        "expected": checkpoint["global_step"] * groups,
        "given_up": len(ledger["given_up"]),
    }


def table(record: dict[str, Any]) -> str:
    """Returns the measurement in Markdown."""
    rows = ["| generators | tokens/s | seconds a step | the trainer waited |", "|---|---|---|---|"]
    for name, generators in (("before", "1"), ("with", "2"), ("after", "1 again")):
        found = record[name]
        rows.append(
            f"| {generators} | {found['tokens_per_s']:.0f} | {found['step_s']:.2f} | "
            f"{found['wait']:.0%} |"
        )
    rows.append(
        f"\n{record['with']['tokens_per_s'] / record['before']['tokens_per_s']:.2f} times the "
        f"tokens; serving {record['joined_s']:.0f} s after the command, out {record['left_s']:.1f} "
        f"s after the other one, {record['reissued']} responses went on elsewhere; "
        f"{record['trained']} groups trained of {record['expected']}, {record['given_up']} given up"
    )
    return "\n".join(rows)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="with each number of generators (%(default)s)"
    )
    parser.add_argument("--groups", type=int, default=16, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=4, help="to each (%(default)s)")
    parser.add_argument(
        "--capacity", type=int, default=4, help="responses a generator writes at once (%(default)s)"
    )
    parser.add_argument("--max_lag", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    arguments.add_places(parser, "elastic", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures unless the record is there, then prints the table."""
    args = arguments.parse(make_parser(), argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = {"settings": settings_of(args)}
    print(
        table(
            records.measured(args.out, settings, lambda: measure(args) | {"command": args.command})
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

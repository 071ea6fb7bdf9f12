"""What a sync's probe can see: the difference of two programs by rounding, and that of weights some
steps old.

    python -m benchmarks.probe_noise                                       measure and print
    python -m benchmarks.probe_noise --steps 20 --dtypes bfloat16       a rehearsal
    python -m benchmarks.probe_noise --print-only                          print what is there

A policy is trained for `--steps` steps of AdamW by random advantages, in float32. Each version is
sent to a real generator by shared memory and probed, as in a run. Then the probes are evaluated
again as if the generator had taken no weights after some version, for several of these, with the
rule of a run (`lrl.weights.tolerance`).
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.lent_server import lent_server
from benchmarks.quickstart_run import policy_of, server_settings
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.quickstart.warmup import make_model, make_tokenizer
from lrl.system.event_loop import LoopThread
from lrl.weights.shared_memory import SharedMemory
from lrl.weights.sync import PoolSync
from lrl.weights.tolerance import ProbeTolerance, format_of, rounds_as
from lrl.weights.tolerance import mean_difference as off

POLICIES = ("random", "quickstart")
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
AGES = (1, 10, 100)
STOPS = (1, 2, 5, 10, 20)
"""Versions after which the generator is assumed to have stopped."""
TOKENS = 47
"""Of the probe: as many as fit into the quickstart's generators beside one that is written."""
HEAD = (
    "| policy | generator | lr | rounding | least | most | 1 step old | 10 | 100 "
    "| log-probs that a step changed, at least | caught after (steps) |\n" + "|---" * 11 + "|"
)

Probed = list[tuple[list[float], list[float]]]
"""For each version: the policy's log-probs, and the generator's."""


def folder_of(policy: str, folder: Path) -> Path:
    """Returns the folder of the quickstart's warmed-up policy, or of the same before its
    warm-up."""
    if policy == "quickstart":
        return policy_of(0)
    torch.manual_seed(0)
    make_model().save_pretrained(folder / policy)
    make_tokenizer().save_pretrained(folder / policy)
    return folder / policy


def step(network: Any, optimizer: torch.optim.Optimizer, sums: list[Tensor]) -> None:
    """Makes one step of AdamW, for or against eight sums at random."""
    losses = []
    for tokens in random.sample(sums, 8):
        logprobs = network(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
        losses.append(random.choice([-1.0, 1.0]) * logprobs.mean())
    optimizer.zero_grad()
    (sum(losses) / len(losses)).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


async def accept(generator: Generator) -> None:
    """A probe that finds nothing wrong: what it would find is measured afterwards."""


def probe(policy: Path, lr: float, steps: int, server: Any) -> Probed:
    """Trains, sends and probes."""
    random.seed(0)
    module = lrl.PolicyModule(str(policy))
    module.configure_model()
    sums = [
        module.tokenizer.encode(f"{a}+{b}={a + b}")
        for a in range(10, 99, 7)
        for b in range(10, 99, 7)
    ]
    tokens = [token for prompt in sums for token in prompt][:TOKENS]
    batches = [torch.tensor([prompt]) for prompt in sums]
    optimizer = torch.optim.AdamW(
        module.network.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    held = rounds_as(format_of(server.settings))
    loop, found = LoopThread(), Probed()
    generator = Generator(server, 1)
    sync = PoolSync(
        GeneratorPool([generator]),
        loop,
        SharedMemory,
        f"{server.run_id}-noise",
        deadline_s=60.0,
        silence_s=60.0,
    )
    try:
        for version in range(steps + 1):
            with torch.no_grad():
                expected = module.prompt_logprobs(tokens, None, held)
            if failed := sync.sync_now(module.sent_weights, version, lambda: accept):
                raise RuntimeError(str(failed))
            asking = generator.client.prompt_logprobs(
                tokens, salt=f"probe-{version}", deadline_s=60.0
            )
            found.append((expected, loop.wait(asking, 60.0, "a probe")))
            step(module.network, optimizer, batches)
    finally:
        loop.wait(generator.client.close(), 5.0, "closing")
        sync.close()
        loop.close()
    return found


def caught_after(found: Probed, dtype: str, stop: int) -> int | None:
    """Returns the versions that a generator missed until the rule noticed; None if it never did.
    `stop` 0: it misses none."""
    tolerance = ProbeTolerance(dtype)
    for version, (policy, generator) in enumerate(found):
        fault = tolerance.fault(
            policy, found[stop - 1][1] if stop and version >= stop else generator
        )
        if fault is not None:
            return version - stop + 1
    return None


def record(found: Probed, dtype: str) -> dict[str, Any]:
    """Returns the results of the probes of one run."""
    if (alarm := caught_after(found, dtype, 0)) is not None:
        logging.warning("a false alarm at version %d", alarm - 1)
    noise = [off(policy, generator) for policy, generator in found]
    changed = [
        sum(a != b for a, b in zip(old[1], new[1], strict=True))
        for old, new in zip(found, found[1:], strict=False)
    ]
    old = {
        age: [off(new[0], old[1]) for old, new in zip(found, found[age:], strict=False)]
        for age in AGES
    }
    return {
        "noise": [records.rounded(value) for value in (median(noise), min(noise), max(noise))],
        "old": {
            str(age): records.rounded(fmean(values)) if values else None
            for age, values in old.items()
        },
        "changed": [min(changed), len(found[0][0])],
        "caught_after": [caught_after(found, dtype, stop) for stop in STOPS if stop < len(found)],
        "false_alarm": alarm is not None,
    }


def described(policy: str, dtype: str, lr: float, steps: int) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    return {"policy": policy, "dtype": dtype, "lr": lr, "steps": steps}


def measure(args: argparse.Namespace) -> None:
    """Measures with a server for each policy and dtype, a run for each learning rate."""
    for policy in args.policies:
        folder = folder_of(policy, args.folder)
        for dtype in args.dtypes:
            with lent_server(folder, server_settings(dtype), args.folder) as server:
                server.start()
                server.wait_ready()
                for lr in args.lrs:
                    found = probe(folder, lr, args.steps, server)
                    line = described(policy, dtype, lr, args.steps) | record(found, dtype)
                    records.append(args.out, line | {"command": args.command})
                    logging.info("%s", line)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [HEAD]
    for row in rows:
        noise = [f"{value:.1e}" for value in row["noise"]]
        old = ["" if value is None else f"{value:.1e}" for value in row["old"].values()]
        changed, tokens = row["changed"]
        known = [steps for steps in row["caught_after"] if steps is not None]
        steps = (
            " to ".join(map(str, sorted({min(known), max(known)})))
            if known == row["caught_after"]
            else "not always"
        )
        cells = [
            row["policy"],
            row["dtype"],
            f"{row['lr']:g}",
            *noise,
            *old,
            f"{changed} of {tokens}",
            steps,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe_noise", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="(%(default)s)"
    )
    dtypes = ["float32", "bfloat16"]
    parser.add_argument(
        "--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of the generator (%(default)s)"
    )
    parser.add_argument(
        "--lrs", nargs="+", type=float, default=list(LEARNING_RATES), help="(%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=120, help="of each run (%(default)s)")
    parser.add_argument(
        "--print-only", action="store_true", help="print what is there; run nothing"
    )
    arguments.add_places(parser, "probe_noise", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    args = arguments.parse(make_parser(), argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.print_only:
        measure(args)
    made = records.read(args.out)
    runs = [
        described(p, d, lr, args.steps)
        for p in args.policies
        for d in args.dtypes
        for lr in args.lrs
    ]
    rows = [row for run in runs if (row := records.find(made, run)) is not None]
    if not rows:
        raise SystemExit(
            f"{args.out} has no measurement with these settings; leave out --print-only to measure."
        )
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Credit over turns on a game of guesses: the group's mean, GAE over a critic's values, ArCHer.

    python -m benchmarks.turn_credit                 measure what the records lack, and print
    python -m benchmarks.turn_credit --print-only    print what is there

One process and no generator (`benchmarks.guess`): sampled wins while the policy learns, 128
episodes a step, after the critic's own first steps.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

import lrl
from benchmarks import guess, records
from benchmarks.arguments import add_print_only, measure_and_print
from lrl.advantages import GAE, Advantages, ArCHer, GroupMean

log = logging.getLogger(__name__)

SIZE = (16, 8)
"""Groups of a step, and episodes of a group."""
EVERY = 25
KINDS: dict[str, tuple[Advantages, bool, bool]] = {
    "group mean": (GroupMean(), False, False),
    "GAE, lambda 0.5": (GAE(0.5, over="turn"), False, False),
    "ArCHer": (ArCHer(), False, False),
    "ArCHer, own model": (ArCHer(), True, False),
    "ArCHer, replay": (ArCHer(), False, True),
}
"""Advantages, whether the critic has a model of its own, and whether older groups are replayed."""


def critic_of(kind: str, folder: str, alone: int, tau: float) -> lrl.Critic | None:
    """Returns the critic of a kind of credit, which learns alone in the first steps."""
    advantages, own, _ = KINDS[kind]
    if not advantages.needs_critic:
        return None
    model, lr = (folder, 1e-3) if own else (None, 1e-2)
    if advantages.needs_turn_critic:
        return lrl.TurnCritic(model, lr=lr, tau=tau, value_only_steps=alone)
    return lrl.Critic(model, lr=lr, value_only_steps=alone)


class Curve(L.Callback):
    """Plays after every `EVERY` steps of the policy; it keeps what the critic says, too."""

    def __init__(self, alone: int) -> None:
        self.alone = alone
        self.wins: list[float] = []
        self.explained: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, policy: Any, *_: Any) -> None:
        """Plays, if it is time."""
        found = trainer.callback_metrics.get("critic/explained_variance")
        if found is not None:
            self.explained.append(float(found))
        done = trainer.global_step - self.alone
        if done > 0 and done % EVERY == 0:
            self.wins.append(guess.wins(policy.network))
            log.info("%s", self.wins)


def curve(
    kind: str, seed: int, steps: int, lr: float, alone: int, tau: float, folder: str
) -> dict[str, Any]:
    """Trains a policy; returns its sampled wins before, and after every `EVERY` steps."""
    torch.manual_seed(seed)
    advantages, _, replays = KINDS[kind]
    alone = alone if advantages.needs_critic else 0
    policy = lrl.PolicyModule(folder, critic=critic_of(kind, folder, alone, tau), lr=lr)
    policy.configure_model()
    # As many groups as are fresh, of the last 8 steps.
    replay = lrl.Replay(SIZE[0], 8, newest_share=0.0, reward_weight=0.0) if replays else None
    before, seen, began = guess.wins(policy.network), Curve(alone), time.monotonic()
    guess.train(policy, advantages, alone + steps, SIZE, replay, [seen])
    last = seen.explained[max(0, alone - 10) : alone]
    return {
        "wins": [before, *seen.wins],
        "explained_variance": records.rounded(sum(last) / len(last)) if last else None,
        "seconds": records.rounded(time.monotonic() - began),
    }


def runs_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the settings of each curve."""
    for seed in args.seeds:
        for kind in args.kinds:
            critic = {"alone": args.alone, "tau": args.tau}
            yield {"kind": kind, "seed": seed, "steps": args.steps, "lr": args.lr} | critic


def measure(args: argparse.Namespace, command: str) -> None:
    """Makes what the records lack."""
    torch.set_num_threads(1)
    for run in runs_of(args):
        seed = run["seed"]
        folder = guess.make_policy(args.folder / f"policy-{seed}", seed)
        log.info("%s", run)

        def made(run: Any = run, folder: str = folder) -> dict[str, Any]:
            return curve(**run, folder=folder) | {"command": command}

        records.measured(args.out, run, made)


def table(found: list[dict[str, Any]]) -> str:
    """Returns a row for each curve."""
    lines = [
        "| credit | seed | critic's own steps | tau | sampled wins, before and every 25 steps "
        "| explained variance before the policy learns |",
        "|---" * 6 + "|",
    ]
    for one in found:
        wins = ", ".join(f"{number:.2f}" for number in one["wins"])
        cells = (
            one["kind"],
            one["seed"],
            one["alone"],
            one["tau"],
            wins,
            one["explained_variance"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.turn_credit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=100, help="of the policy (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the policy (%(default)s)")
    parser.add_argument("--alone", type=int, default=40, help="first steps of the critic alone")
    parser.add_argument("--tau", type=float, default=0.1, help="of ArCHer (%(default)s)")
    add_print_only(parser, "turn_credit")
    return measure_and_print(parser, argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())

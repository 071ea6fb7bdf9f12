"""How good one step's gradient is by each kind of credit, on a game of guesses, with the policy held
still.

    python -m benchmarks.turn_gradients                 measure what the records lack, and print
    python -m benchmarks.turn_gradients --print-only    print what is there

A critic learns the values of one policy (`benchmarks.guess`), whose learning rate is 0. Then every
batch of 128 episodes gives one gradient for each kind of credit. From the dot products between
batches: the noise, as the number of batches whose mean has as much noise as signal, and the bias,
as the cosine of the mean gradient with that of GAE with lambda 1, which has none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import lrl
from benchmarks import guess, records
from benchmarks.arguments import add_print_only, measure_and_print
from lrl.advantages import GAE, Advantages, GroupMean
from lrl.rollouts.packing import Packer
from lrl.types import Group

SIZE = (16, 8)
"""Groups of a batch, and episodes of a group."""
UNBIASED = "GAE over turns, lambda 1"
KINDS: dict[str, Advantages] = {
    "group mean": GroupMean(),
    UNBIASED: GAE(1.0, over="turn"),
    "GAE over turns, lambda 0.5": GAE(0.5, over="turn"),
    "GAE over turns, lambda 0": GAE(0.0, over="turn"),
    "GAE over tokens, lambda 0.9": GAE(0.9),
}


def learnt(folder: str, own: bool, steps: int) -> lrl.PolicyModule:
    """Returns the policy with a critic that has learnt its values for so many steps."""
    model, lr = (folder, 1e-3) if own else (None, 1e-2)
    critic = lrl.Critic(model, lr=lr, value_only_steps=steps)
    policy = lrl.PolicyModule(folder, objective=lrl.objectives.REINFORCE(), critic=critic)
    policy.configure_model()
    guess.train(policy, KINDS[UNBIASED], steps, SIZE)
    return policy


def gradient(policy: lrl.PolicyModule, groups: Sequence[Group], advantages: Advantages) -> Tensor:
    """Returns the gradient of a batch in the policy's weights: float32 [weights]."""
    packer = Packer(guess.MICRO_BATCH_TOKENS, advantages, 1.0)
    rounds = [each for group in groups for each in packer.add(group)] + list(packer.flush())
    policy.zero_grad()
    for micro in (micro for each in rounds for micro in each if micro is not None):
        policy.compute_loss(micro).backward()
    weights = [weight.grad for weight in policy.network.parameters() if weight.grad is not None]
    return torch.cat([one.flatten() for one in weights]) / packer.tokens


def between(left: Tensor, right: Tensor) -> float:
    """Returns the mean dot product of different batches, of float32 [batches, weights] each."""
    dots = left @ right.T
    count = len(left)
    return float((dots.sum() - dots.diagonal().sum()) / (count * (count - 1)))


def compared(found: dict[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """Returns noise and cosine of each kind."""
    unbiased = found[UNBIASED]
    compare = {}
    for kind, gradients in found.items():
        signal = between(gradients, gradients)
        whole = float(gradients.square().sum(1).mean())
        aligned = between(gradients, unbiased)
        lengths = max(signal, 0.0) * max(between(unbiased, unbiased), 0.0)
        compare[kind] = {
            "batches": records.rounded((whole - signal) / signal) if signal > 0 else None,
            "cosine": records.rounded(aligned / lengths**0.5) if lengths else None,
        }
    return compare


def measure_one(seed: int, own: bool, steps: int, batches: int, folder: str) -> dict[str, Any]:
    """Trains a critic, and compares the gradients of so many batches."""
    torch.manual_seed(seed)
    policy = learnt(folder, own, steps)
    found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for number in range(batches):
        groups = guess.groups_of(policy.network, *SIZE, version=number)
        for group in groups:
            policy.prepare(group, 1.0, guess.MICRO_BATCH_TOKENS)
        for kind, advantages in KINDS.items():
            found[kind].append(gradient(policy, groups, advantages))
    return {"kinds": compared({kind: torch.stack(rows) for kind, rows in found.items()})}


def runs_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the settings of each measurement."""
    for seed in args.seeds:
        for own in (False, True):
            yield {"seed": seed, "own": own, "steps": args.steps, "batches": args.batches}


def measure(args: argparse.Namespace, command: str) -> None:
    """Makes what the records lack."""
    torch.set_num_threads(1)
    for run in runs_of(args):
        folder = guess.make_policy(args.folder / f"policy-{run['seed']}", run["seed"])

        def made(run: Any = run, folder: str = folder) -> dict[str, Any]:
            return measure_one(**run, folder=folder) | {"command": command}

        records.measured(args.out, run, made)


def table(found: list[dict[str, Any]]) -> str:
    """Returns a row for each kind of credit of each measurement."""
    lines = [
        "| critic | seed | credit | batches for one unit of signal over noise "
        "| cosine with the unbiased gradient |",
        "|---" * 5 + "|",
    ]
    for one in found:
        critic = "a model of its own" if one["own"] else "a head on the policy"
        for kind, compare in one["kinds"].items():
            cells = (critic, one["seed"], kind, compare["batches"], compare["cosine"])
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m benchmarks.turn_gradients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--steps", type=int, default=100, help="of the critic (%(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="of 128 episodes (%(default)s)")
    add_print_only(parser, "turn_gradients")
    return measure_and_print(parser, argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())

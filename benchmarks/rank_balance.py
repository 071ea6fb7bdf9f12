"""The loss of several trainer ranks by unequal work, computed with the real packing: nothing is
trained.

    python -m benchmarks.rank_balance

Responses are lognormal, mean 2,000 tokens, sigma 1, at most 20,000, behind prompts of 200; groups
of 16 arrive one by one. A pass costs a unit for each token of its rows, padding included, and for
attention `length / longest` more for each token of a response. All groups are complete when the
step begins.

- lrl: cuts of equal work for all ranks. Rank 0 scatters each before it trains its own part, and no
  rank waits.
- in lockstep: the same cuts, but a round begins when all ranks have finished the one before.
- in turn: the micro-batches of one rank in their order, one for each rank to a round, scattered as
  in lrl.

The loss is a step's time beyond the same work, without padding, in equal parts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks import arguments, records
from lrl.planning.simulator.length_sampling import Lognormal
from lrl.planning.simulator.trainer_model import TrainedTree
from lrl.rollouts.bin_packing import BinPacker, Rows

RANKS = (2, 4, 8, 16)
RESPONSES, PROMPT_TOKENS = 16, 200
MEAN = 2000
SIGMA = 1.0
LONGEST = 20_000
MICRO_BATCH_TOKENS = 32_768
HEAD = (
    "| ranks | responses | rounds | loss, lrl | in lockstep | in turn |\n|---|---|---|---|---|---|"
)

Round = Sequence[Rows[TrainedTree]]


def pass_cost(rows: Rows[TrainedTree]) -> float:
    """Returns the cost of one forward and backward pass."""
    lengths = [[len(piece) for piece in row] for row in rows]
    padded = len(rows) * max(map(sum, lengths), default=0)
    return padded + sum(length**2 for row in lengths for length in row) / LONGEST


def rounds_of(groups: Sequence[Sequence[TrainedTree]], ranks: int) -> list[Round]:
    """What is cut for so many ranks while the groups arrive."""
    cuts = BinPacker[TrainedTree](MICRO_BATCH_TOKENS, ranks=ranks)
    found: list[Round] = []
    for group in groups:
        for piece in group:
            cuts.add(piece)
        found += cuts.full()
    return found + list(cuts.flush())


def in_turn(groups: Sequence[Sequence[TrainedTree]], ranks: int) -> list[Round]:
    """Returns the micro-batches of one rank, dealt to so many."""
    alone = [rows for (rows,) in rounds_of(groups, 1)]
    return [alone[first : first + ranks] for first in range(0, len(alone), ranks)]


def free(rounds: Sequence[Round], ranks: int) -> float:
    """Returns the end of the last rank; each rank continues as soon as rank 0 has begun the
    round."""
    began, done = 0.0, [0.0] * ranks
    for each in rounds:
        for rank, rows in enumerate(each):
            done[rank] = max(done[rank], began) + pass_cost(rows)
        began = done[0]
    return max(done)


def in_lockstep(rounds: Sequence[Round]) -> float:
    """Returns the end of the last rank if a round ends with its slowest rank."""
    return sum(max(map(pass_cost, each)) for each in rounds)


def step(ranks: int, groups_per_rank: int, seed: int) -> list[list[TrainedTree]]:
    """Returns the groups of a step."""
    lengths = Lognormal(MEAN / math.exp(SIGMA**2 / 2), SIGMA, LONGEST, seed=seed)
    return [
        [
            TrainedTree(index, PROMPT_TOKENS + tokens)
            for tokens in lengths.of(index, index, RESPONSES)
        ]
        for index in range(ranks * groups_per_rank)
    ]


def measure(ranks: int, groups_per_rank: int, steps: int) -> dict[str, float | int]:
    """Returns means over some steps."""
    found: dict[str, list[float]] = {"rounds": [], "lrl": [], "in_lockstep": [], "in_turn": []}
    for seed in range(steps):
        groups = step(ranks, groups_per_rank, seed)
        share = (
            sum(len(piece) + len(piece) ** 2 / LONGEST for group in groups for piece in group)
            / ranks
        )
        rounds = rounds_of(groups, ranks)
        found["rounds"].append(len(rounds))
        found["lrl"].append(free(rounds, ranks) / share - 1)
        found["in_lockstep"].append(in_lockstep(rounds) / share - 1)
        found["in_turn"].append(free(in_turn(groups, ranks), ranks) / share - 1)
    return {"ranks": ranks, "responses": ranks * groups_per_rank * RESPONSES} | {
        name: round(fmean(values), 4) for name, values in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Computes, writes and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rank_balance", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--groups", type=int, default=8, help="of a step, for each rank (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="to take the mean of (%(default)s)")
    arguments.add_out(parser, "rank_balance")
    args = arguments.parse(parser, argv)
    print(HEAD)
    for ranks in RANKS:
        found = measure(ranks, args.groups, args.steps)
        records.append(
            args.out, found | {"groups": args.groups, "steps": args.steps, "command": args.command}
        )
        lost = " | ".join(f"{found[way]:.1%}" for way in ("lrl", "in_lockstep", "in_turn"))
        print(f"| {ranks} | {found['responses']:,} | {found['rounds']:.1f} | {lost} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

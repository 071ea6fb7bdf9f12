"""What a victim is made of; light, so that whoever starts one need not import torch."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

GENERATORS = 2
"""In every victim."""


@dataclass(frozen=True, kw_only=True)
class VictimSettings:
    """The settings of a victim, and the words of its command line.

    Args:
        folder: Of its journal, checkpoint, logs and answers.
        steps: Optimizer steps; -1 is until the file `stop` is in the folder.
        steps_per_epoch: The data set is cut to so many steps; 0 takes all training problems.
        groups: Problems a step.
        responses: Responses to each.
        max_lag: See `lrl.RolloutDataModule`.
        capacity: Answers a generator writes at once; far below `groups * responses`, generators are never idle.
        seed: Of warm-up, order of the problems, and torch.
        lr: Peak learning rate.
        schedule: `linear` falls to 0 at the last step; without a last step it has to be `constant`.
        checkpoint_every: Steps between checkpoints.
        evaluate: Whether held-out problems are answered at the end.
        heartbeat_s: See `lrl.AsyncSingleDevice`.
        sync_deadline_s: See `WeightSync.deadline_s`.
    """

    folder: str
    steps: int = 60
    steps_per_epoch: int = 30
    groups: int = 8
    responses: int = 16
    max_lag: int = 2
    capacity: int = 32
    seed: int = 0
    lr: float = 1e-4
    schedule: str = "linear"
    checkpoint_every: int = 1
    evaluate: bool = True
    heartbeat_s: float = 5.0
    sync_deadline_s: float = 10.0

    @property
    def words(self) -> list[str]:
        """The arguments of `python -m benchmarks.chaos.victim`."""
        return [f"--{name}={value}" for name, value in asdict(self).items()]

    @property
    def described(self) -> dict[str, object]:
        """What a record is recognised by: all but the place."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def add_deadlines(parser: argparse.ArgumentParser) -> None:
    """The arguments that a machine with other work to do needs: on it, silence is no sign of a fault so soon."""
    parser.add_argument("--heartbeat-s", type=float, default=5.0, help="of the strategy (%(default)s)")
    parser.add_argument("--sync-deadline-s", type=float, default=10.0, help="of a sync's phase (%(default)s)")

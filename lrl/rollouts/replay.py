"""The replay buffer: groups that were trained before and may be trained again, beside a step's fresh ones.

Replay is for objectives that need no fresh responses (TBA, TOPR). Its groups come on top of the step's own: they change
neither pacing nor the rule that every prompt is trained once an epoch, and have a bound on their lag of their own.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

from lrl.runtime.config_errors import fault
from lrl.types import Group, Prompt, Rollout


class Replay:
    """Mixes the newest groups with those of high reward, as TBA does with single responses (2503.18929, section 4).

    Each draw is, with probability `newest_share`, one of the groups of the step before, each as likely; otherwise any
    group in the buffer, with a probability in proportion to exp(`reward_weight` * its mean reward). No group is drawn
    twice in a step.

    Args:
        groups_per_step: Groups that a step trains again, at most.
        max_lag: Most versions between a group's oldest token and the step that trains it again; older groups leave.
        newest_share: Probability that a draw is of the newest groups; in [0, 1].
        reward_weight: 0 draws the others uniformly; the larger, the more the well rewarded ones.
        seed: Of the draws. A step draws the same whether the run was interrupted before it or not.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_lag: int,
        newest_share: float = 0.5,
        reward_weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        if groups_per_step < 1 or max_lag < 1:
            fault(
                f"data.replay: groups_per_step is {groups_per_step} and max_lag is {max_lag}; both must be at least 1, "
                "or set data.replay to null."
            )
        if not 0 <= newest_share <= 1:
            fault(f"data.replay.newest_share is {newest_share}; it must be in [0, 1].")
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.newest_share = newest_share
        self.reward_weight = reward_weight
        self.seed = seed
        self._groups: list[tuple[int, Group]] = []  # (step that first trained it, group)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, step: int, groups: list[Group]) -> None:
        """Take in the fresh groups that `step` has trained; those without a trained response have nothing to replay."""
        self._groups += [(step, group) for group in groups if len(group.scored) > 1 and group.has_tokens]

    def draw(self, step: int) -> list[Group]:
        """The groups that `step` trains again; drops what is too old for it."""
        self._groups = [(at, group) for at, group in self._groups if step - group.oldest_version <= self.max_lag]
        rng = random.Random(f"{self.seed}-{step}")
        left = list(self._groups)
        drawn: list[Group] = []
        while left and len(drawn) < self.groups_per_step:
            newest = [index for index, (at, _) in enumerate(left) if at == step - 1]
            if newest and rng.random() < self.newest_share:
                place = rng.choice(newest)
            else:
                rewards = [self.reward_weight * _mean_reward(group) for _, group in left]
                place = rng.choices(range(len(left)), _softmax(rewards))[0]
            drawn.append(left.pop(place)[1])
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The buffer in primitives."""
        return {"groups": [(at, asdict(group)) for at, group in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the buffer of a checkpoint."""
        self._groups = [(at, _group(fields)) for at, fields in state["groups"]]


def _group(fields: dict[str, Any]) -> Group:
    prompt, rollouts = Prompt(**fields["prompt"]), [Rollout(**rollout) for rollout in fields["rollouts"]]
    return Group(index=fields["index"], prompt=prompt, rollouts=rollouts, reference_version=fields["reference_version"])


def _mean_reward(group: Group) -> float:
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards)


def _softmax(values: list[float]) -> list[float]:
    top = max(values)
    return [math.exp(value - top) for value in values]

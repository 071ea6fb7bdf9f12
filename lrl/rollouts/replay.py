"""The replay buffer: trained groups that later steps train again, together with their fresh groups.

Replay is for objectives that need no fresh responses (TBA, TOPR). Its groups are added to the
step's own: they change neither pacing nor the rule that every prompt is trained once an epoch, and
have a separate bound on their lag.
"""

import logging
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from lrl.rollouts.serialisation import has_same_columns, load_group, save_group
from lrl.system.config_errors import at_least, fault
from lrl.types import Group, Prompt

log = logging.getLogger(__name__)


class Replay:
    """Mixes the newest groups with groups of high reward, as TBA does with single responses
    (2503.18929, section 4).

    With probability `newest_share`, a draw is a uniform choice among the groups of the step before;
    otherwise a choice among all groups, with probabilities in proportion to exp(`reward_weight` *
    mean reward). No group is drawn twice in a step.

    Args:
        groups_per_step: Most groups that a step trains again.
        max_lag: Most versions between a group's oldest token and the step that trains it again;
            older groups leave.
        newest_share: Probability that a draw is among the newest groups; in [0, 1].
        reward_weight: 0 draws the others uniformly; a larger weight favours high rewards.
        seed: Seed of the draws. A step's draws do not depend on interruptions of the run.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_lag: int,
        newest_share: float = 0.5,
        reward_weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        at_least(1, "data.replay", groups_per_step=groups_per_step, max_lag=max_lag)
        if not 0 <= newest_share <= 1:
            fault(f"data.replay.newest_share is {newest_share}; it must be in [0, 1].")
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.seed = seed
        self.newest_share = newest_share
        self.reward_weight = reward_weight
        self._groups: list[tuple[int, Group]] = []  # (step that first trained it, group)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Adds the fresh groups of `step` that have a scored response and a token."""
        self._groups += [(step, group) for group in groups if group.scored and group.has_tokens]

    def draw(self, step: int) -> list[Group]:
        """Returns the groups that `step` trains again; drops groups that are too old for it."""
        self._groups = [
            (at, group) for at, group in self._groups if step - group.oldest_version <= self.max_lag
        ]
        rng = random.Random(f"{self.seed}-{step}")
        left = list(self._groups)
        drawn: list[Group] = []
        while left and len(drawn) < self.groups_per_step:
            newest = [index for index, (at, _) in enumerate(left) if at == step - 1]
            if newest and rng.random() < self.newest_share:
                index = rng.choice(newest)
            else:
                logits = [self.reward_weight * fmean(group.rewards) for _, group in left]
                highest = max(logits)
                index = rng.choices(
                    range(len(left)), [math.exp(logit - highest) for logit in logits]
                )[0]
            drawn.append(left.pop(index)[1])
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Returns the buffer in primitives and tensors, without the prompts and the results of
        `PolicyModule.prepare`."""
        return {"groups": [(at, save_group(group, scored=True)) for at, group in self._groups]}

    def load_state_dict(self, state: dict[str, Any], prompt_at: Callable[[int], Prompt]) -> None:
        """Restores the buffer, without the groups whose rows have other columns than when they were
        scored; raises ValueError if one had another prompt."""
        self._groups = [
            (at, load_group(saved, prompt))
            for at, saved in state["groups"]
            if has_same_columns(saved, prompt := prompt_at(saved["index"]))
        ]
        if dropped := len(state["groups"]) - len(self._groups):
            text = "%d groups are not replayed any longer: the columns of their rows have changed."
            log.warning(text, dropped)

"""The parts of a run that learn from whole steps: the baseline, the replay buffer and the length
predictor.

A checkpoint has what each of them has learnt, with the settings on which that depends. Under other
settings a part begins anew: a mean of other rewards, say, would be wrong without a word.

Replay is for objectives that need no fresh responses (TBA, TOPR). Its groups are added to a step's
own: they change neither pacing nor that every prompt is trained once an epoch, and have a separate
bound on their lag.
"""

import copy
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lrl.advantages import Advantages, rewards_of
from lrl.checkpoints.made_with import Settings, changes, fingerprint
from lrl.errors import ConfigError, at_least
from lrl.rewards import Reward
from lrl.rollouts.ledger import PromptRow, has_same_columns, load_group, save_group
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Group, Sampling

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
            raise ConfigError(f"data.replay.newest_share is {newest_share}; it must be in [0, 1].")
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.seed = seed
        self.newest_share = newest_share
        self.reward_weight = reward_weight
        self.prompts: PromptRow | None = None
        """The run's, by which a saved group finds its prompt; empty on the other ranks."""
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
        return {"groups": [(at, save_group(group, scored=True)) for at, group in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the buffer, without groups whose rows have other columns than when they were
        scored; raises ValueError if one had another prompt."""
        if not (prompts := self.prompts):
            return
        self._groups = [
            (at, load_group(saved, prompt))
            for at, saved in state["groups"]
            if has_same_columns(saved, prompt := prompts[saved["index"]])
        ]
        if dropped := len(state["groups"]) - len(self._groups):
            text = "%d groups are not replayed any longer: the columns of their rows have changed."
            log.warning(text, dropped)


@dataclass
class Learners:
    """The parts that learn from whole steps; None if unused."""

    advantages: Advantages
    replay: Replay | None = None
    length_predictor: LengthPredictor | None = None

    def __post_init__(self) -> None:
        names = ("advantages", "replay", "length_predictor")
        self._parts = {name: part for name in names if (part := getattr(self, name)) is not None}
        self._first_states: dict[str, Any] = {}

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def end_step(self, step: int, groups: Sequence[Group]) -> None:
        """Learns from the fresh groups of a step, once its optimizer step is done."""
        self._keep_first_states()
        self.advantages.end_step(
            rewards_of([rollout for group in groups for rollout in group.rollouts])
        )
        if self.replay is not None:
            enough = self.advantages.min_rollouts
            self.replay.add(step, [group for group in groups if len(group.scored) >= enough])
        if self.length_predictor is not None:
            self.length_predictor.end_step(groups)

    def made_with(
        self,
        sampling: Sampling,
        rewards: Settings,
        environment: Settings,
        kl_in_the_reward: Sequence[Any],
    ) -> dict[str, Settings]:
        """Returns the settings on which the state of each part depends."""
        kind = type(self.advantages)
        of_lengths: Settings = {
            "data.max_response_tokens": sampling.max_tokens,
            "data.temperature": sampling.temperature,
            **environment,
        }
        return {
            "advantages": {
                "data.advantages": f"{kind.__module__}.{kind.__qualname__}",
                "model.reference": fingerprint(kl_in_the_reward),
                **rewards,
            },
            "replay": {"data.rollouts_per_group": sampling.n, **of_lengths, **rewards},
            "length_predictor": of_lengths,
        }

    def begin_anew(self) -> None:
        """Forgets an earlier fit in this process, perhaps of another policy."""
        for name, state in copy.deepcopy(self._first_states).items():
            self._parts[name].load_state_dict(state)

    def _keep_first_states(self) -> None:
        self._first_states = self._first_states or copy.deepcopy(self._states())

    def state_dict(self, made_with: Mapping[str, Settings]) -> dict[str, Any]:
        return {
            name: {"made_with": made_with[name], "state": state}
            for name, state in self._states().items()
        }

    def load_state_dict(self, saved: dict[str, Any], made_with: Mapping[str, Settings]) -> None:
        """Restores the parts of `saved` that were made with this run's settings; logs the others."""
        self._keep_first_states()
        for name, part in self._parts.items():
            state = saved.get(name, {}).get("state")
            if not state:
                continue
            if why := changes(saved[name].get("made_with"), made_with[name]):
                rank_zero_only(log.warning)(
                    "data.%s begins anew, without its state in the checkpoint: %s.", name, why
                )
            else:
                part.load_state_dict(state)


def settings_of(rewards: Sequence[Reward]) -> Settings:
    """Returns the settings on which scores depend: class, arguments and source code of each reward,
    whose files may change during the run."""
    return {
        f"data.rewards {one.name}": fingerprint([type(one).__mro__, vars(one)]) for one in rewards
    }

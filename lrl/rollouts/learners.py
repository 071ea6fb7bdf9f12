"""The parts of a run that learn from whole steps: the baseline, the replay buffer and the length
predictor.

A checkpoint has what each of them has learnt, with the settings on which that depends. Under other
settings a part begins anew: a mean of other rewards, or responses sampled at another temperature,
would be wrong without a word.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lrl.advantages import Advantages, rewards_of
from lrl.checkpoints.made_with import Settings, changes, fingerprint
from lrl.rewards import Reward
from lrl.rollouts.replay import Replay
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Group, Prompt, Sampling

log = logging.getLogger(__name__)
NO_PROMPTS: dict[int, Prompt] = {}


@dataclass
class Learners:
    """The parts that learn from whole steps; None for one that the run has not."""

    advantages: Advantages
    replay: Replay | None = None
    length_predictor: LengthPredictor | None = None
    _first_states: dict[str, Any] | None = field(default=None, init=False)

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts of this run, by their name in a checkpoint."""
        names = ("advantages", "replay", "length_predictor")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def end_step(self, step: int, groups: Sequence[Group]) -> None:
        """Learns from the fresh groups of a step, once its optimizer step is done."""
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
        """Returns the settings on which the state of each part depends. Pass empty ones for an
        environment, or a KL penalty in the rewards, that the run does not have."""
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
        if self._first_states is None:
            self._first_states = {
                name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()
            }
            return
        for name, state in self._first_states.items():
            self._load(name, state, NO_PROMPTS.__getitem__)  # the buffer was empty

    def _load(self, name: str, state: dict[str, Any], prompt_at: Callable[[int], Prompt]) -> None:
        of_prompts = (prompt_at,) if name == "replay" else ()
        self._parts[name].load_state_dict(state, *of_prompts)

    def state_dict(self, made_with: Mapping[str, Settings]) -> dict[str, Any]:
        """Returns the state of each part in plain types and tensors, with the settings on which it
        depends."""
        return {
            name: {"made_with": made_with[name], "state": part.state_dict()}
            for name, part in self._parts.items()
        }

    def load_state_dict(
        self,
        saved: dict[str, Any],
        made_with: Mapping[str, Settings],
        prompt_at: Callable[[int], Prompt] | None,
    ) -> None:
        """Restores the parts of `saved` that were made with this run's settings; logs the others.
        Without prompts (`prompt_at` is None) nothing is replayed."""
        for name in self._parts:
            state = saved.get(name, {}).get("state")
            if not state or (name == "replay" and prompt_at is None):
                continue
            if why := changes(saved[name].get("made_with"), made_with[name]):
                rank_zero_only(log.warning)(
                    "data.%s begins anew, without its state in the checkpoint: %s.", name, why
                )
            else:
                self._load(name, state, prompt_at or NO_PROMPTS.__getitem__)


def settings_of(rewards: Sequence[Reward]) -> Settings:
    """Returns the settings on which scores depend: class, arguments and source code of each reward.
    Call it when they are imported: their files may change while it runs."""
    return {
        f"data.rewards {one.name}": fingerprint([type(one).__mro__, vars(one)]) for one in rewards
    }

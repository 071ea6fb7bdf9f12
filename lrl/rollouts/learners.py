"""The parts of a run that learn from whole steps: the baseline, the replay buffer and the length
predictor.

A checkpoint has what each of them has learnt, with the settings on which that depends. Under other
settings a part begins anew: a mean of other rewards, or responses sampled at another temperature,
would be wrong without a word.
"""

import copy
import logging
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """The settings on which the learners' state depends."""

    sampling: Sampling
    rewards: Settings
    """See `settings_of`."""
    environment: Settings = field(default_factory=dict)
    """Empty without one."""
    kl_in_the_reward: Sequence[Any] = ()
    """Settings of the KL penalty that is subtracted from the rewards (`lrl.Reference`); empty
    without one."""

    @property
    def of_lengths(self) -> Settings:
        """The settings on which the lengths of responses depend."""
        return {
            "data.max_response_tokens": self.sampling.max_tokens,
            "data.temperature": self.sampling.temperature,
            **self.environment,
        }


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
        parts = {
            "advantages": self.advantages,
            "replay": self.replay,
            "length_predictor": self.length_predictor,
        }
        return {name: part for name, part in parts.items() if part is not None}

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

    def state_dict(self, dependencies: Dependencies) -> dict[str, Any]:
        """Returns the state of each part in plain types and tensors, with the settings on which it
        depends."""
        return {
            name: {"made_with": self._made_with(name, dependencies), "state": part.state_dict()}
            for name, part in self._parts.items()
        }

    def load_state_dict(
        self,
        saved: dict[str, Any],
        dependencies: Dependencies,
        prompt_at: Callable[[int], Prompt] | None,
    ) -> None:
        """Restores the parts of `saved` that were made with this run's settings; logs the others.
        Without prompts (`prompt_at` is None) nothing is replayed."""
        for name in self._parts:
            state = saved.get(name, {}).get("state")
            if not state or (name == "replay" and prompt_at is None):
                continue
            if why := changes(saved[name].get("made_with"), self._made_with(name, dependencies)):
                rank_zero_only(log.warning)(
                    "data.%s begins anew, without its state in the checkpoint: %s.", name, why
                )
            else:
                self._load(name, state, prompt_at or NO_PROMPTS.__getitem__)

    def _made_with(self, name: str, dependencies: Dependencies) -> Settings:
        """Returns the settings on which the state of a part depends."""
        if name == "length_predictor":
            return dependencies.of_lengths
        if name == "replay":
            size: Settings = {"data.rollouts_per_group": dependencies.sampling.n}
            return size | dependencies.of_lengths | dependencies.rewards
        kind = type(self.advantages)
        baseline: Settings = {
            "data.advantages": f"{kind.__module__}.{kind.__qualname__}",
            "model.reference": fingerprint(dependencies.kl_in_the_reward),
        }
        return baseline | dependencies.rewards


def settings_of(rewards: Sequence[Reward]) -> Settings:
    """Returns the settings on which scores depend: class, arguments and source code of each reward.

    Call it when they are imported: their files may change while it runs.
    """
    return {
        f"data.rewards {one.name}": fingerprint([type(one).__mro__, vars(one)]) for one in rewards
    }

"""What a run keeps of the steps behind it: moments for the baseline, groups to train again, lengths of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lrl.advantages import Advantages, rewards_of
from lrl.rollouts.replay import Replay
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Group, Prompt


class StepObservers:
    """All that learns from whole steps, and is saved with the ledger.

    Args:
        advantages: The baseline.
        replay: The replay buffer, if there is one.
        length_predictor: What expects lengths, if anything does.
    """

    def __init__(self, advantages: Advantages, replay: Replay | None, length_predictor: LengthPredictor | None) -> None:
        self._advantages = advantages
        self._replay = replay
        self._length_predictor = length_predictor

    def start(self) -> None:
        """A run begins."""
        if self._length_predictor is not None:
            self._length_predictor.ranker.start()

    def close(self) -> None:
        """It is over. May be called twice."""
        if self._length_predictor is not None:
            self._length_predictor.ranker.close()

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """`prompts` start soon. Call it on the loop."""
        if self._length_predictor is not None:
            self._length_predictor.look_ahead(prompts)

    def end_step(self, step: int, groups: Sequence[Group]) -> None:
        """The optimizer step `step` has trained these groups."""
        self._advantages.end_step(rewards_of([rollout for group in groups for rollout in group.rollouts]))
        if self._replay is not None:
            self._replay.add(step, list(groups))
        if self._length_predictor is not None:
            self._length_predictor.end_step(groups)

    def state_dict(self) -> dict[str, Any]:
        """The state of each that there is, in plain types and tensors."""
        parts = {"advantages": self._advantages, "replay": self._replay, "length_predictor": self._length_predictor}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; what was not there begins anew."""
        for name, part in (
            ("advantages", self._advantages),
            ("replay", self._replay),
            ("length_predictor", self._length_predictor),
        ):
            if part is not None and name in state:
                part.load_state_dict(state[name])

"""What every ranker is: it learns a number for each prompt that was answered, and guesses it for others.

The number is how much longer than the others a prompt's responses are, in log tokens. It only ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lrl.types import Prompt


class Ranker(ABC):
    """Guesses a number for a prompt. One thread teaches; another may ask meanwhile, and does not wait."""

    @abstractmethod
    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Take in the prompts of a step, with their numbers."""

    @abstractmethod
    def guess(self, prompt: Prompt) -> float:
        """The number of a prompt; 0 before anything was learnt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain types and tensors, of bounded size."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 - what guesses at once needs no warning
        """These will be asked for soon; called by the thread that asks."""

    def figures(self) -> dict[str, float]:
        """What the log says of it, by the metric's name."""
        return {}

    def start(self) -> None:  # noqa: B027 - most have no process
        """A run begins. Call it on a thread that outlives the run."""

    def close(self) -> None:  # noqa: B027
        """The run is over. May be called twice, and without `start`."""

"""Base class of the rankers, which learn a number for each answered prompt and guess it for others.

The number is the length of a prompt's responses relative to all responses of that time, in log
tokens. It only ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lrl.types import Prompt


class Ranker(ABC):
    """Guesses a number for a prompt. `guess` never waits for `learn`, which another thread may call
    meanwhile."""

    @abstractmethod
    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Learns the numbers of a step's prompts."""

    @abstractmethod
    def guess(self, prompt: Prompt) -> float:
        """Returns the number of a prompt; 0 before anything was learnt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain types and tensors, of bounded size."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 (a ranker that guesses at once ignores it)
        """Announces prompts that will be guessed soon; called by the thread that guesses."""

    def metrics(self) -> dict[str, float]:
        """Returns the ranker's metrics by name."""
        return {}

    def start(self) -> None:  # noqa: B027 (most rankers have no process)
        """Starts the ranker's process. Call it on a thread that outlives the run."""

    def close(self) -> None:  # noqa: B027
        """Ends the ranker's process. May be called twice, and without `start`."""

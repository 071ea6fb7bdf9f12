"""The seam of the rewards room: a `Reward` judges one answer from plain strings and columns, and knows nothing else.

It gets text, not token ids or tensors, so a reward can be written without knowing the house, and a worker process that
runs it imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection
from typing import Any

Score = float | dict[str, float]
"""What a reward gives for one answer: a number, or named parts whose sum counts."""


class GaveUp(float):
    """The reward 0 of a verifier that gave up on an answer: it does not know, so the answer is not right.

    The pool counts such answers (`rewards/gave_up`). For an error, which is no reward, raise an exception instead.

    Args:
        reason: What was too much, for the log.
    """

    reason: str

    def __new__(cls, reason: str) -> GaveUp:
        self = super().__new__(cls, 0.0)
        self.reason = reason
        return self


class Reward(ABC):
    """Judges one answer. Subclass it, or hand over a plain function (see `Function`).

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the class's own name if empty.
    """

    name: str = ""
    weight: float = 1.0
    give_up_s: float = 0.0
    """Seconds after which it gives up on an answer by itself (`GaveUp`); 0 if it never does."""

    def __init__(self, weight: float = 1.0, name: str = "") -> None:
        self.weight = weight
        self.name = name or type(self).__name__

    def missing_column(self, columns: Collection[str]) -> str:
        """What this reward reads and a data set with these `columns` has not; empty if it has all. A run is refused
        before it begins then, and not at the first answer."""
        return ""

    @abstractmethod
    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        """The reward of `response`, before the weight; may be a coroutine.

        Args:
            prompt: The prompt as its author wrote it.
            response: The answer's text, special tokens left out.
            columns: The row's other columns, and two of the answer's own: `finish_reason` (`stop` or `length`)
                and `num_tokens` (the answer's length in tokens). They win over columns of the row with these names.

        Raises:
            Exception: Any, for what cannot be judged. It is counted as an error and never becomes a reward.
        """

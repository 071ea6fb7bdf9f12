"""The form of a response, checked by a regular expression."""

import re
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import Reward


class Format(Reward):
    r"""1 if the whole response, stripped of white space around it, matches a regular expression,
    else 0.

    Args:
        pattern: Python regular expression; `.` also matches line ends. Example:
            `<think>.*</think>.*\\boxed\{.*`.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.

    Raises:
        ValueError: `pattern` is no regular expression.
    """

    binary = True

    def __init__(self, pattern: str, weight: float = 1.0, name: str = "format") -> None:
        super().__init__(weight, name)
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"Format(pattern={pattern!r}) is no regular expression: {error}."
            ) from error

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns 1.0 or 0.0."""
        return float(self.pattern.fullmatch(response.strip()) is not None)

"""A soft limit on length: it teaches a response to end before it is cut."""

from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import Reward


class LengthPenalty(Reward):
    """0 up to `free_tokens`, then linearly down to -1 at `max_tokens`.

    Soft over-long punishment of DAPO (2503.14476, equation 13), where `max_tokens` is L_max and
    `free_tokens` is L_max - L_cache.

    Args:
        free_tokens: Response tokens that cost nothing.
        max_tokens: Response tokens from which on the penalty is -1; usually the sampling limit.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.

    Raises:
        ValueError: Unless 0 <= free_tokens < max_tokens.
    """

    def __init__(
        self, free_tokens: int, max_tokens: int, weight: float = 1.0, name: str = "length_penalty"
    ) -> None:
        super().__init__(weight, name)
        if not 0 <= free_tokens < max_tokens:
            raise ConfigError(
                f"LengthPenalty(free_tokens={free_tokens}, max_tokens={max_tokens}): free_tokens "
                "must be at least 0 and below max_tokens."
            )
        self.free_tokens = free_tokens
        self.max_tokens = max_tokens

    def __call__(self, prompt: str, response: str, *, num_tokens: int = 0, **columns: Any) -> float:
        """Returns a number between -1.0 and 0.0. The pool passes `num_tokens`."""
        excess = (num_tokens - self.free_tokens) / (self.max_tokens - self.free_tokens)
        return -min(max(excess, 0.0), 1.0)

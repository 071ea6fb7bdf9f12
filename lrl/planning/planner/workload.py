"""What a step has to do, whoever does it."""

from __future__ import annotations

from dataclasses import dataclass

from lrl.planning.lengths import Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The prompts and answers of one optimizer step."""

    prompts: int
    """Groups."""
    responses: int
    """Responses to each prompt."""
    prompt_tokens: int
    """Tokens of a prompt; all are taken to be equally long."""
    lengths: Quantiles
    """Tokens of the responses."""

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1.")

    @property
    def samples(self) -> int:
        """Responses of the step."""
        return self.prompts * self.responses

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.prompt_tokens + int(self.lengths.longest)

    @property
    def tokens(self) -> float:
        """Tokens that are trained on, prompts included: every response is a sequence of its own."""
        return self.samples * (self.prompt_tokens + self.lengths.mean)

    @property
    def tokens_squared(self) -> float:
        """Sum of the squared lengths of those sequences."""
        prompt = self.prompt_tokens
        return self.samples * (prompt**2 + 2 * prompt * self.lengths.mean + self.lengths.mean_square)

    @property
    def live_tokens(self) -> float:
        """Tokens of a response and its prompt at a random moment while it is being written."""
        return self.prompt_tokens + self.lengths.written

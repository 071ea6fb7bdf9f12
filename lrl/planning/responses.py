"""How long simulated responses are.

Lengths are drawn by a seed as a function of prompt and group: the same under every dispatch policy.
Responses to one prompt are alike, for length is largely a matter of the prompt's difficulty
(StreamRL, 2504.15930, ranks prompts by it). So the normal number behind a length is a sum of two,
one of the prompt and one of the response.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True)
class LengthSampler(ABC):
    """A distribution of lengths in tokens."""

    prompt_share: float = 0.5
    """Share of the variance between prompts, in [0, 1]: at 1 a prompt's responses are equally long."""
    seed: int = 0

    @abstractmethod
    def tokens(self, normal: np.ndarray) -> np.ndarray:
        """Maps standard normal numbers, float64 [n], to tokens, int64 [n], at least 1."""

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """Returns the tokens of each response of a group: `prompt` is `Prompt.id`, and `index` is
        `Group.index`, as another epoch has other responses to the same prompt."""
        of_prompt = np.random.default_rng([self.seed, 0, prompt]).standard_normal()
        of_responses = np.random.default_rng([self.seed, 1, index]).standard_normal(responses)
        own = math.sqrt(1 - self.prompt_share) * of_responses
        return self.tokens(math.sqrt(self.prompt_share) * of_prompt + own).tolist()


@dataclass
class Lognormal(LengthSampler):
    """exp of a normal number (mean log(`median`), deviation `sigma`), cut at `longest`."""

    median: float
    sigma: float
    longest: int

    def tokens(self, normal: np.ndarray) -> np.ndarray:
        return (self.median * np.exp(self.sigma * normal)).clip(1, self.longest).astype(np.int64)


class ReplayedLengths:
    """A run's lengths, group by group in order; later groups draw from all of them."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._all = [length for group in groups for length in group]

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """See `LengthSampler.of`."""
        if index < len(self._groups) and len(self._groups[index]) == responses:
            return list(self._groups[index])
        return np.random.default_rng(index).choice(self._all, responses).tolist()

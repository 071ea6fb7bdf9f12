"""How long simulated responses are.

Lengths are drawn by a seed as a function of prompt and group: the same under every dispatch policy.
Responses to one prompt are alike, for length is largely a matter of the prompt's difficulty
(StreamRL, 2504.15930, ranks prompts by it). So the normal number behind a length is a sum of two,
one of the prompt and one of the response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Lognormal:
    """Lengths in tokens: exp of a normal number (mean log(`median`), deviation `sigma`), cut at
    `longest`."""

    median: float
    sigma: float
    longest: int
    prompt_share: float = field(default=0.5, kw_only=True)
    """Share of the variance between prompts, in [0, 1]: at 1 a prompt's responses are equally long."""
    seed: int = field(default=0, kw_only=True)

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """Returns the tokens of each response of a group: `prompt` is `Prompt.id`, and `index` is
        `Group.index`, as another epoch has other responses to the same prompt."""
        of_prompt = np.random.default_rng([self.seed, 0, prompt]).standard_normal()
        of_responses = np.random.default_rng([self.seed, 1, index]).standard_normal(responses)
        own = math.sqrt(1 - self.prompt_share) * of_responses
        normal = math.sqrt(self.prompt_share) * of_prompt + own
        tokens = self.median * np.exp(self.sigma * normal)
        return tokens.clip(1, self.longest).astype(np.int64).tolist()


class ReplayedLengths:
    """A run's lengths, group by group in order; later groups draw from all of them."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._all = [length for group in groups for length in group]

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """See `Lognormal.of`."""
        if index < len(self._groups) and len(self._groups[index]) == responses:
            return list(self._groups[index])
        return np.random.default_rng(index).choice(self._all, responses).tolist()

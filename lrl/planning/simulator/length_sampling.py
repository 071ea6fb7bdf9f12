"""Response lengths, drawn by a seed as a function of prompt and group: the same under every
dispatch policy.

Responses to one prompt are alike, for length is largely a matter of the prompt's difficulty
(StreamRL, 2504.15930, ranks prompts by it). So the normal number behind a length is a sum of two,
one of the prompt and one of the response.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

from lrl.types import Prompt


class LengthSampler(ABC):
    """A distribution of lengths in tokens. Dispatch can use it as its `ExpectedLengths`.

    Args:
        prompt_share: Share of the variance between prompts, in [0, 1]; 1 makes all responses to a
            prompt equally long.
        seed: Another seed draws other lengths.

    Raises:
        ValueError: `prompt_share` is outside its range.
    """

    def __init__(self, prompt_share: float = 0.5, seed: int = 0) -> None:
        if not 0 <= prompt_share <= 1:
            raise ValueError(
                f"prompt_share is {prompt_share}; it is a share and must be in [0, 1]."
            )
        self.prompt_share = prompt_share
        self.seed = seed

    @abstractmethod
    def tokens(self, normal: np.ndarray) -> np.ndarray:
        """Maps standard normal numbers, float64 [n], to lengths in tokens, int64 [n], at least
        1."""

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """Returns the tokens of each response of a group: `prompt` is `Prompt.id`, and `index` is
        `Group.index`, as another epoch has other responses to the same prompt."""
        of_responses = np.random.default_rng([self.seed, 1, index]).standard_normal(responses)
        normal = self._of_prompt(prompt) + math.sqrt(1 - self.prompt_share) * of_responses
        return self.tokens(normal).tolist()

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the median tokens of the prompt's responses; more than `written`."""
        return max(float(self.tokens(np.array([self._of_prompt(prompt.id)]))[0]), written + 1.0)

    def quantile(self, share: float) -> float:
        """Returns the tokens that this share of all responses does not exceed."""
        return float(self.tokens(np.array([NormalDist().inv_cdf(share)]))[0])

    def _of_prompt(self, prompt: int) -> float:
        return (
            math.sqrt(self.prompt_share)
            * np.random.default_rng([self.seed, 0, prompt]).standard_normal()
        )


class Lognormal(LengthSampler):
    """exp of a normal number with mean log(`median`), cut at a limit, as responses are.

    Args:
        median: Tokens.
        sigma: Standard deviation of the logarithm; 0 makes all responses equally long.
        longest: Limit in tokens.
        prompt_share, seed: See `LengthSampler`.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self, median: float, sigma: float, longest: int, prompt_share: float = 0.5, seed: int = 0
    ) -> None:
        super().__init__(prompt_share, seed)
        if not 1 <= median <= longest or sigma < 0:
            raise ValueError(
                f"median is {median:g}, longest {longest} and sigma {sigma:g}; there must be 1 <= "
                "median <= longest and sigma >= 0."
            )
        self.median = median
        self.sigma = sigma
        self.longest = longest

    def tokens(self, normal: np.ndarray) -> np.ndarray:
        return (self.median * np.exp(self.sigma * normal)).clip(1, self.longest).astype(np.int64)


class ObservedLengths(LengthSampler):
    """Observed lengths, all equally likely.

    Args:
        lengths: In tokens, each at least 1.
        prompt_share, seed: See `LengthSampler`.

    Raises:
        ValueError: There are none, or one is below 1.
    """

    def __init__(self, lengths: Sequence[int], prompt_share: float = 0.5, seed: int = 0) -> None:
        super().__init__(prompt_share, seed)
        self._sorted = np.sort(np.asarray(lengths, dtype=np.int64))
        if not len(self._sorted) or self._sorted[0] < 1:
            raise ValueError(
                f"lengths has {len(self._sorted)} responses; there must be some, each of 1 token "
                "or more."
            )

    def tokens(self, normal: np.ndarray) -> np.ndarray:
        ranks = (torch.special.ndtr(torch.from_numpy(normal)).numpy() * len(self._sorted)).astype(
            np.int64
        )
        return self._sorted[ranks.clip(max=len(self._sorted) - 1)]


class ReplayedLengths(ObservedLengths):
    """A run's lengths, group by group in the order of its prompts; later groups draw from all of
    them.

    Args:
        groups: Tokens of the responses of each group.

    Raises:
        ValueError: There are none, or one is below 1.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        super().__init__([length for group in groups for length in group])
        self._groups = groups

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        if index < len(self._groups) and len(self._groups[index]) == responses:
            return list(self._groups[index])
        return super().of(prompt, index, responses)

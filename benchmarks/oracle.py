"""Lengths for dispatch where they are drawn: the truth, or the truth with a blur."""

from __future__ import annotations

import numpy as np

from lrl.planning.simulator.length_sampling import LengthSampler
from lrl.routing.length_predictor import recall
from lrl.types import Prompt


class Oracle:
    """The drawn lengths of a first epoch, in which prompt and group have the same number
    (`ExpectedLengths`).

    Args:
        lengths: Distribution of the responses.
        prompts: Rows of the data set.
        responses: Responses to each.
        blur: Standard deviation of the logarithm of each prompt's error factor.
    """

    def __init__(
        self, lengths: LengthSampler, prompts: int, responses: int = 1, blur: float = 0.0
    ) -> None:
        drawn = np.array([lengths.of(prompt, prompt, responses) for prompt in range(prompts)])
        self._found = drawn.mean(axis=1)
        self._expected = self._found * np.exp(
            np.random.default_rng([lengths.seed, 2]).normal(0, blur, prompts)
        )
        self._all = np.sort(drawn.ravel())

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the tokens of a whole response, the mean of those to the prompt; more than
        `written`."""
        return max(float(self._expected[prompt.id]), written + 1.0)

    def quantile(self, share: float) -> float:
        """Returns the length, in tokens, that this share of the responses does not exceed."""
        return float(np.quantile(self._all, share, method="inverted_cdf"))

    @property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return float(self._found.mean())

    def recall(self, share: float) -> float:
        """Returns, of the longest `share` of the prompts, the share that is expected among as
        many."""
        return recall(self._expected, self._found, share)

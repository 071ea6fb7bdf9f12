"""Episodes of several turns in a plan: their lengths, and the seconds of their tools.

The number of turns does not depend on their lengths; the lengths of an episode's turns are alike,
as those of a prompt's are in the simulator. An episode's length is drawn once, with a fixed seed:
the sum of a random number of lengths has no closed form.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lrl.planning.planner.quantiles import POINTS, Quantiles


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Episodes of a step."""

    turns: Quantiles
    """Turns of an episode."""
    turn_lengths: Quantiles
    """Tokens of a turn."""
    observation_tokens: int
    """Tokens of an observation: one between each two turns."""
    tool_ms: Quantiles | None = None
    """Milliseconds of an answer, of which each turn gets one; None for none."""

    def __post_init__(self) -> None:
        if self.observation_tokens < 1:
            raise ValueError(
                f"--observation-tokens is {self.observation_tokens}; it must be at least 1."
            )

    @cached_property
    def lengths(self) -> Quantiles:
        """Tokens of whole episodes, observations included."""
        random = np.random.default_rng(0)
        turns = np.maximum(1, np.round(self.turns.of(POINTS))).astype(int)
        ends = np.cumsum(turns)
        # Half of the variance is the episode's (`LengthSampler.prompt_share`).
        normal = np.repeat(random.standard_normal(POINTS), turns)
        normal += random.standard_normal(ends[-1])
        ranks = normal.argsort().argsort()
        tokens = self.turn_lengths.of(int(ends[-1]))[ranks]
        own = np.add.reduceat(tokens, ends - turns)
        return Quantiles(tuple(sorted((own + (turns - 1) * self.observation_tokens).tolist())))

    @property
    def read_tokens(self) -> float:
        """Mean tokens of an episode's observations."""
        return (self.turns.mean - 1) * self.observation_tokens

    @property
    def written_share(self) -> float:
        """Share of an episode's tokens that the policy writes."""
        return 1 - self.read_tokens / self.lengths.mean

    @property
    def tool_s(self) -> float:
        """Mean seconds that an episode waits for answers."""
        return self._answer_s * self.turns.mean

    @property
    def longest_tool_s(self) -> float:
        """Seconds that the episode with the most turns waits for answers."""
        return self._answer_s * self.turns.longest

    @property
    def _answer_s(self) -> float:
        return 0.0 if self.tool_ms is None else self.tool_ms.mean / 1000

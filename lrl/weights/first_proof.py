"""The first proof of a generator: that it computes what the policy computes, in short texts and in
long ones.

Later proofs are about weights that arrive. The first one is about the two programs: positions that
are stretched, a window of the attention or a cap on its scores may differ by little in a short
text, or far behind in a long one. So a text as long as the run's is compared too, part by part, and
in 16 bits the limit is a few times the rounding that the policy itself has there. That takes two
passes of the policy over the long text, and one of the generator.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from lrl.generators.generator import Generator
from lrl.training.rounding import Rounded
from lrl.weights.tolerance import mean_difference, parts, rounding_tolerance, rounds_as

LONG_TEXT_TOKENS = 8192
"""Tokens of the long text at most."""
LONG_TEXT_TOKENS_ON_CPU = 512
"""The same where there is no GPU, so that the start of a run is not noticeably longer; and vLLM's
CPU build makes a table of all these tokens and the vocabulary."""

PromptLogprobs = Callable[..., list[float]]
"""The policy's log-probs of a text, and with a number format those with the errors of its rounding
(`PolicyModule.prompt_logprobs`)."""


class FirstProof(NamedTuple):
    """What the first proof of some generators needs beside what every probe has."""

    generators: Sequence[Generator]
    """All that are to be compared; only the new ones among them are asked for more."""
    long: list[int]
    """A text as long as the run's."""
    training_dtype: str
    """Number format of the policy's passes that train: in it the log-probs of sampled tokens are
    compared."""


class Text:
    """A text with what the policy computes for it.

    Args:
        prompt_logprobs: The policy.
        tokens: The text.
        formats: Number formats whose rounding is measured on it.
    """

    def __init__(
        self, prompt_logprobs: PromptLogprobs, tokens: list[int], formats: Collection[Rounded] = ()
    ) -> None:
        self.tokens = tokens
        self.expected = prompt_logprobs(tokens)
        """Log-probs of all tokens but the first, in nats."""
        self._rounded = {dtype: prompt_logprobs(tokens, dtype) for dtype in sorted(formats)}

    def spread(self, dtype: str, part: slice = slice(None)) -> float | None:
        """Returns what a format's rounding does to these tokens, in nats a token; None if it was
        not measured."""
        known = rounds_as(dtype)
        if known is None or known not in self._rounded:
            return None
        return mean_difference(self.expected[part], self._rounded[known][part])

    def fault(self, found: Sequence[float], dtype: str, allowed: float | None) -> str | None:
        """Compares each part with what a generator found.

        Args:
            found: Its log-probs.
            dtype: The less exact of the two number formats.
            allowed: Largest mean difference in nats per token; None takes
                `rounding_tolerance`.

        Returns:
            What speaks against the generator, or None.
        """
        for part in parts(len(self.expected)):
            difference = mean_difference(self.expected[part], found[part])
            limit = (
                rounding_tolerance(dtype, self.spread(dtype, part)) if allowed is None else allowed
            )
            if not difference <= limit:  # NaN, too
                return (
                    f"the log-probs of tokens {part.start + 1} to {part.stop} of a text of "
                    f"{len(self.tokens)} are off by {difference:.3g} nats a token, and {limit:.2g} "
                    "is allowed"
                )
        return None

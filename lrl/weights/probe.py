"""The verification of a sync: log-probs of a few real prompts, computed by the policy and by a
generator.

The first one of a generator proves more. Later ones are about weights that arrive, the first is
about the two programs: positions that are stretched, a window of the attention or a cap on its
scores may differ by little in a short text, or only at the end of a long one. So a text as long as
the run's is compared too, part by part, and in 16 bits the limit is a few times the rounding that
the policy itself has there. That takes two passes of the policy over the long text, and one of the
generator.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator
from lrl.generators.pool import Probe
from lrl.training.rounding import Rounded
from lrl.weights.tolerance import (
    ProbeTolerance,
    format_of,
    less_exact,
    mean_difference,
    parts,
    rounding_tolerance,
    rounds_as,
)

LONG_TEXT_TOKENS = 8192
"""Tokens of the long text at most."""
LONG_TEXT_TOKENS_ON_CPU = 512
"""The same where there is no GPU, so that the start of a run is not noticeably longer; and vLLM's
CPU build makes a table of all these tokens and the vocabulary."""

PromptLogprobs = Callable[..., list[float]]
"""The policy's log-probs of a text, and with a number format those with the errors of its rounding
(`PolicyModule.prompt_logprobs`)."""


class FirstProof(NamedTuple):
    """The parts of a first proof that later probes lack."""

    generators: Sequence[Generator]
    """All that are to be compared; only the new ones among them are asked for more."""
    long: list[int]
    """A text as long as the run's."""
    training_dtype: str
    """Number format of the policy's passes that train: in it the log-probs of sampled tokens are
    compared."""


class Text:
    """A text with the policy's log-probs of its tokens.

    Args:
        prompt_logprobs: The policy.
        tokens: The text.
        formats: Number formats whose rounding is measured on it.
        held: Number formats in which generators hold the weights; None for the policy's own.
    """

    def __init__(
        self,
        prompt_logprobs: PromptLogprobs,
        tokens: list[int],
        formats: Collection[Rounded] = (),
        held: Collection[Rounded | None] = (None,),
    ) -> None:
        self.tokens = tokens
        self._held: dict[Rounded | None, list[float]] = {
            dtype: prompt_logprobs(tokens, None, dtype) for dtype in held if dtype
        }
        if None in held:
            self._held[None] = prompt_logprobs(tokens)
        self._rounded = {dtype: prompt_logprobs(tokens, dtype) for dtype in sorted(formats)}

    @property
    def expected(self) -> list[float]:
        """Log-probs of all tokens but the first, in nats, with the policy's own weights."""
        return self._held[None]

    def spread(self, dtype: str, part: slice = slice(None)) -> float | None:
        """Returns the effect of a format's rounding on these tokens, in nats a token; None if it
        was not measured."""
        known = rounds_as(dtype)
        if known is None or known not in self._rounded:
            return None
        return mean_difference(self.expected[part], self._rounded[known][part])

    def of(self, held: str) -> list[float]:
        """Returns the policy's log-probs with weights in the format that a generator holds."""
        known = rounds_as(held)
        return self._held[known if known in self._held else next(iter(self._held))]

    @property
    def rounded_away(self) -> float:
        """Largest effect of rounding the policy's weights for a generator, in nats a token."""
        return max(mean_difference(self.expected, one) for one in self._held.values())

    def fault(
        self, found: Sequence[float], held: str, dtype: str, allowed: float | None
    ) -> str | None:
        """Compares each part with a generator's log-probs.

        Args:
            found: Its log-probs.
            held: Its number format.
            dtype: The less exact of the two number formats.
            allowed: Largest mean difference in nats per token; None takes
                `rounding_tolerance`.

        Returns:
            What speaks against the generator, or None.
        """
        expected = self.of(held)
        for part in parts(len(expected)):
            difference = mean_difference(expected[part], found[part])
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


def held_formats(policy_dtype: str, first: FirstProof | None) -> set[Rounded | None]:
    """Returns the formats of 16 bits in which generators hold a policy of 32, and None if any holds
    the policy's own weights."""
    if first is None or policy_dtype != "float32" or not first.generators:
        return {None}
    return {rounds_as(format_of(generator.server.settings)) for generator in first.generators}


class Probes:
    """Makes a run's probes.

    Args:
        tolerance: Largest mean difference in nats per token; None derives it from the policy and
            the noise of each generator (`lrl.weights.tolerance`).
        deadline_s: Seconds for a generator's answer.
    """

    def __init__(self, tolerance: float | None, deadline_s: float) -> None:
        self.tolerance = tolerance
        self.deadline_s = deadline_s
        self.difference = 0.0
        """Largest mean difference of the last probe over all generators, in nats per token."""
        self._made = 0
        self._tolerances: WeakKeyDictionary[Generator, ProbeTolerance] = WeakKeyDictionary()
        self._first: Text | None = None  # the short text of the last first proof
        self._formats: set[str] = set()  # of all generators

    def make(
        self,
        prompt_logprobs: PromptLogprobs,
        policy_dtype: str,
        tokens: list[int],
        version: int,
        first: FirstProof | None = None,
    ) -> Probe:
        """Makes the comparison of a generator with the policy as it is now.

        Args:
            prompt_logprobs: The policy's log-probs of a text's tokens, in nats, each given those
                before it.
            policy_dtype: Number format of the policy: float32 or bfloat16.
            tokens: The text.
            version: The policy's version.
            first: For a pool that may have new generators; without it they are compared by this
                text alone, and with the limit for any model.
        """
        formats = self._measured(policy_dtype, first)
        held = held_formats(policy_dtype, first)
        if formats is not None:
            held.add(None)  # what rounding does is measured on the policy's own weights
        texts = [Text(prompt_logprobs, tokens, formats or (), held)]
        if formats is not None and first is not None:
            self._first = texts[0]
            if len(first.long) > len(tokens):
                texts.append(Text(prompt_logprobs, first.long, formats, held))
        self.difference = 0.0
        self._made += 1
        salt = f"probe-{self._made}"  # never reuses the keys and values of an earlier probe

        async def probe(generator: Generator) -> None:
            asked = texts[:1] if generator in self._tolerances else texts
            client, deadline_s = generator.client, self.deadline_s
            found = await asyncio.gather(
                *(
                    client.prompt_logprobs(text.tokens, salt=salt, deadline_s=deadline_s)
                    for text in asked
                )
            )
            own = format_of(generator.server.settings)
            self.difference = max(self.difference, mean_difference(texts[0].of(own), found[0]))
            dtype = less_exact(policy_dtype, own)
            if (fault := self._fault(generator, dtype, asked, found)) is not None:
                raise GeneratorError(
                    f"{generator.name} does not compute what the policy computes after the sync to "
                    f"version {version}: {fault} (WeightSync.probe_tolerance). The weights did not "
                    "arrive whole, or trainer and generator disagree about the model (dtype, "
                    "attention). No rollout of this version was trained."
                )

        return probe

    def sampled_tolerance(self, training_dtype: str) -> float:
        """Returns the largest mean difference between the log-probs of sampled tokens, in nats at
        temperature 1."""
        if self.tolerance is not None:
            return self.tolerance
        dtype = less_exact(training_dtype, *self._formats)
        spread = None if self._first is None else self._first.spread(dtype)
        if self._first is not None and spread is not None:
            # Tokens are sampled with the generators' weights and trained with the policy's.
            spread += self._first.rounded_away
        return rounding_tolerance(dtype, spread)

    def _measured(self, policy_dtype: str, first: FirstProof | None) -> set[Rounded] | None:
        """Returns the formats whose rounding the first proof of new generators needs; None if there
        are none."""
        if first is None:
            return None
        new = [generator for generator in first.generators if generator not in self._tolerances]
        if not new:
            return None
        own = {format_of(generator.server.settings) for generator in new}
        self._formats |= own
        if self.tolerance is not None:
            return set()
        trainers = (policy_dtype, first.training_dtype)
        compared = {less_exact(dtype, each) for dtype in trainers for each in own}
        return {known for dtype in compared if (known := rounds_as(dtype)) is not None}

    def _fault(
        self, generator: Generator, dtype: str, texts: Sequence[Text], found: Sequence[list[float]]
    ) -> str | None:
        own = format_of(generator.server.settings)
        tolerance = self._tolerances.setdefault(
            generator, ProbeTolerance(dtype, texts[0].spread(dtype))
        )
        if self.tolerance is None:
            fault = tolerance.fault(texts[0].of(own), found[0])
            if fault is not None:
                return fault
            texts = texts[1:]
            found = found[1:]
        for text, logprobs in zip(texts, found, strict=True):
            fault = text.fault(logprobs, own, dtype, self.tolerance)
            if fault is not None:
                return fault
        return None

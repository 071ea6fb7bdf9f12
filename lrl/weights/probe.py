"""The proof of a sync: a few real prompts, whose log-probs the policy and a generator compute, each by itself."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from lrl.generators.client import GeneratorError
from lrl.generators.crew import Probe

if TYPE_CHECKING:
    from lrl.generators.generator import Generator
    from lrl.policy import PolicyModule

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest mean difference in nats per token that counts as the same weights. The mean and not the maximum: in bfloat16
single prompt tokens of the quickstart's policy were off by 0.6, at a mean of 0.06. A tensor that is missing made 0.75
or more, weights that are one step old 0.005, and two programs in float32 5e-7."""


class Probes:
    """Makes a run's probes.

    Args:
        tolerance: Largest mean difference in nats per token; None takes what suits the generator's dtype.
        deadline_s: Seconds for a generator's answer.
    """

    def __init__(self, tolerance: float | None, deadline_s: float) -> None:
        self.tolerance = tolerance
        self.deadline_s = deadline_s
        self.difference = 0.0
        """Largest mean difference that the last probe saw in a generator, in nats per token."""
        self._made = 0

    def make(self, policy: PolicyModule, tokens: list[int], version: int) -> Probe:
        """A comparison with what `policy` computes for `tokens` now; it must be `version`."""
        expected = policy.prompt_logprobs(tokens)
        self.difference = 0.0
        self._made += 1
        salt = f"probe-{self._made}"  # never the keys and values of an earlier probe

        async def probe(generator: Generator) -> None:
            found = await generator.client.prompt_logprobs(tokens, salt=salt, deadline_s=self.deadline_s)
            difference = fmean(abs(a - b) for a, b in zip(expected, found, strict=True))
            self.difference = max(self.difference, difference)
            dtypes = {policy.dtype_name, generator.server.settings.dtype}
            tolerance = self.tolerance or max(TOLERANCE[dtype] for dtype in dtypes)
            if not difference <= tolerance:
                raise GeneratorError(
                    f"{generator.name} does not compute what the policy computes after the sync to version {version}: "
                    f"the probe's log-probs are off by {difference:.3g} nats a token, and {tolerance:g} is allowed "
                    "(WeightSync.probe_tolerance). The weights did not arrive whole, or trainer and generator "
                    "disagree about the model (dtype, attention). No rollout of this version was trained."
                )
            generator.prove()

        return probe

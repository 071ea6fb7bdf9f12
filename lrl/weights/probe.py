"""The verification of a sync: log-probs of a few real prompts, computed by the policy and by a generator."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from lrl.generators.client import GeneratorError
from lrl.generators.generator import Generator
from lrl.generators.pool import Probe
from lrl.weights.yardstick import FIRST, Yardstick, off


class Probes:
    """Makes a run's probes.

    Args:
        tolerance: Largest mean difference in nats per token; None derives it from the noise of each
            generator (`lrl.weights.yardstick`).
        deadline_s: Seconds for a generator's answer.
    """

    def __init__(self, tolerance: float | None, deadline_s: float) -> None:
        self.tolerance = tolerance
        self.deadline_s = deadline_s
        self.difference = 0.0
        """Largest mean difference of the last probe over all generators, in nats per token."""
        self._made = 0
        self._yardsticks: WeakKeyDictionary[Generator, Yardstick] = WeakKeyDictionary()

    def make(
        self, prompt_logprobs: Callable[[list[int]], list[float]], policy_dtype: str, tokens: list[int], version: int
    ) -> Probe:
        """Makes the comparison of a generator with the policy as it is now.

        Args:
            prompt_logprobs: The policy's log-probs of a text's tokens, in nats, each given those before it.
            policy_dtype: Number format of the policy: float32 or bfloat16.
            tokens: The text.
            version: The policy's version.
        """
        expected = prompt_logprobs(tokens)
        self.difference = 0.0
        self._made += 1
        salt = f"probe-{self._made}"  # never reuses the keys and values of an earlier probe

        async def probe(generator: Generator) -> None:
            found = await generator.client.prompt_logprobs(tokens, salt=salt, deadline_s=self.deadline_s)
            self.difference = max(self.difference, off(expected, found))
            settings = generator.server.settings
            dtype = "quantised" if settings.quantization else max(policy_dtype, settings.dtype, key=FIRST.__getitem__)
            if (fault := self._fault(generator, dtype, expected, found)) is not None:
                raise GeneratorError(
                    f"{generator.name} does not compute what the policy computes after the sync to version {version}: "
                    f"{fault} (WeightSync.probe_tolerance). The weights did not arrive whole, or trainer and generator "
                    "disagree about the model (dtype, attention). No rollout of this version was trained."
                )
            generator.verify()

        return probe

    def _fault(self, generator: Generator, dtype: str, expected: list[float], found: list[float]) -> str | None:
        if self.tolerance is None:
            return self._yardsticks.setdefault(generator, Yardstick(dtype)).fault(expected, found)
        difference = off(expected, found)
        if difference <= self.tolerance:
            return None
        return f"the probe's log-probs are off by {difference:.3g} nats a token, and {self.tolerance:g} is allowed"

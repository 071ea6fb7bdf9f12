"""The proof that a generator computes what the policy computes: the log-probs of a text of real
prompts, by both.

The first proof of a generator is about the two programs as much as about the weights: stretched
positions, a window of the attention or a cap on its scores may differ by little in a short text, or
only at the end of a long one. So a new generator is asked for a text as long as the run's, later
for its first `PROOF_TOKENS`. The text is compared part by part, by the mean difference: the largest
is that of a token that the model takes for all but impossible.

Rounding to bfloat16 moved the log-probs of a tiny random model by 0.0006 nats a token, and those of
SmolLM2-135M by 0.045, and a limit for all models would pass 0.18 nats that vLLM and transformers
make of Phi-3's positions. So the limit is a few times what the less exact format's rounding does to
this model (`lrl.training.rounding`), within fixed bounds (`benchmarks/agreement.py` at tag
before-0.3). An old or incomplete update is often within it (docs/results/weights.md): checksums
and the version that is read back find those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator, State
from lrl.generators.settings import ServerSettings
from lrl.training.rounding import UNIT

PromptLogprobs = Callable[..., list[float]]
"""The policy's log-probs of a text in nats, with errors of rounding and rounded weights
(`PolicyModule.prompt_logprobs`)."""

PROOF_TOKENS = 64
"""Tokens of a later proof, and the least in any part of a text."""
FIRST_PROOF_TOKENS = 8192
"""Most tokens that a new generator is asked for."""
FIRST_PROOF_TOKENS_ON_CPU = 512
"""So that a run starts hardly later: vLLM's CPU build makes a table of these tokens and the
vocabulary."""
MAX_TOLERANCE_NATS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25, "quantised": 0.5}
"""Largest mean difference in nats per token, for any model; the most exact format first. A tensor
that is missing made 0.75 or more."""
MIN_TOLERANCE_NATS = {"float32": 3e-4, "float16": 5e-4, "bfloat16": 2e-3, "quantised": 5e-3}
"""Always allowed, however little the model rounds."""
TOLERATED_ROUNDINGS = 4.0
"""Real programs were off by 0.8 to 1.2 times the rounding of the model."""
QUANTISED_WORDS = ("fp8", "int", "nvfp4", "turboquant")
"""Words in the value of `kv-cache-dtype` that stand for eight bits and less."""


@dataclass
class Proof:
    """The policy's log-probs of a text, and the comparison of generators with them.

    Generators of 16 bits hold a policy of 32 rounded, so its weights are rounded here too: what
    rounding takes away is no fault of a sync.
    """

    prompt_logprobs: PromptLogprobs
    """The policy as it is now; called once, or twice to see what rounding does."""
    policy_dtype: str
    """float32 or bfloat16."""
    held: str
    """The generators' format (`format_of`): a run has one."""
    tokens: list[int]
    """The text, at least two tokens."""
    version: int = field(kw_only=True)
    tolerance: float | None = field(kw_only=True)
    """Largest mean difference in nats per token; None takes one for this policy."""
    deadline_s: float = field(kw_only=True)
    """Seconds for a generator's answer."""

    def __post_init__(self) -> None:
        self._dtype = max(self.policy_dtype, self.held, key=list(MAX_TOLERANCE_NATS).index)
        rounds_weights = self.policy_dtype == "float32" and self.held in UNIT
        weights_as = self.held if rounds_weights else None
        self._expected = self.prompt_logprobs(self.tokens, None, weights_as)
        self._rounded: list[float] | None = None
        if self.tolerance is None and self._dtype in UNIT:
            self._rounded = self.prompt_logprobs(self.tokens, self._dtype, weights_as)

    async def __call__(self, generator: Generator) -> None:
        """Raises GeneratorError if `generator` does not compute what the policy computes."""
        is_new = generator.state is State.NEW
        found = await generator.client.prompt_logprobs(
            self.tokens if is_new else self.tokens[:PROOF_TOKENS],
            # Never the keys and values of an earlier proof.
            salt=f"proof-{self.version}-{generator.syncs}",
            deadline_s=self.deadline_s,
        )
        for part in parts(len(found)):
            difference = mean_difference(self._expected[part], found[part])
            limit = self.limit(part)
            if difference <= limit:  # NaN is not
                continue
            doubt = "" if is_new else " What it wrote since its last proof may be of wrong weights."
            raise GeneratorError(
                f"{generator.name} does not compute what the policy computes after the sync to "
                f"version {self.version}: the log-probs of tokens {part.start + 1} to {part.stop} "
                f"of a text of {len(found) + 1} are off by {difference:.3g} nats a token, and "
                f"{limit:.2g} is allowed (WeightSync.probe_tolerance). The weights did not arrive "
                "whole, or trainer and generator disagree about the model (dtype, attention)."
                f"{doubt}"
            )

    def limit(self, part: slice) -> float:
        """Returns the largest mean difference in nats per token of a part of the text."""
        most = MAX_TOLERANCE_NATS[self._dtype] if self.tolerance is None else self.tolerance
        if self._rounded is None:
            return most
        spread = mean_difference(self._expected[part], self._rounded[part])
        return min(most, max(MIN_TOLERANCE_NATS[self._dtype], TOLERATED_ROUNDINGS * spread))


def format_of(settings: ServerSettings) -> str:
    options = {name.strip("-").replace("_", "-"): one for name, one in settings.extra_args.items()}
    cache = str(options.get("kv-cache-dtype", ""))
    if settings.quantization or any(word in cache for word in QUANTISED_WORDS):
        return "quantised"
    return str(settings.dtype)


def parts(count: int) -> Iterator[slice]:
    """Yields the parts of a text in which the mean is compared: what differs near its end would be
    lost in the whole. Each is three times as long as all before it."""
    start, end = 0, PROOF_TOKENS
    while end + PROOF_TOKENS <= count:
        yield slice(start, end)
        start, end = end, 4 * end
    yield slice(start, count)


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)

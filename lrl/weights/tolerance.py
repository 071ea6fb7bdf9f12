"""Tolerated differences between the log-probs of two programs with the same weights.

At a generator's first proof (`rounding_tolerance`) that depends on the less exact of their number
formats, and on the model: bfloat16 moved the log-probs of a tiny random model by 0.0006 nats a
token, and those of SmolLM2-135M by 0.045. A limit for all models would pass 0.18 nats that vLLM and
transformers make of Phi-3's positions. So the limit is a few times what the format's rounding does
to this model (`lrl.training.rounding`), within fixed bounds. The mean counts and not the largest
difference, which is that of a token that the model takes for all but impossible.
`benchmarks/agreement.py` at tag before-0.3 measures both.

At each later proof (`ProbeTolerance`) it depends on the generator. Two programs differ by rounding:
by 3e-6 nats a token at most in float32, and in bfloat16 by 0.004 for one policy and by 0.02 for the
same one after its training. Weights that are one step old differ by 0.0005 at lr 1e-6 and by 0.04
at lr 1e-4: no fixed limit sees them. So a generator's own noise is the measure. It is known
wherever a probe shows that the generator holds the policy's weights: at its first proof, and again
whenever the policy has moved so far that the limit would have caught a generator that stayed
behind. So it never takes the distance of old weights for noise.

Weights that did not arrive at all are seen sooner: in 720 real updates in bfloat16, of lr 1e-6 to
1e-4, at least 42 of 46 tokens got another log-prob, and without an update none did, also in a busy
batch. `benchmarks/probe_noise.py` at tag before-0.3 measures all of this.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

from lrl.training.rounding import UNIT, Rounded

MAX_TOLERANCE_NATS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25, "quantised": 0.5}
"""Largest mean difference in nats per token, for any model; from the most exact format to the
least. A tensor that is missing made 0.75 or more."""
MIN_TOLERANCE_NATS = {"float32": 3e-4, "float16": 5e-4, "bfloat16": 2e-3, "quantised": 5e-3}
"""A difference that is never held against a generator, however little its model rounds."""
TOLERATED_ROUNDINGS = 4.0
"""How many times the rounding of its model a program may be off: real ones were off by 0.8 to 1.2
times."""
TOLERATED_NOISES = 5.0
"""How many times its noise a generator may be off. Two measurements of noise differed by 2.7 times
at most."""
# The generator is free to round a smaller move away, as it does where a token is all but certain.
MIN_MOVE_NOISES = 0.01
"""By how much of a generator's noise the policy's log-prob of a token must have moved, so that an
unchanged one of the generator tells something."""
MIN_MOVE_NATS = 1e-5
"""The same in nats, at least: twenty times what a float32 log-prob resolves."""
MIN_CHANGED_TOKENS = 16
"""How many such tokens it takes to find weights that did not arrive."""
FIRST_PART_TOKENS = 64
"""Tokens in the first part of a long text, and the least in any; each further part is three times
as long as all before it."""
QUANTISED_WORDS = ("fp8", "int", "nvfp4", "turboquant")
"""Words in the value of `kv-cache-dtype` that stand for eight bits and less."""


def less_exact(*formats: str) -> str:
    """Returns the least exact of number formats; `quantised` stands for all of eight bits and
    less."""
    return max(formats, key=list(MAX_TOLERANCE_NATS).index)


def format_of(settings: Any) -> str:
    """Returns the number format in which a generator computes, from its settings
    (`ServerSettings`)."""
    options = {
        name.strip("-").replace("_", "-"): str(value) for name, value in settings.extra_args.items()
    }
    if settings.quantization or any(
        word in options.get("kv-cache-dtype", "") for word in QUANTISED_WORDS
    ):
        return "quantised"
    return str(settings.dtype)


def rounds_as(dtype: str) -> Rounded | None:
    """Returns the format whose rounding is measured on the model; None for one that has a fixed
    limit alone."""
    return next((known for known in UNIT if known == dtype), None)


def rounding_tolerance(dtype: str, spread: float | None) -> float:
    """Returns the largest mean difference in nats per token.

    Args:
        dtype: The less exact format of the two programs.
        spread: Mean difference that the format's rounding makes of the model's log-probs, in nats
            per token; None if it is not known.
    """
    if spread is None:
        return MAX_TOLERANCE_NATS[dtype]
    return _bounded(dtype, TOLERATED_ROUNDINGS * spread)


def parts(count: int) -> Iterator[slice]:
    """Yields the parts of a text in which the mean is compared: what differs near its end would be
    lost in the whole."""
    start, end = 0, FIRST_PART_TOKENS
    while end + FIRST_PART_TOKENS <= count:
        yield slice(start, end)
        start, end = end, 4 * end
    yield slice(start, count)


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the mean absolute difference of two equally long lists."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


class ProbeTolerance:
    """The tolerance of one generator, from its earlier probes.

    Args:
        dtype: The less exact of the policy's and the generator's number formats.
        spread: What its rounding does to the policy's log-probs at the first proof, in nats per
            token; None if it is not known.
    """

    def __init__(self, dtype: str, spread: float | None = None) -> None:
        self.noise: float | None = None
        """Mean difference in nats a token when it was last measured; None before the first
        verification."""
        self._dtype = dtype
        self._first = rounding_tolerance(dtype, spread)
        self._measured: list[float] = []  # the policy's log-probs then
        # The log-probs of policy and generator when the policy had last moved.
        self._policy_before: list[float] = []
        self._found_before: list[float] = []

    @property
    def limit(self) -> float:
        """Largest mean difference in nats a token."""
        if self.noise is None:
            return self._first
        return _bounded(self._dtype, TOLERATED_NOISES * self.noise)

    def fault(self, policy: Sequence[float], found: Sequence[float]) -> str | None:
        """Compares the log-probs of the same tokens by the policy and by the generator.

        Returns:
            What speaks against the generator, which then must not be asked again; None if nothing
                does.
        """
        difference, limit = mean_difference(policy, found), self.limit
        if not difference <= limit:  # NaN, too
            return (
                f"the probe's log-probs are off by {difference:.3g} nats a token, and {limit:.2g} "
                "is allowed"
            )
        moved = [] if self.noise is None else self._moved(policy)
        has_moved = sum(moved) >= MIN_CHANGED_TOKENS
        if has_moved and not self._has_changed(found, moved):
            return (
                f"the {sum(moved)} log-probs that should have changed are those of the weights "
                "before"
            )
        if has_moved or self.noise is None:
            self._policy_before = list(policy)
            self._found_before = list(found)
        # Twice the limit: one that old weights would not pass.
        if self.noise is None or mean_difference(policy, self._measured) >= 2 * limit:
            self.noise = difference
            self._measured = list(policy)
        return None

    def _moved(self, policy: Sequence[float]) -> list[bool]:
        """Returns for which tokens the policy's log-prob has moved so far that the generator's must
        have moved, too."""
        least = max(MIN_MOVE_NATS, MIN_MOVE_NOISES * (self.noise or 0.0))
        pairs = zip(policy, self._policy_before, strict=True)
        return [abs(now - then) >= least for now, then in pairs]

    def _has_changed(self, found: Sequence[float], moved: Sequence[bool]) -> bool:
        pairs = zip(found, self._found_before, strict=True)
        return any(now != then for now, then in compress(pairs, moved))


def _bounded(dtype: str, difference: float) -> float:
    return min(MAX_TOLERANCE_NATS[dtype], max(MIN_TOLERANCE_NATS[dtype], difference))

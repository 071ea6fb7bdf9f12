"""The tolerance of a probe: how far a generator's log-probs may be from the policy's with the same
weights.

Two programs differ by rounding: by 3e-6 nats a token at most in float32, and in bfloat16 by 0.005
for one policy and by 0.03 for the same one after its training. Weights that are one step old differ
by 0.0005 at lr 1e-6 and by 0.04 at lr 1e-4: no fixed limit sees them. So a generator's own noise is
the measure. It is known wherever a probe shows that the generator holds the policy's weights: at
its first proof, whose limit knows the model (`lrl.weights.agreement`), and again whenever the
policy has moved so far that the limit would have caught a generator that stayed behind. So it never
takes the distance of old weights for noise.

Weights that did not arrive at all are seen sooner: in 720 real updates in bfloat16, of lr 1e-6 to
1e-4, at least 37 of 46 tokens got another log-prob, and without an update none did, also in a busy
batch. `benchmarks/probe_noise.py` measures all of this.
"""

from collections.abc import Sequence
from itertools import compress

from lrl.weights.agreement import LARGEST, LEAST, mean_difference, tolerance

TIMES = 5.0
"""How many times its noise a generator may be off. Two measurements of noise differed by 2.7 times
at most."""
MOVED = 0.01
"""By how much of a generator's noise the policy's log-prob of a token must have moved, so that an
unchanged one tells something; the generator is free to round a smaller move away, as it does where
a token is all but certain..."""
MOVED_AT_LEAST = 1e-5
"""...and by how much in nats, which is twenty times what a float32 log-prob resolves."""
TELLING = 16
"""How many such tokens it takes."""


class Yardstick:
    """The tolerance of one generator, from its earlier probes.

    Args:
        dtype: The less exact of the policy's and the generator's number formats
            (`lrl.weights.agreement`).
        spread: What its rounding does to the policy's log-probs at the first proof, in nats per
            token; None if it is not known.
    """

    def __init__(self, dtype: str, spread: float | None = None) -> None:
        self.noise: float | None = None
        """Mean difference in nats a token when it was last measured; None before the first
        verification."""
        self._first = tolerance(dtype, spread)
        self._largest = LARGEST[dtype]
        self._least = LEAST[dtype]
        self._measured: list[float] = []  # the policy's log-probs then
        # Both log-probs when the policy had last moved.
        self._before: tuple[list[float], list[float]] = (
            [],
            [],
        )

    @property
    def limit(self) -> float:
        """Largest mean difference in nats a token."""
        return (
            self._first
            if self.noise is None
            else min(self._largest, max(self._least, TIMES * self.noise))
        )

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
        if self.noise is None:
            self._before = list(policy), list(found)
        elif (moved := self._moved(policy)).count(True) >= TELLING:
            if all(
                now == then
                for now, then in compress(zip(found, self._before[1], strict=True), moved)
            ):
                return (
                    f"the {moved.count(True)} log-probs that should have changed are those of the "
                    "weights before"
                )
            self._before = list(policy), list(found)
        # Twice the limit: one that old weights would not pass.
        if self.noise is None or mean_difference(policy, self._measured) >= 2 * limit:
            self.noise = difference
            self._measured = list(policy)
        return None

    def _moved(self, policy: Sequence[float]) -> list[bool]:
        """Returns for which tokens the policy's log-prob has moved so far that the generator's must
        have moved, too."""
        least = max(MOVED_AT_LEAST, MOVED * (self.noise or 0.0))
        return [abs(now - then) >= least for now, then in zip(policy, self._before[0], strict=True)]

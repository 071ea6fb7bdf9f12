"""LlamaRL's two problems: the step time of a synchronous and of an asynchronous design under memory constraints.

The paper (2505.24034) is known to lrl through its abstract and through others; that asynchrony splits one shared memory
constraint into two is its statement, the problems below are our reconstruction of it, and so is the theorem's wording.

G devices, B samples a step, M bytes a device. A model is spread over m devices; tau_t(b, m) and tau_g(b, m) are the
seconds of one sample in training and in generation by m devices that work on b samples at a time. W(m) + a(m) b bytes
are needed on the m devices together.

    synchronous    min over m, b_t, b_g               (B m / G) (tau_t(b_t, m) + tau_g(b_g, m))
                   subject to                         W_t + W_g + a_t b_t + a_g b_g <= m M

    asynchronous   min over theta, m_t, m_g, b_t, b_g max( B m_t tau_t(b_t, m_t) / (theta G),
                                                           B m_g tau_g(b_g, m_g) / ((1 - theta) G) )
                   subject to                         W_t + a_t b_t <= m_t M   and   W_g + a_g b_g <= m_g M

Theorem. Let tau_t and tau_g be positive and not growing in b, and let the synchronous problem be feasible. Then

    (i)  T_async <= T_sync;
    (ii) T_async < T_sync if at a synchronous optimum the shared constraint binds (no b can be raised alone) and tau_t
         or tau_g falls strictly in b there, with a_t, a_g, W_t, W_g all above 0.

Proof. Write X = min m tau_t and Y = min m tau_g over each side's own constraint. At theta = X / (X + Y) both terms of
the maximum are (B / G)(X + Y), and no theta makes the larger one smaller, so T_async = (B / G)(X + Y). A point
(m, b_t, b_g) of the synchronous problem satisfies each side's own constraint, so X <= m tau_t(b_t, m) and
Y <= m tau_g(b_g, m): (i). In (ii) each side alone may fill m M, of which the other side took W + a b > 0, so the b of
the side that falls strictly can be raised: its X or Y is strictly below that of the synchronous point.

Assumed, and not so in a run: theta is any number between 0 and 1, generation is a steady flow (no longest response),
and moving weights costs nothing. `search.py` has none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

POINTS = 20
"""Divisions of the shared memory that are tried before the best one is refined."""
REFINEMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Training or generation, spread over m devices."""

    fixed: Callable[[int], float]
    """W(m): bytes on the m devices together, whatever the batch."""
    per_sample: Callable[[int], float]
    """a(m): bytes on the m devices together for each sample of the batch."""
    sample_s: Callable[[float, int], float]
    """tau(b, m): seconds of one sample by m devices that work on b at a time."""

    def device_seconds(self, room: float, m: int) -> float:
        """m tau at the largest batch in `room` bytes on each of m devices; infinite if not one sample fits."""
        batch = (room * m - self.fixed(m)) / self.per_sample(m)
        return m * self.sample_s(batch, m) if batch >= 1 else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One instance of both problems."""

    devices: float
    """G."""
    samples: float
    """B."""
    memory: float
    """M, bytes a device."""
    sizes: Sequence[int]
    """The m there are."""
    trainer: Side
    generator: Side

    def synchronous_s(self) -> float:
        """The synchronous optimum in seconds a step; infinite if nothing fits."""
        return self.samples / self.devices * min(self._shared(m) for m in self.sizes)

    def asynchronous_s(self) -> float:
        """The asynchronous optimum in seconds a step; infinite if nothing fits."""
        return self.samples / self.devices * (self._alone(self.trainer) + self._alone(self.generator))

    def _alone(self, side: Side) -> float:
        """X or Y: the fewest device-seconds a sample takes with a device's whole memory."""
        return min(side.device_seconds(self.memory, m) for m in self.sizes)

    def _shared(self, m: int) -> float:
        """The fewest device-seconds of both sides at one m. The memory that neither W takes is divided between the
        batches: on a grid, then finer around its best point, as both sides' seconds need not be convex in it."""
        fixed = (self.trainer.fixed(m) + self.generator.fixed(m)) / m
        free = self.memory - fixed
        if free <= 0:
            return float("inf")

        def seconds(share: float) -> float:
            return self.trainer.device_seconds(
                self.trainer.fixed(m) / m + share * free, m
            ) + self.generator.device_seconds(self.generator.fixed(m) / m + (1 - share) * free, m)

        best = min(range(1, POINTS), key=lambda i: seconds(i / POINTS)) / POINTS
        low, high = best - 1 / POINTS, best + 1 / POINTS
        for _ in range(REFINEMENTS):
            third = (high - low) / 3
            if seconds(low + third) <= seconds(high - third):
                high -= third
            else:
                low += third
        return min(seconds(best), seconds((low + high) / 2))

"""LlamaRL's two problems: the step time of a synchronous and of an asynchronous design under memory
constraints.

The paper (2505.24034) is known to lrl through its abstract and through others. That asynchrony
splits one shared memory constraint into two is its statement; the problems below and the theorem's
wording are our reconstruction.

G devices, B samples a step, M bytes a device. A model is spread over m devices; tau_t(b, m) and
tau_g(b, m) are the seconds of one sample in training and in generation by m devices that work on b
samples at a time. W(m) + a(m) b bytes are needed on the m devices together.

    synchronous    min over m, b_t, b_g               (B m / G) (tau_t(b_t, m) + tau_g(b_g, m))
                   subject to                         W_t + W_g + a_t b_t + a_g b_g <= m M

    asynchronous   min over theta, m_t, m_g, b_t, b_g max( B m_t tau_t(b_t, m_t) / (theta G),
                                                           B m_g tau_g(b_g, m_g) / ((1 - theta) G) )
                   subject to                         W_t + a_t b_t <= m_t M   and   W_g + a_g b_g <= m_g M

Theorem. Let tau_t and tau_g be positive and not growing in b, and let the synchronous problem be
feasible. Then

    (i)  T_async <= T_sync;
    (ii) T_async < T_sync if at a synchronous optimum the shared constraint binds (no b can be raised alone) and tau_t
         or tau_g falls strictly in b there, with a_t, a_g, W_t, W_g all above 0.

Proof. Write X = min m tau_t and Y = min m tau_g over each side's own constraint. At theta = X / (X
+ Y) both terms of the maximum are (B / G)(X + Y), and no theta makes the larger one smaller, so
T_async = (B / G)(X + Y). A point (m, b_t, b_g) of the synchronous problem satisfies each side's own
constraint, so X <= m tau_t(b_t, m) and Y <= m tau_g(b_g, m): (i). In (ii) each side alone may fill
m M, of which the other side took W + a b > 0, so the b of the side that falls strictly can be
raised: its X or Y is strictly below that of the synchronous point.

Assumed, and not so in a run: theta is any number between 0 and 1, generation is a steady flow (no
longest response), and moving weights costs nothing. `search.py` assumes none of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lrl.planning.planner import memory
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.roofline import RooflineGenerator, RooflineTrainer

POINTS = 20
"""Divisions of the shared memory that are tried before the best one is refined."""
REFINEMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Training or generation, spread over m devices."""

    fixed: Callable[[int], float]
    """W(m): bytes on the m devices together with an empty batch."""
    per_sample: Callable[[int], float]
    """a(m): bytes on the m devices together for each sample of the batch."""
    sample_s: Callable[[float, int], float]
    """tau(b, m): seconds of one sample by m devices that work on b at a time."""

    def device_seconds(self, room: float, m: int) -> float:
        """Returns m tau at the largest batch in `room` bytes on each of m devices; infinite if no
        sample fits."""
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
    """Possible m."""
    trainer: Side
    generator: Side

    def synchronous_s(self) -> float:
        """Returns the synchronous optimum in seconds a step; infinite if nothing fits."""
        return self.samples / self.devices * min(self._shared(m) for m in self.sizes)

    def asynchronous_s(self) -> float:
        """Returns the asynchronous optimum in seconds a step; infinite if nothing fits."""
        x = min(self.trainer.device_seconds(self.memory, m) for m in self.sizes)
        y = min(self.generator.device_seconds(self.memory, m) for m in self.sizes)
        return self.samples / self.devices * (x + y)

    def _shared(self, m: int) -> float:
        """Returns the fewest device-seconds of both sides at one m.

        The memory besides both W is divided between the batches: on a grid, then finer around its
        best point, as the seconds need not be convex in the share.
        """
        trainer, generator = self.trainer, self.generator
        free = self.memory - (trainer.fixed(m) + generator.fixed(m)) / m
        if free <= 0:
            return float("inf")

        def seconds(share: float) -> float:
            training_s = trainer.device_seconds(trainer.fixed(m) / m + share * free, m)
            return training_s + generator.device_seconds(
                generator.fixed(m) / m + (1 - share) * free, m
            )

        best = min(range(1, POINTS), key=lambda i: seconds(i / POINTS)) / POINTS
        low, high = best - 1 / POINTS, best + 1 / POINTS
        for _ in range(REFINEMENTS):
            third = (high - low) / 3
            if seconds(low + third) <= seconds(high - third):
                high -= third
            else:
                low += third
        return min(seconds(best), seconds((low + high) / 2))


def llamarl_problem(layouts: Layouts, cluster: Cluster) -> Problem:
    """Returns the problem with the roofline's tau, m a power of two, bfloat16, and samples of mean
    length."""
    return Problem(
        devices=cluster.count,
        samples=layouts.workload.samples,
        memory=memory.usable(cluster.device),
        sizes=layouts.divisions(cluster.count),
        trainer=_trainer(layouts, cluster),
        generator=_generator(layouts, cluster),
    )


def _trainer(layouts: Layouts, cluster: Cluster) -> Side:
    """Returns training's side: m devices hold one copy of the state (tensor parallel in a node,
    FSDP over nodes)."""
    shape, work = layouts.shape, layouts.workload
    tokens = work.tokens / work.samples
    squared = work.tokens_squared / work.samples

    def tp(m: int) -> int:
        return min(m, cluster.devices_per_node)

    def sample_s(batch: float, m: int) -> float:
        costs = RooflineTrainer(shape=shape, cluster=cluster, devices=m, tp=tp(m))
        return costs.micro_batch_s(batch * tokens, batch * squared) / batch

    return Side(
        fixed=lambda m: m * memory.training(shape, m, tp(m)).fixed,
        per_sample=lambda m: tp(m) * memory.training(shape, m, tp(m)).per_token * tokens,
        sample_s=sample_s,
    )


def _generator(layouts: Layouts, cluster: Cluster) -> Side:
    """Returns generation's side: m devices are one generator with tensor parallelism over all of
    them."""
    shape, work = layouts.shape, layouts.workload

    def sample_s(batch: float, m: int) -> float:
        costs = RooflineGenerator(shape=shape, cluster=cluster, tp=m)
        prompts = costs.prefill_s(batch * work.prompt_tokens / work.responses)
        return (
            work.lengths.mean * costs.decode_s(batch, batch * work.live_tokens) + prompts
        ) / batch

    return Side(
        fixed=lambda m: m * memory.generation(shape, m, "bf16").fixed,
        per_sample=lambda m: m * memory.generation(shape, m, "bf16").per_token * work.live_tokens,
        sample_s=sample_s,
    )

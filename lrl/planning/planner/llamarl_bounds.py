"""LlamaRL's two problems for a real model and cluster, with the roofline for tau."""

from __future__ import annotations

from lrl.planning.planner import memory
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.layouts import Sides
from lrl.planning.planner.optimisation import Problem, Side
from lrl.planning.planner.roofline import RooflineGenerator, RooflineTrainer


def llamarl_problem(sides: Sides, cluster: Cluster) -> Problem:
    """The problem with m a power of two, bfloat16, and every sample of mean length."""
    return Problem(
        devices=cluster.count,
        samples=sides.workload.samples,
        memory=memory.usable(cluster.device),
        sizes=sides.divisions(cluster.count),
        trainer=_trainer(sides, cluster),
        generator=_generator(sides, cluster),
    )


def _trainer(sides: Sides, cluster: Cluster) -> Side:
    """m devices hold one copy of the state: tensor parallelism in a node, FSDP over nodes."""
    tokens = sides.workload.tokens / sides.workload.samples
    squared = sides.workload.tokens_squared / sides.workload.samples

    def tp(m: int) -> int:
        return min(m, cluster.devices_per_node)

    def sample_s(batch: float, m: int) -> float:
        costs = RooflineTrainer(shape=sides.shape, cluster=cluster, devices=m, tp=tp(m), constants=sides.constants)
        return costs.micro_batch_s(batch * tokens, batch * squared) / batch

    return Side(
        fixed=lambda m: m * memory.training(sides.shape, m, tp(m)).fixed,
        per_sample=lambda m: tp(m) * memory.training(sides.shape, m, tp(m)).per_token * tokens,
        sample_s=sample_s,
    )


def _generator(sides: Sides, cluster: Cluster) -> Side:
    """m devices are one generator with tensor parallelism over all of them."""
    work = sides.workload

    def sample_s(batch: float, m: int) -> float:
        costs = RooflineGenerator(shape=sides.shape, cluster=cluster, tp=m, constants=sides.constants)
        prompts = costs.prefill_s(batch * work.prompt_tokens / work.responses)
        return (work.lengths.mean * costs.decode_s(batch, batch * work.live_tokens) + prompts) / batch

    return Side(
        fixed=lambda m: m * memory.generation(sides.shape, m, "bf16").fixed,
        per_sample=lambda m: m * memory.generation(sides.shape, m, "bf16").per_token * work.live_tokens,
        sample_s=sample_s,
    )

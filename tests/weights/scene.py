"""A pool of generators, the syncs of its weights, and their proofs: what whole syncs are tested
with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool, Prove
from lrl.policy import PolicyModule
from lrl.system.event_loop import LoopThread
from lrl.weights.pool_calls import Failures
from lrl.weights.proof import Proof
from lrl.weights.sync import Sync
from lrl.weights.transport import Transport
from tests.weights.whole_weights import WholeWeights

TOKENS = [5 + (7 * place) % 250 for place in range(64)]
"""Of a proof."""


async def accept(generator: Generator) -> None:
    """A proof that finds nothing wrong."""


def give(sync: Sync, version: int, generators: Sequence[Generator] | None = None) -> Failures:
    """Syncs the pool, or one of these generators; returns those that failed the sync or its
    proof, which are evicted."""
    if generators is not None:
        sync.pool.generators = list(generators)
    failed = sync.sync_now(version)
    failed |= sync.wait()
    sync.finish_sync(failed)
    return failed


class Scene:
    """Generators, and the syncs of their pool; with a `policy` it proves them."""

    def __init__(
        self,
        generators: Sequence[Generator],
        weights: WholeWeights,
        transport: type[Transport],
        policy: PolicyModule | None = None,
        *,
        name: str = "run-0",
        tolerance: float | None = None,
        **settings: Any,
    ) -> None:
        self.loop = LoopThread()
        self.version = 0
        self.weights = weights
        self.policy = policy
        self.tolerance = tolerance
        self.generators = list(generators)
        self.pool = GeneratorPool(list(generators))
        made = transport(weights, name)
        settings = {"deadline_s": 300.0, "silence_s": 300.0} | settings
        self.syncs = Sync(self.pool, self.loop, made, self.make_proof, **settings)

    def make_proof(self, due: list[Generator]) -> Prove:
        if self.policy is None:
            return accept
        return Proof(
            self.policy.prompt_logprobs,
            "float32",
            "float32",
            TOKENS,
            version=self.version,
            tolerance=self.tolerance,
            deadline_s=300.0,
        )

    def close(self) -> None:
        for generator in self.generators:
            self.loop.wait(generator.client.close(), 60.0, "closing")
        self.syncs.close()
        self.weights.close()
        self.loop.close()


@torch.no_grad()
def step(policy: PolicyModule, size: float) -> None:
    """Moves every weight by `size`, up or down."""
    for weight in policy.network.parameters():
        weight += size * torch.randn_like(weight).sign()

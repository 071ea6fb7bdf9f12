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
from lrl.weights.proof import Proof
from lrl.weights.sync import Sync
from lrl.weights.transport import Transport
from tests.weights.whole_weights import WholeWeights

TOKENS = [5 + (7 * place) % 250 for place in range(64)]
"""Of a proof."""


async def accept(generator: Generator) -> None:
    """A proof that finds nothing wrong."""


class Scene:
    """Generators, and the syncs of their pool."""

    def __init__(
        self,
        generators: Sequence[Generator],
        weights: WholeWeights,
        transport: type[Transport],
        name: str = "run-0",
        deadline_s: float = 300.0,
        **settings: Any,
    ) -> None:
        self.loop = LoopThread()
        self.version = 0
        self.weights = weights
        self.generators = list(generators)
        self.pool = GeneratorPool(list(generators))
        deadlines = {"deadline_s": deadline_s, "silence_s": deadline_s}
        made = transport(weights, name)
        self.syncs = Sync(self.pool, self.loop, made, self.make_proof, **deadlines, **settings)

    def make_proof(self, due: list[Generator]) -> Prove:
        return accept

    def close(self) -> None:
        for generator in self.generators:
            self.loop.wait(generator.client.close(), 60.0, "closing")
        self.syncs.close()
        self.weights.staging.close()
        self.loop.close()


@torch.no_grad()
def step(policy: PolicyModule, size: float) -> None:
    """Moves every weight by `size`, up or down."""
    for weight in policy.network.parameters():
        weight += size * torch.randn_like(weight).sign()


class ProvedScene(Scene):
    """The same with a policy that proves them."""

    tolerance: float | None = None

    def __init__(self, policy: PolicyModule, *scene: Any, **settings: Any) -> None:
        self.policy = policy
        super().__init__(*scene, **settings)

    def make_proof(self, due: list[Generator]) -> Prove:
        return Proof(
            self.policy.prompt_logprobs,
            "float32",
            "float32",
            TOKENS,
            version=self.version,
            tolerance=self.tolerance,
            deadline_s=300.0,
        )

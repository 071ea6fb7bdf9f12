"""A pool of generators, the syncs of its weights, and their proofs: what whole syncs are tested
with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool, Prove
from lrl.system.event_loop import LoopThread
from lrl.training.rounding import Rounded, rounded_weights, rounding_errors
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
        made: Any = (self.pool, self.loop, transport, weights, lambda due: self.make_proof(due))
        self.syncs = Sync(*made, name=name, **deadlines, **settings)

    def make_proof(self, due: list[Generator]) -> Prove:
        return accept

    def close(self) -> None:
        for generator in self.generators:
            self.loop.wait(generator.client.close(), 60.0, "closing")
        self.syncs.close()
        self.weights.staging.close()
        self.loop.close()


class PolicyInMemory:
    """A policy as far as a proof asks for it: the model in a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def prompt_logprobs(
        self,
        tokens: list[int],
        rounded_as: Rounded | None = None,
        weights_as: Rounded | None = None,
    ) -> list[float]:
        errors = nullcontext() if rounded_as is None else rounding_errors(self.network, rounded_as)
        weights = nullcontext() if weights_as is None else rounded_weights(self.network, weights_as)
        with errors, weights:
            logits = self.network(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    @torch.no_grad()
    def step(self, size: float) -> None:
        """Moves every weight by `size`, up or down."""
        for weight in self.network.parameters():
            weight += size * torch.randn_like(weight).sign()


class ProvedScene(Scene):
    """The same with a policy that proves them."""

    policy: Any
    tolerance: float | None = None

    def __init__(self, policy: PolicyInMemory, *scene: Any, **settings: Any) -> None:
        self.policy = policy
        super().__init__(*scene, **settings)

    def make_proof(self, due: list[Generator]) -> Prove:
        return Proof(
            self.policy.prompt_logprobs,
            "float32",
            TOKENS,
            due,
            version=self.version,
            tolerance=self.tolerance,
            deadline_s=300.0,
        )

"""Responses of drawn lengths, for timing: a policy that learns would change its own lengths.

Every response is written, past end tokens, to exactly the length that is drawn for its group and
its place in it; below the run's limit it counts as ended and not as cut. Responses of a group with
one length share a request, the others have one each. A simulation with the same lengths has
the same responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lrl.generators import generator
from lrl.generators.client import GeneratorClient
from lrl.planning.workload import Lognormal
from lrl.types import Rollout, Sampling


def equal(tokens: int = 64) -> Lognormal:
    return Lognormal(tokens, 0.0, tokens)


def long_tailed(seed: int = 0, prompt_share: float = 0.0) -> Lognormal:
    """Returns lognormal lengths, mean 64 after the cut, at most 512 tokens; of 128 responses the
    longest has about 460."""
    return Lognormal(40, 1.0, 512, prompt_share=prompt_share, seed=seed)


@contextmanager
def forced(lengths: Lognormal, prompts: int, first: int = 0) -> Iterator[None]:
    """Forces these lengths on the responses of a run; enter it before the run starts. Group i
    answers prompt i % prompts with the lengths of group `first` + i."""
    drawn: dict[int, int] = {}  # id(rollout) -> tokens; a half-written one comes back alone

    class Client(GeneratorClient):
        async def write(  # type: ignore[override]
            self, ids: list[int], rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
        ) -> None:
            if not rollouts[0].token_ids:
                group = how["priority"]
                tokens = lengths.of(group % prompts, first + group, len(rollouts))
                drawn.update(zip(map(id, rollouts), tokens, strict=True))
            alike: dict[int, list[Rollout]] = {}
            for rollout in rollouts:
                alike.setdefault(drawn[id(rollout)], []).append(rollout)
            write, temperature = super().write, sampling.temperature
            exact = {
                tokens: Sampling(max_tokens=tokens, temperature=temperature) for tokens in alike
            }
            parts = (write(ids, part, exact[tokens], **how) for tokens, part in alike.items())
            await asyncio.gather(*parts)
            for rollout in rollouts:
                if rollout.finished and drawn[id(rollout)] < sampling.max_tokens:
                    rollout.finish_reason = "stop"

    whole, generator.GeneratorClient = generator.GeneratorClient, Client  # type: ignore[misc]
    try:
        yield
    finally:
        generator.GeneratorClient = whole  # type: ignore[misc]

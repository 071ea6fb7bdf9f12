"""Generators without servers: a request waits until the test writes its responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lrl.generators.generator import Generator
from lrl.types import Rollout, Sampling
from tests.generators import model_fleet

PLACES = 8
"""Responses that one generator writes at once."""


@dataclass(eq=False)
class Asked:
    """A request at a generator."""

    group: int
    rollouts: Sequence[Rollout]
    ended: Callable[[], None]
    done: asyncio.Future[None]
    max_tokens: int
    """Of a response."""


class ManualClient:
    """A model of a generator's client: a request waits until the test writes its responses."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.last_token_at = 0.0

    async def write(
        self,
        prompt_ids: list[int],
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        *,
        priority: int,
        **how: Any,
    ) -> None:
        assert not any(rollout.finished for rollout in rollouts), (
            "a finished response is requested again"
        )
        assert all(len(rollout.token_ids) < sampling.max_tokens for rollout in rollouts), (
            "max_tokens of 0 is requested"
        )
        asked = Asked(
            priority,
            rollouts,
            how["ended"],
            done=asyncio.get_running_loop().create_future(),
            max_tokens=sampling.max_tokens,
        )
        self.requests.append(asked)
        try:
            await asked.done
        finally:
            self.requests.remove(asked)

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        """Ignores pause and resume: only the test writes."""


def make_generator() -> Generator:
    generator = model_fleet.make_generator(0, PLACES)
    generator.client = ManualClient()  # type: ignore[assignment]
    return generator

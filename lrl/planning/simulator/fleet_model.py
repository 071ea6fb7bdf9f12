"""A model of a fleet, for the real controller: the real desk and dispatch in front of models of generators.

A generator that fails, a probe and a deadline are not modelled. An response's tokens are there when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lrl.planning.costs import GeneratorCosts
from lrl.planning.profiling.timeline import GeneratorRecord
from lrl.planning.simulator.generator_model import ModelGenerator
from lrl.planning.simulator.length_sampling import LengthSampler, SimulatedResponse, fill
from lrl.routing.dispatch import DispatchPolicy, Request
from lrl.routing.request_queue import RequestQueue
from lrl.types import Prompt, Rollout, Sampling


class ModelFleet:
    """Fulfils `lrl.rollouts.controller.ResponseWriter`.

    Args:
        costs: Of each generator.
        capacity: Answers a generator writes at once.
        lengths: Of the responses.
        dispatch: Which generator answers which prompt, and in which order.
        record: Told of each stretch of work of each generator; None for nobody.
    """

    def __init__(
        self,
        costs: Sequence[GeneratorCosts],
        capacity: int,
        lengths: LengthSampler,
        dispatch: DispatchPolicy,
        record: Callable[[GeneratorRecord], None] | None = None,
    ) -> None:
        self.generators = [ModelGenerator(one, capacity, record) for one in costs]
        self.requests = RequestQueue(dispatch, self._serving)
        self.lengths = lengths
        self._arrivals = 0

    def _serving(self) -> list[ModelGenerator]:
        return [generator for generator in self.generators if generator.serving]

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, *, priority: int, due: int, deadline_s: float
    ) -> None:
        """See `ResponseWriter.generate`; the rollouts have no token yet."""
        request = Request(prompt, len(rollouts), priority, due)
        written = False
        while not written:
            generator = await self.requests.enter(request, rollouts)
            try:
                if written := generator.serving:  # the door may have closed since it was chosen
                    await self._write(generator, request, rollouts)
            finally:
                self.requests.leave(generator, request)

    async def _write(self, generator: ModelGenerator, request: Request, rollouts: Sequence[Rollout]) -> None:
        whole = asyncio.get_running_loop().create_future()
        left, prompt, priority = len(rollouts), request.prompt, request.priority

        def ended(response: SimulatedResponse) -> None:
            nonlocal left
            left -= 1
            self.requests.release(generator, request)
            if not left:
                whole.set_result(None)

        lengths = self.lengths.of(prompt.id, priority, len(rollouts))
        responses = [
            SimulatedResponse(len(prompt.token_ids), length, (priority, self._arrive()), ended) for length in lengths
        ]
        generator.write(responses)
        await whole
        for rollout, response in zip(rollouts, responses, strict=True):
            fill(rollout, response.versions)

    def _arrive(self) -> int:
        self._arrivals += 1
        return self._arrivals

    async def sync(self, version: int) -> float:
        """Pause all, have each hold `version` and write on; the longest time in seconds that one stood still."""
        loop = asyncio.get_running_loop()

        async def one(generator: ModelGenerator) -> float:
            await generator.pause()
            stood_from = loop.time()
            await asyncio.sleep(generator.costs.sync_pause_s())
            return stood_from

        stood_from = await asyncio.gather(*map(one, self.generators))
        for generator in self.generators:
            generator.resume(version)
        self.requests.send_soon()
        return loop.time() - min(stood_from)

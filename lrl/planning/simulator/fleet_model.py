"""A model of a fleet for the real controller: the real request queue and dispatch before models of
generators.

Failures of generators, probes and deadlines are not modelled. A response's tokens appear at its
end.
"""

import asyncio
from collections.abc import Callable, Sequence

from lrl.planning.costs import GeneratorCosts
from lrl.planning.profiling.timeline import GeneratorRecord
from lrl.planning.simulator.generator_model import ModelGenerator, SimulatedResponse
from lrl.planning.simulator.length_sampling import LengthSampler, fill
from lrl.routing.dispatch import DispatchPolicy, Request
from lrl.routing.request_queue import RequestQueue
from lrl.types import Prompt, Rollout, Sampling


class ModelFleet:
    """ResponseWriter responses for the controller (`lrl.rollouts.controller.ResponseWriter`).

    Each generator writes at most `capacity` at once; `record` is called with each interval of its
    work.
    """

    def __init__(
        self,
        costs: Sequence[GeneratorCosts],
        capacity: int,
        lengths: LengthSampler,
        dispatch: DispatchPolicy,
        record: Callable[[GeneratorRecord], None] = lambda record: None,
    ) -> None:
        self.generators = [ModelGenerator(one, capacity, record) for one in costs]
        self.requests = RequestQueue(
            dispatch, lambda: [one for one in self.generators if one.serving]
        )
        self.lengths = lengths
        self._arrivals = 0

    async def generate(
        self,
        prompt: Prompt,
        rollouts: list[Rollout],
        sampling: Sampling,
        *,
        priority: int,
        due: int,
        deadline_s: float,
    ) -> None:
        """See `ResponseWriter.generate`; the rollouts have no token yet."""
        request = Request(prompt, len(rollouts), priority, due)
        written = False
        while not written:
            generator = await self.requests.enter(request, rollouts)
            try:
                if written := generator.serving:  # it may have closed since the dispatch
                    await self._write(generator, request, rollouts)
            finally:
                self.requests.leave(generator, request)

    async def _write(
        self, generator: ModelGenerator, request: Request, rollouts: Sequence[Rollout]
    ) -> None:
        whole = asyncio.get_running_loop().create_future()
        left, prompt, priority = len(rollouts), request.prompt, request.priority

        def ended(response: SimulatedResponse) -> None:
            nonlocal left
            left -= 1
            self.requests.release(generator, request)
            if not left:
                whole.set_result(None)

        responses = []
        for length in self.lengths.of(prompt.id, priority, len(rollouts)):
            self._arrivals += 1
            responses.append(
                SimulatedResponse(len(prompt.token_ids), length, (priority, self._arrivals), ended)
            )
        generator.write(responses)
        await whole
        for rollout, response in zip(rollouts, responses, strict=True):
            fill(rollout, response.versions)

    async def sync(self, version: int) -> float:
        """Pauses all generators, gives them `version` and resumes them; returns the longest pause
        in seconds."""
        loop = asyncio.get_running_loop()

        async def one(generator: ModelGenerator) -> float:
            await generator.pause()
            paused_at = loop.time()
            await asyncio.sleep(generator.costs.sync_pause_s())
            return paused_at

        paused_at = await asyncio.gather(*map(one, self.generators))
        for generator in self.generators:
            generator.resume(version)
        self.requests.send_soon()
        return loop.time() - min(paused_at)

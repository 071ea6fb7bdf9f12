"""A model of a fleet for the real controller: the real request queue and dispatch before models of
generators.

Failures of generators, probes and deadlines are not modelled. A response's tokens appear at its
end. A request for a later turn of an episode is told by the tokens of its prompt
(`lrl.planning.simulator.episode_model`).
"""

import asyncio
from collections.abc import Callable, Sequence

from lrl.planning.costs import GeneratorCosts
from lrl.planning.profiling.timeline import GeneratorRecord
from lrl.planning.simulator.generator_model import ModelGenerator, SimulatedResponse
from lrl.planning.simulator.length_sampling import LengthSampler
from lrl.planning.simulator.run_lengths import RunLengths, fill
from lrl.routing.dispatch import DispatchPolicy, Home, Request
from lrl.routing.request_queue import RequestQueue
from lrl.types import Prompt, Rollout, Sampling


class ModelFleet:
    """ResponseWriter responses for the controller (`lrl.rollouts.controller.ResponseWriter`).

    Each generator writes at most `capacity` at once; `record` is called with each interval of its
    work. Without `prefix_cache` a later turn reads its whole episode; with `keeps_cache` the cache
    outlives a sync.
    """

    def __init__(
        self,
        costs: Sequence[GeneratorCosts],
        capacity: int,
        lengths: LengthSampler,
        dispatch: DispatchPolicy,
        record: Callable[[GeneratorRecord], None] = lambda record: None,
        *,
        prefix_cache: bool = True,
        keeps_cache: bool = False,
    ) -> None:
        self.generators = [ModelGenerator(one, capacity, record) for one in costs]
        for generator in self.generators:
            generator.keeps_cache = keeps_cache
        self.requests = RequestQueue(
            dispatch, lambda: [one for one in self.generators if one.serving]
        )
        self.lengths = lengths
        self.prefix_cache = prefix_cache
        self.later_turns = 0
        """Requests for a later turn of an episode."""
        self.reused = 0
        """Those of them whose generator still had the episode so far."""
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
        verified: Callable[[], None] = lambda: None,
        home: Home | None = None,
    ) -> None:
        """See `GeneratorPool.generate`; the rollouts have no token yet."""
        home = home or Home()
        written = False
        while not written:
            request = Request(prompt, len(rollouts), priority, due, home=home.generator)
            generator = await self.requests.enter(request, rollouts)
            try:
                if written := generator.serving:  # it may have closed since the dispatch
                    home.generator = generator
                    await self._write(generator, request, rollouts, verified)
            finally:
                self.requests.leave(generator, request)

    async def _write(
        self,
        generator: ModelGenerator,
        request: Request,
        rollouts: Sequence[Rollout],
        verified: Callable[[], None],
    ) -> None:
        whole = asyncio.get_running_loop().create_future()
        rollout_of: dict[SimulatedResponse, Rollout] = {}

        def ended(response: SimulatedResponse) -> None:
            fill(rollout_of.pop(response), response.versions, token=-1 - generator.mark)
            self.requests.release(generator, request)
            verified()
            if not rollout_of:
                whole.set_result(None)

        for length, rollout in zip(self._lengths(request), rollouts, strict=True):
            self._arrivals += 1
            response = SimulatedResponse(
                len(request.prompt.token_ids), length, (request.priority, self._arrivals), ended
            )
            rollout_of[response] = rollout
        if self._is_later_turn(request.prompt):
            (response,) = rollout_of
            response.shares_prompt = False
            response.cached = self._cached(generator, request)
        generator.write(list(rollout_of))
        await whole

    def _lengths(self, request: Request) -> list[int]:
        prompt = request.prompt
        if self._is_later_turn(prompt):
            return [prompt.token_ids[-1]]  # of the observation
        return self.lengths.of(prompt.id, request.priority, request.responses)

    @staticmethod
    def _is_later_turn(prompt: Prompt) -> bool:
        return isinstance(prompt.token_ids, RunLengths) and len(prompt.token_ids.runs) > 1

    def _cached(self, generator: ModelGenerator, request: Request) -> int:
        """Returns the tokens of a later turn's prompt that its generator has in its cache: all but
        the observation, or none."""
        *_, (token, _), (_, observation) = request.prompt.token_ids.runs  # type: ignore[attr-defined]
        self.later_turns += 1
        if not self.prefix_cache or generator is not request.home:
            return 0
        if not generator.holds(-1 - token):
            return 0
        self.reused += 1
        return len(request.prompt.token_ids) - observation

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

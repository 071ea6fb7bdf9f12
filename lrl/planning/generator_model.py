"""A model of one generator: continuous batching, from event to event.

All responses of the batch get a token per decode step, so between two changes of the batch k steps
take k / 2 * (seconds of the first + seconds of the last): exact for costs that are linear in the
context, and else the trapezoidal rule. One event may stand for thousands of tokens. A change waits
for the end of the current decode step, as in vLLM.

Responses that join are prefilled first, while the others wait (vLLM mixes both; the work is the
same). When keys and values no longer fit, the response with the lowest priority is preempted, and
prefilled again with all its tokens when there is room, as in vLLM.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from lrl.planning.costs import GeneratorCosts
from lrl.rollouts.timeline import GeneratorRecord
from lrl.routing.dispatch import GeneratorLoad, Request

HEADROOM = 0.01
"""Share of the KV cache kept free at a join, which would else preempt at once."""


@dataclass(eq=False, slots=True)
class SimulatedResponse:
    """A response that is being written."""

    prompt_tokens: int
    length: int
    order: tuple[int, int]
    """(group, arrival): the smallest joins first, the largest is preempted first."""
    ended: Callable[[SimulatedResponse], None]
    written: int = 0
    """Tokens when it last joined or left the batch."""
    joined: int = 0
    """The generator's decode steps at that moment."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens it wrote) of these tokens, in order."""

    @property
    def last_step(self) -> int:
        """The decode step of its last token, if it stays in the batch."""
        return self.joined + self.length - self.written

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.written


_order = attrgetter("order")


class ModelGenerator(GeneratorLoad):
    """Writes up to `capacity` responses at once; calls `record` with each interval."""

    serving = True

    def __init__(
        self,
        costs: GeneratorCosts,
        capacity: int,
        record: Callable[[GeneratorRecord], None] = lambda record: None,
    ) -> None:
        super().__init__(capacity)
        self.costs = costs
        self.version = 0
        self.tokens = 0
        """Tokens written so far."""
        self.busy_s = self.paused_s = self.idle_s = 0.0
        """Seconds of work, of pause in syncs and without a response: the time since its start."""
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._steps = 0  # decode steps done at `_since`
        self._since = self._loop.time()  # of the last change: always between two decode steps
        self._batch: list[SimulatedResponse] = []  # by their ends
        self._context_tokens = 0  # of the batch's prompts and responses at `_since`
        self._waiting: list[SimulatedResponse] = []  # by their order
        self._versions: list[tuple[int, int]] = [(0, 0)]  # (decode steps at its sync, version)
        self._planned = 0  # decode steps until the next change; 0 in a prefill
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.Future[None] | None = None

    @property
    def outstanding_tokens(self) -> float:
        """Expected of the responses in flight, as if none was written yet."""
        return sum(request.responses * request.tokens for request in self.load)

    def interrupt(self, request: Request) -> bool:
        """Returns False: the model has no migration."""
        return False

    def write(self, responses: Sequence[SimulatedResponse]) -> None:
        """Starts these responses as soon as they fit; raises ValueError if one never will."""
        for response in responses:
            if (tokens := response.prompt_tokens + response.length) > self.costs.kv_tokens:
                raise ValueError(f"{tokens} tokens exceed a generator's {self.costs.kv_tokens}.")
            insort(self._waiting, response, key=_order)
        if self._paused is None:  # a pause has cut the planned work short already
            self._wake()

    async def pause(self) -> None:
        """Pauses after the current decode step; returns when paused."""
        self.serving = False
        self._paused = self._loop.create_future()
        self._wake()
        await self._paused

    def resume(self, version: int) -> None:
        """Resumes under `version` and accepts requests."""
        self.paused_s += self._passed()
        self._versions.append((self._steps, version))
        self.version = version
        self._paused = None
        self.serving = True
        self._next()

    def end(self) -> None:
        """Counts the time since the last change, at the run's end."""
        if self._timer is None:
            self.idle_s += self._passed()
        else:
            self.busy_s += self._passed()
            self._timer.cancel()

    def _passed(self) -> float:
        """Returns the seconds since the last change; now is a change."""
        now = self._loop.time()
        passed, self._since = now - self._since, now
        return passed

    def _decode_s(self, steps: int) -> float:
        responses = len(self._batch)
        first = self.costs.decode_s(responses, self._context_tokens)
        last = self.costs.decode_s(responses, self._context_tokens + responses * (steps - 1))
        return steps / 2 * (first + last)

    def _next(self) -> None:
        """Chooses between two decode steps: pause, prefill, decode, or idle."""
        self._timer = None
        self._planned = 0
        if self._paused is not None:
            if not self._paused.done():
                self._paused.set_result(None)
            return
        if joining := self._join():
            until = self._since + self.costs.prefill_s(joining)
            self._timer = self._loop.call_at(until, self._prefilled, joining)
        elif self._batch:
            self._decode(self._steps_until_change())

    def _wake(self) -> None:
        """Reacts to a change: at once if idle, else after the current decode step."""
        if self._timer is None:
            # In the loop's next turn: requests of this turn share a prefill.
            self._timer = self._loop.call_at(self._loop.time(), self._idled)
        elif self._planned > 1:  # a prefill is not cut
            self._timer.cancel()
            passed = self._loop.time() - self._since
            self._decode(1 + bisect_left(range(1, self._planned), passed, key=self._decode_s))

    def _decode(self, steps: int) -> None:
        self._planned = steps
        self._timer = self._loop.call_at(self._since + self._decode_s(steps), self._decoded)

    def _idled(self) -> None:
        self.idle_s += self._passed()
        self._next()

    def _prefilled(self, tokens: int) -> None:
        seconds = self._passed()
        self.busy_s += seconds
        self._record(GeneratorRecord(seconds=seconds, prefill_tokens=tokens))
        self._next()

    def _decoded(self) -> None:
        steps, responses = self._planned, len(self._batch)
        done = GeneratorRecord(
            seconds=self._passed(),
            tokens=steps * responses,
            responses=responses,
            context_tokens=self._context_tokens + responses * (steps - 1) / 2,
        )
        self._record(done)
        self.busy_s += done.seconds
        self._steps += steps
        self.tokens += done.tokens
        self._context_tokens += done.tokens
        while self._batch and self._batch[0].last_step == self._steps:
            response = self._batch[0]
            self._leave(response)
            response.ended(response)
        self._next()

    def _join(self) -> int:
        """Admits the requests that fit; returns prefill tokens. The responses to one prompt that
        join together share its prefill, as in vLLM."""
        joining, prompt_of = 0, None
        limit = self.costs.kv_tokens * (1 - HEADROOM)
        while self._waiting and (
            not self._batch or self._context_tokens + self._waiting[0].context < limit
        ):
            response = self._waiting.pop(0)
            response.joined = self._steps
            insort(self._batch, response, key=lambda response: response.last_step)
            joining += response.context
            if response.order[0] == prompt_of:
                joining -= response.prompt_tokens
            prompt_of = response.order[0]
            self._context_tokens += response.context
        return joining

    def _steps_until_change(self) -> int:
        """Returns the decode steps until a response ends or the KV cache is full; preempts first."""
        while self._room() < 1 and len(self._batch) > 1:
            last = max(self._batch, key=_order)
            self._leave(last)
            insort(self._waiting, last, key=_order)
        to_end = self._batch[0].last_step - self._steps
        return min(to_end, self._room()) if len(self._batch) > 1 else to_end

    def _room(self) -> int:
        """Returns the tokens for which each response has room in the KV cache."""
        return (self.costs.kv_tokens - self._context_tokens) // len(self._batch)

    def _leave(self, response: SimulatedResponse) -> None:
        """Removes a response from the batch and notes its tokens so far with their versions."""
        self._batch.remove(response)
        first = bisect_left(self._versions, (response.joined + 1,)) - 1
        until = [since for since, _ in self._versions[first + 1 :]] + [self._steps]
        for (since, version), end in zip(self._versions[first:], until, strict=True):
            response.versions.append((version, end - max(since, response.joined)))
        response.written += self._steps - response.joined
        response.joined = self._steps
        self._context_tokens -= response.context

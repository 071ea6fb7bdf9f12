"""A model of one generator: continuous batching, from event to event.

All responses of the batch get a token per decode step, so what changes is only who is in it. Between two changes the
batch is the same and its contexts grow by one token each per step. k steps then take

    k / 2 * (seconds of the first + seconds of the last)

which is exact for costs that are linear in the context, and else the trapezoidal rule. So one event may stand for
thousands of tokens. A change waits for the end of the decode step under way, as in vLLM.

Who joins is read first, and the others wait for it: a prefill is not mixed with decode steps (vLLM's chunked prefill
does mix them; the work is the same). When keys and values no longer fit, the response with the lowest priority leaves
the batch, and is read again, with all it has, when there is room: vLLM's own rule.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from lrl.planning.costs import GeneratorCosts
from lrl.planning.profiling.timeline import GeneratorRecord
from lrl.planning.simulator.length_sampling import SimulatedResponse
from lrl.routing.request_queue import Slots
from lrl.types import Rollout

HEADROOM = 0.01
"""Share of the keys and values that stays free when a response joins others, or it would leave again at once."""


class ModelGenerator(Slots):
    """Writes responses in the time that `costs` say.

    Args:
        costs: Seconds of its work.
        capacity: Responses it writes at once.
        record: Told of each stretch of work; None for nobody.
    """

    serving = True

    def __init__(
        self,
        costs: GeneratorCosts,
        capacity: int,
        record: Callable[[GeneratorRecord], None] | None = None,
    ) -> None:
        super().__init__(capacity)
        self.costs = costs
        self.version = 0
        """What it holds."""
        self.tokens = 0
        """Tokens written so far."""
        self.busy_s = 0.0
        """Seconds in which it read or wrote."""
        self.paused_s = 0.0
        """Seconds it stood still because of a sync; with busy_s and idle_s the time since it was made."""
        self.idle_s = 0.0
        """Seconds without a response to write: nothing was sent here."""
        self.left_batch = 0
        """How often a response left the batch because keys and values did not fit."""
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._steps = 0  # decode steps done at `_since`
        self._since = self._loop.time()  # of the last change: always between two decode steps
        self._batch: list[SimulatedResponse] = []  # by their ends
        self._context_tokens = 0  # of the batch's prompts and answers at `_since`
        self._line: list[SimulatedResponse] = []  # by their order
        self._versions: list[tuple[int, int]] = [(0, 0)]  # (decode steps when it came, version)
        self._planned = 0  # decode steps until the next change; 0 in a prefill
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.Future[None] | None = None

    @property
    def outstanding_tokens(self) -> float:
        """Expected tokens of the responses in flight, as if none was written yet."""
        return sum(request.responses * request.tokens for request in self.load)

    def interrupt(self, rollouts: Sequence[Rollout]) -> bool:
        """Nothing moves in the model."""
        return False

    def write(self, responses: Sequence[SimulatedResponse]) -> None:
        """Begin with these as soon as they fit.

        Raises:
            ValueError: One would never fit.
        """
        for response in responses:
            if response.prompt_tokens + response.length > self.costs.kv_tokens:
                raise ValueError(
                    f"A response of {response.length} tokens to a prompt of {response.prompt_tokens} does not fit into "
                    f"the {self.costs.kv_tokens} tokens that a generator has keys and values for. Spread it over more "
                    "devices, or shorten the responses."
                )
            insort(self._line, response, key=lambda response: response.order)
        if self._timer is None and self._paused is None:
            self._at(self._loop.time(), self._idled)  # in the next turn: who comes in this one is read together
        else:
            self._cut_short()

    async def pause(self) -> None:
        """Stand still from the end of the decode step under way; ends when it does."""
        self.serving = False
        self._paused = self._loop.create_future()
        if self._timer is None:
            self._at(self._loop.time(), self._idled)
        else:
            self._cut_short()
        await self._paused

    def resume(self, version: int) -> None:
        """Write on under `version`, and take what is sent."""
        self.paused_s += self._passed()
        self._versions.append((self._steps, version))
        self.version = version
        self._paused, self.serving = None, True
        self._next()

    def end(self) -> None:
        """The run is over: count the time since the last change."""
        if self._timer is None:
            self.idle_s += self._passed()
        else:
            self.busy_s += self._passed()
            self._timer.cancel()

    # ---- time

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._timer = self._loop.call_at(when, what)

    def _passed(self) -> float:
        """Seconds since the last change; there is one now."""
        now = self._loop.time()
        passed, self._since = now - self._since, now
        return passed

    def _decode_s(self, steps: int) -> float:
        """Seconds of the batch's next `steps` decode steps."""
        responses = len(self._batch)
        first = self.costs.decode_s(responses, self._context_tokens)
        last = self.costs.decode_s(responses, self._context_tokens + responses * (steps - 1))
        return steps / 2 * (first + last)

    def _next(self) -> None:
        """Between two decode steps: stand still, read, write, or idle until something is sent."""
        self._timer, self._planned = None, 0
        if self._paused is not None:
            if not self._paused.done():
                self._paused.set_result(None)
            return
        if joining := self._join():
            self._at(self._since + self.costs.prefill_s(joining), lambda: self._read(joining))
        elif self._batch:
            self._planned = self._steps_until_change()
            self._at(self._since + self._decode_s(self._planned), self._decoded)

    def _cut_short(self) -> None:
        """Something has changed: go on only to the end of the decode step under way. A prefill is not cut."""
        if self._timer is not None and self._planned > 1:
            passed = self._loop.time() - self._since
            self._planned = 1 + bisect_left(range(1, self._planned), passed, key=self._decode_s)
            self._timer.cancel()
            self._at(self._since + self._decode_s(self._planned), self._decoded)

    def _idled(self) -> None:
        self.idle_s += self._passed()
        self._next()

    def _read(self, tokens: int) -> None:
        """A prefill is over."""
        self.busy_s += (seconds := self._passed())
        if self._record is not None:
            self._record(GeneratorRecord(seconds=seconds, prefill_tokens=tokens))
        self._next()

    def _decoded(self) -> None:
        """The planned decode steps are over."""
        steps, responses, seconds = self._planned, len(self._batch), self._passed()
        if self._record is not None:
            context = self._context_tokens + responses * (steps - 1) / 2
            written = steps * responses
            self._record(GeneratorRecord(seconds=seconds, tokens=written, responses=responses, context_tokens=context))
        self.busy_s += seconds
        self._steps += steps
        self.tokens += steps * responses
        self._context_tokens += steps * responses
        while self._batch and self._batch[0].last_step == self._steps:
            response = self._batch[0]
            self._leave(response)
            response.ended(response)
        self._next()

    # ---- the batch

    def _join(self) -> int:
        """Take into the batch who fits; the tokens that have to be read for it.

        The responses to one prompt that join together share its reading, as in vLLM.
        """
        joining, prompt_of = 0, None
        limit = self.costs.kv_tokens * (1 - HEADROOM)
        while self._line and (not self._batch or self._context_tokens + self._context(self._line[0]) < limit):
            response = self._line.pop(0)
            response.joined = self._steps
            insort(self._batch, response, key=lambda response: response.last_step)
            joining += response.written + (0 if response.order[0] == prompt_of else response.prompt_tokens)
            prompt_of = response.order[0]
            self._context_tokens += self._context(response)
        return joining

    def _steps_until_change(self) -> int:
        """Decode steps until a response ends or keys and values are full; makes room for one at least."""
        while (room := (self.costs.kv_tokens - self._context_tokens) // len(self._batch)) < 1 < len(self._batch):
            last = max(self._batch, key=lambda response: response.order)
            self._leave(last)
            insort(self._line, last, key=lambda response: response.order)
            self.left_batch += 1
        to_end = self._batch[0].last_step - self._steps
        return min(to_end, room) if len(self._batch) > 1 else to_end

    def _leave(self, response: SimulatedResponse) -> None:
        """Out of the batch, with all its tokens so far and who wrote them."""
        self._batch.remove(response)
        self._note_versions(response)
        response.written += self._steps - response.joined
        response.joined = self._steps
        self._context_tokens -= self._context(response)

    def _note_versions(self, response: SimulatedResponse) -> None:
        first = bisect_left(self._versions, (response.joined + 1,)) - 1
        until = [since for since, _ in self._versions[first + 1 :]] + [self._steps]
        for (since, version), end in zip(self._versions[first:], until, strict=True):
            response.versions.append((version, end - max(since, response.joined)))

    @staticmethod
    def _context(response: SimulatedResponse) -> int:
        return response.prompt_tokens + response.written

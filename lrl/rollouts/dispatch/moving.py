"""Half-written answers that go on with an idle generator: which, and whether it is worth what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lrl.data import Rollout
from lrl.faults import above, at_least
from lrl.rollouts.dispatch.base import Loaded, Request
from lrl.rollouts.dispatch.decode_time import DecodeTime


class Writing(Loaded, Protocol):
    """What is known of a generator whose answers may move."""

    @property
    def load(self) -> Mapping[Request, Sequence[Rollout]]:
        """What it writes: each request with its answers, of which some may have ended."""


class Moving:
    """Moves requests from busy generators to idle ones when nothing waits, those with most to write first.

    A request moves if its answers then end sooner by at least `margin` times what the move costs: the generator that
    goes on with them reads prompt and tokens first. The crew moves none twice under one version. Answers are expected
    to go on as dispatch's lengths say; without lengths one token is expected, and nothing moves.

    Args:
        decode_time: How long a generator takes for a token.
        prefill_ms: Milliseconds to read a token; the default is a 7B model at half of an H800's 990 TFLOPS.
        margin: Gain over cost, at least.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(self, decode_time: DecodeTime | None = None, prefill_ms: float = 0.03, margin: float = 2.0) -> None:
        at_least(0, "data.moving", prefill_ms=prefill_ms)
        above(0, "data.moving", margin=margin)
        self.decode_time = decode_time or DecodeTime()
        self.prefill_ms = prefill_ms
        self.margin = margin

    def plan(self, generators: Sequence[Writing], fixed: Mapping[Request, int]) -> Iterator[tuple[Request, int, int]]:
        """The requests that move, each with the positions of its old and its new generator.

        Args:
            generators: All that may be asked.
            fixed: Requests that stay where they are.
        """
        answers = [generator.in_flight for generator in generators]
        idle = [position for position, count in enumerate(answers) if count == 0]
        for left, request, source in self._candidates(generators, fixed) if idle else ():
            target = min(idle, key=lambda position: answers[position])
            rollouts = [rollout for rollout in generators[source].load[request] if not rollout.finished]
            if answers[target] + len(rollouts) > generators[target].capacity:
                continue
            now, then = answers[source], answers[target] + len(rollouts)
            gain_ms = left * (self.decode_time.per_token(now) - self.decode_time.per_token(then))
            read = sum(len(request.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts)
            if gain_ms > self.margin * self.prefill_ms * read:
                answers[source] -= request.answers
                answers[target] = then
                yield request, source, target

    def _candidates(
        self, generators: Sequence[Writing], fixed: Mapping[Request, int]
    ) -> list[tuple[float, Request, int]]:
        """Requests with the tokens that the longest of their answers still needs, and where they are written."""
        found = []
        for position, generator in enumerate(generators):
            for request, rollouts in generator.load.items():
                written = [len(rollout.token_ids) for rollout in rollouts if not rollout.finished]
                if written and request not in fixed:
                    found.append((request.written + request.tokens - min(written), request, position))
        return sorted(found, key=lambda candidate: -candidate[0])

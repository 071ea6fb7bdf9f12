"""Half-written responses that go on with an idle generator: which, and whether it is worth what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lrl.routing.dispatch.base import ExpectedLengths, Loaded, Request
from lrl.routing.dispatch.decode_latency import DecodeLatency
from lrl.runtime.config_errors import above, at_least
from lrl.types import Rollout


class MigrationSource(Loaded, Protocol):
    """What is known of a generator whose responses may move."""

    @property
    def load(self) -> Mapping[Request, Sequence[Rollout]]:
        """What it writes: each request with its responses, of which some may have ended."""


class Migration:
    """Moves requests from busy generators to idle ones when nothing waits, those with most to write first.

    A request moves if its responses then end sooner by at least `margin` times what the move costs: the generator that
    goes on with them reads prompt and tokens first. The pool moves none twice under one version.

    Args:
        decode_latency: How long a generator takes for a token.
        prefill_ms: Milliseconds to read a token; the default is a 7B model at half of an H800's 990 TFLOPS.
        margin: Gain over cost, at least.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self, decode_latency: DecodeLatency | None = None, prefill_ms: float = 0.03, margin: float = 2.0
    ) -> None:
        at_least(0, "data.migration", prefill_ms=prefill_ms)
        above(0, "data.migration", margin=margin)
        self.decode_latency = decode_latency or DecodeLatency()
        self.prefill_ms = prefill_ms
        self.margin = margin

    def plan(
        self, generators: Sequence[MigrationSource], lengths: ExpectedLengths, fixed: Mapping[Request, int]
    ) -> Iterator[tuple[Request, int, int]]:
        """The requests that move, each with the positions of its old and its new generator.

        Args:
            generators: All that may be asked.
            lengths: How long responses are expected to go on.
            fixed: Requests that stay where they are.
        """
        idle = [position for position, generator in enumerate(generators) if generator.in_flight == 0]
        if not idle:
            return
        writing = [sum(map(len, map(unfinished, generator.load.values()))) for generator in generators]
        for left, request, source in self._candidates(generators, lengths, fixed):
            target = min(idle, key=lambda position: writing[position])
            responses = unfinished(generators[source].load[request])
            then = writing[target] + len(responses)
            gain_ms = left * (self.decode_latency.per_token(writing[source]) - self.decode_latency.per_token(then))
            read = sum(len(request.prompt.token_ids) + len(response.token_ids) for response in responses)
            if then <= generators[target].capacity and gain_ms > self.margin * self.prefill_ms * read:
                writing[source] -= len(responses)
                writing[target] = then
                yield request, source, target

    def _candidates(
        self, generators: Sequence[MigrationSource], lengths: ExpectedLengths, fixed: Mapping[Request, int]
    ) -> list[tuple[float, Request, int]]:
        """(tokens that the least written of its responses needs, request, where it is), the most tokens first."""
        found = []
        for position, generator in enumerate(generators):
            for request, rollouts in generator.load.items():
                written = [len(rollout.token_ids) for rollout in unfinished(rollouts)]
                if written and request not in fixed:
                    left = lengths.expected(request.prompt, min(written)) - min(written)
                    found.append((left, request, position))
        return sorted(found, key=lambda candidate: -candidate[0])


def unfinished(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those that are still written."""
    return [rollout for rollout in rollouts if not rollout.finished]

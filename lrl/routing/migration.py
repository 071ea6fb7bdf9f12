"""Migration of half-written responses to idle generators: the choice of requests, by gain and
cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lrl.routing.dispatch.base import DecodeLatency, ExpectedLengths, GeneratorLoad, Request
from lrl.system.config_errors import above, at_least
from lrl.types import Rollout


class MigrationSource(GeneratorLoad, Protocol):
    """A generator whose responses may move."""

    @property
    def load(self) -> Mapping[Request, Sequence[Rollout]]:
        """The requests it writes, each with its responses, of which some may have ended."""


class Migration:
    """Moves requests from busy generators to idle ones when no request waits, the longest remaining
    first.

    A request moves if its responses then end sooner by at least `margin` times the cost of the
    move: the new generator reads prompt and tokens first. No request moves twice under one version.

    Args:
        decode_latency: A generator's time for a token.
        prefill_ms: Milliseconds to read a token; the default is a 7B model at half of an H800's 990
            TFLOPS.
        margin: Least ratio of gain to cost.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self,
        decode_latency: DecodeLatency | None = None,
        prefill_ms: float = 0.03,
        margin: float = 2.0,
    ) -> None:
        at_least(0, "data.migration", prefill_ms=prefill_ms)
        above(0, "data.migration", margin=margin)
        self.decode_latency = decode_latency or DecodeLatency()
        self.prefill_ms = prefill_ms
        self.margin = margin

    def plan(
        self,
        generators: Sequence[MigrationSource],
        lengths: ExpectedLengths,
        fixed: Mapping[Request, int],
    ) -> Iterator[tuple[Request, int, int]]:
        """Yields the requests that move, each with the positions of its old and its new generator.
        Those in `fixed` must not move."""
        idle = [
            position for position, generator in enumerate(generators) if generator.in_flight == 0
        ]
        if not idle:
            return
        writing = [
            sum(map(len, map(_unfinished, generator.load.values()))) for generator in generators
        ]
        for left, request, source in self._candidates(generators, lengths, fixed):
            target = min(idle, key=lambda position: writing[position])
            responses = _unfinished(generators[source].load[request])
            then = writing[target] + len(responses)
            gain_ms = left * (
                self.decode_latency.per_token(writing[source]) - self.decode_latency.per_token(then)
            )
            read = sum(
                len(request.prompt.token_ids) + len(response.token_ids) for response in responses
            )
            if (
                then <= generators[target].capacity
                and gain_ms > self.margin * self.prefill_ms * read
            ):
                writing[source] -= len(responses)
                writing[target] = then
                yield request, source, target

    def _candidates(
        self,
        generators: Sequence[MigrationSource],
        lengths: ExpectedLengths,
        fixed: Mapping[Request, int],
    ) -> list[tuple[float, Request, int]]:
        """Returns (tokens that its shortest response still needs, request, its generator), the most
        tokens first."""
        found = []
        for position, generator in enumerate(generators):
            for request, rollouts in generator.load.items():
                written = [len(rollout.token_ids) for rollout in _unfinished(rollouts)]
                if written and request not in fixed:
                    left = lengths.expected(request.prompt, min(written)) - min(written)
                    found.append((left, request, position))
        return sorted(found, key=lambda candidate: -candidate[0])


def _unfinished(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if not rollout.finished]

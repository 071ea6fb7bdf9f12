"""Migration of half-written responses to idle generators, by gain and cost."""

from collections.abc import Iterator, Sequence

from lrl.routing.dispatch import DecodeLatency, GeneratorLoad, Request
from lrl.routing.length_predictor import LengthPredictor


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
    """

    def __init__(
        self,
        decode_latency: DecodeLatency | None = None,
        prefill_ms: float = 0.03,
        margin: float = 2.0,
    ) -> None:
        self.decode_latency = decode_latency or DecodeLatency()
        self.prefill_ms = prefill_ms
        self.margin = margin

    def plan(
        self, generators: Sequence[GeneratorLoad], lengths: LengthPredictor
    ) -> Iterator[tuple[Request, int, int]]:
        """Yields the requests that move, each with the positions of its old and its new
        generator."""
        idle = [place for place, generator in enumerate(generators) if generator.in_flight == 0]
        if not idle:
            return
        version = max(generator.version for generator in generators)
        unfinished = [
            {request: request.unfinished for request in generator.load} for generator in generators
        ]
        writing = [sum(map(len, load.values())) for load in unfinished]
        found: list[tuple[float, Request, int]] = []  # tokens that its shortest response needs
        for source, load in enumerate(unfinished):
            for request, responses in load.items():
                if responses and request.moved_at != version:
                    written = min(len(response.token_ids) for response in responses)
                    left = lengths.expected(request.prompt, written) - written
                    found.append((left, request, source))
        per_token = self.decode_latency.per_token
        for left, request, source in sorted(found, key=lambda one: -one[0]):
            responses = unfinished[source][request]
            target = min(idle, key=writing.__getitem__)
            then = writing[target] + len(responses)
            gain_ms = left * (per_token(writing[source]) - per_token(then))
            prompt = len(request.prompt.token_ids)
            read = sum(prompt + len(response.token_ids) for response in responses)
            gains = gain_ms > self.margin * self.prefill_ms * read
            if gains and then <= generators[target].capacity:
                writing[source] -= len(responses)
                writing[target] = then
                yield request, source, target

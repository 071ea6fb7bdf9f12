"""Appends the tokens of the write route's frames to the rollouts of the request.

The generator sends the first token of each response at once and then what it wrote within `HOLD_S`
seconds. Each frame tells which version wrote which tokens of the response so far
(`lrl.vllm_plugin.output_batching`). A server that does not know gives its tokens the version that it
had at the request, which is never too young: the bound on lag holds.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

from lrl.errors import MalformedResponse
from lrl.generators.frames import Part, Span, unpack
from lrl.types import Rollout

FINISH_REASONS = ("stop", "length")


class ResponseStream:
    """The frames of one request, with a rollout for each of its responses; see
    `GeneratorClient.write`."""

    def __init__(
        self, rollouts: Sequence[Rollout], version: Callable[[], int], ended: Callable[[], None]
    ) -> None:
        self._rollouts = rollouts
        self._version = version
        self._ended = ended
        self._first_version = version()
        self._starts = [len(rollout.token_ids) for rollout in rollouts]

    def take(self, head: dict[str, Any], numbers: bytes) -> None:
        """Appends a frame; raises MalformedResponse if it is an error, or has a wrong log-prob or
        version."""
        if "parts" not in head:
            raise MalformedResponse(f"the stream carries {str(head)[:300]}")
        for part in unpack(head, numbers):
            self._append(part)
            if part.finish_reason is not None:
                self._finish(part)

    def end(self) -> None:
        """Ends the stream; raises MalformedResponse if a response has not ended."""
        if unfinished := sum(not rollout.finished for rollout in self._rollouts):
            raise MalformedResponse(
                f"the stream ended before {unfinished} of its {len(self._rollouts)} responses did"
            )

    def _append(self, part: Part) -> None:
        rollout = self._rollouts[part.number]
        if not math.isfinite(sum(part.logprobs)):
            raise MalformedResponse("a log-prob is infinite or no number")
        rollout.token_ids += part.token_ids
        rollout.logprobs += part.logprobs
        rollout.versions += [self._first_version] * len(part.token_ids)
        if part.versions is not None:
            self._set_versions(rollout, self._starts[part.number], part.versions)

    def _set_versions(self, rollout: Rollout, start: int, spans: Sequence[Span]) -> None:
        """Sets the versions of all tokens that the request has written, from `start` on."""
        counts = [(int(version), stop - first) for version, first, stop in spans]
        tokens = len(rollout.token_ids) - start
        if (versions := sum(count for _, count in counts)) != tokens:
            raise MalformedResponse(f"a response of {tokens} tokens came with {versions} versions")
        if any(not self._first_version <= version <= self._version() for version, _ in counts):
            raise MalformedResponse(
                f"a response says that versions {sorted({version for version, _ in counts})} wrote "
                f"it; the generator held {self._first_version} to {self._version()}"
            )
        rollout.versions[start:] = chain.from_iterable(
            repeat(version, count) for version, count in counts
        )

    def _finish(self, part: Part) -> None:
        if part.finish_reason not in FINISH_REASONS:
            raise MalformedResponse(f"a response ended with finish_reason {part.finish_reason!r}")
        self._rollouts[part.number].finish_reason = part.finish_reason
        self._ended()

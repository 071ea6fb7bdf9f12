"""Appends the tokens of the write route's frames to the rollouts of the request.

The generator sends the first token of each response at once and then what it wrote within `HOLD_S` seconds. The exact
version of each token is known only at the end of a response, when vLLM (0.32 and later) gives the spans of versions
over the whole response. Until then the tokens of a frame get the version that the generator had at the frame before it:
near a sync that is too old, for the tokens of at most `HOLD_S` seconds, and never too young, so the bound on lag also
holds for responses that continue on another generator.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

from lrl.generators.frames import Part, unpack
from lrl.types import Rollout

FINISH_REASONS = ("stop", "length")


class MalformedResponse(ValueError):
    """A stream that cannot be the response to the request."""


class ResponseStream:
    """The frames of one request, with a rollout for each of its responses; see `GeneratorClient.write`."""

    def __init__(self, rollouts: Sequence[Rollout], version: Callable[[], int], ended: Callable[[], None]) -> None:
        self._rollouts, self._version, self._ended = rollouts, version, ended
        self._first_version = version()
        self._starts = [len(rollout.token_ids) for rollout in rollouts]
        self._held = [self._first_version for _ in rollouts]

    def take(self, head: dict[str, Any], numbers: bytes) -> None:
        """Appends a frame; raises MalformedResponse if it is an error, or has a wrong log-prob or version."""
        if "parts" not in head:
            raise MalformedResponse(f"the stream carries {str(head)[:300]}")
        for part in unpack(head, numbers):
            self._append(part)
            if part.finish_reason is not None:
                self._finish(part)

    def end(self) -> None:
        """Ends the stream; raises MalformedResponse if a response has not ended."""
        if unfinished := sum(not rollout.finished for rollout in self._rollouts):
            raise MalformedResponse(f"the stream ended before {unfinished} of its {len(self._rollouts)} responses did")

    def _append(self, part: Part) -> None:
        rollout = self._rollouts[part.number]
        if not math.isfinite(sum(part.logprobs)):
            raise MalformedResponse("a log-prob is infinite or no number")
        rollout.token_ids += part.token_ids
        rollout.logprobs += part.logprobs
        rollout.versions += [self._held[part.number]] * len(part.token_ids)
        self._held[part.number] = self._version()

    def _finish(self, part: Part) -> None:
        rollout, start = self._rollouts[part.number], self._starts[part.number]
        if part.finish_reason not in FINISH_REASONS:
            raise MalformedResponse(f"a response ended with finish_reason {part.finish_reason!r}")
        if part.versions is not None:
            spans = [(int(version), stop - first) for version, first, stop in part.versions]
            if (versions := sum(count for _, count in spans)) != (tokens := len(rollout.token_ids) - start):
                raise MalformedResponse(f"a response of {tokens} tokens came with {versions} versions")
            if any(not self._first_version <= version <= self._version() for version, _ in spans):
                raise MalformedResponse(
                    f"a response says that versions {sorted({version for version, _ in spans})} wrote it; the "
                    f"generator held {self._first_version} to {self._version()}"
                )
            rollout.versions[start:] = chain.from_iterable(repeat(version, count) for version, count in spans)
        rollout.finish_reason = part.finish_reason
        self._ended()

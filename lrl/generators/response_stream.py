"""What one request of the generate route streams, appended to the rollouts it is for.

The server sends each response's first token at once and then every `STREAM_INTERVAL` tokens, so that what a generator
has written is not lost with it. Which version wrote a token is known for certain only at an response's end, when vLLM
(0.32 and later) sends the spans of versions over the whole response. Until then a chunk counts as written by the
version that the generator held when the chunk before it came: a chunk around a sync is then too old by at most
`STREAM_INTERVAL` tokens, never too young, so the bound on lag holds for responses that are carried elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lrl.types import Rollout

STREAM_INTERVAL = 16
"""Tokens of a response between two chunks."""
FINISH_REASONS = ("stop", "length")


class MalformedResponse(ValueError):
    """What a generator sent cannot be the response to the request."""


class ResponseStream:
    """The chunks of one request.

    Args:
        rollouts: One for each choice of the request; tokens are appended, whatever they hold already.
        version: The version that the generator holds now.
        ended: Told of each response's end.
    """

    def __init__(self, rollouts: Sequence[Rollout], version: Callable[[], int], ended: Callable[[], None]) -> None:
        self._rollouts = rollouts
        self._version = version
        self._ended = ended
        self._first_version = version()
        self._starts = [len(rollout.token_ids) for rollout in rollouts]
        self._held = [self._first_version for _ in rollouts]

    def take(self, chunk: dict[str, Any]) -> None:
        """Append one chunk.

        Raises:
            MalformedResponse: It is an error instead, lacks a log-prob or a version, or names a version never held.
        """
        if "choices" not in chunk:
            raise MalformedResponse(f"the stream carries {str(chunk)[:300]}")
        for choice in chunk["choices"]:
            self._append(choice["index"], choice)
            if choice["finish_reason"] is not None:
                self._finish(choice["index"], choice)

    def end(self) -> None:
        """The stream has ended; raises MalformedResponse if a response has not."""
        if unfinished := sum(not rollout.finished for rollout in self._rollouts):
            raise MalformedResponse(f"the stream ended before {unfinished} of its {len(self._rollouts)} responses did")

    def _append(self, index: int, choice: dict[str, Any]) -> None:
        rollout, tokens = self._rollouts[index], choice["token_ids"] or []
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]] if tokens else []
        if len(logprobs) != len(tokens):
            raise MalformedResponse(f"a chunk of {len(tokens)} tokens came with {len(logprobs)} log-probs")
        rollout.token_ids += tokens
        rollout.logprobs += logprobs
        rollout.versions += [self._held[index]] * len(tokens)
        self._held[index] = self._version()

    def _finish(self, index: int, choice: dict[str, Any]) -> None:
        rollout, start = self._rollouts[index], self._starts[index]
        if choice["finish_reason"] not in FINISH_REASONS:
            raise MalformedResponse(f"a response ended with finish_reason {choice['finish_reason']!r}")
        if (spans := choice.get("weight_versions")) is not None:
            versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
            if len(versions) != len(rollout.token_ids) - start:
                raise MalformedResponse(
                    f"a response of {len(rollout.token_ids) - start} tokens came with {len(versions)} versions"
                )
            if versions and not self._first_version <= min(versions) <= max(versions) <= self._version():
                raise MalformedResponse(
                    f"a response says that versions {sorted(set(versions))} wrote it; the generator held "
                    f"{self._first_version} to {self._version()}"
                )
            rollout.versions[start:] = versions
        rollout.finish_reason = choice["finish_reason"]
        self._ended()

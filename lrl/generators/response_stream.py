"""Parser of the generate route's stream; appends its tokens to the rollouts of the request.

The server sends the first token of each response at once and then every `STREAM_INTERVAL` tokens, so a lost generator
takes at most a few tokens with it. The exact version of each token is known only at the end of a response, when vLLM
(0.32 and later) sends the spans of versions over the whole response. Until then a chunk gets the version that the
generator had at the chunk before it: near a sync that is too old by at most `STREAM_INTERVAL` tokens and never too
young, so the bound on lag also holds for responses that continue on another generator.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lrl.types import Rollout

STREAM_INTERVAL = 16
"""Tokens of a response between two chunks."""
FINISH_REASONS = ("stop", "length")


class MalformedResponse(ValueError):
    """A stream that cannot be the response to the request."""


class ResponseStream:
    """The chunks of one request, with a rollout for each of its choices; see `GeneratorClient.write`."""

    def __init__(self, rollouts: Sequence[Rollout], version: Callable[[], int], ended: Callable[[], None]) -> None:
        self._rollouts, self._version, self._ended = rollouts, version, ended
        self._first_version = version()
        self._starts = [len(rollout.token_ids) for rollout in rollouts]
        self._held = [self._first_version for _ in rollouts]

    def take(self, chunk: dict[str, Any]) -> None:
        """Appends a chunk; raises MalformedResponse if it is an error, lacks a log-prob, or has a wrong version."""
        if "choices" not in chunk:
            raise MalformedResponse(f"the stream carries {str(chunk)[:300]}")
        for choice in chunk["choices"]:
            self._append(choice["index"], choice)
            if choice["finish_reason"] is not None:
                self._finish(choice["index"], choice)

    def end(self) -> None:
        """Ends the stream; raises MalformedResponse if a response has not ended."""
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
            if len(versions) != (tokens := len(rollout.token_ids) - start):
                raise MalformedResponse(f"a response of {tokens} tokens came with {len(versions)} versions")
            if versions and not self._first_version <= min(versions) <= max(versions) <= self._version():
                raise MalformedResponse(
                    f"a response says that versions {sorted(set(versions))} wrote it; the generator held "
                    f"{self._first_version} to {self._version()}"
                )
            rollout.versions[start:] = versions
        rollout.finish_reason = choice["finish_reason"]
        self._ended()

"""The form in which tokens travel from a generator to the trainer: a line of JSON, then numbers in
binary.

    {"parts": [[number, tokens, finish_reason, versions], ...]}\\n
    token ids, int32, and log-probs, float32

A frame has the new tokens of several responses to one prompt. Numbers are in the order of the
machine, little-endian on all that vLLM runs on. Two other frames have no numbers:

    {"error": "..."}\\n      the request failed after it had begun
    {"flushed": N}\\n        all tokens that were written before the flush N have been sent

JSON for every token was most of the work at both ends: an object for each in the API server, a
dictionary here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

WRITE, FLUSH = "/lrl/write", "/lrl/flush"
"""The routes of a generator (`lrl.vllm_plugin.write_route`)."""
HOLD_S = 1.0
"""Seconds for which a token may wait in the engine (`lrl.vllm_plugin.output_batching`); its
generator's death can cost a response the tokens of as long."""
REQUEST_PREFIX = "lrl-"
"""Part of the ids of lrl's requests, whose tokens are batched; other clients of this server do not
wait."""
BYTES_PER_NUMBER = 8
"""Of a token and its log-prob."""


Span = tuple[str, int, int]
"""Tokens of one version: the version, the first token and the token after the last."""


class Part(NamedTuple):
    """New tokens of one response."""

    number: int
    """Of the response in its request, from 0."""
    token_ids: list[int]
    logprobs: list[float]
    """In nats, one for each token."""
    finish_reason: str | None
    """None if the response continues."""
    versions: list[Span] | None
    """Of the whole response so far; None if vLLM does not know them."""


def pack(parts: Sequence[Part]) -> bytes:
    """Returns the frame of `parts`; raises RuntimeError if a token has no log-prob."""
    tokens, logprobs = array("i"), array("f")
    for part in parts:
        if len(part.token_ids) != len(part.logprobs):
            raise RuntimeError(
                f"{len(part.token_ids)} tokens came with {len(part.logprobs)} log-probs"
            )
        tokens.extend(part.token_ids)
        logprobs.extend(part.logprobs)
    head = [[part.number, len(part.token_ids), part.finish_reason, part.versions] for part in parts]
    return line({"parts": head}) + tokens.tobytes() + logprobs.tobytes()


def line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def size(head: dict[str, Any]) -> int:
    """Returns the bytes that follow a first line."""
    return BYTES_PER_NUMBER * sum(tokens for _, tokens, _, _ in head.get("parts", ()))


def unpack(head: dict[str, Any], numbers: bytes) -> Iterator[Part]:
    """Yields the parts of a frame; `numbers` are its `size(head)` bytes."""
    middle, start = len(numbers) // 2, 0
    tokens = memoryview(numbers)[:middle].cast("i").tolist()
    logprobs: list[float] = array("f", numbers[middle:]).tolist()
    for number, count, reason, versions in head["parts"]:
        new = slice(start, start + count)
        yield Part(number, tokens[new], logprobs[new], finish_reason=reason, versions=versions)
        start += count

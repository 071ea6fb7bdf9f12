"""Batches of tokens: vLLM's API server then has work once a second, not at each token.

Most of the API server's work is for each response in each of the engine's messages, however many
tokens it has. So the queue in front of the engine's socket holds the tokens of lrl's responses for
up to `HOLD_S` seconds; a response that ends takes its own along. Everything else passes at once, in
the old order: a response's first token, which shows that its prompt was read, and the answer to a
call, like a pause, with all that is held. So whoever has the answer can have all tokens written
before, and tokens of two versions never meet. vLLM's own metrics count these messages, not tokens.

vLLM's API server appends the log-probs of a response token by token, which was two thirds of its
work once the tokens came together. Where each token has a single log-prob, the columns of a message
are appended as they are.

vLLM tells which weights wrote which tokens with the end of a response alone. A half-written
response may continue on another generator or in another run, so lrl needs its versions with every
frame. The trainer's own record of its syncs would not do: frames that were sent before a pause may
be read after the resume."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from lrl.generators.client import HOLD_S, REQUEST_PREFIX

UNBATCHED_FIELDS = (
    "new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "pooling_output", "prefill_stats", "routed_experts",
    "new_sampling_mask", "kv_transfer_params", "ec_transfer_params", "mm_cache_miss_hashes",
)  # fmt: skip
"""Fields of vLLM's `EngineCoreOutput` with which an output is not held."""


def batch_outputs() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    send = EngineCoreProc.process_output_sockets

    def batching(self: Any, *addresses: Any) -> None:
        self.output_queue = OutputBatcher(self.output_queue)
        send(self, *addresses)

    EngineCoreProc.process_output_sockets = batching


class OutputBatcher:
    """The engine's queue of outputs, in front of its `queue.Queue`: pairs of a client's number
    (that of the one API server) and vLLM's `EngineCoreOutputs`, or bytes."""

    def __init__(
        self, outputs: queue.Queue[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.put_nowait = outputs.put_nowait
        self._outputs = outputs
        self._clock = clock
        self._batch: dict[str, list[Any]] = {}  # by request
        self._like: Any = None  # the last message of which tokens are held
        self._client = 0
        self._until = 0.0
        self._ready = deque[Any]()

    def get(self) -> Any:
        """Returns the next message to the API server. Waits until there is one, or held tokens are
        due."""
        while not self._ready:
            try:
                left = max(0.0, self._until - self._clock()) if self._batch else None
                self._take(self._outputs.get(timeout=left))
            except queue.Empty:
                self._release()
        return self._ready.popleft()

    def _take(self, message: Any) -> None:
        outputs = None if isinstance(message, bytes) else message[1]
        if outputs is None or outputs.utility_output is not None:
            self._release()
            self._ready.append(message)
            return
        if self._batch and outputs.outputs and outputs.weight_version != self._like.weight_version:
            self._release()
        passed: list[Any] = []
        for output in outputs.outputs:
            if passes_at_once(output):
                passed.append(joined([*self._batch.pop(output.request_id, ()), output]))
                continue
            if not self._batch:
                self._until = self._clock() + HOLD_S
            self._batch.setdefault(output.request_id, []).append(output)
            self._client, self._like = message
        all_held = bool(outputs.outputs) and not passed
        outputs.outputs = passed
        stats = outputs.scheduler_stats  # a step's may be dropped, for the next has newer ones
        counts = stats is not None and stats.prefix_cache_stats.requests
        if not all_held or outputs.finished_requests or counts:
            self._ready.append(message)
        if self._batch and self._clock() >= self._until:
            self._release()

    def _release(self) -> None:
        """Passes on all that is held."""
        if self._batch:
            outputs, version = list(map(joined, self._batch.values())), self._like.weight_version
            held = type(self._like)(outputs=outputs, weight_version=version)
            self._ready.append((self._client, held))
            self._batch.clear()


def passes_at_once(output: Any) -> bool:
    if output.finish_reason is not None or REQUEST_PREFIX not in output.request_id:
        return True
    return any(getattr(output, field) is not None for field in UNBATCHED_FIELDS)


def joined(parts: list[Any]) -> Any:
    """Returns one output for several of one response, in their order."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.events = [event for part in parts for event in part.events or ()] or None
    tables = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if tables:
        columns = zip(*(table[:3] for table in tables), strict=True)
        last.new_logprobs = type(tables[0])(*(np.concatenate(column) for column in columns), None)
    return last


def append_at_once() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    of_any_request = LogprobsProcessor._update_sample_logprobs

    def update(self: Any, new: Any) -> None:
        single = self.tokenizer is None and new.logprobs.shape[1] == 1
        if not (single and isinstance(self.logprobs, FlatLogprobs)):
            return of_any_request(self, new)
        # Each token has its own log-prob and no alternatives.
        flat, logprobs = self.logprobs, new.logprobs[:, 0].tolist()
        start, count = len(flat.logprobs), len(logprobs)
        flat.start_indices.extend(range(start, start + count))
        flat.end_indices.extend(range(start + 1, start + count + 1))
        flat.token_ids.extend(new.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(logprobs)
        flat.ranks.extend(new.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend(repeat(None, count))
        self.cumulative_logprob += sum(logprobs)

    LogprobsProcessor._update_sample_logprobs = update


def tell_versions() -> None:
    from vllm.v1.engine.output_processor import RequestState

    at_the_end = RequestState._new_completion_output

    def with_versions(self: Any, *positional: Any, **named: Any) -> Any:
        output = at_the_end(self, *positional, **named)
        if output.weight_versions is None and REQUEST_PREFIX in self.request_id:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions

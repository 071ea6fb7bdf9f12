"""What vLLM's API server makes of the tokens of a response: many at once, each with its version.

vLLM appends the log-probs of a response token by token, which was two thirds of the API server's
work once the tokens came together (`lrl.vllm_plugin.output_batching`). Where each token has a
single log-prob, its own, the columns of a message can be appended as they are. All other requests
are left to vLLM.

vLLM notes which weights wrote which tokens, and tells it with the end of a response alone. A
half-written response may continue on another generator or in another run, so lrl needs its versions
with every frame. The trainer's own record of its syncs would not do: frames that were sent before a
pause may be read after the resume.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from lrl.generators.frames import REQUEST_PREFIX


def install() -> None:
    """Puts both in front of vLLM's own; once in a process."""
    _append_at_once()
    _tell_versions()


def _append_at_once() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    of_any_request = LogprobsProcessor._update_sample_logprobs

    def update(self: Any, new: Any) -> None:
        single = self.tokenizer is None and new.logprobs.shape[1] == 1
        if single and isinstance(self.logprobs, FlatLogprobs):
            append(self, new)
        else:
            of_any_request(self, new)

    LogprobsProcessor._update_sample_logprobs = update


def append(processor: Any, new: Any) -> None:
    """Appends new tokens to a response: each with its own log-prob and no alternatives.

    Args:
        processor: vLLM's `LogprobsProcessor` of the response.
        new: vLLM's `LogprobsLists`; its arrays have the shape (tokens, 1).
    """
    flat, logprobs = processor.logprobs, new.logprobs[:, 0].tolist()
    start, count = len(flat.logprobs), len(logprobs)
    flat.start_indices.extend(range(start, start + count))
    flat.end_indices.extend(range(start + 1, start + count + 1))
    flat.token_ids.extend(new.logprob_token_ids[:, 0].tolist())
    flat.logprobs.extend(logprobs)
    flat.ranks.extend(new.sampled_token_ranks.tolist())
    flat.decoded_tokens.extend(repeat(None, count))
    processor.cumulative_logprob += sum(logprobs)


def _tell_versions() -> None:
    from vllm.v1.engine.output_processor import RequestState

    at_the_end = RequestState._new_completion_output

    def with_versions(self: Any, *positional: Any, **named: Any) -> Any:
        output = at_the_end(self, *positional, **named)
        if output.weight_versions is None and REQUEST_PREFIX in self.request_id:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions

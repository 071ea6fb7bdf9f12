"""Log-probs of many tokens at once in vLLM's API server.

vLLM appends the log-probs of a response token by token, which was two thirds of the API server's
work once the tokens came together (`lrl.vllm_plugin.output_batching`). Where each token has a
single log-prob, its own, the columns of a message can be appended as they are. All other requests
are left to vLLM."""

from __future__ import annotations

from itertools import repeat
from typing import Any


def install() -> None:
    """Puts `append` in front of vLLM's own; may be called twice."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    of_any_request = LogprobsProcessor._update_sample_logprobs
    if of_any_request.__name__ == "update":
        return

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

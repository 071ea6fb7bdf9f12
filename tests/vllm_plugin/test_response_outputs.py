"""The log-probs of many tokens at once, against vLLM's own way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from lrl.vllm_plugin import response_outputs


def processor(flat: bool, columns: int) -> Any:
    empty: Any = FlatLogprobs() if flat else []
    return LogprobsProcessor(None, empty, None, 0.0, columns - 1, None)


def message(first: int, count: int, columns: int) -> LogprobsLists:
    tokens = np.arange(first, first + count * columns, dtype=np.int32).reshape(count, columns)
    return LogprobsLists(
        tokens, -0.5 * tokens.astype(np.float32), np.arange(1, count + 1, dtype=np.int32)
    )


@pytest.mark.parametrize(("flat", "columns"), [(True, 1), (True, 3), (False, 1)])
def test_every_request_has_what_vllm_gives_token_by_token(flat: bool, columns: int) -> None:
    response_outputs._append_at_once()
    found, expected = processor(flat, columns), processor(flat, columns)
    for new in (message(7, 1, columns), message(20, 5, columns), message(50, 2, columns)):
        found._update_sample_logprobs(new)
        for tokens, logprobs, rank in zip(*(table.tolist() for table in new[:3]), strict=True):
            none = [None] * columns
            append_logprobs_for_next_position(
                expected.logprobs, tokens, logprobs, none, rank, columns - 1
            )
            expected.cumulative_logprob += logprobs[0]
    assert found == expected and len(found.logprobs or ()) == 8

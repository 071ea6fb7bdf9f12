"""The queue that holds tokens back in vLLM's engine, with vLLM's own messages; and the log-probs of
many tokens at once, against vLLM's own way."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from lrl.generators.client import HOLD_S, REQUEST_PREFIX
from lrl.vllm_plugin.output_batching import OutputBatcher, append_at_once

CALL = UtilityOutput(call_id=1)
A, B = f"{REQUEST_PREFIX}a", f"{REQUEST_PREFIX}b"
"""Ids of lrl's requests."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def output(
    name: str, tokens: list[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    column = np.array(tokens, dtype=np.int32)[:, None]
    logprobs = LogprobsLists(
        column, -0.25 * column.astype(np.float32), np.ones(len(tokens), dtype=np.int32)
    )
    return EngineCoreOutput(name, tokens, new_logprobs=logprobs, finish_reason=finish, **fields)


def message(*outputs: EngineCoreOutput, version: str = "0", **fields: Any) -> Any:
    return 0, EngineCoreOutputs(outputs=list(outputs), weight_version=version, **fields)


def passed(clock: Clock, *messages: Any, after_s: float = 0.0) -> list[Any]:
    """Returns what has been passed on `after_s` seconds after `messages`, which came at once."""
    held, found = OutputBatcher(queue.Queue(), clock), []
    for one in messages:
        held._take(one)
    clock.now += after_s
    while held._ready or (held._batch and clock.now >= held._until):
        found.append(held.get())
    return found


def tokens_of(found: list[Any]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _, outputs in found:
        for one in outputs.outputs:
            tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.new_logprobs is not None:
                assert one.new_logprobs.logprobs[:, 0].tolist() == [
                    -0.25 * token for token in one.new_token_ids
                ]
    return tokens


def test_tokens_wait_for_hold_s_and_go_together() -> None:
    def steps() -> list[Any]:
        return [message(output(A, [step]), output(B, [step + 10])) for step in range(3)]

    assert passed(Clock(), *steps(), after_s=0.9 * HOLD_S) == []
    ((client, found),) = passed(Clock(), *steps(), after_s=HOLD_S)
    assert client == 0 and found.weight_version == "0" and len(found.outputs) == 2
    assert tokens_of([(0, found)]) == {A: [0, 1, 2], B: [10, 11, 12]}


def test_a_queue_that_never_runs_empty_does_not_hold_tokens_longer() -> None:
    clock, outputs = Clock(), queue.Queue[Any]()
    held, waited = OutputBatcher(outputs, clock), []
    for step in range(40):
        outputs.put(message(output(A, [step])))
    outputs.put(b"dead")
    clock_of = dict[int, float]()

    def take(one: Any, before: Any = held._take) -> None:
        clock.now += 0.1 * HOLD_S
        if one != b"dead":
            clock_of[one[1].outputs[0].new_token_ids[0]] = clock.now
        before(one)

    held._take = take
    while (one := held.get()) != b"dead":
        waited += [clock.now - clock_of[token] for token in tokens_of([one])[A]]
    assert len(waited) == 40 and max(waited) < 1.2 * HOLD_S


def test_the_first_token_and_the_last_go_at_once_and_take_along_their_own_response_alone() -> None:
    first = message(output(A, [1], prefill_stats=PrefillStats()))
    assert len(passed(Clock(), first)) == 1
    ends = message(output(A, [3], FinishReason.STOP), output(B, [4]))
    found = passed(Clock(), message(output(A, [2]), output(B, [2])), ends)
    assert (
        tokens_of(found) == {A: [2, 3]}
        and found[0][1].outputs[0].finish_reason is FinishReason.STOP
    )


def test_statistics_of_a_prefill_are_not_lost() -> None:
    stats = SchedulerStats()
    assert passed(Clock(), message(output(A, [1]), scheduler_stats=stats)) == []
    stats.prefix_cache_stats.requests = 1
    ((_, found),) = passed(Clock(), message(output(A, [1]), scheduler_stats=stats))
    assert found.scheduler_stats is stats and found.outputs == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 3),
            st.sampled_from(["", "end", "call", "wait", "sync"]),
        ),
        max_size=40,
    )
)
def test_every_token_is_passed_on_once_in_order_and_with_those_of_its_version_alone(
    steps: list[tuple[int, int, str]],
) -> None:
    clock, wrote, found = Clock(), dict[str, list[int]](), list[Any]()
    held, written_by = OutputBatcher(queue.Queue(), clock), [0]
    for place, (number, count, event) in enumerate(steps):
        name = f"{REQUEST_PREFIX}{number}" if number else "chatcmpl-1"
        tokens = [10 * place + more for more in range(count)]
        wrote.setdefault(name, []).extend(tokens)
        written_by += [written_by[-1] + (event == "sync")]
        finish = FinishReason.LENGTH if event == "end" else None
        held._take(message(output(name, tokens, finish), version=str(written_by[-1])))
        if event == "call":
            held._take(answer := message(utility_output=CALL))
        while held._ready:
            found.append(held.get())
        if not number:
            assert tokens_of(found)[name] == wrote[name], "nobody else's tokens wait"
        if event == "call":
            assert tokens_of(found) == wrote and found[-1] is answer
        clock.now += HOLD_S if event == "wait" else 0.0
    held._take(b"dead")
    while (one := held.get()) != b"dead":
        found.append(one)
    assert tokens_of(found) == wrote
    for _, outputs in found:
        tokens = [token for one in outputs.outputs for token in one.new_token_ids]
        assert all(str(written_by[1 + one // 10]) == outputs.weight_version for one in tokens)


def processor(flat: bool, columns: int) -> Any:
    empty: Any = FlatLogprobs() if flat else []
    return LogprobsProcessor(None, empty, None, 0.0, columns - 1, None)


def columns_of(first: int, count: int, columns: int) -> LogprobsLists:
    tokens = np.arange(first, first + count * columns, dtype=np.int32).reshape(count, columns)
    return LogprobsLists(
        tokens, -0.5 * tokens.astype(np.float32), np.arange(1, count + 1, dtype=np.int32)
    )


@pytest.mark.parametrize(("flat", "columns"), [(True, 1), (True, 3), (False, 1)])
def test_every_request_has_what_vllm_gives_token_by_token(flat: bool, columns: int) -> None:
    append_at_once()
    found, expected = processor(flat, columns), processor(flat, columns)
    for new in (columns_of(7, 1, columns), columns_of(20, 5, columns), columns_of(50, 2, columns)):
        found._update_sample_logprobs(new)
        for tokens, logprobs, rank in zip(*(table.tolist() for table in new[:3]), strict=True):
            none = [None] * columns
            append_logprobs_for_next_position(
                expected.logprobs, tokens, logprobs, none, rank, columns - 1
            )
            expected.cumulative_logprob += logprobs[0]
    assert found == expected and len(found.logprobs or ()) == 8

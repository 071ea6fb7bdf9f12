"""Chunks of responses, and the version of each token."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.generators.response_stream import STREAM_INTERVAL, MalformedResponse, ResponseStream
from lrl.types import Rollout


def chunk(tokens: list[int], finish: str | None = None, spans: Any = None, index: int = 0) -> dict[str, Any]:
    content = [{"logprob": -0.25 * token} for token in tokens]
    choice = {"index": index, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": finish}
    return {"choices": [choice | {"weight_versions": spans}]}


class Held:
    """The version of a generator."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __call__(self) -> int:
        return self.version


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=200), st.integers(0, 5), st.booleans())
def test_a_half_written_responses_versions_are_never_too_new_and_too_old_only_around_a_sync(
    syncs: list[int], before: int, finished: bool
) -> None:
    """A model of vLLM: token by token, a chunk for the first and for every STREAM_INTERVAL after it."""
    held = Held()
    rollout = Rollout(token_ids=[1] * before, logprobs=[0.0] * before, versions=[0] * before)
    stream, wrote, sent = ResponseStream([rollout], held, lambda: None), [], 0
    for token, more in enumerate(syncs):
        held.version += more
        wrote.append(held.version)
        if token == 0 or len(wrote) - sent == STREAM_INTERVAL:
            stream.take(chunk(list(range(sent, len(wrote)))))
            sent = len(wrote)
    recorded = rollout.versions[before:]
    assert len(recorded) == sent and all(0 <= mine <= true for mine, true in zip(recorded, wrote, strict=False))
    assert all(mine >= old for mine, old in zip(recorded, [0] * STREAM_INTERVAL + wrote, strict=False))
    if finished:
        spans = [{"version": str(version), "start": place, "end": place + 1} for place, version in enumerate(wrote)]
        stream.take(chunk(list(range(sent, len(wrote))), "stop", spans))
        stream.end()
        assert rollout.versions == [0] * before + wrote


def test_every_token_has_its_log_prob_and_the_version_that_wrote_it() -> None:
    held = Held(3)
    rollouts = [Rollout(), Rollout()]
    ends: list[int] = []
    stream = ResponseStream(rollouts, held, lambda: ends.append(sum(rollout.finished for rollout in rollouts)))
    stream.take(chunk([10]))
    held.version = 4
    stream.take(chunk([20], "stop", [{"version": "4", "start": 0, "end": 1}], index=1))
    assert ends == [1]
    stream.take(chunk([11], "length", [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]))
    stream.end()
    assert [rollout.versions for rollout in rollouts] == [[3, 4], [4]]
    assert rollouts[0].token_ids == [10, 11] and rollouts[0].logprobs == [-2.5, -2.75]
    assert [rollout.finish_reason for rollout in rollouts] == ["length", "stop"] and ends == [1, 2]


def test_a_server_without_spans_leaves_our_own_record() -> None:
    rollout = Rollout()
    stream = ResponseStream([rollout], Held(5), lambda: None)
    stream.take(chunk([1, 2], "stop"))
    assert rollout.versions == [5, 5] and rollout.finished


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([{"version": "3", "start": 0, "end": 1}], "2 tokens came with 1 versions"),
        ([{"version": "2", "start": 0, "end": 2}], r"versions \[2\] wrote it; the generator held 3 to 3"),
        ([{"version": "4", "start": 0, "end": 2}], r"versions \[4\] wrote it; the generator held 3 to 3"),
    ],
)
def test_versions_that_were_never_held_are_an_error(spans: Any, words: str) -> None:
    with pytest.raises(MalformedResponse, match=words):
        ResponseStream([Rollout()], Held(3), lambda: None).take(chunk([1, 2], "stop", spans))


def test_a_token_without_log_prob_is_an_error() -> None:
    part = chunk([1, 2])
    del part["choices"][0]["logprobs"]["content"][0]
    with pytest.raises(MalformedResponse, match="2 tokens came with 1 log-probs"):
        ResponseStream([Rollout()], Held(), lambda: None).take(part)

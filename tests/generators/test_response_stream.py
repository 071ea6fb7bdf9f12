"""Frames of responses, and the version of each token.

Covers lrl/generators/frames.py.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.errors import MalformedResponse
from lrl.generators.frames import Part, pack, size
from lrl.generators.response_stream import ResponseStream
from lrl.types import Rollout

Spans = list[tuple[str, int, int]] | None


def frame(
    tokens: list[int], finish: str | None = None, spans: Spans = None, number: int = 0
) -> Any:
    """Returns a frame's first line and its numbers, for `ResponseStream.take`."""
    head, _, numbers = pack(
        [Part(number, tokens, [-0.25 * token for token in tokens], finish, spans)]
    ).partition(b"\n")
    assert size(json.loads(head)) == len(numbers)
    return json.loads(head), numbers


class Held:
    """The version of a generator."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __call__(self) -> int:
        return self.version


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=200),
    st.sets(st.integers(0, 200)),
    st.integers(0, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_half_written_responses_versions_are_those_that_wrote_it_however_late_its_frames_are_read(
    syncs: list[int], ends: set[int], before: int, behind: int, knows: bool
) -> None:
    """A model of a generator: token by token, a frame at the places `ends`, read `behind` frames
    later."""
    held = Held()
    rollout = Rollout(token_ids=[1] * before, logprobs=[0.0] * before, versions=[0] * before)
    stream = ResponseStream([rollout], held, lambda: None)
    wrote, sent, late = list[int](), 0, list[Any]()
    for token, more in enumerate(syncs):
        held.version += more
        wrote.append(held.version)
        if token in ends:
            spans = [(str(version), place, place + 1) for place, version in enumerate(wrote)]
            late.append(frame(list(range(sent, len(wrote))), None, spans if knows else None))
            sent = len(wrote)
        if len(late) > behind:
            stream.take(*late.pop(0))
        recorded = rollout.versions[before:]
        if knows:
            assert recorded == wrote[: len(recorded)]
        assert all(mine <= true for mine, true in zip(recorded, wrote, strict=False)), (
            "a token is too new"
        )


def test_every_token_has_its_log_prob_and_the_version_that_wrote_it() -> None:
    held = Held(3)
    rollouts = [Rollout(), Rollout()]
    ends: list[int] = []
    stream = ResponseStream(
        rollouts, held, lambda: ends.append(sum(rollout.finished for rollout in rollouts))
    )
    stream.take(*frame([10]))
    held.version = 4
    stream.take(*frame([20], "stop", [("4", 0, 1)], number=1))
    assert ends == [1]
    stream.take(*frame([11], "length", [("3", 0, 1), ("4", 1, 2)]))
    stream.end()
    assert [rollout.versions for rollout in rollouts] == [[3, 4], [4]]
    assert rollouts[0].token_ids == [10, 11] and rollouts[0].logprobs == [-2.5, -2.75]
    assert [rollout.finish_reason for rollout in rollouts] == ["length", "stop"] and ends == [1, 2]


def test_a_server_without_spans_leaves_our_own_record() -> None:
    rollout = Rollout()
    stream = ResponseStream([rollout], Held(5), lambda: None)
    stream.take(*frame([1, 2], "stop"))
    assert rollout.versions == [5, 5] and rollout.finished


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("3", 0, 1)], "2 tokens came with 1 versions"),
        ([("2", 0, 2)], r"versions \[2\] wrote it; the generator held 3 to 3"),
        ([("4", 0, 2)], r"versions \[4\] wrote it; the generator held 3 to 3"),
    ],
)
def test_versions_that_were_never_held_are_an_error(spans: Any, words: str) -> None:
    with pytest.raises(MalformedResponse, match=words):
        ResponseStream([Rollout()], Held(3), lambda: None).take(*frame([1, 2], "stop", spans))


def test_a_token_without_log_prob_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 tokens came with 1 log-probs"):
        pack([Part(0, [1, 2], [-0.5], None, None)])


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_log_prob_that_cannot_be_trained_with_is_an_error_and_its_token_is_not_kept(
    logprob: float,
) -> None:
    rollout = Rollout()
    head, _, numbers = pack([Part(0, [1, 2], [-0.5, logprob], None, None)]).partition(b"\n")
    with pytest.raises(MalformedResponse, match="a log-prob is infinite or no number"):
        ResponseStream([rollout], Held(), lambda: None).take(json.loads(head), numbers)
    assert rollout == Rollout()


def test_the_parts_of_a_frame_do_not_mix() -> None:
    rollouts = [Rollout(), Rollout(), Rollout()]
    parts = [
        Part(2, [7, 2**31 - 1], [-1.0, -0.1], None, None),
        Part(0, [], [], None, None),
        Part(1, [9], [-3.0], None, None),
    ]
    head, _, numbers = pack(parts).partition(b"\n")
    ResponseStream(rollouts, Held(), lambda: None).take(json.loads(head), numbers)
    assert [rollout.token_ids for rollout in rollouts] == [[], [9], [7, 2**31 - 1]]
    assert rollouts[1].logprobs == [-3.0] and rollouts[2].logprobs == pytest.approx(
        [-1.0, -0.1], abs=1e-8
    )

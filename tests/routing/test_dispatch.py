"""Dispatch policies: the invariants of all, and the purpose of each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.generators.generator import Generator
from lrl.routing.dispatch import (
    DispatchPolicy,
    LeastLoaded,
    LeastTokens,
    Request,
    RoundRobin,
    SkewnessAware,
)
from lrl.types import Prompt, Rollout
from tests.generators.model_fleet import Known, make_generator

RULES: dict[str, Callable[[], DispatchPolicy]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "least tokens": LeastTokens,
    "skewness-aware": SkewnessAware,
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def generators_of(*capacities: int) -> list[Generator]:
    return [make_generator(number, capacity) for number, capacity in enumerate(capacities)]


def request(
    tokens: int, responses: int = 1, priority: int = 0, due: int = 0, written: int = 0
) -> Request:
    rollouts = [Rollout(token_ids=[1] * written) for _ in range(responses)]
    return Request(Prompt(id=priority, token_ids=[tokens], text=""), rollouts, priority, due)


def with_oracle(dispatch: DispatchPolicy) -> DispatchPolicy:
    dispatch.lengths = Known()
    return dispatch


def send_all(dispatch: DispatchPolicy, generators: list[Generator]) -> list[tuple[Request, int]]:
    sent = []
    while (chosen := dispatch.send(generators)) is not None:
        generators[chosen[1]].reserve(chosen[0])
        sent.append(chosen)
    return sent


def goes_before(rule: DispatchPolicy, waiting: Request, sent: Request) -> bool:
    """Returns whether `waiting` must go before `sent`."""
    if isinstance(rule, SkewnessAware):
        return waiting.due < sent.due
    return rule.order(waiting) < rule.order(sent)


requests = st.tuples(st.integers(1, 50), st.integers(1, 12), st.integers(0, 99), st.integers(0, 3))
moves = st.lists(
    requests | st.sampled_from(["end", "end", "discard", "sync", "lose"]), min_size=1, max_size=40
)


@every_rule
@settings(max_examples=100, deadline=None)
@given(
    moves=moves,
    capacities=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    draw=st.randoms(use_true_random=False),
)
def test_waiting_requests_are_sent_once_in_order_and_within_capacity(
    rule: Callable[[], DispatchPolicy],
    moves: list[tuple[int, int, int, int] | str],
    capacities: list[int],
    draw: random.Random,
) -> None:
    dispatch, generators = with_oracle(rule()), generators_of(*capacities)
    waiting: list[Request] = []

    def move(what: tuple[int, int, int, int] | str) -> None:
        busy = [generator for generator in generators if generator.load]
        if isinstance(what, tuple):
            waiting.append(request(*what))
            dispatch.add(waiting[-1])
        elif what == "end" and busy:
            one = draw.choice(busy)
            one.free(one.load[0])
        elif what == "discard" and waiting:
            dispatch.discard(waiting.pop(draw.randrange(len(waiting))))
        elif what == "sync":
            for generator in generators:
                generator.version += 1
        elif what == "lose" and len(generators) > 1:
            generators.pop(draw.randrange(len(generators)))
        while (chosen := dispatch.send(generators)) is not None:
            sent, generator = chosen[0], generators[chosen[1]]
            assert sent in waiting, "discarded, or sent twice"
            assert not any(goes_before(dispatch, other, sent) for other in waiting)
            assert not generator.load or generator.in_flight + sent.responses <= generator.capacity
            waiting.remove(sent)
            generator.reserve(sent)

    for what in moves:
        move(what)
    for _ in range(len(moves)):
        move("end")
    assert not waiting, "it waits for ever"


def test_round_robin_gives_each_generator_its_turn_and_passes_over_full_ones() -> None:
    generators, dispatch = generators_of(8, 1, 8), RoundRobin()
    for priority in range(6):
        dispatch.add(request(1, priority=priority))
    assert [position for _, position in send_all(dispatch, generators)] == [0, 1, 2, 0, 2, 0]


def test_least_tokens_counts_the_tokens_that_responses_still_need() -> None:
    generators, dispatch = generators_of(8, 8), with_oracle(LeastTokens())
    long = request(1)
    long.tokens = 100.0
    generators[0].reserve(request(1, responses=5))
    generators[1].reserve(long)
    for what in (request(9), request(50, written=45)):
        dispatch.add(what)
    assert [(one.tokens, at) for one, at in send_all(dispatch, generators)] == [(9.0, 0), (5.0, 0)]


def test_the_longest_request_of_a_step_goes_first_and_a_later_step_waits() -> None:
    dispatch = with_oracle(LeastTokens())
    for tokens, due in ((5, 1), (50, 2), (9, 1), (7, 1), (80, 2)):
        dispatch.add(request(tokens, due=due))
    sent = [sent.prompt.token_ids[0] for sent, _ in send_all(dispatch, generators_of(99))]
    assert sent == [9, 7, 5, 80, 50]


def test_the_longest_fifth_has_separate_generators() -> None:
    generators, dispatch = generators_of(64, 64, 64, 64), with_oracle(SkewnessAware())
    for priority, tokens in enumerate(range(10, 60)):
        dispatch.add(request(tokens, priority=priority))
    sent = send_all(dispatch, generators)
    long = {position for what, position in sent if what.tokens >= 50}
    assert long and long.isdisjoint(position for what, position in sent if what.tokens < 50)
    for position in range(4):
        tokens = [what.tokens for what, at in sent if at == position]
        assert tokens == sorted(tokens, reverse=True)


def test_an_idle_generator_helps_the_other_part() -> None:
    generators, dispatch = generators_of(2, 2), with_oracle(SkewnessAware())
    for priority in range(5):
        dispatch.add(request(10, priority=priority))
    # One is long, so its generator has room, and is not idle.
    assert len(send_all(dispatch, generators)) == 3
    for sent in list(generators[0].load):
        generators[0].free(sent)
    assert [position for _, position in send_all(dispatch, generators)] == [0]


@pytest.mark.parametrize("rule", [RoundRobin, LeastLoaded, LeastTokens])
def test_a_later_turn_goes_to_the_generator_with_its_beginning_if_that_has_room(
    rule: Callable[[], DispatchPolicy],
) -> None:
    dispatch, generators = with_oracle(rule()), generators_of(8, 8, 8)
    generators[2].reserve(request(9, responses=7))
    for number in range(2):
        later = request(5, priority=number)
        later.home = generators[2]
        dispatch.add(later)
    assert [position for _, position in send_all(dispatch, generators)][0] == 2
    assert generators[2].in_flight == 8 and sum(len(one.load) for one in generators) == 3
    gone = request(5)
    (gone.home,) = generators_of(8)
    dispatch.add(gone)
    assert len(send_all(dispatch, generators)) == 1

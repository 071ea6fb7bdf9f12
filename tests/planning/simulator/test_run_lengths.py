"""Run-length encoded lists, and rollouts filled with meaningless tokens."""

from hypothesis import given
from hypothesis import strategies as st

from lrl.planning.simulator.run_lengths import RunLengths, fill
from lrl.types import Rollout

runs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)))


@given(runs)
def test_run_lengths_read_like_the_decoded_list(runs: list[tuple[int, int]]) -> None:
    whole, short = [value for value, count in runs for _ in range(count)], RunLengths(runs)
    assert list(short) == whole and len(short) == len(whole) and bool(short) == bool(whole)
    assert short[1:] == whole[1:] and all(
        short[place] == value for place, value in enumerate(whole)
    )


def test_a_filled_rollout_is_finished_and_its_lists_are_equally_long() -> None:
    rollout = Rollout()
    fill(rollout, [(3, 4), (4, 20_000)])
    assert (
        rollout.finished
        and len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions) == 20_004
    )
    assert min(rollout.versions) == 3 and rollout.versions[4] == 4


@given(runs, runs)
def test_run_lengths_grow_like_a_list(
    first: list[tuple[int, int]], then: list[tuple[int, int]]
) -> None:
    more = list(RunLengths(then))
    for added in (more, RunLengths(then)):
        grown = RunLengths(first)
        grown += added
        assert isinstance(grown, RunLengths)
        assert list(grown) == [*RunLengths(first), *more] and len(grown) == len(list(grown))

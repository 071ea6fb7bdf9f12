"""The stopwatch: time by state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.system.stopwatch import Stopwatch

STATES = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.tuples(STATES, st.integers(0, 9), st.booleans()), min_size=1))
def test_seconds_of_all_states_add_up_to_the_time_since_the_last_lap(
    moves: list[tuple[str, int, bool]],
) -> None:
    now, lapped = 5.0, 5.0
    stopwatch = Stopwatch(lambda: now)
    stopwatch.enter("a")
    for state, seconds, laps in moves:
        stopwatch.enter(state)
        now += seconds
        if laps:
            assert sum(stopwatch.lap().values()) == now - lapped
            lapped = now
    assert sum(stopwatch.lap().values()) == now - lapped


def test_an_inner_state_has_seconds_of_its_own_and_the_outer_one_continues_after_an_error() -> None:
    now = 0.0
    stopwatch = Stopwatch(lambda: now)
    now = 9.0  # nothing counts before the first state
    stopwatch.enter("train")
    now = 10.0
    with pytest.raises(KeyError), stopwatch.within("sync"):
        now = 12.0
        raise KeyError
    now = 16.0
    assert stopwatch.lap() == {"train": 5.0, "sync": 2.0}

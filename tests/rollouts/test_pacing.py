"""Pacing: when groups may start.

Covers lrl/rollouts/ledger.py.
"""

from hypothesis import given
from hypothesis import strategies as st

from lrl.rollouts.ledger import Pacing

pacings = st.builds(
    Pacing,
    prompts_per_epoch=st.integers(1, 20),
    groups_per_step=st.integers(1, 7),
    max_lag=st.integers(0, 4),
)


@given(pacings, st.integers(0, 3))
def test_the_steps_of_an_epoch_train_every_prompt_once(pacing: Pacing, epoch: int) -> None:
    first = epoch * pacing.steps_per_epoch
    sizes = [pacing.groups_in(step) for step in range(first, first + pacing.steps_per_epoch)]
    assert sum(sizes) == pacing.prompts_per_epoch
    assert all(1 <= size <= pacing.groups_per_step for size in sizes)
    assert pacing.groups_before(first) == epoch * pacing.prompts_per_epoch


@given(pacings, st.integers(0, 30))
def test_every_admitted_group_can_be_trained_before_it_is_too_old(
    pacing: Pacing, version: int
) -> None:
    last = version + pacing.max_lag
    assert pacing.may_have_started(version) == sum(
        pacing.groups_in(step) for step in range(last + 1)
    )


@given(pacings, st.integers(1, 6))
def test_a_sync_every_k_steps_feeds_each_step_if_and_only_if_the_lag_may_be_k_minus_1(
    pacing: Pacing, k: int
) -> None:
    fed = [
        pacing.may_have_started(step // k * k) >= pacing.groups_before(step + 1)
        for step in range(2 * k)
    ]
    assert all(fed) == (pacing.max_lag >= k - 1)


@given(st.integers(0, 20), st.integers(0, 40))
def test_nothing_is_admitted_for_a_step_that_never_comes(last_step: int, version: int) -> None:
    pacing = Pacing(prompts_per_epoch=7, groups_per_step=3, max_lag=2, last_step=last_step)
    assert pacing.may_have_started(version) <= pacing.groups_before(last_step)

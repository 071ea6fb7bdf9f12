"""The order of lrl's callbacks.

Covers callbacks/base.py.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from hypothesis import given
from hypothesis import strategies as st

from lrl import callbacks as kinds_of
from lrl.callbacks import Evaluation
from lrl.callbacks.base import FollowRankZero, OnRankZero
from lrl.callbacks.default_callbacks import let_others_follow, put_in_order


class Users(L.Callback):
    """A user's callback."""


def make(kind: Any) -> L.Callback:
    return Evaluation([{"prompt": "1+1="}]) if kind is Evaluation else kind()


ORDER = "WeightSync Evaluation RolloutLog Throughput Timeline Health Progress Export Summary"
KINDS: list[Any] = [getattr(kinds_of, name) for name in ORDER.split()]


@given(st.permutations([*KINDS, Users, Users]))
def test_lrls_callbacks_have_one_order_and_a_users_own_stay_after_all_that_stood_before_them(
    kinds: list[type[L.Callback]],
) -> None:
    callbacks = [make(kind) for kind in kinds]
    users = [place for place, one in enumerate(callbacks) if isinstance(one, Users)]
    before = {callbacks[place]: set(callbacks[:place]) for place in users}
    put_in_order(callbacks)
    assert [type(one) for one in callbacks if not isinstance(one, Users)] == KINDS
    assert all(those <= set(callbacks[: callbacks.index(one)]) for one, those in before.items())


def once(kind: Any) -> object:
    return object() if kind is Users else kind


@given(st.lists(st.sampled_from([*KINDS, Users]), unique_by=once))
def test_other_ranks_follow_each_row_of_rank_zeros_callbacks_and_lack_nothing_else(
    kinds: list[Any],
) -> None:
    callbacks = [make(kind) for kind in kinds]
    on_rank_zero, on_another = list(callbacks), list(callbacks)
    let_others_follow(on_rank_zero, leads=True)
    let_others_follow(on_another, leads=False)
    assert [one for one in on_rank_zero if not isinstance(one, FollowRankZero)] == callbacks
    assert [one for one in on_another if not isinstance(one, FollowRankZero)] == [
        one for one in callbacks if not isinstance(one, OnRankZero)
    ]
    meetings = [one for one in on_rank_zero if isinstance(one, FollowRankZero)]
    assert [one.last for one in meetings] == [False] * (len(meetings) - 1) + [True] * bool(meetings)
    assert run_by_all(on_rank_zero) == run_by_all(on_another)


def run_by_all(callbacks: list[L.Callback]) -> list[str]:
    """Returns what all ranks run, in order."""
    return [type(one).__name__ for one in callbacks if not isinstance(one, OnRankZero)]

"""The order of lrl's callbacks."""

from __future__ import annotations

from typing import Any

import lightning as L
from hypothesis import given
from hypothesis import strategies as st

from lrl.callbacks import Evaluation, Export, Health, Progress, RolloutLog, Summary, Throughput, Timeline, WeightSync
from lrl.callbacks.default_callbacks import put_in_order


class Users(L.Callback):
    """A user's callback."""


def make(kind: Any) -> L.Callback:
    return Evaluation([{"prompt": "1+1="}]) if kind is Evaluation else kind()


KINDS = [WeightSync, Evaluation, RolloutLog, Throughput, Timeline, Health, Progress, Export, Summary]


@given(st.permutations([*KINDS, Users, Users]))
def test_lrls_callbacks_come_in_one_order_and_a_users_own_stay_behind_what_they_were_behind(
    kinds: list[type[L.Callback]],
) -> None:
    callbacks = [make(kind) for kind in kinds]
    before = {one: set(callbacks[:place]) for place, one in enumerate(callbacks) if isinstance(one, Users)}
    put_in_order(callbacks)
    assert [type(one) for one in callbacks if not isinstance(one, Users)] == KINDS
    assert all(those <= set(callbacks[: callbacks.index(one)]) for one, those in before.items())


def test_what_is_in_order_stays_as_it_is() -> None:
    callbacks = [make(kind) for kind in (Users, WeightSync, RolloutLog, Users, Throughput, Summary, Users)]
    given_order = list(callbacks)
    put_in_order(callbacks)
    assert callbacks == given_order

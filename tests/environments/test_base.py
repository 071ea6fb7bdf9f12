"""An environment of two methods."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from lrl.environments.base import Turns, Written


class Answering(Turns):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reply(self, turn: str) -> Any:
        return self.answer


class OneTurn:
    async def turn(self, *args: Any, **how: Any) -> Written:
        return Written("a turn", [1])


def played(answer: Any) -> float:
    return asyncio.run(Answering(answer).rollout(OneTurn(), "a prompt"))


@pytest.mark.parametrize("done", [True, np.True_])
def test_an_episode_ends_with_the_reward_of_its_last_turn(done: Any) -> None:
    assert played(("", done, 0.5)) == 0.5


@pytest.mark.parametrize("answer", [("", 1.0, True), ("", "False", 1.0), ("", 1, 1.0)])
def test_a_reply_in_another_order_is_an_error_and_not_a_reward(answer: Any) -> None:
    with pytest.raises(TypeError, match="reply gives"):
        played(answer)

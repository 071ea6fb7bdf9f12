"""The stream of one optimizer step, and the trainer's calls of the controller."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lrl.advantages import GroupMean
from lrl.errors import LrlError
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import ControllerCalls, StepStream
from lrl.system.event_loop import LoopThread
from lrl.system.ranks import Ranks
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group, Rollout
from tests.rollouts.test_packing import make_group


class Scene(Learners):
    """A trainer with a row of groups, and a clock that moves only while it waits or works. It is
    the stream's source, policy and learners, too."""

    ranks = Ranks()
    data_parallel_size = 1

    def __init__(
        self, groups: list[Group], replayed: list[Group] | None = None, gather: bool = False
    ) -> None:
        self.groups = iter(groups)
        self.events: list[str] = []
        self.now = 0.0
        self.given_up: list[Group] = []
        self.prepared: list[Group] = []
        self.ended: list[list[Group]] = []
        self.stopwatch = Stopwatch(lambda: self.now)
        self.stream = StepStream(
            0,
            len(groups),
            source=self,
            policy=self,
            learners=self,
            packer=Packer(64, GroupMean(), 1.0, oldest_version=0),
            stopwatch=self.stopwatch,
            gather=gather,
            replayed=replayed or (),
        )

    def give_up(self, group: Group) -> None:
        self.given_up.append(group)

    def raise_if_stopped(self) -> None:
        """Nobody stops it."""

    def end_step(self, step: int, groups: Sequence[Group]) -> None:
        self.ended.append(list(groups))

    def next_group(self, step: int) -> Group:
        group = next(self.groups)
        self.now += 2.0
        self.events.append(f"group {group.index}")
        return group

    def prepare(self, group: Group, packer: Packer) -> None:
        assert packer.micro_batch_tokens == 64, "the step's own"
        self.now += 0.5
        self.prepared.append(group)

    def train(self) -> int:
        tokens = 0
        for batch in self.stream:
            self.now += 100.0
            self.events.append("train")
            tokens += batch.num_tokens
        return tokens


@pytest.mark.parametrize("gather", [False, True])
def test_training_begins_before_the_last_group_is_finished_unless_the_device_is_shared(
    gather: bool,
) -> None:
    groups = [make_group(i, 4, [12, 12]) for i in range(6)]
    scene = Scene(groups, gather=gather)
    assert scene.train() == 6 * 24
    assert scene.events.index("train") < scene.events.index("group 3") or gather
    assert scene.events.index("train") > scene.events.index("group 5") or not gather
    assert scene.events.count("train") > 1
    assert scene.prepared == scene.stream.groups == groups and not scene.given_up
    assert scene.ended == [], "an error could still end the step, whose groups are trained again"
    scene.stream.finish()
    assert scene.ended == [groups]


def test_a_steps_time_is_divided_by_state_and_adds_up() -> None:
    scene = Scene([make_group(i, 4, [12, 12]) for i in range(6)])
    scene.train()
    seconds = scene.stopwatch.lap()
    trained = 100.0 * scene.events.count("train")
    assert seconds == {
        **{"wait_first": 2, "wait_next": 8, "wait_last": 2, "wait_reward": 0},
        **{"reference": 3, "pack": 0, "ranks": 0, "train": trained},
    }
    assert sum(seconds.values()) == scene.now
    scene.now += 7.0  # the update
    assert scene.stopwatch.lap() == {"train": 7.0}


def test_replayed_groups_are_trained_first_whatever_their_age_and_are_not_the_steps_own() -> None:
    old, fresh = make_group(7, 4, [12, 12]), make_group(8, 4, [12, 12])
    for rollout in old.rollouts:
        rollout.versions = [-5] * 12  # far older than the packer lets a fresh group be
    scene = Scene([fresh], replayed=[old])
    assert scene.train() == scene.stream.num_tokens == 48
    assert scene.stream.num_sequences == 4
    assert scene.stream.groups == [fresh] and scene.prepared == [old, fresh]


def test_a_step_without_a_token_names_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    groups = [make_group(index, 4, [4, 4]) for index in range(3)]
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward = None
    scene = Scene(groups)
    assert scene.train() == 0 and scene.given_up == groups
    assert "step 0 has no trained token" in caplog.text
    assert "6 responses have no reward" in caplog.text


def test_a_step_in_which_nothing_was_written_ends_the_run() -> None:
    groups = [make_group(index, 4, [4, 4]) for index in range(2)]
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.token_ids, rollout.logprobs, rollout.versions = [], [], []
    with pytest.raises(LrlError, match="Step 0: not one of its responses has a token"):
        Scene(groups).train()


class WritingController:
    """A controller with one rollout that is written without end."""

    def __init__(self) -> None:
        self.rollout = Rollout()

    async def write(self) -> None:
        """Each token takes a while to be written whole."""
        while True:
            self.rollout.token_ids.append(1)
            time.sleep(0.001)
            self.rollout.logprobs.append(-1.0)
            await asyncio.sleep(0)

    async def next_group(self, step: int) -> None:
        await asyncio.sleep(60)

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        return {"lengths": (len(self.rollout.token_ids), len(self.rollout.logprobs))}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def calls_of(loop: LoopThread, group_deadline_s: float = 60.0, poll: Any = None) -> ControllerCalls:
    controller: Any = WritingController()
    return ControllerCalls(controller, loop, group_deadline_s=group_deadline_s, poll=poll)


def test_a_read_on_the_loop_sees_no_half_written_rollout(loop: LoopThread) -> None:
    calls: Any = calls_of(loop)
    loop.submit(calls.controller.write())
    read = [calls.state_dict(0)["lengths"] for _ in range(30)]
    assert all(tokens == logprobs for tokens, logprobs in read) and read[-1] > read[0]
    loop.close()
    # After the loop's end, too.
    assert calls.state_dict(0)["lengths"] >= read[-1]


def test_a_wait_for_a_group_is_polled_and_has_a_deadline_that_names_the_step(
    loop: LoopThread,
) -> None:
    polled: list[None] = []
    calls = calls_of(loop, group_deadline_s=0.3, poll=lambda: polled.append(None))
    with pytest.raises(TimeoutError, match=r"waiting for a finished group for step 7 did not end"):
        calls.next_group(7)
    assert polled

"""The controller on a virtual clock, between a model of a fleet and a model of a trainer."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.data import Group, Prompt, Rollout
from lrl.generators.sampling import Sampling
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from tests.virtual_clock import Deadlock, run

TOKENS = 4


class Row:
    """Prompts without end."""

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=index, token_ids=[1], text=str(index))


class ModelFleet:
    """Writes answers a token at a time, each with the version held at that moment.

    Args:
        seconds: How long a token of the group with this index takes.
        fails: Index of the group at which the fleet fails.
    """

    def __init__(self, seconds: Callable[[int], float], fails: int | None = None) -> None:
        self.seconds, self.fails = seconds, fails
        self.version = 0
        self.asked: list[tuple[int, int]] = []
        """(index of the group, priority) in the order of asking."""
        self.error = ConnectionError("generator 1 is gone")

    async def answer(self, prompt: Prompt, sampling: Sampling, *, priority: int, deadline_s: float) -> list[Rollout]:
        self.asked.append((prompt.id, priority))
        versions = []
        for _ in range(TOKENS):
            await asyncio.sleep(self.seconds(prompt.id))
            versions.append(self.version)
        if prompt.id == self.fails:
            raise self.error
        return [make_rollout(versions) for _ in range(sampling.n)]


class ModelRewards:
    """Takes its time, and cannot judge each third answer."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.seen = draw, 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await asyncio.sleep(self.draw.random())
        for rollout in rollouts:
            self.seen += 1
            rollout.reward = None if self.seen % 3 == 0 else 0.0
            rollout.reward_failure = None if rollout.reward is not None else "timeout: no reward after 1 s"


def make_rollout(versions: list[int]) -> Rollout:
    tokens = list(range(TOKENS))
    return Rollout(token_ids=tokens, logprobs=[-1.0] * TOKENS, versions=list(versions), finish_reason="stop", text="")


def make_controller(pacing: Pacing, fleet: ModelFleet, draw: random.Random) -> Controller:
    return Controller(Row(), fleet, ModelRewards(draw), Ledger(pacing), Sampling(n=2), str, deadline_s=60.0)


async def train(
    controller: Controller, fleet: ModelFleet, every_n_steps: int, seconds: Callable[[], float]
) -> list[tuple[int, float, Group]]:
    """A whole run; returns (step, time, group) of every group as it was handed out."""
    trained, pacing = list[tuple[int, float, Group]](), controller.ledger.pacing
    await controller.new_version(0)
    for step in range(pacing.last_step or 0):
        for _ in range(pacing.groups_in(step)):
            group = await controller.next_group(step)
            trained.append((step, asyncio.get_running_loop().time(), group))
        await asyncio.sleep(seconds())
        if (step + 1) % every_n_steps == 0:
            fleet.version = step + 1
            await controller.new_version(step + 1)
    return trained


def whole_run(pacing: Pacing, seed: int, every_n_steps: int = 1) -> tuple[list[tuple[int, float, Group]], ModelFleet]:
    draw = random.Random(seed)
    fleet = ModelFleet(lambda index: draw.expovariate(1.0))
    controller = make_controller(pacing, fleet, draw)
    return run(train(controller, fleet, every_n_steps, lambda: draw.expovariate(0.3))), fleet


pacings = st.builds(
    Pacing,
    prompts_per_epoch=st.integers(1, 11),
    groups_per_step=st.integers(1, 5),
    max_lag=st.integers(0, 3),
    last_step=st.just(7),
    wait_for_stragglers=st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(pacings, st.integers(0, 10**6))
def test_a_run_ends_with_every_group_trained_once_and_no_token_too_old(pacing: Pacing, seed: int) -> None:
    trained, _ = whole_run(pacing, seed, every_n_steps=1 + seed % (pacing.max_lag + 1))
    assert sorted(group.index for _, _, group in trained) == list(range(pacing.groups_before(7)))
    if pacing.wait_for_stragglers:
        assert all(step - group.oldest_version <= pacing.max_lag for step, _, group in trained)


def test_on_policy_every_token_is_the_trainers_own() -> None:
    trained, _ = whole_run(Pacing(prompts_per_epoch=5, groups_per_step=2, max_lag=0, last_step=6), seed=1)
    assert all(set(rollout.versions) == {step} for step, _, group in trained for rollout in group.rollouts)


def test_an_answer_that_saw_a_sync_has_tokens_of_both_versions() -> None:
    trained, _ = whole_run(Pacing(prompts_per_epoch=9, groups_per_step=3, max_lag=2, last_step=6), seed=1)
    assert any(len(set(group.rollouts[0].versions)) > 1 for _, _, group in trained)


def test_older_groups_go_first() -> None:
    _, fleet = whole_run(Pacing(prompts_per_epoch=9, groups_per_step=3, max_lag=2, last_step=6), seed=2)
    assert [index for index, _ in fleet.asked] == list(range(18))
    assert [priority for _, priority in sorted(fleet.asked)] == sorted(priority for _, priority in fleet.asked)


def test_an_answer_that_could_not_be_judged_has_no_reward_and_zero_is_one() -> None:
    trained, _ = whole_run(Pacing(prompts_per_epoch=9, groups_per_step=3, max_lag=0, last_step=3), seed=3)
    rollouts = [rollout for _, _, group in trained for rollout in group.rollouts]
    assert len(rollouts) == 18 and sum(rollout.reward is None for rollout in rollouts) == 6
    assert all((rollout.reward is None) == (rollout.reward_failure is not None) for rollout in rollouts)
    assert sum(len(group.scored) for _, _, group in trained) == 12


@pytest.mark.parametrize("wait", [True, False])
def test_the_fleets_failure_reaches_the_trainer_itself_and_soon(wait: bool) -> None:
    pacing = Pacing(prompts_per_epoch=100, groups_per_step=2, max_lag=3, last_step=50, wait_for_stragglers=wait)
    fleet = ModelFleet(lambda index: 1.0, fails=5)
    controller = make_controller(pacing, fleet, random.Random(0))
    with pytest.raises(ConnectionError) as caught:
        run(train(controller, fleet, 1, lambda: 10.0))
    assert caught.value is fleet.error
    assert fleet.version <= 1  # the run did not live on the other groups until the missing one was due


@pytest.mark.parametrize(("wait", "held"), [(True, True), (False, False)])
def test_a_straggler_holds_the_trainer_only_if_it_is_waited_for(wait: bool, held: bool) -> None:
    pacing = Pacing(prompts_per_epoch=100, groups_per_step=4, max_lag=1, last_step=20, wait_for_stragglers=wait)
    fleet = ModelFleet(lambda index: 100.0 if index == 3 else 1.0)  # group 3 takes 400 s
    controller = make_controller(pacing, fleet, random.Random(0))
    trained = run(train(controller, fleet, 1, lambda: 10.0))
    step, time, straggler = next(row for row in trained if row[2].index == 3)
    ended_at_step_5 = max(when for at, when, _ in trained if at == 5)
    assert (ended_at_step_5 > 400) == held
    assert (step - straggler.oldest_version > 1) == (not held) and time > 400


def test_a_step_that_nothing_can_feed_is_seen_as_a_deadlock() -> None:
    pacing = Pacing(prompts_per_epoch=8, groups_per_step=2, max_lag=0, last_step=4)
    fleet = ModelFleet(lambda index: 1.0)
    with pytest.raises(Deadlock):
        run(train(make_controller(pacing, fleet, random.Random(0)), fleet, 2, lambda: 1.0))


def test_the_virtual_clock_keeps_the_order_of_timers_and_takes_no_time() -> None:
    woken: list[tuple[float, str]] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((asyncio.get_running_loop().time(), f"after {seconds:g}"))

    async def all_of_them() -> None:
        await asyncio.gather(*map(sleeper, (3e6, 0.5, 7.0)))

    waits: Awaitable[None] = all_of_them()
    run(waits)
    assert woken == [(0.5, "after 0.5"), (7.0, "after 7"), (3e6, "after 3e+06")]

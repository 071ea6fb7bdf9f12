"""The controller on a virtual clock, between a model of a fleet and a model of a trainer."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lrl.planning.clock import run
from lrl.rollouts.controller import GROUPS_ASKED_AT_ONCE, Controller, Resumed
from lrl.rollouts.ledger import Ledger, Pacing
from lrl.types import Group, Prompt, Rollout, Sampling
from tests.checkpoints.through_files import through_a_file

TOKENS = 4
SAMPLING = Sampling(n=2, max_tokens=9)


PROMPTS = [Prompt(id=index, token_ids=[1], text=str(index)) for index in range(200)]


class ModelFleet:
    """Writes responses a token at a time, each with the version held at that moment: `seconds` says
    how long one of the group with this index takes, and group `fails` fails."""

    def __init__(self, seconds: Callable[[int], float], fails: int | None = None) -> None:
        self.seconds = seconds
        self.fails = fails
        self.version = 0
        self.asked: list[int] = []
        """Indices of the groups in the order of the requests."""
        self.error = ConnectionError("generator 1 is gone")

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        self.asked.append(prompt.id)
        least = min(len(rollout.token_ids) for rollout in rollouts if not rollout.finished)
        for token in range(least, TOKENS):
            await asyncio.sleep(self.seconds(prompt.id))
            for rollout in rollouts:
                if len(rollout.token_ids) <= token:
                    rollout.token_ids.append(token)
                    rollout.logprobs.append(-1.0 - token)
                    rollout.versions.append(self.version)
        if prompt.id == self.fails:
            raise self.error
        for rollout in rollouts:
            rollout.finish_reason = "stop"


class ModelRewards:
    """Scores after a delay, and fails for each third response, or so: `every`. `equal` is the chance
    that all responses to a prompt are worth the same."""

    def __init__(self, draw: random.Random, equal: float = 1.0, every: int = 3) -> None:
        self.draw = draw
        self.equal = equal
        self.every = every
        self.seen = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await asyncio.sleep(self.draw.random())
        spread = float(self.draw.random() >= self.equal)
        for place, rollout in enumerate(rollouts):
            assert rollout.reward is rollout.reward_failure is None and not rollout.reward_parts
            self.seen += 1
            rollout.reward = None if self.seen % self.every == 0 else spread * place
            rollout.reward_failure = "timeout: 1 s" if rollout.reward is None else None


def make_controller(
    pacing: Pacing,
    fleet: ModelFleet,
    draw: random.Random,
    max_skipped: int = 0,
    sampling: Sampling = SAMPLING,
    **rewards: float,
) -> Controller:
    return Controller(
        PROMPTS,
        fleet.generate,
        ModelRewards(draw, **rewards).score,
        Ledger(pacing),
        sampling,
        deadline_s=60.0,
        max_skipped=max_skipped,
    )


async def train(
    controller: Controller, fleet: ModelFleet, every_n_steps: int, seconds: Callable[[], float]
) -> list[tuple[int, float, Group]]:
    """Runs all steps; returns (step, time, group) of every group in the order of handing out."""
    trained, pacing = list[tuple[int, float, Group]](), controller.ledger.pacing
    await controller.new_version(0)
    for step in range(pacing.last_step or 0):
        for _ in range(pacing.groups_in(step)):
            group = await controller.next_group(step)
            trained.append((step, asyncio.get_running_loop().time(), group))
            if step % every_n_steps == 0:  # a generator was replaced
                await controller.new_version(step)
        await asyncio.sleep(seconds())
        if (step + 1) % every_n_steps == 0:
            fleet.version = step + 1
            await controller.new_version(step + 1)
    return trained


class SlowTeacher:
    """Says at the same time what it thinks of some groups."""

    def __init__(self) -> None:
        self.asking = self.most = 0

    async def ask(self, group: Group) -> None:
        self.asking += 1
        self.most = max(self.most, self.asking)
        await asyncio.sleep(1.0)
        self.asking -= 1
        group.reference_version = 0


def test_a_teacher_has_said_its_log_probs_of_each_group_before_a_step_gets_it() -> None:
    pacing = Pacing(prompts_per_epoch=99, groups_per_step=33, max_lag=0, last_step=3)
    fleet = ModelFleet(lambda index: 1.0)
    controller = make_controller(pacing, fleet, random.Random(0))
    teacher = SlowTeacher()
    controller.teacher = teacher  # type: ignore[assignment]
    trained = run(train(controller, fleet, 1, lambda: 1.0))
    assert [group.reference_version for _, _, group in trained] == [0] * 99
    assert teacher.most == GROUPS_ASKED_AT_ONCE, "many at once, and not all"


@pytest.mark.parametrize("wait", [True, False])
def test_the_fleets_failure_reaches_the_trainer_itself_and_soon(wait: bool) -> None:
    pacing = Pacing(
        prompts_per_epoch=100, groups_per_step=2, max_lag=3, last_step=50, wait_for_stragglers=wait
    )
    fleet = ModelFleet(lambda index: 1.0, fails=5)
    controller = make_controller(pacing, fleet, random.Random(0))
    with pytest.raises(ConnectionError) as caught:
        run(train(controller, fleet, 1, lambda: 10.0))
    assert caught.value is fleet.error
    # The run did not live on the other groups until the missing one was due.
    assert fleet.version <= 1


@pytest.mark.parametrize(("wait", "held"), [(True, True), (False, False)])
def test_a_straggler_holds_the_trainer_only_if_it_is_waited_for(wait: bool, held: bool) -> None:
    pacing = Pacing(
        prompts_per_epoch=100, groups_per_step=4, max_lag=1, last_step=20, wait_for_stragglers=wait
    )
    fleet = ModelFleet(lambda index: 100.0 if index == 3 else 1.0)  # group 3 takes 400 s
    controller = make_controller(pacing, fleet, random.Random(0))
    trained = run(train(controller, fleet, 1, lambda: 10.0))
    step, time, straggler = next(row for row in trained if row[2].index == 3)
    ended_at_step_5 = max(when for at, when, _ in trained if at == 5)
    assert (ended_at_step_5 > 400) == held
    assert (step - straggler.oldest_version > 1) == (not held) and time > 400


def skipping_run(max_skipped: int, **rewards: float) -> tuple[list[Group], dict[int, int]]:
    """Runs three on-policy steps of two groups; returns the trained and the skipped groups."""
    pacing = Pacing(prompts_per_epoch=8, groups_per_step=2, max_lag=0, last_step=3)
    fleet = ModelFleet(lambda index: 1.0 + index)
    controller = make_controller(pacing, fleet, random.Random(0), max_skipped, **rewards)
    trained = run(train(controller, fleet, 1, lambda: 1.0))
    return [group for _, _, group in trained], controller.ledger.skipped


def test_equal_groups_are_skipped_up_to_a_budget_that_each_version_fills_again() -> None:
    trained, skipped = skipping_run(3, every=1000)
    assert [group.index for group in trained] == [3, 4, 8, 9, 13, 14]
    assert list(skipped) == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    trained, skipped = skipping_run(3, every=1000, equal=0.0)
    assert [group.index for group in trained] == [0, 1, 2, 3, 4, 5] and not skipped


def interrupted_run(pacing: Pacing, seconds: float) -> dict[str, Any]:
    """Returns the state of a run after this time: group i takes 1 + i s a token, and a reward takes
    under 1 s."""
    fleet = ModelFleet(lambda index: 1.0 + index)
    controller = make_controller(pacing, fleet, random.Random(0), every=1000)

    async def work() -> dict[str, Any]:
        await controller.new_version(0)
        await asyncio.sleep(seconds)
        return controller.state_dict(0)

    return through_a_file(run(work()))


def resumed_run(
    pacing: Pacing,
    state: dict[str, Any],
    sampling: Sampling = SAMPLING,
    other_rewards: str = "",
    rows: Mapping[int, Prompt] = {},
) -> tuple[Controller, ModelFleet, list[Group]]:
    fleet = ModelFleet(lambda index: 1.0 + index)
    controller = make_controller(pacing, fleet, random.Random(0), every=1000, sampling=sampling)
    controller.prompts = dict(enumerate(PROMPTS)) | rows
    controller.load_state_dict(state, other_rewards)
    trained = run(train(controller, fleet, 1, lambda: 1.0))
    return controller, fleet, [group for _, _, group in trained]


SHORT = Pacing(prompts_per_epoch=100, groups_per_step=2, max_lag=1, last_step=3)


def test_a_resumed_run_continues_its_half_written_responses_and_requests_no_others() -> None:
    state = interrupted_run(SHORT, 7.5)  # 0 is finished; 1, 2 and 3 have 3, 2 and 1 of 4 tokens
    controller, fleet, trained = resumed_run(SHORT, state)
    assert fleet.asked == [1, 2, 3, 4, 5]
    assert controller.resumed == Resumed(responses=6, tokens=12, finished_groups=1)
    assert [group.index for group in trained] == list(range(6))
    for group in trained:
        for rollout in group.rollouts:
            assert (rollout.token_ids, rollout.logprobs) == ([0, 1, 2, 3], [-1.0, -2.0, -3.0, -4.0])
    assert controller.generated_tokens == 6 * 2 * TOKENS - 2 * TOKENS - 12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 3}, "data.rollouts_per_group was 2 and is 3"),
        ({"stop_tokens": (7,)}, "the end of the policy's responses has changed"),
    ],
)
def test_with_other_sampling_settings_open_groups_are_generated_anew_and_none_is_lost(
    changed: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = replace(SAMPLING, **changed)
    controller, fleet, trained = resumed_run(SHORT, interrupted_run(SHORT, 7.5), sampling)
    assert fleet.asked == [0, 1, 2, 3, 4, 5]
    assert all(len(group.rollouts) == sampling.n for group in trained) and not controller.resumed
    (record,) = caplog.records
    assert record.getMessage() == f"4 open groups of the checkpoint are generated anew: {message}."


@pytest.mark.parametrize(
    "changed", ["data.rewards right has changed", "the columns of their rows have changed"]
)
def test_with_other_rewards_or_answers_finished_groups_are_scored_again_and_none_is_written_again(
    changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    pacing = Pacing(prompts_per_epoch=100, groups_per_step=3, max_lag=1, last_step=2)
    state = interrupted_run(pacing, 13.5)
    finished = [group["index"] for group in state["finished"]]
    assert finished == [0, 1, 2]
    for group in state["finished"]:
        old = {"reward": -1.0, "reward_parts": {"old": -1.0}}
        group["judgements"] = [judged | old for judged in group["judgements"]]
    if changed.startswith("data.rewards"):
        _, fleet, groups = resumed_run(pacing, state, other_rewards=changed)
        again = finished
    else:
        other_answer = {1: replace(PROMPTS[1], columns={"answer": "5"})}
        _, fleet, groups = resumed_run(pacing, state, rows=other_answer)
        again = [1]
    assert (
        f"{len(again)} finished groups of the checkpoint are scored again: {changed}."
        in caplog.text
    )
    trained = {group.index: group for group in groups}
    assert sorted(trained) == list(range(6))
    assert fleet.asked == [3, 4, 5], "a finished response is written again"
    assert [index for index in finished if trained[index].rewards != [-1.0, -1.0]] == again

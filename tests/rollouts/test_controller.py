"""The controller on a virtual clock, between a pool of a model client and a model of a trainer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lrl.planning.clock import run
from lrl.rollouts.controller import GROUPS_ASKED_AT_ONCE, Controller, Resumed
from lrl.rollouts.ledger import Ledger, Pacing
from lrl.types import Group, Prompt, Rollout, Sampling
from tests.checkpoints.through_files import through_a_file
from tests.generators.model_fleet import ModelClient, make_pool

TOKENS = 4
SAMPLING = Sampling(n=2, max_tokens=9)
PROMPTS = [Prompt(id=index, token_ids=[TOKENS], text=str(index)) for index in range(200)]


class Scene:
    """A controller, and a fleet whose only generator writes a token of group i in `seconds(i)`."""

    def __init__(
        self,
        pacing: Pacing,
        seconds: Callable[[int], float] = lambda index: 1.0 + index,
        sampling: Sampling = SAMPLING,
        max_skipped: int = 0,
        equal: bool = True,
    ) -> None:
        self.equal = equal
        self.client = ModelClient(lambda asked: seconds(asked.priority))
        self.pool, _ = make_pool(1000, clients=[self.client])
        self.controller = Controller(
            PROMPTS,
            self.pool.generate,
            self.score,
            Ledger(pacing),
            sampling,
            deadline_s=60.0,
            max_skipped=max_skipped,
        )

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await asyncio.sleep(0.5)
        for place, rollout in enumerate(rollouts):
            assert rollout.reward is rollout.reward_failure is None and not rollout.reward_parts
            rollout.reward = 0.0 if self.equal else float(place)

    @property
    def asked(self) -> list[int]:
        """Indices of the groups in the order of the requests."""
        return list(dict.fromkeys(asked.priority for asked in self.client.asked))

    async def train(self, step_s: float = 1.0) -> list[tuple[int, float, Group]]:
        """Runs all steps; returns (step, time, group) of every group in the order of handing
        out."""
        controller, pacing = self.controller, self.controller.ledger.pacing
        trained = list[tuple[int, float, Group]]()
        await controller.new_version(0)
        for step in range(pacing.last_step or 0):
            for _ in range(pacing.groups_in(step)):
                group = await controller.next_group(step)
                trained.append((step, asyncio.get_running_loop().time(), group))
                await controller.new_version(step)  # a generator was replaced
            await asyncio.sleep(step_s)
            self.pool.generators[0].version = step + 1
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
    scene = Scene(
        Pacing(prompts_per_epoch=99, groups_per_step=33, max_lag=0, last_step=3), lambda index: 1.0
    )
    teacher = SlowTeacher()
    scene.controller.teacher = teacher  # type: ignore[assignment]
    trained = run(scene.train())
    assert [group.reference_version for _, _, group in trained] == [0] * 99
    assert teacher.most == GROUPS_ASKED_AT_ONCE, "many at once, and not all"


@pytest.mark.parametrize("wait", [True, False])
def test_the_fleets_failure_reaches_the_trainer_itself_and_soon(wait: bool) -> None:
    pacing = Pacing(
        prompts_per_epoch=100, groups_per_step=2, max_lag=3, last_step=50, wait_for_stragglers=wait
    )
    error = ConnectionError("generator 1 is gone")

    def seconds(index: int) -> float:
        if index == 5:
            raise error
        return 1.0

    scene = Scene(pacing, seconds)
    with pytest.raises(ConnectionError) as caught:
        run(scene.train(step_s=10.0))
    assert caught.value is error
    # The run did not live on the other groups until the missing one was due.
    assert scene.pool.generators[0].version <= 1


@pytest.mark.parametrize(("wait", "held"), [(True, True), (False, False)])
def test_a_straggler_holds_the_trainer_only_if_it_is_waited_for(wait: bool, held: bool) -> None:
    pacing = Pacing(
        prompts_per_epoch=100, groups_per_step=4, max_lag=1, last_step=20, wait_for_stragglers=wait
    )
    scene = Scene(pacing, lambda index: 100.0 if index == 3 else 1.0)  # group 3 takes 400 s
    trained = run(scene.train(step_s=10.0))
    step, time, straggler = next(row for row in trained if row[2].index == 3)
    ended_at_step_5 = max(when for at, when, _ in trained if at == 5)
    assert (ended_at_step_5 > 400) == held
    assert (step - straggler.oldest_version > 1) == (not held) and time > 400


@pytest.mark.parametrize(
    ("equal", "trained", "skipped"),
    [
        (True, [3, 4, 8, 9, 13, 14], [0, 1, 2, 5, 6, 7, 10, 11, 12]),
        (False, [0, 1, 2, 3, 4, 5], []),
    ],
)
def test_equal_groups_are_skipped_up_to_a_budget_that_each_version_fills_again(
    equal: bool, trained: list[int], skipped: list[int]
) -> None:
    pacing = Pacing(prompts_per_epoch=8, groups_per_step=2, max_lag=0, last_step=3)
    scene = Scene(pacing, max_skipped=3, equal=equal)
    assert [group.index for _, _, group in run(scene.train())] == trained
    assert list(scene.controller.ledger.skipped) == skipped


def interrupted_run(pacing: Pacing, seconds: float) -> dict[str, Any]:
    """Returns the state of a run after this time."""
    controller = Scene(pacing).controller

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
) -> tuple[Scene, list[Group]]:
    scene = Scene(pacing, sampling=sampling)
    scene.controller.prompts = dict(enumerate(PROMPTS)) | rows
    scene.controller.load_state_dict(state, other_rewards)
    return scene, [group for _, _, group in run(scene.train())]


SHORT = Pacing(prompts_per_epoch=100, groups_per_step=2, max_lag=1, last_step=3)


def test_a_resumed_run_continues_its_half_written_responses_and_requests_no_others() -> None:
    state = interrupted_run(SHORT, 7.5)  # 0 is finished; 1, 2 and 3 have 3, 2 and 1 of 4 tokens
    scene, trained = resumed_run(SHORT, state)
    assert scene.asked == [1, 2, 3, 4, 5]
    assert scene.controller.resumed == Resumed(responses=6, tokens=12, finished_groups=1)
    assert [group.index for group in trained] == list(range(6))
    for group in trained:
        for rollout in group.rollouts:
            assert (rollout.token_ids, rollout.logprobs) == ([0, 1, 2, 3], [-1.0, -2.0, -3.0, -4.0])
    assert scene.controller.generated_tokens == 6 * 2 * TOKENS - 2 * TOKENS - 12


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
    scene, trained = resumed_run(SHORT, interrupted_run(SHORT, 7.5), sampling)
    assert scene.asked == [0, 1, 2, 3, 4, 5]
    assert (
        all(len(group.rollouts) == sampling.n for group in trained) and not scene.controller.resumed
    )
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
        scene, groups = resumed_run(pacing, state, other_rewards=changed)
        again = finished
    else:
        other_answer = {1: replace(PROMPTS[1], columns={"answer": "5"})}
        scene, groups = resumed_run(pacing, state, rows=other_answer)
        again = [1]
    assert (
        f"{len(again)} finished groups of the checkpoint are scored again: {changed}."
        in caplog.text
    )
    trained = {group.index: group for group in groups}
    assert sorted(trained) == list(range(6))
    assert scene.asked == [3, 4, 5], "a finished response is written again"
    assert [index for index in finished if trained[index].rewards != [-1.0, -1.0]] == again

"""The ledger, and open groups through a checkpoint file; `test_state_machine.py` has runs whose
responses end in any order, and which crash at any moment."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.rollouts.ledger import Ledger, Pacing, load_group, save_group
from lrl.types import Group, Prompt, Rollout
from tests import made
from tests.checkpoints.through_files import through_a_file

STEPS = 9
shapes = st.tuples(st.integers(1, 13), st.integers(1, 5), st.integers(0, 3), st.booleans())


def make_pacing(shape: tuple[int, int, int, bool], last_step: int | None = STEPS) -> Pacing:
    prompts, groups, max_lag, wait = shape
    return Pacing(
        prompts_per_epoch=prompts,
        groups_per_step=groups,
        max_lag=max_lag,
        last_step=last_step,
        wait_for_stragglers=wait,
    )


PROMPTS = [Prompt(id=100 + index, token_ids=[1], text="") for index in range(1000)]


def admit(ledger: Ledger, version: int) -> list[int]:
    return [group.index for group in ledger.admit(version, PROMPTS, responses=1)]


def finish(ledger: Ledger, *indices: int) -> None:
    for index in indices:
        ledger.finish(ledger.running[index])


def resumed(ledger: Ledger, steps_done: int) -> Ledger:
    other = Ledger(ledger.pacing)
    other.load_state_dict(through_a_file(ledger.state_dict(steps_done)), PROMPTS.__getitem__)
    return other


def train(ledger: Ledger, step: int) -> None:
    """Does a step whose groups all finish."""
    admit(ledger, step)
    finish(ledger, *ledger.running)
    for _ in range(ledger.pacing.groups_in(step)):
        assert ledger.take(step) is not None


@given(shapes, st.integers(0, 2))
def test_the_ledger_does_not_grow_with_the_run(
    shape: tuple[int, int, int, bool], skipped: int
) -> None:
    ledger = Ledger(make_pacing(shape, None))
    for step in range(30):
        admit(ledger, step)
        for group in list(ledger.running.values())[:skipped]:
            ledger.skip(group)
        train(ledger, step)
    pacing, state = ledger.pacing, ledger.state_dict(30)
    assert len(ledger.finished) <= pacing.max_lag * pacing.groups_per_step
    assert len(ledger._handed) <= pacing.groups_per_step
    most = (pacing.max_lag + 1) * (pacing.groups_per_step + skipped)
    assert len(ledger._steps) == len(state["done_ahead"]) <= most


def test_open_groups_are_open_after_a_resume_in_the_same_order() -> None:
    ledger = Ledger(make_pacing((8, 2, 1, True)))
    admit(ledger, 0)
    finish(ledger, 3, 1, 0)
    assert ledger.take(0).index == 3  # handed to a step that does not end
    other = resumed(ledger, 0)
    assert list(other.finished) == [3, 1, 0] and list(other.running) == [2]
    assert admit(other, 0) == []
    assert [other.take(0).index, other.take(0).index] == [3, 1]
    later = resumed(other, 1)  # these two are trained now
    assert list(later.finished) == [0] and list(later.running) == [2] and admit(later, 1) == [4, 5]


@pytest.mark.parametrize("other", [(4, 1, 0, True), (3, 2, 0, True)])
def test_a_checkpoint_of_a_run_with_other_steps_is_refused(other: tuple) -> None:
    ledger = Ledger(make_pacing((4, 2, 0, True)))
    for step in range(3):
        train(ledger, step)
    state = ledger.state_dict(3)
    with pytest.raises(ValueError, match="groups_per_step"):
        Ledger(make_pacing(other)).load_state_dict(state, PROMPTS.__getitem__)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, STEPS - 1))
def test_a_group_is_due_in_the_step_that_trains_it_in_order_through_a_resume(
    shape: tuple[int, int, int, bool], resume_at: int
) -> None:
    ledger = Ledger(make_pacing(shape))
    for step in range(STEPS):
        admit(ledger, step)
        if step == resume_at:
            ledger = resumed(ledger, step)
        finish(ledger, *sorted(ledger.running))
        for _ in range(ledger.pacing.groups_in(step)):
            group = ledger.take(step)
            assert group is not None
            assert group.due == step <= group.admitted_by + ledger.pacing.max_lag


PROMPT = Prompt(id=7, token_ids=[5, 6], text="?")


def test_a_group_comes_back_unchanged_an_unfinished_one_without_its_rewards() -> None:
    one = made.rollout([0, 2**31 - 1, 7], versions=[3, 3, 5])
    two, none = made.rollout([1], version=5), made.rollout(0, finish_reason="abort")
    judged = {"text": "é", "reward": 0.5, "reward_parts": {"right": 0.5}, "turn_weight": 0.25}
    failed = replace(none, reward_failure="crash: exit code 139")
    rollouts = [replace(one, **judged), two, failed]
    group = Group(index=40, prompt=PROMPT, rollouts=rollouts, admitted_by=3)
    for scored, kept in ((True, rollouts), (False, [one, two, none])):
        loaded = load_group(through_a_file(save_group(group, scored=scored)), PROMPT)
        assert loaded == replace(group, rollouts=kept)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Prompt(id=8, token_ids=[5, 6], text="?"), "is row 8"),
        (Prompt(id=7, token_ids=[5, 7], text="?"), "has other tokens"),
    ],
)
def test_responses_to_another_prompt_are_refused(other: Prompt, what: str) -> None:
    saved = save_group(Group(index=40, prompt=PROMPT, rollouts=[Rollout()]), scored=False)
    load_group(saved, copy.deepcopy(PROMPT))
    with pytest.raises(
        ValueError, match=rf"row 7 .* place 40 .* {what}: data\.prompts has changed"
    ):
        load_group(saved, other)

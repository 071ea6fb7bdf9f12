"""The ledger in runs whose responses end in any order and which crash at any moment, its pacing (when
groups may start), and open groups through a checkpoint file."""

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.rollouts.ledger import Ledger, Pacing, load_group, save_group
from lrl.types import Group, Prompt, Rollout
from tests.checkpoints.through_files import through_a_file

STEPS = 9
shapes = st.tuples(st.integers(1, 13), st.integers(1, 5), st.integers(0, 3), st.booleans())
skipping = st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.3, 1.0]))
"""(most skips per version, share of the groups whose rewards are equal)"""


def make_pacing(shape: tuple[int, int, int, bool], last_step: int | None = STEPS) -> Pacing:
    prompts, groups, max_lag, wait = shape
    return Pacing(
        prompts_per_epoch=prompts,
        groups_per_step=groups,
        max_lag=max_lag,
        last_step=last_step,
        wait_for_stragglers=wait,
    )


def prompt_at(index: int) -> Prompt:
    return Prompt(id=100 + index, token_ids=[1], text="")


class Row:
    def __getitem__(self, index: int) -> Prompt:
        return prompt_at(index)


def admit(ledger: Ledger, version: int) -> list[int]:
    return [group.index for group in ledger.admit(version, Row(), responses=1)]


def finish(ledger: Ledger, *indices: int) -> None:
    for index in indices:
        ledger.finish(ledger.running[index])


def resumed(ledger: Ledger, steps_done: int) -> Ledger:
    other = Ledger(ledger.pacing)
    other.load_state_dict(through_a_file(ledger.state_dict(steps_done)), prompt_at)
    return other


class Run:
    """A trainer and its generators without time. The next response to end, equal groups, groups to
    give up and crashes are random."""

    def __init__(
        self,
        pacing: Pacing,
        seed: int,
        crashes: float = 0.0,
        skipping: tuple[int, float] = (0, 0.0),
    ) -> None:
        self.pacing = pacing
        self.every_n_steps = 1 + seed % (pacing.max_lag + 1)  # between syncs, as the lag allows
        self.crashes = crashes
        self.max_skipped, self.equal = skipping
        self.draw = random.Random(seed)
        self.trained: list[tuple[int, int]] = []
        """(index, lag of the oldest possible token) of each group, for the steps that are done."""
        self.step = 0
        self.start(None, {})
        self.checkpoint = self.save()

    def start(self, state: dict[str, Any] | None, born: dict[int, int]) -> None:
        self.ledger = Ledger(self.pacing)
        self.born = dict(born)
        self.in_step = list[tuple[int, int]]()
        if state is not None:
            self.ledger.load_state_dict(through_a_file(state), prompt_at)
        self.sync()

    def sync(self) -> None:
        self.version = self.step
        self.skips_left = self.max_skipped
        self.admit()

    def admit(self) -> None:
        admitted = admit(self.ledger, self.version)
        done = {index for index, _ in self.trained + self.in_step} | self.ledger.skipped.keys()
        assert not done & {*admitted}, "a group that is done starts again"
        self.born |= dict.fromkeys(admitted, self.version)

    def save(self) -> tuple[int, int, dict[str, Any], dict[int, int]]:
        return self.step, len(self.trained), self.ledger.state_dict(self.step), dict(self.born)

    def crash(self) -> None:
        """Restarts from the state within an unfinished step, or from an older checkpoint."""
        saved = self.save() if self.draw.random() < 0.5 else self.checkpoint
        self.step, trained, state, born = saved
        del self.trained[trained:]
        self.start(state, born)

    def finish_one(self) -> None:
        assert self.ledger.running, f"deadlock: step {self.step} waits and nothing runs"
        group = self.ledger.running[self.draw.choice(list(self.ledger.running))]
        if self.skips_left and self.draw.random() < self.equal:
            self.skips_left -= 1
            self.ledger.skip(group)
            self.admit()
        else:
            self.ledger.finish(group)

    def train_a_group(self) -> None:
        for _ in range(min(self.draw.randint(0, 3), len(self.ledger.running))):
            self.finish_one()
        while (group := self.ledger.take(self.step)) is None:
            self.finish_one()
        self.in_step.append((group.index, self.step - self.born[group.index]))
        if self.draw.random() < 0.1:
            self.ledger.give_up(group)

    def go(self, steps: int = STEPS) -> "Run":
        while self.step < steps:
            if self.draw.random() < self.crashes:
                self.crash()
            elif len(self.in_step) < self.pacing.groups_in(self.step):
                self.train_a_group()
            else:
                self.trained += self.in_step
                self.in_step, self.step = [], self.step + 1
                if self.draw.random() < 0.5:
                    self.checkpoint = self.save()
                if self.step % self.every_n_steps == 0:
                    self.sync()
        return self


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(0, 10**6), st.sampled_from([0.0, 0.1]), skipping)
def test_every_group_is_trained_or_skipped_once_none_is_lost_and_none_is_too_old(
    shape: tuple, seed: int, crashes: float, skipping: tuple
) -> None:
    pacing = make_pacing(shape)
    run = Run(pacing, seed, crashes, skipping).go()
    trained, skipped = [index for index, _ in run.trained], run.ledger.skipped
    assert len(trained) == pacing.groups_before(STEPS)
    assert sorted([*trained, *skipped]) == list(range(len(trained) + len(skipped)))
    assert not run.ledger.running and not run.ledger.finished
    assert run.ledger.given_up.keys() <= set(trained)
    assert all(prompt == prompt_at(index).id for index, prompt in skipped.items())
    if pacing.wait_for_stragglers:
        assert max(lag for _, lag in run.trained) <= pacing.max_lag


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(0, 10**6), st.integers(1, STEPS - 1))
def test_a_resume_with_a_lower_max_lag_keeps_the_lower_bound(
    shape: tuple, seed: int, resumed_at: int
) -> None:
    run = Run(make_pacing((*shape[:3], True)), seed)
    run.every_n_steps = 1
    run.go(resumed_at)
    before = len(run.trained)
    run.pacing = make_pacing((*shape[:2], 0, True))
    run.start(run.ledger.state_dict(run.step), run.born)
    run.go()
    assert all(lag == 0 for _, lag in run.trained[before:])
    assert sorted(index for index, _ in run.trained) == list(range(run.pacing.groups_before(STEPS)))


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(0, 10**6), st.sampled_from([20, 60]), st.sampled_from([0, 2]))
def test_the_ledger_does_not_grow_with_the_run(
    shape: tuple, seed: int, steps: int, max_skipped: int
) -> None:
    pacing = make_pacing((*shape[:3], True), None)
    run = Run(pacing, seed, skipping=(max_skipped, 0.3)).go(steps)
    ledger, state = run.ledger, run.ledger.state_dict(steps)
    most = (pacing.max_lag + 1) * pacing.groups_per_step
    assert len(ledger.running) + len(ledger.finished) <= most
    assert len(ledger._handed) <= pacing.groups_per_step
    most = (pacing.max_lag + run.every_n_steps) * (pacing.groups_per_step + max_skipped)
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


def test_a_group_that_an_unfinished_step_gave_up_is_handed_out_again_and_listed_then() -> None:
    ledger = Ledger(make_pacing((4, 2, 0, True)))
    finish(ledger, *admit(ledger, 0))
    ledger.give_up(ledger.take(0))
    ledger.take(0)
    other = resumed(ledger, 0)
    assert other.given_up == {} and admit(other, 0) == []
    other.give_up(other.take(0))
    other.take(0)
    assert other.state_dict(0)["given_up"] == {} and resumed(other, 1).given_up == {0: 100}


@pytest.mark.parametrize("other", [(4, 1, 0, True), (3, 2, 0, True)])
def test_a_checkpoint_of_a_run_with_other_steps_is_refused(other: tuple) -> None:
    state = Run(make_pacing((4, 2, 0, True)), seed=0).go(3).ledger.state_dict(3)
    with pytest.raises(ValueError, match="groups_per_step"):
        Ledger(make_pacing(other)).load_state_dict(state, prompt_at)


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


@st.composite
def responses(draw: st.DrawFn) -> Rollout:
    tokens = draw(st.integers(0, 20))
    reward = draw(st.none() | st.floats(-2, 2))
    return Rollout(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)),
        logprobs=draw(st.lists(st.floats(-50, 0, width=32), min_size=tokens, max_size=tokens)),
        versions=sorted(draw(st.lists(st.integers(3, 6), min_size=tokens, max_size=tokens))),
        finish_reason=draw(st.sampled_from(["", "stop", "length", "abort"])),
        text=draw(st.text(max_size=5)),
        reward=reward,
        reward_parts={} if reward is None else {"right": reward},
        reward_failure="crash: exit code 139" if reward is None else None,
        turn_weight=1.0 if reward is None else draw(st.floats(-2, 2)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(responses(), min_size=1, max_size=4), st.booleans())
def test_a_group_comes_back_unchanged_an_unfinished_one_without_its_rewards(
    rollouts: list[Rollout], scored: bool
) -> None:
    group = Group(index=40, prompt=PROMPT, rollouts=rollouts, admitted_by=3)
    loaded = load_group(through_a_file(save_group(group, scored=scored)), PROMPT)
    if not scored:
        kept = ("token_ids", "logprobs", "versions", "finish_reason")
        group.rollouts = [
            Rollout(**{name: getattr(one, name) for name in kept}) for one in rollouts
        ]
    assert loaded == group


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

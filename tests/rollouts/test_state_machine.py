"""Schedules that Hypothesis draws and shrinks: tokens, ends, rewards, steps and syncs, and
failures; with an environment that answers turns, or without.

Generators fail their proof, die or leave, just after a sync or later; responses fail for good,
rewards fail, the run stops within a step, or crashes and resumes from its last checkpoint, which
undoes all later events. Every schedule is then driven to the end of the run.

`LRL_SCHEDULES=10000 python -m pytest -s tests/rollouts/test_state_machine.py` tries that many, and
prints what came up in them.

Covers lrl/rollouts/controller.py, ledger.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lrl.generators.generator import Generator
from lrl.rollouts.ledger import Ledger, flattened
from tests.checkpoints.through_files import from_file
from tests.rollouts.modelled_run import COUNTS, ModelledRun, Row
from tests.rollouts.test_ledger import make_pacing

SCHEDULES = int(os.environ.get("LRL_SCHEDULES", "80"))
STEPS = 8
RESUMES = 5
"""Most interruptions of a schedule: with more it would hardly get beyond its first step."""
BOUND_S = 200.0
"""Virtual seconds in which any step must end once all responses are brought forward every second.
The slowest had six groups of episodes, half of them skipped, and took 62."""

EVENTS: dict[str, Callable[[ModelledRun, Generator], None]] = {
    "its proof fails": lambda run, one: run.prove(liars=[one]),
    "its process dies": ModelledRun.dies,
    "it leaves": ModelledRun.leaves,
    "the run is stopped": lambda run, one: run.stop(),
}
"""Events that evict a generator; the last one evicts all."""

picks = st.integers(0, 999)
rewards = st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, None]), min_size=3, max_size=3)


class Schedule(RuleBasedStateMachine):
    """One run with its events."""

    @initialize(
        pacing=st.tuples(
            st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.booleans()
        ).map(lambda shape: make_pacing(shape, STEPS)),
        responses_each=st.sampled_from([2, 1, 3, 2]),
        max_skipped=st.integers(0, 3),
        every=picks,
        head_start=st.integers(0, 12),
        turns=st.booleans(),
    )
    def begin(self, head_start: int, **settings: Any) -> None:
        self.run = ModelledRun(**settings)
        for _ in range(head_start):
            self.bring_forward()
        self.run.save()

    # Progress

    @precondition(lambda self: self.run.unfinished())
    @rule(which=picks, tokens=st.integers(1, 4), ends=st.booleans())
    def write(self, which: int, tokens: int, ends: bool) -> None:
        unfinished = self.run.unfinished()
        self.run.write(*unfinished[which % len(unfinished)], tokens, ends)

    @precondition(lambda self: self.run.unfinished())
    @rule(which=picks)
    def write_a_group_to_its_end(self, which: int) -> None:
        group = self.pick_group(which)
        for index, place in self.run.unfinished():
            if index == group:
                self.run.write(index, place, 1, ends=True)

    @precondition(lambda self: self.run.judging)
    @rule(which=picks, rewards=rewards)
    def judge(self, which: int, rewards: list[float | None]) -> None:
        waiting = list(self.run.judging)
        self.run.judge(waiting[which % len(waiting)], rewards[: self.run.responses_each])

    @rule(moves=st.integers(1, 6))
    def train(self, moves: int) -> None:
        """Moves the trainer until it waits for a group."""
        for _ in range(moves):
            if self.run.request is None and self.run.record.step < STEPS:
                self.run.train_on()
            else:
                self.run.poll()

    @rule(seconds=st.integers(1, 2), ends=st.sampled_from([False, False, True]))
    def all_goes_well(self, seconds: int, ends: bool) -> None:
        for _ in range(seconds):
            self.bring_forward(ends)

    @rule(every=st.integers(1, 3), tokens=st.integers(1, 3))
    def save(self, every: int, tokens: int) -> None:
        """Saves a checkpoint in the middle of some responses."""
        self.write_some(every, tokens)
        self.run.save()

    # Failures

    @precondition(lambda self: self.run.unfinished() and self.run.resumes < RESUMES)
    @rule(before=picks, behind=picks, which=picks, event=st.sampled_from([*EVENTS]))
    def something_happens_just_after_a_sync(
        self, before: int, behind: int, which: int, event: str
    ) -> None:
        """Ends some responses before the sync and some after it: all their tokens stay."""
        self.end_some(before)
        self.run.sync()
        self.write_some(every=1, tokens=1)
        self.end_some(behind)
        self.happens(event, which)

    @precondition(lambda self: self.run.pool.generators)
    @rule(which=picks, event=st.sampled_from([*EVENTS][:3]))
    def something_happens_to_a_generator(self, which: int, event: str) -> None:
        """Has another generator continue its responses with all tokens."""
        self.happens(event, which)

    def happens(self, event: str, which: int) -> None:
        generators = self.run.pool.generators
        EVENTS[event](self.run, generators[which % len(generators)])

    @precondition(lambda self: self.run.unfinished() and self.run.resumes < RESUMES)
    @rule(which=picks)
    def a_response_fails_for_good(self, which: int) -> None:
        self.run.fail(self.pick_group(which))

    @precondition(lambda self: self.run.resumes < RESUMES)
    @rule()
    def crash(self) -> None:
        self.run.crash()

    @precondition(lambda self: self.run.resumes < RESUMES)
    @rule(
        max_lag=st.sampled_from([None, None, None, 0, 1, 3]),
        responses=st.sampled_from([None, None, None, 1, 2, 3]),
        other_rewards=st.sampled_from(["", "", "data.rewards right has changed"]),
    )
    def stop(self, max_lag: int | None, responses: int | None, other_rewards: str) -> None:
        """Stops the run with a checkpoint, and resumes it with the same settings or with others."""
        run = self.run
        run.other_rewards = other_rewards
        self.write_some(every=2, tokens=1)
        run.save()
        state = from_file(run.checkpoint[1])
        saved = {group["index"] for group in [*state["finished"], *state["running"]]}
        if max_lag is not None and max_lag != run.pacing.max_lag:
            run.pacing = replace(run.pacing, max_lag=max_lag)
            trial = Ledger(run.pacing)
            trial.load_state_dict(state, Row(run.pacing.prompts_per_epoch).__getitem__)
            run.forget(saved - trial.finished.keys() - trial.running.keys())
        if responses is not None and responses != run.responses_each:
            run.responses_each = responses
            run.forget(saved)
        run.crash()

    def write_some(self, every: int, tokens: int) -> None:
        for index, place in self.run.unfinished()[::every]:
            self.run.write(index, place, tokens, ends=False)

    def end_some(self, which: int) -> None:
        for number, (index, place) in enumerate(self.run.unfinished()):
            if which >> number % 9 & 1:
                self.run.write(index, place, 1, ends=True)

    def pick_group(self, which: int) -> int:
        """Returns a group that is being written."""
        groups = sorted({index for index, _ in self.run.unfinished()})
        return groups[which % len(groups)]

    # Invariants

    @invariant()
    def an_unproved_generator_has_no_request(self) -> None:
        for one in [*self.run.pool.generators, *self.run.pool.pending]:
            if one.served_from is None:
                assert one.in_flight == 0 and not one.client.open  # type: ignore[attr-defined]

    @invariant()
    def the_record_is_true(self) -> None:
        ledger, record = self.run.ledger, self.run.record
        handed = {index: ledger._handed[index] for index in self.run.in_step}
        groups = {**ledger.running, **ledger.finished, **handed}
        assert len(groups) == len(ledger.running) + len(ledger.finished) + len(handed), (
            "a group is in two places"
        )
        done = [*record.trained, *ledger.skipped]
        assert len({*done, *groups}) == len(done) + len(groups), (
            "a group that is done is open, or done twice"
        )
        for index, group in groups.items():
            self.run.check(group)
            assert group.index == index == int(group.prompt.text)
            assert all(
                version >= group.admitted_by
                for rollout in group.rollouts
                for version in flattened(rollout).policy_versions
            )

    def teardown(self) -> None:
        """Drives the run to its end, wherever the schedule has ended."""
        try:
            while (step := self.run.record.step) < STEPS:
                end = self.run.loop.time() + BOUND_S
                while self.run.record.step == step:
                    assert self.run.loop.time() < end, f"step {step} waits for ever"
                    self.bring_forward()
                    self.the_record_is_true()
            self.every_group_is_trained_or_skipped_once()
        finally:
            COUNTS["schedules"] += 1
            self.run.cancel_all()
            self.run.loop.close()

    def bring_forward(self, ends: bool = True) -> None:
        """Proves new generators, admits pending generators, writes a token of every response,
        maybe its last, and scores the finished groups."""
        self.run.prove()
        self.run.poll()
        for index, place in self.run.unfinished():
            self.run.write(index, place, 1, ends)
        for place, index in enumerate(list(self.run.judging)):
            self.run.judge(
                index, [1.0, None, 0.0, 0.0, 0.0][(index + place) % 3 :][: self.run.responses_each]
            )
        self.train(1)
        self.run.settle()

    def every_group_is_trained_or_skipped_once(self) -> None:
        ledger, trained, prompts = (
            self.run.ledger,
            self.run.record.trained,
            self.run.controller.prompts,
        )
        assert len(trained) == self.run.pacing.groups_before(STEPS)
        assert sorted([*trained, *ledger.skipped]) == list(
            range(len(trained) + len(ledger.skipped))
        )
        assert not ledger.running and not ledger.finished
        rewards = {
            index: [r for r in given if r is not None]
            for index, given in self.run.record.rewards.items()
        }
        assert ledger.given_up == {
            index: prompts[index].id for index in trained if len(rewards[index]) < 2
        }
        for index, prompt in ledger.skipped.items():
            assert prompt == prompts[index].id
            assert len(rewards[index]) > 1 and len(set(rewards[index])) == 1


def test_every_group_is_trained_or_skipped_once_none_is_lost_and_none_is_too_old() -> None:
    unhurried = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Schedule,
        settings=settings(
            max_examples=SCHEDULES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=unhurried,
        ),
    )
    print(*(f"{count:,} {what}" for what, count in sorted(COUNTS.items())), sep=", ")
    assert COUNTS.total() > COUNTS["schedules"] > 0

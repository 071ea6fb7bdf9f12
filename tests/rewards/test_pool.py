"""Every response gets its own reward, whatever its neighbours do to their worker, and an error is
not a reward: failures are told apart by kind, tried once more, and end the run if there are many.
Rewards are tried before anything else starts. Real processes, real crashes."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lrl import errors
from lrl.advantages import rewards_by_action
from lrl.rewards import (
    GSM8K,
    ExactMatch,
    Function,
    Math,
    RewardFailuresError,
    RewardPool,
    TurnRewards,
)
from lrl.rewards.pool import WINDOW, FailureStats
from lrl.types import ENVIRONMENT, Prompt
from tests import made
from tests.event_loop import run
from tests.rewards import odd_rewards
from tests.rewards.scenes import PROMPT, counted, rollouts_of, scored, start_afresh, started

TIMEOUT_S = 1.0
"""Timeout of rewards that never end; the others have a minute, as a busy machine may need seconds
for nothing."""
MEMORY_GIB = 0.25
FAILURES = {
    **dict.fromkeys(["raise it", "unsayable", "cancel", "interrupt"], "exception"),
    **dict.fromkeys(["give nan", "give -inf", "huge", "badpart"], "nan"),
    **dict.fromkeys(["text", "nothing", "numbered"], "wrong_type"),
    **dict.fromkeys(["list", "tuple", "empty"], "wrong_shape"),
    **dict.fromkeys(["sysexit", "segfault", "exit", "exit 0"], "crash"),
    "hog": "memory",
}


@pytest.fixture(scope="module")
def shared_pools():
    limits = {"memory_gib": MEMORY_GIB}
    with (
        started([odd_rewards.obey], timeout_s=60.0, **limits) as patient,
        started([odd_rewards.obey], timeout_s=TIMEOUT_S, **limits) as impatient,
    ):
        yield patient, impatient


@pytest.fixture
def pool(shared_pools):
    return start_afresh(shared_pools[0])


@pytest.fixture
def impatient(shared_pools):
    return start_afresh(shared_pools[1])


# ---- a failure, and its neighbours


NUMBERS = st.floats(-10, 10).map(lambda number: (f"give {number!r}", False))
FAULTS = st.tuples(st.sampled_from(sorted(FAILURES)), st.booleans())
MARKERS = itertools.count()


def expected(order, only_at_first):
    """Reward, and kind of the failure."""
    if order not in FAILURES:
        return float(order.removeprefix("give ")), ""
    return (1.0, "") if only_at_first else (None, FAILURES[order])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example([[("give 1", False), *((order, False) for order in FAILURES), ("give 0", False)]])
@given(st.lists(st.lists(NUMBERS | FAULTS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_result_of_a_reward_and_no_death_of_a_worker_turns_into_a_reward_of_0(
    pool, tmp_path, groups
):
    """With faults at random places, some only at the first try, every count and reward is exact."""
    # The trainer compares the parts, not the worker: if it dies later in the job, they are lost.
    start_afresh(pool)._parts = {"obey"}
    batches = []
    for group in groups:
        first = [f"once {tmp_path}/{next(MARKERS)} " * once for _, once in group]
        orders = [order for order, _ in group]
        batches.append(rollouts_of(*map(str.__add__, first, orders)))

    async def score_all():
        await asyncio.gather(*(pool.score(PROMPT, batch) for batch in batches))

    run(score_all())
    rewards, kinds = zip(*itertools.starmap(expected, itertools.chain(*groups)), strict=True)
    rollouts = [rollout for batch in batches for rollout in batch]
    assert [rollout.reward for rollout in rollouts] == list(rewards)
    of_reward = ("exception: ", "nan: ", "wrong_type: ", "wrong_shape: ")
    for rollout in rollouts:
        why = rollout.reward_failure or ""
        assert rollout.reward is not None or rollout.reward_parts == {}
        assert not why.startswith(of_reward) or "obey" in why
    failures = [(rollout.reward_failure or "").partition(":")[0] for rollout in rollouts]
    assert failures == list(kinds)
    found = counted(pool)
    found.pop("retried", None)  # what failed before a death is tried again, and not counted
    scored_ones = {"scored": len(rewards) - rewards.count(None), "zero": rewards.count(0.0)}
    assert found == Counter(filter(None, kinds)) + Counter(scored_ones)


def test_zero_wrong_timed_out_and_crashed_are_counted_apart(impatient):
    zero, failed, late, deaf, crashed, fine = scored(
        impatient, "give 0", "raise why", "sleep 60", "deaf", "exit", "give 1"
    )
    assert (zero.reward, zero.reward_failure) == (0.0, None)
    assert failed.reward_failure.startswith("exception: obey: LookupError: why (")
    assert late.reward_failure.startswith("timeout: ") and deaf.reward is None
    assert crashed.reward_failure.startswith("crash: ")
    assert fine.reward == 1.0
    failed = {"exception": 1, "timeout": 2, "crash": 1}
    assert counted(impatient) == {"scored": 2, "zero": 1, "retried": 4} | failed


def test_a_slow_group_is_not_late_if_each_of_its_responses_is_in_time(impatient):
    rollouts = scored(impatient, *[f"sleep {0.5 * TIMEOUT_S}"] * 5)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 5


def test_a_cancelled_score_leaves_the_pool_usable(impatient):
    async def give_up():
        async with asyncio.timeout(0.1):
            await impatient.score(PROMPT, rollouts_of("loop"))

    with pytest.raises(TimeoutError):
        run(give_up())
    assert scored(impatient, "give 1")[0].reward == 1.0


def test_memory_counts_once_it_is_filled_and_does_not_fail_the_next_ones_nor_without_a_limit():
    with started([odd_rewards.obey], workers=1, timeout_s=20, memory_gib=MEMORY_GIB) as pool:
        orders = ("pid", "hog", "pid", f"reserve {8 * MEMORY_GIB}", f"take {2 * MEMORY_GIB}")
        before, _, after, reserved, held = (scored(pool, order)[0] for order in orders)
    assert before.reward != after.reward
    assert pool.counts["replaced"] == 4, "two tries of two"
    assert reserved.reward == 1.0 and held.reward_failure.startswith("memory: ")
    with started([odd_rewards.obey], workers=1, memory_gib=None) as unlimited:
        (free,) = scored(unlimited, f"take {2 * MEMORY_GIB}")
    assert free.reward == 1.0


def test_async_rewards_fail_one_by_one_and_those_of_a_group_overlap():
    limits = {"timeout_s": TIMEOUT_S, "memory_gib": MEMORY_GIB}
    with started([odd_rewards.obey_later], workers=1, **limits) as pool:
        rollouts = scored(pool, "give 1", "segfault", "cancel", "wait 0.01", "wait 60", "hog")
        together = scored(pool, *[f"wait {0.8 * TIMEOUT_S}"] * 8)
    assert [(rollout.reward_failure or "").partition(":")[0] for rollout in rollouts] == [
        "", "crash", "exception", "", "timeout", "memory",
    ]  # fmt: skip
    # One after another the eight would have taken 6 deadlines; only those that overlap are done
    # within the first job.
    assert [rollout.reward for rollout in together] == [1.0] * 8


@pytest.mark.parametrize("weight", [1e-3, -1.0, 1e200])
def test_a_sum_that_no_gradient_holds_is_no_reward(weight):
    with started([Function(odd_rewards.obey, weight=weight)], workers=1) as pool:
        *rollouts, fine = scored(pool, "give 1e300", "give 3e38", "give 1e19", "give 0")
    for rollout in rollouts:
        assert rollout.reward is None and rollout.reward_failure.startswith("nan: ")
    assert fine.reward == 0.0


# ---- too many of them


def test_a_broken_reward_ends_the_run_with_counts_a_sample_and_the_remedy(pool):
    start_afresh(pool, max_failures=0.1)
    enough = int(0.1 * WINDOW)
    scored(pool, *["raise it"] * (enough - 1), "text")
    with pytest.raises(RewardFailuresError) as caught:
        scored(pool, "raise it")
    message = str(caught.value)
    assert f"{enough + 1} of the last {enough + 1} responses" in message
    assert f"(exception {enough}, wrong_type 1)" in message
    assert "Prompt 0, response 'raise it': exception: obey: LookupError: it" in message
    assert "Fix the reward: " in message and "data.max_reward_failures is 0.1" in message


def test_another_pool_has_the_same_limits():
    limits = {"timeout_s": 3.0, "memory_gib": None, "start_timeout_s": 9.0}
    pool = RewardPool([odd_rewards.obey], max_failures=0.25, **limits)
    other = pool.like([odd_rewards.length], workers=1)
    spec = other.workers.spec
    assert {name: getattr(spec, name) for name in limits} == limits
    assert other._failure_stats.max_failures == 0.25


def test_the_share_is_that_of_the_last_responses():
    stats = FailureStats(0.5)
    for number in range(3 * WINDOW // 2):
        stats.failure(0, "", "exception: f: E: ") if number < WINDOW // 2 else stats.reward(1.0)
        stats.check()
    for _ in range(WINDOW // 2):
        stats.failure(0, "", "exception: f: E: ")
    stats.check()
    stats.failure(0, "", "exception: f: E: ")
    with pytest.raises(RewardFailuresError):
        stats.check()


# ---- several rewards


TURN, OBEY = TurnRewards(weight=0.5), Function(odd_rewards.obey, weight=3.0)


@pytest.mark.parametrize(
    ("rewards", "of_turns"),
    [
        *(([TurnRewards(weight=weight)], [weight, 0.0]) for weight in (0.0, -1.0)),
        ([TURN, TurnRewards(weight=0.25, name="again")], [0.75, 0.0]),
        *(([OBEY], [0.0, 3.0]), ([OBEY, TURN], [0.5, 3.0])),
    ],
)
def test_a_turn_is_paid_what_its_reward_adds_to_the_whole(rewards, of_turns):
    turns = {"versions": [0, ENVIRONMENT, 0], "turn_ends": [1, 3], "turn_rewards": [1.0, 0.0]}
    episode = made.rollout(3, text="give 1", **turns)
    with started(rewards, workers=1, timeout_s=60) as pool:
        for _ in range(2):  # a resumed run scores a group again
            run(pool.score(PROMPT, [episode]))
            assert rewards_by_action(episode, episode.turns) == of_turns
    assert episode.reward == sum(of_turns) and episode.turn_rewards == [1.0, 0.0]


def test_parts_are_logged_before_their_weight_and_sum_after_it_and_fail_as_a_whole():
    rewards = [Function(odd_rewards.length, weight=0.1), Function(odd_rewards.obey, weight=2.0)]
    with started(rewards, workers=1) as pool:
        (stopped,) = scored(pool, "parts")
        (cut,) = scored(pool, "parts", finish_reason="length")
        (failed,) = scored(pool, "raise it")
        (other,) = scored(pool, "give 1")
    assert stopped.reward_parts == {"obey/form": 0.25, "obey/sense": 0.5, "length": 2.0}
    assert stopped.reward == pytest.approx(2 * 0.75 + 0.1 * 2)
    assert cut.reward_parts == {"obey/form": 0.25, "obey/sense": 0.5, "length": -2.0}
    assert failed.reward is None and failed.reward_parts == {}
    assert other.reward is None and other.reward_failure.startswith("wrong_shape: the parts are")


def test_columns_reach_the_reward_even_beside_a_column_named_like_an_argument():
    with started([odd_rewards.level, ExactMatch("gold")], workers=1) as pool:
        clashes = dict.fromkeys(["prompt", "response", "num_tokens"], "clash")
        (rollout,) = scored(pool, "yes", columns={"level": 3, "gold": "yes "} | clashes)
    assert rollout.reward_parts == {"level": 3.0, "exact_match": 1.0}


def test_what_a_reward_does_to_its_columns_no_other_call_sees():
    rewards = [odd_rewards.first_answer, Function(odd_rewards.first_answer, name="again")]
    with started(rewards, workers=1) as pool:
        columns = {"answers": ["5"]}
        rollouts = scored(pool, "5", "5", "4", "5", columns=columns)
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0, 0.0, 2.0]
    assert columns == {"answers": ["5"]} and pool.counts["retried"] == 0


def test_a_plain_reward_may_run_an_event_loop_of_its_own_beside_async_ones():
    with started([odd_rewards.run_a_loop, odd_rewards.one_later], workers=1) as pool:
        assert [rollout.reward for rollout in scored(pool, "a", "b")] == [2.0, 2.0]


# ---- the trial before a run


def prompt(**columns):
    return Prompt(id=7, token_ids=[1], text="What is it?", columns=columns)


BROKEN = [
    (odd_rewards.missing, {}, "exception: missing: KeyError: 'difficulty' "),
    (odd_rewards.obey, {"answer": "loop"}, "timeout: no reward after 1 s"),
    (odd_rewards.obey, {"answer": "segfault"}, "crash: "),
    (odd_rewards.obey_later, {"solution": "raise it"}, "exception: obey_later: LookupError: it "),
]


@pytest.mark.parametrize(("reward", "columns", "named"), BROKEN)
def test_a_reward_that_cannot_work_is_refused_with_its_name(reward, columns, named):
    limits = {"workers": 1, "timeout_s": 1.0 if "timeout" in named else 60.0}
    with (
        pytest.raises(errors.EXPECTED) as caught,
        started([reward], first=prompt(**columns), **limits),
    ):
        pass
    message = str(caught.value)
    assert named in message and "to prompt 7" in message and "\n" not in message
    assert repr(columns.get("answer", columns.get("solution", "0"))) in message
    if reward is odd_rewards.missing:
        lines = Path(odd_rewards.__file__).read_text().splitlines()
        number = lines.index('    return columns["difficulty"]') + 1
        assert f"({odd_rewards.__file__}, line {number})" in message


def test_a_trial_leaves_the_counts_of_a_working_reward_at_zero():
    with started([odd_rewards.level], workers=1, first=prompt(level=3, answer="5")) as pool:
        assert not any(pool.counts.values())
        (rollout,) = scored(pool, "5", columns={"level": 2})
    assert rollout.reward == 2.0 and pool.counts["scored"] == 1


def test_the_reference_is_a_response_that_every_shipped_verifier_can_judge():
    first = prompt(answer="#### 5", solution=r"\boxed{5}")
    with started([GSM8K(), Math(), ExactMatch()], workers=1, first=first) as pool:
        assert pool.workers.trial is not None, "it got a reward, so scorers are tried with it"


def test_a_trial_that_fails_now_and_then_is_made_twice(tmp_path):
    first = prompt(answer=f"once {tmp_path}/tried raise it")
    with started([odd_rewards.obey], workers=1, first=first) as pool:
        assert (tmp_path / "tried").exists() and pool.workers.trial is not None


def test_with_every_failure_allowed_a_failed_trial_is_only_logged(caplog):
    first = prompt(answer="exit")
    with started([odd_rewards.obey], workers=1, max_failures=1.0, first=first) as pool:
        (rollout,) = scored(pool, "give 1")
    assert rollout.reward == 1.0
    assert "data.max_reward_failures is 1" in caplog.text

"""An error is not a reward: failures are told apart by kind, tried once more, and end the run if
there are many.
"""

import asyncio
import itertools
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrl.rewards import Function, RewardFailuresError, RewardPool
from lrl.rewards.failure_stats import KINDS, MIN_RESPONSES, WINDOW, FailureStats
from tests.rewards import odd_rewards
from tests.rewards.scenes import PROMPT, counted, rollouts_of, scored, start_afresh, started

TIMEOUT_S = 3.0
"""Timeout of rewards that never end; the others have a minute, as a busy machine may need seconds
for nothing."""
MEMORY_GIB = 0.25
REPORTED = {
    **dict.fromkeys(["raise it", "unsayable", "cancel", "interrupt"], "exception"),
    **dict.fromkeys(["give nan", "give -inf", "huge", "badpart"], "nan"),
    **dict.fromkeys(["text", "nothing", "numbered"], "wrong_type"),
    **dict.fromkeys(["list", "tuple", "empty"], "wrong_shape"),
    "parts": "wrong_shape",  # beside responses that get a number
    "sysexit": "crash",
}
DEADLY = {"segfault": "crash", "exit": "crash", "exit 0": "crash", "hog": "memory"}


@pytest.fixture(scope="module")
def shared_pool():
    with started([odd_rewards.obey], timeout_s=60.0, memory_gib=MEMORY_GIB) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    return start_afresh(shared_pool)


@pytest.mark.parametrize(("order", "kind"), (REPORTED | DEADLY).items())
def test_each_kind_of_failure_is_counted_apart_with_the_reward_that_failed(pool, order, kind):
    good, bad, other = scored(pool, "give 1", order, "give 2")
    assert (good.reward, other.reward) == (1.0, 2.0)
    assert bad.reward is None and bad.reward_parts == {}
    assert bad.reward_failure.startswith(f"{kind}: ") and "obey" in bad.reward_failure
    assert counted(pool) == {"scored": 2, "retried": 1, kind: 1}


MARKERS = itertools.count()
# The trainer compares the parts, not the worker: if the worker dies later in the job, they are lost
# with it.
WITH_DEATHS = {order: kind for order, kind in REPORTED.items() if order != "parts"} | DEADLY


@pytest.mark.parametrize("kinds", [REPORTED, WITH_DEATHS], ids=["results", "deaths"])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_result_of_a_reward_and_no_death_of_a_worker_turns_into_a_reward_of_0(
    pool, tmp_path, kinds, data
):
    """With faults at random places, some only at the first try, every count and reward is exact."""
    start_afresh(pool)._parts = {"obey"}
    numbers = st.floats(-10, 10).map(lambda number: f"give {number!r}")
    faults = st.tuples(st.sampled_from(sorted(kinds)), st.booleans())
    groups = data.draw(
        st.lists(st.lists(numbers | faults, min_size=1, max_size=4), min_size=1, max_size=3)
    )
    expected = dict.fromkeys(("scored", "zero", "retried", *KINDS), 0)
    batches, rewards = [], []
    for group in groups:
        texts = []
        for response in group:
            text, reward = response, None
            if isinstance(response, str):
                reward = float(response.split()[1])
            else:
                text, once = response
                expected["retried"] += 1
                expected[kinds[text]] += not once
                if once:
                    text, reward = f"once {tmp_path}/{next(MARKERS)} {text}", 1.0
            texts.append(text)
            rewards.append(reward)
            expected["scored"] += reward is not None
            expected["zero"] += reward == 0
        batches.append(rollouts_of(*texts))

    async def score_all():
        await asyncio.gather(*(pool.score(PROMPT, batch) for batch in batches))

    asyncio.run(score_all())
    rollouts = [rollout for batch in batches for rollout in batch]
    assert [rollout.reward for rollout in rollouts] == rewards
    assert [rollout.reward_failure is not None for rollout in rollouts] == [
        reward is None for reward in rewards
    ]
    found = counted(pool)
    if kinds.keys() & DEADLY.keys():  # what failed before a death is tried again, and not counted
        found.pop("retried", None)
        expected.pop("retried")
    assert found == {name: count for name, count in expected.items() if count}


def test_memory_that_one_response_filled_does_not_fail_the_next_ones():
    with started([odd_rewards.obey], workers=1, timeout_s=20, memory_gib=MEMORY_GIB) as pool:
        before, _, after = (scored(pool, order)[0] for order in ("pid", "hog", "pid"))
    assert before.reward != after.reward
    assert pool.counts["replaced"] == 2


def test_memory_that_is_only_reserved_does_not_count(pool):
    assert scored(pool, f"reserve {8 * MEMORY_GIB}")[0].reward == 1.0


def test_without_a_limit_a_response_may_take_more_memory(pool):
    with started([odd_rewards.obey], workers=1, memory_gib=None) as unlimited:
        (free,) = scored(unlimited, f"take {2 * MEMORY_GIB}")
    (held,) = scored(pool, f"take {2 * MEMORY_GIB}")
    assert free.reward == 1.0 and held.reward_failure.startswith("memory: obey: ")


def test_async_rewards_fail_one_by_one_too():
    with started(
        [odd_rewards.obey_later], workers=1, timeout_s=TIMEOUT_S, memory_gib=MEMORY_GIB
    ) as pool:
        rollouts = scored(pool, "give 1", "segfault", "cancel", "wait 0.01", "wait 60", "hog")
    assert [(rollout.reward_failure or "").partition(":")[0] for rollout in rollouts] == [
        "", "crash", "exception", "", "timeout", "memory",
    ]  # fmt: skip


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
    enough = int(0.1 * MIN_RESPONSES)
    scored(pool, *["raise it"] * (enough - 1), "text")
    with pytest.raises(RewardFailuresError) as caught:
        scored(pool, "raise it")
    message = str(caught.value)
    assert f"{enough + 1} of the last {enough + 1} responses" in message
    assert f"(exception {enough}, wrong_type 1)" in message
    assert "Prompt 0, response 'raise it': exception: obey: LookupError: it" in message
    assert "Fix the reward: " in message and "data.max_reward_failures is 0.1" in message


@given(st.lists(st.booleans(), max_size=40), st.sampled_from([0.02, 0.1, 0.5, 1.0]))
def test_the_run_ends_at_the_first_failure_above_the_share(stretches, share):
    """Each stretch is thirty failures or scored responses."""
    stats, seen = FailureStats(share), []
    for fails in stretches:
        seen += [fails] * 30
        for _ in range(30):
            stats.failure(0, "", "exception: f: E: ") if fails else stats.reward(1.0)
        last = seen[-WINDOW:]
        ends = sum(last) > share * max(MIN_RESPONSES, len(last))
        with pytest.raises(RewardFailuresError) if ends else nullcontext():
            stats.check()


def test_another_pool_has_the_same_limits():
    pool = RewardPool([odd_rewards.obey], timeout_s=3.0, memory_gib=None, max_failures=0.25)
    other = pool.like([odd_rewards.length], workers=1)
    assert (other.workers.spec.timeout_s, other.workers.spec.memory_gib) == (3.0, None)
    assert other._failure_stats.max_failures == 0.25

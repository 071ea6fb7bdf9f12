"""Every response gets its own reward, whatever its neighbours do to their worker: real processes,
real crashes."""

import asyncio

import pytest

from lrl.advantages import rewards_by_action
from lrl.rewards import ExactMatch, Function, RewardPool, TurnRewards
from lrl.types import ENVIRONMENT, Rollout
from tests.rewards import odd_rewards
from tests.rewards.scenes import PROMPT, counted, rollouts_of, scored, start_afresh, started

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def shared_pool():
    with started([odd_rewards.obey], timeout_s=TIMEOUT_S) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    return start_afresh(shared_pool)


TURN, OBEY = TurnRewards(weight=0.5), Function(odd_rewards.obey, weight=3.0)


@pytest.mark.parametrize(
    ("rewards", "of_turns"),
    [
        *(([TurnRewards(weight=weight)], [weight, 0.0]) for weight in (0.5, 0.0, -1.0)),
        ([TURN, TurnRewards(weight=0.25, name="again")], [0.75, 0.0]),
        *(([OBEY], [0.0, 3.0]), ([OBEY, TURN], [0.5, 3.0])),
    ],
)
def test_a_turn_is_paid_what_its_reward_adds_to_the_whole(rewards, of_turns):
    episode = Rollout(
        token_ids=[1, 2, 3],
        logprobs=[-1.0, 0.0, -1.0],
        versions=[0, ENVIRONMENT, 0],
        finish_reason="stop",
        text="give 1",
        turn_ends=[1, 3],
        turn_rewards=[1.0, 0.0],
    )
    with started(rewards, workers=1, timeout_s=60) as pool:
        for _ in range(2):  # a resumed run scores a group again
            asyncio.run(pool.score(PROMPT, [episode]))
            assert rewards_by_action(episode, episode.turns) == of_turns
    assert episode.reward == sum(of_turns) and episode.turn_rewards == [1.0, 0.0]


def test_zero_wrong_timed_out_and_crashed_are_counted_apart(pool):
    zero, failed, late, deaf, crashed, fine = scored(
        pool, "give 0", "raise why", "sleep 60", "deaf", "exit", "give 1"
    )
    assert (zero.reward, zero.reward_failure) == (0.0, None)
    assert failed.reward_failure.startswith("exception: obey: LookupError: why (")
    assert late.reward_failure.startswith("timeout: obey: ") and deaf.reward is None
    assert crashed.reward_failure.startswith("crash: ")
    assert fine.reward == 1.0
    failed = {"exception": 1, "timeout": 2, "crash": 1}
    assert counted(pool) == {"scored": 2, "zero": 1, "retried": 4} | failed


def test_a_slow_group_is_not_late_if_each_of_its_responses_is_in_time(pool):
    rollouts = scored(pool, *[f"sleep {0.5 * TIMEOUT_S}"] * 5)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 5


def test_a_cancelled_score_leaves_the_pool_usable(pool):
    async def give_up():
        async with asyncio.timeout(0.1):
            await pool.score(PROMPT, rollouts_of("loop"))

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert scored(pool, "give 1")[0].reward == 1.0


def test_parts_are_logged_before_their_weight_and_sum_after_it():
    rewards = [Function(odd_rewards.obey, weight=2.0), Function(odd_rewards.length, weight=0.1)]
    with started(rewards, workers=1) as pool:
        (stopped,) = scored(pool, "parts")
        (cut,) = scored(pool, "parts", finish_reason="length")
    assert stopped.reward_parts == {"obey/form": 0.25, "obey/sense": 0.5, "length": 2.0}
    assert stopped.reward == pytest.approx(2 * 0.75 + 0.1 * 2)
    assert cut.reward_parts == {"obey/form": 0.25, "obey/sense": 0.5, "length": -2.0}


def test_the_reward_fails_as_a_whole_if_one_part_fails():
    with started([odd_rewards.length, odd_rewards.obey], workers=1) as pool:
        (rollout,) = scored(pool, "raise it")
    assert rollout.reward is None and rollout.reward_parts == {}


def test_columns_reach_the_reward_even_beside_a_column_named_like_an_argument():
    with started([odd_rewards.level, ExactMatch("gold")], workers=1) as pool:
        clashes = dict.fromkeys(["prompt", "response", "num_tokens"], "clash")
        (rollout,) = scored(pool, "yes", columns={"level": 3, "gold": "yes "} | clashes)
    assert rollout.reward_parts == {"level": 3.0, "exact_match": 1.0}


def test_what_a_reward_does_to_its_columns_no_other_call_sees():
    rewards = [odd_rewards.first_answer, odd_rewards.answers_left, odd_rewards.first_answer_later]
    with started(rewards, workers=1) as pool:
        columns = {"answers": ["5"]}
        rollouts = scored(pool, "5", "5", "4", "5", columns=columns)
        (again,) = scored(pool, "5", columns=columns)
    right = {"first_answer": 1.0, "answers_left": 2.0, "first_answer_later": 1.0}
    wrong = {"first_answer": 0.0, "answers_left": 2.0, "first_answer_later": 0.0}
    found = [rollout.reward_parts for rollout in [*rollouts, again]]
    assert found == [right, right, wrong, right, right]
    assert columns == {"answers": ["5"]} and pool.counts["retried"] == 0


def test_a_plain_reward_may_run_an_event_loop_of_its_own_beside_async_ones():
    with started([odd_rewards.run_a_loop, odd_rewards.one_later], workers=1) as pool:
        ways = scored(pool, "asyncio.run", "none", "Runner", "new loop", "asyncio.run")
    assert [rollout.reward_parts["run_a_loop"] for rollout in ways] == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert [rollout.reward_parts["one_later"] for rollout in ways] == [1.0] * 5


def test_async_rewards_of_a_group_overlap():
    with started([odd_rewards.obey_later], workers=1, timeout_s=TIMEOUT_S) as pool:
        together = scored(pool, *[f"wait {0.8 * TIMEOUT_S}"] * 8)
    # One after another the eight would have taken 6 deadlines; only those that overlap are done
    # within the first job.
    assert [rollout.reward for rollout in together] == [1.0] * 8


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rewards": []}, "rewards is empty"),
        ({"workers": 0}, "data.reward_workers is 0"),
        ({"max_failures": 10}, "data.max_reward_failures is 10"),
        ({"max_failures": 0}, "data.max_reward_failures is 0"),
        ({"rewards": [odd_rewards.obey] * 2}, "more than one named 'obey'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        RewardPool(**{"rewards": [odd_rewards.obey]} | settings)

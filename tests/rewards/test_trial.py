"""Rewards are tried before anything else starts; the error names the reward and the line that
raised.

Covers lrl/rewards/pool.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lrl import errors
from lrl.rewards import GSM8K, ExactMatch, Math, RewardPool
from lrl.types import Prompt
from tests.leftovers import lives, wait_for_none, words
from tests.rewards import odd_rewards
from tests.rewards.scenes import scored, started


def prompt(**columns):
    return Prompt(id=7, token_ids=[1], text="What is it?", columns=columns)


BROKEN = [
    (odd_rewards.missing, {}, "exception: missing: KeyError: 'difficulty' "),
    (odd_rewards.obey, {"answer": "give nan"}, "nan: obey: "),
    (odd_rewards.obey, {"answer": "loop"}, "timeout: obey: no reward after 1 s"),
    (odd_rewards.obey, {"answer": "segfault"}, "crash: obey: "),
    (odd_rewards.obey_later, {"solution": "raise it"}, "exception: obey_later: LookupError: it "),
    (GSM8K(), {"answer": "unknown"}, "exception: gsm8k: ValueError: "),
    (ExactMatch("gold"), {"answer": "5"}, "exception: exact_match: ValueError: "),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "columns", "named"), BROKEN)
def test_a_reward_that_cannot_work_is_refused_with_its_name_and_no_worker_is_left(
    reward, columns, named
):
    before = set(psutil.Process().children(recursive=True))
    pool = RewardPool([reward], workers=1, timeout_s=1.0 if "timeout" in named else 60.0)
    with pytest.raises(errors.EXPECTED) as caught:
        pool.start(prompt(**columns))
    message = str(caught.value)
    assert named in message and "to prompt 7" in message and "\n" not in message
    assert repr(columns.get("answer", columns.get("solution", "0"))) in message

    def left():
        new = set(psutil.Process().children(recursive=True)) - before
        living = [" ".join(words(one)) for one in new if lives(one)]
        return [text for text in living if "resource_tracker" not in text]

    wait_for_none(left, 60.0, "its workers")


def test_the_error_of_a_trial_names_the_line_that_raised():
    with pytest.raises(ValueError) as caught:
        RewardPool([odd_rewards.missing], workers=1).start(prompt(level=3))
    lines = Path(odd_rewards.__file__).read_text().splitlines()
    number = lines.index('    return columns["difficulty"]') + 1
    assert f"({odd_rewards.__file__}, line {number})" in str(caught.value)
    assert "The row's columns: level." in str(caught.value)


def test_a_trial_leaves_the_counts_of_a_working_reward_at_zero():
    with started([odd_rewards.level], workers=1, first=prompt(level=3, answer="5")) as pool:
        assert not any(pool.counts.values())
        (rollout,) = scored(pool, "5", columns={"level": 2})
    assert rollout.reward == 2.0 and pool.counts["scored"] == 1


@pytest.mark.parametrize("rewards", [[GSM8K(), Math()], [ExactMatch()]])
def test_the_reference_is_a_response_that_every_shipped_verifier_can_judge(rewards):
    first = prompt(answer="#### 5", solution=r"\boxed{5}")
    with started(rewards, workers=1, first=first) as pool:
        pass
    assert pool.workers.trial is not None, "it got a reward, so scorers are tried with it"


def test_a_trial_that_fails_now_and_then_is_made_twice(tmp_path):
    first = prompt(answer=f"once {tmp_path}/tried raise it")
    with started([odd_rewards.obey], workers=1, first=first) as pool:
        pass
    assert (tmp_path / "tried").exists() and pool.workers.trial is not None


def test_with_every_failure_allowed_a_failed_trial_is_only_logged(caplog):
    first = prompt(answer="exit")
    with started([odd_rewards.obey], workers=1, max_failures=1.0, first=first) as pool:
        (rollout,) = scored(pool, "give 1")
    assert rollout.reward == 1.0
    assert "data.max_reward_failures is 1" in caplog.text


NOTEBOOK = """
from lrl.rewards import GSM8K, RewardPool
def brevity(prompt, response, **columns):
    return -len(response)
try:
    RewardPool([brevity]).start()
except ValueError as error:
    print(error)
pool = RewardPool([GSM8K(), "tests.odd_lengths:brevity"], workers=1)
pool.start()
pool.close()
print("well")
"""


def test_a_notebook_may_use_rewards_of_a_file_and_no_others():
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    refusal, well = ran.stdout.splitlines()
    assert "data.rewards cannot be loaded in a worker" in refusal and "'brevity'" in refusal
    assert "%%writefile my_rewards.py" in refusal and well == "well"

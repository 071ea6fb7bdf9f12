import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from lrl.evaluation import (
    Report,
    evaluate,
    mean_interval,
    pass_at_k,
    wilson_interval,
    write_responses,
)
from lrl.types import Group
from tests import made

FAILED = {"finish_reason": "length", "reward_failure": "timeout: 5 s"}


def group(index: int, rewards: list[float | None], **columns: Any) -> Group:
    rollouts = []
    for reward in rewards:
        how = {"versions": [3, 8], "text": f"ärgerlich {reward}"} | (
            FAILED if reward is None else {}
        )
        rollouts.append(made.rollout(2, reward, **how))
    return made.group(index, *rollouts, columns=columns)


def report(rewards: list[list[float | None]], binary: bool = True, **settings: Any) -> Report:
    groups = [group(i, row) for i, row in enumerate(rewards)]
    return evaluate("sums", groups, greedy=False, binary=binary, **settings)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_wilson_interval_is_newcombe_s_table(
    right: int, n: int, low: float, high: float
) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson_interval(right / n, n) == pytest.approx((low, high), abs=5e-5)
    answered = [[1.0]] * right + [[0.0]] * (n - right)
    assert mean_interval(answered) == pytest.approx((right / n, low, high), abs=5e-5)


def test_an_interval_of_shares_stays_between_0_and_1_and_is_never_a_point() -> None:
    for rows in ([[1.0, 1.0]] * 5, [[0.0]] * 5, [[1.0]], [[1.0, 0.0]] * 3, [[1.0, 0.0, 0.0]]):
        mean, low, high = mean_interval(rows)
        assert 0 <= low <= mean <= high <= 1 and high - low > 0.2


def test_responses_that_repeat_one_another_add_no_certainty() -> None:
    once = [[1.0], [0.0], [1.0], [1.0], [0.0], [0.0], [1.0]]
    for rows in (once, [[1.0]] * 7, [[0.0]]):
        assert mean_interval([row * 8 for row in rows]) == pytest.approx(mean_interval(rows))


def test_the_interval_covers_the_truth_19_times_in_20_for_clustered_responses() -> None:
    draw, covered, naive = random.Random(0), 0, 0
    for _ in range(400):
        chances = [draw.betavariate(0.6, 0.4) for _ in range(60)]  # true accuracy 0.6
        rows = [[float(draw.random() < chance) for _ in range(4)] for chance in chances]
        mean, low, high = mean_interval(rows)
        covered += low <= 0.6 <= high
        naive_low, naive_high = wilson_interval(mean, 240)
        naive += naive_low <= 0.6 <= naive_high
    assert 0.92 < covered / 400 < 0.98
    assert naive / 400 < 0.85, "the data would not tell the two intervals apart"


def test_other_rewards_get_the_interval_of_the_problems_means() -> None:
    # Means 1, 3, -1: standard deviation 2.
    found = mean_interval([[0.5, 1.5], [2.0, 4.0], [-1.5, -0.5]])
    half = 1.959964 * 2 / math.sqrt(3)
    assert found == pytest.approx((1, 1 - half, 1 + half))
    assert all(math.isnan(number) for number in mean_interval([[0.5]])[1:])


def test_pass_at_k_is_the_share_of_draws_with_a_right_response() -> None:
    for n, correct in itertools.product(range(1, 7), range(7)):
        if correct <= n:
            responses = [True] * correct + [False] * (n - correct)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(responses, k))
                assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at_k(2000, 3, 1000) == pytest.approx(1 - (1000 * 999 * 998) / (2000 * 1999 * 1998))


def test_an_error_is_not_a_reward() -> None:
    found = report([[1.0, None], [0.0, 0.0], [None, None]])
    assert found.reward == 0.5, "a failed response is not a wrong one"
    assert (found.n, found.k, found.failures, found.truncated) == (2, 2, 3, 3)
    assert found.pass_at_k == {1: 0.5, 2: 0.0}, "pass@2 counts only the problem with two scores"


def test_pass_at_k_goes_up_in_powers_of_two_to_the_number_of_responses() -> None:
    found = report([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6])
    assert found.pass_at_k == pytest.approx({1: 1 / 12, 2: 1 / 6, 4: 1 / 3, 6: 1 / 2})
    assert found.pass_at_k[1] == pytest.approx(found.reward)
    assert report([[0.5, 1.0]], binary=False).pass_at_k == {}, "half right is neither"


def test_the_breakdown_follows_the_columns_in_the_order_of_their_values() -> None:
    groups = [
        group(0, [1.0, 0.0], level=10),
        group(1, [1.0], level=2),
        group(2, [0.0], level=2),
        group(3, [None], level=1),
    ]
    found = evaluate("sums", groups, greedy=True, binary=True, by=["level"])
    assert list(found.by["level"].items()) == [("2", (0.5, 2)), ("10", (0.5, 1))]
    metrics = found.metrics()
    assert metrics["eval/sums/accuracy"] == metrics["eval/sums/level/2"] == 0.5
    assert metrics["eval/sums/pass@2"] == 1.0
    assert metrics["eval/sums/reward_low"] < 0.5 < metrics["eval/sums/reward_high"]
    assert all(isinstance(number, float) for number in metrics.values())


def test_an_evaluation_without_a_single_score_has_no_accuracy() -> None:
    failed = evaluate("sums", [group(0, [None], level=3)], greedy=True, binary=True, by=["level"])
    for found in (report([]), failed):
        assert found.n == 0 and math.isnan(found.reward) and found.pass_at_k == {}
        assert "problems: 0" in found.as_table()


def test_only_a_reward_that_tells_right_from_wrong_has_an_accuracy() -> None:
    found, right = (report([[0.5], [1.0], [0.0]], binary=binary) for binary in (False, True))
    names = [f"eval/sums/reward{end}" for end in ("", "_low", "_high")]
    assert [found.metrics()[name] for name in names] == [0.5, found.low, found.high]
    assert found.as_line().startswith("mean reward on sums 0.500 (")
    for text in (*found.metrics(), found.as_line(), found.as_table()):
        assert "accuracy" not in text and "pass@" not in text
    assert "accuracy" in right.as_line()
    assert right.metrics().keys() - {"eval/sums/accuracy"} == found.metrics().keys()


def test_every_response_is_written_once_with_its_reward(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    write_responses(path, "sums", [group(7, [1.0, None], day=Path("x"))])
    write_responses(path, "sums", [group(7, [1.0, None], day=Path("x"))])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["reward"], row["reward_failure"]) for row in rows] == [
        (7, 1.0, None),
        (7, None, "timeout: 5 s"),
    ]
    assert rows[0]["response"] == "ärgerlich 1.0" and rows[0]["versions"] == [3, 8]
    assert rows[0]["columns"] == {"day": "x"} and rows[1]["finish_reason"] == "length"


HALF = "half a pair: \ud83d"


def test_half_a_surrogate_pair_ends_no_evaluation_and_is_read_again_as_it_was(
    tmp_path: Path,
) -> None:
    failed = group(7, [1.0, None], level=HALF, **{HALF: [{HALF: HALF}]})
    failed.rollouts[1].reward_failure = f"exception: ValueError: {HALF}"
    write_responses(tmp_path / "answers.jsonl", "sums", [failed])
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    _, row = map(json.loads, text.splitlines())
    assert "ärgerlich" in text and row["columns"] == failed.prompt.columns
    assert row["reward_failure"] == failed.rollouts[1].reward_failure
    found = evaluate("sums", [failed], greedy=False, binary=True, by=["level"])
    assert "eval/sums/level/half a pair: \\ud83d" in found.metrics()
    assert "half a pair: \\ud83d" in found.as_table()

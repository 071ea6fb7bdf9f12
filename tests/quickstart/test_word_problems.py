"""The word problems: right answers, and no pair of numbers that is both trained and held out."""

import random
import re
from operator import add, mul, sub

from lrl.quickstart.word_problems import held_out, problems
from lrl.rewards import GSM8K


def numbers(row: dict[str, str]) -> tuple[str, int, int]:
    first, second = map(int, re.findall(r"\d+", row["question"]))
    return row["kind"], first, second


def test_every_answer_is_right_and_is_the_only_one_that_is_rewarded() -> None:
    meant = {"sum": add, "difference": sub, "product": mul}
    judge = GSM8K()
    for row in problems() + held_out():
        kind, first, second = numbers(row)
        right = meant[kind](first, second)
        assert int(row["answer"]) == right
        columns = {"answer": row["answer"]}
        assert judge(row["question"], f"It is {first} and {second}, so {right}.", **columns) == 1.0
        assert judge(row["question"], f"It is {right + 1}.", **columns) == 0.0


def test_no_pair_of_numbers_is_trained_and_held_out_and_no_question_comes_twice() -> None:
    trained, held = problems(), held_out()
    random.seed(1)  # a run's seed must not reach them
    assert (problems(), held_out()) == (trained, held)
    assert not set(map(numbers, trained)) & set(map(numbers, held))
    for rows, count in ((trained, 1000), (held, 80)):
        assert len({row["question"] for row in rows}) == len(rows)
        kinds = [row["kind"] for row in rows]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(kinds, count)

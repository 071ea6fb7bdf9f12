"""The calculator writes what is right, or nothing."""

from __future__ import annotations

import pytest

from lrl.quickstart.calculator import Calculator, ProseCalculator, calculate

RESULTS = {
    "7+8=": "15",
    "53 + 68 =": " 121",
    "so 80 - 49 =": " 31",
    "18 + 5 = 23 and 3 x 4 + 2 * 5 - 1=": "21",
    "it is -5 + 3 =": " -2",
    "2 - 3 × 4 =": " -10",
    "10 / 4 =": " 2.5",
    "2 ÷ 3=": "0.6667",
    "12.5*2 =": " 25",
    "7/0=": "",
    "99999999+1=": "",
    "9 =": "",
    "x =": "",
    "=": "",
}


@pytest.mark.parametrize("turn", RESULTS)
def test_a_calculation_gets_its_result_and_all_else_nothing(turn: str) -> None:
    assert ProseCalculator().reply(turn) == (RESULTS[turn], False, 0.0)
    assert Calculator().reply(turn) == (RESULTS[turn].strip(), False, 0.0)


def test_a_turn_without_an_equals_sign_ends_the_episode() -> None:
    assert ProseCalculator().reply("The answer is 5 = five.") == ("", True, 0.0)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        *(("80 - 49", "31"), (" 5 x 12", "60"), ("7/2", "3.5"), ("-2 + 3 * 4", "10")),
        *((part, "error: ") for part in ("(3 + 4) * 5 + 2", "80 - 49 = 31", "80", "7 / 0", "")),
    ],
)
def test_the_tool_works_a_whole_expression_out_and_no_part_of_one(
    expression: str, result: str
) -> None:
    assert calculate(expression).partition(" ")[0] == result.strip()

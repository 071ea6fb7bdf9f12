"""The word problems as the recipe `agent` shows them to the policy, for `lrl.environments.Tools`: the
same system message, and the same solved problem in front."""

from typing import Any

from lrl.quickstart import word_problems
from lrl.quickstart.pydantic_ai_agent import INSTRUCTIONS

CALL = {"name": "calculate", "arguments": {"expression": "12 + 7"}}
BEFORE: list[dict[str, Any]] = [
    {"role": "system", "content": INSTRUCTIONS},
    {
        "role": "user",
        "content": "Tom has 12 pens and finds 7 more. How many pens does Tom have now?",
    },
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "example", "type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "calculate", "tool_call_id": "example", "content": "19"},
    {"role": "assistant", "content": "Tom has 19 pens now."},
]


def problems() -> list[dict[str, Any]]:
    return [behind_the_example(row) for row in word_problems.problems()]


def held_out() -> list[dict[str, Any]]:
    return [behind_the_example(row) for row in word_problems.held_out()]


def behind_the_example(row: dict[str, str]) -> dict[str, Any]:
    return row | {"question": [*BEFORE, {"role": "user", "content": row["question"]}]}

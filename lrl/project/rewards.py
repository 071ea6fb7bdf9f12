"""What a response is worth."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def right(prompt: str, response: str, *, answer: str, **columns: object) -> bool:
    """Returns whether the last number of the response is the answer: the reward is then 1, else 0.

    Args:
        prompt: The prompt, as it stands in the data.
        response: The text of the response.
        answer: The column `answer` of the row; name the columns that you need.
        columns: The row's other columns, and `finish_reason`, `num_tokens` and more.
    """
    numbers = NUMBER.findall(response)
    return bool(numbers) and numbers[-1] == answer

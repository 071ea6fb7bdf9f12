"""Rewards of a few lines: by the text or the length of a response, or by a scorer of
reasoning-gym."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import GaveUp, Reward, reference_of
from lrl.rewards.verifiers.final_answer import marked_answers
from lrl.system.imports import did_you_mean


class ExactMatch(Reward):
    """1 if the response equals a column of the row, apart from white space around both, else 0. A
    number has no exponent; a whole one may end in `.0`.

    Args:
        column: The column with the right answer.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    binary = True

    def __init__(
        self, column: str = "answer", weight: float = 1.0, name: str = "exact_match"
    ) -> None:
        super().__init__(weight, name)
        self.column = column

    def check_row(self, columns: Mapping[str, Any]) -> None:
        reference_of(columns, self.column)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        right = reference_of(columns, self.column).strip()
        response = response.strip()
        is_number = not isinstance(columns[self.column], str)
        return float(response == right or (is_number and response == right.removesuffix(".0")))


class Format(Reward):
    r"""1 if the whole response, stripped of white space around it, matches a regular expression,
    else 0.

    Args:
        pattern: Python regular expression; `.` also matches line ends. Example:
            `<think>.*</think>.*\\boxed\{.*`.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    binary = True

    def __init__(self, pattern: str, weight: float = 1.0, name: str = "format") -> None:
        super().__init__(weight, name)
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        return float(self.pattern.fullmatch(response.strip()) is not None)


class LengthPenalty(Reward):
    """0 up to `free_tokens`, then linearly down to -1 at `max_tokens`: DAPO's soft over-long
    punishment (2503.14476, equation 13), with L_max and L_max - L_cache.

    Args:
        free_tokens: Response tokens that cost nothing.
        max_tokens: Response tokens from which on the penalty is -1; usually the sampling limit.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    def __init__(
        self, free_tokens: int, max_tokens: int, weight: float = 1.0, name: str = "length_penalty"
    ) -> None:
        super().__init__(weight, name)
        if not 0 <= free_tokens < max_tokens:
            raise ConfigError(
                f"LengthPenalty(free_tokens={free_tokens}, max_tokens={max_tokens}): free_tokens "
                "must be at least 0 and below max_tokens."
            )
        self.free_tokens = free_tokens
        self.max_tokens = max_tokens

    def __call__(self, prompt: str, response: str, *, num_tokens: int = 0, **columns: Any) -> float:
        excess = (num_tokens - self.free_tokens) / (self.max_tokens - self.free_tokens)
        return -min(max(excess, 0.0), 1.0)


class ReasoningGym(Reward):
    r"""The score of the task's own scorer, from 0 to 1, for the prompts of `lrl.ReasoningGym`. The
    answer is the last `<answer></answer>` or `\boxed{}`, else the whole response."""

    name = "reasoning_gym"

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the score; `GaveUp` for an answer at which the scorer raises an exception."""
        # Not the prompt: a template may have changed the question.
        task, item = columns["task"], columns["item"]
        marked = marked_answers(response)
        answer = (marked[0] if marked else response).strip()
        score = _scorer(task, json.dumps(columns["settings"], sort_keys=True)).score_answer
        try:
            return float(score(answer, item))
        except Exception as error:
            # Four tasks raise at an answer in another form. A scorer that fails at the right answer
            # too is broken, and this call says so.
            score(item["answer"], item)
            return GaveUp(f"{task} cannot read {answer!r:.60}: {type(error).__name__}: {error}")


def registered(task: str) -> tuple[Any, Any]:
    """Returns the classes of a task: its data set, and the dataclass of its settings."""
    try:
        # Not at the top: it imports all of its tasks, and every reward worker this file.
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'lrl[reasoning-gym]'.") from error
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}.{did_you_mean(task, DATASETS)}")
    dataset_class, config_class = DATASETS[task]
    return dataset_class, config_class


@functools.cache
def _scorer(task: str, settings: str) -> Any:
    dataset_class, config_class = registered(task)
    return dataset_class(config_class(**json.loads(settings)))

"""The score in the text of a judge. A text without one is a failure, and so is a score that is out
of bounds: neither says that the response is bad."""

import math
import re

from lrl.errors import ConfigError, JudgeError
from lrl.rewards.chat_endpoint import Answer

LAST_NUMBER = (
    r"(?:/|\bout\s+of\b)[\s*_(]*\d+(?:[.,]\d+)*"
    r"|(?<![\w.,])([-+]?\d+(?:[.,]\d+)*)(?!\w)"
)
"""Any number but the 10 of `8/10` and of `8 out of 10`, which is the scale."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
_SHOWN = 120


class ScoreReader:
    """Reads a score and maps it to 0..1.

    Args:
        pattern: Regular expression with one group, the score; None for the last number. Of several
            matches the last one counts.
        lowest: Score that is worth 0.
        highest: Score that is worth 1.

    Raises:
        ConfigError: `pattern` is no such expression, or there is no scale from `lowest` to
            `highest`.
    """

    def __init__(self, pattern: str | None, lowest: float, highest: float) -> None:
        self.pattern = _compiled(LAST_NUMBER if pattern is None else pattern)
        self.lowest = lowest
        self.highest = highest
        if not _is_scale(lowest, highest):
            raise ConfigError(
                f"Judge.lowest is {lowest} and Judge.highest is {highest}: give the two ends of "
                "the judge's scale, the lower one first."
            )

    def score(self, answer: Answer) -> float:
        """Returns a number from 0 to 1.

        Raises:
            JudgeError: Of kind `judge_no_score`.
        """
        if answer.finish_reason == "length":
            raise _no_score("is cut: raise Judge.max_tokens", answer)
        found = [match[1] for match in self.pattern.finditer(answer.text) if match[1] is not None]
        if not found:
            raise _no_score("has no score", answer)
        score = found[-1].strip()
        if not _NUMBER.fullmatch(score):
            raise _no_score(f"has the score {score!r:.40}, which is no number", answer)
        if not self.lowest <= float(score) <= self.highest:
            bounds = f"{self.lowest:g} to {self.highest:g} (Judge.lowest, Judge.highest)"
            raise _no_score(f"has the score {score:.40}, which is not in {bounds}", answer)
        return (float(score) - self.lowest) / (self.highest - self.lowest)


def _is_scale(lowest: object, highest: object) -> bool:
    if not isinstance(lowest, int | float) or not isinstance(highest, int | float):
        return False
    return math.isfinite(lowest) and math.isfinite(highest) and lowest < highest


def _no_score(what: str, answer: Answer) -> JudgeError:
    # Its end: a judge reasons first.
    shown = answer.text if len(answer.text) <= _SHOWN else f"...{answer.text[-_SHOWN:]}"
    return JudgeError("judge_no_score", f"the judge's answer {what}: {shown!r}")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"Judge.pattern is {pattern!r:.80}, which is no regular expression: {error}."
        ) from error
    if compiled.groups != 1:
        raise ConfigError(
            f"Judge.pattern is {pattern!r:.80}, which has {compiled.groups} groups: put the score, "
            "and nothing else, in ( ), as in 'SCORE: (\\d+)'; (?: ) makes no group."
        )
    return compiled

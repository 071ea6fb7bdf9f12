"""The score of a judge: the form in which it is asked for, and the only one that is read.

A text in another form is a failure, and so is a score that is out of bounds: neither says that the
response is bad.
"""

import json
import math
import re
from typing import Any, Literal, get_args

from lrl.errors import ConfigError, JudgeError
from lrl.rewards.judge.cache import Answer
from lrl.system.config_errors import one_of

Form = Literal["json", "line"]
_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": _SCHEMA},
}
_ASKED = {
    "json": 'Answer with JSON and nothing else: {"reason": "one sentence", "score": X}, ',
    "line": "End your answer with a line that has nothing but Score: X, ",
}
_LINE = re.compile(r"Score: (-?[0-9]+(?:\.[0-9]+)?)")
_SHOWN = 120


class ScoreReader:
    """Asks for a score, reads it and maps it to 0..1.

    Args:
        form: Of the answer: `json` or `line`; see `Judge`.
        lowest: Score that is worth 0.
        highest: Score that is worth 1.

    Raises:
        ConfigError: There is no scale from `lowest` to `highest`.
    """

    def __init__(self, form: Form, lowest: float, highest: float) -> None:
        one_of("Judge", form=(get_args(Form), form))
        self.form = form
        self.lowest = lowest
        self.highest = highest
        if not -math.inf < lowest < highest < math.inf:
            raise ConfigError(
                f"Judge.lowest is {lowest} and Judge.highest is {highest}: give the two ends of "
                "the judge's scale, the lower one first."
            )
        self.asked = f"{_ASKED[form]}where X is a number from {lowest:g} to {highest:g}."
        """The end of the user's message."""
        self.fields = {"response_format": _RESPONSE_FORMAT} if form == "json" else {}
        """Fields of the request."""

    def score(self, answer: Answer) -> float:
        """Returns a number from 0 to 1.

        Raises:
            JudgeError: Of kind `judge_no_score`.
        """
        if answer.finish_reason == "length":
            raise _no_score("is cut: raise Judge.max_tokens", answer)
        score = _of_json(answer.text) if self.form == "json" else _of_line(answer.text)
        if score is None:
            raise _no_score(f"has no score in the form that Judge.form asks ({self.form})", answer)
        if not self.lowest <= score <= self.highest:
            bounds = f"{self.lowest:g} to {self.highest:g} (Judge.lowest, Judge.highest)"
            raise _no_score(f"has the score {score:.4g}, which is not in {bounds}", answer)
        return (score - self.lowest) / (self.highest - self.lowest)


def _of_json(text: str) -> float | None:
    try:
        found: Any = json.loads(text, parse_int=float, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, tuple) or sorted(name for name, _ in found) != ["reason", "score"]:
        return None
    reason, score = (dict(found)[name] for name in ("reason", "score"))
    return score if isinstance(reason, str) and isinstance(score, float) else None


def _of_line(text: str) -> float | None:
    score = _LINE.fullmatch(text.strip().rpartition("\n")[2].strip())
    return float(score[1]) if score else None


def _no_score(what: str, answer: Answer) -> JudgeError:
    # Its end: a judge reasons first.
    shown = answer.text if len(answer.text) <= _SHOWN else f"...{answer.text[-_SHOWN:]}"
    return JudgeError("judge_no_score", f"the judge's answer {what}: {shown!r}")

"""The score of a judge: the form in which it is asked for, and the only one that is read.

A text in another form is a failure, and so is a score that is out of bounds: neither says that the
response is bad.
"""

import json
import math
import re
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ScoreReader:
    """Asks for a score, reads it and maps it to 0..1; see `Judge` for the fields.

    Raises:
        ConfigError: There is no such form, or no scale from `lowest` to `highest`.
    """

    form: Form
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        one_of("Judge", form=(get_args(Form), self.form))
        if not -math.inf < self.lowest < self.highest < math.inf:
            raise ConfigError(
                f"Judge.lowest is {self.lowest} and Judge.highest is {self.highest}: give the two "
                "ends of the judge's scale, the lower one first."
            )

    @property
    def asked(self) -> str:
        """The end of the user's message."""
        return f"{_ASKED[self.form]}where X is a number from {self.lowest:g} to {self.highest:g}."

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request."""
        return {"response_format": _RESPONSE_FORMAT} if self.form == "json" else {}

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
        # As a tuple of pairs, which no list of JSON is, and in which a name may come twice.
        found = json.loads(text, parse_int=float, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    match dict(found) if isinstance(found, tuple) and len(found) == 2 else None:
        case {"reason": str(), "score": float(score)}:
            return score
    return None


def _of_line(text: str) -> float | None:
    score = _LINE.fullmatch(text.strip().rpartition("\n")[2].strip())
    return float(score[1]) if score else None


def _no_score(what: str, answer: Answer) -> JudgeError:
    # Its end: a judge reasons first.
    shown = answer.text if len(answer.text) <= _SHOWN else f"...{answer.text[-_SHOWN:]}"
    return JudgeError("judge_no_score", f"the judge's answer {what}: {shown!r}")

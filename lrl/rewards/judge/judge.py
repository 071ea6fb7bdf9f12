"""A language model as a reward: it reads the response and writes a score.

A text in another form is a failure, and so is a score that is out of bounds: neither says that the
response is bad.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from lrl.errors import ConfigError, JudgeError
from lrl.rewards.base import Reward
from lrl.rewards.judge.cache import Answer, JudgeCache
from lrl.rewards.model_endpoint import ModelEndpoint, NotSent
from lrl.rewards.reference import reference_of
from lrl.system.config_errors import one_of

OF_THE_RESPONSE = ("prompt", "response", "finish_reason", "num_tokens", "turn_rewards")
"""Names that a template may have besides the columns of the row."""
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


class Judge(Reward):
    """The score that a language model gives a response, mapped to 0..1. The model is behind an
    OpenAI-compatible endpoint (`/v1/chat/completions`).

    An answer without a score, or with one out of bounds, is a failure and never a 0. The responses
    of a group are judged at once.

    Args:
        url: Address of the endpoint: `http://host:port`, `https://host/v1`, or with the route.
        model: Name of the model there.
        template: Text of the user's message. `{prompt}`, `{response}` and any column of the row,
            such as `{answer}`, stand for their values; `{{` and `}}` are braces.
        system: Text of the system message, with such names too; null for none.
        form: The form of the answer, for which the end of the message asks and the only one that is
            read. `json`: by a schema that the server keeps (`response_format`); `line`: a last line
            `Score: X`, for servers that know no schema.
        lowest: Score that is worth 0.
        highest: Score that is worth 1.
        api_key_env: Name of the environment variable with the API key, never the key; null for
            none.
        temperature: Sampling temperature of the judge; null leaves it to the endpoint.
        max_tokens: Most tokens of an answer; null leaves it to the endpoint.
        parameters: Further fields of the request, such as `{seed: 0}`.
        timeout_s: Seconds for one request.
        retries: Further requests after a 429, a 5xx, a timeout or a lost connection.
        deadline_s: Seconds for a response, all requests and the waits between them.
        cache: Folder in which answers with a score stay, for all processes and later runs; null
            for none.
        max_calls: Requests that may be sent, counted in `cache` over processes and resumes; after
            the last one the run ends. Null for no limit.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.

    Raises:
        ConfigError: A setting cannot work.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        system: str | None = None,
        form: Form = "json",
        lowest: float = 0.0,
        highest: float = 1.0,
        api_key_env: str | None = None,
        temperature: float | None = 0.0,
        max_tokens: int | None = 512,
        parameters: dict[str, Any] | None = None,
        timeout_s: float = 30.0,
        retries: int = 4,
        deadline_s: float = 120.0,
        cache: str | None = None,
        max_calls: int | None = None,
        weight: float = 1.0,
        name: str = "judge",
    ) -> None:
        super().__init__(weight, name)
        if max_calls is not None and cache is None:
            raise ConfigError(
                f"Judge.max_calls is {max_calls}, and Judge.cache is not set: give the folder in "
                "which all processes of a run, and those that resume it, count their requests."
            )
        self.deadline_s = deadline_s
        self._reader = ScoreReader(form, lowest, highest)
        self._templates = {"system": system} if system is not None else {}
        self._templates["user"] = template
        self._names = set().union(*map(_names_in, self._templates.values()))
        if "response" not in self._names:
            raise ConfigError(
                f"Judge.template is {template!r:.80}, without {{response}}: the judge would not "
                "see what it scores. Write {response} where the response belongs."
            )
        own = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        own = {name: value for name, value in own.items() if value is not None}
        self._fields = own | (parameters or {}) | self._reader.fields
        self._cache = None if cache is None else JudgeCache(Path(cache), max_calls)
        self._endpoint = ModelEndpoint(
            owner="Judge",
            kind="judge",
            error=JudgeError,
            route="/v1/chat/completions",
            url=url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
        )

    def __repr__(self) -> str:
        """Returns what decides a score: a checkpoint keeps its baselines if nothing else has
        changed."""
        asked = (self._endpoint.url, self._fields, self._templates)
        read = (self._reader.lowest, self._reader.highest)
        return f"Judge{(*asked, *read, self.weight, self.name)}"

    def missing_column(self, columns: Collection[str]) -> str:
        lacking = self._names - {*columns, *OF_THE_RESPONSE}
        return ", ".join(map(repr, sorted(lacking)))

    def check_row(self, columns: Mapping[str, Any]) -> None:
        for name in sorted(self._names - {*OF_THE_RESPONSE}):
            _text_of(columns, name)

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns a number from 0 to 1.

        Raises:
            JudgeError: There is no answer, or no score in it.
            ValueError: The row has no such column as the template names, or no text in it.
        """
        values = {**columns, "prompt": prompt, "response": response}
        body = {**self._fields, "messages": self._messages(values)}
        request = {"url": self._endpoint.url, "body": body}
        if self._cache is None:
            return self._reader.score(await self._endpoint.ask(body, _answer_in))
        if (kept := self._cache.read(request)) is not None:
            return self._reader.score(kept)
        answer = await self._endpoint.ask(body, _answer_in, self._count)
        score = self._reader.score(answer)
        self._cache.write(request, answer)
        return score

    def _messages(self, values: Mapping[str, Any]) -> list[dict[str, str]]:
        texts = {name: _text_of(values, name) for name in self._names}
        messages = [
            {"role": role, "content": template.format_map(texts)}
            for role, template in self._templates.items()
        ]
        messages[-1]["content"] += f"\n\n{self._reader.asked}"
        return messages

    async def _count(self, number: int) -> None:
        assert self._cache is not None, "without a cache nothing is counted"
        try:
            await self._cache.count()
        except JudgeError as error:
            raise NotSent(error) from error


def _answer_in(found: Any) -> Answer:
    choice = found["choices"][0]
    # A model that has only reasoned, or was filtered, has written nothing.
    content = choice["message"]["content"] or ""
    if not isinstance(content, str):
        raise TypeError(f"the content is a {type(content).__name__}")
    return Answer(content, str(choice.get("finish_reason")))


def _text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as the judge reads it: a list or a dict as JSON, a number without an exponent;
    raises ValueError if there is none."""
    if isinstance(value := values.get(name), list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return reference_of(values, name)


def _names_in(template: str) -> set[str]:
    """Returns the names of the values in a template; raises ConfigError for other braces."""
    try:
        fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ConfigError(
            f"Judge.template or Judge.system is {template!r:.80}: {error}."
        ) from error
    for name, form, conversion in fields:
        if form or conversion or not str(name).isidentifier():
            raise ConfigError(
                f"Judge.template or Judge.system is {template!r:.80}: write {{prompt}}, {{response}} "
                "or a column in braces, and {{ and }} for braces that are no name."
            )
    return {str(name) for name, _, _ in fields}


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

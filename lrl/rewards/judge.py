"""A model as a reward: a judge writes a score, a reward model gives a number.

An answer in another form, or out of bounds, is a failure: it does not say that the response is bad.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from lrl.errors import ConfigError, CountedError
from lrl.rewards.base import Reward, reference_of
from lrl.rewards.model_endpoint import ModelEndpoint
from lrl.system.output import best_effort

OF_THE_RESPONSE = {"prompt", "response", "finish_reason", "num_tokens", "turn_rewards"}
"""Names that a template may have besides the columns of the row."""
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
_ASKED = 'Answer with JSON and nothing else: {"reason": "one sentence", "score": X}, where X is a '
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
        lowest: Score that is worth 0.
        highest: Score that is worth 1.
        api_key_env: Name of the environment variable with the API key, never the key; null for
            none.
        temperature: Sampling temperature of the judge; null leaves it to the endpoint.
        max_tokens: Most tokens of an answer; null leaves it to the endpoint.
        parameters: Further fields of the request, such as `{seed: 0}`. For a server that knows no
            schema of the answer, which lrl asks for: `{response_format: {type: json_object}}`.
        timeout_s: Seconds for one request.
        retries: Further requests after a 429, a 5xx, a timeout or a lost connection.
        deadline_s: Seconds for a response, all requests and the waits between them.
        cache: Folder in which answers with a score stay, for all processes and later runs; null
            for none.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        system: str | None = None,
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
        weight: float = 1.0,
        name: str = "judge",
    ) -> None:
        super().__init__(weight, name)
        self.deadline_s = deadline_s
        self._lowest = lowest
        self._highest = highest
        self._templates = {"system": system} if system is not None else {}
        self._templates["user"] = template
        parsed = [part for text in self._templates.values() for part in Formatter().parse(text)]
        self._names = {name for _, name, _, _ in parsed if name is not None}
        if "response" not in self._names:
            raise ConfigError(
                f"Judge.template is {template!r:.80}, without {{response}}: the judge would not "
                "see what it scores. Write {response} where the response belongs."
            )
        own = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        self._fields = given | {"response_format": _RESPONSE_FORMAT} | (parameters or {})
        self._cache = None if cache is None else Path(cache).expanduser().absolute()
        self._endpoint = ModelEndpoint(
            kind="judge",
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
        return f"Judge{(*asked, self._lowest, self._highest, self.weight, self.name)}"

    def check_row(self, columns: Mapping[str, Any]) -> None:
        for name in sorted(self._names - OF_THE_RESPONSE):
            _text_of(columns, name)

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns a number from 0 to 1; raises CountedError if there is none."""
        values = {**columns, "prompt": prompt, "response": response}
        texts = {name: _text_of(values, name) for name in self._names}
        messages = [
            {"role": role, "content": template.format_map(texts)}
            for role, template in self._templates.items()
        ]
        scale = f"number from {self._lowest:g} to {self._highest:g}."
        messages[-1]["content"] += f"\n\n{_ASKED}{scale}"
        body = {**self._fields, "messages": messages}
        if self._cache is None:
            return self._score(await self._endpoint.ask(body, _answer_in))
        request = json.dumps({"url": self._endpoint.url, "body": body}, sort_keys=True)
        digest = hashlib.sha256(request.encode()).hexdigest()
        # A folder for each first two letters: a run may have millions.
        file = self._cache / digest[:2] / f"{digest}.json"
        with suppress(OSError, ValueError, TypeError):  # not there, or cut by a crash
            return self._score(Answer(**json.loads(file.read_text())))
        answer = await self._endpoint.ask(body, _answer_in)
        score = self._score(answer)
        with best_effort("An answer of the judge", file):  # which has its score all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f".{secrets.token_hex(8)}")
            draft.write_text(json.dumps(answer._asdict()))
            draft.rename(file)  # whole: many processes use the folder at once
        return score

    def _score(self, answer: "Answer") -> float:
        """Returns the score in an answer, from 0 to 1."""
        score = _score_in(answer.text)
        if answer.finish_reason == "length":
            why = "is cut: raise Judge.max_tokens"
        elif score is None:
            why = "is not a JSON object of a reason and a score"
        elif not self._lowest <= score <= self._highest:
            bounds = f"{self._lowest:g} to {self._highest:g} (Judge.lowest, Judge.highest)"
            why = f"has the score {score:.4g}, which is not in {bounds}"
        else:
            return (score - self._lowest) / (self._highest - self._lowest)
        # Its end: a judge reasons first.
        shown = answer.text[-_SHOWN:]
        raise CountedError("judge_no_score", f"the judge's answer {why}: {shown!r}")


class Answer(NamedTuple):
    """The answer of a model."""

    text: str
    finish_reason: str
    """`stop`, or `length` if it was cut."""


def _answer_in(found: Any) -> Answer:
    choice = found["choices"][0]
    # A model that has only reasoned, or was filtered, has written nothing.
    content = choice["message"]["content"] or ""
    if not isinstance(content, str):
        raise TypeError(f"the content is a {type(content).__name__}")
    return Answer(content, str(choice.get("finish_reason")))


def _score_in(text: str) -> float | None:
    try:
        found = json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"reason": str(), "score": float(score), **others} if not others:
            return score
    return None


def _text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as the judge reads it: a list or a dict as JSON, a number without an
    exponent; raises ValueError if there is none."""
    if isinstance(value := values.get(name), list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return reference_of(values, name)


class RewardModel(Reward):
    """The number that a reward model gives a response. A vLLM server that you start has the model,
    a sequence classifier: `vllm serve MODEL --runner pooling`. It reads the prompt's messages, and
    the response as the assistant's, in its own chat template.

    Without a number a response has no reward, and never a 0. The responses of a group are scored at
    once; the server batches them. An input that is longer than the model's context is refused, and
    never cut.

    Args:
        url: Address of the server: `http://host:port`, or with the route `/classify`.
        label: Number of the label whose score counts, for a model with several; null for a model
            with one.
        activation: Whether the score goes through the model's activation (sigmoid of one label,
            softmax of several); false takes it as the model's head gives it.
        api_key_env: Name of the environment variable with the key of `url`, never the key; null for
            none.
        timeout_s: Seconds for one request.
        retries: Further requests after a 429, a 5xx, a timeout or a lost connection.
        deadline_s: Seconds for a response, all requests and the waits between them.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    reads_messages = True

    def __init__(
        self,
        url: str,
        label: int | None = None,
        activation: bool = False,
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 10,
        deadline_s: float = 120.0,
        weight: float = 1.0,
        name: str = "reward_model",
    ) -> None:
        super().__init__(weight, name)
        self.label = label
        self.activation = activation
        self.deadline_s = deadline_s
        self.endpoint = ModelEndpoint(
            kind="reward_model",
            route="/classify",
            url=url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
        )

    def __repr__(self) -> str:
        """Returns what decides a score: a checkpoint keeps its baselines if nothing else has
        changed."""
        how = (self.endpoint.url, self.label, self.activation)
        return f"RewardModel{(*how, self.weight, self.name)}"

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the score; raises CountedError if there is none, or none of `label`."""
        before = columns["prompt_messages"] or [{"role": "user", "content": prompt}]
        messages = [*before, {"role": "assistant", "content": response}]
        body = {"messages": messages, "use_activation": self.activation}
        scores = await self.endpoint.ask(body, _scores_in)
        if self.label is None and len(scores) == 1:
            return scores[0]
        if self.label is not None and 0 <= self.label < len(scores):
            return scores[self.label]
        raise self.endpoint.refused(
            f"the model gives {len(scores)} numbers, and RewardModel.label is {self.label}. Set it "
            f"to the number of the label that is the reward, from 0 to {len(scores) - 1}"
        )


def _scores_in(found: Any) -> list[float]:
    (only,) = found["data"]
    scores = [float(number) for number in only["probs"]]
    if not scores or not all(map(math.isfinite, scores)):
        raise ValueError(f"{scores} are no finite numbers")
    return scores

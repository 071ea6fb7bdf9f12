"""A model as a reward: a judge writes a score, a reward model gives a number.

An answer in another form, or out of bounds, is a failure: it does not say that the response is bad.
"""

import asyncio
import functools
import hashlib
import json
import math
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lrl.errors import ConfigError, CountedError
from lrl.rewards.base import Reward, reference_of
from lrl.system.endpoint import stays_here
from lrl.system.output import best_effort

T = TypeVar("T")
_OF_THE_RESPONSE = {"prompt", "response", "finish_reason", "num_tokens", "turn_rewards"}
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
_SHOWN = 160  # characters of a server's text in a message


class Judge(Reward):
    """The score that a language model gives a response, mapped to 0..1. The model is behind an
    OpenAI-compatible endpoint (`/v1/chat/completions`).

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
            "judge",
            "/v1/chat/completions",
            url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
        )

    def __repr__(self) -> str:
        """Names what decides a score: while that stays, a checkpoint keeps its baselines."""
        asked = (self._endpoint.url, self._fields, self._templates)
        return f"Judge{(*asked, self._lowest, self._highest, self.weight, self.name)}"

    def check_row(self, columns: Mapping[str, Any]) -> None:
        for name in sorted(self._names - _OF_THE_RESPONSE):
            _text_of(columns, name)

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
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
            return self._score(await self._endpoint.ask(body, _text_in))
        request = json.dumps({"url": self._endpoint.url, "body": body}, sort_keys=True)
        digest = hashlib.sha256(request.encode()).hexdigest()
        # A folder for each first two letters: a run may have millions.
        file = self._cache / digest[:2] / f"{digest}.json"
        with suppress(OSError, ValueError, TypeError, CountedError):  # not there, or cut by a crash
            return self._score(json.loads(file.read_text()))
        text = await self._endpoint.ask(body, _text_in)
        score = self._score(text)
        with best_effort("An answer of the judge", file):  # which has its score all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f".{secrets.token_hex(8)}")
            draft.write_text(json.dumps(text))
            draft.rename(file)  # whole: many processes use the folder at once
        return score

    def _score(self, text: str) -> float:
        score = None
        with suppress(ValueError, RecursionError):
            match json.loads(text, parse_int=float):
                case {"reason": str(), "score": float(found), **others} if not others:
                    score = found
        if score is None:
            raise _no_score("is not a JSON object of a reason and a score", text)
        if not self._lowest <= score <= self._highest:
            bounds = f"{self._lowest:g} to {self._highest:g} (Judge.lowest, Judge.highest)"
            raise _no_score(f"has the score {score:.4g}, which is not in {bounds}", text)
        return (score - self._lowest) / (self._highest - self._lowest)


def _text_in(found: Any) -> str:
    choice = found["choices"][0]
    # A model that has only reasoned, or was filtered, has written nothing.
    content = choice["message"]["content"] or ""
    if not isinstance(content, str):
        raise TypeError(f"the content is a {type(content).__name__}")
    if choice.get("finish_reason") == "length":
        raise _no_score("is cut: raise Judge.max_tokens", content)
    return content


def _no_score(why: str, text: str) -> CountedError:
    shown = text[-_SHOWN:]  # a judge reasons first
    return CountedError("judge_no_score", f"the judge's answer {why}: {shown!r}")


def _text_of(values: Mapping[str, Any], name: str) -> str:
    if isinstance(value := values.get(name), list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return reference_of(values, name)


class RewardModel(Reward):
    """The number that a reward model gives a response: a sequence classifier, which reads the
    prompt's messages and the response in its own chat template, in a vLLM server that you start
    (`vllm serve MODEL --runner pooling`). It refuses an input beyond its context.

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
            "reward_model",
            "/classify",
            url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
        )

    def __repr__(self) -> str:
        """See `Judge.__repr__`."""
        how = (self.endpoint.url, self.label, self.activation)
        return f"RewardModel{(*how, self.weight, self.name)}"

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
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


# ---- the endpoint

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_certificates = functools.cache(ssl.create_default_context)
"""Reading them takes 60 ms, so not for each client."""


@dataclass
class ModelEndpoint:
    """A route of a model's server. The openai client asks it, and again after 408, 409, 429 (when
    Retry-After says), 5xx, a timeout or a lost connection. Errors: `<kind>_refused`,
    `<kind>_failed`."""

    kind: str
    route: str  # such as `/v1/completions`
    url: str  # of the host, of its `/v1` or of the route; then always of the route
    api_key_env: str | None  # the key is read for each answer, and never stored or sent on
    timeout_s: float  # for one request
    retries: int
    deadline_s: float  # for an answer, all requests and the waits between them
    error: type[CountedError] = CountedError

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if "@" in address.netloc:
            raise ConfigError("A url has a user or a password in it (not shown): set api_key_env.")
        path, end = address.path.rstrip("/"), self.route.removeprefix("/v1")
        if not path.endswith(end):
            path += end if path else self.route
        self.url = address._replace(path=path).geturl()

    async def ask(self, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Returns what `read` finds in the JSON of a response to `body`; an error of it is a
        refusal."""
        text = await self._posted(body)
        try:
            return read(json.loads(text))
        except _UNREADABLE as error:
            shown = self._shown(text)
            raise self.refused(f"cannot read its answer ({error!r:.80}): {shown!r}") from error

    async def tokens_of(self, text: str) -> tuple[list[int], int]:
        """Returns a vLLM server's tokens of a text, without special ones, and its `max_model_len`;
        asks once."""
        server = self.url.removesuffix(self.route.removeprefix("/v1")).removesuffix("/v1")
        tokenize = replace(self, route="/tokenize", url=server, retries=0)
        return await tokenize.ask(
            {"prompt": text, "add_special_tokens": False},
            lambda found: (list(map(int, found["tokens"])), int(found["max_model_len"])),
        )

    def refused(self, message: str) -> CountedError:
        return self.error(f"{self.kind}_refused", f"{self.url}: {message}")

    async def _posted(self, body: dict[str, Any]) -> str:
        import openai  # here: it takes seconds and 59 MB

        key = self._key
        if self.api_key_env and not key:
            raise self.refused("api_key_env names a variable that is not set on this machine")
        # A client for each answer: a server may close an idle connection as a request goes out.
        client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=key or "none",
            timeout=self.timeout_s,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False,  # to a host that nobody has named, and a POST becomes a GET
                trust_env=not stays_here(urlsplit(self.url).hostname or ""),  # no proxy leads here
                verify=_certificates(),
            ),
        )
        client.organization = client.project = None  # OpenAI's, of the environment
        try:
            async with client, asyncio.timeout(self.deadline_s):
                without: Any = {} if key else {"headers": {"Authorization": openai.Omit()}}
                return await client.post(self.url, body=body, cast_to=str, options=without)
        except openai.APIStatusError as error:
            reason = self._shown(str(error))
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                raise self.refused(reason) from None
        except (openai.APITimeoutError, TimeoutError):
            reason = "no answer in time"
        except openai.APIConnectionError as error:
            reason = self._shown(repr(error.__cause__ or error))
        raise self.error(
            f"{self.kind}_failed",
            f"{self.url}: {reason}, also when asked again (timeout_s {self.timeout_s:g}, retries "
            f"{self.retries}, deadline_s {self.deadline_s:g})",
        )

    def _shown(self, text: str) -> str:
        """Returns the beginning of a server's text, without the key, which it may repeat."""
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:_SHOWN]

    @property
    def _key(self) -> str:
        return os.environ.get(self.api_key_env or "", "").strip()

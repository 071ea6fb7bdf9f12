"""A language model as a reward: it reads the response and writes a score."""

from collections.abc import Collection, Mapping
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import Reward
from lrl.rewards.judge.cache import JudgeCache
from lrl.rewards.judge.endpoint import ChatEndpoint
from lrl.rewards.judge.messages import JudgeMessages, text_of
from lrl.rewards.judge.score import Form, ScoreReader
from lrl.system.config_errors import at_least

OF_THE_RESPONSE = ("prompt", "response", "finish_reason", "num_tokens", "turn_rewards")
"""Names that a template may have besides the columns of the row."""
NOT_A_PARAMETER = {
    *("model", "messages", "temperature", "max_tokens", "response_format"),  # settings of their own
    *("n", "stream"),  # a judge gives one whole answer
}


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
        deadline_s: Seconds for a response, all requests and the waits between them;
            `data.reward_timeout_s` must be longer.
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
        at_least(0, "Judge", temperature=temperature)
        at_least(1, "Judge", max_tokens=max_tokens, max_calls=max_calls)
        self.deadline_s = deadline_s
        self._reader = ScoreReader(form, lowest, highest)
        self._messages = JudgeMessages(template, system, self._reader.asked)
        if clash := NOT_A_PARAMETER & set(parameters or {}):
            raise ConfigError(
                f"Judge.parameters has {min(clash)!r}: leave it out, and see the judge's settings."
            )
        if max_calls is not None and cache is None:
            raise ConfigError(
                f"Judge.max_calls is {max_calls}, and Judge.cache is not set: give the folder in "
                "which all processes of a run, and those that resume it, count their requests."
            )
        own = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        own = {name: value for name, value in own.items() if value is not None}
        self._fields = own | (parameters or {}) | self._reader.fields
        self._cache = None if cache is None else JudgeCache(cache, max_calls)
        self._endpoint = ChatEndpoint(
            url,
            api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
            cache=self._cache,
        )

    def __repr__(self) -> str:
        """Returns what decides a score: a checkpoint keeps its baselines if nothing else has
        changed."""
        asked = (self._endpoint.url, self._fields, self._messages.templates)
        read = (self._reader.lowest, self._reader.highest)
        return f"Judge{(*asked, *read, self.weight, self.name)}"

    def missing_column(self, columns: Collection[str]) -> str:
        lacking = self._messages.names - {*columns, *OF_THE_RESPONSE}
        return ", ".join(map(repr, sorted(lacking)))

    def check_row(self, columns: Mapping[str, Any]) -> None:
        for name in sorted(self._messages.names - {*OF_THE_RESPONSE}):
            text_of(columns, name)

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns a number from 0 to 1.

        Raises:
            JudgeError: There is no answer, or no score in it.
            ValueError: The row has no such column as the template names, or no text in it.
        """
        values = {**columns, "prompt": prompt, "response": response}
        body = {**self._fields, "messages": self._messages.written(values)}
        request = {"url": self._endpoint.url, "body": body}
        kept = None if self._cache is None else self._cache.read(request)
        if kept is not None:
            return self._reader.score(kept)
        answer = await self._endpoint.answer(body)
        score = self._reader.score(answer)
        if self._cache is not None:
            self._cache.write(request, answer)
        return score

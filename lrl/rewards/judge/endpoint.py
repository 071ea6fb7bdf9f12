"""The endpoint of a judge: one answer of a language model to one request."""

from typing import Any

from lrl.errors import JudgeError
from lrl.rewards.judge.cache import Answer, JudgeCache
from lrl.rewards.model_endpoint import ModelEndpoint


class ChatEndpoint(ModelEndpoint[Answer]):
    """See `ModelEndpoint`."""

    owner = "Judge"
    kind = "judge"
    error = JudgeError
    route = "/chat/completions"
    first_path = "/v1"
    answers_with = "chat completion"
    remedies = {
        400: "See Judge.model, max_tokens, temperature, parameters and form (line, if the server "
        "knows no JSON schema), and whether the response is too long for the judge",
        401: "Set the key in the environment variable that Judge.api_key_env names",
        403: "Set a key with access to Judge.model in the variable that Judge.api_key_env names",
        404: "See Judge.url and Judge.model",
        413: "The response is too long for the judge",
        422: "See Judge.parameters",
    }

    def __init__(self, *args: Any, cache: JudgeCache | None, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.cache = cache

    async def before_request(self, number: int) -> None:
        if self.cache is not None:
            await self.cache.count()

    def read(self, found: Any) -> Answer:
        choice = found["choices"][0]
        # A model that has only reasoned, or was filtered, has written nothing.
        content = choice["message"]["content"] or ""
        if not isinstance(content, str):
            raise TypeError(f"the content is a {type(content).__name__}")
        return Answer(content, str(choice.get("finish_reason")))

"""A language model behind an OpenAI-compatible endpoint: one answer to one request."""

from typing import Any, NamedTuple

from lrl.errors import JudgeError
from lrl.rewards.model_endpoint import ModelEndpoint


class Answer(NamedTuple):
    """The answer of a model."""

    text: str
    finish_reason: str
    """`stop`, or `length` if it was cut."""


class ChatEndpoint(ModelEndpoint[Answer]):
    """The endpoint of a judge; see `ModelEndpoint`."""

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
        405: "See Judge.url",
        413: "The response is too long for the judge",
        422: "See Judge.parameters",
    }

    def read(self, found: Any) -> Answer:
        choice = found["choices"][0]
        # A model that has only reasoned, or was filtered, has written nothing.
        content = choice["message"]["content"] or ""
        if not isinstance(content, str):
            raise TypeError(f"the content is a {type(content).__name__}")
        return Answer(content, str(choice.get("finish_reason")))

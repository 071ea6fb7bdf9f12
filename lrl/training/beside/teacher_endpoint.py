"""A teacher behind vLLM's completions route: its log-probs of tokens that the policy wrote, and the
tokens that it makes of a text."""

import copy
import logging
import math
from typing import Any, NamedTuple, TypeVar

from lrl.errors import TeacherError
from lrl.rewards.model_endpoint import ModelEndpoint

log = logging.getLogger(__name__)

T = TypeVar("T")
SEE_URL = "See Teacher.url"
ROUNDED = 0.01
"""Nats by which rounding may put a log-prob above 0. With `--logprobs-mode raw_logits` a server gives
numbers that are far above it."""


class _EndpointOfTeacher(ModelEndpoint[T]):
    """A route of the server; see `ModelEndpoint`. It is asked until the deadline, or once."""

    owner = "Teacher"
    kind = "teacher"
    error = TeacherError
    remedies = {
        400: "See whether the teacher's context (--max-model-len) has room for a prompt, its "
        "response and one token more, and whether it has the policy's tokens",
        401: "Set the key in the environment variable that Teacher.api_key_env names",
        403: "Set a key with access in the variable that Teacher.api_key_env names",
        404: "See Teacher.url: the server must be vLLM's, with a model that writes",
    }
    silent = False
    """Whether its last request had no answer."""

    async def before_request(self, number: int) -> None:
        if number > 1 and not self.silent:
            self.silent = True
            log.warning(
                "The teacher at %s does not answer. It is asked again, for at most %g s "
                "(Teacher.deadline_s).",
                self.url,
                self.deadline_s,
            )

    def heard(self) -> None:
        """Notes an answer."""
        if self.silent:
            self.silent = False
            log.warning("The teacher at %s answers again.", self.url)


class TeacherEndpoint(_EndpointOfTeacher[list[list[dict[int, float]]]]):
    """The route of log-probs. Its answer has for each token of each text, but the first, the
    log-probs of that token and of others, by token."""

    route = "/completions"
    first_path = "/v1"
    answers_with = "list of log-probs of the prompt (vLLM's prompt_logprobs)"

    def once(self) -> "TeacherEndpoint":
        """Returns the same endpoint, asked once."""
        found = copy.copy(self)
        found.retries = 0
        return found

    async def logprobs(self, texts: list[list[int]]) -> list[list[float]]:
        """Returns log-probs in nats of `text[1:]` for each text of token ids, each token given those
        before it, at temperature 1. One request asks for all of them.

        Raises:
            TeacherError: It does not say.
        """
        found = await self.answer({"prompt": texts, "max_tokens": 1, "prompt_logprobs": 0})
        if [len(one) + 1 for one in found] != [len(text) for text in texts]:
            raise self.refused(f"log-probs of other tokens than it was asked for. {SEE_URL}")
        try:
            return [
                [of_token[token] for token, of_token in zip(text[1:], one, strict=True)]
                for text, one in zip(texts, found, strict=True)
            ]
        except KeyError as error:
            raise self.refused(f"no log-prob of token {error}. {SEE_URL}") from None

    def read(self, found: Any) -> list[list[dict[int, float]]]:
        self.heard()
        choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
        return [[_by_token(one) for one in choice["prompt_logprobs"][1:]] for choice in choices]

    async def tokens_of(self, text: str) -> "Tokens":
        """Returns what the server makes of a text, without special tokens at its ends. It is asked
        once.

        Raises:
            TeacherError: It does not say.
        """
        endpoint = TokensEndpoint(
            self.url.removesuffix(self.route).removesuffix(self.first_path),
            self.api_key_env,
            timeout_s=self.timeout_s,
            retries=0,
            deadline_s=self.deadline_s,
        )
        return await endpoint.answer({"prompt": text, "add_special_tokens": False})


class Tokens(NamedTuple):
    """The tokens of a text on the server, and how many it can read."""

    token_ids: list[int]
    context: int
    """Most tokens of a request, those that it writes included."""


class TokensEndpoint(_EndpointOfTeacher[Tokens]):
    """The route that makes tokens of a text."""

    route = "/tokenize"
    answers_with = "list of tokens"

    def read(self, found: Any) -> Tokens:
        return Tokens([int(token) for token in found["tokens"]], int(found["max_model_len"]))


def _by_token(entries: dict[str, Any]) -> dict[int, float]:
    found = {int(token): float(entry["logprob"]) for token, entry in entries.items()}
    if not all(math.isfinite(number) and number < ROUNDED for number in found.values()):
        raise ValueError(f"{found} are no log-probs")
    return found

"""A teacher behind vLLM's completions route: its log-probs of given tokens, and a text's tokens."""

import logging
import math
from typing import Any, NamedTuple

from lrl.errors import TeacherError
from lrl.rewards.model_endpoint import ModelEndpoint

log = logging.getLogger(__name__)

ROUNDED = 0.01
"""Nats by which rounding may put a log-prob above 0; `--logprobs-mode raw_logits` is far above."""
MOST_RETRIES = 100_000
"""More than any deadline leaves time for: a run waits for its teacher by the clock."""


class Tokens(NamedTuple):
    """The tokens of a text on the server, and how many it can read."""

    token_ids: list[int]
    context: int
    """Most tokens of a request, those that it writes included."""


class TeacherEndpoint:
    """The server of a teacher, which is asked until the deadline; see `ModelEndpoint`."""

    def __init__(
        self, url: str, api_key_env: str | None, timeout_s: float, deadline_s: float
    ) -> None:
        self.deadline_s = deadline_s
        self.completions = ModelEndpoint(
            owner="Teacher",
            kind="teacher",
            error=TeacherError,
            route="/v1/completions",
            url=url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            retries=MOST_RETRIES,
            deadline_s=deadline_s,
        )
        self._silent = False
        """Whether its last request had no answer."""

    async def logprobs(self, texts: list[list[int]], *, once: bool = False) -> list[list[float]]:
        """Returns log-probs in nats of `text[1:]` for each text of token ids, each token given
        those before it, at temperature 1. One request asks for all of them.

        Args:
            texts: At least one token each.
            once: Whether a request without an answer is the last one.

        Raises:
            TeacherError: It does not say.
        """
        endpoint = self.completions.once() if once else self.completions
        body = {"prompt": texts, "max_tokens": 1, "prompt_logprobs": 0}
        found = await endpoint.ask(body, lambda answer: _logprobs_in(answer, texts), self._count)
        if self._silent:
            self._silent = False
            log.warning("The teacher at %s answers again.", endpoint.url)
        return found

    async def tokens_of(self, text: str) -> Tokens:
        """Returns what the server makes of a text, without special tokens at its ends. It is asked
        once.

        Raises:
            TeacherError: It does not say.
        """
        body = {"prompt": text, "add_special_tokens": False}

        def read(found: Any) -> Tokens:
            return Tokens([int(one) for one in found["tokens"]], int(found["max_model_len"]))

        return await self.completions.sibling("/tokenize").ask(body, read)

    async def _count(self, number: int) -> None:
        if number > 1 and not self._silent:
            self._silent = True
            log.warning(
                "The teacher at %s does not answer. It is asked again, for at most %g s "
                "(Teacher.deadline_s).",
                *(self.completions.url, self.completions.deadline_s),
            )


def _logprobs_in(found: Any, texts: list[list[int]]) -> list[list[float]]:
    """Returns the log-probs in an answer; raises a reading error if any token lacks one."""
    choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
    return [
        [_logprob(entries[str(token)]) for token, entries in zip(text[1:], rest, strict=True)]
        for text, choice in zip(texts, choices, strict=True)
        for _, *rest in [choice["prompt_logprobs"]]
    ]


def _logprob(entry: dict[str, Any]) -> float:
    number = float(entry["logprob"])
    if not (math.isfinite(number) and number < ROUNDED):
        raise ValueError(f"{number} is no log-prob")
    return number

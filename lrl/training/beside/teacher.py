"""The teacher: a frozen model that the policy learns to be like, on what the policy itself writes.

It is in the trainer, or behind a server, which is asked as soon as a group is scored.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lrl.errors import ConfigError, TeacherError, above
from lrl.objectives.base import Tokens, clamp_log_ratio
from lrl.rewards.judge import ModelEndpoint
from lrl.training.beside.reference import Reference
from lrl.training.collate import by_rollout, whole_samples
from lrl.types import Group

TIMEOUT_S = 300.0
DEADLINE_S = 900.0
ROUNDED = 0.01
"""Nats by which rounding may put a log-prob above 0; `--logprobs-mode raw_logits` is far above."""
MOST_RETRIES = 100_000
"""More than any deadline leaves time for: a run waits for its teacher by the clock."""


class Teacher(Reference):
    """On-policy distillation: a reference whose log-probs are a reward for each token ("On-Policy
    Distillation", Thinking Machines, 2025; the reverse KL of MiniLLM, 2306.08543, and of GKD,
    2306.13649).

    `coefficient` times log pi_teacher - log pi is added to the advantage of each token, and belongs
    to that token alone (discount 0). Its mean is -KL(pi || pi_teacher). The rewards count beside
    it; those of weight 0 leave the teacher alone.

    Log pi is that of the policy in the trainer. For tokens of the newest version that is the
    sampler's; for older ones the sampler's would add the gradient of +KL(pi || mu) to it, which
    drives the policy away from what it was.

    Args:
        model: Hub name or folder of the teacher, with the policy's tokenizer. Null with `url`.
        coefficient: Worth of a nat, in units of the advantage.
        url: Address of a vLLM server with the teacher, which somebody runs: `http://host:port`, or
            with the route. Null for a teacher in the trainer.
        api_key_env: Name of the environment variable with the key of `url`, never the key; null for
            none.
        timeout_s: Seconds for one request to `url`, the log-probs of a group.
        deadline_s: Seconds for the log-probs of a group, all requests and the waits between them.
            Then the run ends: nothing is trained without its teacher.
    """

    rewards_tokens = True

    def __init__(
        self,
        model: str | None = None,
        coefficient: float = 1.0,
        url: str | None = None,
        api_key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__(model=model)  # which only measures the KL to it
        above(0, "model.reference", coefficient=coefficient)
        self.worth = coefficient
        if (url is None) == (model is None):
            raise ConfigError(
                f"model.reference.url is {url!r} and model.reference.model is {model!r}: give one "
                "of them."
            )
        if url is not None:
            self.endpoint = ModelEndpoint(
                "teacher",
                "/v1/completions",
                url,
                api_key_env=api_key_env,
                timeout_s=timeout_s,
                retries=MOST_RETRIES,
                deadline_s=deadline_s,
                error=TeacherError,
            )
            self.url = self.endpoint.url
        elif (api_key_env, timeout_s, deadline_s) != (None, TIMEOUT_S, DEADLINE_S):
            raise ConfigError(
                "model.reference.api_key_env, timeout_s and deadline_s are for a teacher at "
                "model.reference.url: leave them out."
            )

    async def ask(self, group: Group) -> None:
        """Sets `reference_logprobs` of every rollout of a group to what the server at `url` says,
        unless they are there.

        Raises:
            TeacherError: It has not said all of them; none is set.
        """
        if group.reference_version == self.version:
            return
        samples = whole_samples(group)
        texts = [sample.token_ids for sample in samples]
        found = await self.logprobs_of(texts) if texts else []
        written = [
            torch.tensor(numbers[len(sample.prompt) - 1 :])[torch.tensor(sample.trained)]
            for sample, numbers in zip(samples, found, strict=True)
        ]
        self.fill(group, by_rollout(samples, written))

    async def logprobs_of(self, texts: list[list[int]], *, once: bool = False) -> list[list[float]]:
        """Returns what the server at `url` says: log-probs in nats of `text[1:]` for each text of
        token ids, at temperature 1. One request asks for all; with `once` none is repeated."""
        endpoint = replace(self.endpoint, retries=0) if once else self.endpoint
        body = {"prompt": texts, "max_tokens": 1, "prompt_logprobs": 0}
        return await endpoint.ask(body, lambda found: _logprobs_in(found, texts))

    def advantages(self, tokens: Tokens) -> Tensor:
        assert tokens.reference_logprobs is not None, "every group passes `fill` first"
        nearer = clamp_log_ratio(tokens.reference_logprobs - tokens.logprobs.detach())
        return tokens.advantages + self.worth * nearer


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

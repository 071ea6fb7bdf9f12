"""A reward model: a sequence classifier reads the response, and its number is the reward."""

import math
from typing import Any

from lrl.rewards.base import Reward
from lrl.rewards.model_endpoint import ModelEndpoint


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

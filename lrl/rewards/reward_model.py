"""A reward model as a reward: a model of sequence classification reads the response, and its number
is the reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lrl.errors import ConfigError
from lrl.rewards.base import Reward
from lrl.rewards.score_endpoint import ScoreEndpoint, TokenizeEndpoint
from lrl.system.config_errors import above, at_least, fault, one_of

ServerDtype = Literal["auto", "float32", "bfloat16", "float16"]
Reads = Literal["messages", "text", "tokens"]
NO_ADDRESS = "http://127.0.0.1"
"""In the place of an address, until the run has started the server."""


@dataclass(frozen=True, kw_only=True)
class RewardModelServer:
    """Settings of a server that the run starts for a reward model.

    Args:
        device: CUDA index of its GPU, as the trainer counts them; null for a CPU.
        dtype: Number format of weights and activations; `auto` is the model's.
        max_tokens: Longest input in tokens; null for what the model allows.
        gpu_memory_utilization: Share of the GPU's memory that it takes. Not on CPU.
        kv_cache_gib: Memory for keys and values in GiB. Only on CPU.
        start_timeout_s: Seconds from its start until it must answer.

    Raises:
        ConfigError: A value is out of range.
    """

    device: int | None = None
    dtype: ServerDtype = "auto"
    max_tokens: int | None = None
    gpu_memory_utilization: float = 0.3
    kv_cache_gib: float = 0.5
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        where = "RewardModel.server"
        at_least(0, where, device=self.device)
        at_least(1, where, max_tokens=self.max_tokens)
        above(
            0,
            where,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            start_timeout_s=self.start_timeout_s,
        )
        one_of(where, dtype=(get_args(ServerDtype), self.dtype))
        if (share := self.gpu_memory_utilization) > 1:
            fault(f"{where}.gpu_memory_utilization is {share}, a share: give at most 1.")


class RewardModel(Reward):
    """The number that a reward model gives a response. vLLM serves the model, a sequence classifier
    (`--runner pooling`, route `/classify`): a server that somebody runs, or one of the run's own.

    Without a number a response has no reward, and never a 0. The responses of a group are scored at
    once; the server batches them. An input that is longer than the model's context is refused, and
    never cut.

    Args:
        url: Address of a server that somebody runs: `http://host:port`, or with the route. Null for
            a server of the run's own.
        model: Folder or hub name of the model that the run serves on this machine, from its start
            to its end. Null with `url`.
        reads: `messages`: the prompt's messages and the response as the assistant's, in the reward
            model's own chat template. `text`: prompt and response, one after the other, without a
            template. `tokens`: the tokens of prompt and response as the generators had and wrote
            them; the reward model must have the policy's tokenizer, which is checked.
        label: Number of the label whose score counts, for a model with several; null for a model
            with one.
        activation: Whether the score goes through the model's activation (sigmoid of one label,
            softmax of several); false takes it as the model's head gives it.
        server: Settings of the run's own server.
        api_key_env: Name of the environment variable with the key of `url`, never the key; null for
            none.
        timeout_s: Seconds for one request.
        retries: Further requests after a 429, a 5xx, a timeout or a lost connection.
        deadline_s: Seconds for a response, all requests and the waits between them;
            `data.reward_timeout_s` must be longer.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.

    Raises:
        ConfigError: A setting cannot work.
    """

    reads_tokens = True

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        reads: Reads = "messages",
        label: int | None = None,
        activation: bool = False,
        server: RewardModelServer | None = None,
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 10,
        deadline_s: float = 120.0,
        weight: float = 1.0,
        name: str = "reward_model",
    ) -> None:
        super().__init__(weight, name)
        _check_place(url, model, server, api_key_env)
        at_least(0, "RewardModel", label=label)
        one_of("RewardModel", reads=(get_args(Reads), reads))
        self.model = model
        self.reads = reads
        self.label = label
        self.activation = activation
        self.server = server or RewardModelServer()
        self.needs_server = model is not None
        self.deadline_s = deadline_s
        self._endpoint = ScoreEndpoint(
            url or NO_ADDRESS,
            api_key_env,
            timeout_s=timeout_s,
            retries=retries,
            deadline_s=deadline_s,
        )

    def __repr__(self) -> str:
        """Returns what decides a score: a checkpoint keeps its baselines if nothing else has
        changed."""
        place = self.model if self.needs_server else self._endpoint.url
        how = (self.reads, self.label, self.activation, self.server.dtype, self.server.max_tokens)
        return f"RewardModel{(place, *how, self.weight, self.name)}"

    def serve_at(self, url: str, token: str) -> None:
        """Says where the server that the run has started answers, and to which token."""
        self._endpoint.url = ScoreEndpoint.address_of(url)
        self._endpoint.token = token

    async def tokens_of(self, text: str) -> list[int]:
        """Returns the tokens that the server makes of a text, without special ones.

        Raises:
            RewardModelError: It does not say.
        """
        found = self._endpoint
        sibling = found.url.removesuffix(ScoreEndpoint.route)
        limits = {"timeout_s": found.timeout_s, "retries": 0, "deadline_s": found.deadline_s}
        endpoint = TokenizeEndpoint(sibling, found.api_key_env, **limits)  # type: ignore[arg-type]
        return await endpoint.answer({"prompt": text, "add_special_tokens": False})

    async def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the score.

        Raises:
            RewardModelError: There is no score, or not the one of `label`.
        """
        if self.needs_server and self._endpoint.token is None:
            raise self._endpoint.refused(
                f"no run has started the server of RewardModel.model {self.model!r}. Outside of a "
                "run give RewardModel.url"
            )
        body = self._input(prompt, response, columns) | {"use_activation": self.activation}
        return self._chosen(await self._endpoint.answer(body))

    def _input(self, prompt: str, response: str, columns: dict[str, Any]) -> dict[str, Any]:
        if self.reads == "tokens":
            return {"input": [*columns["prompt_token_ids"], *columns["response_token_ids"]]}
        if self.reads == "text":
            return {"input": prompt + response}
        before = columns["prompt_messages"] or [{"role": "user", "content": prompt}]
        return {"messages": [*before, {"role": "assistant", "content": response}]}

    def _chosen(self, scores: Sequence[float]) -> float:
        if self.label is None and len(scores) == 1:
            return scores[0]
        if self.label is not None and self.label < len(scores):
            return scores[self.label]
        labels = f"the model gives {len(scores)} number{'s' * (len(scores) > 1)}"
        raise self._endpoint.refused(
            f"{labels}, and RewardModel.label is {self.label}. Set it to the number of the label "
            f"that is the reward, from 0 to {len(scores) - 1}"
        )


def _check_place(
    url: str | None, model: str | None, server: RewardModelServer | None, api_key_env: str | None
) -> None:
    """Raises ConfigError unless there is one server, and no setting of the other kind."""
    if (url is None) == (model is None):
        raise ConfigError(
            f"RewardModel.url is {url!r} and RewardModel.model is {model!r}: give one of them, the "
            "address of a server that runs, or the model that the run serves itself."
        )
    if model is not None and (not isinstance(model, str) or not model.strip()):
        raise ConfigError(f"RewardModel.model is {model!r}: give a folder or a name on the hub.")
    if url is not None and server is not None:
        raise ConfigError(
            "RewardModel.server is set, and RewardModel.url names a server that somebody else runs, "
            "with settings of its own. Leave one of them out."
        )
    if model is not None and api_key_env is not None:
        raise ConfigError(
            "RewardModel.api_key_env is set, and the run makes the token of its own server by "
            "itself. Leave it out."
        )

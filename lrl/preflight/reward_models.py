"""Checks of reward models against the policy, before one is served or asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lrl.errors import CountedError
from lrl.preflight.policy import other_token
from lrl.rewards import Reward
from lrl.rewards.reward_model import RewardModel
from lrl.system.config_errors import EXPECTED, fault, noting
from lrl.system.event_loop import run_apart
from lrl.training.model import open_tokenizer, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy

SAMPLE = "In 1998, three naïve foxes ate 2.5 kg: x**2 >= 7?\n\n\tif not y: 数学 — “yes”!"
"""A text of which two tokenizers hardly make the same tokens."""


def check_reward_models(
    rewards: Sequence[Reward], policy: Policy, data: RolloutDataModule, on_cuda: bool
) -> None:
    """Checks the reward models among some rewards; `on_cuda`: the trainer is on a GPU."""
    for reward in rewards:
        if not isinstance(reward, RewardModel):
            continue
        with noting():
            if reward.model is None:
                _check_address(reward, policy)
            else:
                _check_placement(reward, data, on_cuda)
                _check_model(reward, reward.model, policy, data.max_model_tokens)


def _check_address(reward: RewardModel, policy: Policy) -> None:
    """Checks that a server makes the policy's tokens."""
    if reward.reads != "tokens":
        return
    try:
        theirs = run_apart(lambda: reward.tokens_of(SAMPLE))
    except CountedError as error:
        fault(f"RewardModel.reads is tokens, and the server does not say its own: {error}.")
        return
    ours = policy.tokenizer.encode(SAMPLE, add_special_tokens=False)
    if theirs != ours:
        fault(
            f"RewardModel.reads is tokens, and the server at RewardModel.url makes {theirs[:8]} of a "
            f"text of which the policy's tokenizer makes {ours[:8]} (the first eight). Set reads to "
            "messages or text."
        )


def _check_placement(reward: RewardModel, data: RolloutDataModule, on_cuda: bool) -> None:
    device = reward.server.device
    if on_cuda and device is None:
        fault(
            f"RewardModel.model is {reward.model!r} and RewardModel.server.device is null: vLLM's "
            "build for GPUs needs one. Set it to the CUDA index of a GPU with room, as the trainer "
            "counts them."
        )
    if not on_cuda and device is not None:
        fault(
            f"RewardModel.server.device is {device}, and the trainer is on a CPU: leave it out, and "
            "the reward model is served on the CPU."
        )
    if data.reward_launcher is not None and reward in data.reward_pool.rewards:
        fault(
            f"data.reward_launcher is {type(data.reward_launcher).__name__}, and the server of "
            f"RewardModel.model {reward.model!r} listens on this machine alone: serve the model "
            "where all machines reach it, and give RewardModel.url."
        )


def _check_model(reward: RewardModel, model: str, policy: Policy, longest: int) -> None:
    """Checks a model that the run will serve; `longest` is a prompt with its response in tokens."""
    try:
        config, tokenizer = read_config(model), open_tokenizer(model)
    except EXPECTED as error:
        fault(f"RewardModel.{error}")  # the error begins with "model="
        return
    named = f"RewardModel.model={model!r}"
    kinds = getattr(config, "architectures", None) or ["no architecture"]
    if not str(kinds[0]).endswith("ForSequenceClassification"):
        fault(
            f"{named} is a {kinds[0]}, whose number would come from a head that nobody has trained: "
            "take a model of sequence classification (...ForSequenceClassification)."
        )
        return
    labels = config.num_labels
    if reward.label is None and labels != 1:
        fault(f"{named} has {labels} labels: set RewardModel.label to the one whose score counts.")
    elif reward.label is not None and reward.label >= labels:
        fault(
            f"RewardModel.label is {reward.label}, and the model has the labels 0 to {labels - 1}."
        )
    if reward.reads == "messages" and not tokenizer.chat_template:
        fault(f"{named} has no chat template, and RewardModel.reads is messages: set it to text.")
    if reward.reads == "tokens":
        _check_tokens(named, tokenizer, policy)
        _check_length(reward, config, longest)


def _check_tokens(named: str, tokenizer: PreTrainedTokenizerBase, policy: Policy) -> None:
    """Checks that the model has the policy's tokenizer."""
    if difference := other_token(tokenizer, policy.tokenizer):
        fault(
            f"{named} has another tokenizer than the policy ({difference}), and RewardModel.reads "
            "is tokens: set it to messages or text."
        )


def _check_length(reward: RewardModel, config: Any, longest: int) -> None:
    """Checks that the model's context has room for a prompt and its response."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    room = reward.server.max_tokens or positions
    if isinstance(room, int) and room < longest:
        setting = "RewardModel.server.max_tokens" if reward.server.max_tokens else "its context"
        fault(
            f"RewardModel.model={reward.model!r}: {setting} is {room} tokens, and a prompt with its "
            f"response may have {longest} (data.max_prompt_tokens and data.max_response_tokens): "
            "an input that is too long is refused, and never cut."
        )

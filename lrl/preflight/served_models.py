"""Checks of reward models and teachers on servers against the policy, before a run asks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.errors import CountedError, TeacherError
from lrl.rewards import Reward
from lrl.rewards.reward_model import RewardModel
from lrl.system.config_errors import fault, noting
from lrl.system.event_loop import run_apart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy
    from lrl.training.teacher import Teacher

SAMPLE = "In 1998, three naïve foxes ate 2.5 kg: x**2 >= 7?\n\n\tif not y: 数学 — “yes”!"
"""A text of which two tokenizers hardly make the same tokens."""
SHOWN = 8
"""Tokens in a message."""


def check_reward_models(rewards: Sequence[Reward], policy: Policy) -> None:
    """Checks that the server of every reward model that reads tokens makes the policy's tokens."""
    ours = policy.tokenizer.encode(SAMPLE, add_special_tokens=False)
    for reward in rewards:
        if isinstance(reward, RewardModel) and reward.reads == "tokens":
            with noting():
                _check_reward_model(reward, ours)


def _check_reward_model(reward: RewardModel, ours: list[int]) -> None:
    try:
        theirs = run_apart(lambda: reward.tokens_of(SAMPLE))
    except CountedError as error:
        fault(f"RewardModel.reads is tokens, and the server does not say its own: {error}.")
        return
    if theirs != ours:
        fault(
            f"RewardModel.reads is tokens, and the server at RewardModel.url makes "
            f"{theirs[:SHOWN]} of a text of which the policy's tokenizer makes {ours[:SHOWN]}. Set "
            "reads to messages or text."
        )


def check_teacher_server(teacher: Teacher, policy: Policy, data: RolloutDataModule) -> None:
    """Checks that the server at `model.reference.url` has the policy's tokens, room for a response,
    and log-probs at the run's temperature."""
    if data.sampling.temperature != 1:
        fault(
            f"data.temperature is {data.sampling.temperature}, and a server with a teacher "
            "(model.reference.url) gives log-probs at temperature 1: set data.temperature to 1.0, or "
            "give model.reference.model in the place of url."
        )
    try:
        _check_tokens(teacher, policy.tokenizer, data.max_model_tokens)
        run_apart(lambda: teacher.endpoint.once().logprobs([_trial(policy.tokenizer)]))
    except TeacherError as error:
        fault(f"model.reference.url cannot be the run's teacher: {error}")


def _check_tokens(teacher: Teacher, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Checks that the server reads a text as the policy does, and has room for `longest` tokens.

    The text has all tokens that were added to the vocabulary, such as those of a chat template.
    """
    text = SAMPLE + "".join(sorted(tokenizer.get_added_vocab()))
    theirs = run_apart(lambda: teacher.endpoint.tokens_of(text))
    ours = tokenizer.encode(text, add_special_tokens=False)
    places = range(min(len(ours), len(theirs.token_ids)))
    first = next((at for at in places if ours[at] != theirs.token_ids[at]), len(places))
    shown = slice(first, first + SHOWN)
    if theirs.token_ids != ours:
        fault(
            f"model.reference.url {teacher.url} makes {theirs.token_ids[shown]} of a text of which "
            f"the policy's tokenizer makes {ours[shown]} (from token {first}): a teacher reads the "
            "policy's tokens. Serve one of the same family, with its tokenizer."
        )
    if theirs.context <= longest:
        fault(
            f"model.reference.url {teacher.url} has a context of {theirs.context} tokens, and a "
            f"prompt with its response may have {longest} (data.max_prompt_tokens and "
            "data.max_response_tokens), and vLLM wants one more: raise --max-model-len there, or "
            "lower one of them."
        )


def _trial(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns a text that ends with the tokenizer's last token: the teacher must have a row for
    it."""
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    return [*ids, max(tokenizer.get_vocab().values())]

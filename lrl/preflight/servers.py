"""Checks of the servers that somebody runs for a teacher or a reward model: that they read the
policy's tokens as the policy does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.errors import ConfigError, CountedError, TeacherError
from lrl.rewards import Reward
from lrl.rewards.reward_model import RewardModel
from lrl.system.event_loop import run_apart

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.policy_model import PolicyModel
    from lrl.training.beside.teacher import Teacher

SAMPLE = "In 1998, three naïve foxes ate 2.5 kg: x**2 >= 7?\n\n\tif not y: 数学 — “yes”!"
"""A text of which two tokenizers hardly make the same tokens."""
SHOWN = 8
"""Tokens in a message."""


def check_reward_models(rewards: Sequence[Reward], policy: PolicyModel) -> None:
    """Checks that the servers of rewards that read tokens make the policy's tokens."""
    for reward in rewards:
        if not isinstance(reward, RewardModel) or reward.reads != "tokens":
            continue
        try:
            theirs = run_apart(lambda one=reward: one.tokens_of(SAMPLE))  # type: ignore[misc]
        except CountedError as error:
            raise ConfigError(
                f"RewardModel.reads is tokens, and the server does not say its own: {error}."
            ) from error
        ours = policy.tokenizer.encode(SAMPLE, add_special_tokens=False)
        if theirs != ours:
            raise ConfigError(
                f"RewardModel.reads is tokens, and the server at RewardModel.url makes "
                f"{theirs[:SHOWN]} of a text of which the policy's tokenizer makes {ours[:SHOWN]} "
                "(the first eight). Set reads to messages or text."
            )


def check_teacher(teacher: Teacher, policy: PolicyModel, data: RolloutDataModule) -> None:
    """Checks that the server at `model.reference.url` has the policy's tokens, room for a response,
    and log-probs at the run's temperature."""
    if data.sampling.temperature != 1:
        raise ConfigError(
            f"data.temperature is {data.sampling.temperature}, and a server with a teacher "
            "(model.reference.url) gives log-probs at temperature 1: set it to 1.0, or give "
            "model.reference.model instead of url."
        )
    # With all tokens that were added to the vocabulary, such as those of a chat template.
    text = SAMPLE + "".join(sorted(policy.tokenizer.get_added_vocab()))
    ours = policy.tokenizer.encode(text, add_special_tokens=False)
    sample = policy.tokenizer.encode(SAMPLE, add_special_tokens=False)
    # The teacher must have a row for the last token, too.
    trial = [*sample, max(policy.tokenizer.get_vocab().values())]
    try:
        theirs = run_apart(lambda: teacher.endpoint.tokens_of(text))
        run_apart(lambda: teacher.endpoint.logprobs([trial], once=True))
    except TeacherError as error:
        raise ConfigError(f"model.reference.url cannot be the run's teacher: {error}") from error
    if theirs.token_ids != ours:
        pairs = zip(ours, theirs.token_ids, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), 0)
        shown = slice(first, first + SHOWN)
        raise ConfigError(
            f"model.reference.url {teacher.url} makes {theirs.token_ids[shown]} of a text of which "
            f"the policy's tokenizer makes {ours[shown]} (from token {first}): serve a teacher of "
            "the same family, with its tokenizer."
        )
    if theirs.context <= data.max_model_tokens:
        raise ConfigError(
            f"model.reference.url {teacher.url} has a context of {theirs.context} tokens, and a "
            f"prompt with its response may have {data.max_model_tokens} and one more: raise "
            "--max-model-len there."
        )

"""Checks of a teacher on a server against the policy, before it is asked in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrl.errors import TeacherError
from lrl.preflight.reward_models import SAMPLE
from lrl.system.config_errors import fault
from lrl.system.event_loop import run_apart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy
    from lrl.training.teacher import Teacher

SHOWN = 8
"""Tokens in a message."""


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

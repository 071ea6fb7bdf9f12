"""Checks of the policy against its tokenizer, its prompts, its reference, its critic and the ranker
of its lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedTokenizerBase

from lrl.objectives import Objective
from lrl.preflight.datasets import check_prompts_per_step
from lrl.preflight.disagreements import check_disagreements, check_score_cap
from lrl.preflight.model_folder import Shape, check_weights, shape_of
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.stop_tokens import stop_tokens, turn_stop_tokens
from lrl.system.config_errors import EXPECTED, fault, noting
from lrl.training.critic import Critic
from lrl.training.lora import LoRA
from lrl.training.model import early_tokenizer, open_tokenizer
from lrl.training.reference import Reference
from lrl.training.schedule import Schedule

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule

log = logging.getLogger(__name__)

RANKER = "data.length_predictor.ranker"
PADDING = 1.1
"""Usual rows of an embedding per token of the tokenizer: embeddings are padded to a round
number."""


class Policy(Protocol):
    """A `PolicyModule`, or a subclass, without its weights; the fields are its arguments of the
    same names."""

    model: str
    objective: Objective
    lora: LoRA | None
    reference: Reference | None
    critic: Critic | None
    lr: float
    warmup_steps: int
    schedule: Schedule
    dtype_name: Any
    attention: str | None
    gradient_checkpointing: bool
    head_chunk_tokens: int

    @property
    def training_dtype(self) -> str:
        """Dtype of the passes that train."""

    @property
    def policy_folder(self) -> str:
        """Folder or hub name of the first version."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in that folder."""


def check_before_making(policy: Policy, read: Sequence[Prompts]) -> None:
    """Checks the data sets in the tokens of a policy that a function has yet to make, if it has
    its tokenizer before."""
    try:
        tokenizer = early_tokenizer(policy.model)
    except EXPECTED as error:
        fault(f"model.{error}")  # the error begins with "model="
        return
    for prompts in read if tokenizer is not None else ():
        with noting():
            prompts.check_encoding(tokenizer)


def check_policy(
    policy: Policy, data: RolloutDataModule, read: Sequence[Prompts], longest: int | None = None
) -> Shape | None:
    """Checks the policy's folder, and the data sets in its tokens; returns None if the shapes
    cannot be known.

    `longest` is the context length of the generators in tokens, by default what prompts and
    responses need.
    """
    try:
        folder = policy.policy_folder
        shape = shape_of(folder, policy.attention, policy.lora)
    except EXPECTED as error:
        fault(f"model.{error}")  # the error begins with "model="
        return None
    check_context(folder, shape, data.max_model_tokens)
    check_disagreements(folder, shape.config, shape.attention, longest or data.max_model_tokens)
    sound = check_weights(folder, shape)
    with noting():
        if sound:
            check_vocabulary(folder, shape, policy.tokenizer)
    with noting():
        if sound and data.environment is not None:
            turn_stop_tokens(policy.tokenizer, data.environment.environment)
    with noting():
        for prompts in read if data.max_prompt_tokens > 0 else ():
            with noting():
                data.tokenise(prompts, policy.tokenizer)
                if prompts is data.prompts and prompts.skipped:
                    check_prompts_per_step(data, len(prompts))
                if sound:
                    check_prompt_tokens(prompts, folder, shape)
    if policy.reference is not None and policy.reference.model is not None:
        with noting():
            check_reference(
                policy.reference.model, policy.reference.refresh_every_n_steps, policy, shape
            )
        if policy.reference.rewards_tokens:
            with noting():
                check_teacher(policy.reference.model, policy)
    return shape


def check_context(folder: str, shape: Shape, needed: int) -> None:
    """Checks that prompt and response fit the model's positions."""
    longest = getattr(shape.config, "max_position_embeddings", None)
    rope = getattr(shape.config, "rope_parameters", None) or {}
    # vLLM knows how far scaled positions reach.
    scaled = any("factor" in str(name) for name in _keys(rope))
    if isinstance(longest, int) and needed > longest and not scaled:
        fault(
            f"data.max_prompt_tokens and data.max_response_tokens add up to {needed}, and "
            f"model.model={folder!r} has {longest} positions. Lower them."
        )


def _keys(rope: Any) -> Iterator[Any]:
    """Yields the names in the rope's parameters, which some models have for each kind of layer."""
    for name, value in rope.items() if isinstance(rope, dict) else ():
        yield name
        yield from _keys(value)


def check_vocabulary(folder: str, shape: Shape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that every token has a row in the embedding, and that responses can end."""
    # Without added tokens: no text may need those; see `check_prompt_tokens`.
    tokens = tokenizer.vocab_size
    if tokens > shape.vocabulary:
        fault(
            f"model.model={folder!r}: the tokenizer has {tokens} tokens, the embedding "
            f"{shape.vocabulary} rows. Put the model's own tokenizer into the folder, or resize "
            "the embedding."
        )
    elif shape.vocabulary > PADDING * len(tokenizer):
        log.warning(
            "model.model=%r: the embedding has %d rows for the tokenizer's %d tokens; is it the "
            "model's own tokenizer?",
            *(folder, shape.vocabulary, len(tokenizer)),
        )
    check_ends(folder, shape, stop_tokens(tokenizer, folder))


def check_ends(folder: str, shape: Shape, stops: frozenset[int]) -> None:
    """Checks the tokens at which responses end."""
    named = getattr(shape.config, "eos_token_id", None)
    if named is None:
        named = []
    ends = stops.union(named if isinstance(named, list) else [named])
    if beyond := [end for end in sorted(ends) if not 0 <= end < shape.vocabulary]:
        fault(
            f"model.model={folder!r}: eos_token_id {beyond[0]} in config.json, "
            "generation_config.json or the tokenizer is no token of the model. Correct it."
        )
    elif not stops:
        log.warning(
            "model.model=%r: every response runs to the token limit: the tokenizer has no "
            "eos_token, and generation_config.json (without that file, config.json) no "
            "eos_token_id.",
            folder,
        )


def check_prompt_tokens(prompts: Prompts, folder: str, shape: Shape) -> None:
    """Checks that every token of the prompts has a row in the embedding."""
    for prompt in prompts:
        if max(prompt.token_ids, default=0) >= shape.vocabulary:
            fault(
                f"Row {prompt.id} of {prompts.name} has the token {max(prompt.token_ids)}, and the "
                f"embedding of model.model={folder!r} {shape.vocabulary} rows: the tokenizer is "
                "not the model's own. Put that there."
            )
            return


def check_reference(
    reference: str, refresh_every_n_steps: int | None, policy: Policy, shape: Shape
) -> None:
    """Checks that the reference has the policy's vocabulary and, if it follows the policy, its
    architecture."""
    try:
        other = shape_of(reference, policy.attention)
    except EXPECTED as error:
        fault(f"model.reference.{error}")  # the error begins with "model="
        return
    check_weights(reference, other, "model.reference.model")
    check_score_cap(reference, other.config, other.attention, "model.reference.model")
    # A teacher's rows are often padded to another number, and the tokenizers are compared.
    teaches = policy.reference is not None and policy.reference.rewards_tokens
    padded = teaches and other.vocabulary > shape.vocabulary
    if other.vocabulary != shape.vocabulary and not padded:
        fault(
            f"model.reference.model={reference!r} has {other.vocabulary} tokens and model.model="
            f"{policy.policy_folder!r} {shape.vocabulary}: a reference needs the policy's "
            "vocabulary."
        )
    elif refresh_every_n_steps is not None and other.tensors != shape.tensors:
        fault(
            f"model.reference.refresh_every_n_steps is {refresh_every_n_steps}, and "
            f"model.reference.model={reference!r} is of another architecture than "
            f"model.model={policy.policy_folder!r}: the policy's weights do not fit into it. Leave "
            "refresh_every_n_steps out, or take a reference of the policy's architecture."
        )


def check_teacher(teacher: str, policy: Policy) -> None:
    """Checks that the teacher's tokens are the policy's."""
    try:
        tokenizer = open_tokenizer(teacher)
    except EXPECTED as error:
        fault(f"model.reference.{error}")  # the error begins with "model="
        return
    if difference := other_token(tokenizer, policy.tokenizer):
        fault(
            f"model.reference.model={teacher!r} has another tokenizer than model.model="
            f"{policy.policy_folder!r} ({difference}): a teacher reads the policy's tokens. Take one "
            "of the same family, with its tokenizer in the folder."
        )


def other_token(tokenizer: PreTrainedTokenizerBase, policys: PreTrainedTokenizerBase) -> str:
    """Returns a token on which a tokenizer and the policy's differ, in words; empty if there is
    none."""
    theirs, ours = tokenizer.get_vocab(), policys.get_vocab()
    for token in sorted(ours | theirs):
        if theirs.get(token) != ours.get(token):
            return f"the token {token!r} is {theirs.get(token)} there and {ours.get(token)} here"
    return ""


def check_critic(policy: Policy, shape: Shape) -> int:
    """Checks the critic's model of its own; returns its parameters, 0 without a usable one."""
    if policy.critic is None or policy.critic.model is None:
        return 0
    model = policy.critic.model
    try:
        other = shape_of(model, policy.attention)
    except EXPECTED as error:
        fault(f"model.critic.{error}")  # the error begins with "model="
        return 0
    check_weights(model, other, "model.critic.model")
    check_score_cap(model, other.config, other.attention, "model.critic.model")
    if other.vocabulary != shape.vocabulary:
        fault(
            f"model.critic.model={model!r} has {other.vocabulary} tokens and model.model="
            f"{policy.policy_folder!r} {shape.vocabulary}: a critic needs the policy's vocabulary."
        )
    return other.parameters


def check_ranker(data: RolloutDataModule) -> int:
    """Checks the language model that ranks prompts by length; returns its parameters, 0 without a
    usable one."""
    if data.length_predictor is None:
        return 0
    # Here: most runs have no ranker, or one without a model.
    from lrl.routing.rankers import LanguageModelRanker

    ranker = data.length_predictor.ranker
    if not isinstance(ranker, LanguageModelRanker):
        return 0
    try:
        shape = shape_of(ranker.model, None)
    except EXPECTED as error:
        fault(f"{RANKER}: {error}")
        return 0
    check_weights(ranker.model, shape, f"{RANKER}.model")
    if type(shape.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        fault(
            f"{RANKER}.model={ranker.model!r} is a {shape.config.model_type}, of which "
            "transformers has no form that ends in a number (sequence classification): take one of "
            "another family, such as Qwen2.5."
        )
    return shape.parameters

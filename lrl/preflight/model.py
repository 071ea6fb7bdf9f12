"""Checks of the models of a run against one another, by their configs and shapes. No weight is
loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrl.errors import ConfigError
from lrl.preflight.data import check_prompts_per_step
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.response_text import turn_stop_tokens
from lrl.system.config_errors import EXPECTED
from lrl.training.lora import LoRA
from lrl.training.model import open_meta_model, open_tokenizer, read_config
from lrl.training.weight_files import listed, stored_tensors

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.policy_model import PolicyModel

TensorShapes = dict[str, tuple[int, ...]]
CAPPING_ATTENTIONS = "eager or flash_attention_2"
"""Attentions of transformers that apply a cap to the scores. Read in transformers 5.19; sdpa has no
argument for it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights."""

    config: Any
    """transformers' text config."""
    tensors: TensorShapes
    """Shape of every tensor by its name in memory."""
    parameters: int
    """Numbers in the model, tied ones once."""
    vocabulary: int
    """Rows of the embedding."""
    trained: TensorShapes
    """Shape of every tensor that a checkpoint has: those of the adapters, or all."""
    adapters: int = 0
    """Numbers in the adapters."""
    attention: str | None = None
    """The attention of transformers, also where no setting names it."""


def check_policy(
    policy: PolicyModel, data: RolloutDataModule, read: Sequence[Prompts], longest: int | None
) -> Shape:
    """Checks the policy's folder, the data sets in its tokens, and the models beside it.

    `longest` is the context length of the generators in tokens; None is what prompts and responses
    need.
    """
    with _naming("model."):
        folder = policy.policy_folder
        shape = shape_of(folder, policy.attention, policy.lora)
    check_weights(folder, shape, "model.model")
    check_positions(folder, shape.config, longest or data.max_model_tokens)
    check_vocabulary(folder, shape, policy.tokenizer)
    if data.environment is not None:
        turn_stop_tokens(policy.tokenizer, data.environment.environment)
    for prompts in read:
        data.tokenise(prompts, policy.tokenizer)
    if data.trains:
        check_prompts_per_step(data, len(data.prompts))
    if policy.reference is not None and policy.reference.model is not None:
        check_reference(policy.reference.model, policy, shape)
    if policy.critic is not None and policy.critic.model is not None:
        check_beside(policy.critic.model, "model.critic.model", policy, shape)
    ranker = getattr(getattr(data.length_predictor, "ranker", None), "model", None)
    if ranker is not None:
        with _naming("data.length_predictor.ranker."):
            read_config(ranker)
    _check_servers(policy, data)
    return shape


@contextmanager
def _naming(before: str) -> Iterator[None]:
    """Puts the beginning of a setting before an error, which begins with `model=`."""
    try:
        yield
    except EXPECTED as error:
        raise ConfigError(f"{before}{error}") from error


def shape_of(folder: str, attention: str | None, lora: LoRA | None = None) -> Shape:
    """Returns the shapes of a model, of which `lora` may train adapters alone.

    Raises:
        ValueError: The config cannot be read, describes no causal language model, or needs code of
            its own; `lora` names no layer of it; or the attention leaves out a cap on its scores.
    """
    model = open_meta_model(folder, attention)
    config = model.config.get_text_config()
    check_score_cap(folder, config, config._attn_implementation)
    tensors = _shapes(model.state_dict())
    parameters = model.num_parameters()
    trained = tensors
    adapters = 0
    if lora is not None:
        lora.add_to(model)
        weights = model.named_parameters()
        trained = _shapes({name: weight for name, weight in weights if weight.requires_grad})
        adapters = sum(map(math.prod, trained.values()))
    return Shape(
        config,
        tensors,
        parameters=parameters,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        trained=trained,
        adapters=adapters,
        attention=config._attn_implementation,
    )


def _shapes(tensors: Mapping[str, Tensor]) -> TensorShapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_weights(folder: str, shape: Shape, setting: str) -> None:
    """Checks that a local folder has all weights, in the shapes of its config: transformers would
    draw new ones for those that lack."""
    path = Path(folder)
    if not path.is_dir():
        return
    try:
        found = {name: one.shape for name, one in stored_tensors(path).items()}
        if found:
            _compare(found, shape)
    except ValueError as error:
        raise ConfigError(
            f"{setting}={folder!r}: {error}. Copy or download the folder again, whole."
        ) from error


def _compare(found: TensorShapes, shape: Shape) -> None:
    """Raises ValueError for certain differences only: transformers renames some weights while it
    loads them."""
    for name, size in shape.tensors.items():
        if name in found and found[name] != size:
            raise ValueError(
                f"the weight {name} is {list(found[name])}, by config.json it would be {list(size)}"
            )
    tied = bool(getattr(shape.config, "tie_word_embeddings", False))
    missing = [
        name
        for name in shape.tensors
        if name not in found and not (tied and name.endswith("lm_head.weight"))
    ]
    if missing and not found.keys() - shape.tensors.keys():
        raise ValueError(f"it lacks weights that its config.json asks for: {listed(missing)}")


def check_vocabulary(folder: str, shape: Shape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that every token but added ones, which no text may need, has a row in the embedding."""
    if tokenizer.vocab_size > shape.vocabulary:
        raise ConfigError(
            f"model.model={folder!r}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
            f"{shape.vocabulary} rows. Put the model's own tokenizer into the folder."
        )


def check_reference(model: str, policy: PolicyModel, shape: Shape) -> None:
    """Checks that the reference has the policy's vocabulary, its architecture if it follows the
    policy, and its tokenizer if it is a teacher."""
    reference = policy.reference
    assert reference is not None, "the caller has looked"
    # A teacher's rows are often padded to another number, and the tokenizers are compared.
    other = check_beside(
        model, "model.reference.model", policy, shape, may_have_more=reference.rewards_tokens
    )
    if reference.refresh_every_n_steps is not None and other.tensors != shape.tensors:
        raise ConfigError(
            f"model.reference.refresh_every_n_steps is {reference.refresh_every_n_steps}, and "
            f"model.reference.model={model!r} is of another architecture than the policy. Leave "
            "refresh_every_n_steps out, or take a reference of the policy's architecture."
        )
    if reference.rewards_tokens:
        with _naming("model.reference."):
            tokenizer = open_tokenizer(model)
        if difference := other_token(tokenizer, policy.tokenizer):
            raise ConfigError(
                f"model.reference.model={model!r} has another tokenizer than the policy "
                f"({difference}): take a teacher of the same family."
            )


def check_beside(
    model: str, setting: str, policy: PolicyModel, shape: Shape, may_have_more: bool = False
) -> Shape:
    """Checks that a model beside the policy has the policy's vocabulary, or more rows; returns its
    shape."""
    with _naming(setting.removesuffix("model")):
        other = shape_of(model, policy.attention)
    check_weights(model, other, setting)
    if other.vocabulary < shape.vocabulary or (
        other.vocabulary > shape.vocabulary and not may_have_more
    ):
        raise ConfigError(
            f"{setting}={model!r} has {other.vocabulary} tokens and model.model "
            f"{shape.vocabulary}: it needs the policy's vocabulary."
        )
    return other


def other_token(tokenizer: PreTrainedTokenizerBase, policys: PreTrainedTokenizerBase) -> str:
    """Returns a token on which a tokenizer and the policy's differ, in words; empty if there is
    none."""
    theirs, ours = tokenizer.get_vocab(), policys.get_vocab()
    for token in sorted(ours | theirs):
        if theirs.get(token) != ours.get(token):
            return f"the token {token!r} is {theirs.get(token)} there and {ours.get(token)} here"
    return ""


def _check_servers(policy: PolicyModel, data: RolloutDataModule) -> None:
    """Checks the servers of a teacher and of reward models, of a run that has any."""
    if not data.trains:
        return
    teacher: Any = policy.reference
    rewards = [reward for reward in data.reward_pool.rewards if reward.reads_tokens]
    if rewards or (teacher is not None and teacher.url is not None):
        from lrl.preflight.servers import check_reward_models, check_teacher

        check_reward_models(rewards, policy)
        if teacher is not None and teacher.url is not None:
            check_teacher(teacher, policy, data)


# ---- what transformers and vLLM compute differently by construction, with the same weights


def check_score_cap(folder: str, config: Any, attention: str | None) -> None:
    """Checks that the attention does not leave out a cap on its scores, which vLLM applies."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and attention is not None and "sdpa" in attention:
        raise ValueError(
            f"model={folder!r} caps the scores of its attention (attn_logit_softcapping is {cap:g} "
            f"in its config), and transformers leaves that out in {attention}: set model.attention "
            f"to {CAPPING_ATTENTIONS}"
        )


def check_positions(folder: str, config: Any, longest: int) -> None:
    """Checks that a text of `longest` tokens, the generators' context length, fits the model, and
    that transformers and vLLM compute the same rotary positions up to there."""
    positions = getattr(config, "max_position_embeddings", None)
    rotary = rotary_positions(config)
    is_plain = all(rope.get("rope_type") in ("default", "llama3") for rope in rotary)
    if isinstance(positions, int) and longest > positions and is_plain:
        raise ConfigError(
            f"model.model={folder!r} has {positions} positions, and a text may have {longest} tokens: "
            "lower data.max_prompt_tokens or data.max_response_tokens."
        )
    for rope in rotary:
        kind = rope.get("rope_type")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = None
        if kind == "longrope" and isinstance(original, int) and longest > original:
            limit = original
        elif kind == "dynamic" and isinstance(positions, int):
            trained = rope.get("max_trained_positions", positions)
            if longest > positions or trained != positions:
                limit = min(trained, positions)
        if limit is not None:
            raise ConfigError(
                f"the rotary positions of model.model={folder!r} ({kind}) depend on the length of "
                f"the text beyond {limit} tokens, in another way in vLLM than in transformers, and a "
                f"text may have {longest}. Lower data.max_prompt_tokens and data.max_response_tokens "
                "(or strategy.server.max_model_len), or take another model."
            )


def rotary_positions(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of the rotary positions, of each kind of layer if they have their
    own."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found:
        return [found]
    return [each for each in found.values() if isinstance(each, dict)]

"""Checks of the models of a run against one another, by their configs and shapes, and of the
servers that somebody runs for a teacher or a reward model. No weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lrl.errors import EXPECTED, ConfigError, TeacherError
from lrl.rollouts.policy_text import turn_stop_tokens
from lrl.rollouts.prompts import Prompts
from lrl.system.event_loop import run_apart
from lrl.training.lora import LoRA
from lrl.training.model import open_meta_model, open_tokenizer, read_config

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.policy_model import PolicyModel
    from lrl.run import Run
    from lrl.training.beside.teacher import Teacher

TensorShapes = dict[str, tuple[int, ...]]
SAMPLE = "In 1998, three naïve foxes ate 2.5 kg: x**2 >= 7?\n\n\tif not y: 数学 — “yes”!"
"""A text of which two tokenizers hardly make the same tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights."""

    config: Any
    """transformers' text config."""
    parameters: int
    """Numbers in the model, tied ones once."""
    vocabulary: int
    """Rows of the embedding."""
    trained: TensorShapes
    """Shape of every tensor that a checkpoint has, by its name: those of the adapters, or all."""


def check_policy(run: Run, read: Sequence[Prompts]) -> Shape:
    """Checks the policy's folder, the data sets in its tokens, and the models beside it."""
    policy, data = run.policy, run.data
    with _naming("model."):
        folder, tokenizer = policy.policy_folder, policy.tokenizer
        shape = shape_of(folder, policy.attention, policy.lora)
    longest = run.strategy.server_settings.max_model_len or data.max_model_tokens
    check_positions(folder, shape.config, longest)
    # Added tokens need no row: perhaps no text has them.
    if tokenizer.vocab_size > shape.vocabulary:
        raise ConfigError(
            f"model.model={folder!r}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
            f"{shape.vocabulary} rows. Put the model's own tokenizer into the folder."
        )
    if data.environment is not None:
        turn_stop_tokens(tokenizer, data.environment.environment)
    for prompts in read:
        data.tokenise(prompts, tokenizer)
    if policy.reference is not None and policy.reference.model is not None:
        check_reference(policy.reference.model, policy, shape)
    if policy.critic is not None and policy.critic.model is not None:
        check_beside(policy.critic.model, "model.critic.model", policy, shape)
    ranker = getattr(getattr(data.length_predictor, "ranker", None), "model", None)
    if ranker is not None:
        with _naming("data.length_predictor.ranker."):
            read_config(ranker)
    if run.trains and policy.asked_teacher is not None:
        check_teacher(policy.asked_teacher, policy, data)
    return shape


@contextmanager
def _naming(before: str) -> Iterator[None]:
    """Puts the beginning of a setting before an error, which begins with `model=`."""
    try:
        yield
    except EXPECTED as error:
        raise ConfigError(f"{before}{error}") from error


def shape_of(folder: str, attention: str | None, lora: LoRA | None = None) -> Shape:
    """Returns the shapes of a model, of which `lora` may train adapters alone; raises ValueError for
    one that cannot be opened, or whose attention leaves out a cap on its scores, which vLLM
    applies."""
    model = open_meta_model(folder, attention)
    config = model.config.get_text_config()
    cap, used = getattr(config, "attn_logit_softcapping", None), config._attn_implementation
    # Read in transformers 5.19: sdpa has no argument for it.
    if cap is not None and used is not None and "sdpa" in used:
        raise ValueError(
            f"model={folder!r} caps the scores of its attention (attn_logit_softcapping is {cap:g} "
            f"in its config), and transformers leaves that out in {used}: set model.attention to "
            "eager or flash_attention_2"
        )
    trained = _shapes(model.state_dict())
    parameters = model.num_parameters()
    if lora is not None:
        lora.add_to(model)
        weights = model.named_parameters()
        trained = _shapes({name: weight for name, weight in weights if weight.requires_grad})
    return Shape(
        config,
        parameters=parameters,
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        trained=trained,
    )


def _shapes(tensors: Mapping[str, Tensor]) -> TensorShapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_positions(folder: str, config: Any, longest: int) -> None:
    """Checks that a text of `longest` tokens, the generators' context length, fits the model, and
    that transformers and vLLM compute the same rotary positions up to there."""
    positions = getattr(config, "max_position_embeddings", None)
    found = getattr(config, "rope_parameters", None) or {}
    each_kind = [one for one in found.values() if isinstance(one, dict)]  # of layers
    rotary = [found] if "rope_type" in found else each_kind
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


def check_beside(
    model: str, setting: str, policy: PolicyModel, shape: Shape, may_have_more: bool = False
) -> Shape:
    """Checks that a model beside the policy has the policy's vocabulary, or more rows; returns its
    shape."""
    with _naming(setting.removesuffix("model")):
        other = shape_of(model, policy.attention)
    more = other.vocabulary - shape.vocabulary
    if more < 0 or (more and not may_have_more):
        raise ConfigError(
            f"{setting}={model!r} has {other.vocabulary} tokens and model.model "
            f"{shape.vocabulary}: it needs the policy's vocabulary."
        )
    return other


def check_reference(model: str, policy: PolicyModel, shape: Shape) -> None:
    """Checks that the reference has the policy's vocabulary, its architecture if it follows the
    policy, and its tokenizer if it is a teacher."""
    reference = policy.reference
    assert reference is not None
    # A teacher's rows are often padded to another number, and the tokenizers are compared.
    other = check_beside(
        model, "model.reference.model", policy, shape, may_have_more=reference.rewards_tokens
    )
    if reference.refresh_every_n_steps is not None and other.trained != shape.trained:
        raise ConfigError(
            f"model.reference.refresh_every_n_steps is {reference.refresh_every_n_steps}, and "
            f"model.reference.model={model!r} is of another architecture than the policy. Leave "
            "refresh_every_n_steps out, or take a reference of the policy's architecture."
        )
    if not reference.rewards_tokens:
        return
    with _naming("model.reference."):
        theirs, ours = open_tokenizer(model).get_vocab(), policy.tokenizer.get_vocab()
    if theirs != ours:
        raise ConfigError(
            f"model.reference.model={model!r} has another tokenizer than the policy: take a teacher "
            "of the same family."
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
    tokenizer = policy.tokenizer
    # With all tokens that were added to the vocabulary, such as those of a chat template.
    text = SAMPLE + "".join(sorted(tokenizer.get_added_vocab()))
    ours = tokenizer.encode(text, add_special_tokens=False)
    sample = tokenizer.encode(SAMPLE, add_special_tokens=False)
    # The teacher must have a row for the last token, too.
    trial = [*sample, max(tokenizer.get_vocab().values())]
    try:
        theirs, context = run_apart(lambda: teacher.endpoint.tokens_of(text))
        run_apart(lambda: teacher.logprobs_of([trial], once=True))
    except TeacherError as error:
        raise ConfigError(f"model.reference.url cannot be the run's teacher: {error}") from error
    if theirs != ours:
        raise ConfigError(
            f"model.reference.url {teacher.url} makes other tokens of a text than the policy's "
            "tokenizer: serve a teacher of the same family, with its tokenizer."
        )
    if context <= data.max_model_tokens:
        raise ConfigError(
            f"model.reference.url {teacher.url} has a context of {context} tokens, and a "
            f"prompt with its response may have {data.max_model_tokens} and one more: raise "
            "--max-model-len there."
        )

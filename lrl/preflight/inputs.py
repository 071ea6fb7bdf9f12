"""Data sets and the policy's folder, alone and together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from lrl.preflight.model import Shape, check_context, check_tokens, check_vocabulary, check_weights, shape_of
from lrl.rewards import Reward
from lrl.rollouts.prompts import Prompts
from lrl.routing.rankers import LanguageModelRanker
from lrl.runtime.config_errors import EXPECTED, fault, noting

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.protocols import Policy

RANKER = "data.length_predictor.ranker"


def check_rows(data: RolloutDataModule, evaluations: Sequence[Evaluation]) -> list[Prompts]:
    """Read every data set of the run, which needs no model; returns those that can be used."""
    usable = []
    trains = data.trains
    if trains and _readable(data.prompts, "data.prompts", data.reward_pool.rewards):
        usable.append(data.prompts)
        rows = len(data.prompts.rows)
        if rows < data.groups_per_step:
            fault(
                f"data.groups_per_step is {data.groups_per_step}, and {data.prompts.name} has {rows} prompts: no step "
                f"could have that many. Set it to at most {rows}, or give more prompts."
            )
    for evaluation in evaluations:
        with noting():
            pool = data.reward_pool.like(evaluation.judges(data), workers=1)
            if _readable(evaluation.prompts, "Evaluation.prompts", pool.rewards):
                usable.append(evaluation.prompts)
                _check_breakdown(evaluation)
    return usable


def _readable(prompts: Prompts, setting: str, rewards: Sequence[Reward]) -> bool:
    try:
        prompts.read()
    except EXPECTED as error:
        fault(f"{setting}: {error}")
        return False
    for reward in rewards:
        if lacking := reward.missing_column(prompts.columns):
            fault(
                f"{setting}: {prompts.name} has no column {lacking}, which the reward {reward.name!r} reads. Its other "
                f"columns: {', '.join(prompts.columns) or 'none'}. Rename one, or choose another reward."
            )
    return True


def _check_breakdown(evaluation: Evaluation) -> None:
    prompts = evaluation.prompts
    if unknown := [column for column in evaluation.by if column not in prompts.columns]:
        fault(
            f"Evaluation.by names {', '.join(unknown)}, and {prompts.name} has the columns "
            f"{', '.join(prompts.columns) or 'none'}: name one of them."
        )


def check_policy(policy: Policy, data: RolloutDataModule, read: Sequence[Prompts]) -> Shape | None:
    """The policy's folder, and the data sets in its tokens; None if the model's shapes cannot be known."""
    try:
        folder = policy.policy_folder
        shape = shape_of(folder, policy.attention)
    except EXPECTED as error:
        fault(f"model.{error}")  # which begins with "model="
        return None
    check_context(folder, shape, data.max_model_tokens)
    sound = check_weights(folder, shape)
    with noting():
        if sound:
            check_vocabulary(folder, shape, policy.tokenizer)
        for prompts in read if data.max_prompt_tokens > 0 else ():
            with noting():
                prompts.load(policy.tokenizer, data.max_prompt_tokens)
                if sound:
                    check_tokens(prompts, folder, shape)
    if policy.reference is not None and policy.reference.model is not None:
        with noting():
            _check_reference(policy.reference.model, policy.reference.refresh_every_n_steps, policy, shape)
    return shape


def _check_reference(reference: str, refresh_every_n_steps: int | None, policy: Policy, shape: Shape) -> None:
    try:
        other = shape_of(reference, policy.attention)
    except EXPECTED as error:
        fault(f"model.reference.{error}")  # which begins with "model="
        return
    check_weights(reference, other, "model.reference.model")
    if other.vocabulary != shape.vocabulary:
        fault(
            f"model.reference.model={reference!r} has {other.vocabulary} tokens and model.model="
            f"{policy.policy_folder!r} {shape.vocabulary}: a reference needs the policy's vocabulary."
        )
    elif refresh_every_n_steps is not None and other.tensors != shape.tensors:
        fault(
            f"model.reference.refresh_every_n_steps is {refresh_every_n_steps}, and model.reference.model="
            f"{reference!r} is of another architecture than model.model={policy.policy_folder!r}: the policy's weights "
            "do not fit into it. Leave refresh_every_n_steps out, or take a reference of the policy's architecture."
        )


def check_ranker(data: RolloutDataModule) -> int:
    """The parameters of the language model that guesses lengths; 0 if there is none, or none that can be used."""
    ranker = data.length_predictor.ranker if data.length_predictor is not None else None
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
            f"{RANKER}.model={ranker.model!r} is a {shape.config.model_type}, of which transformers has no form that "
            "ends in a number (sequence classification): take one of another family, such as Qwen2.5."
        )
    return shape.parameters

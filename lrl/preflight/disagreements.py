"""Models that transformers and vLLM compute differently by construction, with the same weights.

A run would pass tokens from one distribution to the other, and learn from the difference. The first
proof of a generator (`lrl.weights.probe`) sees what is larger than rounding; what is known is named
here, before a server starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lrl.system.config_errors import fault

CAPPING_ATTENTIONS = "eager, flex_attention or flash_attention_2"
"""Attentions of transformers that apply a cap to the scores. Read in transformers 5.19; sdpa has no
argument for it."""


def check_disagreements(folder: str, config: Any, attention: str | None, longest: int) -> None:
    """Notes the parts of a model that transformers and vLLM compute differently.

    Args:
        folder: The policy's.
        config: transformers' text config.
        attention: The attention of transformers that the policy has, as it is chosen without a
            setting.
        longest: Context length of the generators, in tokens.
    """
    check_score_cap(folder, config, attention)
    positions = getattr(config, "max_position_embeddings", None)
    for rope in rotary_positions(config):
        kind = rope.get("rope_type")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and isinstance(original, int) and longest > original:
            fault(
                "data.max_prompt_tokens and data.max_response_tokens (or "
                f"strategy.server.max_model_len) give the generators {longest} tokens, and the "
                f"rotary positions of model.model={folder!r} (longrope) change at {original}: vLLM "
                "then takes the factors of long texts for all texts, transformers for those alone "
                f"that are longer than {original}. Lower them to {original} together."
            )
        elif kind == "dynamic" and isinstance(positions, int):
            trained = rope.get("max_trained_positions", positions)
            if longest > positions or trained != positions:
                fault(
                    f"the rotary positions of model.model={folder!r} (dynamic) depend on the "
                    f"length of the text beyond {min(trained, positions)} tokens in transformers, "
                    f"and not in vLLM, and a response may reach {longest}. Lower "
                    "data.max_prompt_tokens and data.max_response_tokens (or "
                    "strategy.server.max_model_len)"
                    f"{f' to {positions} together' if trained == positions else ', or take another model'}."
                )


def check_score_cap(
    folder: str, config: Any, attention: str | None, setting: str = "model.model"
) -> None:
    """Notes that the policy's attention leaves out a cap on the attention's scores, which vLLM
    applies."""
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and attention is not None and "sdpa" in attention:
        fault(
            f"{setting}={folder!r} caps the scores of its attention (attn_logit_softcapping is "
            f"{cap:g} in its config), and transformers leaves that out in {attention}, which "
            f"model.attention has: set it to {CAPPING_ATTENTIONS}."
        )


def rotary_positions(config: Any) -> Iterator[dict[str, Any]]:
    """Yields the parameters of the rotary positions, of each kind of layer if they have their
    own."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, dict):
        yield from (
            [found]
            if "rope_type" in found
            else [each for each in found.values() if isinstance(each, dict)]
        )

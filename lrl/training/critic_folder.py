"""A critic's folder in Hugging Face format: a model for token classification with a class for each
output of the head."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from lrl.errors import ConfigError


def save_critic(
    decoder: PreTrainedModel,
    trunk: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Writes a critic for transformers: its logits for a token are the values behind it.

    Args:
        decoder: The model under the head, which may be without weights.
        trunk: Its weights on the CPU, by their names in it.
        head: `weight` [N, H] and `bias` [N]: N is 1, or 4 of `lrl.TurnCritic` (V1, V2, Q1, Q2).
        tokenizer: The policy's.
        folder: Where to.

    Raises:
        ConfigError: transformers has no token classification for such a model.
        OSError: The folder cannot be written.
    """
    config = copy.deepcopy(decoder.config)
    config.num_labels = len(head["bias"])
    dtype = head["weight"].dtype
    try:
        with torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(config, dtype=dtype)
    except ValueError:
        raise ConfigError(
            f"the critic is of the kind {config.model_type}, for which transformers has no token "
            "classification: it stays in the run's checkpoints."
        ) from None
    prefix = f"{model.base_model_prefix}."
    weights = {f"{prefix}{name}": weight for name, weight in trunk.items()}
    for name in model.state_dict():
        if not name.startswith(prefix):
            weights[name] = head[name.rpartition(".")[2]]
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)

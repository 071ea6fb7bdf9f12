"""The policy's folder: complete, without code to run, and of one mind with its tokenizer. No weight is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrl.rollouts.prompts import Prompts
from lrl.runtime.config_errors import fault
from lrl.training.model import open_meta_model

log = logging.getLogger(__name__)

REMEDY = "Copy or download the folder again, whole."
PADDING = 1.1
"""Rows of an embedding per token of the tokenizer that are usual: embeddings are padded to a round number."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model without its weights."""

    config: Any
    """transformers' text config."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of every tensor by its name in memory."""
    parameters: int
    """Numbers in the model, tied ones once."""
    vocabulary: int
    """Rows of the embedding."""


def shape_of(folder: str, attention: str | None) -> Shape:
    """The shapes of a model.

    Raises:
        ValueError: The config cannot be read, describes no causal language model, or needs code of its own.
    """
    skeleton = open_meta_model(folder, attention)
    return Shape(
        skeleton.config.get_text_config(),
        {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()},
        skeleton.num_parameters(),
        _rows(skeleton),
    )


def _rows(skeleton: PreTrainedModel) -> int:
    return int(skeleton.get_input_embeddings().weight.shape[0])


def check_weights(folder: str, shape: Shape, setting: str = "model.model") -> bool:
    """The weights in a folder are all there, whole, and of the config's shapes. A name on the hub is not looked at.

    Returns:
        Whether they are, as far as it can be known.
    """
    path = Path(folder)
    if not path.is_dir():
        return True
    try:
        found: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(path):
            found |= _shapes_in(file)
        if found:
            _compare(found, shape)
    except ValueError as error:
        fault(f"{setting}={folder!r}: {error}. {REMEDY}")
        return False
    return True


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up the model; none if it has weights of another format."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        try:
            files = sorted(path / name for name in set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index.name} is not an index of weights") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"it lacks {_listed(missing)}, which its index names")
        return files
    if not any(path.glob("pytorch_model*.bin*")):
        raise ValueError(f"it has no weights, neither {single.name} nor {index.name}")
    return []


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name} cannot be read ({error})") from error


def _compare(found: dict[str, tuple[int, ...]], shape: Shape) -> None:
    """Only what is certain: transformers renames some weights while it loads them."""
    for name, size in shape.tensors.items():
        if name in found and found[name] != size:
            raise ValueError(
                f"the weight {name} is {list(found[name])}, by config.json it would be {list(size)}; the config "
                "belongs to another model"
            )
    tied = bool(getattr(shape.config, "tie_word_embeddings", False))
    missing = [name for name in shape.tensors if name not in found and not (tied and name.endswith("lm_head.weight"))]
    if missing and not found.keys() - shape.tensors.keys():
        raise ValueError(f"it lacks weights that its config.json asks for: {_listed(missing)}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_vocabulary(folder: str, shape: Shape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token has a row in the embedding, and answers can end.

    Tokens that were added to the vocabulary may lie beyond: many tokenizers have such that no text needs.
    `check_tokens` looks at those that are used.
    """
    tokens = tokenizer.vocab_size
    if tokens > shape.vocabulary:
        fault(
            f"model.model={folder!r}: the tokenizer has {tokens} tokens, the embedding {shape.vocabulary} rows. "
            "Put the model's own tokenizer into the folder, or resize the embedding."
        )
    elif shape.vocabulary > PADDING * len(tokenizer):
        log.warning(
            "model.model=%r: the embedding has %d rows for the tokenizer's %d tokens; is it the model's own tokenizer?",
            *(folder, shape.vocabulary, len(tokenizer)),
        )
    ends = getattr(shape.config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    beyond = [end for end in ends if not 0 <= end < shape.vocabulary]
    if beyond:
        fault(f"model.model={folder!r}: eos_token_id {beyond[0]} in config.json is no token of the model. Correct it.")
    elif not ends:
        log.warning("model.model=%r: config.json has no eos_token_id; every response runs to the token limit.", folder)


def check_tokens(prompts: Prompts, folder: str, shape: Shape) -> None:
    """Every token of the prompts has a row in the embedding."""
    for prompt in prompts:
        if max(prompt.token_ids, default=0) >= shape.vocabulary:
            fault(
                f"Row {prompt.id} of {prompts.name} has the token {max(prompt.token_ids)}, and the embedding of "
                f"model.model={folder!r} {shape.vocabulary} rows: the tokenizer is not the model's own. Put that there."
            )
            return


def check_context(folder: str, shape: Shape, needed: int) -> None:
    """Prompts and answers fit the positions the model has; a model that scales its positions is left to vLLM."""
    longest = getattr(shape.config, "max_position_embeddings", None)
    rope = getattr(shape.config, "rope_parameters", None) or {}
    scaled = any("factor" in str(name) for name in _keys(rope))
    if isinstance(longest, int) and needed > longest and not scaled:
        fault(
            f"data.max_prompt_tokens and data.max_response_tokens add up to {needed}, and model.model={folder!r} has "
            f"{longest} positions. Lower them."
        )


def _keys(rope: Any) -> list[Any]:
    """Names in the rope's parameters, which some models have for each kind of layer."""
    if not isinstance(rope, dict):
        return []
    return [key for name, value in rope.items() for key in (name, *_keys(value))]

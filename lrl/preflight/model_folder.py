"""Shapes of a model and checks of its weights: all there, whole, and as in the config. No weight is
loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lrl.system.config_errors import fault
from lrl.training.lora import LoRA
from lrl.training.model import open_meta_model
from lrl.training.weight_files import listed, stored_tensors

TensorShapes = dict[str, tuple[int, ...]]


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


def shape_of(folder: str, attention: str | None, lora: LoRA | None = None) -> Shape:
    """Returns the shapes of a model, of which `lora` may train adapters alone.

    Raises:
        ValueError: The config cannot be read, describes no causal language model, or needs code of
            its own; or `lora` names no layer of it.
    """
    model = open_meta_model(folder, attention)
    config = model.config.get_text_config()
    tensors = _shapes(model.state_dict())
    parameters = model.num_parameters()
    trained = tensors
    adapters = 0
    if lora is not None and lora.rank >= 1:  # its class has noted a lower one
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


def check_weights(folder: str, shape: Shape, setting: str = "model.model") -> bool:
    """Notes a fault of the weights in a folder; returns whether there is none.

    A hub name has none: its weights are not read.
    """
    path = Path(folder)
    if not path.is_dir():
        return True
    try:
        found = {name: one.shape for name, one in stored_tensors(path).items()}
        if found:
            _compare(found, shape)
    except ValueError as error:
        fault(f"{setting}={folder!r}: {error}. Copy or download the folder again, whole.")
        return False
    return True


def _compare(found: TensorShapes, shape: Shape) -> None:
    """Raises ValueError for certain differences only: transformers renames some weights while it
    loads them."""
    for name, size in shape.tensors.items():
        if name in found and found[name] != size:
            raise ValueError(
                f"the weight {name} is {list(found[name])}, by config.json it would be "
                f"{list(size)}; the config belongs to another model"
            )
    tied = bool(getattr(shape.config, "tie_word_embeddings", False))
    missing = [
        name
        for name in shape.tensors
        if name not in found and not (tied and name.endswith("lm_head.weight"))
    ]
    if missing and not found.keys() - shape.tensors.keys():
        raise ValueError(f"it lacks weights that its config.json asks for: {listed(missing)}")

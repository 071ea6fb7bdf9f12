"""Low-rank adapters (LoRA, Hu et al., 2106.09685): the policy's weights stay as they are, small
matrices are trained.

A matrix W computes W + scale * B A (equation 3), with scale = alpha / rank. Checkpoints and syncs
through a file hold peft's adapters alone, and a generator merges them into the W that it has
(`lrl.weights.version_file`); between GPUs the trainer merges them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.falcon.modeling_falcon import FalconLinear

from lrl.errors import ConfigError, above, at_least
from lrl.training.merging import DOWN, UP

NAME = "default"
BASE = ".base_layer."
ALL = "all-linear"
PRODUCTS = (nn.Linear.forward, FalconLinear.forward)
"""The forward functions of a layer that computes W x alone."""


@dataclass(frozen=True)
class LoRA:
    """Trains low-rank adapters of the policy's matrices; all other weights stay.

    Args:
        rank: Columns of B and rows of A.
        alpha: The adapters' product counts `alpha / rank` times.
        target_modules: The layers with an adapter, by the ends of their names, such as `[q_proj,
            v_proj]`; `all-linear` takes every linear layer but the output head.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = ALL

    def __post_init__(self) -> None:
        at_least(1, "model.lora", rank=self.rank)
        above(0, "model.lora", alpha=self.alpha)
        modules = self.target_modules
        if not modules or (isinstance(modules, str) and modules != ALL):
            raise ConfigError(
                f"model.lora.target_modules is {modules!r}; give {ALL}, or a list of the ends of "
                "names, such as [q_proj, v_proj]."
            )

    def add_to(self, network: PreTrainedModel) -> None:
        """Adds adapters in float32 to a network, which then computes as before: every B is 0.
        Raises ConfigError if `target_modules` names none of its linear layers."""
        config: Any = self._peft_config([])
        # peft's own way puts those of a mixture's dense layers on its experts.
        for name in self.layers(network):
            parent, _, child = name.rpartition(".")
            base, alpha = network.get_submodule(name), cast(int, self.alpha)
            layer = Linear(base, NAME, config, r=self.rank, lora_alpha=alpha)
            setattr(network.get_submodule(parent), child, layer)
        for name, weight in network.named_parameters():
            weight.requires_grad_(is_adapter(name))
            if is_adapter(name):
                weight.data = weight.data.float()  # peft made it in the dtype of W

    def save(self, adapters: Mapping[str, Tensor], base: str, folder: Path) -> None:
        """Writes whole `adapter_tensors`, on the CPU, in peft's format; `base` is their model."""
        tensors, ends = {}, set()
        for name, tensor in adapters.items():
            layer, _, kind = name.rpartition(".weight")
            ends.add(layer.rpartition(".")[2])
            own = tensor * (self.rank / self.alpha) if kind == UP else tensor
            tensors[f"base_model.model.{layer}{kind}.weight"] = own.contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        self._peft_config(sorted(ends), base).save_pretrained(str(folder))

    def _peft_config(self, layers: list[str], base: str | None = None) -> LoraConfig:
        scale: Any = {"r": self.rank, "lora_alpha": self.alpha}
        return LoraConfig(
            **scale, target_modules=layers, task_type="CAUSAL_LM", base_model_name_or_path=base
        )

    def layers(self, network: PreTrainedModel) -> list[str]:
        """Returns the names of the layers with adapters; see `add_to`."""
        head = network.get_output_embeddings()
        linear = [
            name
            for name, layer in network.named_modules()
            if isinstance(layer, nn.Linear)
            and type(layer).forward in PRODUCTS
            and layer is not head
        ]
        kind = type(network).__name__
        if not linear:  # GPT-2 has layers of another class, with transposed weights
            raise ConfigError(f"model.lora is set, and {kind} has no linear layers: leave it out.")
        if isinstance(self.target_modules, str):
            return linear
        found: set[str] = set()
        for end in self.target_modules:
            of_end = {name for name in linear if f".{name}".endswith(f".{end}")}
            if not of_end:
                ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                raise ConfigError(
                    f"model.lora.target_modules has {end!r}, and {kind} has no linear layer of "
                    f"that name. Choose from {ends}."
                )
            found |= of_end
        return sorted(found)


def is_adapter(name: str) -> bool:
    """Returns whether a weight of that name in memory belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain(name: str) -> str:
    """Returns the name that a weight has in a network without adapters."""
    return name.replace(BASE, ".")


def adapter_tensors(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields A [rank, in] and scale * B [out, rank] of each layer with adapters, as this rank has
    them, by their names on the wire."""
    for name, layer in adapted_layers(network):
        (saved_as,) = revert_weight_conversion(
            network, {f"{name}.weight": layer.get_base_layer().weight}
        )
        down, up = factors_of(layer)
        yield saved_as + DOWN, down
        yield saved_as + UP, up


def adapted_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields each layer with an adapter (peft's `LoraLayer`), and its name."""
    return (
        (name, layer) for name, layer in network.named_modules() if isinstance(layer, LoraLayer)
    )


def adapted_weights(network: nn.Module) -> dict[str, LoraLayer]:
    """Returns `adapted_layers` by the names that their W have without adapters."""
    return {f"{name}.weight": layer for name, layer in adapted_layers(network)}


def factors_of(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """Returns A [rank, in] and scale * B [out, rank] as this rank has them."""
    down, up = (
        cast(nn.Linear, factor[NAME]).weight.detach() for factor in (layer.lora_A, layer.lora_B)
    )
    return down, layer.scaling[NAME] * up


@contextmanager
def base_alone(network: nn.Module) -> Iterator[None]:
    """Has the network compute without its adapters in the block: as the policy's first version."""
    layers = [layer for _, layer in adapted_layers(network)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)

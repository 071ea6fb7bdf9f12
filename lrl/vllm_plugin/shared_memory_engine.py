"""The generator's end of the shared-memory transport; runs inside vLLM's worker, registered by
`lrl.vllm_plugin.plugin`.

vLLM's CPU build packs weights at load into the form that its kernels take, and for two kinds of
layers an update would not reach that form. All others are packed again as their weights arrive, and
their weights dropped, so that there is no one call which is right for every layer. The probe after
a sync is what would notice a third kind.

- An output head that is tied to the embedding gets no weights of its own, and would stay as it was
  loaded: log-probs were off by 0.7 nats with every other layer right. It is packed when all weights
  are there.
- Experts are packed when their kernel is made, which is once; Mixtral was off by 0.09. Without the
  old kernel the new weights are taken as at load.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lrl.system.malloc_trim import trim_heap
from lrl.weights.adapters import are_adapters, merged
from lrl.weights.version_file import check_file


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: nothing is agreed on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The location of the weights.

    Args:
        file: A safetensors file of full tensors under their Hugging Face names, or of
            `lrl.weights.adapters`.
        checksum: Of its header (`lrl.weights.version_file.Header`).
    """

    file: str
    checksum: int


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads the file that the trainer wrote."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing: there is no group to join."""

    def start_weight_update(self) -> None:
        """Prepares the model for weights in checkpoint form."""
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the file. The base class would also wait for an accelerator, which a CPU worker
        does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`; raises ValueError for a damaged file, before any weight is
        replaced."""
        check_file(update_info.file, update_info.checksum)
        tensors = load_file(update_info.file, device=str(self.device))
        self.model.load_weights(self._merged(tensors) if are_adapters(tensors) else tensors.items())

    def _merged(self, adapters: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        return merged(self._first_version(), adapters, cast(torch.dtype, self.model_config.dtype))

    def _first_version(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the weights that the generator began with, from its files: no second copy is kept
        in memory.

        All of them are loaded again, because vLLM gives a layer that gets a part of its weights
        (one of the three matrices of an attention's input) random ones for the rest.
        """
        config = copy.copy(self.vllm_config.load_config)
        config.use_tqdm_on_load = False
        loader = get_model_loader(config)
        if not isinstance(loader, DefaultModelLoader):
            raise ValueError(
                f"load_format {config.load_format} keeps no weights in which adapters can be "
                "merged."
            )
        return loader.get_all_weights(self.model_config, self.model)

    def finish_weight_update(self) -> None:
        """Converts the new weights of every layer into the form of its kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads(self.model)
            # Every update frees the older weights, and the C library would keep their memory.
            trim_heap()

    def shutdown(self) -> None:
        """Does nothing: no resource is held between updates."""


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)

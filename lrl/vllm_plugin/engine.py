"""The base of lrl's engines, the generators' ends of the transports; they run inside vLLM's worker,
registered by `lrl.vllm_plugin.plugin`.

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

from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lrl.system.memory import trim_heap

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class Engine(WeightTransferEngine[Init, Update]):
    """Loads weights in checkpoint form."""

    def start_weight_update(self) -> None:
        """Prepares the model for them."""
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads some. The base class would also wait for an accelerator, which a CPU worker does
        not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Converts the new weights of every layer into the form of its kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads(self.model)
            # Every update frees the older weights, and the C library would keep their memory.
            trim_heap()

    def shutdown(self) -> None:
        """Releases what is held between updates; here nothing."""


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)

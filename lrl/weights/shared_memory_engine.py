"""The generator's end of the shared-memory transport; runs inside vLLM's worker, registered by `lrl.weights.plugin`.

Why the head is processed again at the end of an update: vLLM's CPU build packs the output head's weight once at load,
and with tied embeddings an update of the embedding then never reaches the head (log-probs were off by 0.7 with every
other layer right). Processing the head anew mends it; the probe after each sync is what would notice if it did not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lrl.freed_memory import give_memory_back
from lrl.weights.checksum import checksum


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are.

    Args:
        file: A safetensors file of full tensors under their Hugging Face names.
        checksum: What `lrl.weights.checksum` gives for it.
    """

    file: str
    checksum: int


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a file that the trainer wrote to shared memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to join."""

    def start_weight_update(self) -> None:
        """Make the model ready to take weights in checkpoint form."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file. The base class also waits for an accelerator, which a CPU worker does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`; raises ValueError for a damaged file, before any weight is replaced."""
        if (found := checksum(update_info.file)) != update_info.checksum:
            raise ValueError(f"{update_info.file} has the checksum {found}, and {update_info.checksum} was sent.")
        self.model.load_weights(load_file(update_info.file, device=str(self.device)).items())

    def finish_weight_update(self) -> None:
        """Let every layer bring its new weights into the form it computes with.

        On a CPU the old ones are given back to the system: they are freed with every update, and the C library would
        keep them.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self.device.type == "cpu" and head is not None:
            head.quant_method.process_weights_after_loading(head)
        if self.device.type == "cpu":
            give_memory_back()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

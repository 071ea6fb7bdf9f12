"""The generator's end of the transports that write files (`lrl.vllm_plugin.engine`)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

from lrl.vllm_plugin.engine import Engine
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


class SharedMemoryEngine(Engine[InitInfo, UpdateInfo]):
    """Loads the file that the trainer wrote."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing: there is no group to join."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the file; raises ValueError for a damaged one, before any weight is replaced."""
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

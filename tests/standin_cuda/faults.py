"""Faults that a GPU refuses, put into a run; the stand-in device must refuse them, too."""

import torch
from torch import Tensor

import lrl
from lrl.types import MicroBatch


class LossOnTheCpu(lrl.PolicyModule):
    """Weighs its loss with a tensor of the CPU."""

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        return (super().compute_loss(micro) * torch.ones(1)).sum()


class NoiseFromTheCpu(lrl.PolicyModule):
    """Draws on the GPU from a generator of the CPU."""

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        noise = torch.rand(1, generator=draw, device=self.device)
        return super().compute_loss(micro) * noise.sum()


class GpuToNumpy(lrl.PolicyModule):
    """Reads its loss as an array of numpy."""

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        loss = super().compute_loss(micro)
        assert loss.detach().numpy() == loss.item()
        return loss


FAULTS: dict[str, type[lrl.PolicyModule]] = {
    "loss on the CPU": LossOnTheCpu,
    "noise from the CPU": NoiseFromTheCpu,
    "GPU to numpy": GpuToNumpy,
}
"""The modules that have them."""

"""Faults that a GPU refuses, put into a run; the stand-in device must refuse them, too."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

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


class OpenedOnTheDefaultDevice(lrl.PolicyModule):
    """Opens its model where Lightning has made the GPU the default device; lrl did so until it was
    first on a GPU."""

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            self._open()


@contextmanager
def trial_draws_on_the_gpu() -> Iterator[type[lrl.PolicyModule]]:
    """Lets the trial of shared rows draw its tokens where the network is, as it once did."""

    def texts(network: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
        draw = torch.Generator().manual_seed(0)
        vocabulary = len(network.get_input_embeddings().weight)
        drawn = torch.randint(vocabulary, (sum(lengths),), generator=draw, device="cuda")
        return [text.tolist() for text in drawn.split(list(lengths))]

    with mock.patch("lrl.training.trials._texts", texts):
        yield lrl.PolicyModule


FAULTS: dict[str, Callable[[], AbstractContextManager[type[lrl.PolicyModule]]]] = {
    "loss on the CPU": partial(nullcontext, LossOnTheCpu),
    "noise from the CPU": partial(nullcontext, NoiseFromTheCpu),
    "GPU to numpy": partial(nullcontext, GpuToNumpy),
    "opened on the default device": partial(nullcontext, OpenedOnTheDefaultDevice),
    "trial draws on the GPU": trial_draws_on_the_gpu,
}
"""Each puts its fault in place and gives the module to train."""

"""Sharding of a model over the ranks (FSDP2). Each makes the parameters without memory, divides
them, and gets its part from rank 0, which alone has the whole model, and only while it is loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lrl.errors import ConfigError
from lrl.system.ranks import explain_broken_collective, explain_rank_loss

ReduceGradients = Literal["each", "once"]


@dataclass(frozen=True)
class Sharding:
    """The division of a model over the ranks.

    Args:
        mesh: The ranks, with up to three named dimensions: `replicas`, each with a whole model;
            `shards`, which divide its weights; `tensor`, which also divide each layer's
            computation.
        compute_dtype: Dtype of the passes; None keeps that of the weights. Gradients are averaged
            in float32 either way.
        cpu_offload: Weights, gradients and optimizer state wait on the CPU.
        reduce_gradients: Average the gradients in `each` backward pass, or `once` (`reduces`).
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype | None = None
    cpu_offload: bool = False
    reduce_gradients: ReduceGradients = "each"

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that compute one micro-batch together."""
        return self.mesh["tensor"].size() if "tensor" in (self.mesh.mesh_dim_names or ()) else 1

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are trained at the same time."""
        return self.mesh.size() // self.tensor_parallel_size

    def divide(self, root: nn.Module, *networks: PreTrainedModel) -> None:
        """Divides the parameters of `networks`: each layer by itself, then `root`, which calls
        them, with the rest. lrl calls decoder and head apart, so `root` is not a network."""
        for network in networks if self.tensor_parallel_size > 1 else ():
            plan = tensor_parallel_plan(network, self.tensor_parallel_size)
            apply_tensor_parallelism(network, self.mesh["tensor"], plan)
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "tensor")
        layers = [layer for network in networks for layer in layers_of(network)]
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        pins = self.mesh.device_type != "cpu"  # without a GPU torch cannot
        offload = CPUOffloadPolicy(pin_memory=pins) if self.cpu_offload else OffloadPolicy()
        for module in [*layers, root]:
            fully_shard(module, mesh=self.mesh[names], mp_policy=precision, offload_policy=offload)
        if self.reduce_gradients == "once":
            cast(FSDPModule, root).set_requires_gradient_sync(False)

    @contextmanager
    def reduces(self, root: nn.Module) -> Iterator[None]:
        """Averages, in the backward pass of the block, all gradients that `once` has kept whole."""
        cast(FSDPModule, root).set_requires_gradient_sync(True)
        yield
        cast(FSDPModule, root).set_requires_gradient_sync(False)

    def fill(
        self, network: PreTrainedModel, whole: PreTrainedModel | None, device: torch.device
    ) -> None:
        """Gives every rank its part of the weights of `whole`, which rank 0 has; a collective of
        all ranks. Buffers go to `device`, even if the weights wait on the CPU."""
        give_memory(network, home="cpu" if self.cpu_offload else device, device=device)
        weights = {} if whole is None else whole.state_dict()
        # The head then has no weight of its own.
        tied = network.config.get_text_config().tie_word_embeddings
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not tied)
        with explain_broken_collective():
            set_model_state_dict(network, weights, options=options)


def layers_of(network: PreTrainedModel) -> Iterator[nn.Module]:
    """Yields the modules that a model calls indivisible: its layers."""
    names = set(network._no_split_modules or ())
    for module in network.modules():
        # FSDP makes a subclass of a layer's class.
        if names & {kind.__name__ for kind in type(module).__mro__}:
            yield module


PARALLEL_STYLES = (
    *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"),
    "replicated_with_grad_allreduce",
)
"""Transformers' styles of dividing a weight that leave the gradients of one process."""


def tensor_parallel_plan(network: PreTrainedModel, size: int) -> dict[str, str]:
    """Returns how transformers divides the layers of a network over `size` ranks, by the names of
    modules. Raises ConfigError if it has no plan that works here.

    The ends stay whole: lrl computes log-probs with the head's weight itself.
    """
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    whole = {name for name, module in network.named_modules() if module in ends}
    plan = {name: style for name, style in (network.tp_plan or {}).items() if name not in whole}
    unknown = sorted(set(plan.values()) - set(PARALLEL_STYLES))
    config = network.config.get_text_config()
    heads = ("num_attention_heads", "num_key_value_heads")
    counts = {name: getattr(config, name, None) or 0 for name in heads}
    odd = [f"{name} {count}" for name, count in counts.items() if count % size]
    why = ""
    if not plan:
        why = f"transformers has no plan to divide the layers of {type(network).__name__}"
    elif unknown:
        why = f"lrl does not load layers that are divided as {', '.join(unknown)} yet"
    elif odd:
        why = f"it does not divide the model's {' and '.join(odd)}"
    if why:
        raise ConfigError(f"strategy.tensor_parallel_size is {size}, and {why}. Set it to 1.")
    return plan


def give_memory(
    network: PreTrainedModel, home: torch.device | str, device: torch.device | str
) -> None:
    """Puts empty parameters on `home` where there were none, and all other tensors on `device`."""
    network._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device)
        )
    )
    network.tie_weights()


def own_part(weight: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def shard_again(root: nn.Module) -> None:
    """Frees weights that a forward pass alone has left whole, maybe in another dtype."""
    if isinstance(root, FSDPModule):
        root.reshard()


def whole_on(weight: Tensor, root: int = 0) -> Tensor:
    """Returns a weight whole on rank `root`, on the others a tensor of its shape without memory; a
    collective if it is sharded.

    A collective of torch would give every rank the whole tensor: for a policy of 234 MB it took
    twice the memory on rank 0, and five times as long.
    """
    if not isinstance(weight, DTensor):
        return weight
    own = dist.get_rank()
    # By tensor parallelism, too.
    if sum(not placement.is_replicate() for placement in weight.placements) > 1:
        whole = weight.full_tensor()
        return whole if own == root else torch.empty_like(whole, device="meta")
    group = weight.device_mesh.get_group(weight.device_mesh.ndim - 1)
    part = weight.to_local()
    ranks = dist.get_process_group_ranks(group)
    if own == root:
        whole = torch.empty(weight.shape, dtype=part.dtype, device=part.device)
        # As FSDP2 divides: along the first dimension. A short weight has fewer chunks than there
        # are ranks.
        chunks = dict(zip(ranks, whole.chunk(len(ranks)), strict=False))
        if own in chunks:
            chunks.pop(own).copy_(part)
        with explain_rank_loss("Another rank"):
            for work in [dist.irecv(chunk, rank, group) for rank, chunk in chunks.items()]:
                cast(dist.Work, work).wait()
        return whole
    if part.numel() and root in ranks:  # of several replicas, only that of the root sends
        with explain_rank_loss(f"Rank {root}"):
            dist.send(part.contiguous(), root, group)
    return torch.empty(weight.shape, dtype=part.dtype, device="meta")


def on_cpu(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors of `whole_on` on the CPU by name; nothing on the other ranks."""
    return {name: weight.cpu() for name, weight in named if not weight.is_meta}

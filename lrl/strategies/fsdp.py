"""Sharded training (FSDP2): every rank has a part of every weight, and of the optimizer's state for
it.

All ranks do as many passes, for a layer's weights are gathered in each: one without a micro-batch in
a round trains a blank (`lrl.training.collate.blank`).
"""

from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from lrl.checkpoints.checkpoint_folder import CheckpointFolder
from lrl.errors import ConfigError, at_least, one_of
from lrl.strategies.several_ranks import SeveralRanks
from lrl.system.ranks import explain_broken_collective
from lrl.training.sharding import ReduceGradients, Sharding


class AsyncFSDP(SeveralRanks, ModelParallelStrategy):
    """Several trainer processes, each with a share of every weight; see `SeveralRanks`.

    With `trainer.precision: bf16-mixed` the passes and their traffic are in bfloat16, the weights,
    the average of the gradients and the optimizer in float32.

    Args:
        replicas: Copies of the policy. The ranks of a copy are neighbours and share its weights,
            and gradients are averaged over the copies: as many as nodes keeps the weights' traffic
            within a node (hybrid sharding).
        tensor_parallel_size: Ranks, neighbours, that also divide the computation of each layer, by
            the plan that transformers has for the model; they train one micro-batch together.
        reduce_gradients: `each` averages the gradients in each backward pass. `once` does so at the
            end of the step, in one pass more: less traffic, and each rank keeps a whole gradient in
            float32.
        cpu_offload: Keep weights, gradients and optimizer state in the memory of the CPU, and bring
            a layer to the GPU for its passes (not run on a GPU yet).
        save_distributed_checkpoint: A checkpoint is a folder into which each rank writes its share.
            Otherwise rank 0 gathers all and writes one file. A run with another number of ranks
            resumes from either.
        **kwargs: See `SeveralRanks`, and Lightning's ModelParallelStrategy, whose
            `data_parallel_size` follows from the other sizes.
    """

    resumes_parts = True

    def __init__(
        self,
        replicas: int = 1,
        tensor_parallel_size: int = 1,
        reduce_gradients: ReduceGradients = "each",
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )
        if kwargs.get("data_parallel_size", "auto") != "auto":
            raise ConfigError(
                f"strategy.data_parallel_size is {kwargs['data_parallel_size']}. It follows from "
                "the other sizes: the ranks over strategy.tensor_parallel_size. Leave it out."
            )
        at_least(1, "strategy", replicas=replicas, tensor_parallel_size=tensor_parallel_size)
        one_of("strategy", reduce_gradients=(get_args(ReduceGradients), reduce_gradients))
        self.replicas = replicas
        self.tensor_parallel_size = tensor_parallel_size
        self.reduce_gradients = reduce_gradients
        self.cpu_offload = cpu_offload
        self.saves_parts = save_distributed_checkpoint

    @property
    def shards(self) -> int:
        return self.num_processes * self.num_nodes // self.replicas

    def check(self) -> None:
        super().check()
        ranks, size = self.num_processes * self.num_nodes, self.tensor_parallel_size
        one_group, one_rank = ranks // size < 2, self.shards < 2 <= self.replicas
        if ranks % (self.replicas * size) or one_group or one_rank:
            raise ConfigError(
                f"strategy.replicas is {self.replicas}, strategy.tensor_parallel_size is {size}, "
                f"and there are {ranks} trainer ranks (trainer.devices less "
                "strategy.generator_devices, times trainer.num_nodes): their product must be a "
                "divisor of the ranks, with two or more ranks in each copy, and two or more "
                "tensor-parallel groups. lrl.AsyncDDP trains whole copies."
            )
        if self.saves_parts and not isinstance(self.checkpoint_io, CheckpointFolder):
            raise ConfigError(
                f"trainer.plugins has {type(self.checkpoint_io).__name__}, which writes a "
                "checkpoint on one rank, and strategy.save_distributed_checkpoint writes one on "
                "all. Remove it, or set that to false."
            )

    def setup_environment(self) -> None:
        """Connects the ranks, and divides the weights among them."""
        self._data_parallel_size = self.num_processes * self.num_nodes // self.tensor_parallel_size
        super().setup_environment()

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if self.cpu_offload and backend == "nccl" else backend

    def model_to_device(self) -> None:
        """Does nothing: `Sharding.fill` has put every weight where it belongs."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Lets a signal wait until the pass is done: the other ranks are within its collectives."""
        ModelParallelStrategy.pre_backward(self, closure_loss)

    def usual_checkpoint_io(self) -> CheckpointIO:
        return CheckpointFolder() if self.saves_parts else super().usual_checkpoint_io()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; a collective of all ranks."""
        with explain_broken_collective():
            path = self.broadcast(filepath)
            if self.saves_parts:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            else:
                super().save_checkpoint(checkpoint, path, storage_options)

    def _setup_distributed(self) -> None:
        with self.meeting():
            super()._setup_distributed()
        bfloat16 = torch.bfloat16 if isinstance(self.precision_plugin, MixedPrecision) else None
        if bfloat16:
            self._precision_plugin = CastByShards()
        tensor = self.tensor_parallel_size
        sizes = {"replicas": self.replicas, "shards": self.shards // tensor, "tensor": tensor}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
        kind = self.root_device.type
        mesh = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        for group in mesh.get_all_groups():  # torch gives new ones its own timeout, of minutes
            if self._timeout is not None:
                _set_pg_timeout(self._timeout, group)
        self.sharding = Sharding(mesh, bfloat16, self.cpu_offload, self.reduce_gradients)


class CastByShards(Precision):
    """Mixed precision without autocast: FSDP2 casts the weights as it gathers them."""

    precision: Literal["bf16-mixed"] = "bf16-mixed"

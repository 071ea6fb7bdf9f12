"""One rank of several that stage the weights of policies, divided in one way, without a trainer.

Rank 0 writes the weights as it gathers them, each rank's bytes of the staged version, and what a
worker receives when all ranks broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lrl.system.ranks import collective, follow
from lrl.training.lora import adapter_tensors
from lrl.training.pieces import checkpoint_weights
from lrl.training.sharding import whole_on
from lrl.weights import nccl
from lrl.weights.buckets import JoinOrder
from lrl.weights.staging import StageOrder
from tests.strategies.forked_ranks import met
from tests.strategies.sharded_step import UNDIVIDED, Sharded
from tests.weights.nccl_over_gloo import Communicator, receive


class Divided(Sharded):
    @collective
    def staged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.lora is None:
            return checkpoint_weights(self.network)
        return ((name, whole_on(one)) for name, one in adapter_tensors(self.network))


def broadcast(policy: Divided, place: Path) -> dict[str, torch.Tensor]:
    """Returns what one worker receives of all ranks; gloo stands for NCCL. The ranks meet at a place
    of their own: groups of an earlier one may end later, and would write there."""
    unique_id, size = str(place).encode(), policy.ranks.size + 1
    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(Communicator, unique_id, size - 1, size, "cpu")
        plan, _ = policy.join_broadcast("pool", JoinOrder(unique_id, size, torch.bfloat16))
        group = worker.result(60)
        found = thread.submit(receive, group, plan)
        policy.send_broadcast("pool")
        policy.end_broadcast("pool", False, 60.0)
        return found.result(60)


def main(models: Path, folder: Path, sizes: dict[str, int], offload: bool) -> None:
    """Stages each policy of a folder; `sizes` are those of the dimensions of the mesh, and weights
    that `offload` wait on the CPU."""
    with met(folder) as them:
        nccl.join_communicator, nccl.BUCKET_BYTES = Communicator, 1000
        for model in sorted(models.iterdir()):
            if "tensor" in sizes and model.name in UNDIVIDED:
                continue
            policy = Divided(str(model), them, sizes, None, offload)
            if them.rank == 0:
                of_file = {name: weight.clone() for name, weight in policy.staged_weights()}
                torch.save(of_file, folder / f"{model.name}-file.pt")
                sent = {
                    name: weight.clone() for name, weight in policy.whole_weights(torch.bfloat16)
                }
                torch.save(sent, folder / f"{model.name}-sent.pt")
                file = folder / f"{model.name}.safetensors"
                file.touch()
                policy.stage_weights(StageOrder("file", None, str(file)))
                policy.stage_weights(StageOrder("parts", torch.bfloat16))
                torch.save(
                    broadcast(policy, folder / f"{model.name}-met"),
                    folder / f"{model.name}-worker.pt",
                )
            follow(policy)
            part = policy.staging.parts["parts"]
            blocks = [part.read(block.index) for block in part.blocks]
            torch.save((part.header.text, blocks), folder / f"{model.name}-{them.rank}.pt")
            policy.staging.close()

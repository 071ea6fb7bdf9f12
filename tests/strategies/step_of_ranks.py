"""One rank of several that train a step of policies, divided in one way, without a trainer, and read
and stage their weights.

A policy whose name ends in `bf16` computes in bfloat16, and one whose name ends in `lora` trains
adapters. Each rank writes its gradient, what it did, and its bytes of the staged version; rank 0
also log-probs and weights, all whole, and what a worker receives when all ranks broadcast.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import lrl
from lrl.advantages import GAE, Advantages, ArCHer, GroupMean
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import RankStream, StepStream
from lrl.system.ranks import Ranks, collective, follow
from lrl.system.stopwatch import Stopwatch
from lrl.training import optimizers
from lrl.training.lora import adapter_tensors
from lrl.training.optimizers import sum_over_ranks
from lrl.training.pieces import checkpoint_weights
from lrl.training.sharding import Sharding, whole_on
from lrl.types import ENVIRONMENT, Group
from lrl.weights import nccl
from lrl.weights.buckets import JoinOrder
from lrl.weights.staging import StageOrder
from tests.policies import make_group, sizes
from tests.weights.nccl_over_gloo import Communicator, receive

GROUPS = [make_group(number) for number in range(6)]
BUDGET = 48
TEXT = [1, 2, 3, 4, 5]
MIXTURE = "qwen3_moe"
"""A policy with experts, which is refused with tensor parallelism."""
ADAPTED, LORA = "llama_lora", lrl.LoRA(rank=4)
"""A policy whose adapters are trained, which is refused with tensor parallelism, too."""
UNDIVIDED = (MIXTURE, ADAPTED, "llama3_rope")
"""Policies that are not tried with tensor parallelism: it leaves positions as they are."""
OF_CRITICS = "qwen3"
"""A model of critics alone, which is refused with tensor parallelism."""
CRITICS = {"llama_tied": None, "llama3_rope": OF_CRITICS, "qwen2": None, "phi3": OF_CRITICS}
"""Policies with a critic, by the folder of its own model; None puts it on the policy."""
OF_TURNS = ("qwen2", "phi3")
"""Those whose critic is one of turns."""
LONE = make_group(9, responses=2)
"""A group with a single response in the loss: there is none for another rank."""
LONE.rollouts[1].versions = [ENVIRONMENT] * len(LONE.rollouts[1].versions)


class Divided(lrl.PolicyModule):
    """A policy without a trainer; whole on every rank without sizes of a mesh."""

    ranks: Any = None
    sharding: Any = None

    def __init__(
        self, model: str, ranks: Ranks, sizes: dict[str, int], offload: bool, **parts: Any
    ) -> None:
        super().__init__(model, lora=LORA if model.endswith("lora") else None, **parts)
        self.ranks = ranks
        if sizes:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            dtype = torch.bfloat16 if model.endswith("bf16") else None
            self.sharding = Sharding(mesh, dtype, offload)
        self.configure_model()
        self.setup("fit")
        fill_new_weights(self)

    @collective
    def staged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.lora is None:
            return checkpoint_weights(self.network)
        return ((name, whole_on(one)) for name, one in adapter_tensors(self.network))


def critic_of(model: Path, tensor: int) -> lrl.Critic | None:
    own = CRITICS.get(model.name)
    if model.name not in CRITICS or (own and tensor > 1):
        return None
    kind = lrl.TurnCritic if model.name in OF_TURNS else lrl.Critic
    return kind() if own is None else kind(str(model.parent / own))


@torch.no_grad()
def fill_new_weights(policy: torch.nn.Module) -> None:
    """Gives adapters and the head of a critic, if there are any, the same numbers in every
    process."""
    torch.manual_seed(5)
    for name, weight in policy.named_parameters():
        if ".lora_" in name or name.startswith("critic.head."):
            numbers = 0.1 * torch.randn(weight.shape)
            is_whole = not isinstance(weight, DTensor)
            weight.copy_(
                numbers
                if is_whole
                else distribute_tensor(numbers, weight.device_mesh, weight.placements)
            )


@contextmanager
def met(folder: Path) -> Iterator[Ranks]:
    """Has this rank meet the others, and wait for them at the end."""
    wait, rank = timedelta(seconds=60), int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder / 'store'}", wait, world_size=ranks, rank=rank)
    yield Ranks(dist.new_group(backend="gloo", timeout=wait))
    dist.barrier()
    dist.destroy_process_group()


def main(
    models: Path, folder: Path, names: Sequence[str], sizes: dict[str, int], offload: bool
) -> None:
    """Trains a step of policies in a folder, by their names, and stages them; `sizes` are those of the
    dimensions of the mesh, and weights that `offload` wait on the CPU."""
    tensor = sizes.get("tensor", 1)
    with met(folder) as them:
        nccl.join_communicator, nccl.BUCKET_BYTES = Communicator, 1000
        for model in [models / name for name in names]:
            parts = {"reference": lrl.Reference(), "critic": critic_of(model, tensor)}
            policy = Divided(str(model), them, sizes, offload, **parts)
            found = train(policy)
            if them.rank:
                with pytest.raises(
                    RuntimeError, match="has called PolicyModel.prompt_logprobs by itself"
                ):
                    policy.prompt_logprobs(TEXT)
            else:
                found |= read(policy)
                policy.export(folder / f"{model.name}-exported")
                found |= stage(policy, folder / model.name)
            follow(policy)
            part = policy.staging.parts["parts"]
            found["header"] = part.header.text
            found["blocks"] = [part.read(block.index) for block in part.blocks]
            torch.save(found, folder / f"{model.name}-{them.rank}.pt")
            policy.staging.close()


def train(policy: Divided) -> dict[str, Any]:
    """Runs the passes of a step; returns its gradient, and what this rank did and holds."""
    passes = blanks = tokens = sequences = 0
    sharded = policy.sharding is not None
    for groups in (GROUPS, [LONE]):
        # Reads between the groups, as a probe does while the trainer waits.
        source = Arriving(groups, lambda: policy.prompt_logprobs(TEXT))
        leading = stream(policy, source, len(groups), advantages_of(policy), blanks=sharded)
        step = RankStream(policy) if policy.ranks.rank else leading
        for micro in step:
            blank = not micro.mask.any()
            (policy.blank_loss(micro) if blank else policy.compute_loss(micro)).backward()
            passes, blanks = passes + 1, blanks + blank
        tokens, sequences = tokens + step.num_tokens, sequences + step.num_sequences
    sum_over_ranks(policy.parameters(), policy.ranks.size)
    weights = dict(policy.named_parameters())
    scale = (policy.data_parallel_size if sharded else 1) / tokens
    return {
        "gradient": {
            name: whole(one.grad) * scale
            for name, one in weights.items()
            if one.requires_grad and one.grad is not None
        },
        "critic": policy.critic is not None,
        "target": target_of(policy),
        "passes": passes,
        "blanks": blanks,
        "sequences": sequences,
        "share": sum(local(one).numel() for one in weights.values())
        / sum(one.numel() for one in weights.values()),
    }


def read(policy: Divided) -> dict[str, Any]:
    """Returns log-probs and weights, which all ranks compute and gather."""
    return {
        "logprobs": policy.prompt_logprobs(TEXT),
        "rounded": policy.prompt_logprobs(TEXT, "bfloat16"),
        "held": policy.prompt_logprobs(TEXT, None, "bfloat16"),
        "afterwards": policy.prompt_logprobs(TEXT),
        "reference": reference_logprobs(policy),
        "weights": copies(policy.whole_weights()),
    }


def stage(policy: Divided, place: Path) -> dict[str, Any]:
    """Stages the weights, into a file and in parts; returns them as rank 0 gathers them, and as a
    worker receives them."""
    file = place.with_suffix(".safetensors")
    file.touch()
    found = {
        "of_file": copies(policy.staged_weights()),
        "sent": copies(policy.whole_weights(torch.bfloat16)),
    }
    policy.stage_weights(StageOrder("file", None, str(file)))
    policy.stage_weights(StageOrder("parts", torch.bfloat16))
    # A place of their own: groups of an earlier meeting may end later, and would write there.
    return found | {"received": broadcast(policy, f"{place}-met")}


def broadcast(policy: Divided, place: str) -> dict[str, torch.Tensor]:
    """Returns what one worker receives of all ranks, which meet at a place; gloo stands for NCCL."""
    unique_id, size = place.encode(), policy.ranks.size + 1
    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(Communicator, unique_id, size - 1, size, "cpu")
        plan, _ = policy.join_broadcast("pool", JoinOrder(unique_id, size, torch.bfloat16))
        group = worker.result(60)
        found = thread.submit(receive, group, plan)
        policy.send_broadcast("pool")
        policy.end_broadcast("pool", False, 60.0)
        return found.result(60)


def copies(weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights}


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()


def local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def reference_logprobs(policy: lrl.PolicyModule) -> list[Any]:
    """Returns those of three passes, which two ranks cannot share equally."""
    group = make_group(0, responses=3)
    policy.prepare(group, sizes(1))
    return [rollout.reference_logprobs for rollout in group.rollouts]


def advantages_of(policy: lrl.PolicyModule) -> Advantages:
    if policy.critic is None:
        return GroupMean()
    return ArCHer() if policy.critic.of_turns else GAE(0.9)


def target_of(policy: lrl.PolicyModule) -> list[torch.Tensor]:
    if policy.critic is None:
        return []
    policy.critic.end_step()
    slow = [one for name, one in policy.critic.named_parameters() if name.startswith("target_")]
    return [whole(one) for one in slow]


class Arriving:
    """Groups, every third after what is done first."""

    def __init__(self, groups: Sequence[Group], first: Callable[[], Any]) -> None:
        self.coming = copy.deepcopy(list(groups))  # each policy adds its own values
        self.first = first

    def next_group(self, step: int) -> Group:
        if len(self.coming) % 3 == 0:
            self.first()
        return self.coming.pop(0)

    def give_up(self, group: Group) -> None: ...

    def raise_if_stopped(self) -> None: ...


def stream(
    policy: Any, source: Arriving, groups: int, advantages: Advantages, blanks: bool
) -> StepStream:
    size = policy.data_parallel_size
    return StepStream(
        0,
        groups,
        source=source,
        policy=policy,
        learners=Learners(advantages),
        packer=Packer(BUDGET, advantages, 1.0, data_parallel_size=size, blanks=blanks),
        stopwatch=Stopwatch(),
    )


def sums(folder: Path) -> None:
    """Sums gradients of two dtypes in buckets of one or a few, and each by itself; the last rank
    has none, and one weight has none anywhere. Each rank writes both sums."""
    with met(folder) as them:
        optimizers.BUCKET_BYTES = 600
        torch.manual_seed(them.rank)
        kinds = [torch.float32] * 9 + [torch.bfloat16] * 4 + [torch.float32] * 3
        weights = [
            torch.nn.Parameter(torch.zeros(7 * size + 1, dtype=kind))
            for size, kind in enumerate(kinds)
        ]
        for weight in weights[1:]:
            weight.grad = None if them.rank == them.size - 1 else torch.randn_like(weight)
        each = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in weights]
        for gradient in each:
            dist.all_reduce(gradient)
        sum_over_ranks(weights, them.size)
        found = [weight.grad for weight in weights]
        torch.save({"found": found, "each": each}, folder / f"{them.rank}.pt")

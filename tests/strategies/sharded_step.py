"""One rank of several that train a step of sharded policies, without a trainer, and read their
weights.

A policy whose name ends in `bf16` computes in bfloat16, and one whose name ends in `lora` trains
adapters. Rank 0 writes gradient, log-probs and weights, all whole, and the log-probs of the
reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import lrl
from lrl.advantages import GAE, Advantages, ArCHer, GroupMean
from lrl.rollouts.stream import RankStream
from lrl.system.ranks import Ranks, follow
from lrl.training.sharding import Sharding
from lrl.types import ENVIRONMENT, Group
from tests.policies import make_group, sizes
from tests.strategies.forked_ranks import met
from tests.strategies.gradient_of_ranks import BUDGET, GROUPS, Arriving, stream

TEXT = [1, 2, 3, 4, 5]
MIXTURE = "qwen3_moe"
"""A policy with experts, which is refused with tensor parallelism."""
ADAPTED, LORA = "llama_lora", lrl.LoRA(rank=4)
"""A policy whose adapters are trained, which is refused with tensor parallelism, too."""
UNDIVIDED = (MIXTURE, ADAPTED, "llama3_rope")
"""Policies that are not tried with tensor parallelism: it leaves positions as they are."""
CRITICS = {"llama_tied": None, "llama3_rope": "qwen3", "qwen2": None, "phi3": "qwen3"}
"""Policies with a critic, by the folder of its own model, which is refused with tensor parallelism;
None puts it on the policy."""
OF_TURNS = ("qwen2", "phi3")
"""Those whose critic is one of turns."""
LONE = make_group(9, responses=2)
"""A group with a single response in the loss: there is none for another rank."""
LONE.rollouts[1].versions = [ENVIRONMENT] * len(LONE.rollouts[1].versions)


class Sharded(lrl.PolicyModule):
    """A policy without a trainer; whole on every rank without sizes of a mesh."""

    ranks: Any = None
    sharding: Any = None

    def __init__(
        self, model: str, ranks: Ranks, sizes: dict[str, int], *division: Any, **parts: Any
    ) -> None:
        super().__init__(model, lora=LORA if model.endswith("lora") else None, **parts)
        self.ranks = ranks
        if sizes:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            self.sharding = Sharding(mesh, *division)
        self.configure_model()
        self.setup("fit")
        fill_new_weights(self)


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


def main(models: Path, folder: Path, tensor: int) -> None:
    """Trains a step of each policy of a folder; `tensor` ranks compute a micro-batch together."""
    with met(folder) as them:
        for model in sorted(models.iterdir()):
            if tensor > 1 and model.name in UNDIVIDED:
                continue
            sizes = {"shards": them.size // tensor} | ({"tensor": tensor} if tensor > 1 else {})
            dtype = torch.bfloat16 if model.name.endswith("bf16") else None
            parts = {"reference": lrl.Reference(), "critic": critic_of(model, tensor)}
            policy = Sharded(str(model), them, sizes, dtype, **parts)
            found = train(policy)
            if them.rank:
                with pytest.raises(
                    RuntimeError, match="has called PolicyModel.prompt_logprobs by itself"
                ):
                    policy.prompt_logprobs(TEXT)
            else:
                found["logprobs"] = policy.prompt_logprobs(TEXT)
                found["rounded"] = policy.prompt_logprobs(TEXT, "bfloat16")
                found["held"] = policy.prompt_logprobs(TEXT, None, "bfloat16")
                found["afterwards"] = policy.prompt_logprobs(TEXT)
                found["reference"] = reference_logprobs(policy)
                found["weights"] = {name: weight.clone() for name, weight in policy.whole_weights()}
                policy.export(folder / f"{model.name}-exported")
            follow(policy)
            torch.save(found, folder / f"{model.name}-{them.rank}.pt")


def train(policy: Sharded) -> dict[str, Any]:
    """Runs the passes of a step; returns its gradient, and what this rank did and holds."""
    passes = blanks = tokens = 0
    for groups in (GROUPS, [LONE]):
        # A read before each group, as a probe does while the trainer waits.
        source = Arriving(groups, lambda: policy.prompt_logprobs(TEXT))
        whole = stream(policy, source, len(groups), advantages_of(policy), blanks=True)
        step = RankStream(policy) if policy.ranks.rank else whole
        for micro in step:
            blank = not micro.mask.any()
            (policy.blank_loss(micro) if blank else policy.compute_loss(micro)).backward()
            passes, blanks = passes + 1, blanks + blank
        tokens += step.num_tokens
    scale, weights = policy.data_parallel_size / tokens, dict(policy.named_parameters())
    return {
        "gradient": {
            name: one.grad.full_tensor() * scale
            for name, one in weights.items()
            if one.requires_grad
        },
        "critic": policy.critic is not None,
        "target": target_of(policy),
        "passes": passes,
        "blanks": blanks,
        "share": sum(one.to_local().numel() for one in weights.values())
        / sum(one.numel() for one in weights.values()),
    }


def reference_logprobs(policy: lrl.PolicyModule) -> list[Any]:
    """Returns those of three passes, which two ranks cannot share equally."""
    group = make_group(0, responses=3)
    policy.prepare(group, sizes(1))
    return [rollout.reference_logprobs for rollout in group.rollouts]


def prepare(policy: lrl.PolicyModule, group: Group) -> None:
    if policy.critic is not None:
        policy.prepare(group, sizes(BUDGET))


def advantages_of(policy: lrl.PolicyModule) -> Advantages:
    if policy.critic is None:
        return GroupMean()
    return ArCHer() if policy.critic.of_turns else GAE(0.9)


def target_of(policy: lrl.PolicyModule) -> list[torch.Tensor]:
    if policy.critic is None:
        return []
    policy.critic.end_step()
    slow = [one for name, one in policy.critic.named_parameters() if name.startswith("target_")]
    return [one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in slow]

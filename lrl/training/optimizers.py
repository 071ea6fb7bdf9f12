"""An optimizer step: the gradient, averaged over ranks, scaled, clipped and finite; the learning
rate over a run; a user's `configure_optimizers`; and AdamW for bfloat16 weights."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lrl.errors import ConfigError
from lrl.system.ranks import explain_rank_loss
from lrl.training.merging import rounded
from lrl.training.sharding import own_part

Schedule = Literal["constant", "linear", "cosine"]
NORM_EPSILON = 1e-6
"""As in torch's `clip_grad_norm_`."""
BUCKET_BYTES = 2**26
"""Of the gradients that one collective sums."""
SLICE = 2**24
"""Numbers of a weight that `RoundedAdamW` has in float32 at once: about 0.5 GB of working space."""


def sum_over_ranks(parameters: Iterable[torch.nn.Parameter], ranks: int) -> None:
    """Gives every rank the sum of all gradients, a rank without one counting as zero; a collective.
    Sharded parameters are left out: the backward pass has averaged their gradients."""
    if ranks == 1:
        return
    weights = [
        weight for weight in parameters if weight.requires_grad and not isinstance(weight, DTensor)
    ]
    here = [weight.grad is not None for weight in weights]
    anywhere = torch.tensor(here, dtype=torch.uint8, device=weights[0].device if weights else None)
    with explain_rank_loss("Another rank"):
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    gradients = []
    for weight, any_rank_has_one in zip(weights, anywhere.tolist(), strict=True):
        if any_rank_has_one:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.append(weight.grad)
    with explain_rank_loss("Another rank"):
        for bucket in _buckets(gradients):
            # NCCL sums them in one kernel, where they are; gloo copies them together.
            with _coalescing_manager():
                for gradient in bucket:
                    dist.all_reduce(gradient)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = by_dtype.setdefault(gradient.dtype, [])
        bucket.append(gradient)
        if sum(each.nbytes for each in bucket) >= BUCKET_BYTES:
            yield by_dtype.pop(gradient.dtype)
    yield from by_dtype.values()


def scale_and_clip(
    parameters: Iterable[torch.nn.Parameter], scale: float, max_norm: float | None
) -> Tensor:
    """Multiplies gradients by `scale`, then limits their L2 norm over all parameters to `max_norm`;
    returns the norm before it was limited, float32 []."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    norm = scale * norm_of(gradients).float()
    factor = torch.full_like(norm, scale)
    if max_norm is not None:
        factor *= (max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
    if gradients:
        local = [own_part(one) for one in gradients]
        torch._foreach_mul_(local, factor.to(local[0].device))
    return norm


def check_norm(norm: float, step: int) -> None:
    if not math.isfinite(norm):
        raise RuntimeError(
            f"step {step}: the gradient norm is {norm}. The weights were not touched. Look at "
            "policy/ratio_max and policy/kl_behaviour of the steps before, then lower model.lr or "
            "model.max_grad_norm, or set model.dtype to float32."
        )


def on_cpu_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors on the CPU, by one copy, so that the host waits for a GPU once."""
    device = tensors[0].device
    flat = torch.cat([one.detach().to(device, torch.float64).flatten() for one in tensors]).cpu()
    parts = flat.split([one.numel() for one in tensors])
    return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, tensors, strict=True)]


def norm_of(gradients: Iterable[Tensor | None]) -> Tensor:
    """Returns the L2 norm over all gradients, float32 []; a collective if they are sharded."""
    by_mesh: dict[Any, list[Tensor]] = {}  # torch adds up no tensors of different meshes
    for gradient in gradients:
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(some) for some in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack(whole).norm() if whole else torch.tensor(0.0)


def check_end(schedule: Schedule, max_steps: int) -> None:
    """Raises ValueError for a schedule that falls to 0 at the end of a run without an end."""
    if schedule != "constant" and max_steps < 1:
        raise ConfigError(
            f"model.schedule={schedule!r} needs an end: set trainer.max_steps (now {max_steps})"
        )


def lr_factor(
    schedule: Schedule, warmup_steps: int, max_steps: int, step: int, first_step: int = 0
) -> float:
    """Returns learning rate over peak at `step` (from 0): 0 before `first_step`, up to 1 in
    warm-up, then down to 0 at `max_steps`."""
    if step < first_step:
        return 0.0
    step -= first_step
    max_steps -= first_step
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def check_optimizers(trainer: L.Trainer) -> None:
    """Raises ValueError if lrl's step cannot use what `configure_optimizers` has given."""
    optimizers, module = trainer.optimizers, trainer.lightning_module
    gives = f"{type(module).__name__}.configure_optimizers gives"
    if len(optimizers) != 1:
        raise ConfigError(
            f"{gives} {len(optimizers)} optimizers: give one, with a group for each setting."
        )
    given = {id(weight) for group in optimizers[0].param_groups for weight in group["params"]}
    if any(id(weight) not in given for weight in getattr(module, "critic_weights", ())):
        raise ConfigError(
            f"{gives} no group with the weights of model.critic (`self.critic_weights`): add one."
        )
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    if any(isinstance(one, ReduceLROnPlateau) for one in schedulers) and not is_overridden(
        "lr_scheduler_step", module, L.LightningModule
    ):
        # Lightning leaves `monitor` out of the configuration of a module that optimises by itself.
        raise ConfigError(
            f"{gives} ReduceLROnPlateau without a metric: override lr_scheduler_step, and step it "
            "with one of self.trainer.callback_metrics."
        )


def step_schedulers(trainer: L.Trainer, batch_idx: int) -> None:
    """Steps the schedulers that are due after batch `batch_idx`, as Lightning would; before the
    step's hooks, which save checkpoints."""
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            done = trainer.global_step
        elif batch_idx + 1 == trainer.num_training_batches:
            done = trainer.current_epoch + 1
        else:
            continue
        if done % config.frequency == 0:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def restart_at(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    lrs: Sequence[float],
    settings: dict[str, Any],
) -> None:
    """Overwrites learning rates and AdamW's settings that a checkpoint has restored."""
    scheduler.base_lrs = list(lrs)
    for group, factor, lr in zip(optimizer.param_groups, scheduler.lr_lambdas, lrs, strict=True):
        group.update(lr=lr * factor(scheduler.last_epoch), initial_lr=lr, **settings)


class RoundedAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights: computes in float32, and rounds weights and moments to their own
    dtype at random, right in the mean.

    At a learning rate of 1e-6 nearly every update is smaller than half the distance of two bfloat16
    numbers: rounded to the nearest, the weight would stay as it was. A parameter takes 8 bytes:
    weight, gradient and both moments.

    The draws follow from `seed`, the number of updates, and the place of a weight: a run that
    resumes draws what it would have drawn. Ranks that hold the same numbers need the same seed.
    """

    def __init__(self, params: Any, seed: int, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group.update(seed=seed, updates=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, group in enumerate(self.param_groups):
            group["updates"] += 1
            found: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *found)
            found.pop(4)  # of amsgrad
            for index, (*tensors, count) in enumerate(zip(*found, strict=True)):
                key = f"{group['seed']} {group['updates']} {number} {index} {_part(tensors[0])}"
                _update(group, tensors, count, key)
        return loss


def _update(group: dict[str, Any], tensors: list[Tensor], count: Tensor, key: str) -> None:
    flat = [own_part(tensor).view(-1).split(SLICE) for tensor in tensors]
    for number, slices in enumerate(zip(*flat, strict=True)):
        in_float32 = [one.float() for one in slices]
        weight, gradient, mean, square = in_float32
        adamw(
            params=[weight],
            grads=[gradient],
            exp_avgs=[mean],
            exp_avg_sqs=[square],
            max_exp_avg_sqs=[],
            state_steps=[count.clone()],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, one, found in zip("wgms", slices, in_float32, strict=True):
            if found is not gradient:
                seed = zlib.crc32(f"{key} {number} {name}".encode())
                one.copy_(rounded(found, one.dtype, seed))
    count += 1


def _part(weight: Tensor) -> tuple[int, ...]:
    """Returns which part of a sharded weight this rank has; replicas have the same."""
    if not isinstance(weight, DTensor):
        return ()
    places = cast("list[int]", weight.device_mesh.get_coordinate())
    return tuple(
        place
        for place, placement in zip(places, weight.placements, strict=True)
        if not placement.is_replicate()
    )

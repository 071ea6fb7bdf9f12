"""The policy: the model being trained, as a LightningModule.

One Lightning batch is one optimizer step, a lazy stream of micro-batches, so optimisation is
manual: each micro-batch adds the gradient of its *sum* of token losses when it arrives, and the
whole is divided once by the number of trained tokens of the step. Therefore packing, number of
ranks and order of arrival cannot change the gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, get_args

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR

from lrl.callbacks.base import run_of
from lrl.callbacks.default_callbacks import default_callbacks
from lrl.errors import ConfigError, above, answers_aliases, at_least, instances, one_of
from lrl.objectives import AIPO, Diagnostics, Objective, Tokens, check_mismatch
from lrl.objectives.base import NormaliseBy, check_normalise_by, denominator, token_weights
from lrl.policy_model import PolicyModel
from lrl.preflight.settings import check_trainer
from lrl.rollouts.packing import Packer
from lrl.system.ranks import explain_broken_collective
from lrl.training.beside.critic import Critic
from lrl.training.beside.reference import Reference
from lrl.training.collate import blank, each_rollout, try_step
from lrl.training.kernels import Kernels
from lrl.training.lora import LoRA
from lrl.training.model import Dtype, find_model, is_made
from lrl.training.optimizers import (
    RoundedAdamW,
    Schedule,
    check_norm,
    lr_factor,
    on_cpu_together,
    restart_at,
    scale_and_clip,
    step_schedulers,
    sum_over_ranks,
)
from lrl.types import Group, MicroBatch, Step


class PolicyModule(PolicyModel):
    """A causal language model, trained by an objective on packed rollouts.

    Args:
        model: Hub name, folder in Hugging Face format, or `module:function`, which makes such a
            folder and returns its path. Code from the hub is never run.
        objective: The loss; AIPO() if not given.
        normalise_by: Divisor of the losses of a step: `token`, `sequence`, or a number of tokens
            per response (`lrl.objectives.base`); null takes the objective's default.
        lora: Train low-rank adapters (`lrl.LoRA`); null trains all weights.
        reference: A frozen policy to stay near to (`lrl.Reference`), or to learn from
            (`lrl.Teacher`); null loads none.
        critic: A value head that learns the return of each token (`lrl.Critic`, for `GAE`) or the
            values of each turn (`lrl.TurnCritic`, for `ArCHer`); null for none.
        abort_on_mismatch: Stop the run, before the update, if `policy/mismatch_kl` (nats) is above
            this: the generators then compute something else.
        lr: Peak learning rate of AdamW.
        betas: AdamW's decay of the first and second moment.
        weight_decay: AdamW's weight decay, on every weight.
        warmup_steps: Steps over which the learning rate rises linearly to `lr`.
        schedule: Learning rate after the warm-up. `linear` and `cosine` fall to 0 at
            `trainer.max_steps`.
        max_grad_norm: The gradient of a step is scaled down to this L2 norm; null never does.
        dtype: Dtype of weights, gradients and optimizer state. `float32` takes 16 bytes a parameter
            and goes with `trainer.precision: bf16-mixed`; `bfloat16` takes 8, and AdamW rounds its
            updates at random, right in the mean (`lrl.training.optimizers`).
        gradient_checkpointing: Recompute each layer in the backward pass: less memory, about a
            third more time. A number n recomputes every n-th layer only.
        attention: `varlen`, lrl's own without masks, or one of transformers (`sdpa`, `eager`,
            `flash_attention_2`, ...). Null takes `varlen` on a GPU with passes in 16 bits where the
            model can have it, and elsewhere what transformers chooses.
        kernels: Kernels of the layers. `eager`: as transformers has them. `liger`: fused by Liger
            (`pip install lrl[liger]`), on CUDA GPUs, for the families that it knows. `compile`:
            each layer by torch.compile; the first step takes a minute or more. Both also compile
            the head's log-probs, and are tried before a server starts: numbers must be those of
            `eager` but for rounding. `auto` takes `liger` where it works, else `eager`.
        head_chunk_tokens: Response tokens with logits in memory at once.
    """

    @answers_aliases
    def __init__(
        self,
        model: str,
        objective: Objective | None = None,
        normalise_by: NormaliseBy | None = None,
        lora: LoRA | None = None,
        reference: Reference | None = None,
        critic: Critic | None = None,
        abort_on_mismatch: float | None = None,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        max_grad_norm: float | None = 1.0,
        dtype: Dtype = "float32",
        gradient_checkpointing: bool | int = False,
        attention: str | None = None,
        kernels: Kernels = "auto",
        head_chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        instances(
            "model",
            objective=(Objective, objective),
            lora=(LoRA, lora),
            reference=(Reference, reference),
            critic=(Critic, critic),
        )
        one_of(
            "model",
            dtype=(get_args(Dtype), dtype),
            kernels=(get_args(Kernels), kernels),
            schedule=(get_args(Schedule), schedule),
        )
        at_least(0, "model", lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps)
        at_least(0, "model", gradient_checkpointing=gradient_checkpointing)
        at_least(1, "model", head_chunk_tokens=head_chunk_tokens)
        above(0, "model", max_grad_norm=max_grad_norm, abort_on_mismatch=abort_on_mismatch)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"model.betas is {betas}; both must be at least 0 and below 1.")
        self.automatic_optimization = False
        self.model = model
        self.objective = objective or AIPO()
        self.normalise_by = check_normalise_by(
            self.objective.normalise_by if normalise_by is None else normalise_by
        )
        self.lora = lora
        self.reference = reference
        self.critic = critic
        self.abort_on_mismatch = abort_on_mismatch
        self.strict_loading = lora is None
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.dtype_name = dtype
        self.attention = attention
        self.kernels = kernels
        self.gradient_checkpointing = gradient_checkpointing
        self.head_chunk_tokens = head_chunk_tokens
        self.diagnostics = Diagnostics(version=0)
        self._check_together()

    def _check_together(self) -> None:
        if not is_made(self.model):
            try:
                find_model(self.model)
            except ValueError as error:
                raise ConfigError(f"model.{error}") from error
        if self.objective.needs_reference and self.reference is None:
            raise ConfigError(
                f"model.objective {type(self.objective).__name__} needs a reference policy: set "
                "model.reference to lrl.Reference (its coefficient may stay 0)."
            )
        refresh = None if self.reference is None else self.reference.refresh_every_n_steps
        if self.lora is not None and refresh is not None:
            raise ConfigError(
                f"model.reference.refresh_every_n_steps is {refresh}, and model.lora trains adapters, "
                "which a reference has not. Leave one of them out."
            )

    # ---- a step

    def prepare(self, group: Group, packer: Packer) -> None:
        """Adds the log-probs of the reference and the values of the critic, if there are such, to a
        finished group, in passes of the packer's sizes."""
        passes = partial(each_rollout, group, packer.temperature, packer.micro_batch_tokens)
        if (teacher := self.asked_teacher) is not None:
            # The controller has asked for those that it has scored: others are of a checkpoint.
            what = f"asking the teacher at {teacher.url}"
            late_s = 2 * teacher.endpoint.deadline_s  # its own deadline comes first
            run_of(self.trainer).fleet.call(teacher.ask(group), what, late_s)
        elif self.reference is not None:
            # One of another family has not been tried with shared tokens.
            shares = packer.attention_tokens if self.reference.model is None else 0
            self.reference.fill(group, passes(self.reference_logprobs, shares))
        if self.critic is not None:
            self.critic.fill(group, passes(self.critic_values, packer.attention_tokens))

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        """Returns the weighted sum (not the mean) of the micro-batch's token losses, the critic's
        included. Override it for your own loss."""
        values: Any = None
        if self.critic is None:
            logprobs = self(micro)
        else:
            logprobs, values = self(micro, "both")
        tokens = Tokens.select(logprobs, micro, self.diagnostics.version)
        if self.reference is not None:
            tokens = tokens._replace(advantages=self.reference.advantages(tokens))
        self.diagnostics.add(self.objective, tokens)
        losses = self.objective.token_losses(tokens)
        if self.reference is not None:
            losses = losses + self.reference.token_losses(tokens)
        weights = token_weights(self.normalise_by, micro)
        loss = (weights * losses).sum()
        return loss if self.critic is None else loss + self.critic.loss(values, micro, weights)

    def try_loss(self) -> None:
        """Has a user's own `compute_loss` or `training_step` train two made-up responses, as far as
        the gradient, so that an error in it comes before a server starts.

        Not with a critic, whose targets are not made up, nor with sharded gradients, which
        `zero_grad` does not reach.
        """
        own = any(
            is_overridden(one, self, PolicyModule) for one in ("compute_loss", "training_step")
        )
        if not own or self.critic is not None or self.sharding is not None:
            return
        # Lightning's raise before the first step.
        quiet = dict.fromkeys(("log", "log_dict"), lambda *args, **settings: None)
        vars(self).update(quiet)
        try:
            with self.trainer.precision_plugin.train_step_context():
                try_step(self.training_step)
        finally:
            for name in quiet:
                delattr(self, name)
        self.zero_grad()

    def training_step(self, step: Step, batch_idx: int) -> None:
        """Does one optimizer step; the policy's version grows by one, also if the step has no
        token."""
        self.diagnostics = Diagnostics(self.trainer.global_step, self.device_of_use)
        if self.critic is not None:
            self.critic.begin_step(self.device_of_use)
        loss = torch.zeros((), device=self.device_of_use)
        for micro in step:
            loss += self._add_gradient(micro)
        if (
            step.num_tokens
            and self.sharding is not None
            and self.sharding.reduce_gradients == "once"
        ):
            with self.sharding.reduces(self):
                self._add_gradient(blank())
        trained = [
            weight
            for group in self.trainer.optimizers[0].param_groups
            for weight in group["params"]
        ]
        sum_over_ranks(trained, self.trainer.world_size)
        divisor = denominator(self.normalise_by, step)
        # FSDP's backward pass has averaged over the ranks.
        averaged_over = 1 if self.sharding is None else self.data_parallel_size
        scale = averaged_over / divisor
        norms = self._scale_and_clip(trained, scale)
        for name, value in self._metrics(step, loss, norms, divisor=divisor).items():
            self.log(name, value, prog_bar=name == "policy/lag_mean")
        # Lightning counts these calls, and so the versions: step also without gradients.
        cast(LightningOptimizer, self.optimizers()).step()
        step_schedulers(self.trainer, batch_idx)
        self.zero_grad()  # all weights: those that a user's optimizer leaves out have a gradient, too
        if self.reference is not None:
            self.reference.end_step(self.trainer.global_step, self.network)
        if self.critic is not None:
            self.critic.end_step()
        step.finish()

    def _add_gradient(self, micro: MicroBatch) -> Tensor:
        """Adds the gradient of a micro-batch; returns its loss, float32 []."""
        micro = micro.to(self.device_of_use)
        with explain_broken_collective():
            has_labels = len(micro.index.places) > 0
            loss = self.compute_loss(micro) if has_labels else self.blank_loss(micro)
            self.manual_backward(loss)
        return loss.detach()

    def blank_loss(self, micro: MicroBatch) -> Tensor:
        """Returns a loss of 0 that takes part in every collective of the passes: float32 []."""
        if self.critic is None:
            return 0.0 * self(micro).sum()
        logprobs, values = self(micro, "both")
        return 0.0 * (logprobs.sum() + values.sum())

    def _scale_and_clip(self, trained: Sequence[Parameter], scale: float) -> dict[str, Tensor]:
        own = set(self.critic_weights)
        of_policy = [weight for weight in trained if weight not in own]
        norms = {"policy": scale_and_clip(of_policy, scale, self.max_grad_norm)}
        if self.critic is not None:
            of_critic = [weight for weight in trained if weight in own]
            norms["critic"] = scale_and_clip(of_critic, scale, self.critic.max_grad_norm)
        return norms

    def _metrics(
        self, step: Step, loss: Tensor, norms: dict[str, Tensor], *, divisor: int
    ) -> dict[str, float]:
        """Returns the metrics of the step over all ranks, of this rank's sum of losses (float32 [],
        the critic's included) and the norms of the gradients.

        Raises:
            RuntimeError: A norm is not finite, or the mismatch is above `abort_on_mismatch`.
        """
        version, critic, counts = self.trainer.global_step, self.critic, self.diagnostics
        reduce, device = self.trainer.strategy.reduce, self.device_of_use
        # Ranks that compute a micro-batch together have counted the same.
        alike = self.trainer.world_size // self.data_parallel_size

        def total(of_rank: Tensor) -> Tensor:
            return reduce(of_rank.to(device) / alike, reduce_op="sum")

        maxima = reduce(counts.maxima.to(device), reduce_op="max")
        read = [total(counts.sums), maxima, total(loss), *norms.values()]
        if critic is not None:
            read.append(total(critic.sums))
        counts.sums, counts.maxima, whole, *others = on_cpu_together(read)
        of_critic: dict[str, float] = {}
        if critic is not None:
            critic.sums = others.pop()
            if critic.tokens != step.num_tokens:
                raise ConfigError(
                    f"{type(self).__name__}.compute_loss leaves out the loss of model.critic: call "
                    "super().compute_loss in it, write an objective (lrl.objectives.Objective) in "
                    "its place, or leave model.critic out."
                )
            of_critic = critic.metrics(divisor)
        found = counts.result()
        if self.abort_on_mismatch is not None:
            check_mismatch(found, self.abort_on_mismatch, version)
        found["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        found["loss"] = whole.item() / divisor - of_critic.get("loss", 0.0)
        metrics = {f"policy/{name}": value for name, value in found.items()}
        metrics |= {f"critic/{name}": value for name, value in of_critic.items()}
        for name, norm in zip(norms, others, strict=True):
            check_norm(norm.item(), version)
            metrics[f"{name}/grad_norm"] = norm.item()
        return metrics

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See Lightning's. A number stays on the CPU: Lightning would put each on the GPU, and
        wait for each when it is read."""
        if isinstance(value, int | float) and not kwargs.get("sync_dist"):
            value = torch.tensor(value, dtype=torch.float32)
        super().log(name, value, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Lightning would log the metrics of an earlier step again.
        for metric in (self.trainer._results or {}).values():
            if not metric.meta.on_epoch:
                metric.reset()

    def validation_step(self, evaluation: Any, batch_idx: int) -> None:
        """Runs one `lrl.callbacks.Evaluation` of the current policy."""
        self.log_dict(evaluation.run(self.trainer), batch_size=1, add_dataloader_idx=False)

    # ---- the optimizer

    def configure_optimizers(self) -> Any:
        """Returns AdamW and its schedule, with one scheduler step per optimizer step.

        Override it for any other optimizer, parameter groups and scheduler; `lr`, `betas`,
        `weight_decay`, `warmup_steps` and `schedule` then have no effect unless it reads them.
        """
        own = set(self.critic_weights)
        trained = [one for one in self.parameters() if one.requires_grad and one not in own]
        groups: list[dict[str, Any]] = [{"params": trained, "lr": self.lr}]
        factor = partial(lr_factor, self.schedule, self.warmup_steps, self.trainer.max_steps)
        factors: list[Callable[[int], float]] = [factor]
        if self.critic is not None:
            groups.append({"params": self.critic_weights, "lr": self.critic.lr})
            factors.insert(0, partial(factor, first_step=self.critic.value_only_steps))
        adamw: Any = torch.optim.AdamW
        if any(one.dtype == torch.bfloat16 for group in groups for one in group["params"]):
            adamw = partial(RoundedAdamW, seed=self.ranks.share(torch.initial_seed()))
        # None: as torch chooses.
        fused = True if all(weight.is_cuda for weight in trained) else None
        optimizer = adamw(groups, betas=self.betas, weight_decay=self.weight_decay, fused=fused)
        scheduler = {"scheduler": LambdaLR(optimizer, factors), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @property
    def critic_weights(self) -> list[Parameter]:
        """The trained weights of the critic, which are the optimizer's second parameter group."""
        if self.critic is None:
            return []
        return [weight for weight in self.critic.parameters() if weight.requires_grad]

    def configure_callbacks(self) -> list[L.Callback]:
        """Returns the default callbacks, and makes the run."""
        from lrl.datamodule import RolloutDataModule
        from lrl.run import Run  # here: it imports this module

        check_trainer(self.trainer, self)
        callbacks = default_callbacks(self.trainer)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, RolloutDataModule):
            Run(self.trainer, self, data)
        return callbacks

    def on_train_start(self) -> None:
        """Lets the config win over a checkpoint's optimizer settings."""
        if not is_overridden("configure_optimizers", self, PolicyModule):
            settings = {"betas": self.betas, "weight_decay": self.weight_decay}
            lrs = [self.lr] if self.critic is None else [self.lr, self.critic.lr]
            restart_at(
                self.trainer.optimizers[0], cast(LambdaLR, self.lr_schedulers()), lrs, settings
            )

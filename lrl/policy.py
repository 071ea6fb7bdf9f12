"""The policy: the model being trained, as a LightningModule.

One Lightning batch is one optimizer step, a lazy stream of micro-batches, so optimisation is manual: each micro-batch
adds the gradient of its *sum* of token losses when it arrives, and the whole is divided once by the number of trained
tokens of the step. Therefore packing, number of ranks and order of arrival cannot change the gradient.
"""

import logging
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from lrl import preflight
from lrl.callbacks.default_callbacks import default_callbacks
from lrl.objectives import AIPO, Diagnostics, Objective, Tokens, check_mismatch
from lrl.objectives.normalisation import NormaliseBy, check_normalise_by, denominator, token_weights
from lrl.runtime.config_errors import above, at_least, fault
from lrl.runtime.lightning_warnings import forget_last_step
from lrl.training.gradients import average_over_ranks, scale_and_clip
from lrl.training.isolation import may_share_rows
from lrl.training.model import (
    Dtype,
    checkpoint_weights,
    find_model,
    is_made,
    label_logprobs,
    open_network,
    open_tokenizer,
    text_as_micro_batch,
    unique_parameters,
)
from lrl.training.reference import Reference
from lrl.training.schedule import Schedule, lr_factor, restart_at, step_schedulers
from lrl.types import Group, MicroBatch, Step

log = logging.getLogger(__name__)


class PolicyModule(L.LightningModule):
    """A causal language model, trained by an objective on packed rollouts.

    Args:
        model: Hub name, folder in Hugging Face format, or `module:function`: a Python function without arguments that
            makes such a folder and returns its path. Code from the hub is never run.
        objective: The loss; AIPO() if not given.
        normalise_by: Divisor of the losses of a step: `token`, `sequence`, or a number of tokens per response
            (`lrl.objectives.normalisation`); null takes the objective's default.
        reference: A frozen policy to stay near to; null loads none.
        abort_on_mismatch: Stop the run, before the update, if the mean KL of tokens that the version in the trainer
            wrote itself (`policy/mismatch_kl`, nats) is above this: the generators then compute something else.
        lr: Peak learning rate of AdamW.
        betas: AdamW's decay of the first and second moment.
        weight_decay: AdamW's weight decay, on every weight.
        warmup_steps: Steps over which the learning rate rises linearly to `lr`.
        schedule: Learning rate after the warm-up. `linear` and `cosine` fall to 0 at `trainer.max_steps`.
        max_grad_norm: The gradient of a step is scaled down to this L2 norm; null never does.
        dtype: Dtype of weights and optimizer state. With bfloat16 weights, updates below 1/256 of a weight are lost.
        gradient_checkpointing: Recompute each layer in the backward pass: less memory, about a third more time.
        attention: Attention of transformers (`sdpa`, `eager`, `flash_attention_2`, ...); null lets transformers choose.
        head_chunk_tokens: Response tokens with logits in memory at once.
    """

    def __init__(
        self,
        model: str,
        objective: Objective | None = None,
        normalise_by: NormaliseBy | None = None,
        reference: Reference | None = None,
        abort_on_mismatch: float | None = None,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        max_grad_norm: float | None = 1.0,
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attention: str | None = None,
        head_chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.objective = model, objective or AIPO()
        self.normalise_by = check_normalise_by(self.objective.normalise_by if normalise_by is None else normalise_by)
        self.reference, self.abort_on_mismatch = reference, abort_on_mismatch
        self.lr, self.betas, self.weight_decay, self.max_grad_norm = lr, betas, weight_decay, max_grad_norm
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.dtype_name, self.attention = dtype, attention
        self.gradient_checkpointing, self.head_chunk_tokens = gradient_checkpointing, head_chunk_tokens
        self.diagnostics = Diagnostics(version=0)
        self.responses_share_rows = False
        """Whether several responses may share a row; `configure_model` tries it on the model."""
        if not is_made(model):
            try:
                find_model(model)
            except ValueError as error:
                fault(f"model.{error}")
        if self.objective.needs_reference and reference is None:
            fault(
                f"model.objective {type(self.objective).__name__} needs a reference policy: set model.reference to "
                "lrl.Reference (its coefficient may stay 0)."
            )
        at_least(0, "model", lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps)
        at_least(1, "model", head_chunk_tokens=head_chunk_tokens)
        above(0, "model", max_grad_norm=max_grad_norm, abort_on_mismatch=abort_on_mismatch)
        if not all(0 <= beta < 1 for beta in betas):
            fault(f"model.betas is {betas}; both must be at least 0 and below 1.")

    # ---- the model

    @cached_property
    def policy_folder(self) -> str:
        """Folder or hub name of the first version, also of the generators. Runs `module:function` once."""
        return find_model(self.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer in the policy's folder."""
        return open_tokenizer(self.policy_folder)

    def configure_model(self) -> None:
        """Loads the model into `self.network`, once, and tries whether its responses may share rows."""
        if not hasattr(self, "network"):
            self.network = open_network(
                self.policy_folder, self.dtype_name, self.attention, self.gradient_checkpointing, self.device_of_use
            )
            self.responses_share_rows = may_share_rows(self.network)

    @property
    def device_of_use(self) -> torch.device:
        """Device that trains; without a trainer, the device of the module."""
        return self.device if self._trainer is None else self.trainer.strategy.root_device

    def forward(self, micro: MicroBatch) -> Tensor:
        """Returns log-probs of the labels at the micro-batch's temperature: float32 [R, L], nats, 0 outside the mask.

        All that reads weights in training goes through here, so a strategy can shard this module as the root.
        """
        return label_logprobs(self.network, micro, self.head_chunk_tokens)

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Returns log-probs in nats of `token_ids[1:]`, each given the tokens before it, at temperature 1."""
        micro = text_as_micro_batch(token_ids, self.network.device)
        return self(micro)[micro.mask].tolist()

    # ---- a step

    def prepare(self, group: Group, temperature: float, micro_batch_tokens: int) -> None:
        """Adds the log-probs of the reference, if there is one, to a finished group."""
        if self.reference is not None:
            self.reference.fill(group, temperature, self.head_chunk_tokens, micro_batch_tokens)

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        """Returns the weighted sum (not the mean) of the micro-batch's token losses. Override it for your own loss."""
        tokens = Tokens.select(self(micro), micro, self.diagnostics.version)
        self.diagnostics.add(self.objective, tokens)
        losses = self.objective.token_losses(tokens)
        if self.reference is not None:
            losses = losses + self.reference.token_losses(tokens)
        return (token_weights(self.normalise_by, tokens.responses) * losses).sum()

    def training_step(self, step: Step, batch_idx: int) -> None:
        """Does one optimizer step; the policy's version grows by one, also if the step has no token."""
        self.diagnostics = Diagnostics(version=self.trainer.global_step)
        loss = torch.zeros((), device=self.device)
        for micro in step:
            micro_loss = self.compute_loss(micro.to(self.device))
            self.manual_backward(micro_loss)
            loss += micro_loss.detach()
        if not step.num_tokens:
            log.warning("step %d has no trained token: the policy stays as it is", self.trainer.global_step)
        trained = [weight for group in self.trainer.optimizers[0].param_groups for weight in group["params"]]
        average_over_ranks(trained, self.trainer.world_size)
        divisor = denominator(self.normalise_by, step)
        metrics = self._metrics(loss, divisor)
        scale = self.trainer.world_size / divisor  # the sum over ranks was divided by their number
        metrics["grad_norm"] = scale_and_clip(trained, scale, self.max_grad_norm, self.trainer.global_step)
        for name, value in metrics.items():
            self.log(f"policy/{name}", value, prog_bar=name == "lag_mean")
        # Lightning counts these calls, and so the versions: step also without gradients.
        cast(LightningOptimizer, self.optimizers()).step()
        step_schedulers(self.trainer, batch_idx)
        self.zero_grad()  # all weights: those that a user's optimizer leaves out have a gradient, too
        if self.reference is not None:
            self.reference.end_step(self.trainer.global_step, self.network)
        step.finish()

    def _metrics(self, loss: Tensor, divisor: int) -> dict[str, Any]:
        """Returns the step's metrics over all ranks. Raises RuntimeError above `abort_on_mismatch`."""
        reduce, diagnostics = self.trainer.strategy.reduce, self.diagnostics
        diagnostics.sums = reduce(diagnostics.sums.to(self.device), reduce_op="sum")
        diagnostics.maxima = reduce(diagnostics.maxima.to(self.device), reduce_op="max")
        found = diagnostics.result()
        if self.abort_on_mismatch is not None:
            check_mismatch(found, self.abort_on_mismatch, self.trainer.global_step)
        found["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return found | {"loss": reduce(loss, reduce_op="sum") / divisor}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        forget_last_step(self.trainer)  # Lightning would log a metric of an earlier step again

    def validation_step(self, evaluation: Any, batch_idx: int) -> None:
        """Runs one evaluation (`lrl.callbacks.Evaluation`) of the current policy and logs its metrics."""
        self.log_dict(evaluation.run(self.trainer), batch_size=1, add_dataloader_idx=False)

    # ---- the optimizer

    def configure_optimizers(self) -> Any:
        """Returns AdamW and its schedule, with one scheduler step per optimizer step.

        Override it for any other optimizer, parameter groups and scheduler; `lr`, `betas`, `weight_decay`,
        `warmup_steps` and `schedule` are then only yours to read. A scheduler is stepped at its `interval`, as in
        Lightning: an epoch unless it is `step`. A resumed run has the optimizer state of its checkpoint.
        """
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        factor = partial(lr_factor, self.schedule, self.warmup_steps, self.trainer.max_steps)
        scheduler = {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_callbacks(self) -> list[L.Callback]:
        """Runs the preflight checks and returns the default callbacks."""
        preflight.check(self.trainer)
        return default_callbacks(self.trainer)

    def setup(self, stage: str) -> None:
        """Opens the reference policy for training; a wrong name raises before a server starts."""
        if self.reference is not None and stage == "fit":
            self.reference.open(self.policy_folder, self.dtype_name, self.attention, self.device_of_use)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the state of the reference."""
        if self.reference is not None:
            checkpoint["reference"] = self.reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the state of the reference."""
        if self.reference is not None and self.trainer.state.fn == "fit":
            self.reference.load_state_dict(checkpoint.get("reference", {}))

    def on_train_start(self) -> None:
        """Moves the reference to the policy's device; lets the config win over a checkpoint's optimizer settings."""
        if self.reference is not None:
            self.reference.network.to(self.device)
        if not is_overridden("configure_optimizers", self, PolicyModule):
            settings = {"betas": self.betas, "weight_decay": self.weight_decay}
            restart_at(self.trainer.optimizers[0], cast(LambdaLR, self.lr_schedulers()), self.lr, settings)

    # ---- the weights

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole weights with their names in a Hugging Face checkpoint; a collective of all ranks if sharded.

        A head tied to the embedding is left out: vLLM ties it itself.
        """
        return checkpoint_weights(self.network)

    def export(self, folder: Path) -> None:
        """Writes policy and tokenizer in Hugging Face format, for transformers and vLLM; one rank is enough."""
        self.network.save_pretrained(folder, state_dict=dict(unique_parameters(self.network)))
        self.tokenizer.save_pretrained(folder)

"""The policy: the model being trained, as a LightningModule.

One Lightning batch is one optimizer step, a lazy stream of micro-batches, so optimisation is
manual: each micro-batch adds the gradient of its *sum* of token losses when it arrives, and the
whole is divided once by the number of trained tokens of the step. Therefore packing, number of
ranks and order of arrival cannot change the gradient.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrl import preflight
from lrl.callbacks.default_callbacks import default_callbacks
from lrl.distributed.collective import collective
from lrl.distributed.ranks import Ranks, explain_broken_collective
from lrl.errors import ConfigError
from lrl.objectives import AIPO, Diagnostics, Objective, Tokens, check_mismatch
from lrl.objectives.normalisation import NormaliseBy, check_normalise_by, denominator, token_weights
from lrl.rollouts import prompt_form
from lrl.rollouts.response_text import ends_of_text
from lrl.rollouts.stop_tokens import stop_tokens
from lrl.system.config_errors import above, at_least, fault, instances
from lrl.system.lightning_warnings import forget_last_step
from lrl.system.malloc_trim import trim_heap
from lrl.training.collate import blank
from lrl.training.critic import Critic, ValueSums
from lrl.training.export import save_policy
from lrl.training.gradients import average_over_ranks, scale_and_clip
from lrl.training.isolation import Shared, shared_by_responses
from lrl.training.lora import LoRA, base_alone, is_adapter, whole_adapters
from lrl.training.model import (
    Dtype,
    checkpoint_weights,
    decoder_of,
    find_model,
    head_logprobs,
    is_made,
    last_hidden,
    open_tokenizer,
    text_as_micro_batch,
    whole_tensors,
)
from lrl.training.model_files import open_in_parts, open_on_all_ranks
from lrl.training.optimizers import restart_at, step_schedulers
from lrl.training.reference import Reference
from lrl.training.rounding import Rounded, rounding_errors
from lrl.training.schedule import Schedule, lr_factor
from lrl.training.sharding import Sharding, on_cpu, shard_again
from lrl.training.shared_passes import shared_passes
from lrl.training.tree_cost import attention_tokens_of
from lrl.types import Group, MicroBatch, Step
from lrl.weights.adapters import named
from lrl.weights.sampled_proof import SampledProof

Output = Literal["logprobs", "values", "both"]


class PolicyModule(L.LightningModule):
    """A causal language model, trained by an objective on packed rollouts.

    Args:
        model: Hub name, folder in Hugging Face format, or `module:function`: a Python function
            without arguments that makes such a folder and returns its path. Code from the hub is
            never run.
        objective: The loss; AIPO() if not given.
        normalise_by: Divisor of the losses of a step: `token`, `sequence`, or a number of tokens
            per response (`lrl.objectives.normalisation`); null takes the objective's default.
        lora: Train low-rank adapters in the place of the weights (`lrl.LoRA`); null trains all
            weights.
        reference: A frozen policy to stay near to (`lrl.Reference`), or to learn from
            (`lrl.Teacher`); null loads none.
        critic: A value head that learns the return of each token, for `lrl.advantages.GAE`; null
            for none.
        abort_on_mismatch: Stop the run, before the update, if the mean KL of tokens that the
            version in the trainer wrote itself (`policy/mismatch_kl`, nats) is above this: the
            generators then compute something else.
        lr: Peak learning rate of AdamW.
        betas: AdamW's decay of the first and second moment.
        weight_decay: AdamW's weight decay, on every weight.
        warmup_steps: Steps over which the learning rate rises linearly to `lr`.
        schedule: Learning rate after the warm-up. `linear` and `cosine` fall to 0 at
            `trainer.max_steps`.
        max_grad_norm: The gradient of a step is scaled down to this L2 norm; null never does.
        dtype: Dtype of weights and optimizer state. With bfloat16 weights, updates below 1/256 of a
            weight are lost.
        gradient_checkpointing: Recompute each layer in the backward pass: less memory, about a
            third more time.
        attention: Attention of transformers (`sdpa`, `eager`, `flash_attention_2`, ...); null lets
            transformers choose.
        head_chunk_tokens: Response tokens with logits in memory at once.
    """

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
        gradient_checkpointing: bool = False,
        attention: str | None = None,
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
        self.gradient_checkpointing = gradient_checkpointing
        self.head_chunk_tokens = head_chunk_tokens
        self.diagnostics = Diagnostics(version=0)
        self._sampled_proof = SampledProof()
        self.responses_share = Shared()
        """What several responses may share; `configure_model` tries it on the model."""
        self._check_settings()

    def _check_settings(self) -> None:
        if not is_made(self.model) and not _get_rank():  # another node need not have the folder
            try:
                find_model(self.model)
            except ValueError as error:
                fault(f"model.{error}")
        if self.objective.needs_reference and self.reference is None:
            fault(
                f"model.objective {type(self.objective).__name__} needs a reference policy: set "
                "model.reference to lrl.Reference (its coefficient may stay 0)."
            )
        if self.lora is not None and self.reference is not None:
            self.reference.check_beside_adapters()
        at_least(
            0,
            "model",
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
        )
        at_least(1, "model", head_chunk_tokens=self.head_chunk_tokens)
        above(
            0,
            "model",
            max_grad_norm=self.max_grad_norm,
            abort_on_mismatch=self.abort_on_mismatch,
        )
        if not all(0 <= beta < 1 for beta in self.betas):
            fault(f"model.betas is {self.betas}; both must be at least 0 and below 1.")

    # ---- the model

    @cached_property
    def policy_folder(self) -> str:
        """Folder or hub name of the first version, also of the generators. Runs `module:function`
        once."""
        return find_model(self.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer in the policy's folder."""
        return open_tokenizer(self.policy_folder)

    @cached_property
    def ends_of_text(self) -> frozenset[int]:
        """Tokens that begin, end or fill up a text of the policy."""
        return ends_of_text(self.tokenizer, self.stop_tokens)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens at which its responses end."""
        return stop_tokens(self.tokenizer, self.policy_folder)

    def configure_model(self) -> None:
        """Loads the model into `self.network`, once, and tries whether its responses may share
        rows."""
        if hasattr(self, "network"):
            return
        # Lightning makes the GPU the default device here. lrl names each device itself: a generator
        # of random numbers draws on its own device only, and the whole weights of a sharded policy
        # have no room on one GPU.
        with torch.device("cpu"):
            self._open_network()

    def _open_network(self) -> None:
        settings = self.policy_folder, self.dtype_name, self.attention, self.gradient_checkpointing
        if self.sharding is None:
            self.network = open_on_all_ranks(*settings, self.device_of_use, self.ranks)
            self.responses_share = shared_by_responses(self.network)
            self._add_adapters(self.network)
            self._check_adapters(self.network)
            if self.critic is not None:
                self.critic.open(self.network, *settings[1:], self.device_of_use, self.ranks)
                self.responses_share = self.responses_share.also(self.critic.responses_share)
            return
        ranks = self.ranks
        self.network, whole = open_in_parts(*settings, ranks)
        if whole is not None:
            self.responses_share = shared_by_responses(whole)
            self._add_adapters(whole)
            self._check_adapters(whole)
        self.responses_share = ranks.share(self.responses_share)
        self._add_adapters(self.network)
        networks, wholes = [self.network], [whole]
        if self.critic is not None:
            wholes.append(self.critic.open_sharded(self.network, *settings[1:], ranks))
            self.responses_share = self.responses_share.also(self.critic.responses_share)
            networks += [] if self.critic.trunk is None else [self.critic.trunk]
        self.sharding.divide(self, *networks)
        for network, its_whole in zip(networks, wholes, strict=False):
            self.sharding.fill(network, its_whole, self.device_of_use)
        del whole, wholes, its_whole
        trim_heap()  # the C library would keep the memory of the whole model for the rest of the run

    def _add_adapters(self, network: PreTrainedModel) -> None:
        if self.lora is not None:
            self.lora.add_to(network)

    def _check_adapters(self, network: PreTrainedModel) -> None:
        if self.lora is not None:
            from lrl.training.adapter_trial import (
                check_adapters,  # a run without adapters needs none
            )

            check_adapters(network)

    @property
    def sharding(self) -> Sharding | None:
        """The division of the weights over the ranks; None if every rank has them all."""
        return None if self._trainer is None else getattr(self.trainer.strategy, "sharding", None)

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are trained at the same time; one a rank without tensor
        parallelism."""
        return self.ranks.size if self.sharding is None else self.sharding.data_parallel_size

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of the passes, outside of autocast."""
        return (
            "bfloat16"
            if self.sharding is not None and self.sharding.compute_dtype
            else self.dtype_name
        )

    @property
    def attention_tokens(self) -> int:
        """Length of a row at which attention takes as long as all other layers."""
        return attention_tokens_of(self.network.config.get_text_config().hidden_size)

    @property
    def training_dtype(self) -> str:
        """Dtype of the passes that train, under the autocast of `trainer.precision`."""
        precision = "" if self._trainer is None else str(self.trainer.precision)
        return (
            "bfloat16"
            if "bf16" in precision
            else "float16"
            if precision[:3] == "16-"
            else self.compute_dtype
        )

    @property
    def device_of_use(self) -> torch.device:
        """Device that trains; without a trainer, the device of the module."""
        return self.device if self._trainer is None else self.trainer.strategy.root_device

    def forward(self, micro: MicroBatch, output: Output = "logprobs") -> Any:
        """Returns log-probs of the labels at the micro-batch's temperature: float32 [R, L], nats, 0
        outside the mask.

        With output `values` the critic's values before them, float32 [R, L], and with `both`
        log-probs and values. All that reads weights in training goes through here, so a strategy
        can shard this module as the root.
        """
        critic = self.critic
        hidden = None
        if output != "values" or (critic is not None and critic.trunk is None):
            hidden = last_hidden(decoder_of(self.network), micro)
        values = None if output == "logprobs" or critic is None else critic(hidden, micro)
        if hidden is None or output == "values":
            return values
        logprobs = head_logprobs(self.network, hidden, micro, self.head_chunk_tokens)
        return logprobs if output == "logprobs" else (logprobs, values)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train; without lrl's strategies, this process."""
        return (
            Ranks() if self._trainer is None else getattr(self.trainer.strategy, "ranks", Ranks())
        )

    @collective
    @torch.no_grad()
    def prompt_logprobs(
        self, token_ids: list[int], rounded_as: Rounded | None = None
    ) -> list[float]:
        """Returns log-probs in nats of `token_ids[1:]`, each given the tokens before it, at
        temperature 1.

        They are computed in `compute_dtype`, also within a step that Lightning runs under autocast.
        With `rounded_as` they have errors as large as the rounding of that number format makes
        them.
        """
        micro = text_as_micro_batch(token_ids, self.device_of_use)
        errors = nullcontext() if rounded_as is None else rounding_errors(self.network, rounded_as)
        with torch.autocast(self.device_of_use.type, enabled=False), errors:
            return self(micro)[micro.mask].tolist()

    # ---- a step

    def prepare(
        self,
        group: Group,
        temperature: float,
        micro_batch_tokens: int,
        attention_tokens: int = 0,
    ) -> None:
        """Adds the log-probs of the reference and the values of the critic, if there are such, to a
        finished group. The arguments are those of `lrl.training.collate.each_rollout`."""
        if self.reference is not None:
            # One of another family has not been tried with shared tokens.
            shares = attention_tokens if self.reference.model is None else 0
            self.reference.fill(
                group,
                temperature,
                micro_batch_tokens,
                self.reference_logprobs,
                attention_tokens=shares,
            )
        if self.critic is not None:
            self.critic.fill(
                group,
                temperature,
                micro_batch_tokens,
                self.critic_values,
                attention_tokens=attention_tokens,
            )

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy without its adapters, which needs no memory of its
        own."""
        return self.lora is not None and self.reference is not None and self.reference.model is None

    @collective
    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the reference's log-probs of each batch, see `Reference.logprobs`; every rank
        computes a share."""
        return self._in_shares(batches, self._reference_logprobs)

    @collective
    def critic_values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the critic's values before the labels of each batch: float32 [R, L] on the CPU;
        every rank computes a share."""
        return self._in_shares(batches, self._critic_values)

    def _in_shares(
        self, batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        return shared_passes(
            batches, compute, device=self.device_of_use, ranks=self.ranks, sharding=self.sharding
        )

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        if not self.reference_is_base:
            return cast(Reference, self.reference).logprobs(micro, self.head_chunk_tokens)
        with torch.no_grad(), base_alone(self.network):
            found: Tensor = self(micro)
        shard_again(self)
        return found.cpu()

    @torch.no_grad()
    def _critic_values(self, micro: MicroBatch) -> Tensor:
        found: Tensor = self(micro, "values")
        shard_again(self)
        return found.cpu()

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
        whole = micro.response_tokens
        weights = token_weights(
            self.normalise_by, tokens.responses, None if whole is None else whole[micro.mask]
        )
        loss = (weights * losses).sum()
        return loss if self.critic is None else loss + self.critic.loss(values, micro, weights)

    def training_step(self, step: Step, batch_idx: int) -> None:
        """Does one optimizer step; the policy's version grows by one, also if the step has no
        token."""
        self.diagnostics = Diagnostics(version=self.trainer.global_step)
        if self.critic is not None:
            self.critic.sums = ValueSums()
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
        average_over_ranks(trained, self.trainer.world_size)
        divisor = denominator(self.normalise_by, step)
        of_critic = self._critic_metrics(step.num_tokens, divisor)
        metrics: dict[str, Any] = self._metrics(loss, divisor) | of_critic
        metrics["policy/loss"] -= of_critic.get("critic/loss", 0.0)
        scale = self.data_parallel_size / divisor  # the sum over ranks was divided by their number
        metrics |= self._scale_and_clip(trained, scale)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == "policy/lag_mean")
        # Lightning counts these calls, and so the versions: step also without gradients.
        cast(LightningOptimizer, self.optimizers()).step()
        step_schedulers(self.trainer, batch_idx)
        self.zero_grad()  # all weights: those that a user's optimizer leaves out have a gradient, too
        if self.reference is not None:
            self.reference.end_step(self.trainer.global_step, self.network)
        step.finish()

    def _add_gradient(self, micro: MicroBatch) -> Tensor:
        """Adds the gradient of a micro-batch; returns its loss, float32 []."""
        micro = micro.to(self.device_of_use)
        with explain_broken_collective():
            loss = self.compute_loss(micro) if micro.mask.any() else self.blank_loss(micro)
            self.manual_backward(loss)
        return loss.detach()

    def blank_loss(self, micro: MicroBatch) -> Tensor:
        """Returns a loss of 0 that takes part in every collective of the passes: float32 []."""
        if self.critic is None:
            return 0.0 * self(micro).sum()
        logprobs, values = self(micro, "both")
        return 0.0 * (logprobs.sum() + values.sum())

    def _scale_and_clip(self, trained: Sequence[Parameter], scale: float) -> dict[str, Tensor]:
        """Scales all gradients, and clips the policy's and the critic's separately; returns their
        norms."""
        step, own = self.trainer.global_step, set(self.critic_weights)
        of_policy = [weight for weight in trained if weight not in own]
        norms = {
            "policy/grad_norm": scale_and_clip(of_policy, scale, self.max_grad_norm, step),
        }
        if self.critic is not None:
            of_critic = [weight for weight in trained if weight in own]
            norms["critic/grad_norm"] = scale_and_clip(
                of_critic, scale, self.critic.max_grad_norm, step
            )
        return norms

    def _critic_metrics(self, num_tokens: int, divisor: int) -> dict[str, Any]:
        """Returns the metrics of the step's values over all ranks; empty without a critic.

        Raises ConfigError if the critic has not learnt from each of the step's `num_tokens`.
        """
        if self.critic is None:
            return {}
        sums, reduce = self.critic.sums, self.trainer.strategy.reduce
        # These ranks have counted the same.
        together = self.trainer.world_size // self.data_parallel_size
        sums.sums = reduce(sums.sums.to(self.device_of_use) / together, reduce_op="sum")
        if round(sums.tokens) != num_tokens:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss leaves out the loss of model.critic: call "
                "super().compute_loss in it, write an objective (lrl.objectives.Objective) in its "
                "place, or leave model.critic out."
            )
        return {f"critic/{name}": value for name, value in sums.result(divisor).items()}

    def _metrics(self, loss: Tensor, divisor: int) -> dict[str, Any]:
        """Returns the policy's metrics of the step over all ranks; its loss may have the critic's in
        it.

        Raises RuntimeError above `abort_on_mismatch`, and for generators that do not sample from
        the policy.
        """
        reduce = self.trainer.strategy.reduce
        # Ranks that compute a micro-batch together have counted the same.
        together = self.trainer.world_size // self.data_parallel_size
        self.diagnostics.reduce(reduce, together, self.device_of_use)
        found: dict[str, Any] = self.diagnostics.result()
        self._sampled_proof.check(found, self.diagnostics.fresh_tokens, self.trainer, self)
        if self.abort_on_mismatch is not None:
            check_mismatch(found, self.abort_on_mismatch, self.trainer.global_step)
        found["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        found["loss"] = reduce(loss / together, reduce_op="sum") / divisor
        return {f"policy/{name}": value for name, value in found.items()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        forget_last_step(self.trainer)  # Lightning would log a metric of an earlier step again

    def validation_step(self, evaluation: Any, batch_idx: int) -> None:
        """Runs one evaluation (`lrl.callbacks.Evaluation`) of the current policy and logs its
        metrics."""
        self.log_dict(evaluation.run(self.trainer), batch_size=1, add_dataloader_idx=False)

    # ---- the optimizer

    def configure_optimizers(self) -> Any:
        """Returns AdamW and its schedule, with one scheduler step per optimizer step.

        Override it for any other optimizer, parameter groups and scheduler; `lr`, `betas`,
        `weight_decay`, `warmup_steps` and `schedule` are then only yours to read. A scheduler is
        stepped at its `interval`, as in Lightning: an epoch unless it is `step`. A resumed run has
        the optimizer state of its checkpoint.
        """
        own = set(self.critic_weights)
        trained = [one for one in self.parameters() if one.requires_grad and one not in own]
        groups: list[dict[str, Any]] = [{"params": trained, "lr": self.lr}]
        factor = partial(lr_factor, self.schedule, self.warmup_steps, self.trainer.max_steps)
        factors: list[Callable[[int], float]] = [factor]
        if self.critic is not None:
            groups.append({"params": self.critic_weights, "lr": self.critic.lr})
            factors.insert(0, partial(factor, first_step=self.critic.value_only_steps))
        optimizer = torch.optim.AdamW(groups, betas=self.betas, weight_decay=self.weight_decay)
        scheduler = {"scheduler": LambdaLR(optimizer, factors), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @property
    def critic_weights(self) -> list[Parameter]:
        """The trained weights of the critic, which are the optimizer's second parameter group."""
        return [] if self.critic is None else list(self.critic.parameters())

    def configure_callbacks(self) -> list[L.Callback]:
        """Runs the preflight checks and returns the default callbacks."""
        preflight.check(self.trainer)
        return default_callbacks(self.trainer)

    def setup(self, stage: str) -> None:
        """Opens the reference policy for training; a wrong name raises before a server starts."""
        if self.reference is not None and stage == "fit" and not self.reference_is_base:
            settings = self.policy_folder, self.dtype_name, self.attention, self.device_of_use
            if self.sharding is None:
                self.reference.open(*settings, self.ranks)
            else:
                self.reference.open_sharded(*settings, self.sharding, self.ranks)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves what `lrl export` needs (model, kind of adapters, form of prompts), and the
        reference's state."""
        checkpoint["policy_folder"] = _absolute(self.policy_folder)
        checkpoint["prompt_form"] = prompt_form.of(self.trainer.datamodule)  # type: ignore[attr-defined]
        if self.lora is not None:
            checkpoint |= {"lora": asdict(self.lora), "dtype": self.dtype_name}
        if self.critic is not None:
            checkpoint["critic"] = self.critic.kind
            if self.critic.model is not None:
                checkpoint["critic_folder"] = _absolute(self.critic.model)
        if self.reference is not None:
            checkpoint["reference"] = self.reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the state of the reference. Raises ConfigError for a checkpoint with other
        adapters."""
        saved, own = checkpoint.get("lora"), None if self.lora is None else asdict(self.lora)
        if saved != own:
            raise ConfigError(
                f"The checkpoint was made with model.lora {saved}, and it is {own}: resume with "
                "the same."
            )
        kind = None if self.critic is None else self.critic.kind
        if checkpoint.get("critic") != kind:
            raise ConfigError(
                f"The checkpoint was made with model.critic {checkpoint.get('critic')}, and it is "
                f"{kind}: resume with the same, or begin anew with the policy in it (`lrl export`)."
            )
        if self.reference is not None and self.trainer.state.fn == "fit":
            self.reference.load_state_dict(checkpoint.get("reference", {}))

    def on_train_start(self) -> None:
        """Moves the reference to the policy's device; lets the config win over a checkpoint's
        optimizer settings."""
        self._sampled_proof = SampledProof()
        if self.reference is not None and self.sharding is None and not self.reference_is_base:
            self.reference.network.to(self.device)
        if not is_overridden("configure_optimizers", self, PolicyModule):
            settings = {"betas": self.betas, "weight_decay": self.weight_decay}
            lrs = [self.lr] if self.critic is None else [self.lr, self.critic.lr]
            restart_at(
                self.trainer.optimizers[0], cast(LambdaLR, self.lr_schedulers()), lrs, settings
            )

    # ---- the weights

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what a checkpoint holds: all weights, or the adapters and the critic alone."""
        found = super().state_dict(*args, **kwargs)
        return (
            found
            if self.lora is None
            else {
                name: found[name]
                for name in found
                if is_adapter(name) or name.startswith("critic.")
            }
        )

    @collective
    def sent_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what a sync sends: the adapters (`lrl.weights.adapters`), or without them whole
        weights with their names in a Hugging Face checkpoint.

        A head tied to the embedding is left out: vLLM ties it itself.
        """
        shard_again(self)
        return (
            checkpoint_weights(self.network)
            if self.lora is None
            else named(whole_adapters(self.network))
        )

    @collective
    def export(self, folder: Path) -> None:
        """Writes policy and tokenizer in Hugging Face format, for transformers and vLLM.

        Adapters are merged in it, and there for themselves in its folder `adapter`, in peft's
        format. All that training does not change is as in the first version's folder.
        """
        shard_again(self)
        weights = on_cpu(whole_tensors(self.network))
        adapters = [
            (name, down.cpu(), up.cpu())
            for name, down, up in whole_adapters(self.network)
            if not up.is_meta
        ]
        if self.ranks.rank == 0:
            save_policy(
                self.network,
                weights,
                self.tokenizer,
                base=self.policy_folder,
                folder=folder,
                lora=self.lora,
                adapters=adapters,
            )


def _absolute(model: str) -> str:
    """Returns the whole path of a folder, and a hub name as it is."""
    return os.path.abspath(model) if os.path.exists(model) else model

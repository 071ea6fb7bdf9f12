"""The model of a policy: opened on all ranks, read by all of them together, and exported.

With several ranks no single one may have all weights, so every read of them is a collective
(`lrl.system.ranks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrl.errors import ConfigError
from lrl.objectives.base import Objective
from lrl.rollouts.policy_text import form_of, stop_tokens
from lrl.system.endpoint import Endpoint
from lrl.system.machine import trim_heap
from lrl.system.ranks import Ranks, collective
from lrl.training.beside.critic import Critic
from lrl.training.beside.reference import Reference
from lrl.training.collate import blank, text_as_micro_batch
from lrl.training.export import save_policy
from lrl.training.kernels import Kernels, fuse, fuse_tried
from lrl.training.logprobs import decoder_of, head_logprobs, last_hidden
from lrl.training.lora import LoRA, adapter_tensors, base_alone, is_adapter
from lrl.training.model import Dtype, ModelSource, find_model, open_on_ranks, open_tokenizer
from lrl.training.optimizers import Schedule
from lrl.training.pieces import adapter_pieces, checkpoint_pieces, checkpoint_weights, whole_tensors
from lrl.training.prefix_tree import attention_tokens_of
from lrl.training.rounding import Rounded, rounded_weights, rounding_errors
from lrl.training.sharding import Sharding, on_cpu, shard_again, whole_on
from lrl.training.trials import Shared, check_adapters, shared_by_responses
from lrl.training.varlen import computes_in, in_its_dtype
from lrl.types import MicroBatch
from lrl.weights.staging import Served, StageOrder, Staging

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lrl.training.beside.teacher import Teacher
    from lrl.weights.buckets import JoinOrder, Plan
    from lrl.weights.nccl import Broadcast
    from lrl.weights.version_file import Header

Output = Literal["logprobs", "values", "both"]
TRIED_TOKENS = 32
"""Of the text on which kernels are tried."""


class PolicyModel(L.LightningModule):
    """Base of `lrl.PolicyModule`, whose arguments these fields are: its model, the critic's and the
    reference's."""

    model: str
    objective: Objective
    lora: LoRA | None
    reference: Reference | None
    critic: Critic | None
    schedule: Schedule
    dtype_name: Dtype
    attention: str | None
    kernels: Kernels
    gradient_checkpointing: bool | int
    head_chunk_tokens: int
    kernels_in_use: Kernels = "eager"
    """What `kernels` has come to; `configure_model` tries it on the model."""
    responses_share = Shared()
    """What several responses may share; `configure_model` tries it on the model."""

    # ---- where it is

    @property
    def device_of_use(self) -> torch.device:
        return self.device if self._trainer is None else self.trainer.strategy.root_device

    @property
    def ranks(self) -> Ranks:
        return (
            Ranks() if self._trainer is None else getattr(self.trainer.strategy, "ranks", Ranks())
        )

    @property
    def sharding(self) -> Sharding | None:
        """The division of the weights over the ranks; None if every rank has them all."""
        return None if self._trainer is None else getattr(self.trainer.strategy, "sharding", None)

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are trained at the same time."""
        return self.ranks.size if self.sharding is None else self.sharding.data_parallel_size

    # ---- opened

    @cached_property
    def policy_folder(self) -> str:
        return find_model(self.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return open_tokenizer(self.policy_folder)

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
            self._open()

    @property
    def source(self) -> ModelSource:
        """The first version, and how it is opened."""
        device = self.device_of_use
        on_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        halves = self.dtype_name == "bfloat16"
        if on_ampere and self._trainer is not None:
            halves |= self.trainer.precision == "bf16-mixed"
        return ModelSource(
            self.policy_folder,
            self.dtype_name,
            self.attention,
            self.gradient_checkpointing,
            takes_flash=on_ampere and halves,
        )

    def _open(self) -> None:
        sharding, device = self.sharding, self.device_of_use
        where = device, self.ranks, sharding is not None
        self.network, whole = open_on_ranks(self.source, *where)
        if whole is not None:
            self.responses_share = shared_by_responses(whole)
            if self.lora is not None:
                self.lora.add_to(whole)
                check_adapters(whole)
        if sharding is not None:
            self.responses_share = self.ranks.share(self.responses_share).under(self.network)
            if self.lora is not None:
                self.lora.add_to(self.network)
        opened = [(self.network, whole)]
        if self.critic is not None:
            opened += self.critic.open(self.network, self.source, *where)
            self.responses_share = self.responses_share.also(self.critic.responses_share)
        networks = [network for network, _ in opened]
        if sharding is not None:
            sharding.divide(self, *networks)
            whole = None
            while opened:
                sharding.fill(*opened.pop(0), device)
            trim_heap()  # the C library would keep the memory of the whole model for the rest of the run
        if self.reference is not None and hasattr(self.reference, "network"):
            networks.append(self.reference.network)  # Lightning's `setup` comes first
        self._fuse(*networks)

    def setup(self, stage: str) -> None:
        if self.reference is not None and stage == "fit" and self.reference_has_model:
            self.reference.open(self.source, self.device_of_use, self.ranks, self.sharding)

    def _fuse(self, policy: PreTrainedModel, *others: PreTrainedModel) -> None:
        """Gives the networks the kernels of `kernels`, after a trial on the policy."""
        device = self.device_of_use
        if self.kernels == "eager" or (self.kernels == "auto" and device.type != "cuda"):
            return
        precision = (
            nullcontext if self._trainer is None else self.trainer.precision_plugin.forward_context
        )
        ids = torch.arange(1, TRIED_TOKENS) % policy.get_input_embeddings().num_embeddings
        micro = text_as_micro_batch(ids.tolist(), device)
        sharding = self.sharding

        def passes() -> Tensor:
            once = sharding is not None and sharding.reduce_gradients == "once"
            with precision(), sharding.reduces(self) if sharding and once else nullcontext():
                logprobs = self(micro)[micro.mask]
                weights = torch.linspace(-1, 1, len(logprobs), device=device)
                (weights * logprobs).sum().backward()
            return logprobs.detach()

        with precision():
            halves = torch.is_autocast_enabled(device.type) or self.compute_dtype == "bfloat16"
        self.kernels_in_use = fuse_tried(
            policy, self.kernels, device=device, ranks=self.ranks, passes=passes, in_16_bits=halves
        )
        for network in others:
            fuse(network, self.kernels_in_use)

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of the passes outside of autocast, which 16-bit attention has on there, too."""
        if self.sharding is not None and self.sharding.compute_dtype:
            return "bfloat16"
        return "bfloat16" if computes_in(self.network) == torch.bfloat16 else self.dtype_name

    @property
    def attention_tokens(self) -> int:
        """Length of a row at which attention takes as long as all other layers."""
        return attention_tokens_of(self.network.config.get_text_config().hidden_size)

    # ---- read

    def forward(self, micro: MicroBatch, output: Output = "logprobs") -> Any:
        """Returns log-probs of the labels at the micro-batch's temperature: float32 [R, L], nats, 0
        outside the mask.

        With output `values` the critic's values before them, float32 [R, L] (of `lrl.TurnCritic`
        float32 [R, L, N]), and with `both` log-probs and values. All that reads weights in training
        goes through here, so a strategy can shard this module as the root.
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

    @collective
    @torch.no_grad()
    def prompt_logprobs(
        self,
        token_ids: list[int],
        rounded_as: Rounded | None = None,
        weights_as: Rounded | None = None,
    ) -> list[float]:
        """Returns log-probs in nats of `token_ids[1:]`, each given the tokens before it, at
        temperature 1.

        They are computed in `compute_dtype`, also within a step that Lightning runs under autocast.
        With `rounded_as` they have errors as large as the rounding of that number format makes
        them. With `weights_as` the weights are rounded to that format.
        """
        micro = text_as_micro_batch(token_ids, self.device_of_use)
        errors = nullcontext() if rounded_as is None else rounding_errors(self.network, rounded_as)
        weights = nullcontext() if weights_as is None else rounded_weights(self.network, weights_as)
        # A compiled layer does not see the hooks of the last two.
        eager = torch.compiler.set_stance("force_eager")
        with in_its_dtype(self.network), errors, weights, eager:
            return self(micro)[micro.mask].tolist()

    @property
    def reference_is_base(self) -> bool:
        return self.lora is not None and self.reference is not None and self.reference.model is None

    @property
    def reference_has_model(self) -> bool:
        of_its_own = self.reference is not None and self.asked_teacher is None
        return of_its_own and not self.reference_is_base

    @property
    def asked_teacher(self) -> Teacher | None:
        if self.reference is None or self.reference.url is None:
            return None
        return cast("Teacher", self.reference)

    @collective
    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns `Reference.logprobs` of each batch; every rank computes a share."""
        if self.reference_is_base:
            with base_alone(self.network):
                return self._in_shares(batches, self)
        reference = cast(Reference, self.reference)
        logprobs = partial(reference.logprobs, chunk_tokens=self.head_chunk_tokens)
        return self._in_shares(batches, logprobs)

    @collective
    def critic_values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns what the critic's `forward` does for each batch, on the CPU; every rank computes a
        share."""
        return self._in_shares(batches, partial(self, output="values"))

    @torch.no_grad()
    def _in_shares(
        self, batches: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Returns the result of `compute` for each batch on rank 0, and nothing on the others."""
        size, rank = self.data_parallel_size, self.ranks.rank
        together = self.ranks.size // size  # neighbours compute one batch together
        share = list(batches[rank // together :: size])
        if self.sharding is not None and len(share) * size < len(batches):
            share.append(blank())  # all ranks take part in a pass
        computed = [compute(each.to(self.device_of_use)).cpu() for each in share]
        shard_again(self)
        found = self.ranks.gather(computed)[::together]
        return [
            found[number % size][number // size] for number in range(len(batches) if found else 0)
        ]

    # ---- saved and sent

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what a checkpoint holds: all weights, or the adapters and the critic alone."""
        found = super().state_dict(*args, **kwargs)
        if self.lora is None:
            return found
        kept = (name for name in found if is_adapter(name) or name.startswith("critic."))
        return {name: found[name] for name in kept}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves what `lrl export` needs (model, kind of adapters, form of prompts), and the
        reference's state."""
        here = os.path.exists(self.policy_folder)
        checkpoint["policy_folder"] = (
            os.path.abspath(self.policy_folder) if here else self.policy_folder
        )
        checkpoint["prompt_form"] = form_of(self.trainer.datamodule)  # type: ignore[attr-defined]
        if self.lora is not None:
            checkpoint |= {"lora": asdict(self.lora), "dtype": self.dtype_name}
        if self.critic is not None:
            checkpoint["critic"] = self.critic.kind
        if self.reference is not None:
            checkpoint["reference"] = self.reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the state of the reference. Raises ConfigError for a checkpoint with other
        adapters."""
        own = {
            "lora": None if self.lora is None else asdict(self.lora),
            "critic": None if self.critic is None else self.critic.kind,
        }
        for setting, value in own.items():
            if (saved := checkpoint.get(setting)) != value:
                raise ConfigError(
                    f"The checkpoint was made with model.{setting} {saved}, and it is {value}: resume "
                    "with the same, or begin anew with the policy in it (`lrl export`)."
                )
        if self.reference is not None and self.trainer.state.fn == "fit":
            self.reference.load_state_dict(checkpoint.get("reference", {}))

    @cached_property
    def staging(self) -> Staging:
        return Staging(here=self._trainer is None or self.trainer.node_rank == 0)

    @collective
    def whole_weights(self, merged_in: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights with their names in a Hugging Face checkpoint, whole on rank 0.
        Adapters are merged into them, in the format `merged_in`, or the weights' own.

        A head tied to the embedding is left out: vLLM ties it itself.
        """
        shard_again(self)
        return checkpoint_weights(self.network, merged_in)

    @collective
    def stage_weights(self, order: StageOrder) -> Header:
        """Stages the adapters (`lrl.weights.version_file`), or without them all weights, a part on
        every rank (`Staging.stage`)."""
        shard_again(self)
        pieces = checkpoint_pieces if self.lora is None else adapter_pieces
        return self.staging.stage(lambda: pieces(self.network, self.ranks), order, self.ranks)

    @collective
    def serve_weights(self, endpoint: Endpoint, token: str) -> list[Served]:
        return self.staging.serve(endpoint, token, self.ranks)

    @cached_property
    def broadcasts(self) -> dict[str, Broadcast]:
        return {}

    @collective
    def join_broadcast(self, pool: str, order: JoinOrder) -> tuple[Plan, Future[Any]]:
        from lrl.weights.nccl import Broadcast  # here: NCCL alone needs it

        broadcast = self.broadcasts.setdefault(pool, Broadcast())
        shard_again(self)
        return broadcast.join(
            lambda: checkpoint_pieces(self.network, self.ranks, order.narrow), order, self.ranks
        )

    @collective
    def send_broadcast(self, pool: str) -> Future[None]:
        shard_again(self)
        return self.broadcasts[pool].send(self.ranks)

    @collective
    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None:
        self.broadcasts[pool].end(abort, deadline_s)

    def free_sent(self) -> None:
        """Frees what syncs hold on this rank; idempotent."""
        self.staging.close()
        for broadcast in self.broadcasts.values():
            broadcast.close()

    @collective
    def export(self, folder: Path) -> None:
        """Writes policy and tokenizer in Hugging Face format, for transformers and vLLM.

        Adapters are merged in it, and there for themselves in its folder `adapter`, in peft's
        format. All that training does not change is as in the first version's folder.
        """
        shard_again(self)
        weights = on_cpu(whole_tensors(self.network))
        adapters = on_cpu((name, whole_on(one)) for name, one in adapter_tensors(self.network))
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

"""The reference policy (`model.reference`): a frozen model that the policy stays near to."""

import logging
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from lrl.errors import ConfigError, at_least, one_of
from lrl.objectives.base import Tokens, clamp_log_ratio, k3
from lrl.system.ranks import Ranks
from lrl.training.collate import Numbers
from lrl.training.logprobs import LabelLogprobs
from lrl.training.model import ModelSource, open_on_ranks
from lrl.training.pieces import unique_tensors, whole_tensors
from lrl.training.sharding import Sharding, on_cpu, shard_again
from lrl.training.trials import check_rows
from lrl.types import Group, MicroBatch

log = logging.getLogger(__name__)

WHOLE = StateDictOptions(full_state_dict=True, strict=False)
"""Each rank takes its part of whole weights; a tied head is there once."""
Estimator = Literal["k1", "k2", "k3"]
PenaltyIn = Literal["loss", "reward"]


class Reference:
    """A frozen policy, and the cost of the KL to it. Its log-probs are computed when a rollout's group
    reaches its step, and stay with the rollout.

    Estimators of KL(pi || pi_ref) per token, with d = log pi_ref - log pi (Schulman, "Approximating
    KL divergence", 2020): k1 = -d, without bias, of any sign; k2 = d^2 / 2; k3 = e^d - 1 - d,
    without bias and never negative.

    In the loss, `coefficient` times the estimator is added to the loss of each token (GRPO,
    2402.03300, equation 4, with k3). The gradient of k1 is zero on average and does nothing there;
    that of k2 is the gradient of the KL. In the reward, `coefficient` times the sum over a
    response's tokens is subtracted from its reward before the baseline, with the behaviour
    log-probs for log pi; there k1 is the usual choice.

    Args:
        coefficient: Cost of a nat of KL; 0 only measures it.
        estimator: `k1`, `k2` or `k3`.
        penalty_in: The cost is part of the `loss` or of the `reward`.
        model: Hub name or folder of the reference; None takes the policy's own first version.
        refresh_every_n_steps: Copy the policy's weights into the reference after every so many
            steps; None never does.
    """

    rewards_tokens = False
    """Whether it adds to the advantages, so that responses of equal rewards have a gradient."""
    url: str | None = None
    """Address of the server that has it; None for a model in the trainer."""
    network: PreTrainedModel

    def __init__(
        self,
        coefficient: float = 0.0,
        estimator: Estimator = "k3",
        penalty_in: PenaltyIn = "loss",
        model: str | None = None,
        refresh_every_n_steps: int | None = None,
    ) -> None:
        at_least(0, "model.reference", coefficient=coefficient)
        at_least(1, "model.reference", refresh_every_n_steps=refresh_every_n_steps)
        one_of(
            "model.reference",
            estimator=(get_args(Estimator), estimator),
            penalty_in=(get_args(PenaltyIn), penalty_in),
        )
        if coefficient and (estimator, penalty_in) == ("k1", "loss"):
            raise ConfigError(
                "model.reference.estimator k1 with penalty_in loss: its gradient is zero on average. "
                "Use k2 or k3, or penalty_in reward."
            )
        self.coefficient = coefficient
        self.estimator = estimator
        self.penalty_in = penalty_in
        self.model = model
        self.refresh_every_n_steps = refresh_every_n_steps
        self.version = 0
        """Optimizer step whose weights were last copied in; 0 for the first weights."""

    @property
    def settings_of_the_reward(self) -> tuple[float | str | None, ...]:
        """The settings behind the KL penalty in rewards; empty without such a penalty."""
        return () if self.penalty_in != "reward" else (self.coefficient, self.estimator, self.model)

    def open(
        self,
        policy: ModelSource,
        device: torch.device,
        ranks: Ranks,
        sharding: Sharding | None = None,
    ) -> None:
        """Loads the frozen model, once; with `sharding` in parts over all ranks."""
        if hasattr(self, "network"):
            if sharding is None:
                self.network.to(device)  # an earlier `fit` may have had another
            return
        own = replace(policy, folder=self.model or policy.folder, gradient_checkpointing=False)
        self.network, whole = open_on_ranks(own, device, ranks, in_parts=sharding is not None)
        if whole is not None:
            check_rows(whole)
        self._scorer = LabelLogprobs(self.network).requires_grad_(False)
        if sharding is not None:
            sharding.divide(self._scorer, self.network)
            sharding.fill(self.network, whole, device)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, chunk_tokens: int) -> Tensor:
        """Returns log-probs of the labels: float32 [R, L] on the CPU, nats, 0 outside the mask."""
        found: Tensor = self._scorer(micro, chunk_tokens)
        shard_again(self._scorer)
        return found.cpu()

    def fill(self, group: Group, found: Numbers) -> None:
        """Sets `reference_logprobs` and, if the penalty is in the reward, `kl_penalty` of every
        rollout of a group; `found` gives its log-probs, and computes them only if it is asked."""
        # From a replay, and the reference is still the same.
        if group.reference_version == self.version:
            return
        for rollout, logprobs in found:
            rollout.reference_logprobs = logprobs.tolist()
            if self.penalty_in == "reward":
                kl = self._kl(torch.tensor(rollout.logprobs), logprobs)
                rollout.kl_penalty = self.coefficient * kl[torch.tensor(rollout.mask)].sum().item()
        group.reference_version = self.version

    def advantages(self, tokens: Tokens) -> Tensor:
        """Returns the advantages with what this adds to them: float32 [n]."""
        return tokens.advantages

    def token_losses(self, tokens: Tokens) -> Tensor:
        """Returns the KL's part of the loss of each token: float32 [n]."""
        if not self.coefficient or self.penalty_in != "loss":
            return torch.zeros_like(tokens.logprobs)
        assert tokens.reference_logprobs is not None, "every group passes `fill` first"
        return self.coefficient * self._kl(tokens.logprobs, tokens.reference_logprobs)

    def end_step(self, steps_done: int, network: torch.nn.Module) -> None:
        """Copies the policy's weights in after every `refresh_every_n_steps` steps."""
        if self.refresh_every_n_steps and steps_done % self.refresh_every_n_steps == 0:
            # A tied head is there once.
            self.network.load_state_dict(dict(unique_tensors(network)), strict=False)
            self.version = steps_done

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and version; empty for the weights of `model`. A collective if sharded."""
        if not self.version:  # also of an earlier run, which refreshed it
            return {}
        weights = on_cpu(whole_tensors(self.network))
        return {"weights": weights, "version": self.version, "model": self.model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a checkpoint's weights and version, unless `model` names another reference."""
        if not state:
            return
        if (before := state.get("model")) != self.model or self.url is not None:
            rank_zero_only(log.warning)(
                "The reference in the checkpoint, copied from the policy at step %d, is not "
                "restored: model.reference.model was %s and is %s.",
                *(state["version"], before, self.url or self.model),
            )
            return
        set_model_state_dict(self.network, state["weights"], options=WHOLE)
        self.version = state["version"]

    def _kl(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        difference = clamp_log_ratio(reference - logprobs)
        if self.estimator == "k1":
            return -difference
        if self.estimator == "k2":
            return difference.square() / 2
        return k3(difference)

"""What every objective shares: which tokens it sees, and what it may ask for.

An objective is one formula over trained tokens. They are cut out of the rows first, so a formula cannot see padding,
and a NaN in a masked place cannot reach the gradient (0 * NaN is NaN: multiplying by the mask would not do).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from lrl.objectives.normalisation import NormaliseBy
from lrl.types import MicroBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios are held in [-20, 20] nats before `exp`: beyond every truncation, and the square still fits float32."""


class Tokens(NamedTuple):
    """The n trained tokens of a micro-batch, prompts and padding gone. They belong to S responses of G groups."""

    logprobs: Tensor
    """float32 [n], nats: log pi(token) of the policy; carries the gradient."""
    behaviour_logprobs: Tensor
    """float32 [n], nats: log mu(token)."""
    advantages: Tensor
    """float32 [n]."""
    lags: Tensor
    """int64 [n]: version that trains minus version that wrote the token."""
    responses: Tensor
    """int64 [n]: the response each token belongs to, 0 to S - 1. A micro-batch holds responses whole."""
    groups: Tensor
    """int64 [n]: the group, 0 to G - 1. Only an objective with `whole_groups` may rely on a group being whole."""
    reference_logprobs: Tensor | None = None
    """float32 [n], nats: log-prob under the reference policy; None when there is none."""

    @classmethod
    def select(cls, logprobs: Tensor, micro: MicroBatch, version: int) -> Tokens:
        """The trained tokens of `micro`, with log-probs [R, L] of a policy that has done `version` steps."""
        mask = micro.mask
        reference = micro.reference_logprobs
        return cls(
            logprobs=logprobs[mask].float(),
            behaviour_logprobs=micro.behaviour_logprobs[mask].float(),
            advantages=micro.advantages[mask].float(),
            lags=version - micro.versions[mask],
            responses=_numbered(micro.sequence_ids[mask]),
            groups=_numbered(micro.group_ids[mask]),
            reference_logprobs=None if reference is None else reference[mask].float(),
        )

    @property
    def log_ratio(self) -> Tensor:
        """float32 [n], nats: log pi - log mu, held in +-`MAX_LOG_RATIO`."""
        return clamp_log_ratio(self.logprobs - self.behaviour_logprobs)

    @property
    def ratio(self) -> Tensor:
        """float32 [n]: pi / mu, finite and above zero."""
        return self.log_ratio.exp()

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` [n] over each response: [S]."""
        return values.new_zeros(_count(self.responses)).index_add(0, self.responses, values)

    def means(self, values: Tensor) -> Tensor:
        """Mean of `values` [n] over each response: [S]."""
        return self.sums(values) / self.sums(torch.ones_like(values))


class Objective(ABC):
    """A loss per response token. A subclass gives `token_losses`, and `clipped` if it clips."""

    normalise_by: NormaliseBy = "token"
    """What the losses are divided by unless the policy's setting says otherwise; what the objective's paper does."""
    whole_groups: bool = False
    """Whether the formula looks across the responses of a group: its micro-batches then hold groups whole."""
    needs_reference: bool = False
    """Whether the formula uses `Tokens.reference_logprobs`."""
    needs_group_mean: bool = False
    """Whether advantages must be rewards less the group's mean, and nothing else."""

    @abstractmethod
    def token_losses(self, tokens: Tokens) -> Tensor:
        """The formula: float32 [n], to be minimised, one number per token of `tokens`, not averaged."""

    def clipped(self, tokens: Tokens) -> Tensor:
        """bool [n]: where the objective held back a token's ratio. Only for the metric `policy/clip_fraction`."""
        return torch.zeros_like(tokens.lags, dtype=torch.bool)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """A log-ratio in nats, held in +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """w - 1 - log w of log w = log p - log q in nats: an estimate of KL(q || p) from samples of q, never negative.

    Schulman, "Approximating KL divergence", 2020.
    """
    return log_ratio.exp() - 1 - log_ratio


def _numbered(ids: Tensor) -> Tensor:
    """The same ids counted from 0 without gaps."""
    return torch.unique(ids, return_inverse=True)[1]


def _count(numbers: Tensor) -> int:
    return int(numbers.max()) + 1 if numbers.numel() else 0

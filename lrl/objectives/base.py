"""What every objective shares: the mask, float32, and the numbers that tell how far off-policy a step was.

An objective is one formula over trained tokens. The base cuts those tokens out of the rows first, so a formula cannot
see padding, and a NaN in a masked place cannot reach the gradient (0 * NaN is NaN: multiplying by the mask would not
do).

Everything reported is kept as sums and maxima and divided once, at the end of the step. Means of micro-batch means
would depend on packing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held in [-20, 20] nats before `exp`: beyond every truncation, and the square still fits float32."""


class Tokens(NamedTuple):
    """The n trained tokens of a micro-batch, prompts and padding gone."""

    logprobs: Tensor
    """float32 [n], nats: log pi(token) of the policy; carries the gradient."""
    behaviour_logprobs: Tensor
    """float32 [n], nats: log mu(token)."""
    advantages: Tensor
    """float32 [n]."""
    versions: Tensor
    """int64 [n]: policy version that wrote the token."""

    @property
    def log_ratio(self) -> Tensor:
        """float32 [n], nats: log pi - log mu, held in +-`MAX_LOG_RATIO`."""
        return (self.logprobs - self.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def ratio(self) -> Tensor:
        """float32 [n]: pi / mu, finite and above zero."""
        return self.log_ratio.exp()


class Objective(ABC):
    """A loss per answer token. A subclass gives `token_losses`, and `clipped` if it clips."""

    @abstractmethod
    def token_losses(self, tokens: Tokens) -> Tensor:
        """The formula: float32 [n], to be minimised, one number per token of `tokens`."""

    def clipped(self, tokens: Tokens) -> Tensor:
        """bool [n]: where the objective held back a token's ratio. Only for the metric `policy/clip_fraction`."""
        return torch.zeros_like(tokens.versions, dtype=torch.bool)

    def __call__(
        self, logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, versions: Tensor
    ) -> Tensor:
        """Token losses of a micro-batch, not averaged.

        Args:
            logprobs: [R, L], nats: log-prob of the label under the policy.
            behaviour_logprobs: float32 [R, L], nats: log-prob of the label when it was sampled.
            advantages: float32 [R, L].
            mask: bool [R, L]: the tokens that count. Elsewhere the other tensors may hold anything, NaN included.
            versions: int64 [R, L]: policy version that wrote the label.

        Returns:
            float32 [R, L], 0 where `mask` is false.
        """
        tokens = _select(logprobs, behaviour_logprobs, advantages, mask, versions)
        losses = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return losses.masked_scatter(mask, self.token_losses(tokens))


class Diagnostics:
    """How far the trained tokens of one step were from the policy, gathered micro-batch by micro-batch.

    Args:
        version: Version of the policy that trains, in optimizer steps done. Lag is this minus a token's version.
    """

    SUMS = ("tokens", "ratio", "ratio_squared", "kl", "clipped", "lag")
    MAXIMA = ("ratio_max", "lag_max")

    def __init__(self, version: int) -> None:
        self.version = version
        self.sums = torch.zeros(len(self.SUMS))
        self.maxima = torch.zeros(len(self.MAXIMA))

    @torch.no_grad()
    def add(
        self,
        objective: Objective,
        logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        versions: Tensor,
    ) -> None:
        """Counts one micro-batch in. Arguments as for `Objective.__call__`."""
        tokens = _select(logprobs, behaviour_logprobs, advantages, mask, versions)
        if not len(tokens.versions):
            return
        ratio, lag = tokens.ratio, self.version - tokens.versions
        kl = ratio - 1 - tokens.log_ratio
        per_token = (torch.ones_like(ratio), ratio, ratio.square(), kl, objective.clipped(tokens), lag)
        self.sums = self.sums.to(mask.device) + torch.stack([values.float().sum() for values in per_token])
        maxima = torch.stack([ratio.max(), lag.max().float()])
        self.maxima = torch.maximum(self.maxima.to(mask.device), maxima)

    def result(self) -> dict[str, float]:
        """The step's metrics; empty when it had no token.

        `ratio_mean`, `ratio_max`: pi / mu. `clip_fraction`: share of tokens whose ratio was held back. `ess`: effective
        sample size over the number of tokens, (sum w)^2 / (n sum w^2) with w = pi / mu; 1 means on-policy.
        `kl_behaviour`: KL(mu || pi) per token in nats by the k3 estimator, w - 1 - log w, unbiased under mu and never
        negative (Schulman, "Approximating KL divergence", 2020). `lag_mean`, `lag_max`: in versions.
        """
        sums = dict(zip(self.SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(self.MAXIMA, self.maxima.tolist(), strict=True))
        if not (n := sums["tokens"]):
            return {}
        return {
            "ratio_mean": sums["ratio"] / n,
            "ratio_max": maxima["ratio_max"],
            "clip_fraction": sums["clipped"] / n,
            "ess": sums["ratio"] ** 2 / (n * sums["ratio_squared"]),
            "kl_behaviour": sums["kl"] / n,
            "lag_mean": sums["lag"] / n,
            "lag_max": maxima["lag_max"],
        }


def _select(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, versions: Tensor) -> Tokens:
    return Tokens(logprobs[mask].float(), behaviour_logprobs[mask].float(), advantages[mask].float(), versions[mask])

"""The interface of an objective: one formula over the trained tokens of a micro-batch; the divisor
of a step's losses; and the metrics of a step's distance from the policy.

The divisor is a weight for each token, and one number for the whole step that is known when the
step ends. So the gradient does not depend on how the step was packed. Nor do the metrics: they are
sums and maxima, one row per lag, divided once at the end of the step.
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from lrl.errors import ConfigError
from lrl.types import MicroBatch, Step

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios in nats before `exp`: above every truncation; its square fits float32."""
MAX_LAG_SHOWN = 16
"""Tokens with a larger lag are counted in the row of this one."""
NormaliseBy = Literal["token", "sequence"] | int
"""`token`: by all trained tokens of the step (DAPO, 2503.14476, section 3.3). `sequence`: by the
response's own tokens, then by the number of responses (GRPO, 2402.03300, equation 3). A number: by
that number of tokens and by the number of responses; with the longest length allowed it is Dr. GRPO
(2503.20783)."""


class Tokens(NamedTuple):
    """The n trained tokens of a micro-batch, which belong to S responses of G groups."""

    logprobs: Tensor
    """float32 [n], nats: log pi(token) of the policy; carries the gradient."""
    behaviour_logprobs: Tensor
    """float32 [n], nats: log mu(token)."""
    advantages: Tensor
    """float32 [n]."""
    lags: Tensor
    """int64 [n]: version that trains minus version that wrote the token."""
    responses: Tensor
    """int64 [n]: the response of each token, 0 to S - 1. A micro-batch holds responses whole."""
    groups: Tensor
    """int64 [n]: the group of each token, 0 to G - 1; whole only with `whole_groups`."""
    num_responses: int
    """S."""
    num_groups: int
    """G."""
    reference_logprobs: Tensor | None = None
    """float32 [n], nats: log-prob under the reference policy; None without one."""
    partial: bool = False
    """Whether a response lacks tokens: too old (`data.stragglers: mask`), or of another branch."""

    @classmethod
    def select(cls, logprobs: Tensor, micro: MicroBatch, version: int) -> Self:
        """Selects the trained tokens; log-probs [R, L] are of the policy after `version` steps."""
        reference = micro.reference_logprobs
        return cls(
            logprobs=micro.of_labels(logprobs).float(),
            behaviour_logprobs=micro.of_labels(micro.behaviour_logprobs).float(),
            advantages=micro.of_labels(micro.advantages).float(),
            lags=version - micro.of_labels(micro.versions),
            responses=micro.index.responses,
            groups=micro.index.groups,
            num_responses=micro.index.num_responses,
            num_groups=micro.index.num_groups,
            reference_logprobs=None if reference is None else micro.of_labels(reference).float(),
            partial=micro.partial,
        )

    @property
    def log_ratio(self) -> Tensor:
        """float32 [n], nats: log pi - log mu, clamped to +-`MAX_LOG_RATIO`."""
        return clamp_log_ratio(self.logprobs - self.behaviour_logprobs)

    @property
    def ratio(self) -> Tensor:
        """float32 [n]: pi / mu, finite and above zero."""
        return self.log_ratio.exp()

    @property
    def response_ratio(self) -> Tensor:
        """float32 [n]: pi / mu of each token's whole response, the product over its tokens."""
        return clamp_log_ratio(self.sums(self.log_ratio)).exp()[self.responses]

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [n] over each response: [S].

        Raises ConfigError if a response lacks tokens.
        """
        if self.partial:
            raise ConfigError(
                "The objective adds up the tokens of a response (Tokens.sums, means or "
                "response_ratio), and data.stragglers mask has left out those that are too old, or "
                "they are in another branch: set data.stragglers to wait, and `branches` of "
                "lrl.environments.Agent to false."
            )
        return sum_by(self.responses, values, self.num_responses)

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean of `values` [n] over each response: [S]."""
        return self.sums(values) / self.sums(torch.ones_like(values))


class Objective(ABC):
    """A loss for each token. A subclass defines `token_losses`, and `clipped` if it clips."""

    normalise_by: NormaliseBy = "token"
    """Default divisor of the losses, as in the paper; the policy has a setting for it."""
    whole_groups: bool = False
    """Whether the formula needs all responses of a group; micro-batches then hold groups whole."""
    whole_responses: bool = False
    """Whether the formula adds up the tokens of a response (`Tokens.sums`, `means`,
    `response_ratio`); a run that leaves some out (`data.stragglers: mask`) is then refused."""
    needs_reference: bool = False
    """Whether the formula uses `Tokens.reference_logprobs`."""
    needs_group_mean: bool = False
    """Whether advantages must be rewards minus the group's mean, and nothing else."""

    @abstractmethod
    def token_losses(self, tokens: Tokens) -> Tensor:
        """Returns the loss of each token, to be minimised, not averaged: float32 [n]."""

    def clipped(self, tokens: Tokens) -> Tensor:
        """Returns which ratios were limited, for the metric `policy/clip_fraction`: bool [n]."""
        return torch.zeros_like(tokens.lags, dtype=torch.bool)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps a log-ratio in nats to +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """Returns w - 1 - log w for log w = log p - log q in nats: an estimate of KL(q || p) from
    samples of q, never negative (Schulman, "Approximating KL divergence", 2020)."""
    return log_ratio.exp() - 1 - log_ratio


def check_normalise_by(by: NormaliseBy) -> NormaliseBy:
    """Returns `by`; reports a fault if it is no divisor."""
    if by not in ("token", "sequence") and not (isinstance(by, int) and by > 0):
        raise ConfigError(
            f"model.normalise_by is {by!r}: use token, sequence, or a number of tokens above 0."
        )
    return by


def token_weights(by: NormaliseBy, micro: MicroBatch) -> Tensor:
    """Returns the factor of each token's loss: float32 [n]."""
    elsewhere = micro.of_labels(micro.trained_elsewhere)
    ones = torch.ones(elsewhere.shape, device=elsewhere.device)
    if by != "sequence":
        return ones
    responses = micro.index.responses
    here = sum_by(responses, ones, micro.index.num_responses)[responses]
    return ones / (here + elsewhere)


def sum_by(ids: Tensor, values: Tensor, count: int) -> Tensor:
    """Returns the sum of `values` [n] over each of the `ids`, int64 [n]: [count]."""
    return values.new_zeros(count).index_add(0, ids, values)


def denominator(by: NormaliseBy, step: Step) -> int:
    """Returns the divisor of the weighted sum over the whole step; at least 1."""
    if by == "token":
        return max(1, step.num_tokens)
    return max(1, step.num_sequences) * (1 if by == "sequence" else by)


# ---- metrics


class Diagnostics:
    """Sums and maxima over the trained tokens of one step, gathered micro-batch by micro-batch.
    `version` is that of the policy that trains."""

    SUMS = (
        *("tokens", "ratio", "ratio_squared", "kl", "clipped"),
        *("lag", "kl_reference", "difference"),
    )

    def __init__(self, version: int, device: torch.device | str = "cpu") -> None:
        self.version = version
        self.sums = torch.zeros(MAX_LAG_SHOWN + 1, len(self.SUMS), device=device)
        # Ratio, difference of log-probs, lag.
        self.maxima = torch.zeros(MAX_LAG_SHOWN + 1, 3, device=device)
        self.has_reference = False
        self.log_ratios: list[tuple[Tensor, Tensor]] = []
        """Of each micro-batch of this rank `Tokens.responses` and `Tokens.log_ratio`."""

    @torch.no_grad()
    def add(self, objective: Objective, tokens: Tokens) -> None:
        """Adds one micro-batch."""
        if not len(tokens.lags):
            return
        tokens = tokens._replace(logprobs=tokens.logprobs.detach())
        self.log_ratios.append((tokens.responses, tokens.log_ratio))
        rows = tokens.lags.clamp(0, MAX_LAG_SHOWN)
        ratio, lag = tokens.ratio, tokens.lags.float()
        reference = tokens.reference_logprobs
        kl_reference = torch.zeros_like(ratio)
        if reference is not None:
            self.has_reference = True
            kl_reference = k3(clamp_log_ratio(reference - tokens.logprobs))
        clipped = objective.clipped(tokens).float()
        difference = (tokens.logprobs - tokens.behaviour_logprobs).abs()
        of_policy = torch.ones_like(ratio), ratio, ratio.square(), k3(tokens.log_ratio)
        values = (*of_policy, clipped, lag, kl_reference, difference)
        self.sums = self.sums.to(rows.device).index_add(0, rows, torch.stack(values, dim=1))
        maxima = torch.stack((ratio, difference, lag), dim=1)
        rows = rows[:, None].expand_as(maxima)
        self.maxima = self.maxima.to(rows.device).scatter_reduce(0, rows, maxima, "amax")

    def result(self) -> dict[str, float]:
        """Returns the step's metrics; empty if it had no token.

        With w = pi / mu, `ess` is (sum w)^2 / (n sum w^2), and `kl_behaviour` KL(mu || pi) by `k3`.
        `by_lag/<k>/...` is the same over the tokens of lag k; besides `share`, of the step's
        tokens. `mismatch_...` is over tokens of lag 0, which the version in the trainer wrote.
        docs/metrics.md has all.
        """
        table = [dict(zip(self.SUMS, row, strict=True)) for row in self.sums.tolist()]
        ratio_max, difference_max, lag_max = self.maxima.T.tolist()
        whole = dict(zip(self.SUMS, self.sums.sum(0).tolist(), strict=True))
        if not (n := whole["tokens"]):
            return {}
        metrics = _means(whole, max(ratio_max))
        metrics |= {"lag_mean": whole["lag"] / n, "lag_max": max(lag_max)}
        if self.has_reference:
            metrics["kl_reference"] = whole["kl_reference"] / n
        if table[0]["tokens"]:
            kl, mean = (table[0][name] / table[0]["tokens"] for name in ("kl", "difference"))
            metrics |= {"mismatch_kl": kl, "mismatch_mean": mean, "mismatch_max": difference_max[0]}
        for lag, sums in enumerate(table):
            if sums["tokens"]:
                found = _means(sums, ratio_max[lag])
                found["share"] = sums["tokens"] / n
                metrics |= {f"by_lag/{lag}/{name}": value for name, value in found.items()}
        return metrics


def check_mismatch(metrics: dict[str, float], limit: float, step: int) -> None:
    """Raises RuntimeError if a step has a `mismatch_kl` above `limit` nats a token."""
    mismatch = metrics.get("mismatch_kl", 0.0)
    if not mismatch <= limit:
        raise RuntimeError(
            f"step {step}: policy/mismatch_kl is {mismatch:.3g} nats a token, and "
            f"model.abort_on_mismatch is {limit:g}: the generators compute something else than the "
            "trainer. The weights were not touched. Compare their dtype and attention with the "
            "policy's."
        )


def _means(sums: dict[str, float], ratio_max: float) -> dict[str, float]:
    n = sums["tokens"]
    return {
        "ratio_mean": sums["ratio"] / n,
        "ratio_max": ratio_max,
        "clip_fraction": sums["clipped"] / n,
        "ess": sums["ratio"] ** 2 / (n * sums["ratio_squared"]),
        "kl_behaviour": sums["kl"] / n,
    }

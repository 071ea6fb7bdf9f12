"""Metrics of a step's distance from the policy and of the harm, over all its tokens and for each
lag.

They are kept as sums and maxima, one row per lag, and divided once at the end of the step: means of
micro-batch means would depend on packing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lrl.objectives.base import Objective, Tokens, clamp_log_ratio, k3

MAX_LAG_SHOWN = 16
"""Tokens with a larger lag are counted in the row of this one."""


class Diagnostics:
    """Sums and maxima over the trained tokens of one step, gathered micro-batch by micro-batch.

    Args:
        version: Version of the policy that trains, in optimizer steps done.
        device: Where the tokens are.
    """

    SUMS = (
        *("tokens", "ratio", "ratio_squared", "kl", "clipped"),
        *("mass", "lag", "kl_reference", "difference"),
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
        mass = _mass(objective, tokens)
        difference = (tokens.logprobs - tokens.behaviour_logprobs).abs()
        of_policy = torch.ones_like(ratio), ratio, ratio.square(), k3(tokens.log_ratio)
        values = (*of_policy, clipped, mass, lag, kl_reference, difference)
        self.sums = self.sums.to(rows.device).index_add(0, rows, torch.stack(values, dim=1))
        maxima = torch.stack((ratio, difference, lag), dim=1)
        rows = rows[:, None].expand_as(maxima)
        self.maxima = self.maxima.to(rows.device).scatter_reduce(0, rows, maxima, "amax")

    def reduce(self, reduce: Callable[..., Tensor], alike: int, device: torch.device) -> None:
        """Reduces the sums and maxima over all ranks, which all call this, by the `reduce` of the
        trainer's strategy on a device. Always `alike` neighbours have counted the same."""
        self.sums = reduce(self.sums.to(device) / alike, reduce_op="sum")
        self.maxima = reduce(self.maxima.to(device), reduce_op="max")

    def result(self) -> dict[str, float]:
        """Returns the step's metrics; empty if it had no token.

        `ratio_mean`, `ratio_max`: pi / mu. `clip_fraction`: share of tokens whose ratio was
        limited. `ess`: effective sample size over the number of tokens, (sum w)^2 / (n sum w^2)
        with w = pi / mu; 1 means on-policy. `kl_behaviour`: KL(mu || pi) per token in nats by the
        k3 estimator, w - 1 - log w, unbiased under mu and never negative (Schulman, "Approximating
        KL divergence", 2020). `lag_mean`, `lag_max`: in versions. `kl_reference`: KL(pi || pi_ref)
        per token by k3, only with a reference.

        `by_lag/<k>/...`: the same over the tokens of lag k; besides `share`, of the step's tokens,
        and `contribution`, of the gradient's mass, the sum over tokens of `|d loss / d log pi|`.

        `mismatch_kl`, `mismatch_mean`, `mismatch_max`: `kl_behaviour`, and the mean and the largest
        `|log pi - log mu|` in nats, over tokens of lag 0. The version in the trainer wrote these
        tokens, so trainer and generator compute it differently.
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
                found["contribution"] = sums["mass"] / (whole["mass"] or 1.0)
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


@torch.enable_grad()
def _mass(objective: Objective, tokens: Tokens) -> Tensor:
    """Returns |d loss / d log pi| of each token: float32 [n]."""
    leaf = tokens.logprobs.detach().requires_grad_()
    losses = objective.token_losses(tokens._replace(logprobs=leaf))
    return torch.autograd.grad(losses.sum(), leaf)[0].abs()

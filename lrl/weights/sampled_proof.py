"""The proof that generators sample from the distribution whose log-probs they return.

A probe asks for the log-probs of given texts. It cannot see an option of vLLM that changes what is
sampled: a way of speculative decoding, a processor of logits, a plugin. The tokens of the first
rollouts show it. Those of lag 0 were written by the version that trains, so their log-probs are the
policy's but for rounding. They are compared once, before the update.
"""

from collections.abc import Mapping
from typing import Any

import lightning as L

ENOUGH_TOKENS = 64
"""Tokens of lag 0 that a step must have to be the one that is compared; as many as a probe has."""


class SampledProof:
    """The comparison of one fit; every rank has one."""

    def __init__(self) -> None:
        self.made = False

    def check(
        self, metrics: Mapping[str, float], fresh_tokens: int, trainer: L.Trainer, policy: Any
    ) -> None:
        """Compares the log-probs of a step's tokens, until a step had enough; all ranks call it.

        Args:
            metrics: The step's (`Diagnostics.result`), over all ranks.
            fresh_tokens: Its tokens of lag 0.
            trainer: The trainer, before the update.
            policy: The policy that has computed them.

        Raises:
            RuntimeError: They are not the policy's.
        """
        if self.made or fresh_tokens < ENOUGH_TOKENS:
            return
        strategy = trainer.strategy
        run = getattr(getattr(trainer, "datamodule", None), "run", None)
        sync = None if run is None else run.weight_sync  # rank 0's
        allowed = strategy.broadcast(None if sync is None else sync.sampled_tolerance(run))
        if allowed is not None:
            options = getattr(getattr(strategy, "server_settings", None), "extra_args", {})
            check_sampled(metrics, allowed, options, trainer.global_step)
            self.made = True


def check_sampled(
    metrics: Mapping[str, float], allowed: float, options: Mapping[str, Any], step: int
) -> None:
    """Raises RuntimeError if the log-probs of sampled tokens are not the policy's.

    Args:
        metrics: The step's (`Diagnostics.result`).
        allowed: Largest mean difference in nats per token.
        options: Flags of vLLM that the user has set (`strategy.server.extra_args`).
        step: Number of the step, for the message.
    """
    mean, largest = metrics["mismatch_mean"], metrics["mismatch_max"]
    if mean <= allowed:
        return
    named = ", ".join(f"{name}: {value}" for name, value in options.items())
    remedy = (
        f"Leave out what strategy.server.extra_args has ({named}), one after the other."
        if named
        else (
            "strategy.server.extra_args has none: look for plugins and VLLM_ variables in the "
            "generators' environment."
        )
    )
    raise RuntimeError(
        f"step {step}: the generators' log-probs of tokens that they have just sampled are off by "
        f"{mean:.3g} nats a token (policy/mismatch_mean; the largest by {largest:.3g}) from those "
        f"of the policy that wrote them, and {allowed:.2g} is allowed. Of given texts they compute "
        "what the policy computes, so an option changes what they sample or which log-probs they "
        f"return. The weights were not touched. {remedy} WeightSync.probe_tolerance sets another "
        "limit."
    )

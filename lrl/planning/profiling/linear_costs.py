"""Costs that are linear in the work: what `lrl.planning.profiling.calibration` fits to a log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGenerator:
    """Fulfils `GeneratorCosts`."""

    kv_tokens: int
    """Tokens whose keys and values fit."""
    step_s: float = 0.0
    """Seconds of every decode step: reading the weights."""
    response_s: float = 0.0
    """Seconds that each response adds to a decode step."""
    context_token_s: float = 0.0
    """Seconds that each token of context adds to a decode step: reading its keys and values."""
    prefill_token_s: float = 0.0
    """Seconds to read a token of a prompt."""
    pause_s: float = 0.0
    """Seconds that a sync stops it for."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        """See `GeneratorCosts.decode_s`."""
        return self.step_s + self.response_s * responses + self.context_token_s * context_tokens

    def prefill_s(self, tokens: int) -> float:
        """See `GeneratorCosts.prefill_s`."""
        return self.prefill_token_s * tokens

    def sync_pause_s(self) -> float:
        """See `GeneratorCosts.sync_pause_s`."""
        return self.pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrainer:
    """Fulfils `TrainerCosts`."""

    micro_batch_fixed_s: float = 0.0
    """Seconds of every micro-batch."""
    token_s: float = 0.0
    """Seconds that each token of a sequence adds."""
    token_squared_s: float = 0.0
    """Seconds that each squared token of a sequence adds: attention."""
    optimizer_s: float = 0.0
    """Seconds of the update."""
    weights_s: float = 0.0
    """Seconds of a sync."""
    goes_on: bool = False
    """See `TrainerCosts.goes_on`."""

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """See `TrainerCosts.micro_batch_s`."""
        return self.micro_batch_fixed_s + self.token_s * tokens + self.token_squared_s * tokens_squared

    def update_s(self) -> float:
        """See `TrainerCosts.update_s`."""
        return self.optimizer_s

    def sync_s(self) -> float:
        """See `TrainerCosts.sync_s`."""
        return self.weights_s

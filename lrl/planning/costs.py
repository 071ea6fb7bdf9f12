"""Seconds of work: the interface between cost models and their users (simulator, planner), and
linear costs."""

from dataclasses import dataclass
from typing import Protocol


class GeneratorCosts(Protocol):
    """One generator, on any number of devices."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit next to the weights."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        """Returns the seconds of a decode step: one token for each of `responses`, whose contexts
        (prompt and response so far) hold `context_tokens` in sum."""

    def prefill_s(self, tokens: int) -> float:
        """Returns the seconds to prefill `tokens` tokens of prompts and of migrated responses."""

    def sync_pause_s(self) -> float:
        """Returns the seconds of a sync in which the generator writes no token."""


class TrainerCosts(Protocol):
    """The whole trainer, on any number of devices."""

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """Returns the seconds of forward and backward for sequences (prompt and response) with
        these sums of lengths and of squared lengths."""

    def update_s(self) -> float:
        """Returns the seconds of the optimizer's update."""

    def sync_s(self) -> float:
        """Returns the trainer's seconds in a sync: before the generators' pause if
        `pause_overlaps`, else around it."""

    @property
    def pause_overlaps(self) -> bool:
        """Whether the generators' pause overlaps the next step (`lrl.weights.Transport.copies`).
        With lag 0 it never does: the trainer has nothing to train then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGenerator:
    """Linear costs of a generator (`GeneratorCosts`), as `lrl.planning.profiling.calibration` fits
    them."""

    kv_tokens: int
    """Tokens whose keys and values fit."""
    step_s: float = 0.0
    """Seconds of every decode step: reading the weights."""
    response_s: float = 0.0
    """Seconds that each response adds to a decode step."""
    context_token_s: float = 0.0
    """Seconds that each token of context adds to a decode step: reading its keys and values."""
    prefill_token_s: float = 0.0
    """Seconds to prefill a token."""
    pause_s: float = 0.0
    """Seconds of pause in a sync."""

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
    """Linear costs of a trainer (`TrainerCosts`)."""

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
    pause_overlaps: bool = False
    """See `TrainerCosts.pause_overlaps`."""

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """See `TrainerCosts.micro_batch_s`."""
        return (
            self.micro_batch_fixed_s + self.token_s * tokens + self.token_squared_s * tokens_squared
        )

    def update_s(self) -> float:
        """See `TrainerCosts.update_s`."""
        return self.optimizer_s

    def sync_s(self) -> float:
        """See `TrainerCosts.sync_s`."""
        return self.weights_s

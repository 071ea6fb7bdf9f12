"""What work costs: the seam between what predicts costs and what adds them up (simulator, planner)."""

from __future__ import annotations

from typing import Protocol


class GeneratorCosts(Protocol):
    """One generator, on however many devices it runs."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        """Seconds in which each of `responses` answers gets its next token; their contexts (prompt and answer so far)
        hold `context_tokens` together."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds to read `tokens` tokens of prompts, or of half-written responses that go on here."""

    def sync_pause_s(self) -> float:
        """Seconds in which the generator writes no token because of a sync."""


class TrainerCosts(Protocol):
    """The whole trainer, on however many devices it runs."""

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """Seconds for forward and backward of sequences (prompt and answer) whose lengths sum to `tokens`, and the
        squares of whose lengths sum to `tokens_squared`."""

    def update_s(self) -> float:
        """Seconds of the optimizer's update."""

    def sync_s(self) -> float:
        """Seconds that the trainer spends in a sync, beside the generators' pause or in it; before it if `goes_on`."""

    @property
    def goes_on(self) -> bool:
        """Whether the pause of the generators is beside the next step (`lrl.weights.Transport.copies`), unless lag 0
        leaves the trainer nothing to do."""

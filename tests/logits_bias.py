"""A processor of logits, as a vLLM server loads it: it changes what is sampled, and the log-probs
of that alone."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

FLAG = {"logits-processors": "tests.logits_bias:EvenTokens"}


class EvenTokens(LogitsProcessor):
    """Makes every second token likelier."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Has no state."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, ::2] += 0.5
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Has no state."""
